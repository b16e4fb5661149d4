//! `portcullis doctor`: what can be enforced here, what not and why, and what each named policy would get.

use crate::Failure;
use portcullis::protocol::environment::Enforcement;
use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::file;
use portcullis::sandbox::policy::{Files, Network, Policy};
use portcullis::sandbox::report;
use portcullis::sandbox::resolve::{self, Machine};
use portcullis::{Config, ExecServerRuntimePaths, Gateway};
use std::io::{self, Write};
use std::process::ExitCode;

/// Asks a gateway of its own, since only one that runs has tried the layers. Success says that a confined process can be given
/// something to write to.
pub(crate) async fn run(json: bool) -> Result<ExitCode, Failure> {
    let gateway = Gateway::start(Config::new(ExecServerRuntimePaths::of_this_process()?)).await?;
    let found = gateway.enforcement().clone();
    gateway.shutdown().await;
    let out = &mut io::stdout();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&found)?)?;
    } else {
        print(out, &found)?;
    }
    Ok(if can_write(&found) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The layers without which a process under a policy with a writable root is refused.
fn can_write(found: &Enforcement) -> bool {
    let has = |name: &str| found.layers.iter().any(|layer| layer.name == name && layer.available);
    ["landlock", "seccomp", "namespaces"].into_iter().all(has)
}

/// Writes the report for people.
fn print(out: &mut impl Write, found: &Enforcement) -> io::Result<()> {
    writeln!(out, "kernel {}", found.kernel)?;
    for layer in &found.layers {
        writeln!(out, "  {:<11} {:<4} {}", layer.name, if layer.available { "yes" } else { "no" }, layer.reason)?;
        for (nth, line) in layer.remedy.lines().enumerate() {
            writeln!(out, "  {:<11} {:<4} {}{line}", "", "", if nth == 0 { "remedy: " } else { "        " })?;
        }
    }
    let workspace = AbsolutePath::new("/workspace").expect("Invariant: the constant is absolute");
    for name in file::BUILTIN {
        let known = file::builtin(name).expect("Invariant: every name in BUILTIN has its file");
        writeln!(out, "\npolicy {name}: {}", known.description)?;
        let sandbox = known.in_workspaces(std::slice::from_ref(&workspace), None);
        match resolve::resolve(&sandbox, None, &Machine::here(std::env::var_os("TMPDIR").as_deref())) {
            Ok(None) => writeln!(out, "  nothing is confined: it asks for no sandbox")?,
            Ok(Some(policy)) => would_get(out, &policy, found)?,
            Err(error) => writeln!(out, "  refused: {error}")?,
        }
    }
    Ok(())
}

fn would_get(out: &mut impl Write, policy: &Policy, found: &Enforcement) -> io::Result<()> {
    let restricted = matches!(policy.files, Files::Restricted(_));
    let landlock = found.layers.iter().any(|layer| layer.name == "landlock" && layer.available);
    if restricted && !landlock {
        return writeln!(out, "  refused: it restricts files, and this kernel's Landlock cannot");
    }
    if restricted {
        writeln!(
            out,
            "  fs/*      enforced: every path is judged in the worker, Landlock ABI {} and seccomp behind it",
            found.landlock_abi
        )?;
    } else {
        writeln!(out, "  fs/*      not confined: it does not restrict files")?;
    }
    let network = match policy.network {
        Network::Restricted => "no network",
        Network::Enabled => "network",
    };
    let gaps = report::process_gaps(policy, &found.namespaces);
    if gaps.is_empty() {
        return writeln!(out, "  processes enforced ({network})");
    }
    let acceptable = gaps.iter().all(|gap| gap.waivable);
    let unless = if acceptable { " unless --allow-unprotected-metadata is given" } else { "" };
    writeln!(out, "  processes refused{unless} ({network}):")?;
    for gap in gaps {
        writeln!(out, "    {}", gap.text)?;
    }
    Ok(())
}

//! `portcullis doctor`: what this kernel offers, and what each named policy would get.

use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::file;
use portcullis::sandbox::policy::{Files, Network, Policy};
use portcullis::sandbox::report::{self, MachineReport};
use portcullis::sandbox::resolve::{self, Machine};
use std::io::{self, Write};

/// Writes the report for people.
pub(crate) fn print(out: &mut impl Write) -> io::Result<()> {
    let machine = report::machine();
    writeln!(out, "kernel {}", machine.kernel)?;
    for layer in &machine.layers {
        writeln!(out, "  {:<16} {:<4} {}", layer.name, if layer.available { "yes" } else { "no" }, layer.reason)?;
        if !layer.remedy.is_empty() {
            writeln!(out, "  {:<16} {:<4} remedy: {}", "", "", layer.remedy)?;
        }
    }
    let workspace = AbsolutePath::new("/workspace").expect("Invariant: the constant is absolute");
    for name in file::BUILTIN {
        let known = file::builtin(name).expect("Invariant: every name in BUILTIN has its file");
        writeln!(out, "\npolicy {name}: {}", known.description)?;
        let sandbox = known.in_workspaces(std::slice::from_ref(&workspace), None);
        match resolve::resolve(&sandbox, None, &Machine::here(std::env::var_os("TMPDIR").as_deref())) {
            Ok(None) => writeln!(out, "  nothing is confined: it asks for no sandbox")?,
            Ok(Some(policy)) => would_get(out, &policy, &machine)?,
            Err(error) => writeln!(out, "  refused: {error}")?,
        }
    }
    Ok(())
}

fn would_get(out: &mut impl Write, policy: &Policy, machine: &MachineReport) -> io::Result<()> {
    let restricted = matches!(policy.files, Files::Restricted(_));
    let landlock = machine.layers.iter().any(|layer| layer.name == "landlock" && layer.available);
    if restricted && !landlock {
        return writeln!(out, "  refused: it restricts files, and this kernel's Landlock cannot");
    }
    if restricted {
        writeln!(
            out,
            "  fs/*      enforced: every path is judged in the worker, Landlock ABI {} and seccomp behind it",
            machine.landlock_abi
        )?;
    } else {
        writeln!(out, "  fs/*      not confined: it does not restrict files")?;
    }
    let network = match policy.network {
        Network::Restricted => "no network",
        Network::Enabled => "network",
    };
    let gaps = report::process_gaps(policy);
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

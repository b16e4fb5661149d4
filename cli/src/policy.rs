//! Policies and workspaces as the operator names them on the command line.

use crate::Failure;
use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::compiled::Compiled;
use portcullis::sandbox::file::{self, PolicyFile};
use portcullis::sandbox::policy::{Files, Policy, PolicyError};
use portcullis::sandbox::resolve::{self, Machine};
use portcullis::sandbox::roots::Roots;
use std::path::{Path, PathBuf};

/// What no request to a server may exceed; none if the policy confines nothing. That it can be held to is tried here and now:
/// else each request would say so.
pub(crate) fn ceiling(name: &str, workspaces: &[PathBuf]) -> Result<Option<Policy>, Failure> {
    let policy = resolved(name, workspaces)?;
    if name.starts_with("workspace-write") && policy.as_ref().is_none_or(|policy| policy.files == Files::Unrestricted) {
        return Err(format!(
            "--policy {name} --workspace / leaves nothing to confine: name a directory below, or say full-access"
        )
        .into());
    }
    if let Some(policy) = &policy {
        compiled(policy).map_err(|error| format!("--policy {name}: {error}"))?;
    }
    Ok(policy)
}

/// A policy on this machine.
pub(crate) fn resolved(name: &str, workspaces: &[PathBuf]) -> Result<Option<Policy>, Failure> {
    let workspaces: Vec<_> = workspaces.iter().map(|path| workspace(path)).collect::<Result<_, _>>()?;
    let sandbox = load(name)?.in_workspaces(&workspaces, home());
    resolve::resolve(&sandbox, None, &Machine::here(std::env::var_os("TMPDIR").as_deref())).map_err(|error| match error {
        PolicyError::CwdRequired => format!("--policy {name} speaks of a workspace: give --workspace DIR").into(),
        other => format!("--policy {name}: {other}").into(),
    })
}

/// The policy's tables, with its paths as they are now.
pub(crate) fn compiled(policy: &Policy) -> Result<(Compiled, Roots), Failure> {
    let roots = Roots::open(policy)?;
    let compiled = Compiled::new(policy, |path| roots.resolve(path))?;
    Ok((compiled, roots))
}

/// A policy by name, or from a file.
pub(crate) fn load(name: &str) -> Result<PolicyFile, Failure> {
    if let Some(builtin) = file::builtin(name) {
        return Ok(builtin);
    }
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "toml") {
        return Err(
            format!("no policy is named `{name}`: known are {}, or give a file (*.toml)", file::BUILTIN.join(", ")).into()
        );
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("read the policy file `{name}`: {error}"))?;
    Ok(file::parse(name, &text)?)
}

/// The home of whoever runs this program, for policies that speak of one.
pub(crate) fn home() -> Option<AbsolutePath> {
    std::env::var_os("HOME").and_then(|home| AbsolutePath::new(home).ok())
}

/// The real path of a directory.
pub(crate) fn workspace(path: &Path) -> Result<AbsolutePath, Failure> {
    let real = std::fs::canonicalize(path).map_err(|error| format!("open the workspace `{}`: {error}", path.display()))?;
    if !real.is_dir() {
        return Err(format!("the workspace `{}` is not a directory", path.display()).into());
    }
    Ok(AbsolutePath::new(&real)?)
}

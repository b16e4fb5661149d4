//! From the wire's sandbox object and this machine to a policy. Whatever cannot be resolved is an error: a policy is never
//! weaker than its author wrote it.

use crate::glob::{self, compile_glob};
use crate::policy::{
    Access, DenyGlob, Files, Grant, Grants, MAX_ENTRIES, MAX_GLOBS, MAX_PATH_BYTES, MAX_PATH_LENGTH, Network, Policy, PolicyError,
};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::sandbox::{self as wire, Permissions, Sandbox, Target};
use std::cell::Cell;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Directories that programs need to start.
const MINIMAL: [&str; 8] = ["/bin", "/sbin", "/usr", "/etc", "/lib", "/lib64", "/nix/store", "/run/current-system/sw"];

/// A glob with this prefix is relative to every workspace root, rather than to the cwd.
pub(crate) const PROJECT_ROOTS_PREFIX: &str = "codex-project-roots://";

/// The special entry that grants nothing and can deny.
const CURRENT_DIRECTORY: &str = "current_working_directory";

/// What of this machine enters into policies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The server's own TMPDIR, links resolved; never that of a request, whose author could name any place.
    pub tmpdir: Option<PathBuf>,
    /// Whether `/tmp` is a directory.
    pub slash_tmp: bool,
    /// Those of the system's directories that exist.
    pub minimal: Vec<PathBuf>,
}

impl Machine {
    /// This machine, with the value of TMPDIR in the server's environment. Links in it are resolved here and now: it is the
    /// operator's word, while a writable root that a client names must not be a link.
    #[must_use]
    pub fn here(server_tmpdir: Option<&OsStr>) -> Self {
        let tmpdir = server_tmpdir
            .map(Path::new)
            .filter(|path| path.is_absolute())
            .and_then(|path| std::fs::canonicalize(path).ok())
            .filter(|path| path.is_dir());
        let minimal = MINIMAL.into_iter().map(PathBuf::from).filter(|path| path.exists()).collect();
        Self { tmpdir, slash_tmp: Path::new("/tmp").is_dir(), minimal }
    }
}

/// Turns the wire's object into a policy; none if no confinement was asked for. `process_cwd` is the working directory of a
/// process to be started, which stands in for a missing cwd.
///
/// # Errors
/// A path of another system, a dynamic entry without a cwd, a glob that does not compile, a limit that would come to nothing, a
/// bound.
pub fn resolve(sandbox: &Sandbox, process_cwd: Option<&AbsolutePath>, machine: &Machine) -> Result<Option<Policy>, PolicyError> {
    let (files, network) = match &sandbox.permissions {
        Permissions::Disabled if sandbox.protect_nested => return Err(PolicyError::NothingToProtect),
        Permissions::Disabled => return Ok(None),
        Permissions::External(network) => (&wire::Files::Unrestricted, network),
        Permissions::Managed { files, network } => (files, network),
    };
    let network = match network {
        wire::Network::Restricted => Network::Restricted,
        wire::Network::Enabled => Network::Enabled,
    };
    let files = match files {
        wire::Files::Unrestricted => Files::Unrestricted,
        wire::Files::Restricted { entries, glob_scan_max_depth: _ } => {
            let places = Places::new(sandbox, process_cwd, machine)?;
            restricted(entries, &places, sandbox.protect_nested)?
        }
    };
    // Whoever asks for no limits but this one would get none.
    if sandbox.protect_nested && files == Files::Unrestricted {
        return Err(PolicyError::NothingToProtect);
    }
    let nothing_to_enforce = files == Files::Unrestricted && network == Network::Enabled;
    Ok((!nothing_to_enforce).then_some(Policy { files, network }))
}

fn restricted(entries: &[wire::Entry], places: &Places<'_>, protect_nested: bool) -> Result<Files, PolicyError> {
    let mut grants = Vec::new();
    let mut globs = Vec::new();
    let (mut counted, mut bytes) = ((0, 0), 0);
    for entry in entries {
        match &entry.target {
            Target::Glob(pattern) => globs.extend(places.glob(pattern)?),
            Target::Nothing(kind) if entry.access == wire::Access::Deny => {
                let skip_missing = entry.skip_missing;
                grants.push(Grant { path: places.denied(kind)?, access: Access::Deny, skip_missing });
            }
            Target::ProjectRoots { .. } if entry.access == wire::Access::Deny && places.workspace_roots()?.is_empty() => {
                return Err(no_roots("project_roots"));
            }
            target => {
                let access = match entry.access {
                    wire::Access::Write => Access::Write,
                    wire::Access::Read => Access::Read,
                    wire::Access::Deny => Access::Deny,
                };
                let skip_missing = entry.skip_missing;
                grants.extend(places.paths(target)?.into_iter().map(|path| Grant { path, access, skip_missing }));
            }
        }
        // Checked on the way, so that 16 MiB of entries times a thousand roots are not built first.
        check_bound("entries", grants.len(), 4 * MAX_ENTRIES)?;
        check_bound("deny globs", globs.len(), 4 * MAX_GLOBS)?;
        bytes += grants[counted.0..].iter().map(|grant| grant.path.len()).sum::<usize>();
        bytes += globs[counted.1..].iter().map(|glob: &DenyGlob| glob.base.len()).sum::<usize>();
        check_bound("bytes of paths", bytes, 4 * MAX_PATH_BYTES)?;
        counted = (grants.len(), globs.len());
    }
    refuse_lost_narrowing(entries, &grants)?;
    let grants = Grants { protect_nested, ..Grants::new(grants, globs)? };
    Ok(if is_everything(&grants) { Files::Unrestricted } else { Files::Restricted(grants.into()) })
}

/// An entry for reading whose kind nobody knows grants nothing. Where something is writable it may have been meant to take
/// writing away, which must not be left out.
fn refuse_lost_narrowing(entries: &[wire::Entry], grants: &[Grant]) -> Result<(), PolicyError> {
    let narrows = |entry: &wire::Entry| match &entry.target {
        Target::Nothing(kind) if entry.access == wire::Access::Read => Some(kind.clone()),
        _ => None,
    };
    match entries.iter().find_map(narrows) {
        Some(kind) if grants.iter().any(|grant| grant.access == Access::Write) => Err(PolicyError::Special {
            kind,
            access: "read",
            problem: "grants nothing, and could not keep what other entries make writable from being changed: name a path",
        }),
        _ => Ok(()),
    }
}

fn no_roots(kind: &str) -> PolicyError {
    PolicyError::Special { kind: kind.to_owned(), access: "deny", problem: "denies nothing: give workspaceRoots" }
}

fn check_bound(what: &'static str, count: usize, bound: usize) -> Result<(), PolicyError> {
    if count > bound { Err(PolicyError::Bound { what, count, bound }) } else { Ok(()) }
}

/// Whether everything is writable and nothing narrows it: then there is nothing to enforce on files.
fn is_everything(grants: &Grants) -> bool {
    let root_is_writable =
        grants.entries.iter().any(|grant| grant.path.as_path() == Path::new("/") && grant.access == Access::Write);
    root_is_writable
        && !grants.protect_nested
        && grants.deny_globs.is_empty()
        && grants.entries.iter().all(|grant| grant.access == Access::Write)
}

/// What special entries stand for in one request.
struct Places<'a> {
    cwd: Option<AbsolutePath>,
    roots: Vec<AbsolutePath>,
    home: Option<&'a WirePath>,
    machine: &'a Machine,
    /// Of the globs so far.
    size: Cell<glob::Size>,
}

impl<'a> Places<'a> {
    fn new(sandbox: &'a Sandbox, process_cwd: Option<&AbsolutePath>, machine: &'a Machine) -> Result<Self, PolicyError> {
        let cwd = match &sandbox.cwd {
            Some(cwd) => Some(local("sandbox cwd", cwd)?),
            None => process_cwd.cloned(),
        };
        let roots = if sandbox.roots_default_to_cwd && sandbox.workspace_roots.is_empty() {
            cwd.iter().cloned().collect()
        } else {
            // Each entry for workspace roots becomes as many, before they are counted.
            check_bound("workspace roots", sandbox.workspace_roots.len(), MAX_ENTRIES)?;
            sandbox.workspace_roots.iter().map(|root| local("workspace root", root)).collect::<Result<_, _>>()?
        };
        Ok(Self { cwd, roots, home: sandbox.home.as_ref(), machine, size: Cell::default() })
    }

    /// The home, for an entry that was written so.
    fn home(&self, entry: &str) -> Result<AbsolutePath, PolicyError> {
        let at = || format!("policy path `{entry}`");
        match self.home {
            Some(home) => local(&at(), home),
            None => Err(PolicyError::Path { at: at(), problem: "is below the home: give userHomeDir".to_owned() }),
        }
    }

    fn cwd(&self) -> Result<&AbsolutePath, PolicyError> {
        self.cwd.as_ref().ok_or(PolicyError::CwdRequired)
    }

    /// They are looked at only together with a cwd, as clients know it.
    fn workspace_roots(&self) -> Result<&[AbsolutePath], PolicyError> {
        self.cwd()?;
        Ok(&self.roots)
    }

    /// What the denial of a kind that grants nothing denies.
    fn denied(&self, kind: &str) -> Result<AbsolutePath, PolicyError> {
        if kind == CURRENT_DIRECTORY {
            return self.cwd().cloned();
        }
        Err(PolicyError::Special {
            kind: kind.to_owned(),
            access: "deny",
            problem: "is of a kind that this version does not know, so that it would deny nothing: name a path",
        })
    }

    fn paths(&self, target: &Target) -> Result<Vec<AbsolutePath>, PolicyError> {
        Ok(match target {
            Target::Path(path) => vec![local("policy path", path)?],
            Target::Home(below) => vec![absolute(&self.home(&format!("~/{below}"))?.as_path().join(below))?],
            Target::Root => vec![absolute(Path::new("/"))?],
            Target::Minimal => self.machine.minimal.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?,
            Target::ProjectRoots { subpath } => {
                let below = |root: &AbsolutePath| match subpath {
                    Some(subpath) => absolute(&root.as_path().join(subpath)),
                    None => Ok(root.clone()),
                };
                self.workspace_roots()?.iter().map(below).collect::<Result<_, _>>()?
            }
            Target::Tmpdir => self.machine.tmpdir.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?,
            Target::SlashTmp if self.machine.slash_tmp => vec![absolute(Path::new("/tmp"))?],
            Target::SlashTmp | Target::Nothing(_) => Vec::new(),
            Target::Glob(glob) => {
                return Err(PolicyError::Glob { glob: glob.clone(), problem: "is no path".to_owned() });
            }
        })
    }

    /// As [`split_glob`], which is work on the gateway's thread: of all globs together there is a bound before any is compiled.
    fn split_glob(&self, base: &AbsolutePath, pattern: &str, whole: &str) -> Result<DenyGlob, PolicyError> {
        self.size.set(self.size.get().and(pattern)?);
        split_glob(base, pattern, whole)
    }

    fn glob(&self, glob: &str) -> Result<Vec<DenyGlob>, PolicyError> {
        if let Some(pattern) = glob.strip_prefix(PROJECT_ROOTS_PREFIX) {
            let roots = self.workspace_roots()?;
            if roots.is_empty() {
                let problem = "denies nothing: give workspaceRoots".to_owned();
                return Err(PolicyError::Glob { glob: glob.to_owned(), problem });
            }
            check_bound("workspace roots below which one glob denies", roots.len(), 4 * MAX_GLOBS)?;
            let pattern = pattern.trim_start_matches('/');
            return roots.iter().map(|root| self.split_glob(root, pattern, glob)).collect();
        }
        if let Some(pattern) = wire::below_home(glob) {
            return Ok(vec![self.split_glob(&self.home(glob)?, pattern, glob)?]);
        }
        let (base, pattern) = match glob.strip_prefix('/') {
            Some(pattern) => (absolute(Path::new("/"))?, pattern),
            None => (self.cwd()?.clone(), glob),
        };
        Ok(vec![self.split_glob(&base, pattern, glob)?])
    }
}

/// Moves the literal directories at the start of a pattern into its base, where links in them are resolved.
fn split_glob(base: &AbsolutePath, pattern: &str, whole: &str) -> Result<DenyGlob, PolicyError> {
    let fail = |problem: &str| PolicyError::Glob { glob: whole.to_owned(), problem: problem.to_owned() };
    if pattern.contains('\0') {
        return Err(fail("holds a NUL byte, which no name can"));
    }
    let mut base = base.as_path().to_owned();
    let mut rest: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    if rest.contains(&"..") {
        return Err(fail("holds `..`: write the place itself"));
    }
    // Real paths hold no `.`, so that a pattern with one would match nothing.
    rest.retain(|part| *part != ".");
    let is_literal = |part: &&str| !part.contains(['*', '?', '[', ']', '{', '}', '\\', ',']);
    let literal = rest.iter().take_while(|part| is_literal(part)).count().min(rest.len().saturating_sub(1));
    base.extend(&rest[..literal]);
    let pattern = rest[literal..].join("/");
    if pattern.is_empty() {
        return Err(fail("is empty"));
    }
    compile_glob(&pattern).map_err(|error| match error {
        PolicyError::Glob { problem, .. } => fail(&problem),
        other => other,
    })?;
    Ok(DenyGlob { base: absolute(&base)?, pattern })
}

fn local(at: &str, path: &WirePath) -> Result<AbsolutePath, PolicyError> {
    let path = path.local().map_err(|error| PolicyError::Path { at: at.to_owned(), problem: error.to_string() })?;
    check_length(at, path.as_path())?;
    Ok(path.clone())
}

fn absolute(path: &Path) -> Result<AbsolutePath, PolicyError> {
    check_length("policy path", path)?;
    AbsolutePath::new(path)
        .map_err(|error| PolicyError::Path { at: format!("policy path `{}`", path.display()), problem: error.to_string() })
}

/// The kernel takes no longer path, so that nothing would be granted or denied by it.
fn check_length(at: &str, path: &Path) -> Result<(), PolicyError> {
    let length = path.as_os_str().len();
    if length <= MAX_PATH_LENGTH {
        return Ok(());
    }
    let problem = format!("has {length} bytes, and the system takes paths of up to {MAX_PATH_LENGTH}");
    Err(PolicyError::Path { at: at.to_owned(), problem })
}

#[cfg(test)]
mod tests;

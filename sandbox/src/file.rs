//! Policy files: the operator's words for what a client can also say on the wire.

use crate::policy::PolicyError;
use crate::resolve::PROJECT_ROOTS_PREFIX;
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::sandbox::{Access, Entry, Files, Network, Permissions, Sandbox, Target, below_home, is_plain_relative};
use serde::Deserialize;
use std::ops::Range;
use toml::Spanned;

/// Names of the policies that every build holds.
pub const BUILTIN: [&str; 4] = ["read-only", "workspace-write", "workspace-write-network", "full-access"];

/// A named policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyFile {
    /// Its name: that of the file without `.toml`.
    pub name: String,
    /// What it is for, in a sentence.
    pub description: String,
    /// As if a client had sent it. Its project roots are those that are put in, or else the cwd.
    pub sandbox: Sandbox,
}

impl PolicyFile {
    /// The policy for these workspaces and this home. The first workspace is its cwd; relative globs hold in each.
    #[must_use]
    pub fn in_workspaces(self, workspaces: &[AbsolutePath], home: Option<AbsolutePath>) -> Sandbox {
        let mut sandbox = self.sandbox;
        sandbox.home = home.map(WirePath::Local);
        let local = |path: &AbsolutePath| WirePath::Local(path.clone());
        sandbox.cwd = workspaces.first().map(local);
        sandbox.workspace_roots = workspaces.iter().map(local).collect();
        if let Permissions::Managed { files: Files::Restricted { entries, .. }, .. } = &mut sandbox.permissions {
            for entry in entries {
                match &mut entry.target {
                    Target::Glob(glob) if is_relative(glob) => {
                        glob.insert_str(0, PROJECT_ROOTS_PREFIX);
                    }
                    _other => {}
                }
            }
        }
        sandbox
    }
}

fn is_relative(glob: &str) -> bool {
    !glob.starts_with('/') && !glob.starts_with(PROJECT_ROOTS_PREFIX) && below_home(glob).is_none()
}

/// A policy that every build holds; none of another name.
#[must_use]
pub fn builtin(name: &str) -> Option<PolicyFile> {
    let text = match name {
        "read-only" => include_str!("../../policies/read-only.toml"),
        "workspace-write" => include_str!("../../policies/workspace-write.toml"),
        "workspace-write-network" => include_str!("../../policies/workspace-write-network.toml"),
        "full-access" => include_str!("../../policies/full-access.toml"),
        _ => return None,
    };
    Some(parse(name, text).expect("Invariant: a test parses every policy that is built in"))
}

/// Reads a policy file; see `policies/README.md` for its members.
///
/// # Errors
/// An unknown or missing member, a wrong value. The error names the file and the line.
pub fn parse(name: &str, text: &str) -> Result<PolicyFile, PolicyError> {
    let fail = |span: Option<Range<usize>>, problem: String| {
        let before = span.and_then(|span| text.get(..span.start)).unwrap_or("");
        let line = before.matches('\n').count() + 1;
        PolicyError::File { file: name.to_owned(), line, problem }
    };
    let file: File = toml::from_str(text).map_err(|error| fail(error.span(), error.message().to_owned()))?;
    let network = match file.network {
        WireNetwork::Restricted => Network::Restricted,
        WireNetwork::Enabled => Network::Enabled,
    };
    let files = match file.files.get_ref() {
        WireFiles::Restricted => {
            let mut entries = Vec::with_capacity(file.entries.len());
            for entry in file.entries {
                let span = entry.span();
                entries.push(entry.into_inner().read().map_err(|problem| fail(Some(span), problem))?);
            }
            Files::Restricted { entries, glob_scan_max_depth: None }
        }
        WireFiles::Unrestricted if file.entries.is_empty() => Files::Unrestricted,
        WireFiles::Unrestricted => {
            return Err(fail(Some(file.files.span()), "unrestricted files and entries: give one".to_owned()));
        }
    };
    let permissions = match (&files, network) {
        (Files::Unrestricted, Network::Enabled) => Permissions::Disabled,
        _ => Permissions::Managed { files, network },
    };
    let sandbox = Sandbox {
        permissions,
        cwd: None,
        workspace_roots: Vec::new(),
        roots_default_to_cwd: true,
        home: None,
        protect_nested: file.protect_nested,
        ignored: 0,
    };
    Ok(PolicyFile { name: name.to_owned(), description: file.description, sandbox })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    description: String,
    files: Spanned<WireFiles>,
    network: WireNetwork,
    #[serde(default)]
    protect_nested: bool,
    #[serde(default)]
    entries: Vec<Spanned<FileEntry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WireFiles {
    Restricted,
    Unrestricted,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WireNetwork {
    Restricted,
    Enabled,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileAccess {
    Read,
    Write,
    Deny,
}

/// One of `path`, `glob` and `special`, and what it gives.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    path: Option<String>,
    glob: Option<String>,
    special: Option<Special>,
    subpath: Option<String>,
    access: FileAccess,
    missing_path_behavior: Option<Missing>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Missing {
    Skip,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Special {
    Root,
    Minimal,
    ProjectRoots,
    Tmpdir,
    SlashTmp,
}

impl FileEntry {
    fn read(self) -> Result<Entry, String> {
        let access = match self.access {
            FileAccess::Read => Access::Read,
            FileAccess::Write => Access::Write,
            FileAccess::Deny => Access::Deny,
        };
        let subpath = self.subpath;
        if subpath.is_some() && !matches!(self.special, Some(Special::ProjectRoots)) {
            return Err("`subpath` belongs to special = \"project_roots\"".to_owned());
        }
        if let Some(bad) = subpath.as_deref().filter(|path| !is_plain_relative(path)) {
            return Err(format!("subpath {bad:?} is not a relative path without `..`"));
        }
        let target = match (self.path, self.glob, self.special) {
            (Some(path), None, None) if below_home(&path).is_some() => {
                let below = below_home(&path).unwrap_or_default().to_owned();
                if access == Access::Write {
                    return Err(format!("path `{path}`: only entries that read or deny may start with `~`"));
                }
                if !below.is_empty() && !is_plain_relative(&below) {
                    return Err(format!("path {path:?} is not a path below the home without `..`"));
                }
                Target::Home(below)
            }
            (Some(path), None, None) => match WirePath::parse(&path) {
                Ok(WirePath::Local(path)) => Target::Path(WirePath::Local(path)),
                Ok(WirePath::Foreign(path)) => return Err(format!("path `{path}` is not of this machine")),
                Err(error) => return Err(format!("path `{path}`: {error}")),
            },
            (None, Some(_), None) if access != Access::Deny => return Err("only denials take globs".to_owned()),
            (None, Some(glob), None) => Target::Glob(glob),
            (None, None, Some(special)) => match special {
                Special::Root => Target::Root,
                Special::Minimal => Target::Minimal,
                Special::ProjectRoots => Target::ProjectRoots { subpath },
                Special::Tmpdir => Target::Tmpdir,
                Special::SlashTmp => Target::SlashTmp,
            },
            _ => return Err("needs one of `path`, `glob` and `special`".to_owned()),
        };
        Ok(Entry { target, access, skip_missing: self.missing_path_behavior.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builtin_policy_means_what_its_name_says() {
        for name in BUILTIN {
            let built_in = builtin(name).unwrap().sandbox;
            let (kind, network) = match name {
                "workspace-write-network" => ("workspace-write", ",\"network_access\":true"),
                "full-access" => ("danger-full-access", ""),
                same => (same, ""),
            };
            let plain = Sandbox::parse(&format!(r#"{{"type":"{kind}"{network}}}"#)).unwrap();
            assert_eq!(built_in, plain, "{name}");
        }
        assert_eq!(builtin("other"), None);
    }

    #[test]
    fn every_kind_of_entry() {
        let head = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n";
        let entries = "[[entries]]\npath = '/data'\naccess = 'write'\n[[entries]]\nglob = '**/*.env'\naccess = 'deny'\n[[entries]]\nspecial = 'project_roots'\nsubpath = 'src'\naccess = 'read'\n";
        let file = parse("mine", &format!("{head}{entries}")).unwrap();
        let Permissions::Managed { files: Files::Restricted { entries, .. }, .. } = file.sandbox.permissions else { panic!() };
        let targets: Vec<_> = entries.into_iter().map(|entry| entry.target).collect();
        assert_eq!(
            targets,
            [
                Target::Path(WirePath::parse("/data").unwrap()),
                Target::Glob("**/*.env".to_owned()),
                Target::ProjectRoots { subpath: Some("src".to_owned()) }
            ]
        );
    }

    #[test]
    fn members_of_limits() {
        let head = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n";
        let text = format!(
            "{head}protect_nested = true\n[[entries]]\npath = '~/.ssh'\naccess = 'deny'\nmissing_path_behavior = 'skip'\n"
        );
        let home = AbsolutePath::new("/h").unwrap();
        let sandbox = parse("mine", &text).unwrap().in_workspaces(&[], Some(home));
        let policy = crate::resolve::resolve(&sandbox, None, &crate::resolve::Machine::default()).unwrap().unwrap();
        let grants = policy.files.sets().next().unwrap();
        assert!(grants.protect_nested && grants.entries[0].skip_missing);
        assert_eq!(grants.entries[0].path.as_path().to_str(), Some("/h/.ssh"));
    }

    #[test]
    fn relative_globs_hold_in_every_workspace() {
        let text = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n[[entries]]\nglob = '**/*.env'\naccess = 'deny'\n[[entries]]\nglob = '/etc/*'\naccess = 'deny'\n";
        let roots = ["/a", "/b"].map(|path| AbsolutePath::new(path).unwrap());
        let sandbox = parse("mine", text).unwrap().in_workspaces(&roots, None);
        let policy = crate::resolve::resolve(&sandbox, None, &crate::resolve::Machine::default()).unwrap().unwrap();
        let globs = &policy.files.sets().next().unwrap().deny_globs;
        let bases: Vec<_> = globs.iter().map(|glob| glob.base.as_path().to_str().unwrap()).collect();
        assert_eq!(bases, ["/a", "/b", "/etc"]);
    }

    #[test]
    fn errors_name_file_and_line() {
        let check = |text: &str, expect: &str| {
            let error = parse("mine", text).unwrap_err().to_string();
            assert!(error.starts_with(expect), "{error}");
        };
        let head = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n";
        check("description = 'd'\nfiles = 'all'\n", "policy file mine, line 2: unknown variant `all`");
        check(&format!("{head}colour = 'red'\n"), "policy file mine, line 4: unknown field `colour`");
        check(&format!("{head}[[entries]]\naccess = 'read'\n"), "policy file mine, line 4: needs one of");
        check(
            &format!("{head}[[entries]]\npath = '/a'\naccess = 'read'\n[[entries]]\npath = 'a'\naccess = 'read'\n"),
            "policy file mine, line 7: path `a`",
        );
        for (entry, expect) in [
            ("path = '~/x'\naccess = 'write'", "path `~/x`: only entries that read or deny"),
            ("path = '~/../x'\naccess = 'deny'", "path \"~/../x\" is not a path below the home"),
            ("path = \"~/\\u0000\"\naccess = 'deny'", "is not a path below the home"),
            ("special = 'project_roots'\nsubpath = ''\naccess = 'read'", "subpath \"\" is not"),
            ("special = 'project_roots'\nsubpath = \"\\u0000\"\naccess = 'deny'", "is not a relative path"),
            ("path = '/x'\naccess = 'all'", "unknown variant `all`"),
            ("path = 'file://h/x'\naccess = 'read'", "path `file://h/x` is not of this machine"),
            ("path = 3\naccess = 'read'", "invalid type: integer `3`"),
            ("path = '/x'\nspecial = 'root'\naccess = 'read'", "needs one of"),
            ("path = '/x'\naccess = 'read'\nmissing_path_behavior = 'keep'", "unknown variant `keep`"),
            ("special = 'tmpdir'\nsubpath = 'x'\naccess = 'read'", "`subpath` belongs to"),
            ("special = 'project_roots'\nsubpath = '/x'\naccess = 'read'", "subpath \"/x\" is not"),
        ] {
            let error = parse("mine", &format!("{head}[[entries]]\n{entry}\n")).unwrap_err().to_string();
            assert!(error.starts_with("policy file mine, line ") && error.contains(expect), "{error}");
        }
        check(&format!("{head}protect_nested = 'yes'\n"), "policy file mine, line 4: invalid type");
        check(&format!("{head}[[entries]]\nglob = '*'\naccess = 'read'\n"), "policy file mine, line 4: only denials take globs");
        check(
            "description = 'd'\nfiles = 'unrestricted'\nnetwork = 'enabled'\n[[entries]]\nspecial = 'root'\naccess = 'read'\n",
            "policy file mine, line 2: unrestricted files and entries",
        );
    }
}

//! The wire's sandbox object: every accepted spelling becomes one type.
//!
//! Two families are accepted. Permission profiles: `{"permissions": {"type": "managed", …}, "cwd": …, …}`. Plain policies:
//! `{"type": "read-only"}`, `{"type": "workspace-write", …}`, `{"type": "danger-full-access"}`, `{"type":
//! "external-sandbox", …}` and their camelCase spellings, bare or under `sandboxPolicy` or `policy`. What is incomplete, of a
//! wrong type or of an unknown tag is refused; unknown members are counted, but for near-misses of members that matter.

mod entry;
mod object;
mod spell;

use crate::path::WirePath;
use object::{Object, fail, fold};
use serde_json::Value;

pub use entry::{below_home, is_plain_relative};
pub use object::is_near_miss;

/// What a request may touch, as the client said it. Nothing here is resolved against a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// What is granted.
    pub permissions: Permissions,
    /// Base of relative globs, and the sign that dynamic entries may be resolved.
    pub cwd: Option<WirePath>,
    /// What project roots stand for. A plain workspace-write policy without any means its cwd: see
    /// [`Sandbox::roots_default_to_cwd`].
    pub workspace_roots: Vec<WirePath>,
    /// Whether an absent list of workspace roots means the cwd: true of plain policies, whose workspace is the cwd.
    pub roots_default_to_cwd: bool,
    /// What `~` stands for in paths that limit or are read; never one that grants writing.
    pub home: Option<WirePath>,
    /// Whether `.git` and the other protected names are read-only at any depth below what is writable.
    pub protect_nested: bool,
    /// Members that nobody knows; they change nothing.
    pub ignored: u32,
}

/// The two kinds of permission, and none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Permissions {
    /// No sandbox is wanted.
    Disabled,
    /// Somebody else confines the files; the network is as said.
    External(Network),
    /// We confine.
    Managed {
        /// Files.
        files: Files,
        /// Network.
        network: Network,
    },
}

/// Whether the network of the host can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// No.
    Restricted,
    /// Yes.
    Enabled,
}

/// What may be touched on file systems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Files {
    /// Everything.
    Unrestricted,
    /// What the entries grant, the most specific first.
    Restricted {
        /// In the order of the client.
        entries: Vec<Entry>,
        /// How deep globs are looked for where they must be expanded.
        glob_scan_max_depth: Option<u32>,
    },
}

/// One grant or denial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// On what.
    pub target: Target,
    /// What is granted.
    pub access: Access,
    /// Whether the entry says nothing where its path does not exist; of no effect on entries for writing.
    pub skip_missing: bool,
}

/// What an entry speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A path and everything below it.
    Path(WirePath),
    /// A path below the home of [`Sandbox::home`], which may be empty: relative, without `..`. Never for writing.
    Home(String),
    /// Every path that matches; for denials only.
    Glob(String),
    /// The whole file system.
    Root,
    /// What programs need to start: the system's directories.
    Minimal,
    /// Every workspace root, or a path below each.
    ProjectRoots {
        /// Relative, without `..`.
        subpath: Option<String>,
    },
    /// The server's own TMPDIR.
    Tmpdir,
    /// `/tmp`.
    SlashTmp,
    /// A kind that grants nothing: `current_working_directory`, `unknown`, and kinds of newer clients. Denying the first denies
    /// the cwd; denying another must not come to nothing, so that whoever resolves it refuses.
    Nothing(String),
}

/// What an entry grants, weakest last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and change.
    Write,
    /// Read.
    Read,
    /// Neither.
    Deny,
}

/// Why a sandbox object is refused. The text names the member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct SandboxError {
    /// The member, as in `sandbox.permissions.file_system.entries[2].access`.
    pub at: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Sandbox {
    /// Reads a sandbox object from its JSON text.
    ///
    /// # Errors
    /// Any member that decides over access is missing, of a wrong type, of an unknown tag, or misspelt.
    pub fn parse(text: &str) -> Result<Self, SandboxError> {
        let value: Value = serde_json::from_str(text).map_err(|error| fail("sandbox", error))?;
        let mut object = Object::new(value, "sandbox".to_owned())?;
        let is_plain = !object.has("permissions");
        let sandbox = if object.has("permissions") {
            only_one(&object, &["sandboxPolicy", "policy", "type"])?;
            Self::profile(&mut object)?
        } else if let Some(member) = ["sandboxPolicy", "policy"].into_iter().find(|member| object.has(member)) {
            only_one(&object, &["type"])?;
            if object.has("sandboxPolicy") && object.has("policy") {
                return Err(fail(&object.at, "has both `sandboxPolicy` and `policy`: give one"));
            }
            let mut plain = object.object(member)?;
            let permissions = plain_permissions(&mut plain)?;
            // It may stand with the policy or around it, and holds if either says so.
            let protect_nested = plain.spelled_boolean(NESTED.0, NESTED.1)?;
            object.ignored += finish_plain(plain)?;
            let around = Self::surroundings(&mut object, permissions, true)?;
            Self { protect_nested: protect_nested || around.protect_nested, ..around }
        } else if object.has("type") {
            let permissions = plain_permissions(&mut object)?;
            Self::surroundings(&mut object, permissions, true)?
        } else {
            return Err(fail(&object.at, "missing field `permissions`"));
        };
        let own = ["permissions", "sandboxPolicy", "policy", "policyContext", "workspaceRoots", "cwd", "userHomeDir", NESTED.1];
        if is_plain {
            refuse_limits(&object)?;
        }
        let ignored = object.finish(&[&own[..], &PLAIN_MEMBERS].concat())?;
        Ok(Self { ignored, ..sandbox })
    }

    fn profile(object: &mut Object) -> Result<Self, SandboxError> {
        let mut profile = object.object("permissions")?;
        let permissions = managed_permissions(&mut profile)?;
        object.ignored += profile.finish(&["entries", "access", "path", "file_system", "network", "type", NESTED.1])?;
        object.variant("windowsSandboxLevel", &["disabled", "restricted-token", "elevated", "mxc"])?;
        Self::surroundings(object, permissions, false)
    }

    /// The members beside the permissions.
    fn surroundings(object: &mut Object, permissions: Permissions, plain: bool) -> Result<Self, SandboxError> {
        let mut cwd = object.optional_path("cwd")?;
        let mut roots = object.optional_paths("workspaceRoots")?;
        if object.has_value("policyContext") {
            let mut context = object.object("policyContext")?;
            let at = |member: &str| (object.place(member), context.place(member));
            let (cwd_at, roots_at) = (at("cwd"), at("workspaceRoots"));
            cwd = only_value(cwd, context.optional_path("cwd")?, &cwd_at, |cwd| format!("`{cwd}`"))?;
            roots = only_value(roots, context.optional_paths("workspaceRoots")?, &roots_at, |roots| list(roots))?;
            object.ignored += context.finish(&["cwd", "workspaceRoots"])?;
        } else {
            object.take("policyContext");
        }
        let home = object.optional_path("userHomeDir")?;
        let protect_nested =
            if plain { object.spelled_boolean(NESTED.0, NESTED.1)? } else { object.optional_boolean(NESTED.1)?.unwrap_or(false) };
        // Checked and without effect: they speak of another system, or of what only this server's own TMPDIR decides.
        object.optional_paths("temporaryDirectories")?;
        object.optional_boolean("useLegacyLandlock")?;
        object.optional_boolean("windowsSandboxPrivateDesktop")?;
        object.optional_variant("windowsSandboxProxySettingsMode", &["reconcile", "preserve"])?;
        if plain {
            object.optional_variant("windowsSandboxLevel", &["disabled", "restricted-token", "elevated", "mxc"])?;
        }
        let roots_default_to_cwd = plain && roots.is_none();
        let workspace_roots = roots.unwrap_or_default();
        Ok(Self { permissions, cwd, workspace_roots, roots_default_to_cwd, home, protect_nested, ignored: 0 })
    }
}

/// The member that protects nested repositories, as plain policies may spell it, and as everything does.
const NESTED: (&str, &str) = ("protect_nested_repositories", "protectNestedRepositories");

/// Members of plain policies that decide over access; `access` and `readOnlyAccess` are narrowings of other makes, which this
/// version does not know and must not leave out.
const PLAIN_MEMBERS: [&str; 8] = [
    "writable_roots",
    "network_access",
    "exclude_slash_tmp",
    "exclude_tmpdir_env_var",
    "access",
    "readOnlyAccess",
    "type",
    NESTED.1,
];

/// Members that would each say what is granted must not stand side by side.
fn only_one(object: &Object, others: &[&str]) -> Result<(), SandboxError> {
    match others.iter().find(|other| object.has(other)) {
        None => Ok(()),
        Some(other) => Err(fail(&object.at, format!("has `{other}` beside another policy: give one"))),
    }
}

/// A value that may stand in two places must not be two values: either could be the one that was meant to confine.
fn only_value<T: PartialEq>(
    outer: Option<T>,
    inner: Option<T>,
    at: &(String, String),
    show: impl Fn(&T) -> String,
) -> Result<Option<T>, SandboxError> {
    match (outer, inner) {
        (Some(outer), Some(inner)) if outer != inner => {
            Err(fail(&at.0, format!("is {} where {} is {}: give one", show(&outer), at.1, show(&inner))))
        }
        (outer, inner) => Ok(outer.or(inner)),
    }
}

/// Paths in words; the first ones, for there may be many.
fn list(paths: &[WirePath]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<String> = paths.iter().take(SHOWN).map(|path| format!("`{path}`")).collect();
    let more = if paths.len() > SHOWN { ", …" } else { "" };
    format!("[{}{more}]", shown.join(", "))
}

fn finish_plain(plain: Object) -> Result<u32, SandboxError> {
    refuse_limits(&plain)?;
    plain.finish(&PLAIN_MEMBERS)
}

/// What starts like a limit of a plain policy is one of another make or misspelt beyond recognition: left out, it would no
/// longer limit.
fn refuse_limits(plain: &Object) -> Result<(), SandboxError> {
    const LIMITS: [&str; 4] = ["exclude", "read", "writ", "deny"];
    let starts = |member: &str, limit: &str| fold(member).iter().copied().take(limit.len()).eq(limit.chars());
    let mut members = plain.members.keys().filter(|member| !PLAIN_MEMBERS.iter().any(|known| is_near_miss(member, known)));
    match members.find(|member| LIMITS.iter().any(|limit| starts(member, limit))) {
        None => Ok(()),
        Some(member) => Err(fail(&plain.at, format!("`{member}` is unknown, and its name says that it limits what is granted"))),
    }
}

fn managed_permissions(profile: &mut Object) -> Result<Permissions, SandboxError> {
    Ok(match profile.variant("type", &["managed", "disabled", "external"])? {
        "disabled" => {
            profile.take("network");
            Permissions::Disabled
        }
        "external" => Permissions::External(profile.network("network")?),
        _managed => {
            let mut files = profile.object("file_system")?;
            let network = profile.network("network")?;
            let files = match files.variant("type", &["restricted", "unrestricted"])? {
                "unrestricted" => {
                    if files.has("entries") {
                        return Err(fail(&files.at, "is unrestricted and has `entries`: give one"));
                    }
                    files.finish_into(profile)?;
                    Files::Unrestricted
                }
                _restricted => {
                    let entries = files.entries()?;
                    let glob_scan_max_depth = files.optional_depth("glob_scan_max_depth")?;
                    files.finish_into(profile)?;
                    Files::Restricted { entries, glob_scan_max_depth }
                }
            };
            Permissions::Managed { files, network }
        }
    })
}

fn plain_permissions(plain: &mut Object) -> Result<Permissions, SandboxError> {
    const TAGS: &[&str] = &[
        "read-only",
        "readOnly",
        "workspace-write",
        "workspaceWrite",
        "danger-full-access",
        "dangerFullAccess",
        "external-sandbox",
        "externalSandbox",
    ];
    let entry = |target, access| Entry { target, access, skip_missing: false };
    Ok(match plain.variant("type", TAGS)? {
        "danger-full-access" | "dangerFullAccess" => Permissions::Disabled,
        "external-sandbox" | "externalSandbox" => Permissions::External(plain.spelled_network()?),
        "read-only" | "readOnly" => {
            let entries = vec![entry(Target::Root, Access::Read)];
            Permissions::Managed {
                files: Files::Restricted { entries, glob_scan_max_depth: None },
                network: plain.spelled_network()?,
            }
        }
        _workspace_write => {
            let mut entries =
                vec![entry(Target::Root, Access::Read), entry(Target::ProjectRoots { subpath: None }, Access::Write)];
            if !plain.spelled_boolean("exclude_slash_tmp", "excludeSlashTmp")? {
                entries.push(entry(Target::SlashTmp, Access::Write));
            }
            if !plain.spelled_boolean("exclude_tmpdir_env_var", "excludeTmpdirEnvVar")? {
                entries.push(entry(Target::Tmpdir, Access::Write));
            }
            let member = plain.spelled("writable_roots", "writableRoots")?;
            let roots = plain.optional_paths(member)?.unwrap_or_default();
            entries.extend(roots.into_iter().map(|root| entry(Target::Path(root), Access::Write)));
            Permissions::Managed {
                files: Files::Restricted { entries, glob_scan_max_depth: None },
                network: plain.spelled_network()?,
            }
        }
    })
}

#[cfg(test)]
mod tests;

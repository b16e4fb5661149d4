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
mod tests {
    use super::*;

    fn profile(permissions: &str) -> Result<Sandbox, String> {
        parse(&format!(r#"{{"permissions":{permissions},"windowsSandboxLevel":"disabled"}}"#))
    }

    fn parse(text: &str) -> Result<Sandbox, String> {
        Sandbox::parse(text).map_err(|error| error.to_string())
    }

    fn managed(entries: &str) -> Result<Sandbox, String> {
        profile(&format!(
            r#"{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":{entries}}}}}"#
        ))
    }

    #[track_caller]
    fn entries(sandbox: Result<Sandbox, String>) -> Vec<Entry> {
        match sandbox.unwrap().permissions {
            Permissions::Managed { files: Files::Restricted { entries, .. }, .. } => entries,
            other => panic!("{other:?}"),
        }
    }

    fn grants(text: &str) -> Vec<(Target, Access)> {
        entries(parse(text)).into_iter().map(|entry| (entry.target, entry.access)).collect()
    }

    #[test]
    fn every_spelling_of_read_only_is_one_value() {
        let root = [(Target::Root, Access::Read)];
        for text in [
            r#"{"type":"read-only"}"#,
            r#"{"type":"readOnly"}"#,
            r#"{"sandboxPolicy":{"type":"read-only"}}"#,
            r#"{"policy":{"type":"readOnly"},"cwd":"/w"}"#,
        ] {
            assert_eq!(grants(text), root, "{text}");
        }
        let from_profile = managed(r#"[{"path":{"type":"special","value":{"kind":"root"}},"access":"read"}]"#);
        assert_eq!(entries(from_profile).len(), 1);
    }

    #[test]
    fn workspace_write_members_in_both_spellings() {
        let tmp = |path: &str| (Target::Path(WirePath::parse(path).unwrap()), Access::Write);
        let base = [(Target::Root, Access::Read), (Target::ProjectRoots { subpath: None }, Access::Write)];
        let with = |more: &[(Target, Access)]| [&base, more].concat();
        assert_eq!(
            grants(r#"{"type":"workspace-write"}"#),
            with(&[(Target::SlashTmp, Access::Write), (Target::Tmpdir, Access::Write)])
        );
        assert_eq!(
            grants(r#"{"type":"workspaceWrite","excludeSlashTmp":true,"excludeTmpdirEnvVar":true,"writableRoots":["/x"]}"#),
            with(&[tmp("/x")])
        );
        assert_eq!(
            grants(
                r#"{"type":"workspace-write","exclude_slash_tmp":true,"exclude_tmpdir_env_var":true,"writable_roots":["file:///x"]}"#
            ),
            with(&[tmp("/x")])
        );
        let both = parse(r#"{"type":"workspace-write","writable_roots":[],"writableRoots":[]}"#);
        assert_eq!(both.unwrap_err(), "sandbox: has both `writable_roots` and `writableRoots`: give one");
    }

    #[test]
    fn network_is_off_unless_said() {
        let network = |text: &str| match parse(text).unwrap().permissions {
            Permissions::Managed { network, .. } | Permissions::External(network) => network,
            Permissions::Disabled => panic!(),
        };
        assert_eq!(network(r#"{"type":"read-only"}"#), Network::Restricted);
        assert_eq!(network(r#"{"type":"read-only","network_access":true}"#), Network::Enabled);
        assert_eq!(network(r#"{"type":"externalSandbox","networkAccess":"enabled"}"#), Network::Enabled);
        assert_eq!(network(r#"{"type":"external-sandbox"}"#), Network::Restricted);
    }

    #[test]
    fn policy_context_stands_in_for_cwd_and_roots() {
        let text = r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"disabled","policyContext":{"cwd":"/w","workspaceRoots":["/w"]}}"#;
        let sandbox = parse(text).unwrap();
        assert_eq!(sandbox.cwd, Some(WirePath::parse("/w").unwrap()));
        assert_eq!(sandbox.workspace_roots.len(), 1);
        assert!(!sandbox.roots_default_to_cwd);
    }

    #[test]
    fn nested_repositories_in_every_spelling() {
        let profile =
            |beside: &str| format!(r#"{{"permissions":{{"type":"disabled"}},"windowsSandboxLevel":"disabled",{beside}}}"#);
        for (text, expect) in [
            (profile(r#""protectNestedRepositories":true"#), true),
            (profile(r#""protectNestedRepositories":false"#), false),
            (profile(r#""protectNestedRepositories":null"#), false),
            (r#"{"type":"workspace-write","protect_nested_repositories":true}"#.to_owned(), true),
            (r#"{"type":"workspace-write","protectNestedRepositories":true}"#.to_owned(), true),
            (r#"{"policy":{"type":"workspace-write","protect_nested_repositories":true}}"#.to_owned(), true),
            (r#"{"policy":{"type":"workspace-write"},"protectNestedRepositories":true}"#.to_owned(), true),
            (
                r#"{"policy":{"type":"workspace-write","protectNestedRepositories":true},"protectNestedRepositories":false}"#
                    .to_owned(),
                true,
            ),
            (r#"{"type":"workspace-write"}"#.to_owned(), false),
        ] {
            assert_eq!(parse(&text).unwrap().protect_nested, expect, "{text}");
        }
        let entry = |more: &str| {
            format!(
                r#"{{"permissions":{{"type":"managed","network":"enabled","file_system":{{"type":"restricted","entries":[]{more}}}}},"windowsSandboxLevel":"disabled"}}"#
            )
        };
        for text in [
            profile(r#""protect_nested_repositories":true"#),
            profile(r#""protectNestedRepositorys":true"#),
            profile(r#""protectNestedRepository":true"#),
            r#"{"permissions":{"type":"disabled","protectNestedRepositories":true},"windowsSandboxLevel":"disabled"}"#.to_owned(),
            entry(r#","protectNestedRepositories":true"#),
            r#"{"type":"workspace-write","protectNestedRepo":true}"#.to_owned(),
            r#"{"type":"workspace-write","protect_nested":true}"#.to_owned(),
        ] {
            assert!(parse(&text).unwrap_err().contains("protect"), "{text}");
        }
        let wrong = parse(&profile(r#""protectNestedRepositories":"yes""#)).unwrap_err();
        assert_eq!(wrong, r#"sandbox.protectNestedRepositories: invalid type: string "yes", expected a boolean"#);
        let both = r#"{"type":"workspace-write","protect_nested_repositories":true,"protectNestedRepositories":true}"#;
        assert!(parse(both).unwrap_err().contains("has both"));
    }

    #[test]
    fn a_home_is_for_reading_and_denying() {
        let of =
            |path: &str, access: &str| managed(&format!(r#"[{{"path":{{"type":"path","path":"{path}"}},"access":"{access}"}}]"#));
        for (path, below) in [("~", ""), ("~/", ""), ("~/.ssh", ".ssh"), ("~//a/b", "a/b")] {
            for access in ["read", "deny"] {
                assert_eq!(entries(of(path, access))[0].target, Target::Home(below.to_owned()), "{path}");
            }
        }
        let at = "sandbox.permissions.file_system.entries[0].path.path";
        let write = format!("{at}: `~/x` with access write: only entries that read or deny may start with `~`");
        assert_eq!(of("~/x", "write").unwrap_err(), write);
        assert_eq!(
            of("~/a/../../x", "deny").unwrap_err(),
            format!("{at}: `~/a/../../x` is not a path below the home without `..`")
        );
        assert!(of("~user/x", "deny").unwrap_err().contains("relative URL"));
        let home = |home: &str| parse(&format!(r#"{{"type":"read-only","userHomeDir":{home}}}"#));
        assert_eq!(home(r#""file:///h""#).unwrap().home, Some(WirePath::parse("/h").unwrap()));
        assert!(home(r#""h""#).unwrap_err().starts_with("sandbox.userHomeDir: `h`"));
        assert!(home("3").unwrap_err().starts_with("sandbox.userHomeDir: invalid type"));
        let misspelt = r#"{"type":"read-only","user_home_dirr":"/h"}"#;
        assert!(parse(misspelt).unwrap_err().contains("did you mean `userHomeDir`?"));
    }

    #[test]
    fn temporary_directories_are_checked() {
        let of = |list: &str| parse(&format!(r#"{{"type":"read-only","temporaryDirectories":{list}}}"#));
        for list in [r#"["file:///t"]"#, "[]", "null"] {
            assert_eq!(of(list), parse(r#"{"type":"read-only"}"#), "{list}");
        }
        assert!(of(r#""/t""#).unwrap_err().starts_with("sandbox.temporaryDirectories: invalid type"));
        assert!(of(r#"["t"]"#).unwrap_err().starts_with("sandbox.temporaryDirectories[0]: `t`"));
    }

    #[test]
    fn two_places_must_not_give_two_values() {
        let text = |outer: &str, inner: &str| format!(r#"{{"type":"read-only",{outer},"policyContext":{{{inner}}}}}"#);
        for (outer, inner, expect) in [
            (r#""cwd":"/a""#, r#""cwd":"/b""#, "sandbox.cwd: is `/a` where sandbox.policyContext.cwd is `/b`: give one"),
            (
                r#""workspaceRoots":["/a"]"#,
                r#""workspaceRoots":["/a","/b"]"#,
                "sandbox.workspaceRoots: is [`/a`] where sandbox.policyContext.workspaceRoots is [`/a`, `/b`]: give one",
            ),
            (
                r#""workspaceRoots":["/a","/b","/c","/d","/e"]"#,
                r#""workspaceRoots":[]"#,
                "sandbox.workspaceRoots: is [`/a`, `/b`, `/c`, `/d`, …] where sandbox.policyContext.workspaceRoots is []: give one",
            ),
        ] {
            assert_eq!(parse(&text(outer, inner)).unwrap_err(), expect);
        }
        // Equal values, in any spelling, and values in one place only.
        for (outer, inner) in [
            (r#""cwd":"/a","workspaceRoots":["/a"]"#, r#""cwd":"file:///a","workspaceRoots":["/a"]"#),
            (r#""cwd":"/a","workspaceRoots":null"#, r#""cwd":null,"workspaceRoots":["/a"]"#),
        ] {
            let sandbox = parse(&text(outer, inner)).unwrap();
            assert_eq!((sandbox.cwd, sandbox.workspace_roots.len()), (Some(WirePath::parse("/a").unwrap()), 1));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |result: Result<Sandbox, String>, expect: &str| assert_eq!(result.unwrap_err(), expect);
        wrong(parse("3"), "sandbox: invalid type: number, expected a map");
        wrong(parse(r#""read-only""#), r#"sandbox: invalid type: string "read-only", expected a map"#);
        wrong(parse("{}"), "sandbox: missing field `permissions`");
        wrong(parse(r#"{"permissions":{"type":"disabled"}}"#), "sandbox: missing field `windowsSandboxLevel`");
        wrong(profile("{}"), "sandbox.permissions: missing field `type`");
        wrong(profile(r#"{"type":"external"}"#), "sandbox.permissions: missing field `network`");
        wrong(
            profile(r#"{"type":"read-only"}"#),
            "sandbox.permissions.type: unknown variant `read-only`, expected one of `managed`, `disabled`, `external`",
        );
        wrong(managed("3"), "sandbox.permissions.file_system.entries: expected a sequence");
        wrong(
            managed(r#"[{"path":{"type":"path","path":"/a"},"access":"zz"}]"#),
            "sandbox.permissions.file_system.entries[0].access: unknown variant `zz`, expected one of `read`, `write`, `deny`, `none`",
        );
        wrong(
            managed(r#"[{"path":{"type":"path","path":"a"},"access":"read"}]"#),
            "sandbox.permissions.file_system.entries[0].path.path: `a`: invalid URI: relative URL without a base",
        );
        wrong(
            managed(r#"[{"path":{"type":"glob_pattern","pattern":"*"},"access":"write"}]"#),
            "sandbox.permissions.file_system.entries[0].path.pattern: glob `*` with access other than deny: only denials take globs",
        );
        wrong(
            managed(r#"[{"path":{"type":"special","value":{"kind":"project_roots","subpath":"../x"}},"access":"write"}]"#),
            "sandbox.permissions.file_system.entries[0].path.value.subpath: `../x` is not a relative path without `..`",
        );
        wrong(parse(r#"{"type":"read-only","cwd":3}"#), "sandbox.cwd: invalid type: number, expected a string");
        wrong(
            parse(r#"{"type":"read-only","permissions":{"type":"disabled"}}"#),
            "sandbox: has `type` beside another policy: give one",
        );
    }

    #[test]
    fn near_misses_are_refused_and_strangers_counted() {
        let text = r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"disabled","futureOption":1,"other":{}}"#;
        assert_eq!(parse(text).unwrap().ignored, 2);
        for (text, meant) in [
            (r#"{"type":"read-only","permission":{}}"#, "permissions"),
            (r#"{"type":"read-only","workspace_roots":[]}"#, "workspaceRoots"),
            (r#"{"type":"workspace-write","exclude_slash_tmpp":true}"#, "exclude_slash_tmp"),
            (r#"{"type":"workspace-write","excludeslashtmp":true}"#, "exclude_slash_tmp"),
            (r#"{"type":"read-only","access":{"type":"restricted"}}"#, "access"),
            (r#"{"policy":{"type":"read-only","readOnlyAccess":{}}}"#, "readOnlyAccess"),
            (r#"{"policy":{"type":"workspace-write","writeable_roots":[]}}"#, "writable_roots"),
            (r#"{"type":"workspace-write","wrtiableRotos":[]}"#, "writable_roots"),
            (r#"{"policy":{"type":"read-only","read_only_access":{}}}"#, "readOnlyAccess"),
            (r#"{"type":"workspace-write","excludeSlashTemp":true}"#, "exclude_slash_tmp"),
        ] {
            assert!(parse(text).unwrap_err().contains(&format!("did you mean `{meant}`?")), "{text}");
        }
        let access = managed(r#"[{"path":{"type":"path","path":"/a"},"access":"deny","Access":"write"}]"#);
        assert!(access.unwrap_err().contains("did you mean `access`?"));
    }

    #[test]
    fn limits_that_nobody_knows_are_refused_in_plain_policies() {
        for member in ["excludeHome", "exclude_temporary", "readDenied", "read_only_paths", "writablePathsOnly", "denyPaths"] {
            for text in [
                format!(r#"{{"type":"read-only","{member}":[]}}"#),
                format!(r#"{{"policy":{{"type":"workspace-write","{member}":[]}}}}"#),
                format!(r#"{{"sandboxPolicy":{{"type":"read-only"}},"{member}":[]}}"#),
            ] {
                assert!(parse(&text).unwrap_err().contains(&format!("`{member}` is unknown")), "{text}");
            }
        }
        // What names no limit is a stranger, and profiles have their limits in entries.
        assert_eq!(parse(r#"{"type":"read-only","colour":1,"re":2}"#).unwrap().ignored, 2);
        let profile = r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"disabled","readiness":1}"#;
        assert_eq!(parse(profile).unwrap().ignored, 1);
    }

    #[test]
    fn an_unknown_special_kind_grants_nothing() {
        let sandbox = managed(r#"[{"path":{"type":"special","value":{"kind":"everything","subpath":"x"}},"access":"write"}]"#);
        assert_eq!(sandbox.as_ref().unwrap().ignored, 1);
        assert_eq!(entries(sandbox)[0].target, Target::Nothing("everything".to_owned()));
    }

    #[test]
    fn members_beside_a_special_kind_are_not_dropped() {
        let special = |value: &str, access: &str| {
            managed(&format!(r#"[{{"path":{{"type":"special","value":{value}}},"access":"{access}"}}]"#))
        };
        for (value, access) in [
            (r#"{"kind":"project_roots","subpth":"x"}"#, "write"),
            (r#"{"kind":"project_roots","sub_path":"x"}"#, "deny"),
            (r#"{"kind":"root","subpath":"x"}"#, "write"),
            (r#"{"kind":"current_working_directory","subpath":"x"}"#, "deny"),
            (r#"{"kind":"everything","subpath":"x"}"#, "deny"),
        ] {
            assert!(special(value, access).unwrap_err().contains("did you mean `subpath`?"), "{value}");
        }
        assert!(special(r#"{"kind":"project_roots","subpath":"x"}"#, "write").is_ok());
        assert_eq!(special(r#"{"kind":"root","colour":"red"}"#, "read").unwrap().ignored, 1);
    }

    #[test]
    fn near_miss_table() {
        for near in ["sandBox", "SANDBOX", "sand_box", "sandbx", "sandboxx", "asndbox"] {
            assert!(is_near_miss(near, "sandbox"), "{near}");
        }
        for near in ["snadbxo", "sandboxes", "sndbx", "sambdox"] {
            assert!(is_near_miss(near, "sandbox"), "{near}");
        }
        for far in ["path", "sand", "box", "metadata", "snbdaox", "sandboxing"] {
            assert!(!is_near_miss(far, "sandbox"), "{far}");
        }
        // In a short name two edits leave too little.
        assert!(is_near_miss("pth", "path") && is_near_miss("paths", "path") && !is_near_miss("pat", "paths_"));
        assert!(!is_near_miss("pa", "path") && !is_near_miss(&"path".repeat(1 << 16), "path"));
    }
}

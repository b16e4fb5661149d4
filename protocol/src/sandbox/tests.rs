use super::*;

fn profile(permissions: &str) -> Result<Sandbox, String> {
    parse(&format!(r#"{{"permissions":{permissions},"windowsSandboxLevel":"disabled"}}"#))
}

fn parse(text: &str) -> Result<Sandbox, String> {
    Sandbox::parse(text).map_err(|error| error.to_string())
}

fn managed(entries: &str) -> Result<Sandbox, String> {
    profile(&format!(r#"{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":{entries}}}}}"#))
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
    let profile = |beside: &str| format!(r#"{{"permissions":{{"type":"disabled"}},"windowsSandboxLevel":"disabled",{beside}}}"#);
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
    assert_eq!(of("~/a/../../x", "deny").unwrap_err(), format!("{at}: `~/a/../../x` is not a path below the home without `..`"));
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
    let special =
        |value: &str, access: &str| managed(&format!(r#"[{{"path":{{"type":"special","value":{value}}},"access":"{access}"}}]"#));
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

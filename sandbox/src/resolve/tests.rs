use super::*;

fn machine() -> Machine {
    Machine { tmpdir: Some("/srv/tmp".into()), slash_tmp: true, minimal: vec!["/bin".into(), "/usr".into()] }
}

fn with(text: &str, cwd: Option<&str>) -> Result<Option<Policy>, String> {
    let sandbox = Sandbox::parse(text).unwrap();
    let cwd = cwd.map(|cwd| AbsolutePath::new(cwd).unwrap());
    resolve(&sandbox, cwd.as_ref(), &machine()).map_err(|error| error.to_string())
}

/// Entries and globs of a managed profile as text, one a word.
fn managed(entries: &str, beside: &str) -> Result<String, String> {
    let text = format!(
        r#"{{"permissions":{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":[{entries}]}}}},"windowsSandboxLevel":"disabled"{beside}}}"#
    );
    with(&text, None).map(|policy| show(policy.as_ref()))
}

fn show(policy: Option<&Policy>) -> String {
    let Some(policy) = policy else { return "none".to_owned() };
    let Some(grants) = policy.files.sets().next() else {
        return format!("unrestricted {:?}", policy.network);
    };
    let entries = grants.entries.iter().map(|grant| format!("{:?}:{}", grant.access, grant.path));
    let globs = grants.deny_globs.iter().map(|glob| format!("{}|{}", glob.base, glob.pattern));
    entries.chain(globs).collect::<Vec<_>>().join(" ")
}

fn special(kind: &str, access: &str) -> String {
    format!(r#"{{"path":{{"type":"special","value":{{"kind":"{kind}"}}}},"access":"{access}"}}"#)
}

fn path(path: &str, access: &str) -> String {
    format!(r#"{{"path":{{"type":"path","path":"{path}"}},"access":"{access}"}}"#)
}

fn glob(pattern: &str) -> String {
    format!(r#"{{"path":{{"type":"glob_pattern","pattern":"{pattern}"}},"access":"deny"}}"#)
}

const ROOTS: &str = r#","cwd":"file:///c","workspaceRoots":["file:///w","file:///v"]"#;

#[track_caller]
fn check(entries: &str, beside: &str, expect: Result<&str, &str>) {
    let got = managed(entries, beside);
    assert_eq!(got.as_deref().map_err(String::as_str), expect, "{entries}");
}

#[test]
fn special_entries() {
    check(&special("root", "read"), "", Ok("Read:/"));
    check(&special("minimal", "read"), "", Ok("Read:/bin Read:/usr"));
    check(&special("tmpdir", "write"), "", Ok("Write:/srv/tmp"));
    check(&special("slash_tmp", "write"), "", Ok("Write:/tmp"));
    check(&special("project_roots", "write"), ROOTS, Ok("Write:/v Write:/w"));
    check(&special("current_working_directory", "write"), ROOTS, Ok(""));
    check(&special("everything", "write"), ROOTS, Ok(""));
    let below = r#"{"path":{"type":"special","value":{"kind":"project_roots","subpath":"sub/x"}},"access":"read"}"#;
    check(below, ROOTS, Ok("Read:/v/sub/x Read:/w/sub/x"));
    check("", "", Ok(""));
}

#[test]
fn project_roots_come_from_workspace_roots_only() {
    check(&special("project_roots", "write"), r#","cwd":"file:///c""#, Ok(""));
    check(&special("project_roots", "write"), r#","cwd":"file:///c","workspaceRoots":[]"#, Ok(""));
}

#[test]
fn a_denial_never_comes_to_nothing() {
    let root = special("root", "read");
    let with_root = |entry: &str| format!("{root},{entry}");
    let cwd = "current_working_directory";
    check(&with_root(&special(cwd, "deny")), r#","cwd":"/c""#, Ok("Read:/ Deny:/c"));
    check(&with_root(&special(cwd, "deny")), "", Err("file system sandbox context with dynamic permissions requires cwd"));
    for kind in ["unknown", "minimall", "curent_working_directory"] {
        let text = format!(
            "special entry `{kind}` with access deny: is of a kind that this version does not know, so that it would deny nothing: name a path"
        );
        check(&with_root(&special(kind, "deny")), ROOTS, Err(&text));
    }
    let no_roots = "special entry `project_roots` with access deny: denies nothing: give workspaceRoots";
    let below = r#"{"path":{"type":"special","value":{"kind":"project_roots","subpath":"x"}},"access":"deny"}"#;
    for entry in [special("project_roots", "deny"), below.to_owned()] {
        check(&with_root(&entry), r#","cwd":"/c","workspaceRoots":[]"#, Err(no_roots));
    }
    check(&with_root(below), ROOTS, Ok("Read:/ Deny:/v/x Deny:/w/x"));
    let pattern = "codex-project-roots://*.env";
    let text = "deny glob `codex-project-roots://*.env`: denies nothing: give workspaceRoots";
    check(&with_root(&glob(pattern)), r#","cwd":"/c""#, Err(text));
    check(&with_root(&glob(pattern)), ROOTS, Ok("Read:/ /v|*.env /w|*.env"));
    // What this machine does not have cannot be reached on it.
    let sandbox = format!(
        r#"{{"permissions":{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":[{root},{}]}}}},"windowsSandboxLevel":"disabled"}}"#,
        ["tmpdir", "slash_tmp", "minimal"].map(|kind| special(kind, "deny")).join(",")
    );
    let bare = resolve(&Sandbox::parse(&sandbox).unwrap(), None, &Machine::default()).unwrap();
    assert_eq!(show(bare.as_ref()), "Read:/");
    check(
        &[root.clone(), special("tmpdir", "deny"), special("slash_tmp", "deny")].join(","),
        "",
        Ok("Read:/ Deny:/srv/tmp Deny:/tmp"),
    );
}

#[test]
fn a_process_cwd_can_be_denied() {
    let text = format!(
        r#"{{"permissions":{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":[{}]}}}},"windowsSandboxLevel":"disabled"}}"#,
        special("current_working_directory", "deny")
    );
    assert_eq!(with(&text, Some("/own")).map(|policy| show(policy.as_ref())).unwrap(), "Deny:/own");
}

#[test]
fn a_denial_keeps_everything_from_being_writable() {
    for denied in [special("current_working_directory", "deny"), path("/c", "deny"), path("/c", "none")] {
        check(&[special("root", "write"), denied].join(","), r#","cwd":"/c""#, Ok("Write:/ Deny:/c"));
    }
    check(&[special("root", "write"), special("root", "deny")].join(","), "", Ok("Deny:/"));
    check(&special("root", "write"), r#","cwd":"/c""#, Ok("unrestricted Restricted"));
}

#[test]
fn an_unknown_narrowing_of_writable_places_is_refused() {
    for kind in ["protected", "current_working_directory"] {
        let text = format!(
            "special entry `{kind}` with access read: grants nothing, and could not keep what other entries make writable from being changed: name a path"
        );
        for write in [path("/w", "write"), special("root", "write"), special("project_roots", "write")] {
            check(&[special(kind, "read"), write.clone()].join(","), ROOTS, Err(&text));
            check(&[write, special(kind, "read")].join(","), ROOTS, Err(&text));
        }
        // Nothing is writable: nothing is lost.
        check(&[special("root", "read"), special(kind, "read")].join(","), ROOTS, Ok("Read:/"));
        check(&[special("everything", "write"), special(kind, "read")].join(","), ROOTS, Ok(""));
    }
}

#[test]
fn dynamic_entries_need_a_cwd() {
    let text = "file system sandbox context with dynamic permissions requires cwd";
    for entry in [special("project_roots", "write"), glob("*.env"), glob("codex-project-roots://*.env")] {
        check(&entry, r#","workspaceRoots":["file:///w"]"#, Err(text));
    }
    check(&glob("/w/*.env"), "", Ok("/w|*.env"));
}

#[test]
fn a_plain_workspace_is_the_cwd() {
    let plain = r#"{"type":"workspace-write","excludeSlashTmp":true,"excludeTmpdirEnvVar":true}"#;
    assert_eq!(with(plain, Some("/c")).map(|policy| show(policy.as_ref())).unwrap(), "Read:/ Write:/c");
    assert_eq!(with(plain, None).unwrap_err(), PolicyError::CwdRequired.to_string());
    let own = r#"{"type":"workspace-write","excludeSlashTmp":true,"excludeTmpdirEnvVar":true,"cwd":"/own"}"#;
    assert_eq!(with(own, Some("/c")).map(|policy| show(policy.as_ref())).unwrap(), "Read:/ Write:/own");
}

#[test]
fn globs_are_split_where_their_pattern_starts() {
    for (pattern, expect) in [
        ("/w/**/*.env", "/w|**/*.env"),
        ("/w//./a/x", "/w/a|x"),
        ("*.env", "/c|*.env"),
        ("a/b/*.env/", "/c/a/b|*.env"),
        ("a/{b/c,d}/e", "/c/a|{b/c,d}/e"),
        ("codex-project-roots://k/*.pem", "/v/k|*.pem /w/k|*.pem"),
    ] {
        check(&glob(pattern), ROOTS, Ok(expect));
    }
    // A cwd with the letters of patterns in it is a place, not a pattern.
    check(&glob("*.env"), r#","cwd":"file:///c*%5B""#, Ok("/c*[|*.env"));
}

#[test]
fn a_home_is_what_the_request_says() {
    const HOME: &str = r#","userHomeDir":"file:///h""#;
    check(
        &[path("~/.ssh", "deny"), path("~", "read"), glob("~/**/*.pem")].join(","),
        HOME,
        Ok("Read:/h Deny:/h/.ssh /h|**/*.pem"),
    );
    for entry in [path("~/.ssh", "deny"), path("~/.ssh", "read")] {
        check(&entry, "", Err("policy path `~/.ssh`: is below the home: give userHomeDir"));
        let foreign = "policy path `~/.ssh`: 'file://host/h' is invalid on 'linux'";
        check(&entry, r#","userHomeDir":"file://host/h""#, Err(foreign));
    }
    check(&glob("~/*.pem"), "", Err("policy path `~/*.pem`: is below the home: give userHomeDir"));
    check(&glob("~"), HOME, Err("deny glob `~`: is empty"));
}

#[test]
fn temporary_directories_of_the_request_widen_nothing() {
    let own = r#","temporaryDirectories":["file:///etc"]"#;
    check(&special("tmpdir", "write"), own, Ok("Write:/srv/tmp"));
    check(&special("tmpdir", "write"), r#","temporaryDirectories":[]"#, Ok("Write:/srv/tmp"));
}

#[test]
fn nested_protection_goes_with_limits() {
    let plain = |kind: &str| with(&format!(r#"{{"type":"{kind}","protectNestedRepositories":true}}"#), Some("/c"));
    assert!(plain("workspace-write").unwrap().unwrap().protects_nested());
    assert!(!with(r#"{"type":"workspace-write"}"#, Some("/c")).unwrap().unwrap().protects_nested());
    for kind in ["danger-full-access", "external-sandbox"] {
        assert!(plain(kind).unwrap_err().contains("protects nothing"), "{kind}");
    }
    // Everything is writable, but for those names.
    check(&special("root", "write"), r#","protectNestedRepositories":true"#, Ok("Write:/"));
}

#[test]
fn paths_have_a_bound_each_and_together() {
    let root = |length: usize| format!(r#","cwd":"/c","workspaceRoots":["/{}"]"#, "r".repeat(length - 1));
    let below = |nth: usize| {
        format!(r#"{{"path":{{"type":"special","value":{{"kind":"project_roots","subpath":"s{nth:04}"}}}},"access":"read"}}"#)
    };
    // The longest that the system takes; one byte more is refused, as a root and below one.
    check(&special("project_roots", "read"), &root(4095), Ok(&format!("Read:/{}", "r".repeat(4094))));
    let longer = "has 4096 bytes, and the system takes paths of up to 4095";
    check(&special("project_roots", "read"), &root(4096), Err(&format!("workspace root: {longer}")));
    check(&below(0), &root(4090), Err(&format!("policy path: {longer}")));
    check(&path(&format!("/{}", "p".repeat(4095)), "read"), "", Err(&format!("policy path: {longer}")));
    check(&glob("a/b*"), &format!(r#","cwd":"/{}""#, "c".repeat(4093)), Err(&format!("policy path: {longer}")));
    // Many entries below a long root.
    let many = |count: usize| (0..count).map(below).collect::<Vec<_>>().join(",");
    let paths = |count: usize| managed(&many(count), &root(4000)).map(|shown| shown.split(' ').count());
    assert_eq!(paths(523), Ok(523));
    assert_eq!(paths(524).unwrap_err(), "policy with 2099144 bytes of paths: the bound is 2097152");
    assert_eq!(paths(8000).unwrap_err(), "policy with 8392570 bytes of paths: the bound is 8388608");
    // Many roots.
    let roots = |count: usize| format!(r#","cwd":"/c","workspaceRoots":[{}]"#, vec![r#""/r""#; count].join(","));
    check(&special("project_roots", "read"), &roots(8192), Ok("Read:/r"));
    check(&special("project_roots", "read"), &roots(8193), Err("policy with 8193 workspace roots: the bound is 8192"));
    let below_roots = glob("codex-project-roots://a*");
    let too_many = "policy with 2049 workspace roots below which one glob denies: the bound is 2048";
    check(&below_roots, &roots(2049), Err(too_many));
}

#[test]
fn what_is_skipped_is_said() {
    let skipping = |path: &str| format!(r#"{{"path":{path},"access":"deny","missing_path_behavior":"skip"}}"#);
    for path in [r#"{"type":"path","path":"/a"}"#, r#"{"type":"special","value":{"kind":"current_working_directory"}}"#] {
        let text = format!(
            r#"{{"permissions":{{"type":"managed","network":"restricted","file_system":{{"type":"restricted","entries":[{}]}}}},"windowsSandboxLevel":"disabled","cwd":"/c"}}"#,
            skipping(path)
        );
        let policy = with(&text, None).unwrap().unwrap();
        assert!(policy.files.sets().next().unwrap().entries[0].skip_missing, "{path}");
    }
}

#[test]
fn globs_that_would_match_nothing_are_refused() {
    for (pattern, expect) in [
        ("../*.env", "deny glob `../*.env`: holds `..`: write the place itself"),
        ("/", "deny glob `/`: is empty"),
        ("[", "deny glob `[`: unclosed character class; missing ']'"),
    ] {
        check(&glob(pattern), ROOTS, Err(expect));
    }
}

#[test]
fn foreign_paths_are_refused_wherever_they_stand() {
    check(&path("file://host/x", "read"), "", Err("policy path: 'file://host/x' is invalid on 'linux'"));
    check(&special("root", "read"), r#","cwd":"file:///C:/x""#, Err("sandbox cwd: 'file:///C:/x' is invalid on 'linux'"));
    let root = r#","cwd":"/c","workspaceRoots":["file://host/x"]"#;
    check(&special("root", "read"), root, Err("workspace root: 'file://host/x' is invalid on 'linux'"));
}

#[test]
fn where_nothing_is_asked_nothing_is_confined() {
    for (text, expect) in [
        (r#"{"type":"danger-full-access"}"#, "none"),
        (r#"{"type":"external-sandbox","network_access":"enabled"}"#, "none"),
        (r#"{"type":"external-sandbox"}"#, "unrestricted Restricted"),
    ] {
        assert_eq!(show(with(text, None).unwrap().as_ref()), expect, "{text}");
    }
    check(&special("root", "write"), "", Ok("unrestricted Restricted"));
    check(&[special("root", "write"), path("/a", "read")].join(","), "", Ok("Write:/ Read:/a"));
    check(&[special("root", "write"), glob("/a/*")].join(","), "", Ok("Write:/ /a|*"));
}

#[test]
fn a_relative_tmpdir_is_none() {
    assert_eq!(Machine::here(Some(OsStr::new("tmp"))).tmpdir, None);
    assert_eq!(Machine::here(Some(OsStr::new("/"))).tmpdir, Some("/".into()));
}

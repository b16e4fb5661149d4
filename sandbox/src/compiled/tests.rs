use super::*;
use crate::policy::{Access, DenyGlob, Files, Grant, Grants, Network, PROTECTED_NAMES};

mod properties;

fn absolute(path: &str) -> AbsolutePath {
    AbsolutePath::new(path).unwrap()
}

fn policy(entries: &[(&str, Access)], globs: &[(&str, &str)]) -> Policy {
    let entries = entries.iter().map(|(path, access)| Grant::new(absolute(path), *access)).collect();
    let globs = globs.iter().map(|(base, pattern)| DenyGlob { base: absolute(base), pattern: (*pattern).to_owned() });
    Policy { files: Files::Restricted(Grants::new(entries, globs.collect()).unwrap().into()), network: Network::Restricted }
}

fn restricted(grants: Grants) -> Policy {
    Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
}

fn nested(policy: &Policy) -> Policy {
    restricted(Grants { protect_nested: true, ..policy.files.sets().next().unwrap().clone() })
}

fn compile(policy: &Policy) -> Compiled {
    Compiled::new(policy, Resolved::same).unwrap()
}

/// Compiles a policy of which only some paths exist, and none through a link.
fn compile_where(policy: &Policy, exists: impl Fn(&str) -> bool) -> Compiled {
    let resolved = |path: &AbsolutePath| {
        if exists(path.as_path().to_str().unwrap()) {
            Resolved::same(path)
        } else {
            Resolved::Missing { path: path.as_path().to_owned(), links: Vec::new() }
        }
    };
    Compiled::new(policy, resolved).unwrap()
}

fn root_of<'a>(compiled: &'a Compiled, real: &str) -> Vec<&'a str> {
    compiled.roots_of(Path::new(real)).map(|root| root.to_str().unwrap()).collect()
}

#[track_caller]
fn check(compiled: &Compiled, rows: &[(&str, Verdict)]) {
    for (path, expect) in rows {
        assert_eq!(compiled.verdict(Path::new(path)), *expect, "{path}");
    }
}

use Access::{Deny, Read, Write};

#[test]
fn places_are_where_the_verdict_changes() {
    let compiled = compile(&policy(&[("/", Read), ("/w", Write), ("/w/ro", Read), ("/w/x", Write), ("/etc", Read)], &[]));
    let places: Vec<_> = compiled.places().iter().map(|place| (place.path.to_owned(), place.verdict)).collect();
    let mut expect = vec![("/", Verdict::Read), ("/w", Verdict::Write)];
    expect.extend(["/w/.agents", "/w/.aws", "/w/.codex", "/w/.git", "/w/ro"].map(|path| (path, Verdict::Protected)));
    expect.extend(["/w/x/.agents", "/w/x/.aws", "/w/x/.codex", "/w/x/.git"].map(|path| (path, Verdict::Protected)));
    assert_eq!(places, expect.into_iter().map(|(path, verdict)| (PathBuf::from(path), verdict)).collect::<Vec<_>>());
}

#[test]
fn the_longest_path_wins() {
    let compiled = compile(&policy(
        &[("/", Read), ("/w", Write), ("/w/ro", Read), ("/w/ro/rw", Write), ("/w/no", Deny), ("/w/no/yes", Read), ("/etc", Deny)],
        &[],
    ));
    check(
        &compiled,
        &[
            ("/", Verdict::Read),
            ("/usr/bin", Verdict::Read),
            ("/w", Verdict::Write),
            ("/w/a/b", Verdict::Write),
            ("/wx", Verdict::Read),
            ("/w/ro", Verdict::Protected),
            ("/w/ro/a", Verdict::Protected),
            ("/w/ro/rw/a", Verdict::Write),
            ("/w/no", Verdict::Denied),
            ("/w/no/a", Verdict::Denied),
            ("/w/no/yes/a", Verdict::Read),
            ("/etc/passwd", Verdict::Denied),
        ],
    );
    assert_eq!(root_of(&compiled, "/w/ro/rw/a"), ["/w/ro/rw"]);
    assert_eq!(root_of(&compiled, "/usr"), ["/"]);
}

#[test]
fn protected_names_at_the_top_of_every_writable_root() {
    let compiled =
        compile(&policy(&[("/w", Write), ("/g", Write), ("/g/.git", Write), ("/h", Write), ("/h/.git/hooks", Write)], &[]));
    for name in PROTECTED_NAMES {
        check(&compiled, &[(&format!("/w/{name}"), Verdict::Protected), (&format!("/w/{name}/a"), Verdict::Protected)]);
    }
    check(
        &compiled,
        &[
            ("/w/sub/.git", Verdict::Write),
            ("/w/.gitignore", Verdict::Write),
            ("/g/.git/config", Verdict::Write),
            ("/g/.git/.git", Verdict::Protected),
            ("/g/.codex", Verdict::Protected),
            ("/h/.git/config", Verdict::Protected),
            ("/h/.git/hooks/x", Verdict::Write),
        ],
    );
}

#[test]
fn another_spelling_of_a_protected_name_gains_nothing() {
    let mut compiled = compile(&policy(
        &[("/w", Write), ("/w/.git/hooks", Write), ("/w/.aws", Deny), ("/g", Write), ("/g/.git", Write), ("/r/.git", Write)],
        &[],
    ));
    let protected = ["/w/.GIT/config", "/w/git~1", "/w/.GIT/hooks/x", "/w/.Codex"];
    check(&compiled, &protected.map(|path| (path, Verdict::Protected)));
    check(&compiled, &["/w/sub/.GIT", "/g/.GIT"].map(|path| (path, Verdict::Write)));
    check(&compiled, &[("/w/.AWS/x", Verdict::Denied), ("/r/.GIT", Verdict::Unlisted)]);
    assert!(!compiled.is_visible(Path::new("/r/.GIT")) && compiled.is_visible(Path::new("/r/.git")));
    compiled = compile(&nested(&policy(&[("/w", Write)], &[])));
    check(&compiled, &[("/w/sub/.Git/x", Verdict::Protected)]);
}

#[test]
fn names_protected_at_any_depth() {
    let plain = policy(&[("/w", Write), ("/w/a/.git/hooks", Write), ("/w/b/.aws", Write), ("/r", Read)], &[]);
    let compiled = compile(&nested(&plain));
    check(
        &compiled,
        &[
            ("/w/sub/.git", Verdict::Protected),
            ("/w/sub/.git/hooks/x", Verdict::Protected),
            ("/w/a/.git/config", Verdict::Protected),
            ("/w/.codex/x", Verdict::Protected),
            // Lifted by an entry whose own path goes through the name, up to the next such name.
            ("/w/a/.git/hooks/x", Verdict::Write),
            ("/w/a/.git/hooks/.git", Verdict::Protected),
            ("/w/b/.aws/x", Verdict::Write),
            ("/w/b/.aws/d/.aws", Verdict::Protected),
            ("/w/sub/git", Verdict::Write),
            ("/r/sub/.git", Verdict::Read),
        ],
    );
    check(&compile(&plain), &[("/w/sub/.git/hooks/x", Verdict::Write), ("/w/b/.aws/d/.aws", Verdict::Write)]);
    for (path, expect) in [("/w/sub", true), ("/w/sub/.git", false), ("/r", false)] {
        assert_eq!(compiled.has_narrower_below(Path::new(path)), expect, "{path}");
    }
    // In one of two sets is enough, below what both make writable.
    let both = compile(&policy(&[("/w", Write), ("/r", Write)], &[]).bounded_by(&nested(&plain)).unwrap());
    check(&both, &[("/w/sub/.git", Verdict::Protected), ("/r/sub/.git", Verdict::Read), ("/w/sub/x", Verdict::Write)]);
}

#[test]
fn what_is_skipped_when_missing_says_nothing_until_it_exists() {
    let skip = |path: &str, access| Grant { skip_missing: true, ..Grant::new(absolute(path), access) };
    let entries = vec![Grant::new(absolute("/w"), Write), skip("/w/ro", Read), skip("/w/no", Deny), skip("/w/ws", Write)];
    let policy = restricted(Grants::new(entries, Vec::new()).unwrap());
    let with = |is_there: bool| compile_where(&policy, |path| is_there || path == "/w");
    check(&with(true), &[("/w/ro/a", Verdict::Protected), ("/w/no/a", Verdict::Denied)]);
    let missing = with(false);
    check(&missing, &[("/w/ro/a", Verdict::Write), ("/w/no/a", Verdict::Write), ("/w/ws/.git", Verdict::Protected)]);
    // A caller must see that the path came to exist, and that its parents are unchanged.
    assert_eq!(root_of(&missing, "/w/no/a"), ["/w", "/w/no"]);
    assert!(missing.places().iter().all(|place| place.path != Path::new("/w/no")));
}

#[test]
fn visible_is_what_can_be_read_or_leads_to_it() {
    let compiled = compile(&policy(&[("/a/b/c", Read), ("/a/no", Deny), ("/a/no/yes", Write)], &[("/a/b/c", "*.env")]));
    for (path, expect) in [
        ("/", true),
        ("/a", true),
        ("/a/b", true),
        ("/a/b/c/d", true),
        ("/a/x", false),
        ("/b", false),
        ("/a/no", true),
        ("/a/no/x", false),
        ("/a/no/yes/x", true),
        ("/a/b/c/x.env", false),
    ] {
        assert_eq!(compiled.is_visible(Path::new(path)), expect, "{path}");
    }
    check(&compiled, &[("/a", Verdict::Unlisted), ("/", Verdict::Unlisted)]);
}

#[test]
fn globs_win_over_everything_and_cover_what_is_below() {
    let compiled = compile(&policy(&[("/w", Write), ("/w/a.env", Write)], &[("/w", "**/*.env"), ("/w/s", "*"), ("/[x]", "y")]));
    check(
        &compiled,
        &[
            ("/w/a.env", Verdict::Denied),
            ("/w/deep/er/.env", Verdict::Denied),
            ("/w/d.env/below/it", Verdict::Denied),
            ("/w/env", Verdict::Write),
            ("/w/s", Verdict::Write),
            ("/w/s/a", Verdict::Denied),
            // A base is not a pattern.
            ("/x/y", Verdict::Unlisted),
            ("/[x]/y", Verdict::Denied),
        ],
    );
    let one_level = compile(&policy(&[("/", Read)], &[("/w", "*/k")]));
    check(&one_level, &[("/w/a/k", Verdict::Denied), ("/w/a/b/k", Verdict::Read), ("/w/k", Verdict::Read)]);
}

#[test]
fn narrower_below() {
    let compiled = compile(&policy(&[("/", Read), ("/w", Write), ("/w/a/b/no", Deny), ("/r/s", Read)], &[("/r/g", "*.env")]));
    for (path, expect) in [
        ("/", true),
        ("/w", true),
        ("/w/a", true),
        ("/w/a/b", true),
        ("/w/a/b/no", false),
        ("/w/.git", false),
        ("/w/x", false),
        ("/r/s", false),
        ("/r", true),
        ("/r/g", true),
        ("/r/g/x", true),
        ("/q", false),
    ] {
        assert_eq!(compiled.has_narrower_below(Path::new(path)), expect, "{path}");
    }
}

#[test]
fn links_count_by_name_and_by_target() {
    let policy = policy(&[("/a/ws", Write), ("/a/secret", Deny), ("/a/ro", Read), ("/bin", Read)], &[("/a/ws", "*.env")]);
    let real = |path: &str, links: &[&str]| Resolved::Real {
        path: PathBuf::from(path),
        links: links.iter().map(PathBuf::from).collect(),
    };
    // /a -> /b; /b/secret -> /b/ws/s; /b/ro -> /b/ws/r; /bin -> /usr/bin
    let compiled = Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
        "/a/ws" => real("/b/ws", &["/a"]),
        "/a/secret" => real("/b/ws/s", &["/a", "/b/secret"]),
        "/a/ro" => real("/b/ws/r", &["/a", "/b/ro"]),
        "/bin" => real("/usr/bin", &["/bin"]),
        other => panic!("{other}"),
    })
    .unwrap();
    check(
        &compiled,
        &[
            ("/b/ws/x", Verdict::Write),
            ("/b/ws/s", Verdict::Denied),
            ("/b/ws/r/x", Verdict::Protected),
            ("/b/secret", Verdict::Denied),
            ("/a/secret", Verdict::Denied),
            ("/usr/bin/sh", Verdict::Read),
            ("/b/ws/x.env", Verdict::Denied),
            ("/a/ws/x.env", Verdict::Denied),
            ("/a/ws/x", Verdict::Unlisted),
        ],
    );
    assert!(compiled.is_visible(Path::new("/a")) && compiled.is_visible(Path::new("/bin")));
    assert!(compiled.is_visible(Path::new("/b/ro")));
}

#[test]
fn missing_paths_grant_nothing_and_still_narrow() {
    let policy = policy(&[("/w", Write), ("/w/ro", Read), ("/w/no", Deny), ("/r", Read), ("/q", Write)], &[]);
    let compiled = compile_where(&policy, |path| path == "/w");
    check(
        &compiled,
        &[
            ("/w/ro/a", Verdict::Protected),
            ("/w/no/a", Verdict::Denied),
            ("/r/a", Verdict::Unlisted),
            ("/q/a", Verdict::Unlisted),
        ],
    );
    // The worker must see that it came to be.
    assert_eq!(root_of(&compiled, "/q/a"), ["/q"]);
    let refused = Compiled::new(&policy, |_| Resolved::Refused("is not usable".to_owned()));
    assert_eq!(refused.unwrap_err().to_string(), "policy path `/q`: is not usable");
}

#[test]
fn a_missing_writable_entry_keeps_its_protected_names() {
    let policy = policy(&[("/par", Write), ("/par/ws", Write), ("/par/.git/x", Write), ("/alone/ws", Write)], &[]);
    let there = |is_there: bool| compile_where(&policy, |path| is_there || path == "/par");
    for is_there in [true, false] {
        for name in PROTECTED_NAMES {
            check(
                &there(is_there),
                &[
                    (&format!("/par/ws/{name}"), Verdict::Protected),
                    (&format!("/par/ws/{name}/hooks"), Verdict::Protected),
                    (&format!("/par/{name}"), Verdict::Protected),
                    ("/par/ws/src", Verdict::Write),
                    (&format!("/par/other/{name}"), Verdict::Write),
                ],
            );
        }
        assert!(there(is_there).has_narrower_below(Path::new("/par/ws")));
    }
    // Alone it is as little as before, and so are its protected names.
    check(&there(false), &[("/alone/ws/.git", Verdict::Unlisted), ("/alone/ws/a", Verdict::Unlisted)]);
    check(&there(true), &[("/alone/ws/.git", Verdict::Protected)]);
}

#[test]
fn a_writable_entry_keeps_its_own_protected_names() {
    let policy = policy(&[("/", Write), ("/a/ws", Write)], &[]);
    let compiled = Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
        "/a/ws" => Resolved::Real { path: PathBuf::from("/b/ws"), links: vec![PathBuf::from("/a")] },
        _ => Resolved::same(path),
    })
    .unwrap();
    check(&compiled, &[("/b/ws/.git", Verdict::Protected), ("/a/ws/.git", Verdict::Protected), ("/a/ws/x", Verdict::Write)]);
}

#[test]
fn the_least_of_two_sets_counts() {
    let own = policy(&[("/", Read), ("/w", Write), ("/x", Write), ("/w/no", Deny)], &[("/w", "*.env")]);
    let ceiling = policy(&[("/", Read), ("/w", Write), ("/w/a/.git", Read), ("/etc/shadow", Deny), ("/w/ro", Read)], &[]);
    let compiled = compile(&own.bounded_by(&ceiling).unwrap());
    check(
        &compiled,
        &[
            ("/usr", Verdict::Read),
            ("/w/a", Verdict::Write),
            ("/w/no", Verdict::Denied),
            ("/w/b.env", Verdict::Denied),
            ("/w/.git", Verdict::Protected),
            ("/w/a/.git", Verdict::Protected),
            ("/w/ro/x", Verdict::Protected),
            // Writable below one only, its protected names are not special.
            ("/x/a", Verdict::Read),
            ("/x/.git", Verdict::Read),
            ("/etc/shadow", Verdict::Denied),
        ],
    );
    assert_eq!(root_of(&compiled, "/w/a"), ["/w", "/w"]);
    assert_eq!(root_of(&compiled, "/x/a"), ["/x", "/"]);
    let places: Vec<_> = compiled.places().iter().map(|place| place.path.to_str().unwrap()).collect();
    let names = ["/w", "/w/.agents", "/w/.aws", "/w/.codex", "/w/.git", "/w/a/.git", "/w/no", "/w/ro"];
    assert_eq!(places, [&["/", "/etc/shadow"], &names[..]].concat());
    assert!(compiled.has_narrower_below(Path::new("/w/a")));
}

#[test]
fn what_one_set_does_not_lead_to_is_not_visible() {
    let compiled = compile(&policy(&[("/a/b", Read)], &[]).bounded_by(&policy(&[("/a/c", Read)], &[])).unwrap());
    for (path, expect) in [("/a", true), ("/a/b", false), ("/a/c", false)] {
        assert_eq!(compiled.is_visible(Path::new(path)), expect, "{path}");
    }
}

#[test]
fn unrestricted_is_writable_everywhere() {
    let compiled = compile(&Policy { files: Files::Unrestricted, network: Network::Restricted });
    check(&compiled, &[("/", Verdict::Write), ("/a/.git", Verdict::Write)]);
    assert!(!compiled.has_narrower_below(Path::new("/")));
}

use super::*;
use crate::compiled::{Compiled, Verdict};
use crate::policy::{DenyGlob, Files, Network};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

fn open(entries: &[(&Path, Access)]) -> Result<Roots, EnforceError> {
    Roots::open(&policy(entries, &[]))
}

fn policy(entries: &[(&Path, Access)], globs: &[(&Path, &str)]) -> Policy {
    let grant = |(path, access): &(&Path, Access)| Grant::new(AbsolutePath::new(path).unwrap(), *access);
    let glob =
        |(base, pattern): &(&Path, &str)| DenyGlob { base: AbsolutePath::new(base).unwrap(), pattern: (*pattern).to_owned() };
    let grants = Grants::new(entries.iter().map(grant).collect(), globs.iter().map(glob).collect()).unwrap();
    Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
}

#[test]
fn links_are_followed_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::create_dir_all(top.join("real/sub")).unwrap();
    symlink("real", top.join("one")).unwrap();
    symlink("./one/../one", top.join("two")).unwrap();
    symlink(top.join("loop"), top.join("loop")).unwrap();
    symlink("nowhere/../x", top.join("dangling")).unwrap();

    let followed = follow(&top.join("two/sub")).unwrap();
    assert_eq!(followed.path, top.join("real/sub"));
    assert_eq!(followed.links, [top.join("two"), top.join("one"), top.join("one")]);
    assert!(followed.exists && !followed.is_link);
    assert!(follow(&top.join("two")).unwrap().is_link);
    let followed = follow(&top.join("one/later/on")).unwrap();
    assert_eq!((followed.path, followed.exists), (top.join("real/later/on"), false));
    assert!(!follow(&top.join("loop/x")).unwrap().exists);
    assert!(!follow(&top.join("dangling")).unwrap().exists);
}

#[test]
fn no_path_of_a_policy_leads_through_a_process() {
    let own = format!("/proc/{}/cwd", std::process::id());
    for name in ["/proc/self/cwd", "/proc/thread-self/root/etc", "/proc/self", own.as_str(), "/proc/1/exe"] {
        let roots = open(&[(Path::new(name), Access::Write)]).unwrap();
        assert_eq!(roots.all()[0].real, Path::new(name), "where its links lead is not told");
        assert!(roots.all()[0].descriptor.is_none(), "{name}");
    }
    // The control.
    assert!(open(&[(Path::new("/proc/sys"), Access::Read)]).unwrap().all()[0].descriptor.is_some());
}

#[test]
fn a_root_that_another_set_hides_tells_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::create_dir_all(top.join("hidden/directory")).unwrap();
    symlink(top.join("target"), top.join("hidden/link")).unwrap();
    symlink(top.join("nowhere"), top.join("hidden/dangling")).unwrap();
    symlink(top.join("hidden/link"), top.join("outside")).unwrap();
    let ceiling = policy(&[(&top, Access::Write), (&top.join("hidden"), Access::Deny)], &[]);
    for name in ["hidden/absent", "hidden/directory", "hidden/link", "hidden/dangling", "outside"] {
        let own = policy(&[(&top.join(name), Access::Write)], &[]);
        let roots = Roots::open(&own.clone().bounded_by(&ceiling).unwrap()).unwrap();
        let root = roots.all().iter().find(|root| root.real == top.join(name)).unwrap();
        assert!(root.descriptor.is_none(), "{name}");
        // The control: without the other set the link is named.
        let is_link = name.ends_with("link") || name.ends_with("dangling") || name == "outside";
        assert_eq!(matches!(Roots::open(&own), Err(EnforceError::LinkedRoot { .. })), is_link, "{name}");
    }
}

/// A workspace, and directories with links that lead into it one after the other.
fn linked_workspace() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    for name in ["ws/a/b/.git", "ws/a/.git", "one", "two", "three"] {
        fs::create_dir_all(top.join(name)).unwrap();
    }
    symlink(top.join("two/second"), top.join("one/first")).unwrap();
    symlink("../three/third", top.join("two/second")).unwrap();
    symlink(top.join("ws"), top.join("three/third")).unwrap();
    symlink("a", top.join("ws/inner")).unwrap();
    (directory, top)
}

#[test]
fn hiding_a_link_lifts_nothing_that_another_set_narrows() {
    let (_directory, top) = linked_workspace();
    let at = |name: &str| top.join(name);
    let ws = at("ws");
    let entries = [(top.as_path(), Access::Read), (ws.as_path(), Access::Write)];
    let skipped = |path: PathBuf| {
        let mut grants = policy(&entries, &[]).files.sets().next().unwrap().clone();
        let more = Grant { path: AbsolutePath::new(path).unwrap(), access: Access::Read, skip_missing: true };
        grants = Grants::new([grants.entries, vec![more]].concat(), Vec::new()).unwrap();
        Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
    };
    let with = |path: PathBuf, access| policy(&[&entries[..], &[(path.as_path(), access)]].concat(), &[]);
    let rows = [
        (with(at("one/first/a"), Access::Read), ["ws/a", "ws/a/b/f", "ws/a/.git/config"]),
        (with(at("one/first/inner"), Access::Read), ["ws/a", "ws/a/b/f", "ws/a/.git/config"]),
        (with(at("one/first/a"), Access::Write), ["ws/a/.git", "ws/a/.git/config", "ws/a/.codex"]),
        (with(at("one/first/a/later"), Access::Read), ["ws/a/later", "ws/a/later/f", "ws/.git"]),
        (skipped(at("one/first/a")), ["ws/a", "ws/a/b/f", "ws/a/.git/config"]),
        (policy(&entries, &[(&at("one/first/a"), "*.env")]), ["ws/a/x.env", "ws/a/x.env/f", "ws/.git"]),
    ];
    let whole = policy(&entries, &[]);
    for (ceiling, narrowed) in &rows {
        for hidden in [&["one"][..], &["two"], &["three"], &["one", "two", "three"]] {
            let denials: Vec<_> = hidden.iter().map(|name| at(name)).collect();
            let denied: Vec<_> = denials.iter().map(|path| (path.as_path(), Access::Deny)).collect();
            let hiding = policy(&[&entries[..], &denied[..]].concat(), &[]);
            for both in [hiding.clone().bounded_by(ceiling), ceiling.clone().bounded_by(&hiding)] {
                let both = compile(&both.unwrap());
                for name in narrowed {
                    assert!(both.verdict(&at(name)).rank() < Verdict::Write.rank(), "{name}, {hidden:?}, {ceiling:?}");
                }
                // The controls: beside it nothing is taken away, and without the hidden path nothing at all.
                assert_eq!(both.verdict(&at("ws/beside")), Verdict::Write);
            }
        }
        let is_free = |name: &&str| compile(&whole).verdict(&at(name)) == Verdict::Write;
        assert!(narrowed.iter().any(is_free), "{ceiling:?}");
    }
}

#[test]
fn a_skipped_entry_that_exists_narrows_whatever_hides_it() {
    let (_directory, top) = linked_workspace();
    let (ws, place) = (top.join("ws"), top.join("ws/a"));
    let below = place.join("b");
    let own = policy(&[(&top, Access::Read), (&ws, Access::Deny), (&below, Access::Write)], &[]);
    for (is_skipped, is_there) in [(true, true), (false, true), (false, false), (true, false)] {
        let path = if is_there { place.clone() } else { ws.join("missing") };
        let entry = Grant { path: AbsolutePath::new(path).unwrap(), access: Access::Read, skip_missing: is_skipped };
        let wide = policy(&[(&top, Access::Read), (&ws, Access::Write)], &[]).files.sets().next().unwrap().clone();
        let grants = Grants::new([wide.entries, vec![entry]].concat(), Vec::new()).unwrap();
        let ceiling = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
        let both = compile(&own.clone().bounded_by(&ceiling).unwrap());
        // The control: what is missing takes nothing away here.
        assert_eq!(both.verdict(&below.join("f")) == Verdict::Write, !is_there, "{is_skipped}, {is_there}");
    }
}

#[test]
fn a_hidden_entry_grants_nothing_and_names_nothing() {
    let (_directory, top) = linked_workspace();
    let (ws, linked) = (top.join("ws"), top.join("one/first/a"));
    let hiding = policy(&[(&top, Access::Read), (&ws, Access::Write), (&top.join("two"), Access::Deny)], &[]);
    let reading = policy(&[(&top, Access::Read), (&linked, Access::Write)], &[]);
    // The control: shown, it is granted.
    assert_eq!(compile(&reading).verdict(&ws.join("a/b")), Verdict::Write);
    let both = reading.bounded_by(&hiding).unwrap();
    assert_eq!(compile(&both).verdict(&ws.join("a/b")), Verdict::Read);
    let roots = Roots::open(&both).unwrap();
    assert!(
        roots.all().iter().filter(|root| root.access == Access::Write && root.set == 0).all(|root| root.descriptor.is_none())
    );
    // A link that can be turned is refused by the entry's own words alone.
    let turned = policy(&[(&top, Access::Read), (&ws, Access::Write), (&top.join("one/first/inner"), Access::Read)], &[]);
    for (policy, is_told) in [(turned.clone(), true), (turned.bounded_by(&hiding).unwrap(), false)] {
        let roots = Roots::open(&policy).unwrap();
        let refused = roots.refuse_turnable(&compile(&policy)).unwrap_err().to_string();
        assert!(refused.contains("one/first/inner`"), "{refused}");
        assert_eq!(refused.contains("/ws/a`"), is_told, "{refused}");
    }
}

#[test]
fn a_writable_root_behind_a_link_in_another_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    for name in ["w", "build/out", "w/own/out"] {
        fs::create_dir_all(top.join(name)).unwrap();
    }
    symlink(top.join("build"), top.join("w/l")).unwrap();
    symlink("own", top.join("w/inner")).unwrap();
    symlink("w", top.join("alias")).unwrap();
    let (w, steered, inner) = (top.join("w"), top.join("w/l/out"), top.join("w/inner/out"));
    for entry in [&steered, &inner] {
        let refused = open(&[(&w, Access::Write), (entry, Access::Write)]);
        assert!(matches!(refused, Err(EnforceError::SteeredRoot { .. })), "{refused:?}");
    }
    // The controls: no confined process may change these links.
    assert!(open(&[(&w, Access::Read), (&steered, Access::Write)]).is_ok());
    assert!(open(&[(&w, Access::Write), (&steered, Access::Read)]).is_ok());
    assert!(open(&[(&w, Access::Write), (&top.join("alias/own"), Access::Write)]).is_ok());
}

#[test]
fn no_entry_leads_through_a_link_to_the_servers_own_places() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    for name in ["ws", "state/own", "bin"] {
        fs::create_dir_all(top.join(name)).unwrap();
    }
    fs::write(top.join("state/own/token"), "secret").unwrap();
    fs::write(top.join("bin/program"), "").unwrap();
    for (link, to) in [("ws/file", "state/own/token"), ("ws/own", "state/own"), ("ws/state", "state"), ("ws/bin", "bin")] {
        symlink(top.join(to), top.join(link)).unwrap();
    }
    let [hidden, kept] = ["state/own", "bin/program"].map(|name| AbsolutePath::new(top.join(name)).unwrap());
    let whole = [(top.as_path(), Access::Read)];
    let open_with = |name: &str, access: Access, is_guarded: bool| {
        let entry = top.join(name);
        let policy = policy(&[&whole[..], &[(&entry, access)]].concat(), &[]);
        Roots::open(&if is_guarded { policy.hiding(&hidden).keeping(&kept) } else { policy })
    };
    for (name, access) in [
        ("ws/file", Access::Read),
        ("ws/own", Access::Read),
        ("ws/own/token", Access::Read),
        ("ws/own/missing", Access::Write),
        ("ws/state/own/token", Access::Write),
        ("ws/bin/program", Access::Write),
        ("ws/bin/program/below", Access::Write),
    ] {
        let refused = open_with(name, access, true);
        assert!(matches!(refused, Err(EnforceError::OwnPlace { .. })), "{name}: {refused:?}");
        // The control.
        open_with(name, access, false).unwrap();
    }
    // A directory above a hidden place may be named in any way: the longer path of the place decides.
    for (name, access) in
        [("ws/state", Access::Read), ("state", Access::Write), ("ws/bin/program", Access::Read), ("ws/own", Access::Deny)]
    {
        let guarded = open_with(name, access, true);
        assert!(guarded.is_ok(), "{name}: {guarded:?}");
    }
    // Above a file that is only kept there is no such path, unless an entry makes it writable by its name.
    let steered = policy(&[&whole[..], &[(&top.join("bin"), Access::Write)]].concat(), &[]).keeping(&kept);
    assert!(Roots::open(&steered).is_ok(), "a name without a link is kept by its own entry");
    symlink(&top, top.join("ws/top")).unwrap();
    let steered = policy(&[&whole[..], &[(&top.join("ws/top/bin"), Access::Write)]].concat(), &[]);
    assert!(Roots::open(&steered).is_ok());
    assert!(matches!(Roots::open(&steered.keeping(&kept)), Err(EnforceError::OwnPlace { .. })));
}

#[test]
fn names_that_links_multiply_have_a_bound() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::create_dir(top.join("a")).unwrap();
    // Each link leads to the one before it, through 700 more names that are looked at.
    symlink("a", top.join("l0")).unwrap();
    for nth in 1..=20 {
        symlink(format!("{}l{}", "a/../".repeat(700), nth - 1), top.join(format!("l{nth}"))).unwrap();
    }
    let followed = follow(&top.join("l3")).unwrap();
    assert_eq!((followed.path, followed.exists), (top.join("a"), true), "the control");
    assert_eq!(follow(&top.join("l20")), Err(Errno::LOOP));
}

#[test]
fn roots_know_what_they_opened() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::create_dir(top.join("real")).unwrap();
    symlink("real", top.join("link")).unwrap();
    let (link, missing) = (top.join("link"), top.join("missing"));
    let roots = open(&[(&link, Access::Read), (&missing, Access::Write)]).unwrap();
    let metadata = fs::metadata(&link).unwrap();
    let identity = Identity { device: metadata.dev(), inode: metadata.ino() };
    assert_eq!(roots.identity(&top.join("real")), Some(identity));
    assert_eq!(roots.identity(&missing), None);
    let named = |path: &Path| roots.resolve(&AbsolutePath::new(path).unwrap());
    assert_eq!(named(&missing), Resolved::Missing { path: missing.clone(), links: Vec::new() });
    assert_eq!(named(&link), Resolved::Real { path: top.join("real"), links: vec![link.clone()] });
    assert!(matches!(named(&top), Resolved::Refused(_)));
    assert!(matches!(open(&[(&link, Access::Write)]), Err(EnforceError::LinkedRoot { .. })));
}

fn compile(policy: &Policy) -> Compiled {
    let roots = Roots::open(policy).unwrap();
    Compiled::new(policy, |path| roots.resolve(path)).unwrap()
}

#[test]
fn a_link_in_one_set_leads_to_nothing_that_the_other_denies() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    let (secret, open, link) = (top.join("secret"), top.join("open"), top.join("open/link"));
    fs::create_dir_all(secret.join("sub")).unwrap();
    fs::create_dir(&open).unwrap();
    symlink("../secret", &link).unwrap();
    let own = policy(&[(&link, Access::Read), (&open, Access::Read)], &[]);
    let denying = policy(&[(&top, Access::Write), (&secret, Access::Deny)], &[]);
    let matching = policy(&[(&top, Access::Write)], &[(&top, "s*t")]);
    let unlisted = policy(&[(&open, Access::Write)], &[]);
    // The control: the link leads there, and by itself grants it.
    assert_eq!(compile(&own).verdict(&secret.join("sub")), Verdict::Read);
    for (ceiling, expect) in [(denying, Verdict::Denied), (matching, Verdict::Denied), (unlisted, Verdict::Unlisted)] {
        let both = compile(&own.clone().bounded_by(&ceiling).unwrap());
        assert_eq!(both.verdict(&secret.join("sub")), expect);
        assert_eq!(both.verdict(&open.join("other")), Verdict::Read);
    }
}

#[test]
fn a_path_in_both_sets_must_be_one_place() {
    let mut roots = Roots { all: Vec::new(), resolved: HashMap::new(), raised_limit: None };
    let named = AbsolutePath::new("/a").unwrap();
    roots.remember(&named, Resolved::same(&named)).unwrap();
    roots.remember(&named, Resolved::same(&named)).unwrap();
    let elsewhere = Resolved::Real { path: "/b".into(), links: vec!["/a".into()] };
    assert!(matches!(roots.remember(&named, elsewhere), Err(EnforceError::Root { .. })));
}

const NAMES: [&str; 5] = ["a", "b", "c", ".git", "x.env"];

fn any_path() -> impl Strategy<Value = PathBuf> {
    prop::collection::vec(prop::sample::select(NAMES.to_vec()), 0..4).prop_map(|names| names.iter().collect())
}

/// Entries and globs.
type Said = (Vec<(PathBuf, Access)>, Vec<(PathBuf, &'static str)>);

fn anything_said() -> impl Strategy<Value = Said> {
    let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Deny]);
    let pattern = prop::sample::select(vec!["*.env", "**/b", "a/*"]);
    (prop::collection::vec((any_path(), access), 0..6), prop::collection::vec((any_path(), pattern), 0..2))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Directories, files and links made at random, and two policies whose paths lead through them.
    #[test]
    fn whatever_the_links_the_ceiling_holds(
        directories in prop::collection::vec(any_path(), 0..5), links in prop::collection::vec((any_path(), any_path()), 0..4),
        own in anything_said(), ceiling in anything_said(), paths in prop::collection::vec(any_path(), 1..20),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        // A path that is in the way of another is left out.
        directories.iter().for_each(|path| drop(fs::create_dir_all(top.join(path))));
        links.iter().for_each(|(link, target)| drop(symlink(top.join(target), top.join(link))));
        let at_top = |said: &Said| {
            let entries: Vec<_> = said.0.iter().map(|(path, access)| (top.join(path), *access)).collect();
            let globs: Vec<_> = said.1.iter().map(|(base, pattern)| (top.join(base), *pattern)).collect();
            policy(
                &entries.iter().map(|(path, access)| (path.as_path(), *access)).collect::<Vec<_>>(),
                &globs.iter().map(|(base, pattern)| (base.as_path(), *pattern)).collect::<Vec<_>>(),
            )
        };
        let (own, ceiling) = (at_top(&own), at_top(&ceiling));
        let both = own.clone().bounded_by(&ceiling).unwrap();
        // A denial of one set reveals nothing to the other, not even that the path would be refused.
        let denies = |policy: &Policy| policy.files.sets().any(|set| set.entries.iter().any(|it| it.access == Access::Deny));
        let hides = denies(&own) || denies(&ceiling);
        if Roots::open(&own).is_err() || Roots::open(&ceiling).is_err() {
            prop_assert!(hides || Roots::open(&both).is_err());
            return Ok(());
        }
        let (both, own, ceiling) = (compile(&both), compile(&own), compile(&ceiling));
        for path in &paths {
            let real = follow(&top.join(path)).unwrap().path;
            let rank = |compiled: &Compiled| compiled.verdict(&real).rank();
            let least = rank(&own).min(rank(&ceiling));
            prop_assert!(rank(&both) == least || hides && rank(&both) < least, "{}", real.display());
        }
    }
}

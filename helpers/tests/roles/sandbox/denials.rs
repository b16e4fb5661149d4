//! Denied and ungranted places in the view of a process.

use super::*;
use portcullis_protocol::denial::{Layer, Wanted};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{DenyGlob, Files, Grants, Network};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;

pub(super) fn a_place_that_its_owner_could_open_again_is_refused() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let locked = place.workspace.join("locked");
    fs::create_dir(&locked).unwrap();
    fs::write(locked.join("secret"), "content").unwrap();
    fs::set_permissions(&locked, Permissions::from_mode(0o000)).unwrap();
    let secret = locked.join("secret");
    let denying = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&secret, Access::Deny)]);
    let open = place.in_workspace("chmod 700 locked && cat locked/secret");
    // Root's capabilities reach it, so that it is covered; an ordinary user's init has those only for its own group.
    spawner.newest += 1;
    let id = spawner.newest;
    let (mut stdout, _stderr) = spawner.start_process(id, &open, Some(&denying));
    match spawner.event() {
        SpawnerEvent::StartFailed { failure, .. } => assert!(failure.attempt.contains("chmod u+rwx"), "{failure:?}"),
        SpawnerEvent::Started { .. } => assert!(matches!(spawner.event(), SpawnerEvent::Exited { .. })),
        other => panic!("{other:?}"),
    }
    let mut text = String::new();
    stdout.read_to_string(&mut text).unwrap();
    assert!(!text.contains("content"), "{text}");
    // The control.
    assert_eq!(spawner.run(&open, Some(&place.policy())).0.stdout, "content");
    spawner.close();
}

pub(super) fn denied_places_and_globs_are_covered() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    for directory in ["no", "no/yes", "deep/er", "deep/dir.env"] {
        fs::create_dir_all(place.workspace.join(directory)).unwrap();
    }
    for file in ["no/secret", "no/yes/file", "a.env", "deep/er/b.env", "deep/dir.env/c", "deep/plain"] {
        fs::write(place.workspace.join(file), "content").unwrap();
    }
    let Policy { files, .. } = policy(&[
        (Path::new("/"), Access::Read),
        (&place.workspace, Access::Write),
        (&place.workspace.join("no"), Access::Deny),
        (&place.workspace.join("no/yes"), Access::Read),
        (&place.outside.join("file"), Access::Deny),
    ]);
    let entries = files.sets().next().unwrap().entries.clone();
    let glob = DenyGlob { base: AbsolutePath::new(&place.workspace).unwrap(), pattern: "**/*.env".to_owned() };
    let denying =
        Policy { files: Files::Restricted(Grants::new(entries, vec![glob]).unwrap().into()), network: Network::Restricted };
    for file in ["no/secret", "a.env", "deep/er/b.env", "deep/dir.env/c", "../out/file", "/proc/self/root/$PWD/a.env"] {
        let (outcome, _) = spawner.run(&place.in_workspace(&format!("cat {file}")), Some(&denying));
        assert_ne!(outcome.status, ExitStatus::Code(0), "{file}: {}", said(&outcome));
        assert!(!outcome.stdout.contains("content"), "{file}");
        // The control: without the denials.
        let (outcome, _) = spawner.run(&place.in_workspace(&format!("cat {file}")), Some(&place.policy()));
        assert_eq!(outcome.stdout, "content", "{file}: {}", said(&outcome));
    }
    for act in ["ln -f a.env l && cat l", "mv no n", "rm -f a.env", "chmod 777 no && ls no", "ls deep/dir.env"] {
        let (outcome, _) = spawner.run(&place.in_workspace(act), Some(&denying));
        assert_ne!(outcome.status, ExitStatus::Code(0), "{act}: {}", said(&outcome));
    }
    let (outcome, _) = spawner.run(&place.in_workspace("cat no/yes/file deep/plain && mv deep/plain deep/p"), Some(&denying));
    assert_eq!(outcome.stdout, "contentcontent", "{}", said(&outcome));
    spawner.close();
}

pub(super) fn no_sandbox_can_prepare_the_next_one() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    for directory in ["a/b", "closed", "odd"] {
        fs::create_dir_all(place.workspace.join(directory)).unwrap();
    }
    for file in ["a/b/secret", "closed/x.env", "c.env"] {
        fs::write(place.workspace.join(file), "content").unwrap();
    }
    let odd = std::ffi::OsString::from_vec(b"odd/\xff.env".to_vec());
    fs::write(place.workspace.join(odd), "content").unwrap();
    let entries = [
        (Path::new("/"), Access::Read),
        (place.workspace.as_path(), Access::Write),
        (&place.workspace.join("a/b/secret"), Access::Deny),
    ];
    let denying = |globs: &[&str]| {
        let base = AbsolutePath::new(&place.workspace).unwrap();
        let globs = globs.iter().map(|glob| DenyGlob { base: base.clone(), pattern: (*glob).to_owned() }).collect();
        let entries = policy(&entries).files.sets().next().unwrap().entries.clone();
        Policy { files: Files::Restricted(Grants::new(entries, globs).unwrap().into()), network: Network::Restricted }
    };
    let denying = denying(&["**/*.env"]);
    // Each tries to put something out of the policy's reach, and the next looks for it.
    for (prepare, look) in [
        ("mv a x", "cat x/b/secret"),
        ("mv a/b x", "cat x/secret"),
        ("chmod 000 closed", "chmod 700 closed; cat closed/x.env"),
        ("chmod 444 closed", "chmod 700 closed; cat closed/x.env"),
        ("chmod 311 closed", "chmod 700 closed; cat closed/x.env"),
        ("mv odd o", "cat o/*"),
        ("mv c.env c", "cat c"),
    ] {
        spawner.run(&place.in_workspace(prepare), Some(&denying));
        let (outcome, _) = spawner.run(&place.in_workspace(look), Some(&denying));
        assert!(!outcome.stdout.contains("content"), "{prepare}: {}", said(&outcome));
    }
    // Deeper than any path can say.
    let walk = |act: &str| {
        let python = format!(
            "import os\nfor _ in range(25):\n os.path.isdir('{0}') or os.mkdir('{0}')\n os.chdir('{0}')\n{act}",
            "d".repeat(200)
        );
        place.in_workspace(&format!("python3 -c \"{python}\""))
    };
    let (outcome, _) = spawner.run(&walk("open('x.env', 'w').write('content')"), Some(&denying));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    let look = walk("print(open('x.env').read())");
    let (outcome, _) = spawner.run(&look, Some(&denying));
    assert!(!outcome.stdout.contains("content"), "{}", said(&outcome));
    assert_eq!(spawner.run(&look, Some(&place.policy())).0.stdout, "content\n", "the control");
    // The control: without the denials the same gets there.
    let (outcome, _) = spawner
        .run(&place.in_workspace("rm -rf x; mv a x; cat x/b/secret; chmod 700 closed; cat closed/x.env"), Some(&place.policy()));
    assert_eq!(outcome.stdout, "contentcontent", "{}", said(&outcome));
    spawner.close();
}

pub(super) fn a_nested_link_lifts_no_denial_beside_it() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    fs::create_dir(place.workspace.join("sub")).unwrap();
    fs::write(place.workspace.join("sub/x.env"), "content").unwrap();
    let entries = place.policy().files.sets().next().unwrap().entries.clone();
    let glob = DenyGlob { base: AbsolutePath::new(&place.workspace).unwrap(), pattern: "**/*.env".to_owned() };
    let grants = Grants { protect_nested: true, ..Grants::new(entries, vec![glob]).unwrap() };
    let denying = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
    spawner.run(&place.in_workspace("ln -s /tmp sub/.git"), Some(&denying));
    assert!(place.workspace.join("sub/.git").is_symlink());
    let (outcome, _) = spawner.run(&place.in_workspace("cat sub/x.env; touch sub/new; rm sub/.git"), Some(&denying));
    assert_eq!(outcome.stdout, "", "{}", said(&outcome));
    assert!(place.workspace.join("sub/.git").is_symlink() && !place.workspace.join("sub/new").exists(), "{}", said(&outcome));
    // The control.
    let (outcome, _) = spawner.run(&place.in_workspace("cat sub/x.env; rm sub/.git"), Some(&place.policy()));
    assert_eq!(outcome.stdout, "content", "{}", said(&outcome));
    assert!(!place.workspace.join("sub/.git").is_symlink());
    spawner.close();
}

pub(super) fn a_link_that_a_process_could_turn_is_no_part_of_its_policy() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    fs::write(place.workspace.join("secret"), "content").unwrap();
    let link = place.workspace.join("link");
    std::os::unix::fs::symlink("secret", &link).unwrap();
    for access in [Access::Deny, Access::Read] {
        let policy = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&link, access)]);
        let failure = spawner.fail(&place.in_workspace("true"), Some(&policy));
        assert!(failure.attempt.contains("a link on its way lies where the process may write"), "{failure:?}");
    }
    // The control: a link that it cannot turn.
    let other = place.outside.join("link");
    std::os::unix::fs::symlink("file", &other).unwrap();
    let policy = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&other, Access::Deny)]);
    let (outcome, _) = spawner.run(&place.in_workspace("cat ../out/link ../out/file || echo denied"), Some(&policy));
    assert_eq!(outcome.stdout, "denied\n", "{}", said(&outcome));
    spawner.close();
}

pub(super) fn what_is_not_granted_is_not_there() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let system = ["/bin", "/usr", "/lib", "/lib64", "/etc/passwd"].map(Path::new).into_iter().filter(|path| path.exists());
    let entries: Vec<_> = system.map(|path| (path, Access::Read)).chain([(place.workspace.as_path(), Access::Write)]).collect();
    let narrow = policy(&entries);
    let (outcome, enforced) = spawner.run(&place.in_workspace("cat file && echo x > new && ls /etc && ls /"), Some(&narrow));
    assert!(outcome.stdout.starts_with("contentpasswd\n"), "{}", said(&outcome));
    assert!(!outcome.stdout.contains("home") && enforced.namespaces.contains(&"mount".to_owned()), "{}", said(&outcome));
    for act in [
        format!("ls {}", place.outside.display()),
        "cat /etc/hostname".to_owned(),
        "touch /x".to_owned(),
        "mkdir /etc/x".to_owned(),
    ] {
        let (outcome, _) = spawner.run(&place.in_workspace(&act), Some(&narrow));
        assert_ne!(outcome.status, ExitStatus::Code(0), "{act}: {}", said(&outcome));
    }
    let (outcome, _) = spawner.run(&place.in_workspace(&format!("ls {}", place.outside.display())), Some(&place.policy()));
    assert_eq!(outcome.stdout, "file\n", "the control");
    // Without the machine's tree the processes are the sandbox's own, too, wherever they are with it.
    let own = "read pid rest < /proc/self/stat && test $pid = $$ || exit 3";
    let with_tree = spawner.run(&place.in_workspace(own), Some(&place.policy())).0.status;
    assert_eq!(spawner.run(&place.in_workspace(own), Some(&narrow)).0.status, with_tree);
    spawner.close();
}

pub(super) fn changes_that_are_refused_are_seen() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let outside = place.outside.display();
    let script = format!(
        "echo x > {outside}/file; mkdir {outside}/d; mv file {outside}/m; rm .git/x; cat {outside}/file >/dev/null; echo y > made"
    );
    let (outcome, enforced, denials) = spawner.run_and_see(&place.in_workspace(&script), Some(&place.policy()));
    assert!(enforced.observed && outcome.status == ExitStatus::Code(0), "{}", said(&outcome));
    let paths: Vec<_> = denials.list.iter().map(|denial| denial.path.clone()).collect();
    assert_eq!(paths, ["file", "d", "m"].map(|name| format!("{outside}/{name}")));
    for denial in &denials.list {
        assert_eq!((denial.access, denial.layer, denial.rule.as_str()), (Wanted::Write, Layer::Mounts, "entry `read /`"));
        // What does not exist is not made writable by an entry of its own.
        let granted = if denial.path.ends_with("/file") { denial.path.clone() } else { outside.to_string() };
        assert_eq!(denial.grant.as_ref().unwrap().path.path, format!("file://{granted}"));
    }
    // The control: where everything is granted, nothing is seen.
    let both = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&place.outside, Access::Write)]);
    let (_, _, denials) =
        spawner.run_and_see(&place.in_workspace(&format!("echo x > {outside}/file; echo y > made")), Some(&both));
    assert!(denials.is_empty(), "{denials:?}");
    spawner.close();
}

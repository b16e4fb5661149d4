//! Nested repositories that a confined process made for the next one: they keep no start from succeeding, take no more than themselves
//! and what they name, and tell nothing of what the policy hides.

use super::gateway::{Outcome, Spawner, Worker, policy, shell};
use super::place::Place;
use crate::Test;
use portcullis_protocol::helper::ExitStatus;
use portcullis_sandbox::policy::{Access, Files, Grants, Network, Policy};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

pub(crate) const TESTS: &[Test] = &[
    ("nested::a_nested_git_file_fails_no_later_start", a_nested_git_file_fails_no_later_start),
    ("nested::a_nested_pointer_protects_a_repository_beside_it", a_nested_pointer_protects_a_repository_beside_it),
    ("nested::a_pointer_tells_nothing_of_hidden_places", a_pointer_tells_nothing_of_hidden_places),
    ("nested::file_calls_tell_nothing_of_where_a_pointer_leads", file_calls_tell_nothing_of_where_a_pointer_leads),
    ("nested::an_operators_pointer_is_followed_where_it_is_hidden", an_operators_pointer_is_followed_where_it_is_hidden),
    (
        "nested::repositories_of_strangers_in_shared_places_decide_nothing",
        repositories_of_strangers_in_shared_places_decide_nothing,
    ),
    ("nested::a_strangers_pointer_leads_to_its_own_only", a_strangers_pointer_leads_to_its_own_only),
    ("nested::what_a_process_locks_is_held_for_the_next", what_a_process_locks_is_held_for_the_next),
];

impl Place {
    /// The workspace is writable, with protected names at any depth.
    fn nested(&self, more: &[(&Path, Access)]) -> Policy {
        let workspace = self.at("ws");
        with_nested(&[&[(Path::new("/"), Access::Read), (&workspace, Access::Write)], more].concat())
    }

    /// Empties the workspace, also where modes deny access.
    fn reset(&self) {
        let emptied = std::process::Command::new("sh")
            .args(["-c", "chmod -R u+rwx ws && rm -rf ws && mkdir ws"])
            .current_dir(self.top())
            .status();
        assert!(emptied.unwrap().success());
    }

    fn run(&self, spawner: &mut Spawner, script: &str, policy: &Policy) -> Outcome {
        spawner.run(&shell(&format!("cd {} && {{ {script}\n}}", self.at("ws").display())), Some(policy)).0
    }
}

fn with_nested(entries: &[(&Path, Access)]) -> Policy {
    let grants = policy(entries).files.sets().next().unwrap().clone();
    Policy { files: Files::Restricted(Grants { protect_nested: true, ..grants }.into()), network: Network::Restricted }
}

/// What git could not follow either, and what is not a repository of the workspace.
const POINTERS: &[&str] = &[
    "mkdir -p sub/.git/commondir",
    "mkdir -p sub/.git && mkfifo sub/.git/commondir",
    "mkdir sub && mkfifo sub/.git",
    "mkdir sub && ln -s b sub/a && ln -s a sub/b && echo 'gitdir: a/x' >sub/.git",
    "mkdir sub && ln -s x sub/x && echo 'gitdir: x' >sub/.git",
    "mkdir sub && printf 'gitdir: %06000d' 0 >sub/.git",
    "mkdir sub && printf 'gitdir: x/%0300d/y' 0 >sub/.git",
    "mkdir sub && echo 'gitdir: file/x' >sub/.git && touch sub/file",
    "mkdir sub && echo 'gitdir: .git' >sub/.git",
    "mkdir sub && echo 'gitdir: no/such/place' >sub/.git && chmod 555 sub",
    "mkdir -p sub/shut/x && chmod 1755 sub/shut/x && chmod 111 sub/shut && echo 'gitdir: shut/x' >sub/.git",
    "mkdir -p sub/shut/x && chmod 0 sub/shut && echo 'gitdir: shut/x' >sub/.git",
    "mkdir sub && echo 'gitdir: x' >sub/.git && chmod 0 sub/.git",
    "mkdir sub && printf 'gitdir: \\377\\376/x' >sub/.git",
    "mkdir sub && echo 'gitdir: ..' >sub/.git",
    "mkdir sub && echo 'gitdir: /' >sub/.git",
    "mkdir sub && echo \"gitdir: $PWD\" >sub/.git",
    "mkdir sub && echo 'gitdir: ../../../../../../../../..' >sub/.git",
    "mkdir -p sub/.git && echo ../.. >sub/.git/commondir",
    "mkdir sub && ln -s . l && mkdir d && echo 'gitdir: ../l/d' >sub/.git",
    "mkdir sub && ln -s .. sub/up && echo 'gitdir: up' >sub/.git",
    "mkdir sub && echo 'gitdir: /proc/self/root' >sub/.git",
    "mkdir sub && ln -s nowhere sub/.git",
    "ln -s sub .GIT",
    "echo 'gitdir: .' >.GIT",
    "echo 'gitdir: x' >.GIT && chmod 0 .GIT",
    "mkdir -p sub/.git && chmod 1755 sub/.git",
    "mkdir -p sub/deep/.git && chmod 0 sub/deep",
    "mkdir -p sub/deep/.git && chmod 311 sub/deep",
    "for i in 1 2 3 4 5 6 7 8 9; do d=$d/$i/a/b/c/d/e/f/g; done; mkdir -p sub$d/.git && echo \"gitdir: .$d/../x\" >sub/.git",
    "d=$(printf '%0250d' 0); for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do mkdir $d && cd $d || break; done; mkdir .git",
];

fn a_nested_git_file_fails_no_later_start() {
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let nested = place.nested(&[]);
    for script in POINTERS {
        place.reset();
        place.run(&mut spawner, script, &nested);
        let outcome = place.run(&mut spawner, "touch file && mkdir other && echo done", &nested);
        assert_eq!(outcome.stdout, "done\n", "{script}: {outcome:?}");
        // The `.git` itself stays, if it is one that a mount holds.
        let git = place.at("ws/sub/.git");
        if git.exists() && !git.is_symlink() {
            let outcome = place.run(&mut spawner, "rm -rf sub/.git", &nested);
            assert_ne!(outcome.status, ExitStatus::Code(0), "{script}: {outcome:?}");
            assert!(git.exists(), "{script}");
        }
    }
    spawner.close();
}

fn a_nested_pointer_protects_a_repository_beside_it() {
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let (nested, plain) = (place.nested(&[]), policy(&[(Path::new("/"), Access::Read), (&place.at("ws"), Access::Write)]));
    for pointer in ["../store/repo", "../store/l/repo", "../store/tree"] {
        place.reset();
        for directory in ["ws/sub", "ws/store/repo/hooks", "ws/store/tree"] {
            fs::create_dir_all(place.at(directory)).unwrap();
        }
        symlink(".", place.at("ws/store/l")).unwrap();
        fs::write(place.at("ws/store/tree/commondir"), "../repo\n").unwrap();
        fs::write(place.at("ws/sub/.git"), format!("gitdir: {pointer}\n")).unwrap();
        for script in ["touch store/repo/hooks/x", "mv store s", "mv store/repo store/r", "rm sub/.git"] {
            let outcome = place.run(&mut spawner, script, &nested);
            assert_ne!(outcome.status, ExitStatus::Code(0), "{pointer}, {script}: {outcome:?}");
        }
        assert_eq!(place.run(&mut spawner, "touch file sub/file", &nested).status, ExitStatus::Code(0));
        // The control.
        let outcome = place.run(&mut spawner, "touch store/repo/hooks/x && mv store s && rm sub/.git", &plain);
        assert_eq!(outcome.status, ExitStatus::Code(0), "{pointer}: {outcome:?}");
    }
    spawner.close();
}

fn a_pointer_tells_nothing_of_hidden_places() {
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let hidden = place.at("hidden");
    fs::create_dir_all(hidden.join("there/ws")).unwrap();
    fs::create_dir(hidden.join("tree")).unwrap();
    fs::write(hidden.join("tree/commondir"), place.at("ws/bar").to_str().unwrap()).unwrap();
    fs::write(hidden.join("file"), "").unwrap();
    symlink(place.at("ws/bar"), hidden.join("link")).unwrap();
    let denying = policy(&[(Path::new("/"), Access::Write), (&hidden, Access::Deny)]);
    let system = ["/bin", "/usr", "/lib", "/lib64"].map(Path::new).into_iter().filter(|path| path.exists());
    let workspace = place.at("ws");
    let minimal: Vec<_> = system.map(|path| (path, Access::Read)).chain([(workspace.as_path(), Access::Write)]).collect();
    let policies = [
        ("denied", place.nested(&[(&hidden, Access::Deny)])),
        ("denied by the ceiling", place.nested(&[]).bounded_by(&denying).unwrap()),
        ("unlisted", with_nested(&minimal)),
        ("shown", place.nested(&[])),
    ];
    let through = |name: &str| hidden.join(name).to_str().unwrap().to_owned();
    // What a nested `.git` file says, and the `commondir` of what it may lead to.
    let pointers = |name: &str| {
        [
            (format!("{}/../../ws/foo", through(name)), "../bar".to_owned()),
            (through(name), "../bar".to_owned()),
            ("../foo".to_owned(), through(name)),
            (format!("../l/{name}"), "../bar".to_owned()),
        ]
    };
    for (which, policy) in &policies {
        for nth in 0..pointers("").len() {
            let mut said = BTreeSet::new();
            for name in ["there", "absent", "file", "link", "tree"] {
                place.reset();
                for directory in ["sub", "foo", "bar"] {
                    fs::create_dir(place.at("ws").join(directory)).unwrap();
                }
                symlink(&hidden, place.at("ws/l")).unwrap();
                let (target, shared) = pointers(name)[nth].clone();
                fs::write(place.at("ws/sub/.git"), format!("gitdir: {target}\n")).unwrap();
                fs::write(place.at("ws/foo/commondir"), shared).unwrap();
                let outcome = place.run(&mut spawner, "touch bar/x && echo free || echo held", policy);
                said.insert(outcome.stdout);
            }
            let alike = ["free\n".to_owned()].into();
            // The control: what is shown counts.
            assert_eq!(said == alike, *which != "shown", "{which}, {nth}: {said:?}");
        }
    }
    spawner.close();
}

fn file_calls_tell_nothing_of_where_a_pointer_leads() {
    let place = Place::with(&["ws"]);
    let hidden = place.at("hidden");
    fs::create_dir_all(hidden.join("tree")).unwrap();
    fs::write(hidden.join("tree/commondir"), place.at("ws/bar").to_str().unwrap()).unwrap();
    symlink(place.at("ws/bar"), hidden.join("link")).unwrap();
    symlink(place.at("hidden/loop"), hidden.join("loop")).unwrap();
    let workspace = place.at("ws");
    let entries = [(Path::new("/"), Access::Read), (workspace.as_path(), Access::Write)];
    let denying = policy(&[(Path::new("/"), Access::Write), (&hidden, Access::Deny)]);
    let own = policy(&[&entries[..], &[(&hidden, Access::Deny)]].concat());
    // The ceiling makes `/` writable, so that an earlier request may have written the pointer.
    for (policy, is_hidden) in [
        (own.bounded_by(&denying).unwrap(), true),
        (policy(&entries).bounded_by(&denying).unwrap(), true),
        (policy(&entries), false),
    ] {
        for (name, leads) in [("tree", true), ("link", true), ("absent", false), ("loop", false)] {
            place.reset();
            fs::create_dir(place.at("ws/bar")).unwrap();
            fs::write(place.at("ws/.git"), format!("gitdir: {}/{name}", hidden.display())).unwrap();
            let mut worker = Worker::start(Some(&policy));
            let written = worker.write(place.at("ws/bar/x"), b"x");
            // The control: what is shown counts.
            assert_eq!(written.is_err(), !is_hidden && leads, "{name}, {is_hidden}: {written:?}");
        }
    }
}

fn an_operators_pointer_is_followed_where_it_is_hidden() {
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let (workspace, hidden) = (place.at("ws"), place.at("hidden"));
    fs::create_dir(&hidden).unwrap();
    symlink(place.at("ws/store"), hidden.join("link")).unwrap();
    let entries = [(Path::new("/"), Access::Read), (workspace.as_path(), Access::Write)];
    let denying = policy(&[&entries[..], &[(&hidden, Access::Deny)]].concat());
    let system = ["/bin", "/usr", "/lib", "/lib64"].map(Path::new).into_iter().filter(|path| path.exists());
    let minimal: Vec<_> = system.map(|path| (path, Access::Read)).chain([(workspace.as_path(), Access::Write)]).collect();
    let (ceiling, everything) = (policy(&entries), policy(&[(Path::new("/"), Access::Write)]));
    let policies = [
        ("denied", denying.clone().bounded_by(&ceiling).unwrap(), true),
        ("unlisted", policy(&minimal).bounded_by(&ceiling).unwrap(), true),
        ("without a ceiling", denying.clone(), true),
        // The control: where a request may have written the pointer, it is not followed, so that nothing protects its target.
        ("of a request", denying.bounded_by(&everything).unwrap(), false),
    ];
    let target = hidden.join("link/repo").to_str().unwrap().to_owned();
    for is_shared in [false, true] {
        place.reset();
        fs::create_dir_all(place.at("ws/store/repo/hooks")).unwrap();
        if is_shared {
            fs::create_dir(place.at("ws/.git")).unwrap();
            fs::write(place.at("ws/.git/commondir"), &target).unwrap();
        } else {
            fs::write(place.at("ws/.git"), format!("gitdir: {target}\n")).unwrap();
        }
        for (which, policy, is_kept) in &policies {
            let config = place.at("ws/store/repo/config");
            fs::write(&config, "old\n").unwrap();
            for script in
                ["echo new >store/repo/config", "touch store/repo/hooks/x && rm store/repo/hooks/x", "mv store s && mv s store"]
            {
                let outcome = place.run(&mut spawner, script, policy);
                assert_eq!(outcome.status != ExitStatus::Code(0), *is_kept, "{which}, {is_shared}, {script}: {outcome:?}");
            }
            let mut worker = Worker::start(Some(policy));
            for name in ["config", "hooks/y"] {
                let written = worker.write(config.with_file_name(name), b"new\n");
                assert_eq!(written.is_err(), *is_kept, "{which}, {is_shared}, {name}: {written:?}");
            }
            assert_eq!(fs::read_to_string(&config).unwrap() == "old\n", *is_kept, "{which}, {is_shared}");
            let written = worker.write(place.at("ws/store/beside"), b"");
            assert!(written.is_ok(), "{which}, {is_shared}: {written:?}");
        }
    }
    spawner.close();
}

const STRANGER: u32 = 64_105;

/// Gives a tree to another user, which only root can.
fn give(tree: &Path, user: u32) {
    let given = std::process::Command::new("chown").args(["-R", &user.to_string()]).arg(tree).status();
    assert!(given.unwrap().success());
}

fn repositories_of_strangers_in_shared_places_decide_nothing() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can make files of another user");
        return;
    }
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let shared = place.at("shared");
    fs::create_dir_all(place.at("ws/sub")).unwrap();
    fs::create_dir_all(shared.join("theirs")).unwrap();
    // A directory such as /tmp.
    std::os::unix::fs::chown(&shared, Some(STRANGER + 1), None).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
    let policy = place.nested(&[(&shared, Access::Write)]);
    fs::write(shared.join("theirs/.git"), format!("gitdir: {}\n", place.at("ws/sub").display())).unwrap();
    let script = "touch sub/x && rm sub/x && echo done";
    // The control: of this user it counts.
    assert_eq!(place.run(&mut spawner, script, &policy).stdout, "");
    give(&shared.join("theirs"), STRANGER);
    assert_eq!(place.run(&mut spawner, script, &policy).stdout, "done\n");
    // More of them than a start can hold.
    for nth in 0..=portcullis_sandbox::survey::MOST_FOUND {
        fs::create_dir_all(shared.join(format!("theirs/{nth}/.git"))).unwrap();
    }
    give(&shared.join("theirs"), 0);
    let shell = shell("true");
    assert!(spawner.fail(&shell, Some(&policy)).attempt.contains("places"), "those of this user count");
    give(&shared.join("theirs"), STRANGER);
    assert_eq!(place.run(&mut spawner, script, &policy).stdout, "done\n");
    spawner.close();
}

fn a_strangers_pointer_leads_to_its_own_only() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can make files of another user");
        return;
    }
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    for (pointer, target, is_followed) in [(STRANGER, 0, false), (STRANGER, STRANGER, true), (0, STRANGER, true), (0, 0, true)] {
        place.reset();
        for directory in ["ws/sub", "ws/repo"] {
            fs::create_dir(place.at(directory)).unwrap();
        }
        fs::set_permissions(place.at("ws/repo"), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(place.at("ws/sub/.git"), "gitdir: ../repo\n").unwrap();
        give(&place.at("ws/sub"), pointer);
        give(&place.at("ws/repo"), target);
        let outcome = place.run(&mut spawner, "touch repo/x && echo done", &place.nested(&[]));
        assert_eq!(outcome.stdout.is_empty(), is_followed, "{pointer} {target}: {outcome:?}");
    }
    spawner.close();
}

fn what_a_process_locks_is_held_for_the_next() {
    let (mut spawner, place) = (Spawner::start(), Place::with(&["ws"]));
    let (secret, later) = (place.at("ws/sub/secret"), place.at("ws/sub/later"));
    let denying = place.nested(&[(&secret, Access::Deny), (&later, Access::Deny)]);
    for (lock, open) in [
        ("chmod 0 sub", "chmod 700 sub; cat sub/secret; touch sub/later"),
        ("chmod 555 sub", "chmod 700 sub; cat sub/secret; echo x >sub/later"),
        ("chmod 311 sub", "chmod 700 sub; cat sub/secret; echo x >sub/later"),
        ("chmod 555 .", "chmod 700 .; mkdir .codex; cat sub/secret"),
    ] {
        place.reset();
        fs::create_dir(place.at("ws/sub")).unwrap();
        fs::write(&secret, "content").unwrap();
        fs::set_permissions(place.at("ws"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(place.run(&mut spawner, lock, &denying).status, ExitStatus::Code(0), "{lock}");
        let outcome = place.run(&mut spawner, &format!("{open}; echo done"), &denying);
        assert_eq!(outcome.stdout, "done\n", "{lock}: {outcome:?}");
        for made in ["ws/sub/later", "ws/.codex"] {
            assert!(fs::symlink_metadata(place.at(made)).is_err(), "{lock}: {made}: {outcome:?}");
        }
    }
    // The control: unlocked, the same is held and the rest is free.
    place.reset();
    fs::create_dir(place.at("ws/sub")).unwrap();
    fs::write(&secret, "content").unwrap();
    let outcome = place.run(&mut spawner, "touch sub/other && cat sub/secret; echo done", &denying);
    assert_eq!(outcome.stdout, "done\n", "{outcome:?}");
    assert!(place.at("ws/sub/other").exists());
    spawner.close();
}

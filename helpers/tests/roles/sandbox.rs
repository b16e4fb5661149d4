//! Sandboxes with a view of their own: what is held in them, and what is left of them.

use super::gateway::{Outcome, Spawner, policy, shell};
use crate::Test;
use portcullis_protocol::denial::{Layer, Wanted};
use portcullis_protocol::helper::{Command, ExitStatus, SpawnerEvent, SpawnerRequest};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, DenyGlob, Files, Grants, Network, Policy};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, test_kill_process};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("sandbox::a_nested_link_lifts_no_denial_beside_it", a_nested_link_lifts_no_denial_beside_it),
    ("sandbox::absent_names_are_held_and_nothing_is_left", absent_names_are_held_and_nothing_is_left),
    ("sandbox::nothing_is_left_after_any_death", nothing_is_left_after_any_death),
    ("sandbox::the_end_of_one_sandbox_does_not_lift_what_another_holds", the_end_of_one_sandbox_does_not_lift_what_another_holds),
    ("sandbox::what_was_left_behind_goes_with_the_next_sandbox", what_was_left_behind_goes_with_the_next_sandbox),
    ("sandbox::protected_places_cannot_be_moved_away", protected_places_cannot_be_moved_away),
    ("sandbox::a_cover_that_is_moved_from_outside_ends_the_sandbox", a_cover_that_is_moved_from_outside_ends_the_sandbox),
    (
        "sandbox::what_is_denied_and_made_from_outside_later_ends_the_sandbox",
        what_is_denied_and_made_from_outside_later_ends_the_sandbox,
    ),
    ("sandbox::a_place_that_its_owner_could_open_again_is_refused", a_place_that_its_owner_could_open_again_is_refused),
    ("sandbox::many_at_once_share_what_they_hold", many_at_once_share_what_they_hold),
    ("sandbox::a_git_file_protects_where_it_leads", a_git_file_protects_where_it_leads),
    ("sandbox::a_protected_link_is_refused", a_protected_link_is_refused),
    ("sandbox::no_set_lifts_what_another_set_protects", no_set_lifts_what_another_set_protects),
    ("sandbox::denied_places_and_globs_are_covered", denied_places_and_globs_are_covered),
    ("sandbox::no_sandbox_can_prepare_the_next_one", no_sandbox_can_prepare_the_next_one),
    (
        "sandbox::a_link_that_a_process_could_turn_is_no_part_of_its_policy",
        a_link_that_a_process_could_turn_is_no_part_of_its_policy,
    ),
    ("sandbox::what_is_not_granted_is_not_there", what_is_not_granted_is_not_there),
    ("sandbox::changes_that_are_refused_are_seen", changes_that_are_refused_are_seen),
    ("sandbox::with_its_first_process_everything_ends", with_its_first_process_everything_ends),
    ("sandbox::others_live_on_after_the_program_until_they_are_killed", others_live_on_after_the_program_until_they_are_killed),
    ("sandbox::a_terminal_has_a_name_and_others_cannot_be_reached", a_terminal_has_a_name_and_others_cannot_be_reached),
];

/// A workspace and something beside it, both the user's.
struct Place {
    _directory: tempfile::TempDir,
    workspace: PathBuf,
    outside: PathBuf,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let top = directory.path().canonicalize().unwrap();
        let place = Self { workspace: top.join("ws"), outside: top.join("out"), _directory: directory };
        for path in [&place.workspace, &place.outside] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("file"), "content").unwrap();
        }
        place
    }

    fn policy(&self) -> Policy {
        policy(&[(Path::new("/"), Access::Read), (&self.workspace, Access::Write)])
    }

    fn in_workspace(&self, script: &str) -> Command {
        shell(&format!("cd {} && {script}", self.workspace.display()))
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(&self.workspace).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn said(outcome: &Outcome) -> String {
    format!("{}{}", outcome.stdout, outcome.stderr)
}

/// Waits for the end of a process that is nobody's child here.
pub(crate) fn ended(pidfd: &OwnedFd) {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    while let Err(Errno::INTR) = poll(&mut polled, None) {}
}

fn absent_names_are_held_and_nothing_is_left() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    for act in
        ["mkdir .git/hooks", "touch .codex/x", "rmdir .aws", "mv .agents a", "rm -rf .git", "ln -s /tmp .git/x", "chmod 700 .git"]
    {
        let (outcome, _) = spawner.run(&place.in_workspace(act), Some(&place.policy()));
        assert_ne!(outcome.status, ExitStatus::Code(0), "{act}: {}", said(&outcome));
    }
    // The control: other names can be made, and these too where an entry grants them.
    let (outcome, _) = spawner.run(&place.in_workspace("mkdir -p other/hooks"), Some(&place.policy()));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    let git = place.workspace.join(".git");
    let granted = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&git, Access::Write)]);
    fs::create_dir(&git).unwrap();
    let (outcome, _) = spawner.run(&place.in_workspace("mkdir .git/hooks && mv .git g && mv g .git"), Some(&granted));
    assert_ne!(outcome.status, ExitStatus::Code(0), "a root cannot be moved");
    assert!(git.join("hooks").is_dir(), "{}", said(&outcome));
    spawner.close();
    assert_eq!(place.names(), [".git", "file", "other"]);
}

/// Starts something that waits for ever, and yields the process id of its init.
fn start_waiting(spawner: &mut Spawner, place: &Place, id: u64) -> (Pid, File) {
    let (stdout, _stderr) = spawner.start_process(id, &place.in_workspace("echo ready; exec sleep 1000"), Some(&place.policy()));
    let pid = match spawner.event() {
        SpawnerEvent::Started { pid, .. } => Pid::from_raw(pid).unwrap(),
        other => panic!("{other:?}"),
    };
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    assert_eq!(place.names(), [".agents", ".aws", ".codex", ".git", "file"], "held while it runs");
    (pid, stdout.into_inner())
}

fn nothing_is_left_after_any_death() {
    let place = Place::new();
    let is_clean = || place.names() == ["file"];
    // Of the sandbox's init.
    let mut spawner = Spawner::start();
    let (init, _stdout) = start_waiting(&mut spawner, &place, 1);
    kill_process(init, Signal::KILL).unwrap();
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 1, status: ExitStatus::Signal(9), .. }));
    assert!(is_clean(), "{:?}", place.names());
    // Of the gateway.
    let (init, _stdout) = start_waiting(&mut spawner, &place, 2);
    spawner.close();
    assert!(is_clean() && test_kill_process(init).is_err(), "{:?}", place.names());
    // Of the spawner.
    let mut spawner = Spawner::start();
    let (init, mut stdout) = start_waiting(&mut spawner, &place, 3);
    let init = pidfd_open(init, PidfdFlags::empty()).unwrap();
    let remover = pidfd_open(Pid::from_raw(super::races::remover(&spawner)).unwrap(), PidfdFlags::empty()).unwrap();
    spawner.process.kill().unwrap();
    spawner.process.wait().unwrap();
    // The program held the other end.
    stdout.read_to_end(&mut Vec::new()).unwrap();
    // The remover cleans up before it ends.
    ended(&init);
    ended(&remover);
    assert!(is_clean(), "{:?}", place.names());
}

fn the_end_of_one_sandbox_does_not_lift_what_another_holds() {
    let place = Place::new();
    let (mut first, mut second) = (Spawner::start(), Spawner::start());
    let (init, _stdout) = start_waiting(&mut first, &place, 1);
    // Another sandbox of the same gateway, and one of another gateway, come and go.
    for spawner in [&mut first, &mut second] {
        assert_eq!(spawner.run(&place.in_workspace("true"), Some(&place.policy())).0.status, ExitStatus::Code(0));
    }
    second.close();
    assert_eq!(place.names(), [".agents", ".aws", ".codex", ".git", "file"]);
    // Still covered inside: what is made in the mount point on the machine is not seen there.
    fs::write(place.workspace.join(".git/planted"), "").unwrap();
    let seen = format!("/proc/{}/root{}/.git", init.as_raw_nonzero(), place.workspace.display());
    assert_eq!(fs::read_dir(seen).map(Iterator::count).unwrap_or(0), 0);
    fs::remove_file(place.workspace.join(".git/planted")).unwrap();
    first.close();
    assert_eq!(place.names(), ["file"]);
}

fn what_was_left_behind_goes_with_the_next_sandbox() {
    let place = Place::new();
    let mut spawner = Spawner::start();
    let (init, mut stdout) = start_waiting(&mut spawner, &place, 1);
    // None of them can clean up. The init is stopped, so that it does not see the spawner's end, and the spawner, so that it makes no
    // other remover.
    let process = |pid| Pid::from_raw(pid).unwrap();
    let helper = process(spawner.pid());
    kill_process(init, Signal::STOP).unwrap();
    kill_process(helper, Signal::STOP).unwrap();
    kill_process(process(super::races::remover(&spawner)), Signal::KILL).unwrap();
    spawner.process.kill().unwrap();
    spawner.process.wait().unwrap();
    kill_process(init, Signal::KILL).unwrap();
    stdout.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(place.names(), [".agents", ".aws", ".codex", ".git", "file"], "left behind");
    let mut spawner = Spawner::start();
    assert_eq!(spawner.run(&place.in_workspace("true"), Some(&place.policy())).0.status, ExitStatus::Code(0));
    spawner.close();
    assert_eq!(place.names(), ["file"]);
}

fn protected_places_cannot_be_moved_away() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let inner = place.workspace.join("a/b");
    fs::create_dir_all(inner.join(".git/hooks")).unwrap();
    // A root within a root: whoever moved the way to it could put another repository in its place.
    let policy = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&inner, Access::Write)]);
    for act in ["mv a x", "mv a/b a/x", "mv a/b/.git a/b/x", "touch a/b/.git/hooks/x", "rm -rf a/b/.git"] {
        let (outcome, _) = spawner.run(&place.in_workspace(act), Some(&policy));
        assert_ne!(outcome.status, ExitStatus::Code(0), "{act}");
    }
    // The control: what leads nowhere can be moved, and what is no mount of another can be changed.
    fs::create_dir_all(place.workspace.join("c/d/.git")).unwrap();
    let (outcome, _) = spawner.run(&place.in_workspace("touch a/b/x && mv c x && touch x/d/.git/y"), Some(&policy));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    spawner.close();
}

fn a_cover_that_is_moved_from_outside_ends_the_sandbox() {
    let place = Place::new();
    fs::create_dir_all(place.workspace.join(".git/hooks")).unwrap();
    for act in ["move", "beside"] {
        let mut spawner = Spawner::start();
        let (stdout, _stderr) =
            spawner.start_process(1, &place.in_workspace("echo ready; exec sleep 1000"), Some(&place.policy()));
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let at = |name: &str| place.workspace.join(name);
        if act == "beside" {
            // The control: other names can be moved.
            fs::rename(at("file"), at("renamed")).unwrap();
            spawner.send(&SpawnerRequest::Signal { id: 1, signal: 15 }, &[]);
        } else {
            fs::rename(at(".git"), at("g")).unwrap();
            fs::rename(at("g"), at(".git")).unwrap();
            fs::rename(at(".git"), at("g")).unwrap();
            fs::create_dir(at(".git")).unwrap();
        }
        match spawner.event() {
            SpawnerEvent::Exited { status, failure, .. } if act == "beside" => {
                assert_eq!((status, failure), (ExitStatus::Signal(15), None));
            }
            SpawnerEvent::Exited { status, failure, .. } => {
                assert_eq!(status, ExitStatus::Signal(9));
                assert!(failure.unwrap().contains(".git` was made, moved or replaced from outside"));
                fs::remove_dir(at(".git")).unwrap();
                fs::rename(at("g"), at(".git")).unwrap();
            }
            other => panic!("{other:?}"),
        }
        spawner.close();
    }
}

fn what_is_denied_and_made_from_outside_later_ends_the_sandbox() {
    let place = Place::new();
    let later = place.outside.join("later/secret");
    let denying = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&later, Access::Deny)]);
    for is_denied in [true, false] {
        let mut spawner = Spawner::start();
        let script = "echo ready; while ! test -e ../out/later/secret; do :; done; echo there";
        let policy = if is_denied { &denying } else { &place.policy() };
        let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace(script), Some(policy));
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        let mut stdout = BufReader::new(stdout);
        let mut text = String::new();
        stdout.read_line(&mut text).unwrap();
        // The directory alone is nothing, and is watched from then on.
        fs::create_dir(later.parent().unwrap()).unwrap();
        fs::write(later.with_file_name("beside"), "").unwrap();
        File::create(&later).unwrap();
        match spawner.event() {
            SpawnerEvent::Exited { failure, .. } => {
                assert_eq!(failure.is_some_and(|text| text.contains("/out/later/secret` was made")), is_denied);
            }
            other => panic!("{other:?}"),
        }
        stdout.read_to_string(&mut text).unwrap();
        if !is_denied {
            assert_eq!(text, "ready\nthere\n", "the control");
        }
        fs::remove_dir_all(later.parent().unwrap()).unwrap();
        spawner.close();
    }
}

fn a_place_that_its_owner_could_open_again_is_refused() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let locked = place.workspace.join("locked");
    fs::create_dir(&locked).unwrap();
    fs::write(locked.join("secret"), "content").unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
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

fn many_at_once_share_what_they_hold() {
    /// Starts in flight.
    const MANY: u64 = 40;
    let (mut first, mut second, place) = (Spawner::start(), Spawner::start(), Place::new());
    for round in 0..3 {
        for id in 0..MANY {
            for spawner in [&mut first, &mut second] {
                let command = place.in_workspace("mkdir .codex/x 2>/dev/null || exit 3");
                let _outputs = spawner.start_process(round * MANY + id, &command, Some(&place.policy()));
            }
        }
        for spawner in [&mut first, &mut second] {
            let mut left = MANY;
            while left > 0 {
                match spawner.event() {
                    SpawnerEvent::Started { .. } => {}
                    SpawnerEvent::Exited { status: ExitStatus::Code(3), .. } => left -= 1,
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(place.names(), ["file"]);
    }
    first.close();
    second.close();
}

fn a_git_file_protects_where_it_leads() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let repository = place.workspace.join("store/repo.git");
    fs::create_dir_all(repository.join("hooks")).unwrap();
    let act = "touch store/repo.git/hooks/x || mv store s || echo x > .git";
    // The control: without the pointer the directory is one like others.
    let (outcome, _) =
        spawner.run(&place.in_workspace("touch store/repo.git/hooks/c && rm store/repo.git/hooks/c"), Some(&place.policy()));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    fs::write(place.workspace.join(".git"), "gitdir: store/repo.git\n").unwrap();
    let (outcome, _) = spawner.run(&place.in_workspace(act), Some(&place.policy()));
    assert_ne!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    assert_eq!(fs::read_dir(repository.join("hooks")).unwrap().count(), 0);
    let (outcome, _) = spawner.run(&place.in_workspace("touch store/beside"), Some(&place.policy()));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
    spawner.close();
}

fn no_set_lifts_what_another_set_protects() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let (workspace, repository) = (place.workspace.clone(), place.workspace.join("repo"));
    fs::create_dir_all(repository.join("hooks")).unwrap();
    fs::write(repository.join("config"), "old").unwrap();
    let ceiling = policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write)]);
    let git = workspace.join(".git");
    let read = (Path::new("/"), Access::Read);
    let attack = place.in_workspace("echo new >repo/config; echo new >repo/hooks/x");
    for is_link in [false, true] {
        let _none_before = fs::remove_file(&git);
        if is_link {
            std::os::unix::fs::symlink("repo", &git).unwrap();
        } else {
            fs::write(&git, "gitdir: repo\n").unwrap();
        }
        for own in [
            vec![read, (&repository, Access::Write)],
            vec![read, (&workspace, Access::Write), (&git, Access::Deny)],
            vec![(Path::new("/usr"), Access::Read), (Path::new("/bin"), Access::Read), (&repository, Access::Write)],
        ] {
            let both = policy(&own).bounded_by(&ceiling).unwrap();
            spawner.start_process(7, &attack, Some(&both));
            // It runs and changes nothing, or the start is refused.
            while !matches!(spawner.event(), SpawnerEvent::Exited { .. } | SpawnerEvent::StartFailed { .. }) {}
            assert_eq!(fs::read_to_string(repository.join("config")).unwrap(), "old", "{own:?}, a link: {is_link}");
            assert!(!repository.join("hooks/x").exists(), "{own:?}, a link: {is_link}");
        }
    }
    // The control: the same where nothing leads there.
    fs::remove_file(&git).unwrap();
    let both = policy(&[read, (&repository, Access::Write)]).bounded_by(&ceiling).unwrap();
    spawner.run(&attack, Some(&both));
    assert_eq!(fs::read_to_string(repository.join("config")).unwrap(), "new\n");
    spawner.close();
}

fn a_protected_link_is_refused() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    std::os::unix::fs::symlink(&place.outside, place.workspace.join(".git")).unwrap();
    let failure = spawner.fail(&place.in_workspace("true"), Some(&place.policy()));
    assert!(failure.attempt.contains("/ws/.git` from being changed: it is a symbolic link"), "{failure:?}");
    spawner.close();
    assert_eq!(place.names(), [".git", "file"], "what was made before the refusal is gone");
}

fn denied_places_and_globs_are_covered() {
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

fn no_sandbox_can_prepare_the_next_one() {
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

fn a_nested_link_lifts_no_denial_beside_it() {
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

fn a_link_that_a_process_could_turn_is_no_part_of_its_policy() {
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

fn what_is_not_granted_is_not_there() {
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

fn changes_that_are_refused_are_seen() {
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

fn with_its_first_process_everything_ends() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let script = "setsid sh -c 'echo deep; exec sleep 1000' & echo top; exec sleep 1000";
    let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace(script), Some(&place.policy()));
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    let mut stdout = BufReader::new(stdout);
    let mut lines = [String::new(), String::new()];
    for line in &mut lines {
        stdout.read_line(line).unwrap();
    }
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 1, status: ExitStatus::Signal(9), .. }));
    // The daemon held the other end.
    assert_eq!(stdout.read_to_end(&mut Vec::new()).unwrap(), 0);
    spawner.close();
}

fn others_live_on_after_the_program_until_they_are_killed() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let script = "setsid sh -c 'echo daemon; exec sleep 1000' & exit 3";
    let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace(script), Some(&place.policy()));
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 1, status: ExitStatus::Code(3), .. }));
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "daemon\n");
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    assert_eq!(stdout.read_to_end(&mut Vec::new()).unwrap(), 0);
    // Whoever is about removing what a killed init held may be killed too, and then it is done at the end.
    spawner.close();
    assert_eq!(place.names(), ["file"]);
}

fn a_terminal_has_a_name_and_others_cannot_be_reached() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let other = name.to_str().unwrap();
    // Another one of the same user, which is there outside, is not there inside.
    assert!(Path::new(other).exists());
    let (outcome, _) = spawner.run(&shell(&format!("ls {other}; ls /dev/pts")), Some(&place.policy()));
    assert!(outcome.stderr.contains("No such file") && outcome.stdout.contains("ptmx"), "{}", said(&outcome));
    spawner.close();
}

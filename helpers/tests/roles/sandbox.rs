//! Sandboxes with a view of their own: what is held in them, and what is left of them.

mod absent_names;
mod denials;
mod shared_memory;

use super::gateway::{Outcome, Spawner, encoded, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{Command, ExitStatus, SpawnerEvent, SpawnerRequest};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::policy::{Access, DenyGlob, Files, Network, Policy};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("sandbox::a_nested_link_lifts_no_denial_beside_it", denials::a_nested_link_lifts_no_denial_beside_it),
    ("sandbox::absent_names_are_held_and_nothing_is_left", absent_names::absent_names_are_held_and_nothing_is_left),
    ("sandbox::nothing_is_left_after_any_death", absent_names::nothing_is_left_after_any_death),
    (
        "sandbox::the_end_of_one_sandbox_does_not_lift_what_another_holds",
        absent_names::the_end_of_one_sandbox_does_not_lift_what_another_holds,
    ),
    ("sandbox::what_was_left_behind_goes_with_the_next_sandbox", absent_names::what_was_left_behind_goes_with_the_next_sandbox),
    ("sandbox::protected_places_cannot_be_moved_away", protected_places_cannot_be_moved_away),
    ("sandbox::a_cover_that_is_moved_from_outside_ends_the_sandbox", a_cover_that_is_moved_from_outside_ends_the_sandbox),
    ("sandbox::what_others_make_and_remove_ends_no_sandbox", what_others_make_and_remove_ends_no_sandbox),
    ("sandbox::a_busy_init_checks_covers_that_nothing_reports", a_busy_init_checks_covers_that_nothing_reports),
    (
        "sandbox::what_is_denied_and_made_from_outside_later_ends_the_sandbox",
        what_is_denied_and_made_from_outside_later_ends_the_sandbox,
    ),
    ("sandbox::a_place_that_its_owner_could_open_again_is_refused", denials::a_place_that_its_owner_could_open_again_is_refused),
    ("sandbox::many_at_once_share_what_they_hold", absent_names::many_at_once_share_what_they_hold),
    ("sandbox::a_git_file_protects_where_it_leads", a_git_file_protects_where_it_leads),
    ("sandbox::a_protected_link_is_refused", a_protected_link_is_refused),
    ("sandbox::no_set_lifts_what_another_set_protects", no_set_lifts_what_another_set_protects),
    ("sandbox::denied_places_and_globs_are_covered", denials::denied_places_and_globs_are_covered),
    ("sandbox::no_sandbox_can_prepare_the_next_one", denials::no_sandbox_can_prepare_the_next_one),
    (
        "sandbox::a_link_that_a_process_could_turn_is_no_part_of_its_policy",
        denials::a_link_that_a_process_could_turn_is_no_part_of_its_policy,
    ),
    ("sandbox::what_is_not_granted_is_not_there", denials::what_is_not_granted_is_not_there),
    ("sandbox::changes_that_are_refused_are_seen", denials::changes_that_are_refused_are_seen),
    ("sandbox::with_its_first_process_everything_ends", with_its_first_process_everything_ends),
    ("sandbox::others_live_on_after_the_program_until_they_are_killed", others_live_on_after_the_program_until_they_are_killed),
    ("sandbox::denials_in_shared_memory_hold_as_elsewhere", shared_memory::denials_in_shared_memory_hold_as_elsewhere),
    ("sandbox::no_crash_starts_a_core_handler", no_crash_starts_a_core_handler),
    ("sandbox::a_terminal_has_a_name_and_others_cannot_be_reached", a_terminal_has_a_name_and_others_cannot_be_reached),
    ("sandbox::a_terminal_is_opened_to_no_other_user", a_terminal_is_opened_to_no_other_user),
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
    let mut nested = place.policy().files.sets().next().unwrap().clone();
    nested.protect_nested = true;
    let nested = Policy { files: Files::Restricted(nested.into()), network: Network::Restricted };
    for (act, policy) in [("move", place.policy()), ("move", nested.clone()), ("beside", nested)] {
        let mut spawner = Spawner::start();
        let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace("echo ready; exec sleep 1000"), Some(&policy));
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

fn what_others_make_and_remove_ends_no_sandbox() {
    let place = Place::new();
    let at = |name: &str| place.workspace.join(name);
    let mut grants = place.policy().files.sets().next().unwrap().clone();
    let base = portcullis_protocol::path::AbsolutePath::new(&place.workspace).unwrap();
    grants.deny_globs = vec![DenyGlob { base, pattern: "**/*.env".to_owned() }];
    grants.protect_nested = true;
    let policy = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
    // Once the found things are gone the process ends by itself; a denied name that returns ends it.
    for returns in [true, false] {
        fs::create_dir_all(at("sub/.git/hooks")).unwrap();
        fs::create_dir_all(at("deep/er")).unwrap();
        fs::write(at("deep/er/x.env"), "").unwrap();
        let mut spawner = Spawner::start();
        let script = "echo ready; while test -e sub/.git || test -e deep; do :; done; echo gone; while ! test -e end; do :; done; echo over";
        let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace(script), Some(&policy));
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        let mut stdout = BufReader::new(stdout);
        let mut text = String::new();
        stdout.read_line(&mut text).unwrap();
        for name in ["sub", "deep"] {
            fs::remove_dir_all(at(name)).unwrap();
        }
        stdout.read_line(&mut text).unwrap();
        assert_eq!(text, "ready\ngone\n");
        fs::create_dir_all(at("sub/.git")).unwrap();
        fs::create_dir_all(at("deep/er")).unwrap();
        if returns {
            fs::write(at("deep/er/x.env"), "").unwrap();
        } else {
            fs::write(at("end"), "").unwrap();
        }
        let SpawnerEvent::Exited { failure, .. } = spawner.event() else { panic!("another event than its end") };
        assert_eq!(failure.as_ref().is_some_and(|text| text.contains("/x.env` was made")), returns, "{failure:?}");
        assert_eq!(failure.is_some(), returns, "{failure:?}");
        for name in ["sub", "deep"] {
            fs::remove_dir_all(at(name)).unwrap();
        }
        spawner.close();
    }
}

fn a_busy_init_checks_covers_that_nothing_reports() {
    let place = Place::new();
    let (directory, secret) = (place.workspace.join("d"), place.workspace.join("d/secret"));
    fs::create_dir(&directory).unwrap();
    // Each round is a change that init is notified of. The rounds after the new content take far longer than the interval of checks.
    let script = "echo ready; n=0; while [ $n -lt 100000 ]; do
        grep -q new d/secret 2>/dev/null && n=$((n + 1)) && while [ $n -lt 100000 ]; do true >/ ; n=$((n + 1)); done
        true >/ ; done 2>/dev/null; echo over";
    let denying = policy(&[(Path::new("/"), Access::Read), (&place.workspace, Access::Write), (&secret, Access::Deny)]);
    for is_denied in [true, false] {
        fs::write(&secret, "old").unwrap();
        let mut spawner = Spawner::start();
        // An earlier process made its directory one that init cannot list, so nothing in it is reported.
        let (outcome, _) = spawner.run(&place.in_workspace("chmod 311 d"), Some(&denying));
        assert_eq!(outcome.status, ExitStatus::Code(0), "{}", said(&outcome));
        let policy = if is_denied { &denying } else { &place.policy() };
        let (stdout, _stderr) = spawner.start_process(1, &place.in_workspace(script), Some(policy));
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        let mut stdout = BufReader::new(stdout);
        let mut text = String::new();
        stdout.read_line(&mut text).unwrap();
        // As an editor saves a file.
        fs::write(directory.join("new"), "new").unwrap();
        fs::rename(directory.join("new"), &secret).unwrap();
        let SpawnerEvent::Exited { failure, .. } = spawner.event() else { panic!("another event than its end") };
        assert_eq!(failure.is_some_and(|text| text.contains("/d/secret` was made, moved or replaced")), is_denied);
        stdout.read_to_string(&mut text).unwrap();
        assert_eq!(text.ends_with("over\n"), !is_denied, "the control goes on to its end: {text}");
        spawner.close();
        // Its user could not remove it otherwise.
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
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
    let (git, config, hooks) = (workspace.join(".git"), repository.join("config"), repository.join("hooks"));
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
            vec![read, (&config, Access::Write)],
            vec![(Path::new("/usr"), Access::Read), (Path::new("/bin"), Access::Read), (&config, Access::Write)],
            vec![read, (&workspace, Access::Write), (&repository, Access::Read), (&config, Access::Write)],
            vec![read, (&workspace, Access::Write), (&repository, Access::Read), (&hooks, Access::Write)],
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
    assert_eq!(place.names(), [".git", "file"], "mount points made before the refusal are removed");
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

fn no_crash_starts_a_core_handler() {
    let (mut spawner, place) = (Spawner::start(), Place::new());
    // At 0 the kernel starts the handler of a piped core_pattern all the same; a shell that turns core files off changes nothing.
    let script = shell("ulimit -c 0 && sed -n 's/ \\+/ /g; s/^Max core file size //p' /proc/self/limits");
    let confined = spawner.run(&script, Some(&place.policy())).0;
    assert_eq!((confined.stdout.as_str(), confined.stderr.as_str()), ("1 1 bytes \n", ""));
    // The control.
    assert_eq!(spawner.run(&script, None).0.stdout, "0 0 bytes \n");
    spawner.close();
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

/// A descriptor of the terminal leads to the read-only mount of the view, not to the machine's, on which its mode can be changed.
fn a_terminal_is_opened_to_no_other_user() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let script = "chmod 666 /proc/self/fd/0; echo mode $?; touch -c -d @1 /proc/self/fd/1; echo time $?; echo >/dev/tty; tty";
    for (id, policy) in [(1, Some(place.policy())), (2, None)] {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = OwnedFd::from(File::options().read(true).write(true).open(&name).unwrap());
        let mode = || rustix::fs::stat(name.as_str()).unwrap().st_mode & 0o777;
        let before = mode();
        let confined = policy.is_some();
        let request = SpawnerRequest::Start {
            id,
            session: "s".to_owned(),
            tty: true,
            policy: policy.map(|policy| Bytes(policy.encode())),
            own_view: confined,
            own_network: confined,
            own_uid: confined,
            allow_unprotected: true,
            limits: Default::default(),
            command: Bytes(encoded(&shell(script))),
        };
        spawner.send(&request, &[terminal]);
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        assert!(matches!(spawner.event(), SpawnerEvent::Exited { status: ExitStatus::Code(0), .. }));
        let after = mode();
        let lines = BufReader::new(File::from(master)).lines().map_while(Result::ok);
        let said: Vec<String> = lines.filter(|line| !line.is_empty()).collect();
        if confined {
            let words = ["Read-only file system", "mode 1", "Read-only file system", "time 1", "/dev/console"];
            assert!(said.len() == words.len() && said.iter().zip(words).all(|(line, word)| line.contains(word)), "{said:?}");
            assert_eq!(after, before);
        } else {
            // The control.
            assert_eq!((said.as_slice(), after), (["mode 0", "time 0", name.as_str()].map(str::to_owned).as_slice(), 0o666));
        }
    }
    spawner.close();
}

//! Mount points for names that do not exist: what they hold, and what is left of them.

use super::*;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, test_kill_process};

pub(super) fn absent_names_are_held_and_nothing_is_left() {
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

pub(super) fn nothing_is_left_after_any_death() {
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
    let remover = pidfd_open(Pid::from_raw(super::super::races::remover(&spawner)).unwrap(), PidfdFlags::empty()).unwrap();
    spawner.process.kill().unwrap();
    spawner.process.wait().unwrap();
    // The program held the other end.
    stdout.read_to_end(&mut Vec::new()).unwrap();
    // The remover cleans up before it ends.
    ended(&init);
    ended(&remover);
    assert!(is_clean(), "{:?}", place.names());
}

pub(super) fn the_end_of_one_sandbox_does_not_lift_what_another_holds() {
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

pub(super) fn what_was_left_behind_goes_with_the_next_sandbox() {
    let place = Place::new();
    let mut spawner = Spawner::start();
    let (init, mut stdout) = start_waiting(&mut spawner, &place, 1);
    // None of them can clean up. The init is stopped, so that it does not see the spawner's end, and the spawner, so that it makes no
    // other remover.
    let process = |pid| Pid::from_raw(pid).unwrap();
    let helper = process(spawner.pid());
    kill_process(init, Signal::STOP).unwrap();
    kill_process(helper, Signal::STOP).unwrap();
    kill_process(process(super::super::races::remover(&spawner)), Signal::KILL).unwrap();
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

pub(super) fn many_at_once_share_what_they_hold() {
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

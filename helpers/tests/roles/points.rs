//! Mount points of absent names, and their removal.

use super::gateway::{RECORDS, Spawner, policy, shell};
use super::races::remover;
use super::sandbox::ended;
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent};
use portcullis_sandbox::policy::{Access, Policy};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, umask};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("points::a_strangers_lock_stops_no_start", a_strangers_lock_stops_no_start),
    ("points::the_mode_is_exact_whatever_the_mask", the_mode_is_exact_whatever_the_mask),
    ("points::a_directory_without_a_record_stays", a_directory_without_a_record_stays),
    ("points::nothing_is_left_after_the_death_of_the_remover", nothing_is_left_after_the_death_of_the_remover),
    ("points::any_deaths_leave_no_name_bare_and_none_behind", any_deaths_leave_no_name_bare_and_none_behind),
];

fn workspace() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().canonicalize().unwrap();
    (directory, path)
}

fn writable(workspace: &Path) -> Policy {
    policy(&[(Path::new("/"), Access::Read), (workspace, Access::Write)])
}

fn names(workspace: &Path) -> Vec<PathBuf> {
    fs::read_dir(workspace).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn records() -> usize {
    let entries = fs::read_dir(RECORDS.get().unwrap()).unwrap();
    // Beside them there is the file with the locks of user ids.
    entries.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_symlink()).count()
}

/// Starts something that waits for ever. Its init.
fn start(spawner: &mut Spawner, id: u64, workspace: &Path) -> i32 {
    let (stdout, _stderr) = spawner.start_process(id, &shell("echo on; exec sleep 1000"), Some(&writable(workspace)));
    let pid = match spawner.event() {
        SpawnerEvent::Started { pid, .. } => pid,
        other => panic!("{other:?}"),
    };
    BufReader::new(stdout).read_line(&mut String::new()).unwrap();
    pid
}

fn kill(pid: i32) {
    // It may have ended by itself meanwhile.
    let _ended = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

fn a_strangers_lock_stops_no_start() {
    let ((_directory, workspace), mut spawner) = (workspace(), Spawner::start());
    let git = workspace.join(".git");
    fs::create_dir(&git).unwrap();
    fs::set_permissions(&git, fs::Permissions::from_mode(0o1755)).unwrap();
    let lock = File::open(&git).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    let act = shell(&format!("mkdir {}/x", git.display()));
    for _start in 0..2 {
        assert_ne!(spawner.run(&act, Some(&writable(&workspace))).0.status, ExitStatus::Code(0), "protected all the same");
    }
    // The control.
    assert_eq!(spawner.run(&act, None).0.status, ExitStatus::Code(0));
    spawner.close();
    assert!(git.join("x").is_dir());
}

fn the_mode_is_exact_whatever_the_mask() {
    let (_directory, workspace) = workspace();
    // Helpers inherit it, and so do programs.
    let mask = umask(Mode::from_raw_mode(0o077));
    let mut spawner = Spawner::start();
    umask(mask);
    start(&mut spawner, 1, &workspace);
    assert_eq!(fs::metadata(workspace.join(".git")).unwrap().mode() & 0o7777, 0o1755);
    let (outcome, _) = spawner.run(&shell("umask"), Some(&writable(&workspace)));
    assert_eq!(outcome.stdout, "0077\n", "the control: nothing else is made with another one");
    spawner.close();
}

fn a_directory_without_a_record_stays() {
    let ((_directory, workspace), mut spawner) = (workspace(), Spawner::start());
    let own = workspace.join("own");
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o1755)).unwrap();
    let inode = fs::metadata(&own).unwrap().ino();
    let absent = workspace.join("absent");
    for writes in [Access::Read, Access::Write] {
        let denying =
            policy(&[(Path::new("/"), Access::Read), (&workspace, writes), (&own, Access::Deny), (&absent, Access::Deny)]);
        let look = shell(&format!("ls {}", own.display()));
        assert_ne!(spawner.run(&look, Some(&denying)).0.status, ExitStatus::Code(0));
        assert_eq!(fs::metadata(&own).unwrap().ino(), inode);
        assert!(!absent.exists(), "the control: a mount point of a sandbox is removed");
    }
    spawner.close();
    assert_eq!(names(&workspace), [own]);
}

fn nothing_is_left_after_the_death_of_the_remover() {
    let ((_directory, workspace), mut spawner) = (workspace(), Spawner::start());
    // While a sandbox runs, with its init, and of both it and the spawner.
    let init = start(&mut spawner, 1, &workspace);
    let old = remover(&spawner);
    kill(old);
    while remover(&spawner) == old {}
    assert_eq!(names(&workspace).len(), 4, "still held");
    kill(init);
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 1, .. }));
    assert_eq!(names(&workspace).len(), 0);
    let init = start(&mut spawner, 2, &workspace);
    let init = pidfd_open(Pid::from_raw(init).unwrap(), PidfdFlags::empty()).unwrap();
    let last = remover(&spawner);
    spawner.process.kill().unwrap();
    kill(last);
    spawner.process.wait().unwrap();
    ended(&init);
    // Left behind, by all; the next server of the user removes it at its start, or with the next sandbox.
    let mut next = Spawner::start();
    assert_eq!(next.run(&shell("true"), Some(&writable(&workspace))).0.status, ExitStatus::Code(0));
    next.close();
    assert_eq!((names(&workspace).len(), records()), (0, 0));
}

fn any_deaths_leave_no_name_bare_and_none_behind() {
    let (_directory, workspace) = workspace();
    // Which dies when is of no matter, only that all do.
    let mut state = 1_u32;
    let mut draw = |most: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % most
    };
    // Another server's sandbox holds the same names all the time.
    let mut steady = Spawner::start();
    start(&mut steady, 1, &workspace);
    for _round in 0..6 {
        let mut spawner = Spawner::start();
        let (inits, removing) = ((1..=4).map(|id| start(&mut spawner, id, &workspace)).collect::<Vec<_>>(), remover(&spawner));
        let pidfds: Vec<_> =
            inits.iter().map(|pid| pidfd_open(Pid::from_raw(*pid).unwrap(), PidfdFlags::empty()).unwrap()).collect();
        let spawner_pid = spawner.pid();
        let mut victims = [inits, vec![removing, spawner_pid]].concat();
        while !victims.is_empty() {
            let nth = draw(u32::try_from(victims.len()).unwrap());
            kill(victims.swap_remove(usize::try_from(nth).unwrap()));
            assert_eq!(names(&workspace).len(), 4, "held by the other one");
        }
        spawner.process.wait().unwrap();
        pidfds.iter().for_each(ended);
        assert_eq!(names(&workspace).len(), 4, "held by the other one");
    }
    steady.close();
    // A mount point that was locked by another process is removed by the next server.
    let mut next = Spawner::start();
    assert_eq!(next.run(&shell("true"), Some(&writable(&workspace))).0.status, ExitStatus::Code(0));
    next.close();
    assert_eq!((names(&workspace).len(), records()), (0, 0));
}

//! What others do while a sandbox is made or ends.

use super::gateway::{Spawner, policy, shell};
use crate::Test;
use portcullis_protocol::helper::SpawnerEvent;
use portcullis_sandbox::policy::{Access, Policy};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const TESTS: &[Test] = &[
    ("races::a_removal_that_is_killed_is_done_again", a_removal_that_is_killed_is_done_again),
    ("races::what_comes_in_the_way_of_a_denied_name_does_not_bare_it", what_comes_in_the_way_of_a_denied_name_does_not_bare_it),
];

fn workspace() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().canonicalize().unwrap();
    (directory, path)
}

/// Children of a process; none once it has ended.
pub(crate) fn children(pid: i32) -> BTreeSet<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// The process of a spawner that removes mount points. It takes its name a moment after it was forked.
pub(crate) fn remover(spawner: &Spawner) -> i32 {
    let name = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    loop {
        let found = children(spawner.pid()).into_iter().find(|pid| name(pid) == "remover\n");
        if let Some(found) = found {
            return found;
        }
        std::thread::yield_now();
    }
}

fn a_removal_that_is_killed_is_done_again() {
    let (_directory, workspace) = workspace();
    let fifo = workspace.join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let writable = policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write)]);
    let mut spawner = Spawner::start();
    let mut killed = 0_usize;
    for id in 1..=30 {
        let (stdout, _stderr) =
            spawner.start_process(id, &shell(&format!("echo on && exec cat {}", fifo.display())), Some(&writable));
        let init = match spawner.event() {
            SpawnerEvent::Started { pid, .. } => pid,
            other => panic!("{other:?}"),
        };
        BufReader::new(stdout).read_line(&mut String::new()).unwrap();
        assert!(workspace.join(".git").is_dir(), "held while it runs");
        let remover = remover(&spawner);
        // It ends with its input.
        drop(File::create(&fifo).unwrap());
        // Those that remove are killed at a later moment in each round: before, while and after they do.
        for _moment in 0..id * 8 {
            std::thread::yield_now();
        }
        let is_running = children(spawner.pid()).contains(&init);
        for child in children(remover) {
            // It may have ended by itself meanwhile.
            let _ended = kill_process(Pid::from_raw(child).unwrap(), Signal::KILL);
            killed += usize::from(is_running);
        }
        assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: ended, .. } if ended == id));
        let left: Vec<_> = fs::read_dir(&workspace).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["fifo"], "{killed} were killed");
    }
    assert!(killed > 0);
    spawner.close();
}

fn what_comes_in_the_way_of_a_denied_name_does_not_bare_it() {
    let (_directory, workspace) = workspace();
    let place = workspace.join("a");
    let writable: &[(&Path, Access)] = &[(Path::new("/"), Access::Read), (&workspace, Access::Write)];
    let secret = place.join("b/secret");
    let denied = policy(&[writable, &[(&secret, Access::Deny)]].concat());
    let script = format!("cd {} && rm -f a; mkdir -p a/b && echo planted > a/b/secret && cat a/b/secret", workspace.display());
    let mut spawner = Spawner::start();
    let mut plants = |id: u64, policy: &Policy| {
        let (mut stdout, _stderr) = spawner.start_process(id, &shell(&script), Some(policy));
        // Refused is held, too.
        if let SpawnerEvent::Started { .. } = spawner.event() {
            assert!(matches!(spawner.event(), SpawnerEvent::Exited { .. }));
        }
        let mut said = String::new();
        stdout.read_to_string(&mut said).unwrap();
        let _made = fs::remove_dir_all(&place);
        said.contains("planted")
    };
    assert!(plants(1, &policy(writable)), "the control");
    let (stop, path) = (Arc::new(AtomicBool::new(false)), place.clone());
    let stopped = Arc::clone(&stop);
    let toggler = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            let _there = File::create_new(&path);
            let _gone = fs::remove_file(&path);
        }
    });
    let bare: Vec<u64> = (2..=80).filter(|id| plants(*id, &denied)).collect();
    stop.store(true, Ordering::Relaxed);
    toggler.join().unwrap();
    assert_eq!(bare, [0_u64; 0]);
    spawner.close();
}

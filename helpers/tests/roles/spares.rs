//! Inits that wait for an order: each serves one start, and what it is makes no difference to that.

use super::gateway::{Spawner, command, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent};
use portcullis_sandbox::policy::{Access, Network, Policy};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, kill_process, pidfd_open, test_kill_process};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

pub(crate) const TESTS: &[Test] = &[
    ("spares::each_serves_one_start", each_serves_one_start),
    ("spares::mounts_are_those_of_the_time_of_the_start", mounts_are_those_of_the_time_of_the_start),
    ("spares::one_that_ends_takes_nobody_along", one_that_ends_takes_nobody_along),
    ("spares::none_outlives_the_spawner", none_outlives_the_spawner),
    ("spares::what_does_not_fit_them_is_started_without", what_does_not_fit_them_is_started_without),
];

/// Writes what namespaces it is in, a line each, and waits to be killed.
const STAYS: &str = "readlink /proc/self/ns/net /proc/self/ns/ipc /proc/self/ns/pid /proc/self/ns/mnt && exec sleep 1000";

/// Nothing of it has to be given back, so that a spawner's children are who runs and who waits.
fn read_only() -> Policy {
    policy(&[(Path::new("/"), Access::Read)])
}

/// All but the remover.
fn children(spawner: &Spawner) -> BTreeSet<i32> {
    let remover = super::races::remover(spawner);
    super::races::children(spawner.pid()).into_iter().filter(|pid| *pid != remover).collect()
}

/// Has a sandbox come and go, and waits until two wait for the next.
fn with_spares(spawner: &mut Spawner) -> BTreeSet<i32> {
    assert_eq!(children(spawner).len(), 0, "before the first sandbox none waits");
    assert_eq!(lines(spawner, "true", &read_only()).len(), 0);
    loop {
        let waiting = children(spawner);
        if waiting.len() == 2 {
            return waiting;
        }
        std::thread::yield_now();
    }
}

fn lines(spawner: &mut Spawner, script: &str, policy: &Policy) -> Vec<String> {
    let (outcome, _) = spawner.run(&shell(script), Some(policy));
    assert_eq!(outcome.status, ExitStatus::Code(0), "{}", outcome.stderr);
    outcome.stdout.lines().map(str::to_owned).collect()
}

/// Starts a process that waits to be killed. Its init, and its namespaces.
fn start(spawner: &mut Spawner, id: u64) -> (i32, Vec<String>) {
    let (stdout, _stderr) = spawner.start_process(id, &shell(STAYS), Some(&read_only()));
    let pid = match spawner.event() {
        SpawnerEvent::Started { id: started, pid, .. } if started == id => pid,
        other => panic!("{other:?}"),
    };
    (pid, BufReader::new(stdout).lines().take(4).map(Result::unwrap).collect())
}

fn each_serves_one_start() {
    let mut spawner = Spawner::start();
    let waiting = with_spares(&mut spawner);
    // Each of them has everything to itself, and none of the machine's. The number of one that is gone is given again.
    let machine = ["net", "ipc", "pid", "mnt"].map(|name| fs::read_link(format!("/proc/self/ns/{name}")).unwrap());
    let mut seen: BTreeSet<String> = machine.map(|link| link.into_os_string().into_string().unwrap()).into();
    let mut inits = BTreeSet::new();
    for id in 1..=6 {
        let (init, namespaces) = start(&mut spawner, id);
        assert!(inits.insert(init));
        assert_eq!(namespaces.len(), 4);
        for namespace in namespaces {
            assert!(seen.insert(namespace.clone()), "{namespace} serves twice");
        }
    }
    assert!(waiting.is_subset(&inits), "{inits:?} are none of {waiting:?}");
    spawner.close();
}

fn mounts_are_those_of_the_time_of_the_start() {
    if !geteuid().is_root() {
        // Nobody else may mount anything outside of a sandbox.
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let place = directory.path().canonicalize().unwrap();
    let script = format!("ls {}", place.display());
    let mut spawner = Spawner::start();
    with_spares(&mut spawner);
    mount("tmpfs", &place, "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(place.join("later"), "").unwrap();
    let seen = lines(&mut spawner, &script, &read_only());
    unmount(&place, UnmountFlags::empty()).unwrap();
    assert_eq!(seen, ["later"]);
    // The control: it was on the mount.
    assert_eq!(lines(&mut spawner, &script, &read_only()).len(), 0);
    spawner.close();
}

fn one_that_ends_takes_nobody_along() {
    let mut spawner = Spawner::start();
    with_spares(&mut spawner);
    let (runs, _) = start(&mut spawner, 1);
    let waiting: Vec<i32> = children(&spawner).into_iter().filter(|pid| *pid != runs).collect();
    assert!(!waiting.is_empty());
    for pid in &waiting {
        kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL).unwrap();
    }
    // Until the spawner has heard of it.
    while children(&spawner).iter().any(|pid| waiting.contains(pid)) {
        std::thread::yield_now();
    }
    assert_eq!(lines(&mut spawner, "echo still", &read_only()), ["still"]);
    assert!(test_kill_process(Pid::from_raw(runs).unwrap()).is_ok(), "the one that runs goes on");
    assert_eq!(lines(&mut spawner, "echo again", &read_only()), ["again"]);
    spawner.close();
}

fn none_outlives_the_spawner() {
    let mut spawner = Spawner::start();
    let waiting = with_spares(&mut spawner);
    let watched: Vec<_> =
        waiting.iter().map(|pid| pidfd_open(Pid::from_raw(*pid).unwrap(), PidfdFlags::empty()).unwrap()).collect();
    spawner.process.kill().unwrap();
    spawner.process.wait().unwrap();
    watched.iter().for_each(super::sandbox::ended);
}

fn what_does_not_fit_them_is_started_without() {
    let mut spawner = Spawner::start();
    with_spares(&mut spawner);
    // More than an order may be.
    let long = "x".repeat(100 * 1024);
    let (outcome, _) = spawner.run(&command(&["/bin/sh", "-c", "echo ${#LONG}"], &[("LONG", &long)]), Some(&read_only()));
    assert_eq!((outcome.status, outcome.stdout.trim()), (ExitStatus::Code(0), "102400"), "{}", outcome.stderr);

    // They have a network of their own, which this one shall not have.
    let machine = fs::read_link("/proc/self/ns/net").unwrap().into_os_string().into_string().unwrap();
    let online = Policy { network: Network::Enabled, ..read_only() };
    assert_eq!(lines(&mut spawner, "readlink /proc/self/ns/net", &online), [machine.as_str()]);
    assert_ne!(lines(&mut spawner, "readlink /proc/self/ns/net", &read_only()), [machine.as_str()]);
    spawner.close();
}

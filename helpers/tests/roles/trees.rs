//! Nothing outlives anything: what is left of processes ends with them, with their session, and with everybody above.

use super::gateway::{Spawner, command, shell};
use super::spawner::{done, ended};
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent, SpawnerRequest};
use portcullis_protocol::limit::{LimitReached, Scope, SessionLimits};
use rustix::process::{Pid, test_kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU64;

pub(crate) const TESTS: &[Test] = &[
    ("trees::the_end_of_the_gateway_ends_daemons_too", the_end_of_the_gateway_ends_daemons_too),
    ("trees::a_killed_spawner_takes_daemons_along", a_killed_spawner_takes_daemons_along),
    ("trees::a_daemon_ends_with_its_process_and_with_its_session", a_daemon_ends_with_its_process_and_with_its_session),
    ("trees::a_daemon_ends_after_its_process_has_ended", a_daemon_ends_after_its_process_has_ended),
    ("trees::whoever_kills_its_keeper_ends_with_it", whoever_kills_its_keeper_ends_with_it),
    ("trees::a_chain_of_forks_is_ended", a_chain_of_forks_is_ended),
    ("trees::a_session_is_bounded_as_a_whole", a_session_is_bounded_as_a_whole),
    ("trees::a_group_is_killed_after_its_leader_ended", a_group_is_killed_after_its_leader_ended),
];

/// Starts a process whose grandchild leaves its session and its group; yields what it writes to and its process id.
fn start_daemon(spawner: &mut Spawner) -> (BufReader<File>, Pid) {
    let script = "setsid -f sh -c 'echo $$; exec sleep 1000'; sleep 1000 & wait";
    let (stdout, _stderr) = spawner.start_process(1, &shell(script), None);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let daemon = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    test_kill_process(daemon).unwrap();
    (stdout, daemon)
}

fn the_end_of_the_gateway_ends_daemons_too() {
    let mut spawner = Spawner::start();
    let (mut stdout, daemon) = start_daemon(&mut spawner);
    spawner.close();
    // The spawner has reaped it before it ended itself, and nobody holds the output any more.
    assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
    assert!(test_kill_process(daemon).is_err());
}

fn a_killed_spawner_takes_daemons_along() {
    let mut spawner = Spawner::start();
    let (mut stdout, _daemon) = start_daemon(&mut spawner);
    spawner.process.kill().unwrap();
    spawner.process.wait().unwrap();
    assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
}

fn a_daemon_ends_with_its_process_and_with_its_session() {
    for request in [SpawnerRequest::Signal { id: 1, signal: 9 }, SpawnerRequest::EndSession { session: "s".to_owned() }] {
        let mut spawner = Spawner::start();
        let (mut stdout, daemon) = start_daemon(&mut spawner);
        spawner.send(&SpawnerRequest::EndSession { session: "of others".to_owned() }, &[]);
        assert_eq!(spawner.run(&command(&["/bin/true"], &[]), None).0, done(""));
        test_kill_process(daemon).unwrap();
        spawner.send(&request, &[]);
        assert_eq!(spawner.event(), ended(1, ExitStatus::Signal(9)));
        assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
        assert!(test_kill_process(daemon).is_err(), "reaped before its end was told");
        spawner.close();
    }
}

fn a_daemon_ends_after_its_process_has_ended() {
    for last in ["exit 3", "kill -KILL $$"] {
        let mut spawner = Spawner::start();
        // The daemon's own parent is gone too, before the program ends.
        let script = format!("setsid -f sh -c 'setsid -f sh -c \"echo on; exec sleep 1000\"'; {last}");
        let (stdout, _stderr) = spawner.start_process(1, &shell(&script), None);
        assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
        assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 1, .. }));
        let mut stdout = BufReader::new(stdout);
        assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 3, "it lives, and says so");
        spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
        assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
        spawner.close();
    }
}

fn whoever_kills_its_keeper_ends_with_it() {
    let mut spawner = Spawner::start();
    let script = "setsid -f sh -c 'echo on; exec sleep 1000'; setsid -f sh -c 'setsid -f sleep 1000; exec sleep 1000'; \
                  kill -KILL $PPID; exec sleep 1000";
    let (stdout, _stderr) = spawner.start_process(1, &shell(script), None);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    let mut text = String::new();
    BufReader::new(stdout).read_to_string(&mut text).unwrap();
    assert_eq!(spawner.event(), ended(1, ExitStatus::Signal(9)));
    assert_eq!(spawner.run(&command(&["/bin/echo", "on"], &[]), None).0, done("on\n"), "the others go on");
    spawner.close();
}

fn a_chain_of_forks_is_ended() {
    let mut spawner = Spawner::start();
    // Each starts the next, in a session of its own, for ever: whoever goes down one generation at a time never sees the last.
    let link = "echo on; setsid sh -c \"$0\" \"$0\" & setsid sleep 1000 & wait";
    let (stdout, _stderr) =
        spawner.start_process(1, &command(&["/bin/sh", "-c", link, link], &[("PATH", "/usr/bin:/bin")]), None);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    let mut stdout = BufReader::new(stdout);
    for _generation in 0..100 {
        stdout.read_line(&mut String::new()).unwrap();
    }
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    // Ends only when none of them is left.
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    assert_eq!(spawner.event(), ended(1, ExitStatus::Signal(9)));
    spawner.close();
}

fn a_group_is_killed_after_its_leader_ended() {
    let mut spawner = Spawner::start();
    let (stdout, _stderr) = spawner.start_process(1, &shell("sleep 1000 & echo on"), None);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
    assert_eq!(spawner.event(), ended(1, ExitStatus::Code(0)));
    let mut stdout = BufReader::new(stdout);
    stdout.read_line(&mut String::new()).unwrap();
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    // Ends only when the last of the group has let go of the pipe.
    assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
    spawner.close();
}

/// Only cgroups count a session. Where none can be made the spawner says so, and the gateway does not start.
fn a_session_is_bounded_as_a_whole() {
    let limited = SessionLimits { processes: NonZeroU64::new(8), ..SessionLimits::default() };
    let children =
        |most: u32| format!("n=0; while [ $n -lt {most} ]; do sleep 1000 >/dev/null 2>&1 & n=$((n+1)); done; echo on; wait");
    for (limits, is_limited) in [(SessionLimits::default(), false), (limited, true)] {
        let (mut spawner, cgroups) = Spawner::start_with(limits);
        // The shell and its four: five of eight.
        let (stdout, _stderr) = spawner.start_process(1, &shell(&children(4)), None);
        assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
        assert_eq!(BufReader::new(stdout).read_line(&mut String::new()).unwrap(), 3);
        // Another one that would be five.
        let (stdout, _stderr) = spawner.start_process(2, &shell(&children(4)), None);
        assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 2, .. }));
        let said = BufReader::new(stdout).read_line(&mut String::new()).unwrap();
        if is_limited && cgroups.processes {
            assert_eq!(said, 0, "its shell cannot fork, and ends");
            let SpawnerEvent::Exited { id: 2, limits, status, .. } = spawner.event() else { panic!("it ends") };
            assert_ne!(status, ExitStatus::Code(0));
            let reached = LimitReached { limit: "processes".to_owned(), value: 8, used: 8, scope: Scope::Session };
            assert_eq!(limits, [reached]);
        } else {
            assert!(!is_limited || !cgroups.reason.is_empty(), "{cgroups:?}");
            assert_eq!(said, 3, "nothing holds it");
        }
        spawner.send(&SpawnerRequest::EndSession { session: "s".to_owned() }, &[]);
        spawner.close();
    }
}

//! The ends of processes, of their sandboxes and of what left them.

use super::{Set, read_only, workspace_write};
use portcullis_tests::{Client, Place, Server, Watched};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;

/// What identifies a daemon: the last word of its command line.
fn mark(place: &Place) -> String {
    format!("daemon-of-{}", place.path("").file_name().unwrap().to_str().unwrap())
}

/// Leaves its session, its group and its pipes, and waits for ever.
fn daemon(place: &Place) -> String {
    let fifo = place.path("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let _there = rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0);
    let inner = format!("echo ready; exec >/dev/null 2>&1 </dev/null; read x <{}", fifo.display());
    format!("setsid sh -c '{inner}' {} &", mark(place))
}

/// The processes, as the machine sees them, of the daemons of a place.
fn daemons(place: &Place) -> Vec<i32> {
    let mark = mark(place);
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).trim_end_matches('\0').split('\0').next_back() == Some(&mark)
    })
    .collect()
}

/// Starts a program that makes a daemon and then does `after`, and watches the daemon.
async fn start(client: &mut Client, place: &Place, id: &str, after: &str, mut more: Value) -> Watched {
    let script = format!("{} read x; {after}", daemon(place));
    more["pipeStdin"] = json!(true);
    client.start(place, id, &["sh", "-c", &script], more).await;
    client.output(id, "ready\n").await;
    let found = daemons(place);
    assert_eq!(found.len(), 1, "{found:?}");
    let watched = Watched::new(found[0]);
    client.ok("process/write", json!({"processId": id, "chunk": "Cg==", "writeId": "1"})).await;
    if after == "exit" {
        assert_eq!(client.events(id).await.code(), 0);
        assert_eq!(daemons(place).len(), 1, "it lives on after the program");
    }
    watched
}

#[tokio::test]
async fn terminate_ends_a_sandbox_with_its_daemons() {
    let mut set = Set::new().await;
    let (sandboxes, place) = ([read_only(), workspace_write(&set.place, &[])], Place::new());
    let confined = json!({"sandbox": sandboxes[1]});
    let ways = [(true, json!({"sandbox": sandboxes[0]})), (true, confined.clone()), (true, json!({})), (false, confined)];
    for (nth, (is_whole, more)) in ways.into_iter().enumerate() {
        for after in ["exec sleep 600", "exit"] {
            let client = if is_whole { &mut set.with } else { &mut set.without };
            let id = format!("p{nth}{}", after.len());
            let watched = start(client, &place, &id, after, more.clone()).await;
            assert_eq!(daemons(&place).len(), 1, "the control: it lives until somebody ends it");
            client.ok("process/terminate", json!({"processId": id})).await;
            watched.ended().await;
        }
    }
}

#[tokio::test]
async fn the_end_of_the_gateway_ends_every_daemon() {
    let place = Place::new();
    let sandbox = json!({"sandbox": workspace_write(&place, &[])});
    place.directory("ws");
    for signal in [Signal::TERM, Signal::KILL] {
        for (is_whole, after, more) in [
            (true, "exec sleep 600", &sandbox),
            (true, "exit", &sandbox),
            (false, "exec sleep 600", &sandbox),
            (false, "exit", &sandbox),
            (true, "exit", &json!({})),
            (true, "exec sleep 600", &json!({})),
        ] {
            let accepting = ["--allow-unprotected-metadata"];
            let mut server = if is_whole { Server::start().await } else { Server::without(&["namespaces"], &accepting).await };
            let mut client = Client::connect(&server).await;
            let watched = start(&mut client, &place, "p", after, more.clone()).await;
            server.program.signal(signal);
            server.program.wait().await;
            watched.ended().await;
        }
    }
}

/// Starts a program with a daemon, cuts the connection, and waits until the daemon has ended with the session.
async fn ended_with_its_session(after: &str) {
    let place = Place::new();
    for more in [json!({"sandbox": read_only()}), json!({})] {
        let server = Server::with_arguments(&["--detached-retention", "1"]).await;
        let mut client = Client::connect(&server).await;
        let watched = start(&mut client, &place, "p", after, more).await;
        client.cut();
        watched.ended().await;
    }
}

#[tokio::test]
async fn the_end_of_a_session_ends_the_daemons_of_its_sandboxes() {
    ended_with_its_session("exec sleep 600").await;
}

#[tokio::test]
async fn the_end_of_a_session_ends_the_daemons_of_sandboxes_whose_program_has_ended() {
    ended_with_its_session("exit").await;
}

#[tokio::test]
async fn nothing_stays_a_zombie() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    // Each leaves grandchildren behind that end after their parent.
    let script = "for n in 1 2 3; do (sleep 0.1 &) ; done; exit 0";
    for _round in 0..10 {
        set.run(&sandbox, &["sh", "-c", script], &json!({})).await;
    }
    for server in [&set.whole, &set.bare] {
        let gateway = server.program.child.id().unwrap().cast_signed();
        let is_clean = async {
            while descendants(gateway).iter().any(|(_, state)| *state == 'Z') {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(portcullis_tests::PATIENCE, is_clean)
            .await
            .unwrap_or_else(|_late| panic!("{:?}", descendants(gateway)));
    }
}

/// Every process below one, with its state.
fn descendants(of: i32) -> Vec<(i32, char)> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let all: Vec<(i32, i32, char)> = pids
        .filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut words = stat.rsplit_once(')')?.1.split_whitespace();
            let state = words.next()?.chars().next()?;
            Some((pid, words.next()?.parse().ok()?, state))
        })
        .collect();
    let mut found: Vec<(i32, char)> = Vec::new();
    let mut open = vec![of];
    while let Some(parent) = open.pop() {
        for (pid, _, state) in all.iter().filter(|(_, its, _)| *its == parent) {
            found.push((*pid, *state));
            open.push(*pid);
        }
    }
    found
}

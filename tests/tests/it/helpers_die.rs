//! Helpers that are killed.

use portcullis_tests::{Client, PATIENCE, Place, Server, Watched, executable, portcullis_at};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The processes whose parent is `parent` and whose command line holds `word`.
fn children(parent: u32, word: &str) -> Vec<i32> {
    let numbers = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter(|pid| {
            let line = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let stat = String::from_utf8_lossy(&line("stat")).into_owned();
            let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            let is_child = behind_name.split_whitespace().nth(1) == Some(&parent.to_string());
            is_child && String::from_utf8_lossy(&line("cmdline")).split('\0').any(|part| part == word)
        })
        .collect()
}

/// The one above the spawner.
fn warden(server: &Server) -> i32 {
    let found = children(server.program.child.id().unwrap(), "spawner");
    assert_eq!(found.len(), 1, "one warden");
    found[0]
}

fn spawner(server: &Server) -> i32 {
    let found = children(warden(server).unsigned_abs(), "spawner");
    // The keepers of processes without a sandbox are forks of it and look alike.
    found.into_iter().min().expect("a spawner")
}

/// Everything below a process.
fn below(pid: i32) -> Vec<i32> {
    let mut found = vec![pid];
    let mut at = 0;
    while at < found.len() {
        let tasks = fs::read_dir(format!("/proc/{}/task", found[at])).into_iter().flatten().flatten();
        let texts: Vec<String> = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
        found.extend(texts.iter().flat_map(|text| text.split_whitespace().map(|word| word.parse::<i32>().unwrap())));
        at += 1;
    }
    found
}

/// Waits until the server says that it is ready; how often it said otherwise.
async fn ready(server: &Server) -> usize {
    let address = server.url.strip_prefix("ws://").unwrap();
    let waited = async {
        let mut refusals = 0;
        loop {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await.unwrap();
            if answer.starts_with("HTTP/1.1 200") {
                return refusals;
            }
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("the spawner has died"), "{answer}");
            refusals += 1;
        }
    };
    timeout(PATIENCE, waited).await.expect("a server that is ready again")
}

fn descriptors(server: &Server) -> usize {
    fs::read_dir(format!("/proc/{}/fd", server.program.child.id().unwrap())).unwrap().count()
}

fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[tokio::test]
async fn a_killed_worker_loses_its_calls_and_is_replaced() {
    let server = Server::start().await;
    let place = Place::new();
    let uri = place.put("f", "content");
    let mut client = Client::connect(&server).await;
    // A call that had not left the gateway when its worker died goes to another one, so a single try proves nothing.
    let mut was_lost = false;
    for _try in 0..50 {
        client.ok("fs/readFile", json!({"path": uri})).await;
        let workers = children(spawner(&server).unsigned_abs(), "worker");
        assert!(!workers.is_empty());
        // Stopped, they take requests and answer none; killed, they never will.
        for worker in &workers {
            send(*worker, Signal::STOP);
        }
        let read = client.begin("fs/readFile", json!({"path": uri})).await;
        client.ok("environment/status", json!({})).await;
        let watched: Vec<Watched> = workers.iter().map(|worker| Watched::new(*worker)).collect();
        for worker in &workers {
            send(*worker, Signal::KILL);
        }
        for worker in watched {
            worker.ended().await;
        }
        match client.answer(read).await {
            Ok(_) => {}
            Err(lost) => {
                assert!(lost.code == -32603 && lost.message.contains("lost"), "{lost:?}");
                was_lost = true;
                break;
            }
        }
    }
    assert!(was_lost, "no call was in a worker's hands when it died");
    client.ok("fs/readFile", json!({"path": uri})).await;
}

#[tokio::test]
async fn a_replaced_executable_is_not_executed() {
    let place = Place::new();
    let (program, mark) = (place.path("portcullis"), place.path("mark"));
    fs::copy(executable("portcullis"), &program).unwrap();
    let server = Server::with(portcullis_at(&program, &["serve", "--insecure-no-auth"])).await;
    place.put("other", format!("#!/bin/sh\necho > {}\n", mark.display()));
    place.mode("other", 0o755);
    fs::rename(place.path("other"), &program).unwrap();
    let mut client = Client::connect(&server).await;
    let watched = Watched::new(spawner(&server));
    send(spawner(&server), Signal::KILL);
    watched.ended().await;
    // Another spawner replaces it, of the file that runs.
    client.run(&place, "p", &["true"], json!({})).await;
    assert!(!mark.exists());
    // The control: whoever executes that path leaves the mark.
    assert!(std::process::Command::new(&program).status().unwrap().success());
    assert!(mark.exists());
}

#[tokio::test]
async fn a_killed_spawner_ends_its_processes_by_name() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sh", "-c", "echo $$; exec sleep 600"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    send(spawner(&server), Signal::KILL);
    watched.ended().await;
    assert_eq!(client.events("p").await.code(), 137);
    // Another spawner replaces it, and new requests wait for that.
    client.run(&place, "q", &["true"], json!({})).await;
    client.ok("environment/status", json!({})).await;
}

#[tokio::test]
async fn a_hundred_killed_spawners_are_replaced_under_load() {
    let server = Server::start().await;
    let place = Place::new();
    let uri = place.put("f", "content");
    let confined = json!({"sandbox": {"type": "read-only"}});
    let mut clients = Vec::new();
    for _nth in 0..3 {
        clients.push(Client::connect(&server).await);
    }
    let mut open = 0;
    for round in 0..100 {
        let id = format!("p{round}");
        // Processes with a daemon each, confined and not, and unanswered file calls.
        let script = "setsid sleep 600 & echo up; exec sleep 600";
        for (client, more) in clients.iter_mut().zip([json!({}), confined.clone(), confined.clone()]) {
            client.start(&place, &id, &["sh", "-c", script], more).await;
            client.output(&id, "up\n").await;
        }
        let mut calls = Vec::new();
        for client in &mut clients {
            for params in [json!({"path": uri}), json!({"path": uri, "sandbox": {"type": "read-only"}})] {
                calls.push(client.begin("fs/readFile", params).await);
            }
        }
        let dead = below(warden(&server)).into_iter().filter_map(Watched::if_running).collect::<Vec<_>>();
        send(spawner(&server), Signal::KILL);
        for one in dead {
            one.ended().await;
        }
        for (client, calls) in clients.iter_mut().zip(calls.chunks(2)) {
            for call in calls {
                if let Err(lost) = client.answer(*call).await {
                    assert!(lost.code == -32603 && lost.message.contains("lost"), "{lost:?}");
                }
            }
            assert_eq!(client.events(&id).await.code(), 137);
            // New requests wait for the next spawner.
            let read = client.ok("fs/readFile", json!({"path": uri})).await;
            assert_eq!(read["dataBase64"], "Y29udGVudA==");
            assert_eq!(client.run(&place, &format!("q{round}"), &["true"], confined.clone()).await.code(), 0);
        }
        ready(&server).await;
        // Once everything was used.
        match round {
            9 => open = descriptors(&server),
            99 => {
                let settled = async {
                    while descriptors(&server) > open + 8 {
                        tokio::task::yield_now().await;
                    }
                };
                timeout(PATIENCE, settled).await.expect("descriptors that are closed");
            }
            _ => {}
        }
    }
    let address = server.url.strip_prefix("ws://").unwrap();
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut metrics = String::new();
    socket.read_to_string(&mut metrics).await.unwrap();
    assert!(metrics.contains("exec_server_spawners_replaced_total 100\n"), "{metrics}");
    assert!(metrics.contains("exec_server_helpers_active{role=\"spawner\"} 1\n"), "{metrics}");
}

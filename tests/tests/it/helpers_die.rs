//! Helpers that are killed.

use portcullis_tests::{Client, Place, Server, Watched};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs;

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

fn spawner(server: &Server) -> i32 {
    let found = children(server.program.child.id().unwrap(), "spawner");
    assert_eq!(found.len(), 1, "one spawner");
    found[0]
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
async fn a_killed_spawner_ends_its_processes_by_name() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sh", "-c", "echo $$; exec sleep 600"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    send(spawner(&server), Signal::KILL);
    watched.ended().await;
    assert_eq!(client.events("p").await.code(), 137);
    // Nothing can be started without a spawner: an error says so, and the connection stays.
    let refusal = client.refused("process/start", Client::start_params(&place, "q", &["true"])).await;
    assert!(refusal.code == -32603 && refusal.message.contains("the spawner has ended"), "{refusal:?}");
    client.ok("environment/status", json!({})).await;
}

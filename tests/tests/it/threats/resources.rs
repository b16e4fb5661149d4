//! What a request can make the gateway and its helpers use.

use super::{Set, read_only};
use portcullis_tests::{Client, Place, Server, executable};
use serde_json::json;
use std::fs;

/// The most memory that a process had, in KiB.
fn most_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn huge_and_sparse_files_cost_no_memory() {
    let mut set = Set::new().await;
    let gateway = set.whole.program.child.id().unwrap();
    for name in ["ws/small", "ws/huge"] {
        fs::File::create(set.place.path(name)).unwrap().set_len(if name == "ws/huge" { 1 << 40 } else { 1 << 16 }).unwrap();
    }
    let read = |name: &str| json!({"path": set.place.uri(name), "sandbox": read_only()});
    let (small, huge) = (read("ws/small"), read("ws/huge"));
    set.with.ok("fs/readFile", small).await;
    let before = most_memory(gateway);
    for _time in 0..8 {
        let refusal = set.with.refused("fs/readFile", huge.clone()).await;
        assert!(refusal.message.contains("limit") || refusal.message.contains("larger"), "{refusal:?}");
    }
    // A piece of it can be had, and costs no more than a piece.
    set.with.ok("fs/open", json!({"handleId": "h", "path": huge["path"], "sandbox": read_only()})).await;
    set.with.ok("fs/readBlock", json!({"handleId": "h", "offset": 1_u64 << 39, "len": 1 << 20})).await;
    assert!(most_memory(gateway) < before + (32 << 10), "{before} KiB before, {} KiB after", most_memory(gateway));
}

#[tokio::test]
async fn a_large_read_costs_the_gateway_less_than_three_times_the_file() {
    let mut set = Set::new().await;
    let gateway = set.whole.program.child.id().unwrap();
    let size = 64 << 20;
    fs::File::create(set.place.path("ws/large")).unwrap().set_len(size).unwrap();
    let before = most_memory(gateway);
    set.with.ok("fs/readFile", json!({"path": set.place.uri("ws/large"), "sandbox": read_only()})).await;
    let cost = (most_memory(gateway) - before) << 10;
    // Its text in base64 is a third more, and lies once in a reply and once in what is sent.
    assert!(cost < 3 * size, "{cost} bytes for a file of {size}");
}

#[tokio::test]
async fn a_gateway_out_of_descriptors_refuses_and_recovers() {
    let place = Place::new();
    place.put("ws/file", "content");
    let mut command = tokio::process::Command::new("/bin/sh");
    command.args(["-c", "ulimit -n 200; exec \"$0\" serve --insecure-no-auth"]).arg(executable("portcullis"));
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command.kill_on_drop(true);
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    let mut running = Vec::new();
    let refusal = loop {
        let id = format!("p{}", running.len());
        let mut params = Client::start_params(&place, &id, &["sleep", "600"]);
        params["pipeStdin"] = json!(true);
        params["sandbox"] = read_only();
        match client.call("process/start", params).await {
            Ok(_) => running.push(id),
            Err(refusal) => break refusal,
        }
        assert!(running.len() < 200, "each takes descriptors");
    };
    assert!(refusal.message.contains("(os error 24)"), "{refusal:?}");
    // What runs goes on, and with it gone everything works as before.
    for id in &running {
        assert_eq!(client.ok("process/terminate", json!({"processId": id})).await, json!({"running": true}));
        assert_eq!(client.events(id).await.code(), 137);
    }
    client.ok("fs/readFile", json!({"path": place.uri("ws/file"), "sandbox": read_only()})).await;
    assert_eq!(client.run(&place, "last", &["true"], json!({"sandbox": read_only()})).await.code(), 0);
    drop(Client::connect(&server).await);
}

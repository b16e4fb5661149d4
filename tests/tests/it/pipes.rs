//! Pipes of processes that write more than is read: they grow as far as there is a budget, and shrink again.

use portcullis_protocol::base64::decode;
use portcullis_tests::{Client, PATIENCE, Place, Server};
use rustix::fs::{Mode, OFlags, open};
use rustix::pipe::fcntl_getpipe_size;
use serde_json::{Value, json};
use tokio::time::timeout;

/// The size of a pipe that has grown.
const GROWN: usize = 1 << 20;

/// What a process of these tests writes once it is let go.
const FLOOD: usize = 16 << 20;

/// The size of the pipe that is a process's standard output. It is opened anew, to be read, and nothing is read.
fn size(pid: i32) -> usize {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    fcntl_getpipe_size(open(format!("/proc/{pid}/fd/1"), flags, Mode::empty()).unwrap()).unwrap()
}

/// Starts a process that waits for its input, writes, and waits again. Answers its id.
async fn start(client: &mut Client, place: &Place, id: &str, writes: &str) -> i32 {
    let script = format!("echo $$; read x; {writes}; read x");
    client.start(place, id, &["sh", "-c", &script], json!({"pipeStdin": true})).await;
    client.process_id(id).await
}

async fn go(client: &mut Client, id: &str) {
    let params = json!({"processId": id, "writeId": "go", "chunk": "Cg=="});
    assert_eq!(client.ok("process/write", params).await["status"], "accepted");
}

fn bytes(notice: &Value) -> usize {
    decode(notice["params"]["chunk"].as_str().unwrap()).unwrap().len()
}

/// Takes in a whole flood, and says whether the pipe was seen to have grown meanwhile.
async fn flood(client: &mut Client, place: &Place, id: &str) -> (i32, bool) {
    let pid = start(client, place, id, &format!("head -c {FLOOD} /dev/zero")).await;
    go(client, id).await;
    let (mut seen, mut has_grown) = (0, false);
    while seen < FLOOD {
        seen += bytes(&client.notice(id).await);
        has_grown |= size(pid) == GROWN;
    }
    assert_eq!(seen, FLOOD);
    (pid, has_grown)
}

#[tokio::test]
async fn a_pipe_grows_under_a_flood_and_shrinks_after_it() {
    let server = Server::start().await;
    let (mut client, place) = (Client::connect(&server).await, Place::new());
    let idle = start(&mut client, &place, "idle", "true").await;
    let made = size(idle);
    assert!(made < GROWN);
    let (pid, has_grown) = flood(&mut client, &place, "p").await;
    assert!(has_grown);
    let shrinks = async {
        while size(pid) != made {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, shrinks).await.expect("it shrinks once it is quiet");
    assert_eq!(size(idle), made);
    client.close().await;

    let server = Server::with_arguments(&["--pipe-bytes", "0"]).await;
    let mut client = Client::connect(&server).await;
    let (pid, has_grown) = flood(&mut client, &place, "p").await;
    assert!(!has_grown && size(pid) == made, "control: without a budget it stays as it was made");
    client.close().await;
    place.done();
}

#[tokio::test]
async fn all_pipes_grow_out_of_one_budget_and_what_one_gives_back_another_gets() {
    let server = Server::with_arguments(&["--pipe-bytes", "1048576"]).await;
    let (mut client, place) = (Client::connect(&server).await, Place::new());
    let mut pids = Vec::new();
    for id in ["a", "b", "c"] {
        pids.push((id, start(&mut client, &place, id, "exec cat /dev/zero").await));
    }
    for (id, _) in &pids {
        go(&mut client, id).await;
    }
    for others in [2, 1] {
        let (mut grown, mut seen) = (None, [0; 3]);
        // From when one has it on, the others write as much as would make them grow many times.
        while grown.is_none() || seen.iter().filter(|seen| **seen >= FLOOD / 8).count() <= others {
            let notice = timeout(PATIENCE, client.wait(|message| message["method"] == "process/output")).await.unwrap();
            let has_grown: Vec<&str> = pids.iter().filter(|(_, pid)| size(*pid) == GROWN).map(|(id, _)| *id).collect();
            assert!(has_grown.len() <= 1, "{has_grown:?}");
            grown = has_grown.first().copied();
            let from = pids.iter().position(|(id, _)| notice["params"]["processId"] == *id);
            if let (Some(_), Some(from)) = (grown, from) {
                seen[from] += bytes(&notice);
            }
        }
        let id = grown.unwrap();
        pids.retain(|(other, _)| *other != id);
        client.ok("process/terminate", json!({"processId": id})).await;
        let is_closed = |message: &Value| message["method"] == "process/closed" && message["params"]["processId"] == id;
        client.wait(is_closed).await;
    }
    let (last, pid) = pids[0];
    let grows = async {
        while size(pid) != GROWN {
            client.notice(last).await;
        }
    };
    timeout(PATIENCE, grows).await.expect("the last one gets it");
    client.close().await;
    place.done();
}

//! Sessions outlive their connections.

use portcullis_tests::{Client, Place, Server, Watched};
use serde_json::json;

#[tokio::test]
async fn what_was_missed_is_read_and_what_comes_is_announced() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    // The named pipes are the clock: the process goes on when the test lets it.
    for name in ["one", "two"] {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, place.path(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }
    let script = "echo before; read x <one; echo while; read x <two; echo after; exit 5";
    client.start(&place, "p", &["sh", "-c", script], json!({})).await;
    client.output("p", "before\n").await;
    let session = client.session.clone();
    client.cut();
    std::fs::write(place.path("one"), "\n").unwrap();
    let mut resumed = Client::resume(&server, &session).await;
    let page = resumed.ok("process/read", json!({"processId": "p", "afterSeq": 1, "waitMs": 60_000})).await;
    assert_eq!(page["chunks"][0]["seq"], 2);
    std::fs::write(place.path("two"), "\n").unwrap();
    let events = resumed.events("p").await;
    assert!(events.output(None).ends_with("after\n"));
    assert_eq!((events.code(), *events.seqs().last().unwrap()), (5, 5));
}

#[tokio::test]
async fn an_attached_session_is_not_taken_over() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    let mut other = Client::dial(&server.url).await;
    let refusal = other.initialize(Some(&client.session)).await.unwrap_err();
    assert_eq!(refusal.code, -32010);
    assert_eq!(refusal.message, format!("session {} is already attached to another connection", client.session));
    client.ok("environment/status", json!({})).await;
    other.initialize(None).await.unwrap();
    assert_ne!(other.session, client.session);
}

#[tokio::test]
async fn processes_are_private_to_their_session() {
    let server = Server::start().await;
    let place = Place::new();
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    one.start(&place, "p", &["sleep", "600"], json!({})).await;
    assert_eq!(two.refused("process/read", json!({"processId": "p"})).await.code, -32600);
    assert_eq!(two.ok("process/terminate", json!({"processId": "p"})).await, json!({"running": false}));
    assert_eq!(two.run(&place, "p", &["true"], json!({})).await.code(), 0);
    assert_eq!(one.ok("process/read", json!({"processId": "p"})).await["exited"], json!(false));
    assert_eq!(one.ok("process/terminate", json!({"processId": "p"})).await, json!({"running": true}));
}

#[tokio::test]
async fn a_pending_poll_holds_no_session_and_known_writes_are_remembered() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let write = |id: &str, chunk: &str| json!({"processId": "p", "chunk": chunk, "writeId": id});
    client.ok("process/write", write("w1", "YQo=")).await;
    client.output("p", "a\n").await;
    // A poll that waits must not hold the session when its connection is cut: the resume would never succeed.
    client.begin("process/read", json!({"processId": "p", "afterSeq": 1, "waitMs": 600_000})).await;
    let session = client.session.clone();
    client.cut();
    let mut resumed = Client::resume(&server, &session).await;
    assert_eq!(resumed.ok("process/write", write("w1", "YQo=")).await, json!({"status": "accepted"}));
    resumed.ok("process/write", write("w2", "Ygo=")).await;
    assert_eq!(resumed.notice("p").await["params"]["chunk"], json!("Ygo="), "the repeated write wrote nothing");
}

#[tokio::test]
async fn a_detached_session_ends_after_its_retention_with_its_processes() {
    let server = Server::with_arguments(&["--detached-retention", "1"]).await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sh", "-c", "echo $$; exec sleep 600"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    let session = client.session.clone();
    client.cut();
    watched.ended().await;
    let mut late = Client::dial(&server.url).await;
    let forgotten = async {
        loop {
            match late.initialize(Some(&session)).await {
                Err(refusal) if refusal.code == -32600 => break refusal,
                Err(_still_ending) => {}
                Ok(_) => panic!("the session should have ended"),
            }
        }
    };
    let refusal = tokio::time::timeout(portcullis_tests::PATIENCE, forgotten).await.unwrap();
    assert_eq!(refusal.message, format!("unknown session id {session}"));
}

//! Clients and processes that wait for one another: nothing stops for ever.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent};
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::{StartParams, WriteStatus};
use portcullis_tests::{Client, PATIENCE, Place, Server};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

#[tokio::test]
async fn input_that_waits_for_its_process_does_not_hold_up_what_makes_room_for_its_output() {
    const WRITES: usize = 600;
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let chunk = |nth: usize| format!("{nth:065535}\n");
    let mut calls = Vec::new();
    for nth in 0..WRITES {
        let params = json!({"processId": "p", "chunk": STANDARD.encode(chunk(nth)), "writeId": nth.to_string()});
        calls.push(client.begin("process/write", params).await);
    }
    // Each is taken, or refused at once: none waits for ever.
    let mut taken = String::new();
    for (nth, call) in calls.into_iter().enumerate() {
        match client.answer(call).await {
            Ok(answer) => {
                assert_eq!(answer, json!({"status": "accepted"}));
                taken.push_str(&chunk(nth));
            }
            Err(refusal) => assert_eq!(refusal.code, -32600, "{refusal:?}"),
        }
    }
    client.ok("process/closeStdin", json!({"processId": "p"})).await;
    let events = client.events("p").await;
    assert_eq!(events.code(), 0);
    assert!(events.output(None) == taken, "what was taken came back, in order");
}

#[tokio::test]
async fn the_same_change_many_times_at_once_is_done_once_and_holds_up_nothing() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let file = place.put("f", "");
    for round in 0..20 {
        let content = STANDARD.encode(vec![b'x'; 300_000]);
        let write = json!({"path": file, "dataBase64": content, "operationId": round.to_string()});
        let mut calls = Vec::new();
        for _ in 0..4 {
            calls.push(client.begin("fs/writeFile", write.clone()).await);
        }
        calls.push(client.begin("fs/createDirectory", json!({"path": place.uri("d")})).await);
        for call in calls {
            assert_eq!(client.answer(call).await.unwrap(), json!({}), "round {round}");
        }
    }
}

/// RFC 6455 section 5.5.3 lets a peer answer the newest ping alone.
#[tokio::test]
async fn a_client_that_answers_only_the_newest_ping_gets_everything() {
    const BYTES: usize = 24 << 20;
    let (server, place) = (Server::start().await, Place::new());
    let (mut socket, _response) = tokio_tungstenite::connect_async(&server.url).await.unwrap();
    let start = Client::start_params(&place, "p", &["head", "-c", &BYTES.to_string(), "/dev/zero"]);
    for message in [
        json!({"id": 1, "method": "initialize", "params": {"clientName": "test"}}),
        json!({"method": "initialized"}),
        json!({"id": 2, "method": "process/start", "params": start}),
    ] {
        socket.send(Message::text(message.to_string())).await.unwrap();
    }
    // The library answers every ping when it is flushed; reading alone, it keeps the newest answer only.
    let mut bytes = 0;
    loop {
        let message = timeout(PATIENCE, socket.next()).await.expect("it goes on").unwrap().unwrap();
        let Message::Text(text) = message else { continue };
        let notice: Value = serde_json::from_str(&text).unwrap();
        match notice["method"].as_str() {
            Some("process/output") => bytes += STANDARD.decode(notice["params"]["chunk"].as_str().unwrap()).unwrap().len(),
            Some("process/closed") => break,
            _ => {}
        }
    }
    assert_eq!(bytes, BYTES);
}

#[tokio::test]
async fn input_of_a_client_that_came_after_another_is_not_taken_for_the_others() {
    let (server, place) = (Server::start().await, Place::new());
    let options = ExecServerClientConnectOptions::new(&server.url, "test");
    let (first, task) = ExecServerClient::connect(&options).await.unwrap();
    let cwd = WirePath::parse(&place.uri("")).unwrap();
    let mut params = StartParams::new("p", vec!["/bin/cat".to_owned()], cwd);
    params.pipe_stdin = true;
    let mut process = first.start(&params).await.unwrap();
    let mut input = process.take_input().unwrap();
    assert_eq!(input.write(b"one\n".to_vec()).await.unwrap(), WriteStatus::Accepted);
    let session = first.session_id().to_owned();
    drop((input, process, first));
    task.await.unwrap();
    let mut options = options;
    options.take_over = true;
    let (second, task) = ExecServerClient::resume(&options, &session).await.unwrap();
    let mut process = second.attach("p", 0).await.unwrap();
    let mut input = process.take_input().unwrap();
    assert_eq!(input.write(b"two\n".to_vec()).await.unwrap(), WriteStatus::Accepted);
    input.close().await.unwrap();
    let mut output = Vec::new();
    while let Some(event) = timeout(PATIENCE, process.event()).await.unwrap() {
        if let ProcessEvent::Output { chunk, .. } = event {
            output.extend(chunk);
        }
    }
    assert_eq!(output, b"one\ntwo\n");
    drop((process, second));
    task.await.unwrap();
}

#[tokio::test]
async fn a_cursor_beyond_all_numbers_harms_nobody() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    client.run(&place, "p", &["echo", "x"], json!({})).await;
    let beyond = |more: &[(&str, Value)]| {
        let mut params = json!({"processId": "p", "afterSeq": u64::MAX, "waitMs": 0});
        params.as_object_mut().unwrap().extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        params
    };
    let read = client.ok("process/read", beyond(&[])).await;
    assert_eq!((&read["chunks"], &read["nextSeq"], &read["closed"]), (&json!([]), &json!(4), &json!(true)));
    client.ok("process/read", beyond(&[("maxBytes", json!(u64::MAX))])).await;
    assert_eq!(client.refused("process/read", beyond(&[("events", json!(true))])).await.code, -32602);
    assert_eq!(client.refused("process/acknowledge", json!({"processId": "p", "seq": u64::MAX})).await.code, -32602);
    assert_eq!(client.ok("process/read", json!({"processId": "p"})).await["chunks"][0]["seq"], 1);
}

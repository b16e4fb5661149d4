//! What a session keeps for the next connection of its client, and how another one comes to it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_tests::{Client, PATIENCE, Place, Refusal, Server, Watched};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

#[tokio::test]
async fn another_client_takes_a_session_over_if_it_says_so() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let session = client.session.clone();
    // The connection that will lose the session is a bare socket, so that every frame of it is seen.
    let (mut first, _response) = tokio_tungstenite::connect_async(&server.url).await.unwrap();
    for message in [
        json!({"id": 1, "method": "initialize", "params": {"clientName": "test", "resumeSessionId": session, "takeOver": true}}),
        json!({"method": "initialized"}),
        json!({"id": 2, "method": "process/read", "params": {"processId": "p", "waitMs": 600_000}}),
        json!({"id": 3, "method": "environment/status", "params": {}}),
    ] {
        first.send(Message::text(message.to_string())).await.unwrap();
    }
    let (mut answered, mut code) = (Vec::new(), None);
    // The poll was taken up once what was sent behind it is answered.
    while !answered.contains(&json!(3)) {
        let Message::Text(text) = timeout(PATIENCE, first.next()).await.unwrap().unwrap().unwrap() else { continue };
        answered.push(serde_json::from_str::<Value>(&text).unwrap()["id"].take());
    }
    let mut second = Client::connect_with(&server, Some(&session), json!({"takeOver": true})).await;
    assert_eq!(second.session, session);
    while let Some(Ok(frame)) = timeout(PATIENCE, first.next()).await.unwrap() {
        match frame {
            Message::Text(text) => answered.push(serde_json::from_str::<Value>(&text).unwrap()["id"].take()),
            Message::Close(frame) => code = frame.map(|frame| u16::from(frame.code)),
            _ping => {}
        }
    }
    assert_eq!((answered, code), (vec![json!(1), json!(3)], Some(4001)), "the poll is not answered");
    let listed = second.ok("process/list", json!({})).await;
    assert_eq!((&listed["processes"][0]["processId"], &listed["processes"][0]["state"]), (&json!("p"), &json!("running")));
    second.ok("process/write", json!({"processId": "p", "chunk": "YQo=", "writeId": "1"})).await;
    second.output("p", "a\n").await;
    // Without the word the attached one stays, and whoever does not know the session gets nothing.
    let mut third = Client::dial(&server.url).await;
    assert_eq!(third.initialize(Some(&session)).await.unwrap_err().code, -32010);
    for wrong in ["", "nope", &session.to_uppercase(), &format!("{session} ")] {
        let refusal = third.initialize_with(Some(wrong), json!({"takeOver": true})).await.unwrap_err();
        assert_eq!((refusal.code, refusal.message), (-32600, format!("unknown session id {wrong}")));
    }
    let refusal = third.initialize_with(Some(&session), json!({"takeOver": "yes"})).await.unwrap_err();
    assert_eq!(refusal.code, -32602);
    second.ok("environment/status", json!({})).await;
}

#[tokio::test]
async fn a_client_that_says_nothing_when_its_session_is_wanted_loses_it() {
    let (server, place) = (Server::start().await, Place::new());
    let mut first = Client::connect(&server).await;
    first.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let session = first.session.clone();
    // It answers no ping from here on, since nobody asks its socket: as if its machine had gone.
    let mut second = Client::dial(&server.url).await;
    let attached = async {
        loop {
            match second.initialize(Some(&session)).await {
                Err(Refusal { code: -32010, .. }) => {}
                other => break other,
            }
        }
    };
    timeout(PATIENCE, attached).await.unwrap().unwrap();
    drop(first);
}

#[tokio::test]
async fn a_client_that_answers_keeps_its_session_while_others_want_it() {
    let server = Server::start().await;
    let mut first = Client::connect(&server).await;
    let session = first.session.clone();
    let mut second = Client::dial(&server.url).await;
    for _many in 0..200 {
        assert_eq!(second.initialize(Some(&session)).await.unwrap_err().code, -32010);
        first.ok("environment/status", json!({})).await;
    }
}

#[tokio::test]
async fn handles_are_kept_over_a_resume_where_that_was_asked_for() {
    let (server, place) = (Server::start().await, Place::new());
    let uri = place.put("f", "0123456789");
    for keep in [false, true] {
        let mut client = Client::connect_with(&server, None, json!({"keepHandles": keep})).await;
        client.ok("fs/open", json!({"handleId": "h", "path": uri})).await;
        let session = client.session.clone();
        client.cut();
        let mut resumed = Client::resume(&server, &session).await;
        let block = resumed.call("fs/readBlock", json!({"handleId": "h", "offset": 2, "len": 3})).await;
        match block {
            Ok(block) => assert_eq!((block["chunk"].as_str(), keep), (Some(&*STANDARD.encode("234")), true)),
            Err(refusal) => assert_eq!((refusal.code, keep), (-32004, false)),
        }
        // The second connection asked for nothing, so a third finds nothing.
        resumed.cut();
        let mut third = Client::resume(&server, &session).await;
        assert_eq!(third.refused("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 1})).await.code, -32004);
    }
}

#[tokio::test]
async fn a_client_says_how_long_it_may_be_away_within_the_operators_bound() {
    let (server, place) = (Server::with_arguments(&["--max-retention", "1"]).await, Place::new());
    // An hour is asked for, and a second is what the operator allows.
    let mut client = Client::connect_with(&server, None, json!({"retentionMs": 3_600_000})).await;
    client.start(&place, "p", &["sh", "-c", "echo $$; exec sleep 600"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    client.cut();
    watched.ended().await;
    let info = Client::connect(&server).await.ok("environment/info", json!({"extensions": true})).await;
    assert_eq!(info["extensions"]["maxRetentionMs"], json!(1000));
}

#[tokio::test]
async fn changes_that_are_sent_again_are_done_once() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let file = place.put("f", "old");
    let write = |text: &str, id: &str| json!({"path": file, "dataBase64": STANDARD.encode(text), "operationId": id});
    client.ok("fs/writeFile", write("one", "w")).await;
    client.ok("fs/writeFile", json!({"path": file, "dataBase64": STANDARD.encode("two")})).await;
    assert_eq!(client.ok("fs/writeFile", write("one", "w")).await, json!({}));
    assert_eq!(std::fs::read_to_string(place.path("f")).unwrap(), "two", "it was not written again");
    let refusal = client.refused("fs/writeFile", write("three", "w")).await;
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        (-32600, "operationId w: this operationId belongs to another call; nothing was done")
    );
    for id in [String::new(), "x".repeat(257)] {
        assert_eq!(client.refused("fs/writeFile", write("three", &id)).await.code, -32602);
    }
    // An error is an outcome too, and the second answer is the first.
    let directory = json!({"path": place.uri("d"), "recursive": false, "operationId": "d"});
    client.ok("fs/createDirectory", directory.clone()).await;
    client.ok("fs/createDirectory", directory.clone()).await;
    let again = json!({"path": place.uri("d"), "recursive": false, "operationId": "e"});
    let first = client.refused("fs/createDirectory", again.clone()).await;
    std::fs::remove_dir(place.path("d")).unwrap();
    assert_eq!(client.refused("fs/createDirectory", again).await, first);
    let copy = json!({"sourcePath": file, "destinationPath": place.uri("g"), "recursive": false, "operationId": "c"});
    client.ok("fs/copy", copy.clone()).await;
    let remove = json!({"path": place.uri("g"), "force": false, "operationId": "r"});
    client.ok("fs/remove", remove.clone()).await;
    // Over a cut, of connections that said nothing of their outcomes.
    let session = client.session.clone();
    client.cut();
    let mut resumed = Client::resume(&server, &session).await;
    resumed.ok("fs/remove", remove).await;
    resumed.ok("fs/copy", copy).await;
    assert!(!place.path("g").exists(), "it was not copied again");
    // Names are a session's own.
    Client::connect(&server).await.ok("fs/createDirectory", directory).await;
    assert!(place.path("d").exists());
}

#[tokio::test]
async fn a_change_whose_answer_is_lost_is_done_once_and_answered_to_who_asks_again() {
    let (server, place) = (Server::start().await, Place::new());
    // It fails where it was done before.
    let change = json!({"path": place.uri("d"), "recursive": false, "operationId": "d"});
    let mut client = Client::connect(&server).await;
    let session = client.session.clone();
    client.begin("fs/createDirectory", change.clone()).await;
    // It is done, and its answer is never read.
    let done = async {
        while !place.path("d").exists() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, done).await.unwrap();
    client.cut();
    let mut resumed = Client::resume(&server, &session).await;
    assert_eq!(resumed.ok("fs/createDirectory", change).await, json!({}));
    let refusal = resumed.refused("fs/createDirectory", json!({"path": place.uri("d"), "recursive": false})).await;
    assert!(refusal.message.contains("os error 17"), "without its name it is another change: {refusal:?}");
}

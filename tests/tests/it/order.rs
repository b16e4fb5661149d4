//! Calls run side by side; effects keep their order.

use portcullis_tests::{Client, Place, Server};
use serde_json::json;

#[tokio::test]
async fn mutations_keep_their_order_and_reads_see_those_before_them() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    let mut reads = Vec::new();
    for nth in 0..100 {
        let content = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, nth.to_string());
        client.begin("fs/writeFile", json!({"path": place.uri("f"), "dataBase64": content})).await;
        let read = client.begin("fs/readFile", json!({"path": place.uri("f")})).await;
        reads.push((read, nth));
    }
    for (read, nth) in reads {
        let got = client.answer(read).await.unwrap()["dataBase64"].as_str().unwrap().to_owned();
        let got = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, got).unwrap();
        let seen: i32 = String::from_utf8(got).unwrap().parse().unwrap();
        // A read waits for what came before it, not the other way round.
        assert!(seen >= nth, "read {nth} saw write {seen}");
    }
    assert_eq!(place.content("f"), "99");
}

#[tokio::test]
async fn a_start_sees_the_files_that_were_written_before_it() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    for nth in 0..20 {
        let script = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, format!("echo {nth}"));
        client.begin("fs/writeFile", json!({"path": place.uri("script"), "dataBase64": script})).await;
        let id = format!("p{nth}");
        client.begin("process/start", Client::start_params(&place, &id, &["sh", "script"])).await;
        assert_eq!(client.events(&id).await.output(None), format!("{nth}\n"));
    }
}

#[tokio::test]
async fn control_calls_overtake_what_waits() {
    let server = Server::with_arguments(&["--concurrent-requests", "1"]).await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sleep", "600"], json!({})).await;
    let poll = client.begin("process/read", json!({"processId": "p", "afterSeq": 0, "waitMs": 600_000})).await;
    assert_eq!(client.ok("process/terminate", json!({"processId": "p"})).await, json!({"running": true}));
    assert_eq!(client.answer(poll).await.unwrap()["exitCode"], json!(137));
}

#[tokio::test]
async fn more_calls_than_may_run_are_all_answered() {
    let server = Server::with_arguments(&["--concurrent-requests", "2"]).await;
    let place = Place::new();
    let uri = place.put("f", "x");
    let mut client = Client::connect(&server).await;
    let mut calls = Vec::new();
    for _nth in 0..1000 {
        calls.push(client.begin("fs/readFile", json!({"path": uri})).await);
    }
    for call in calls {
        assert_eq!(client.answer(call).await.unwrap(), json!({"dataBase64": "eA=="}));
    }
}

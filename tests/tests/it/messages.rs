//! Text that is no message, messages that nobody expects.

use portcullis_tests::{Client, Server};
use serde_json::{Value, json};

async fn still_works(client: &mut Client) {
    assert_eq!(client.ok("environment/status", json!({})).await, json!({"status": "ready"}));
}

#[tokio::test]
async fn text_that_is_no_message_is_answered_with_id_minus_one() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    for text in [
        "",
        "{nope",
        "[]",
        "3",
        "null",
        "\"x\"",
        r#"[{"id":1,"method":"environment/status"}]"#,
        r#"{"id":true,"method":"x"}"#,
        r#"{"id":9223372036854775808,"method":"x"}"#,
        r#"{"id":3,"id":4,"method":"x"}"#,
        r#"{"id":3,"method":"x"}{}"#,
        r#"{"id":3,"method":"environment/status","params":{"q":1,"q":2}}"#,
        r#"{"id":3}"#,
    ] {
        client.send_text(text).await;
        let answer = client.next().await.unwrap();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(-1), &json!(-32600)), "{text}: {answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap().starts_with("failed to parse websocket JSON-RPC message from"),
            "{answer}"
        );
        still_works(&mut client).await;
    }
}

#[tokio::test]
async fn notifications_and_responses_that_nobody_expects_are_answered_and_change_nothing() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    for text in [
        r#"{"method":"foo/bar","params":{}}"#,
        r#"{"method":"environment/status"}"#,
        r#"{"id":3,"result":{}}"#,
        r#"{"id":3,"error":{"code":-1,"message":"x"}}"#,
    ] {
        client.send_text(text).await;
        let answer = client.next().await.unwrap();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(-1), &json!(-32600)), "{text}: {answer}");
        still_works(&mut client).await;
    }
    let mut early = Client::dial(&server.url).await;
    early.send_text(r#"{"method":"initialized"}"#).await;
    assert_eq!(early.next().await.unwrap()["id"], json!(-1));
    early.initialize(None).await.unwrap();
}

#[tokio::test]
async fn ids_are_echoed_as_they_came() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    for id in [json!("abc"), json!(""), json!(-5), json!(i64::MAX)] {
        client.send(&json!({"jsonrpc": 2, "id": id, "method": "environment/status", "extra": [1]})).await;
        let answer: Value = client.next().await.unwrap();
        assert_eq!(answer, json!({"id": id, "result": {"status": "ready"}}));
    }
}

#[tokio::test]
async fn a_request_whose_sandbox_is_misspelt_does_not_run() {
    let server = Server::start().await;
    let place = portcullis_tests::Place::new();
    let mut client = Client::connect(&server).await;
    for member in ["sandBox", "sandbox_", "Sandbox", "sand_box"] {
        let params = json!({"path": place.uri("made"), "dataBase64": "", member: {"type": "read-only"}});
        let refusal = client.refused("fs/writeFile", params).await;
        assert_eq!(refusal.code, -32602, "{member}: {refusal:?}");
        assert!(refusal.message.contains(member), "{refusal:?}");
        assert!(!place.has("made"), "{member}: nothing may have run");
    }
    // The control: a stranger that looks like nothing is ignored.
    client.ok("fs/writeFile", json!({"path": place.uri("made"), "dataBase64": "", "futureOption": {}})).await;
    assert!(place.has("made"));
}

//! initialize, initialized, then everything else.

use portcullis_tests::{Client, Server};
use serde_json::json;

#[tokio::test]
async fn the_result_names_a_session_and_describes_the_machine() {
    let server = Server::start().await;
    let mut client = Client::dial(&server.url).await;
    let result = client.initialize(None).await.unwrap();
    assert_eq!(client.session.len(), 36);
    let info = &result["environmentInfo"];
    assert_eq!(info["platformOs"], "linux");
    for member in ["cwd", "userHomeDir", "tempDir"] {
        assert!(info[member].as_str().unwrap().starts_with("file:///"), "{member}: {info}");
    }
    assert!(info["shell"]["path"].as_str().unwrap().starts_with('/'));
    client.send(&json!({"method": "initialized"})).await;
    assert_eq!(&client.ok("environment/info", json!({})).await, info);
    assert_eq!(client.ok("environment/status", json!(null)).await, json!({"status": "ready"}));
}

#[tokio::test]
async fn a_capability_is_true_only_if_its_method_is_built() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    let info = client.ok("environment/info", json!({})).await;
    let capabilities = info["capabilities"].as_object().unwrap();
    let on: Vec<&String> = capabilities.iter().filter(|(_, on)| **on == json!(true)).map(|(name, _)| name).collect();
    assert_eq!(on, ["fileWriteStreaming", "fsWatchMissing", "httpHeaderEnvVars", "sandboxedFileStreaming"]);
    for (method, params) in [
        ("environmentConfig/read", json!({"cwd": "/", "configPaths": [], "requirementsPaths": []})),
        ("capabilities/discoverV2", json!({})),
    ] {
        assert_eq!(client.refused(method, params).await.code, -32601, "{method}");
    }
    for method in ["fs/watchMissing", "http/request"] {
        assert_eq!(client.refused(method, json!({})).await.code, -32602, "{method}");
    }
}

#[tokio::test]
async fn methods_before_their_time_are_refused_and_the_connection_stays() {
    let server = Server::start().await;
    let mut client = Client::dial(&server.url).await;
    let early = client.refused("fs/readFile", json!({"path": "file:///x"})).await;
    assert_eq!((early.code, early.message.as_str()), (-32600, "client must call initialize before using filesystem methods"));
    client.initialize(None).await.unwrap();
    let early = client.refused("process/read", json!({"processId": "p"})).await;
    assert_eq!((early.code, early.message.as_str()), (-32600, "client must send initialized before using exec methods"));
    let twice = client.initialize(None).await.unwrap_err();
    assert_eq!((twice.code, twice.message.as_str()), (-32600, "initialize may only be sent once per connection"));
    client.send(&json!({"method": "initialized"})).await;
    client.ok("environment/status", json!({})).await;
}

#[tokio::test]
async fn a_failed_initialize_may_be_tried_again_on_the_same_connection() {
    let server = Server::start().await;
    let mut client = Client::dial(&server.url).await;
    for unknown in ["", "no-such-session"] {
        let refusal = client.initialize(Some(unknown)).await.unwrap_err();
        assert_eq!((refusal.code, refusal.message), (-32600, format!("unknown session id {unknown}")));
    }
    assert_eq!(client.refused("initialize", json!({"clientName": 3})).await.code, -32602);
    client.initialize(None).await.unwrap();
}

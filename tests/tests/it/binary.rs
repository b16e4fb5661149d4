//! Messages with bytes, for connections that ask for them, beside those that do not.

use crate::remote::Remote;
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use portcullis_tests::{Client, Events, PATIENCE, Place, Program, Server, portcullis};
use serde_json::{Value, json};
use std::io::Read as _;
use std::process::Stdio;
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

fn asks() -> Value {
    json!({"binaryFrames": true})
}

fn random(size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

/// An answer, and whether its bytes came as bytes.
async fn answered(client: &mut Client, method: &str, params: Value) -> (Value, bool) {
    let id = client.begin(method, params).await;
    let message = client.wait(|message| message["id"] == id).await;
    let is_binary = Client::is_binary(&message);
    (message, is_binary)
}

/// What a process wrote, and whether all of that came as bytes, or nothing.
fn written(events: &Events) -> (Vec<u8>, bool) {
    let is_output = |notice: &&Value| notice["method"] == "process/output";
    let kinds: Vec<bool> = events.notices.iter().filter(is_output).map(Client::is_binary).collect();
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| *kind == kinds[0]), "one kind: {kinds:?}");
    let others = events.notices.iter().filter(|notice| !is_output(notice));
    assert!(others.map(Client::is_binary).all(|kind| !kind), "the exit and the close are texts");
    assert!(events.seqs().into_iter().eq(1..=events.notices.len() as u64), "in the order of sending");
    (events.bytes(None), kinds[0])
}

#[tokio::test]
async fn files_and_output_are_the_same_in_both_ways() {
    let (server, place) = (Server::start().await, Place::new());
    let mut plain = Client::connect(&server).await;
    let mut client = Client::dial(&server.url).await;
    assert_eq!(client.initialize_with(None, asks()).await.unwrap()["binaryFrames"], true);
    client.send(&json!({"method": "initialized"})).await;
    for size in [0, 1, 65_536, 65_537, 131_072, 8 << 20] {
        place.put("file", random(size));
        let read = json!({"path": place.uri("file")});
        let (mut bytes, is_binary) = answered(&mut client, "fs/readFile", read.clone()).await;
        assert!(is_binary, "{size} bytes");
        let (text, is_text) = answered(&mut plain, "fs/readFile", read).await;
        assert!(!is_text && text["result"]["dataBase64"].as_str().unwrap().len() == size.div_ceil(3) * 4);
        assert!(bytes["result"] == text["result"], "{size} bytes");
        // Nothing else is said.
        bytes["result"].as_object_mut().unwrap().remove("dataBase64");
        assert_eq!(bytes["result"], json!({}));
    }
    for (offset, len, eof) in [(0, 1_048_576, false), ((8 << 20) - 5, 10, true), (9 << 20, 1, true), (1, 1, false)] {
        let mut results = Vec::new();
        for (client, expect) in [(&mut client, true), (&mut plain, false)] {
            let open = json!({"handleId": "h", "path": place.uri("file")});
            client.ok("fs/open", open).await;
            let read = json!({"handleId": "h", "offset": offset, "len": len});
            let (message, is_binary) = answered(client, "fs/readBlock", read).await;
            assert_eq!((is_binary, &message["result"]["eof"]), (expect, &json!(eof)));
            results.push(message["result"].clone());
            client.ok("fs/close", json!({"handleId": "h"})).await;
        }
        assert!(results[0] == results[1], "{offset}");
    }
    let output = random(5 << 20);
    place.put("output", &output);
    let path = place.path("output").display().to_string();
    for (client, expect) in [(&mut client, true), (&mut plain, false)] {
        let events = client.run(&place, "p", &["cat", &path], json!({})).await;
        let (bytes, is_binary) = written(&events);
        assert!(bytes == output && is_binary == expect);
        let tty = client.run(&place, "t", &["sh", "-c", "printf 'a\\nb'; exit 3"], json!({"tty": true})).await;
        assert_eq!((written(&tty), tty.code()), ((b"a\r\nb".to_vec(), expect), 3));
        assert_eq!(tty.notices[0]["params"]["stream"], "pty");
        // Pages are texts.
        let (page, is_binary) = answered(client, "process/read", json!({"processId": "p", "afterSeq": 600})).await;
        assert!(!is_binary && !page["result"]["chunks"].as_array().unwrap().is_empty());
        // Errors too, and whatever else is answered.
        for (method, params) in [
            ("fs/readFile", json!({"path": place.uri("missing")})),
            ("fs/readBlock", json!({"handleId": "none", "offset": 0, "len": 1})),
            ("fs/getMetadata", json!({"path": place.uri("file")})),
        ] {
            let (message, is_binary) = answered(client, method, params).await;
            assert!(!is_binary && message.get("error").is_none() == (method == "fs/getMetadata"), "{message}");
        }
    }
    place.done();
}

#[tokio::test]
async fn it_belongs_to_the_connection_and_not_to_the_session() {
    let (server, place) = (Server::start().await, Place::new());
    place.put("file", "content");
    let mut client = Client::connect_with(&server, None, json!({"binaryFrames": true, "acknowledge": true})).await;
    // Each line that it is told it says again.
    let echo = |line: &str| json!({"processId": "p", "chunk": base64(line), "writeId": line});
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    for (line, more) in [
        ("one", json!({"acknowledge": true})),
        ("two", json!({"binaryFrames": true, "acknowledge": true, "takeOver": true})),
        ("three", json!({"binaryFrames": false, "takeOver": true})),
        ("four", json!({})),
    ] {
        let expect = ["one", "three"].contains(&line);
        client.ok("process/write", echo(line)).await;
        let notice = client.notice("p").await;
        assert_eq!((Client::is_binary(&notice), &notice["params"]["chunk"]), (expect, &json!(base64(line))), "{line}");
        let (message, is_binary) = answered(&mut client, "fs/readFile", json!({"path": place.uri("file")})).await;
        assert_eq!((is_binary, &message["result"]["dataBase64"]), (expect, &json!(base64("content"))), "{line}");
        let session = client.session.clone();
        if more["takeOver"] == true {
            client = Client::connect_with(&server, Some(&session), more).await;
        } else {
            client.close().await;
            client = Client::resume(&server, &session).await;
        }
    }
    // What was said as bytes and as text is one log.
    let page = client.ok("process/read", json!({"processId": "p", "afterSeq": 0})).await;
    let chunks: Vec<&Value> = page["chunks"].as_array().unwrap().iter().map(|chunk| &chunk["chunk"]).collect();
    assert_eq!(chunks, ["one", "two", "three", "four"].map(base64).iter().collect::<Vec<_>>());
    place.done();
}

fn base64(text: &str) -> String {
    portcullis_protocol::base64::encode(text.as_bytes())
}

#[tokio::test]
async fn who_does_not_ask_is_told_nothing_of_it() {
    let server = Server::start().await;
    let mut client = Client::dial(&server.url).await;
    let initialized = client.initialize(None).await.unwrap();
    let members: Vec<&String> = initialized.as_object().unwrap().keys().collect();
    assert_eq!(members, ["environmentInfo", "sessionId"]);
    client.send(&json!({"method": "initialized"})).await;
    let info = client.ok("environment/info", json!({"extensions": true})).await;
    assert_eq!(info["extensions"]["binaryFrames"], true);
}

#[tokio::test]
async fn over_a_unix_socket_it_is_given_and_over_standard_input_it_is_not() {
    let place = Place::new();
    place.put("file", "content");
    let url = format!("unix:{}", place.path("s").display());
    let server = Server::with(portcullis(&["serve", "--listen", &url])).await;
    let mut client = Client::connect_with(&server, None, asks()).await;
    let (message, is_binary) = answered(&mut client, "fs/readFile", json!({"path": place.uri("file")})).await;
    assert!(is_binary && message["result"]["dataBase64"] == base64("content"));

    let mut command = portcullis(&["serve", "--listen", "stdio"]);
    command.stdin(Stdio::piped());
    let mut program = Program::start(command);
    let mut stdin = program.stdin();
    let lines = [
        json!({"id": 1, "method": "initialize", "params": {"clientName": "test", "binaryFrames": true}}),
        json!({"method": "initialized"}),
        json!({"id": 2, "method": "fs/readFile", "params": {"path": place.uri("file")}}),
    ];
    stdin.write_all(lines.map(|line| format!("{line}\n")).concat().as_bytes()).await.unwrap();
    let parse = |line: String| serde_json::from_str::<Value>(&line).unwrap();
    assert_eq!(parse(program.line().await)["result"]["binaryFrames"], false);
    assert_eq!(parse(program.line().await), json!({"id": 2, "result": {"dataBase64": base64("content")}}));
    drop(stdin);
    assert_eq!(program.wait().await, 0);
    drop(server);
    place.done();
}

/// The library reads a file both ways, and output.
async fn through_the_library(client: &ExecServerClient, place: &Place) {
    let content = random(3 << 20);
    place.put("file", &content);
    let wire = |name: &str| WirePath::Local(AbsolutePath::new(place.path(name)).unwrap());
    assert!(client.read_file(&wire("file"), None).await.unwrap() == content);
    let whole: Value = client.call("fs/readFile", &json!({"path": wire("file")})).await.unwrap();
    assert!(whole["dataBase64"] == portcullis_protocol::base64::encode(&content), "who looks at the JSON sees all of it");
    let mut reader = client.open(&wire("file"), None).await.unwrap();
    let mut read = Vec::new();
    while let Some(block) = reader.next().await {
        read.extend(block.unwrap());
    }
    assert!(read == content);
    let argv = ["/bin/cat", "file"].map(str::to_owned).to_vec();
    let mut process = client.start(&StartParams::new("p", argv, wire(""))).await.unwrap();
    let mut output = Vec::new();
    while let Some(event) = timeout(PATIENCE, process.event()).await.unwrap() {
        if let ProcessEvent::Output { chunk, .. } = event {
            output.extend(chunk);
        }
    }
    assert!(output == content);
    let missing = client.read_file(&wire("missing"), None).await.unwrap_err().to_string();
    assert!(missing.contains("No such file"), "{missing}");
}

#[tokio::test]
async fn the_library_asks_for_it_and_does_without_it() {
    let (server, place) = (Server::start().await, Place::new());
    let options = ExecServerClientConnectOptions::new(&server.url, "test");
    let (client, task) = ExecServerClient::connect(&options).await.unwrap();
    assert_eq!(client.initialized().binary_frames, Some(true));
    through_the_library(&client, &place).await;
    drop(client);
    timeout(PATIENCE, task).await.unwrap().unwrap();

    let remote = Remote::with(&[]).await;
    let (client, task) = ExecServerClient::connect(&remote.options()).await.unwrap();
    // It is not asked for there, since a forwarder may pass the question on to a server that grants it.
    assert_eq!(client.initialized().binary_frames, None, "not through a rendezvous");
    through_the_library(&client, &place).await;
    drop(client);
    timeout(PATIENCE, task).await.unwrap().unwrap();
    remote.end().await;
    place.done();
}

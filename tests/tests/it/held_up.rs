//! Clients and processes that wait for one another: nothing stops for ever.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent};
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::{StartParams, WriteStatus};
use portcullis_tests::{Client, PATIENCE, Place, Server};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

#[tokio::test]
async fn input_that_waits_for_its_process_does_not_hold_up_what_makes_room_for_its_output() {
    const WRITES: usize = 1000;
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

/// RFC 6455 section 5.5.3 lets a peer answer the newest ping alone. Between the marks behind output and that answer another ping
/// may come, and it must not make the marks forgotten.
#[tokio::test]
async fn a_client_that_answers_only_the_newest_ping_gets_everything() {
    const BYTES: usize = 24 << 20;
    // Without a word from here so much is sent and no more.
    const WINDOW: usize = 4 << 20;
    let (server, place) = (Server::start().await, Place::new());
    let mut slow = Bare::connect(&server.url).await;
    slow.send(&json!({"id": 1, "method": "initialize", "params": {"clientName": "test"}})).await;
    let Frame::Message(answer) = slow.frame().await else { panic!("an answer") };
    let session = answer["result"]["sessionId"].as_str().unwrap().to_owned();
    slow.send(&json!({"method": "initialized"})).await;
    let start = Client::start_params(&place, "p", &["head", "-c", &BYTES.to_string(), "/dev/zero"]);
    slow.send(&json!({"id": 2, "method": "process/start", "params": start})).await;
    let (mut bytes, mut newest) = (0, Vec::new());
    while bytes < WINDOW {
        match slow.frame().await {
            Frame::Ping(payload) => newest = payload,
            Frame::Message(message) => bytes += output(&message),
        }
    }
    // Somebody else who wants the session makes the server ask for a sign of life, behind all marks.
    let mut other = Client::dial(&server.url).await;
    assert_eq!(other.initialize(Some(&session)).await.unwrap_err().code, -32010);
    let last = loop {
        match slow.frame().await {
            Frame::Ping(payload) if payload.is_empty() || payload == newest => break payload,
            Frame::Ping(mark) => newest = mark,
            Frame::Message(message) => panic!("{message} beyond the window"),
        }
    };
    slow.pong(&last).await;
    let Frame::Message(goes_on) = slow.frame().await else { panic!("the server asks again: it did not take the answer") };
    bytes += output(&goes_on);
    loop {
        match slow.frame().await {
            Frame::Ping(payload) => slow.pong(&payload).await,
            Frame::Message(message) if message["method"] == "process/closed" => break,
            Frame::Message(message) => bytes += output(&message),
        }
    }
    assert_eq!(bytes, BYTES);
}

/// Bytes of output in a message.
fn output(message: &Value) -> usize {
    match message["method"].as_str() {
        Some("process/output") => STANDARD.decode(message["params"]["chunk"].as_str().unwrap()).unwrap().len(),
        _ => 0,
    }
}

/// A WebSocket client by hand, which answers the pings that its test answers.
struct Bare(TcpStream);

enum Frame {
    Message(Value),
    Ping(Vec<u8>),
}

impl Bare {
    async fn connect(url: &str) -> Self {
        let mut socket = TcpStream::connect(url.strip_prefix("ws://").unwrap()).await.unwrap();
        let request = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                       Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        Self(socket)
    }

    /// A frame from client to server, masked with zeros: RFC 6455 section 5.2.
    async fn write(&mut self, opcode: u8, payload: &[u8]) {
        let mut frame = vec![0x80 | opcode, 0x80 | 126];
        frame.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    async fn send(&mut self, message: &Value) {
        self.write(1, message.to_string().as_bytes()).await;
    }

    async fn pong(&mut self, payload: &[u8]) {
        let mut frame = vec![0x8a, 0x80 | u8::try_from(payload.len()).unwrap()];
        frame.extend([0; 4]);
        frame.extend(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    /// The next frame.
    async fn frame(&mut self) -> Frame {
        let read = async {
            let opcode = self.0.read_u8().await.unwrap() & 0x0f;
            let length = match self.0.read_u8().await.unwrap() {
                126 => u64::from(self.0.read_u16().await.unwrap()),
                127 => self.0.read_u64().await.unwrap(),
                short => u64::from(short),
            };
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            self.0.read_exact(&mut payload).await.unwrap();
            match opcode {
                1 => Frame::Message(serde_json::from_slice(&payload).unwrap()),
                9 => Frame::Ping(payload),
                other => panic!("a frame of kind {other}"),
            }
        };
        timeout(PATIENCE, read).await.expect("a frame in time")
    }
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

#[tokio::test]
async fn a_change_that_was_cut_off_keeps_its_place_before_those_that_came_later() {
    let (server, place) = (Server::start().await, Place::new());
    for round in 0..5 {
        let (file, directory) = (format!("f{round}"), format!("d{round}"));
        let mut client = Client::connect(&server).await;
        // What it works on takes a while to be looked at.
        let write = json!({"path": place.uri(&file), "dataBase64": STANDARD.encode(vec![b'x'; 8 << 20]), "operationId": "w"});
        let make = json!({"path": place.uri(&directory), "operationId": "d"});
        client.begin("fs/writeFile", write).await;
        client.begin("fs/createDirectory", make.clone()).await;
        // Both have arrived: what is on its way when a link breaks may be lost, and then it is the client's to send again.
        client.ok("environment/status", Value::Null).await;
        let session = client.session.clone();
        client.cut();
        // The later one is carried out, so the earlier one must have been, though nobody asks for it again.
        let mut resumed = Client::resume(&server, &session).await;
        resumed.ok("fs/createDirectory", make).await;
        let written = std::fs::metadata(place.path(&file)).map(|file| file.len());
        assert_eq!(written.unwrap(), 8 << 20, "round {round}");
    }
}

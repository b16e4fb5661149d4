use crate::{ExecServerClient, ExecServerError, ProcessEvent, Transport};
use portcullis_protocol::denial::{Denial, Denials, Layer, Wanted};
use portcullis_protocol::event::{Event, Stream};
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::StartParams;
use portcullis_protocol::rpc::{self, Id, Message, RpcError};
use std::sync::Arc;
use tokio::sync::mpsc;

fn denial() -> Denial {
    let rule = "an entry for reading".to_owned();
    Denial { path: "/etc/x".to_owned(), access: Wanted::Write, layer: Layer::Mounts, rule, grant: None }
}

/// A server that starts what it is asked to but for the id `taken`.
async fn serve(mut requests: mpsc::Receiver<String>, answers: mpsc::Sender<String>) {
    while let Some(text) = requests.recv().await {
        let Ok(Message::Request { id, method, params }) = rpc::parse(text.as_bytes()) else { continue };
        let answer = match (&*method, params.map_or("", |params| params.get())) {
            ("initialize", _) => rpc::result_text(&id, &serde_json::json!({"sessionId": "s"})).unwrap(),
            (_, params) if params.contains("taken") => {
                rpc::error_text(&id, &RpcError::new(-32600, "process taken already exists").with_denials(&[denial()]))
            }
            (_, _) => rpc::result_text(&id, &serde_json::json!({"processId": "p"})).unwrap(),
        };
        answers.send(answer).await.unwrap();
        if id == Id::Number(4) {
            let output = Event::Output { stream: Stream::Stdout, chunk: "x".into() };
            answers.send(output.notification("p", 1)).await.unwrap();
            let denials = Arc::new(Denials { list: vec![denial()], more: 2 });
            answers.send(Event::Exited { code: 1, denials, limits: Vec::new() }.notification("p", 2)).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_second_start_of_an_id_leaves_the_first_its_events() {
    let (outgoing, requests) = mpsc::channel(8);
    let (answers, incoming) = mpsc::channel(8);
    let server = tokio::spawn(serve(requests, answers));
    let (client, task) = ExecServerClient::over(Transport { outgoing, incoming }, "test").await.unwrap();
    let start = |id: &str| StartParams::new(id, vec!["true".to_owned()], WirePath::parse("/").unwrap());
    let mut first = client.start(&start("p")).await.unwrap();
    assert!(matches!(client.start(&start("p")).await, Err(ExecServerError::InUse(id)) if id == "p"));
    // A start that the server refuses is forgotten, so that it can be tried again.
    for _twice in 0..2 {
        let refused = client.start(&start("taken")).await;
        assert!(matches!(refused, Err(ExecServerError::Server(error)) if error.denials() == [denial()]));
    }
    assert_eq!(first.event().await, Some(ProcessEvent::Output { seq: 1, stream: Stream::Stdout, chunk: b"x".to_vec() }));
    let denials = Denials { list: vec![denial()], more: 2 };
    assert_eq!(first.event().await, Some(ProcessEvent::Exited { seq: 2, code: 1, denied: true, denials }));
    drop((first, client));
    task.await.unwrap();
    server.await.unwrap();
}

#[tokio::test]
async fn what_is_asked_of_a_process_is_in_the_words_of_the_wire() {
    use portcullis_protocol::process::{ProcessState, Size, WriteStatus};
    use portcullis_protocol::signal::Signal;
    use serde_json::{Value, json};
    let (outgoing, mut requests) = mpsc::channel::<String>(8);
    let (answers, incoming) = mpsc::channel::<String>(8);
    let server = tokio::spawn(async move {
        let mut asked = Vec::new();
        while let Some(text) = requests.recv().await {
            let request: Value = serde_json::from_str(&text).unwrap();
            let listed = json!({"processId": "p", "state": "running", "startedAtMs": 1, "tty": true, "nextSeq": 1});
            let result = match request["method"].as_str().unwrap() {
                "initialize" => json!({"sessionId": "s"}),
                "initialized" => continue,
                "process/start" => json!({"processId": "p"}),
                "process/write" => json!({"status": "accepted"}),
                "process/list" => json!({"processes": [listed]}),
                _ => json!({}),
            };
            answers.send(json!({"id": request["id"], "result": result}).to_string()).await.unwrap();
            asked.push((request["method"].clone(), request["params"].clone()));
        }
        asked
    });
    let (client, task) = ExecServerClient::over(Transport { outgoing, incoming }, "test").await.unwrap();
    let params = StartParams::new("p", vec!["true".to_owned()], WirePath::parse("/").unwrap());
    let mut process = client.start(&params).await.unwrap();
    let one = std::num::NonZeroU16::MIN;
    process.resize(Size { rows: one, cols: one }).await.unwrap();
    process.signal(Signal::STOP).await.unwrap();
    process.interrupt().await.unwrap();
    let mut input = process.take_input().unwrap();
    assert!(process.take_input().is_none());
    for _twice in 0..2 {
        assert_eq!(input.write(b"x".to_vec()).await.unwrap(), WriteStatus::Accepted);
    }
    input.close().await.unwrap();
    process.close_stdin().await.unwrap();
    let listed = client.processes().await.unwrap();
    assert_eq!((listed[0].state, listed[0].exit_code, &listed[0].sandbox_type), (ProcessState::Running, None, &None));
    drop((process, client));
    task.await.unwrap();
    let asked = server.await.unwrap();
    // A name of the input's own, and the number of the write.
    let name = asked[5].1["writeId"].as_str().unwrap().strip_suffix("-1").unwrap().to_owned();
    assert!(name.len() >= 32, "nobody else has it: {name}");
    let write = |id: &str| (json!("process/write"), json!({"processId": "p", "chunk": "eA==", "writeId": id}));
    let expect = [
        (json!("process/resize"), json!({"processId": "p", "rows": 1, "cols": 1})),
        (json!("process/signal"), json!({"processId": "p", "signal": "stop"})),
        (json!("process/signal"), json!({"processId": "p", "signal": "interrupt"})),
        write(&format!("{name}-1")),
        write(&format!("{name}-2")),
        (json!("process/closeStdin"), json!({"processId": "p"})),
        (json!("process/closeStdin"), json!({"processId": "p"})),
        (json!("process/list"), json!({})),
    ];
    assert_eq!(asked[2..], expect);
}

/// A server in this process, played by the test.
struct Played {
    requests: mpsc::Receiver<String>,
    answers: mpsc::Sender<String>,
}

impl Played {
    /// A client whose handshake is done.
    async fn with_client(info: serde_json::Value) -> (Self, ExecServerClient, tokio::task::JoinHandle<()>) {
        let (outgoing, requests) = mpsc::channel(64);
        let (answers, incoming) = mpsc::channel(64);
        let mut played = Self { requests, answers };
        let connecting = ExecServerClient::over(Transport { outgoing, incoming }, "test");
        let shaking = async {
            let initialize = played.request("initialize").await;
            played.answer(&initialize, info).await;
            played.request("initialized").await;
        };
        let (connected, ()) = tokio::join!(connecting, shaking);
        let (client, task) = connected.unwrap();
        (played, client, task)
    }

    /// The next request, which must be of a method.
    async fn request(&mut self, method: &str) -> serde_json::Value {
        let request: serde_json::Value = serde_json::from_str(&self.requests.recv().await.unwrap()).unwrap();
        assert_eq!(request["method"], method, "{request}");
        request
    }

    async fn send(&self, message: serde_json::Value) {
        self.answers.send(message.to_string()).await.unwrap();
    }

    async fn answer(&self, request: &serde_json::Value, result: serde_json::Value) {
        self.send(serde_json::json!({"id": request["id"], "result": result})).await;
    }
}

fn start_params(id: &str) -> StartParams {
    StartParams::new(id, vec!["true".to_owned()], WirePath::parse("/").unwrap())
}

#[tokio::test]
async fn a_start_that_nobody_takes_is_ended_whenever_its_caller_goes() {
    use futures_util::FutureExt as _;
    use serde_json::json;
    let (mut played, client, task) = Played::with_client(json!({"sessionId": "s"})).await;
    // An id each, since that of the first is taken until its end was answered, and heard of.
    for (id, answer_first) in [("p", false), ("q", true)] {
        let params = start_params(id);
        let mut start = Box::pin(client.start(&params));
        assert!((&mut start).now_or_never().is_none());
        let request = played.request("process/start").await;
        if answer_first {
            // The answer is there, and nobody looks.
            played.answer(&request, json!({"processId": id})).await;
            let nothing = json!({});
            let mut look = Box::pin(client.call::<serde_json::Value>("look", &nothing));
            assert!((&mut look).now_or_never().is_none());
            let request = played.request("look").await;
            played.answer(&request, json!({})).await;
            look.await.unwrap();
        }
        drop(start);
        if !answer_first {
            played.answer(&request, json!({"processId": id})).await;
        }
        let terminate = played.request("process/terminate").await;
        assert_eq!(terminate["params"], json!({"processId": id}));
        played.answer(&terminate, json!({"running": true})).await;
    }
    drop(client);
    task.await.unwrap();
}

#[tokio::test]
async fn a_process_is_a_stream_and_a_sink() {
    use futures_util::{SinkExt as _, StreamExt as _};
    use portcullis_protocol::process::WriteStatus;
    use serde_json::json;
    let (mut played, client, task) = Played::with_client(json!({"sessionId": "s"})).await;
    let server = async {
        let start = played.request("process/start").await;
        played.answer(&start, json!({"processId": "p"})).await;
        for (number, status) in [("-1", "accepted"), ("-2", "accepted"), ("-3", "stdinClosed")] {
            let write = played.request("process/write").await;
            assert!(write["params"]["writeId"].as_str().unwrap().ends_with(number), "{write}");
            played.answer(&write, json!({"status": status})).await;
        }
        for event in [
            Event::Output { stream: Stream::Stderr, chunk: "x".into() }.notification("p", 1),
            Event::Closed.notification("p", 3),
            Event::Exited { code: 0, denials: Arc::default(), limits: Vec::new() }.notification("p", 2),
        ] {
            played.answers.send(event).await.unwrap();
        }
        played
    };
    let user = async {
        let mut process = client.start(&start_params("p")).await.unwrap();
        let mut input = process.take_input().unwrap();
        input.send(b"one".to_vec()).await.unwrap();
        input.feed(b"two".to_vec()).await.unwrap();
        let refused = input.send(b"three".to_vec()).await.unwrap_err();
        let status = WriteStatus::StdinClosed;
        assert_eq!(refused, ExecServerError::Input { process: "p".to_owned(), status });
        let events: Vec<ProcessEvent> = process.take_events().unwrap().collect().await;
        assert_eq!(events.iter().filter_map(ProcessEvent::last_seq).collect::<Vec<_>>(), [1, 2, 3]);
    };
    let (_played, ()) = tokio::join!(server, user);
    drop(client);
    task.await.unwrap();
}

#[tokio::test]
async fn a_body_comes_in_parts_and_breaks_with_its_link() {
    use crate::HttpRequest;
    use serde_json::json;
    let (mut played, client, task) = Played::with_client(json!({"sessionId": "s"})).await;
    let server = async {
        for name in ["whole", "broken"] {
            let request = played.request("http/request").await;
            assert_eq!((&request["params"]["requestId"], &request["params"]["streamResponse"]), (&json!(name), &json!(true)));
            let headers = json!([{"name": "a", "value": "b"}]);
            played.answer(&request, json!({"status": 404, "headers": headers, "bodyBase64": ""})).await;
            let delta = |seq: u64, text: &str, done: bool| {
                let params = json!({"requestId": name, "seq": seq, "deltaBase64": text, "done": done, "error": null});
                json!({"method": "http/request/bodyDelta", "params": params})
            };
            played.send(delta(1, "YQ==", false)).await;
            if name == "whole" {
                played.send(delta(2, "", true)).await;
            }
        }
    };
    let user = async {
        let mut whole = client.http_request(&HttpRequest::new("whole", "GET", "http://localhost/")).await.unwrap();
        assert_eq!((whole.status, whole.headers[0].value.as_str()), (404, "b"));
        assert_eq!(whole.body.next().await, Some(Ok(b"a".to_vec())));
        assert_eq!(whole.body.next().await, None);
        client.http_request(&HttpRequest::new("broken", "GET", "http://localhost/")).await.unwrap()
    };
    let ((), mut broken) = tokio::join!(server, user);
    assert_eq!(broken.body.next().await, Some(Ok(b"a".to_vec())));
    drop(played);
    let reason = "exec-server transport disconnected: the server is gone".to_owned();
    let error = ExecServerError::Body { request: "broken".to_owned(), reason: reason.clone() };
    assert_eq!(broken.body.next().await, Some(Err(error)));
    assert_eq!(broken.body.next().await, None);
    assert_eq!(client.processes().await, Err(ExecServerError::Failed(reason)));
    drop((client, broken));
    task.await.unwrap();
}

#[tokio::test]
async fn a_change_is_named_where_the_server_knows_names() {
    use serde_json::json;
    for knows in [false, true] {
        let info = json!({"shell": {"name": "sh", "path": "/bin/sh"},
            "extensions": {"fileOperationId": knows, "operationId": knows}});
        let (mut played, client, task) = Played::with_client(json!({"sessionId": "s", "environmentInfo": info})).await;
        let server = async {
            let mut names = std::collections::BTreeSet::new();
            for method in ["fs/writeFile", "fs/createDirectory", "fs/remove", "fs/copy", "process/start"] {
                let request = played.request(method).await;
                let name = &request["params"]["operationId"];
                assert_eq!(name.is_string(), knows, "{request}");
                names.extend(name.as_str().map(str::to_owned));
                played.answer(&request, json!({"processId": "p"})).await;
            }
            assert_eq!(names.len(), if knows { 5 } else { 0 });
        };
        let path = WirePath::parse("/f").unwrap();
        let user = async {
            client.write_file(&path, Vec::new(), None).await.unwrap();
            client.create_directory(&path, true, None).await.unwrap();
            client.remove(&path, true, true, None).await.unwrap();
            client.copy(&path, &path, false, None).await.unwrap();
            drop(client.start(&start_params("p")).await.unwrap());
        };
        tokio::join!(server, user);
        drop(client);
        task.await.unwrap();
    }
}

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
            let output = Event::Output { stream: Stream::Stdout, chunk: b"x".to_vec() };
            answers.send(output.notification("p", 1)).await.unwrap();
            let denials = Arc::new(Denials { list: vec![denial()], more: 2 });
            answers.send(Event::Exited { code: 1, denials }.notification("p", 2)).await.unwrap();
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
    let write = |id: &str| (json!("process/write"), json!({"processId": "p", "chunk": "eA==", "writeId": id}));
    let expect = [
        (json!("process/resize"), json!({"processId": "p", "rows": 1, "cols": 1})),
        (json!("process/signal"), json!({"processId": "p", "signal": "stop"})),
        (json!("process/signal"), json!({"processId": "p", "signal": "interrupt"})),
        write("1"),
        write("2"),
        (json!("process/closeStdin"), json!({"processId": "p"})),
        (json!("process/closeStdin"), json!({"processId": "p"})),
        (json!("process/list"), json!({})),
    ];
    assert_eq!(asked[2..], expect);
}

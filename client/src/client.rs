//! The client: a handle to its task.

use crate::process::{Process, ProcessEvents, ProcessInput};
use crate::task::{self, Order, Transport};
use crate::{ExecServerError, dial};
use portcullis_protocol::init::{InitializeParams, InitializeResult};
use portcullis_protocol::process::{ListResult, ListedProcess, StartParams};
use portcullis_protocol::rpc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Calls on their way to the task.
const QUEUE: usize = 128;
/// Events of one process that its owner has not taken yet.
const EVENTS: usize = 256;

/// How to reach a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecServerClientConnectOptions {
    /// Where: `ws://HOST:PORT`.
    pub url: String,
    /// Who calls; any text.
    pub client_name: String,
}

/// A client of an exec-server. Clones share one connection, which ends when the last is dropped.
#[derive(Debug, Clone)]
pub struct ExecServerClient {
    orders: mpsc::Sender<Order>,
    initialized: Arc<InitializeResult>,
}

impl ExecServerClient {
    /// Connects over a WebSocket. Answers the client and its task, which the caller joins after dropping the client.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn connect(options: &ExecServerClientConnectOptions) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        let (transport, carrier) = dial::websocket(&options.url).await?;
        Self::begin(transport, Some(carrier), &options.client_name).await
    }

    /// Connects over a transport of the caller's. Otherwise like [`Self::connect`].
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn over(transport: Transport, client_name: &str) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        Self::begin(transport, None, client_name).await
    }

    async fn begin(
        transport: Transport,
        carrier: Option<JoinHandle<()>>,
        client_name: &str,
    ) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        let (orders, queue) = mpsc::channel(QUEUE);
        let task = tokio::spawn(task::run(transport, queue, carrier));
        match shake_hands(&orders, client_name).await {
            Ok(initialized) => Ok((Self { orders, initialized: Arc::new(initialized) }, task)),
            Err(error) => {
                drop(orders);
                let _panicked = task.await;
                Err(error)
            }
        }
    }

    /// What the server said of itself.
    #[must_use]
    pub fn initialized(&self) -> &InitializeResult {
        &self.initialized
    }

    /// Calls any method.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn call<R: DeserializeOwned>(&self, method: &str, params: &impl Serialize) -> Result<R, ExecServerError> {
        call(&self.orders, method, params).await
    }

    /// What the session knows of its processes, in the order of their starts.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn processes(&self) -> Result<Vec<ListedProcess>, ExecServerError> {
        self.call("process/list", &serde_json::json!({})).await.map(|list: ListResult| list.processes)
    }

    /// Starts a process. Its events are kept from the first on, up to a bound, after which the server is held up.
    ///
    /// # Errors
    /// See [`ExecServerError`]. After [`ExecServerError::Disconnected`] it may or may not run. An id whose process this client
    /// still follows is [`ExecServerError::InUse`].
    pub async fn start(&self, params: &StartParams) -> Result<Process, ExecServerError> {
        let (events, receiver) = mpsc::channel(EVENTS);
        let (taken, answer) = oneshot::channel();
        let process = params.process_id.clone();
        send(&self.orders, Order::Listen { process: process.clone(), events, taken }).await?;
        if answer.await.map_err(|_| gone())? {
            return Err(ExecServerError::InUse(process));
        }
        match self.call("process/start", params).await {
            Ok(started) => {
                let input = Some(ProcessInput::new(self.clone(), process));
                Ok(Process { client: self.clone(), started, input, events: Some(ProcessEvents(receiver)) })
            }
            Err(error) => {
                send(&self.orders, Order::Unlisten { process }).await?;
                Err(error)
            }
        }
    }
}

async fn shake_hands(orders: &mpsc::Sender<Order>, client_name: &str) -> Result<InitializeResult, ExecServerError> {
    let params = InitializeParams::new(client_name);
    let initialized = call(orders, "initialize", &params).await?;
    let text =
        rpc::notification_text("initialized", &serde_json::json!({})).map_err(|error| unwritable("initialized", &error))?;
    send(orders, Order::Notify { text }).await?;
    Ok(initialized)
}

async fn call<R: DeserializeOwned>(
    orders: &mpsc::Sender<Order>,
    method: &str,
    params: &impl Serialize,
) -> Result<R, ExecServerError> {
    let (answer, answered) = oneshot::channel();
    let params = serde_json::to_string(params).map_err(|error| unwritable(method, &error))?;
    send(orders, Order::Call { method: method.to_owned(), params, answer }).await?;
    let result = answered.await.map_err(|_| gone())??;
    serde_json::from_str(result.get())
        .map_err(|error| ExecServerError::Answer { method: method.to_owned(), reason: error.to_string() })
}

async fn send(orders: &mpsc::Sender<Order>, order: Order) -> Result<(), ExecServerError> {
    orders.send(order).await.map_err(|_| gone())
}

fn gone() -> ExecServerError {
    ExecServerError::Disconnected("the server is gone".to_owned())
}

fn unwritable(method: &str, error: &serde_json::Error) -> ExecServerError {
    ExecServerError::Answer { method: method.to_owned(), reason: format!("its parameters cannot be written: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessEvent;
    use portcullis_protocol::denial::{Denial, Denials, Layer, Wanted};
    use portcullis_protocol::event::{Event, Stream};
    use portcullis_protocol::path::WirePath;
    use portcullis_protocol::rpc::{Id, Message, RpcError};

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
            write("input-1"),
            write("input-2"),
            (json!("process/closeStdin"), json!({"processId": "p"})),
            (json!("process/closeStdin"), json!({"processId": "p"})),
            (json!("process/list"), json!({})),
        ];
        assert_eq!(asked[2..], expect);
    }
}

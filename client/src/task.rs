//! The client's task: it alone owns the transport, the calls that wait, and who hears of which process.

use crate::ExecServerError;
use crate::process::ProcessEvent;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::method::Notice;
use portcullis_protocol::process::{ClosedNotice, ExitedNotice, OutputNotice};
use portcullis_protocol::rpc::{self, Id, Message};
use serde_json::value::RawValue;
use std::collections::HashMap;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Two bounded channels of texts: one message each, whole.
#[derive(Debug)]
pub struct Transport {
    /// Towards the server.
    pub outgoing: mpsc::Sender<String>,
    /// From the server; it ends when the link does.
    pub incoming: mpsc::Receiver<String>,
}

/// Answer to a call: the result's JSON text.
pub(crate) type Answer = oneshot::Sender<Result<Box<RawValue>, ExecServerError>>;

/// What the handles ask of the task.
#[derive(Debug)]
pub(crate) enum Order {
    /// Send a request; `text` is made from the id that the task picks.
    Call { method: String, params: String, answer: Answer },
    /// Send a notification.
    Notify { text: String },
    /// Hand what happens to a process to somebody, unless somebody has it. It ends by itself after the process's last event.
    Listen { process: String, events: mpsc::Sender<ProcessEvent>, taken: oneshot::Sender<bool> },
    /// The process did not start.
    Unlisten { process: String },
}

pub(crate) async fn run(transport: Transport, mut orders: mpsc::Receiver<Order>, carrier: Option<JoinHandle<()>>) {
    let Transport { outgoing, mut incoming } = transport;
    let mut task = Task { calls: HashMap::new(), listeners: HashMap::new(), next: 1 };
    let reason = loop {
        let text = tokio::select! {
            order = orders.recv() => match order {
                Some(order) => task.order(order),
                None => break "the client was dropped",
            },
            message = incoming.recv() => match message {
                Some(message) => {
                    task.message(&message).await;
                    None
                }
                None => break "the server is gone",
            },
        };
        if let Some(text) = text
            && outgoing.send(text).await.is_err()
        {
            break "the server is gone";
        }
    };
    for (_id, answer) in task.calls {
        let _caller_gone = answer.send(Err(ExecServerError::Disconnected(reason.to_owned())));
    }
    drop((outgoing, incoming));
    if let Some(carrier) = carrier {
        let _panicked = carrier.await;
    }
}

struct Task {
    calls: HashMap<i64, Answer>,
    listeners: HashMap<String, mpsc::Sender<ProcessEvent>>,
    next: i64,
}

impl Task {
    fn order(&mut self, order: Order) -> Option<String> {
        match order {
            Order::Call { method, params, answer } => {
                let id = self.next;
                self.next += 1;
                self.calls.insert(id, answer);
                let method = serde_json::Value::from(method);
                Some(format!(r#"{{"id":{id},"method":{method},"params":{params}}}"#))
            }
            Order::Notify { text } => Some(text),
            Order::Listen { process, events, taken } => {
                let is_taken = self.listeners.get(&process).is_some_and(|listener| !listener.is_closed());
                if !is_taken {
                    self.listeners.insert(process, events);
                }
                let _caller_gone = taken.send(is_taken);
                None
            }
            Order::Unlisten { process } => {
                self.listeners.remove(&process);
                None
            }
        }
    }

    async fn message(&mut self, text: &str) {
        match rpc::parse(text.as_bytes()) {
            Ok(Message::Response { id: Id::Number(id), outcome }) => {
                if let Some(answer) = self.calls.remove(&id) {
                    let outcome = outcome.map(ToOwned::to_owned).map_err(ExecServerError::Server);
                    let _caller_gone = answer.send(outcome);
                }
            }
            Ok(Message::Notification { method, params: Some(params) }) => self.notice(&method, params).await,
            // Requests of the server, and what a newer server announces: nothing that this version asked for.
            Ok(_) | Err(_) => {}
        }
    }

    async fn notice(&mut self, method: &str, params: &RawValue) {
        // What is not of this list, or breaks the rules of the wire, is nothing that this version can act on.
        let (process, event) = match Notice::decode(method, params) {
            Ok(Some(Notice::Output(OutputNotice { process_id, seq, stream, chunk }))) => {
                (process_id, ProcessEvent::Output { seq, stream, chunk: chunk.0 })
            }
            Ok(Some(Notice::Exited(exited))) => {
                let ExitedNotice { process_id, seq, exit_code: code, sandbox_denied: denied, denials, denials_more } = exited;
                let denials = Denials { list: denials, more: denials_more };
                (process_id, ProcessEvent::Exited { seq, code, denied, denials })
            }
            Ok(Some(Notice::Closed(ClosedNotice { process_id, seq }))) => (process_id, ProcessEvent::Closed { seq }),
            Ok(Some(Notice::MissingChanged(_)) | None) | Err(_) => return,
        };
        let is_last = matches!(event, ProcessEvent::Closed { .. });
        if let Some(listener) = self.listeners.get(&process) {
            // A listener that does not listen holds this client up, and through it the server: nothing is dropped.
            let _listener_gone = listener.send(event).await;
        }
        if is_last {
            self.listeners.remove(&process);
        }
    }
}

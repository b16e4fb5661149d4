//! Answers: from a call's outcome to the text that goes to the client, with the room that it takes on its way.

use crate::asked::Asked;
use crate::budget::{Budget, Charge};
use crate::link::Outgoing;
use crate::metrics::{Direction, Metrics};
use crate::reply;
use futures_util::FutureExt as _;
use portcullis_protocol::rpc::{self, Id, RpcError};
use serde::Serialize;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// From here on a reply is large.
const LARGE: usize = 128 * 1024;

/// The way of one answer to its client.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) replies: Budget,
    pub(crate) metrics: Arc<Metrics>,
    /// The request that it answers.
    pub(crate) asked: Option<Asked>,
}

/// Runs a call and sends its answer. A panic answers that call and no other.
///
/// What a call keeps takes kilobytes, and a task is moved several times while it is made: boxed, it is moved once.
pub(crate) fn carry_out(
    id: Id,
    way: Way,
    call: impl Future<Output = Result<Answer, RpcError>> + Send + 'static,
) -> impl Future<Output = ()> + Send {
    finish(id, way, Box::pin(call))
}

async fn finish(id: Id, way: Way, call: Pin<Box<dyn Future<Output = Result<Answer, RpcError>> + Send>>) {
    let Way { outgoing, replies, metrics, asked } = way;
    let outcome = AssertUnwindSafe(call).catch_unwind().await.unwrap_or_else(|_panic| {
        let incident = uuid::Uuid::new_v4();
        tracing::error!(%incident, "a call panicked");
        Err(reply::internal(format!("a defect of the server, incident {incident}; its log says more")))
    });
    let outcome = match asked {
        Some(asked) => asked.over(outcome).await,
        None => outcome,
    };
    let answer = outcome.unwrap_or_else(|error| rpc::error_text(&id, &error).into());
    metrics.message(Direction::Out, answer.text.len());
    let message = match answer {
        Answer { text, room: Some(room) } => Outgoing::Large(text, room),
        // Only now is it known how large it is; at least what waits for the client is bounded.
        Answer { text, room: None } if text.len() > LARGE => {
            let room = replies.charge(text.len()).await;
            Outgoing::Large(text, room)
        }
        Answer { text, room: None } => Outgoing::Text(text),
    };
    let _link_gone = outgoing.send(message).await;
}

/// An answer's text, with the room that it takes if it is large.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) room: Option<Charge>,
}

impl Answer {
    pub(crate) fn large(text: String, room: Charge) -> Self {
        Self { text, room: Some(room) }
    }
}

impl From<String> for Answer {
    fn from(text: String) -> Self {
        Self { text, room: None }
    }
}

/// Bytes of so many bytes in base64, with what is around them.
pub(crate) fn text_size(bytes: usize) -> usize {
    (bytes / 3).saturating_mul(4).saturating_add(256)
}

/// The session's answer as a text.
pub(crate) async fn answered<T: Serialize>(id: Id, answer: oneshot::Receiver<Result<T, RpcError>>) -> Result<Answer, RpcError> {
    Ok(text(&id, &answer.await.map_err(|_| reply::session_ended())??)?.into())
}

/// The text of a result.
pub(crate) fn text(id: &Id, result: &impl Serialize) -> Result<String, RpcError> {
    rpc::result_text(id, result).map_err(|error| reply::internal(format!("the result cannot be written: {error}")))
}

//! Answers: from a call's outcome to the text that goes to the client, with the room that it takes on its way.

use crate::asked::Asked;
use crate::budget::{Budget, Charge};
use crate::link::Outgoing;
use crate::metrics::{Direction, Metrics};
use crate::reply;
use bytes::Bytes;
use futures_util::FutureExt as _;
use portcullis_protocol::binary::Message;
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
    let Answer { message, room } = answer;
    metrics.message(Direction::Out, message.size());
    let room = match room {
        // Only now is it known how large it is; at least what waits for the client is bounded.
        None if message.size() > LARGE => Some(replies.charge(message.size()).await),
        room => room,
    };
    let _link_gone = outgoing.send(Outgoing::message(message, room)).await;
}

/// An answer, with the room that it takes if it is large.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) message: Message,
    pub(crate) room: Option<Charge>,
}

impl Answer {
    pub(crate) fn large(message: impl Into<Message>, room: Charge) -> Self {
        Self { message: message.into(), room: Some(room) }
    }
}

impl From<String> for Answer {
    fn from(text: String) -> Self {
        Self { message: text.into(), room: None }
    }
}

/// How bytes travel to a client, which is settled by its `initialize`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// In base64, in the JSON.
    #[default]
    Json,
    /// As they are, beside the JSON.
    Binary,
}

impl Form {
    /// What so many bytes take, with what is around them.
    pub(crate) fn size(self, bytes: usize) -> usize {
        let bytes = match self {
            Self::Json => (bytes / 3).saturating_mul(4),
            Self::Binary => bytes,
        };
        bytes.saturating_add(256)
    }

    /// The message of a result whose one member is bytes; `more` is raw JSON that begins with a comma, or nothing.
    pub(crate) fn bytes_result(self, id: &Id, member: &str, bytes: impl Into<Bytes>, more: &str) -> Message {
        let bytes = bytes.into();
        match self {
            Self::Json => rpc::bytes_result_text(id, member, &bytes, more).into(),
            Self::Binary => Message::binary(rpc::bytes_result_head(id, more), bytes),
        }
    }
}

/// The session's answer as a text.
pub(crate) async fn answered<T: Serialize>(id: Id, answer: oneshot::Receiver<Result<T, RpcError>>) -> Result<Answer, RpcError> {
    // Cut here, since the room of the message that it names may go before it is sent.
    let outcome = answer.await.map_err(|_| reply::session_ended())?.map_err(RpcError::cut)?;
    Ok(text(&id, &outcome)?.into())
}

/// The text of a result.
pub(crate) fn text(id: &Id, result: &impl Serialize) -> Result<String, RpcError> {
    rpc::result_text(id, result).map_err(|error| reply::internal(format!("the result cannot be written: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of an answer of so many bytes, where there is room for so many.
    async fn sent(form: Form, bytes: usize, free: usize) -> Option<Outgoing> {
        let (outgoing, mut sent) = mpsc::channel(1);
        let replies = Budget::new(8 << 20);
        let _others = replies.charge((8 << 20) - free).await;
        let way = Way { outgoing, replies, metrics: Arc::new(Metrics::new()), asked: None };
        let call = async move {
            let message = form.bytes_result(&Id::Number(1), "chunk", vec![0; bytes], "");
            Ok(Answer { message, room: None })
        };
        let _held_up = carry_out(Id::Number(1), way, call).now_or_never();
        sent.try_recv().ok()
    }

    #[tokio::test]
    async fn bytes_are_charged_by_what_is_held_of_them() {
        assert!(matches!(sent(Form::Binary, LARGE / 2, 0).await, Some(Outgoing::Binary { room: None, .. })), "it is small");
        assert!(sent(Form::Binary, LARGE, 0).await.is_none(), "there is no room");
        let (bytes, free) = (3 << 20, (3 << 20) + 1024);
        assert!(matches!(sent(Form::Binary, bytes, free).await, Some(Outgoing::Binary { room: Some(_), .. })));
        assert!(sent(Form::Json, bytes, free).await.is_none());
        assert!(
            matches!(sent(Form::Json, bytes, free / 2 * 3).await, Some(Outgoing::Large(..))),
            "control: in base64 it takes more"
        );
        let message = Form::Binary.bytes_result(&Id::Number(1), "chunk", vec![0; bytes], "");
        assert!((bytes..free).contains(&message.size()) && (message.size()..free).contains(&Form::Binary.size(bytes)));
    }
}

//! The body of an answer in parts, as fast as the client takes them.

use super::Answer;
use super::fetch::within;
use super::whole::LARGEST;
use crate::answer::Form;
use crate::budget::Budget;
use crate::ids::{Ids, InUse, NotFree};
use crate::link::Outgoing;
use crate::metrics::{Direction, Metrics};
use crate::reply;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::http::BodyDelta;
use portcullis_protocol::rpc::{self, RpcError, code};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Streamed answers of one connection at a time. Each holds a socket and some hundred KiB.
const STREAMS: usize = 256;
/// Bytes of one part.
const PART: usize = 1 << 20;
/// Bytes of parts on their way to one client. Few, since one that reads nothing holds them for as long as it is connected.
const ON_THE_WAY: usize = 8 << 20;
/// The words that clients of this wire know for a body that is not whole.
const BROKEN: &str = "error decoding response body";

/// Bodies on their way to one client.
#[derive(Debug)]
pub(crate) struct Bodies {
    /// What those that come whole may hold while they come. Apart from the replies, which must not wait for a slow server.
    pub(crate) whole: Budget,
    /// What the parts of all others may hold until they are sent.
    pub(crate) parts: Budget,
    /// What sends them; they end with the connection.
    pub(crate) tasks: JoinSet<()>,
    /// Ids in use. One is free again as soon as its last part is on its way.
    ids: Ids<String>,
}

impl Bodies {
    /// None yet. What they hold is a part of what those of all clients may.
    pub(crate) fn new(bodies: &Budget, replies: &Budget) -> Self {
        let (whole, parts) = (Budget::new(LARGEST), Budget::new(ON_THE_WAY));
        whole.join(bodies);
        parts.join(replies);
        Self { whole, parts, tasks: JoinSet::new(), ids: Ids::new(STREAMS) }
    }

    /// Takes the id of a body that comes in parts.
    pub(crate) fn reserve(&mut self, id: &str) -> Result<InUse, RpcError> {
        self.ids.reserve(id.to_owned()).map_err(|reason| match reason {
            NotFree::Taken => {
                let text = format!("http/request streamResponse requestId `{id}` is already active");
                RpcError::new(code::INVALID_PARAMS, text)
            }
            NotFree::Full => reply::invalid(format!(
                "http/request: {STREAMS} answers are streamed to this connection already: wait for the end of one"
            )),
        })
    }
}

/// Where the parts of one answer go.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) request_id: String,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    /// What the parts on their way may hold.
    pub(crate) room: Budget,
    pub(crate) metrics: Arc<Metrics>,
    /// When all of it must be over.
    pub(crate) deadline: Option<Instant>,
}

/// Sends the body. A client that reads slowly is waited for, and with it the server at the other end: nothing is read ahead. The
/// id is free once the last part is on its way.
pub(crate) async fn send_parts(mut answer: Answer, to: Parts, in_use: InUse) {
    let mut sent = Sent { to, seq: 0 };
    let error = loop {
        let bytes = match within(sent.to.deadline, answer.next()).await {
            Some(Some(Ok(bytes))) => bytes,
            Some(Some(Err(cause))) => break Some(cause),
            Some(None) => break None,
            None => break Some("timed out: timeoutMs ran out".to_owned()),
        };
        for part in bytes.chunks(PART) {
            if !sent.part(part.to_vec(), None).await {
                return;
            }
        }
    };
    // The socket is closed first, so that who sees the end sees that too.
    drop(answer);
    let _link_gone = sent.part(Vec::new(), Some((in_use, error))).await;
}

/// What was sent of one body.
struct Sent {
    to: Parts,
    seq: u64,
}

impl Sent {
    /// Sends one part once there is room; false if the client is gone.
    async fn part(&mut self, bytes: Vec<u8>, last: Option<(InUse, Option<String>)>) -> bool {
        self.seq += 1;
        let room = self.to.room.charge(Form::Json.size(bytes.len()) + self.to.request_id.len()).await;
        let done = last.is_some();
        let (in_use, detail) = last.unzip();
        let detail = detail.flatten();
        let delta = BodyDelta {
            request_id: self.to.request_id.clone(),
            seq: self.seq,
            delta: Chunk(bytes),
            done,
            error: detail.is_some().then(|| BROKEN.to_owned()),
            detail,
        };
        let Ok(text) = rpc::notification_text("http/request/bodyDelta", &delta) else { return false };
        let Ok(line) = self.to.outgoing.reserve().await else { return false };
        // Nothing of another body with this id comes before the last part, and who has seen that may use the id.
        drop(in_use);
        self.to.metrics.message(Direction::Out, text.len());
        line.send(Outgoing::Large(text, room));
        true
    }
}

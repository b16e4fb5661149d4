//! The body of an answer in parts, as fast as the client takes them.

use super::Answer;
use super::fetch::within;
use super::whole::LARGEST;
use crate::answer::text_size;
use crate::budget::Budget;
use crate::link::Outgoing;
use crate::reply;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::http::BodyDelta;
use portcullis_protocol::rpc::{self, RpcError, code};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
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
    ids: HashMap<String, Weak<()>>,
}

/// An id in use.
#[derive(Debug)]
pub(crate) struct InUse {
    _alive: Arc<()>,
}

impl Bodies {
    /// None yet. What they hold is a part of what those of all clients may.
    pub(crate) fn new(bodies: &Budget, replies: &Budget) -> Self {
        let (whole, parts) = (Budget::new(LARGEST), Budget::new(ON_THE_WAY));
        whole.join(bodies);
        parts.join(replies);
        Self { whole, parts, tasks: JoinSet::new(), ids: HashMap::new() }
    }

    /// Takes an id.
    pub(crate) fn reserve(&mut self, id: &str) -> Result<InUse, RpcError> {
        self.ids.retain(|_, in_use| in_use.strong_count() > 0);
        if self.ids.contains_key(id) {
            let text = format!("http/request streamResponse requestId `{id}` is already active");
            return Err(RpcError::new(code::INVALID_PARAMS, text));
        }
        if self.ids.len() >= STREAMS {
            let text =
                format!("http/request: {STREAMS} answers are streamed to this connection already: wait for the end of one");
            return Err(reply::invalid(text));
        }
        let in_use = Arc::new(());
        self.ids.insert(id.to_owned(), Arc::downgrade(&in_use));
        Ok(InUse { _alive: in_use })
    }
}

/// Where the parts of one answer go.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) request_id: String,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    /// What the parts on their way may hold.
    pub(crate) room: Budget,
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
            if !sent.part(part.to_vec(), false, None).await {
                return;
            }
        }
    };
    // The socket is closed first, so that who sees the end sees that too.
    drop((answer, in_use));
    let _link_gone = sent.part(Vec::new(), true, error).await;
}

/// What was sent of one body.
struct Sent {
    to: Parts,
    seq: u64,
}

impl Sent {
    /// Sends one part once there is room; false if the client is gone.
    async fn part(&mut self, bytes: Vec<u8>, done: bool, detail: Option<String>) -> bool {
        self.seq += 1;
        let room = self.to.room.charge(text_size(bytes.len()) + self.to.request_id.len()).await;
        let delta = BodyDelta {
            request_id: self.to.request_id.clone(),
            seq: self.seq,
            delta: Chunk(bytes),
            done,
            error: detail.is_some().then(|| BROKEN.to_owned()),
            detail,
        };
        let Ok(text) = rpc::notification_text("http/request/bodyDelta", &delta) else { return false };
        self.to.outgoing.send(Outgoing::Large(text, room)).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_once_and_free_again() {
        let mut streams = Bodies::new(&Budget::new(1), &Budget::new(1));
        let first = streams.reserve("a").unwrap();
        let taken = streams.reserve("a").unwrap_err();
        assert_eq!(taken.message, "http/request streamResponse requestId `a` is already active");
        let others: Vec<_> = (1..STREAMS).map(|number| streams.reserve(&number.to_string()).unwrap()).collect();
        assert!(streams.reserve("b").unwrap_err().message.contains("256 answers"));
        drop(first);
        let again = streams.reserve("a").unwrap();
        drop((others, again));
        assert!(streams.reserve("a").is_ok() && streams.ids.len() == 1);
    }
}

//! A link: a pair of bounded channels that carry the messages of one client, whatever the transport.

use crate::budget::{Budget, Charge};
use crate::caller::{Caller, Transport};
use crate::scope::TokenScope;
use bytes::Bytes;
use portcullis_protocol::binary::Message;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Messages that wait in one direction. A client that reads nothing holds up its own calls once they are this many, and
/// never anyone else's.
const QUEUE: usize = 128;

/// Bytes of a client's messages that were not carried out yet: one of the largest.
const INCOMING_BYTES: usize = 64 << 20;

/// The gateway's end of a link.
#[derive(Debug)]
pub struct Link {
    /// What the client sends; the channel ends when the client is gone.
    pub(crate) incoming: mpsc::Receiver<Incoming>,
    /// What the client gets.
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    /// The last mark that was answered, which speaks for those before it: a state, not messages, so that it waits behind
    /// nothing and nobody waits to put it there.
    pub(crate) answered: watch::Receiver<u64>,
    pub(crate) can: Abilities,
    /// How texts name the peer, as in `websocket JSON-RPC message from exec-server websocket 127.0.0.1:4000`.
    pub(crate) peer: String,
    /// Whether the session may outlive this link: no on stdio, whose client cannot come back.
    pub(crate) resumable: bool,
    pub(crate) doubt: Doubt,
    /// How long its client may take for the handshake; none: as long as it likes.
    pub(crate) handshake: Option<Duration>,
    pub(crate) caller: Caller,
    /// What its client's token narrows it to.
    pub(crate) scope: Option<Arc<TokenScope>>,
    /// What its client's messages are charged to.
    pub(crate) budget: Budget,
}

/// What a link can beside carrying texts in order.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Abilities {
    /// [`Outgoing::Ping`] is answered.
    pub(crate) answers_pings: bool,
    /// [`Outgoing::Binary`] is carried.
    pub(crate) carries_binary: bool,
}

/// Raised when somebody else wants what the client of a link has: the client may be gone without a word, and a transport that
/// can should ask it. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Doubt(watch::Sender<()>);

impl Doubt {
    pub(crate) fn raise(&self) {
        self.0.send_replace(());
    }
}

/// The other end: a transport, or a client in this process.
#[derive(Debug)]
#[non_exhaustive]
pub struct LinkEnd {
    /// Towards the gateway.
    pub incoming: Inlet,
    /// From the gateway.
    pub outgoing: mpsc::Receiver<Outgoing>,
    /// Changes when the gateway doubts that the client is still there. It ends when the connection does.
    pub doubts: watch::Receiver<()>,
}

/// Where a transport puts a client's messages.
#[derive(Debug)]
pub struct Inlet {
    messages: mpsc::Sender<Incoming>,
    answered: watch::Sender<u64>,
    budget: Budget,
}

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub struct ConnectionEnded;

impl Inlet {
    /// Hands one whole message over, once there is room for its bytes.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn send(&self, bytes: Bytes) -> Result<(), ConnectionEnded> {
        let charge = tokio::select! {
            charge = self.budget.charge(bytes.len()) => charge,
            () = self.messages.closed() => return Err(ConnectionEnded),
        };
        self.messages.send(Incoming { bytes, charge }).await.map_err(|_| ConnectionEnded)
    }

    /// The client answered a ping. An answer to an older one says nothing new, and must not hide a newer one's.
    pub fn answered(&self, mark: u64) {
        self.answered.send_if_modified(|newest| mark > std::mem::replace(newest, mark.max(*newest)));
    }

    /// Waits for the end of the connection.
    pub async fn closed(&self) {
        self.messages.closed().await;
    }
}

/// One message of a client, whole, with the room that it takes.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) bytes: Bytes,
    pub(crate) charge: Charge,
}

/// What goes to a client.
#[derive(Debug)]
pub enum Outgoing {
    /// One message.
    Text(String),
    /// One message, with the room that it takes: to be dropped when it was sent.
    Large(String, Charge),
    /// One message of JSON and bytes (see [`portcullis_protocol::binary`]), with the room that it takes if it is large; only over
    /// links that carry those.
    Binary {
        /// The message without its bytes.
        head: String,
        /// Its bytes.
        body: Bytes,
        /// To be dropped when it was sent.
        room: Option<Charge>,
    },
    /// A ping that carries this mark; only over links that answer those, with [`Inlet::answered`] once the client has
    /// received everything before it.
    Ping(u64),
    /// The end, with a WebSocket close code and a reason. Nothing follows.
    Close {
        /// As RFC 6455 section 7.4 says.
        code: u16,
        /// For people.
        reason: String,
    },
}

impl Link {
    /// Two ends. `peer` is how texts name the client, as in `message from CLIENT`; `resumable` says whether its session may
    /// outlive the link, so that the client can come back for it.
    #[must_use]
    pub fn pair(peer: impl Into<String>, resumable: bool) -> (Self, LinkEnd) {
        let (messages, incoming) = mpsc::channel(QUEUE);
        let (outgoing, from_gateway) = mpsc::channel(QUEUE);
        let (doubt, doubts) = watch::channel(());
        let (answered, answers) = watch::channel(0);
        let budget = Budget::new(INCOMING_BYTES);
        let link = Self {
            budget: budget.clone(),
            incoming,
            outgoing,
            answered: answers,
            can: Abilities::default(),
            peer: peer.into(),
            resumable,
            doubt: Doubt(doubt),
            handshake: None,
            caller: Caller::default(),
            scope: None,
        };
        let inlet = Inlet { messages, answered, budget };
        (link, LinkEnd { incoming: inlet, outgoing: from_gateway, doubts })
    }

    /// The same link, as metrics and logs shall name it: of this transport, from this address if there is such a thing.
    #[must_use]
    pub fn over(mut self, transport: Transport, address: impl Into<String>) -> Self {
        (self.caller.transport, self.caller.address) = (transport, address.into());
        self
    }

    /// The same link, of this client.
    pub(crate) fn of(self, caller: Caller) -> Self {
        Self { caller, ..self }
    }

    /// The same link, over which the client answers [`Outgoing::Ping`] in order. What it was sent is kept until it has
    /// received that; over any other link, sending must be enough.
    #[must_use]
    pub fn answering_pings(self) -> Self {
        Self { can: Abilities { answers_pings: true, ..self.can }, ..self }
    }

    /// The same link, which carries [`Outgoing::Binary`]. Its client gets such messages if it asks for them.
    #[must_use]
    pub fn carrying_binary(self) -> Self {
        Self { can: Abilities { carries_binary: true, ..self.can }, ..self }
    }
}

impl Outgoing {
    /// A message, with the room that it takes if it is large.
    pub(crate) fn message(Message { text, body }: Message, room: Option<Charge>) -> Self {
        match (body, room) {
            (Some(body), room) => Self::Binary { head: text, body, room },
            (None, Some(room)) => Self::Large(text, room),
            (None, None) => Self::Text(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn a_client_that_sends_without_end_is_held_up_by_bytes() {
        let (mut link, end) = Link::pair("test", true);
        let message = || Bytes::from(vec![0; INCOMING_BYTES / 4]);
        let mut sent = 0;
        while end.incoming.send(message()).now_or_never().is_some() {
            sent += 1;
        }
        assert_eq!(sent, 4);
        let first = link.incoming.try_recv().unwrap();
        assert!(end.incoming.send(message()).now_or_never().is_none(), "it was taken out and not carried out yet");
        drop(first);
        assert!(end.incoming.send(message()).now_or_never().is_some());
        drop(link);
        assert_eq!(end.incoming.send(message()).now_or_never(), Some(Err(ConnectionEnded)));
    }
}

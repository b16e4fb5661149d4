//! A link: a pair of bounded channels that carry the messages of one client, whatever the transport.

use bytes::Bytes;
use tokio::sync::mpsc;

/// Messages that wait in one direction. A client that reads nothing holds up its own calls once they are this many, and
/// never anyone else's.
const QUEUE: usize = 128;

/// The gateway's end of a link.
#[derive(Debug)]
pub struct Link {
    /// What the client sends; the channel ends when the client is gone.
    pub incoming: mpsc::Receiver<Incoming>,
    /// What the client gets.
    pub outgoing: mpsc::Sender<Outgoing>,
    /// How texts name the peer, as in `websocket JSON-RPC message from exec-server websocket 127.0.0.1:4000`.
    pub peer: String,
    /// Whether the session may outlive this link: no on stdio, whose client cannot come back.
    pub resumable: bool,
}

/// The other end: a transport, or a client in this process.
#[derive(Debug)]
pub struct LinkEnd {
    /// Towards the gateway.
    pub incoming: mpsc::Sender<Incoming>,
    /// From the gateway.
    pub outgoing: mpsc::Receiver<Outgoing>,
}

/// One message of a client, whole.
#[derive(Debug, Clone)]
pub struct Incoming(pub Bytes);

/// What goes to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outgoing {
    /// One message.
    Text(String),
    /// The end, with a WebSocket close code and a reason. Nothing follows.
    Close {
        /// As RFC 6455 section 7.4 says.
        code: u16,
        /// For people.
        reason: String,
    },
}

impl Link {
    /// Two ends. `peer` and `resumable` as in the fields.
    #[must_use]
    pub fn pair(peer: impl Into<String>, resumable: bool) -> (Self, LinkEnd) {
        let (to_gateway, incoming) = mpsc::channel(QUEUE);
        let (outgoing, from_gateway) = mpsc::channel(QUEUE);
        let link = Self { incoming, outgoing, peer: peer.into(), resumable };
        (link, LinkEnd { incoming: to_gateway, outgoing: from_gateway })
    }
}

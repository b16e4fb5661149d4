//! A link as the client's task has it, whatever carries it.

use crate::task::Transport;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Bytes;

/// Both directions.
#[derive(Debug)]
pub(crate) struct Carried {
    pub(crate) outgoing: mpsc::Sender<String>,
    pub(crate) incoming: Incoming,
}

/// What comes over a link: texts alone, or binary messages too.
#[derive(Debug)]
pub(crate) enum Incoming {
    Texts(mpsc::Receiver<String>),
    Messages(mpsc::Receiver<Received>),
}

/// One message of a server, whole.
#[derive(Debug)]
pub(crate) enum Received {
    Text(String),
    Binary(Bytes),
}

impl From<Transport> for Carried {
    fn from(Transport { outgoing, incoming }: Transport) -> Self {
        Self { outgoing, incoming: Incoming::Texts(incoming) }
    }
}

impl Incoming {
    /// The next; none at the end.
    pub(crate) async fn recv(&mut self) -> Option<Received> {
        match self {
            Self::Texts(texts) => texts.recv().await.map(Received::Text),
            Self::Messages(messages) => messages.recv().await,
        }
    }

    /// Whether it is at its end and everything was taken.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Texts(texts) => texts.is_closed() && texts.is_empty(),
            Self::Messages(messages) => messages.is_closed() && messages.is_empty(),
        }
    }
}

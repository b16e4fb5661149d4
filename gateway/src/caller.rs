//! Who is at the other end of a link, as far as is known: for what is measured, logged and recorded.

use serde::Serialize;

/// How a client reaches the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Transport {
    /// WebSocket over TCP.
    WebSocket,
    /// WebSocket over a socket of the file system.
    Unix,
    /// Standard input and output.
    Stdio,
    /// An encrypted stream through a rendezvous.
    Relay,
    /// The same process.
    #[default]
    Embedded,
}

impl Transport {
    /// As metrics and logs name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WebSocket => "websocket",
            Self::Unix => "unix",
            Self::Stdio => "stdio",
            Self::Relay => "relay",
            Self::Embedded => "embedded",
        }
    }
}

/// The other end of a link.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    pub(crate) transport: Transport,
    /// Where it comes from, as in `127.0.0.1:4000`; empty where there is no such thing.
    pub(crate) address: String,
    pub(crate) who: Who,
}

/// What a client showed, but never the token itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "credential", rename_all = "lowercase")]
pub(crate) enum Who {
    /// Nothing was asked of it.
    #[default]
    None,
    /// The one token of the listener.
    Token,
    /// A token that somebody signed.
    Signed {
        /// Its `sub`.
        #[serde(skip_serializing_if = "Option::is_none")]
        sub: Option<String>,
        /// Its `jti`.
        #[serde(skip_serializing_if = "Option::is_none")]
        jti: Option<String>,
    },
}

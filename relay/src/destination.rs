//! Where streams are forwarded to: a WebSocket of somebody else's, dialled anew for each stream.

use crate::segment::MAX_MESSAGE;
use crate::wire::{self, Tls, Wire};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use std::fmt;
use std::time::Duration;
use thiserror::Error;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use url::Url;

/// How long the connection and its upgrade may take.
const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of a frame: those that listen take longer messages, and no frames above 16 MiB.
const FRAME: usize = 8 << 20;
/// How long a destination may take nothing of what it is sent, as the peer of a stream may.
const STALL: Duration = Duration::from_secs(60);
/// How long a destination may take to answer the end.
const CLOSE: Duration = Duration::from_secs(1);

/// A destination.
#[derive(Clone)]
pub struct Destination {
    url: Url,
    tls: Option<Tls>,
}

/// The way towards it.
pub struct ToDestination(SplitSink<WebSocketStream<Box<dyn Wire>>, Message>);

/// The way from it.
pub struct FromDestination(SplitStream<WebSocketStream<Box<dyn Wire>>>);

/// Why a destination is none, or a connection to it is over. No text has a secret of its URL.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DestinationError {
    /// The URL.
    #[error("forward destination must be a ws:// or wss:// URL")]
    Url,
    /// It was not reached.
    #[error("reach the forward destination {0}: {1}")]
    Unreachable(String, String),
    /// It is gone, or takes nothing.
    #[error("send to the forward destination: {0}")]
    Gone(String),
}

impl Destination {
    /// A destination at a `ws://` or `wss://` URL with a host. Nothing is added to its handshake.
    ///
    /// # Errors
    /// It is another URL.
    pub fn new(url: &str, tls: Option<Tls>) -> Result<Self, DestinationError> {
        let url = Url::parse(url).map_err(|_| DestinationError::Url)?;
        let is_known = matches!(url.scheme(), "ws" | "wss") && url.host().is_some();
        if is_known { Ok(Self { url, tls }) } else { Err(DestinationError::Url) }
    }

    /// Whether it needs to be known whom to believe.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.url.scheme() == "wss"
    }

    /// Where it is, for people.
    #[must_use]
    pub fn place(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        let port = self.url.port().map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}://{host}{port}{}", self.url.scheme(), self.url.path())
    }

    /// Dials, within 10 s.
    ///
    /// # Errors
    /// [`DestinationError::Unreachable`].
    pub async fn dial(&self) -> Result<(ToDestination, FromDestination), DestinationError> {
        let unreachable = |reason: String| DestinationError::Unreachable(self.place(), reason);
        let dialled = timeout(CONNECT, async {
            let request = self.url.as_str().into_client_request().map_err(|error| error.to_string())?;
            let wire = wire::open(&self.url, self.tls.as_ref()).await?;
            let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
            let upgraded = tokio_tungstenite::client_async_with_config(request, wire, Some(config)).await;
            upgraded.map(|(socket, _response)| socket).map_err(|error| error.to_string())
        });
        let late = |_elapsed| format!("nothing was answered within {} s", CONNECT.as_secs());
        let socket = dialled.await.map_err(late).and_then(|dialled| dialled).map_err(unreachable)?;
        let (sink, stream) = socket.split();
        Ok((ToDestination(sink), FromDestination(stream)))
    }
}

impl ToDestination {
    /// Sends one binary message, in frames of at most 8 MiB.
    ///
    /// # Errors
    /// [`DestinationError::Gone`], also if nothing of it was taken for 60 s.
    pub async fn send(&mut self, mut message: Bytes) -> Result<(), DestinationError> {
        let mut kind = OpCode::Data(Data::Binary);
        loop {
            let frame = message.split_to(message.len().min(FRAME));
            let frame = Message::Frame(Frame::message(frame, kind, message.is_empty()));
            let sent = timeout(STALL, self.0.send(frame)).await;
            let late = |_elapsed| DestinationError::Gone(format!("nothing was taken for {} s", STALL.as_secs()));
            sent.map_err(late)?.map_err(|error| DestinationError::Gone(error.to_string()))?;
            if message.is_empty() {
                return Ok(());
            }
            kind = OpCode::Data(Data::Continue);
        }
    }

    /// Closes the connection and waits for the answer, for at most 1 s.
    pub async fn close(mut self, mut from: FromDestination) {
        let _gone = timeout(CLOSE, async {
            let _gone_already = self.0.send(Message::Close(None)).await;
            while from.recv().await.is_some() {}
        })
        .await;
    }
}

impl FromDestination {
    /// The next message, text or binary; none: the destination closed, or is gone.
    pub async fn recv(&mut self) -> Option<Bytes> {
        loop {
            match self.0.next().await? {
                Ok(Message::Binary(bytes)) => return Some(bytes),
                Ok(Message::Text(text)) => return Some(text.into()),
                Ok(Message::Close(_)) => return None,
                Ok(_sign_of_life) => {}
                Err(error) => {
                    tracing::info!("the forward destination is gone: {error}");
                    return None;
                }
            }
        }
    }
}

/// Without what may be secret in the URL.
impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Destination({})", self.place())
    }
}

impl fmt::Debug for ToDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ToDestination")
    }
}

impl fmt::Debug for FromDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromDestination")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_websocket_and_its_secrets_are_not_shown() {
        let place = |url: &str| Destination::new(url, None).map(|destination| destination.place());
        assert_eq!(place("ws://127.0.0.1:7/p?token=hush#hush").unwrap(), "ws://127.0.0.1:7/p");
        assert_eq!(place("wss://me:hush@box.example").unwrap(), "wss://box.example/");
        for wrong in ["", "box", "http://box", "https://box", "unix:/x", "ws://", "ws:box:7:7"] {
            assert_eq!(place(wrong), Err(DestinationError::Url), "{wrong}");
        }
    }
}

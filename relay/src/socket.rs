//! A WebSocket to the rendezvous: binary messages both ways, and signs of life.

use crate::frame::MAX_FRAME;
use crate::wire::{self, Tls, Wire};
use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WebSocketError, Message};
use url::Url;

/// Frames that came and were not taken yet.
const INCOMING: usize = 128;
/// Frames on their way out: few, since records are best made when they can leave.
const OUTGOING: usize = 16;
/// How long the connection and its upgrade may take.
const CONNECT: Duration = Duration::from_secs(10);
/// From one ping to the next.
const PING: Duration = Duration::from_secs(30);
/// How long the rendezvous may say nothing, a pong included.
const SILENCE: Duration = Duration::from_secs(60);

/// An open WebSocket. Dropping both channels closes it.
#[derive(Debug)]
pub struct Socket {
    /// Towards the rendezvous.
    pub outgoing: mpsc::Sender<Bytes>,
    /// From the rendezvous; it ends when the socket does.
    pub incoming: mpsc::Receiver<Bytes>,
    /// The one task that carries, which answers why it ended. Whoever has the socket joins it; if it is dropped, so is the task.
    pub carrier: JoinSet<String>,
}

/// Why there is no WebSocket. No text names the URL, which is a secret.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The rendezvous answered the upgrade with another status.
    #[error("the rendezvous refused the WebSocket with status {0}")]
    Refused(u16),
    /// It was not reached, or is none.
    #[error("reach the rendezvous: {0}")]
    Unreachable(String),
}

impl DialError {
    /// Whether the URL is of no use any more: another one is to be had from the registry.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Refused(400..=499))
    }
}

impl Socket {
    /// Dials a URL that the registry gave, within 10 s.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial(url: &str, tls: Option<&Tls>) -> Result<Self, DialError> {
        let dialled = timeout(CONNECT, upgrade(url, tls)).await;
        let late = |_elapsed| DialError::Unreachable(format!("nothing was answered within {} s", CONNECT.as_secs()));
        let socket = dialled.map_err(late)??;
        let (outgoing, to_send) = mpsc::channel(OUTGOING);
        let (received, incoming) = mpsc::channel(INCOMING);
        let mut carrier = JoinSet::new();
        carrier.spawn(carry(socket, to_send, received));
        Ok(Self { outgoing, incoming, carrier })
    }
}

async fn upgrade(url: &str, tls: Option<&Tls>) -> Result<WebSocketStream<Box<dyn Wire>>, DialError> {
    let unreachable = DialError::Unreachable;
    let parsed = Url::parse(url).map_err(|error| unreachable(format!("the registry gave no URL: {error}")))?;
    if !matches!(parsed.scheme(), "ws" | "wss") {
        return Err(unreachable(format!("the registry gave a URL of scheme {}; ws and wss are known", parsed.scheme())));
    }
    let request = url.into_client_request().map_err(|error| unreachable(error.to_string()))?;
    let wire = wire::open(&parsed, tls).await.map_err(unreachable)?;
    let config = WebSocketConfig::default().max_message_size(Some(MAX_FRAME)).max_frame_size(Some(MAX_FRAME));
    match tokio_tungstenite::client_async_with_config(request, wire, Some(config)).await {
        Ok((socket, _response)) => Ok(socket),
        Err(WebSocketError::Http(response)) => Err(DialError::Refused(response.status().as_u16())),
        Err(error) => Err(unreachable(error.to_string())),
    }
}

/// Carries frames until either end is gone, and says why it ended.
async fn carry(
    socket: WebSocketStream<Box<dyn Wire>>,
    mut to_send: mpsc::Receiver<Bytes>,
    received: mpsc::Sender<Bytes>,
) -> String {
    let (mut sink, mut stream) = socket.split();
    let read = async {
        loop {
            let message = match timeout_at(Instant::now() + SILENCE, stream.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => break error.to_string(),
                Ok(None) => break "the rendezvous is gone".to_owned(),
                Err(_elapsed) => break format!("nothing was heard of the rendezvous for {} s", SILENCE.as_secs()),
            };
            let frame = match message {
                Message::Binary(frame) => frame,
                Message::Text(_) => {
                    tracing::warn!("the rendezvous sent a text, which is dropped");
                    continue;
                }
                Message::Close(_) => break "the rendezvous closed the connection".to_owned(),
                _sign_of_life => continue,
            };
            if received.send(frame).await.is_err() {
                // Nobody reads any more; what is still to be sent decides when this ends.
                std::future::pending::<()>().await;
            }
        }
    };
    let write = async {
        let mut ping = interval_at(Instant::now() + PING, PING);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let message = tokio::select! {
                frame = to_send.recv() => match frame {
                    Some(frame) => Message::Binary(frame),
                    None => break,
                },
                _tick = ping.tick() => Message::Ping(Bytes::new()),
            };
            if sink.send(message).await.is_err() {
                // The reader finds out why, behind what came before.
                std::future::pending::<()>().await;
            }
        }
        let _gone = sink.send(Message::Close(None)).await;
        "this end closed the connection".to_owned()
    };
    tokio::select! {
        reason = read => reason,
        reason = write => reason,
    }
}

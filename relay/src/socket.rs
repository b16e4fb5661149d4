//! A WebSocket to the rendezvous: binary messages both ways, and signs of life.

use crate::frame::MAX_FRAME;
use crate::wire::{self, Tls, Wire};
use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use std::collections::VecDeque;
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
/// How long the rendezvous may say nothing, a pong included, or take nothing; and how long what it sent may wait to be taken here, for
/// as long as that does its silence is not noticed.
const SILENCE: Duration = Duration::from_secs(60);

/// Frames of whoever drives streams that its socket did not take yet: while there are so many no more are made.
pub const UNSENT: usize = 64;

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
    /// Dials a URL that the registry gave, within 10 s: `wss://`, or `ws://` on this very machine.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial(url: &str, tls: Option<&Tls>) -> Result<Self, DialError> {
        if Url::parse(url).is_ok_and(|url| url.scheme() == "ws" && !wire::is_loopback(&url)) {
            let reason = "the registry gave a ws:// URL of another machine, and it is a secret that would travel in clear; \
                          tell the rendezvous with --public-url wss://HOST where it is reached over TLS";
            return Err(DialError::Unreachable(reason.to_owned()));
        }
        Self::open(url, tls).await
    }

    /// Dials a `ws://` URL wherever it leads: over a network of which the caller knows that nobody listens there.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial_in_clear(url: &str) -> Result<Self, DialError> {
        Self::open(url, None).await
    }

    async fn open(url: &str, tls: Option<&Tls>) -> Result<Self, DialError> {
        let dialled = timeout(CONNECT, upgrade(url, tls)).await;
        let late = |_elapsed| DialError::Unreachable(format!("nothing was answered within {} s", CONNECT.as_secs()));
        let socket = dialled.map_err(late)??;
        let (outgoing, to_send) = mpsc::channel(OUTGOING);
        let (received, incoming) = mpsc::channel(INCOMING);
        let mut carrier = JoinSet::new();
        carrier.spawn(carry(socket, to_send, received, SILENCE));
        Ok(Self { outgoing, incoming, carrier })
    }

    /// Sends what is left and closes the socket, for at most `within`, and then ends it anyway. Answers why it ended, if it did in time.
    pub async fn end(self, within: Duration) -> Option<String> {
        let Self { outgoing, incoming, mut carrier } = self;
        drop((outgoing, incoming));
        let ended = timeout(within, carrier.join_next()).await;
        carrier.shutdown().await;
        ended.ok().flatten().and_then(Result::ok)
    }
}

/// Sends the first frame, or waits for ever if there is none, or nowhere to send it. False: the socket has ended. Dropping the future
/// loses nothing.
pub async fn send_first(outgoing: Option<&mpsc::Sender<Bytes>>, unsent: &mut VecDeque<Bytes>) -> bool {
    let Some(outgoing) = outgoing.filter(|_| !unsent.is_empty()) else { return std::future::pending().await };
    let Ok(permit) = outgoing.reserve().await else { return false };
    if let Some(frame) = unsent.pop_front() {
        permit.send(frame);
    }
    true
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

/// Carries frames until either end is gone, or stands still for as long as `silence`, and says why it ended.
async fn carry(
    socket: WebSocketStream<Box<dyn Wire>>,
    mut to_send: mpsc::Receiver<Bytes>,
    received: mpsc::Sender<Bytes>,
    silence: Duration,
) -> String {
    let (mut sink, mut stream) = socket.split();
    let read = async {
        loop {
            let message = match timeout_at(Instant::now() + silence, stream.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => break error.to_string(),
                Ok(None) => break "the rendezvous is gone".to_owned(),
                Err(_elapsed) => break format!("nothing was heard of the rendezvous for {} s", silence.as_secs()),
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
            match timeout(silence, received.send(frame)).await {
                Ok(Ok(())) => {}
                // Nobody reads any more; what is still to be sent decides when this ends.
                Ok(Err(_)) => std::future::pending().await,
                Err(_elapsed) => break format!("nobody here took what the rendezvous sent for {} s", silence.as_secs()),
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
                    None => Message::Close(None),
                },
                _tick = ping.tick() => Message::Ping(Bytes::new()),
            };
            let is_last = matches!(message, Message::Close(_));
            match timeout(silence, sink.send(message)).await {
                Err(_elapsed) => break format!("the rendezvous took nothing for {} s", silence.as_secs()),
                Ok(_gone) if is_last => break "this end closed the connection".to_owned(),
                Ok(Ok(())) => {}
                // The reader finds out why, behind what came before.
                Ok(Err(_)) => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        reason = read => reason,
        reason = write => reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio_tungstenite::tungstenite::protocol::Role;

    /// What the tests wait for, instead of 60 s.
    const SHORT: Duration = Duration::from_millis(300);
    const FRAME_OF_ONE_BYTE: [u8; 3] = [0x82, 1, b'x'];
    const PING: [u8; 2] = [0x89, 0];

    /// A socket, and the other end of its wire, which takes 1 KiB at a time.
    async fn connected() -> (Socket, DuplexStream) {
        let (near, far) = duplex(1024);
        let socket = WebSocketStream::from_raw_socket(Box::new(near) as Box<dyn Wire>, Role::Client, None).await;
        let (outgoing, to_send) = mpsc::channel(OUTGOING);
        let (received, incoming) = mpsc::channel(INCOMING);
        let mut carrier = JoinSet::new();
        carrier.spawn(carry(socket, to_send, received, SHORT));
        (Socket { outgoing, incoming, carrier }, far)
    }

    #[tokio::test]
    async fn a_rendezvous_that_takes_nothing_is_noticed_although_it_shows_signs_of_life() {
        let (mut socket, mut far) = connected().await;
        socket.outgoing.send(vec![0; 4096].into()).await.unwrap();
        let mut signs = async || while far.write_all(&PING).await.is_ok() {};
        let (reason, ()) = tokio::join!(async { socket.carrier.join_next().await.unwrap().unwrap() }, signs());
        assert_eq!(reason, "the rendezvous took nothing for 0 s");
    }

    #[tokio::test]
    async fn no_other_machine_is_dialled_in_clear_unless_the_caller_says_so() {
        // All of it is this machine in truth; nothing else says so of the first.
        let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = format!("ws://0.0.0.0:{port}/?sig=hush");
        let error = Socket::dial(&other, None).await.unwrap_err().to_string();
        assert!(error.contains("--public-url wss://HOST") && !error.contains("hush"), "{error}");
        let answer = async {
            for _ in 0..2 {
                let (mut asked, _) = listener.accept().await.unwrap();
                assert_ne!(asked.read(&mut [0; 1024]).await.unwrap(), 0);
                asked.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            }
        };
        let dial = async {
            assert_eq!(Socket::dial_in_clear(&other).await.unwrap_err(), DialError::Refused(404));
            let here = format!("ws://127.0.0.1:{port}/");
            assert_eq!(Socket::dial(&here, None).await.unwrap_err(), DialError::Refused(404));
        };
        tokio::join!(answer, dial);
    }

    #[tokio::test]
    async fn frames_that_nobody_takes_end_the_connection() {
        let (mut socket, far) = connected().await;
        let (mut reads, mut writes) = tokio::io::split(far);
        let more = async { while writes.write_all(&FRAME_OF_ONE_BYTE).await.is_ok() {} };
        let mut unread = [0; 64];
        let taken = async { while matches!(reads.read(&mut unread).await, Ok(1..)) {} };
        let (reason, (), ()) = tokio::join!(async { socket.carrier.join_next().await.unwrap().unwrap() }, more, taken);
        assert_eq!(reason, "nobody here took what the rendezvous sent for 0 s");
    }

    #[tokio::test]
    async fn what_stands_still_is_closed_only_as_long_as_it_may_take() {
        let (socket, far) = connected().await;
        socket.outgoing.send(vec![0; 4096].into()).await.unwrap();
        assert_eq!(socket.end(SHORT / 10).await, None, "it was ended");
        drop(far);
        let (socket, mut far) = connected().await;
        let mut last = [0; 2];
        let (reason, read) = tokio::join!(socket.end(SILENCE), far.read_exact(&mut last));
        read.unwrap();
        assert_eq!((reason.as_deref(), last[0]), (Some("this end closed the connection"), 0x88));
    }
}

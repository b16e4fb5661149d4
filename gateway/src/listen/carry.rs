//! Carrying messages between a WebSocket and its link.

use super::STRAGGLERS;
use super::upgrade::WebSocket;
use crate::budget::Charge;
use crate::link::{Inlet, LinkEnd, Outgoing};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_protocol::binary::before_body;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout_at};
use tokio_tungstenite::tungstenite::error::{CapacityError, ProtocolError};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{CloseFrame, Frame};
use tokio_tungstenite::tungstenite::{Error, Message};

/// Bytes of one WebSocket frame from a client, and of one message in several.
const FRAME: usize = 16 << 20;
const MESSAGE: usize = 64 << 20;
/// Bytes that are read from a socket at a time. Each connection holds as many, also while it is idle: with 128 KiB that was most
/// of its memory, and a message of 1 MiB is no faster for it.
const READ_BUFFER: usize = 8 << 10;
/// Bytes of one WebSocket frame to a client. A longer message goes in several (RFC 6455 section 5.4): what the socket does not take
/// at once is moved to the front of its buffer with every write, which for a message of 10 MB came to hundreds of them.
const PIECE: usize = 128 << 10;

/// Every so many turns everything is looked at; else a message in line goes first: looking costs as much as a small message.
const ROW: u32 = 32;

/// What a listener grants its clients of time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Until the socket is upgraded, and from there to `initialized`.
    pub(super) handshake: Duration,
    /// From one ping to the next.
    pub(super) ping: Duration,
    /// How long a client may say nothing, a pong included, before it counts as gone.
    pub(super) silence: Duration,
}

/// How long a client has to say something, a pong included, once another connection wants its session: most likely it has
/// come back itself while we have not heard that the old connection broke.
const DOUBT: Duration = Duration::from_secs(5);

/// What a client did wrong, as a close code and a reason; none if the connection simply ended.
type Offence = Option<(u16, String)>;

/// The bounds of a client's WebSocket.
pub(super) fn config() -> WebSocketConfig {
    WebSocketConfig::default().max_frame_size(Some(FRAME)).max_message_size(Some(MESSAGE)).read_buffer_size(READ_BUFFER)
}

/// Carries messages until either end is gone. When we end it, a close frame goes first.
pub(super) async fn carry(socket: WebSocket, end: LinkEnd, patience: Patience) {
    let LinkEnd { incoming, outgoing, doubts } = end;
    let (sink, stream) = socket.split();
    let (ended, reader_ended) = oneshot::channel();
    let read = read(stream, incoming, doubts.clone(), ended, patience.silence);
    let write = write(sink, outgoing, doubts, reader_ended, patience.ping);
    // Whichever ends first: a client that reads nothing must not keep what is left for it, and us, for ever.
    tokio::select! {
        () = write => {}
        () = async { read.await; sleep(STRAGGLERS).await } => {}
    }
}

/// Hands over what a client sends. Its end drops the inlet, which detaches the session at once, whatever the writer still has
/// to do.
async fn read(
    mut stream: SplitStream<WebSocket>,
    incoming: Inlet,
    mut doubted: watch::Receiver<()>,
    ended: oneshot::Sender<Offence>,
    silence: Duration,
) {
    let mut heard = Instant::now();
    let mut until = heard + silence;
    let offence = loop {
        let message = tokio::select! {
            message = timeout_at(until, stream.next()) => message,
            () = incoming.closed() => break None,
            Ok(()) = doubted.changed() => {
                // Not longer than it would have had anyway.
                until = until.min(Instant::now() + DOUBT);
                continue;
            }
        };
        let bytes = match message {
            Ok(Some(Ok(Message::Text(text)))) => Some(Bytes::from(text)),
            Ok(Some(Ok(Message::Binary(bytes)))) => Some(bytes),
            Ok(Some(Ok(Message::Pong(payload)))) => {
                if let Ok(mark) = <[u8; 8]>::try_from(&*payload) {
                    incoming.answered(u64::from_be_bytes(mark));
                }
                None
            }
            Ok(Some(Ok(Message::Ping(_) | Message::Frame(_)))) => None,
            Ok(Some(Ok(Message::Close(_))) | None) => break None,
            Ok(Some(Err(error))) => break offence(&error),
            Err(_elapsed) => break Some((CloseCode::Away.into(), format!("nothing came for {} s", heard.elapsed().as_secs()))),
        };
        if let Some(bytes) = bytes
            && incoming.send(bytes).await.is_err()
        {
            break None;
        }
        // Only now: a client that we let wait has said nothing because we did not listen.
        heard = Instant::now();
        until = heard + silence;
    };
    let _writer_gone = ended.send(offence);
}

/// Sends what a client gets, and pings.
async fn write(
    mut sink: SplitSink<WebSocket, Message>,
    mut outgoing: mpsc::Receiver<Outgoing>,
    mut doubted: watch::Receiver<()>,
    mut reader_ended: oneshot::Receiver<Offence>,
    every: Duration,
) {
    let mut ping = interval_at(Instant::now() + every, every);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut doubt_again, mut has_reader_ended) = (Instant::now(), false);
    // In every ping after it too, since a client may answer the newest alone (RFC 6455 section 5.5.3).
    let mut mark = Bytes::new();
    let mut turn = 0;
    loop {
        turn = (turn + 1) % ROW;
        let in_line = if turn > 0 { outgoing.try_recv().ok() } else { None };
        let next = if let Some(message) = in_line {
            next(message, &mut mark)
        } else {
            tokio::select! {
                message = outgoing.recv() => match message {
                    Some(message) => next(message, &mut mark),
                    None => return,
                },
                _tick = ping.tick() => Message::Ping(mark.clone()).into(),
                // Whoever wants the session may ask many times a second.
                Ok(()) = doubted.changed() => {
                    if Instant::now() < doubt_again {
                        continue;
                    }
                    doubt_again = Instant::now() + DOUBT;
                    Message::Ping(mark.clone()).into()
                }
                offence = &mut reader_ended, if !has_reader_ended => match offence {
                    Ok(Some((code, reason))) => close(code, reason).into(),
                    // Where it is we who end, the last word is in line already; where the client is gone, sending soon fails.
                    Ok(None) | Err(_) => {
                        has_reader_ended = true;
                        continue;
                    }
                },
            }
        };
        let is_last = matches!(next, Next::Whole(Message::Close(_)));
        // What is large gives its room back once the socket has it.
        let (fed, room) = match next {
            Next::Whole(message) => (sink.feed(message).await, None),
            Next::Data(kind, parts, room) => (in_pieces(&mut sink, kind, parts).await, room),
        };
        if fed.is_err() {
            return;
        }
        // What is in line goes out together, the last of it at once.
        let flushed = if is_last || room.is_some() || outgoing.is_empty() { sink.flush().await } else { Ok(()) };
        if is_last || flushed.is_err() {
            return;
        }
    }
}

/// What is sent next.
enum Next {
    Whole(Message),
    /// A message whose parts are in different buffers, or that is large; with the room that it takes.
    Data(Data, [Bytes; 2], Option<Charge>),
}

fn next(message: Outgoing, mark: &mut Bytes) -> Next {
    match message {
        Outgoing::Text(text) => Message::Text(text.into()).into(),
        Outgoing::Large(text, room) => Next::Data(Data::Text, [text.into(), Bytes::new()], Some(room)),
        Outgoing::Binary { head, body, room } => Next::Data(Data::Binary, [before_body(&head), body], room),
        Outgoing::Ping(newest) => {
            *mark = Bytes::copy_from_slice(&newest.to_be_bytes());
            Message::Ping(mark.clone()).into()
        }
        Outgoing::Close { code, reason } => close(code, reason).into(),
    }
}

impl From<Message> for Next {
    fn from(message: Message) -> Self {
        Self::Whole(message)
    }
}

/// Feeds one message of several frames, so that its parts need not be joined. Each full piece goes out at once.
async fn in_pieces(sink: &mut SplitSink<WebSocket, Message>, mut kind: Data, parts: [Bytes; 2]) -> Result<(), Error> {
    let mut left: usize = parts.iter().map(Bytes::len).sum();
    for mut part in parts {
        while !part.is_empty() {
            let piece = part.split_to(part.len().min(PIECE));
            left -= piece.len();
            let is_full = piece.len() == PIECE;
            sink.feed(Message::Frame(Frame::message(piece, OpCode::Data(kind), left == 0))).await?;
            if is_full {
                sink.flush().await?;
            }
            kind = Data::Continue;
        }
    }
    Ok(())
}

fn close(code: u16, reason: String) -> Message {
    Message::Close(Some(CloseFrame { code: code.into(), reason: reason.into() }))
}

fn offence(error: &Error) -> Offence {
    match error {
        Error::Capacity(CapacityError::MessageTooLong { .. }) => {
            Some((CloseCode::Size.into(), format!("a frame may carry {FRAME} bytes and a message {MESSAGE}")))
        }
        Error::Io(_) | Error::ConnectionClosed | Error::AlreadyClosed => None,
        Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) => None,
        wrong => Some((CloseCode::Protocol.into(), wrong.to_string())),
    }
}

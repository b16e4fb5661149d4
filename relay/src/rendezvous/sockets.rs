//! Carrying frames between the socket of an executor and those of its harnesses.

use super::board::{Executor, Replaced};
use crate::frame::Frame;
use crate::stream::reset;
use axum::extract::ws::{Message, WebSocket};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout, timeout_at};

/// Frames in line for one socket.
pub(super) const QUEUE: usize = 128;
/// Claims in line for one executor.
pub(super) const CLAIMS: usize = 16;
/// Streams of one harness's socket: it needs one.
const STREAMS: usize = 8;
/// From one ping to the next.
const PING: Duration = Duration::from_secs(30);
/// How long an end may say nothing, a pong included.
pub(super) const SILENCE: Duration = Duration::from_secs(60);
/// How long a harness may take nothing of what its executor sends. The executor's other harnesses wait for that, so it is short, and
/// then this harness is cut off.
const SLOW: Duration = Duration::from_secs(5);

/// A frame on its way to an executor.
pub(super) type Incoming = Bytes;

/// A stream changes hands.
#[derive(Debug)]
pub(super) enum Claim {
    /// A harness's socket wants the stream of this name; answers whether nobody else has it.
    Take { stream: String, harness: u64, frames: mpsc::Sender<Bytes>, answer: oneshot::Sender<bool> },
    /// The socket of a harness is gone, with its streams.
    Leave { harness: u64 },
}

/// Carries the socket of an executor until it ends, or another one serves in its place.
pub(super) async fn executor(
    socket: WebSocket,
    claims: mpsc::Receiver<Claim>,
    frames: mpsc::Receiver<Incoming>,
    own: mpsc::WeakSender<Incoming>,
    replaced: Replaced,
) {
    let (sink, stream) = socket.split();
    tokio::select! {
        () = write(sink, frames) => {}
        () = route(stream, claims, own) => {}
        _newer = replaced => {}
    }
}

/// Gives what an executor sends to the harness whose stream it is.
async fn route(mut stream: SplitStream<WebSocket>, mut claims: mpsc::Receiver<Claim>, own: mpsc::WeakSender<Incoming>) {
    let mut streams: HashMap<String, (u64, mpsc::Sender<Bytes>)> = HashMap::new();
    // The executor learns at once that nobody is there, or as soon as it takes that: until then a session is not free.
    let mut gone: Vec<String> = Vec::new();
    let mut until = Instant::now() + SILENCE;
    loop {
        gone.retain(|name| own.upgrade().is_some_and(|own| own.try_send(reset(name)).is_err()));
        let message = tokio::select! {
            message = timeout_at(until, stream.next()) => message,
            Some(claim) = claims.recv() => {
                gone.extend(change(&mut streams, claim));
                continue;
            }
        };
        let Ok(Some(Ok(message))) = message else { return };
        until = Instant::now() + SILENCE;
        let Message::Binary(bytes) = message else {
            if matches!(message, Message::Close(_)) {
                return;
            }
            continue;
        };
        let Ok(frame) = Frame::decode(bytes.clone()) else { continue };
        let Some((harness, frames)) = streams.get(&frame.stream_id) else { continue };
        if !matches!(timeout(SLOW, frames.send(bytes)).await, Ok(Ok(()))) {
            // Its socket ends when nobody can send to it any more.
            let harness = *harness;
            gone.extend(change(&mut streams, Claim::Leave { harness }));
        }
    }
}

/// Carries a claim out, and answers the streams that nobody has any more.
fn change(streams: &mut HashMap<String, (u64, mpsc::Sender<Bytes>)>, claim: Claim) -> Vec<String> {
    match claim {
        Claim::Take { stream, harness, frames, answer } => {
            let has = streams.values().filter(|(owner, _)| *owner == harness).count();
            let is_free = has < STREAMS && !streams.contains_key(&stream);
            if answer.send(is_free).is_ok() && is_free {
                streams.insert(stream, (harness, frames));
            }
            Vec::new()
        }
        Claim::Leave { harness } => streams.extract_if(|_, (owner, _)| *owner == harness).map(|(name, _)| name).collect(),
    }
}

/// Carries the socket of a harness until it ends, or its executor's does.
pub(super) async fn harness(socket: WebSocket, number: u64, executor: Executor) {
    let (sink, stream) = socket.split();
    let (frames, to_send) = mpsc::channel(QUEUE);
    tokio::select! {
        () = write(sink, to_send) => {}
        () = claim_and_pass(stream, number, frames, &executor) => {}
        () = executor.frames.closed() => {}
    }
    let _executor_gone = executor.claims.send(Claim::Leave { harness: number }).await;
}

async fn claim_and_pass(mut stream: SplitStream<WebSocket>, number: u64, frames: mpsc::Sender<Bytes>, executor: &Executor) {
    // With its first stream it is the executor's side that keeps this socket open.
    let (weak, mut strong) = (frames.downgrade(), Some(frames));
    let mut own: Vec<String> = Vec::new();
    loop {
        let message = match timeout_at(Instant::now() + SILENCE, stream.next()).await {
            Ok(Some(Ok(Message::Binary(bytes)))) => bytes,
            Ok(Some(Ok(Message::Close(_)) | Err(_)) | None) | Err(_) => return,
            Ok(Some(Ok(_sign_of_life))) => continue,
        };
        let Ok(frame) = Frame::decode(message.clone()) else { continue };
        if !own.contains(&frame.stream_id) {
            // The first frame claims the stream; one of somebody else's is dropped.
            let (answer, answered) = oneshot::channel();
            let Some(frames) = weak.upgrade() else { return };
            let take = Claim::Take { stream: frame.stream_id.clone(), harness: number, frames, answer };
            if executor.claims.send(take).await.is_err() {
                return;
            }
            if !answered.await.unwrap_or_default() {
                continue;
            }
            own.push(frame.stream_id);
            drop(strong.take());
        }
        if executor.frames.send(message).await.is_err() {
            return;
        }
    }
}

/// Sends what is in line, and pings. Ends when nobody can send any more, or the socket does.
pub(super) async fn write(mut sink: SplitSink<WebSocket, Message>, mut frames: mpsc::Receiver<Bytes>) {
    let mut ping = interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            frame = frames.recv() => match frame {
                Some(frame) => Message::Binary(frame),
                None => break,
            },
            _tick = ping.tick() => Message::Ping(Bytes::new()),
        };
        // An end that takes nothing for so long is as good as silent.
        if !matches!(timeout(SILENCE, sink.send(message)).await, Ok(Ok(()))) {
            return;
        }
    }
    let _gone = timeout(SLOW, sink.send(Message::Close(None))).await;
}

//! Carrying frames between the socket of an executor and those of its harnesses.

use super::board::{Executor, Replaced};
use super::line::{Full, Line, Waiting, WeakLine};
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

/// Claims in line for one executor.
pub(super) const CLAIMS: usize = 16;
/// Streams of one harness's socket: it needs one.
const STREAMS: usize = 8;
/// From one ping to the next.
const PING: Duration = Duration::from_secs(30);
/// How long an end may say nothing, a pong included.
pub(super) const SILENCE: Duration = Duration::from_secs(60);
/// How long the harnesses of an executor may hold up its others, all together, by not taking what it sends: then a harness whose line
/// is full is cut off at once. Ends that keep to the protocol have 32 records of a stream on their way, so none of them fills a line.
pub(super) const SLOW: Duration = Duration::from_secs(5);
/// The time in which that comes back.
const SLOW_AGAIN: Duration = Duration::from_secs(60);
/// Resets in line for one executor. While they are too many nobody's claims are taken, so those who leave wait with their places.
const RESETS: usize = 1024;

/// A stream changes hands.
#[derive(Debug)]
pub(super) enum Claim {
    /// A harness's socket wants the stream of this name; answers whether nobody else has it.
    Take { stream: String, harness: u64, frames: Line, answer: oneshot::Sender<bool> },
    /// The socket of a harness is gone, with its streams.
    Leave { harness: u64 },
}

/// Carries the socket of an executor until it ends, or another one serves in its place.
pub(super) async fn executor(
    socket: WebSocket,
    claims: mpsc::Receiver<Claim>,
    frames: mpsc::Receiver<Waiting>,
    own: WeakLine,
    replaced: Replaced,
) {
    let (sink, stream) = socket.split();
    let (gone, resets) = mpsc::channel(RESETS);
    tokio::select! {
        () = write(sink, frames) => {}
        () = route(stream, claims, gone) => {}
        () = tell(resets, own) => {}
        _newer = replaced => {}
    }
}

/// Tells the executor of streams that nobody has any more, as soon as it takes that: until then a session is not free. It waits in the
/// same line as frames, so neither passes the other by.
async fn tell(mut gone: mpsc::Receiver<String>, own: WeakLine) {
    while let Some(stream) = gone.recv().await {
        let Some(own) = own.upgrade() else { break };
        let _ending = own.send(reset(&stream)).await;
    }
    // What is in line is still to be written.
    std::future::pending().await
}

/// Gives what an executor sends to the harness whose stream it is.
async fn route(mut stream: SplitStream<WebSocket>, mut claims: mpsc::Receiver<Claim>, gone: mpsc::Sender<String>) {
    let mut streams: HashMap<String, (u64, Line)> = HashMap::new();
    let mut allowance = Allowance::new(Instant::now());
    let mut until = Instant::now() + SILENCE;
    loop {
        let message = tokio::select! {
            message = timeout_at(until, stream.next()) => message,
            Some(claim) = next(&mut claims, &gone) => {
                if !change(&mut streams, claim, &gone) {
                    return;
                }
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
        if !allowance.send(frames, bytes).await {
            // Its socket ends when nobody can send to it any more.
            let harness = *harness;
            if !change(&mut streams, Claim::Leave { harness }, &gone) {
                return;
            }
        }
    }
}

/// The next claim, once there is room for all resets that it may need.
async fn next(claims: &mut mpsc::Receiver<Claim>, gone: &mpsc::Sender<String>) -> Option<Claim> {
    drop(gone.reserve_many(STREAMS).await);
    claims.recv().await
}

/// What is left of [`SLOW`].
#[derive(Debug)]
struct Allowance {
    left: Duration,
    since: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { left: SLOW, since: now }
    }

    fn left(&mut self, now: Instant) -> Duration {
        let back = now.duration_since(self.since).mul_f64(SLOW.div_duration_f64(SLOW_AGAIN));
        (self.left, self.since) = ((self.left + back).min(SLOW), now);
        self.left
    }

    /// Puts a frame in a harness's line. False: it is full for longer than is left, or the harness is gone.
    async fn send(&mut self, frames: &Line, frame: Bytes) -> bool {
        let frame = match frames.try_send(frame) {
            Ok(()) => return true,
            Err(Full::Gone) => return false,
            Err(Full::Now(frame)) => frame,
        };
        let begin = Instant::now();
        let sent = timeout(self.left(begin), frames.send(frame)).await;
        // Nothing comes back while somebody waits.
        self.since = Instant::now();
        self.left = self.left.saturating_sub(self.since - begin);
        sent.unwrap_or_default()
    }
}

/// Carries a claim out, and has streams told of that nobody has any more. False: there is no room for that.
fn change(streams: &mut HashMap<String, (u64, Line)>, claim: Claim, gone: &mpsc::Sender<String>) -> bool {
    match claim {
        Claim::Take { stream, harness, frames, answer } => {
            let has = streams.values().filter(|(owner, _)| *owner == harness).count();
            let is_free = has < STREAMS && !streams.contains_key(&stream);
            if answer.send(is_free).is_ok() && is_free {
                streams.insert(stream, (harness, frames));
            }
            true
        }
        Claim::Leave { harness } => {
            streams.extract_if(|_, (owner, _)| *owner == harness).all(|(name, _)| gone.try_send(name).is_ok())
        }
    }
}

/// Carries the socket of a harness until it ends, or its executor's does.
pub(super) async fn harness(socket: WebSocket, number: u64, executor: Executor) {
    let (sink, stream) = socket.split();
    let (frames, to_send) = Line::new(executor.frames.node());
    tokio::select! {
        () = write(sink, to_send) => {}
        () = claim_and_pass(stream, number, frames, &executor) => {}
        () = executor.frames.closed() => {}
    }
    let _executor_gone = executor.claims.send(Claim::Leave { harness: number }).await;
}

async fn claim_and_pass(mut stream: SplitStream<WebSocket>, number: u64, frames: Line, executor: &Executor) {
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
        if !executor.frames.send(message).await {
            return;
        }
    }
}

/// Sends what is in line, and pings. Ends when nobody can send any more, or the socket does.
pub(super) async fn write(mut sink: SplitSink<WebSocket, Message>, mut frames: mpsc::Receiver<impl Into<Bytes>>) {
    let mut ping = interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            frame = frames.recv() => match frame {
                Some(frame) => Message::Binary(frame.into()),
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

#[cfg(test)]
mod tests {
    use super::super::line;
    use super::*;
    use tokio::task::JoinSet;

    #[tokio::test]
    async fn slow_harnesses_share_what_they_may_hold_up() {
        let begin = Instant::now();
        let mut allowance = Allowance { left: Duration::from_millis(20), since: begin };
        let room = line::room();
        let lines: Vec<_> = (0..4).map(|_| Line::new(&room)).collect();
        for (line, _harness) in &lines {
            while line.try_send(Bytes::new()).is_ok() {}
        }
        // The first uses the allowance up, and the others, which are as slow, are cut off by what came back of it.
        for (line, _harness) in &lines {
            assert!(!allowance.send(line, Bytes::new()).await);
        }
        assert!(allowance.left < Duration::from_millis(20) && allowance.left(Instant::now()) < SLOW);
        let (quick, mut taken) = Line::new(&room);
        assert!(allowance.send(&quick, Bytes::new()).await && taken.recv().await.is_some());
        drop(taken);
        assert!(!allowance.send(&quick, Bytes::new()).await, "it is gone");
        // All of it comes back in its time, and no more.
        let now = Instant::now();
        let mut spent = Allowance { left: Duration::ZERO, since: now };
        assert!(spent.left(now + SLOW_AGAIN / 2).abs_diff(SLOW / 2) < Duration::from_millis(1));
        assert_eq!(spent.left(now + 3 * SLOW_AGAIN), SLOW);
    }

    #[tokio::test]
    async fn an_executor_hears_of_every_stream_that_is_gone_once_it_takes_that() {
        const HARNESSES: u64 = 1000;
        let (gone, resets) = mpsc::channel(RESETS);
        let (room, mut in_line) = (line::room(), 0);
        let (own, mut taken) = Line::new(&room);
        while own.try_send(Bytes::new()).is_ok() {
            in_line += 1;
        }
        let (claim, mut claims) = mpsc::channel(CLAIMS);
        let mut streams = HashMap::new();
        for harness in 0..HARNESSES {
            for nth in 0..STREAMS as u64 {
                streams.insert(format!("{harness} {nth}"), (harness, Line::new(&room).0));
            }
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(tell(resets, own.downgrade()));
        tasks.spawn(async move {
            for harness in 0..HARNESSES {
                claim.send(Claim::Leave { harness }).await.unwrap();
            }
        });
        tasks.spawn(async move {
            while let Some(claim) = next(&mut claims, &gone).await {
                assert!(change(&mut streams, claim, &gone), "there is room for what it may need");
            }
        });
        // Nothing comes from the executor meanwhile; it takes what was in line, and then the resets.
        for _ in 0..in_line {
            assert_eq!(Bytes::from(taken.recv().await.unwrap()), Bytes::new());
        }
        let mut told = std::collections::HashSet::new();
        while told.len() < usize::try_from(HARNESSES).unwrap() * STREAMS {
            let next = timeout(SILENCE, taken.recv()).await.expect("a reset in time");
            let frame = Frame::decode(next.unwrap().into()).unwrap();
            assert!(matches!(frame.body, crate::frame::Body::Reset { .. }) && told.insert(frame.stream_id));
        }
        tasks.shutdown().await;
    }
}

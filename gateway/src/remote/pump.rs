//! Between a stream and its link.

use crate::link::{LinkEnd, Outgoing};
use bytes::Bytes;
use portcullis_relay::mux::StreamKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Messages of one harness that nobody took yet; one more ends its stream, so that the others never wait for it. Calls in one breath are
/// many and small; what is long is bounded by its bytes, which all streams share.
const QUEUE: usize = 8192;
/// Bytes of memory that a message takes beside its own, which count as if they were: otherwise the smallest would cost nothing.
const ENTRY: usize = 64;

/// What a link has for its stream.
#[derive(Debug)]
pub(super) enum FromLink {
    /// A message. The next one comes when this one was taken or dropped.
    Message { stream: StreamKey, bytes: Bytes, taken: oneshot::Sender<()> },
    /// Its connection ended, or its destination did.
    Ended { stream: StreamKey },
}

/// Where a stream's messages go: its pump, which counts their bytes until they have arrived.
#[derive(Debug)]
pub(super) struct ToPump {
    /// None: the stream is over, and what came before is still delivered.
    messages: Option<mpsc::Sender<Bytes>>,
    bytes: Arc<AtomicUsize>,
    dropped: CancellationToken,
}

/// More messages wait than may.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// The other end.
#[derive(Debug)]
pub(super) struct FromStream {
    messages: mpsc::Receiver<Bytes>,
    bytes: Arc<AtomicUsize>,
    /// What the message that was taken last counts for.
    last: usize,
    dropped: CancellationToken,
}

pub(super) fn channel() -> (ToPump, FromStream) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let (bytes, dropped) = (Arc::<AtomicUsize>::default(), CancellationToken::new());
    let to_pump = ToPump { messages: Some(sender), bytes: Arc::clone(&bytes), dropped: dropped.clone() };
    (to_pump, FromStream { messages: receiver, bytes, last: 0, dropped })
}

/// What a message counts for.
fn cost(message: &Bytes) -> usize {
    message.len() + ENTRY
}

impl ToPump {
    /// Passes a message on, unless there is no room. Where nobody takes it any more the stream closes, and it is dropped.
    pub(super) fn send(&self, message: Bytes) -> Result<(), NoRoom> {
        let Some(messages) = &self.messages else { return Ok(()) };
        let length = cost(&message);
        self.bytes.fetch_add(length, Ordering::Relaxed);
        let sent = messages.try_send(message);
        if sent.is_err() {
            self.bytes.fetch_sub(length, Ordering::Relaxed);
        }
        if let Err(TrySendError::Full(_)) = sent { Err(NoRoom) } else { Ok(()) }
    }

    /// Bytes that did not arrive yet, and what it takes to keep them. Of what is dropped there are none: nothing makes them fewer but the link, which lets go of them
    /// as soon as it is its turn.
    pub(super) fn held(&self) -> usize {
        if self.dropped.is_cancelled() { 0 } else { self.bytes.load(Ordering::Relaxed) }
    }

    /// Nothing follows.
    pub(super) fn end(&mut self) {
        self.messages = None;
    }

    /// Nothing follows, and what did not arrive yet is dropped.
    pub(super) fn drop_all(&mut self) {
        self.messages = None;
        self.dropped.cancel();
    }
}

impl FromStream {
    /// The next message. Whoever asks is done with the one before it.
    pub(super) async fn recv(&mut self) -> Option<Bytes> {
        self.bytes.fetch_sub(std::mem::take(&mut self.last), Ordering::Relaxed);
        let message = tokio::select! {
            biased;
            () = self.dropped.cancelled() => None,
            message = self.messages.recv() => message,
        };
        self.last = message.as_ref().map_or(0, cost);
        message
    }

    /// Ends when what was not delivered yet is to be dropped.
    pub(super) fn dropped(&self) -> CancellationToken {
        self.dropped.clone()
    }
}

/// Passes messages on both ways, until the stream is over and its connection has ended. Answers which it was.
pub(super) async fn pump(
    stream: StreamKey,
    end: LinkEnd,
    mut from_stream: FromStream,
    to_stream: mpsc::Sender<FromLink>,
) -> StreamKey {
    let LinkEnd { incoming, mut outgoing, .. } = end;
    let up = async move {
        let dropped = from_stream.dropped();
        while let Some(bytes) = from_stream.recv().await {
            tokio::select! {
                sent = incoming.send(bytes) => if sent.is_err() {
                    return;
                },
                () = dropped.cancelled() => return,
            }
        }
    };
    let down = async move {
        while let Some(message) = outgoing.recv().await {
            let (text, _room) = match message {
                Outgoing::Text(text) => (text, None),
                Outgoing::Large(text, room) => (text, Some(room)),
                Outgoing::Ping(_) | Outgoing::Binary { .. } => continue,
                Outgoing::Close { .. } => break,
            };
            let (taken, is_taken) = oneshot::channel();
            if to_stream.send(FromLink::Message { stream, bytes: text.into(), taken }).await.is_err() {
                return;
            }
            let _stream_over = is_taken.await;
        }
        let _drive_over = to_stream.send(FromLink::Ended { stream }).await;
    };
    tokio::join!(up, down);
    stream
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn what_waits_for_its_link_is_counted_until_it_has_arrived() {
        let (mut to_pump, mut from_stream) = channel();
        assert_eq!([&b"abc"[..], b"de"].map(|message| to_pump.send(Bytes::from_static(message))), [Ok(()), Ok(())]);
        assert_eq!(to_pump.held(), 5 + 2 * ENTRY);
        assert!(from_stream.recv().now_or_never().flatten().is_some());
        assert_eq!(to_pump.held(), 5 + 2 * ENTRY, "it was taken out and has not arrived yet");
        to_pump.end();
        assert_eq!((to_pump.send(Bytes::from_static(b"x")), to_pump.held()), (Ok(()), 5 + 2 * ENTRY), "nobody takes it");
        assert_eq!(from_stream.recv().now_or_never().flatten().unwrap(), "de", "what came before the end is delivered");
        assert_eq!(to_pump.held(), 2 + ENTRY);
        assert_eq!(from_stream.recv().now_or_never(), Some(None));
        assert_eq!(to_pump.held(), 0);
    }

    #[test]
    fn what_is_dropped_is_not_delivered() {
        let (mut to_pump, mut from_stream) = channel();
        to_pump.send(Bytes::from_static(b"abc")).unwrap();
        to_pump.drop_all();
        assert_eq!(to_pump.held(), 0, "to drop it again would make nothing fewer");
        assert_eq!(from_stream.recv().now_or_never(), Some(None));
    }

    #[test]
    fn messages_that_nobody_takes_are_bounded_and_those_to_nobody_are_dropped() {
        let (to_pump, from_stream) = channel();
        for _ in 0..QUEUE {
            to_pump.send(Bytes::from_static(b"x")).unwrap();
        }
        assert_eq!((to_pump.send(Bytes::from_static(b"x")), to_pump.held()), (Err(NoRoom), QUEUE * (1 + ENTRY)));
        drop(from_stream);
        assert_eq!(to_pump.send(Bytes::from_static(b"x")), Ok(()));
    }
}

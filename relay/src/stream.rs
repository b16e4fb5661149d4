//! One open stream: messages in, frames out, and the other way round. Both ends are the same from the handshake on.

use crate::fault::Fault;
use crate::frame::{Body, Frame};
use crate::noise::Channel;
use crate::records::{Piece, Records};
use crate::segment::{Cutter, Joiner, QueueError};
use bytes::Bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What a closing stream has to deliver what was queued, counted from the last confirmation that brought it forward.
const FLUSH: Duration = Duration::from_secs(5);
/// What every reset says: a peer learns nothing from it.
const REASON: &str = "noise_relay_protocol_error";

pub(crate) struct Stream {
    id: String,
    channel: Channel,
    records: Records,
    cutter: Cutter,
    joiner: Joiner,
    received: VecDeque<Bytes>,
    closes: Option<Instant>,
}

impl Stream {
    pub(crate) fn new(id: String, channel: Channel, is_reliable: bool, now: Instant) -> Self {
        Self {
            id,
            channel,
            records: Records::new(is_reliable, now),
            cutter: Cutter::default(),
            joiner: Joiner::default(),
            received: VecDeque::new(),
            closes: None,
        }
    }

    pub(crate) fn is_reliable(&self) -> bool {
        self.records.is_reliable()
    }

    /// Takes a frame of this stream that is no handshake. A fault ends the stream; what came before it can still be taken.
    pub(crate) fn handle(&mut self, frame: Frame, now: Instant) -> Result<(), Fault> {
        if matches!(frame.body, Body::Reset { .. }) {
            return Err(Fault::Reset);
        }
        let confirmed = self.records.confirmed();
        self.records.handle(Piece { ack: frame.ack, ack_bits: frame.ack_bits, body: frame.body }, now)?;
        if self.records.confirmed() > confirmed {
            self.closes = self.closes.map(|_| now + FLUSH);
        }
        while let Some(record) = self.records.pop() {
            let plaintext = self.channel.open(&record)?;
            self.joiner.push(&plaintext, &mut self.received)?;
        }
        Ok(())
    }

    /// When something was heard of the peer last.
    pub(crate) fn heard(&self) -> Instant {
        self.records.heard()
    }

    /// The next message that the peer sent.
    pub(crate) fn message(&mut self) -> Option<Bytes> {
        self.received.pop_front()
    }

    /// Bytes in memory: of what came in part, and of what is not sent or not confirmed.
    pub(crate) fn held(&self) -> usize {
        self.joiner.held() + self.cutter.held() + self.records.held()
    }

    /// Takes a message to send.
    pub(crate) fn queue(&mut self, message: Bytes) -> Result<(), QueueError> {
        if self.closes.is_some() { Err(QueueError::NotOpen) } else { self.cutter.push(message) }
    }

    /// The next frame to send. Records are encrypted here, so no more of them wait than the window holds.
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Option<Bytes>, Fault> {
        while self.records.has_room() {
            let Some(plaintext) = self.cutter.record() else { break };
            self.records.push(self.channel.seal(&plaintext)?, now)?;
        }
        if let Some(Piece { ack, ack_bits, body }) = self.records.poll(now) {
            return Ok(Some(Frame { stream_id: self.id.clone(), ack, ack_bits, body }.encode()));
        }
        let is_flushed = self.cutter.is_empty() && self.records.is_delivered();
        if self.closes.is_some_and(|until| is_flushed || now >= until) { Err(Fault::Done) } else { Ok(None) }
    }

    /// When [`Stream::timeout`] or [`Stream::poll`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        [self.records.deadline(), self.closes].into_iter().flatten().min()
    }

    pub(crate) fn timeout(&mut self, now: Instant) -> Result<(), Fault> {
        self.records.timeout(now)
    }

    /// Takes no more messages; [`Stream::poll`] ends the stream when all are delivered, or after 5 s in which the peer confirmed none.
    /// That has an end: what is queued is bounded, and so is the number of its records.
    pub(crate) fn close(&mut self, now: Instant) {
        self.closes.get_or_insert(now + FLUSH);
    }

    pub(crate) fn disconnected(&mut self) -> Result<(), Fault> {
        self.records.disconnected()
    }

    pub(crate) fn connected(&mut self, now: Instant) {
        self.records.connected(now);
    }
}

/// The frame that ends a stream.
pub(crate) fn reset(stream_id: &str) -> Bytes {
    frame(stream_id, 0, Body::Reset { reason: REASON.to_owned() })
}

/// A frame outside an open stream.
pub(crate) fn frame(stream_id: &str, ack: u32, body: Body) -> Bytes {
    Frame { stream_id: stream_id.to_owned(), ack, ack_bits: 0, body }.encode()
}

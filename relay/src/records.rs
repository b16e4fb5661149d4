//! Reliable delivery of records between the two ends of a stream, under the encryption and above a connection that may be replaced.
//!
//! # The rule
//! Every frame has `ack` and `ack_bits` in its head. Ends that know no repetition leave both at 0 and ignore them.
//! * An end of ours says that it repeats by `ack = 1` in its `handshake` frame. No other end has a reason to send that: nothing was
//!   received yet, which is 0 wherever an acknowledgement names the last record. If both handshake frames say so, the stream is
//!   *reliable*; if not, neither end sends an acknowledgement nor looks at one.
//! * On a reliable stream `ack` is 1 + the number of records that came in order, so that 0 still says nothing, and bit *i* of
//!   `ack_bits` says that record *(number that came in order) + 1 + i* is here already.
//! * A sender keeps at most 32 records until the first count covers them. After 500 ms without progress (doubling to 8 s) it repeats,
//!   byte for byte, those that the receiver lacks while it has later ones, or else the first. Bits only save repetition; a record is
//!   forgotten by the count alone.
//! * A receiver answers after at most 20 ms, at once after 8 records or when something is out of order, and with whatever it sends.
//! * An end that has sent nothing for 15 s sends a heartbeat. One that hears nothing for 90 s, or whose records are confirmed by nobody
//!   for 60 s, gives the stream up.
//! * On a new physical connection an end sends `resume` with the number that it waits for, and both send again what is not confirmed.
//!
//! None of this is authenticated: who carries the frames can make a stream stall or end, which it can anyway by dropping them. What is
//! delivered is decrypted in the order of its numbers, so it is what was sent, in order and once, or the stream ends.
//!
//! Without it, a lost connection ends the stream; the session above it is resumed over another.

use crate::fault::Fault;
use crate::frame::Body;
use crate::inbox::{Inbox, Taken};
use crate::outbox::Outbox;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// The `ack` of a handshake frame whose sender repeats.
pub(crate) const REPEATS: u32 = 1;
/// For so long an acknowledgement waits for something to travel with.
const ACK_AFTER: Duration = Duration::from_millis(20);
/// So many records are acknowledged at once: a quarter of the window.
const ACK_MOST: u32 = 8;
/// An end that sent nothing for so long says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Longer than the 60 s in which the physical connection must answer.
const SILENCE: Duration = Duration::from_secs(90);

/// A frame's head and body, without the name of its stream.
pub(crate) struct Piece {
    pub(crate) ack: u32,
    pub(crate) ack_bits: u32,
    pub(crate) body: Body,
}

/// One end of a stream's records.
pub(crate) struct Records {
    is_reliable: bool,
    is_connected: bool,
    inbox: Inbox,
    outbox: Outbox,
    /// When something was last heard, and last said.
    heard: Instant,
    said: Instant,
    /// When an acknowledgement is due, and for how many records.
    owed: Option<Instant>,
    records_owed: u32,
    resumes: bool,
}

impl Records {
    pub(crate) fn new(is_reliable: bool, now: Instant) -> Self {
        Self {
            is_reliable,
            is_connected: true,
            inbox: Inbox::new(is_reliable),
            outbox: Outbox::new(is_reliable),
            heard: now,
            said: now,
            owed: None,
            records_owed: 0,
            resumes: false,
        }
    }

    pub(crate) fn is_reliable(&self) -> bool {
        self.is_reliable
    }

    /// Takes what the peer sent. A fault ends the stream.
    pub(crate) fn handle(&mut self, piece: Piece, now: Instant) -> Result<(), Fault> {
        self.heard = now;
        if let (true, Some(count)) = (self.is_reliable, piece.ack.checked_sub(1)) {
            self.outbox.acknowledge(count, piece.ack_bits, now)?;
        }
        match piece.body {
            Body::Record { seq, payload } => {
                let taken = self.inbox.insert(seq, payload)?;
                self.records_owed += 1;
                let is_late = taken == Taken::Due && self.records_owed < ACK_MOST;
                self.owe(if is_late { now + ACK_AFTER } else { now });
            }
            Body::Resume { .. } if self.is_reliable => {
                self.outbox.send_again(now);
                self.owe(now);
            }
            Body::Ack | Body::Heartbeat | Body::Resume { .. } => {}
            Body::Reset { .. } | Body::Handshake { .. } => return Err(Fault::Unexpected),
        }
        Ok(())
    }

    /// The next record in order that the peer sent.
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        self.inbox.pop()
    }

    /// Whether another record may be encrypted.
    pub(crate) fn has_room(&self) -> bool {
        self.is_connected && self.outbox.has_room()
    }

    /// Whether all was sent, and confirmed if the peer confirms.
    pub(crate) fn is_delivered(&self) -> bool {
        self.outbox.is_empty()
    }

    /// How many records the peer confirmed.
    pub(crate) fn confirmed(&self) -> u32 {
        self.outbox.confirmed()
    }

    /// When something was heard of the peer last.
    pub(crate) fn heard(&self) -> Instant {
        self.heard
    }

    /// Bytes of records that wait in either direction.
    pub(crate) fn held(&self) -> usize {
        self.inbox.held() + self.outbox.held()
    }

    /// Takes the next record to send.
    pub(crate) fn push(&mut self, record: Bytes, now: Instant) -> Result<(), Fault> {
        self.outbox.push(record, now)
    }

    /// What is to be sent now.
    pub(crate) fn poll(&mut self, now: Instant) -> Option<Piece> {
        if !self.is_connected {
            return None;
        }
        let body = if std::mem::take(&mut self.resumes) {
            Body::Resume { next_seq: self.inbox.due() }
        } else if let Some((seq, payload)) = self.outbox.poll(now) {
            Body::Record { seq, payload }
        } else if self.owed.is_some_and(|at| now >= at) {
            Body::Ack
        } else if self.is_reliable && now >= self.said + HEARTBEAT {
            Body::Heartbeat
        } else {
            return None;
        };
        self.said = now;
        self.owed = None;
        self.records_owed = 0;
        let (ack, ack_bits) = if self.is_reliable { (self.inbox.due().saturating_add(1), self.inbox.bits()) } else { (0, 0) };
        Some(Piece { ack, ack_bits, body })
    }

    /// When [`Records::timeout`] or [`Records::poll`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if !self.is_reliable {
            return None;
        }
        let silence = Some(self.heard + SILENCE);
        if !self.is_connected {
            return silence;
        }
        [silence, self.outbox.deadline(), self.owed, Some(self.said + HEARTBEAT)].into_iter().flatten().min()
    }

    /// Time has passed. A fault ends the stream.
    pub(crate) fn timeout(&mut self, now: Instant) -> Result<(), Fault> {
        if !self.is_reliable {
            return Ok(());
        }
        if now >= self.heard + SILENCE {
            return Err(Fault::Silent);
        }
        if self.is_connected { self.outbox.timeout(now) } else { Ok(()) }
    }

    /// The physical connection ended. Without repetition, so does the stream.
    pub(crate) fn disconnected(&mut self) -> Result<(), Fault> {
        self.is_connected = false;
        if self.is_reliable { Ok(()) } else { Err(Fault::Lost) }
    }

    /// There is another physical connection.
    pub(crate) fn connected(&mut self, now: Instant) {
        self.is_connected = true;
        self.resumes = true;
        self.outbox.send_again(now);
    }

    fn owe(&mut self, at: Instant) {
        if self.is_reliable {
            self.owed = Some(self.owed.map_or(at, |owed| owed.min(at)));
        }
    }
}

#[cfg(test)]
mod tests;

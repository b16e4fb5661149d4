//! Records as they are sent: encrypted once, kept until the peer has them, repeated byte for byte.

use crate::fault::Fault;
use crate::inbox::LAST_SEQ;
use bytes::Bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many records may be unconfirmed: what the bits of an acknowledgement can name.
pub(crate) const WINDOW: usize = 32;
// They are never more than 2 MiB, so their bytes need no bound of their own.
const _: () = assert!(WINDOW * crate::noise::MAX_NOISE <= 2 << 20);
/// After this time without progress records are repeated; it doubles each time, up to [`RESEND_MOST`].
const RESEND_AFTER: Duration = Duration::from_millis(500);
const RESEND_MOST: Duration = Duration::from_secs(8);
/// After this time without progress the stream is over.
const STALL: Duration = Duration::from_secs(60);
/// For so long the peer may confirm less than before: late frames do, a peer whose confirmation was forged always will.
const ACK_BACK: Duration = Duration::from_secs(30);

struct Sent {
    record: Bytes,
    /// By the bits of the latest acknowledgement. Only a hint: the record is kept until all before it are there too.
    is_received: bool,
    /// It is to be sent at the next poll.
    is_due: bool,
}

pub(crate) struct Outbox {
    is_reliable: bool,
    /// Number of the first record that is kept: how many the peer confirmed.
    first: u32,
    kept: VecDeque<Sent>,
    /// Bytes of those.
    bytes: usize,
    /// How many of those kept were sent at least once.
    sent: usize,
    resend: Option<Instant>,
    tries: u32,
    /// When the peer last confirmed more, or the first of the kept was taken.
    moved: Option<Instant>,
    /// When the peer last confirmed as much as is known.
    confirmed_at: Option<Instant>,
}

impl Outbox {
    pub(crate) fn new(is_reliable: bool) -> Self {
        Self {
            is_reliable,
            first: 0,
            kept: VecDeque::new(),
            bytes: 0,
            sent: 0,
            resend: None,
            tries: 0,
            moved: None,
            confirmed_at: None,
        }
    }

    /// Whether another record may be encrypted. Without repetition one at a time, so that none waits here.
    pub(crate) fn has_room(&self) -> bool {
        self.kept.len() < if self.is_reliable { WINDOW } else { 1 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// How many records the peer confirmed, or, if it confirms none, were sent.
    pub(crate) fn confirmed(&self) -> u32 {
        self.first
    }

    /// Bytes of the records that are kept.
    pub(crate) fn held(&self) -> usize {
        self.bytes
    }

    /// Takes the next record.
    pub(crate) fn push(&mut self, record: Bytes, now: Instant) -> Result<(), Fault> {
        if self.number(self.kept.len()).is_none_or(|seq| seq > LAST_SEQ) {
            return Err(Fault::Exhausted);
        }
        if self.kept.is_empty() {
            self.moved = Some(now);
        }
        self.bytes += record.len();
        self.kept.push_back(Sent { record, is_received: false, is_due: true });
        Ok(())
    }

    /// The next record to send, with its number.
    pub(crate) fn poll(&mut self, now: Instant) -> Option<(u32, Bytes)> {
        let at = self.kept.iter().position(|sent| sent.is_due)?;
        let seq = self.number(at)?;
        let sent = self.kept.get_mut(at)?;
        sent.is_due = false;
        let record = sent.record.clone();
        self.sent = self.sent.max(at + 1);
        if self.is_reliable {
            let wait = self.wait();
            self.resend.get_or_insert(now + wait);
        } else {
            self.drop_first(1);
        }
        Some((seq, record))
    }

    /// The peer has all records before `count`, and those behind it that `bits` names.
    pub(crate) fn acknowledge(&mut self, count: u32, bits: u32, now: Instant) -> Result<(), Fault> {
        let Some(more) = count.checked_sub(self.first) else {
            let since = self.confirmed_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
            return if since > ACK_BACK { Err(Fault::AckBack) } else { Ok(()) };
        };
        let more = usize::try_from(more).map_err(|_| Fault::AckBeyond)?;
        let last_bit = usize::try_from(u32::BITS - bits.leading_zeros()).map_err(|_| Fault::AckBeyond)?;
        let reach = if bits == 0 { more } else { more + 1 + last_bit };
        if reach > self.sent {
            return Err(Fault::AckBeyond);
        }
        self.confirmed_at = Some(now);
        if more > 0 {
            self.drop_first(more);
            self.moved = Some(now);
            self.tries = 0;
            let is_waiting = self.kept.iter().any(|sent| !sent.is_due);
            self.resend = is_waiting.then(|| now + RESEND_AFTER);
        }
        for (at, sent) in self.kept.iter_mut().enumerate() {
            sent.is_received = at.checked_sub(1).is_some_and(|bit| bit < 32 && bits & (1 << bit) != 0);
        }
        Ok(())
    }

    /// A new physical connection: what was on the way is lost.
    pub(crate) fn send_again(&mut self, now: Instant) {
        for sent in self.kept.iter_mut().take(self.sent).filter(|sent| !sent.is_received) {
            sent.is_due = true;
        }
        self.tries = 0;
        self.resend = None;
        self.moved = Some(now);
        self.confirmed_at = Some(now);
    }

    /// When [`Outbox::timeout`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let stall = self.moved.filter(|_| !self.kept.is_empty()).map(|at| at + STALL);
        [self.resend, stall].into_iter().flatten().min()
    }

    /// Lets records be repeated whose time came: those that the peer lacks while it has later ones, or else the first.
    pub(crate) fn timeout(&mut self, now: Instant) -> Result<(), Fault> {
        if !self.kept.is_empty() && self.moved.is_some_and(|at| now >= at + STALL) {
            return Err(Fault::Stalled);
        }
        if self.resend.is_none_or(|at| now < at) {
            return Ok(());
        }
        let last = self.kept.iter().rposition(|sent| sent.is_received).unwrap_or(1);
        for sent in self.kept.iter_mut().take(last.min(self.sent)).filter(|sent| !sent.is_received) {
            sent.is_due = true;
        }
        self.tries += 1;
        // Begins again when the next is sent.
        self.resend = None;
        Ok(())
    }

    fn wait(&self) -> Duration {
        RESEND_AFTER.saturating_mul(1 << self.tries.min(4)).min(RESEND_MOST)
    }

    fn number(&self, at: usize) -> Option<u32> {
        self.first.checked_add(u32::try_from(at).ok()?)
    }

    fn drop_first(&mut self, count: usize) {
        for sent in self.kept.drain(..count.min(self.kept.len())) {
            self.first += 1;
            self.bytes -= sent.record.len();
        }
        self.sent = self.sent.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn start() -> Instant {
        Instant::now()
    }

    fn filled(count: u8, now: Instant) -> Outbox {
        let mut outbox = Outbox::new(true);
        for byte in 0..count {
            outbox.push(vec![byte; 16].into(), now).unwrap();
        }
        outbox
    }

    fn drain(outbox: &mut Outbox, now: Instant) -> Vec<u32> {
        std::iter::from_fn(|| outbox.poll(now))
            .inspect(|(seq, record)| assert_eq!(u32::from(record[0]), *seq))
            .map(|(seq, _)| seq)
            .collect()
    }

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn records_are_sent_once_and_repeated_when_their_time_came() {
        let now = start();
        let mut outbox = filled(3, now);
        assert_eq!(drain(&mut outbox, now), [0, 1, 2]);
        assert_eq!(outbox.deadline(), Some(now + millis(500)));
        outbox.timeout(now + millis(499)).unwrap();
        assert!(drain(&mut outbox, now).is_empty());
        // Nothing is known of any of them: only the first is repeated, and then after twice the time.
        outbox.timeout(now + millis(500)).unwrap();
        assert_eq!(drain(&mut outbox, now + millis(500)), [0]);
        assert_eq!(outbox.deadline(), Some(now + millis(1500)));
        // The peer has 0 and 2.
        outbox.acknowledge(1, 0b1, now + millis(600)).unwrap();
        outbox.timeout(now + millis(1100)).unwrap();
        assert_eq!(drain(&mut outbox, now + millis(1100)), [1]);
        outbox.acknowledge(3, 0, now + millis(1200)).unwrap();
        assert!(outbox.is_empty());
        assert_eq!(outbox.deadline(), None);
    }

    #[test]
    fn a_new_connection_repeats_what_is_not_received() {
        let now = start();
        let mut outbox = filled(4, now);
        drain(&mut outbox, now);
        outbox.acknowledge(1, 0b1, now).unwrap();
        outbox.send_again(now);
        assert_eq!(drain(&mut outbox, now), [1, 3]);
    }

    #[test]
    fn bits_are_a_hint_and_a_count_is_not() {
        let now = start();
        let mut outbox = filled(3, now);
        drain(&mut outbox, now);
        outbox.acknowledge(0, 0b11, now).unwrap();
        assert_eq!(outbox.kept.len(), 3);
        outbox.acknowledge(0, 0, now).unwrap();
        outbox.send_again(now);
        assert_eq!(drain(&mut outbox, now), [0, 1, 2]);
        outbox.acknowledge(2, 0, now).unwrap();
        outbox.acknowledge(1, 0, now + ACK_BACK).unwrap();
        assert_eq!(outbox.kept.len(), 1);
        assert_eq!(outbox.acknowledge(1, 0, now + ACK_BACK + millis(1)), Err(Fault::AckBack));
    }

    #[test]
    fn what_was_never_sent_cannot_be_confirmed() {
        let now = start();
        let mut outbox = filled(3, now);
        assert_eq!(outbox.acknowledge(1, 0, now), Err(Fault::AckBeyond));
        outbox.poll(now).unwrap();
        outbox.poll(now).unwrap();
        assert_eq!(outbox.acknowledge(3, 0, now), Err(Fault::AckBeyond));
        assert_eq!(outbox.acknowledge(0, 0b10, now), Err(Fault::AckBeyond));
        assert_eq!(outbox.acknowledge(2, 0b1, now), Err(Fault::AckBeyond));
        assert_eq!(outbox.acknowledge(u32::MAX, u32::MAX, now), Err(Fault::AckBeyond));
        outbox.acknowledge(0, 0b1, now).unwrap();
        outbox.acknowledge(2, 0, now).unwrap();
    }

    #[test]
    fn the_window_is_bounded() {
        let now = start();
        assert!(filled(31, now).has_room());
        assert!(!filled(32, now).has_room());
    }

    #[test]
    fn a_peer_that_confirms_nothing_is_given_up() {
        let now = start();
        let mut outbox = filled(1, now);
        let mut at = now;
        let mut sent = Vec::new();
        let fault = loop {
            sent.extend(drain(&mut outbox, at).into_iter().map(|_| at.duration_since(now).as_millis()));
            at = outbox.deadline().unwrap();
            if let Err(fault) = outbox.timeout(at) {
                break fault;
            }
        };
        assert_eq!((fault, at), (Fault::Stalled, now + STALL));
        assert_eq!(sent, [0, 500, 1500, 3500, 7500, 15_500, 23_500, 31_500, 39_500, 47_500, 55_500]);
    }

    #[test]
    fn without_repetition_a_record_is_gone_when_it_is_sent() {
        let now = start();
        let mut outbox = Outbox::new(false);
        outbox.push(vec![0; 16].into(), now).unwrap();
        assert!(!outbox.has_room());
        assert_eq!(drain(&mut outbox, now), [0]);
        assert!(outbox.is_empty() && outbox.has_room() && outbox.deadline().is_none());
        outbox.push(vec![1; 16].into(), now).unwrap();
        assert_eq!(drain(&mut outbox, now), [1]);
    }

    #[test]
    fn numbers_never_begin_again() {
        let now = start();
        let mut outbox = Outbox::new(true);
        outbox.first = LAST_SEQ;
        outbox.push(vec![0; 16].into(), now).unwrap();
        assert_eq!(outbox.push(vec![0; 16].into(), now), Err(Fault::Exhausted));
        assert_eq!(outbox.poll(now).unwrap().0, LAST_SEQ);
        outbox.acknowledge(LAST_SEQ + 1, 0, now).unwrap();
        assert_eq!(outbox.push(vec![0; 16].into(), now), Err(Fault::Exhausted));
    }

    proptest! {
        #[test]
        fn no_acknowledgement_panics(acks in proptest::collection::vec((any::<u32>(), any::<u32>(), 0..5u32), 0..50)) {
            let now = start();
            let mut outbox = filled(20, now);
            for (count, bits, small) in acks {
                let _ = outbox.acknowledge(count, bits, now);
                let _ = outbox.acknowledge(small, bits & 0xf, now);
                let _ = outbox.poll(now);
                let _ = outbox.timeout(now + millis(u64::from(small) * 400));
            }
        }
    }
}

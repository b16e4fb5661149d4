//! Records as they arrive: what is out of order waits, what came before is dropped, and each comes out once.

use crate::fault::Fault;
use crate::noise::check_record;
use bytes::Bytes;
use std::collections::BTreeMap;

/// How far a record may be ahead of the one that is due.
pub(crate) const MAX_AHEAD: u32 = 64;
/// How many bytes of such records are kept: about 17 of the longest.
pub(crate) const MAX_WAITING: usize = 1 << 20;
/// The last number of a record. Two less than the counter holds, so that the acknowledgement of all of them still fits.
pub(crate) const LAST_SEQ: u32 = u32::MAX - 2;

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is due.
    Due,
    /// It waits for an earlier one.
    Early,
    /// It came before: the first copy counts.
    Duplicate,
    /// There was no room for it; its sender will repeat it.
    Dropped,
}

pub(crate) struct Inbox {
    is_reliable: bool,
    due: u32,
    waiting: BTreeMap<u32, Bytes>,
    bytes: usize,
}

impl Inbox {
    pub(crate) fn new(is_reliable: bool) -> Self {
        Self { is_reliable, due: 0, waiting: BTreeMap::new(), bytes: 0 }
    }

    /// Takes a record. What the peer may not send is fatal; from a peer that repeats nothing, so is a record without room.
    pub(crate) fn insert(&mut self, seq: u32, record: Bytes) -> Result<Taken, Fault> {
        check_record(&record)?;
        if seq < self.due || self.waiting.contains_key(&seq) {
            return Ok(Taken::Duplicate);
        }
        if seq - self.due > MAX_AHEAD {
            return Err(Fault::Ahead { seq, due: self.due });
        }
        if seq > LAST_SEQ {
            return Err(Fault::Exhausted);
        }
        // The one that is due never waits, so it needs no room.
        if seq > self.due && self.bytes + record.len() > MAX_WAITING {
            return if self.is_reliable { Ok(Taken::Dropped) } else { Err(Fault::Waiting) };
        }
        self.bytes += record.len();
        if seq == self.due {
            self.waiting.insert(seq, record);
            return Ok(Taken::Due);
        }
        // A copy: the record would keep the whole frame, and what else its sender put there, in memory.
        self.waiting.insert(seq, Bytes::copy_from_slice(&record));
        Ok(Taken::Early)
    }

    /// The next record in order, if it is there.
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        let record = self.waiting.remove(&self.due)?;
        self.bytes -= record.len();
        self.due += 1;
        Some(record)
    }

    /// The number of the next record: how many came out.
    pub(crate) fn due(&self) -> u32 {
        self.due
    }

    /// Bytes of records that are here and not out.
    pub(crate) fn held(&self) -> usize {
        self.bytes
    }

    /// Which of the 32 records behind the one that is due are here.
    pub(crate) fn bits(&self) -> u32 {
        let ahead = self.waiting.keys().filter_map(|seq| seq.checked_sub(self.due)?.checked_sub(1));
        ahead.filter_map(|bit| 1_u32.checked_shl(bit)).fold(0, |bits, bit| bits | bit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::NoiseError;
    use proptest::prelude::*;

    fn record(byte: u8) -> Bytes {
        vec![byte; 16].into()
    }

    fn drain(inbox: &mut Inbox) -> Vec<u8> {
        std::iter::from_fn(|| inbox.pop()).map(|record| record[0]).collect()
    }

    #[test]
    fn records_come_out_in_order_and_once() {
        let mut inbox = Inbox::new(true);
        for (seq, taken) in [(2, Taken::Early), (1, Taken::Early), (33, Taken::Early), (2, Taken::Duplicate)] {
            assert_eq!(inbox.insert(seq, record(u8::try_from(seq).unwrap())), Ok(taken));
        }
        assert!(drain(&mut inbox).is_empty());
        assert_eq!(inbox.bits(), 0b11, "33 is beyond the bits");
        assert_eq!(inbox.insert(0, record(0)), Ok(Taken::Due));
        assert_eq!(drain(&mut inbox), [0, 1, 2]);
        assert_eq!((inbox.due(), inbox.bits()), (3, 1 << 29));
        assert_eq!(inbox.insert(1, record(9)), Ok(Taken::Duplicate));
        assert!(drain(&mut inbox).is_empty());
    }

    #[test]
    fn the_first_copy_counts() {
        let mut inbox = Inbox::new(false);
        inbox.insert(1, record(1)).unwrap();
        assert_eq!(inbox.insert(1, record(9)), Ok(Taken::Duplicate));
        inbox.insert(0, record(0)).unwrap();
        assert_eq!(drain(&mut inbox), [0, 1]);
    }

    #[test]
    fn what_waits_is_bounded_in_distance_and_in_bytes() {
        let long = Bytes::from(vec![0; 65_535]);
        for is_reliable in [true, false] {
            let mut inbox = Inbox::new(is_reliable);
            assert_eq!(inbox.insert(MAX_AHEAD, vec![0; 17].into()), Ok(Taken::Early));
            assert_eq!(inbox.insert(MAX_AHEAD + 1, record(0)), Err(Fault::Ahead { seq: 65, due: 0 }));
            for seq in 1..=15 {
                assert_eq!(inbox.insert(seq, long.clone()), Ok(Taken::Early));
            }
            let full = if is_reliable { Ok(Taken::Dropped) } else { Err(Fault::Waiting) };
            assert_eq!(inbox.insert(16, long.clone()), full);
            assert_eq!(inbox.insert(0, long.clone()), Ok(Taken::Due), "the one that is due needs no room");
        }
        for length in [15, 65_536] {
            assert_eq!(Inbox::new(true).insert(0, vec![0; length].into()), Err(NoiseError::Length(length).into()));
        }
    }

    #[test]
    fn numbers_never_begin_again() {
        let mut inbox = Inbox::new(true);
        inbox.due = LAST_SEQ;
        assert_eq!(inbox.insert(LAST_SEQ + 1, record(0)), Err(Fault::Exhausted));
        assert_eq!(inbox.insert(LAST_SEQ, record(0)), Ok(Taken::Due));
        assert_eq!(drain(&mut inbox), [0]);
        assert_eq!(inbox.insert(LAST_SEQ + 1, record(0)), Err(Fault::Exhausted));
        assert_eq!(inbox.insert(0, record(0)), Ok(Taken::Duplicate));
    }

    proptest! {
        #[test]
        fn any_order_comes_out_in_order(seqs in proptest::collection::vec(0..100_u32, 0..300)) {
            let (mut inbox, mut out) = (Inbox::new(true), Vec::new());
            for seq in seqs {
                let _ = inbox.insert(seq, record(u8::try_from(seq).unwrap()));
                out.extend(drain(&mut inbox));
            }
            prop_assert!(out.iter().copied().eq(0..u8::try_from(out.len()).unwrap()));
        }
    }
}

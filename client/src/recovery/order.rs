//! Puts what comes out of order back into it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Bound of what waits for an earlier one: more means that the earlier one will not come.
pub(crate) const MOST_EVENTS: usize = 256;
/// The same in bytes.
pub(crate) const MOST_BYTES: usize = 1 << 20;

/// Events by number: what is contiguous comes out, once.
#[derive(Debug)]
pub(crate) struct Order<E> {
    last: u64,
    waiting: BTreeMap<u64, (usize, E)>,
    bytes: usize,
}

/// An event was not taken: too much waits for an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overflow;

impl<E> Order<E> {
    /// Everything up to `last` came out before.
    pub(crate) fn new(last: u64) -> Self {
        Self { last, waiting: BTreeMap::new(), bytes: 0 }
    }

    /// The number of the last that came out.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Takes an event. One that came before is a duplicate and changes nothing. The one that is due is exempt from both bounds.
    pub(crate) fn insert(&mut self, seq: u64, size: usize, event: E) -> Result<(), Overflow> {
        if seq == self.last.saturating_add(1) {
            self.put(seq, size, event);
            return Ok(());
        }
        self.keep(seq, size, event)
    }

    /// Takes an event while nothing comes out: none is exempt.
    pub(crate) fn keep(&mut self, seq: u64, size: usize, event: E) -> Result<(), Overflow> {
        let is_new = seq > self.last && !self.waiting.contains_key(&seq);
        if is_new && (self.waiting.len() >= MOST_EVENTS || self.bytes.saturating_add(size) > MOST_BYTES) {
            return Err(Overflow);
        }
        self.put(seq, size, event);
        Ok(())
    }

    /// Takes an event that is known to be needed, whatever waits.
    pub(crate) fn put(&mut self, seq: u64, size: usize, event: E) {
        if seq > self.last && !self.waiting.contains_key(&seq) {
            self.bytes += size;
            self.waiting.insert(seq, (size, event));
        }
    }

    /// The next in order, if it is there.
    pub(crate) fn pop(&mut self) -> Option<E> {
        let due = self.last.checked_add(1)?;
        let (size, event) = self.waiting.remove(&due)?;
        self.last = due;
        self.bytes -= size;
        Some(event)
    }

    /// Nothing up to `seq` will come.
    pub(crate) fn skip_to(&mut self, seq: u64) {
        self.last = self.last.max(seq);
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() <= seq) {
            self.bytes -= entry.remove().0;
        }
    }

    /// The first number that waits.
    pub(crate) fn first(&self) -> Option<u64> {
        self.waiting.keys().next().copied()
    }

    /// What waits, in order.
    pub(crate) fn waiting(&self, range: RangeInclusive<u64>) -> impl Iterator<Item = (u64, &E)> {
        let range = if range.is_empty() { u64::MAX..=u64::MAX } else { range };
        self.waiting.range(range).map(|(seq, (_size, event))| (*seq, event))
    }

    /// The same, to be changed.
    pub(crate) fn waiting_mut(&mut self) -> impl Iterator<Item = &mut E> {
        self.waiting.values_mut().map(|(_size, event)| event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain<E>(order: &mut Order<E>) -> Vec<E> {
        std::iter::from_fn(|| order.pop()).collect()
    }

    #[test]
    fn what_comes_out_of_order_comes_out_in_order() {
        let mut order = Order::new(3);
        for seq in [6, 5, 3, 5] {
            order.insert(seq, 1, seq).unwrap();
        }
        assert!(drain(&mut order).is_empty());
        order.insert(4, 1, 4).unwrap();
        assert_eq!(drain(&mut order), [4, 5, 6]);
    }

    #[test]
    fn too_many_or_too_large_are_refused_but_the_one_that_is_due_is_not() {
        let mut order = Order::new(0);
        for seq in 2..258 {
            order.insert(seq, 1, seq).unwrap();
        }
        assert_eq!(order.insert(258, 1, 258), Err(Overflow));
        assert_eq!(order.insert(257, MOST_BYTES, 257), Ok(()), "a duplicate takes no room");
        order.insert(1, 2 * MOST_BYTES, 1).unwrap();
        assert_eq!(drain(&mut order).len(), 257);
        let mut order = Order::new(0);
        order.insert(2, MOST_BYTES, 2).unwrap();
        assert_eq!(order.insert(3, 1, 3), Err(Overflow));
        order.insert(1, MOST_BYTES, 1).unwrap();
        assert_eq!(drain(&mut order), [1, 2]);
        assert_eq!(order.insert(4, MOST_BYTES + 1, 4), Err(Overflow), "one that is too large by itself");
    }

    #[test]
    fn what_is_skipped_does_not_wait() {
        let mut order = Order::new(0);
        for seq in [3, 5] {
            order.insert(seq, 10, seq).unwrap();
        }
        order.skip_to(4);
        assert_eq!((order.last(), order.bytes, drain(&mut order)), (4, 10, vec![5]));
        order.skip_to(2);
        assert_eq!(order.last(), 5);
    }

    proptest! {
        #[test]
        fn whatever_the_order_and_the_repeats_each_comes_out_once(
            mut seqs in prop::collection::vec(1_u64..40, 0..120),
            start in 0_u64..5,
        ) {
            let mut order = Order::new(start);
            let mut out = Vec::new();
            seqs.extend(start + 1..40);
            for seq in seqs {
                order.insert(seq, 1, seq).unwrap();
                out.extend(drain(&mut order));
            }
            prop_assert_eq!(out, (start + 1..40).collect::<Vec<_>>());
            prop_assert_eq!(order.bytes, 0);
        }
    }
}

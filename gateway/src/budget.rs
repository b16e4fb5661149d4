//! Bytes that may be held at a time, by one connection and by all of them. A queue that counts messages alone bounds nothing: one
//! message may be as small as a cursor or as large as a file.

use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The unit of account: a semaphore counts to 2^29 on machines of 32 bits, and bytes would be more.
const UNIT: usize = 1024;

/// What each budget may hold beside the whole that it is a part of.
const RESERVE: usize = 1 << 20;

/// So many bytes. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    own: Pool,
    /// A little of it counts against nothing else, so that what others hold of the whole stops nobody's small messages, above all
    /// those that end something.
    reserve: Pool,
    /// What this budget is a part of, from when that is known on.
    whole: Arc<OnceLock<Pool>>,
}

#[derive(Debug, Clone)]
struct Pool {
    units: Arc<Semaphore>,
    all: u32,
}

/// Bytes taken out of a budget; they return when it is dropped.
#[derive(Debug)]
pub struct Charge {
    /// Boxed: each queue of messages has room for 32 of them from the start, also while it is idle.
    _taken: Box<Taken>,
}

#[derive(Debug)]
struct Taken {
    _own: OwnedSemaphorePermit,
    _reserve: Option<OwnedSemaphorePermit>,
    _whole: Option<OwnedSemaphorePermit>,
}

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { own: Pool::new(bytes), reserve: Pool::new(RESERVE.min(bytes)), whole: Arc::default() }
    }

    /// Makes this budget and its clones a part of another one: what is charged to it is charged to both from now on.
    pub(crate) fn join(&self, whole: &Self) {
        // Who belongs somewhere already stays there.
        let _joined_before = self.whole.set(whole.own.clone());
    }

    /// The same at once or not at all, of a budget that is no part of another one.
    pub(crate) fn try_charge(&self, bytes: usize) -> Option<Charge> {
        Some(Charge { _taken: Box::new(Taken { _own: self.own.try_take(bytes)?, _reserve: None, _whole: None }) })
    }

    /// Waits until so many bytes are free, in order of arrival. What is larger than the whole takes the whole: it goes alone.
    pub(crate) async fn charge(&self, bytes: usize) -> Charge {
        // Its own first: who has used that up must not stand in the line of all others.
        let own = self.own.take(bytes).await;
        let reserve = self.reserve.try_take(bytes);
        let whole = match self.whole.get() {
            Some(whole) if reserve.is_none() => Some(whole.take(bytes).await),
            Some(_) | None => None,
        };
        Charge { _taken: Box::new(Taken { _own: own, _reserve: reserve, _whole: whole }) }
    }
}

impl Pool {
    fn new(bytes: usize) -> Self {
        let all = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX >> 3);
        Self { units: Arc::new(Semaphore::new(usize::try_from(all).unwrap_or(Semaphore::MAX_PERMITS))), all }
    }

    fn try_take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).ok()?;
        Arc::clone(&self.units).try_acquire_many_owned(units).ok()
    }

    async fn take(&self, bytes: usize) -> OwnedSemaphorePermit {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(self.all).min(self.all);
        let taken = Arc::clone(&self.units).acquire_many_owned(units).await;
        taken.expect("Invariant: a budget is never closed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn what_is_too_large_goes_alone_and_in_its_turn() {
        let budget = Budget::new(10 * UNIT);
        let small = budget.charge(1).now_or_never().unwrap();
        let mut large = Box::pin(budget.charge(1 << 40));
        assert!(large.as_mut().now_or_never().is_none());
        assert!(budget.charge(1).now_or_never().is_none(), "nobody overtakes what waits");
        drop(small);
        let all = large.now_or_never().unwrap();
        assert!(budget.charge(1).now_or_never().is_none());
        drop(all);
        let most = budget.try_charge(10 * UNIT);
        assert!(most.is_some() && budget.try_charge(1).is_none());
        drop(most);
        assert!(budget.charge(10 * UNIT).now_or_never().is_some());
        assert!(budget.try_charge(11 * UNIT).is_none() && Budget::new(0).try_charge(1).is_none());
    }

    #[test]
    fn parts_share_their_whole_and_keep_their_own_bounds() {
        let whole = Budget::new(10 * RESERVE);
        let part = || {
            let part = Budget::new(6 * RESERVE);
            part.join(&whole);
            part
        };
        let (one, another, alone) = (part(), part(), Budget::new(6 * RESERVE));
        let held = one.charge(6 * RESERVE).now_or_never().unwrap();
        assert!(one.charge(1).now_or_never().is_none(), "its own bound");
        let rest = another.charge(4 * RESERVE).now_or_never().unwrap();
        assert!(another.charge(2 * RESERVE).now_or_never().is_none(), "the bound of all");
        let small = another.charge(RESERVE).now_or_never().expect("what is small goes on");
        assert!(another.charge(1).now_or_never().is_none(), "that has a bound too");
        assert!(alone.charge(6 * RESERVE).now_or_never().is_some(), "control: it belongs to nobody");
        drop(held);
        assert!(another.charge(UNIT).now_or_never().is_some());
        drop((rest, small));
    }
}

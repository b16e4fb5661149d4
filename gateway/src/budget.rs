//! Bytes that one connection may hold at a time. A queue that counts messages alone bounds nothing: one message may be as
//! small as a cursor or as large as a file.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The unit of account: a semaphore counts to 2^29 on machines of 32 bits, and bytes would be more.
const UNIT: usize = 1024;

/// So many bytes. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    units: Arc<Semaphore>,
    all: u32,
}

/// Bytes taken out of a budget; they return when it is dropped.
#[derive(Debug)]
pub struct Charge {
    _units: OwnedSemaphorePermit,
}

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        let all = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX >> 3);
        Self { units: Arc::new(Semaphore::new(usize::try_from(all).unwrap_or(Semaphore::MAX_PERMITS))), all }
    }

    /// Waits until so many bytes are free, in order of arrival. What is larger than the whole takes the whole: it goes alone.
    pub(crate) async fn charge(&self, bytes: usize) -> Charge {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(self.all).min(self.all);
        let taken = Arc::clone(&self.units).acquire_many_owned(units).await;
        Charge { _units: taken.expect("Invariant: a budget is never closed") }
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
        assert!(budget.charge(10 * UNIT).now_or_never().is_some());
    }
}

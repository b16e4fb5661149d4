//! Names of a client's choice that are in use. One is free again as soon as the last of what it names is dropped.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

/// Those in use.
#[derive(Debug)]
pub(crate) struct Ids<K> {
    taken: HashMap<K, Weak<()>>,
    most: usize,
}

/// A name in use, until this is dropped.
#[derive(Debug)]
pub(crate) struct InUse {
    _alive: Arc<()>,
}

/// Why a name cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotFree {
    /// It is in use.
    Taken,
    /// As many as there may be are.
    Full,
}

impl<K: Eq + Hash> Ids<K> {
    /// At most so many.
    pub(crate) fn new(most: usize) -> Self {
        Self { taken: HashMap::new(), most }
    }

    /// Takes one.
    pub(crate) fn reserve(&mut self, id: K) -> Result<InUse, NotFree> {
        self.taken.retain(|_, alive| alive.strong_count() > 0);
        if self.taken.contains_key(&id) {
            return Err(NotFree::Taken);
        }
        if self.taken.len() >= self.most {
            return Err(NotFree::Full);
        }
        let alive = Arc::new(());
        self.taken.insert(id, Arc::downgrade(&alive));
        Ok(InUse { _alive: alive })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_once_and_free_again() {
        let mut ids = Ids::new(3);
        let first = ids.reserve("a").unwrap();
        assert_eq!(ids.reserve("a").unwrap_err(), NotFree::Taken);
        let others = ["b", "c"].map(|id| ids.reserve(id).unwrap());
        assert_eq!(ids.reserve("d").unwrap_err(), NotFree::Full);
        drop(first);
        let again = ids.reserve("a").unwrap();
        drop((others, again));
        assert!(ids.reserve("a").is_ok() && ids.taken.len() == 1);
    }
}

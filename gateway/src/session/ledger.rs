//! The write ids of a process: what was accepted once is never written twice.

use sha2::{Digest, Sha256};
use std::collections::{HashSet, VecDeque};

/// Ids remembered for a process; the oldest goes first. Clients of this wire count on it.
const REMEMBERED: usize = 4096;

/// An id by its hash, so that ids of any length cost the same.
type Key = [u8; 32];

/// The ids that were accepted.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    oldest_first: VecDeque<Key>,
    known: HashSet<Key>,
}

impl Ledger {
    /// Whether a write of this id was accepted, as far back as is remembered.
    pub(crate) fn has_seen(&self, id: &str) -> bool {
        self.known.contains(&key(id))
    }

    /// Remembers an id whose bytes were accepted; one that is known keeps its age.
    pub(crate) fn record(&mut self, id: &str) {
        let key = key(id);
        if !self.known.insert(key) {
            return;
        }
        if self.oldest_first.len() == REMEMBERED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.known.remove(&oldest);
        }
        self.oldest_first.push_back(key);
    }
}

fn key(id: &str) -> Key {
    Sha256::digest(id).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_too_many_is_forgotten_and_only_that() {
        let mut ledger = Ledger::default();
        for id in 0..=REMEMBERED {
            assert!(!ledger.has_seen(&id.to_string()));
            ledger.record(&id.to_string());
        }
        assert!(!ledger.has_seen("0"));
        assert!((1..=REMEMBERED).all(|id| ledger.has_seen(&id.to_string())));
    }

    #[test]
    fn a_repeated_id_takes_no_second_place() {
        let mut ledger = Ledger::default();
        for id in 0..REMEMBERED {
            ledger.record(&id.to_string());
            ledger.record("0");
        }
        assert!(ledger.has_seen("0") && ledger.has_seen("1"));
        ledger.record("new");
        assert!(!ledger.has_seen("0"), "being repeated made it no younger");
    }
}

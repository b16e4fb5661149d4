//! The order of a session's mutations: each waits for those before it, a read only for the mutations before it.

use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::watch;

/// The queue of a session's mutations. The attached connection owns it and hands it back when it detaches, so the order
/// holds over a resume.
#[derive(Debug)]
pub(crate) struct Order {
    next: u64,
    /// Mutations that have not ended. The calls in flight of the connections bound it.
    unfinished: Arc<watch::Sender<BTreeSet<u64>>>,
}

impl Default for Order {
    fn default() -> Self {
        Self { next: 0, unfinished: Arc::new(watch::Sender::new(BTreeSet::new())) }
    }
}

impl Order {
    /// Enters a mutation: all that are entered later wait until the turn is dropped.
    pub(crate) fn mutation(&mut self) -> Turn {
        let number = self.next;
        self.next += 1;
        self.unfinished.send_modify(|unfinished| {
            unfinished.insert(number);
        });
        Turn { number, mutation: true, unfinished: Arc::clone(&self.unfinished) }
    }

    /// Enters a read: nobody waits for it.
    pub(crate) fn read(&self) -> Turn {
        Turn { number: self.next, mutation: false, unfinished: Arc::clone(&self.unfinished) }
    }
}

/// A place in the queue. Dropping it, whether it waited or not, leaves the queue.
#[derive(Debug)]
pub(crate) struct Turn {
    number: u64,
    mutation: bool,
    unfinished: Arc<watch::Sender<BTreeSet<u64>>>,
}

impl Turn {
    /// Waits until every mutation that was entered before has ended.
    pub(crate) async fn wait(&self) {
        let mut unfinished = self.unfinished.subscribe();
        // The sender lives as long as this turn, so the wait cannot fail.
        let _sender_lives = unfinished.wait_for(|numbers| numbers.first().is_none_or(|first| *first >= self.number)).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.mutation {
            self.unfinished.send_modify(|unfinished| {
                unfinished.remove(&self.number);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;

    fn is_free(turn: &Turn) -> bool {
        turn.wait().now_or_never().is_some()
    }

    #[test]
    fn mutations_go_one_after_the_other_and_reads_side_by_side() {
        let mut order = Order::default();
        let early = order.read();
        let (first, second) = (order.mutation(), order.mutation());
        let (late, later) = (order.read(), order.read());
        let third = order.mutation();
        assert!(is_free(&early) && is_free(&first));
        assert!(!is_free(&second) && !is_free(&late));
        drop(first);
        assert!(is_free(&second) && !is_free(&late) && !is_free(&third));
        drop(second);
        assert!(is_free(&late) && is_free(&later) && is_free(&third));
    }

    #[test]
    fn one_that_leaves_early_lets_nobody_past_those_before_it() {
        let mut order = Order::default();
        let (first, second, third) = (order.mutation(), order.mutation(), order.mutation());
        drop(second);
        assert!(!is_free(&third), "the first is still at work");
        drop(first);
        assert!(is_free(&third));
    }

    #[test]
    fn the_order_holds_when_the_queue_changes_hands() {
        let mut order = Order::default();
        let old = order.mutation();
        let mut handed_over = order;
        let new = handed_over.mutation();
        assert!(!is_free(&new));
        drop(old);
        assert!(is_free(&new));
    }

    #[tokio::test]
    async fn a_waiting_turn_is_woken() {
        let mut order = Order::default();
        let (first, second) = (order.mutation(), order.mutation());
        let waiting = async {
            second.wait().await;
        };
        let ending = async {
            tokio::task::yield_now().await;
            drop(first);
        };
        tokio::join!(waiting, ending);
    }

    proptest! {
        /// However turns come and go, the free ones are the first mutation and the reads before it.
        #[test]
        fn nobody_overtakes_a_mutation(steps in prop::collection::vec((0_u8..3, any::<prop::sample::Index>()), 1..60)) {
            let mut order = Order::default();
            let mut turns: Vec<Turn> = Vec::new();
            for (step, index) in steps {
                match step {
                    0 => turns.push(order.mutation()),
                    1 => turns.push(order.read()),
                    _ if turns.is_empty() => {}
                    _ => drop(turns.remove(index.index(turns.len()))),
                }
                let mut mutation_before = false;
                for turn in &turns {
                    prop_assert_eq!(is_free(turn), !mutation_before);
                    mutation_before |= turn.mutation;
                }
            }
        }
    }
}

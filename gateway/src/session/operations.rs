//! Changes of files by the names that their client gave them: what was carried out once is not done again, and is answered as
//! it was. Sans-IO.

use super::message::{Call, Twice};
use portcullis_protocol::rpc::RpcError;
use std::collections::{HashMap, VecDeque};

/// Changes that are remembered after their end; the oldest goes first. A client sends one again right after a cut, so these
/// are far more than it can have in flight.
const REMEMBERED: usize = 1024;

/// What the errors of those may take. An error names paths, and usually takes some hundred bytes.
const REMEMBERED_BYTES: usize = 4 << 20;

/// Changes on their way at a time. Each ends within the deadline of file calls, whatever becomes of its connection.
const RUNNING: usize = 256;

/// How a change ended.
type Outcome = Result<(), RpcError>;

/// The changes of a session.
#[derive(Debug, Default)]
pub(super) struct Operations {
    changes: HashMap<String, Change>,
    /// Those that ended, in the order of their ends.
    oldest_first: VecDeque<String>,
    /// What the errors of these take.
    bytes: usize,
}

#[derive(Debug)]
struct Change {
    digest: u64,
    progress: Progress,
}

#[derive(Debug)]
enum Progress {
    /// Who waits for it.
    Running(Vec<Call>),
    Ended(Outcome),
}

/// What becomes of a change that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Come {
    /// It is new: carry it out. The call is answered when it ends.
    New,
    /// It was sent before and is on its way: the call is answered with the others.
    Running,
    /// It was carried out before, and ended like this.
    Ended(Outcome),
}

impl Operations {
    /// A change came.
    pub(super) fn come(&mut self, call: Call, operation: &str, digest: u64) -> Result<Come, Twice> {
        let running = self.changes.len() - self.oldest_first.len();
        match self.changes.get_mut(operation) {
            Some(change) if change.digest != digest => Err(Twice::Another),
            Some(Change { progress: Progress::Running(calls), .. }) => {
                calls.push(call);
                Ok(Come::Running)
            }
            Some(Change { progress: Progress::Ended(outcome), .. }) => Ok(Come::Ended(outcome.clone())),
            None if running >= RUNNING => Err(Twice::TooMany),
            None => {
                self.changes.insert(operation.to_owned(), Change { digest, progress: Progress::Running(vec![call]) });
                Ok(Come::New)
            }
        }
    }

    /// A change ended. Answers who waits for it.
    pub(super) fn ended(&mut self, operation: String, outcome: Outcome) -> Vec<Call> {
        let Some(change) = self.changes.get_mut(&operation) else { return Vec::new() };
        let Progress::Running(calls) = &mut change.progress else { return Vec::new() };
        let calls = std::mem::take(calls);
        let outcome = outcome.map_err(RpcError::cut);
        self.bytes += size(&outcome);
        change.progress = Progress::Ended(outcome);
        self.oldest_first.push_back(operation);
        // The latest stays, however large it is: it may be asked for right now.
        while self.oldest_first.len() > 1
            && (self.oldest_first.len() > REMEMBERED || self.bytes > REMEMBERED_BYTES)
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            if let Some(Change { progress: Progress::Ended(outcome), .. }) = self.changes.remove(&oldest) {
                self.bytes -= size(&outcome);
            }
        }
        calls
    }

    /// Nobody is left to hear the answers; what is on its way goes on.
    pub(super) fn abandon(&mut self) -> Vec<Call> {
        let running = self.changes.values_mut().filter_map(|change| match &mut change.progress {
            Progress::Running(calls) => Some(std::mem::take(calls)),
            Progress::Ended(_) => None,
        });
        running.flatten().collect()
    }
}

fn size(outcome: &Outcome) -> usize {
    let Err(error) = outcome else { return 0 };
    error.message.len() + error.data.as_ref().map_or(0, |data| data.to_string().len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::rpc::code;

    fn refused() -> RpcError {
        RpcError::new(code::INTERNAL, "no")
    }

    #[test]
    fn what_was_done_once_is_answered_again_and_not_done_again() {
        let mut operations = Operations::default();
        assert_eq!(operations.come(1, "a", 1), Ok(Come::New));
        assert_eq!(operations.come(2, "a", 1), Ok(Come::Running));
        assert_eq!(operations.come(3, "a", 2), Err(Twice::Another));
        assert_eq!(operations.come(4, "b", 1), Ok(Come::New), "another name is another change");
        assert_eq!(operations.ended("a".to_owned(), Err(refused())), [1, 2]);
        assert_eq!(operations.ended("a".to_owned(), Ok(())), Vec::<Call>::new(), "it ends once");
        assert_eq!(operations.come(5, "a", 1), Ok(Come::Ended(Err(refused()))));
        assert_eq!(operations.come(6, "a", 2), Err(Twice::Another));
    }

    #[test]
    fn a_cut_takes_the_callers_and_leaves_the_change() {
        let mut operations = Operations::default();
        operations.come(1, "a", 1).unwrap();
        assert_eq!(operations.abandon(), [1]);
        assert_eq!(operations.come(2, "a", 1), Ok(Come::Running), "sent again after the cut");
        assert_eq!(operations.ended("a".to_owned(), Ok(())), [2]);
        assert_eq!(operations.come(3, "a", 1), Ok(Come::Ended(Ok(()))));
    }

    #[test]
    fn both_kinds_are_bounded_and_the_oldest_goes() {
        let mut operations = Operations::default();
        for nth in 0..RUNNING {
            assert_eq!(operations.come(0, &format!("r{nth}"), 0), Ok(Come::New));
        }
        assert_eq!(operations.come(0, "more", 0), Err(Twice::TooMany));
        for nth in 0..RUNNING {
            operations.ended(format!("r{nth}"), Ok(()));
        }
        for nth in 0..=REMEMBERED - RUNNING {
            assert_eq!(operations.come(0, &nth.to_string(), 0), Ok(Come::New));
            operations.ended(nth.to_string(), Ok(()));
        }
        assert_eq!(operations.changes.len(), REMEMBERED);
        assert_eq!(operations.come(0, "r1", 0), Ok(Come::Ended(Ok(()))));
        assert_eq!(operations.come(0, "r0", 0), Ok(Come::New), "forgotten, so it would be done again");
    }

    #[test]
    fn what_is_remembered_of_errors_is_bounded_in_bytes() {
        let mut operations = Operations::default();
        let long = RpcError::new(code::INTERNAL, "p".repeat(1 << 20));
        for nth in 0..REMEMBERED {
            operations.come(0, &nth.to_string(), 0).unwrap();
            operations.ended(nth.to_string(), Err(long.clone()));
        }
        let held: usize = operations
            .changes
            .values()
            .map(|change| match &change.progress {
                Progress::Ended(outcome) => size(outcome),
                Progress::Running(_) => 0,
            })
            .sum();
        assert_eq!(held, operations.bytes);
        assert!((REMEMBERED_BYTES / 2..=REMEMBERED_BYTES).contains(&held), "{held}");
        let last = (REMEMBERED - 1).to_string();
        assert_eq!(operations.come(0, &last, 0), Ok(Come::Ended(Err(long.cut()))));
    }
}

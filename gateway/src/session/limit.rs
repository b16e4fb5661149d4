//! The output of a process: held to the limit that the session sees to itself, and cut into events.

use super::guard::{Bounds, Guard};
use super::message::Output;
use super::process::Phase;
use super::state::State;
use crate::process::pump::CHUNK;
use bytes::Bytes;
use portcullis_protocol::event::{Event, Stream};
use portcullis_protocol::limit::{LimitReached, Scope};
use portcullis_protocol::signal::Signal;
use std::num::NonZeroU64;
use std::time::Instant;

/// The output of one process, counted.
#[derive(Debug)]
pub(super) struct OutputLimit {
    most: Option<NonZeroU64>,
    so_far: u64,
}

impl OutputLimit {
    pub(super) fn new(most: Option<NonZeroU64>) -> Self {
        Self { most, so_far: 0 }
    }

    /// Takes off output what is too much. What was reached, the first time that something is.
    fn take(&mut self, bytes: &mut Bytes) -> Option<LimitReached> {
        let before = self.so_far;
        self.so_far = before.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        let most = self.most?.get();
        if self.so_far <= most {
            return None;
        }
        bytes.truncate(usize::try_from(most.saturating_sub(before)).unwrap_or(usize::MAX));
        let limit = "outputBytes".to_owned();
        (before <= most).then_some(LimitReached { limit, value: most, used: self.so_far, scope: Scope::Process })
    }
}

impl State {
    /// Output that came. Beyond its limit it goes nowhere, though the pipe is read on, and the process is stopped.
    pub(super) fn output(&mut self, key: u64, stream: Stream, mut bytes: Bytes, now: Instant) {
        self.guards.get_mut(&key).into_iter().for_each(|guard| guard.heard(now));
        let Some(process) = self.processes.get_mut(&key) else { return };
        process.received(bytes.len());
        if let Some(reached) = process.output.take(&mut bytes) {
            let most = reached.value;
            process.reached.push(reached);
            process.failure.get_or_insert_with(|| {
                format!("the process was stopped: it wrote more than {most} bytes, as much as its start allows (outputBytes)")
            });
            if process.phase == Phase::Running {
                let guard = self.guards.entry(key).or_insert_with(|| Guard::new(Bounds::default(), now));
                guard.interrupted(now);
                self.outputs.push_back(Output::Signal { key, signal: Signal::INTERRUPT });
            } else {
                // The program has ended: it is what it left that writes.
                self.kill(key);
            }
        }
        let chunks = std::iter::from_fn(|| (!bytes.is_empty()).then(|| bytes.split_to(bytes.len().min(CHUNK))));
        self.append(key, chunks.map(|chunk| Event::Output { stream, chunk }));
        self.grant(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_cut_off_and_told_once() {
        let mut limit = OutputLimit::new(NonZeroU64::new(5));
        let mut take = |text: &[u8]| {
            let mut chunk = Bytes::copy_from_slice(text);
            let reached = limit.take(&mut chunk).map(|reached| (reached.value, reached.used));
            (chunk, reached)
        };
        assert_eq!(take(b"abcde"), ("abcde".into(), None), "all that is allowed is not too much");
        assert_eq!(take(b"fg"), (Bytes::new(), Some((5, 7))));
        assert_eq!(take(b"h"), (Bytes::new(), None));
        let mut limit = OutputLimit::new(NonZeroU64::new(5));
        let mut chunk = Bytes::from("abcdefg");
        assert!(limit.take(&mut chunk).is_some() && chunk == "abcde");
        let mut unlimited = OutputLimit::new(None);
        assert_eq!((unlimited.take(&mut chunk), chunk.len()), (None, 5));
    }
}

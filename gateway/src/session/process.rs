//! What a session knows of one process. Sans-IO.

use super::ledger::Ledger;
use super::log::EventLog;
use super::message::Call;
use crate::process::pump::INPUT_QUEUE;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::process::{ReadResult, WriteStatus};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes that a pump may have read and the log has not taken in yet.
const WINDOW: u64 = 128 * 1024;

/// Bytes of input that wait for a process, beside the bound on chunks; one chunk is taken whatever its size.
const INPUT_BYTES: usize = 16 << 20;

/// Writes that wait for a place in the queue; the calls in flight of a connection bound it before that.
const PARKED: usize = 256;

/// One process, from its start until it is forgotten.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) id: Arc<str>,
    pub(super) phase: Phase,
    pub(super) log: EventLog,
    pub(super) input: Input,
    /// Why its end is not known, if it is not, or why its sandbox ended it.
    pub(super) failure: Option<String>,
    /// What its sandbox was seen to refuse, once it ended.
    pub(super) denials: Arc<Denials>,
    granted: u64,
    received: u64,
}

/// How far a process is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The spawner was asked. What is wanted of the process meanwhile is done once it runs.
    Starting { call: Call, kill: bool, interrupt: bool },
    /// It runs.
    Running,
    /// It ended with this status; its streams may still bring output of others.
    Exited(i32),
    /// All is over.
    Closed(i32),
}

/// A write that waits for a place in the queue.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) call: Call,
    pub(super) id: String,
    pub(super) chunk: Vec<u8>,
}

/// What becomes of a write now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// Answer this; a chunk is to be queued with the pump.
    Now(WriteStatus, Option<Vec<u8>>),
    /// It waits.
    Parked,
    /// Too many wait.
    TooMany,
}

impl Process {
    pub(super) fn starting(id: Arc<str>, call: Call, takes_input: bool) -> Self {
        let input = Input { open: takes_input, ledger: Ledger::default(), chunks: 0, bytes: 0, parked: VecDeque::new() };
        let phase = Phase::Starting { call, kill: false, interrupt: false };
        Self { id, phase, log: EventLog::default(), input, failure: None, denials: Arc::default(), granted: 0, received: 0 }
    }

    /// Whether something of it is alive on this machine, as far as is known.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. } | Phase::Running)
    }

    /// Bytes held. What the log and the process share counts twice: either may be the one that keeps it.
    pub(super) fn bytes(&self) -> usize {
        self.log.bytes() + self.denials.size()
    }

    /// Counts output that the pump brought.
    pub(super) fn received(&mut self, bytes: usize) {
        self.received += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// The credit that the pump gets now, in bytes since its start, if that is worth telling: small steps would wake it for
    /// little.
    pub(super) fn grant(&mut self) -> Option<u64> {
        let room = u64::try_from(self.log.room()).unwrap_or(u64::MAX);
        let target = self.received + room.min(WINDOW);
        let step = target.saturating_sub(self.granted);
        let runs_dry = self.granted < self.received + WINDOW / 4;
        (room > 0 && (step >= WINDOW / 4 || (step > 0 && runs_dry))).then(|| {
            self.granted = target;
            target
        })
    }

    /// What `process/read` answers. What it hands out needs no longer be kept for this reader.
    pub(super) fn read(&mut self, after: u64, max_bytes: Option<u64>) -> ReadResult {
        let page = self.log.page(after, max_bytes);
        self.log.release(page.next_seq - 1);
        let (exit_code, closed) = match self.phase {
            Phase::Starting { .. } | Phase::Running => (None, false),
            Phase::Exited(code) => (Some(code), false),
            Phase::Closed(code) => (Some(code), true),
        };
        ReadResult {
            chunks: page.chunks,
            next_seq: page.next_seq,
            exited: exit_code.is_some(),
            exit_code,
            closed,
            failure: self.failure.clone(),
            sandbox_denied: exit_code.is_some_and(|code| self.denials.failed_it(code)),
            denials: self.denials.list.clone(),
            denials_more: self.denials.more,
        }
    }
}

/// The input of a process: accepted once, written once, in order.
#[derive(Debug)]
pub(super) struct Input {
    open: bool,
    ledger: Ledger,
    /// Accepted and not written yet.
    chunks: usize,
    bytes: usize,
    parked: VecDeque<Parked>,
}

impl Input {
    /// A write that came.
    pub(super) fn write(&mut self, call: Call, id: String, chunk: Vec<u8>) -> Written {
        if self.ledger.has_seen(&id) {
            return Written::Now(WriteStatus::Accepted, None);
        }
        if !self.open {
            return Written::Now(WriteStatus::StdinClosed, None);
        }
        if self.parked.is_empty() && self.has_room(chunk.len()) {
            return Written::Now(WriteStatus::Accepted, Some(self.accept(&id, chunk)));
        }
        if self.parked.len() >= PARKED {
            return Written::TooMany;
        }
        self.parked.push_back(Parked { call, id, chunk });
        Written::Parked
    }

    /// One chunk of so many bytes was written.
    pub(super) fn taken(&mut self, bytes: usize) {
        self.chunks = self.chunks.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// A parked write that can be answered now.
    pub(super) fn unpark(&mut self) -> Option<(Call, WriteStatus, Option<Vec<u8>>)> {
        let first = self.parked.front()?;
        let seen = self.ledger.has_seen(&first.id);
        if self.open && !seen && !self.has_room(first.chunk.len()) {
            return None;
        }
        let Parked { call, id, chunk } = self.parked.pop_front()?;
        Some(match (seen, self.open) {
            (true, _) => (call, WriteStatus::Accepted, None),
            (false, false) => (call, WriteStatus::StdinClosed, None),
            (false, true) => (call, WriteStatus::Accepted, Some(self.accept(&id, chunk))),
        })
    }

    /// Nothing more goes in.
    pub(super) fn close(&mut self) {
        self.open = false;
    }

    /// Writes whose callers are gone; nothing of them was accepted.
    pub(super) fn abandon(&mut self) -> impl Iterator<Item = Call> {
        std::mem::take(&mut self.parked).into_iter().map(|parked| parked.call)
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.chunks == 0 || (self.chunks < INPUT_QUEUE && self.bytes.saturating_add(bytes) <= INPUT_BYTES)
    }

    fn accept(&mut self, id: &str, chunk: Vec<u8>) -> Vec<u8> {
        self.ledger.record(id);
        self.chunks += 1;
        self.bytes += chunk.len();
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        Process::starting("p".into(), 0, true)
    }

    #[test]
    fn a_write_beyond_the_queue_waits_and_those_behind_it_too() {
        let mut input = process().input;
        for nth in 0..INPUT_QUEUE {
            assert_eq!(input.write(0, nth.to_string(), vec![1]), Written::Now(WriteStatus::Accepted, Some(vec![1])));
        }
        assert_eq!(input.write(7, "a".to_owned(), vec![2]), Written::Parked);
        assert_eq!(input.write(8, "b".to_owned(), vec![3]), Written::Parked);
        assert_eq!(
            input.write(9, "0".to_owned(), vec![9]),
            Written::Now(WriteStatus::Accepted, None),
            "a known id does not wait"
        );
        assert_eq!(input.unpark(), None);
        input.taken(1);
        assert_eq!(input.unpark(), Some((7, WriteStatus::Accepted, Some(vec![2]))));
        assert_eq!(input.unpark(), None);
        input.close();
        assert_eq!(input.unpark(), Some((8, WriteStatus::StdinClosed, None)));
        assert_eq!(input.write(1, "a".to_owned(), vec![]), Written::Now(WriteStatus::Accepted, None));
        assert_eq!(input.write(1, "b".to_owned(), vec![]), Written::Now(WriteStatus::StdinClosed, None), "it was never accepted");
    }

    #[test]
    fn the_same_write_twice_in_line_is_accepted_once() {
        let mut input = process().input;
        let huge = vec![0; INPUT_BYTES + 1];
        assert!(matches!(input.write(1, "big".to_owned(), huge), Written::Now(WriteStatus::Accepted, Some(_))));
        assert_eq!(input.write(2, "x".to_owned(), vec![1]), Written::Parked, "the bytes are bounded too");
        assert_eq!(input.write(3, "x".to_owned(), vec![1]), Written::Parked);
        input.taken(INPUT_BYTES + 1);
        assert_eq!(input.unpark(), Some((2, WriteStatus::Accepted, Some(vec![1]))));
        assert_eq!(input.unpark(), Some((3, WriteStatus::Accepted, None)));
    }

    #[test]
    fn writes_in_line_are_bounded() {
        let mut input = process().input;
        assert!(matches!(input.write(1, "big".to_owned(), vec![0; INPUT_BYTES]), Written::Now(..)));
        for nth in 0..PARKED {
            assert_eq!(input.write(1, nth.to_string(), vec![1]), Written::Parked);
        }
        assert_eq!(input.write(1, "one more".to_owned(), vec![1]), Written::TooMany);
        assert_eq!(input.abandon().count(), PARKED);
    }

    #[test]
    fn credit_follows_the_log_and_comes_in_steps() {
        use portcullis_protocol::event::{Event, Stream};
        let mut process = process();
        let mut granted = process.grant().unwrap();
        assert_eq!((granted, process.grant()), (WINDOW, None));
        let (mut received, mut tells) = (0, 0);
        while received < granted {
            process.received(8192);
            received += 8192;
            process.log.append(Event::Output { stream: Stream::Stdout, chunk: vec![0; 8192] });
            if let Some(total) = process.grant() {
                assert!(total > granted);
                granted = total;
                tells += 1;
            }
        }
        assert_eq!(process.log.room(), 0, "nobody reads: the credit ends with the room");
        assert_eq!(received, granted);
        assert!(tells < 200, "{tells} times told");
        while process.log.announce("p").is_some() {}
        assert!(process.grant().is_some());
    }
}

//! What a session knows of one process. Sans-IO.

use super::ledger::Ledger;
use super::limit::OutputLimit;
use super::log::{EventLog, Limits};
use super::message::{Call, Start};
use crate::process::pump::INPUT_QUEUE;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::limit::{LimitReached, TreeEnd};
use portcullis_protocol::process::{ListedProcess, ProcessState, ReadResult, StartResult, WriteStatus};
use portcullis_protocol::signal::Signal;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Bytes that a pump may have read and the log has not taken in yet.
const WINDOW: u64 = 128 * 1024;

/// Bytes of input that wait for a process, beside the bound on chunks; one chunk is taken whatever its size.
const INPUT_BYTES: usize = 16 << 20;

/// Writes that wait for a place in the queue; the calls in flight of a connection bound it before that.
pub(super) const PARKED: usize = 256;

/// One process, from its start until it is forgotten.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) id: Arc<str>,
    pub(super) phase: Phase,
    pub(super) log: EventLog,
    pub(super) input: Input,
    pub(super) tty: bool,
    pub(super) operation: Option<String>,
    /// What its start was answered, once it ran.
    pub(super) started: Option<StartResult>,
    started_at_ms: u64,
    /// When it was last read to any purpose after its close.
    pub(super) read_at: Option<Instant>,
    /// Why its end is not known, if it is not, or why its sandbox ended it.
    pub(super) failure: Option<String>,
    /// What its sandbox was seen to refuse, once it ended.
    pub(super) denials: Arc<Denials>,
    pub(super) output: OutputLimit,
    /// The limits that it reached, as far as they can be seen.
    pub(super) reached: Vec<LimitReached>,
    /// How everything that comes of it is ended, once it runs.
    pub(super) tree: Option<TreeEnd>,
    granted: u64,
    received: u64,
}

/// How far a process is in its life.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The spawner was asked.
    Starting(Starting),
    /// It runs.
    Running,
    /// It ended with this status; its streams may still bring output of others.
    Exited(i32),
    /// All is over.
    Closed(i32),
}

/// Who waits for a process to run, and what is wanted of it then.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Starting {
    /// The start, and those that repeat it.
    pub(super) calls: Vec<Call>,
    pub(super) kill: bool,
    /// Each once, in the order in which they were last asked for.
    pub(super) signals: Vec<Signal>,
}

/// What waits for a place in the queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Parked {
    Write {
        call: Call,
        id: String,
        chunk: Vec<u8>,
    },
    /// The end of the input, behind the writes before it.
    End {
        call: Call,
    },
}

/// What waited and can be answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unparked {
    /// A chunk is to be queued with the pump.
    Write(Call, WriteStatus, Option<Vec<u8>>),
    /// Whether the pump is to be told.
    End(Call, bool),
}

/// What becomes of an end of input now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Answer it; whether the pump is to be told.
    Now(bool),
    /// It waits.
    Parked,
    /// Too much waits.
    TooMany,
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
    pub(super) fn starting(id: Arc<str>, call: Call, start: Start, spool_bytes: u64) -> Self {
        let Start { tty, takes_input, operation, at_ms: started_at_ms, when_full, output, .. } = start;
        let input = Input { open: takes_input, ledger: Ledger::default(), chunks: 0, bytes: 0, parked: VecDeque::new() };
        Self {
            id,
            phase: Phase::Starting(Starting { calls: vec![call], ..Starting::default() }),
            log: EventLog::new(Limits { spool_bytes, when_full }),
            input,
            tty,
            operation,
            started: None,
            started_at_ms,
            read_at: None,
            failure: None,
            denials: Arc::default(),
            output: OutputLimit::new(output),
            reached: Vec::new(),
            tree: None,
            granted: 0,
            received: 0,
        }
    }

    /// What `process/list` says of it.
    pub(super) fn listed(&self) -> ListedProcess {
        let (state, exit_code) = match self.phase {
            Phase::Starting(_) => (ProcessState::Starting, None),
            Phase::Running => (ProcessState::Running, None),
            Phase::Exited(code) => (ProcessState::Exited, Some(code)),
            Phase::Closed(code) => (ProcessState::Closed, Some(code)),
        };
        ListedProcess {
            process_id: self.id.to_string(),
            state,
            exit_code,
            started_at_ms: self.started_at_ms,
            tty: self.tty,
            sandbox_type: self.started.as_ref().map(|started| started.sandbox_type.clone()),
            next_seq: self.log.last() + 1,
        }
    }

    /// Repeats of its start whose callers are gone; the start itself goes on.
    pub(super) fn abandon_repeats(&mut self) -> Vec<Call> {
        match &mut self.phase {
            Phase::Starting(Starting { calls, .. }) => calls.split_off(1.min(calls.len())),
            Phase::Running | Phase::Exited(_) | Phase::Closed(_) => Vec::new(),
        }
    }

    /// Whether something of it is alive on this machine, as far as is known.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Starting(_) | Phase::Running)
    }

    /// Bytes held. What the log and the process share counts twice: either may be the one that keeps it.
    pub(super) fn bytes(&self) -> usize {
        self.log.bytes() + self.denials.size() + self.reached.iter().map(LimitReached::size).sum::<usize>()
    }

    /// Counts output that the pump brought.
    pub(super) fn received(&mut self, bytes: usize) {
        self.received += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// The credit that the pump gets now, in bytes since its start, if that is worth telling: small steps would wake it for
    /// little. There is no pump before the process runs, and credit that nobody heard of would never be given again.
    pub(super) fn grant(&mut self) -> Option<u64> {
        if matches!(self.phase, Phase::Starting(_)) {
            return None;
        }
        let room = u64::try_from(self.log.room()).unwrap_or(u64::MAX);
        let target = self.received + room.min(WINDOW);
        let step = target.saturating_sub(self.granted);
        let runs_dry = self.granted < self.received + WINDOW / 4;
        (room > 0 && (step >= WINDOW / 4 || (step > 0 && runs_dry))).then(|| {
            self.granted = target;
            target
        })
    }

    /// What `process/read` answers, but for its events.
    pub(super) fn answer(&self) -> ReadResult {
        let (exit_code, closed) = match self.phase {
            Phase::Starting(_) | Phase::Running => (None, false),
            Phase::Exited(code) => (Some(code), false),
            Phase::Closed(code) => (Some(code), true),
        };
        ReadResult {
            chunks: Vec::new(),
            next_seq: self.log.last() + 1,
            exited: exit_code.is_some(),
            exit_code,
            closed,
            failure: self.failure.clone(),
            sandbox_denied: exit_code.is_some_and(|code| self.denials.failed_it(code)),
            denials: self.denials.list.clone(),
            denials_more: self.denials.more,
            limits: self.reached.clone(),
            gap: None,
            events: None,
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
    /// Whether a write of so many bytes would have to wait now.
    pub(super) fn is_full(&self, bytes: usize) -> bool {
        self.open && !(self.parked.is_empty() && self.has_room(bytes))
    }

    /// Bytes of the writes that wait.
    pub(super) fn parked_bytes(&self) -> usize {
        let sizes = self.parked.iter().map(|parked| match parked {
            Parked::Write { chunk, .. } => chunk.len(),
            Parked::End { .. } => 0,
        });
        sizes.sum()
    }

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
        self.parked.push_back(Parked::Write { call, id, chunk });
        Written::Parked
    }

    /// Its end, behind the writes that wait. An input that has ended already does so again.
    pub(super) fn end(&mut self, call: Call) -> Ended {
        if self.parked.is_empty() {
            return Ended::Now(std::mem::take(&mut self.open));
        }
        if self.parked.len() >= PARKED {
            return Ended::TooMany;
        }
        self.parked.push_back(Parked::End { call });
        Ended::Parked
    }

    /// One chunk of so many bytes was written.
    pub(super) fn taken(&mut self, bytes: usize) {
        self.chunks = self.chunks.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// What waited and can be answered now.
    pub(super) fn unpark(&mut self) -> Option<Unparked> {
        if let Parked::Write { id, chunk, .. } = self.parked.front()?
            && self.open
            && !self.ledger.has_seen(id)
            && !self.has_room(chunk.len())
        {
            return None;
        }
        Some(match self.parked.pop_front()? {
            Parked::End { call } => Unparked::End(call, std::mem::take(&mut self.open)),
            Parked::Write { call, id, .. } if self.ledger.has_seen(&id) => Unparked::Write(call, WriteStatus::Accepted, None),
            Parked::Write { call, .. } if !self.open => Unparked::Write(call, WriteStatus::StdinClosed, None),
            Parked::Write { call, id, chunk } => Unparked::Write(call, WriteStatus::Accepted, Some(self.accept(&id, chunk))),
        })
    }

    /// Nothing more goes in.
    pub(super) fn close(&mut self) {
        self.open = false;
    }

    /// What waited and whose callers are gone; nothing of it was accepted.
    pub(super) fn abandon(&mut self) -> VecDeque<Parked> {
        std::mem::take(&mut self.parked)
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
    use crate::session::guard::Bounds;
    use portcullis_protocol::logged::WhenFull;

    fn process() -> Process {
        let when_full = WhenFull::Pause;
        let bounds = Bounds::default();
        let start = Start {
            process: String::new(),
            tty: false,
            takes_input: true,
            operation: None,
            at_ms: 0,
            when_full,
            bounds,
            output: None,
        };
        Process::starting("p".into(), 0, start, 0)
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
        assert_eq!(input.unpark(), Some(Unparked::Write(7, WriteStatus::Accepted, Some(vec![2]))));
        assert_eq!(input.unpark(), None);
        input.close();
        assert_eq!(input.unpark(), Some(Unparked::Write(8, WriteStatus::StdinClosed, None)));
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
        assert_eq!(input.unpark(), Some(Unparked::Write(2, WriteStatus::Accepted, Some(vec![1]))));
        assert_eq!(input.unpark(), Some(Unparked::Write(3, WriteStatus::Accepted, None)));
    }

    #[test]
    fn the_end_of_input_keeps_its_place_among_the_writes() {
        let mut input = process().input;
        assert!(matches!(input.write(1, "big".to_owned(), vec![0; INPUT_BYTES]), Written::Now(..)));
        assert_eq!(input.write(2, "before".to_owned(), vec![1]), Written::Parked);
        assert_eq!(input.end(3), Ended::Parked);
        assert_eq!(input.write(4, "after".to_owned(), vec![2]), Written::Parked);
        assert_eq!(input.unpark(), None);
        input.taken(INPUT_BYTES);
        assert_eq!(input.unpark(), Some(Unparked::Write(2, WriteStatus::Accepted, Some(vec![1]))));
        assert_eq!(input.unpark(), Some(Unparked::End(3, true)));
        assert_eq!(input.unpark(), Some(Unparked::Write(4, WriteStatus::StdinClosed, None)));
        assert_eq!(input.end(5), Ended::Now(false), "it has ended already");
    }

    #[test]
    fn writes_in_line_are_bounded() {
        let mut input = process().input;
        assert!(matches!(input.write(1, "big".to_owned(), vec![0; INPUT_BYTES]), Written::Now(..)));
        for nth in 0..PARKED {
            assert_eq!(input.write(1, nth.to_string(), vec![1]), Written::Parked);
        }
        assert_eq!(input.write(1, "one more".to_owned(), vec![1]), Written::TooMany);
        assert_eq!(input.end(1), Ended::TooMany);
        assert_eq!(input.abandon().len(), PARKED);
    }

    #[test]
    fn credit_follows_the_log_and_comes_in_steps() {
        use portcullis_protocol::event::{Event, Stream};
        let mut process = process();
        assert_eq!(process.grant(), None, "there is nobody yet to have it");
        process.phase = Phase::Running;
        let mut granted = process.grant().unwrap();
        assert_eq!((granted, process.grant()), (WINDOW, None));
        let (mut received, mut tells) = (0, 0);
        while received < granted {
            process.received(8192);
            received += 8192;
            process.log.append(Event::Output { stream: Stream::Stdout, chunk: vec![0; 8192].into() });
            if let Some(total) = process.grant() {
                assert!(total > granted);
                granted = total;
                tells += 1;
            }
        }
        assert_eq!(process.log.room(), 0, "nobody reads: the credit ends with the room");
        assert_eq!(received, granted);
        assert!(tells < 200, "{tells} times told");
        while process.log.announce().is_some() {}
        process.log.deliver(process.log.told());
        assert!(process.grant().is_some());
    }
}

//! The state of a session. Sans-IO: `handle` takes what happened, `poll` gives what to do, `deadline` says when to call again.

use super::delivery::{CATCH_UP, Delivery, Proof};
use super::guard::{Due, Guard};
use super::ledger::Ledger;
use super::message::{Answer, Call, Input, Output, Retention, SpoolLimits, Terms};
use super::operations::Operations;
use super::paging::{Pending, Reader};
use super::process::{Parked, Phase, Process};
use crate::answer::Form;
use crate::process::pump::Feed;
use portcullis_protocol::binary::Message;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event::Event;
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_protocol::signal::Signal;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Closed processes that are remembered, and the bytes that their logs may hold together: beyond, the oldest is forgotten
/// before its time.
const CLOSED: usize = 4096;
const CLOSED_BYTES: usize = 256 << 20;

/// The longest grace that is taken literally.
const LONGEST_GRACE: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone, Copy)]
pub(super) enum Attachment {
    Attached { catch_up: Option<Instant> },
    Detached { until: Instant },
    Ended,
}

/// A session.
#[derive(Debug)]
pub(super) struct State {
    retention: Retention,
    pub(super) limits: SpoolLimits,
    /// Processes that may live at a time.
    pub(super) most_processes: usize,
    pub(super) attachment: Attachment,
    /// Of the latest attachment; an older one may change nothing.
    pub(super) generation: u64,
    /// Who takes over as soon as the connection that has the session has left.
    successor: Option<(Call, Terms)>,
    /// The latest client says what it has.
    says_when: bool,
    /// How output travels to it.
    form: Form,
    pub(super) next_key: u64,
    pub(super) processes: HashMap<u64, Process>,
    pub(super) keys: HashMap<Arc<str>, u64>,
    /// The operations that started a process: none starts a second one when the first is forgotten.
    pub(super) operations: Ledger,
    pub(super) changes: Operations,
    /// Of the processes that are bounded in time, or told to end.
    pub(super) guards: HashMap<u64, Guard>,
    pub(super) readers: Vec<Reader>,
    /// Pages that are not complete. The calls in flight of a connection bound them.
    pub(super) pages: HashMap<Call, Pending>,
    pub(super) delivery: Delivery,
    /// Processes with something to announce, each once, in turn.
    unsent: VecDeque<u64>,
    /// When which closed process is forgotten, in order.
    pub(super) closed: VecDeque<(Instant, u64)>,
    pub(super) outputs: VecDeque<Output>,
}

impl State {
    /// A session that waits for its first connection.
    pub(super) fn new(retention: Retention, limits: SpoolLimits, most_processes: usize, now: Instant) -> Self {
        Self {
            retention,
            limits,
            most_processes,
            attachment: Attachment::Detached { until: now + retention.detached },
            generation: 0,
            successor: None,
            says_when: false,
            form: Form::Json,
            next_key: 0,
            processes: HashMap::new(),
            keys: HashMap::new(),
            operations: Ledger::default(),
            changes: Operations::default(),
            guards: HashMap::new(),
            readers: Vec::new(),
            pages: HashMap::new(),
            delivery: Delivery::default(),
            unsent: VecDeque::new(),
            closed: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Takes in what happened, after what is due by now.
    pub(super) fn handle(&mut self, input: Input, now: Instant) {
        self.expire(now);
        if matches!(self.attachment, Attachment::Ended) && !is_of_a_process(&input) {
            return;
        }
        match input {
            Input::Attach { call, terms } => self.want(call, terms, now),
            Input::Detach { generation } => self.detach(generation, now),
            Input::Change { call, operation, digest } => self.change(call, operation, digest),
            Input::Changed { operation, outcome } => self.changed(operation, outcome),
            Input::Start { call, start } => self.start(call, start, now),
            Input::Started { key, sandbox_type, enforcement, limits, tree } => {
                self.started(key, sandbox_type, enforcement, (limits, tree));
            }
            Input::StartFailed { key, error } => self.start_failed(key, error),
            Input::Read { call, params } => self.read(call, &params, now),
            Input::Acknowledge { call, params } => self.acknowledge(call, &params),
            Input::Delivered { generation, mark } => self.delivered(generation, mark),
            Input::HandedOut { generation, page } => self.handed_out(generation, page),
            Input::RoomReserved { call } => self.room_reserved(call),
            Input::SpoolWritten { key, is_written } => self.spool_written(key, is_written),
            Input::SpoolRead { call, slots } => self.spool_read(call, slots),
            Input::Write { call, params } => self.write(call, params, now),
            Input::CloseStdin { call, process } => self.close_stdin(call, &process),
            Input::Resize { call, process, size } => self.resize(call, &process, size),
            Input::List { call } => self.list(call),
            Input::Signal { call, process, signal } => self.signal(call, &process, signal),
            Input::Terminate { call, process, grace, report } => {
                self.terminate(call, &process, now + grace.min(LONGEST_GRACE), report, now);
            }
            Input::Feed { key, feed } => self.feed(key, feed, now),
            Input::PumpLost { key } => self.pump_lost(key, now),
            Input::Timeout => {}
            Input::Close => self.end(),
        }
    }

    /// The next thing to do.
    pub(super) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call again, if nothing happens before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let attachment = match self.attachment {
            Attachment::Attached { catch_up } => catch_up,
            Attachment::Detached { until } => Some(until),
            Attachment::Ended => return None,
        };
        let closed = self.closed.front().map(|(at, _)| *at);
        let readers = self.readers.iter().map(|reader| reader.deadline).min();
        let guards = self.guards.values().filter_map(Guard::deadline).min();
        [attachment, closed, readers, guards].into_iter().flatten().min()
    }

    /// Whether a notification or a mark waits for a place in the connection's queue.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || self.wants_mark()
    }

    /// The next notification; processes take turns.
    pub(super) fn announce(&mut self) -> Option<Message> {
        while let Some(key) = self.unsent.pop_front() {
            let Some(process) = self.processes.get_mut(&key) else { continue };
            let Some((seq, event)) = process.log.announce() else { continue };
            let message = event.message(&process.id, seq, self.form == Form::Binary);
            if process.log.has_unsent() {
                self.unsent.push_back(key);
            }
            self.sent(key, message.size());
            return Some(message);
        }
        None
    }

    /// Whether nobody is connected to it.
    pub(super) fn is_detached(&self) -> bool {
        !matches!(self.attachment, Attachment::Attached { .. })
    }

    /// Whether a process lives.
    pub(super) fn is_live(&self) -> bool {
        self.processes.values().any(Process::is_live)
    }

    fn expire(&mut self, now: Instant) {
        match self.attachment {
            Attachment::Attached { catch_up: Some(at) } if at <= now => {
                self.give_up_missed(now);
            }
            Attachment::Detached { until } if until <= now => return self.end(),
            Attachment::Attached { .. } | Attachment::Detached { .. } | Attachment::Ended => {}
        }
        while let Some((at, key)) = self.closed.front().copied()
            && at <= now
        {
            self.closed.pop_front();
            if self.is_wanted(key, now) {
                self.closed.push_back((now + self.retention.closed, key));
            } else {
                self.forget(key);
            }
        }
        self.watch(now);
        let (due, waiting) = std::mem::take(&mut self.readers).into_iter().partition(|reader| reader.deadline <= now);
        self.readers = waiting;
        self.answer_readers(due);
    }

    /// Whether the client has not got everything of a closed process yet, and is about to: it is told, it reads, or it is one
    /// that says when it has. Such a one comes back for it as long as the session lives. The bounds of closed processes hold all
    /// the same.
    fn is_wanted(&self, key: u64, now: Instant) -> bool {
        let Some(process) = self.processes.get(&key) else { return false };
        (process.log.has_unsent() && !self.unsent.is_empty())
            || process.read_at.is_some_and(|at| now < at + self.retention.closed)
            || (self.says_when && !process.log.is_proved())
    }

    /// A connection wants the session. Whoever knows its name is its client; two at a time would not know what the other one
    /// has read, so one of them has to leave first, and only a client that says so makes it.
    fn want(&mut self, call: Call, terms: Terms, now: Instant) {
        match (self.attachment, self.successor) {
            (Attachment::Attached { .. }, None) if terms.take_over => {
                self.successor = Some((call, terms));
                self.outputs.push_back(Output::Evict);
            }
            (Attachment::Attached { .. }, _) => {
                self.outputs.push_back(Output::Doubt);
                self.reply(call, Answer::Attach(None));
            }
            (Attachment::Detached { .. } | Attachment::Ended, _) => self.attach(call, terms, now),
        }
    }

    fn attach(&mut self, call: Call, terms: Terms, now: Instant) {
        self.generation += 1;
        if let Some(kept) = terms.retention {
            self.retention = Retention { detached: kept, closed: kept };
        }
        for process in self.processes.values_mut() {
            process.log.attach();
        }
        self.delivery.begin(terms.proof);
        (self.says_when, self.form) = (terms.proof == Proof::Word, terms.form);
        // A client that acknowledges is waited for: it said so.
        let catch_up = (!self.processes.is_empty() && terms.proof != Proof::Word).then(|| now + CATCH_UP);
        self.attachment = Attachment::Attached { catch_up };
        self.reply(call, Answer::Attach(Some(self.generation)));
    }

    fn detach(&mut self, generation: u64, now: Instant) {
        if generation != self.generation || !matches!(self.attachment, Attachment::Attached { .. }) {
            return;
        }
        self.attachment = Attachment::Detached { until: now + self.retention.detached };
        self.unsent.clear();
        // Nobody is left to hear the answers. A write or an end of input that waited was not accepted, so it may be sent again.
        let gone = || RpcError::new(code::INVALID_REQUEST, "the session was detached before the call ended");
        for reader in std::mem::take(&mut self.readers) {
            self.reply(reader.call, Answer::read_failed(gone()));
        }
        for (call, _) in std::mem::take(&mut self.pages) {
            self.reply(call, Answer::read_failed(gone()));
        }
        let parked: Vec<Parked> = self.processes.values_mut().flat_map(|process| process.input.abandon()).collect();
        for parked in parked {
            match parked {
                Parked::Write { call, .. } => self.reply(call, Answer::Write(Err(gone()))),
                Parked::End { call } => self.reply(call, Answer::Done(Err(gone()))),
            }
        }
        let repeats: Vec<Call> = self.processes.values_mut().flat_map(Process::abandon_repeats).collect();
        for call in repeats {
            self.reply(call, Answer::Start(Err(gone())));
        }
        for call in self.changes.abandon() {
            self.reply(call, Answer::Done(Err(gone())));
        }
        self.delivery.begin(Proof::default());
        let keys: Vec<u64> = self.processes.keys().copied().collect();
        for key in keys {
            self.with(key, |process| process.log.detach());
            self.grant(key);
        }
        if let Some((call, terms)) = self.successor.take() {
            self.attach(call, terms, now);
        }
    }

    fn feed(&mut self, key: u64, feed: Feed, now: Instant) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        match feed {
            Feed::Output { stream, bytes } => self.output(key, stream, bytes, now),
            Feed::Exited { code, denials, failure, limits } => {
                let denials = Arc::new(denials);
                process.phase = Phase::Exited(code);
                // What ended it from outside says more than how it ended.
                process.failure = process.failure.take().or(failure);
                process.denials = Arc::clone(&denials);
                process.input.close();
                process.reached.extend(limits);
                let limits = process.reached.clone();
                let was_to_end = self.guards.get(&key).is_some_and(Guard::is_to_end);
                if self.guards.get_mut(&key).is_some_and(|guard| !guard.exited(now)) {
                    self.guards.remove(&key);
                }
                self.append(key, [Event::Exited { code, denials, limits }]);
                self.unpark(key);
                if was_to_end {
                    // It obeyed. What it left behind has had its time too.
                    self.kill(key);
                }
            }
            Feed::Closed => self.close(key, now),
            Feed::Taken { bytes } => {
                process.input.taken(bytes);
                self.unpark(key);
            }
            Feed::InputClosed => {
                process.input.close();
                self.unpark(key);
            }
        }
    }

    fn close(&mut self, key: u64, now: Instant) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        let Phase::Exited(code) = process.phase else { return };
        process.phase = Phase::Closed(code);
        self.guards.remove(&key);
        self.append(key, [Event::Closed]);
        self.closed.push_back((now + self.retention.closed, key));
        let mut bytes: usize = self.closed.iter().filter_map(|(_, key)| self.processes.get(key)).map(Process::bytes).sum();
        while (self.closed.len() > CLOSED || bytes > CLOSED_BYTES)
            && let Some((_, oldest)) = self.closed.pop_front()
        {
            bytes -= self.processes.get(&oldest).map_or(0, Process::bytes);
            self.forget(oldest);
        }
    }

    fn pump_lost(&mut self, key: u64, now: Instant) {
        let Some(process) = self.processes.get(&key) else { return };
        if process.is_live() {
            let failure = Some("the process was lost by the server and killed".to_owned());
            self.feed(key, Feed::Exited { code: 137, denials: Denials::default(), failure, limits: Vec::new() }, now);
        }
        self.close(key, now);
    }

    /// Kills everything; nothing more is answered.
    fn end(&mut self) {
        self.attachment = Attachment::Ended;
        self.unsent.clear();
        // What ended processes have left ends with the session.
        let live: Vec<u64> = self.processes.iter().filter(|(_, process)| process.is_live()).map(|(key, _)| *key).collect();
        live.into_iter().for_each(|key| self.kill(key));
        self.outputs.push_back(Output::End);
    }

    pub(super) fn append(&mut self, key: u64, events: impl IntoIterator<Item = Event>) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        let had_unsent = process.log.has_unsent();
        // All of them, before anybody who waits for news is answered with the first alone.
        if events.into_iter().filter_map(|event| process.log.append(event)).last().is_none() {
            return;
        }
        if matches!(self.attachment, Attachment::Attached { .. }) && !had_unsent {
            self.unsent.push_back(key);
        }
        let has_news = |reader: &Reader| reader.key == key && process.log.has_news(reader.wanted.after);
        if self.readers.iter().any(has_news) {
            let (due, waiting) = std::mem::take(&mut self.readers).into_iter().partition(has_news);
            self.readers = waiting;
            self.answer_readers(due);
        }
    }

    /// Ends what has run out of its time.
    fn watch(&mut self, now: Instant) {
        let due: Vec<(u64, Due)> =
            self.guards.iter_mut().filter_map(|(key, guard)| guard.due(now).map(|due| (*key, due))).collect();
        for (key, due) in due {
            match due {
                Due::Kill => self.kill(key),
                Due::Abandon(reason) => {
                    self.with(key, |process| process.failure = process.failure.take().or(Some(reason)));
                    self.outputs.push_back(Output::Abandon { key });
                }
                Due::Interrupt(reason) => {
                    self.with(key, |process| process.failure = Some(reason));
                    if self.processes.get(&key).is_some_and(|process| process.phase == Phase::Running) {
                        self.outputs.push_back(Output::Signal { key, signal: Signal::INTERRUPT });
                    }
                }
            }
        }
    }

    pub(super) fn forget(&mut self, key: u64) {
        self.guards.remove(&key);
        if let Some(process) = self.processes.remove(&key) {
            self.keys.remove(&process.id);
            self.outputs.push_back(Output::Forget { key });
        }
    }

    pub(super) fn with(&mut self, key: u64, once: impl FnOnce(&mut Process)) {
        self.processes.get_mut(&key).map(once);
    }
}

/// What still matters after the end: how far the killed have come.
fn is_of_a_process(input: &Input) -> bool {
    matches!(input, Input::Feed { .. } | Input::Started { .. } | Input::StartFailed { .. } | Input::PumpLost { .. })
}

#[cfg(test)]
mod tests;

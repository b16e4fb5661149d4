//! How a session finds out that what it sent has arrived. Sans-IO.
//!
//! A client whose link answers pings does so in order, so a ping behind notifications, a **mark**, says with its answer that
//! everything before it has arrived. A mark is set when enough was sent since the last one, and behind a page that a client
//! was handed to catch up. An answer speaks for all marks before it too: a peer may leave out the answers to older pings.

use super::message::{Answer, Call, Output};
use super::process::Process;
use super::state::{Attachment, State};
use portcullis_protocol::logged::AcknowledgeParams;
use portcullis_protocol::rpc::{RpcError, code};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Bytes of notifications from one mark to the next: a small part of what a process may be ahead of its client.
const MARK_EVERY: usize = 256 << 10;

/// Marks on their way; with more, the next waits and covers more.
const MARKS: usize = 64;

/// Pages that were answered and not handed out yet. The calls in flight of a connection bound them before that.
const PAGES: usize = 1024;

/// How long a client may leave what it missed unread while a process waits for that, before it is kept no longer than the
/// rest: without this end, a client that never pages would stop the process for ever. While pages are read or on their way, the
/// time begins anew. What no process waits for is kept.
pub(super) const CATCH_UP: Duration = Duration::from_secs(60);

/// What shows that a client has what it was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Nothing does, so sending must be enough: on links that end with their session.
    #[default]
    Sent,
    /// An answer to a mark behind it.
    Mark,
    /// Nothing but the client's own word, in `process/acknowledge` and `afterSeq`.
    Word,
}

/// What was sent over the attached connection and is not known to have arrived.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    pub(super) proof: Proof,
    /// Never used again, so that an answer to a mark of an earlier connection means nothing.
    next_number: u64,
    /// Bytes since the last mark.
    bytes: usize,
    /// How far which process was told since the last mark.
    told: HashMap<u64, u64>,
    /// A page is among that.
    has_page: bool,
    marks: VecDeque<Mark>,
    /// Pages that were answered: by number, which process, and how far.
    pages: HashMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Mark {
    number: u64,
    told: HashMap<u64, u64>,
    has_page: bool,
}

impl Delivery {
    /// Nothing was sent over a connection that begins.
    pub(super) fn begin(&mut self, proof: Proof) {
        *self = Self { proof, next_number: self.next_number, ..Self::default() };
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn has_pages(&self) -> bool {
        self.has_page || !self.pages.is_empty() || self.marks.iter().any(|mark| mark.has_page)
    }
}

impl State {
    /// Whether a mark is due.
    pub(super) fn wants_mark(&self) -> bool {
        let Delivery { bytes, told, has_page, marks, .. } = &self.delivery;
        (*bytes >= MARK_EVERY || *has_page) && !told.is_empty() && marks.len() < MARKS
    }

    /// Sets a mark that is due behind everything that was sent, and answers its number.
    pub(super) fn mark(&mut self) -> Option<u64> {
        self.wants_mark().then(|| {
            let number = self.delivery.number();
            let (told, has_page) = (std::mem::take(&mut self.delivery.told), std::mem::take(&mut self.delivery.has_page));
            self.delivery.bytes = 0;
            self.delivery.marks.push_back(Mark { number, told, has_page });
            number
        })
    }

    /// A notification about a process was sent.
    pub(super) fn sent(&mut self, key: u64, bytes: usize) {
        match self.delivery.proof {
            Proof::Sent => self.told(key),
            Proof::Mark => {
                self.delivery.bytes += bytes;
                self.told(key);
            }
            Proof::Word => {}
        }
    }

    /// A mark was answered.
    pub(super) fn delivered(&mut self, generation: u64, number: u64) {
        if generation != self.generation || !self.delivery.marks.iter().any(|mark| mark.number == number) {
            return;
        }
        while let Some(mark) = self.delivery.marks.pop_front() {
            for (key, seq) in mark.told {
                self.with(key, |process| process.log.deliver(seq));
                self.grant(key);
            }
            if mark.number == number {
                break;
            }
        }
    }

    /// Whether a page is to be reported once it was handed out, and under which number: it is if its client catches up by it.
    pub(super) fn receipt(&mut self, key: u64, seq: u64) -> Option<u64> {
        let log = &self.processes.get(&key)?.log;
        let counts = log.is_behind() && seq > log.told() && self.delivery.proof != Proof::Word;
        (counts && self.delivery.pages.len() < PAGES).then(|| {
            let number = self.delivery.number();
            self.delivery.pages.insert(number, (key, seq));
            number
        })
    }

    /// A page is in the connection's queue: whatever is sent from now on is behind it.
    pub(super) fn handed_out(&mut self, generation: u64, page: u64) {
        if generation != self.generation {
            return;
        }
        let Some((key, seq)) = self.delivery.pages.remove(&page) else { return };
        self.with(key, |process| process.log.tell(seq));
        self.delivery.has_page = self.delivery.proof == Proof::Mark;
        self.told(key);
    }

    /// The client says how far it has come.
    pub(super) fn acknowledge(&mut self, call: Call, params: &AcknowledgeParams) {
        let AcknowledgeParams { process_id, seq } = params;
        let error = match self.named(process_id) {
            None => Some(RpcError::new(code::INVALID_REQUEST, format!("unknown process id {process_id}"))),
            Some((_, process)) if *seq > process.log.last() => Some(from_the_future(process_id, *seq, process.log.last())),
            Some((key, _)) => {
                self.prove(key, *seq);
                None
            }
        };
        self.reply(call, Answer::Done(error.map_or(Ok(()), Err)));
    }

    /// The client of a process has everything up to `seq`.
    pub(super) fn prove(&mut self, key: u64, seq: u64) {
        self.keep_up(key, |process| process.log.prove(seq));
        self.grant(key);
    }

    /// Does something by which a client may have been told all that it missed. Then what it was sent meanwhile counts too, and
    /// nothing may follow that brings a mark: so one is due.
    fn keep_up(&mut self, key: u64, once: impl FnOnce(&mut Process)) {
        let was_behind = self.processes.get(&key).is_some_and(|process| process.log.is_behind());
        self.with(key, once);
        if was_behind && self.processes.get(&key).is_some_and(|process| !process.log.is_behind()) {
            self.told(key);
            self.delivery.has_page |= self.delivery.proof == Proof::Mark;
        }
    }

    /// A client reads what it missed: it gets its time anew.
    pub(super) fn catches_up(&mut self, now: Instant) {
        if let Attachment::Attached { catch_up: catch_up @ Some(_) } = &mut self.attachment {
            *catch_up = Some(now + CATCH_UP);
        }
    }

    /// The time to catch up is over.
    pub(super) fn give_up_missed(&mut self, now: Instant) {
        if self.delivery.has_pages() || !self.pages.is_empty() {
            return self.catches_up(now);
        }
        let keys: Vec<u64> = self.processes.keys().copied().collect();
        for key in keys {
            self.keep_up(key, |process| {
                if process.log.room() == 0 {
                    process.log.give_up_missed();
                }
            });
            self.grant(key);
        }
        let is_behind = self.processes.values().any(|process| process.log.is_behind());
        self.attachment = Attachment::Attached { catch_up: is_behind.then(|| now + CATCH_UP) };
    }

    fn told(&mut self, key: u64) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        let told = process.log.told();
        match self.delivery.proof {
            Proof::Sent => {
                process.log.deliver(told);
                self.grant(key);
            }
            Proof::Mark => drop(self.delivery.told.insert(key, told)),
            Proof::Word => {}
        }
    }

    /// Gives a process the room that it has now, and its spool what there is to do.
    pub(super) fn grant(&mut self, key: u64) {
        let quota = self.limits.session.saturating_sub(if self.wants_spool(key) { self.spooled() } else { 0 });
        let Some(process) = self.processes.get_mut(&key) else { return };
        if let Some(write) = process.log.relieve(quota) {
            self.outputs.push_back(Output::Spool { key, write });
        }
        if process.log.has_drained() {
            self.outputs.push_back(Output::SpoolDrained { key });
        }
        if let Some(total) = process.grant() {
            self.outputs.push_back(Output::Grant { key, total });
        }
    }

    /// What was to be written to a spool is there, or not.
    pub(super) fn spool_written(&mut self, key: u64, is_written: bool) {
        self.with(key, |process| process.log.written(is_written));
        self.grant(key);
    }

    fn wants_spool(&self, key: u64) -> bool {
        self.processes.get(&key).is_some_and(|process| process.log.wants_spool())
    }

    fn spooled(&self) -> u64 {
        self.processes.values().map(|process| process.log.spooled()).sum()
    }
}

/// Of a cursor behind which nothing can be.
pub(super) fn from_the_future(process: &str, seq: u64, last: u64) -> RpcError {
    RpcError::new(code::INVALID_PARAMS, format!("process {process} has no event {seq} yet: its last is {last}"))
}

#[cfg(test)]
impl State {
    pub(super) fn delivery_is_empty(&self) -> bool {
        let Delivery { told, marks, pages, .. } = &self.delivery;
        told.is_empty() && marks.is_empty() && pages.is_empty()
    }
}

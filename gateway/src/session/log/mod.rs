//! The events of one process: numbered from 1 without holes, kept for a while, read from any cursor.
//!
//! # What may be forgotten
//! What was sent is not yet received: a cut loses what is in our queue and in the buffers of both sockets. So there are two
//! cursors. `sent` is the last event that was announced, or passed over because nobody was attached when it happened.
//! `released` is the last one that may be forgotten, and it moves by evidence only:
//!
//! * **proved**: the client said that it has everything up to there, by the `afterSeq` of a read or by `process/acknowledge`.
//!   A cursor from the future proves nothing.
//! * **told and delivered**: `told` is how far the client of this attachment was told without a hole: what it proved, then
//!   what it was handed in pages, and once that reaches what happened before it came (`missed`), everything that is announced.
//!   What was told is delivered when something that was sent behind it was answered, which the session finds out (see
//!   [`super::delivery`]). For a client that acknowledges, nothing is delivered but what it proved.
//!
//! A client that resumes and pages once, from what it saw last to the end, has thereby been told all: from then on its live
//! notifications are told too. What it never pages is given up by the session if its process has waited for that for a while.
//!
//! Behind `released`, the newest 4 MiB stay all the same.
//!
//! # Where events are
//! In memory, or in slots of a spool file while nobody is attached (see [`overflow`]). Whoever reads gets a [`page::Draft`],
//! which says which slots it needs.

mod overflow;
mod page;

pub(crate) use overflow::{Limits, Write};
pub(crate) use page::{Draft, Extent, Wanted};

use crate::process::pump::CHUNK;
use overflow::{Overflow, Segment};
use portcullis_protocol::event::Event;
use std::collections::VecDeque;

/// This much of the newest released output stays. It is 512 chunks of full size, more than a client holds back while it waits
/// for a hole to be filled.
const KEPT_BYTES: usize = 512 * 8192;

/// Tiny chunks cost more than their bytes, so this many events are enough, however little they hold.
const KEPT_EVENTS: u64 = 50_000;

/// A log with this much output in memory that is not released gives no more room. A link that takes 100 ms to answer and back
/// then carries 40 MiB a second.
const UNRELEASED_BYTES: usize = 512 * 8192;

/// The same for events, of which a byte of room brings one at most. It is what a pump may be ahead.
const UNRELEASED_EVENTS: u64 = 128 * 1024;

/// The log of one process.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    /// In order. What lies between two runs is the hole.
    runs: VecDeque<Run>,
    last: u64,
    /// Events 1 to this were forgotten, and so many bytes of output with them.
    forgotten: u64,
    forgotten_bytes: u64,
    /// What is in memory, and what of it is released.
    held: Tally,
    held_released: Tally,
    /// What is spooled and released.
    spooled_released: Tally,
    sent: u64,
    released: u64,
    proved: u64,
    told: u64,
    missed: u64,
    closed: bool,
    overflow: Overflow,
}

/// Events one after the other in the same place; never empty.
#[derive(Debug)]
enum Run {
    Held { first: u64, events: VecDeque<Event> },
    Spooled(Segment),
}

impl Run {
    fn first(&self) -> u64 {
        match self {
            Self::Held { first, .. } | Self::Spooled(Segment { first, .. }) => *first,
        }
    }

    fn last(&self) -> u64 {
        match self {
            Self::Held { first, events } => first + count(events.len()) - 1,
            Self::Spooled(Segment { first, events, .. }) => first + events - 1,
        }
    }
}

/// Events and their bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Tally {
    events: u64,
    bytes: usize,
}

impl Tally {
    fn add(&mut self, events: u64, bytes: usize) {
        self.events += events;
        self.bytes += bytes;
    }

    fn take(&mut self, events: u64, bytes: usize) {
        self.events -= events;
        self.bytes -= bytes;
    }
}

impl EventLog {
    /// A log that may spool, and drop, as its process was started.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { overflow: Overflow::new(limits), ..Self::default() }
    }

    /// Adds an event and answers the number of the newest. Nothing can follow Closed: such an event is dropped and has no
    /// number. Output that nobody can have seen the end of grows while nobody is attached, so that a process that writes
    /// little by little costs no more than its bytes.
    pub(crate) fn append(&mut self, event: Event) -> Option<u64> {
        if self.closed {
            return None;
        }
        self.closed = event == Event::Closed;
        let size = event.size();
        if self.grow(&event) {
            self.held.add(0, size);
            return Some(self.last);
        }
        self.last += 1;
        self.held.add(1, size);
        match self.runs.back_mut() {
            Some(Run::Held { first, events }) if *first + count(events.len()) == self.last => events.push_back(event),
            Some(_) | None => self.runs.push_back(Run::Held { first: self.last, events: [event].into() }),
        }
        Some(self.last)
    }

    /// Whether a reader at `after` would learn anything: output, the exit or the close behind it, or that all is over.
    pub(crate) fn has_news(&self, after: u64) -> bool {
        self.closed || self.last > after
    }

    /// The number of the newest event; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Takes the next event to announce, with its number. What happened since the client came is always in memory.
    pub(crate) fn announce(&mut self) -> Option<(u64, Event)> {
        let seq = self.sent + 1;
        let Run::Held { first, events } = self.runs.get(self.run_of(seq))? else { return None };
        let event = events.get(place(seq.checked_sub(*first)?))?.clone();
        self.sent = seq;
        self.tell(0);
        self.release(self.proved);
        Some((seq, event))
    }

    /// Whether there is something to announce.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.last
    }

    /// A client attached: it gets what happens from now on. What it missed stays until it proved or was told that.
    pub(crate) fn attach(&mut self) {
        self.overflow.attach();
        (self.sent, self.missed, self.told) = (self.last, self.last, self.released.max(self.proved));
        self.release(self.proved);
        self.tell(0);
    }

    /// The client is gone.
    pub(crate) fn detach(&mut self) {
        let has_caught_up = !self.is_behind();
        self.overflow.detach(self.last, has_caught_up.then_some(self.sent));
    }

    /// The client has everything up to `seq`, as it says itself; not if there is no such event yet.
    pub(crate) fn prove(&mut self, seq: u64) {
        if seq > self.last {
            return;
        }
        self.proved = self.proved.max(seq);
        self.tell(seq);
        self.release(seq);
    }

    /// The client was handed everything up to `seq` in a page that began at what it proved.
    pub(crate) fn tell(&mut self, seq: u64) {
        self.told = self.told.max(seq.min(self.last));
        if !self.is_behind() {
            self.told = self.told.max(self.sent);
        }
    }

    /// Whether the client said that it has everything.
    pub(crate) fn is_proved(&self) -> bool {
        self.proved >= self.last
    }

    /// What the client of this attachment was told without a hole.
    pub(crate) fn told(&self) -> u64 {
        self.told
    }

    /// Whether the client that attached has not been told yet what it missed.
    pub(crate) fn is_behind(&self) -> bool {
        self.told < self.missed
    }

    /// What was told up to `seq` has arrived.
    pub(crate) fn deliver(&mut self, seq: u64) {
        self.release(seq.min(self.told));
    }

    /// The client that attached does not ask for what it missed: it waits for its turn to be forgotten like the rest.
    pub(crate) fn give_up_missed(&mut self) {
        let missed = self.missed;
        self.tell(missed);
        self.release(missed);
    }

    /// Bytes that the log takes before it is full. Exit and close find room in any case.
    pub(crate) fn room(&self) -> usize {
        let Tally { events, bytes } = self.unreleased();
        let room = UNRELEASED_BYTES.saturating_sub(bytes).min(place(UNRELEASED_EVENTS.saturating_sub(events)));
        room.max(self.room_by_dropping())
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.held.bytes
    }

    /// In memory, and not released.
    fn unreleased(&self) -> Tally {
        let Tally { events, bytes } = self.held_released;
        Tally { events: self.held.events - events, bytes: self.held.bytes - bytes }
    }

    /// Adds output to the newest event if nobody was shown that yet, and says whether it did.
    fn grow(&mut self, event: &Event) -> bool {
        let is_hidden = self.overflow.is_hidden(self.last);
        let (Event::Output { stream, chunk }, Some(Run::Held { events, .. })) = (event, self.runs.back_mut()) else {
            return false;
        };
        match events.back_mut() {
            Some(Event::Output { stream: of, chunk: earlier })
                if is_hidden && of == stream && earlier.len() + chunk.len() <= CHUNK =>
            {
                // Copied only if another event of the same read is still there. What else was read with it may be gone: its room goes
                // too.
                let mut more = Vec::from(std::mem::take(earlier));
                if more.capacity() > 2 * CHUNK {
                    more.shrink_to(CHUNK);
                }
                more.extend_from_slice(chunk);
                *earlier = more.into();
                true
            }
            _ => false,
        }
    }

    /// What was not sent is not released: it is still to be announced.
    fn release(&mut self, seq: u64) {
        let (from, to) = (self.released, seq.min(self.sent));
        if to <= from {
            return;
        }
        self.released = to;
        let begin = self.run_of(from + 1);
        for run in self.runs.range(begin..) {
            match run {
                run if run.first() > to => break,
                Run::Held { first, events } => {
                    let (begin, end) = (from.saturating_sub(first - 1), (to + 1 - first).min(count(events.len())));
                    for event in events.range(place(begin)..place(end)) {
                        self.held_released.add(1, event.size());
                    }
                }
                Run::Spooled(Segment { events, output, .. }) if run.last() <= to => self.spooled_released.add(*events, *output),
                // It counts once all of it is.
                Run::Spooled(_) => {}
            }
        }
        self.forget();
    }

    /// Forgets the oldest of what was released. What is not released takes no room from what is kept: a process that goes on
    /// while its client is away does not push out what the client was sent last.
    fn forget(&mut self) {
        loop {
            self.forget_hole();
            let (events, size) = match self.runs.front() {
                Some(Run::Held { first, events }) if *first <= self.released => (1, events[0].size()),
                Some(run @ Run::Spooled(segment)) if run.last() <= self.released => (segment.events, segment.output),
                _ => return,
            };
            let kept = Tally {
                events: self.held_released.events + self.spooled_released.events,
                bytes: self.held_released.bytes + self.spooled_released.bytes,
            };
            if kept.bytes - size < KEPT_BYTES && kept.events - events < KEPT_EVENTS {
                return;
            }
            self.forget_oldest();
        }
    }

    /// Forgets the oldest event, or the slot that holds it, which must be released.
    fn forget_oldest(&mut self) {
        let (last, output) = match self.runs.front_mut() {
            None => return,
            Some(Run::Spooled(segment)) => {
                let segment = *segment;
                self.spooled_released.take(segment.events, segment.output);
                self.overflow.free(&segment);
                self.runs.pop_front();
                (segment.last(), segment.output)
            }
            Some(Run::Held { first, events }) => {
                let oldest = events.pop_front();
                let (seq, is_over) = (*first, events.is_empty());
                *first += 1;
                let size = oldest.as_ref().map_or(0, Event::size);
                self.held.take(1, size);
                self.held_released.take(1, size);
                if is_over {
                    self.runs.pop_front();
                }
                (seq, oldest.as_ref().map_or(0, output_size))
            }
        };
        self.forgotten = last;
        self.forgotten_bytes += bytes(output);
    }

    /// The index of the run that holds an event, or of the first behind it.
    fn run_of(&self, seq: u64) -> usize {
        self.runs.partition_point(|run| run.last() < seq)
    }
}

/// Bytes of output of an event.
fn output_size(event: &Event) -> usize {
    match event {
        Event::Output { chunk, .. } => chunk.len(),
        Event::Exited { .. } | Event::Closed => 0,
    }
}

/// A number of events as an index; what is too large for one is beyond every end.
fn place(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

fn bytes(length: usize) -> u64 {
    count(length)
}

#[cfg(test)]
mod tests;

//! What becomes of output for which there is no room in memory while nobody is attached.
//!
//! The oldest output that is not released moves to the spool, a file in slots of one size, so that any of them can be given
//! back alone. It stays in memory until it is written: a write that fails loses nothing, and from then on the spool counts as
//! full. When it is full the process waits, or, if its start said so, the oldest goes that no client was sent, which leaves
//! one hole: it begins behind what clients were sent, and what follows it is dropped next, until a client has passed it.
//! The exit is never dropped; a hole that has grown up to it grows no more.

use super::{EventLog, Run, Tally, UNRELEASED_BYTES, UNRELEASED_EVENTS, bytes, count, output_size, place};
use bytes::Bytes;
use portcullis_protocol::event::{Event, Stream};
use portcullis_protocol::logged::WhenFull;
use std::collections::VecDeque;

/// Bytes of a slot: large enough that writing it costs little beside its bytes, small enough to be read for one short page.
pub(crate) const SLOT: u64 = 256 << 10;

/// From here on what is in memory moves to the spool, so that the process need not wait for the disk.
const SPOOL_FROM: Tally = Tally { events: UNRELEASED_EVENTS / 2, bytes: UNRELEASED_BYTES / 2 };

/// Events in a spool: their bytes alone would not bound the text of a page.
const SPOOLED_EVENTS: u64 = 512 * 1024;

/// A log that drops does so from here on, so that the process need not wait for it.
const DROP_FROM: Tally = Tally { events: UNRELEASED_EVENTS / 8 * 7, bytes: UNRELEASED_BYTES / 8 * 7 };

/// A log that drops keeps at least this much of the newest in memory, even if all other memory holds what was sent.
const UNSENT_BYTES: usize = 1 << 20;

/// Before each event in a slot: its stream and its length.
const HEADER: usize = 5;

/// What a log may do when memory is full.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Limits {
    /// Of its spool, in bytes; less than a slot is none.
    pub(crate) spool_bytes: u64,
    /// What its start said.
    pub(crate) when_full: WhenFull,
}

/// Events in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) first: u64,
    pub(super) events: u64,
    /// Bytes of output.
    pub(super) output: usize,
    slot: u64,
    length: usize,
}

/// Something to be written to the spool; [`EventLog::written`] must follow.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Events that were dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hole {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

/// The state of it.
#[derive(Debug, Default)]
pub(super) struct Overflow {
    limits: Limits,
    /// While nobody is attached: the last event that somebody may have been shown.
    shown: Option<u64>,
    /// Up to here clients were sent something, when the first of them left that had caught up.
    base: u64,
    pub(super) hole: Option<Hole>,
    /// Slots that were used before.
    free: Vec<u64>,
    /// Slots that were used ever.
    slots: u64,
    used: u64,
    events: u64,
    writing: Option<Segment>,
    has_failed: bool,
}

impl Segment {
    pub(super) fn last(&self) -> u64 {
        self.first + self.events - 1
    }

    pub(super) fn extent(&self) -> (u64, usize) {
        (self.slot * SLOT, self.length)
    }

    /// The events of a slot, from what was read of it.
    pub(super) fn decode(&self, mut read: &[u8]) -> Option<Vec<(u64, Event)>> {
        let mut events = Vec::with_capacity(place(self.events));
        for seq in self.first..=self.last() {
            let ([stream, length @ ..], rest) = read.split_first_chunk::<HEADER>()?;
            let (chunk, rest) = rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
            let stream = [Stream::Stdout, Stream::Stderr, Stream::Pty].into_iter().find(|known| tag(*known) == *stream)?;
            events.push((seq, Event::Output { stream, chunk: Bytes::copy_from_slice(chunk) }));
            read = rest;
        }
        read.is_empty().then_some(events)
    }
}

impl Overflow {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    pub(super) fn attach(&mut self) {
        self.shown = None;
    }

    /// `sent` if the client had caught up.
    pub(super) fn detach(&mut self, last: u64, sent: Option<u64>) {
        self.shown = Some(last);
        if let Some(sent) = sent
            && self.hole.is_none()
        {
            self.base = sent;
        }
    }

    /// Whether nobody can have been shown this event, and nobody is about to write it.
    pub(super) fn is_hidden(&self, seq: u64) -> bool {
        self.shown.is_some_and(|shown| seq > shown) && self.writing.is_none_or(|writing| seq > writing.last())
    }

    /// Gives a slot back.
    pub(super) fn free(&mut self, segment: &Segment) {
        self.events -= segment.events;
        self.free_slot(segment.slot);
    }

    fn free_slot(&mut self, slot: u64) {
        self.free.push(slot);
        self.used -= 1;
    }

    fn take_slot(&mut self) -> Option<u64> {
        let slot = self.free.pop().or_else(|| {
            let slot = self.slots;
            (slot < self.limits.spool_bytes / SLOT).then(|| {
                self.slots += 1;
                slot
            })
        })?;
        self.used += 1;
        Some(slot)
    }

    fn drops(&self) -> bool {
        self.limits.when_full == WhenFull::DropOldest && self.shown.is_some()
    }
}

impl EventLog {
    /// Bytes of the spool's slots in use.
    pub(crate) fn spooled(&self) -> u64 {
        self.overflow.used * SLOT
    }

    /// Whether something is to be written to the spool, if there is room there.
    pub(crate) fn wants_spool(&self) -> bool {
        let Overflow { shown, writing, has_failed, limits, .. } = &self.overflow;
        let unreleased = self.unreleased();
        let is_time = unreleased.bytes >= SPOOL_FROM.bytes || unreleased.events >= SPOOL_FROM.events;
        shown.is_some() && writing.is_none() && !has_failed && is_time && limits.spool_bytes >= SLOT
    }

    /// What is to be done now that there may be too much in memory: something to write, if `quota` more bytes may be used.
    pub(crate) fn relieve(&mut self, quota: u64) -> Option<Write> {
        let used = self.overflow.used;
        loop {
            // What was dropped meanwhile gives its slot back.
            let freed = used.saturating_sub(self.overflow.used) * SLOT;
            if let Some(write) = self.spool(quota.saturating_add(freed)) {
                return Some(write);
            }
            if self.overflow.writing.is_some() || !self.is_tight() || !self.drop_oldest() {
                return None;
            }
        }
    }

    /// What [`Self::relieve`] gave was written, or not.
    pub(crate) fn written(&mut self, is_written: bool) {
        let Some(segment) = self.overflow.writing.take() else { return };
        // What a client has meanwhile needs no slot: it is on its way out.
        if !is_written || self.released >= segment.first {
            self.overflow.has_failed |= !is_written;
            return self.overflow.free_slot(segment.slot);
        }
        let at = self.run_of(segment.first);
        let Some(Run::Held { first, events }) = self.runs.get_mut(at) else { return };
        let first = *first;
        let mut spooled = events.split_off(place(segment.first - first));
        let behind = spooled.split_off(place(segment.events));
        let is_first = events.is_empty();
        self.held.take(segment.events, segment.output);
        self.overflow.events += segment.events;
        if is_first {
            self.runs[at] = Run::Spooled(segment);
        } else {
            self.runs.insert(at + 1, Run::Spooled(segment));
        }
        if !behind.is_empty() {
            self.runs.insert(at + if is_first { 1 } else { 2 }, Run::Held { first: segment.last() + 1, events: behind });
        }
    }

    /// Whether the spool was used and is not any more; asked once.
    pub(crate) fn has_drained(&mut self) -> bool {
        let Overflow { free, slots, used, .. } = &mut self.overflow;
        let has_drained = *slots > 0 && *used == 0;
        if has_drained {
            free.clear();
            *slots = 0;
        }
        has_drained
    }

    /// What dropping makes sure of: room for the newest, as long as there is something to drop.
    pub(super) fn room_by_dropping(&self) -> usize {
        let floor = self.overflow.hole.map_or(self.overflow.base, |hole| hole.to).max(self.released);
        if !self.overflow.drops() || self.overflow.writing.is_some() || self.is_barred(floor) {
            return 0;
        }
        let unsent = self.runs.range(self.run_of(floor + 1)..).map(|run| match run {
            Run::Held { first, events } => {
                let begin = (floor + 1).saturating_sub(*first);
                events.range(place(begin).min(events.len())..).map(Event::size).sum()
            }
            Run::Spooled(_) => 0,
        });
        UNSENT_BYTES.saturating_sub(unsent.sum())
    }

    /// Takes what a client has passed out of the log, once nothing before it is kept.
    pub(super) fn forget_hole(&mut self) {
        if let Some(Hole { from, to, bytes }) = self.overflow.hole
            && from == self.forgotten + 1
            && to <= self.released
        {
            self.forgotten = to;
            self.forgotten_bytes += bytes;
            self.overflow.hole = None;
        }
    }

    /// Begins to write the oldest output that is not released, as much as a slot takes.
    fn spool(&mut self, quota: u64) -> Option<Write> {
        if !self.wants_spool() || quota < SLOT || self.overflow.events >= SPOOLED_EVENTS {
            return None;
        }
        let base = self.overflow.base;
        let (first, found) = self.runs.range(self.run_of(self.released + 1)..).find_map(|run| {
            let Run::Held { first, events } = run else { return None };
            let begin = (self.released + 1).saturating_sub(*first);
            let at = (place(begin)..events.len()).find(|at| fits(&events[*at], 0))?;
            Some((first + count(at), events.range(at..)))
        })?;
        let (mut bytes, mut events, mut output) = (Vec::new(), 0, 0);
        for event in found {
            let Event::Output { stream, chunk } = event else { break };
            // A slot holds what was sent or what was not: else it could not be dropped alone.
            if !fits(event, bytes.len()) || (events > 0 && first + events == base + 1) {
                break;
            }
            bytes.push(tag(*stream));
            bytes.extend(u32::try_from(chunk.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend_from_slice(chunk);
            (events, output) = (events + 1, output + chunk.len());
        }
        let slot = self.overflow.take_slot()?;
        self.overflow.writing = Some(Segment { first, events, output, slot, length: bytes.len() });
        Some(Write { at: slot * SLOT, bytes })
    }

    /// Whether it is time to drop something.
    fn is_tight(&self) -> bool {
        let Tally { events, bytes } = self.unreleased();
        (events >= DROP_FROM.events || bytes >= DROP_FROM.bytes) && self.room_by_dropping() < UNSENT_BYTES / 2
    }

    /// Whether a hole has grown up to what cannot be dropped.
    fn is_barred(&self, floor: u64) -> bool {
        let next = self.runs.get(self.run_of(floor + 1));
        match (self.overflow.hole, next) {
            (Some(hole), Some(Run::Held { first, events })) if hole.to > self.released => {
                !matches!(events.get(place((floor + 1).saturating_sub(*first))), None | Some(Event::Output { .. }))
            }
            _ => false,
        }
    }

    /// Drops the oldest event that no client was sent, or the slot that holds it, and says whether there was one.
    fn drop_oldest(&mut self) -> bool {
        if !self.overflow.drops() || self.overflow.writing.is_some() {
            return false;
        }
        let hole = self.overflow.hole.filter(|hole| hole.to > self.released);
        let floor = hole.map_or(self.overflow.base, |hole| hole.to).max(self.released);
        // Only what follows a hole makes it larger; a new one begins where it can.
        let is_next = |first: u64| hole.is_none_or(|hole| first == hole.to + 1);
        let found = self.runs.range(self.run_of(floor + 1)..).find_map(|run| match run {
            Run::Spooled(segment) => (segment.first > floor).then_some((segment.first, segment.events, segment.output)),
            Run::Held { first, events } => {
                let begin = (floor + 1).saturating_sub(*first);
                let index = (place(begin)..events.len()).find(|index| matches!(events[*index], Event::Output { .. }))?;
                Some((first + count(index), 1, output_size(&events[index])))
            }
        });
        let Some((first, events, output)) = found.filter(|(first, ..)| is_next(*first)) else { return false };
        // One hole is enough: what is before one that a client has passed is forgotten before the next begins.
        while hole.is_none() && self.overflow.hole.is_some_and(|passed| self.forgotten < passed.from - 1) {
            self.forget_oldest();
        }
        self.forget_hole();
        self.cut(first);
        let from = hole.map_or(first, |hole| hole.from);
        let dropped = hole.map_or(0, |hole| hole.bytes) + bytes(output);
        self.overflow.hole = Some(Hole { from, to: first + events - 1, bytes: dropped });
        true
    }

    /// Takes the event `first`, or the slot that begins with it, out of a run.
    fn cut(&mut self, seq: u64) {
        let at = self.run_of(seq);
        match &mut self.runs[at] {
            Run::Spooled(segment) => {
                let segment = *segment;
                self.overflow.free(&segment);
                self.runs.remove(at);
            }
            Run::Held { first, events } => {
                let first = *first;
                let mut behind: VecDeque<Event> = events.split_off(place(seq - first));
                let size = behind.pop_front().map_or(0, |event| event.size());
                let is_first = events.is_empty();
                self.held.take(1, size);
                match (is_first, behind.is_empty()) {
                    (true, true) => drop(self.runs.remove(at)),
                    (true, false) => self.runs[at] = Run::Held { first: seq + 1, events: behind },
                    (false, true) => {}
                    (false, false) => self.runs.insert(at + 1, Run::Held { first: seq + 1, events: behind }),
                }
            }
        }
    }
}

/// Whether an event is output that finds place in a slot behind so many bytes.
fn fits(event: &Event, used: usize) -> bool {
    matches!(event, Event::Output { chunk, .. } if bytes(used + HEADER + chunk.len()) <= SLOT)
}

fn tag(stream: Stream) -> u8 {
    match stream {
        Stream::Stdout => 1,
        Stream::Stderr => 2,
        Stream::Pty => 3,
    }
}

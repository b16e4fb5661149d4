//! Pages: what a reader gets of a log.

use super::overflow::{Hole, Segment};
use super::{EventLog, Run, bytes, output_size, place};
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Event;
use portcullis_protocol::logged::{Gap, LoggedEvent};
use portcullis_protocol::process::{OutputChunk, ReadResult};

/// Bytes of output and events in a page of events: a bound whatever the reader asked for.
const PAGE_BYTES: u64 = 1 << 20;
const PAGE_EVENTS: usize = 8192;

/// What an event costs in the text of a page beside its output.
const EVENT_TEXT: usize = 96;

/// What a reader wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) after: u64,
    pub(crate) max_bytes: Option<u64>,
    /// Every event, instead of the output alone.
    pub(crate) events: bool,
}

impl Wanted {
    fn bytes(&self) -> u64 {
        let max = self.max_bytes.unwrap_or(u64::MAX);
        if self.events { max.min(PAGE_BYTES) } else { max }
    }
}

/// Where a slot lies in the spool, and how much of it is used.
pub(crate) type Extent = (u64, usize);

/// A page whose slots are still to be read.
#[derive(Debug)]
pub(crate) struct Draft {
    wanted: Wanted,
    parts: Vec<Part>,
    last: u64,
}

#[derive(Debug)]
enum Part {
    Gap(Gap),
    Event(u64, Event),
    Segment(Segment),
}

enum Piece<'log> {
    Gap(Gap),
    Event(u64, &'log Event),
    Segment(&'log Segment),
}

impl EventLog {
    /// The output that a page may hold, and the bytes of its text, at most.
    pub(crate) fn weigh(&self, wanted: Wanted) -> usize {
        let mut text = 0;
        self.pieces(wanted, |piece| {
            let (events, output) = match piece {
                Piece::Gap(_) => (1, 0),
                Piece::Event(_, event) => (1, event.size()),
                Piece::Segment(segment) => (place(segment.events), segment.output),
            };
            text += output.div_ceil(3) * 4 + events * EVENT_TEXT;
        });
        text
    }

    /// A page, all but the slots that it needs.
    pub(crate) fn draft(&self, wanted: Wanted) -> Draft {
        let mut parts = Vec::new();
        self.pieces(wanted, |piece| {
            parts.push(match piece {
                Piece::Gap(gap) => Part::Gap(gap),
                Piece::Event(seq, event) => Part::Event(seq, event.clone()),
                Piece::Segment(segment) => Part::Segment(*segment),
            });
        });
        Draft { wanted, parts, last: self.last }
    }

    /// Everything behind the reader's cursor that its page may hold, in order, and maybe a little more.
    fn pieces<'log>(&'log self, wanted: Wanted, mut take: impl FnMut(Piece<'log>)) {
        let (mut next, mut left, mut some) = (wanted.after.saturating_add(1), wanted.bytes(), false);
        for run in self.runs.range(self.run_of(next)..) {
            // The first event comes whatever it holds.
            if left == 0 && some {
                return;
            }
            if run.first() > next {
                take(Piece::Gap(self.gap(next, run.first() - 1)));
            }
            match run {
                Run::Held { first, events } => {
                    let skip = place(next.saturating_sub(*first));
                    for (seq, event) in (first + next.saturating_sub(*first)..).zip(events.range(skip..)) {
                        let size = bytes(output_size(event));
                        if some && size > left {
                            return take(Piece::Event(seq, event));
                        }
                        left = left.saturating_sub(size);
                        some |= size > 0;
                        take(Piece::Event(seq, event));
                    }
                }
                Run::Spooled(segment) => {
                    // How much of it lies behind a cursor within is known once it was read.
                    if segment.first >= next {
                        left = left.saturating_sub(bytes(segment.output));
                        some = true;
                    }
                    take(Piece::Segment(segment));
                }
            }
            next = run.last() + 1;
        }
        if next <= self.last {
            take(Piece::Gap(self.gap(next, self.last)));
        }
    }

    /// A run of events that are not there. Of one that the reader is in the middle of, the bytes are not known.
    fn gap(&self, from: u64, to: u64) -> Gap {
        let hole = self.overflow.hole.map_or((0, 0), |Hole { from, bytes, .. }| (from, bytes));
        let known = match from {
            1 if (1..=to).contains(&hole.0) => Some(self.forgotten_bytes + hole.1),
            1 => Some(self.forgotten_bytes),
            from => (from == hole.0).then_some(hole.1),
        };
        Gap { from_seq: from, to_seq: to, bytes: known }
    }
}

impl Draft {
    /// The slots that it needs, in order.
    pub(crate) fn extents(&self) -> Vec<Extent> {
        let extent = |part: &Part| if let Part::Segment(segment) = part { Some(segment.extent()) } else { None };
        self.parts.iter().filter_map(extent).collect()
    }

    /// Lays the page into an answer, with what was read of its slots. None if that is not what was written.
    pub(crate) fn complete(self, slots: &[Vec<u8>], mut answer: ReadResult) -> Option<ReadResult> {
        let Self { wanted, parts, last } = self;
        let mut slots = slots.iter();
        let mut page = Page::new(wanted);
        for part in parts {
            let goes_on = match part {
                Part::Gap(gap) => page.gap(gap),
                Part::Event(seq, event) => page.event(seq, event),
                Part::Segment(segment) => {
                    let events = segment.decode(slots.next()?)?.into_iter();
                    let mut behind = events.filter(|(seq, _)| *seq > wanted.after);
                    behind.all(|(seq, event)| page.event(seq, event))
                }
            };
            if !goes_on {
                break;
            }
        }
        answer.next_seq = page.next_seq(last);
        answer.gap = page.gap.filter(|gap| !wanted.events && gap.from_seq < answer.next_seq);
        answer.chunks = page.chunks;
        answer.events = wanted.events.then_some(page.events);
        Some(answer)
    }
}

/// A page that is being filled.
struct Page {
    wanted: Wanted,
    left: u64,
    chunks: Vec<OutputChunk>,
    events: Vec<LoggedEvent>,
    /// The last that was passed; there are two at most, and of the first its reader was sent the events.
    gap: Option<Gap>,
}

impl Page {
    fn new(wanted: Wanted) -> Self {
        Self { left: wanted.bytes(), wanted, chunks: Vec::new(), events: Vec::new(), gap: None }
    }

    /// Adds one, and says whether there may be more.
    fn gap(&mut self, gap: Gap) -> bool {
        self.gap = Some(gap);
        if self.wanted.events {
            self.events.push(LoggedEvent::Gap(gap));
        }
        true
    }

    fn event(&mut self, seq: u64, event: Event) -> bool {
        let size = bytes(output_size(&event));
        if size > self.left && !(self.chunks.is_empty() && self.events.is_empty()) || self.events.len() >= PAGE_EVENTS {
            return false;
        }
        self.left = self.left.saturating_sub(size);
        match event {
            Event::Output { stream, chunk } if self.wanted.events => {
                self.events.push(LoggedEvent::Output { seq, stream, chunk: Chunk(chunk.into()) });
            }
            Event::Output { stream, chunk } => self.chunks.push(OutputChunk { seq, stream, chunk: Chunk(chunk.into()) }),
            Event::Exited { code, denials, limits } if self.wanted.events => self.events.push(LoggedEvent::Exited {
                seq,
                exit_code: code,
                sandbox_denied: denials.failed_it(code),
                denials: denials.list.clone(),
                denials_more: denials.more,
                limits,
            }),
            Event::Closed if self.wanted.events => self.events.push(LoggedEvent::Closed { seq }),
            Event::Exited { .. } | Event::Closed => {}
        }
        true
    }

    /// One past the last event that the page speaks of.
    fn next_seq(&self, last: u64) -> u64 {
        let told = if self.wanted.events {
            self.events.last().map(LoggedEvent::last_seq)
        } else {
            self.chunks.last().filter(|_| self.wanted.max_bytes.is_some()).map(|chunk| chunk.seq)
        };
        told.unwrap_or(last) + 1
    }
}

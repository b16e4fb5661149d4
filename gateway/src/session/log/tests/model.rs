//! The log against one that keeps everything.

use super::*;
use portcullis_protocol::base64::Chunk;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Output(usize, u8),
    Exit,
    Announce(u8),
    /// What was told when a mark was set, this many marks ago, has arrived.
    Deliver(usize),
    Mark,
    Prove(prop::sample::Index),
    Page(prop::sample::Index, Option<u64>, bool),
    Attach,
    Detach,
    Relieve,
    Written(bool),
    GiveUp,
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        12 => (1_usize..200_000, 0..2_u8).prop_map(|(size, stream)| Step::Output(size, stream)),
        4 => (1_usize..20_000, 0..2_u8).prop_map(|(size, stream)| Step::Output(size, stream)),
        1 => Just(Step::Exit),
        3 => (1..10_u8).prop_map(Step::Announce),
        2 => Just(Step::Mark),
        2 => (0..4_usize).prop_map(Step::Deliver),
        2 => index().prop_map(Step::Prove),
        3 => (index(), prop::option::of(0..600_000_u64), any::<bool>()).prop_map(|(at, max, events)| Step::Page(at, max, events)),
        1 => Just(Step::Attach),
        2 => Just(Step::Detach),
        6 => Just(Step::Relieve),
        6 => prop::bool::weighted(0.97).prop_map(Step::Written),
        1 => Just(Step::GiveUp),
    ]
}

/// Everything that ever happened, and a file in memory.
struct Model {
    log: EventLog,
    /// The events from 1: the stream and the bytes of output, or none.
    all: Vec<Option<(Stream, Vec<u8>)>>,
    file: Vec<u8>,
    writing: Option<Write>,
    attached: bool,
    has_exited: bool,
    marks: Vec<u64>,
    tag: u8,
    drops: bool,
}

impl Model {
    fn output(&mut self, size: usize, stream: Stream) {
        self.tag = self.tag.wrapping_add(1);
        let chunk = vec![self.tag; size];
        let seq = self.log.append(Event::Output { stream, chunk: chunk.clone().into() }).unwrap();
        if seq == count(self.all.len()) {
            let Some(Some((of, earlier))) = self.all.last_mut() else { panic!("only output grows") };
            assert!(*of == stream && !self.attached);
            earlier.extend(chunk);
        } else {
            assert_eq!(seq, count(self.all.len()) + 1);
            self.all.push(Some((stream, chunk)));
        }
    }

    fn bytes(&self, gap: Gap) -> u64 {
        let (from, to) = (place(gap.from_seq) - 1, place(gap.to_seq));
        self.all[from..to].iter().flatten().map(|(_, chunk)| count(chunk.len())).sum()
    }

    fn gap(&self, gap: Gap) {
        assert!(gap.from_seq <= gap.to_seq && gap.to_seq <= self.log.last());
        if let Some(bytes) = gap.bytes {
            assert_eq!(bytes, self.bytes(gap), "{gap:?}");
        }
        // What is missing was released, or is the hole.
        let hole = self.log.overflow.hole;
        for seq in gap.from_seq..=gap.to_seq {
            assert!(seq <= self.log.released || hole.is_some_and(|hole| (hole.from..=hole.to).contains(&seq)), "{seq} is lost");
        }
    }

    /// Reads a page and compares it with all that happened.
    fn page(&self, wanted: Wanted) {
        let page = page_of(&self.log, &self.file, wanted);
        let last = self.log.last();
        if !wanted.events {
            let mut left = wanted.max_bytes.unwrap_or(u64::MAX);
            for (nth, chunk) in page.chunks.iter().enumerate() {
                let Some((stream, bytes)) = &self.all[place(chunk.seq) - 1] else { panic!("no output") };
                assert_eq!((*stream, bytes), (chunk.stream, &chunk.chunk.0));
                let size = count(bytes.len());
                assert!(nth == 0 || size <= left);
                left = left.saturating_sub(size);
            }
            // Between the chunks only what is no output, or a gap, which is named if it is one that nobody was sent.
            let seqs: Vec<u64> = page.chunks.iter().map(|chunk| chunk.seq).collect();
            let mut missing = (wanted.after + 1..page.next_seq.min(last + 1))
                .filter(|seq| self.all[place(*seq) - 1].is_some() && !seqs.contains(seq))
                .peekable();
            assert!(missing.peek().is_none() || page.gap.is_some(), "a gap is named");
            if let Some(gap) = page.gap {
                self.gap(gap);
                assert!(missing.all(|seq| seq <= self.log.released || (gap.from_seq..=gap.to_seq).contains(&seq)));
            }
            return;
        }
        let events = page.events.unwrap();
        let mut next = wanted.after + 1;
        for event in &events {
            match event {
                LoggedEvent::Gap(gap) => {
                    assert_eq!(gap.from_seq, next);
                    self.gap(*gap);
                }
                LoggedEvent::Output { seq, stream, chunk: Chunk(chunk) } => {
                    assert_eq!((*seq, Some(&(*stream, chunk.clone()))), (next, self.all[place(*seq) - 1].as_ref()));
                }
                LoggedEvent::Exited { seq, .. } | LoggedEvent::Closed { seq } => {
                    assert!(*seq == next && self.all[place(*seq) - 1].is_none());
                }
            }
            next = event.last_seq() + 1;
        }
        assert_eq!(page.next_seq, next);
        assert!(!events.is_empty() || wanted.after == last, "at least one");
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Output(size, stream) => {
                let stream = if stream == 0 { Stream::Stdout } else { Stream::Stderr };
                // A pump brings no more than there is room for.
                if self.log.room() >= size {
                    self.output(size, stream);
                }
            }
            Step::Exit if !self.has_exited => {
                self.has_exited = true;
                self.log.append(exited());
                self.all.push(None);
            }
            Step::Announce(times) if self.attached => {
                for _ in 0..times {
                    let next = self.log.sent + 1;
                    let Some((seq, _)) = self.log.announce() else { break };
                    assert_eq!(seq, next);
                }
            }
            Step::Mark => self.marks.push(self.log.told()),
            Step::Deliver(ago) if self.attached && ago < self.marks.len() => {
                self.log.deliver(self.marks[self.marks.len() - 1 - ago]);
            }
            Step::Prove(at) if self.attached => self.log.prove(count(at.index(self.all.len() + 2))),
            Step::Page(at, max_bytes, events) => {
                let after = count(at.index(self.all.len() + 1));
                self.page(Wanted { after, max_bytes, events });
                if self.attached && max_bytes.is_none() && !events {
                    self.log.prove(after);
                    self.log.tell(self.log.last());
                }
            }
            Step::Attach if !self.attached => {
                self.log.attach();
                self.marks.clear();
                self.attached = true;
            }
            Step::Detach if self.attached => {
                self.log.detach();
                self.attached = false;
            }
            Step::Relieve if self.writing.is_none() => self.writing = self.log.relieve(u64::MAX),
            Step::Written(is_written) => {
                if let Some(Write { at, bytes }) = self.writing.take() {
                    let at = place(at);
                    self.file.resize(self.file.len().max(at + bytes.len()), 0);
                    if is_written {
                        self.file[at..at + bytes.len()].copy_from_slice(&bytes);
                    } else {
                        self.file[at..at + bytes.len()].fill(0xff);
                    }
                    self.log.written(is_written);
                }
            }
            Step::GiveUp if self.attached => self.log.give_up_missed(),
            _ => {}
        }
    }

    fn check(&self, spool_bytes: u64) {
        let log = &self.log;
        assert_eq!(log.last(), count(self.all.len()));
        assert!(log.released <= log.sent && log.sent <= log.last() && log.forgotten <= log.released);
        assert!(log.spooled() <= spool_bytes);
        assert!(log.bytes() <= KEPT_BYTES + UNRELEASED_BYTES + (2 << 20), "{} bytes in memory", log.bytes());
        let held = log.runs.iter().filter_map(|run| if let Run::Held { events, .. } = run { Some(events) } else { None });
        let (mut tally, mut next) = (Tally::default(), log.forgotten + 1);
        for event in held.flatten() {
            tally.add(1, event.size());
        }
        assert_eq!(tally, log.held);
        // The runs follow each other, but for the hole.
        for run in &log.runs {
            if let Some(hole) = log.overflow.hole
                && hole.from == next
            {
                next = hole.to + 1;
            }
            assert_eq!(run.first(), next);
            next = run.last() + 1;
        }
        let end = if log.overflow.hole.is_some_and(|hole| hole.from == next) { log.overflow.hole.unwrap().to + 1 } else { next };
        assert_eq!(end, log.last() + 1);
        // What is released and newest stays; a hole may begin anew only where the one before it is forgotten.
        if log.forgotten > 0 && !self.drops {
            let kept = self.all[place(log.forgotten)..place(log.released)].iter().flatten().map(|(_, chunk)| chunk.len());
            assert!(kept.sum::<usize>() >= 1 << 20);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn numbers_are_dense_and_nothing_unreleased_is_lost(
        steps in prop::collection::vec(step(), 1..300),
        slots in 0..12_u64,
        drops: bool,
    ) {
        let spool_bytes = slots * (256 << 10);
        let when_full = if drops { WhenFull::DropOldest } else { WhenFull::Pause };
        let log = EventLog::new(Limits { spool_bytes, when_full });
        let mut model = Model {
            log, all: Vec::new(), file: Vec::new(), writing: None, attached: true, has_exited: false, marks: Vec::new(),
            tag: 0,
            drops,
        };
        for step in steps {
            model.step(step);
            model.check(spool_bytes);
        }
        model.page(Wanted { after: 0, max_bytes: None, events: false });
        let mut after = 0;
        while after < model.log.last() {
            let wanted = Wanted { after, max_bytes: Some(100_000), events: true };
            model.page(wanted);
            after = page_of(&model.log, &model.file, wanted).next_seq - 1;
        }
    }
}

//! The events of one process: numbered from 1 without holes, kept for a while, read from any cursor.
//!
//! Two cursors move through the log. `sent` is the last event that was announced, or passed over because nobody was attached
//! when it happened. `released` is the last one that may be forgotten: everything up to it was announced, or handed out in a
//! page, or its client proved that it has it. While a client is attached and follows, both are the same.

use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Event;
use portcullis_protocol::process::OutputChunk;
use std::collections::VecDeque;

/// What was sent is not yet received: this much of the newest released output stays. It is 512 chunks of full size, more than
/// a client holds back while it waits for a hole to be filled, and what the buffers of a connection that was cut are likely
/// to have held.
const KEPT_BYTES: usize = 512 * 8192;

/// Tiny chunks cost more than their bytes, so this many events are enough, however little they hold.
const KEPT_EVENTS: u64 = 50_000;

/// A log with this much output that is not released gives no more room.
const UNRELEASED_BYTES: usize = 1 << 20;

/// The same for events, of which a byte of room brings one at most. It is what a pump may be ahead.
const UNRELEASED_EVENTS: u64 = 128 * 1024;

/// The log of one process.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    /// In order, from number `evicted + 1`.
    events: VecDeque<Event>,
    /// How many events were forgotten: they are 1 to this.
    evicted: u64,
    bytes: usize,
    sent: u64,
    released: u64,
    /// Of the events up to `released` that are there.
    released_bytes: usize,
    /// The last event that happened before the attached client came; behind it, what was announced is released.
    missed: u64,
    closed: bool,
}

/// What a reader gets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Output behind the reader's cursor.
    pub(crate) chunks: Vec<OutputChunk>,
    /// One past the last event that this page speaks of.
    pub(crate) next_seq: u64,
}

impl EventLog {
    /// Adds an event and answers its number. Nothing can follow Closed: such an event is dropped and has no number.
    pub(crate) fn append(&mut self, event: Event) -> Option<u64> {
        if self.closed {
            return None;
        }
        self.closed = event == Event::Closed;
        self.bytes += event.size();
        self.events.push_back(event);
        Some(self.last())
    }

    /// Output behind `after`, at most `max_bytes` but always one chunk if there is one.
    pub(crate) fn page(&self, after: u64, max_bytes: Option<u64>) -> Page {
        let mut left = max_bytes.map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let mut chunks: Vec<OutputChunk> = Vec::new();
        for (seq, event) in self.behind(after) {
            let Event::Output { stream, chunk } = event else { continue };
            if chunk.len() > left && !chunks.is_empty() {
                break;
            }
            left = left.saturating_sub(chunk.len());
            chunks.push(OutputChunk { seq, stream: *stream, chunk: Chunk(chunk.clone()) });
        }
        let next_seq = match (max_bytes, chunks.last()) {
            (Some(_), Some(last)) => last.seq + 1,
            _ => self.last() + 1,
        };
        Page { chunks, next_seq }
    }

    /// Whether a reader at `after` would learn anything: output, the exit or the close behind it, or that all is over.
    pub(crate) fn has_news(&self, after: u64) -> bool {
        self.closed || self.last() > after
    }

    /// The number of the newest event; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.evicted + u64::try_from(self.events.len()).unwrap_or(u64::MAX)
    }

    /// Takes the next event to announce, as a notification.
    pub(crate) fn announce(&mut self, process: &str) -> Option<String> {
        let seq = self.sent + 1;
        let (_, event) = self.behind(self.sent).next()?;
        let text = event.notification(process, seq);
        self.sent = seq;
        self.release(self.released);
        Some(text)
    }

    /// Whether there is something to announce.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.last()
    }

    /// A client attached: it gets what happens from now on. What it missed stays until it was paged or [`Self::release`]d.
    pub(crate) fn skip_missed(&mut self) {
        self.sent = self.last();
        self.missed = self.sent;
    }

    /// A client has everything up to `seq`, or was handed it.
    pub(crate) fn release(&mut self, seq: u64) {
        let mut target = self.released.max(seq.min(self.sent));
        if target >= self.missed {
            target = self.sent;
        }
        while self.released < target {
            let size = self.behind(self.released).next().map_or(0, |(_, event)| event.size());
            self.released_bytes += size;
            self.released += 1;
        }
        self.evict();
    }

    /// The client that attached does not ask for what it missed: it waits for its turn to be forgotten like the rest.
    pub(crate) fn release_missed(&mut self) {
        self.release(self.sent);
    }

    /// Bytes that the log takes before it is full. Exit and close find room in any case.
    pub(crate) fn room(&self) -> usize {
        let events = UNRELEASED_EVENTS.saturating_sub(self.last() - self.released);
        let bytes = UNRELEASED_BYTES.saturating_sub(self.bytes - self.released_bytes);
        bytes.min(usize::try_from(events).unwrap_or(usize::MAX))
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Events behind a cursor; the forgotten ones are missing, which shows as a gap in the numbers.
    fn behind(&self, after: u64) -> impl Iterator<Item = (u64, &Event)> {
        let skip = usize::try_from(after.saturating_sub(self.evicted)).unwrap_or(usize::MAX).min(self.events.len());
        let first = self.evicted + u64::try_from(skip).unwrap_or(u64::MAX) + 1;
        (first..).zip(self.events.range(skip..))
    }

    /// Forgets the oldest of what was released. What is not released takes no room from what is kept: a process that goes on
    /// while its client is away does not push out what the client was sent last.
    fn evict(&mut self) {
        while self.evicted < self.released
            && let Some(oldest) = self.events.front()
            && (self.released_bytes - oldest.size() >= KEPT_BYTES || self.released - self.evicted > KEPT_EVENTS)
        {
            self.bytes -= oldest.size();
            self.released_bytes -= oldest.size();
            self.events.pop_front();
            self.evicted += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::event::Stream;
    use proptest::prelude::*;

    fn output(size: usize) -> Event {
        Event::Output { stream: Stream::Stdout, chunk: vec![b'x'; size] }
    }

    fn exited() -> Event {
        Event::Exited { code: 0, denials: std::sync::Arc::default() }
    }

    fn log(events: impl IntoIterator<Item = Event>) -> EventLog {
        let mut log = EventLog::default();
        for event in events {
            log.append(event).unwrap();
        }
        log
    }

    fn announce_all(log: &mut EventLog) {
        while log.announce("p").is_some() {}
    }

    #[track_caller]
    fn paged(log: &EventLog, after: u64, max_bytes: Option<u64>, seqs: &[u64], next: u64) {
        let page = log.page(after, max_bytes);
        let got: Vec<u64> = page.chunks.iter().map(|chunk| chunk.seq).collect();
        assert_eq!((got.as_slice(), page.next_seq), (seqs, next), "after {after}, at most {max_bytes:?}");
    }

    #[test]
    fn pages_by_bytes() {
        // "aa\n", "bbb\n", "c\n", exited, closed
        let log = log([output(3), output(4), output(2), exited(), Event::Closed]);
        for (max, seqs, next) in [
            (0, &[1][..], 2),
            (1, &[1], 2),
            (3, &[1], 2),
            (6, &[1], 2),
            (7, &[1, 2], 3),
            (8, &[1, 2], 3),
            (9, &[1, 2, 3], 4),
            (10, &[1, 2, 3], 4),
            (1_000_000_000, &[1, 2, 3], 4),
        ] {
            paged(&log, 0, Some(max), seqs, next);
        }
        paged(&log, 3, Some(0), &[], 6);
        paged(&log, 3, Some(5), &[], 6);
        paged(&log, 0, None, &[1, 2, 3], 6);
        paged(&log, 1, None, &[2, 3], 6);
        paged(&log, 99, None, &[], 6);
        paged(&EventLog::default(), 0, None, &[], 1);
    }

    #[test]
    fn news_for_a_long_poll() {
        let mut log = EventLog::default();
        assert!(!log.has_news(0));
        log.append(exited());
        assert!(log.has_news(0) && !log.has_news(1), "a poll past the exit waits on");
        log.append(Event::Closed);
        assert!(log.has_news(1) && log.has_news(99));
    }

    #[test]
    fn nothing_follows_closed() {
        let mut log = log([exited(), Event::Closed]);
        assert_eq!(log.append(output(1)), None);
        assert_eq!(log.last(), 2);
    }

    #[test]
    fn what_was_announced_goes_and_the_newest_stays() {
        let mut log = EventLog::default();
        for _ in 0..1000 {
            log.append(output(8192));
            announce_all(&mut log);
        }
        assert_eq!(log.bytes(), KEPT_BYTES);
        let page = log.page(0, None);
        assert_eq!((page.chunks.len(), page.chunks[0].seq, page.next_seq), (512, 489, 1001), "the gap shows in the numbers");
    }

    #[test]
    fn nothing_goes_that_nobody_was_told_and_the_room_ends() {
        let mut log = EventLog::default();
        let mut appended = 0;
        while log.room() >= 8192 {
            log.append(output(8192));
            appended += 1;
        }
        assert_eq!(appended, UNRELEASED_BYTES / 8192);
        assert_eq!(log.page(0, None).chunks.len(), appended);
        log.append(exited());
        log.append(Event::Closed);
        announce_all(&mut log);
        assert!(log.room() >= 128 * 1024);
    }

    #[test]
    fn tiny_chunks_are_bounded_by_their_number() {
        let mut log = EventLog::default();
        for _ in 0..UNRELEASED_EVENTS {
            log.append(output(1));
        }
        assert_eq!(log.room(), 0);
        announce_all(&mut log);
        assert_eq!(log.last() - log.evicted, KEPT_EVENTS);
        assert_eq!(u64::try_from(log.room()).unwrap(), UNRELEASED_EVENTS);
    }

    #[test]
    fn what_was_missed_stays_until_it_was_paged() {
        let chunk = 64 * 1024;
        let mut log = EventLog::default();
        log.append(output(chunk));
        announce_all(&mut log);
        // Detached: a whole mebibyte.
        while log.room() >= chunk {
            log.append(output(chunk));
        }
        log.skip_missed();
        let missed = log.last();
        assert!(!log.has_unsent(), "what was missed is not announced");
        assert_eq!(log.room(), 0);
        log.append(output(1));
        announce_all(&mut log);
        assert_eq!(log.page(1, None).chunks.len(), usize::try_from(missed).unwrap(), "all of it is there");
        log.release(missed);
        assert!(log.room() > 0);
        log.append(output(chunk));
        announce_all(&mut log);
        assert_eq!(log.released, log.last(), "from here on, what is announced is released");
    }

    #[test]
    fn a_client_that_never_pages_what_it_missed_loses_it_by_decision_only() {
        let mut log = log((0..600).map(|_| output(8192)));
        log.skip_missed();
        log.append(output(8192));
        announce_all(&mut log);
        assert_eq!((log.evicted, log.released), (0, 0));
        log.release_missed();
        assert_eq!(log.bytes(), KEPT_BYTES);
    }

    #[test]
    fn what_was_sent_last_is_not_pushed_out_by_what_comes_while_nobody_is_there() {
        let mut log = log((0..512).map(|_| output(8192)));
        announce_all(&mut log);
        while log.room() > 0 {
            log.append(output(8192));
        }
        assert_eq!((log.evicted, log.bytes()), (0, KEPT_BYTES + UNRELEASED_BYTES));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn numbers_are_dense_and_nothing_unreleased_is_lost(steps in prop::collection::vec((0_u8..6, 1_usize..400_000), 1..60)) {
            let (mut log, mut told) = (EventLog::default(), 0);
            for (step, size) in steps {
                match step {
                    0..=2 => {
                        let before = log.last();
                        prop_assert_eq!(log.append(output(size)), Some(before + 1));
                    }
                    3 => if let Some(text) = log.announce("p") {
                        let at = format!(r#""seq":{},"#, told + 1);
                        prop_assert!(text.contains(&at));
                        told += 1;
                    },
                    4 => {
                        log.skip_missed();
                        told = log.last();
                    }
                    _ => log.release(told),
                }
                // Everything that is not released is there, in order, without a hole.
                let page = log.page(log.released, None);
                let expected: Vec<u64> = (log.released + 1..=log.last()).collect();
                prop_assert_eq!(page.chunks.iter().map(|chunk| chunk.seq).collect::<Vec<_>>(), expected);
                let all = log.page(0, None);
                let held: usize = all.chunks.iter().map(|chunk| chunk.chunk.0.len()).sum();
                prop_assert_eq!(held, log.bytes());
                prop_assert!(all.chunks.windows(2).all(|pair| pair[0].seq + 1 == pair[1].seq));
                prop_assert!(log.evicted == 0 || log.released_bytes >= KEPT_BYTES);
                prop_assert!(log.released <= log.sent && log.evicted <= log.released);
            }
        }
    }
}

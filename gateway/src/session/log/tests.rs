use super::*;
use portcullis_protocol::event::Stream;
use portcullis_protocol::logged::{Gap, LoggedEvent, WhenFull};
use portcullis_protocol::process::ReadResult;

mod model;

fn output(size: usize) -> Event {
    Event::Output { stream: Stream::Stdout, chunk: vec![b'x'; size].into() }
}

fn exited() -> Event {
    Event::Exited { code: 0, denials: std::sync::Arc::default(), limits: Vec::new() }
}

fn log(events: impl IntoIterator<Item = Event>) -> EventLog {
    let mut log = EventLog::default();
    for event in events {
        log.append(event).unwrap();
    }
    log
}

fn announce_all(log: &mut EventLog) {
    while log.announce().is_some() {}
}

/// As a link does that cannot say more.
fn deliver_all(log: &mut EventLog) {
    announce_all(log);
    let told = log.told();
    log.deliver(told);
}

/// An answer without a page.
fn blank() -> ReadResult {
    ReadResult {
        chunks: Vec::new(),
        next_seq: 0,
        exited: false,
        exit_code: None,
        closed: false,
        failure: None,
        sandbox_denied: false,
        denials: Vec::new(),
        denials_more: 0,
        limits: Vec::new(),
        gap: None,
        events: None,
    }
}

/// A page of a log that has nothing in a spool.
fn page(log: &EventLog, after: u64, max_bytes: Option<u64>) -> ReadResult {
    log.draft(Wanted { after, max_bytes, events: false }).complete(&[], blank()).unwrap()
}

fn events(log: &EventLog, after: u64, max_bytes: Option<u64>) -> (Vec<LoggedEvent>, u64) {
    let page = log.draft(Wanted { after, max_bytes, events: true }).complete(&[], blank()).unwrap();
    assert!(page.chunks.is_empty() && page.gap.is_none());
    (page.events.unwrap(), page.next_seq)
}

#[track_caller]
fn paged(log: &EventLog, after: u64, max_bytes: Option<u64>, seqs: &[u64], next: u64) {
    let page = page(log, after, max_bytes);
    let got: Vec<u64> = page.chunks.iter().map(|chunk| chunk.seq).collect();
    assert_eq!((got.as_slice(), page.next_seq), (seqs, next), "after {after}, at most {max_bytes:?}");
}

fn small() -> EventLog {
    // "aa\n", "bbb\n", "c\n", exited, closed
    log([output(3), output(4), output(2), exited(), Event::Closed])
}

#[test]
fn pages_by_bytes() {
    let log = small();
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
fn pages_of_events_hold_every_kind_and_have_a_bound() {
    let few = small();
    for (after, max, seqs, next) in [
        (0, Some(0), &[1][..], 2),
        (0, Some(7), &[1, 2], 3),
        (0, Some(9), &[1, 2, 3, 4, 5], 6),
        (2, None, &[3, 4, 5], 6),
        (3, Some(0), &[4, 5], 6),
        (5, None, &[], 6),
    ] {
        let (events, got) = events(&few, after, max);
        let got_seqs: Vec<u64> = events.iter().map(LoggedEvent::last_seq).collect();
        assert_eq!((got_seqs.as_slice(), got), (seqs, next), "after {after}, at most {max:?}");
    }
    assert_eq!(events(&log((0..300).map(|_| output(8192))), 0, None).0.len(), 128, "a mebibyte");
    assert_eq!(events(&log((0..9000).map(|_| output(1))), 0, None).0.len(), 8192);
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
fn what_was_delivered_goes_and_the_newest_stays() {
    let mut log = EventLog::default();
    for _ in 0..1000 {
        log.append(output(8192));
        deliver_all(&mut log);
    }
    assert_eq!(log.bytes(), KEPT_BYTES);
    let all = page(&log, 0, None);
    assert_eq!((all.chunks.len(), all.chunks[0].seq, all.next_seq), (512, 489, 1001));
    assert_eq!(all.gap, Some(Gap { from_seq: 1, to_seq: 488, bytes: Some(488 * 8192) }));
    assert_eq!(page(&log, 5, None).gap, Some(Gap { from_seq: 6, to_seq: 488, bytes: None }), "how much is not known");
    assert_eq!(page(&log, 488, None).gap, None);
    let (events, next) = events(&log, 5, Some(0));
    assert_eq!((events, next), (vec![LoggedEvent::Gap(Gap { from_seq: 6, to_seq: 488, bytes: None })], 489));
}

#[test]
fn what_was_sent_is_kept_until_it_is_known_to_have_arrived() {
    let mut log = EventLog::default();
    while log.room() >= 8192 {
        log.append(output(8192));
        announce_all(&mut log);
    }
    assert_eq!((log.last(), log.released), (512, 0));
    log.deliver(100);
    assert_eq!(log.unreleased(), Tally { events: 412, bytes: 412 * 8192 });
    assert!(log.room() > 0);
    // Whatever is said to have arrived, it was not more than was sent.
    log.append(output(8192));
    log.deliver(u64::MAX);
    assert_eq!(log.released, 512);
    log.prove(514);
    assert_eq!(log.proved, 0, "a cursor from the future proves nothing");
    // What a page told before it was announced is kept until it is announced.
    log.prove(513);
    assert_eq!(log.released, 512);
    announce_all(&mut log);
    assert_eq!(log.released, 513);
    log.prove(1);
    assert_eq!(log.released, 513);
}

#[test]
fn the_room_ends_and_exit_and_close_find_some() {
    let mut log = EventLog::default();
    while log.room() >= 8192 {
        log.append(output(8192));
    }
    assert_eq!(log.last(), 512);
    log.append(exited());
    log.append(Event::Closed);
    deliver_all(&mut log);
    assert!(log.room() >= 128 * 1024);
}

#[test]
fn tiny_chunks_are_bounded_by_their_number() {
    let mut log = EventLog::default();
    for _ in 0..UNRELEASED_EVENTS {
        log.append(output(1));
    }
    assert_eq!(log.room(), 0);
    deliver_all(&mut log);
    assert_eq!(log.last() - log.forgotten, KEPT_EVENTS);
    assert_eq!(count(log.room()), UNRELEASED_EVENTS);
}

#[test]
fn tiny_chunks_grow_while_nobody_can_see_them() {
    let mut log = log([output(1)]);
    log.detach();
    for _ in 0..8192 {
        assert_eq!(log.append(output(1)), Some(2));
    }
    assert_eq!(log.append(output(1)), Some(3));
    assert_eq!(log.append(Event::Output { stream: Stream::Stderr, chunk: vec![1].into() }), Some(4));
    log.attach();
    log.append(output(1));
    log.append(output(1));
    log.detach();
    log.append(output(1));
    assert_eq!(log.last(), 7, "whoever was there may have seen the sixth");
    let sizes: Vec<usize> = page(&log, 0, None).chunks.iter().map(|chunk| chunk.chunk.0.len()).collect();
    assert_eq!(sizes, [1, 8192, 1, 1, 1, 1, 1]);
}

#[test]
fn what_was_missed_stays_until_it_was_paged() {
    let mut log = log([output(8192)]);
    deliver_all(&mut log);
    log.detach();
    while log.room() >= 8192 {
        log.append(output(8192));
    }
    log.attach();
    let missed = log.last();
    assert!(!log.has_unsent() && log.is_behind(), "what was missed is not announced");
    log.append(output(1));
    deliver_all(&mut log);
    assert_eq!((log.released, log.told()), (1, 1), "what is behind it does not speak for it");
    assert_eq!(page(&log, 1, None).chunks.len(), 513, "all of it is there");
    // As one that acknowledges nothing does it: one page, and from then on what is announced.
    log.tell(missed);
    assert!(!log.is_behind());
    log.deliver(log.told());
    assert_eq!(log.released, log.last());
}

#[test]
fn a_client_that_never_pages_what_it_missed_loses_it_by_decision_only() {
    let mut log = log((0..600).map(|_| output(8192)));
    log.detach();
    log.attach();
    log.append(output(8192));
    deliver_all(&mut log);
    assert_eq!((log.forgotten, log.released), (0, 0));
    log.give_up_missed();
    assert_eq!((log.bytes(), log.released), (KEPT_BYTES + 8192, 600), "what was sent since has not arrived");
}

#[test]
fn what_was_sent_last_is_not_pushed_out_by_what_comes_while_nobody_is_there() {
    let mut log = log((0..512).map(|_| output(8192)));
    deliver_all(&mut log);
    log.detach();
    while log.room() > 0 {
        log.append(output(8192));
    }
    assert_eq!((log.forgotten, log.bytes()), (0, KEPT_BYTES + UNRELEASED_BYTES));
}

/// A detached log that spools to memory.
fn detached(spool_bytes: u64, when_full: WhenFull) -> (EventLog, Vec<u8>) {
    let mut log = EventLog::new(Limits { spool_bytes, when_full });
    for _ in 0..10 {
        log.append(output(8192));
    }
    announce_all(&mut log);
    log.detach();
    (log, Vec::new())
}

fn relieve(log: &mut EventLog, file: &mut Vec<u8>) {
    while let Some(Write { at, bytes }) = log.relieve(u64::MAX) {
        let at = usize::try_from(at).unwrap();
        file.resize(file.len().max(at + bytes.len()), 0);
        file[at..at + bytes.len()].copy_from_slice(&bytes);
        log.written(true);
    }
}

fn page_of(log: &EventLog, file: &[u8], wanted: Wanted) -> ReadResult {
    let draft = log.draft(wanted);
    let slots: Vec<Vec<u8>> = draft
        .extents()
        .iter()
        .map(|(at, length)| {
            let at = usize::try_from(*at).unwrap();
            file[at..at + length].to_vec()
        })
        .collect();
    draft.complete(&slots, blank()).unwrap()
}

#[test]
fn the_spool_takes_what_memory_does_not_and_then_the_room_ends() {
    let (mut log, mut file) = detached(8 << 20, WhenFull::Pause);
    while log.room() >= 8192 {
        log.append(output(8192));
        relieve(&mut log, &mut file);
    }
    assert!(log.bytes() <= UNRELEASED_BYTES && log.spooled() == 8 << 20);
    assert!(log.last() > 1400, "{}", log.last());
    for wanted in [0, 9, 10, 700].map(|after| Wanted { after, max_bytes: None, events: false }) {
        let page = page_of(&log, &file, wanted);
        let seqs: Vec<u64> = page.chunks.iter().map(|chunk| chunk.seq).collect();
        assert_eq!(seqs, (wanted.after + 1..=log.last()).collect::<Vec<_>>());
        assert_eq!(page.next_seq, log.last() + 1);
    }
    let (mut after, mut pages) = (0, 0);
    while after < log.last() {
        let page = page_of(&log, &file, Wanted { after, max_bytes: Some(100_000), events: true });
        let events = page.events.unwrap();
        assert_eq!(events.len(), 12.min(place(log.last() - after)));
        after = page.next_seq - 1;
        pages += 1;
        log.prove(after);
    }
    assert!(pages > 100);
    log.attach();
    log.prove(log.last());
    assert_eq!(log.spooled(), 0, "the newest are in memory");
    assert!(log.has_drained() && !log.has_drained());
    assert_eq!(log.bytes(), KEPT_BYTES);
}

#[test]
fn a_write_that_fails_loses_nothing_and_is_the_last() {
    let (mut log, _) = detached(8 << 20, WhenFull::Pause);
    while log.room() >= 8192 {
        log.append(output(8192));
        if log.relieve(u64::MAX).is_some() {
            log.written(false);
        }
    }
    assert_eq!((log.spooled(), log.last()), (0, 512));
    assert_eq!(page(&log, 0, None).chunks.len(), 512);
}

#[test]
fn the_oldest_that_was_not_sent_goes_and_the_hole_says_how_much() {
    for spool in [0, 1 << 20] {
        let (mut log, mut file) = detached(spool, WhenFull::DropOldest);
        for _ in 10..2000 {
            log.append(output(8192));
            relieve(&mut log, &mut file);
            assert!(log.room() >= 8192, "it never waits");
        }
        log.append(exited());
        log.append(Event::Closed);
        let page = page_of(&log, &file, Wanted { after: 0, max_bytes: None, events: false });
        let gap = page.gap.unwrap();
        let kept: u64 = page.chunks.iter().map(|chunk| count(chunk.chunk.0.len())).sum();
        assert_eq!(gap.from_seq, 11, "it begins behind what was sent");
        assert_eq!(gap.bytes, Some(2000 * 8192 - kept));
        assert_eq!((page.chunks[9].seq, page.chunks[10].seq), (10, gap.to_seq + 1));
        assert_eq!(page.next_seq, 2003);
        assert!(kept >= 3 << 20, "the newest stay");
        let within = page_of(&log, &file, Wanted { after: 20, max_bytes: None, events: false });
        assert_eq!(within.gap, Some(Gap { from_seq: 21, bytes: None, ..gap }));
        // A page that ends before it does not speak of it, the next one does.
        let before = page_of(&log, &file, Wanted { after: 0, max_bytes: Some(8192), events: false });
        assert_eq!((before.gap, before.next_seq), (None, 2));
        let after = page_of(&log, &file, Wanted { after: 10, max_bytes: Some(8192), events: false });
        assert_eq!((after.gap, after.chunks[0].seq), (Some(gap), gap.to_seq + 1));
        let events = page_of(&log, &file, Wanted { after: 10, max_bytes: None, events: true }).events.unwrap();
        assert_eq!(events[0], LoggedEvent::Gap(gap));
    }
}

#[test]
fn a_hole_grows_until_it_is_passed_and_then_another_may_begin() {
    let (mut log, mut file) = detached(0, WhenFull::DropOldest);
    let fill = |log: &mut EventLog, file: &mut Vec<u8>| {
        for _ in 0..1000 {
            log.append(output(8192));
            relieve(log, file);
        }
    };
    let gap = |log: &EventLog, after| page(log, after, None).gap;
    fill(&mut log, &mut file);
    let first = gap(&log, 10).unwrap();
    // Somebody comes, pages nothing, and leaves.
    log.attach();
    log.detach();
    fill(&mut log, &mut file);
    let second = gap(&log, 10).unwrap();
    assert!(second.from_seq == first.from_seq && second.to_seq > first.to_seq + 900, "{first:?} {second:?}");
    // Somebody comes and pages all.
    log.attach();
    let seen = log.last();
    log.prove(seen);
    log.detach();
    fill(&mut log, &mut file);
    let third = gap(&log, seen).unwrap();
    assert_eq!(third.from_seq, seen + 1);
    let (events, _) = events(&log, 0, Some(0));
    let forgotten = Gap { from_seq: 1, to_seq: second.to_seq, bytes: Some(second.to_seq * 8192) };
    assert_eq!(events, [LoggedEvent::Gap(forgotten)], "what was before the one that was passed is forgotten with it");
}

#[test]
fn an_exit_is_never_dropped() {
    let (mut log, mut file) = detached(0, WhenFull::DropOldest);
    log.append(output(8192));
    log.append(exited());
    while log.room() >= 8192 {
        log.append(output(8192));
        relieve(&mut log, &mut file);
    }
    let page = page(&log, 0, None);
    assert_eq!(page.gap, Some(Gap { from_seq: 11, to_seq: 11, bytes: Some(8192) }), "it grows up to the exit and no more");
    assert_eq!(page.chunks[10].seq, 13);
}

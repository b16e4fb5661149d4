use super::*;
use crate::recovery::order::MOST_EVENTS;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Stream;
use serde_json::{Value, json};

fn output(seq: u64) -> ProcessEvent {
    ProcessEvent::Output { seq, stream: Stream::Stdout, chunk: b"x".to_vec() }
}

fn exited(seq: u64, code: i32, denied: bool) -> ProcessEvent {
    ProcessEvent::Exited { seq, code, denied, denials: Denials::default() }
}

fn closed(seq: u64) -> ProcessEvent {
    ProcessEvent::Closed { seq }
}

/// An answer with chunks of these numbers.
fn read(seqs: &[u64], next: u64, more: Value) -> ReadResult {
    let chunks = seqs.iter().map(|seq| OutputChunk { seq: *seq, stream: Stream::Stdout, chunk: Chunk(b"x".to_vec()) }).collect();
    let mut result: ReadResult = serde_json::from_value({
        let mut base = json!({"chunks": [], "nextSeq": next, "exited": false, "exitCode": null, "closed": false});
        base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        base
    })
    .unwrap();
    result.chunks = chunks;
    result
}

fn order(last: u64, waiting: Vec<ProcessEvent>) -> Order<ProcessEvent> {
    let mut order = Order::new(last);
    for event in waiting {
        order.insert(event.last_seq().unwrap(), event.size(), event).unwrap();
    }
    order
}

#[track_caller]
fn brings(last: u64, waiting: Vec<ProcessEvent>, has_exited: bool, read: ReadResult, expect: &[ProcessEvent]) {
    let mut order = order(last, waiting);
    assert_eq!(chunks(&mut order, has_exited, read).as_deref(), Ok(expect));
}

#[track_caller]
fn fails(last: u64, waiting: Vec<ProcessEvent>, read: ReadResult, expect: &str) {
    let mut order = order(last, waiting);
    let error = chunks(&mut order, false, read).unwrap_err();
    assert!(error.contains(expect), "{error}");
    assert_eq!(order.last(), last, "nothing came out");
}

#[test]
fn what_was_missed_comes_once_and_in_order() {
    let plain = || json!({});
    brings(0, vec![], false, read(&[1, 2], 3, plain()), &[output(1), output(2)]);
    brings(1, vec![], false, read(&[1, 2], 3, plain()), &[output(2)]);
    brings(2, vec![], false, read(&[], 3, plain()), &[]);
    brings(5, vec![], false, read(&[], 3, plain()), &[]);
    brings(1, vec![output(3)], false, read(&[2, 3], 4, plain()), &[output(2), output(3)]);
    // What came live and is newer than the answer follows it.
    brings(1, vec![output(4), closed(5)], false, read(&[2, 3], 4, plain()), &[output(2), output(3), output(4), closed(5)]);
    brings(1, vec![output(5)], false, read(&[2], 3, plain()), &[output(2)]);
}

#[test]
fn an_exit_has_the_one_number_that_is_missing() {
    let ended = |closed: bool| json!({"exited": true, "exitCode": 3, "closed": closed});
    brings(1, vec![], false, read(&[2], 4, ended(false)), &[output(2), exited(3, 3, false)]);
    brings(1, vec![], false, read(&[3], 4, ended(false)), &[exited(2, 3, false), output(3)]);
    brings(0, vec![], false, read(&[1, 3], 5, ended(true)), &[output(1), exited(2, 3, false), output(3), closed(4)]);
    brings(0, vec![], false, read(&[], 3, ended(true)), &[exited(1, 3, false), closed(2)]);
    brings(3, vec![], true, read(&[4], 6, ended(true)), &[output(4), closed(5)]);
    brings(1, vec![closed(4)], false, read(&[3], 5, ended(true)), &[exited(2, 3, false), output(3), closed(4)]);
    let live = vec![exited(3, 7, false)];
    brings(1, live, false, read(&[2], 4, ended(false)), &[output(2), exited(3, 7, false)]);
}

#[test]
fn a_dense_tail_needs_no_room() {
    let many: Vec<u64> = (3..1000).collect();
    let mut order = order(1, vec![output(1000)]);
    let ended = json!({"exited": true, "exitCode": 0, "closed": false});
    let events = chunks(&mut order, false, read(&many, 1000, ended)).unwrap();
    assert_eq!(events.len(), 999);
    assert!(events.len() > MOST_EVENTS && events[0] == exited(2, 0, false) && events[998] == output(1000));
}

#[test]
fn what_the_read_knows_of_denials_is_added_to_an_exit_that_waits() {
    let ended = json!({"exited": true, "exitCode": 1, "sandboxDenied": true});
    brings(1, vec![exited(3, 1, false)], false, read(&[2], 4, ended), &[output(2), exited(3, 1, true)]);
}

#[test]
fn what_is_not_kept_or_contradicts_itself_is_an_error() {
    let gone = "no longer retained while recovering through sequence";
    fails(1, vec![], read(&[4], 5, json!({})), gone);
    fails(1, vec![], read(&[], 3, json!({})), gone);
    fails(1, vec![], read(&[4], 6, json!({"exited": true, "exitCode": 0})), gone);
    fails(1, vec![], read(&[2], 3, json!({"exited": true, "exitCode": 0})), gone);
    fails(1, vec![], read(&[2], 4, json!({"exited": true})), "without its status");
    fails(1, vec![], read(&[5], 4, json!({})), "behind its last number");
    fails(1, vec![], read(&[2, 3], 4, json!({"closed": true})), "under one number");
    fails(1, vec![output(3)], read(&[2], 4, json!({"closed": true})), "under one number");
    fails(1, vec![], read(&[], 2, json!({"failure": "its helper died"})), "its helper died");
}

/// An answer with events.
fn paged(events: Value, next: u64) -> ReadResult {
    read(&[], next, json!({"events": events}))
}

fn logged(seq: u64) -> Value {
    json!({"type": "output", "seq": seq, "stream": "stdout", "chunk": "eA=="})
}

#[test]
fn a_page_brings_its_events_and_names_its_gaps() {
    let gap = |from: u64, to: u64, bytes: Option<u64>| ProcessEvent::Gap { from, to, bytes };
    let wire_gap = |from: u64, to: u64| json!({"type": "gap", "fromSeq": from, "toSeq": to, "bytes": 9});
    let check = |last: u64, waiting: Vec<ProcessEvent>, events: Value, expect: &[ProcessEvent]| {
        let mut order = order(last, waiting);
        assert_eq!(page(&mut order, paged(events, 0)).unwrap().as_deref(), Some(expect));
    };
    let ends =
        json!([logged(2), {"type": "exited", "seq": 3, "exitCode": 4, "sandboxDenied": true}, {"type": "closed", "seq": 4}]);
    check(1, vec![], ends, &[output(2), exited(3, 4, true), closed(4)]);
    check(1, vec![output(3)], json!([logged(2)]), &[output(2), output(3)]);
    check(1, vec![], json!([wire_gap(2, 5), logged(6)]), &[gap(2, 5, Some(9)), output(6)]);
    // What came live from within a gap is not lost.
    let around = [gap(2, 2, None), output(3), gap(4, 5, None), output(6)];
    check(1, vec![output(3)], json!([wire_gap(2, 5), logged(6)]), &around);
    let mut order = order(4, vec![]);
    assert_eq!(page(&mut order, paged(json!([]), 5)), Ok(None));
    for wrong in [json!([logged(6)]), json!([logged(4)])] {
        assert!(page(&mut order, paged(wrong, 0)).is_err());
    }
    assert!(page(&mut order, read(&[], 5, json!({}))).is_err(), "it announced that it can");
}

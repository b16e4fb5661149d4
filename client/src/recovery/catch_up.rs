//! What a client missed, from the answers to `process/read`.

use super::order::Order;
use crate::process::ProcessEvent;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::logged::{Gap, LoggedEvent};
use portcullis_protocol::process::{OutputChunk, ReadResult};
use std::collections::BTreeSet;

/// What an answer with `events` brings. None if it brings nothing new.
///
/// # Errors
/// The server contradicts itself; the text says how.
pub(crate) fn page(order: &mut Order<ProcessEvent>, read: ReadResult) -> Result<Option<Vec<ProcessEvent>>, String> {
    let events = read.events.ok_or("the server answered without the events that it announced")?;
    if events.is_empty() {
        return Ok(None);
    }
    let before = order.last();
    let mut out = Vec::new();
    for event in events {
        drain(order, &mut out);
        let seq = event.last_seq();
        let event = match event {
            LoggedEvent::Output { seq, stream, chunk } => ProcessEvent::Output { seq, stream, chunk: chunk.0 },
            LoggedEvent::Exited { seq, exit_code: code, sandbox_denied: denied, denials, denials_more, .. } => {
                ProcessEvent::Exited { seq, code, denied, denials: Denials { list: denials, more: denials_more } }
            }
            LoggedEvent::Closed { seq } => ProcessEvent::Closed { seq },
            LoggedEvent::Gap(gap) => {
                leap(order, gap, &mut out);
                continue;
            }
        };
        if seq > order.last().saturating_add(1) {
            return Err(format!("the server left out what is before number {seq}"));
        }
        order.put(seq, event.size(), event);
    }
    drain(order, &mut out);
    if order.last() == before {
        return Err(format!("the server repeats what is not after number {before}"));
    }
    Ok(Some(out))
}

fn drain(order: &mut Order<ProcessEvent>, out: &mut Vec<ProcessEvent>) {
    out.extend(std::iter::from_fn(|| order.pop()));
}

/// Goes over a gap. What came live from within it is not lost.
fn leap(order: &mut Order<ProcessEvent>, Gap { from_seq, to_seq, bytes }: Gap, out: &mut Vec<ProcessEvent>) {
    while order.last() < to_seq {
        let from = order.last() + 1;
        let to = order.first().map_or(to_seq, |first| to_seq.min(first - 1));
        let is_whole = (from, to) == (from_seq, to_seq);
        out.push(ProcessEvent::Gap { from, to, bytes: bytes.filter(|_| is_whole) });
        order.skip_to(to);
        drain(order, out);
    }
}

/// What an answer without `events` brings, from a server that knows nothing else: chunks with their numbers, and of the exit
/// and the close only that they happened. Their numbers follow, since there are no holes.
///
/// # Errors
/// Something is not kept any more, or the server contradicts itself; the text says what. Nothing came out of `order` then.
pub(crate) fn chunks(order: &mut Order<ProcessEvent>, has_exited: bool, read: ReadResult) -> Result<Vec<ProcessEvent>, String> {
    let ReadResult { chunks, next_seq, exited, exit_code, closed, failure, sandbox_denied, denials, denials_more, .. } = read;
    if let Some(failure) = failure {
        return Err(failure);
    }
    let (last, target) = (order.last(), next_seq.saturating_sub(1));
    if exited {
        for event in order.waiting_mut() {
            if let ProcessEvent::Exited { denied, .. } = event {
                *denied |= sandbox_denied;
            }
        }
    }
    let mut out = Vec::new();
    if target <= last {
        drain(order, &mut out);
        return Ok(out);
    }
    if let Some(beyond) = chunks.iter().find(|chunk| chunk.seq > target) {
        return Err(format!("the server answered output {} behind its last number {target}", beyond.seq));
    }
    let new: Vec<OutputChunk> = chunks.into_iter().filter(|chunk| chunk.seq > last).collect();
    let mut known: BTreeSet<u64> = new.iter().map(|chunk| chunk.seq).collect();
    known.extend(order.waiting(last + 1..=target).map(|(seq, _event)| seq));
    if closed {
        let waits = order.waiting(target..=target).next().map(|(_seq, event)| event);
        let is_taken = waits.is_some_and(|event| !matches!(event, ProcessEvent::Closed { .. }));
        if is_taken || new.iter().any(|chunk| chunk.seq == target) {
            return Err(format!("the server answered output and the close under one number, {target}"));
        }
        known.insert(target);
    }
    let is_exit_known =
        has_exited || order.waiting(last + 1..=u64::MAX).any(|(_, event)| matches!(event, ProcessEvent::Exited { .. }));
    let missing = target - last - u64::try_from(known.len()).unwrap_or(u64::MAX);
    let expected = u64::from(exited && !is_exit_known);
    if missing != expected {
        return Err(format!("process events are no longer retained while recovering through sequence {target}"));
    }
    if expected == 1 {
        let hole = (last + 1..).zip(&known).find(|(seq, known)| seq != *known).map(|(seq, _known)| seq);
        let seq = hole.unwrap_or(target);
        let code = exit_code.ok_or("the server answered an exit without its status")?;
        let denials = Denials { list: denials, more: denials_more };
        let event = ProcessEvent::Exited { seq, code, denied: sandbox_denied, denials };
        order.put(seq, event.size(), event);
    }
    for OutputChunk { seq, stream, chunk } in new {
        order.put(seq, chunk.0.len(), ProcessEvent::Output { seq, stream, chunk: chunk.0 });
    }
    if closed {
        order.put(target, 0, ProcessEvent::Closed { seq: target });
    }
    drain(order, &mut out);
    Ok(out)
}

#[cfg(test)]
#[path = "catch_up_tests.rs"]
mod tests;

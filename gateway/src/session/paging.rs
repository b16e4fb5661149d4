//! Reads: when they are answered, and how. Sans-IO.
//!
//! A small page that is in memory is answered at once. A larger one waits for the room that its text takes on the connection,
//! is then made of what the log has, and if parts of it are in the spool, it waits for those: nothing else waits with it.

use super::delivery::from_the_future;
use super::log::{Draft, Wanted};
use super::message::{Answer, Call, Output};
use super::process::Phase;
use super::state::State;
use crate::reply;
use portcullis_protocol::limit::Scope;
use portcullis_protocol::process::{ReadParams, ReadResult};
use portcullis_protocol::rpc::{RpcError, code};
use std::time::{Duration, Instant};

/// Reads that wait for news; the calls in flight of a connection bound it before that.
const READERS: usize = 1024;

/// The longest wait that is taken literally.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// Text of a page that is answered at once: what a connection takes without counting it.
const AT_ONCE: usize = 64 << 10;

/// A read that waits for news.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) call: Call,
    pub(super) key: u64,
    pub(super) wanted: Wanted,
    pub(super) deadline: Instant,
}

/// A page on its way.
#[derive(Debug)]
pub(super) enum Pending {
    /// It waits for the room that its text takes.
    Room { key: u64, wanted: Wanted },
    /// It waits for what is in the spool. The rest is as it was when that was asked for.
    Slots { key: u64, draft: Box<Draft>, answer: Box<ReadResult> },
}

impl State {
    pub(super) fn read(&mut self, call: Call, params: &ReadParams, now: Instant) {
        let refuse = |text: String| Answer::read_failed(RpcError::new(code::INVALID_REQUEST, text));
        let id = &params.process_id;
        let Some((key, process)) = self.named(id) else {
            return self.reply(call, refuse(format!("unknown process id {id}")));
        };
        if matches!(process.phase, Phase::Starting(_)) {
            return self.reply(call, refuse(format!("process id {id} is starting")));
        }
        let (after, last) = (params.after_seq.unwrap_or(0), process.log.last());
        if params.events && after > last {
            return self.reply(call, Answer::read_failed(from_the_future(id, after, last)));
        }
        if after < last && matches!(process.phase, Phase::Closed(_)) {
            process.read_at = Some(now);
        }
        self.prove(key, after);
        let Some(process) = self.processes.get(&key) else { return };
        let is_behind = process.log.is_behind();
        let wait = Duration::from_millis(params.wait_ms.unwrap_or(0)).min(LONGEST_WAIT);
        let waits = !wait.is_zero() && !process.log.has_news(after);
        if is_behind {
            self.catches_up(now);
        }
        if waits && self.readers.len() >= READERS {
            let text = format!("at most {READERS} reads may wait in a session");
            return self.reply(call, Answer::read_failed(reply::limit(text, "waiting-reads", READERS, Scope::Session)));
        }
        let wanted = Wanted { after, max_bytes: params.max_bytes, events: params.events };
        let reader = Reader { call, key, wanted, deadline: now + wait };
        if waits {
            self.readers.push(reader);
        } else {
            self.answer_readers(vec![reader]);
        }
    }

    pub(super) fn answer_readers(&mut self, readers: Vec<Reader>) {
        for Reader { call, key, wanted, .. } in readers {
            let Some(process) = self.processes.get(&key) else {
                self.reply(call, forgotten());
                continue;
            };
            let bytes = process.log.weigh(wanted);
            let pending = Pending::Room { key, wanted };
            if bytes > AT_ONCE {
                self.pages.insert(call, pending);
                self.outputs.push_back(Output::ReserveRoom { call, bytes });
            } else {
                self.go_on(call, pending);
            }
        }
    }

    /// The room that a page takes is reserved.
    pub(super) fn room_reserved(&mut self, call: Call) {
        if let Some(pending) = self.pages.remove(&call) {
            self.go_on(call, pending);
        }
    }

    /// What a page needed of the spool was read.
    pub(super) fn spool_read(&mut self, call: Call, slots: Result<Vec<Vec<u8>>, RpcError>) {
        let Some(Pending::Slots { key, draft, answer }) = self.pages.remove(&call) else { return };
        match slots {
            Ok(slots) => self.complete(call, key, *draft, &slots, *answer),
            Err(error) => self.reply(call, Answer::read_failed(error)),
        }
    }

    fn go_on(&mut self, call: Call, pending: Pending) {
        let (Pending::Room { key, .. } | Pending::Slots { key, .. }) = &pending;
        let key = *key;
        let (Some(process), Pending::Room { wanted, .. }) = (self.processes.get(&key), pending) else {
            return self.reply(call, forgotten());
        };
        let (draft, answer) = (process.log.draft(wanted), process.answer());
        let extents = draft.extents();
        if extents.is_empty() {
            self.complete(call, key, draft, &[], answer);
        } else {
            self.pages.insert(call, Pending::Slots { key, draft: Box::new(draft), answer: Box::new(answer) });
            self.outputs.push_back(Output::ReadSpool { call, key, extents });
        }
    }

    fn complete(&mut self, call: Call, key: u64, draft: Draft, slots: &[Vec<u8>], answer: ReadResult) {
        match draft.complete(slots, answer) {
            Some(result) => {
                let receipt = self.receipt(key, result.next_seq - 1);
                self.reply(call, Answer::Read(Ok(result), receipt));
            }
            None => {
                let text = "the spool of the process's output does not hold what was written to it";
                self.reply(call, Answer::read_failed(RpcError::new(code::INTERNAL, text)));
            }
        }
    }
}

fn forgotten() -> Answer {
    Answer::read_failed(RpcError::new(code::INVALID_REQUEST, "the process was forgotten while the read waited"))
}

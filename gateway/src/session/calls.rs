//! The calls of a session's client on its processes.

use super::message::{Answer, Call, Output};
use super::process::{Phase, Process, Written};
use super::state::{Reader, State};
use portcullis_protocol::helper::Enforced;
use portcullis_protocol::process::{ReadParams, StartResult, TerminateResult, WriteParams, WriteResult, WriteStatus};
use portcullis_protocol::rpc::{RpcError, code};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Processes of a session that live; each costs a task, descriptors and a log.
const LIVE: usize = 1024;

/// Reads that wait for news; the calls in flight of a connection bound it before that.
const READERS: usize = 1024;

/// The longest wait that is taken literally.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

impl State {
    pub(super) fn start(&mut self, call: Call, process: String, takes_input: bool) {
        if self.keys.contains_key(process.as_str()) {
            return self.refuse_start(call, format!("process {process} already exists"));
        }
        if self.processes.len() - self.closed.len() >= LIVE {
            return self.refuse_start(call, format!("at most {LIVE} processes may run in a session"));
        }
        let (key, id): (u64, Arc<str>) = (self.next_key, process.into());
        self.next_key += 1;
        self.keys.insert(Arc::clone(&id), key);
        self.processes.insert(key, Process::starting(id, call, takes_input));
        self.outputs.push_back(Output::Launch { call, key });
    }

    fn refuse_start(&mut self, call: Call, text: String) {
        self.reply(call, Answer::Start(Err(RpcError::new(code::INVALID_REQUEST, text))));
    }

    pub(super) fn started(&mut self, key: u64, sandbox_type: &'static str, enforcement: Option<Box<Enforced>>) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        let Phase::Starting { call, kill, interrupt } = process.phase else { return };
        process.phase = Phase::Running;
        let (process_id, sandbox_type) = (process.id.to_string(), sandbox_type.to_owned());
        let result = StartResult { process_id, sandbox_type, enforcement };
        self.reply(call, Answer::Start(Ok(result)));
        if kill {
            self.outputs.push_back(Output::Kill { key });
        } else if interrupt {
            self.outputs.push_back(Output::Interrupt { key });
        }
        self.grant(key);
    }

    pub(super) fn start_failed(&mut self, key: u64, error: RpcError) {
        let Some(Process { phase: Phase::Starting { call, .. }, .. }) = self.processes.get(&key) else { return };
        let call = *call;
        self.forget(key);
        self.reply(call, Answer::Start(Err(error)));
    }

    pub(super) fn read(&mut self, call: Call, params: &ReadParams, now: Instant) {
        let refuse = |text: String| Answer::Read(Err(RpcError::new(code::INVALID_REQUEST, text)));
        let id = &params.process_id;
        let Some((key, process)) = self.named(id) else {
            return self.reply(call, refuse(format!("unknown process id {id}")));
        };
        if matches!(process.phase, Phase::Starting { .. }) {
            return self.reply(call, refuse(format!("process id {id} is starting")));
        }
        let after = params.after_seq.unwrap_or(0);
        let wait = Duration::from_millis(params.wait_ms.unwrap_or(0)).min(LONGEST_WAIT);
        let waits = !wait.is_zero() && !process.log.has_news(after);
        if waits && self.readers.len() >= READERS {
            return self.reply(call, refuse(format!("at most {READERS} reads may wait in a session")));
        }
        let reader = Reader { call, key, after, max_bytes: params.max_bytes, deadline: now + wait };
        if waits {
            self.readers.push(reader);
        } else {
            self.answer_readers(vec![reader]);
        }
    }

    pub(super) fn write(&mut self, call: Call, params: WriteParams) {
        let WriteParams { process_id, chunk, write_id } = params;
        if write_id.is_empty() {
            let error = RpcError::new(code::INVALID_PARAMS, "writeId must not be empty");
            return self.reply(call, Answer::Write(Err(error)));
        }
        let Some((key, process)) = self.named(&process_id) else {
            return self.reply_status(call, WriteStatus::UnknownProcess);
        };
        if matches!(process.phase, Phase::Starting { .. }) {
            return self.reply_status(call, WriteStatus::Starting);
        }
        match process.input.write(call, write_id, chunk.0) {
            Written::Now(status, chunk) => {
                self.outputs.extend(chunk.map(|chunk| Output::Write { key, chunk }));
                self.reply_status(call, status);
            }
            Written::Parked => {}
            Written::TooMany => {
                let error = RpcError::new(code::INVALID_REQUEST, format!("too many writes wait for process {process_id}"));
                self.reply(call, Answer::Write(Err(error)));
            }
        }
    }

    pub(super) fn interrupt(&mut self, call: Call, id: &str) {
        if let Some((key, process)) = self.named(id) {
            match &mut process.phase {
                Phase::Starting { interrupt, .. } => *interrupt = true,
                Phase::Running => self.outputs.push_back(Output::Interrupt { key }),
                Phase::Exited(_) | Phase::Closed(_) => {}
            }
        }
        self.reply(call, Answer::Signal);
    }

    pub(super) fn terminate(&mut self, call: Call, id: &str) {
        let running = self.named(id).is_some_and(|(_, process)| process.is_live());
        if let Some(key) = self.keys.get(id).copied() {
            self.kill(key);
        }
        self.reply(call, Answer::Terminate(TerminateResult { running }));
    }

    /// A process that starts is killed as soon as it runs.
    pub(super) fn kill(&mut self, key: u64) {
        match self.processes.get_mut(&key).map(|process| &mut process.phase) {
            Some(Phase::Starting { kill, .. }) => *kill = true,
            Some(Phase::Running) => self.outputs.push_back(Output::Kill { key }),
            Some(Phase::Exited(_) | Phase::Closed(_)) | None => {}
        }
    }

    pub(super) fn answer_readers(&mut self, readers: Vec<Reader>) {
        for Reader { call, key, after, max_bytes, .. } in readers {
            let answer = match self.processes.get_mut(&key) {
                Some(process) => Ok(process.read(after, max_bytes)),
                None => Err(RpcError::new(code::INVALID_REQUEST, "the process was forgotten while the read waited")),
            };
            self.reply(call, Answer::Read(answer));
            self.grant(key);
        }
    }

    pub(super) fn unpark(&mut self, key: u64) {
        while let Some((call, status, chunk)) = self.processes.get_mut(&key).and_then(|process| process.input.unpark()) {
            self.outputs.extend(chunk.map(|chunk| Output::Write { key, chunk }));
            self.reply_status(call, status);
        }
    }

    fn named(&mut self, id: &str) -> Option<(u64, &mut Process)> {
        let key = *self.keys.get(id)?;
        self.processes.get_mut(&key).map(|process| (key, process))
    }

    fn reply_status(&mut self, call: Call, status: WriteStatus) {
        self.reply(call, Answer::Write(Ok(WriteResult { status })));
    }

    pub(super) fn reply(&mut self, call: Call, answer: Answer) {
        self.outputs.push_back(Output::Reply(call, answer));
    }
}

//! The calls of a session's client on its processes.

use super::guard::{Bounds, Guard};
use super::message::{Answer, Call, Output, Start};
use super::operations::Come;
use super::process::{Ended, PARKED, Phase, Process, Starting, Unparked, Written};
use super::state::State;
use crate::reply;
use portcullis_protocol::helper::Enforced;
use portcullis_protocol::limit::{LimitInForce, Scope, TreeEnd};
use portcullis_protocol::process::{ListResult, Size, StartResult, TerminateResult, WriteParams, WriteResult, WriteStatus};
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_protocol::signal::Signal;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of writes that wait for a place in the queues of their processes; one is taken whatever its size. Half of what a
/// connection may hold of its client's messages: behind what waits there must be room to hear that output has arrived, without
/// which the process may never read its input.
const PARKED_BYTES: usize = 32 << 20;

impl State {
    pub(super) fn start(&mut self, call: Call, start: Start, now: Instant) {
        if let Some(key) = self.keys.get(start.process.as_str()) {
            return self.repeat(call, *key, &start);
        }
        if let Some(operation) = &start.operation
            && self.operations.has_seen(&operation_name(&start.process, operation))
        {
            let text = format!(
                "process {} was started by this operation before and is forgotten: it is not started again",
                start.process
            );
            return self.refuse_start(call, text);
        }
        if self.processes.len() - self.closed.len() >= self.most_processes {
            let most = self.most_processes;
            let text = format!("process/start {}: at most {most} processes may run in a session; let some end", start.process);
            return self.reply(call, Answer::Start(Err(reply::limit(text, "session-processes", most, Scope::Session))));
        }
        let (key, id): (u64, Arc<str>) = (self.next_key, start.process.as_str().into());
        self.next_key += 1;
        self.keys.insert(Arc::clone(&id), key);
        if start.bounds != Bounds::default() {
            self.guards.insert(key, Guard::new(start.bounds, now));
        }
        self.processes.insert(key, Process::starting(id, call, start, self.limits.process));
        self.outputs.push_back(Output::Launch { call, key });
    }

    /// A start of a process that is known: the same start sent again is answered as it was, any other is refused.
    fn repeat(&mut self, call: Call, key: u64, start: &Start) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        if start.operation.is_none() || start.operation != process.operation {
            return self.refuse_start(call, format!("process {} already exists", start.process));
        }
        match (&mut process.phase, &process.started) {
            (Phase::Starting(starting), _) => starting.calls.push(call),
            (_, Some(started)) => {
                let started = started.clone();
                self.reply(call, Answer::Start(Ok(started)));
            }
            // What does not start any more was started.
            (Phase::Running | Phase::Exited(_) | Phase::Closed(_), None) => {}
        }
    }

    fn refuse_start(&mut self, call: Call, text: String) {
        self.reply(call, Answer::Start(Err(RpcError::new(code::INVALID_REQUEST, text))));
    }

    pub(super) fn started(
        &mut self,
        key: u64,
        sandbox_type: &'static str,
        enforcement: Option<Box<Enforced>>,
        (limits, tree): (Vec<LimitInForce>, TreeEnd),
    ) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        let Phase::Starting(starting) = &mut process.phase else { return };
        let Starting { calls, kill, signals } = std::mem::take(starting);
        process.phase = Phase::Running;
        let (process_id, sandbox_type) = (process.id.to_string(), sandbox_type.to_owned());
        let result = StartResult { process_id, sandbox_type, enforcement, limits };
        process.tree = Some(tree);
        process.started = Some(result.clone());
        if let Some(operation) = &process.operation {
            self.operations.record(&operation_name(&process.id, operation));
        }
        for call in calls {
            self.reply(call, Answer::Start(Ok(result.clone())));
        }
        if kill {
            self.outputs.push_back(Output::Kill { key });
        } else {
            self.outputs.extend(signals.into_iter().map(|signal| Output::Signal { key, signal }));
        }
        self.grant(key);
    }

    pub(super) fn start_failed(&mut self, key: u64, error: RpcError) {
        let Some(Process { phase: Phase::Starting(starting), .. }) = self.processes.get_mut(&key) else { return };
        let calls = std::mem::take(&mut starting.calls);
        self.forget(key);
        for call in calls {
            self.reply(call, Answer::Start(Err(error.clone())));
        }
    }

    /// A change of files that may have been sent before.
    pub(super) fn change(&mut self, call: Call, operation: String, digest: u64) {
        match self.changes.come(call, &operation, digest) {
            Ok(Come::New) => self.outputs.push_back(Output::Change { call }),
            Ok(Come::Running) => self.outputs.push_back(Output::Repeated { call }),
            Ok(Come::Ended(outcome)) => self.reply(call, Answer::Done(outcome)),
            Err(twice) => self.refuse(call, format!("operationId {operation}: {twice}; nothing was done")),
        }
    }

    pub(super) fn changed(&mut self, operation: String, outcome: Result<(), RpcError>) {
        for call in self.changes.ended(operation, outcome.clone()) {
            self.reply(call, Answer::Done(outcome.clone()));
        }
    }

    pub(super) fn write(&mut self, call: Call, params: WriteParams, now: Instant) {
        let WriteParams { process_id, chunk, write_id } = params;
        if write_id.is_empty() {
            let error = RpcError::new(code::INVALID_PARAMS, "writeId must not be empty");
            return self.reply(call, Answer::Write(Err(error)));
        }
        let Some((_, process)) = self.named(&process_id) else {
            return self.reply_status(call, WriteStatus::UnknownProcess);
        };
        if matches!(process.phase, Phase::Starting(_)) {
            return self.reply_status(call, WriteStatus::Starting);
        }
        if process.input.is_full(chunk.0.len()) {
            let parked: usize = self.processes.values().map(|process| process.input.parked_bytes()).sum();
            if parked > 0 && parked + chunk.0.len() > PARKED_BYTES {
                let text = format!(
                    "write to process {process_id}: writes of {parked} bytes wait for their processes already; send it again when some were answered"
                );
                let error = reply::limit(text, "waiting-input-bytes", PARKED_BYTES, Scope::Session);
                return self.reply(call, Answer::Write(Err(error)));
            }
        }
        let Some((key, process)) = self.named(&process_id) else { return };
        match process.input.write(call, write_id, chunk.0) {
            Written::Now(status, chunk) => {
                if chunk.is_some() {
                    self.guards.get_mut(&key).into_iter().for_each(|guard| guard.heard(now));
                }
                self.outputs.extend(chunk.map(|chunk| Output::Write { key, chunk }));
                self.reply_status(call, status);
            }
            Written::Parked => {}
            Written::TooMany => {
                let error = too_many_writes(&process_id);
                self.reply(call, Answer::Write(Err(error)));
            }
        }
    }

    pub(super) fn close_stdin(&mut self, call: Call, id: &str) {
        let (key, process) = match self.settled(id) {
            Ok((_, process)) if process.tty => {
                let text = format!("process {id} has a terminal, whose input cannot be closed: write the byte \\x04 to end it");
                return self.refuse(call, text);
            }
            Ok(found) => found,
            Err(text) => return self.refuse(call, text),
        };
        match process.input.end(call) {
            Ended::Now(tell) => {
                self.outputs.extend(tell.then_some(Output::CloseStdin { key }));
                self.reply(call, Answer::Done(Ok(())));
            }
            Ended::Parked => {}
            Ended::TooMany => self.reply(call, Answer::Done(Err(too_many_writes(id)))),
        }
    }

    /// One that comes after the end is carried out as well as can be: a client cannot know that yet.
    pub(super) fn resize(&mut self, call: Call, id: &str, size: Size) {
        match self.settled(id) {
            Ok((_, process)) if !process.tty => {
                self.refuse(call, format!("process {id} has no terminal to resize: it was started without `tty`"));
            }
            Ok((key, _)) => {
                self.outputs.push_back(Output::Resize { key, size });
                self.reply(call, Answer::Done(Ok(())));
            }
            Err(text) => self.refuse(call, text),
        }
    }

    pub(super) fn list(&mut self, call: Call) {
        let mut keys: Vec<u64> = self.processes.keys().copied().collect();
        keys.sort_unstable();
        let processes = keys.iter().filter_map(|key| self.processes.get(key)).map(Process::listed).collect();
        self.reply(call, Answer::List(ListResult { processes }));
    }

    pub(super) fn signal(&mut self, call: Call, id: &str, signal: Signal) {
        if let Some((key, process)) = self.named(id) {
            match &mut process.phase {
                _ if signal == Signal::KILL => self.kill(key),
                Phase::Starting(Starting { signals, .. }) => {
                    signals.retain(|earlier| *earlier != signal);
                    signals.push(signal);
                }
                Phase::Running => self.outputs.push_back(Output::Signal { key, signal }),
                Phase::Exited(_) | Phase::Closed(_) => {}
            }
        }
        self.reply(call, Answer::Done(Ok(())));
    }

    pub(super) fn terminate(&mut self, call: Call, id: &str, at: Instant, report: bool, now: Instant) {
        let named = self.named(id).map(|(key, process)| (key, process.is_live(), process.phase == Phase::Running));
        let running = named.is_some_and(|(_, is_live, _)| is_live);
        let ended = self.named(id).and_then(|(_, process)| process.tree).filter(|_| report);
        match named {
            // One that does not run yet cannot tidy up, and what an ended one has left behind has had its time.
            Some((key, _, true)) if at > now => {
                self.guards.entry(key).or_insert_with(|| Guard::new(Bounds::default(), now)).ends(at);
                self.outputs.push_back(Output::Signal { key, signal: Signal::TERMINATE });
            }
            Some((key, ..)) => self.kill(key),
            None => {}
        }
        self.reply(call, Answer::Terminate(TerminateResult { running, ended }));
    }

    /// Ends a process and everything that came of it, also what it has left behind. One that starts is killed as soon as it runs.
    pub(super) fn kill(&mut self, key: u64) {
        match self.processes.get_mut(&key).map(|process| &mut process.phase) {
            Some(Phase::Starting(starting)) => starting.kill = true,
            Some(Phase::Running) => self.outputs.push_back(Output::Kill { key }),
            Some(Phase::Exited(_) | Phase::Closed(_)) => self.outputs.push_back(Output::KillLeft { key }),
            None => {}
        }
    }

    pub(super) fn unpark(&mut self, key: u64) {
        while let Some(unparked) = self.processes.get_mut(&key).and_then(|process| process.input.unpark()) {
            match unparked {
                Unparked::Write(call, status, chunk) => {
                    self.outputs.extend(chunk.map(|chunk| Output::Write { key, chunk }));
                    self.reply_status(call, status);
                }
                Unparked::End(call, tell) => {
                    self.outputs.extend(tell.then_some(Output::CloseStdin { key }));
                    self.reply(call, Answer::Done(Ok(())));
                }
            }
        }
    }

    /// A process whose start has been answered, or in words why there is none.
    fn settled(&mut self, id: &str) -> Result<(u64, &mut Process), String> {
        match self.named(id) {
            Some((_, Process { phase: Phase::Starting(_), .. })) => Err(format!("process id {id} is starting")),
            Some(found) => Ok(found),
            None => Err(format!("unknown process id {id}")),
        }
    }

    fn refuse(&mut self, call: Call, text: String) {
        self.reply(call, Answer::Done(Err(RpcError::new(code::INVALID_REQUEST, text))));
    }

    pub(super) fn named(&mut self, id: &str) -> Option<(u64, &mut Process)> {
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

/// An operation is a process's own: its name holds both, and no other pair gives the same.
fn operation_name(process: &str, operation: &str) -> String {
    format!("{} {process} {operation}", process.len())
}

fn too_many_writes(process: &str) -> RpcError {
    let text = format!("too many writes wait for process {process}");
    reply::limit(text, "waiting-writes", PARKED, Scope::Process)
}

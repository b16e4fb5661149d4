use super::*;
use crate::helper::spawner::fake;
use crate::session::guard::Bounds;
use crate::session::message::Start;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Stream;
use portcullis_protocol::logged::{AcknowledgeParams, WhenFull};
use portcullis_protocol::process::{
    ListedProcess, ProcessState, ReadParams, ReadResult, Size, StartResult, WriteParams, WriteStatus,
};
use portcullis_protocol::signal::Signal;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::time::Duration;

mod attach;
mod bounds;
mod delivery;

const RETENTION: Duration = Duration::from_secs(90);

/// A session with a clock that jumps.
struct Harness {
    state: State,
    now: Instant,
    next_call: Call,
    answers: BTreeMap<Call, Answer>,
    outputs: Vec<Output>,
    /// Of the processes that are started.
    bounds: Bounds,
}

impl Harness {
    fn new() -> Self {
        let now = Instant::now();
        let retention = Retention { detached: RETENTION, closed: RETENTION };
        Self {
            state: State::new(retention, SpoolLimits::default(), now),
            now,
            next_call: 0,
            answers: BTreeMap::new(),
            outputs: Vec::new(),
            bounds: Bounds::default(),
        }
    }

    fn attached() -> Self {
        let mut harness = Self::new();
        assert_eq!(harness.attach(), Some(1));
        harness
    }

    fn handle(&mut self, input: Input) {
        self.state.handle(input, self.now);
        while let Some(output) = self.state.poll() {
            match output {
                Output::Reply(call, answer) => {
                    let before = self.answers.insert(call, answer);
                    assert!(before.is_none(), "a second answer to call {call}");
                }
                Output::ReserveRoom { call, .. } => self.state.handle(Input::RoomReserved { call }, self.now),
                output => self.outputs.push(output),
            }
        }
    }

    fn call(&mut self, input: impl FnOnce(Call) -> Input) -> Call {
        let call = self.next_call;
        self.next_call += 1;
        self.handle(input(call));
        call
    }

    fn attach(&mut self) -> Option<u64> {
        self.attach_with(Proof::Sent)
    }

    fn attach_with(&mut self, proof: Proof) -> Option<u64> {
        let call = self.call(|call| Input::Attach { call, terms: Terms { proof, ..Terms::default() } });
        match self.answers.remove(&call) {
            Some(Answer::Attach(generation)) => generation,
            other => panic!("{other:?}"),
        }
    }

    /// Begins a start and answers its key.
    fn begin(&mut self, process: &str) -> Option<u64> {
        self.begin_with(process, None, false).1
    }

    fn begin_with(&mut self, process: &str, operation: Option<&str>, tty: bool) -> (Call, Option<u64>) {
        let operation = operation.map(str::to_owned);
        let start = Start {
            process: process.to_owned(),
            tty,
            takes_input: true,
            operation,
            at_ms: 7,
            when_full: WhenFull::Pause,
            bounds: self.bounds,
        };
        let call = self.call(|call| Input::Start { call, start });
        let key = self.outputs.iter().find_map(|output| match output {
            Output::Launch { call: of, key } if *of == call => Some(*key),
            _ => None,
        });
        (call, key)
    }

    fn start_answer(&mut self, call: Call) -> Option<Result<StartResult, RpcError>> {
        match self.answers.remove(&call)? {
            Answer::Start(result) => Some(result),
            other => panic!("{other:?}"),
        }
    }

    /// What a call that only is carried out or not was answered.
    fn done(&mut self, input: impl FnOnce(Call) -> Input) -> Result<(), RpcError> {
        let call = self.call(input);
        match self.answers.remove(&call) {
            Some(Answer::Done(result)) => result,
            other => panic!("{other:?}"),
        }
    }

    fn close_stdin(&mut self, process: &str) -> Result<(), RpcError> {
        let process = process.to_owned();
        self.done(|call| Input::CloseStdin { call, process })
    }

    fn resize(&mut self, process: &str) -> Result<(), RpcError> {
        let (process, side) = (process.to_owned(), NonZeroU16::MIN);
        self.done(|call| Input::Resize { call, process, size: Size { rows: side, cols: side } })
    }

    fn signal(&mut self, process: &str, signal: &str) {
        let (process, signal) = (process.to_owned(), Signal::named(signal).unwrap());
        self.done(|call| Input::Signal { call, process, signal }).unwrap();
    }

    fn signalled(&self) -> Vec<i32> {
        let number = |output: &Output| if let Output::Signal { signal, .. } = output { Some(signal.number()) } else { None };
        self.outputs.iter().filter_map(number).collect()
    }

    fn list(&mut self) -> Vec<ListedProcess> {
        let call = self.call(|call| Input::List { call });
        match self.answers.remove(&call) {
            Some(Answer::List(result)) => result.processes,
            other => panic!("{other:?}"),
        }
    }

    fn start(&mut self, process: &str) -> u64 {
        let key = self.begin(process).unwrap();
        self.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
        key
    }

    fn output(&mut self, key: u64, bytes: usize) {
        let feed = Feed::Output { stream: Stream::Stdout, chunk: vec![b'x'; bytes] };
        self.handle(Input::Feed { key, feed });
    }

    fn exit(&mut self, key: u64) {
        self.handle(Input::Feed { key, feed: Feed::Exited { code: 3, denials: Denials::default(), failure: None } });
    }

    fn close(&mut self, key: u64) {
        self.exit(key);
        self.handle(Input::Feed { key, feed: Feed::Closed });
    }

    fn ask_read(&mut self, process: &str, after: u64, wait_ms: u64) -> Call {
        let params = ReadParams {
            process_id: process.to_owned(),
            after_seq: Some(after),
            max_bytes: None,
            wait_ms: Some(wait_ms),
            ..ReadParams::default()
        };
        self.call(|call| Input::Read { call, params })
    }

    fn read_answer(&mut self, call: Call) -> Option<Result<ReadResult, RpcError>> {
        match self.answers.remove(&call)? {
            Answer::Read(result, _) => Some(result),
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self, process: &str, after: u64) -> Result<ReadResult, RpcError> {
        let call = self.ask_read(process, after, 0);
        self.read_answer(call).unwrap()
    }

    fn ask_write(&mut self, process: &str, id: &str, bytes: &[u8]) -> Call {
        let params = WriteParams { process_id: process.to_owned(), chunk: Chunk(bytes.to_vec()), write_id: id.to_owned() };
        self.call(|call| Input::Write { call, params })
    }

    fn write_answer(&mut self, call: Call) -> Option<Result<WriteStatus, RpcError>> {
        match self.answers.remove(&call)? {
            Answer::Write(result) => Some(result.map(|result| result.status)),
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, process: &str, id: &str) -> Result<WriteStatus, RpcError> {
        let call = self.ask_write(process, id, b"x");
        self.write_answer(call).unwrap()
    }

    fn terminate(&mut self, process: &str) -> bool {
        let process = process.to_owned();
        let call = self.call(|call| Input::Terminate { call, process, grace: Duration::ZERO });
        match self.answers.remove(&call) {
            Some(Answer::Terminate(result)) => result.running,
            other => panic!("{other:?}"),
        }
    }

    fn start_error(&mut self, process: &str) -> String {
        assert_eq!(self.begin(process), None);
        match self.answers.remove(&(self.next_call - 1)) {
            Some(Answer::Start(Err(error))) => error.message,
            other => panic!("{other:?}"),
        }
    }

    fn killed(&self) -> Vec<u64> {
        self.outputs.iter().filter_map(|output| if let Output::Kill { key } = output { Some(*key) } else { None }).collect()
    }

    fn announced(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.state.announce()).collect()
    }

    /// Jumps to the next deadline.
    fn jump(&mut self) {
        self.now = self.state.deadline().unwrap();
        self.handle(Input::Timeout);
    }

    fn has_ended(&self) -> bool {
        self.outputs.iter().any(|output| matches!(output, Output::End))
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, RpcError>, expect: &str) {
    assert_eq!(result.unwrap_err().message, expect);
}

#[test]
fn the_life_of_a_process() {
    let mut session = Harness::attached();
    refused(session.read("p", 0), "unknown process id p");
    assert_eq!(session.write("p", "1").unwrap(), WriteStatus::UnknownProcess);
    assert!(!session.terminate("p"));

    let key = session.begin("p").unwrap();
    assert_eq!(session.start_error("p"), "process p already exists");
    refused(session.read("p", 0), "process id p is starting");
    assert_eq!(session.write("p", "1").unwrap(), WriteStatus::Starting);

    session.handle(Input::Started { key, sandbox_type: "linuxSeccomp", enforcement: None });
    assert_eq!(session.write("p", "1").unwrap(), WriteStatus::Accepted);
    refused(session.write("p", ""), "writeId must not be empty");
    session.output(key, 3);
    session.exit(key);
    let read = session.read("p", 0).unwrap();
    assert_eq!((read.exit_code, read.closed, read.next_seq), (Some(3), false, 3));
    assert!(!session.terminate("p"), "what has exited does not run");
    assert_eq!(session.write("p", "1").unwrap(), WriteStatus::Accepted, "an id that was accepted");
    assert_eq!(session.write("p", "2").unwrap(), WriteStatus::StdinClosed);

    session.handle(Input::Feed { key, feed: Feed::Closed });
    assert!(session.read("p", 99).unwrap().closed);
    assert_eq!(session.start_error("p"), "process p already exists");
    assert_eq!(session.announced().len(), 3);
    while session.state.processes.contains_key(&key) {
        session.jump();
    }
    refused(session.read("p", 0), "unknown process id p");
    session.start("p");
}

#[test]
fn a_start_that_fails_leaves_the_id_free() {
    let mut session = Harness::attached();
    let key = session.begin("p").unwrap();
    session.handle(Input::StartFailed { key, error: RpcError::new(code::INTERNAL, "no") });
    refused(session.read("p", 0), "unknown process id p");
    assert!(session.begin("p").is_some_and(|again| again != key));
}

#[test]
fn terminate_beats_a_start() {
    let mut session = Harness::attached();
    let key = session.begin("p").unwrap();
    assert!(session.terminate("p"));
    assert_eq!(session.killed(), [] as [u64; 0], "there is nothing to kill yet");
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    assert_eq!(session.killed(), [key]);
}

#[test]
fn a_long_poll_ends_with_news_or_with_its_time() {
    let mut session = Harness::attached();
    let key = session.start("p");
    let poll = session.ask_read("p", 0, 300);
    assert!(session.read_answer(poll).is_none());
    session.jump();
    let read = session.read_answer(poll).unwrap().unwrap();
    assert_eq!((read.chunks.len(), read.next_seq), (0, 1));

    let (poll, late) = (session.ask_read("p", 0, 5000), session.ask_read("p", 1, 5000));
    session.exit(key);
    assert_eq!(session.read_answer(poll).unwrap().unwrap().exit_code, Some(3));
    assert!(session.read_answer(late).is_none(), "a poll past the exit waits for the close");
    session.handle(Input::Feed { key, feed: Feed::Closed });
    assert!(session.read_answer(late).unwrap().unwrap().closed);
}

#[test]
fn only_one_connection_at_a_time_and_a_stale_one_changes_nothing() {
    let mut session = Harness::attached();
    assert_eq!(session.attach(), None);
    session.handle(Input::Detach { generation: 1 });
    assert_eq!(session.attach(), Some(2));
    session.handle(Input::Detach { generation: 1 });
    assert_eq!(session.attach(), None, "the second is still attached");
}

#[test]
fn detach_answers_what_waits_and_accepts_nothing_of_it() {
    let mut session = Harness::attached();
    session.start("p");
    for nth in 0..128 {
        assert_eq!(session.write("p", &nth.to_string()).unwrap(), WriteStatus::Accepted);
    }
    let (poll, write) = (session.ask_read("p", 0, 5000), session.ask_write("p", "late", b"x"));
    session.handle(Input::Detach { generation: 1 });
    assert!(session.read_answer(poll).unwrap().is_err());
    assert!(session.write_answer(write).unwrap().is_err());
    session.attach();
    let again = session.ask_write("p", "late", b"x");
    assert!(session.write_answer(again).is_none(), "it was not remembered, and there is no room yet");
    session.handle(Input::Feed { key: 0, feed: Feed::Taken { bytes: 1 } });
    assert_eq!(session.write_answer(again).unwrap().unwrap(), WriteStatus::Accepted);
}

#[test]
fn what_happens_while_detached_is_paged_and_not_announced() {
    let mut session = Harness::attached();
    let key = session.start("p");
    session.output(key, 1);
    assert_eq!(session.announced().len(), 1);
    session.handle(Input::Detach { generation: 1 });
    session.output(key, 2);
    assert!(!session.state.has_unsent());
    session.attach();
    assert_eq!(session.announced(), [] as [String; 0]);
    session.output(key, 3);
    let live = session.announced();
    assert!(live.len() == 1 && live[0].contains(r#""seq":3,"#), "{live:?}");
    let missed = session.read("p", 1).unwrap();
    assert_eq!(missed.chunks.iter().map(|chunk| chunk.seq).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn denials_outlast_a_cut_and_go_with_their_process() {
    let mut session = Harness::attached();
    let key = session.start("p");
    session.handle(Input::Detach { generation: 1 });
    let denials = fake::denials(&["/etc/a", "/etc/b"]);
    let size = denials.size();
    session.handle(Input::Feed { key, feed: Feed::Exited { code: 1, denials: denials.clone(), failure: None } });
    assert_eq!(session.state.processes[&key].log.bytes(), size, "they count against the log's bounds");
    session.attach();
    assert_eq!(session.announced(), [] as [String; 0]);
    for _twice in 0..2 {
        let read = session.read("p", 0).unwrap();
        assert_eq!((read.sandbox_denied, &read.denials, read.denials_more), (true, &denials.list, 0));
    }
    session.handle(Input::Feed { key, feed: Feed::Closed });
    assert_eq!(session.announced().len(), 1);
    session.now += RETENTION;
    session.handle(Input::Timeout);
    refused(session.read("p", 0), "unknown process id p");
}

#[test]
fn a_success_is_not_denied_and_an_ordinary_exit_says_nothing_of_denials() {
    let mut session = Harness::attached();
    for (process, code, denials, expect) in [("p", 0, &["/etc/a"][..], false), ("q", 1, &[], false), ("r", 1, &["/etc/a"], true)]
    {
        let key = session.start(process);
        let denials = fake::denials(denials);
        let has_some = !denials.is_empty();
        session.handle(Input::Feed { key, feed: Feed::Exited { code, denials, failure: None } });
        let read = session.read(process, 0).unwrap();
        assert_eq!((read.sandbox_denied, read.denials.len()), (expect, usize::from(has_some)), "{process}");
        let told = session.announced().concat();
        assert!(told.contains(&format!(r#""sandboxDenied":{expect}"#)), "{told}");
        assert_eq!(told.contains("denials"), has_some, "{told}");
    }
}

#[test]
fn nobody_comes_back_in_time() {
    let mut session = Harness::attached();
    let key = session.start("p");
    let starting = session.begin("q").unwrap();
    session.handle(Input::Detach { generation: 1 });
    session.now += RETENTION - Duration::from_secs(1);
    session.handle(Input::Timeout);
    assert!(!session.has_ended());
    session.now += Duration::from_secs(1);
    session.handle(Input::Timeout);
    assert!(session.has_ended());
    assert_eq!(session.killed(), [key]);
    assert!(session.state.is_live());
    session.handle(Input::Started { key: starting, sandbox_type: "none", enforcement: None });
    assert_eq!(session.killed(), [key, starting]);
    session.exit(key);
    session.exit(starting);
    assert!(!session.state.is_live());
    let call = session.call(|call| Input::Attach { call, terms: Terms::default() });
    assert!(!session.answers.contains_key(&call), "the end answers nothing");
}

#[test]
fn an_attached_session_never_expires() {
    let mut session = Harness::attached();
    session.now += RETENTION * 10;
    session.handle(Input::Timeout);
    assert!(!session.has_ended());
    assert_eq!(session.state.deadline(), None);
}

#[test]
fn a_client_that_never_pages_after_a_resume_stops_its_process_for_a_while_only() {
    let mut session = Harness::attached();
    let key = session.start("p");
    session.handle(Input::Detach { generation: 1 });
    while session.state.processes[&key].log.room() >= 8192 {
        session.output(key, 8192);
    }
    session.attach();
    let grants = |session: &Harness| session.outputs.iter().filter(|output| matches!(output, Output::Grant { .. })).count();
    let before = grants(&session);
    session.output(key, 1);
    session.announced();
    assert_eq!(grants(&session), before, "what was missed is kept until it is paged");
    session.jump();
    assert!(grants(&session) > before);
}

#[test]
fn a_pump_that_fails_ends_its_process() {
    let mut session = Harness::attached();
    let key = session.start("p");
    let poll = session.ask_read("p", 0, 60_000);
    session.handle(Input::PumpLost { key });
    let read = session.read_answer(poll).unwrap().unwrap();
    assert!(read.exited && read.failure.is_some());
    assert!(session.read("p", 0).unwrap().closed);
}

#[test]
fn many_processes_take_turns() {
    let mut session = Harness::attached();
    let (loud, quiet) = (session.start("loud"), session.start("quiet"));
    for _ in 0..5 {
        session.output(loud, 1);
    }
    session.output(quiet, 1);
    let order: Vec<bool> = session.announced().iter().map(|text| text.contains("quiet")).collect();
    assert_eq!(order, [false, true, false, false, false, false]);
}

#[test]
fn live_processes_are_bounded() {
    let mut session = Harness::attached();
    let keys: Vec<u64> = (0..1024).map(|nth| session.start(&nth.to_string())).collect();
    assert_eq!(session.start_error("more"), "at most 1024 processes may run in a session");
    session.close(keys[0]);
    session.start("more");
}

#[test]
fn the_same_start_sent_again_is_answered_as_the_first_and_starts_nothing() {
    let mut session = Harness::attached();
    let (first, key) = session.begin_with("p", Some("o"), false);
    let (second, none) = session.begin_with("p", Some("o"), false);
    assert_eq!(none, None);
    assert!(session.start_answer(second).is_none(), "it waits with the first");
    for other in [None, Some("other")] {
        let (call, none) = session.begin_with("p", other, false);
        refused(session.start_answer(call).unwrap(), "process p already exists");
        assert_eq!(none, None);
    }
    // The link is cut: who repeats is answered, and the start goes on.
    session.handle(Input::Detach { generation: 1 });
    refused(session.start_answer(second).unwrap(), "the session was detached before the call ended");
    session.attach();
    let (third, none) = session.begin_with("p", Some("o"), false);
    assert_eq!(none, None);
    let key = key.unwrap();
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    let answer = session.start_answer(first).unwrap().unwrap();
    assert_eq!(session.start_answer(third).unwrap().unwrap(), answer);
    session.close(key);
    let (late, none) = session.begin_with("p", Some("o"), false);
    assert_eq!((session.start_answer(late).unwrap().unwrap(), none), (answer, None));
    session.announced();
    // Even when it is forgotten it is not started anew, and another start is.
    while !session.list().is_empty() {
        session.jump();
    }
    let (later, none) = session.begin_with("p", Some("o"), false);
    let text = "process p was started by this operation before and is forgotten: it is not started again";
    refused(session.start_answer(later).unwrap(), text);
    assert_eq!(none, None);
    assert!(session.begin_with("p", Some("other"), false).1.is_some());
}

#[test]
fn all_that_repeat_a_start_hear_that_it_failed_and_may_try_again() {
    let mut session = Harness::attached();
    let (first, key) = session.begin_with("p", Some("o"), false);
    let (second, _) = session.begin_with("p", Some("o"), false);
    session.handle(Input::StartFailed { key: key.unwrap(), error: RpcError::new(code::INTERNAL, "no") });
    for call in [first, second] {
        refused(session.start_answer(call).unwrap(), "no");
    }
    assert!(session.begin_with("p", Some("o"), false).1.is_some(), "nothing was started");
}

#[test]
fn input_ends_once_and_only_where_it_can() {
    let mut session = Harness::attached();
    refused(session.close_stdin("p"), "unknown process id p");
    let key = session.begin("p").unwrap();
    refused(session.close_stdin("p"), "process id p is starting");
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    let huge = session.ask_write("p", "1", &[0; 16 << 20]);
    session.write_answer(huge).unwrap().unwrap();
    // A write waits, so the end waits behind it; a cut link takes both back.
    let write = session.ask_write("p", "2", b"x");
    let end = session.call(|call| Input::CloseStdin { call, process: "p".to_owned() });
    session.handle(Input::Detach { generation: 1 });
    assert!(matches!(session.answers.remove(&end), Some(Answer::Done(Err(_)))));
    assert!(session.write_answer(write).unwrap().is_err());
    session.attach();
    let write = session.ask_write("p", "2", b"x");
    let end = session.call(|call| Input::CloseStdin { call, process: "p".to_owned() });
    session.handle(Input::Feed { key, feed: Feed::Taken { bytes: 16 << 20 } });
    assert_eq!(session.write_answer(write).unwrap().unwrap(), WriteStatus::Accepted);
    assert!(matches!(session.answers.remove(&end), Some(Answer::Done(Ok(())))));
    let told = |output: &&Output| matches!(output, Output::CloseStdin { .. } | Output::Write { .. });
    let told: Vec<bool> = session.outputs.iter().filter(told).map(|told| matches!(told, Output::CloseStdin { .. })).collect();
    assert_eq!(told, [false, false, true], "the end comes last");
    assert_eq!(session.write("p", "3").unwrap(), WriteStatus::StdinClosed);
    assert_eq!(session.write("p", "2").unwrap(), WriteStatus::Accepted, "an id that was accepted");
    session.close_stdin("p").unwrap();
    session.close(key);
    session.close_stdin("p").unwrap();
    assert_eq!(session.outputs.iter().filter(|output| matches!(output, Output::CloseStdin { .. })).count(), 1);

    let (_, key) = session.begin_with("t", None, true);
    session.handle(Input::Started { key: key.unwrap(), sandbox_type: "none", enforcement: None });
    let text = "process t has a terminal, whose input cannot be closed: write the byte \\x04 to end it";
    refused(session.close_stdin("t"), text);
}

#[test]
fn terminals_are_resized_and_nothing_else() {
    let mut session = Harness::attached();
    refused(session.resize("p"), "unknown process id p");
    session.start("p");
    refused(session.resize("p"), "process p has no terminal to resize: it was started without `tty`");
    let (_, key) = session.begin_with("t", None, true);
    refused(session.resize("t"), "process id t is starting");
    let key = key.unwrap();
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    session.resize("t").unwrap();
    assert!(session.outputs.iter().any(|output| matches!(output, Output::Resize { key: of, .. } if *of == key)));
    session.close(key);
    session.resize("t").unwrap();
}

#[test]
fn signals_of_a_start_are_sent_once_it_runs() {
    let mut session = Harness::attached();
    session.signal("nobody", "interrupt");
    let key = session.begin("p").unwrap();
    for name in ["stop", "user1", "continue", "stop", "continue"] {
        session.signal("p", name);
    }
    assert_eq!(session.signalled(), [] as [i32; 0]);
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    assert_eq!(session.signalled(), [10, 19, 18], "each once, in the order in which they were last wanted");
    session.signal("p", "SIGWINCH");
    session.signal("p", "SIGKILL");
    assert_eq!((session.signalled().last(), session.killed()), (Some(&28), vec![key]), "kill is terminate");
    session.exit(key);
    session.signal("p", "terminate");
    assert_eq!(session.signalled().last(), Some(&28));
}

#[test]
fn processes_are_listed_in_the_order_of_their_starts() {
    let mut session = Harness::attached();
    assert!(session.list().is_empty());
    let closed = session.start("z");
    let exited = session.start("y");
    session.begin_with("x", None, true).1.unwrap();
    session.start("w");
    session.output(closed, 3);
    session.close(closed);
    session.exit(exited);
    let listed = session.list();
    let told: Vec<_> = listed
        .iter()
        .map(|process| (process.process_id.as_str(), process.state, process.exit_code, process.tty, process.next_seq))
        .collect();
    let expect = [
        ("z", ProcessState::Closed, Some(3), false, 4),
        ("y", ProcessState::Exited, Some(3), false, 2),
        ("x", ProcessState::Starting, None, true, 1),
        ("w", ProcessState::Running, None, false, 1),
    ];
    assert_eq!(told, expect);
    assert_eq!((listed[2].sandbox_type.as_deref(), listed[3].sandbox_type.as_deref()), (None, Some("none")));
    assert!(listed.iter().all(|process| process.started_at_ms == 7));
}

impl Harness {
    fn marked() -> (Self, u64, u64) {
        let mut session = Self::new();
        assert_eq!(session.attach_with(Proof::Mark), Some(1));
        let (one, two) = (session.start("one"), session.start("two"));
        (session, one, two)
    }

    fn fill(&mut self, key: u64) {
        while self.room(key) >= 8192 {
            self.output(key, 8192);
            self.announced();
        }
    }

    fn room(&self, key: u64) -> usize {
        self.state.processes[&key].log.room()
    }

    fn acknowledge(&mut self, process: &str, seq: u64) -> Result<(), RpcError> {
        let params = AcknowledgeParams { process_id: process.to_owned(), seq };
        self.done(|call| Input::Acknowledge { call, params })
    }
}

#[test]
fn a_process_that_starts_while_its_client_comes_and_goes_gets_its_credit() {
    let mut session = Harness::attached();
    let key = session.begin("p").unwrap();
    session.handle(Input::Detach { generation: 1 });
    session.attach();
    session.handle(Input::Started { key, sandbox_type: "none", enforcement: None });
    let started = session.outputs.iter().position(|output| matches!(output, Output::Grant { .. }));
    let launched = session.outputs.iter().position(|output| matches!(output, Output::Launch { .. }));
    assert!(started > launched, "{:?}", session.outputs);
    assert_eq!(
        session.outputs.iter().filter(|output| matches!(output, Output::Grant { .. })).count(),
        1,
        "and none before it runs"
    );
}

#[test]
fn what_was_sent_makes_room_once_a_mark_behind_it_is_answered() {
    let (mut session, one, two) = Harness::marked();
    session.output(one, 8192);
    session.announced();
    assert_eq!(session.state.mark(), None, "a small tail harms nobody");
    for key in [one, two] {
        for _ in 0..20 {
            session.output(key, 8192);
        }
    }
    session.announced();
    let first = session.state.mark().unwrap();
    assert_eq!(session.state.mark(), None);
    session.fill(one);
    session.fill(two);
    let second = session.state.mark().unwrap();
    assert_eq!((session.room(one), session.room(two)), (0, 0));
    for (generation, mark) in [(0, first), (2, first), (1, 0), (1, second + 1), (1, u64::MAX)] {
        session.handle(Input::Delivered { generation, mark });
        assert_eq!((session.room(one), session.room(two)), (0, 0), "{generation} {mark} means nothing");
    }
    session.handle(Input::Delivered { generation: 1, mark: first });
    assert!(session.room(one) > 0 && session.room(two) > 0);
    let log = &session.state.processes[&one].log;
    assert_eq!(log.told(), log.last());
    session.fill(one);
    // An answer speaks for those before it, and none counts twice.
    let third = session.state.mark();
    session.handle(Input::Delivered { generation: 1, mark: second });
    assert!(session.room(one) > 0 && session.room(two) > 0);
    session.handle(Input::Delivered { generation: 1, mark: first });
    session.handle(Input::Delivered { generation: 1, mark: third.unwrap_or(second) });
    session.handle(Input::Detach { generation: 1 });
    session.attach_with(Proof::Mark);
    session.handle(Input::Delivered { generation: 2, mark: second });
    assert!(session.state.delivery_is_empty());
}

#[test]
fn marks_on_their_way_are_bounded() {
    let (mut session, one, _) = Harness::marked();
    let mut marks = Vec::new();
    for _ in 0..200 {
        for _ in 0..32 {
            session.output(one, 8192);
        }
        session.announced();
        marks.extend(session.state.mark());
    }
    assert_eq!(marks.len(), 64);
    session.handle(Input::Delivered { generation: 1, mark: marks[0] });
    let late = session.state.mark().unwrap();
    session.handle(Input::Delivered { generation: 1, mark: late });
    assert!(session.room(one) > 0, "it covers all that came meanwhile");
}

#[test]
fn a_client_that_acknowledges_is_taken_at_its_word_and_at_nothing_else() {
    let mut session = Harness::new();
    assert_eq!(session.attach_with(Proof::Word), Some(1));
    let key = session.start("p");
    session.fill(key);
    assert_eq!((session.state.mark(), session.room(key)), (None, 0));
    let page = session.read("p", 0).unwrap();
    assert_eq!((page.chunks.len(), session.room(key)), (512, 0), "a page is not a proof");
    refused(session.acknowledge("x", 0), "unknown process id x");
    refused(session.acknowledge("p", 513), "process p has no event 513 yet: its last is 512");
    assert_eq!(session.room(key), 0);
    session.acknowledge("p", 100).unwrap();
    session.acknowledge("p", 1).unwrap();
    session.fill(key);
    assert_eq!(session.state.processes[&key].log.last(), 612);
    session.read("p", 200).unwrap();
    assert!(session.room(key) > 0, "a cursor is");
    session.fill(key);
    session.read("p", 9999).unwrap();
    assert_eq!(session.room(key), 0, "one from the future is not");
    let deadline = session.state.deadline();
    assert_eq!(deadline, None, "it is waited for");
}

#[test]
fn a_page_of_what_was_missed_counts_once_a_mark_behind_it_is_answered() {
    let (mut session, one, _) = Harness::marked();
    session.handle(Input::Detach { generation: 1 });
    while session.room(one) >= 8192 {
        session.output(one, 8192);
    }
    assert_eq!(session.attach_with(Proof::Mark), Some(2));
    let call = session.ask_read("one", 0, 0);
    let Some(Answer::Read(Ok(_), Some(page))) = session.answers.remove(&call) else { panic!("no receipt") };
    // The time to catch up passes while the page is on its way: it is not given up.
    session.jump();
    assert_eq!((session.state.mark(), session.room(one)), (None, 0));
    session.handle(Input::HandedOut { generation: 1, page });
    assert_eq!(session.state.mark(), None, "a stale connection says nothing");
    session.handle(Input::HandedOut { generation: 2, page });
    let mark = session.state.mark().unwrap();
    session.jump();
    assert_eq!(session.room(one), 0);
    session.handle(Input::Delivered { generation: 2, mark });
    assert!(session.room(one) > 0);
    let call = session.ask_read("one", 0, 0);
    assert!(matches!(session.answers.remove(&call), Some(Answer::Read(Ok(_), None))), "it has caught up");
}

#[test]
fn spools_of_a_session_share_a_quota_and_pages_of_them_are_read_beside_it() {
    let mut session = Harness::attached();
    session.state.limits = SpoolLimits { process: 1 << 20, session: 1536 << 10 };
    let keys = [session.start("one"), session.start("two")];
    session.handle(Input::Detach { generation: 1 });
    let mut files: BTreeMap<(u64, u64), Vec<u8>> = BTreeMap::new();
    for key in keys {
        while session.room(key) >= 8192 {
            session.output(key, 8192);
            for output in std::mem::take(&mut session.outputs) {
                if let Output::Spool { key, write } = output {
                    files.insert((key, write.at), write.bytes);
                    session.handle(Input::SpoolWritten { key, is_written: true });
                }
            }
        }
    }
    let spooled = keys.map(|key| session.state.processes[&key].log.spooled());
    assert_eq!(spooled, [1 << 20, 512 << 10], "the first has what a process may, the second what is left of the session's");
    session.attach();
    let (read, cut) = (session.ask_read("one", 0, 0), session.ask_read("two", 0, 0));
    let mut asked = std::mem::take(&mut session.outputs).into_iter();
    let Some(Output::ReadSpool { call, key, extents }) = asked.next() else { panic!("nothing is read") };
    assert_eq!(call, read);
    // Nobody else waits for it.
    assert!(session.read("two", 9999).is_ok() && session.read_answer(read).is_none());
    let slots = extents.iter().map(|(at, length)| files[&(key, *at)][..*length].to_vec()).collect();
    session.handle(Input::SpoolRead { call, slots: Ok(slots) });
    let page = session.read_answer(read).unwrap().unwrap();
    assert_eq!(page.chunks.len(), usize::try_from(session.state.processes[&key].log.last()).unwrap());
    session.handle(Input::Detach { generation: 2 });
    refused(session.read_answer(cut).unwrap(), "the session was detached before the call ended");
    session.handle(Input::SpoolRead { call: cut, slots: Ok(Vec::new()) });
}

/// Operations of a client and of pumps, as a fuzzer sees them.
#[derive(Debug, Clone)]
enum Step {
    Attach,
    Detach { stale: bool },
    Start(u8),
    StartWith { process: u8, operation: u8 },
    Started(u8),
    Failed(u8),
    Read { process: u8, after: u64, wait: u16 },
    Write { process: u8, id: u8 },
    CloseStdin(u8),
    Taken(u8),
    Terminate(u8),
    Output(u8, u16),
    Exit(u8),
    Close(u8),
    Announce,
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0..3_u8;
    prop_oneof![
        Just(Step::Attach),
        any::<bool>().prop_map(|stale| Step::Detach { stale }),
        process.clone().prop_map(Step::Start),
        (process.clone(), 0..2_u8).prop_map(|(process, operation)| Step::StartWith { process, operation }),
        process.clone().prop_map(Step::Started),
        process.clone().prop_map(Step::Failed),
        (process.clone(), 0..6_u64, 0..3000_u16).prop_map(|(process, after, wait)| Step::Read { process, after, wait }),
        (process.clone(), any::<u8>()).prop_map(|(process, id)| Step::Write { process, id }),
        process.clone().prop_map(Step::CloseStdin),
        process.clone().prop_map(Step::Taken),
        process.clone().prop_map(Step::Terminate),
        (process.clone(), 1..9000_u16).prop_map(|(process, bytes)| Step::Output(process, bytes)),
        process.clone().prop_map(Step::Exit),
        process.prop_map(Step::Close),
        Just(Step::Announce),
        (0..40_000_u16).prop_map(Step::Wait),
    ]
}

/// What a pump would do: which key a process has, and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pumped {
    Starting,
    Running,
    Exited,
    Closed,
}

proptest! {
    #[test]
    fn whatever_happens_calls_are_answered_once_and_events_stay_in_order(steps in prop::collection::vec(step(), 1..120)) {
        let mut session = Harness::new();
        let mut pumps: BTreeMap<u8, (u64, Pumped)> = BTreeMap::new();
        let (mut asked, mut generation, mut attached) = (BTreeSet::new(), 0, false);
        let mut announced: BTreeMap<String, u64> = BTreeMap::new();
        for step in steps {
            let generation_before = session.state.generation;
            match step {
                Step::Attach => {
                    let call = session.call(|call| Input::Attach { call, terms: Terms::default() });
                    if let Some(Answer::Attach(got)) = session.answers.get(&call) {
                        prop_assert_eq!(got.is_some(), !attached);
                        if let Some(got) = got {
                            (generation, attached) = (*got, true);
                            announced.clear();
                        }
                    }
                }
                Step::Detach { stale: true } => {
                    session.handle(Input::Detach { generation: generation.wrapping_sub(1) });
                    if attached && !session.has_ended() {
                        let is_attached = matches!(session.state.attachment, Attachment::Attached { .. });
                        prop_assert!(is_attached, "a stale generation changes nothing");
                    }
                }
                Step::Detach { stale: false } => {
                    session.handle(Input::Detach { generation });
                    attached = false;
                    prop_assert!(asked.iter().all(|call| session.answers.contains_key(call)), "nothing waits after a detach");
                }
                Step::Start(process) => if let Some(key) = session.begin(&process.to_string()) {
                    pumps.insert(process, (key, Pumped::Starting));
                },
                Step::StartWith { process, operation } if attached => {
                    let (call, key) = session.begin_with(&process.to_string(), Some(&operation.to_string()), false);
                    match key {
                        Some(key) => drop(pumps.insert(process, (key, Pumped::Starting))),
                        None => drop(asked.insert(call)),
                    }
                }
                Step::Started(process) => if let Some((key, at @ Pumped::Starting)) = pumps.get_mut(&process) {
                    *at = Pumped::Running;
                    session.handle(Input::Started { key: *key, sandbox_type: "none", enforcement: None });
                },
                Step::Failed(process) => if let Some((key, Pumped::Starting)) = pumps.get(&process).copied() {
                    pumps.remove(&process);
                    session.handle(Input::StartFailed { key, error: RpcError::new(0, "") });
                },
                // Only an attached client asks.
                Step::Read { process, after, wait } if attached => {
                    asked.insert(session.ask_read(&process.to_string(), after, wait.into()));
                }
                Step::Write { process, id } if attached => {
                    asked.insert(session.ask_write(&process.to_string(), &id.to_string(), &[0; 100]));
                }
                Step::CloseStdin(process) if attached => {
                    let process = process.to_string();
                    asked.insert(session.call(|call| Input::CloseStdin { call, process }));
                }
                Step::Taken(process) => if let Some((key, Pumped::Running)) = pumps.get(&process).copied() {
                    session.handle(Input::Feed { key, feed: Feed::Taken { bytes: 100 } });
                },
                Step::Terminate(process) if attached => {
                    let process = process.to_string();
                    asked.insert(session.call(|call| Input::Terminate { call, process, grace: Duration::ZERO }));
                }
                Step::Output(process, bytes) => if let Some((key, Pumped::Running | Pumped::Exited)) = pumps.get(&process).copied() {
                    session.output(key, bytes.into());
                },
                Step::Exit(process) => if let Some((key, at @ Pumped::Running)) = pumps.get_mut(&process) {
                    *at = Pumped::Exited;
                    let key = *key;
                    session.exit(key);
                },
                Step::Close(process) => if let Some((key, at @ Pumped::Exited)) = pumps.get_mut(&process) {
                    *at = Pumped::Closed;
                    let key = *key;
                    session.handle(Input::Feed { key, feed: Feed::Closed });
                    // Nothing comes after it, whatever a broken pump says.
                    let last = session.state.processes.get(&key).map(|process| process.log.last());
                    session.output(key, 1);
                    prop_assert_eq!(session.state.processes.get(&key).map(|process| process.log.last()), last);
                },
                Step::Announce => if let Some(text) = session.state.announce() {
                    prop_assert!(attached);
                    let event: serde_json::Value = serde_json::from_str(&text).unwrap();
                    let (process, seq) = (&event["params"]["processId"], event["params"]["seq"].as_u64().unwrap());
                    let before = announced.insert(process.as_str().unwrap().to_owned(), seq);
                    let is_next = before.is_none_or(|before| seq == before + 1 || seq == 1);
                    prop_assert!(is_next, "{} after {:?}", seq, before);
                },
                Step::Wait(seconds) => {
                    session.now += Duration::from_millis(u64::from(seconds));
                    session.handle(Input::Timeout);
                }
                Step::StartWith { .. } | Step::Read { .. } | Step::Write { .. } | Step::CloseStdin(_) | Step::Terminate(_) => {}
            }
            if session.has_ended() {
                prop_assert!(!attached, "only a detached session expires");
                prop_assert_eq!(session.state.generation, generation_before);
                return Ok(());
            }
            if let Some(deadline) = session.state.deadline() {
                prop_assert!(deadline > session.now, "what is due was done");
            }
        }
        // Every call is answered at the latest when its time is up.
        session.now += Duration::from_secs(4);
        session.handle(Input::Timeout);
        session.handle(Input::Detach { generation });
        prop_assert!(asked.iter().all(|call| session.answers.contains_key(call)));
    }
}

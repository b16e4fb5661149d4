use super::*;
use crate::helper::spawner::fake;
use crate::session::guard::Bounds;
use crate::session::message::Start;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Stream;
use portcullis_protocol::limit::TreeEnd;
use portcullis_protocol::logged::{AcknowledgeParams, WhenFull};
use portcullis_protocol::process::{
    ListedProcess, ProcessState, ReadParams, ReadResult, Size, StartResult, WriteParams, WriteStatus,
};
use portcullis_protocol::signal::Signal;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

mod attach;
mod bounds;
mod calls;
mod delivery;
mod stories;

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
    output: Option<NonZeroU64>,
}

impl Harness {
    fn new() -> Self {
        let now = Instant::now();
        let retention = Retention { detached: RETENTION, closed: RETENTION };
        Self {
            state: State::new(retention, SpoolLimits::default(), 1024, now),
            now,
            next_call: 0,
            answers: BTreeMap::new(),
            outputs: Vec::new(),
            bounds: Bounds::default(),
            output: None,
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
            output: self.output,
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
        self.handle(Input::Started {
            key,
            sandbox_type: "none",
            enforcement: None,
            limits: Vec::new(),
            tree: TreeEnd::Descendants,
        });
        key
    }

    fn output(&mut self, key: u64, bytes: usize) {
        let feed = Feed::Output { stream: Stream::Stdout, bytes: vec![b'x'; bytes].into() };
        self.handle(Input::Feed { key, feed });
    }

    fn exit(&mut self, key: u64) {
        self.handle(Input::Feed {
            key,
            feed: Feed::Exited { code: 3, denials: Denials::default(), failure: None, limits: Vec::new() },
        });
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
        let call = self.call(|call| Input::Terminate { call, process, grace: Duration::ZERO, report: false });
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
        std::iter::from_fn(|| self.state.announce()).map(|message| message.text).collect()
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

    session.handle(Input::Started {
        key,
        sandbox_type: "linuxSeccomp",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
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
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
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
    session
        .handle(Input::Feed { key, feed: Feed::Exited { code: 1, denials: denials.clone(), failure: None, limits: Vec::new() } });
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
        session.handle(Input::Feed { key, feed: Feed::Exited { code, denials, failure: None, limits: Vec::new() } });
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
    session.handle(Input::Started {
        key: starting,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
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
    assert_eq!(session.start_error("more"), "process/start more: at most 1024 processes may run in a session; let some end");
    session.close(keys[0]);
    session.start("more");
}

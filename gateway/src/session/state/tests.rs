use super::*;
use crate::helper::spawner::fake;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::event::Stream;
use portcullis_protocol::process::{ReadParams, ReadResult, WriteParams, WriteStatus};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const RETENTION: Duration = Duration::from_secs(90);

/// A session with a clock that jumps.
struct Harness {
    state: State,
    now: Instant,
    next_call: Call,
    answers: BTreeMap<Call, Answer>,
    outputs: Vec<Output>,
}

impl Harness {
    fn new() -> Self {
        let now = Instant::now();
        let retention = Retention { detached: RETENTION, closed: RETENTION };
        Self { state: State::new(retention, now), now, next_call: 0, answers: BTreeMap::new(), outputs: Vec::new() }
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
        let call = self.call(|call| Input::Attach { call });
        match self.answers.remove(&call) {
            Some(Answer::Attach(generation)) => generation,
            other => panic!("{other:?}"),
        }
    }

    /// Begins a start and answers its key.
    fn begin(&mut self, process: &str) -> Option<u64> {
        let process = process.to_owned();
        let call = self.call(|call| Input::Start { call, process, takes_input: true });
        self.outputs.iter().find_map(|output| match output {
            Output::Launch { call: of, key } if *of == call => Some(*key),
            _ => None,
        })
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
        let params =
            ReadParams { process_id: process.to_owned(), after_seq: Some(after), max_bytes: None, wait_ms: Some(wait_ms) };
        self.call(|call| Input::Read { call, params })
    }

    fn read_answer(&mut self, call: Call) -> Option<Result<ReadResult, RpcError>> {
        match self.answers.remove(&call)? {
            Answer::Read(result) => Some(result),
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
        let call = self.call(|call| Input::Terminate { call, process });
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
    let call = session.call(|call| Input::Attach { call });
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

/// Operations of a client and of pumps, as a fuzzer sees them.
#[derive(Debug, Clone)]
enum Step {
    Attach,
    Detach { stale: bool },
    Start(u8),
    Started(u8),
    Failed(u8),
    Read { process: u8, after: u64, wait: u16 },
    Write { process: u8, id: u8 },
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
        process.clone().prop_map(Step::Started),
        process.clone().prop_map(Step::Failed),
        (process.clone(), 0..6_u64, 0..3000_u16).prop_map(|(process, after, wait)| Step::Read { process, after, wait }),
        (process.clone(), any::<u8>()).prop_map(|(process, id)| Step::Write { process, id }),
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
                    let call = session.call(|call| Input::Attach { call });
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
                Step::Taken(process) => if let Some((key, Pumped::Running)) = pumps.get(&process).copied() {
                    session.handle(Input::Feed { key, feed: Feed::Taken { bytes: 100 } });
                },
                Step::Terminate(process) if attached => {
                    let process = process.to_string();
                    asked.insert(session.call(|call| Input::Terminate { call, process }));
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
                Step::Read { .. } | Step::Write { .. } | Step::Terminate(_) => {}
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

//! A session with real processes, started by a stand-in for the spawner.

use super::super::{Command, SessionHandle, Terms, start};
use super::*;
use crate::helper::spawner::fake;
use crate::link::Link;
use crate::session::Places;
use portcullis_protocol::base64::{Chunk, decode};
use portcullis_protocol::helper::{Enforced, ExitStatus, SpawnerEvent, SpawnerRequest, Step, StepFailed};
use portcullis_protocol::limit::{ProcessLimits, TreeEnd};
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::{
    CloseStdinParams, ReadParams, ReadResult, SignalParams, TerminateParams, WriteParams, WriteStatus,
};
use portcullis_protocol::rpc::code;
use portcullis_protocol::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use tokio_util::sync::CancellationToken;

struct Client {
    session: SessionHandle,
    attachment: Option<Attachment>,
    incoming: mpsc::Receiver<Outgoing>,
    /// The session, the spawner and its stand-in.
    tasks: JoinSet<()>,
}

/// What a process did, as its notifications tell.
#[derive(Debug, Default, PartialEq, Eq)]
struct Story {
    output: BTreeMap<String, Vec<u8>>,
    exit: Option<i64>,
    seqs: Vec<u64>,
    methods: Vec<String>,
}

impl Client {
    async fn new() -> Self {
        let mut tasks = JoinSet::new();
        let spawner = fake::spawner(&mut tasks);
        Self::with(spawner, tasks).await
    }

    async fn with(spawner: Spawner, tasks: JoinSet<()>) -> Self {
        Self::with_retention(spawner, tasks, Duration::from_secs(90)).await
    }

    async fn with_retention(spawner: Spawner, mut tasks: JoinSet<()>, retention: Duration) -> Self {
        let config = SessionConfig {
            process_limits: ProcessLimits::default(),
            process_times: crate::config::ProcessTimes::default(),
            retention,
            environment: Arc::new([]),
            allow_unprotected: false,
            shell: "/bin/sh".to_owned(),
            spool: std::env::temp_dir(),
            spool_limits: crate::session::SpoolLimits { process: 64 << 20, session: 256 << 20 },
            metrics: Arc::new(crate::metrics::Metrics::new()),
            audit: None,
            scope: None,
            most_processes: 1024,
            processes: Places { free: Arc::new(tokio::sync::Semaphore::new(1024)), all: 1024 },
            pipes: Budget::new(16 << 20),
        };
        let (session, task) = start("s".into(), spawner, config);
        tasks.spawn(task);
        let mut client = Self { session, attachment: None, incoming: mpsc::channel(1).1, tasks };
        client.attach().await;
        client
    }

    async fn attach(&mut self) {
        let (outgoing, incoming) = mpsc::channel(8);
        self.incoming = incoming;
        let attached = self.try_attach(outgoing).await.unwrap();
        self.attachment = Some(attached);
    }

    async fn try_attach(&self, outgoing: mpsc::Sender<Outgoing>) -> Result<Attachment, AttachError> {
        let (reply, answer) = oneshot::channel();
        let doubt = Link::pair("test", true).0.doubt;
        let newcomer = Newcomer { outgoing, evicted: CancellationToken::new(), doubt, terms: Terms::default() };
        self.session.send(Command::Attach { newcomer, reply }).await.unwrap();
        answer.await.unwrap()
    }

    async fn detach(&mut self) {
        let attachment = self.attachment.take().unwrap();
        self.session.send(Command::Detach(attachment)).await.unwrap();
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> oneshot::Receiver<Result<T, RpcError>> {
        let (reply, answer) = oneshot::channel();
        self.session.send(command(reply)).await.unwrap();
        answer
    }

    async fn ask_start(&mut self, params: StartParams) -> oneshot::Receiver<Result<StartResult, RpcError>> {
        let turn = self.attachment.as_mut().unwrap().order.mutation();
        self.ask(|reply| Command::Start { params: Box::new(params), policy: None, turn, reply }).await
    }

    async fn start(&mut self, params: StartParams) -> Result<StartResult, RpcError> {
        self.ask_start(params).await.await.unwrap()
    }

    async fn read(&self, process: &str, after: u64, wait_ms: u64) -> ReadResult {
        let params = ReadParams {
            process_id: process.to_owned(),
            after_seq: Some(after),
            max_bytes: None,
            wait_ms: Some(wait_ms),
            ..ReadParams::default()
        };
        let Page { result, receipt, .. } = self.ask_read(params).await.await.unwrap().unwrap();
        if let Some(receipt) = receipt {
            self.session.send(receipt).await.unwrap();
        }
        result
    }

    async fn ask_read(&self, params: ReadParams) -> oneshot::Receiver<Result<Page, RpcError>> {
        self.ask(|reply| Command::Read { params, replies: Budget::new(64 << 20), reply }).await
    }

    async fn ask_write(&self, process: &str, id: &str, bytes: &[u8]) -> oneshot::Receiver<Result<WriteResult, RpcError>> {
        let params = WriteParams { process_id: process.to_owned(), chunk: Chunk(bytes.to_vec()), write_id: id.to_owned() };
        self.ask(|reply| Command::Write { params, reply }).await
    }

    async fn write(&self, process: &str, id: &str, bytes: &[u8]) -> WriteStatus {
        self.ask_write(process, id, bytes).await.await.unwrap().unwrap().status
    }

    async fn terminate(&self, process: &str) -> bool {
        let params = TerminateParams { process_id: process.to_owned(), grace_ms: None, report: false };
        self.ask(|reply| Command::Terminate { params, reply }).await.await.unwrap().unwrap().running
    }

    async fn interrupt(&self, process: &str) {
        self.signal(process, Signal::INTERRUPT).await;
    }

    async fn signal(&self, process: &str, signal: Signal) {
        let params = SignalParams { process_id: process.to_owned(), signal };
        self.ask(|reply| Command::Signal { params, reply }).await.await.unwrap().unwrap();
    }

    async fn next(&mut self) -> Value {
        match self.incoming.recv().await {
            Some(Outgoing::Text(text)) => serde_json::from_str(&text).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// Follows a process until what it wrote to `stream` ends with `end`.
    async fn until(&mut self, stream: &str, end: &[u8]) {
        let mut seen = Vec::new();
        while !seen.ends_with(end) {
            let event = self.next().await;
            assert_eq!(event["params"]["stream"], stream, "{event}");
            seen.extend(decode(event["params"]["chunk"].as_str().unwrap()).unwrap());
        }
    }

    /// Follows the only process to its close.
    async fn story(&mut self) -> Story {
        let mut story = Story::default();
        loop {
            let event = self.next().await;
            let (method, params) = (event["method"].as_str().unwrap(), &event["params"]);
            story.seqs.push(params["seq"].as_u64().unwrap());
            story.methods.push(method.to_owned());
            match method {
                "process/output" => {
                    let chunk = decode(params["chunk"].as_str().unwrap()).unwrap();
                    assert!((1..=8192).contains(&chunk.len()));
                    story.output.entry(params["stream"].as_str().unwrap().to_owned()).or_default().extend(chunk);
                }
                "process/exited" => story.exit = params["exitCode"].as_i64(),
                _closed => return story,
            }
        }
    }

    /// Ends the session, and with it everything.
    async fn end(mut self) {
        let _already_ended = self.session.send(Command::Close).await;
        drop(self.session);
        while let Some(task) = self.tasks.join_next().await {
            task.unwrap();
        }
    }
}

fn shell(process: &str, script: &str) -> StartParams {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let env = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
    StartParams { env, ..StartParams::new(process, argv, WirePath::parse("/").unwrap()) }
}

#[tokio::test]
async fn quick_commands_tell_their_output_before_their_exit() {
    let mut client = Client::new().await;
    for nth in 0..30 {
        let id = format!("p{nth}");
        let started = client.start(shell(&id, "echo out; echo err >&2; exit 3")).await.unwrap();
        assert_eq!((started.process_id, started.sandbox_type.as_str()), (id, "none"));
        let story = client.story().await;
        assert_eq!(story.output, BTreeMap::from([("stdout".into(), b"out\n".to_vec()), ("stderr".into(), b"err\n".to_vec())]));
        assert_eq!((story.exit, story.seqs), (Some(3), vec![1, 2, 3, 4]));
        assert_eq!(story.methods, ["process/output", "process/output", "process/exited", "process/closed"]);
    }
    client.end().await;
}

#[tokio::test]
async fn a_reply_comes_before_the_first_event() {
    let mut client = Client::new().await;
    client.detach().await;
    let (outgoing, incoming) = mpsc::channel(8);
    client.incoming = incoming;
    client.attachment = Some(client.try_attach(outgoing.clone()).await.unwrap());
    for nth in 0..20 {
        // As a connection does: the answer is awaited in a task of its own and goes the way of the notifications.
        let answer = client.ask_start(shell(&nth.to_string(), "echo x")).await;
        let outgoing = outgoing.clone();
        client.tasks.spawn(async move {
            answer.await.unwrap().unwrap();
            outgoing.send(Outgoing::Text(r#""reply""#.to_owned())).await.unwrap();
        });
        assert_eq!(client.next().await, "reply");
        client.story().await;
    }
    drop(outgoing);
    client.end().await;
}

#[tokio::test]
async fn a_large_output_arrives_whole_through_a_narrow_connection() {
    let mut client = Client::new().await;
    client.start(shell("p", "head -c 20000000 /dev/zero; echo END")).await.unwrap();
    let story = client.story().await;
    assert_eq!(story.output["stdout"].len(), 20_000_004);
    assert!(story.output["stdout"].ends_with(b"\0END\n"));
    assert!(story.seqs.iter().copied().eq(1..=story.seqs.len() as u64));
    client.end().await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_holds_up_output_and_nothing_else() {
    let mut client = Client::new().await;
    client.start(shell("p", "cat /dev/zero")).await.unwrap();
    // The log fills up to its bound: the page stops growing only when the pump has stopped reading.
    let mut last = 0;
    loop {
        let page = client.read("p", last, 200).await;
        if page.chunks.is_empty() {
            break;
        }
        last = page.next_seq - 1;
        assert!(last < 2000, "an unread log is bounded");
    }
    assert!(client.terminate("p").await);
    let read = client.read("p", last + 1000, 0).await;
    assert!(!read.closed || read.exit_code == Some(137));
    let story = client.story().await;
    assert_eq!((story.exit, story.seqs.len() as u64), (Some(137), *story.seqs.last().unwrap()));
    client.end().await;
}

#[tokio::test]
async fn output_held_by_a_child_comes_after_the_exit() {
    let mut client = Client::new().await;
    // The background child writes when its standard input ends, which is after the leader has exited.
    let params = StartParams { pipe_stdin: true, ..shell("p", "exec 3<&0; (read line <&3; echo late) & echo early") };
    client.start(params).await.unwrap();
    let story = client.story().await;
    assert_eq!(story.output["stdout"], b"early\nlate\n");
    assert_eq!(story.methods, ["process/output", "process/exited", "process/output", "process/closed"]);
    client.end().await;
}

#[tokio::test]
async fn input_is_written_once_and_in_order() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "cat") }).await.unwrap();
    for text in ["a\n", "a\n", "b\n"] {
        assert_eq!(client.write("p", "same", text.as_bytes()).await, WriteStatus::Accepted);
    }
    assert_eq!(client.write("p", "empty", b"").await, WriteStatus::Accepted);
    assert_eq!(client.write("p", "other", b"end\n").await, WriteStatus::Accepted);
    client.until("stdout", b"a\nend\n").await;
    assert!(client.terminate("p").await);
    assert_eq!(client.story().await.exit, Some(137));
    assert_eq!(client.write("p", "late", b"x").await, WriteStatus::StdinClosed);
    assert_eq!(client.write("p", "same", b"x").await, WriteStatus::Accepted);
    client.end().await;
}

#[tokio::test]
async fn input_ends_behind_what_was_accepted() {
    let mut client = Client::new().await;
    // It reads once all that it wrote is taken, which is after the end was asked for: most of the input is on its way then.
    let script = "head -c 8388608 /dev/zero; wc -c";
    client.start(StartParams { pipe_stdin: true, ..shell("p", script) }).await.unwrap();
    let chunk = vec![b'x'; 65536];
    for nth in 0..20 {
        assert_eq!(client.write("p", &nth.to_string(), &chunk).await, WriteStatus::Accepted);
    }
    let params = CloseStdinParams { process_id: "p".to_owned() };
    client.ask(|reply| Command::CloseStdin { params, reply }).await.await.unwrap().unwrap();
    assert_eq!(client.write("p", "late", b"x").await, WriteStatus::StdinClosed);
    let story = client.story().await;
    assert!(story.output["stdout"].ends_with(b"\x001310720\n") && story.exit == Some(0));
    client.end().await;
}

#[tokio::test]
async fn a_full_queue_holds_up_that_write_alone() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "read go; cat | wc -c") }).await.unwrap();
    // The pipe holds 64 KiB, the queue 128 chunks, and one is in the pump's hands.
    let chunk = vec![b'x'; 65536];
    let mut waiting = Vec::new();
    for nth in 0..140 {
        waiting.push(client.ask_write("p", &nth.to_string(), &chunk).await);
    }
    // The session answers everything else meanwhile, in order: this read comes after all the writes.
    assert!(client.read("p", 0, 0).await.chunks.is_empty());
    let accepted = waiting.iter_mut().filter_map(|answer| answer.try_recv().ok()).count();
    assert!((126..=134).contains(&accepted), "{accepted} writes were accepted");
    assert!(client.terminate("p").await);
    client.story().await;
    for answer in waiting.iter_mut().skip(accepted) {
        assert_eq!(answer.await.unwrap().unwrap().status, WriteStatus::StdinClosed);
    }
    client.end().await;
}

#[tokio::test]
async fn every_byte_of_input_arrives_once_there_is_a_reader() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "head -c 9175040 | sha256sum; exec cat") }).await.unwrap();
    let (mut waiting, mut all) = (Vec::new(), Vec::new());
    for nth in 0..140_u32 {
        // No chunk is like another, so none can take another's place.
        let chunk: Vec<u8> = (0..65536_u32).map(|at| (at + nth * 7).to_le_bytes()[usize::from(at % 3 == 0)]).collect();
        waiting.push(client.ask_write("p", &nth.to_string(), &chunk).await);
        all.extend(chunk);
    }
    for answer in waiting {
        assert_eq!(answer.await.unwrap().unwrap().status, WriteStatus::Accepted);
    }
    let sum: String = sha2::Digest::finalize(<sha2::Sha256 as sha2::Digest>::new_with_prefix(&all))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    client.until("stdout", format!("{sum}  -\n").as_bytes()).await;
    client.end().await;
}

#[tokio::test]
async fn a_child_that_closes_its_input_is_told_by_the_next_writes() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "exec <&-; echo closed; exec sleep 1000") }).await.unwrap();
    client.until("stdout", b"closed\n").await;
    let mut nth = 0;
    while client.write("p", &nth.to_string(), b"x").await == WriteStatus::Accepted {
        nth += 1;
        tokio::task::yield_now().await;
    }
    assert_eq!(client.write("p", "more", b"x").await, WriteStatus::StdinClosed);
    assert_eq!(client.write("p", "0", b"x").await, WriteStatus::Accepted);
    client.end().await;
}

#[tokio::test]
async fn a_terminal_echoes_and_ends() {
    let mut client = Client::new().await;
    let started = client.start(StartParams { tty: true, ..shell("p", "exec cat") }).await.unwrap();
    assert_eq!(started.process_id, "p");
    client.write("p", "1", b"hey\n").await;
    client.until("pty", b"hey\r\nhey\r\n").await;
    client.write("p", "2", &[4]).await;
    let story = client.story().await;
    assert_eq!((story.exit, story.output.len()), (Some(0), 0));
    assert_eq!(client.write("p", "3", b"x").await, WriteStatus::StdinClosed);
    client.end().await;
}

#[tokio::test]
async fn terminate_kills_the_group_and_no_signal_goes_to_the_dead() {
    let mut client = Client::new().await;
    client.start(shell("p", "trap '' INT TERM; echo ready; sleep 1000; true")).await.unwrap();
    client.until("stdout", b"ready\n").await;
    assert!(client.terminate("p").await);
    let story = client.story().await;
    assert_eq!((story.exit, story.output.len()), (Some(137), 0));
    assert!(!client.terminate("p").await);
    client.interrupt("p").await;
    client.interrupt("nobody").await;
    client.end().await;
}

#[tokio::test]
async fn an_interrupt_is_sigint_and_may_be_repeated() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    fake::say(
        &mut sender,
        &SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants },
    )
    .await;
    started.await.unwrap().unwrap();
    for _time in 0..2 {
        client.interrupt("p").await;
        let heard = fake::hear(&mut receiver).await;
        assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 2 }, _)) if of == id), "{heard:?}");
    }
    drop((sender, receiver, descriptors));
    client.end().await;
}

#[tokio::test]
async fn what_the_sandbox_saw_and_why_it_ended_a_process_reach_the_client() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    drop(descriptors);
    fake::say(
        &mut sender,
        &SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants },
    )
    .await;
    started.await.unwrap().unwrap();
    let (denials, failure) = (fake::denials(&["/etc/x"]), Some("more memory than its sandbox allows".to_owned()));
    let ended = SpawnerEvent::Exited {
        id,
        status: ExitStatus::Signal(9),
        denials: denials.clone(),
        failure: failure.clone(),
        limits: Vec::new(),
    };
    fake::say(&mut sender, &ended).await;
    assert_eq!(client.story().await.exit, Some(137));
    let read = client.read("p", 0, 0).await;
    assert_eq!((read.sandbox_denied, read.denials, read.failure), (true, denials.list, failure));
    client.end().await;
}

#[tokio::test]
async fn what_a_failed_start_was_denied_is_data_of_its_error() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let denial = fake::denials(&["/opt/tool"]).list.remove(0);
    for denial in [None, Some(denial)] {
        let started = client.ask_start(shell("p", "")).await;
        let Some((SpawnerRequest::Start { id, .. }, _descriptors)) = fake::hear(&mut receiver).await else { panic!() };
        let data = denial.as_ref().map(|denial| serde_json::json!({"denials": [denial]}));
        let attempt = "start `/opt/tool`".to_owned();
        let failure = StepFailed { step: Step::Execute, attempt, errno: 13, denial: denial.map(Box::new) };
        fake::say(&mut sender, &SpawnerEvent::StartFailed { id, failure }).await;
        let error = started.await.unwrap().unwrap_err();
        assert_eq!(error.message, "start `/opt/tool`: Permission denied (os error 13)");
        assert_eq!(error.data, data);
    }
    client.end().await;
}

#[tokio::test]
async fn what_cannot_start_says_why_and_frees_its_id() {
    let mut client = Client::new().await;
    let nowhere = StartParams { argv: vec!["/no/such/program".to_owned()], ..shell("p", "") };
    let error = client.start(nowhere).await.unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (code::INTERNAL, "start it: No such file or directory (os error 2)"));
    let empty = StartParams { argv: Vec::new(), ..shell("p", "") };
    assert_eq!(client.start(empty).await.unwrap_err().code, code::INVALID_PARAMS);
    let nul = StartParams { argv: vec!["a\0".to_owned()], ..shell("p", "") };
    assert_eq!(client.start(nul).await.unwrap_err().code, code::INTERNAL);
    client.start(shell("p", "true")).await.unwrap();
    assert_eq!(client.start(shell("p", "true")).await.unwrap_err().message, "process p already exists");
    client.end().await;
}

#[tokio::test]
async fn a_session_outlives_its_connection() {
    let mut client = Client::new().await;
    let params =
        StartParams { pipe_stdin: true, ..shell("p", "echo before; read line; echo while; read line; echo after; exit 5") };
    client.start(params).await.unwrap();
    client.until("stdout", b"before\n").await;
    let other = mpsc::channel(1).0;
    assert!(matches!(client.try_attach(other).await, Err(AttachError)));
    assert_eq!(client.write("p", "1", b"\n").await, WriteStatus::Accepted);
    // A long poll does not hold the session.
    let poll = ReadParams {
        process_id: "p".to_owned(),
        after_seq: Some(99),
        max_bytes: None,
        wait_ms: Some(60_000),
        ..ReadParams::default()
    };
    let poll = client.ask_read(poll).await;
    client.detach().await;
    assert!(poll.await.unwrap().is_err());
    client.attach().await;
    // The line was written before or after the resume; in either case the page has it.
    let page = client.read("p", 1, 60_000).await;
    assert_eq!(page.chunks[0].chunk.0, b"while\n");
    assert_eq!(client.write("p", "1", b"\n").await, WriteStatus::Accepted, "the id is remembered, the line is not read");
    assert!(client.read("p", 2, 0).await.chunks.is_empty());
    client.write("p", "2", b"\n").await;
    let story = client.story().await;
    assert_eq!(story.exit, Some(5));
    assert!(story.seqs.ends_with(&[3, 4, 5]), "{story:?}");
    client.end().await;
}

#[tokio::test]
async fn output_of_a_detached_process_is_kept_to_the_byte() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "read go; head -c 30000000 /dev/zero; echo END") }).await.unwrap();
    client.write("p", "1", b"go\n").await;
    let mut bytes = 0;
    let mut last = 0;
    // Cut and resume over and over, in the middle of the stream, until it has ended.
    loop {
        client.detach().await;
        client.attach().await;
        let page = client.read("p", last, 60_000).await;
        for chunk in &page.chunks {
            assert_eq!(chunk.seq, last + 1, "no gap");
            last += 1;
            bytes += chunk.chunk.0.len();
        }
        if page.closed {
            break;
        }
        for _event in 0..50 {
            let event = client.next().await;
            let seq = event["params"]["seq"].as_u64().unwrap();
            if seq > last {
                assert_eq!(seq, last + 1, "no gap");
                last = seq;
                bytes += event["params"]["chunk"].as_str().map_or(0, |chunk| decode(chunk).unwrap().len());
            }
            if event["method"] == "process/closed" {
                break;
            }
        }
    }
    assert_eq!(bytes, 30_000_004);
    client.end().await;
}

#[tokio::test]
async fn a_start_waits_for_the_mutations_before_it() {
    let mut client = Client::new().await;
    let before = client.attachment.as_mut().unwrap().order.mutation();
    let mut start = client.ask_start(shell("p", "true")).await;
    // The session has taken the start in by the time it answers this.
    let read =
        ReadParams { process_id: "p".to_owned(), after_seq: None, max_bytes: None, wait_ms: None, ..ReadParams::default() };
    let read = client.ask_read(read).await.await.unwrap();
    assert_eq!(read.unwrap_err().message, "process id p is starting");
    assert!(start.try_recv().is_err());
    drop(before);
    start.await.unwrap().unwrap();
    client.end().await;
}

#[tokio::test]
async fn the_end_of_a_session_kills_what_it_started() {
    let mut client = Client::new().await;
    client.start(shell("p", "trap '' TERM INT HUP; echo $$; while :; do sleep 0.01; done")).await.unwrap();
    let event = client.next().await;
    let pid = String::from_utf8(decode(event["params"]["chunk"].as_str().unwrap()).unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::test_kill_process(pid).unwrap();
    let session = client.session.clone();
    client.end().await;
    assert!(rustix::process::test_kill_process(pid).is_err(), "it is reaped before the session's task ends");
    assert!(session.send(Command::Close).await.is_err());
}

#[tokio::test]
async fn a_detached_session_expires() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    // Long enough to attach first, and short for a test.
    let mut client = Client::with_retention(spawner, tasks, Duration::from_secs(1)).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    drop(descriptors);
    fake::say(
        &mut sender,
        &SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants },
    )
    .await;
    started.await.unwrap().unwrap();
    client.detach().await;
    // The next thing that happens is the end of the session, which kills the process.
    let heard = fake::hear(&mut receiver).await;
    assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 9 }, _)) if of == id), "{heard:?}");
    assert!(client.session.send(Command::Close).await.is_err());
    // The helper never says that it exited: the session's task ends all the same.
    drop(client.session);
    drop(client.attachment);
    client.tasks.join_next().await.unwrap().unwrap();
}

#[tokio::test]
async fn when_the_spawner_dies_its_processes_are_lost() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    fake::say(
        &mut sender,
        &SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants },
    )
    .await;
    started.await.unwrap().unwrap();
    let pending = client.ask_start(shell("q", "")).await;
    fake::hear(&mut receiver).await.unwrap();
    // Its output is still held by somebody, but it is not waited for.
    drop((sender, receiver));
    let error = pending.await.unwrap().unwrap_err();
    assert!(error.message.starts_with("lost: "), "{error}");
    assert_eq!(client.story().await.exit, Some(137));
    drop(descriptors);
    assert!(client.read("p", 0, 0).await.failure.is_some());
    client.end().await;
}

#[tokio::test]
async fn terminating_what_starts_kills_it_once_it_runs() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    assert!(client.terminate("p").await);
    fake::say(
        &mut sender,
        &SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants },
    )
    .await;
    started.await.unwrap().unwrap();
    let heard = fake::hear(&mut receiver).await;
    assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 9 }, _)) if of == id), "{heard:?}");
    drop((sender, receiver, descriptors));
    client.end().await;
}

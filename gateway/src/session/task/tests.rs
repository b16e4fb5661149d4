//! A session with real processes, started by a stand-in for the spawner.

mod end;
mod input;

use super::super::{Command, SessionHandle, Terms, start};
use super::*;
use crate::helper::spawner::fake;
use crate::link::Link;
use crate::session::Places;
use portcullis_protocol::base64::{Chunk, decode};
use portcullis_protocol::helper::{SpawnerEvent, SpawnerRequest, Step, StepFailed};
use portcullis_protocol::limit::ProcessLimits;
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::{ReadParams, ReadResult, SignalParams, TerminateParams, WriteParams, WriteStatus};
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

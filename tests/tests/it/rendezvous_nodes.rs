//! A rendezvous of several nodes, which share a Redis: a client finds its executor at whatever node it is.

use super::rendezvous::{Rendezvous, connected, hear, heard, registered, said, say, status};
use portcullis_client::{
    ExecServerClient, ExecServerClientConnectOptions, ProcessEvent, ProcessInput, RemoteExecServerConnectArgs, Token,
};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use portcullis_relay::keys::Identity;
use portcullis_relay::registry::{Registry, RegistryError};
use portcullis_relay::socket::{DialError, Socket};
use portcullis_tests::{PATIENCE, Place, Program, portcullis};
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

const EXECUTOR: &str = "an-executor-token-of-the-tests";
const HARNESS: &str = "a-harness-token-of-the-tests";
const OTHER: &str = "another-token-of-the-tests";
const REDIS: &str = "/usr/bin/redis-server";

/// A Redis on a unix socket, which keeps nothing on disk.
struct Redis {
    program: Program,
    place: Place,
}

impl Redis {
    async fn start() -> Self {
        let place = Place::new();
        Self { program: Self::run(&place).await, place }
    }

    async fn run(place: &Place) -> Program {
        assert!(std::path::Path::new(REDIS).exists(), "{REDIS} is missing: install the Debian package redis-server");
        let (socket, directory) = (place.path("redis.sock"), place.path(""));
        let mut command = Command::new(REDIS);
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(socket).arg("--dir").arg(directory);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut program = Program::start(command);
        while !program.line().await.contains("ready to accept connections at") {}
        program
    }

    fn url(&self) -> String {
        format!("redis+unix://{}", self.place.path("redis.sock").display())
    }

    async fn kill(&mut self) {
        self.program.child.kill().await.unwrap();
    }

    /// A new one, which knows nothing.
    async fn restart(&mut self) {
        self.program = Self::run(&self.place).await;
    }
}

/// Passes connections on to the first of some addresses that answers.
struct Balancer {
    address: SocketAddr,
    targets: watch::Sender<Vec<SocketAddr>>,
    passed: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Balancer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (targets, known) = watch::channel(Vec::<SocketAddr>::new());
        let (passed, mut tasks) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
        let counts = Arc::clone(&passed);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _address)) = listener.accept().await {
                counts.fetch_add(1, Ordering::SeqCst);
                let targets = known.borrow().clone();
                connections.spawn(async move {
                    for target in targets {
                        if let Ok(mut server) = TcpStream::connect(target).await {
                            let _cut = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                            return;
                        }
                    }
                });
            }
        });
        Self { address, targets, passed, _tasks: tasks }
    }

    fn leads_to(&self, nodes: &[&Rendezvous]) {
        let address = |node: &&Rendezvous| node.url.strip_prefix("http://").unwrap().parse().unwrap();
        self.targets.send_replace(nodes.iter().map(address).collect());
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn passed(&self) -> usize {
        self.passed.load(Ordering::SeqCst)
    }
}

/// Two nodes with a Redis, and what each dials to reach the other.
struct Nodes {
    redis: Redis,
    a: Rendezvous,
    b: Rendezvous,
    to_a: Balancer,
    to_b: Balancer,
}

impl Nodes {
    async fn start() -> Self {
        let redis = Redis::start().await;
        let (a, to_a) = node(&redis).await;
        let (b, to_b) = node(&redis).await;
        Self { redis, a, b, to_a, to_b }
    }

    async fn end(self) {
        self.a.end().await;
        self.b.end().await;
    }
}

/// A node that others reach by an address that was there before it.
async fn node(redis: &Redis) -> (Rendezvous, Balancer) {
    let balancer = Balancer::start().await;
    let node_url = format!("ws://{}", balancer.address);
    let node = Rendezvous::start(&["--store", &redis.url(), "--node-url", &node_url]).await;
    balancer.leads_to(&[&node]);
    (node, balancer)
}

async fn executor(url: &str) -> Program {
    let mut command = portcullis(&["serve", "--remote", url, "--environment-id", "box"]);
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
    let mut executor = Program::start(command);
    assert_eq!(executor.line().await, format!("environment box is registered at {url}"));
    executor
}

async fn end(mut executor: Program) {
    executor.signal(rustix::process::Signal::TERM);
    assert_eq!(executor.wait().await, 0, "{}", executor.stderr().await);
}

fn options(url: &str) -> ExecServerClientConnectOptions {
    let remote =
        RemoteExecServerConnectArgs { base_url: url.to_owned(), environment_id: "box".to_owned(), token: Token::new(HARNESS) };
    ExecServerClientConnectOptions::remote(remote, "tests")
}

async fn exec(url: &str, command: &[&str]) -> std::process::Output {
    let place = Place::new();
    let workspace = place.path("").display().to_string();
    let words = ["exec", "--remote", url, "--environment-id", "box", "--workspace", &workspace, "--"];
    let output = portcullis(&[&words[..], command].concat()).env("PORTCULLIS_HARNESS_TOKEN", HARNESS).output().await.unwrap();
    place.done();
    output
}

/// A process that says a line for each line that it is told.
struct Echo {
    client: ExecServerClient,
    task: tokio::task::JoinHandle<()>,
    process: portcullis_client::Process,
    input: ProcessInput,
    events: portcullis_client::ProcessEvents,
    place: Place,
}

impl Echo {
    async fn start(url: &str) -> Self {
        let place = Place::new();
        let (client, task) = ExecServerClient::connect(&options(url)).await.unwrap();
        let words = ["sh", "-c", "while read line; do echo \"heard $line\"; done"].map(str::to_owned).to_vec();
        let cwd = WirePath::Local(AbsolutePath::new(place.path("")).unwrap());
        let mut params = StartParams::new("echo", words, cwd);
        params.pipe_stdin = true;
        let mut process = client.start(&params).await.unwrap();
        let (input, events) = (process.take_input().unwrap(), process.take_events().unwrap());
        Self { client, task, process, input, events, place }
    }

    async fn hears(&mut self, word: &str) {
        self.input.write(format!("{word}\n").into_bytes()).await.unwrap();
        let mut heard = String::new();
        while !heard.ends_with('\n') {
            match self.events.next().await {
                Some(ProcessEvent::Output { chunk, .. }) => heard.push_str(std::str::from_utf8(&chunk).unwrap()),
                other => panic!("{other:?} after {heard:?}"),
            }
        }
        assert_eq!(heard, format!("heard {word}\n"));
    }

    async fn end(self) {
        self.process.terminate().await.unwrap();
        drop((self.client, self.process, self.input, self.events));
        self.task.await.unwrap();
        self.place.done();
    }
}

fn code(refused: Result<String, RegistryError>) -> (u16, String) {
    match refused.unwrap_err() {
        RegistryError::Refused { status, code, .. } => (status, code.unwrap_or_default()),
        other => panic!("{other}"),
    }
}

/// The same signed URL at another node.
fn at(node: &Rendezvous, url: &str) -> String {
    let path = url.strip_prefix("ws://").unwrap().split_once('/').unwrap().1;
    format!("{}/{path}", node.url.replace("http://", "ws://"))
}

#[tokio::test]
async fn a_client_at_one_node_reaches_an_executor_at_another() {
    const LENGTH: usize = 1 << 20;
    let nodes = Nodes::start().await;
    let executor = executor(&nodes.a.url).await;
    let long = ["sh", "-c", "head -c 1048576 /dev/zero | tr '\\0' x"];
    let output = exec(&nodes.a.url, &long).await;
    assert_eq!((output.status.code(), output.stdout.len(), nodes.to_a.passed()), (Some(0), LENGTH, 0), "{:?}", output.status);
    let output = exec(&nodes.b.url, &long).await;
    assert!(output.status.success() && output.stdout == [b'x'; LENGTH], "{}", String::from_utf8_lossy(&output.stderr));
    assert!(nodes.to_a.passed() == 1 && nodes.to_b.passed() == 0);
    end(executor).await;
    nodes.end().await;
}

#[tokio::test]
async fn an_executor_whose_node_dies_comes_back_at_another_and_its_session_goes_on() {
    let mut nodes = Nodes::start().await;
    let balancer = Balancer::start().await;
    balancer.leads_to(&[&nodes.a, &nodes.b]);
    let executor = executor(&balancer.url()).await;
    let mut echo = Echo::start(&nodes.b.url).await;
    echo.hears("before").await;
    assert_eq!(nodes.to_a.passed(), 1, "it is at the first node");
    nodes.a.program.child.kill().await.unwrap();
    echo.hears("after").await;
    echo.end().await;
    end(executor).await;
    nodes.b.end().await;
}

#[tokio::test]
async fn streams_go_on_without_the_store_and_what_is_new_waits_for_it() {
    let mut nodes = Nodes::start().await;
    let executor = executor(&nodes.a.url).await;
    let mut streams = [Echo::start(&nodes.a.url).await, Echo::start(&nodes.b.url).await];
    for (node, stream) in [&nodes.a, &nodes.b].into_iter().zip(&mut streams) {
        stream.hears("before").await;
        assert_eq!((status(&node.url, "/livez").await, status(&node.url, "/readyz").await), (200, 200));
    }
    let known = connected(&nodes.a.url, "box", HARNESS).await.unwrap();
    nodes.redis.kill().await;
    for (node, stream) in [&nodes.a, &nodes.b].into_iter().zip(&mut streams) {
        assert_eq!(code(connected(&node.url, "box", HARNESS).await), (503, "store_unreachable".to_owned()));
        assert_eq!(code(registered(&node.url, "new", EXECUTOR).await), (503, "store_unreachable".to_owned()));
        // Who may ask at all is decided before.
        assert_eq!(code(connected(&node.url, "box", "a wrong one").await).0, 401);
        assert_eq!((status(&node.url, "/livez").await, status(&node.url, "/readyz").await), (200, 503));
        assert_eq!(Socket::dial(&at(node, &known), None).await.unwrap_err(), DialError::Refused(503));
        stream.hears("without").await;
    }
    nodes.redis.restart().await;
    for (node, stream) in [&nodes.a, &nodes.b].into_iter().zip(&mut streams) {
        let begin = Instant::now();
        // With another token, whose questions may run out.
        while let Err(error) = connected(&node.url, "box", OTHER).await {
            assert!(begin.elapsed() < PATIENCE, "{error}");
        }
        assert_eq!(status(&node.url, "/readyz").await, 200);
        let output = exec(&node.url, &["echo", "again"]).await;
        assert_eq!(output.stdout, b"again\n", "{output:?}");
        stream.hears("with").await;
    }
    for stream in streams {
        stream.end().await;
    }
    end(executor).await;
    nodes.end().await;
}

#[tokio::test]
async fn a_store_that_comes_back_empty_learns_of_executors_that_stayed() {
    let mut nodes = Nodes::start().await;
    let mut executor = Socket::dial(&registered(&nodes.a.url, "box", EXECUTOR).await.unwrap(), None).await.unwrap();
    let old = Socket::dial(&connected(&nodes.b.url, "box", HARNESS).await.unwrap(), None).await.unwrap();
    say(&old, "old", "before").await;
    assert_eq!(hear(&mut executor).await, heard("old", "before"));
    nodes.redis.kill().await;
    nodes.redis.restart().await;
    // Nobody registers it again: the node of its executor tells of it.
    let begin = Instant::now();
    let url = loop {
        match connected(&nodes.b.url, "box", HARNESS).await {
            Ok(url) => break url,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
    };
    assert_eq!(code(registered(&nodes.b.url, "box", OTHER).await), (409, "environment_taken".to_owned()));
    let new = Socket::dial(&url, None).await.unwrap();
    for (harness, stream) in [(&old, "old"), (&new, "new")] {
        say(harness, stream, "after").await;
        assert_eq!(hear(&mut executor).await, heard(stream, "after"));
    }
    nodes.end().await;
}

#[tokio::test]
async fn an_environment_has_one_owner_at_all_nodes() {
    let nodes = Nodes::start().await;
    let (keys, urls) = (Identity::generate().unwrap().public_keys(), [&nodes.a.url, &nodes.b.url]);
    let register = |url: &str, token| Registry::new(url, "box", token, None).unwrap();
    let first = register(urls[0], EXECUTOR).register(&keys).await.unwrap();
    for url in urls {
        assert_eq!(code(registered(url, "box", OTHER).await), (409, "environment_taken".to_owned()));
        // The owner is known by any node, and the other token may have another environment.
        let again = register(url, EXECUTOR).register(&keys).await.unwrap();
        assert_eq!(again.executor_registration_id, first.executor_registration_id);
        registered(url, "another", OTHER).await.unwrap();
        assert_eq!(code(connected(url, "box", HARNESS).await), (409, "environment_offline".to_owned()));
        assert_eq!(code(connected(url, "nobox", HARNESS).await), (404, "environment_unknown".to_owned()));
    }
    nodes.end().await;
}

/// Both nodes are asked at once, many times: one token of two has each environment.
#[tokio::test]
async fn of_two_that_register_at_once_one_owns() {
    let nodes = Nodes::start().await;
    for nth in 0..20 {
        let name = format!("box-{nth}");
        let outcomes = tokio::join!(registered(&nodes.a.url, &name, EXECUTOR), registered(&nodes.b.url, &name, OTHER));
        assert!(outcomes.0.is_ok() != outcomes.1.is_ok(), "{nth}");
    }
    nodes.end().await;
}

#[tokio::test]
async fn a_newer_socket_at_another_node_replaces_the_older() {
    let nodes = Nodes::start().await;
    let url = registered(&nodes.a.url, "box", EXECUTOR).await.unwrap();
    let mut older = Socket::dial(&url, None).await.unwrap();
    let harness = Socket::dial(&connected(&nodes.b.url, "box", HARNESS).await.unwrap(), None).await.unwrap();
    say(&harness, "one", "to the older").await;
    assert_eq!(hear(&mut older).await, heard("one", "to the older"));
    // What one node signed opens at the other.
    let mut newer = Socket::dial(&at(&nodes.b, &url), None).await.unwrap();
    let harness = Socket::dial(&connected(&nodes.a.url, "box", HARNESS).await.unwrap(), None).await.unwrap();
    say(&harness, "two", "to the newer").await;
    assert_eq!(hear(&mut newer).await, heard("two", "to the newer"));
    say(&newer, "two", "back").await;
    let mut harness = harness;
    assert_eq!(hear(&mut harness).await, heard("two", "back"));
    while let Some(frame) = hear(&mut older).await {
        assert_eq!(frame, ("one".to_owned(), "reset".to_owned()));
    }
    nodes.end().await;
}

#[tokio::test]
async fn what_a_harness_sent_before_it_left_reaches_an_executor_at_another_node() {
    const WORDS: usize = 100;
    let nodes = Nodes::start().await;
    let mut executor = Socket::dial(&registered(&nodes.a.url, "box", EXECUTOR).await.unwrap(), None).await.unwrap();
    let harness = Socket::dial(&connected(&nodes.b.url, "box", HARNESS).await.unwrap(), None).await.unwrap();
    let long = "x".repeat(100_000);
    for nth in 0..WORDS {
        say(&harness, "stream", &format!("{nth}{long}")).await;
    }
    let Socket { outgoing, incoming, mut carrier } = harness;
    drop((outgoing, incoming));
    let left = async { carrier.join_next().await.unwrap().unwrap() };
    let taken = async {
        for nth in 0..WORDS {
            assert_eq!(hear(&mut executor).await, heard("stream", &format!("{nth}{long}")), "word {nth}");
        }
        assert_eq!(hear(&mut executor).await, heard("stream", "reset"));
    };
    tokio::join!(left, taken);
    nodes.end().await;
}

#[tokio::test]
async fn a_node_asks_another_only_for_a_harness_of_its_own() {
    let nodes = Nodes::start().await;
    let of_executor = registered(&nodes.a.url, "box", EXECUTOR).await.unwrap();
    let mut executor = Socket::dial(&of_executor, None).await.unwrap();
    let of_harness = connected(&nodes.a.url, "box", HARNESS).await.unwrap();
    let inner = |node, url: &str| at(node, url).replace("/cloud/", "/node/cloud/");
    let refusal = |url: String| async move { Socket::dial(&url, None).await.unwrap_err() };
    // Asked as one node asks another, only the node that has the executor says yes.
    let harness = Socket::dial(&inner(&nodes.a, &of_harness), None).await.unwrap();
    say(&harness, "one", "by the inner door").await;
    assert_eq!(hear(&mut executor).await, heard("one", "by the inner door"));
    assert_eq!(refusal(inner(&nodes.b, &of_harness)).await, DialError::Refused(409));
    assert_eq!(nodes.to_a.passed(), 0);
    let outer = Socket::dial(&at(&nodes.b, &of_harness), None).await.unwrap();
    say(&outer, "two", "by the outer door").await;
    assert_eq!(hear(&mut executor).await, heard("two", "by the outer door"));
    assert_eq!(nodes.to_a.passed(), 1);
    // The ticket is what admits, and it is a harness's.
    assert_eq!(refusal(inner(&nodes.a, &of_executor)).await, DialError::Refused(403));
    assert_eq!(refusal(inner(&nodes.a, &of_harness.replace("sig=", "sig=A"))).await, DialError::Refused(403));
    let plain = said(&nodes.a.url, "GET /node/cloud/environment/box/ws HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(plain.starts_with("HTTP/1.1 4"), "{plain}");
    nodes.end().await;
}

/// The nodes count together what a token registered, and it makes room by what is its own.
#[tokio::test]
async fn a_token_over_its_share_takes_no_environment_of_another() {
    const SHARE: usize = 256;
    let nodes = Nodes::start().await;
    registered(&nodes.a.url, "of-another", OTHER).await.unwrap();
    let served = registered(&nodes.a.url, "0", EXECUTOR).await.unwrap();
    let _executor = Socket::dial(&served, None).await.unwrap();
    // Both nodes are asked, since each bounds the questions of a token.
    for nth in 1..=SHARE {
        let node = if nth % 2 == 0 { &nodes.a } else { &nodes.b };
        registered(&node.url, &nth.to_string(), EXECUTOR).await.unwrap();
    }
    for node in [&nodes.a, &nodes.b] {
        connected(&node.url, "0", HARNESS).await.unwrap();
        assert_eq!(code(connected(&node.url, "1", HARNESS).await), (404, "environment_unknown".to_owned()));
        for name in ["of-another", "2", "256"] {
            assert_eq!(code(connected(&node.url, name, HARNESS).await), (409, "environment_offline".to_owned()), "{name}");
        }
    }
    nodes.end().await;
}

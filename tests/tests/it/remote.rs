//! Remote mode with the real programs: a rendezvous, an executor and a client, over loopback.

use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent, RemoteExecServerConnectArgs, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use portcullis_relay::fault::Fault;
use portcullis_relay::harness::{Harness, HarnessInput, HarnessOutput};
use portcullis_relay::keys::Identity;
use portcullis_relay::noise::Binding;
use portcullis_relay::registry::Registry;
use portcullis_relay::socket::Socket;
use portcullis_tests::{PATIENCE, Place, Program, Proxy, Server, portcullis};
use std::path::Path;
use std::process::Output;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

pub(super) const EXECUTOR: &str = "an-executor-token-of-the-tests";
pub(super) const HARNESS: &str = "a-harness-token-of-the-tests";

/// Three programs, less the client.
pub(super) struct Remote {
    pub(super) rendezvous: Program,
    pub(super) executor: Program,
    pub(super) url: String,
    pub(super) place: Place,
}

impl Remote {
    async fn start() -> Self {
        Self::with(&[]).await
    }

    /// With more arguments for the executor.
    pub(super) async fn with(arguments: &[&str]) -> Self {
        let (rendezvous, url, place) = rendezvous().await;
        let executor = executor_with(&url, arguments).await;
        Self { rendezvous, executor, url, place }
    }

    pub(super) fn registry(&self) -> Registry {
        Registry::new(&self.url, "box", HARNESS, None).unwrap()
    }

    pub(super) fn options(&self) -> ExecServerClientConnectOptions {
        options(&self.url)
    }

    /// Both end by a signal, with status 0.
    pub(super) async fn end(mut self) {
        for program in [&mut self.executor, &mut self.rendezvous] {
            program.signal(rustix::process::Signal::TERM);
            let status = program.wait().await;
            assert_eq!(status, 0, "{}", program.stderr().await);
        }
        self.place.done();
    }
}

pub(super) async fn rendezvous() -> (Program, String, Place) {
    rendezvous_at("ws://127.0.0.1:0").await
}

pub(super) async fn rendezvous_at(listen: &str) -> (Program, String, Place) {
    let place = Place::new();
    place.put("executor", EXECUTOR);
    place.put("harness", HARNESS);
    let [executors, harnesses] = ["executor", "harness"].map(|name| place.path(name).to_str().unwrap().to_owned());
    let files = ["--executor-token-file", &executors, "--harness-token-file", &harnesses];
    let mut rendezvous = Program::start(portcullis(&[&["rendezvous", "--listen", listen][..], &files].concat()));
    let url = rendezvous.line().await;
    (rendezvous, url, place)
}

async fn executor(url: &str) -> Program {
    executor_with(url, &[]).await
}

async fn executor_with(url: &str, arguments: &[&str]) -> Program {
    let usual = ["serve", "--remote", url, "--environment-id", "box", "--name", "a box"];
    let mut command = portcullis(&[&usual, arguments].concat());
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
    let mut executor = Program::start(command);
    while executor.line().await != format!("environment box is registered at {url}") {}
    executor
}

fn options(url: &str) -> ExecServerClientConnectOptions {
    let token = Token::new(HARNESS);
    let remote = RemoteExecServerConnectArgs { base_url: url.to_owned(), environment_id: "box".to_owned(), token };
    ExecServerClientConnectOptions::remote(remote, "tests")
}

/// Runs `exec --remote` and answers its output.
pub(super) async fn exec(
    url: &str,
    environment: &str,
    token: &str,
    workspace: &Path,
    command: &[&str],
) -> (Output, String, String) {
    let workspace = workspace.to_str().unwrap();
    let arguments = ["exec", "--remote", url, "--environment-id", environment, "--workspace", workspace, "--"];
    let mut program = portcullis(&[&arguments[..], command].concat());
    let output = program.env("PORTCULLIS_HARNESS_TOKEN", token).output().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    (output, stdout, stderr)
}

/// A proxy before a URL of HTTP, and the URL of it.
async fn proxy(url: &str) -> (Proxy, String) {
    let proxy = Proxy::before(&url.replace("http://", "ws://")).await;
    let url = proxy.url.replace("ws://", "http://");
    (proxy, url)
}

/// A process that says a line for each line that it is told.
async fn echo(client: &ExecServerClient, place: &Place) -> portcullis_client::Process {
    let words = ["sh", "-c", "while read line; do echo \"heard $line\"; done"].map(str::to_owned).to_vec();
    let cwd = WirePath::Local(AbsolutePath::new(place.path("")).unwrap());
    let mut params = StartParams::new("echo", words, cwd);
    params.pipe_stdin = true;
    client.start(&params).await.unwrap()
}

#[tokio::test]
async fn a_command_and_a_file_pass_through_the_rendezvous() {
    let remote = Remote::start().await;
    let place = Place::new();
    let (output, stdout, stderr) =
        exec(&remote.url, "box", HARNESS, &place.path(""), &["sh", "-c", "echo out; echo err >&2; exit 7"]).await;
    assert_eq!((output.status.code(), stdout.as_str(), stderr.as_str()), (Some(7), "out\n", "err\n"));
    let (client, task) = ExecServerClient::connect(&remote.options()).await.unwrap();
    let content: Vec<u8> = (0..5_u32 << 20).map(|nth| nth.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let path = WirePath::Local(AbsolutePath::new(place.path("file")).unwrap());
    client.write_file(&path, content.clone(), None).await.unwrap();
    assert!(std::fs::read(place.path("file")).unwrap() == content);
    assert!(client.read_file(&path, None).await.unwrap() == content);
    drop(client);
    task.await.unwrap();
    remote.end().await;
}

/// One end's connection is cut while a process runs: whoever is cut.
async fn survives_cuts(cuts_executor: bool) {
    let (rendezvous, url, place) = rendezvous().await;
    let (proxy, cut_url) = proxy(&url).await;
    let (executor_url, client_url) = if cuts_executor { (&cut_url, &url) } else { (&url, &cut_url) };
    let executor = executor(executor_url).await;
    let (client, task) = ExecServerClient::connect(&options(client_url)).await.unwrap();
    let mut process = echo(&client, &place).await;
    let (mut input, mut events) = (process.take_input().unwrap(), process.take_events().unwrap());
    let mut heard = String::new();
    for round in 0..4 {
        if round % 2 == 1 {
            proxy.cut();
        }
        input.write(format!("{round}\n").into_bytes()).await.unwrap();
        while heard.lines().count() <= round {
            match events.next().await {
                Some(ProcessEvent::Output { chunk, .. }) => heard.push_str(std::str::from_utf8(&chunk).unwrap()),
                other => panic!("{other:?} after {heard:?}"),
            }
        }
    }
    assert_eq!(heard, "heard 0\nheard 1\nheard 2\nheard 3\n");
    process.terminate().await.unwrap();
    drop((client, process, input, events));
    task.await.unwrap();
    Remote { rendezvous, executor, url, place }.end().await;
    proxy.end().await;
}

#[tokio::test]
async fn a_process_survives_a_cut_of_the_executors_socket() {
    survives_cuts(true).await;
}

#[tokio::test]
async fn a_process_survives_a_cut_of_the_clients_socket() {
    survives_cuts(false).await;
}

#[tokio::test]
async fn wrong_tokens_and_unknown_environments_are_refused() {
    let remote = Remote::start().await;
    let place = Place::new();
    let run = |environment: &'static str, token: &'static str| {
        let (url, workspace) = (remote.url.clone(), place.path(""));
        async move { exec(&url, environment, token, &workspace, &["true"]).await }
    };
    let (output, _stdout, stderr) = run("box", HARNESS).await;
    assert!(output.status.success(), "{stderr}");
    // One of the other kind is as wrong as any.
    for token in ["another", EXECUTOR] {
        let (output, _stdout, stderr) = run("box", token).await;
        assert_eq!(output.status.code(), Some(125));
        assert!(stderr.contains("environment registry authentication failed (401)"), "{stderr}");
    }
    let (output, _stdout, stderr) = run("nobox", HARNESS).await;
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr.contains("nobody registered this environment"), "{stderr}");
    let mut command = portcullis(&["serve", "--remote", &remote.url, "--environment-id", "box"]);
    command.env("PORTCULLIS_EXECUTOR_TOKEN", HARNESS);
    let mut refused = Program::start(command);
    assert_eq!(refused.wait().await, 1);
    assert!(refused.stderr().await.contains("environment registry authentication failed (401)"));
    remote.end().await;
}

/// Connects with keys and an authorization that was given for others, and answers how that ended; none: it was let in.
async fn knock(registry: &Registry, known: &Identity, own: &Identity) -> Option<Fault> {
    Raw::open(registry, known, own).await.err()
}

/// A harness by hand, which sends no more than it is told to.
pub(super) struct Raw {
    harness: Harness,
    socket: Socket,
}

impl Raw {
    pub(super) async fn open(registry: &Registry, known: &Identity, own: &Identity) -> Result<Self, Fault> {
        let bundle = registry.connect(&known.public_keys()).await.unwrap();
        let socket = Socket::dial(&bundle.url, None).await.unwrap();
        let stream = portcullis_relay::stream_name();
        let registration = &bundle.executor_registration_id;
        let binding = Binding { environment: "box", registration, stream: &stream };
        let authorization = &bundle.harness_key_authorization;
        let harness = Harness::start(own, &bundle.executor_public_key, binding, authorization, Instant::now()).unwrap();
        let mut raw = Self { harness, socket };
        loop {
            match raw.next().await {
                HarnessOutput::Send(bytes) => raw.socket.outgoing.send(bytes).await.unwrap(),
                HarnessOutput::Opened => return Ok(raw),
                HarnessOutput::Closed(fault) => return Err(fault),
                HarnessOutput::Message(_) => {}
            }
        }
    }

    /// Begins a message.
    pub(super) fn queue(&mut self, message: Vec<u8>) {
        self.harness.queue(message.into()).unwrap();
    }

    /// Sends so many bytes of what is queued, or answers how the stream ended before.
    pub(super) async fn send(&mut self, mut bytes: usize) -> Option<Fault> {
        while bytes > 0 {
            match self.next().await {
                HarnessOutput::Send(frame) => {
                    bytes = bytes.saturating_sub(frame.len());
                    self.socket.outgoing.send(frame).await.unwrap();
                }
                HarnessOutput::Closed(fault) => return Some(fault),
                HarnessOutput::Opened | HarnessOutput::Message(_) => {}
            }
        }
        None
    }

    /// Sends what is queued until a message comes, or answers how the stream ended before.
    pub(super) async fn answer(&mut self) -> Result<Vec<u8>, Fault> {
        loop {
            match self.next().await {
                HarnessOutput::Send(frame) => self.socket.outgoing.send(frame).await.unwrap(),
                HarnessOutput::Closed(fault) => return Err(fault),
                HarnessOutput::Message(message) => return Ok(message.into()),
                HarnessOutput::Opened => {}
            }
        }
    }

    /// Ends the stream, once everything that is queued was sent.
    pub(super) async fn close(mut self) {
        self.harness.handle(HarnessInput::Close, Instant::now());
        loop {
            match self.next().await {
                HarnessOutput::Send(frame) => self.socket.outgoing.send(frame).await.unwrap(),
                HarnessOutput::Closed(fault) => break assert_eq!(fault, Fault::Done),
                HarnessOutput::Opened | HarnessOutput::Message(_) => {}
            }
        }
        drop(self.socket.outgoing);
        self.socket.carrier.join_next().await.unwrap().unwrap();
    }

    /// What is to be done next.
    async fn next(&mut self) -> HarnessOutput {
        loop {
            if let Some(output) = self.harness.poll(Instant::now()) {
                return output;
            }
            let deadline = self.harness.deadline().unwrap_or_else(|| Instant::now() + PATIENCE);
            tokio::select! {
                frame = self.socket.incoming.recv() => {
                    self.harness.handle(HarnessInput::Frame(frame.expect("an open socket")), Instant::now());
                }
                () = tokio::time::sleep_until(deadline.into()) => self.harness.handle(HarnessInput::Timer, Instant::now()),
            }
        }
    }
}

#[tokio::test]
async fn a_harness_whose_keys_the_registry_does_not_know_is_refused() {
    let remote = Remote::start().await;
    let registry = remote.registry();
    let [known, other] = [(); 2].map(|()| Identity::generate().unwrap());
    assert_eq!(knock(&registry, &known, &known).await, None);
    assert_eq!(knock(&registry, &known, &other).await, Some(Fault::Reset));
    assert_eq!(knock(&registry, &other, &other).await, None);
    remote.end().await;
}

/// Passes bytes on and keeps what came from the server, which WebSockets do not mask.
struct Ear {
    url: String,
    heard: Arc<Mutex<Vec<u8>>>,
    tasks: JoinSet<()>,
}

impl Ear {
    async fn before(url: &str) -> Self {
        let server = url.split_once("://").unwrap().1.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{}://{}", url.split_once("://").unwrap().0, listener.local_addr().unwrap());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = JoinSet::new();
        let keeps = Arc::clone(&heard);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _address)) = listener.accept().await {
                let (mut client_read, mut client_write) = client.into_split();
                let (mut server_read, mut server_write) = TcpStream::connect(&server).await.unwrap().into_split();
                let keeps = Arc::clone(&keeps);
                connections.spawn(async move {
                    let _cut = tokio::io::copy(&mut client_read, &mut server_write).await;
                    let _gone = server_write.shutdown().await;
                });
                connections.spawn(async move {
                    let mut buffer = vec![0; 64 * 1024];
                    while let Ok(length @ 1..) = server_read.read(&mut buffer).await {
                        keeps.lock().unwrap().extend_from_slice(&buffer[..length]);
                        if client_write.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { url, heard, tasks }
    }

    fn has_heard(&self, text: &str) -> bool {
        self.heard.lock().unwrap().windows(text.len()).any(|part| part == text.as_bytes())
    }
}

#[tokio::test]
async fn nothing_in_clear_passes_the_rendezvous() {
    let (rendezvous, url, place) = rendezvous().await;
    let mut ear = Ear::before(&url).await;
    let executor = executor(&ear.url).await;
    let workspace = Place::new();
    // The marker is in the words of the command, which the executor gets, and in its output, which the client gets.
    let command = ["echo", "marker-of-the-test"];
    let (output, stdout, stderr) = exec(&ear.url, "box", HARNESS, &workspace.path(""), &command).await;
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stdout, "marker-of-the-test\n");
    assert!(ear.has_heard("noise_hybrid_ik_v1") && !ear.has_heard("marker-of-the-test") && !ear.has_heard("processId"));
    // The control: without the relay the same ear hears it.
    let server = Server::start().await;
    let mut control = Ear::before(&server.url).await;
    let place_of_it = workspace.path("");
    let arguments = ["exec", "--url", &control.url, "--workspace", place_of_it.to_str().unwrap(), "--"];
    let output = portcullis(&[&arguments[..], &command].concat()).output().await.unwrap();
    assert!(output.status.success() && control.has_heard("processId"), "{output:?}");
    Remote { rendezvous, executor, url, place }.end().await;
    ear.tasks.shutdown().await;
    control.tasks.shutdown().await;
}

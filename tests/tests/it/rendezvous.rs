//! The rendezvous by itself: what one node accepts, and what it bounds. Its ends are played by the test.

use super::tls::certificates;
use portcullis_relay::frame::{Body, Frame, MAX_FRAME};
use portcullis_relay::keys::Identity;
use portcullis_relay::registry::{Registry, RegistryError};
use portcullis_relay::socket::{DialError, Socket};
use portcullis_tests::{PATIENCE, Place, Program, portcullis};
use std::process::Output;
use std::time::Instant;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const EXECUTOR: &str = "an-executor-token-of-the-tests";
const HARNESS: &str = "a-harness-token-of-the-tests";
const OTHER: &str = "another-token-of-the-tests";

/// A rendezvous with two tokens of each kind, the second being the same.
pub(super) struct Rendezvous {
    pub(super) program: Program,
    pub(super) url: String,
    place: Place,
}

impl Rendezvous {
    pub(super) async fn start(arguments: &[&str]) -> Self {
        let place = Place::new();
        place.put("executors", format!("{EXECUTOR}\n{OTHER}\n"));
        place.put("harnesses", format!("{OTHER}\n{HARNESS}\n"));
        let [executors, harnesses] = ["executors", "harnesses"].map(|name| place.path(name).display().to_string());
        let files = ["rendezvous", "--executor-token-file", &executors, "--harness-token-file", &harnesses];
        let mut program = Program::start(portcullis(&[&files[..], arguments].concat()));
        let url = program.line().await;
        Self { program, url, place }
    }

    /// Ends by a signal, with status 0.
    pub(super) async fn end(mut self) {
        self.program.signal(rustix::process::Signal::TERM);
        let status = self.program.wait().await;
        assert_eq!(status, 0, "{}", self.program.stderr().await);
        self.place.done();
    }
}

/// The URL of an executor's socket.
pub(super) async fn registered(url: &str, environment: &str, token: &str) -> Result<String, RegistryError> {
    let registry = Registry::new(url, environment, token, None).unwrap();
    Ok(registry.register(&Identity::generate().unwrap().public_keys()).await?.url)
}

/// The URL of a harness's socket.
pub(super) async fn connected(url: &str, environment: &str, token: &str) -> Result<String, RegistryError> {
    let registry = Registry::new(url, environment, token, None).unwrap();
    Ok(registry.connect(&Identity::generate().unwrap().public_keys()).await?.url)
}

/// An executor's socket that does what the test says.
pub(super) async fn executor(url: &str) -> Socket {
    Socket::dial(&registered(url, "box", EXECUTOR).await.unwrap(), None).await.unwrap()
}

pub(super) async fn harness(url: &str) -> Socket {
    Socket::dial(&connected(url, "box", HARNESS).await.unwrap(), None).await.unwrap()
}

fn frame(stream: &str, payload: Vec<u8>) -> Frame {
    Frame { stream_id: stream.to_owned(), ack: 0, ack_bits: 0, body: Body::Handshake { payload: payload.into() } }
}

/// Sends what is enough to be told from others.
pub(super) async fn say(socket: &Socket, stream: &str, word: &str) {
    socket.outgoing.send(frame(stream, word.as_bytes().to_vec()).encode()).await.unwrap();
}

/// The next frame's stream and word; none: the socket has ended.
pub(super) async fn hear(socket: &mut Socket) -> Option<(String, String)> {
    let bytes = timeout(PATIENCE, socket.incoming.recv()).await.expect("a frame in time")?;
    let Frame { stream_id, body, .. } = Frame::decode(bytes).unwrap();
    match body {
        Body::Handshake { payload } => Some((stream_id, String::from_utf8(payload.to_vec()).unwrap())),
        Body::Reset { .. } => Some((stream_id, "reset".to_owned())),
        other => panic!("{other:?}"),
    }
}

pub(super) fn heard(stream: &str, word: &str) -> Option<(String, String)> {
    Some((stream.to_owned(), word.to_owned()))
}

/// Sends bytes to the port, and answers what came back until the end.
pub(super) async fn said(url: &str, words: &str) -> String {
    let mut socket = TcpStream::connect(url.split_once("://").unwrap().1).await.unwrap();
    socket.write_all(words.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, socket.read_to_string(&mut answer)).await.expect("an end in time").unwrap();
    answer
}

/// The status of a GET.
pub(super) async fn status(url: &str, path: &str) -> u16 {
    let answer = said(url, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
}

fn refused(error: &RegistryError) -> (u16, &str) {
    match error {
        RegistryError::Refused { status, code, .. } => (*status, code.as_deref().unwrap_or_default()),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn a_newer_socket_of_an_executor_replaces_the_older() {
    let rendezvous = Rendezvous::start(&[]).await;
    let url = registered(&rendezvous.url, "box", EXECUTOR).await.unwrap();
    let mut older = Socket::dial(&url, None).await.unwrap();
    let first = harness(&rendezvous.url).await;
    say(&first, "one", "to the older").await;
    assert_eq!(hear(&mut older).await, heard("one", "to the older"));
    let mut newer = Socket::dial(&url, None).await.unwrap();
    assert_eq!(hear(&mut older).await, None);
    let second = harness(&rendezvous.url).await;
    say(&second, "two", "to the newer").await;
    assert_eq!(hear(&mut newer).await, heard("two", "to the newer"));
    rendezvous.end().await;
}

#[tokio::test]
async fn two_executors_of_one_environment_are_warned_of() {
    for is_warned in [false, true] {
        let mut rendezvous = Rendezvous::start(&[]).await;
        let url = registered(&rendezvous.url, "box", EXECUTOR).await.unwrap();
        let mut older = Socket::dial(&url, None).await.unwrap();
        // One that comes again with its keys is no second one.
        let url = if is_warned { registered(&rendezvous.url, "box", EXECUTOR).await.unwrap() } else { url };
        let _newer = Socket::dial(&url, None).await.unwrap();
        assert_eq!(hear(&mut older).await, None);
        rendezvous.program.signal(rustix::process::Signal::TERM);
        assert_eq!(rendezvous.program.wait().await, 0);
        let stderr = rendezvous.program.stderr().await;
        assert_eq!(stderr.contains("the environment box ends") && stderr.contains("oust each other"), is_warned, "{stderr}");
        rendezvous.place.done();
    }
}

#[tokio::test]
async fn a_stream_is_its_first_harnesss_alone() {
    let rendezvous = Rendezvous::start(&[]).await;
    let mut executor = executor(&rendezvous.url).await;
    let (mut owner, mut thief) = (harness(&rendezvous.url).await, harness(&rendezvous.url).await);
    say(&owner, "stream", "mine").await;
    assert_eq!(hear(&mut executor).await, heard("stream", "mine"));
    say(&thief, "stream", "stolen").await;
    say(&thief, "own", "mine too").await;
    assert_eq!(hear(&mut executor).await, heard("own", "mine too"));
    for (stream, word) in [("nobodys", "lost"), ("stream", "for the owner"), ("own", "for the thief")] {
        say(&executor, stream, word).await;
    }
    assert_eq!(hear(&mut owner).await, heard("stream", "for the owner"));
    assert_eq!(hear(&mut thief).await, heard("own", "for the thief"));
    // The executor hears that its harness is gone.
    drop(owner);
    assert_eq!(hear(&mut executor).await, heard("stream", "reset"));
    rendezvous.end().await;
}

#[tokio::test]
async fn a_frame_that_is_too_long_ends_its_socket_and_no_other() {
    let rendezvous = Rendezvous::start(&[]).await;
    let mut executor = executor(&rendezvous.url).await;
    let (mut long, other) = (harness(&rendezvous.url).await, harness(&rendezvous.url).await);
    let room = MAX_FRAME - frame("long", vec![0; MAX_FRAME / 2]).encode().len() + MAX_FRAME / 2;
    long.outgoing.send(frame("long", vec![b'x'; room]).encode()).await.unwrap();
    assert_eq!(hear(&mut executor).await.unwrap().1.len(), room);
    long.outgoing.send(frame("long", vec![b'x'; room + 1]).encode()).await.unwrap();
    assert_eq!(hear(&mut long).await, None);
    assert_eq!(hear(&mut executor).await, heard("long", "reset"));
    say(&other, "other", "still here").await;
    assert_eq!(hear(&mut executor).await, heard("other", "still here"));
    rendezvous.end().await;
}

#[tokio::test]
async fn a_harness_that_takes_nothing_is_cut_off_and_another_goes_on() {
    const FRAMES: usize = 400;
    let rendezvous = Rendezvous::start(&[]).await;
    let mut executor = executor(&rendezvous.url).await;
    let mut quick = harness(&rendezvous.url).await;
    let slow = connected(&rendezvous.url, "box", HARNESS).await.unwrap();
    let (mut slow, _answer) = tokio_tungstenite::connect_async(slow).await.unwrap();
    let claim = tokio_tungstenite::tungstenite::Message::Binary(frame("slow", b"here".to_vec()).encode());
    futures_util::SinkExt::send(&mut slow, claim).await.unwrap();
    say(&quick, "quick", "here").await;
    let mut streams = [hear(&mut executor).await.unwrap().0, hear(&mut executor).await.unwrap().0];
    streams.sort();
    assert_eq!(streams, ["quick", "slow"]);
    // More than all buffers on the way hold. A socket that takes nothing for 60 s is ended anyway: this one is well before that.
    for stream in ["quick", "slow"] {
        let frame = frame(stream, vec![b'x'; 200_000]).encode();
        let sent = async {
            for _ in 0..FRAMES {
                executor.outgoing.send(frame.clone()).await.unwrap();
            }
        };
        let taken = async {
            for _ in 0..if stream == "quick" { FRAMES } else { 0 } {
                assert!(hear(&mut quick).await.is_some());
            }
        };
        timeout(PATIENCE / 2, async { tokio::join!(sent, taken) }).await.expect("the slow one holds nobody up for long");
    }
    say(&executor, "quick", "last").await;
    assert_eq!(hear(&mut quick).await, heard("quick", "last"));
    let mut arrived = 0;
    while let Some(Ok(message)) = timeout(PATIENCE, futures_util::StreamExt::next(&mut slow)).await.expect("an end in time") {
        arrived += usize::from(message.is_binary());
    }
    assert!(arrived < FRAMES, "it was cut off: {arrived}");
    rendezvous.end().await;
}

#[tokio::test]
async fn sockets_of_a_token_are_bounded() {
    const SOCKETS: usize = 256;
    let rendezvous = Rendezvous::start(&[]).await;
    let _executor = executor(&rendezvous.url).await;
    let [own, other] = [HARNESS, OTHER].map(|token| connected(&rendezvous.url, "box", token));
    let (own, other) = (own.await.unwrap(), other.await.unwrap());
    let mut open = Vec::new();
    for _ in 0..SOCKETS {
        open.push(Socket::dial(&own, None).await.unwrap());
    }
    assert_eq!(Socket::dial(&own, None).await.unwrap_err(), DialError::Refused(429));
    let _of_another_token = Socket::dial(&other, None).await.unwrap();
    drop(open.pop());
    // It is told of the end when it hears of it.
    let begin = Instant::now();
    while let Err(error) = Socket::dial(&own, None).await {
        assert!(error == DialError::Refused(429) && begin.elapsed() < PATIENCE, "{error}");
    }
    rendezvous.end().await;
}

#[tokio::test]
async fn questions_of_a_token_are_bounded() {
    let rendezvous = Rendezvous::start(&[]).await;
    let _executor = executor(&rendezvous.url).await;
    let begin = Instant::now();
    let mut asked = 0;
    let error = loop {
        match connected(&rendezvous.url, "box", HARNESS).await {
            Ok(_url) => asked += 1,
            Err(error) => break error,
        }
        assert!(begin.elapsed() < PATIENCE);
    };
    assert_eq!(refused(&error), (429, "too_often"));
    assert!(asked >= 256, "{asked}");
    connected(&rendezvous.url, "box", OTHER).await.unwrap();
    rendezvous.end().await;
}

#[tokio::test]
async fn half_a_request_is_closed_and_an_open_socket_stays() {
    let rendezvous = Rendezvous::start(&[]).await;
    let (mut executor, harness) = (executor(&rendezvous.url).await, harness(&rendezvous.url).await);
    let url = &rendezvous.url;
    let half = "POST /cloud/environment/box/connect HTTP/1.1\r\nHost: localhost\r\n";
    let half_a_body = format!("{half}Content-Length: 10\r\n\r\n12345");
    let closed = tokio::join!(said(url, ""), said(url, half), said(url, &half_a_body));
    assert_eq!(closed, (String::new(), String::new(), String::new()));
    // Those are older than the deadline.
    say(&harness, "stream", "still here").await;
    assert_eq!(hear(&mut executor).await, heard("stream", "still here"));
    let whole = said(url, &format!("{half}Content-Length: 0\r\n\r\n")).await;
    assert!(whole.starts_with("HTTP/1.1 401") && whole.to_lowercase().contains("\r\nconnection: close\r\n"), "{whole}");
    assert_eq!((status(url, "/livez").await, status(url, "/readyz").await), (200, 200));
    rendezvous.end().await;
}

async fn exec(place: &Place, url: &str, ca: &str) -> Output {
    let (workspace, ca) = (place.path("").display().to_string(), place.path(ca).display().to_string());
    let words =
        ["exec", "--remote", url, "--environment-id", "box", "--workspace", &workspace, "--tls-ca", &ca, "--", "echo", "out"];
    portcullis(&words).env("PORTCULLIS_HARNESS_TOKEN", HARNESS).output().await.unwrap()
}

#[tokio::test]
async fn both_ends_reach_it_over_tls_and_believe_nobody_else() {
    let place = certificates();
    let [certificate, key] = ["server-of-ours.pem", "server-of-ours.key"].map(|name| place.path(name).display().to_string());
    let rendezvous = Rendezvous::start(&["--listen", "wss://127.0.0.1:0", "--tls-cert", &certificate, "--tls-key", &key]).await;
    assert!(rendezvous.url.starts_with("https://127.0.0.1:"), "{}", rendezvous.url);
    let serve = |ca: &str| {
        let mut command = portcullis(&["serve", "--remote", &rendezvous.url, "--environment-id", "box"]);
        Program::start({
            command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR).env("SSL_CERT_FILE", place.path(ca));
            command
        })
    };
    let mut stranger = serve("other.pem");
    assert_eq!(stranger.wait().await, 1);
    let mut executor = serve("ours.pem");
    assert!(executor.line().await.starts_with("environment box is registered"));
    let output = exec(&place, &rendezvous.url, "ours.pem").await;
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"out\n"[..]), "{output:?}");
    let output = exec(&place, &rendezvous.url, "other.pem").await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(125) && stderr.contains("UnknownIssuer"), "{stderr}");
    // Nothing else is spoken there, and nobody waits for who does not shake hands.
    let (plain, silent) =
        tokio::join!(said_bytes(&rendezvous.url, b"GET /livez HTTP/1.1\r\n\r\n"), said_bytes(&rendezvous.url, b""));
    assert!(!plain.starts_with(b"HTTP") && silent.is_empty());
    executor.signal(rustix::process::Signal::TERM);
    assert_eq!(executor.wait().await, 0);
    rendezvous.end().await;
}

async fn said_bytes(url: &str, words: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(url.split_once("://").unwrap().1).await.unwrap();
    socket.write_all(words).await.unwrap();
    let mut answer = Vec::new();
    // A reset is an end too.
    let _reset = timeout(PATIENCE, socket.read_to_end(&mut answer)).await.expect("an end in time");
    answer
}

#[tokio::test]
async fn what_would_send_tokens_in_clear_is_refused_at_the_start() {
    let place = certificates();
    let [certificate, key] = ["server-of-ours.pem", "server-of-ours.key"].map(|name| place.path(name).display().to_string());
    let tls = ["--tls-cert", &certificate, "--tls-key", &key];
    let node = ["--node-url", "ws://127.0.0.1:1"];
    for (arguments, words) in [
        (&["--listen", "ws://0.0.0.0:0"][..], "put TLS in front and say with --public-url wss://HOST where"),
        (&["--listen", "ws://0.0.0.0:0", "--public-url", "ws://rendezvous.example"], "tokens would travel in clear"),
        (&["--listen", "wss://127.0.0.1:0"], "give --tls-cert FILE and --tls-key FILE"),
        (&["--listen", "unix:/run/rendezvous"], "a rendezvous listens on ws://IP:PORT"),
        (&["--public-url", "https://rendezvous.example"], "it begins with wss:// or ws://"),
        (&["--store", "redis://127.0.0.1:1"], "--store and --node-url go together"),
        (&node, "--store and --node-url go together"),
        (&[&node[..], &["--store", "http://secret@127.0.0.1:1"]].concat(), "give redis://HOST:PORT"),
        (&["--store", "redis://127.0.0.1:1", "--node-url", "http://127.0.0.1:1"], "it is ws://IP:PORT"),
        (&[&node[..], &tls, &["--store", "redis://127.0.0.1:1"]].concat(), "put TLS in front"),
    ] {
        let mut refused = Program::start(portcullis(&[&["rendezvous"], arguments].concat()));
        assert_eq!(refused.wait().await, 1, "{arguments:?}");
        let stderr = refused.stderr().await;
        assert!(stderr.contains(words) && !stderr.contains("secret"), "{arguments:?}: {stderr}");
    }
    for arguments in [
        &["--listen", "ws://0.0.0.0:0", "--public-url", "wss://rendezvous.example"][..],
        &[&tls[..], &["--listen", "wss://0.0.0.0:0"]].concat(),
    ] {
        Rendezvous::start(arguments).await.end().await;
    }
}

//! `portcullis forward`: clients of an environment are passed on to a server of somebody else's.

use crate::remote::{EXECUTOR, HARNESS, Raw, Remote, exec, rendezvous};
use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_client::ExecServerClient;
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_relay::fault::Fault;
use portcullis_relay::keys::Identity;
use portcullis_relay::registry::Registry;
use portcullis_tests::{PATIENCE, Place, Program, Server, portcullis};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// A rendezvous, and a forwarder to a destination in the executor's place.
async fn forward(destination: &str) -> Remote {
    let (rendezvous, url, place) = rendezvous().await;
    let mut command = portcullis(&["forward", "--connect", destination, "--remote", &url, "--environment-id", "box"]);
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
    let mut executor = Program::start(command);
    assert_eq!(executor.line().await, format!("environment box is registered at {url}"));
    Remote { rendezvous, executor, url, place }
}

/// A destination that does what a test says.
struct Destination {
    listener: TcpListener,
    url: String,
}

impl Destination {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("ws://{}/path?secret=mark-secret", listener.local_addr().unwrap());
        Self { listener, url }
    }

    async fn dialled(&self) -> TcpStream {
        timeout(PATIENCE, self.listener.accept()).await.expect("a connection in time").unwrap().0
    }

    /// Takes frames of 8 MiB and no longer ones.
    async fn accept(&self) -> WebSocketStream<TcpStream> {
        let config = WebSocketConfig::default().max_frame_size(Some(8 << 20)).max_message_size(Some(64 << 20));
        tokio_tungstenite::accept_async_with_config(self.dialled().await, Some(config)).await.unwrap()
    }
}

async fn open(registry: &Registry) -> Raw {
    let keys = Identity::generate().unwrap();
    Raw::open(registry, &keys, &keys).await.unwrap()
}

async fn next(socket: &mut WebSocketStream<TcpStream>) -> Message {
    timeout(PATIENCE, socket.next()).await.expect("a message in time").expect("an open socket").unwrap()
}

#[tokio::test]
async fn commands_and_files_pass_through_a_forwarder() {
    let server = Server::start().await;
    let (remote, place) = (forward(&server.url).await, Place::new());
    let command = ["sh", "-c", "echo out; echo err >&2; exit 7"];
    let (output, stdout, stderr) = exec(&remote.url, "box", HARNESS, &place.path(""), &command).await;
    assert_eq!((output.status.code(), stdout.as_str(), stderr.as_str()), (Some(7), "out\n", "err\n"));
    let (client, task) = ExecServerClient::connect(&remote.options()).await.unwrap();
    let content: Vec<u8> = (0..5_u32 << 20).map(|nth| nth.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let path = WirePath::Local(AbsolutePath::new(place.path("file")).unwrap());
    client.write_file(&path, content.clone(), None).await.unwrap();
    assert!(client.read_file(&path, None).await.unwrap() == content);
    drop(client);
    task.await.unwrap();
    remote.end().await;
}

#[tokio::test]
async fn text_and_binary_pass_and_what_is_long_comes_in_frames() {
    let destination = Destination::start().await;
    let remote = forward(&destination.url).await;
    let registry = remote.registry();
    let (mut stream, mut socket) = tokio::join!(open(&registry), destination.accept());
    for message in [Message::text("a text"), Message::binary(&b""[..]), Message::binary(vec![7; 200_000])] {
        socket.send(message).await.unwrap();
    }
    assert_eq!(stream.answer().await.unwrap(), b"a text");
    assert_eq!(stream.answer().await.unwrap(), vec![7; 200_000]);
    let long = vec![9; 20 << 20];
    stream.queue(long.clone());
    let arrived = tokio::select! {
        ended = stream.answer() => panic!("{ended:?}"),
        message = next(&mut socket) => message,
    };
    assert!(arrived.is_binary() && arrived.into_data() == long);
    remote.end().await;
}

#[tokio::test]
async fn a_destination_that_is_not_there_ends_one_stream_and_no_other() {
    let destination = Destination::start().await;
    let remote = forward(&destination.url).await;
    let registry = remote.registry();
    let (mut stream, mut socket) = tokio::join!(open(&registry), destination.accept());
    let (mut other, dropped) = tokio::join!(open(&registry), destination.dialled());
    drop(dropped);
    assert_eq!(other.answer().await, Err(Fault::Reset));
    socket.send(Message::text("still there")).await.unwrap();
    assert_eq!(stream.answer().await.unwrap(), b"still there");
    // And where nobody listens at all.
    drop(destination);
    assert_eq!(open(&registry).await.answer().await, Err(Fault::Reset));
    remote.end().await;
}

#[tokio::test]
async fn what_a_destination_said_before_it_closed_arrives() {
    let destination = Destination::start().await;
    let remote = forward(&destination.url).await;
    let registry = remote.registry();
    let (mut stream, mut socket) = tokio::join!(open(&registry), destination.accept());
    let last = vec![5; 16 << 20];
    socket.send(Message::text("first")).await.unwrap();
    socket.send(Message::binary(last.clone())).await.unwrap();
    socket.close(None).await.unwrap();
    let left = async { while let Some(Ok(_)) = socket.next().await {} };
    timeout(PATIENCE, left).await.expect("an end in time");
    // The forwarder hears of the end at once, and has most of what was said still in line.
    drop(socket);
    assert_eq!(stream.answer().await.unwrap(), b"first");
    assert!(stream.answer().await.unwrap() == last);
    assert_eq!(stream.answer().await, Err(Fault::Reset));
    remote.end().await;
}

#[tokio::test]
async fn the_destination_hears_of_the_end_of_its_stream_and_of_the_forwarder() {
    let destination = Destination::start().await;
    let remote = forward(&destination.url).await;
    let registry = remote.registry();
    let (mut stream, mut socket) = tokio::join!(open(&registry), destination.accept());
    stream.queue(b"last words".to_vec());
    stream.close().await;
    assert_eq!(next(&mut socket).await.into_data(), &b"last words"[..]);
    assert!(next(&mut socket).await.is_close());
    let (_stream, mut socket) = tokio::join!(open(&registry), destination.accept());
    let (closed, ()) = tokio::join!(next(&mut socket), remote.end());
    assert!(closed.is_close());
}

#[tokio::test]
async fn a_destination_that_is_no_websocket_is_refused_before_anybody_is_asked() {
    let registry = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", registry.local_addr().unwrap());
    let destination = "wss://127.0.0.1:9";
    for (destination, more, status, expect) in [
        ("http://127.0.0.1:9", None, 1, "forward destination must be a ws:// or wss:// URL"),
        ("ws://", None, 1, "forward destination must be a ws:// or wss:// URL"),
        (destination, Some(["--ws-auth", "capability-token"]), 2, "--ws-auth"),
        (destination, Some(["--ws-token-file", "/token"]), 2, "--ws-token-file"),
    ] {
        let usual = ["forward", "--connect", destination, "--remote", &url, "--environment-id", "box"];
        let mut command = portcullis(&[&usual[..], more.as_ref().map_or(&[][..], |more| more)].concat());
        command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
        let mut refused = Program::start(command);
        assert_eq!(refused.wait().await, status);
        let stderr = refused.stderr().await;
        assert!(stderr.contains(expect), "{stderr}");
    }
    assert!(registry.into_std().unwrap().accept().is_err(), "the registry was asked");
}

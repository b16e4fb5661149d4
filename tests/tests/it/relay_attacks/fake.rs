//! A registry and a rendezvous that say what a test wants, and what a test says at the other end of a stream.

use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_relay::frame::{Body, Frame};
use portcullis_relay::keys::{Identity, PublicKeys, SECURITY_PROFILE};
use portcullis_relay::noise::{Binding, Channel, Initiator};
use portcullis_tests::PATIENCE;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

/// Secrets of the registry, which no log may repeat.
pub(super) const SECRETS: [&str; 3] = ["mark-of-the-url", "mark-of-the-authorization", "mark-of-the-token"];
pub(super) const REGISTRATION: &str = "registration-one";

/// What a fake answers to a question.
pub(super) enum Reply {
    Json(Value),
    /// The bytes of the answer, its head included.
    Raw(Vec<u8>),
    Never,
}

/// Answers a question: its name, what it says, and the fake's own address, `HOST:PORT`.
type Answer = dyn Fn(&str, &Value, &str) -> Reply + Send + Sync;

pub(super) struct Fake {
    pub(super) url: String,
    pub(super) questions: mpsc::Receiver<(String, Value)>,
    pub(super) sockets: mpsc::Receiver<WebSocketStream<TcpStream>>,
    _tasks: JoinSet<()>,
}

impl Fake {
    pub(super) async fn start(answer: impl Fn(&str, &Value, &str) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let ((asks, questions), (opens, sockets)) = (mpsc::channel(1024), mpsc::channel(64));
        let (url, answer, mut tasks) = (format!("http://{address}"), Arc::new(answer), JoinSet::new());
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _address)) = listener.accept().await {
                let (answer, address, asks, opens) = (Arc::clone(&answer), address.clone(), asks.clone(), opens.clone());
                open.spawn(async move { attend(stream, &*answer, &address, asks, opens).await });
            }
        });
        Self { url, questions, sockets, _tasks: tasks }
    }

    /// The next question of a name.
    pub(super) async fn question(&mut self, name: &str) -> Value {
        loop {
            let (asked, question) = timeout(PATIENCE, self.questions.recv()).await.expect("a question in time").unwrap();
            if asked == name {
                return question;
            }
        }
    }

    pub(super) async fn socket(&mut self) -> WebSocketStream<TcpStream> {
        timeout(PATIENCE, self.sockets.recv()).await.expect("a socket in time").unwrap()
    }
}

async fn attend(
    mut stream: TcpStream,
    answer: &Answer,
    address: &str,
    asks: mpsc::Sender<(String, Value)>,
    opens: mpsc::Sender<WebSocketStream<TcpStream>>,
) {
    let mut method = [0; 4];
    if !matches!(stream.peek(&mut method).await, Ok(4)) {
        return;
    }
    if &method == b"GET " {
        if let Ok(socket) = tokio_tungstenite::accept_async(stream).await {
            let _test_over = opens.send(socket).await;
        }
        return;
    }
    let mut bytes = Vec::new();
    let (head, body) = loop {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ").map(str::to_owned));
        if length.is_some_and(|length| length.parse() == Ok(body.len())) {
            break (head.to_owned(), body.to_owned());
        }
    };
    let path = head.split(' ').nth(1).unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    let question = serde_json::from_str(&body).unwrap_or_default();
    let reply = answer(&name, &question, address);
    let _test_over = asks.send((name, question)).await;
    let bytes = match reply {
        Reply::Json(json) => http("200 OK", &json.to_string()),
        Reply::Raw(bytes) => bytes,
        Reply::Never => std::future::pending().await,
    };
    let _gone = stream.write_all(&bytes).await;
    let _gone = stream.shutdown().await;
}

/// An answer over HTTP.
pub(super) fn http(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len()).into_bytes()
}

/// What an honest registry answers to an executor.
pub(super) fn registered(address: &str) -> Value {
    json!({
        "environment_id": "box", "security_profile": SECURITY_PROFILE, "executor_registration_id": REGISTRATION,
        "url": format!("ws://{address}/?role=environment&sig={}", SECRETS[0]),
    })
}

/// One end of a stream, written by hand: it repeats nothing and checks nothing.
pub(super) struct Stream {
    pub(super) name: String,
    pub(super) channel: Channel,
    next: u32,
    calls: u64,
}

impl Stream {
    /// The next record, which says something.
    pub(super) fn record(&mut self, message: &Value) -> Body {
        let text = message.to_string();
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        let payload = self.channel.seal(&[&length[..], text.as_bytes()].concat()).unwrap();
        self.next += 1;
        Body::Record { seq: self.next - 1, payload }
    }
}

/// The harnesses' side of an executor's socket.
pub(super) struct Peer<T = TcpStream> {
    pub(super) socket: WebSocketStream<T>,
    pub(super) keys: PublicKeys,
    kept: VecDeque<Frame>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Peer<T> {
    pub(super) fn new(socket: WebSocketStream<T>, keys: PublicKeys) -> Self {
        Self { socket, keys, kept: VecDeque::new() }
    }

    pub(super) async fn send(&mut self, name: &str, body: Body) {
        let frame = Frame { stream_id: name.to_owned(), ack: 0, ack_bits: 0, body };
        self.socket.send(Message::Binary(frame.encode())).await.unwrap();
    }

    /// The next frame of a stream; those of others are kept.
    pub(super) async fn body_of(&mut self, name: &str) -> Body {
        if let Some(at) = self.kept.iter().position(|frame| frame.stream_id == name) {
            return self.kept.remove(at).unwrap().body;
        }
        let found = async {
            loop {
                let frame = self.frame().await;
                if frame.stream_id == name {
                    break frame.body;
                }
                self.kept.push_back(frame);
            }
        };
        timeout(PATIENCE, found).await.expect("a frame in time")
    }

    async fn frame(&mut self) -> Frame {
        loop {
            // Pings come too.
            if let Message::Binary(bytes) = self.socket.next().await.expect("an open socket").unwrap() {
                return Frame::decode(bytes).unwrap();
            }
        }
    }

    /// The first message of a harness's handshake, and its stream.
    pub(super) async fn first_message(&mut self) -> (String, Vec<u8>) {
        loop {
            let Frame { stream_id, body, .. } = timeout(PATIENCE, self.frame()).await.expect("a frame in time");
            if let Body::Handshake { payload } = body {
                return (stream_id, payload.to_vec());
            }
        }
    }

    pub(super) async fn is_reset(&mut self, name: &str) {
        let body = self.body_of(name).await;
        assert_eq!(body, Body::Reset { reason: "noise_relay_protocol_error".to_owned() }, "{name}");
    }

    /// Opens a stream, as anybody who may.
    pub(super) async fn open(&mut self, name: &str) -> Stream {
        let (initiator, payload) = knock(&self.keys, binding(name), SECRETS[1]);
        self.send(name, Body::Handshake { payload: payload.into() }).await;
        let Body::Handshake { payload } = self.body_of(name).await else { panic!("{name} was not let in") };
        Stream { name: name.to_owned(), channel: initiator.finish(&payload).unwrap(), next: 0, calls: 0 }
    }

    /// Opens a stream on which the gateway was greeted.
    pub(super) async fn greeted(&mut self, name: &str) -> Stream {
        let mut stream = self.open(name).await;
        let answer = self.call(&mut stream, "initialize", &json!({"clientName": "tests"})).await;
        assert!(answer["result"]["sessionId"].is_string(), "{answer}");
        stream
    }

    /// Calls the gateway; the answer fits into one record.
    pub(super) async fn call(&mut self, stream: &mut Stream, method: &str, params: &Value) -> Value {
        stream.calls += 1;
        let body = stream.record(&json!({"id": stream.calls, "method": method, "params": params}));
        self.send(&stream.name, body).await;
        loop {
            let Body::Record { payload, .. } = self.body_of(&stream.name).await else { panic!("{} ended", stream.name) };
            let plain = stream.channel.open(&payload).unwrap();
            let answer: Value = serde_json::from_slice(&plain[4..]).unwrap();
            if answer["id"] == stream.calls {
                return answer;
            }
        }
    }

    /// The control: a stream still does what it is for.
    pub(super) async fn works(&mut self, stream: &mut Stream) {
        let answer = self.call(stream, "mark-of-a-message", &json!({})).await;
        assert_eq!(answer["error"]["code"], -32601, "{answer}");
    }
}

pub(super) fn binding(stream: &str) -> Binding<'_> {
    Binding { environment: "box", registration: REGISTRATION, stream }
}

/// The first message of a handshake with the executor that has these keys.
pub(super) fn knock(keys: &PublicKeys, binding: Binding<'_>, authorization: &str) -> (Initiator, Vec<u8>) {
    Initiator::start(&Identity::generate().unwrap(), keys, binding, authorization).unwrap()
}

//! A plain client that knows nothing but JSON: what it sees is what is on the wire.

use crate::{PATIENCE, Place, Server};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fmt::Debug;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// A byte stream of any kind.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + Debug {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + Debug> Stream for S {}

/// One connection.
#[derive(Debug)]
pub struct Client {
    socket: WebSocketStream<Box<dyn Stream>>,
    /// Messages that came while another was waited for.
    waiting: VecDeque<Value>,
    next: i64,
    /// The session's id, after `initialize`.
    pub session: String,
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its code.
    pub code: i64,
    /// Its text.
    pub message: String,
    /// What more it says to programs.
    pub data: Option<Value>,
}

/// Everything that happened to one process.
#[derive(Debug)]
pub struct Events {
    /// The notifications, in the order they came.
    pub notices: Vec<Value>,
}

impl Client {
    /// Connects, with both steps of the handshake.
    pub async fn connect(server: &Server) -> Self {
        let mut client = Self::dial(&server.url).await;
        client.initialize(None).await.expect("initialize");
        client.send(&json!({"method": "initialized"})).await;
        client
    }

    /// Connects, with both steps of the handshake and more members of `initialize`.
    pub async fn connect_with(server: &Server, resume: Option<&str>, more: Value) -> Self {
        let mut client = Self::dial(&server.url).await;
        client.initialize_with(resume, more).await.expect("initialize");
        client.send(&json!({"method": "initialized"})).await;
        client
    }

    /// Resumes a session, trying again while its old connection is not gone yet.
    pub async fn resume(server: &Server, session: &str) -> Self {
        Self::dial(&server.url).await.resumed(session).await
    }

    /// The same with a token.
    pub async fn resume_with_token(url: &str, token: &str, session: &str) -> Self {
        Self::dial_with(url, Some(token)).await.resumed(session).await
    }

    async fn resumed(mut self, session: &str) -> Self {
        let client = &mut self;
        let attached = async {
            loop {
                match client.initialize(Some(session)).await {
                    Ok(_) => break,
                    Err(Refusal { code: -32010, .. }) => tokio::task::yield_now().await,
                    Err(other) => panic!("resume: {other:?}"),
                }
            }
        };
        timeout(PATIENCE, attached).await.expect("the old connection goes away");
        self.send(&json!({"method": "initialized"})).await;
        self
    }

    /// Connects with a token, with both steps of the handshake.
    pub async fn connect_with_token(url: &str, token: &str) -> Self {
        let mut client = Self::dial_with(url, Some(token)).await;
        client.initialize(None).await.expect("initialize");
        client.send(&json!({"method": "initialized"})).await;
        client
    }

    /// Connects and says nothing.
    pub async fn dial(url: &str) -> Self {
        Self::dial_with(url, None).await
    }

    /// Connects over TCP or, to `unix:PATH`, over a unix socket, and says nothing.
    pub async fn dial_with(url: &str, token: Option<&str>) -> Self {
        let (url, stream): (_, Box<dyn Stream>) = match url.strip_prefix("unix:") {
            Some(path) => ("ws://localhost/", Box::new(UnixStream::connect(path).await.expect("reach the server"))),
            None => {
                let authority = url.strip_prefix("ws://").expect("a URL").split('/').next().expect("an address");
                let stream = TcpStream::connect(authority).await.expect("reach the server");
                stream.set_nodelay(true).expect("TCP_NODELAY");
                (url, Box::new(stream))
            }
        };
        let mut request = url.into_client_request().expect("a URL");
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().expect("a token"));
        }
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let (socket, _response) =
            tokio_tungstenite::client_async_with_config(request, stream, Some(config)).await.expect("connect to the server");
        Self { socket, waiting: VecDeque::new(), next: 0, session: String::new() }
    }

    /// Sends `initialize`.
    pub async fn initialize(&mut self, resume: Option<&str>) -> Result<Value, Refusal> {
        self.initialize_with(resume, json!({})).await
    }

    /// Sends `initialize` with more members.
    pub async fn initialize_with(&mut self, resume: Option<&str>, more: Value) -> Result<Value, Refusal> {
        let params = merged(json!({"clientName": "test", "resumeSessionId": resume}), more);
        let result = self.call("initialize", params).await?;
        self.session = result["sessionId"].as_str().expect("a session id").to_owned();
        Ok(result)
    }

    /// Sends a message.
    pub async fn send(&mut self, message: &Value) {
        self.send_text(&message.to_string()).await;
    }

    /// Sends any text as a message.
    pub async fn send_text(&mut self, text: &str) {
        timeout(PATIENCE, self.socket.send(Message::text(text))).await.expect("the server reads").expect("send");
    }

    /// Sends what the server ends the connection over, while it is sent or after.
    pub async fn send_and_be_cut(mut self, text: &str) {
        if self.socket.send(Message::text(text)).await.is_ok() {
            assert_eq!(self.next().await, None);
        }
    }

    /// Sends a request and answers its id, without waiting.
    pub async fn begin(&mut self, method: &str, params: Value) -> i64 {
        self.next += 1;
        self.send(&json!({"id": self.next, "method": method, "params": params})).await;
        self.next
    }

    /// Waits for the answer of a request.
    pub async fn answer(&mut self, id: i64) -> Result<Value, Refusal> {
        let mut answer = self.wait(|message| message.get("method").is_none() && message["id"] == id).await;
        match answer.get("error") {
            None => Ok(answer["result"].take()),
            Some(error) => Err(Refusal {
                code: error["code"].as_i64().expect("a code"),
                message: error["message"].as_str().expect("a text").to_owned(),
                data: error.get("data").cloned(),
            }),
        }
    }

    /// Calls a method.
    pub async fn call(&mut self, method: &str, params: Value) -> Result<Value, Refusal> {
        let id = self.begin(method, params).await;
        self.answer(id).await
    }

    /// Calls a method that must succeed.
    pub async fn ok(&mut self, method: &str, params: Value) -> Value {
        let shown = params.to_string();
        self.call(method, params).await.unwrap_or_else(|refusal| panic!("{method} {shown}: {refusal:?}"))
    }

    /// Whether each sandbox of this server has a user id of its own on the machine.
    pub async fn has_own_uids(&mut self) -> bool {
        let info = self.ok("environment/info", json!({"enforcement": true})).await;
        info["enforcement"]["namespaces"]["available"]["uids"] == "own"
    }

    /// Calls a method that must fail, and answers how.
    pub async fn refused(&mut self, method: &str, params: Value) -> Refusal {
        let shown = params.to_string();
        match self.call(method, params).await {
            Err(refusal) => refusal,
            Ok(result) => panic!("{method} {shown} should fail, but answered {result}"),
        }
    }

    /// The next message that `wanted` picks; others wait.
    pub async fn wait(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(at) = self.waiting.iter().position(&wanted) {
            return self.waiting.remove(at).expect("it is there");
        }
        loop {
            let message = self.next().await.expect("the connection is open");
            if wanted(&message) {
                return message;
            }
            self.waiting.push_back(message);
        }
    }

    /// The next message of all; none when the connection ended.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            match timeout(PATIENCE, self.socket.next()).await.expect("a message in time") {
                Some(Ok(Message::Text(text))) => return Some(serde_json::from_str(&text).expect("JSON")),
                Some(Ok(Message::Binary(bytes))) => return Some(with_bytes(&bytes)),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return None,
                Some(Ok(_)) => {}
            }
        }
    }

    /// Whether a message came as one with bytes, which are put back to where JSON has them.
    #[must_use]
    pub fn is_binary(message: &Value) -> bool {
        message["cameAsBytes"] == true
    }

    /// Waits until the server closes the connection, and answers with which code.
    pub async fn closed(&mut self) -> Option<u16> {
        loop {
            match timeout(PATIENCE, self.socket.next()).await.expect("a message in time") {
                Some(Ok(Message::Close(frame))) => return frame.map(|frame| frame.code.into()),
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return None,
            }
        }
    }

    /// Parameters of a start that need not be said every time.
    #[must_use]
    pub fn start_params(place: &Place, id: &str, argv: &[&str]) -> Value {
        json!({"processId": id, "argv": argv, "cwd": place.uri(""), "env": {"PATH": "/usr/bin:/bin"}, "tty": false})
    }

    /// Starts a process that must start; `more` is laid over the parameters.
    pub async fn start(&mut self, place: &Place, id: &str, argv: &[&str], more: Value) -> Value {
        let params = merged(Self::start_params(place, id, argv), more);
        self.ok("process/start", params).await
    }

    /// Starts a process and waits for everything that happens to it.
    pub async fn run(&mut self, place: &Place, id: &str, argv: &[&str], more: Value) -> Events {
        self.start(place, id, argv, more).await;
        self.events(id).await
    }

    /// Runs a script that must end with this status.
    pub async fn run_bounded(&mut self, place: &Place, id: &str, script: &str, more: Value, code: i64) {
        let events = self.run(place, id, &["sh", "-c", script], more).await;
        assert_eq!(events.code(), code, "{id}: {}", events.output(None));
    }

    /// Waits for everything that happens to a process.
    pub async fn events(&mut self, id: &str) -> Events {
        let mut notices = Vec::new();
        loop {
            let notice = self.notice(id).await;
            let is_last = notice["method"] == "process/closed";
            notices.push(notice);
            if is_last {
                return Events { notices };
            }
        }
    }

    /// The next notification about a process.
    pub async fn notice(&mut self, id: &str) -> Value {
        self.wait(|message| {
            message["method"].as_str().is_some_and(|method| method.starts_with("process/"))
                && message["params"]["processId"] == id
        })
        .await
    }

    /// Waits until a process has written `text`, whatever the stream.
    pub async fn output(&mut self, id: &str, text: &str) {
        let mut seen = Vec::new();
        while !seen.windows(text.len()).any(|window| window == text.as_bytes()) {
            let notice = self.notice(id).await;
            let so_far = String::from_utf8_lossy(&seen);
            assert_eq!(notice["method"], "process/output", "{notice} came before `{text}`, after `{so_far}`");
            seen.extend(unbase64(&notice["params"]["chunk"]));
        }
    }

    /// The number that a process writes first: its own process id, or a child's.
    pub async fn process_id(&mut self, id: &str) -> i32 {
        let notice = self.notice(id).await;
        let text = String::from_utf8(unbase64(&notice["params"]["chunk"])).expect("text");
        text.trim().parse().expect("a number")
    }

    /// Ends the connection with a close frame, and waits for the server's.
    pub async fn close(mut self) {
        timeout(PATIENCE, self.socket.close(None)).await.expect("the server reads").expect("close");
        self.closed().await;
    }

    /// Ends the connection as a cut cable would: without a close frame.
    pub fn cut(self) {
        drop(self.socket);
    }
}

impl Events {
    /// What it wrote to a stream, or to all.
    #[must_use]
    pub fn output(&self, stream: Option<&str>) -> String {
        String::from_utf8_lossy(&self.bytes(stream)).into_owned()
    }

    /// The same as it is.
    #[must_use]
    pub fn bytes(&self, stream: Option<&str>) -> Vec<u8> {
        let wanted = |notice: &&Value| {
            notice["method"] == "process/output" && stream.is_none_or(|stream| notice["params"]["stream"] == stream)
        };
        self.notices.iter().filter(wanted).flat_map(|notice| unbase64(&notice["params"]["chunk"])).collect()
    }

    /// Its exit status.
    #[must_use]
    pub fn code(&self) -> i64 {
        let exited = self.notices.iter().find(|notice| notice["method"] == "process/exited");
        exited.and_then(|notice| notice["params"]["exitCode"].as_i64()).expect("it exited")
    }

    /// The sequence numbers, in the order they came.
    #[must_use]
    pub fn seqs(&self) -> Vec<u64> {
        self.notices.iter().map(|notice| notice["params"]["seq"].as_u64().expect("a seq")).collect()
    }
}

/// Lays the members of one object over another's.
fn merged(mut base: Value, more: Value) -> Value {
    if let (Value::Object(base), Value::Object(more)) = (&mut base, more) {
        base.extend(more);
    }
    base
}

/// A message with bytes as JSON would have it, and marked.
fn with_bytes(message: &[u8]) -> Value {
    let (length, rest) = message.split_first_chunk().expect("a length");
    let (head, body) = rest.split_at(u32::from_be_bytes(*length) as usize);
    let mut message: Value = serde_json::from_slice(head).expect("a head of JSON");
    let (place, member) = match (&message["params"], &message["result"]["eof"]) {
        (Value::Object(_), _) => ("params", "chunk"),
        (_, Value::Bool(_)) => ("result", "chunk"),
        _ => ("result", "dataBase64"),
    };
    let earlier = message[place].as_object_mut().expect("an object").insert(member.to_owned(), json!(STANDARD.encode(body)));
    assert_eq!(earlier, None, "the head says it without its bytes");
    message["cameAsBytes"] = json!(true);
    message
}

fn unbase64(text: &Value) -> Vec<u8> {
    STANDARD.decode(text.as_str().expect("base64")).expect("base64")
}

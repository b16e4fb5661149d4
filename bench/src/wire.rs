//! A client that does as little as possible: one thread, one socket, no parsing but of what a row looks at. What it costs is the
//! same for every server.

use crate::Failure;
use portcullis_protocol::binary;
use rustix::net::sockopt::set_tcp_quickack;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tokio_tungstenite::tungstenite::client::{IntoClientRequest as _, client_with_config};
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Bytes, Message, Utf8Bytes, WebSocket};

/// How long any answer may take before the run is given up.
const LONGEST: Duration = Duration::from_secs(60);

/// When this end acknowledges what it received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acks {
    /// As the kernel does by itself: up to 40 ms late, in the hope of something to send along.
    Ordinary,
    /// At once (`TCP_QUICKACK`, tcp(7)). A server that lets small packets wait for acknowledgements looks better than it is.
    AtOnce,
}

/// Where a server is, and what it asks for.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    pub(crate) url: String,
    pub(crate) token: Option<String>,
}

/// A connection after its handshake.
pub(crate) struct Wire {
    socket: WebSocket<Tcp>,
    session: String,
    calls: u64,
    names: u64,
}

/// What a server sent: JSON, and the bytes beside it if they came as bytes.
pub(crate) struct Incoming(Utf8Bytes, Option<Bytes>);

/// The parts of it.
#[derive(Debug, Deserialize)]
pub(crate) struct Parts<'a> {
    pub(crate) id: Option<u64>,
    pub(crate) method: Option<&'a str>,
    #[serde(borrow)]
    pub(crate) params: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) result: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) error: Option<&'a RawValue>,
}

impl Incoming {
    pub(crate) fn parts(&self) -> Result<Parts<'_>, Failure> {
        serde_json::from_str(&self.0).map_err(|error| format!("the server sent {:.200}: {error}", self.0.as_str()).into())
    }

    /// How many bytes came as bytes.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.1.as_ref().map(|body| body.len() as u64)
    }
}

impl Wire {
    /// Connects and shakes hands, in a new session.
    pub(crate) fn connect(address: &Address, acks: Acks) -> Result<Self, Failure> {
        Ok(Self::open(address, acks, None, false)?.0)
    }

    /// The same, to get content of files and output as bytes. None of a server that does not do that.
    pub(crate) fn connect_binary(address: &Address, acks: Acks) -> Result<Option<Self>, Failure> {
        let (wire, is_given) = Self::open(address, acks, None, true)?;
        Ok(is_given.then_some(wire))
    }

    /// Connects to a session that is there.
    pub(crate) fn resume(address: &Address, acks: Acks, session: &str) -> Result<Self, Failure> {
        Ok(Self::open(address, acks, Some(session), false)?.0)
    }

    fn open(address: &Address, acks: Acks, session: Option<&str>, binary: bool) -> Result<(Self, bool), Failure> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Initialized {
            session_id: String,
            #[serde(default)]
            binary_frames: bool,
        }
        let host = address.url.strip_prefix("ws://").ok_or("a URL of the kind ws://HOST:PORT is needed")?;
        let stream = TcpStream::connect(host.trim_end_matches('/'))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LONGEST))?;
        let mut request = address.url.as_str().into_client_request()?;
        if let Some(token) = &address.token {
            request.headers_mut().insert(AUTHORIZATION, format!("Bearer {token}").parse()?);
        }
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let (socket, _response) = client_with_config(request, Tcp { stream, acks }, Some(config))
            .map_err(|error| format!("upgrade at {}: {error}", address.url))?;
        let mut wire = Self { socket, session: String::new(), calls: 0, names: 0 };
        let resumed = session.map(|id| format!(r#","resumeSessionId":"{id}""#)).unwrap_or_default();
        let binary = if binary { r#","binaryFrames":true"# } else { "" };
        let answer = wire.call("initialize", &format!(r#"{{"clientName":"bench"{resumed}{binary}}}"#))?;
        let Initialized { session_id, binary_frames } =
            serde_json::from_str(answer.parts()?.result.ok_or("initialize has no result")?.get())?;
        wire.session = session_id;
        wire.socket.send(Message::text(r#"{"method":"initialized","params":{}}"#))?;
        Ok((wire, binary_frames))
    }

    /// The session's id.
    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// A name that nothing in this session has yet.
    pub(crate) fn name(&mut self) -> String {
        self.names += 1;
        format!("n{}", self.names)
    }

    /// Sends a call; the params are JSON. Answers its id.
    pub(crate) fn send(&mut self, method: &str, params: &str) -> Result<u64, Failure> {
        self.calls += 1;
        self.socket.send(Message::text(format!(r#"{{"id":{},"method":"{method}","params":{params}}}"#, self.calls)))?;
        Ok(self.calls)
    }

    /// The next message.
    pub(crate) fn receive(&mut self) -> Result<Incoming, Failure> {
        loop {
            match self.socket.read()? {
                Message::Text(text) => return Ok(Incoming(text, None)),
                Message::Binary(message) => {
                    let (head, body) = binary::split(message)?;
                    return Ok(Incoming(head.try_into()?, Some(body)));
                }
                Message::Close(frame) => return Err(format!("the server closed the connection: {frame:?}").into()),
                // Answers to pings are sent by the next read or write.
                _sign_of_life => {}
            }
        }
    }

    /// A call and its answer; what comes in between is dropped.
    pub(crate) fn call(&mut self, method: &str, params: &str) -> Result<Incoming, Failure> {
        let id = self.send(method, params)?;
        loop {
            let incoming = self.receive()?;
            let parts = incoming.parts()?;
            if parts.id == Some(id) {
                if let Some(error) = parts.error {
                    return Err(format!("{method} {params:.300}: {error}").into());
                }
                return Ok(incoming);
            }
        }
    }

    /// Ends the connection without a word.
    pub(crate) fn cut(self) -> Result<(), Failure> {
        Ok(self.socket.get_ref().stream.shutdown(std::net::Shutdown::Both)?)
    }
}

/// A TCP socket.
struct Tcp {
    stream: TcpStream,
    acks: Acks,
}

impl Read for Tcp {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buffer)?;
        if self.acks == Acks::AtOnce {
            // The kernel falls back to waiting by itself.
            set_tcp_quickack(&self.stream, true)?;
        }
        Ok(read)
    }
}

impl Write for Tcp {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

//! A link over a WebSocket.

use crate::link::{Carried, Incoming, Received};
use crate::options::Token;
use crate::tls::Tls;
use futures_util::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::handshake::client::Request;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Bytes, Error, Message};

/// Messages in line in one direction.
const QUEUE: usize = 128;
/// A server answers a file of 512 MiB in one message, in base64.
const MESSAGE: usize = 768 << 20;

/// Connects, and answers the link with the task that carries it, which answers why it ended; its owner joins it.
///
/// # Errors
/// The server was not reached; the text says why.
pub(crate) async fn websocket(
    url: &str,
    token: Option<&Token>,
    tls: Option<&Tls>,
    silence: Option<Duration>,
) -> Result<(Carried, JoinHandle<String>), String> {
    let config = WebSocketConfig::default().max_message_size(Some(MESSAGE)).max_frame_size(Some(MESSAGE));
    if let Some(path) = url.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        let stream = UnixStream::connect(path).await.map_err(|error| error.to_string())?;
        // Whose name and port these are is decided by the path; a Host must be given all the same.
        let connecting = tokio_tungstenite::client_async_with_config(request("ws://localhost/", token)?, stream, Some(config));
        let (socket, _response) = connecting.await.map_err(|error| refusal(&error))?;
        return Ok(carry(socket, silence));
    }
    let request = request(url, token)?;
    if request.uri().scheme_str() == Some("wss") {
        let tls =
            tls.ok_or("nobody is believed yet: name the certificates that the server's own descends from (--tls-ca FILE)")?;
        let host = request.uri().host().ok_or("it has no host")?.to_owned();
        let port = request.uri().port_u16().unwrap_or(443);
        let stream = TcpStream::connect(format!("{host}:{port}")).await.map_err(|error| error.to_string())?;
        // Without this a call waits 40 ms for the server's delayed acknowledgement of the one before it.
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let stream = tls.connect(&host, stream).await?;
        let connecting = tokio_tungstenite::client_async_with_config(request, stream, Some(config));
        let (socket, _response) = connecting.await.map_err(|error| refusal(&error))?;
        return Ok(carry(socket, silence));
    }
    let connecting = tokio_tungstenite::connect_async_with_config(request, Some(config), true);
    let (socket, _response) = connecting.await.map_err(|error| refusal(&error))?;
    Ok(carry(socket, silence))
}

/// The upgrade.
fn request(url: &str, token: Option<&Token>) -> Result<Request, String> {
    let mut request = url.into_client_request().map_err(|error| error.to_string())?;
    if let Some(token) = token {
        let value = HeaderValue::from_str(&format!("Bearer {}", token.reveal()));
        let mut value = value.map_err(|_| "the token holds what no header can".to_owned())?;
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    Ok(request)
}

/// A link over an upgraded stream.
fn carry<S>(socket: WebSocketStream<S>, silence: Option<Duration>) -> (Carried, JoinHandle<String>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sink, mut stream) = socket.split();
    let (to_server, mut outgoing) = mpsc::channel::<String>(QUEUE);
    let (incoming, from_server) = mpsc::channel(QUEUE);
    // Signs of life are asked for by the reader and sent by the writer; one at a time is enough.
    let (ask, mut asked) = mpsc::channel::<()>(1);
    let carried = tokio::spawn(async move {
        let read = async {
            loop {
                let message = match heard(&mut stream, silence, &ask).await {
                    Some(Some(Ok(message))) => message,
                    Some(Some(Err(error))) => break error.to_string(),
                    Some(None) => break "the server is gone".to_owned(),
                    None => break format!("nothing was heard of the server for {} s", silence.unwrap_or_default().as_secs_f64()),
                };
                let message = match message {
                    Message::Text(text) => Received::Text(text.as_str().to_owned()),
                    Message::Binary(bytes) => Received::Binary(bytes),
                    Message::Close(_) => break "the server closed the connection".to_owned(),
                    _ping_pong => continue,
                };
                if incoming.send(message).await.is_err() {
                    // Who reads is gone; what is still to be written decides when this ends.
                    std::future::pending::<()>().await;
                }
            }
        };
        let write = async {
            loop {
                let message = tokio::select! {
                    text = outgoing.recv() => match text {
                        Some(text) => Message::Text(text.into()),
                        None => break,
                    },
                    Some(()) = asked.recv() => Message::Ping(Bytes::new()),
                };
                if sink.send(message).await.is_err() {
                    // What was read before the end still counts: the reader finds the end by itself.
                    std::future::pending::<()>().await;
                }
            }
            let _gone = sink.send(Message::Close(None)).await;
            "the client closed the connection".to_owned()
        };
        tokio::select! {
            reason = read => reason,
            reason = write => reason,
        }
    });
    (Carried { outgoing: to_server, incoming: Incoming::Messages(from_server) }, carried)
}

/// Why there is no connection, with what the server said.
fn refusal(error: &Error) -> String {
    match error {
        Error::Http(response) => {
            let said = response.body().as_deref().map(String::from_utf8_lossy).unwrap_or_default();
            format!("{error}: {}", said.trim())
        }
        other => match other.to_string() {
            // Before TLS 1.3 the handshake itself fails; since then a server says so afterwards.
            text if text.contains("CertificateRequired") => {
                format!("{text}: the server asks for a certificate (--tls-cert and --tls-key)")
            }
            text => text,
        },
    }
}

/// The next item. None after too long a silence, in which the server was asked for a sign of life.
async fn heard<S: futures_util::Stream + Unpin>(
    stream: &mut S,
    silence: Option<Duration>,
    ask: &mpsc::Sender<()>,
) -> Option<Option<S::Item>> {
    let Some(silence) = silence else { return Some(stream.next().await) };
    let begin = Instant::now();
    if let Ok(item) = timeout_at(begin + silence / 3, stream.next()).await {
        return Some(item);
    }
    let _asked_already = ask.try_send(());
    timeout_at(begin + silence, stream.next()).await.ok()
}

//! A transport over a WebSocket.

use crate::ExecServerError;
use crate::task::Transport;
use futures_util::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// How long a server may take to take a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Messages in line in one direction.
const QUEUE: usize = 128;
/// A server answers a file of 512 MiB in one message, in base64.
const MESSAGE: usize = 768 << 20;

/// Connects, and answers the transport with the task that carries it; its owner joins it.
pub(crate) async fn websocket(url: &str) -> Result<(Transport, JoinHandle<()>), ExecServerError> {
    let failed = |reason: String| ExecServerError::Connect { url: url.to_owned(), reason };
    let config = WebSocketConfig::default().max_message_size(Some(MESSAGE)).max_frame_size(Some(MESSAGE));
    let connecting = tokio_tungstenite::connect_async_with_config(url, Some(config), true);
    let connected = tokio::time::timeout(CONNECT, connecting).await;
    let (socket, _response) = connected
        .map_err(|_elapsed| failed(format!("no answer within {} s", CONNECT.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    let (mut sink, mut stream) = socket.split();
    let (to_server, mut outgoing) = mpsc::channel::<String>(QUEUE);
    let (incoming, from_server) = mpsc::channel(QUEUE);
    let carried = tokio::spawn(async move {
        let read = async {
            while let Some(Ok(message)) = stream.next().await {
                let text = match message {
                    Message::Text(text) => text.as_str().to_owned(),
                    Message::Close(_) => break,
                    _ping_pong_binary => continue,
                };
                if incoming.send(text).await.is_err() {
                    break;
                }
            }
        };
        let write = async {
            while let Some(text) = outgoing.recv().await {
                if sink.send(Message::Text(text.into())).await.is_err() {
                    return;
                }
            }
            let _gone = sink.send(Message::Close(None)).await;
        };
        tokio::select! {
            () = read => {}
            () = write => {}
        }
    });
    Ok((Transport { outgoing: to_server, incoming: from_server }, carried))
}

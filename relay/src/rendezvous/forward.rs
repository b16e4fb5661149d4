//! From a harness's socket here to its executor's at another node.
//!
//! The other node sees the very ticket that the harness showed, and that is what it asks for: it was signed with the key that nodes
//! share. It looks among its own sockets only, so a ticket is passed on once.

use super::sockets::{SILENCE, SLOW, write};
use super::store::Refused;
use crate::socket::{DialError, Socket};
use axum::extract::ws::{Message, WebSocket};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::SplitStream;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

/// How long the other node may take: less than its caller waits for an answer.
const DIAL: Duration = Duration::from_secs(5);

/// The path at which a node asks another one.
pub(super) const PATH: &str = "/node/cloud/environment/{environment}/ws";

/// Dials another node with the query of a harness's URL.
pub(super) async fn dial(node: &str, environment: &str, query: &str) -> Result<Socket, Refused> {
    let url = format!("{node}{}?{query}", PATH.replace("{environment}", environment));
    let dialled = timeout(DIAL, Socket::dial_in_clear(&url)).await;
    // An error does not name the URL, which is a secret for as long as it is valid.
    match dialled {
        Ok(Ok(socket)) => Ok(socket),
        Ok(Err(DialError::Refused(429))) => Err(Refused::Sockets),
        Ok(Err(error)) => {
            tracing::warn!("an executor is said to be at the node {node}: {error}");
            Err(Refused::Offline)
        }
        Err(_elapsed) => {
            tracing::warn!("an executor is said to be at the node {node}, which did not answer within {} s", DIAL.as_secs());
            Err(Refused::Offline)
        }
    }
}

/// Passes frames both ways until either socket ends. What one does not take the other is not asked for.
pub(super) async fn carry(socket: WebSocket, far: Socket) {
    let Socket { outgoing, incoming, mut carrier } = far;
    let (sink, stream) = socket.split();
    tokio::select! {
        () = write(sink, incoming) => {}
        () = pass(stream, outgoing) => {}
    }
    // Both channels are gone by now, so it ends when it has sent what was in line.
    let _aborted_below = timeout(SLOW, carrier.join_next()).await;
    carrier.shutdown().await;
}

async fn pass(mut stream: SplitStream<WebSocket>, outgoing: mpsc::Sender<Bytes>) {
    loop {
        let frame = match timeout_at(Instant::now() + SILENCE, stream.next()).await {
            Ok(Some(Ok(Message::Binary(frame)))) => frame,
            Ok(Some(Ok(Message::Close(_)) | Err(_)) | None) | Err(_) => return,
            Ok(Some(Ok(_sign_of_life))) => continue,
        };
        if outgoing.send(frame).await.is_err() {
            // The other socket ended; what came from it before is still to be written.
            std::future::pending::<()>().await;
        }
    }
}

//! A client and a gateway in one process.

use bytes::Bytes;
use portcullis_client::{ExecServerClient, ExecServerError, Transport};
use portcullis_gateway::{Gateway, Link, LinkEnd, Outgoing};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Texts in line in one direction.
const QUEUE: usize = 16;

/// Connects a client to a gateway of the same process, without a socket. Answers the client and its task, which the caller
/// joins after dropping the client.
///
/// # Errors
/// See [`ExecServerError`].
pub async fn connect(gateway: &Gateway, client_name: &str) -> Result<(ExecServerClient, JoinHandle<()>), ExecServerError> {
    let (link, LinkEnd { incoming, mut outgoing, .. }) = Link::pair("JSON-RPC message from a client in this process", false);
    gateway.accept(link).await;
    let (to_gateway, mut from_client) = mpsc::channel::<String>(QUEUE);
    let (to_client, from_gateway) = mpsc::channel(QUEUE);
    let carrier = tokio::spawn(async move {
        let up = async move {
            while let Some(text) = from_client.recv().await {
                if incoming.send(Bytes::from(text)).await.is_err() {
                    return;
                }
            }
        };
        let down = async move {
            while let Some(message) = outgoing.recv().await {
                let text = match message {
                    Outgoing::Text(text) | Outgoing::Large(text, _) => text,
                    Outgoing::Ping(_) | Outgoing::Binary { .. } => continue,
                    Outgoing::Close { .. } => return,
                };
                if to_client.send(text).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(up, down);
    });
    let transport = Transport { outgoing: to_gateway, incoming: from_gateway };
    let (client, task) = match ExecServerClient::over(transport, client_name).await {
        Ok(connected) => connected,
        Err(error) => {
            // Its transport is dropped, so the carrier ends.
            let _panicked = carrier.await;
            return Err(error);
        }
    };
    let joined = tokio::spawn(async move {
        let _panicked = task.await;
        let _panicked = carrier.await;
    });
    Ok((client, joined))
}

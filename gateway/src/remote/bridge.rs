//! Between a stream and a WebSocket of its own at a destination.

use super::pump::{FromLink, FromStream};
use bytes::Bytes;
use portcullis_relay::destination::{Destination, FromDestination, ToDestination};
use portcullis_relay::mux::StreamKey;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Passes messages on both ways until either end is over, or `stopped`. Answers which stream it was.
pub(super) async fn bridge(
    stream: StreamKey,
    destination: Arc<Destination>,
    mut from_stream: FromStream,
    to_stream: mpsc::Sender<FromLink>,
    stopped: CancellationToken,
) -> StreamKey {
    let dropped = from_stream.dropped();
    let carried = async {
        let (mut to, mut from) = match destination.dial().await {
            Ok(dialled) => dialled,
            Err(error) => return tracing::warn!("{error}"),
        };
        tokio::select! {
            () = up(&mut from_stream, &mut to) => {}
            () = down(stream, &mut from, &to_stream) => {}
            () = stopped.cancelled() => {}
        }
        to.close(from).await;
    };
    tokio::select! {
        () = carried => {}
        () = dropped.cancelled() => {}
    }
    let _drive_over = to_stream.send(FromLink::Ended { stream }).await;
    stream
}

/// Until the stream is over and what came of it was sent, or the destination takes nothing more.
async fn up(from_stream: &mut FromStream, to: &mut ToDestination) {
    while let Some(message) = from_stream.recv().await {
        if let Err(error) = to.send(message).await {
            // Its reader finds the end too, behind what came before it.
            tracing::info!("{error}");
            return std::future::pending().await;
        }
    }
}

/// Until the destination is over and what came of it is in line, or the driver is over. One message at a time: whoever does not
/// take them holds the destination up, and nobody else.
async fn down(stream: StreamKey, from: &mut FromDestination, to_stream: &mpsc::Sender<FromLink>) {
    // A stream has no empty messages, and they say nothing.
    let mut next = async || loop {
        let message: Option<Bytes> = from.recv().await;
        if message.as_ref().is_none_or(|bytes| !bytes.is_empty()) {
            return message;
        }
    };
    while let Some(bytes) = next().await {
        let (taken, is_taken) = oneshot::channel();
        if to_stream.send(FromLink::Message { stream, bytes, taken }).await.is_err() {
            return;
        }
        let _stream_over = is_taken.await;
    }
}

//! Between a stream and its link.

use crate::link::{LinkEnd, Outgoing};
use bytes::Bytes;
use portcullis_relay::mux::StreamKey;
use tokio::sync::{mpsc, oneshot};

/// What a link has for its stream.
#[derive(Debug)]
pub(super) enum FromLink {
    /// A message. The next one comes when this one was taken or dropped.
    Message { stream: StreamKey, bytes: Bytes, taken: oneshot::Sender<()> },
    /// The gateway ended the connection.
    Ended { stream: StreamKey },
}

/// Passes messages on both ways, until the stream is over and its connection has ended.
pub(super) async fn pump(
    stream: StreamKey,
    end: LinkEnd,
    mut from_stream: mpsc::Receiver<Bytes>,
    to_stream: mpsc::Sender<FromLink>,
) {
    let LinkEnd { incoming, mut outgoing, .. } = end;
    let up = async move {
        while let Some(bytes) = from_stream.recv().await {
            if incoming.send(bytes).await.is_err() {
                return;
            }
        }
    };
    let down = async move {
        while let Some(message) = outgoing.recv().await {
            let (text, _room) = match message {
                Outgoing::Text(text) => (text, None),
                Outgoing::Large(text, room) => (text, Some(room)),
                Outgoing::Ping(_) => continue,
                Outgoing::Close { .. } => break,
            };
            let (taken, is_taken) = oneshot::channel();
            if to_stream.send(FromLink::Message { stream, bytes: text.into(), taken }).await.is_err() {
                return;
            }
            let _stream_over = is_taken.await;
        }
        let _drive_over = to_stream.send(FromLink::Ended { stream }).await;
    };
    tokio::join!(up, down);
}

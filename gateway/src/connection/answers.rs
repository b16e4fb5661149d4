//! Answers on their way to the client.

use super::Connection;
use crate::answer::{Way, text};
use crate::link::Outgoing;
use crate::metrics::Direction;
use portcullis_protocol::rpc::{self, Id, RpcError};
use serde::Serialize;
use std::sync::Arc;

impl Connection {
    /// The way of the answer to the request at hand.
    pub(super) fn way(&mut self) -> Way {
        let metrics = Arc::clone(&self.core.metrics);
        Way { outgoing: self.outgoing.clone(), replies: self.replies.clone(), metrics, asked: self.asked.take() }
    }

    pub(super) async fn answer(&mut self, id: &Id, result: &impl Serialize) -> Result<(), RpcError> {
        let text = text(id, result)?;
        self.answered(Ok(()));
        self.send(text).await;
        Ok(())
    }

    /// The request at hand is answered here.
    fn answered(&mut self, outcome: Result<(), &RpcError>) {
        if let Some(asked) = self.asked.take() {
            asked.answered(outcome);
        }
    }

    /// Waits for room towards the client, but not when the connection is to end.
    pub(super) async fn send(&self, text: String) {
        self.core.metrics.message(Direction::Out, text.len());
        tokio::select! {
            _link_gone = self.outgoing.send(Outgoing::Text(text)) => {}
            () = self.leaving.cancelled() => {}
        }
    }

    /// Answers a call that came to nothing before it was carried out.
    pub(super) async fn admitted(&mut self, id: &Id, admitted: Result<(), RpcError>) {
        if let Err(error) = admitted {
            self.answered(Err(&error));
            self.send(rpc::error_text(id, &error)).await;
        }
    }
}

//! Requests as they come, and answers on their way to the client.

use super::Connection;
use crate::answer::{Way, text};
use crate::asked::{Asked, INVALID};
use crate::audit::{self, Entry};
use crate::link::Outgoing;
use crate::metrics::Direction;
use crate::reply;
use portcullis_protocol::method::{Call, Decoded};
use portcullis_protocol::rpc::{self, Id, RawParams, RpcError};
use serde::Serialize;
use std::sync::Arc;

impl Connection {
    /// A request came: from here on it is measured and, if it can be, recorded.
    pub(super) async fn asked(&mut self, method: &str, params: Option<RawParams<'_>>) -> Result<Call, RpcError> {
        let allowed = self.scope.as_ref().map_or(Ok(()), |scope| scope.admit(method)).map_err(reply::invalid);
        let decoded = Call::decode(method, params);
        let method = decoded.as_ref().map_or(INVALID, |decoded| decoded.call.method());
        let asked = Asked::new(Arc::clone(&self.core.metrics), self.caller.transport, method);
        let Some(audit) = self.core.audit.clone().filter(|_| decoded.as_ref().map_or(true, |it| audit::is_recorded(&it.call)))
        else {
            self.asked = Some(asked);
            return allowed.and(decoded).map(|decoded| self.known(decoded));
        };
        let mut entry = Entry::of(&self.caller, self.number, method);
        entry.session = self.attached.as_ref().map(|(session, _)| session.mark());
        if let Ok(Decoded { call, .. }) = &decoded {
            entry.on = audit::subject(call);
        }
        let checked = match &decoded {
            Ok(Decoded { call, .. }) if allowed.is_ok() && audit::must_be_possible(call) => audit.check().await,
            _ => Ok(()),
        };
        if let Err(error) = checked {
            self.asked = Some(asked);
            return Err(reply::internal(format!("{method}: {error}; nothing was done")));
        }
        self.asked = Some(asked.recorded(audit, entry));
        allowed.and(decoded).map(|decoded| self.known(decoded))
    }

    fn known(&self, Decoded { call, ignored }: Decoded) -> Call {
        if ignored > 0 {
            let method = call.method();
            tracing::debug!(connection = self.number, method, ignored, "members of a request that nobody knows");
        }
        call
    }

    /// Answers a call that came to nothing before it was carried out.
    pub(super) async fn admitted(&mut self, id: &Id, admitted: Result<(), RpcError>) {
        if let Err(error) = admitted
            && let Err(error) = self.over::<()>(Err(error)).await
        {
            self.send(rpc::error_text(id, &error)).await;
        }
    }

    /// The way of the answer to the request at hand.
    pub(super) fn way(&mut self) -> Way {
        let metrics = Arc::clone(&self.core.metrics);
        Way { outgoing: self.outgoing.clone(), replies: self.replies.clone(), metrics, asked: self.asked.take() }
    }

    pub(super) async fn answer(&mut self, id: &Id, result: &impl Serialize) -> Result<(), RpcError> {
        let text = self.over(text(id, result)).await?;
        self.send(text).await;
        Ok(())
    }

    /// The request at hand is answered here.
    async fn over<T>(&mut self, outcome: Result<T, RpcError>) -> Result<T, RpcError> {
        match self.asked.take() {
            Some(asked) => asked.over(outcome).await,
            None => outcome,
        }
    }

    /// Waits for room towards the client, but not when the connection is to end. The text is small, since ids and texts of errors
    /// have bounds: it is not charged.
    pub(super) async fn send(&self, text: String) {
        self.core.metrics.message(Direction::Out, text.len());
        tokio::select! {
            _link_gone = self.outgoing.send(Outgoing::Text(text)) => {}
            () = self.leaving.cancelled() => {}
        }
    }
}

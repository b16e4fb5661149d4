//! A request on its way to its answer: what is measured and recorded of it, in one place, whatever it asks for.

use crate::audit::{Audit, Entry};
use crate::caller::Transport;
use crate::metrics::Metrics;
use crate::reply;
use portcullis_protocol::rpc::RpcError;
use portcullis_sandbox::policy::PolicyHash;
use std::sync::Arc;
use tokio::time::Instant;

/// What stands for the method of a request that does not decode: what a client makes up must not become a label.
pub(crate) const INVALID: &str = "invalid";

/// A request that was not answered yet. If it is dropped, its connection ended first.
#[derive(Debug)]
pub(crate) struct Asked {
    metrics: Arc<Metrics>,
    transport: Transport,
    method: &'static str,
    began: Instant,
    /// Where it is to be recorded, and what is known of it by now; none once it was, or if it is not to be.
    record: Option<Box<(Audit, Entry)>>,
    is_over: bool,
}

impl Asked {
    /// A request that just came. `method` is of the closed list of calls, or [`INVALID`].
    pub(crate) fn new(metrics: Arc<Metrics>, transport: Transport, method: &'static str) -> Self {
        Self { metrics, transport, method, began: Instant::now(), record: None, is_over: false }
    }

    /// The same, to be recorded.
    pub(crate) fn recorded(mut self, audit: Audit, entry: Entry) -> Self {
        self.record = Some(Box::new((audit, entry)));
        self
    }

    /// It is one of this session.
    pub(crate) fn of(&mut self, session: impl FnOnce() -> Arc<str>) {
        if let Some((_, entry)) = self.record.as_deref_mut() {
            entry.session = Some(session());
        }
    }

    /// It is carried out under this policy, or none.
    pub(crate) fn under(&mut self, policy: impl FnOnce() -> Option<PolicyHash>) {
        if let Some((_, entry)) = self.record.as_deref_mut() {
            entry.policy = Some(policy().map_or_else(|| "none".to_owned(), |hash| hash.to_string()));
        }
    }

    /// It came to this. Once it is recorded, so that the answer may leave, answers the same; if it cannot be, what to say instead.
    pub(crate) async fn over<T>(mut self, outcome: Result<T, RpcError>) -> Result<T, RpcError> {
        let brief = outcome.as_ref().map(|_| ());
        if let Err(error) = brief {
            self.metrics.denied(&error.denials());
        }
        let recorded = match self.record.take() {
            None => Ok(()),
            Some(record) => {
                let (audit, entry) = *record;
                audit.record(entry.ended(brief)).await
            }
        };
        let outcome = match (recorded, outcome) {
            (Ok(()), outcome) => outcome,
            (Err(error), Ok(_)) => Err(reply::internal(format!("{}: it was carried out, but {error}", self.method))),
            (Err(unrecorded), Err(error)) => {
                Err(RpcError { message: format!("{}; moreover {unrecorded}", error.message), ..error })
            }
        };
        self.is_over = true;
        self.metrics.request(self.transport, self.method, outcome.is_ok(), self.began.elapsed());
        outcome
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(record) = self.record.take() {
            let (audit, entry) = *record;
            // What a worker or the session had begun goes on, so it may have been carried out.
            audit.note(Entry { outcome: "unanswered", ..entry });
        }
        if !self.is_over {
            self.metrics.request(self.transport, self.method, false, self.began.elapsed());
        }
    }
}

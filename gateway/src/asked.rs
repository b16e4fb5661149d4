//! A request on its way to its answer: what is measured of it, in one place, whatever it asks for.

use crate::caller::Transport;
use crate::metrics::Metrics;
use portcullis_protocol::rpc::RpcError;
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
    is_over: bool,
}

impl Asked {
    /// A request that just came. `method` is of the closed list of calls, or [`INVALID`].
    pub(crate) fn new(metrics: Arc<Metrics>, transport: Transport, method: &'static str) -> Self {
        Self { metrics, transport, method, began: Instant::now(), is_over: false }
    }

    /// Its answer is made.
    pub(crate) fn answered(mut self, outcome: Result<(), &RpcError>) {
        self.is_over = true;
        self.metrics.request(self.transport, self.method, outcome.is_ok(), self.began.elapsed());
        if let Err(error) = outcome {
            self.metrics.denied(&error.denials());
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.is_over {
            self.metrics.request(self.transport, self.method, false, self.began.elapsed());
        }
    }
}

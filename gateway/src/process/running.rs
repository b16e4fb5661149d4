//! A process that runs, as those see it who watch the gateway.

use crate::metrics::{Metrics, Present, ProcessEnd};
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::ExitStatus;
use std::sync::Arc;
use tokio::time::Instant;

/// Counts a process and says in the log how it ended. Dropped before its end was told, the process goes with it.
#[derive(Debug)]
pub(crate) struct Running {
    metrics: Arc<Metrics>,
    /// The short name of its session.
    session: Arc<str>,
    /// The session's own number of it: what the client calls it is the client's matter.
    key: u64,
    began: Instant,
    /// None once it ended.
    present: Option<Present>,
}

impl Running {
    /// A process that just began to run.
    pub(crate) fn new(metrics: &Arc<Metrics>, session: Arc<str>, key: u64, sandbox: &'static str) -> Self {
        tracing::info!(session = &*session, process = key, sandbox, "process started");
        Self { metrics: Arc::clone(metrics), session, key, began: Instant::now(), present: Some(metrics.process()) }
    }

    /// It ended; how is not known if the spawner died.
    pub(crate) fn ended(&mut self, status: Option<ExitStatus>, denials: &Denials) {
        self.metrics.denied_to_process(denials);
        let end = match status {
            Some(ExitStatus::Code(0)) => ProcessEnd::Success,
            Some(ExitStatus::Code(_)) => ProcessEnd::Error,
            Some(ExitStatus::Signal(_)) | None => ProcessEnd::Terminated,
        };
        self.over(end, status.map(ExitStatus::code));
    }

    fn over(&mut self, end: ProcessEnd, code: Option<i32>) {
        if self.present.take().is_none() {
            return;
        }
        let took = self.began.elapsed();
        self.metrics.process_ended(end, took);
        let (result, milliseconds) = (end.name(), took.as_millis());
        tracing::info!(session = &*self.session, process = self.key, code, result, milliseconds, "process ended");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.over(ProcessEnd::Terminated, None);
    }
}

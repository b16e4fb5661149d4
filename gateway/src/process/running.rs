//! A process that runs, as those see it who watch the gateway.

use crate::audit::{Audit, Entry, bounded};
use crate::metrics::{Metrics, Present, ProcessEnd};
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::ExitStatus;
use serde_json::json;
use std::sync::Arc;
use tokio::time::Instant;

/// Counts a process, and logs and records how it ended. Dropped before its end was told, the process goes with it.
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
    /// Where its end is to be recorded, under its client's name for it.
    audit: Option<(Audit, String)>,
}

impl Running {
    /// A process that just began to run.
    pub(crate) fn new(
        metrics: &Arc<Metrics>,
        audit: Option<(Audit, String)>,
        session: Arc<str>,
        key: u64,
        sandbox: &'static str,
    ) -> Self {
        tracing::info!(session = &*session, process = key, sandbox, "process started");
        Self { metrics: Arc::clone(metrics), session, key, began: Instant::now(), present: Some(metrics.process()), audit }
    }

    /// It ended; how is not known if the spawner died. Waits until that is recorded.
    pub(crate) async fn ended(&mut self, status: Option<ExitStatus>, denials: &Denials) {
        self.metrics.denied_to_process(denials);
        let end = match status {
            Some(ExitStatus::Code(0)) => ProcessEnd::Success,
            Some(ExitStatus::Code(_)) => ProcessEnd::Error,
            Some(ExitStatus::Signal(_)) | None => ProcessEnd::Terminated,
        };
        if let Some((audit, entry)) = self.over(end, status.map(ExitStatus::code)) {
            // Where it cannot be written, the next call is refused, and this is kept until it can.
            let _kept = audit.record(entry).await;
        }
    }

    fn over(&mut self, end: ProcessEnd, code: Option<i32>) -> Option<(Audit, Entry)> {
        self.present.take()?;
        let took = self.began.elapsed();
        self.metrics.process_ended(end, took);
        let (result, milliseconds) = (end.name(), took.as_millis());
        tracing::info!(session = &*self.session, process = self.key, code, result, milliseconds, "process ended");
        let (audit, process) = self.audit.take()?;
        let on = json!({"process": bounded(&process), "exit": code, "milliseconds": u64::try_from(milliseconds).ok()});
        let session = Some(Arc::clone(&self.session));
        Some((audit, Entry { action: "process/ended", outcome: result, session, on, ..Entry::default() }))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some((audit, entry)) = self.over(ProcessEnd::Terminated, None) {
            audit.note(entry);
        }
    }
}

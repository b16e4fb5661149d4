//! A process on the server.

use crate::{ExecServerClient, ExecServerError};
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event::Stream;
use portcullis_protocol::fs::Empty;
use portcullis_protocol::process::{Signal, SignalParams, StartResult, TerminateParams, TerminateResult};
use tokio::sync::mpsc;

/// Something that happened to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// It wrote.
    Output {
        /// Its number.
        seq: u64,
        /// Where.
        stream: Stream,
        /// What.
        chunk: Vec<u8>,
    },
    /// It ended.
    Exited {
        /// Its number.
        seq: u64,
        /// Its status, or 128 + the signal that ended it.
        code: i32,
        /// Whether it failed and its sandbox was seen to refuse something.
        denied: bool,
        /// What its sandbox was seen to refuse.
        denials: Denials,
    },
    /// It ended and all its streams did. Nothing follows.
    Closed {
        /// Its number.
        seq: u64,
    },
}

/// A started process. Dropping it leaves the process running.
#[derive(Debug)]
pub struct Process {
    pub(crate) client: ExecServerClient,
    pub(crate) started: StartResult,
    pub(crate) events: mpsc::Receiver<ProcessEvent>,
}

impl Process {
    /// The id under which it was started.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.started.process_id
    }

    /// `none`, or how it is confined.
    #[must_use]
    pub fn sandbox_type(&self) -> &str {
        &self.started.sandbox_type
    }

    /// The next event, in order. None after [`ProcessEvent::Closed`], or when the link ended before.
    pub async fn event(&mut self) -> Option<ProcessEvent> {
        self.events.recv().await
    }

    /// Sends SIGINT to its group.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn interrupt(&self) -> Result<(), ExecServerError> {
        let params = SignalParams { process_id: self.id().to_owned(), signal: Signal::Interrupt };
        self.client.call("process/signal", &params).await.map(|_: Empty| ())
    }

    /// Kills its group. Answers whether it ran.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn terminate(&self) -> Result<bool, ExecServerError> {
        let params = TerminateParams { process_id: self.id().to_owned() };
        self.client.call("process/terminate", &params).await.map(|answer: TerminateResult| answer.running)
    }
}

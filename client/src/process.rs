//! A process on the server.

use crate::{ExecServerClient, ExecServerError};
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event::Stream;
use portcullis_protocol::fs::Empty;
use portcullis_protocol::process::{
    CloseStdinParams, ResizeParams, SignalParams, Size, StartResult, TerminateParams, TerminateResult, WriteParams, WriteResult,
    WriteStatus,
};
use portcullis_protocol::signal::Signal;
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
    pub(crate) input: Option<ProcessInput>,
    pub(crate) events: Option<ProcessEvents>,
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
        self.events.as_mut()?.next().await
    }

    /// What happens to it, once, to be followed while calls on it are on their way. [`Self::event`] has none then.
    pub fn take_events(&mut self) -> Option<ProcessEvents> {
        self.events.take()
    }

    /// Its standard input, or what is typed at its terminal; once. Of use if it was started with `pipe_stdin` or `tty`.
    pub fn take_input(&mut self) -> Option<ProcessInput> {
        self.input.take()
    }

    /// Ends its standard input behind what was written; one with a terminal is refused.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn close_stdin(&self) -> Result<(), ExecServerError> {
        close_stdin(&self.client, self.id()).await
    }

    /// Changes the size of its terminal; one without is refused.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn resize(&self, Size { rows, cols }: Size) -> Result<(), ExecServerError> {
        let params = ResizeParams { process_id: self.id().to_owned(), rows, cols };
        self.client.call("process/resize", &params).await.map(|_: Empty| ())
    }

    /// Sends SIGINT to its group.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn interrupt(&self) -> Result<(), ExecServerError> {
        self.signal(Signal::INTERRUPT).await
    }

    /// Sends a signal to its group; nothing happens if it has ended.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn signal(&self, signal: Signal) -> Result<(), ExecServerError> {
        let params = SignalParams { process_id: self.id().to_owned(), signal };
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

/// What happens to a process. While it is kept and not followed it holds up its client: also the answers of other calls.
#[derive(Debug)]
pub struct ProcessEvents(pub(crate) mpsc::Receiver<ProcessEvent>);

impl ProcessEvents {
    /// The next event, in order. None after [`ProcessEvent::Closed`], or when the link ended before.
    pub async fn next(&mut self) -> Option<ProcessEvent> {
        self.0.recv().await
    }
}

/// The standard input of a process. Dropping it leaves the input open.
#[derive(Debug)]
pub struct ProcessInput {
    client: ExecServerClient,
    process_id: String,
    writes: u64,
}

impl ProcessInput {
    pub(crate) fn new(client: ExecServerClient, process_id: String) -> Self {
        Self { client, process_id, writes: 0 }
    }

    /// Writes bytes behind those before, and waits while the server has as much as it takes. Answers what became of them.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<WriteStatus, ExecServerError> {
        self.writes += 1;
        let write_id = format!("input-{}", self.writes);
        let params = WriteParams { process_id: self.process_id.clone(), chunk: Chunk(bytes), write_id };
        self.client.call("process/write", &params).await.map(|result: WriteResult| result.status)
    }

    /// Ends the input behind what was written; that of a terminal is refused.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn close(self) -> Result<(), ExecServerError> {
        close_stdin(&self.client, &self.process_id).await
    }
}

async fn close_stdin(client: &ExecServerClient, process: &str) -> Result<(), ExecServerError> {
    let params = CloseStdinParams { process_id: process.to_owned() };
    client.call("process/closeStdin", &params).await.map(|_: Empty| ())
}

//! A process on the server.

mod events;
mod input;

pub use events::{ProcessEvent, ProcessEvents};
pub use input::ProcessInput;

use crate::{ExecServerClient, ExecServerError};
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event::Stream;
use portcullis_protocol::fs::Empty;
use portcullis_protocol::process::{
    CloseStdinParams, ResizeParams, SignalParams, Size, StartResult, TerminateParams, TerminateResult,
};
use portcullis_protocol::signal::Signal;

/// A started process. It survives cuts of the link as its client does. Dropping it leaves the process running.
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

    /// `none`, or how it is confined; empty if it was attached to.
    #[must_use]
    pub fn sandbox_type(&self) -> &str {
        &self.started.sandbox_type
    }

    /// The next event, in order. None after [`ProcessEvent::Closed`] or [`ProcessEvent::Failed`].
    pub async fn event(&mut self) -> Option<ProcessEvent> {
        self.events.as_mut()?.next().await
    }

    /// What happens to it, once, to be followed while calls on it are on their way. [`Self::event`] has none then.
    pub fn take_events(&mut self) -> Option<ProcessEvents> {
        self.events.take()
    }

    /// Waits for its end, and keeps the first `most` bytes of each of its streams; with 0 none.
    ///
    /// # Errors
    /// [`ExecServerError::Process`] if its end cannot be known, or its events were taken.
    pub async fn wait(&mut self, most: usize) -> Result<Finished, ExecServerError> {
        let process = self.id().to_owned();
        let lost = |reason: &str| ExecServerError::Process { process: process.clone(), reason: reason.to_owned() };
        let events = self.events.as_mut().ok_or_else(|| lost("its events were taken by somebody else"))?;
        let (mut finished, mut has_exited) = (Finished::default(), false);
        while let Some(event) = events.next().await {
            match event {
                ProcessEvent::Output { stream, chunk, .. } => finished.keep(stream, &chunk, most),
                ProcessEvent::Exited { code, denied, denials, .. } => {
                    has_exited = true;
                    (finished.code, finished.denied, finished.denials) = (code, denied, denials);
                }
                ProcessEvent::Gap { .. } => finished.is_whole = false,
                ProcessEvent::Closed { .. } if has_exited => return Ok(finished),
                ProcessEvent::Closed { .. } => break,
                ProcessEvent::Failed { message } => return Err(lost(&message)),
            }
        }
        Err(lost("it closed without an exit status"))
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
        let params = TerminateParams { process_id: self.id().to_owned(), grace_ms: None, report: false };
        self.client.call("process/terminate", &params).await.map(|answer: TerminateResult| answer.running)
    }
}

/// How a process ended, and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// Its status, or 128 + the signal that ended it.
    pub code: i32,
    /// The beginning of its standard output, or of what its terminal showed.
    pub stdout: Vec<u8>,
    /// The beginning of its standard error.
    pub stderr: Vec<u8>,
    /// Whether that is all that it wrote.
    pub is_whole: bool,
    /// Whether it failed and its sandbox was seen to refuse something.
    pub denied: bool,
    /// What its sandbox was seen to refuse.
    pub denials: Denials,
}

impl Default for Finished {
    fn default() -> Self {
        Self { code: 0, stdout: Vec::new(), stderr: Vec::new(), is_whole: true, denied: false, denials: Denials::default() }
    }
}

impl Finished {
    fn keep(&mut self, stream: Stream, chunk: &[u8], most: usize) {
        let kept = if stream == Stream::Stderr { &mut self.stderr } else { &mut self.stdout };
        let room = chunk.len().min(most.saturating_sub(kept.len()));
        kept.extend_from_slice(&chunk[..room]);
        self.is_whole &= room == chunk.len();
    }
}

pub(super) async fn close_stdin(client: &ExecServerClient, process: &str) -> Result<(), ExecServerError> {
    let params = CloseStdinParams { process_id: process.to_owned() };
    client.call("process/closeStdin", &params).await.map(|_: Empty| ())
}

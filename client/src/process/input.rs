//! The standard input of a process.

use super::close_stdin;
use crate::{ExecServerClient, ExecServerError};
use futures_util::Sink;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::process::{WriteParams, WriteResult, WriteStatus};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

type Working = Pin<Box<dyn Future<Output = Result<WriteStatus, ExecServerError>> + Send>>;

/// The standard input of a process, also as a sink of bytes. Dropping it leaves the input open.
///
/// Each write has a number, by which the server writes it once however often it is sent: a cut neither loses nor repeats input.
pub struct ProcessInput {
    client: ExecServerClient,
    process_id: String,
    /// Before the numbers of its writes: another one, of this client or of one that resumed the session, has another.
    name: String,
    writes: u64,
    /// The sink's write that was begun.
    working: Option<Working>,
    is_closing: bool,
}

impl fmt::Debug for ProcessInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessInput").field("process_id", &self.process_id).field("writes", &self.writes).finish_non_exhaustive()
    }
}

impl ProcessInput {
    pub(crate) fn new(client: ExecServerClient, process_id: String) -> Self {
        // Where the system has no random bytes, numbers alone are right for the first input of a process.
        let name = crate::client::operation_id().unwrap_or_else(|| "input".to_owned());
        Self { client, process_id, name, writes: 0, working: None, is_closing: false }
    }

    /// Writes bytes behind those before, and waits while the server has as much as it takes. Answers what became of them. If this
    /// future is dropped they are written once or not at all.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<WriteStatus, ExecServerError> {
        if let Some(working) = self.working.take() {
            accepted(working.await, &self.process_id)?;
        }
        self.begin(bytes).await
    }

    fn begin(&mut self, bytes: Vec<u8>) -> Working {
        self.writes += 1;
        let params = WriteParams {
            process_id: self.process_id.clone(),
            chunk: Chunk(bytes),
            write_id: format!("{}-{}", self.name, self.writes),
        };
        let client = self.client.clone();
        Box::pin(async move { client.call("process/write", &params).await.map(|result: WriteResult| result.status) })
    }

    /// Ends the input behind what was written; that of a terminal is refused.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn close(mut self) -> Result<(), ExecServerError> {
        if let Some(working) = self.working.take() {
            accepted(working.await, &self.process_id)?;
        }
        close_stdin(&self.client, &self.process_id).await
    }
}

fn accepted(outcome: Result<WriteStatus, ExecServerError>, process: &str) -> Result<(), ExecServerError> {
    match outcome? {
        WriteStatus::Accepted => Ok(()),
        status => Err(ExecServerError::Input { process: process.to_owned(), status }),
    }
}

impl Sink<Vec<u8>> for ProcessInput {
    type Error = ExecServerError;

    fn poll_ready(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        self.poll_flush(task)
    }

    fn start_send(mut self: Pin<&mut Self>, bytes: Vec<u8>) -> Result<(), ExecServerError> {
        self.working = Some(self.begin(bytes));
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        let Some(working) = &mut self.working else { return Poll::Ready(Ok(())) };
        let outcome = ready!(working.as_mut().poll(task));
        self.working = None;
        Poll::Ready(accepted(outcome, &self.process_id))
    }

    fn poll_close(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if !self.is_closing {
            ready!(self.as_mut().poll_flush(task))?;
            self.is_closing = true;
            let (client, process) = (self.client.clone(), self.process_id.clone());
            let closing = async move { close_stdin(&client, &process).await.map(|()| WriteStatus::Accepted) };
            self.working = Some(Box::pin(closing));
        }
        self.poll_flush(task)
    }
}

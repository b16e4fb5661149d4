//! A file that is written block by block.

use super::Handle;
use crate::ExecServerError;
use futures_util::{Sink, SinkExt as _};
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::fs::{Empty, WriteBlockParams};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Bytes of one block at most.
const BLOCK: usize = 1 << 20;

type Working = Pin<Box<dyn Future<Output = Result<(), ExecServerError>> + Send>>;

/// A file that is written block by block: a sink of bytes, one behind the other. Dropping it closes the file behind what was
/// flushed.
///
/// Over a cut of the link it goes on if the server keeps handles and the client asked for that: a block has its offset, and
/// written twice it is what it was. Otherwise it fails with [`ExecServerError::HandleLost`], or [`ExecServerError::Lost`] for a
/// block that was on its way.
pub struct FileWriter {
    handle: Arc<Handle>,
    offset: u64,
    working: Option<Working>,
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter").field("handle", &self.handle).field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl FileWriter {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle: Arc::new(handle), offset: 0, working: None }
    }

    /// Writes bytes behind those before, and waits until the server has them.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), ExecServerError> {
        self.send(bytes).await
    }

    /// Closes the file, and waits for that.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn finish(mut self) -> Result<(), ExecServerError> {
        self.flush().await?;
        match Arc::try_unwrap(self.handle) {
            Ok(handle) => handle.close().await,
            // Nobody else has it once everything is flushed.
            Err(_shared) => Ok(()),
        }
    }
}

async fn write(handle: Arc<Handle>, mut offset: u64, bytes: Vec<u8>) -> Result<(), ExecServerError> {
    for block in bytes.chunks(BLOCK) {
        let params = WriteBlockParams { handle_id: handle.id.clone(), offset, chunk: Chunk(block.to_owned()) };
        let _written: Empty = handle.call("fs/writeBlock", &params).await?;
        offset += block.len() as u64;
    }
    Ok(())
}

impl Sink<Vec<u8>> for FileWriter {
    type Error = ExecServerError;

    fn poll_ready(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        self.poll_flush(task)
    }

    fn start_send(mut self: Pin<&mut Self>, bytes: Vec<u8>) -> Result<(), ExecServerError> {
        let (handle, offset) = (Arc::clone(&self.handle), self.offset);
        self.offset += bytes.len() as u64;
        self.working = Some(Box::pin(write(handle, offset, bytes)));
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        let Some(working) = &mut self.working else { return Poll::Ready(Ok(())) };
        let outcome = ready!(working.as_mut().poll(task));
        self.working = None;
        Poll::Ready(outcome)
    }

    /// Waits for what was written. The file is closed when this is dropped, or by [`FileWriter::finish`], which waits for that.
    fn poll_close(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        self.poll_flush(task)
    }
}

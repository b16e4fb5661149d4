//! A file that is read block by block.

use super::Handle;
use crate::ExecServerError;
use crate::client::decode;
use crate::recovery::Reply;
use futures_util::Stream;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::fs::{ReadBlockParams, ReadBlockResult};
use serde::Deserialize;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Bytes of one block. Larger ones hold up what else is on the link.
const BLOCK: u64 = 256 * 1024;

type Working = Pin<Box<dyn Future<Output = Result<ReadBlockResult, ExecServerError>> + Send>>;

/// A file that is read block by block: a stream that ends at the end of the file or after an error. Dropping it closes the file.
///
/// It goes on over a cut of the link if the server keeps handles and the client asked for that; otherwise it fails with
/// [`ExecServerError::HandleLost`], or [`ExecServerError::Disconnected`] for a block that was on its way. A file is never opened
/// anew behind the caller's back: it could be another one by then.
pub struct FileReader {
    handle: Arc<Handle>,
    offset: u64,
    working: Option<Working>,
    is_ended: bool,
}

impl fmt::Debug for FileReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileReader").field("handle", &self.handle).field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl FileReader {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle: Arc::new(handle), offset: 0, working: None, is_ended: false }
    }

    /// Bytes from anywhere in the file, at most 1 MiB; fewer only at its end. What the stream reads next does not change.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn read_at(&self, offset: u64, len: u64) -> Result<Vec<u8>, ExecServerError> {
        read(Arc::clone(&self.handle), offset, len).await.map(|block| block.chunk.0)
    }

    /// The next block. None at the end.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn next(&mut self) -> Option<Result<Vec<u8>, ExecServerError>> {
        std::future::poll_fn(|task| Pin::new(&mut *self).poll_next(task)).await
    }
}

async fn read(handle: Arc<Handle>, offset: u64, len: u64) -> Result<ReadBlockResult, ExecServerError> {
    let params = ReadBlockParams { handle_id: handle.id.clone(), offset, len };
    let Reply { result, body } = handle.ask("fs/readBlock", &params).await?;
    match body {
        Some(chunk) => {
            let End { eof } = decode("fs/readBlock", Reply { result, body: None })?;
            Ok(ReadBlockResult { chunk: Chunk(chunk.into()), eof })
        }
        None => decode("fs/readBlock", Reply { result, body }),
    }
}

/// What a block says beside its bytes.
#[derive(Deserialize)]
struct End {
    eof: bool,
}

impl Stream for FileReader {
    type Item = Result<Vec<u8>, ExecServerError>;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_ended {
            return Poll::Ready(None);
        }
        let (handle, offset) = (Arc::clone(&self.handle), self.offset);
        let working = self.working.get_or_insert_with(|| Box::pin(read(handle, offset, BLOCK)));
        let outcome = ready!(working.as_mut().poll(task));
        self.working = None;
        Poll::Ready(match outcome {
            Ok(ReadBlockResult { chunk, eof }) => {
                self.offset += chunk.0.len() as u64;
                self.is_ended = eof || chunk.0.is_empty();
                (!chunk.0.is_empty()).then_some(Ok(chunk.0))
            }
            Err(error) => {
                self.is_ended = true;
                Some(Err(error))
            }
        })
    }
}

//! The `fs/*` operations, one family a file.
//!
//! Every operation reaches the file system through a [`View`]: it judges a path by the policy, and yields descriptors. An
//! operation never opens a path of its own accord.

mod copy;
mod directory;
mod links;
mod metadata;
mod pointers;
mod read;
mod refusal;
mod remove;
mod rules;
mod serve;
mod trace;
mod view;
mod walk;
mod watch;
mod write;

use portcullis_protocol::helper::{FsDone, FsError, FsOperation, OpenMode};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

pub(crate) use serve::serve;
pub(crate) use view::View;

/// What came of a request, with what travels beside the body of its reply.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Result<FsDone, FsError>,
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptor: Option<OwnedFd>,
}

impl From<Result<FsDone, FsError>> for Answer {
    fn from(outcome: Result<FsDone, FsError>) -> Self {
        Self { outcome, payload: Vec::new(), descriptor: None }
    }
}

impl From<FsError> for Answer {
    fn from(error: FsError) -> Self {
        Err::<FsDone, _>(error).into()
    }
}

impl From<Result<Self, FsError>> for Answer {
    fn from(answer: Result<Self, FsError>) -> Self {
        answer.unwrap_or_else(Self::from)
    }
}

/// Carries out one request.
pub(crate) fn carry_out(view: &View, operation: FsOperation, payload: &[u8], descriptors: Vec<OwnedFd>) -> Answer {
    if let Err(stale) = view.check_fresh() {
        return stale.into();
    }
    let mut answer = act(view, &operation, payload, descriptors);
    answer.outcome = answer.outcome.map_err(|error| refusal::named(error, &operation));
    answer
}

fn act(view: &View, operation: &FsOperation, payload: &[u8], descriptors: Vec<OwnedFd>) -> Answer {
    match operation {
        FsOperation::ReadFile { path, follow, limit } => read::file(view, path, *follow, *limit).into(),
        FsOperation::Open { path, mode: OpenMode::Read } => read::open(view, path).into(),
        FsOperation::Open { path, mode: OpenMode::Replace } => write::open(view, path).into(),
        FsOperation::WriteFile { path, follow } => {
            let content = write::Content::of(payload, descriptors);
            content.and_then(|content| write::file(view, path, *follow, &content)).into()
        }
        FsOperation::CreateDirectory { path, recursive, follow } => directory::create(view, path, *recursive, *follow).into(),
        FsOperation::GetMetadata { path, follow } => metadata::get(view, path, *follow).into(),
        FsOperation::Canonicalize { path } => metadata::canonicalize(view, path).into(),
        FsOperation::ReadDirectory { path } => directory::read(view, path).into(),
        FsOperation::Walk { path, options } => walk::walk(view, path, *options).into(),
        FsOperation::Remove { path, recursive, force, follow } => {
            remove::remove(view, path, remove::Manner { recursive: *recursive, force: *force, follow: *follow }).into()
        }
        FsOperation::WatchMissing { path, others, present } => watch::missing(view, path, others, present.as_ref()),
        FsOperation::Copy { source, destination, recursive } => copy::copy(view, source, destination, *recursive).into(),
    }
}

/// The system said no.
fn os(errno: Errno) -> FsError {
    FsError::Os(errno.raw_os_error())
}

/// Whether the system said just this.
fn is(error: &FsError, errno: Errno) -> bool {
    *error == os(errno)
}

#[cfg(test)]
mod tests;

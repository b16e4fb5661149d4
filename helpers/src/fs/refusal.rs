//! What the policy refused, as the client is told of it.

use portcullis_protocol::denial::{Denial, Layer, SuggestedEntry, Wanted};
use portcullis_protocol::helper::{FsError, FsOperation};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::Access;
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// The policy said no to `wanted` of a link-free path: by which rule, and what would allow it.
pub(super) fn refused(errno: Errno, real: &Path, wanted: Wanted, rule: String, grant: Option<(PathBuf, Access)>) -> FsError {
    let grant = grant.and_then(|(path, access)| entry(&path, if access == Access::Write { Wanted::Write } else { Wanted::Read }));
    let path = real.to_string_lossy().into_owned();
    let denial = Denial { path, access: wanted, layer: Layer::Worker, rule, grant };
    FsError::Denied(errno.raw_os_error(), Some(Box::new(denial)))
}

/// Whether the policy said just this.
pub(super) fn is_refused(error: &FsError, errno: Errno) -> bool {
    matches!(error, FsError::Denied(number, _) if *number == errno.raw_os_error())
}

/// The same error, met on the way of a path that was to be changed.
pub(super) fn of_change(error: FsError) -> FsError {
    let FsError::Denied(errno, Some(mut denial)) = error else { return error };
    denial.access = Wanted::Write;
    if let Some(grant) = &mut denial.grant {
        grant.access = Wanted::Write;
    }
    FsError::Denied(errno, Some(denial))
}

/// The same error by the path that the client named, which need not be the real one. What the policy hides from a client is
/// not spoken of by its real path, nor is it looked at: then the entry that would allow it is made from the client's words.
pub(super) fn named(error: FsError, operation: &FsOperation) -> FsError {
    let FsError::Denied(errno, Some(mut denial)) = error else { return error };
    let (path, destination) = operation.paths();
    let named = destination.filter(|_| denial.access == Wanted::Write).unwrap_or(path);
    denial.path = named.as_path().to_string_lossy().into_owned();
    if errno == Errno::NOENT.raw_os_error() && denial.grant.is_some() {
        // An entry for writing a file that is not there allows nothing, so the directory is the one to grant.
        let parent = named.as_path().parent().filter(|_| denial.access == Wanted::Write);
        denial.grant = entry(parent.unwrap_or(named.as_path()), denial.access);
    }
    FsError::Denied(errno, Some(denial))
}

fn entry(path: &Path, access: Wanted) -> Option<SuggestedEntry> {
    AbsolutePath::new(path).ok().map(|path| SuggestedEntry::new(&path, access))
}

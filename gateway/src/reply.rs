//! Errors of the wire for calls on files and handles: which code, and the words around the cause.

use crate::helper::worker::WorkerError;
use portcullis_protocol::helper::{FsError, errno_text};
use portcullis_protocol::limit::{LimitReached, Scope};
use portcullis_protocol::path::PathError;
use portcullis_protocol::rpc::{RpcError, code};
use rustix::io::Errno;

/// Of a path that names another system, in a file call.
pub(crate) fn foreign_path(error: &PathError) -> RpcError {
    RpcError::new(code::INVALID_REQUEST, error.to_string())
}

/// Of a file call that failed. `attempt` says what was tried on what, as in `fs/readFile /etc/shadow`.
pub(crate) fn fs_error(attempt: &str, error: &FsError) -> RpcError {
    let number = match error {
        FsError::Os(errno) | FsError::Denied(errno, _) | FsError::Partial { errno, .. } => os_code(*errno),
        FsError::NotAFile(_) | FsError::TooLarge(_) | FsError::Link => code::INVALID_REQUEST,
        FsError::Unsupported(_) => code::INVALID_REQUEST,
        FsError::RecursiveNoFollow | FsError::Stale | FsError::InFlight(_) => code::INTERNAL,
    };
    let answer = RpcError::new(number, format!("{attempt}: {error}"));
    match error {
        FsError::Denied(_, Some(denial)) => answer.with_denials(std::slice::from_ref(denial)),
        _unexplained => answer,
    }
}

/// Of a worker that did not answer.
pub(crate) fn worker_error(attempt: &str, error: &WorkerError) -> RpcError {
    let number = match error {
        WorkerError::Unenforceable(_) => code::INVALID_PARAMS,
        WorkerError::Gone | WorkerError::Lost(_) | WorkerError::Start(_) => code::INTERNAL,
    };
    RpcError::new(number, format!("{attempt}: {error}"))
}

/// Of a system call on an open handle.
pub(crate) fn os_error(attempt: &str, errno: Errno) -> RpcError {
    RpcError::new(os_code(errno.raw_os_error()), format!("{attempt}: {}", errno_text(errno.raw_os_error())))
}

/// Of a handle that is not there.
pub(crate) fn unknown_handle(handle: &str) -> RpcError {
    RpcError::new(code::NOT_FOUND, format!("unknown file handle `{handle}`"))
}

/// An operation that makes no sense as it was asked for.
pub(crate) fn invalid(text: impl Into<String>) -> RpcError {
    RpcError::new(code::INVALID_REQUEST, text)
}

/// Of a session that ended while a call was on its way.
pub(crate) fn session_ended() -> RpcError {
    invalid("the session has ended")
}

/// Of a call that would need more than the operator allows, where all of it is in use. `limit` is its name in [`crate::LIMITS`].
pub(crate) fn limit(text: impl Into<String>, limit: &str, value: usize, scope: Scope) -> RpcError {
    let (limit, value) = (limit.to_owned(), u64::try_from(value).unwrap_or(u64::MAX));
    invalid(text).with_limit(&LimitReached { limit, value, used: value, scope })
}

/// A defect of ours.
pub(crate) fn internal(text: impl Into<String>) -> RpcError {
    RpcError::new(code::INTERNAL, text)
}

/// The codes that clients of this wire know for errors of the system.
fn os_code(errno: i32) -> i32 {
    let is = |known: Errno| errno == known.raw_os_error();
    if is(Errno::NOENT) {
        code::NOT_FOUND
    } else if is(Errno::ACCESS) || is(Errno::INVAL) {
        code::INVALID_REQUEST
    } else {
        code::INTERNAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_systems_errors() {
        let code_of = |errno: Errno| fs_error("fs/x /p", &FsError::Os(errno.raw_os_error())).code;
        assert_eq!(code_of(Errno::NOENT), code::NOT_FOUND);
        assert_eq!(code_of(Errno::ACCESS), code::INVALID_REQUEST);
        assert_eq!(code_of(Errno::INVAL), code::INVALID_REQUEST);
        for errno in
            [Errno::EXIST, Errno::NOTDIR, Errno::ISDIR, Errno::BUSY, Errno::ROFS, Errno::NOTEMPTY, Errno::LOOP, Errno::PERM]
        {
            assert_eq!(code_of(errno), code::INTERNAL, "{errno:?}");
        }
    }

    #[test]
    fn texts_say_what_was_attempted_on_what() {
        let error = fs_error("fs/writeFile /etc/x", &FsError::Denied(30, None));
        assert_eq!(error.message, "fs/writeFile /etc/x: the request's policy refuses it: Read-only file system (os error 30)");
    }
}

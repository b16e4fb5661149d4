//! Whether this machine gives namespaces and mounts: tried once, in a child that ends at once.

use crate::init::{self, Tried};
use crate::sys::{self, Fork};
use portcullis_protocol::helper::{NamespaceLayer, errno_text};
use portcullis_sandbox::enforce::EnforceError;
use portcullis_sandbox::namespaces::{self, Users};
use portcullis_sandbox::report;
use rustix::pipe::{PipeFlags, pipe_with};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Statuses of the child. With the last three it writes why.
const OWN_PROC: i32 = 0;
const MACHINE_PROC: i32 = 1;
const SHARED_USERS: i32 = 2;
const SHARED_USERS_MACHINE_PROC: i32 = 3;
const REFUSED: i32 = 4;

/// Tries.
pub(crate) fn namespaces() -> NamespaceLayer {
    match attempt(Users::here(true)) {
        Ok((own_proc, shared)) => NamespaceLayer::Available { user: shared.is_empty(), own_proc, shared },
        Err(reason) => NamespaceLayer::Unavailable { reason, remedy: report::namespace_remedy() },
    }
}

/// Whether `/proc` can be its own, and why its users cannot.
fn attempt(users: Users) -> Result<(bool, String), String> {
    let (words, pen) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| format!("make a pipe: {errno}"))?;
    let forked = sys::fork_into(namespaces::flags(users.is_first()));
    let forked = forked.map_err(|error| format!("make user, pid and ipc namespaces for a view of mounts: {error}"))?;
    let child = match forked {
        Fork::Child => {
            let tried = catch_unwind(AssertUnwindSafe(|| init::try_all(users)));
            let (status, problem) = match tried {
                Ok(Ok(Tried { own_proc, shared_users: None })) => sys::end(if own_proc { OWN_PROC } else { MACHINE_PROC }),
                Ok(Ok(Tried { own_proc, shared_users: Some(error) })) => {
                    (if own_proc { SHARED_USERS } else { SHARED_USERS_MACHINE_PROC }, text(&error))
                }
                Ok(Err(error)) => (REFUSED, text(&error)),
                Err(_panic) => (REFUSED, "the attempt panicked".to_owned()),
            };
            // It fits into an empty pipe; without a reader there is nobody to tell.
            let _unheard = rustix::io::write(&pen, problem.as_bytes());
            sys::end(status)
        }
        Fork::Parent(child) => child,
    };
    drop(pen);
    let status = sys::wait_for(child);
    let mut problem = [0; 4096];
    let length = rustix::io::read(&words, &mut problem[..]).unwrap_or(0);
    let problem = match String::from_utf8_lossy(&problem[..length]) {
        empty if empty.is_empty() => "the attempt died".to_owned(),
        text => text.into_owned(),
    };
    match status {
        Some(OWN_PROC) => Ok((true, String::new())),
        Some(MACHINE_PROC) => Ok((false, String::new())),
        Some(SHARED_USERS) => Ok((true, problem)),
        Some(SHARED_USERS_MACHINE_PROC) => Ok((false, problem)),
        _failed => Err(problem),
    }
}

fn text(error: &EnforceError) -> String {
    match error.errno() {
        0 => error.to_string(),
        errno => format!("{error}: {}", errno_text(errno)),
    }
}

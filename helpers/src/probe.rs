//! Whether this machine gives namespaces and mounts: tried once, in a child that ends at once.

use crate::init::{self, Tried};
use crate::sys::{self, Fork};
use crate::uids::{Lease, Uids};
use portcullis_protocol::helper::{NamespaceLayer, errno_text};
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::enforce::EnforceError;
use portcullis_sandbox::mounts::RecordsAt;
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
        Ok((own_proc, shared)) => {
            NamespaceLayer::Available { user: shared.is_empty(), own_proc, shared, uids: Default::default() }
        }
        Err(reason) => NamespaceLayer::Unavailable { reason, remedy: report::namespace_remedy() },
    }
}

/// Tries user ids of the machine for sandboxes of root, of a range that is locked beside the records. If not, why.
pub(crate) fn uids(range: UidRange, records: &RecordsAt) -> Result<Uids, String> {
    let mut uids = Uids::new(range, records).map_err(|errno| format!("lock user ids in the private directory: {errno}"))?;
    let lease = uids.lease().map_err(|error| format!("take a user id of {range}: {error}"))?;
    if let Some(lease) = lease {
        try_user(&lease)?;
        uids.put_back(lease);
    }
    Ok(uids)
}

fn try_user(lease: &Lease) -> Result<(), String> {
    let tried = in_child(Users::Later, || match init::try_user(lease) {
        Ok(()) => (OWN_PROC, String::new()),
        Err(reason) => (REFUSED, reason),
    });
    match tried.map_err(|error| format!("make the namespaces of a sandbox: {error}"))? {
        (Some(OWN_PROC), _) => Ok(()),
        (_, problem) => Err(problem),
    }
}

/// Whether `/proc` can be its own, and why its users cannot.
fn attempt(users: Users) -> Result<(bool, String), String> {
    let tried = in_child(users, || match init::try_all(users) {
        Ok(Tried { own_proc, shared_users: None }) => (if own_proc { OWN_PROC } else { MACHINE_PROC }, String::new()),
        Ok(Tried { own_proc, shared_users: Some(error) }) => {
            (if own_proc { SHARED_USERS } else { SHARED_USERS_MACHINE_PROC }, text(&error))
        }
        Err(error) => (REFUSED, text(&error)),
    });
    match tried.map_err(|error| format!("make user, pid and ipc namespaces for a view of mounts: {error}"))? {
        (Some(OWN_PROC), _) => Ok((true, String::new())),
        (Some(MACHINE_PROC), _) => Ok((false, String::new())),
        (Some(SHARED_USERS), problem) => Ok((true, problem)),
        (Some(SHARED_USERS_MACHINE_PROC), problem) => Ok((false, problem)),
        (_failed, problem) => Err(problem),
    }
}

/// The status of a child in new namespaces that tries something, and what it wrote of that.
fn in_child(users: Users, attempt: impl FnOnce() -> (i32, String)) -> std::io::Result<(Option<i32>, String)> {
    let (words, pen) = pipe_with(PipeFlags::CLOEXEC)?;
    let child = match sys::fork_into(namespaces::flags(users.is_first()))? {
        Fork::Child => {
            let tried = catch_unwind(AssertUnwindSafe(attempt));
            let (status, problem) = tried.unwrap_or_else(|_panic| (REFUSED, "the attempt panicked".to_owned()));
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
    Ok((status, problem))
}

fn text(error: &EnforceError) -> String {
    match error.errno() {
        0 => error.to_string(),
        errno => format!("{error}: {}", errno_text(errno)),
    }
}

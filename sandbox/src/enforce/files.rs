//! The capabilities that an fs worker gives up before it opens the roots of its policy, and its confinement in a view of its own.

use super::{EnforceError, worker};
use crate::limits;
use crate::mounts::FileView;
use crate::policy::{Files, Policy};
use crate::roots::Roots;
use portcullis_protocol::helper::Enforced;

/// Confines this single-threaded process as [`worker`] does, in a view of files, in the first process of new pid and ipc namespaces. `roots` were opened anew in it.
///
/// # Errors
/// A step failed; the process must end.
pub fn worker_in_view(policy: &Policy, roots: &Roots, view: &FileView, user: bool) -> Result<Enforced, EnforceError> {
    let enforced = worker(policy, roots)?;
    let user = user.then_some("user");
    let namespaces = user.into_iter().chain(["mount", "pid", "ipc"]).map(str::to_owned).collect();
    Ok(Enforced { namespaces, own_proc: view.own_proc, ..enforced })
}

/// Keeps of this process's capabilities those by which it makes its view, before it looks at any file. A file that its user may not
/// reach is out of reach from here on.
///
/// # Errors
/// The system refuses; the process must end.
pub fn keep_mounting() -> Result<(), EnforceError> {
    limits::keep_mounting(false).map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
}

/// The same for a process that is about to execute the program that makes a view.
///
/// # Errors
/// The system refuses; the process must end.
pub fn hand_on_mounting() -> Result<(), EnforceError> {
    limits::keep_mounting(true).map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
}

/// Gives up the capabilities that override file modes, before this process opens or resolves a path of the policy. A file in a
/// directory that its user may not search is then missing from the start, whether it exists or not. [`worker`] comes after it.
///
/// # Errors
/// The system refuses; the process must end.
pub fn surrender(policy: &Policy) -> Result<(), EnforceError> {
    if policy.files == Files::Unrestricted {
        return Ok(());
    }
    limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
}

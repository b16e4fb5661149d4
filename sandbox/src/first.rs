//! Confining the first process of a sandbox, its init, once the view stands: from then on it waits, reads, signals and reaps.
//!
//! Two steps, with the fork of the launcher between them. Before it, the domain of Landlock, in which the launcher's own nests: a
//! tracer of an ancestor's domain may read a program's memory, one of another domain may not (Landlock documentation, "Ptrace
//! restrictions"). After it, what the launcher still needs.

use crate::enforce::{EnforceError, Own, landlock_abi};
use crate::landlock;
use crate::policy::Policy;
use crate::roots::Roots;
use crate::{limits, seccomp};
use rustix::thread::CapabilitySet;

/// What init has to do itself at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// Nothing.
    None,
    /// To remove mount points from the machine: it unmounts what covers them, and Landlock forbids every unmount
    /// (`hook_sb_umount`).
    RemovePoints,
}

/// What that takes: to unmount, and to remove a directory of another user.
const FOR_POINTS: [CapabilitySet; 4] =
    [CapabilitySet::SYS_ADMIN, CapabilitySet::DAC_OVERRIDE, CapabilitySet::DAC_READ_SEARCH, CapabilitySet::FOWNER];

/// Before the launcher is forked, after all mounts: no program of higher privilege, and files as the launcher will have them at
/// most, beside reading.
///
/// # Errors
/// A step failed; the process must end.
pub fn before_launcher(policy: &Policy, roots: &Roots, own: &Own, duty: Duty) -> Result<(), EnforceError> {
    rustix::thread::set_no_new_privs(true).map_err(|errno| EnforceError::NoNewPrivs { errno: errno.raw_os_error() })?;
    if duty == Duty::RemovePoints {
        return Ok(());
    }
    let abi = landlock_abi(policy)?;
    landlock::restrict_first(policy, roots, own, abi).map_err(|error| EnforceError::Landlock { problem: error.to_string() })
}

/// After the launcher is forked: no capabilities, and the calls of its table.
///
/// # Errors
/// A step failed; the process must end.
pub fn for_good(duty: Duty) -> Result<(), EnforceError> {
    let fail = |errno: rustix::io::Errno| EnforceError::Capabilities { errno: errno.raw_os_error() };
    match duty {
        Duty::RemovePoints => limits::keep_capabilities(FOR_POINTS.into_iter().collect()).map_err(fail),
        Duty::None => {
            limits::drop_capabilities().map_err(fail)?;
            let table = seccomp::Table::Init;
            seccomp::install(table).map_err(|error| EnforceError::Seccomp { table: table.name(), problem: error.to_string() })
        }
    }
}

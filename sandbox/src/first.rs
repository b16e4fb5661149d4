//! Confining the first process of a sandbox, its init, after the view is built: from then on it only waits, reads, signals and
//! reaps.
//!
//! There are two steps, with the fork of the launcher between them. Before the fork init enters a Landlock domain, in which the
//! launcher's own domain nests: a tracer in an ancestor's domain may read a program's memory, a tracer in another domain may not
//! (Landlock documentation, "Ptrace restrictions"). After the fork init gives up the capabilities and system calls that the
//! launcher still needed.

use crate::compiled::Compiled;
use crate::enforce::{EnforceError, Own, landlock_abi};
use crate::landlock;
use crate::policy::Policy;
use crate::roots::Roots;
use crate::{limits, seccomp};

/// Called after all mounts are made and before the launcher is forked. Init then cannot execute a program of higher privilege, and
/// can change no more files than the launcher; it may still read everything.
///
/// # Errors
/// A step failed; the process must end.
pub fn before_launcher(policy: &Policy, roots: &Roots, own: &Own, tables: &Compiled) -> Result<(), EnforceError> {
    rustix::thread::set_no_new_privs(true).map_err(|errno| EnforceError::NoNewPrivs { errno: errno.raw_os_error() })?;
    let abi = landlock_abi(policy)?;
    landlock::restrict_first(policy, roots, own, tables, abi)
        .map_err(|error| EnforceError::Landlock { problem: error.to_string() })
}

/// Called after the launcher is forked. Init then has no capabilities, and only the system calls of its table.
///
/// # Errors
/// A step failed; the process must end.
pub fn for_good() -> Result<(), EnforceError> {
    limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })?;
    let table = seccomp::Table::Init;
    seccomp::install(table).map_err(|error| EnforceError::Seccomp { table: table.name(), problem: error.to_string() })
}

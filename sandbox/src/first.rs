//! Confining the first process of a sandbox, its init, once the view stands: from then on it waits, reads, signals and reaps.
//!
//! Two steps, with the fork of the launcher between them. Before it, the domain of Landlock, in which the launcher's own nests: a
//! tracer of an ancestor's domain may read a program's memory, one of another domain may not (Landlock documentation, "Ptrace
//! restrictions"). After it, what the launcher still needs.

use crate::compiled::Compiled;
use crate::enforce::{EnforceError, Own, landlock_abi};
use crate::landlock;
use crate::policy::Policy;
use crate::roots::Roots;
use crate::{limits, seccomp};

/// Before the launcher is forked, after all mounts: no program of higher privilege, and files as the launcher will have them at
/// most, beside reading.
///
/// # Errors
/// A step failed; the process must end.
pub fn before_launcher(policy: &Policy, roots: &Roots, own: &Own, tables: &Compiled) -> Result<(), EnforceError> {
    rustix::thread::set_no_new_privs(true).map_err(|errno| EnforceError::NoNewPrivs { errno: errno.raw_os_error() })?;
    let abi = landlock_abi(policy)?;
    landlock::restrict_first(policy, roots, own, tables, abi)
        .map_err(|error| EnforceError::Landlock { problem: error.to_string() })
}

/// After the launcher is forked: no capabilities, and the calls of its table.
///
/// # Errors
/// A step failed; the process must end.
pub fn for_good() -> Result<(), EnforceError> {
    limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })?;
    let table = seccomp::Table::Init;
    seccomp::install(table).map_err(|error| EnforceError::Seccomp { table: table.name(), problem: error.to_string() })
}

//! Namespaces of a sandbox: which ones, and what has to be done inside before they can be used.

use crate::enforce::EnforceError;
use crate::sys;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::CapabilitySet;
use std::fs;
use std::os::fd::AsFd;

/// Whether this process needs a user namespace to be allowed the others: it may not administer the machine.
#[must_use]
pub fn need_user() -> bool {
    !rustix::thread::capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The flags with which the first process of a sandbox is cloned. The network comes later, for only some policies want one of
/// their own.
#[must_use]
pub fn flags(user: bool) -> u64 {
    flags_ahead(user) | u64::from(libc::CLONE_NEWNS.cast_unsigned())
}

/// The same without the mounts: for a process that is cloned before it is known what for, and takes [`own_mounts`] then, so that
/// it sees what the machine has mounted by that time.
#[must_use]
pub fn flags_ahead(user: bool) -> u64 {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWIPC | if user { libc::CLONE_NEWUSER } else { 0 };
    flags.cast_unsigned().into()
}

/// A copy of the machine's mounts for this process alone, in the user namespace that it is in.
///
/// # Errors
/// The kernel refuses.
pub fn own_mounts() -> Result<(), EnforceError> {
    sys::own_mounts().map_err(|error| fail("make a mount namespace", error.raw_os_error().unwrap_or(0)))
}

/// Gives this process, the first one of a new user namespace, its own user and group there, as `user_namespaces(7)` allows
/// without privilege: one line, the own id, and no changes of supplementary groups. `user` and `group` are the effective ids
/// outside, which nobody inside can see before they are mapped.
///
/// # Errors
/// `/proc` does not offer the maps, or the kernel refuses them.
pub fn map_ids(user: u32, group: u32) -> Result<(), EnforceError> {
    // The maps belong to root while the process may not be looked at.
    set_dumpable_behavior(DumpableBehavior::Dumpable)
        .map_err(|errno| fail("make the process its user's", errno.raw_os_error()))?;
    let write = |file: &str, text: &str| {
        let path = format!("/proc/self/{file}");
        fs::write(&path, text).map_err(|error| fail(&format!("write {path}"), error.raw_os_error().unwrap_or(0)))
    };
    let own = |id: u32| format!("{id} {id} 1");
    write("setgroups", "deny")?;
    write("uid_map", &own(user))?;
    write("gid_map", &own(group))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|errno| fail("hide the process's memory", errno.raw_os_error()))
}

/// A network of its own, with nothing in it but the loopback interface.
///
/// # Errors
/// The kernel refuses.
pub fn own_network() -> Result<(), EnforceError> {
    sys::own_network().map_err(|error| fail("make a network namespace", error.raw_os_error().unwrap_or(0)))?;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| fail("make a socket in the network namespace", errno.raw_os_error()))?;
    sys::loopback_up(socket.as_fd()).map_err(|error| fail("bring loopback up", error.raw_os_error().unwrap_or(0)))
}

fn fail(attempt: &str, errno: i32) -> EnforceError {
    EnforceError::Namespace { attempt: attempt.to_owned(), errno }
}

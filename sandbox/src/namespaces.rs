//! Namespaces of a sandbox: which ones, and what has to be done inside before they can be used.

use crate::enforce::EnforceError;
use crate::{limits, sys};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, getegid, geteuid, set_dumpable_behavior};
use rustix::thread::CapabilitySet;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where the user namespace of a sandbox comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Its first process is cloned into it, since the server may not make the other namespaces without one. The effective user and
    /// group outside, which no process inside can see before they are mapped.
    First(u32, u32),
    /// Its first process enters it once the view stands, which it makes with the rights of a server that may administer the machine.
    Later,
    /// The sandbox stays in the user namespace of the server.
    Servers,
}

impl Users {
    /// Of a sandbox of this process; `own` says whether a server that may administer the machine has one made.
    #[must_use]
    pub fn here(own: bool) -> Self {
        if need_user() {
            Self::First(geteuid().as_raw(), getegid().as_raw())
        } else if own {
            Self::Later
        } else {
            Self::Servers
        }
    }

    /// Whether the first process is cloned into it.
    #[must_use]
    pub fn is_first(self) -> bool {
        matches!(self, Self::First(..))
    }
}

/// Whether this process needs a user namespace to be allowed the others: it may not administer the machine.
#[must_use]
pub fn need_user() -> bool {
    !rustix::thread::capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The flags with which the first process of a sandbox is cloned. The mounts come later, with [`own_mounts`], so that it sees what the
/// machine has mounted when it is known what for; the network too, for only some policies want one of their own.
#[must_use]
pub fn flags(user: bool) -> u64 {
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
    write_maps(CWD, "/proc/self", user, group)
}

/// `/proc` as the server has it mounted. In a mount namespace of its own the process makes each mount read-only; those of the server stay
/// as they are for who holds a descriptor.
#[derive(Debug)]
pub struct Maps {
    proc: OwnedFd,
}

impl Maps {
    /// Opens it, before [`own_mounts`].
    ///
    /// # Errors
    /// There is none.
    pub fn take() -> Result<Self, EnforceError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = openat(CWD, "/proc", flags, Mode::empty()).map_err(|errno| fail("open /proc", errno.raw_os_error()))?;
        Ok(Self { proc })
    }

    /// Moves this single-threaded process, which may administer the machine, into a new user namespace in which there is its own user
    /// and its own group and no other. It has no capability afterwards: the step itself takes those on the machine away, and those in
    /// the new namespace are given up.
    ///
    /// # Errors
    /// The kernel makes no user namespace, or does not take the maps; then the process must end.
    pub fn enter(self) -> Result<(), EnforceError> {
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        sys::own_users().map_err(|error| fail("make a user namespace", error.raw_os_error().unwrap_or(0)))?;
        write_maps(self.proc.as_fd(), "self", user, group)?;
        limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
    }
}

/// Writes the maps of this process, whose directory is at a path below a descriptor.
fn write_maps(proc: BorrowedFd<'_>, process: &str, user: u32, group: u32) -> Result<(), EnforceError> {
    // The maps belong to root while the process may not be looked at.
    set_dumpable_behavior(DumpableBehavior::Dumpable)
        .map_err(|errno| fail("make the process its user's", errno.raw_os_error()))?;
    let write = |file: &str, text: &str| {
        let path = format!("{process}/{file}");
        let written = openat(proc, &path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| File::from(file).write_all(text.as_bytes()));
        written.map_err(|error| fail(&format!("write /proc/self/{file}"), error.raw_os_error().unwrap_or(0)))
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

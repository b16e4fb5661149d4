//! The namespaces of a sandbox: which ones it gets, and how they are set up.

use crate::enforce::EnforceError;
use crate::{limits, sys};
use rustix::fs::{CWD, Mode, OFlags, fchown, fstat, fstatfs, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, Gid, Uid, getegid, geteuid, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, set_keep_capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// The origin of the user namespace of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// The first process is cloned into a new user namespace, because the server may not make the other namespaces without one. The
    /// fields are the effective user and group outside, which no process inside can see before they are mapped.
    First(u32, u32),
    /// The first process makes the view with the rights of a server that may administer the machine, and then enters a new user
    /// namespace.
    Later,
    /// The sandbox stays in the user namespace of the server.
    Servers,
}

impl Users {
    /// The origin for a sandbox that this process starts. `own` says whether a server that may administer the machine makes a user
    /// namespace, too.
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

    /// Whether the first process is cloned into a new user namespace.
    #[must_use]
    pub fn is_first(self) -> bool {
        matches!(self, Self::First(..))
    }
}

/// Whether this process needs a user namespace to make the others, because it may not administer the machine.
#[must_use]
pub fn need_user() -> bool {
    !rustix::thread::capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The flags with which the first process of a sandbox is cloned. The mount namespace is made later, with [`own_mounts`], so that
/// it has the machine's mounts at the time when its use is known. The network namespace is made later as well, because only some
/// policies need one.
#[must_use]
pub fn flags(user: bool) -> u64 {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWIPC | if user { libc::CLONE_NEWUSER } else { 0 };
    flags.cast_unsigned().into()
}

/// Makes a copy of the machine's mounts for this process alone, in its present user namespace.
///
/// # Errors
/// The kernel refuses.
pub fn own_mounts() -> Result<(), EnforceError> {
    sys::own_mounts().map_err(|error| fail("make a mount namespace", error.raw_os_error().unwrap_or(0)))
}

/// Maps the user and the group of this process, the first one of a new user namespace, as `user_namespaces(7)` allows without
/// privilege: one line with its own id, and no changes of supplementary groups. `user` and `group` are the effective ids outside,
/// which no process inside can see before they are mapped.
///
/// # Errors
/// `/proc` has no map files, or the kernel refuses the maps.
pub fn map_ids(user: u32, group: u32) -> Result<(), EnforceError> {
    write_maps(CWD, "/proc/self", (user, user), (group, group))
}

/// `/proc` as the server has it mounted. In its own mount namespace the process makes every mount read-only. The server's mounts
/// stay as they are for a process that holds a descriptor.
#[derive(Debug)]
pub struct Maps {
    proc: OwnedFd,
}

impl AsRawFd for Maps {
    fn as_raw_fd(&self) -> RawFd {
        self.proc.as_raw_fd()
    }
}

impl Maps {
    /// Opens `/proc`. To be called before [`own_mounts`].
    ///
    /// # Errors
    /// `/proc` cannot be opened.
    pub fn take() -> Result<Self, EnforceError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = openat(CWD, "/proc", flags, Mode::empty()).map_err(|errno| fail("open /proc", errno.raw_os_error()))?;
        Ok(Self { proc })
    }

    /// Moves this single-threaded process, which may administer the machine, into a new user namespace. Only its own user and group
    /// are mapped there, both as root, independent of their ids outside. Afterwards it has no capabilities: entering removes those
    /// on the machine, and those in the new namespace are dropped.
    ///
    /// # Errors
    /// The kernel refuses the user namespace or its maps. Then the process must end.
    pub fn enter(self) -> Result<(), EnforceError> {
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        sys::own_users().map_err(|error| fail("make a user namespace", error.raw_os_error().unwrap_or(0)))?;
        write_maps(self.proc.as_fd(), "self", (ROOT, user), (ROOT, group))?;
        limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
    }
}

/// The id of the sandbox's user inside its user namespace, on a root server.
const ROOT: u32 = 0;

/// Changes this single-threaded process from root to user `id` and group `id`, without supplementary groups. It keeps the rights
/// that it needs to make its view. From then on, the kernel counts its user namespaces and all other per-user budgets for that
/// user.
///
/// # Errors
/// The kernel refuses; the process must end.
pub fn become_user(id: u32) -> Result<(), EnforceError> {
    let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
    let became = set_thread_groups(&[])
        .and_then(|()| set_thread_res_gid(group, group, group))
        // Without this the next call clears the capabilities for good (capabilities(7)).
        .and_then(|()| set_keep_capabilities(true))
        .and_then(|()| set_thread_res_uid(user, user, user))
        .and_then(|()| set_keep_capabilities(false));
    became.map_err(|errno| fail(&format!("become user {id} of the machine"), errno.raw_os_error()))?;
    limits::use_permitted().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })?;
    // After a change of user, `fs.suid_dumpable` decides whether the memory of this process is hidden.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|errno| fail("hide the process's memory", errno.raw_os_error()))
}

/// Makes user `id` the owner of those of the descriptors 0 to 2 that have no name on a disk: pipes, terminals and memory. When a
/// program opens `/dev/stdout`, the kernel checks the owner and mode as of a file.
///
/// # Errors
/// The kernel refuses; the process must end.
pub fn give_standard(id: u32) -> Result<(), EnforceError> {
    let standard = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    for (nth, descriptor) in standard.into_iter().enumerate() {
        let given = is_without_name(descriptor)
            .and_then(|is| if is { fchown(descriptor, Some(Uid::from_raw(id)), Some(Gid::from_raw(id))) } else { Ok(()) });
        given.map_err(|errno| fail(&format!("give descriptor {nth} to user {id}"), errno.raw_os_error()))?;
    }
    Ok(())
}

fn is_without_name(descriptor: BorrowedFd<'_>) -> Result<bool, Errno> {
    /// `PIPEFS_MAGIC`, `DEVPTS_SUPER_MAGIC` and `TMPFS_MAGIC` of `linux/magic.h`.
    const PIPE: u32 = 0x5049_5045;
    const TERMINAL: u32 = 0x1cd1;
    const MEMORY: u32 = 0x0102_1994;
    let kind = u32::try_from(fstatfs(descriptor)?.f_type).unwrap_or(0);
    Ok(matches!(kind, PIPE | TERMINAL) || kind == MEMORY && fstat(descriptor)?.st_nlink == 0)
}

/// Writes the id maps of this process. `process` is its directory below the descriptor `proc`. Each pair is an id in the new
/// namespace and the id outside to which it is mapped.
fn write_maps(proc: BorrowedFd<'_>, process: &str, user: (u32, u32), group: (u32, u32)) -> Result<(), EnforceError> {
    // While the process is not dumpable, its map files belong to root.
    set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(|errno| fail("make the process dumpable", errno.raw_os_error()))?;
    let write = |file: &str, text: &str| {
        let path = format!("{process}/{file}");
        let written = openat(proc, &path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| File::from(file).write_all(text.as_bytes()));
        written.map_err(|error| fail(&format!("write /proc/self/{file}"), error.raw_os_error().unwrap_or(0)))
    };
    let own = |(inside, outside): (u32, u32)| format!("{inside} {outside} 1");
    write("setgroups", "deny")?;
    write("uid_map", &own(user))?;
    write("gid_map", &own(group))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|errno| fail("hide the process's memory", errno.raw_os_error()))
}

/// Makes a network namespace that has only the loopback interface.
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

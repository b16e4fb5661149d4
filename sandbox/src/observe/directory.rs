//! Setting the group's bit on directories, in place of the caller.
//!
//! The bit makes new names in a directory belong to the directory's group; `cp -p`, `git init --shared` and rsync keep it. On
//! files it gives the group's rights to every user, and no filter can tell files from directories. So the call is handled here,
//! and is never continued.
//!
//! Init must not lend its rights. It opens the caller's path once, by O_PATH and only if it is a directory, and changes that
//! directory. It has no capabilities by then. Its user, groups and mounts are the caller's own. So the kernel judges it as it
//! would judge the caller; Landlock judges neither modes nor O_PATH (landlock(7)).

use super::{LISTENED_MODES, argument, low_half, read_path};
use crate::compiled::{Compiled, Verdict};
use crate::sys::{self, Notification};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, chmodat, openat, openat2, readlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, c_long};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Where a call that changes a mode has its arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChangeOfMode {
    pub(super) number: c_long,
    /// Index of the path; none where a descriptor says it all.
    path: Option<u8>,
    /// Index of the descriptor, if there is one.
    descriptor: Option<u8>,
    pub(super) mode: u8,
    /// Index of the flags, if there are any.
    flags: Option<u8>,
}

/// `fchmodat2`, Linux 6.6, on every architecture.
const FCHMODAT2: c_long = 452;

pub(super) const ALL: &[ChangeOfMode] = &[
    ChangeOfMode { number: libc::SYS_fchmod, path: None, descriptor: Some(0), mode: 1, flags: None },
    ChangeOfMode { number: libc::SYS_fchmodat, path: Some(1), descriptor: Some(0), mode: 2, flags: None },
    ChangeOfMode { number: FCHMODAT2, path: Some(1), descriptor: Some(0), mode: 2, flags: Some(3) },
    #[cfg(target_arch = "x86_64")]
    ChangeOfMode { number: libc::SYS_chmod, path: Some(0), descriptor: None, mode: 1, flags: None },
];

impl ChangeOfMode {
    /// If a call would set the group's bit.
    pub(super) fn of(notification: &Notification) -> Option<&'static Self> {
        let call = ALL.iter().find(|call| call.number == c_long::from(notification.call))?;
        let mode = argument(notification, call.mode)?;
        (mode & u64::from(LISTENED_MODES) != 0).then_some(call)
    }

    /// Does it, if it is a directory's bit and the caller may.
    pub(super) fn carry_out(
        &self,
        listener: BorrowedFd<'_>,
        notification: &Notification,
        tables: &Compiled,
    ) -> Result<(), Errno> {
        /// The mode bits of chmod(2).
        const MODES: u64 = 0o7777;
        let mode = argument(notification, self.mode).ok_or(Errno::INVAL)? & MODES;
        // A filter refuses it; this must not depend on that.
        if mode & 0o4000 != 0 {
            return Err(Errno::PERM);
        }
        let mode = Mode::from_raw_mode(u32::try_from(mode).map_err(|_| Errno::INVAL)?);
        let directory = self.directory(listener, notification).map_err(|errno| match errno {
            // No directory; or a way through links of /proc, which would be init's own.
            Errno::NOTDIR | Errno::LOOP => Errno::PERM,
            other => other,
        })?;
        let here = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let real = readlinkat(CWD, &here, Vec::new())?;
        let real = Path::new(OsStr::from_bytes(real.as_bytes()));
        if tables.verdict(real) != Verdict::Write {
            return Err(Errno::PERM);
        }
        // By its descriptor, which names one inode on one mount, even if its path changes.
        chmodat(CWD, &here, mode, AtFlags::empty())
    }

    fn directory(&self, listener: BorrowedFd<'_>, notification: &Notification) -> Result<OwnedFd, Errno> {
        let thread = notification.thread;
        let number = self.descriptor.and_then(|nth| argument(notification, nth)).map(low_half);
        let Some(nth) = self.path else {
            let number = number.filter(|number| *number >= 0).ok_or(Errno::BADF)?;
            return own(listener, notification, &format!("/proc/{thread}/fd/{number}"));
        };
        let flags = self.flags.and_then(|nth| argument(notification, nth)).map_or(0, low_half);
        if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::INVAL);
        }
        let address = argument(notification, nth).ok_or(Errno::FAULT)?;
        let is_empty = flags & libc::AT_EMPTY_PATH != 0 && is_empty(thread, address);
        let path = if is_empty { None } else { Some(read_path(thread, address).ok_or(Errno::NOENT)?) };
        if let Some(number) = path.as_deref().and_then(descriptor) {
            return own(listener, notification, &format!("/proc/{thread}/fd/{number}"));
        }
        // AT_FDCWD is negative. The kernel does not look at the descriptor where the path is absolute.
        let from = match number {
            _any if path.as_ref().is_some_and(|path| path.is_absolute()) => None,
            Some(number) if number >= 0 => Some(own(listener, notification, &format!("/proc/{thread}/fd/{number}"))?),
            _working => Some(own(listener, notification, &format!("/proc/{thread}/cwd"))?),
        };
        match (path, from) {
            (None, Some(from)) => Ok(from),
            (None, None) => Err(Errno::NOENT),
            (Some(path), from) => {
                let last = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { OFlags::NOFOLLOW } else { OFlags::empty() };
                let from = from.as_ref().map_or(CWD, AsFd::as_fd);
                openat2(from, &path, DIRECTORY | last, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
            }
        }
    }
}

/// A directory that the caller holds, by the kernel's link to it.
fn own(listener: BorrowedFd<'_>, notification: &Notification, link: &str) -> Result<OwnedFd, Errno> {
    let opened = openat(CWD, link, DIRECTORY, Mode::empty())?;
    // Else the thread may be gone, and its number another's.
    sys::is_waiting(listener, notification.id).then_some(opened).ok_or(Errno::SRCH)
}

/// The descriptor that a path names: so the C library spells a change that must not follow a link (glibc before 2.39).
fn descriptor(path: &Path) -> Option<u32> {
    path.strip_prefix("/proc/self/fd").ok()?.to_str()?.parse().ok()
}

fn is_empty(process: i32, address: u64) -> bool {
    let mut byte = [1];
    sys::read_memory(process, address, &mut byte).is_ok_and(|length| length == 1) && byte == [0]
}

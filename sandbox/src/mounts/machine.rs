//! One process's own copy of the machine's mounts, taken before its policy is known.

use super::MountError;
use super::furniture::Furniture;
use super::kernel::KernelMounts;
use super::mapped;
use super::tree;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;

pub use super::mapped::Unmapped;

/// A copy of the machine's mounts. Changes in it are not visible on the machine, and later mounts of the machine are not visible in
/// it. Views are built on it.
#[derive(Debug)]
pub struct Machine {
    pub(super) kernel: KernelMounts,
    /// Made ahead.
    pub(super) furniture: Option<Furniture>,
    /// The locked directories in which file systems of the kernel are not covered. All others are covered already, except
    /// automounters. `None` if they are still to be covered.
    pub(super) locked: Option<Vec<PathBuf>>,
}

impl Machine {
    /// Takes the copy that the kernel made in this process's own mount namespace ([`crate::namespaces::own_mounts`]).
    ///
    /// # Errors
    /// A step failed: the process must end.
    pub fn take() -> Result<Self, MountError> {
        tree::part_from_the_machine()?;
        Ok(Self { kernel: KernelMounts::read()?, furniture: None, locked: None })
    }

    /// As [`Self::take`], but root's files belong to another user. The process must have all of root's rights. `map` is a user
    /// namespace that maps the ids on the disk to the ids that files have here.
    ///
    /// # Errors
    /// The copy cannot be made. After [`Unmapped::Refused`] nothing was changed.
    pub fn take_mapped(map: BorrowedFd<'_>) -> Result<Self, Unmapped> {
        tree::part_from_the_machine()?;
        mapped::map_machine(map).map(|kernel| Self { kernel, furniture: None, locked: None })
    }

    /// The descriptors of the parts that were made ahead.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.furniture.iter().flat_map(Furniture::descriptors)
    }

    /// Makes ahead the parts that every view has: devices, `/proc`, and empty files and directories as covers. Also covers the file
    /// systems of the kernel if the kernel can do that before anything is attached. The process must already have its final user.
    ///
    /// # Errors
    /// A step failed: the process must end.
    pub fn furnish(&mut self) -> Result<(), MountError> {
        let furniture = Furniture::make()?;
        self.locked = furniture.cover_kernel_mounts()?;
        self.furniture = Some(furniture);
        Ok(())
    }
}

/// Detects changes of this process's mounts. The kernel reports a change as `POLLPRI` on the list of mounts, to the next poll only
/// (proc_pid_mountinfo(5)).
#[derive(Debug)]
pub struct MountChanges {
    /// `None` if the kernel does not report changes.
    list: Option<OwnedFd>,
    /// The number of polls that saw a change.
    changes: u64,
}

impl MountChanges {
    /// Begins to observe changes.
    #[must_use]
    pub fn observe() -> Self {
        let list = openat(CWD, "/proc/self/mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Self { list: list.ok(), changes: 0 }
    }

    /// A number for the present state: after a change it differs from all earlier ones. If the kernel does not report changes,
    /// every call returns a new number.
    pub fn state(&mut self) -> u64 {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_same = self.list.as_ref().is_some_and(|list| {
            let mut polled = [PollFd::new(list, PollFlags::PRI)];
            loop {
                match poll(&mut polled, Some(&now)) {
                    Err(Errno::INTR) => {}
                    answer => break answer == Ok(0),
                }
            }
        });
        self.changes += u64::from(!is_same);
        self.changes
    }

    /// The descriptor to poll for `POLLPRI` until the next change. The poll that reports a change takes it from [`Self::state`], so
    /// call [`Self::note`] after it.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.list.as_ref().map(AsFd::as_fd)
    }

    /// Notes a change that a poll of the descriptor reported.
    pub fn note(&mut self) {
        self.changes += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_state_is_stable_unless_the_list_cannot_be_read() {
        let mut mounts = MountChanges::observe();
        // Others may mount things while this runs; they do so rarely.
        let (before, after) = (mounts.state(), mounts.state());
        assert!(after == before || mounts.state() == mounts.state());
        let noted = mounts.state();
        mounts.note();
        assert_ne!(mounts.state(), noted);
        let mut untold = MountChanges { list: None, changes: 0 };
        assert_ne!(untold.state(), untold.state());
    }
}

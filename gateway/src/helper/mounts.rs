//! Whether the machine's mounts are still those that a worker's view was made of.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// The mounts of this process, which are the machine's to its helpers. The kernel tells of a change by a condition on the list that is
/// taken back by the poll that sees it (proc_pid_mountinfo(5): POLLPRI). The gateway asks, since a worker in its own mounts cannot.
#[derive(Debug)]
pub(super) struct MachineMounts {
    /// None where the kernel does not tell.
    list: Option<OwnedFd>,
    /// How often a change was seen.
    changes: u64,
}

impl MachineMounts {
    pub(super) fn open() -> Self {
        #[expect(clippy::disallowed_methods, reason = "the kernel's own list, which no client names")]
        let list = openat(CWD, "/proc/self/mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Self { list: list.ok(), changes: 0 }
    }

    /// Which state of the mounts this is. Where the kernel does not tell, no state is that of the last question.
    pub(super) fn state(&mut self) -> u64 {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_a_change_where_the_kernel_tells_and_all_where_it_does_not() {
        let mut mounts = MachineMounts::open();
        // Others may mount things while this runs; they do so rarely.
        let (before, after) = (mounts.state(), mounts.state());
        assert!(after == before || mounts.state() == mounts.state());
        let mut untold = MachineMounts { list: None, changes: 0 };
        assert_ne!(untold.state(), untold.state());
    }
}

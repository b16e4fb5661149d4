//! Removing mount points from the machine, in children of the remover: a file system that hangs must not delay other removals.
//!
//! A child carries out one removal after another, so that most sandboxes end without a fork. A child gets its next removal only
//! when it has finished the last one.

use crate::closing;
use crate::dispatch::complain;
use crate::keeper::EXIT_FAILED;
use crate::remover::{Token, way};
use crate::sys::{self, Fork};
use portcullis_sandbox::mounts::{self, Records, RecordsAt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::Pid;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

/// Time for the other processes to close their duplicates of the inotify descriptors, so that the child closes the last one.
const UNTIL_LAST: Duration = Duration::from_millis(100);

/// The maximum size of a removal as a message, in bytes. For a larger one a child is forked.
const MOST_BYTES: usize = 32 * 1024;

/// The time after which an idle child ends.
const IDLE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// The messages of a child: the names are gone; the records of them are gone too, so the child is ready for the next removal.
const GONE: u8 = b'g';
const READY: u8 = b'r';

/// A request to a child to remove mount points.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    pub(crate) points: Vec<PathBuf>,
    /// Remove everything that is recorded and not in use.
    pub(crate) all_left: bool,
    /// The names are gone.
    pub(crate) is_done: bool,
    /// The number of children that were killed while they carried it out.
    pub(crate) killed: u32,
    /// The sandbox whose end waits for it, until the end is reported.
    pub(crate) token: Option<Token>,
}

/// A child, as the remover holds it.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) pid: Pid,
    /// The socket to the child, which ends when it is closed.
    pub(crate) way: OwnedFd,
}

/// A message of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Said {
    Gone,
    Ready,
    /// The child ends.
    End,
}

impl Child {
    /// Forks a child with its first removal.
    pub(crate) fn fork(records: Option<&RecordsAt>, first: &Removal) -> std::io::Result<Self> {
        let (ours, theirs) = way()?;
        match sys::fork()? {
            Fork::Child => {
                // Most of all, the sockets of inits must be closed: the child has duplicates of them.
                if let Err(failure) = closing::close_all_but(&[theirs.as_raw_fd()]) {
                    complain(format_args!("remove mount points: {failure}"));
                    sys::end(EXIT_FAILED)
                }
                serve(theirs.as_fd(), records, first);
                sys::end(0)
            }
            Fork::Parent(pid) => Ok(Self { pid, way: ours }),
        }
    }

    /// Sends another removal to a child that is ready. Returns false if the child does not take it.
    pub(crate) fn take(&self, removal: &Removal) -> bool {
        let bytes = removal.written();
        bytes.len() <= MOST_BYTES && send(&self.way, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok()
    }

    /// The next message of the child, if there is one.
    pub(crate) fn hear(&self) -> Option<Said> {
        let mut word = [0; 1];
        loop {
            return match recv(&self.way, &mut word[..], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => None,
                Ok((1, _)) if word == [GONE] => Some(Said::Gone),
                Ok((1, _)) if word == [READY] => Some(Said::Ready),
                _ended => Some(Said::End),
            };
        }
    }
}

impl Removal {
    fn written(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.all_left)];
        for path in &self.points {
            bytes.extend(path.as_os_str().as_bytes());
            bytes.push(0);
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (all_left, paths) = bytes.split_first()?;
        let points = paths.split(|byte| *byte == 0).filter(|path| !path.is_empty());
        let points = points.map(|path| PathBuf::from(OsString::from_vec(path.to_vec()))).collect();
        Some(Self { points, all_left: *all_left == 1, ..Self::default() })
    }

    /// Removes the mount points, and reports as soon as the names are gone.
    fn carry_out(&self, records: Option<&Records>, told: BorrowedFd<'_>) {
        // Closing a removed mount point takes the file system as long as removing it.
        let removed: Vec<_> = records
            .iter()
            .flat_map(|records| self.points.iter().rev().filter_map(move |point| mounts::take(point, records)))
            .collect();
        if self.all_left {
            records.iter().for_each(|records| mounts::remove_left(records));
        }
        say(told, GONE);
        if let Some(records) = records {
            removed.into_iter().for_each(|removed| removed.forget(records));
        }
    }
}

/// Carries out the first removal and those that follow, until the remover is gone or sends none for [`IDLE`].
fn serve(way: BorrowedFd<'_>, records: Option<&RecordsAt>, first: &Removal) {
    let carry_out = |removal: &Removal| {
        let records = records.and_then(|records| records.open().ok());
        removal.carry_out(records.as_ref(), way);
        drop(records);
        say(way, READY);
    };
    carry_out(first);
    let mut bytes = vec![0; MOST_BYTES];
    loop {
        match poll(&mut [PollFd::new(&way, PollFlags::IN)], Some(&IDLE)) {
            Err(Errno::INTR) => continue,
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        match recv(way, &mut bytes[..], RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((count, _)) if count > 0 => match bytes.get(..count).and_then(Removal::read) {
                Some(removal) => carry_out(&removal),
                None => return,
            },
            _gone => return,
        }
    }
}

fn say(told: BorrowedFd<'_>, word: u8) {
    let _gone = send(told, &[word], SendFlags::NOSIGNAL);
}

/// Closes the inotify descriptors of covers in a child, as the last process that has them: each close takes the kernel about ten
/// milliseconds.
pub(crate) fn close_in_child(covers: Vec<OwnedFd>) {
    let kept: Vec<RawFd> = covers.iter().map(AsRawFd::as_raw_fd).collect();
    if let Ok(Fork::Child) = sys::fork() {
        let _closed_with_the_process = closing::close_all_but(&kept);
        std::thread::sleep(UNTIL_LAST);
        sys::end(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_read_as_it_was_written() {
        let points = ["/a/b", "/a/ \n\u{e4}"].map(PathBuf::from).to_vec();
        for (points, all_left) in [(points, false), (Vec::new(), true)] {
            let read = Removal::read(&Removal { points: points.clone(), all_left, ..Removal::default() }.written()).unwrap();
            assert_eq!((read.points, read.all_left), (points, all_left));
        }
        assert!(Removal::read(&[]).is_none());
    }

    #[test]
    fn one_child_takes_several_removals_and_no_large_one() {
        let child = Child::fork(None, &Removal::default()).unwrap();
        let hear = || loop {
            let ready = PollFd::new(&child.way, PollFlags::IN);
            poll(&mut [ready], None).unwrap();
            if let Some(said) = child.hear() {
                return said;
            }
        };
        assert_eq!([hear(), hear()], [Said::Gone, Said::Ready]);
        assert!(child.take(&Removal::default()));
        assert_eq!([hear(), hear()], [Said::Gone, Said::Ready]);
        let large = Removal { points: vec![PathBuf::from("/x".repeat(MOST_BYTES / 2))], ..Removal::default() };
        assert!(!child.take(&large));
        rustix::net::shutdown(&child.way, rustix::net::Shutdown::Write).unwrap();
        assert_eq!(hear(), Said::End);
        assert_eq!(sys::wait_for(child.pid), Some(0));
    }
}

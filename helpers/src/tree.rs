//! Ending everything below this process, which is the reaper of whoever loses its parent there.
//!
//! A number may stand for another process as soon as its owner was reaped. The numbers of this process's own children are theirs
//! until it reaps them itself; who is further down is signalled by descriptor, once it was seen to be there.

use crate::sys;
use portcullis_protocol::helper::ExitStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpgid, getpid, getsid, pidfd_open, pidfd_send_signal};
use std::collections::HashSet;
use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Bound of the descendants that are looked at in one round: far above what one machine runs.
const MOST_DESCENDANTS: usize = 1 << 16;

/// How long nobody may have ended until those who wait are told that somebody does not.
const PATIENCE: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Ends everything below this process. A process that loses its parent on the way becomes our child and is met in a later round.
/// So the loop ends only when no process is left, or when this user cannot kill the rest. `known` are known children; where the
/// kernel does not list children, the loop ends only these, and cannot reach daemons. `ended` is called for each end before the
/// process id is released. A process that `is_spared` is waited for and not ended. `signals` reports ends of children. `stuck` is
/// called each time no process has ended for a while: the rest belongs to another user, or hangs in the kernel.
pub(crate) fn end_all(
    known: &HashSet<Pid>,
    signals: BorrowedFd<'_>,
    is_spared: impl Fn(Pid) -> bool,
    mut ended: impl FnMut(Pid, ExitStatus),
    mut stuck: impl FnMut(),
) {
    let mut known = known.clone();
    loop {
        kill_all(&known, &is_spared);
        // Before the look, so that an end behind it is heard of.
        let _drained = rustix::io::read(signals, &mut [0_u8; 1024][..]);
        let mut has_ended = false;
        loop {
            match sys::ended_child() {
                Ok(Some((pid, status))) => {
                    ended(pid, status);
                    sys::reap(pid);
                    known.remove(&pid);
                    has_ended = true;
                }
                Ok(None) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_no_child) => return,
            }
        }
        if !has_ended && poll(&mut [PollFd::from_borrowed_fd(signals, PollFlags::IN)], Some(&PATIENCE)) == Ok(0) {
            stuck();
        }
    }
}

/// Kills every child of this process, but those who are spared, and everything below them, as they are now. The way down is
/// faster than one fork after the other, for which going round by round from the top would be no match.
pub(crate) fn kill_all(known: &HashSet<Pid>, is_spared: impl Fn(Pid) -> bool) {
    let Some(children) = children_of(getpid()) else {
        // Children that have ended are zombies until they are reaped, so the numbers are theirs.
        known.iter().filter(|pid| !is_spared(**pid)).for_each(|pid| drop(sys::kill(*pid, libc::SIGKILL, false)));
        return;
    };
    for child in children.into_iter().filter(|pid| !is_spared(*pid)) {
        // Who is below it is looked for first: it moves up when this one ends. Whoever it bears until then comes up as well.
        let below = children_of(child).unwrap_or_default();
        let mut found: Vec<_> = below.into_iter().filter_map(|pid| Below::new(pid, child)).collect();
        let _ended = sys::kill(child, libc::SIGKILL, false);
        let mut looked = 0;
        while let Some(one) = found.pop()
            && looked < MOST_DESCENDANTS
        {
            looked += 1;
            let below = children_of(one.pid).unwrap_or_default();
            let below: Vec<_> = below.into_iter().filter_map(|pid| Below::new(pid, one.pid)).collect();
            // Alive until now, so what was read under its number was of its own children.
            if !one.has_ended() {
                found.extend(below);
            }
            let _ended = pidfd_send_signal(&one.descriptor, Signal::KILL);
        }
    }
}

/// Whether somebody below this process is in the session and group that one of them began, whose number is that group's then.
pub(crate) fn has_group(leader: Pid) -> bool {
    let belongs = |pid: &Pid| getpgid(Some(*pid)) == Ok(leader) && getsid(Some(*pid)) == Ok(leader);
    let mut found = children_of(getpid()).unwrap_or_default();
    let mut at = 0;
    while at < found.len() && found.len() < MOST_DESCENDANTS {
        found.extend(children_of(found[at]).unwrap_or_default());
        at += 1;
    }
    found.iter().any(belongs)
}

/// A process below a child.
struct Below {
    pid: Pid,
    descriptor: OwnedFd,
}

impl Below {
    /// None if it is not there any more, or no child of `parent`. Where descriptors run out it is met in a later round.
    fn new(pid: Pid, parent: Pid) -> Option<Self> {
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let below = Self { pid, descriptor };
        // The descriptor may be of a process that got the number later. One that lives now had it when its parent was read.
        (parent_of(pid) == Some(parent) && !below.has_ended()).then_some(below)
    }

    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.descriptor, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// The parent of a process.
pub(crate) fn parent_of(pid: Pid) -> Option<Pid> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name before it is in parentheses and may hold any bytes, also such that are no UTF-8.
    let name_ends = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&text[name_ends + 1..]).ok()?;
    Pid::from_raw(rest.split_ascii_whitespace().nth(1)?.parse().ok()?)
}

/// Children of all threads of a process; none if the kernel does not list them.
pub(crate) fn children_of(process: Pid) -> Option<Vec<Pid>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten() {
        let text = fs::read_to_string(thread.path().join("children")).ok()?;
        found.extend(text.split_ascii_whitespace().filter_map(|word| Pid::from_raw(word.parse().ok()?)));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_whatever_the_name_of_the_process() {
        for name in [c"plain", c"two words) 1 2", c"\xff\xfe) 3"] {
            // A thread has an entry of its own in /proc, with the parent of its process.
            std::thread::spawn(move || {
                rustix::thread::set_name(name).unwrap();
                assert_eq!(parent_of(rustix::thread::gettid()), rustix::process::getppid(), "{name:?}");
            })
            .join()
            .unwrap();
        }
    }
}

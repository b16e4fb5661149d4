//! User ids of the machine for sandboxes of a root server. Each id belongs to one sandbox at a time.
//!
//! So a sandbox cannot use up the per-user budgets of the kernel (inotify, epoll, pipes, keys, signals, descriptors in flight) of
//! another sandbox or of the server. The ids come from a range that the operator reserves. A server locks each id that it uses by
//! locking one byte of a file in its private directory. The kernel releases the lock when the spawner ends, even if it is killed.
//! The processes of a killed spawner may live a moment longer, and servers with other private directories do not see this lock. So
//! an id is leased only while no process on the machine has it.

use crate::dispatch::complain;
use crate::sys::{self, Fork};
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::mounts::RecordsAt;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Uid, getpriority_user};
use rustix::time::{ClockId, clock_gettime};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// The highest id of a user namespace that maps all ids; the next number means "no id".
const LAST: u32 = u32::MAX - 1;

/// A user id that one sandbox has.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) uid: u32,
    /// A user namespace for id-mapped mounts: it maps root on the disk to this id, and every other id to itself.
    pub(crate) map: OwnedFd,
}

/// The user ids of a server; empty if sandboxes have the server's user id.
#[derive(Debug, Default)]
pub(crate) struct Uids {
    pool: Option<Pool>,
    /// The last reported reason why a sandbox has the server's user id although it was to have its own.
    told: String,
}

#[derive(Debug)]
struct Pool {
    range: UidRange,
    locks: OwnedFd,
    /// The position in the range where the next search begins. The first one comes from the process id and the clock, so that
    /// servers without a common directory rarely begin at the same id.
    next: u32,
    /// The ids that this server has locked.
    own: HashSet<u32>,
    free: VecDeque<Lease>,
    /// Leases in use, by the first process of the sandbox, until that process is reaped: then every process in its pid namespace is
    /// dead.
    used: HashMap<Pid, Lease>,
}

impl Uids {
    /// Makes a pool of a range, with locks in the private directory of the server's user.
    pub(crate) fn new(range: UidRange, records: &RecordsAt) -> Result<Self, Errno> {
        let locks = records.open()?.locks()?;
        let now = clock_gettime(ClockId::Realtime);
        let next = (std::process::id() ^ u32::try_from(now.tv_nsec).unwrap_or(0)) % range.count();
        let pool = Pool { range, locks, next, own: HashSet::new(), free: VecDeque::new(), used: HashMap::new() };
        Ok(Self { pool: Some(pool), told: String::new() })
    }

    /// Leases an id that no process on the machine has. `None` if sandboxes have the server's user id.
    ///
    /// # Errors
    /// `EUSERS`: all ids are in use. Other errors come from the system.
    pub(crate) fn lease(&mut self) -> io::Result<Option<Lease>> {
        self.pool.as_mut().map(Pool::lease).transpose()
    }

    /// Assigns a lease to a child. It is taken back when the child is reaped.
    pub(crate) fn give(&mut self, lease: Lease, to: Pid) {
        if let Some(pool) = &mut self.pool {
            pool.used.insert(to, lease);
        }
    }

    /// Takes back the lease of a reaped child, if it had one.
    pub(crate) fn take_back(&mut self, from: Pid) {
        if let Some(pool) = &mut self.pool
            && let Some(lease) = pool.used.remove(&from)
        {
            pool.free.push_back(lease);
        }
    }

    /// Reports to the operator why a sandbox has the server's user id although it was to have its own. A reason is not repeated
    /// while it stays the same.
    pub(crate) fn tell_shared(&mut self, reason: Option<String>) {
        if let Some(reason) = reason.filter(|reason| *reason != self.told) {
            complain(format_args!("a sandbox has the user id of the server on the machine: {reason}"));
            self.told = reason;
        }
    }

    /// Takes back a lease that was never used, or whose child was already waited for.
    pub(crate) fn put_back(&mut self, lease: Lease) {
        if let Some(pool) = &mut self.pool {
            pool.free.push_back(lease);
        }
    }
}

impl Pool {
    fn lease(&mut self) -> io::Result<Lease> {
        // The ids that were unused for the longest time first.
        for _each in 0..self.free.len() {
            match self.free.pop_front() {
                Some(lease) if is_unused(lease.uid) => return Ok(lease),
                Some(lease) => self.free.push_back(lease),
                None => break,
            }
        }
        for _each in 0..self.range.count() {
            let uid = self.range.at(self.next);
            self.next = (self.next + 1) % self.range.count();
            if self.own.contains(&uid) || !is_unused(uid) || !sys::lock_byte(self.locks.as_fd(), uid)? {
                continue;
            }
            let lease = Lease { uid, map: map_of(uid)? };
            self.own.insert(uid);
            // Between the check and the lock another server may have used the id and ended, and its processes may still be ending.
            if is_unused(uid) {
                return Ok(lease);
            }
            self.free.push_back(lease);
        }
        Err(io::Error::from_raw_os_error(libc::EUSERS))
    }
}

/// Whether no visible process has the id. Zombies count.
fn is_unused(uid: u32) -> bool {
    getpriority_user(Uid::from_raw(uid)) == Err(Errno::SRCH)
}

/// Makes a user namespace that maps root to `uid`, and every other id except `uid` to itself.
fn map_of(uid: u32) -> io::Result<OwnedFd> {
    let (gate, holder) = pipe_with(PipeFlags::CLOEXEC)?;
    match sys::fork_into(libc::CLONE_NEWUSER.cast_unsigned().into())? {
        Fork::Child => {
            drop(holder);
            // Waits until the namespace is mapped and opened, or the spawner is gone.
            let _opened = rustix::io::read(&gate, &mut [0; 1][..]);
            sys::end(0)
        }
        Fork::Parent(child) => {
            let of = |file: &str| format!("/proc/{}/{file}", child.as_raw_nonzero());
            let text = format!("0 {uid} 1\n1 1 {}\n{next} {next} {}\n", uid - 1, LAST - uid, next = uid + 1);
            let written = fs::write(of("uid_map"), &text).and_then(|()| fs::write(of("gid_map"), &text));
            let opened = written.and_then(|()| Ok(OwnedFd::from(fs::File::open(of("ns/user"))?)));
            drop(holder);
            sys::wait_for(child);
            opened
        }
    }
}

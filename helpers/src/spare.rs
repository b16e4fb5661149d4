//! Inits that are forked ahead of demand. They have already done the slow part of a start in a sandbox that does not depend on the
//! order. A start without a sandbox has no such part: passing its order to a waiting process takes as long as a fork.
//!
//! A spare is the first process of new user, pid, ipc, network and mount namespaces. On a server of root it has also become a
//! separate user. It keeps only one descriptor of the spawner, a socket on which it waits for one order. Then it is the init of the
//! ordered sandbox, as if it had been forked for that order. A spare is used once: a second sandbox would find what the first one
//! left. Its mounts are nevertheless those of the machine at the time of the start: after a change of the mounts the spawner uses
//! no spare that was made before.

use crate::closing;
use crate::frames::ReceiveError;
use crate::launch::Order;
use crate::uids::Lease;
use portcullis_protocol::helper::{HEADER, StepFailed, decode, encode};
use portcullis_sandbox::mounts::MountChanges;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown, socketpair,
};
use rustix::process::Pid;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// The maximum number of spares: one is taken while the next is made. More would help only with bursts of starts, and would not
/// reduce their total cost.
const MOST: usize = 2;

/// The time without a start in a sandbox after which spares end: a spare costs some hundred kilobytes.
const IDLE: Duration = Duration::from_mins(1);

/// While one spare waits, the next is made only after the spawner has been idle for this time. So it does not compete with the
/// start that took the last spare, nor with its program.
const QUIET: Duration = Duration::from_millis(1);

/// The maximum size of an order in bytes, which fits in a socket's buffer. For a larger order an init is forked.
const MOST_BYTES: usize = 64 * 1024;

/// The number of descriptors that each init gets: the result pipe, the tether, and the socket to the remover.
const ENDS: usize = 3;

/// The maximum number of descriptors of an order: those, three standard ones, and the doors of some cgroups.
const MOST_DESCRIPTORS: usize = 16;

/// The spares that wait for an order.
#[derive(Debug)]
pub(crate) struct Spares {
    /// In the order in which they were made.
    ready: VecDeque<Spare>,
    /// The time until which spares are kept; `None` if none are wanted.
    until: Option<Instant>,
    /// A spare could not be made, ended unused, or had old mounts. No more are made before the next start.
    has_given_up: bool,
    mounts: MountChanges,
}

/// A waiting spare, as the spawner holds it.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) pid: Pid,
    /// The socket to the spare, which ends when it is closed.
    pub(crate) way: OwnedFd,
    /// The machine's mounts when it was forked ([`Spares::mounts`]).
    pub(crate) mounts: u64,
}

impl Spares {
    /// Starts without spares.
    pub(crate) fn new() -> Self {
        Self { ready: VecDeque::new(), until: None, has_given_up: false, mounts: MountChanges::observe() }
    }

    /// Takes a spare for a start now, if there is one, and requests more for the following starts.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Spare> {
        self.until = Some(now + IDLE);
        self.has_given_up = false;
        let mounts = self.mounts.state();
        // Spares whose mounts are not the machine's present ones end when their sockets are closed.
        self.ready.retain(|spare| spare.mounts == mounts);
        self.ready.pop_front()
    }

    /// The state of the machine's mounts now, for a spare that is forked next.
    pub(crate) fn mounts(&mut self) -> u64 {
        self.mounts.state()
    }

    /// The descriptor that reports changes of the machine's mounts, while there are spares: a spare keeps an unmounted file system
    /// in use.
    pub(crate) fn of_mounts(&self) -> Option<BorrowedFd<'_>> {
        self.mounts.descriptor().filter(|_| !self.ready.is_empty())
    }

    /// Drops all spares after a change of the machine's mounts. No more are made before the next start, so that frequent mounts on
    /// a machine cost nothing.
    pub(crate) fn hear_of_mounts(&mut self) {
        self.mounts.note();
        self.ready.clear();
        self.give_up();
    }

    /// Adds a new spare.
    pub(crate) fn add(&mut self, spare: Spare) {
        self.ready.push_back(spare);
    }

    /// The idle time of the spawner after which a spare is made; `None` if none is to be made.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let is_short = self.until.is_some() && !self.has_given_up && self.ready.len() < MOST;
        is_short.then_some(if self.ready.is_empty() { Duration::ZERO } else { QUIET })
    }

    /// Makes no more spares before the next start.
    pub(crate) fn give_up(&mut self) {
        self.has_given_up = true;
    }

    /// Notes that a spare has ended. If it was not used, something is wrong, and no more are made before the next start.
    pub(crate) fn lose(&mut self, pid: Pid) {
        let before = self.ready.len();
        self.ready.retain(|spare| spare.pid != pid);
        if self.ready.len() < before {
            self.give_up();
        }
    }

    /// Drops the newest spare.
    pub(crate) fn give_way(&mut self) -> Option<Pid> {
        self.ready.pop_back().map(|spare| spare.pid)
    }

    /// The time at which the waiting spares are no longer wanted.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.until.filter(|_| !self.ready.is_empty())
    }

    /// Drops the spares if they are no longer wanted.
    pub(crate) fn let_go(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            self.ready.clear();
            self.until = None;
            self.has_given_up = false;
        }
    }
}

/// Makes the socket to a spare: the spawner's end and the spare's.
pub(crate) fn way() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    // SOCK_SEQPACKET keeps each message whole, with its descriptors.
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// The encoded order; `None` if it is too large for a spare.
pub(crate) fn written(order: &Order) -> Option<Vec<u8>> {
    let bytes = encode(order, b"", 0).ok()?;
    let count = ENDS + order.descriptors.len() + order.limits.doors.len();
    (bytes.len() <= MOST_BYTES && count <= MOST_DESCRIPTORS).then_some(bytes)
}

/// The descriptors that a keeper gets with its order.
#[derive(Debug)]
pub(crate) struct Ends {
    /// The pipe to which a launcher writes its report.
    pub(crate) result: OwnedFd,
    pub(crate) tether: OwnedFd,
    /// An init's socket to the remover of mount points.
    pub(crate) line: Option<OwnedFd>,
}

impl Spare {
    /// Sends `bytes`, the [`written`] form of `order`, with the descriptors. If the spare does not take them, the caller drops it.
    pub(crate) fn hand(&self, bytes: &[u8], order: &Order, ends: &Ends) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let all = [&ends.result, &ends.tether].into_iter().chain(&ends.line).chain(&order.descriptors).chain(&order.limits.doors);
        let descriptors: Vec<BorrowedFd<'_>> = all.map(AsFd::as_fd).collect();
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(Errno::MSGSIZE);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.way, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
    }
}

/// Closes all descriptors of the spawner except the socket to it and the user namespace that this process needs to become another
/// user.
pub(crate) fn leave_spawner(way: &OwnedFd, lease: Option<&Lease>) -> Result<(), StepFailed> {
    let kept: Vec<RawFd> = [way].into_iter().chain(lease.map(|lease| &lease.map)).map(AsRawFd::as_raw_fd).collect();
    closing::close_all_but(&kept)
}

/// Refuses all orders except one that has already arrived.
pub(crate) fn refuse(way: &OwnedFd) {
    // A later sender gets EPIPE. On a socket that this process holds, shutdown cannot fail.
    let _refused = shutdown(way, Shutdown::Read);
}

/// Waits for the order. `None` if the spawner closed the socket.
pub(crate) fn wait(way: &OwnedFd) -> Result<Option<(Order, Ends)>, ReceiveError> {
    let mut bytes = vec![0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match recvmsg(way, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other.map_err(ReceiveError::Socket)?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(ReceiveError::Descriptors);
    }
    let mut order: Order = decode(bytes.get(HEADER..got.bytes).unwrap_or_default())?;
    let mut descriptors = descriptors.into_iter();
    let (Some(result), Some(tether), Some(line)) = (descriptors.next(), descriptors.next(), descriptors.next()) else {
        return Err(ReceiveError::Descriptors);
    };
    order.descriptors = descriptors.by_ref().take(order.standard()).collect();
    order.limits.doors = descriptors.collect();
    Ok(Some((order, Ends { result, tether, line: Some(line) })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare(pid: i32) -> Spare {
        Spare { pid: Pid::from_raw(pid).unwrap(), way: way().unwrap().0, mounts: 0 }
    }

    #[test]
    fn they_are_made_once_they_are_wanted_and_go_when_they_are_not() {
        let (mut spares, now) = (Spares::new(), Instant::now());
        assert!(spares.patience().is_none() && spares.deadline().is_none(), "none is wanted");
        assert!(spares.take(now).is_none());
        for (pid, patience) in [(1, Duration::ZERO), (2, QUIET)] {
            assert_eq!(spares.patience(), Some(patience));
            spares.add(spare(pid));
        }
        assert!(spares.patience().is_none());
        assert_eq!(spares.deadline(), Some(now + IDLE));
        spares.let_go(now + IDLE / 2);
        assert!(spares.take(now + IDLE / 2).is_some() && spares.patience().is_some(), "wanted, and one less");
        assert_eq!(spares.deadline(), Some(now + IDLE / 2 + IDLE));
        spares.let_go(now + IDLE / 2 + IDLE);
        assert!(spares.patience().is_none() && spares.deadline().is_none());
        assert!(spares.take(now).is_none(), "all have gone");
    }

    #[test]
    fn one_that_ends_unused_is_not_replaced_before_the_next_start() {
        let (mut spares, now) = (Spares::new(), Instant::now());
        spares.take(now);
        spares.add(spare(1));
        spares.lose(Pid::from_raw(7).unwrap());
        assert!(spares.patience().is_some(), "another's end changes nothing");
        spares.add(spare(2));
        spares.lose(Pid::from_raw(1).unwrap());
        assert!(spares.patience().is_none());
        assert_eq!(spares.deadline(), Some(now + IDLE), "the other one goes all the same");
        assert!(spares.take(now).is_some() && spares.patience().is_some());
        spares.give_up();
        assert!(spares.patience().is_none());
    }

    #[test]
    fn an_order_arrives_with_its_descriptors_or_not_at_all() {
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut limits = crate::limit::Limits::default();
        limits.doors.push(pipe().1);
        let mut order = |command: usize| Order {
            session: "s".to_owned(),
            tty: false,
            policy: None,
            allow_unprotected: false,
            command: portcullis_protocol::path::Bytes(vec![7; command]),
            own_view: true,
            own_network: true,
            own_uid: true,
            records: None,
            limits: std::mem::take(&mut limits),
            descriptors: vec![pipe().1, pipe().1, pipe().1],
        };
        let ((ours, theirs), order, too_large) = (way().unwrap(), order(MOST_BYTES / 2), order(MOST_BYTES));
        assert!(written(&too_large).is_none());
        let ((result, pen), (tether, other), (line, third)) = (pipe(), pipe(), pipe());
        let bytes = written(&order).unwrap();
        Spare { pid: rustix::process::getpid(), way: ours, mounts: 0 }
            .hand(&bytes, &order, &Ends { result: pen, tether: other, line: Some(third) })
            .unwrap();
        drop(order);
        let (order, ends) = wait(&theirs).unwrap().unwrap();
        assert_eq!((order.command.0.len(), order.descriptors.len(), order.limits.doors.len()), (MOST_BYTES / 2, 3, 1));
        rustix::io::write(&ends.result, b"r").unwrap();
        rustix::io::write(&ends.tether, b"t").unwrap();
        rustix::io::write(ends.line.unwrap(), b"l").unwrap();
        let mut byte = [0];
        for (end, expect) in [(result, b"r"), (tether, b"t"), (line, b"l")] {
            rustix::io::read(&end, &mut byte[..]).unwrap();
            assert_eq!(&byte, expect);
        }
        // The spawner's end was closed with the `Spare`, so no order follows.
        assert!(wait(&theirs).unwrap().is_none());
    }
}

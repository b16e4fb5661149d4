//! Inits that were forked ahead of demand, so that a start in a sandbox finds done what takes time and does not depend on what is
//! started. Without a sandbox there is nothing to gain: to hand an order over takes as long as to fork for it.
//!
//! A spare is the first process of new user, pid, ipc and network namespaces. It holds nothing of the spawner's but one socket,
//! on which it waits for one order; then it takes a copy of the machine's mounts, as they are at that time, and is the init of
//! what is ordered, as if it had been forked for it. None serves twice: whoever came second would find what the first left.

use crate::closing;
use crate::frames::ReceiveError;
use crate::launch::Order;
use portcullis_protocol::helper::{HEADER, StepFailed, decode, encode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown, socketpair,
};
use rustix::process::Pid;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// So many wait at most: one is taken while the next is made. More would serve bursts only, whose cost they move and do not lessen.
const MOST: usize = 2;

/// After so long without a sandbox they end: a spare costs some hundred kilobytes.
const IDLE: Duration = Duration::from_mins(1);

/// Bytes of an order. A larger one goes to an init that is forked for it; a socket's buffer takes this whole.
const MOST_BYTES: usize = 64 * 1024;

/// Descriptors that an init is given: the result pipe, the tether, and the socket to the remover.
const ENDS: usize = 3;

/// Descriptors of an order: those, three standard ones, and the doors of some groups.
const MOST_DESCRIPTORS: usize = 16;

/// Those that wait.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    /// In the order in which they were made.
    ready: VecDeque<Spare>,
    /// Until when they are wanted, if they are.
    until: Option<Instant>,
    /// Something was wrong with one.
    has_given_up: bool,
}

/// One that waits, as the spawner holds it.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) pid: Pid,
    /// Without it the spare ends.
    pub(crate) way: OwnedFd,
}

impl Spares {
    /// One to be used now, if there is one; and more shall be there for the next.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Spare> {
        self.until = Some(now + IDLE);
        self.has_given_up = false;
        self.ready.pop_front()
    }

    /// Puts one there.
    pub(crate) fn add(&mut self, spare: Spare) {
        self.ready.push_back(spare);
    }

    /// Whether one should be made.
    pub(crate) fn is_short(&self) -> bool {
        self.until.is_some() && !self.has_given_up && self.ready.len() < MOST
    }

    /// No more are made before the next start: one could not be made.
    pub(crate) fn give_up(&mut self) {
        self.has_given_up = true;
    }

    /// One has ended. If it had not been used, something is wrong, and no more are made before the next start.
    pub(crate) fn lose(&mut self, pid: Pid) {
        let before = self.ready.len();
        self.ready.retain(|spare| spare.pid != pid);
        if self.ready.len() < before {
            self.give_up();
        }
    }

    /// When those that wait are not wanted any more.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.until.filter(|_| !self.ready.is_empty())
    }

    /// Lets them go if they are not wanted any more.
    pub(crate) fn let_go(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            *self = Self::default();
        }
    }
}

/// Both ends of the way to a spare: the spawner's and the spare's.
pub(crate) fn way() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    // A message comes whole with its descriptors, or not at all.
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// The bytes of an order; none if it is too large for a spare.
pub(crate) fn written(order: &Order) -> Option<Vec<u8>> {
    let bytes = encode(order, b"", 0).ok()?;
    let count = ENDS + order.descriptors.len() + order.limits.doors.len();
    (bytes.len() <= MOST_BYTES && count <= MOST_DESCRIPTORS).then_some(bytes)
}

/// What a keeper is given with its order.
#[derive(Debug)]
pub(crate) struct Ends {
    /// Where a launcher reports.
    pub(crate) result: OwnedFd,
    pub(crate) tether: OwnedFd,
    /// An init's socket to the remover of mount points.
    pub(crate) line: Option<OwnedFd>,
}

impl Spare {
    /// Hands over what was [`written`] of `order`, with its descriptors. One that does not take it is dropped by the caller.
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

/// Lets go of everything of the spawner's but the way to it.
pub(crate) fn leave_spawner(way: &OwnedFd) -> Result<(), StepFailed> {
    closing::close_all_but(&[way.as_raw_fd()])
}

/// No order is taken any more but one that is there already.
pub(crate) fn refuse(way: &OwnedFd) {
    // Whoever sends one is told (EPIPE). Of a socket of this process's own this cannot fail.
    let _refused = shutdown(way, Shutdown::Read);
}

/// Waits for the one order. None if there will be none.
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
        Spare { pid: Pid::from_raw(pid).unwrap(), way: way().unwrap().0 }
    }

    #[test]
    fn they_are_made_once_they_are_wanted_and_go_when_they_are_not() {
        let (mut spares, now) = (Spares::default(), Instant::now());
        assert!(!spares.is_short() && spares.deadline().is_none(), "nobody wants any");
        assert!(spares.take(now).is_none());
        for pid in 1..=2 {
            assert!(spares.is_short());
            spares.add(spare(pid));
        }
        assert!(!spares.is_short());
        assert_eq!(spares.deadline(), Some(now + IDLE));
        spares.let_go(now + IDLE / 2);
        assert!(spares.take(now + IDLE / 2).is_some() && spares.is_short(), "wanted, and one less");
        assert_eq!(spares.deadline(), Some(now + IDLE / 2 + IDLE));
        spares.let_go(now + IDLE / 2 + IDLE);
        assert!(!spares.is_short() && spares.deadline().is_none());
        assert!(spares.take(now).is_none(), "all have gone");
    }

    #[test]
    fn one_that_ends_unused_is_not_replaced_before_the_next_start() {
        let (mut spares, now) = (Spares::default(), Instant::now());
        spares.take(now);
        spares.add(spare(1));
        spares.lose(Pid::from_raw(7).unwrap());
        assert!(spares.is_short(), "another's end changes nothing");
        spares.add(spare(2));
        spares.lose(Pid::from_raw(1).unwrap());
        assert!(!spares.is_short());
        assert_eq!(spares.deadline(), Some(now + IDLE), "the other one goes all the same");
        assert!(spares.take(now).is_some() && spares.is_short());
        spares.give_up();
        assert!(!spares.is_short());
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
            records: None,
            limits: std::mem::take(&mut limits),
            descriptors: vec![pipe().1, pipe().1, pipe().1],
        };
        let ((ours, theirs), order, too_large) = (way().unwrap(), order(MOST_BYTES / 2), order(MOST_BYTES));
        assert!(written(&too_large).is_none());
        let ((result, pen), (tether, other), (line, third)) = (pipe(), pipe(), pipe());
        let bytes = written(&order).unwrap();
        Spare { pid: rustix::process::getpid(), way: ours }
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
        // The spawner's end went with the `Spare`: there will be no order.
        assert!(wait(&theirs).unwrap().is_none());
    }
}

//! Frames on a UNIX socket: whole frames with their descriptors in, bytes with descriptors out.

use portcullis_protocol::helper::{Deframer, Frame, FrameError};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Bytes asked of the socket at once: most frames cost one call.
const READ: usize = 72 * 1024;

/// Descriptors of one message. The kernel never joins those of two sends into one receive, and no frame has more than
/// three; the rest is room for a peer that is wrong, so that this is seen instead of cut off.
const MOST_DESCRIPTORS: usize = 8;

/// Receives frames from a socket.
#[derive(Debug)]
pub(crate) struct Inlet {
    deframer: Deframer,
    descriptors: VecDeque<OwnedFd>,
    buffer: Vec<u8>,
}

/// Whether to wait for bytes that have not come yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Yes,
    No,
    /// Not for a frame, but for the rest of one that has begun.
    Rest,
}

/// What a socket had to give.
#[derive(Debug)]
pub(crate) enum Received {
    /// A frame and its descriptors.
    Frame(Frame, Vec<OwnedFd>),
    /// Nothing yet; only without waiting.
    Later,
    /// The peer closed, maybe in the middle of a frame, which then does not count.
    End,
}

/// Why a socket is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("receive a frame: {0}")]
    Socket(Errno),
    #[error("receive a frame: {0}")]
    Frame(#[from] FrameError),
    #[error("receive a frame: its descriptors did not come with it")]
    Descriptors,
}

impl Inlet {
    pub(crate) fn new() -> Self {
        Self::reading(READ)
    }

    /// One that asks the socket for so many bytes at once.
    pub(crate) fn reading(bytes: usize) -> Self {
        Self { deframer: Deframer::default(), descriptors: VecDeque::new(), buffer: vec![0; bytes] }
    }

    /// The next frame.
    pub(crate) fn next(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> Result<Received, ReceiveError> {
        loop {
            if let Some(frame) = self.deframer.next_frame()? {
                if self.descriptors.len() < frame.descriptors {
                    return Err(ReceiveError::Descriptors);
                }
                let descriptors = self.descriptors.drain(..frame.descriptors).collect();
                return Ok(Received::Frame(frame, descriptors));
            }
            match self.receive(socket, wait) {
                Ok(0) => return Ok(Received::End),
                Ok(length) => self.deframer.push(&self.buffer[..length]),
                Err(ReceiveError::Socket(Errno::INTR)) => {}
                Err(ReceiveError::Socket(Errno::AGAIN)) => return Ok(Received::Later),
                Err(ReceiveError::Socket(Errno::CONNRESET)) => return Ok(Received::End),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether a whole frame was read that nobody has taken.
    pub(crate) fn has_frame(&self) -> bool {
        self.deframer.has_frame()
    }

    fn receive(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> Result<usize, ReceiveError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let waits = wait == Wait::Yes || (wait == Wait::Rest && self.deframer.is_mid_frame());
        let flags = if waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT } | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(socket, &mut [IoSliceMut::new(&mut self.buffer)], &mut control, flags).map_err(ReceiveError::Socket)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        // Without room for a descriptor the kernel drops it; which frame it belonged to cannot be known any more.
        if got.flags.contains(ReturnFlags::CTRUNC) || self.descriptors.len() > 2 * MOST_DESCRIPTORS {
            return Err(ReceiveError::Descriptors);
        }
        Ok(got.bytes)
    }
}

/// Sends what the socket takes now, or at least one byte if `wait`; the descriptor goes with the first byte.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>, wait: Wait) -> Result<usize, Errno> {
    send_some(socket, [bytes, &[]], descriptor, wait)
}

/// Sends all bytes, waiting as long as the peer makes us.
pub(crate) fn send_all(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    send_parts(socket, [bytes, &[]], descriptor)
}

/// The same for a frame whose payload is in its own buffer.
pub(crate) fn send_parts(
    socket: BorrowedFd<'_>,
    [head, payload]: [&[u8]; 2],
    mut descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut sent = 0;
    while sent < head.len() + payload.len() {
        let rest = [&head[sent.min(head.len())..], &payload[sent.saturating_sub(head.len())..]];
        sent += send_some(socket, rest, descriptor.take(), Wait::Yes)?;
    }
    Ok(())
}

fn send_some(socket: BorrowedFd<'_>, parts: [&[u8]; 2], descriptor: Option<BorrowedFd<'_>>, wait: Wait) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(fits, "Invariant: the space is made for one descriptor");
    }
    let flags = if wait == Wait::Yes { SendFlags::empty() } else { SendFlags::DONTWAIT } | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(socket, &parts.map(IoSlice::new), &mut control, flags) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::helper::{decode, encode};
    use rustix::event::{PollFd, PollFlags};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_descriptor_arrives_with_its_frame() {
        let (here, there) = pair();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        send_all(here.as_fd(), &encode(&1_u8, b"first", 0).unwrap(), None).unwrap();
        send_all(here.as_fd(), &encode(&2_u8, b"second", 1).unwrap(), Some(write.as_fd())).unwrap();
        drop((here, write));
        let mut inlet = Inlet::new();
        let Received::Frame(frame, none) = inlet.next(there.as_fd(), Wait::Yes).unwrap() else { panic!() };
        assert_eq!((decode::<u8>(&frame.body).unwrap(), none.len()), (1, 0));
        let Received::Frame(frame, one) = inlet.next(there.as_fd(), Wait::Yes).unwrap() else { panic!() };
        assert_eq!((&frame.payload[..], one.len()), (&b"second"[..], 1));
        rustix::io::write(&one[0], b"x").unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0_u8; 4][..]).unwrap(), 1);
        assert!(matches!(inlet.next(there.as_fd(), Wait::Yes).unwrap(), Received::End));
    }

    #[test]
    fn a_frame_without_its_descriptor_is_an_error() {
        let (here, there) = pair();
        send_all(here.as_fd(), &encode(&1_u8, b"", 1).unwrap(), None).unwrap();
        assert!(matches!(Inlet::new().next(there.as_fd(), Wait::Yes), Err(ReceiveError::Descriptors)));
    }

    #[test]
    fn a_frame_that_has_begun_is_waited_for_and_none_else() {
        let (here, there) = pair();
        let mut inlet = Inlet::new();
        assert!(matches!(inlet.next(there.as_fd(), Wait::Rest).unwrap(), Received::Later));
        let frame = encode(&1_u8, &vec![7; 300_000], 0).unwrap();
        let sender = std::thread::spawn(move || send_all(here.as_fd(), &frame, None));
        // Until the first byte is there; more than the socket takes at once comes while this reads.
        rustix::event::poll(&mut [PollFd::new(&there, PollFlags::IN)], None).unwrap();
        let Received::Frame(frame, _none) = inlet.next(there.as_fd(), Wait::Rest).unwrap() else { panic!() };
        assert!(frame.payload.len() == 300_000 && frame.payload.iter().all(|byte| *byte == 7));
        sender.join().unwrap().unwrap();
        assert!(matches!(inlet.next(there.as_fd(), Wait::Rest).unwrap(), Received::End));
    }

    #[test]
    fn half_a_frame_is_later_and_then_the_end() {
        let (here, there) = pair();
        let frame = encode(&1_u8, b"payload", 0).unwrap();
        send_all(here.as_fd(), &frame[..15], None).unwrap();
        let mut inlet = Inlet::new();
        assert!(matches!(inlet.next(there.as_fd(), Wait::No).unwrap(), Received::Later));
        drop(here);
        assert!(matches!(inlet.next(there.as_fd(), Wait::No).unwrap(), Received::End));
    }
}

//! Frames and descriptors over an AF_UNIX stream socket.

use portcullis_protocol::helper::{Deframer, Frame, MAX_DESCRIPTORS};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// Bytes asked of the kernel at once: content that a worker sends along fits, with what is before it.
const READ: usize = 72 * 1024;

/// The two directions of a socket, for one sending and one receiving task.
pub(crate) fn pair_up(stream: UnixStream) -> (FrameSender, FrameReceiver) {
    let socket = Arc::new(stream);
    let receiver = FrameReceiver {
        socket: Arc::clone(&socket),
        frames: Deframer::default(),
        descriptors: VecDeque::new(),
        buffer: vec![0; READ].into_boxed_slice(),
    };
    (FrameSender { socket }, receiver)
}

/// Watches a descriptor that does not block.
pub(crate) fn watch_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(deprecated, reason = "its successor is unsafe since a type may lie about its descriptor, which `OwnedFd` cannot")]
    AsyncFd::with_interest(fd, interest)
}

/// Sends frames.
#[derive(Debug)]
pub(crate) struct FrameSender {
    socket: Arc<UnixStream>,
}

impl FrameSender {
    /// Sends one frame of `protocol::helper::encode` and its descriptors. Dropping the future may leave half a frame on its
    /// way, after which the socket is of no use; so is it after an error, unless [`Self::is_untouched`] says otherwise.
    pub(crate) async fn send(&mut self, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_parts([frame, &[]], descriptors).await
    }

    /// The same for a frame whose payload is in its own buffer.
    pub(crate) async fn send_parts(&mut self, [head, payload]: [&[u8]; 2], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut sent = 0;
        while sent < head.len() + payload.len() {
            // Descriptors travel with the first byte, and the kernel takes them with the first call that sends any.
            let with = if sent == 0 { descriptors } else { &[] };
            let rest = [&head[sent.min(head.len())..], &payload[sent.saturating_sub(head.len())..]];
            sent += self.socket.async_io(Interest::WRITABLE, || send_some(&self.socket, rest, with)).await?;
        }
        Ok(())
    }

    /// Whether an error means that not a byte of its frame was sent and the next frame may succeed: the kernel bounds the
    /// descriptors of a user that are on their way.
    pub(crate) fn is_untouched(error: &io::Error) -> bool {
        error.raw_os_error() == Some(rustix::io::Errno::TOOMANYREFS.raw_os_error())
    }
}

fn send_some(socket: &UnixStream, parts: [&[u8]; 2], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!("{} descriptors in one frame: the bound is {MAX_DESCRIPTORS}", descriptors.len())));
    }
    Ok(sendmsg(socket, &parts.map(IoSlice::new), &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
}

/// Receives frames.
#[derive(Debug)]
pub(crate) struct FrameReceiver {
    socket: Arc<UnixStream>,
    frames: Deframer,
    /// In order of arrival, of frames that are not whole yet: see [`Self::wait`] for the bound.
    descriptors: VecDeque<OwnedFd>,
    buffer: Box<[u8]>,
}

impl FrameReceiver {
    /// The next frame with its descriptors, or none at the end. Dropping the future loses nothing.
    pub(crate) async fn recv(&mut self) -> Result<Option<(Frame, Vec<OwnedFd>)>, SocketError> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|error| SocketError::Frame(error.to_string()))? {
                if self.descriptors.len() < frame.descriptors {
                    return Err(SocketError::Missing { said: frame.descriptors, came: self.descriptors.len() });
                }
                let descriptors = self.descriptors.drain(..frame.descriptors).collect();
                return Ok(Some((frame, descriptors)));
            }
            if self.wait().await? == 0 {
                return if self.frames.is_mid_frame() { Err(SocketError::Cut) } else { Ok(None) };
            }
        }
    }

    /// Reads once; 0 is the end.
    async fn wait(&mut self) -> Result<usize, SocketError> {
        // No whole frame is left, so what is queued belongs to one that has begun.
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(SocketError::TooMany(self.descriptors.len()));
        }
        let Self { socket, buffer, .. } = self;
        let (bytes, arrived, truncated) = socket.async_io(Interest::READABLE, || recv_some(socket, buffer)).await?;
        self.descriptors.extend(arrived);
        if truncated {
            return Err(SocketError::TooMany(self.descriptors.len()));
        }
        self.frames.push(&self.buffer[..bytes]);
        Ok(bytes)
    }
}

fn recv_some(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(arrived) = message {
            descriptors.extend(arrived);
        }
    }
    Ok((received.bytes, descriptors, received.flags.contains(ReturnFlags::CTRUNC)))
}

/// Why nothing more can be received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// The system said no.
    #[error("receive a frame: {0}")]
    Io(#[from] io::Error),
    /// The bytes are no frame.
    #[error("receive a frame: {0}")]
    Frame(String),
    /// The peer ended inside of a frame.
    #[error("the peer ended inside of a frame")]
    Cut,
    /// A frame without its descriptors.
    #[error("a frame of {said} descriptors came with {came}")]
    Missing {
        /// By its header.
        said: usize,
        /// In the queue.
        came: usize,
    },
    /// Descriptors that no frame's header speaks of.
    #[error("{0} descriptors came for one frame: the bound is {MAX_DESCRIPTORS}")]
    TooMany(usize),
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::helper::{INLINE_PAYLOAD, encode};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::os::fd::AsFd;

    fn sockets() -> ((FrameSender, FrameReceiver), (FrameSender, FrameReceiver)) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (pair_up(ours), pair_up(theirs))
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).unwrap()
    }

    #[tokio::test]
    async fn each_frame_gets_its_own_descriptors() {
        let ((mut sender, _), (_, mut receiver)) = sockets();
        let pipes: Vec<_> = (0..3).map(|_| pipe()).collect();
        for (nth, count) in [(0_u8, 2_usize), (1, 0), (2, 1)] {
            let at = usize::from(nth);
            let descriptors: Vec<_> = pipes[at..at + count].iter().map(|(_, write)| write.as_fd()).collect();
            sender.send(&encode(&nth, &[nth; 10], count).unwrap(), &descriptors).await.unwrap();
        }
        drop(sender);
        for (nth, count) in [(0_u8, 2_usize), (1, 0), (2, 1)] {
            let (frame, descriptors) = receiver.recv().await.unwrap().unwrap();
            assert_eq!((&frame.payload[..], descriptors.len()), (&[nth; 10][..], count));
            for (at, descriptor) in descriptors.iter().enumerate() {
                rustix::io::write(descriptor, &[nth]).unwrap();
                let mut byte = [9];
                rustix::io::read(&pipes[usize::from(nth) + at].0, &mut byte).unwrap();
                assert_eq!(byte, [nth]);
                assert!(rustix::io::fcntl_getfd(descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            }
        }
    }

    #[tokio::test]
    async fn frames_larger_than_the_socket_buffer_arrive_whole() {
        let ((mut sender, keep), (_, mut receiver)) = sockets();
        let body = vec![7_u8; 3 * 1024 * 1024];
        let payload = vec![3_u8; INLINE_PAYLOAD];
        let frame = encode(&body, &payload, 0).unwrap();
        let sending = async {
            for _ in 0..3 {
                sender.send(&frame, &[]).await.unwrap();
            }
            drop((sender, keep));
        };
        let receiving = async {
            for _ in 0..3 {
                let (frame, _) = receiver.recv().await.unwrap().unwrap();
                assert_eq!(portcullis_protocol::helper::decode::<Vec<u8>>(&frame.body).unwrap(), body);
                assert_eq!(frame.payload, payload);
            }
            assert!(receiver.recv().await.unwrap().is_none());
        };
        tokio::join!(sending, receiving);
    }

    #[tokio::test]
    async fn a_peer_that_breaks_the_rules_is_an_error() {
        let ((mut sender, keep), (_, mut receiver)) = sockets();
        sender.send(&encode(&1_u8, &[], 1).unwrap(), &[]).await.unwrap();
        assert!(matches!(receiver.recv().await, Err(SocketError::Missing { said: 1, came: 0 })));

        let frame = encode(&1_u8, &[1; 100], 0).unwrap();
        sender.send(&frame[..50], &[]).await.unwrap();
        drop((sender, keep));
        assert!(matches!(receiver.recv().await, Err(SocketError::Cut)));
    }

    #[tokio::test]
    async fn descriptors_without_frames_do_not_pile_up() {
        let ((mut sender, _keep), (_, mut receiver)) = sockets();
        let (_read, write) = pipe();
        // A frame that never becomes whole: each byte brings three more.
        let frame = encode(&1_u8, &[0; 1000], 0).unwrap();
        for byte in &frame[..4] {
            sender.send(std::slice::from_ref(byte), &[write.as_fd(); 3]).await.unwrap();
        }
        assert!(matches!(receiver.recv().await, Err(SocketError::TooMany(6))));
    }
}

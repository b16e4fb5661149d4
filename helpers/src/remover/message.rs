//! The messages between the spawner, the inits and the remover. Each arrives whole with its descriptors, or not at all.

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The maximum size of a message in bytes: a path and its kind.
const MESSAGE: usize = 4096 + 8;

/// The maximum number of descriptors of a message: an init's socket and its pidfd.
pub(super) const DESCRIPTORS: usize = 2;

/// The number of a sandbox in the messages between the spawner and the remover. It is never reused.
pub(crate) type Token = u64;

/// The kinds of messages to the remover: the first byte of each.
pub(super) const WATCH: u8 = b'w';
pub(super) const SWEEP: u8 = b's';
pub(super) const POINT: u8 = b'p';
pub(super) const COVERS: u8 = b'c';
pub(super) const CLOSE: u8 = b'd';
pub(super) const LET_GO: u8 = b'g';

/// Both ends of a socket to the remover, for the spawner or for an init.
pub(crate) fn way() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    // SOCK_SEQPACKET keeps each message whole, with its descriptors.
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Init's end of its socket to the remover.
#[derive(Debug)]
pub(crate) struct Line(pub(crate) OwnedFd);

impl Line {
    /// Announces that a mount point will be made at `path`.
    pub(crate) fn name(&self, path: &Path) {
        // If the remover is gone, the next one finds it in the records.
        let _gone = post(self.0.as_fd(), &[&[POINT], path.as_os_str().as_bytes()].concat(), &[], SendFlags::empty());
    }

    /// Sends a duplicate of the inotify descriptor of the covers: closing the last duplicate takes the kernel long, which must not
    /// delay init.
    pub(crate) fn lend(&self, covers: BorrowedFd<'_>) {
        let _gone = post(self.0.as_fd(), &[COVERS], &[covers], SendFlags::empty());
    }

    /// Sends a descriptor that the remover closes at once: its last close takes the kernel long.
    pub(crate) fn close(&self, descriptor: OwnedFd) {
        let _gone = post(self.0.as_fd(), &[CLOSE], &[descriptor.as_fd()], SendFlags::empty());
    }

    /// Reports that no other process is left in the sandbox, and that all locks are released.
    pub(crate) fn let_go(self) {
        let _gone = post(self.0.as_fd(), &[LET_GO], &[], SendFlags::empty());
    }
}

/// Requests that the remover watches an init. `is_known` is false if an earlier remover, which has died, may have read mount points
/// of this init.
pub(crate) fn watch(
    remover: BorrowedFd<'_>,
    token: Token,
    socket: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
    is_known: bool,
) -> Result<(), Errno> {
    let bytes = [&[WATCH, u8::from(is_known)][..], &token.to_le_bytes()].concat();
    post(remover, &bytes, &[socket, init], SendFlags::empty())
}

/// Requests that the remover removes everything that is left, and reports `token` then.
pub(crate) fn sweep(remover: BorrowedFd<'_>, token: Token) -> Result<(), Errno> {
    post(remover, &[&[SWEEP, 0][..], &token.to_le_bytes()].concat(), &[], SendFlags::empty())
}

/// The next sandbox that the remover reports as gone, if there is a report.
pub(crate) fn next_gone(remover: BorrowedFd<'_>) -> Option<Token> {
    let mut token = [0; 8];
    match rustix::net::recv(remover, &mut token[..], RecvFlags::DONTWAIT) {
        Ok((8, _)) => Some(Token::from_le_bytes(token)),
        _none => None,
    }
}

fn post(to: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::MSGSIZE);
    }
    loop {
        match sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// The bytes of a message, and its descriptors.
pub(super) type Message = (Vec<u8>, Vec<OwnedFd>);

/// The next message; `None` at the end of the socket.
pub(super) fn receive(from: BorrowedFd<'_>) -> Result<Option<Message>, Errno> {
    let mut bytes = vec![0; MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = loop {
        match recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    bytes.truncate(got.bytes);
    Ok((got.bytes > 0).then_some((bytes, descriptors)))
}

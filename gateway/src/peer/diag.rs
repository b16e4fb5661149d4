//! One question to the kernel's `sock_diag`: whose TCP socket has these two addresses?

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// `TCP_ESTABLISHED` and `TCP_LISTEN` of `net/tcp_states.h`.
pub(super) const ESTABLISHED: u8 = 1;
pub(super) const LISTEN: u8 = 10;

/// What the kernel says of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Socket {
    /// Of `net/tcp_states.h`.
    pub(super) state: u8,
    /// Of whoever made it.
    pub(super) uid: u32,
    /// Its number in `/proc/PID/fd`; 0 when no process has it any more.
    pub(super) inode: u32,
}

/// From `linux/netlink.h`, `linux/sock_diag.h` and `linux/inet_diag.h`.
const HEADER: usize = 16;
const BY_FAMILY: u16 = 20;
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
const TCP: u8 = 6;
const INET: u8 = 2;
const INET6: u8 = 10;
/// Bytes of `inet_diag_req_v2`, and of `inet_diag_msg`.
const REQUEST_BODY: usize = 56;
const ANSWER_BODY: usize = 72;

/// The socket of this machine whose own address is `own` and whose other end is `other`; none if there is none. The kernel
/// answers while it is asked, so this does not wait.
pub(super) fn socket(own: SocketAddr, other: SocketAddr) -> io::Result<Option<Socket>> {
    let diag = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    send(&diag, &request(own, other), SendFlags::empty())?;
    let mut answer = [0; 4096];
    let (length, _truncated) = recv(&diag, &mut answer[..], RecvFlags::DONTWAIT)?;
    read(&answer[..length])
}

fn request(own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    let length = HEADER + REQUEST_BODY;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    // Sequence and port: one question a socket, so neither tells anything apart.
    bytes.extend([0; 8]);
    bytes.extend([if own.is_ipv4() { INET } else { INET6 }, TCP, 0, 0]);
    // Whatever its state.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(other.port().to_be_bytes());
    bytes.extend(address(own.ip()));
    bytes.extend(address(other.ip()));
    // On any interface, with any cookie.
    bytes.extend([0; 4]);
    bytes.extend([0xff; 8]);
    bytes
}

fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(ip) => ip.octets(),
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
    }
}

fn read(answer: &[u8]) -> io::Result<Option<Socket>> {
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is not understood");
    let word = |at: usize| {
        let bytes = answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(nonsense)?;
        Ok::<u32, io::Error>(u32::from_ne_bytes(bytes))
    };
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes).ok_or_else(nonsense)?;
    match kind {
        BY_FAMILY if answer.len() >= HEADER + ANSWER_BODY => {
            Ok(Some(Socket { state: answer[HEADER + 1], uid: word(HEADER + 64)?, inode: word(HEADER + 68)? }))
        }
        ERROR => match Errno::from_raw_os_error(word(HEADER)?.cast_signed().wrapping_neg()) {
            Errno::NOENT => Ok(None),
            errno => Err(errno.into()),
        },
        _other => Err(nonsense()),
    }
}

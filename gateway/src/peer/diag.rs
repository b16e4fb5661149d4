//! Questions to the kernel's `sock_diag`: whose TCP socket has these two addresses, and what is the other end of a unix socket?

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

/// From `linux/unix_diag.h`: the family, what to show, the attribute that says it, and the bytes of `unix_diag_msg`.
const UNIX: u8 = 1;
const SHOW_PEER: u32 = 4;
const PEER: u16 = 2;
const UNIX_ANSWER_BODY: usize = 16;

/// The number of the socket at the other end of this unix socket of our own network namespace; none if nobody has that any more,
/// or there is no such socket. The kernel answers while it is asked, so this does not wait.
pub(super) fn unix_peer(inode: u32) -> io::Result<Option<u32>> {
    let diag = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    let body = [
        // Family, protocol, and two bytes of nothing; whatever its state; whose; what; with any cookie.
        u32::from_ne_bytes([UNIX, 0, 0, 0]),
        u32::MAX,
        inode,
        SHOW_PEER,
        u32::MAX,
        u32::MAX,
    ];
    let body: Vec<u8> = body.into_iter().flat_map(u32::to_ne_bytes).collect();
    send(&diag, &[&header(body.len())[..], &body].concat(), SendFlags::empty())?;
    let mut answer = [0; 4096];
    let (length, _truncated) = recv(&diag, &mut answer[..], RecvFlags::DONTWAIT)?;
    read_unix(&answer[..length])
}

fn read_unix(answer: &[u8]) -> io::Result<Option<u32>> {
    match kind(answer)? {
        BY_FAMILY => {
            let mut at = HEADER + UNIX_ANSWER_BODY;
            while at < answer.len() {
                let [length, kind] = word(answer, at).map(split)?;
                if kind == PEER {
                    return word(answer, at + 4).map(|inode| (inode != 0).then_some(inode));
                }
                // Each begins at a multiple of four, and none is shorter than its own head.
                at += usize::from(length).max(4).next_multiple_of(4);
            }
            Ok(None)
        }
        ERROR => refusal(answer).map(|()| None),
        _other => Err(nonsense()),
    }
}

/// The two halves of four bytes.
fn split(word: u32) -> [u16; 2] {
    let [a, b, c, d] = word.to_ne_bytes();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
}

/// The head of a question whose body has this many bytes.
fn header(body: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body);
    bytes.extend(u32::try_from(HEADER + body).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    // Sequence and port: one question a socket, so neither tells anything apart.
    bytes.extend([0; 8]);
    bytes
}

fn request(own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    let mut bytes = header(REQUEST_BODY);
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
    match kind(answer)? {
        BY_FAMILY if answer.len() >= HEADER + ANSWER_BODY => {
            Ok(Some(Socket { state: answer[HEADER + 1], uid: word(answer, HEADER + 64)?, inode: word(answer, HEADER + 68)? }))
        }
        ERROR => refusal(answer).map(|()| None),
        _other => Err(nonsense()),
    }
}

/// What kind of message an answer is.
fn kind(answer: &[u8]) -> io::Result<u16> {
    word(answer, 4).map(|word| split(word)[0])
}

fn word(answer: &[u8], at: usize) -> io::Result<u32> {
    let bytes = answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(nonsense)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// An error that the kernel answered; that there is no such socket is none.
fn refusal(answer: &[u8]) -> io::Result<()> {
    match Errno::from_raw_os_error(word(answer, HEADER)?.cast_signed().wrapping_neg()) {
        Errno::NOENT => Ok(()),
        errno => Err(errno.into()),
    }
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is not understood")
}

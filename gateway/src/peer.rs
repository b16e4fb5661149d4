//! Whose connection it is.
//!
//! A confined process that may use the network reaches the gateway at any address of this machine, and could ask it for anything
//! without a sandbox. So once such a process was started, the gateway asks the kernel for the holders of the other end of a
//! connection. It serves the connection only if none of its own descendants holds that socket. If the holder is unknown, the
//! connection is refused: a socket without a holder, a socket in flight between two processes, a socket whose holder cannot be
//! inspected. Connections from addresses of other machines need no check. Connections over a unix socket are always checked.

mod diag;
mod holder;
mod unix;
mod walk;

use self::diag::Socket;
use self::walk::Held;
pub(crate) use self::walk::Looks;
use crate::blocking::Blocking;
use crate::helper::spawner::Spawner;
use portcullis_protocol::uids::UidRange;
use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::time::timeout;

/// Tells those who may be served from the gateway's own descendants. Clones share everything.
#[derive(Debug, Clone)]
pub(crate) struct Peers {
    /// None: a unix socket.
    listener: Option<SocketAddr>,
    spawner: Spawner,
    /// Its few threads are also the bound of what many connections at once can cost.
    blocking: Blocking,
    looks: Looks,
    has_warned: Arc<AtomicBool>,
}

/// The ends of a connection, as the accepted socket tells of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ends {
    /// Their addresses: of the accepted socket's own one, since that of a listener may be a wildcard.
    Tcp { peer: SocketAddr, local: SocketAddr },
    /// The accepted socket's number in the kernel, and who called `connect(2)`; no process if it is of another pid namespace.
    Unix { inode: u64, uid: u32, pid: Option<u32> },
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { peer, .. } => peer.fmt(f),
            Self::Unix { uid, pid: Some(pid), .. } => write!(f, "of process {pid} of user {uid}"),
            Self::Unix { uid, pid: None, .. } => write!(f, "of user {uid}"),
        }
    }
}

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// It is the very thing that must not get in.
    #[error(
        "refused: this connection comes from process {0}, which this gateway started itself, and processes confined by it must not ask it for more; connect from a process that the gateway did not start"
    )]
    Descendant(u32),
    /// It is somebody else's.
    #[error(
        "refused: this connection comes from user {caller}, and this socket serves user {own} and root only; connect as one of them"
    )]
    Stranger { caller: u32, own: u32 },
    /// It may be from inside a unix socket's server.
    #[error(
        "refused: whose connection this is cannot be told ({0}), and processes that this gateway started must not connect to it; connect from a process of the server's own network and pid namespace whose /proc/PID/fd the server can read"
    )]
    Nobody(String),
    /// It may be.
    #[error(
        "refused: whose connection this is cannot be told ({0}), and a confined process with network was started by this gateway, which must not connect to it; connect from a process whose /proc/PID/fd the gateway can read, or as another user"
    )]
    Unknown(String),
}

impl Peers {
    /// For connections to a listener on this address, which may stand for every address of this machine; none: to a unix socket.
    pub(crate) fn new(listener: Option<SocketAddr>, spawner: Spawner, looks: Looks) -> Self {
        Self { listener, spawner, blocking: Blocking::new(), looks, has_warned: Arc::default() }
    }

    /// Whether the kernel answers such questions here, by one about the listener itself. Blocks for a moment.
    pub(crate) fn can_be_told(&self) -> Result<(), String> {
        let Some(listener) = self.listener else { return unix::can_be_told() };
        let nobody = SocketAddr::new(if listener.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() }, 0);
        let is_listener = |socket: &Socket| socket.state == diag::LISTEN && socket.inode != 0;
        match diag::socket(listener, nobody) {
            Ok(Some(socket)) if is_listener(&socket) => holder::look().map_err(|error| format!("/proc: {error}")),
            Ok(_other) => Err("sock_diag does not know the gateway's own listener".to_owned()),
            Err(error) => Err(format!("sock_diag: {error}")),
        }
    }

    /// The user at the other end of a TCP connection from this machine, as far as that tells sandboxes from clients: where the server
    /// is root, and a confined process with network was started. One question to the kernel, which answers at once.
    pub(crate) fn user(&self, ends: &Ends) -> Option<u32> {
        let Ends::Tcp { peer, local } = ends else { return None };
        if !self.spawner.has_dialers() || self.spawner.uids().is_none() || !rustix::process::geteuid().is_root() {
            return None;
        }
        let [peer, local] = [*peer, *local].map(canonical);
        // A socket that is closing has no user, and some kernels say that it is root's.
        let socket = diag::socket(peer, local).ok()?.filter(is_held)?;
        Some(socket.uid)
    }

    /// Whether a connection may be served. Over TCP, where no confined process with network was ever started, this is one read;
    /// over a unix socket, where being of the right user is the credential, everybody is asked about.
    pub(crate) async fn admit(&self, ends: &Ends) -> Result<(), PeerError> {
        if matches!(ends, Ends::Tcp { .. }) && !self.spawner.has_dialers() {
            return Ok(());
        }
        let told = self.ask(ends).await;
        if let Err(error) = &told {
            // Once: who is refused may try without end, and shall not fill the log.
            if self.has_warned.swap(true, Ordering::Relaxed) {
                tracing::debug!(%ends, "{error}");
            } else {
                tracing::warn!(%ends, "{error} (more of these are logged as debug only)");
            }
        }
        told
    }

    async fn ask(&self, ends: &Ends) -> Result<(), PeerError> {
        let (spawner, asked) = (self.spawner.clone(), ends.clone());
        let untold: fn(String) -> PeerError = match ends {
            Ends::Tcp { .. } => PeerError::Unknown,
            Ends::Unix { .. } => PeerError::Nobody,
        };
        let asked = self.blocking.run(move || match asked {
            Ends::Tcp { peer, local } => question(peer, local, spawner.uids()),
            Ends::Unix { inode, uid, pid } => unix::question(inode, uid, pid, || spawner.ancestors()),
        });
        match timeout(walk::DEADLINE, asked).await {
            Ok(Ok(asked)) => match asked? {
                Some(inode) => judge(self.looks.holder(inode).await.map_err(|error| untold(error.to_string()))?, untold),
                None => Ok(()),
            },
            Ok(Err(lost)) => Err(untold(lost.to_string())),
            Err(_elapsed) => Err(untold(format!("the kernel did not answer within {} s", walk::DEADLINE.as_secs()))),
        }
    }
}

/// Whether a connection is served, by the holder of its other end.
fn judge(held: Held, untold: fn(String) -> PeerError) -> Result<(), PeerError> {
    match held {
        Held::Others => Ok(()),
        Held::Descendant(pid) => Err(PeerError::Descendant(pid)),
        Held::Unseen => Err(untold("no visible process holds its other end".to_owned())),
    }
}

/// Whether a connection may be served, or the number of the socket whose holders have to be known for that.
/// `uids` are those that sandboxes may have.
fn question(peer: SocketAddr, local: SocketAddr, uids: Option<UidRange>) -> Result<Option<u32>, PeerError> {
    let [peer, local] = [peer, local].map(canonical);
    let unknown = |text: &'static str| move |error: io::Error| PeerError::Unknown(format!("{text}: {error}"));
    if !is_of_this_machine(peer) {
        return Ok(None);
    }
    let socket = diag::socket(peer, local).map_err(unknown("sock_diag"))?;
    // One that is closing already may have left its request behind. It belongs to nobody, and some kernels say it is root's.
    let Some(socket) = socket.filter(is_held) else {
        return Err(PeerError::Unknown("its other end is closed or not of this machine".to_owned()));
    };
    // Confined processes have no capability and never gain one, so their sockets are of the gateway's own user, or of one that
    // sandboxes have.
    let own = [rustix::process::getuid(), rustix::process::geteuid()];
    let is_of_sandbox = uids.is_some_and(|uids| uids.contains(socket.uid));
    if !is_of_sandbox && !own.iter().any(|uid| uid.as_raw() == socket.uid) {
        return Ok(None);
    }
    Ok(Some(socket.inode))
}

/// A listener on all addresses of both families writes those of IPv4 in the form of IPv6, and the other end does not.
fn canonical(mut address: SocketAddr) -> SocketAddr {
    address.set_ip(address.ip().to_canonical());
    address
}

fn is_held(socket: &Socket) -> bool {
    socket.state == diag::ESTABLISHED && socket.inode != 0
}

/// Whether an address is one of this machine's, which is what may be bound. Any other answer than that it is not counts as yes:
/// then it must also be found whose it is. Neither end needs to be on loopback: a process reaches any of the machine's
/// addresses from any other.
fn is_of_this_machine(mut address: SocketAddr) -> bool {
    address.set_port(0);
    match UdpSocket::bind(address) {
        Ok(_bound) => true,
        Err(error) => error.kind() != io::ErrorKind::AddrNotAvailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    /// No process: nobody descends from it.
    const NOBODY: u32 = u32::MAX;

    /// The whole way of a question without the task.
    pub(super) fn told(inode: Option<u32>, spawner: u32, untold: fn(String) -> PeerError) -> Result<(), PeerError> {
        let Some(inode) = inode else { return Ok(()) };
        let until = std::time::Instant::now() + walk::DEADLINE;
        let found = walk::look(&[inode], || vec![spawner], until).map_err(|error| untold(error.to_string()))?;
        judge(found.get(&inode).cloned().unwrap_or(Held::Unseen), untold)
    }

    fn tell(peer: SocketAddr, local: SocketAddr, spawner: u32) -> Result<(), PeerError> {
        told(question(peer, local, None)?, spawner, PeerError::Unknown)
    }

    #[test]
    fn one_holder_that_was_started_here_is_enough_to_refuse() {
        let (listener, client, _server) = connected();
        let (local, peer) = (listener.local_addr().unwrap(), client.local_addr().unwrap());
        // Another process holds it too, which began later and descends from this one as well.
        #[expect(clippy::disallowed_methods, reason = "another process that holds the socket")]
        let mut child = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .stdout(OwnedFd::from(client.try_clone().unwrap()))
            .spawn()
            .unwrap();
        tell(peer, local, NOBODY).unwrap();
        let inode = question(peer, local, None).unwrap().unwrap();
        let until = std::time::Instant::now() + walk::DEADLINE;
        // The child is the descendant and this process is not; their order in `/proc` does not matter.
        let found = walk::look(&[inode], || vec![child.id()], until).unwrap();
        assert_eq!(found.get(&inode), Some(&Held::Descendant(child.id())));
        assert!(matches!(walk::look(&[inode], Vec::new, std::time::Instant::now()), Err(walk::Untold::Late)));
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    fn connected() -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        (listener, client, server)
    }

    /// Asks until it is refused: another test may just be starting a child, which has a copy of every descriptor until it executes.
    fn refused(peer: SocketAddr, local: SocketAddr) -> String {
        for _attempt in 0..10_000 {
            if let Err(error) = tell(peer, local, NOBODY) {
                return error.to_string();
            }
            std::thread::yield_now();
        }
        panic!("it is still served");
    }

    #[test]
    fn one_look_finds_all_connections_of_a_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let clients: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(local).unwrap()).collect();
        let inode = |client: &TcpStream| question(client.local_addr().unwrap(), local, None).unwrap().unwrap();
        let inodes: Vec<u32> = clients.iter().map(inode).collect();
        for (ancestor, expect) in [(NOBODY, Held::Others), (std::process::id(), Held::Descendant(std::process::id()))] {
            let until = std::time::Instant::now() + walk::DEADLINE;
            let found = walk::look(&inodes, || vec![ancestor], until).unwrap();
            // Another test may just be starting a child, which has a copy of every descriptor until it executes.
            let is_expected = |held: &Held| *held == expect || ancestor != NOBODY && matches!(held, Held::Descendant(_));
            assert!(inodes.iter().all(|inode| found.get(inode).is_some_and(is_expected)), "{expect:?}: {found:?}");
        }
    }

    #[test]
    fn who_connects_is_known_on_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let local = listener.local_addr().unwrap();
            let client = TcpStream::connect(local).unwrap();
            let peer = client.local_addr().unwrap();
            tell(peer, local, NOBODY).unwrap();
            // This very process holds it: it descends from itself.
            assert!(
                matches!(tell(peer, local, std::process::id()), Err(PeerError::Descendant(pid)) if pid == std::process::id())
            );
        }
    }

    #[test]
    fn a_socket_that_is_closing_is_nobodys() {
        let (listener, client, _server) = connected();
        let (local, peer) = (listener.local_addr().unwrap(), client.local_addr().unwrap());
        drop(client);
        assert!(refused(peer, local).contains("closed"));
    }

    #[test]
    fn a_socket_between_two_processes_is_nobodys() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::os::fd::AsFd as _;
        let (listener, client, _server) = connected();
        let (local, peer) = (listener.local_addr().unwrap(), client.local_addr().unwrap());
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [client.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&one, &[io::IoSlice::new(b"x")], &mut ancillary, SendFlags::empty()).unwrap();
        tell(peer, local, NOBODY).unwrap();
        // Its only holder lets go of it: now it lives in the queue of the pair.
        drop(client);
        assert!(refused(peer, local).contains("no visible process"));
    }

    #[tokio::test]
    async fn the_question_can_be_asked_here() {
        let mut tasks = tokio::task::JoinSet::new();
        let (spawner, _sender, _receiver) = crate::helper::spawner::fake::scripted(&mut tasks);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (looks, _never_asked) = Looks::new(spawner.clone());
        let peers = Peers::new(listener.local_addr().ok(), spawner, looks);
        assert_eq!(peers.can_be_told(), Ok(()));
        // Nothing confined was started: nobody is asked about, not even about who cannot be there.
        let ends = Ends::Tcp { peer: "127.0.0.1:1".parse().unwrap(), local: listener.local_addr().unwrap() };
        peers.admit(&ends).await.unwrap();
        for wildcard in ["0.0.0.0:0", "[::]:0"] {
            let listener = TcpListener::bind(wildcard).unwrap();
            let peers = Peers { listener: listener.local_addr().ok(), ..peers.clone() };
            assert_eq!(peers.can_be_told(), Ok(()), "{wildcard}");
        }
    }

    #[test]
    fn who_connects_to_a_wildcard_is_known_by_the_addresses_of_the_connection() {
        for (wildcard, dialled) in
            [("0.0.0.0:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.2"), ("[::]:0", "127.0.0.1"), ("[::]:0", "::1")]
        {
            let listener = TcpListener::bind(wildcard).unwrap();
            let to = SocketAddr::new(dialled.parse().unwrap(), listener.local_addr().unwrap().port());
            let _client = TcpStream::connect(to).unwrap();
            let (server, peer) = listener.accept().unwrap();
            let local = server.local_addr().unwrap();
            tell(peer, local, NOBODY).unwrap();
            let told = tell(peer, local, std::process::id());
            assert!(matches!(told, Err(PeerError::Descendant(_))), "{wildcard} at {dialled}: {told:?}");
        }
    }

    #[test]
    fn what_comes_from_elsewhere_is_nobodys_here() {
        let local = "127.0.0.1:1".parse().unwrap();
        // Addresses for documentation (RFC 5737, RFC 3849), which no machine has.
        for elsewhere in ["192.0.2.1:1", "[2001:db8::1]:1", "[::ffff:192.0.2.1]:1"] {
            tell(elsewhere.parse().unwrap(), local, std::process::id()).unwrap();
        }
        for here in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(tell(here.parse().unwrap(), local, NOBODY).is_err(), "{here}: nobody has this connection");
        }
    }
}

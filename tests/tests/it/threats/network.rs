//! Sockets of the host: of the internet, of unix by path and by abstract name, and of the other families.

use super::{Set, entry, is_root, managed, read_only};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Read as _;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

/// Sends a word by every way that leads out.
const SEND: &str = r#"
import ctypes, os, socket, struct, sys
tcp, udp, path, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "\0" + sys.argv[4]
libc = ctypes.CDLL(None, use_errno=True)

def stream(way, family, address, protocol=0):
    s = socket.socket(family, socket.SOCK_STREAM, protocol)
    s.connect(address)
    s.sendall(way.encode())

def fast_open(way):
    s = socket.socket()
    s.sendto(way.encode(), 0x20000000, ("127.0.0.1", tcp))

def own(family):
    return socket.socket(family, socket.SOCK_DGRAM)

def pair(kind):
    return socket.socketpair(socket.AF_UNIX, kind)[0]

def to(way, s, address):
    s.sendto(way.encode(), address)

def message(way, s, address):
    s.sendmsg([way.encode()], [], 0, address)

def messages(way, s, address):
    # One struct mmsghdr.
    at = struct.pack("H", socket.AF_UNIX) + address.encode() + (b"" if address[0] == "\0" else b"\0")
    at, word = ctypes.create_string_buffer(at, len(at)), ctypes.create_string_buffer(way.encode(), len(way))
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(word), len(way))
    header = (ctypes.c_size_t * 8)(ctypes.addressof(at), len(at), ctypes.addressof(vector), 1, 0, 0, 0, 0)
    if libc.sendmmsg(s.fileno(), header, 1, 0) != 1:
        raise OSError(ctypes.get_errno(), "sendmmsg")

U, I = socket.AF_UNIX, socket.AF_INET
ways = {
    "tcp": lambda w: stream(w, I, ("127.0.0.1", tcp)),
    "mptcp": lambda w: stream(w, I, ("127.0.0.1", tcp), 262),
    "fast-open": fast_open,
    "udp": lambda w: to(w, own(I), ("127.0.0.1", udp)),
    "udp-message": lambda w: message(w, own(I), ("127.0.0.1", udp)),
    "unix-path": lambda w: stream(w, U, path + "/stream"),
    "unix-abstract": lambda w: stream(w, U, name),
}
for kind, address in [("path", path + "/datagram"), ("abstract", name + "-datagram")]:
    for how in [to, message, messages]:
        ways["unix-%s-%s" % (kind, how.__name__)] = lambda w, a=address, h=how: h(w, own(U), a)
        ways["unix-%s-%s-pair" % (kind, how.__name__)] = lambda w, a=address, h=how: h(w, pair(socket.SOCK_DGRAM), a)
# What cannot be pointed elsewhere, shown to be so.
for kind in ["STREAM", "SEQPACKET"]:
    ways["unix-pair-" + kind] = lambda w, k=kind: to(w, pair(getattr(socket, "SOCK_" + k)), path + "/datagram")
for way, act in ways.items():
    try:
        act(way)
    except OSError as error:
        print(way, error, file=sys.stderr)
"#;

/// Who listens outside.
struct Host {
    tcp: TcpListener,
    udp: UdpSocket,
    streams: [UnixListener; 2],
    datagrams: [UnixDatagram; 2],
    name: String,
}

impl Host {
    fn new(set: &Set) -> Self {
        let name = set.place.path("").file_name().unwrap().to_str().unwrap().to_owned();
        let abstract_name = |suffix: &str| SocketAddr::from_abstract_name(format!("{name}{suffix}")).unwrap();
        let host = Self {
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            streams: [
                UnixListener::bind(set.place.path("out/stream")).unwrap(),
                UnixListener::bind_addr(&abstract_name("")).unwrap(),
            ],
            datagrams: [
                UnixDatagram::bind(set.place.path("out/datagram")).unwrap(),
                UnixDatagram::bind_addr(&abstract_name("-datagram")).unwrap(),
            ],
            name,
        };
        host.tcp.set_nonblocking(true).unwrap();
        host.udp.set_nonblocking(true).unwrap();
        host.streams.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        host.datagrams.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        host
    }

    /// The words that came since it was last asked. Who sent them has ended, so that all have arrived.
    fn heard(&self) -> BTreeSet<String> {
        let mut heard = BTreeSet::new();
        let mut buffer = [0; 64];
        let mut hear = |bytes: &[u8]| heard.insert(String::from_utf8_lossy(bytes).into_owned());
        let read = |stream: &mut dyn std::io::Read| {
            let mut words = Vec::new();
            let _cut = stream.read_to_end(&mut words);
            words
        };
        while let Ok((mut stream, _)) = self.tcp.accept() {
            stream.set_nonblocking(false).unwrap();
            hear(&read(stream.by_ref()));
        }
        while let Ok((mut stream, _)) = self.streams[0].accept().or_else(|_| self.streams[1].accept()) {
            stream.set_nonblocking(false).unwrap();
            hear(&read(stream.by_ref()));
        }
        while let Ok(length) = self.udp.recv(&mut buffer) {
            hear(&buffer[..length]);
        }
        while let Ok(length) = self.datagrams[0].recv(&mut buffer).or_else(|_| self.datagrams[1].recv(&mut buffer)) {
            hear(&buffer[..length]);
        }
        heard
    }
}

/// What is heard of a process with namespaces, of one without, and of one that is not confined.
async fn heard(set: &mut Set, host: &Host, sandbox: &Value) -> [BTreeSet<String>; 3] {
    let (tcp, udp) = (host.tcp.local_addr().unwrap().port().to_string(), host.udp.local_addr().unwrap().port().to_string());
    let out = set.at("out");
    let argv = ["python3", "-c", SEND, &tcp, &udp, &out, &host.name];
    let mut all = [const { BTreeSet::new() }; 3];
    for (which, heard) in all.iter_mut().enumerate() {
        set.run_one(which, sandbox, &argv, &json!({})).await;
        *heard = host.heard();
    }
    all
}

#[tokio::test]
async fn no_word_reaches_the_host_when_the_network_is_off() {
    let mut set = Set::new().await;
    let host = Host::new(&set);
    let [with, without, free] = heard(&mut set, &host, &read_only()).await;
    assert_eq!([with, without], [const { BTreeSet::new() }; 2]);
    let internet = ["fast-open", "mptcp", "tcp", "udp", "udp-message"];
    assert_eq!(free.iter().filter(|way| !way.starts_with("unix")).collect::<Vec<_>>(), internet);
    // Both kinds of name by both kinds of socket, each of the three calls, and from a pair; but never from a pair of streams.
    assert_eq!(free.iter().filter(|way| way.starts_with("unix")).count(), 14, "{free:?}");
    assert!(!free.iter().any(|way| way.starts_with("unix-pair")), "{free:?}");
}

#[tokio::test]
async fn with_the_network_on_the_hosts_unix_sockets_stay_out_of_reach() {
    let mut set = Set::new().await;
    let host = Host::new(&set);
    let sandbox = managed(&set.place, "enabled", &[entry("root", "read"), entry("project_roots", "write")]);
    let [with, without, free] = heard(&mut set, &host, &sandbox).await;
    for confined in [&with, &without] {
        assert!(confined.contains("tcp") && confined.contains("udp"), "{confined:?}");
        assert!(!confined.iter().any(|way| way.starts_with("unix")), "{confined:?}");
    }
    assert!(free.iter().any(|way| way.starts_with("unix")), "{free:?}");
}

#[tokio::test]
async fn the_other_families_are_refused() {
    let mut set = Set::new().await;
    for (network, sandbox) in [("off", read_only()), ("on", managed(&set.place, "enabled", &[entry("root", "read")]))] {
        // Packets, raw, vsock, bluetooth, cryptography, netlink of other kinds than routes, XDP.
        for (numbers, needs_root) in [
            ("17,3,768", true),
            ("17,2,768", true),
            ("2,3,1", true),
            ("40,1,0", false),
            ("31,1,3", false),
            ("38,5,0", false),
            ("16,3,4", false),
            ("16,3,15", false),
            ("44,3,0", true),
            // SCTP, SMC, L2TP and UDPLITE of the internet's families: asking for them loads kernel modules.
            ("2,1,132", false),
            ("10,1,132", false),
            ("2,1,256", false),
            ("2,2,115", false),
            ("2,2,136", false),
            ("10,2,136", false),
        ] {
            let [with, without, free] = set.act(&sandbox, "socket", numbers).await;
            assert_eq!([with.as_str(), &without], ["EPERM"; 2], "{numbers}, network {network}");
            // The kernel may not have the family, and says so by another number.
            if is_root() || !needs_root {
                assert_ne!(free, "EPERM", "{numbers}");
            }
        }
    }
}

#[tokio::test]
async fn a_ring_cannot_be_had_with_or_without_network() {
    let mut set = Set::new().await;
    let enabled = managed(&set.place, "enabled", &[entry("root", "read")]);
    for sandbox in [read_only(), enabled] {
        let [with, without, free] = set.act(&sandbox, "io-uring", "-").await;
        assert_eq!([with.as_str(), &without], ["EPERM"; 2]);
        // EFAULT: the kernel looks at what it was given. An administrator may have switched rings off for everybody.
        let is_off = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|value| value.trim() != "0");
        assert!(free == "EFAULT" || is_off, "{free}");
    }
}

//! Sockets of every kind that a listener has, as far as they differ.

use super::loopback::Port;
use super::unix::SocketFile;
use crate::peer::Ends;
use rustix::fs::fstat;
use std::io;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsAcceptor;

/// Where clients arrive.
pub(super) enum Listener {
    Tcp(Port),
    Tls(Port, TlsAcceptor),
    /// With the name by which it is reached, which lives for as long.
    Unix(UnixListener, SocketFile),
}

/// A client's socket before anything was said.
pub(super) enum Socket {
    Tcp(TcpStream),
    /// Nobody has shaken hands yet.
    Tls(TcpStream, TlsAcceptor),
    Unix(UnixStream),
}

impl Listener {
    /// The next client, and whose it is as far as its socket says.
    pub(super) async fn accept(&self) -> io::Result<(Socket, Ends)> {
        match self {
            Self::Tcp(listener) => accept_tcp(listener).await.map(|(socket, ends)| (Socket::Tcp(socket), ends)),
            Self::Tls(listener, acceptor) => {
                accept_tcp(listener).await.map(|(socket, ends)| (Socket::Tls(socket, acceptor.clone()), ends))
            }
            Self::Unix(listener, _file) => {
                let (socket, _nameless) = listener.accept().await?;
                let caller = socket.peer_cred().map_err(of_one_client)?;
                let inode = fstat(&socket).map_err(|errno| of_one_client(errno.into()))?.st_ino;
                let pid = caller.pid().and_then(|pid| u32::try_from(pid).ok());
                Ok((Socket::Unix(socket), Ends::Unix { inode, uid: caller.uid(), pid }))
            }
        }
    }
}

async fn accept_tcp(listener: &Port) -> io::Result<(TcpStream, Ends)> {
    let (socket, peer) = listener.accept().await?;
    // Without this a reply and the notification behind it wait 40 ms for the client's delayed acknowledgement.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!("TCP_NODELAY: {error}");
    }
    let local = socket.local_addr().map_err(of_one_client)?;
    Ok((socket, Ends::Tcp { peer, local }))
}

impl Socket {
    /// Waits for the client's first byte, or for its end.
    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) | Self::Tls(socket, _) => socket.readable().await,
            Self::Unix(socket) => socket.readable().await,
        }
    }

    /// Sends the bytes that fit at once; none to a client that expects TLS.
    pub(super) fn try_write(&self, bytes: &[u8]) {
        let _socket_gone = match self {
            Self::Tcp(socket) => socket.try_write(bytes),
            Self::Unix(socket) => socket.try_write(bytes),
            Self::Tls(..) => Ok(0),
        };
    }
}

/// Says of an error about one accepted socket that it is nothing of the listener.
fn of_one_client(error: io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, error)
}

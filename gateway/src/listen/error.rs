//! Why a server ends with an error.

use super::url::{ExecServerListenUrlParseError, ListenUrl};
use crate::core::StartError;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a server ends with an error.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The URL.
    #[error(transparent)]
    Url(#[from] ExecServerListenUrlParseError),
    /// The address is reachable from other machines, and clients would give no credential.
    #[error(
        "listen on {0}: without a credential only loopback addresses are allowed; leave --insecure-no-auth out, or listen on 127.0.0.1 or [::1]"
    )]
    NotLoopback(SocketAddr),
    /// The address is reachable from other machines, and how much goes on here is nobody's business there.
    #[error("listen on {0} for those who look: only loopback addresses are allowed; use 127.0.0.1 or [::1]")]
    OpenHealth(SocketAddr),
    /// Over a unix socket there is nothing to leave open.
    #[error(
        "listen on unix:{0}: --insecure-no-auth would open nothing, since the kernel itself says who connects to a unix socket, and only the server's own user and root are served; leave it out"
    )]
    NothingToOpen(PathBuf),
    /// A URL that promises TLS, and nothing to show there.
    #[error("listen on {0}: it needs a certificate; give --tls-cert FILE and --tls-key FILE")]
    NoCertificate(ListenUrl),
    /// TLS where there is no network.
    #[error("listen on {0}: TLS is for ws://IP:PORT and wss://IP:PORT; leave the certificate out")]
    NoTls(ListenUrl),
    /// Whose connections those to a unix socket are cannot be told.
    #[error(
        "listen on unix:{path}: who connects cannot be told on this machine ({reason}), and processes that the gateway starts must not; offer sock_diag (CONFIG_UNIX_DIAG) and /proc to it, or listen on ws://127.0.0.1:0"
    )]
    Untold {
        /// The socket.
        path: PathBuf,
        /// What the kernel does not answer.
        reason: String,
    },
    /// A server listens there.
    #[error(
        "listen on unix:{path}: {} listens there already; stop it, or choose another path", server.map_or_else(|| "a server".to_owned(), |pid| format!("process {pid}"))
    )]
    Served {
        /// The socket.
        path: PathBuf,
        /// The process that listens, if the kernel says so.
        server: Option<i32>,
    },
    /// What is there is not ours to remove.
    #[error("listen on unix:{0}: what is there is no socket; remove it, or choose another path")]
    NoSocket(PathBuf),
    /// The system said no.
    #[error("{attempt}: {source}")]
    Io {
        /// What was attempted, on what.
        attempt: String,
        /// What the system said.
        source: io::Error,
    },
    /// The gateway.
    #[error(transparent)]
    Start(#[from] StartError),
}

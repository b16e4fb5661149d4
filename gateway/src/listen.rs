//! The listener: where clients reach the gateway.

mod accept;
mod carry;
mod credential;
mod host;
mod socket;
mod token;
mod unix;

pub use self::credential::{Credential, SecretTooShort, SignedBearer};
pub(crate) use self::token::token_directory;
pub use self::token::token_path;

use self::accept::{FRAME, MESSAGE, Serving, Upgraded};
use self::carry::carry;
use self::credential::Guard;
use self::socket::Listener;
use self::token::TokenFile;
use crate::config::{Config, ExecServerRuntimePaths};
use crate::core::{Gateway, StartError};
use crate::link::Link;
use crate::peer::Peers;
use crate::stdio;
use std::fmt;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Where a server listens unless it is told otherwise: loopback, on a port of the system's choice.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// How long a client may take from its upgrade to `initialized`.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long open HTTP exchanges may hold up the end, and a client's unread messages the end of its connection.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// Upgraded sockets on their way to the gateway.
const UPGRADES: usize = 16;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenUrl {
    /// WebSocket on a literal address; port 0 lets the system choose.
    WebSocket(SocketAddr),
    /// WebSocket over a unix socket at an absolute path, in a directory that exists.
    Unix(PathBuf),
    /// Standard input and output.
    Stdio,
}

/// Why a text is no listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecServerListenUrlParseError {
    /// `ws://` with something that is no literal address and port.
    #[error("invalid websocket --listen URL `{0}`; expected `ws://IP:PORT`")]
    InvalidWebSocketListenUrl(String),
    /// `unix:` with something that is no absolute path.
    #[error("invalid unix --listen URL `{0}`; expected `unix:PATH` with an absolute path")]
    InvalidUnixListenUrl(String),
    /// Another scheme.
    #[error("unsupported --listen URL `{0}`; expected `ws://IP:PORT` or `stdio`, or `unix:PATH`")]
    UnsupportedListenUrl(String),
}

impl std::str::FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if matches!(url, "stdio" | "stdio://") {
            return Ok(Self::Stdio);
        }
        if let Some(path) = url.strip_prefix("unix:") {
            let path = Path::new(path.strip_prefix("//").unwrap_or(path));
            return match path.is_absolute() && path.file_name().is_some() {
                true => Ok(Self::Unix(path.to_owned())),
                false => Err(ExecServerListenUrlParseError::InvalidUnixListenUrl(url.to_owned())),
            };
        }
        match url.strip_prefix("ws://") {
            Some(address) => address
                .parse()
                .map(Self::WebSocket)
                .map_err(|_| ExecServerListenUrlParseError::InvalidWebSocketListenUrl(url.to_owned())),
            None => Err(ExecServerListenUrlParseError::UnsupportedListenUrl(url.to_owned())),
        }
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WebSocket(address) => write!(f, "ws://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Stdio => f.write_str("stdio"),
        }
    }
}

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
    /// Over a unix socket there is nothing to leave open.
    #[error(
        "listen on unix:{0}: --insecure-no-auth would open nothing, since the kernel itself says who connects to a unix socket, and only the server's own user and root are served; leave it out"
    )]
    NothingToOpen(PathBuf),
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

/// The main function of a server: listens at `url`, says where on standard output, and serves until SIGINT, SIGTERM or, on
/// stdio, the end of the input.
///
/// # Errors
/// See [`ListenError`].
pub async fn run_main(url: &str, paths: ExecServerRuntimePaths) -> Result<(), ListenError> {
    serve(url.parse()?, Config::new(paths)).await
}

/// Like [`run_main`], with every choice made by the caller.
///
/// # Errors
/// See [`ListenError`].
pub async fn serve(url: ListenUrl, config: Config) -> Result<(), ListenError> {
    let stop = CancellationToken::new();
    let signals = stop_on_signals(stop.clone())?;
    let served = match url {
        ListenUrl::Stdio => serve_stdio(config, &stop).await,
        url @ (ListenUrl::WebSocket(_) | ListenUrl::Unix(_)) => serve_websocket(url, config, &stop).await,
    };
    signals.abort();
    let _aborted = signals.await;
    served
}

fn stop_on_signals(stop: CancellationToken) -> Result<tokio::task::JoinHandle<()>, ListenError> {
    let watch = |kind| signal(kind).map_err(|source| ListenError::Io { attempt: "watch for signals".to_owned(), source });
    let (mut interrupt, mut terminate) = (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?);
    Ok(tokio::spawn(async move {
        tokio::select! {
            _signal = interrupt.recv() => {}
            _signal = terminate.recv() => {}
        }
        stop.cancel();
    }))
}

async fn serve_stdio(config: Config, stop: &CancellationToken) -> Result<(), ListenError> {
    if config.ceiling.is_none() {
        tracing::warn!("no operator's policy is set: the client itself says what its requests may touch");
    }
    let gateway = Gateway::start(config).await?;
    let (link, carry) = stdio::link(tokio::io::stdin(), tokio::io::stdout());
    gateway.accept(link).await;
    tokio::select! {
        () = carry => {}
        () = stop.cancelled() => {}
    }
    gateway.shutdown().await;
    Ok(())
}

async fn serve_websocket(url: ListenUrl, mut config: Config, stop: &CancellationToken) -> Result<(), ListenError> {
    let (listener, url) = bind(url, &config).await?;
    if let ListenUrl::Unix(path) = &url {
        config.hidden.push(path.clone());
    }
    let (guard, token_files) = guard(&config, &url)?;
    let (connections, hosts) = (config.connections, Arc::from(config.allowed_hosts.clone()));
    let clients_decide = config.ceiling.is_none();
    let gateway = Gateway::start(config).await?;
    let idled = gateway.idled();
    let peers = gateway.peers(url.address());
    warn(&url, &guard, clients_decide, &peers)?;
    let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
    let serving = Serving { upgrades, readiness: gateway.readiness(), peers, guard, hosts, stop: stop.clone() };
    let accepting = tokio::spawn(accept::run(listener, serving, connections));
    let said = writeln!(io::stdout(), "{url}");
    said.map_err(|source| ListenError::Io { attempt: format!("say on standard output where to reach {url}"), source })?;
    let mut sockets = JoinSet::new();
    loop {
        tokio::select! {
            Some(one) = upgraded.recv() => begin(one, &gateway, &mut sockets).await,
            Some(_ended) = sockets.join_next() => {}
            () = idled.cancelled() => stop.cancel(),
            () = stop.cancelled() => break,
        }
    }
    // Who was told that the upgrade succeeds before the stop is served, and hears of the end like everybody else. The last
    // sender goes when nothing is accepted any more and every upgraded socket has arrived here.
    let fenced = async {
        while let Some(one) = upgraded.recv().await {
            begin(one, &gateway, &mut sockets).await;
        }
    };
    let _half_open = tokio::time::timeout(STRAGGLERS, fenced).await;
    accepting.abort();
    gateway.shutdown().await;
    let drained = async { while sockets.join_next().await.is_some() {} };
    let _aborted_below = tokio::time::timeout(STRAGGLERS, drained).await;
    sockets.shutdown().await;
    drop(token_files);
    Ok(())
}

/// Listens, and answers with the URL by which the listener is reached.
async fn bind(url: ListenUrl, config: &Config) -> Result<(Listener, ListenUrl), ListenError> {
    let is_open = matches!(config.credential, Credential::Insecure);
    match url {
        ListenUrl::Unix(path) if is_open => Err(ListenError::NothingToOpen(path)),
        ListenUrl::Unix(path) => {
            let (listener, file) = unix::bind(&path)?;
            Ok((Listener::Unix(listener, file), ListenUrl::Unix(path)))
        }
        ListenUrl::WebSocket(address) if is_open && !address.ip().is_loopback() => Err(ListenError::NotLoopback(address)),
        ListenUrl::WebSocket(address) => {
            let failed = |source| ListenError::Io { attempt: format!("listen on {address}"), source };
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            let local = listener.local_addr().map_err(failed)?;
            Ok((Listener::Tcp(listener), ListenUrl::WebSocket(local)))
        }
        ListenUrl::Stdio => Err(ExecServerListenUrlParseError::UnsupportedListenUrl(url.to_string()).into()),
    }
}

/// Gives an upgraded socket to the gateway.
async fn begin(one: Upgraded, gateway: &Gateway, sockets: &mut JoinSet<()>) {
    let Upgraded { socket, ends, place } = one;
    let (link, end) = Link::pair(format!("websocket JSON-RPC message from exec-server websocket {ends}"), true);
    sockets.spawn(async move {
        carry(socket, end).await;
        drop(place);
    });
    gateway.accept(Link { handshake: Some(HANDSHAKE), ..link.answering_pings() }).await;
}

/// What clients have to show, and the files that say so to those who belong. The files go when they are dropped.
fn guard(config: &Config, url: &ListenUrl) -> Result<(Guard, Vec<TokenFile>), ListenError> {
    let file = match &config.credential {
        Credential::Insecure => return Ok((Guard::Open, Vec::new())),
        // The kernel says who it is. A token is asked for only where the operator says so.
        Credential::Generated { file: None } if url.address().is_none() => return Ok((Guard::Open, Vec::new())),
        Credential::Capability(digest) => return Ok((Guard::Token(*digest, None), Vec::new())),
        Credential::SignedBearer(rules) => return Ok((Guard::Signed(rules.clone()), Vec::new())),
        Credential::Generated { file } => file,
    };
    let token = token::make().map_err(|source| ListenError::Io { attempt: "make a token".to_owned(), source })?;
    let mut files = Vec::new();
    if let Some(path) = file {
        let failed = |source| ListenError::Io { attempt: format!("write the token to {}", path.display()), source };
        files.push(TokenFile::write(path.clone(), &token).map_err(failed)?);
    }
    // For clients of this user on this machine. That it cannot be written is no reason to serve nobody.
    let found = config.token_directory().zip(url.address());
    let found = found.map(|(directory, address)| token::in_directory(&directory, address));
    match found.map(|path| TokenFile::write_in_directory(path, &token)) {
        Some(Ok(file)) => files.push(file),
        Some(Err(error)) => tracing::warn!("clients of this user do not find the token by themselves: {error}"),
        None => {}
    }
    let places: Vec<String> = files.iter().map(|file| file.path().display().to_string()).collect();
    let place = if places.is_empty() { "on its standard error".to_owned() } else { format!("in {}", places.join(" and ")) };
    if file.is_none() {
        // Not by the log, which may go anywhere.
        let told = writeln!(io::stderr(), "token: {token}");
        told.map_err(|source| ListenError::Io { attempt: "say the token on standard error".to_owned(), source })?;
    }
    let hint = format!("send `Authorization: Bearer TOKEN`; the server put its token {place}");
    Ok((Guard::Token(credential::digest_of(&token), Some(hint)), files))
}

/// Says what the operator should know of who may ask for what.
fn warn(url: &ListenUrl, guard: &Guard, clients_decide: bool, peers: &Peers) -> Result<(), ListenError> {
    match (guard, url, clients_decide) {
        (Guard::Open, ListenUrl::WebSocket(_), true) => tracing::warn!(
            "no operator's policy is set and clients give no credential: every program of this machine that reaches {url} says itself what its requests may touch"
        ),
        (Guard::Open, ListenUrl::WebSocket(_), false) => tracing::warn!(
            "clients give no credential: within the operator's policy, every program of this machine that reaches {url} says itself what its requests may touch"
        ),
        (_, _, true) => tracing::warn!("no operator's policy is set: clients themselves say what their requests may touch"),
        (_, _, false) => {}
    }
    match (peers.can_be_told(), url) {
        (Ok(()), _) => Ok(()),
        // Here it is the credential itself: nobody at all could be served.
        (Err(reason), ListenUrl::Unix(path)) => Err(ListenError::Untold { path: path.clone(), reason }),
        (Err(reason), _) => {
            tracing::warn!(
                "whose connection is whose cannot be told on this machine ({reason}): once a confined process with network was started, no new connection from this machine is served; offer sock_diag (CONFIG_INET_DIAG) and /proc to the gateway"
            );
            Ok(())
        }
    }
}

impl ListenUrl {
    /// The address that others dial; none of a unix socket or a stream.
    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::WebSocket(address) => Some(*address),
            Self::Unix(_) | Self::Stdio => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_urls() {
        let parse = |url: &str| url.parse::<ListenUrl>();
        assert_eq!(parse(DEFAULT_LISTEN_URL), Ok(ListenUrl::WebSocket(SocketAddr::from(([127, 0, 0, 1], 0)))));
        assert_eq!(parse("ws://[::1]:9"), Ok(ListenUrl::WebSocket("[::1]:9".parse().unwrap())));
        for unix in ["unix:/run/x", "unix:///run/x"] {
            assert_eq!(parse(unix), Ok(ListenUrl::Unix("/run/x".into())));
        }
        assert_eq!(parse("stdio"), Ok(ListenUrl::Stdio));
        assert_eq!(parse("stdio://"), Ok(ListenUrl::Stdio));
        for (url, expect) in [
            ("ws://localhost:1", "invalid websocket --listen URL `ws://localhost:1`; expected `ws://IP:PORT`"),
            ("ws://127.0.0.1:1/x", "invalid websocket --listen URL `ws://127.0.0.1:1/x`; expected `ws://IP:PORT`"),
            (
                "http://127.0.0.1:1",
                "unsupported --listen URL `http://127.0.0.1:1`; expected `ws://IP:PORT` or `stdio`, or `unix:PATH`",
            ),
            ("unix:run/x", "invalid unix --listen URL `unix:run/x`; expected `unix:PATH` with an absolute path"),
            ("unix:/", "invalid unix --listen URL `unix:/`; expected `unix:PATH` with an absolute path"),
        ] {
            assert_eq!(parse(url).unwrap_err().to_string(), expect);
        }
    }
}

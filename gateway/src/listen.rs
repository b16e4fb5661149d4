//! The listener: where clients reach the gateway.

mod accept;
mod carry;
mod credential;
mod host;
mod token;

pub use self::credential::{Credential, SecretTooShort, SignedBearer};
pub(crate) use self::token::token_directory;
pub use self::token::token_path;

use self::accept::{FRAME, MESSAGE, Serving, Upgraded};
use self::carry::carry;
use self::credential::Guard;
use self::token::TokenFile;
use crate::caller::{Caller, Transport};
use crate::config::{Config, ExecServerRuntimePaths};
use crate::core::{Gateway, StartError};
use crate::link::Link;
use crate::peer::Peers;
use crate::stdio;
use std::io::{self, Write as _};
use std::net::SocketAddr;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenUrl {
    /// WebSocket on a literal address; port 0 lets the system choose.
    WebSocket(SocketAddr),
    /// Standard input and output.
    Stdio,
}

/// Why a text is no listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecServerListenUrlParseError {
    /// `ws://` with something that is no literal address and port.
    #[error("invalid websocket --listen URL `{0}`; expected `ws://IP:PORT`")]
    InvalidWebSocketListenUrl(String),
    /// Another scheme.
    #[error("unsupported --listen URL `{0}`; expected `ws://IP:PORT` or `stdio`")]
    UnsupportedListenUrl(String),
}

impl std::str::FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if matches!(url, "stdio" | "stdio://") {
            return Ok(Self::Stdio);
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
        ListenUrl::WebSocket(address) => serve_websocket(address, config, &stop).await,
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

async fn serve_websocket(address: SocketAddr, config: Config, stop: &CancellationToken) -> Result<(), ListenError> {
    if !address.ip().is_loopback() && matches!(config.credential, Credential::Insecure) {
        return Err(ListenError::NotLoopback(address));
    }
    let failed = |attempt: &str| {
        let attempt = format!("{attempt} {address}");
        move |source| ListenError::Io { attempt, source }
    };
    let listener = TcpListener::bind(address).await.map_err(failed("listen on"))?;
    let local = listener.local_addr().map_err(failed("listen on"))?;
    let (guard, token_files) = guard(&config, local)?;
    let (connections, hosts) = (config.connections, Arc::from(config.allowed_hosts.clone()));
    let clients_decide = config.ceiling.is_none();
    let gateway = Gateway::start(config).await?;
    let idled = gateway.idled();
    let peers = gateway.peers(local);
    warn(local, &guard, clients_decide, &peers);
    let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
    let serving = Serving {
        upgrades,
        readiness: gateway.readiness(),
        metrics: gateway.counters(),
        audit: gateway.audit(),
        peers,
        guard,
        hosts,
        stop: stop.clone(),
    };
    let accepting = tokio::spawn(accept::run(listener, serving, connections));
    writeln!(io::stdout(), "ws://{local}").map_err(failed("say on standard output where to reach"))?;
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

/// Gives an upgraded socket to the gateway.
async fn begin(one: Upgraded, gateway: &Gateway, sockets: &mut JoinSet<()>) {
    let Upgraded { socket, peer, who, place } = one;
    let (link, end) = Link::pair(format!("websocket JSON-RPC message from exec-server websocket {peer}"), true);
    let link = link.of(Caller { transport: Transport::WebSocket, address: peer.to_string(), who });
    sockets.spawn(async move {
        carry(socket, end).await;
        drop(place);
    });
    gateway.accept(Link { handshake: Some(HANDSHAKE), ..link.answering_pings() }).await;
}

/// What clients have to show, and the files that say so to those who belong. The files go when they are dropped.
fn guard(config: &Config, local: SocketAddr) -> Result<(Guard, Vec<TokenFile>), ListenError> {
    let file = match &config.credential {
        Credential::Insecure => return Ok((Guard::Open, Vec::new())),
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
    let found = config.token_directory().map(|directory| token::in_directory(&directory, local));
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
fn warn(local: SocketAddr, guard: &Guard, clients_decide: bool, peers: &Peers) {
    match (guard, clients_decide) {
        (Guard::Open, true) => tracing::warn!(
            "no operator's policy is set and clients give no credential: every program of this machine that reaches ws://{local} says itself what its requests may touch"
        ),
        (Guard::Open, false) => tracing::warn!(
            "clients give no credential: within the operator's policy, every program of this machine that reaches ws://{local} says itself what its requests may touch"
        ),
        (_, true) => tracing::warn!("no operator's policy is set: clients themselves say what their requests may touch"),
        (_, false) => {}
    }
    if let Err(reason) = peers.can_be_told() {
        tracing::warn!(
            "whose connection is whose cannot be told on this machine ({reason}): once a confined process with network was started, no new connection from this machine is served; offer sock_diag (CONFIG_INET_DIAG) and /proc to the gateway"
        );
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
        assert_eq!(parse("stdio"), Ok(ListenUrl::Stdio));
        assert_eq!(parse("stdio://"), Ok(ListenUrl::Stdio));
        for (url, expect) in [
            ("ws://localhost:1", "invalid websocket --listen URL `ws://localhost:1`; expected `ws://IP:PORT`"),
            ("ws://127.0.0.1:1/x", "invalid websocket --listen URL `ws://127.0.0.1:1/x`; expected `ws://IP:PORT`"),
            ("http://127.0.0.1:1", "unsupported --listen URL `http://127.0.0.1:1`; expected `ws://IP:PORT` or `stdio`"),
        ] {
            assert_eq!(parse(url).unwrap_err().to_string(), expect);
        }
    }
}

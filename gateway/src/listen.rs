//! The listener: where clients reach the gateway.

mod accept;
mod carry;
mod credential;
mod error;
mod health;
mod host;
mod loopback;
mod pending;
mod socket;
mod tls;
mod token;
mod unix;
mod upgrade;
mod url;

pub use self::credential::{Credential, SecretTooShort, SignError, SignedBearer};
pub use self::error::ListenError;
pub(crate) use self::health::Health;
pub use self::tls::{Tls, TlsError};
pub(crate) use self::token::token_directory;
pub use self::token::token_path;
pub use self::url::{ExecServerListenUrlParseError, ListenUrl};

use self::accept::{Serving, Upgraded, Upgrades};
use self::carry::{Patience, carry};
use self::credential::{Ground, Guard};
use self::loopback::Port;
use self::pending::PendingConnections;
use self::socket::Listener;
use self::token::TokenFile;
use crate::caller::{Caller, Transport};
use crate::config::{Config, ExecServerRuntimePaths};
use crate::core::Gateway;
use crate::link::Link;
use crate::peer::{Ends, Peers};
use crate::stdio;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::resolve::Machine;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Where a server listens unless it is told otherwise: loopback, on a port of the system's choice.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// How long open HTTP exchanges may hold up the end, and a client's unread messages the end of its connection.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// Upgraded sockets on their way to the gateway.
const UPGRADES: usize = 16;

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
    if config.tls.is_some() && url.address().is_none() {
        return Err(ListenError::NoTls(url));
    }
    let stop = CancellationToken::new();
    let mut signals = stop_on_signals(stop.clone())?;
    let served = match url {
        ListenUrl::Stdio => serve_stdio(config, &stop).await,
        url => serve_websocket(url, config, &stop).await,
    };
    signals.shutdown().await;
    served
}

/// Cancels at SIGINT or SIGTERM, for as long as the one task that is answered is not dropped.
pub(crate) fn stop_on_signals(stop: CancellationToken) -> Result<JoinSet<()>, ListenError> {
    let watch = |kind| signal(kind).map_err(|source| ListenError::Io { attempt: "watch for signals".to_owned(), source });
    let (mut interrupt, mut terminate) = (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?);
    let mut watching = JoinSet::new();
    watching.spawn(async move {
        tokio::select! {
            _signal = interrupt.recv() => {}
            _signal = terminate.recv() => {}
        }
        stop.cancel();
    });
    Ok(watching)
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
    let patience = Patience { handshake: config.handshake, ping: config.ping, silence: config.silence };
    let (connections, hosts) = (config.connections, Arc::from(config.allowed_hosts.clone()));
    let clients_decide = config.ceiling.is_none();
    let gateway = Gateway::start(config).await?;
    let idled = gateway.idled();
    let peers = gateway.peers(url.address());
    warn(&url, &guard, clients_decide, &peers)?;
    let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
    let serving = Serving {
        upgrades: Some(Upgrades::new(upgrades, connections)),
        readiness: gateway.readiness(),
        metrics: gateway.counters(),
        audit: gateway.audit(),
        peers,
        guard,
        hosts,
        deadline: patience.handshake,
        stop: stop.clone(),
    };
    let accepting = tokio::spawn(accept::run(listener, serving, PendingConnections::new(connections)));
    let said = writeln!(io::stdout(), "{url}");
    said.map_err(|source| ListenError::Io { attempt: format!("say on standard output where to reach {url}"), source })?;
    let mut sockets = JoinSet::new();
    loop {
        tokio::select! {
            Some(one) = upgraded.recv() => begin(one, &gateway, patience, &mut sockets).await,
            Some(_ended) = sockets.join_next() => {}
            () = idled.cancelled() => stop.cancel(),
            () = stop.cancelled() => break,
        }
    }
    // Who was told that the upgrade succeeds before the stop is served, and hears of the end like everybody else. The last
    // sender goes when nothing is accepted any more and every upgraded socket has arrived here.
    let fenced = async {
        while let Some(one) = upgraded.recv().await {
            begin(one, &gateway, patience, &mut sockets).await;
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
        ListenUrl::WebSocketTls(_) if config.tls.is_none() => Err(ListenError::NoCertificate(url)),
        ListenUrl::WebSocket(address) | ListenUrl::WebSocketTls(address) => {
            if is_open && !address.ip().is_loopback() {
                return Err(ListenError::NotLoopback(address));
            }
            let failed = |source| ListenError::Io { attempt: format!("listen on {address}"), source };
            let listener = Port::bind(address).await.map_err(failed)?;
            let local = listener.local_addr().map_err(failed)?;
            Ok(match &config.tls {
                Some(tls) => (Listener::Tls(listener, tls.acceptor()), ListenUrl::WebSocketTls(local)),
                None => (Listener::Tcp(listener), ListenUrl::WebSocket(local)),
            })
        }
        ListenUrl::Stdio => Err(ExecServerListenUrlParseError::UnsupportedListenUrl(url.to_string()).into()),
    }
}

/// Gives an upgraded socket to the gateway.
async fn begin(one: Upgraded, gateway: &Gateway, patience: Patience, sockets: &mut JoinSet<()>) {
    let Upgraded { upgrading, ends, admitted, place } = one;
    let (link, end) = Link::pair(format!("websocket JSON-RPC message from exec-server websocket {ends}"), true);
    let transport = match &ends {
        Ends::Tcp { .. } => Transport::WebSocket,
        Ends::Unix { .. } => Transport::Unix,
    };
    let link = link.of(Caller { transport, address: ends.to_string(), who: admitted.who });
    sockets.spawn(async move {
        if let Some(socket) = upgrading.socket(carry::config()).await {
            carry(socket, end, patience).await;
        }
        drop(place);
    });
    gateway
        .accept(Link { handshake: Some(patience.handshake), scope: admitted.scope, ..link.answering_pings().carrying_binary() })
        .await;
}

/// What clients have to show, and the files that say so to those who belong. The files go when they are dropped.
fn guard(config: &Config, url: &ListenUrl) -> Result<(Guard, Vec<TokenFile>), ListenError> {
    let file = match &config.credential {
        Credential::Insecure => return Ok((Guard::Open, Vec::new())),
        // The kernel or a certificate says who it is. A token is asked for only where the operator says so.
        Credential::Generated { file: None } if url.address().is_none() || config.tls.as_ref().is_some_and(Tls::asks_clients) => {
            return Ok((Guard::Known, Vec::new()));
        }
        Credential::Capability(digest) => return Ok((Guard::Token(*digest, None), Vec::new())),
        Credential::SignedBearer(rules) => return Ok((Guard::Signed(rules.clone(), ground(config)), Vec::new())),
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

/// Where the policies of tokens are to hold: on this machine, with the home of the server's user.
fn ground(config: &Config) -> Ground {
    let home = config.variable("HOME").and_then(|home| AbsolutePath::new(home).ok());
    Ground { machine: Machine::here(config.variable("TMPDIR")), home }
}

/// Says what the operator should know of who may ask for what.
fn warn(url: &ListenUrl, guard: &Guard, clients_decide: bool, peers: &Peers) -> Result<(), ListenError> {
    match (guard, clients_decide) {
        (Guard::Open, true) => tracing::warn!(
            "no operator's policy is set and clients give no credential: every program of this machine that reaches {url} says itself what its requests may touch"
        ),
        (Guard::Open, false) => tracing::warn!(
            "clients give no credential: within the operator's policy, every program of this machine that reaches {url} says itself what its requests may touch"
        ),
        (_, true) => tracing::warn!("no operator's policy is set: clients themselves say what their requests may touch"),
        (_, false) => {}
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

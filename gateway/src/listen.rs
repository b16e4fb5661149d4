//! The listener: where clients reach the gateway.

mod carry;

use self::carry::carry;
use crate::config::{Config, ExecServerRuntimePaths};
use crate::core::{Gateway, Readiness, StartError};
use crate::link::Link;
use crate::peer::Peers;
use crate::stdio;
use axum::Router;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Where a server listens unless it is told otherwise: loopback, on a port of the system's choice.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// Bytes of one WebSocket frame, and of one message in several.
const FRAME: usize = 16 << 20;
const MESSAGE: usize = 64 << 20;
/// Bytes that are read from a socket at a time. Each connection holds as many, also while it is idle: with 128 KiB that was most
/// of its memory, and a message of 1 MiB is no faster for it.
const READ_BUFFER: usize = 8 << 10;
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
    /// The address is reachable from other machines, and this version asks clients for no credential.
    #[error(
        "listen on {0}: only loopback addresses are allowed, since this version asks clients for no credential; listen on 127.0.0.1 or [::1] and forward the port"
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
    if !address.ip().is_loopback() {
        return Err(ListenError::NotLoopback(address));
    }
    let failed = |attempt: &str| {
        let attempt = format!("{attempt} {address}");
        move |source| ListenError::Io { attempt, source }
    };
    let listener = TcpListener::bind(address).await.map_err(failed("listen on"))?;
    let local = listener.local_addr().map_err(failed("listen on"))?;
    let clients_decide = config.ceiling.is_none();
    let gateway = Gateway::start(config).await?;
    let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
    writeln!(io::stdout(), "ws://{local}").map_err(failed("say on standard output where to reach"))?;
    let bound = if clients_decide {
        "no operator's policy is set and clients give no credential: every program of this machine that reaches"
    } else {
        "clients give no credential: within the operator's policy, every program of this machine that reaches"
    };
    tracing::warn!("{bound} ws://{local} says itself what its requests may touch");
    let peers = gateway.peers(local);
    if let Err(reason) = peers.can_be_told() {
        tracing::warn!(
            "whose connection is whose cannot be told on this machine ({reason}): once a confined process with network was started, no new connection is served; offer sock_diag (CONFIG_INET_DIAG) and /proc to the gateway"
        );
    }
    let listener = axum::serve::ListenerExt::tap_io(listener, |socket| {
        // Without this a reply and the notification behind it wait 40 ms for the client's delayed acknowledgement.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
    });
    let app = routes(Serving { upgrades: Arc::new(upgrades), readiness: gateway.readiness(), peers })
        .into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let mut server = tokio::spawn(server.into_future());
    let mut sockets = tokio::task::JoinSet::new();
    let ended = loop {
        tokio::select! {
            ended = &mut server => break Some(ended),
            Some(Upgraded { socket, peer }) = upgraded.recv() => {
                let (link, end) = Link::pair(format!("websocket JSON-RPC message from exec-server websocket {peer}"), true);
                gateway.accept(link.answering_pings()).await;
                sockets.spawn(carry(socket, end));
            }
            Some(_ended) = sockets.join_next() => {}
            () = stop.cancelled() => break None,
        }
    };
    gateway.shutdown().await;
    let ended = match ended {
        Some(ended) => Some(ended),
        None => tokio::time::timeout(STRAGGLERS, &mut server).await.ok(),
    };
    server.abort();
    let drained = async { while sockets.join_next().await.is_some() {} };
    let _aborted_below = tokio::time::timeout(STRAGGLERS, drained).await;
    sockets.shutdown().await;
    match ended {
        Some(Ok(Err(source))) => Err(failed("accept on")(source)),
        _ => Ok(()),
    }
}

#[derive(Debug)]
struct Upgraded {
    socket: WebSocket,
    peer: SocketAddr,
}

/// What requests need.
#[derive(Debug, Clone)]
struct Serving {
    upgrades: Arc<mpsc::Sender<Upgraded>>,
    readiness: Readiness,
    peers: Peers,
}

fn routes(serving: Serving) -> Router {
    Router::new()
        .route("/readyz", get(ready))
        .route("/livez", get(StatusCode::OK))
        .route("/", any(upgrade))
        .layer(middleware::from_fn(refuse_browsers))
        .with_state(serving)
}

async fn ready(State(serving): State<Serving>) -> StatusCode {
    if serving.readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Browsers send an Origin, programs do not: a web page must not reach a gateway on its reader's machine.
async fn refuse_browsers(request: Request, next: Next) -> Response {
    if request.headers().contains_key(header::ORIGIN) { StatusCode::FORBIDDEN.into_response() } else { next.run(request).await }
}

async fn upgrade(
    State(serving): State<Serving>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    upgrade: WebSocketUpgrade,
) -> Response {
    if let Err(error) = serving.peers.admit(peer).await {
        return (StatusCode::FORBIDDEN, format!("{error}\n")).into_response();
    }
    upgrade.max_frame_size(FRAME).max_message_size(MESSAGE).read_buffer_size(READ_BUFFER).on_upgrade(move |socket| async move {
        let _shutting_down = serving.upgrades.send(Upgraded { socket, peer }).await;
    })
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

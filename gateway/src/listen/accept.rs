//! Accepting: from a socket of the system to a WebSocket that is handed to the gateway.
//!
//! Each accepted socket is a task with a deadline until it is upgraded or has answered. The number of sockets has a bound. Once
//! the server stops, what is still in line is answered with 503 before the listener is closed, so that nobody is accepted and
//! then dropped without a word.

use super::credential::Guard;
use super::host;
use crate::audit::{Audit, Entry};
use crate::caller::Who;
use crate::core::Readiness;
use crate::metrics::{Metrics, Refused};
use crate::peer::Peers;
use axum::Router;
use axum::body::Body;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Bytes of one WebSocket frame, and of one message in several.
pub(super) const FRAME: usize = 16 << 20;
pub(super) const MESSAGE: usize = 64 << 20;
/// Bytes that are read from a socket at a time. Each connection holds as many, also while it is idle: with 128 KiB that was most
/// of its memory, and a message of 1 MiB is no faster for it.
const READ_BUFFER: usize = 8 << 10;
/// What a scrape is written in.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Bytes of a request's line and headers.
const HEADERS: usize = 32 << 10;
/// How long a socket may take until it is upgraded, or has sent its one request and taken the answer. One deadline for all: a
/// place must not be held by somebody who shows no credential, however busy.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long the listener waits after the system refused to accept, as when descriptors have run out.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// What requests need.
#[derive(Debug, Clone)]
pub(super) struct Serving {
    pub(super) upgrades: mpsc::Sender<Upgraded>,
    pub(super) readiness: Readiness,
    pub(super) metrics: Arc<Metrics>,
    pub(super) audit: Option<Audit>,
    pub(super) peers: Peers,
    pub(super) guard: Guard,
    /// What a `Host` header may name beside addresses.
    pub(super) hosts: Arc<[String]>,
    /// Cancelled once the server stops: nobody is upgraded any more.
    pub(super) stop: CancellationToken,
}

impl Serving {
    /// Counts and records that a client is not let in.
    async fn refused(&self, reason: Refused, peer: SocketAddr) {
        self.metrics.refused(reason);
        if let Some(audit) = &self.audit {
            let (peer, on) = (Some(peer.to_string().into()), json!({"reason": reason.name()}));
            audit.refused(Entry { action: "connect", outcome: "denied", peer, on, ..Entry::default() }).await;
        }
    }
}

/// A client's socket, and its place among those that there may be.
#[derive(Debug)]
pub(super) struct Upgraded {
    pub(super) socket: WebSocket,
    pub(super) peer: SocketAddr,
    pub(super) who: Who,
    pub(super) place: Arc<OwnedSemaphorePermit>,
}

/// Accepts until the server stops, and then serves nobody more. `connections` is the bound of sockets, upgraded ones included.
pub(super) async fn run(listener: TcpListener, serving: Serving, connections: usize) {
    let places = Arc::new(Semaphore::new(connections));
    let app = routes(serving.clone());
    let mut sockets = JoinSet::new();
    let begin = |socket: TcpStream, peer: SocketAddr, sockets: &mut JoinSet<()>| {
        // Without this a reply and the notification behind it wait 40 ms for the client's delayed acknowledgement.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
        match Arc::clone(&places).try_acquire_owned() {
            Ok(place) => drop(sockets.spawn(serve(socket, peer, place, app.clone()))),
            Err(_full) => {
                serving.metrics.refused(Refused::Full);
                refuse(&socket, connections);
            }
        }
    };
    loop {
        let accepted = tokio::select! {
            biased;
            () = serving.stop.cancelled() => break,
            Some(_ended) = sockets.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, peer)) => begin(socket, peer, &mut sockets),
            Err(error) if is_of_one_client(&error) => {}
            Err(error) => {
                tracing::warn!("accept: {error}");
                tokio::select! {
                    () = sleep(AFTER_ERROR) => {}
                    () = serving.stop.cancelled() => break,
                }
            }
        }
    }
    while let Some(Ok((socket, peer))) = listener.accept().now_or_never() {
        begin(socket, peer, &mut sockets);
    }
    drop(listener);
    while sockets.join_next().await.is_some() {}
}

/// Answers the one request of a socket, or upgrades it.
async fn serve(socket: TcpStream, peer: SocketAddr, place: OwnedSemaphorePermit, app: Router) {
    let place = Arc::new(place);
    let local = match socket.local_addr() {
        Ok(local) => local,
        Err(error) => return tracing::debug!(%peer, "its own address: {error}"),
    };
    let service = hyper::service::service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let (app, place) = (app.clone(), Arc::clone(&place));
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Arrival { peer, local, place });
        async move {
            let mut answer = app.oneshot(request).await?;
            // Not by a setting of the whole socket, which would say so of an upgrade too.
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<Response, Infallible>(answer)
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .max_buf_size(HEADERS)
        .serve_connection(TokioIo::new(socket), service)
        .with_upgrades();
    // It ends with the upgrade, so what follows that has time.
    match timeout(DEADLINE, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, "http: {error}"),
        Err(_elapsed) => tracing::debug!(%peer, "http: neither upgraded nor answered within {} s", DEADLINE.as_secs()),
    }
}

/// Where a request came from.
#[derive(Debug, Clone)]
struct Arrival {
    peer: SocketAddr,
    /// The address that it reached.
    local: SocketAddr,
    place: Arc<OwnedSemaphorePermit>,
}

fn routes(serving: Serving) -> Router {
    Router::new()
        .route("/readyz", get(ready))
        .route("/livez", get(StatusCode::OK))
        .route("/metrics", get(metrics))
        .route("/", any(upgrade))
        .layer(middleware::from_fn_with_state(serving.clone(), refuse_pages))
        .with_state(serving)
}

async fn ready(State(serving): State<Serving>) -> StatusCode {
    let is_ready = serving.readiness.is_ready() && !serving.stop.is_cancelled();
    if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Who connects from this machine may look, as at whether it is ready. From elsewhere, what an upgrade asks for is asked for: how
/// much goes on here is nobody's business.
async fn metrics(
    State(serving): State<Serving>,
    Extension(Arrival { peer, local, .. }): Extension<Arrival>,
    headers: HeaderMap,
) -> Response {
    if !local.ip().to_canonical().is_loopback()
        && let Err(text) = serving.guard.admit(&headers)
    {
        serving.refused(Refused::Auth, peer).await;
        return (StatusCode::UNAUTHORIZED, text).into_response();
    }
    if let Err(error) = serving.peers.admit(peer, local).await {
        serving.refused(Refused::Peer, peer).await;
        return (StatusCode::FORBIDDEN, format!("{error}\n")).into_response();
    }
    ([(header::CONTENT_TYPE, METRICS_TYPE)], serving.metrics.text()).into_response()
}

/// Browsers send an Origin, programs do not: a web page must not reach a gateway on its reader's machine, also not by a name of
/// its own that leads here.
async fn refuse_pages(
    State(serving): State<Serving>,
    Extension(Arrival { peer, .. }): Extension<Arrival>,
    request: Request,
    next: Next,
) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        serving.refused(Refused::Origin, peer).await;
        return StatusCode::FORBIDDEN.into_response();
    }
    if !host::is_allowed(request.headers(), &serving.hosts) {
        serving.refused(Refused::Host, peer).await;
        let text = "refused: the Host of this request is no address; use one, or localhost, or start the server with --allow-host NAME\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    next.run(request).await
}

async fn upgrade(
    State(serving): State<Serving>,
    Extension(Arrival { peer, local, place }): Extension<Arrival>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let who = match serving.guard.admit(&headers) {
        Ok(who) => who,
        Err(text) => {
            serving.refused(Refused::Auth, peer).await;
            return (StatusCode::UNAUTHORIZED, text).into_response();
        }
    };
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(refusal) => return refusal.into_response(),
    };
    if serving.stop.is_cancelled() {
        serving.metrics.refused(Refused::Stopping);
        return (StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down; nothing was done\n").into_response();
    }
    if let Err(error) = serving.peers.admit(peer, local).await {
        serving.refused(Refused::Peer, peer).await;
        return (StatusCode::FORBIDDEN, format!("{error}\n")).into_response();
    }
    let upgrade = upgrade.max_frame_size(FRAME).max_message_size(MESSAGE).read_buffer_size(READ_BUFFER);
    upgrade.on_upgrade(move |socket| async move {
        let _shutting_down = serving.upgrades.send(Upgraded { socket, peer, who, place }).await;
    })
}

/// The answer to a socket too many, as far as the system takes it at once.
fn refuse(socket: &TcpStream, connections: usize) {
    let text = format!("at most {connections} connections are served; try again later\n");
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{text}",
        text.len()
    );
    let _socket_gone = socket.try_write(answer.as_bytes());
}

/// Errors of `accept(2)` that say that one client gave up, and nothing of the listener.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused)
}

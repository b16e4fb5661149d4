//! Accepting: from a socket of the system to a WebSocket that is handed to the gateway.
//!
//! Each accepted socket is a task with a deadline until it is upgraded or has answered. Until then it is pending
//! ([`super::pending`]) and does not count against the bound of connections. A client takes one of these places once its request,
//! its credential and the process at its other end were checked. Once the server stops, what is still in line is answered with 503
//! before the listener is closed, so that each accepted client gets an answer.

use super::credential::{Admitted, Guard};
use super::host;
use super::pending::{Added, Key, PendingConnections, Progress, Source};
use super::socket::{Listener, Socket};
use super::tls;
use super::upgrade::{Upgrade, Upgrading};
use crate::audit::{Audit, Entry};
use crate::metrics::{Metrics, Refused};
use crate::peer::{Ends, Peers};
use crate::readiness::Readiness;
use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// What a scrape is written in.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Bytes of a request's line and headers.
const HEADERS: usize = 32 << 10;
/// How long the listener waits after the system refused to accept, as when descriptors have run out.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// What requests need.
#[derive(Debug, Clone)]
pub(super) struct Serving {
    /// None: no connection is upgraded, and there is only something to look at.
    pub(super) upgrades: Option<Upgrades>,
    pub(super) readiness: Readiness,
    pub(super) metrics: Arc<Metrics>,
    pub(super) audit: Option<Audit>,
    pub(super) peers: Peers,
    pub(super) guard: Guard,
    /// What a `Host` header may name beside addresses.
    pub(super) hosts: Arc<[String]>,
    /// How long a socket may take until it is upgraded, or has sent its one request and taken the answer. One deadline for all: a
    /// client without a credential must not stay, however busy it is.
    pub(super) deadline: Duration,
    /// Cancelled once the server stops: nobody is upgraded any more.
    pub(super) stop: CancellationToken,
}

/// Where upgraded sockets go, and the bound of them.
#[derive(Debug, Clone)]
pub(super) struct Upgrades {
    to: mpsc::Sender<Upgraded>,
    places: Arc<Semaphore>,
    most: usize,
}

impl Upgrades {
    /// At most so many are connected at a time.
    pub(super) fn new(to: mpsc::Sender<Upgraded>, most: usize) -> Self {
        Self { to, places: Arc::new(Semaphore::new(most)), most }
    }

    fn is_full(&self) -> bool {
        self.places.available_permits() == 0
    }
}

impl Serving {
    /// Counts and records that a client is not let in.
    async fn refused(&self, reason: Refused, ends: &Ends) {
        self.metrics.refused(reason);
        if let Some(audit) = &self.audit {
            let (peer, on) = (Some(ends.to_string().into()), json!({"reason": reason.name()}));
            audit.refused(Entry { action: "connect", outcome: "denied", peer, on, ..Entry::default() }).await;
        }
    }
}

/// A client's socket, and its place among those that there may be.
#[derive(Debug)]
pub(super) struct Upgraded {
    pub(super) upgrading: Upgrading,
    pub(super) ends: Ends,
    pub(super) admitted: Admitted,
    pub(super) place: OwnedSemaphorePermit,
}

/// Accepts until the server stops, and then serves no more clients. Upgraded sockets are not among the pending ones.
pub(super) async fn run(listener: Listener, serving: Serving, mut pending: PendingConnections) {
    let app = routes(serving.clone());
    let mut sockets = JoinSet::new();
    let mut has_warned = false;
    let mut begin = |(socket, ends): (Socket, Ends), pending: &mut PendingConnections, sockets: &mut JoinSet<Key>| {
        let Added { key, progress, closed, is_full } = pending.add(Source::of(&ends, serving.peers.user(&ends)));
        if is_full {
            serving.metrics.refused(Refused::Silent);
            if !std::mem::replace(&mut has_warned, true) {
                tracing::warn!("more than {} connections are pending: for each new one another is closed", pending.bound());
            }
        }
        let (app, deadline) = (app.clone(), serving.deadline);
        sockets.spawn(async move {
            serve(socket, Arrival { ends, progress }, app, deadline, closed).await;
            key
        });
    };
    loop {
        let accepted = tokio::select! {
            biased;
            () = serving.stop.cancelled() => break,
            Some(ended) = sockets.join_next() => {
                // One that panicked stays until it is the oldest.
                ended.into_iter().for_each(|key| pending.remove(key));
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(arrived) => begin(arrived, &mut pending, &mut sockets),
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
    while let Some(Ok(arrived)) = listener.accept().now_or_never() {
        begin(arrived, &mut pending, &mut sockets);
    }
    drop(listener);
    while sockets.join_next().await.is_some() {}
}

/// Answers the one request of a socket, or upgrades it. If it is closed for another one before it sent anything, it is told so.
async fn serve(socket: Socket, arrival: Arrival, app: Router, deadline: Duration, mut closed: oneshot::Receiver<()>) {
    let (ends, until) = (arrival.ends.clone(), Instant::now() + deadline);
    // Before the first byte there is nothing to be kept for a connection but the socket.
    let began = tokio::select! {
        biased;
        _gone = &mut closed => {
            return socket.try_write(unavailable("too many connections have sent no request; try again later").as_bytes());
        }
        began = timeout_at(until, socket.readable()) => began,
    };
    let served = async {
        match socket {
            Socket::Tcp(socket) => answer(socket, arrival, app).await?,
            Socket::Unix(socket) => answer(socket, arrival, app).await?,
            Socket::Tls(socket, acceptor) if tls::begins_with_tls(&socket).await? => {
                answer(acceptor.accept(socket).await?, arrival, app).await?;
            }
            Socket::Tls(socket, _acceptor) => tls::refuse_plain(socket).await?,
        }
        Ok::<(), Box<dyn Error + Send + Sync>>(())
    };
    let served = async {
        began??;
        timeout_at(until, served).await?
    };
    // It ends with the upgrade, so what follows that has time.
    tokio::select! {
        biased;
        _gone = closed => tracing::debug!(%ends, "http: closed for another connection before its request was whole"),
        served = served => match served {
            Ok(()) => {}
            Err(error) if error.is::<Elapsed>() => {
                tracing::debug!(%ends, "http: neither upgraded nor answered within {} s", deadline.as_secs());
            }
            Err(error) => tracing::debug!(%ends, "http: {error}"),
        },
    }
}

/// The same over any stream.
async fn answer<S>(stream: S, arrival: Arrival, app: Router) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let app = app.clone();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(arrival.clone());
        let progress = arrival.progress.clone();
        async move {
            progress.began();
            let mut answer = app.oneshot(request).await?;
            // Not by a setting of the whole socket, which would say so of an upgrade too.
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                progress.ended();
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<Response, Infallible>(answer)
        }
    });
    hyper::server::conn::http1::Builder::new()
        .max_buf_size(HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
}

/// Where a request came from.
#[derive(Debug, Clone)]
struct Arrival {
    ends: Ends,
    progress: Progress,
}

fn routes(serving: Serving) -> Router {
    let looks = Router::new().route("/readyz", get(ready)).route("/livez", get(StatusCode::OK)).route("/metrics", get(metrics));
    let all = if serving.upgrades.is_some() { looks.route("/", any(upgrade)) } else { looks };
    all.layer(middleware::from_fn_with_state(serving.clone(), refuse_pages)).with_state(serving)
}

async fn ready(State(serving): State<Serving>) -> Response {
    let full = serving.upgrades.as_ref().filter(|upgrades| upgrades.is_full());
    let full = full.map(|Upgrades { most, .. }| {
        format!("max-connections: all {most} connections are in use, and new clients are refused until one ends")
    });
    match serving.readiness.obstacle().or(full) {
        None if !serving.stop.is_cancelled() => StatusCode::OK.into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Some(text) => (StatusCode::SERVICE_UNAVAILABLE, format!("{text}\n")).into_response(),
    }
}

/// Who connects from this machine may look, as at whether it is ready. From elsewhere, what an upgrade asks for is asked for: how
/// much goes on here is nobody's business.
async fn metrics(
    State(serving): State<Serving>,
    Extension(Arrival { ends, .. }): Extension<Arrival>,
    headers: HeaderMap,
) -> Response {
    let is_elsewhere = matches!(&ends, Ends::Tcp { local, .. } if !local.ip().to_canonical().is_loopback());
    if is_elsewhere {
        let refusal = match serving.guard.admit(&headers) {
            Ok(admitted) if admitted.is_scoped() => {
                Some((StatusCode::FORBIDDEN, "this token is for connections alone".to_owned()))
            }
            Ok(_admitted) => None,
            Err(text) => Some((StatusCode::UNAUTHORIZED, text)),
        };
        if let Some(refusal) = refusal {
            serving.refused(Refused::Auth, &ends).await;
            return refusal.into_response();
        }
    }
    if let Err(error) = serving.peers.admit(&ends).await {
        serving.refused(Refused::Peer, &ends).await;
        return (StatusCode::FORBIDDEN, format!("{error}\n")).into_response();
    }
    ([(header::CONTENT_TYPE, METRICS_TYPE)], serving.metrics.text()).into_response()
}

/// Browsers send an Origin, programs do not: a web page must not reach a gateway on its reader's machine, also not by a name of
/// its own that leads here.
async fn refuse_pages(
    State(serving): State<Serving>,
    Extension(Arrival { ends, .. }): Extension<Arrival>,
    request: Request,
    next: Next,
) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        serving.refused(Refused::Origin, &ends).await;
        return StatusCode::FORBIDDEN.into_response();
    }
    if !host::is_allowed(request.headers(), &serving.hosts) {
        serving.refused(Refused::Host, &ends).await;
        let text = "refused: the Host of this request is no address; use one, or localhost, or start the server with --allow-host NAME\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    next.run(request).await
}

async fn upgrade(
    State(serving): State<Serving>,
    Extension(Arrival { ends, .. }): Extension<Arrival>,
    mut request: Request,
) -> Response {
    let admitted = match serving.guard.admit(request.headers()) {
        Ok(admitted) => admitted,
        Err(text) => {
            serving.refused(Refused::Auth, &ends).await;
            return (StatusCode::UNAUTHORIZED, text).into_response();
        }
    };
    let upgrade = match Upgrade::of(&mut request) {
        Ok(upgrade) => upgrade,
        Err(refusal) => return refusal.into_response(),
    };
    if serving.stop.is_cancelled() {
        return stopping(&serving.metrics);
    }
    if let Err(error) = serving.peers.admit(&ends).await {
        serving.refused(Refused::Peer, &ends).await;
        return (StatusCode::FORBIDDEN, format!("{error}\n")).into_response();
    }
    let Some(upgrades) = &serving.upgrades else { return stopping(&serving.metrics) };
    let Ok(place) = Arc::clone(&upgrades.places).try_acquire_owned() else {
        serving.metrics.refused(Refused::Full);
        let text = format!("at most {} connections are served; try again later\n", upgrades.most);
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let (answer, upgrading) = upgrade.answer();
    match upgrades.to.send(Upgraded { upgrading, ends, admitted, place }).await {
        Ok(()) => answer,
        Err(_shutting_down) => stopping(&serving.metrics),
    }
}

fn stopping(metrics: &Metrics) -> Response {
    metrics.refused(Refused::Stopping);
    (StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down; nothing was done\n").into_response()
}

/// A whole answer that the server cannot serve a client now.
fn unavailable(text: &str) -> String {
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{text}\n",
        text.len() + 1
    )
}

/// Errors of `accept(2)` that say that one client gave up, and nothing of the listener.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused)
}

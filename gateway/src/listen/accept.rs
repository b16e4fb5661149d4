//! Accepting: from a socket of the system to a WebSocket that is handed to the gateway.
//!
//! Each accepted socket is a task with a deadline until it is upgraded or has answered. The number of sockets has a bound. Once
//! the server stops, what is still in line is answered with 503 before the listener is closed, so that nobody is accepted and
//! then dropped without a word.

use super::credential::{Admitted, Guard};
use super::host;
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
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
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
    /// None: nobody is upgraded, and there is only something to look at.
    pub(super) upgrades: Option<mpsc::Sender<Upgraded>>,
    pub(super) readiness: Readiness,
    pub(super) metrics: Arc<Metrics>,
    pub(super) audit: Option<Audit>,
    pub(super) peers: Peers,
    pub(super) guard: Guard,
    /// What a `Host` header may name beside addresses.
    pub(super) hosts: Arc<[String]>,
    /// How long a socket may take until it is upgraded, or has sent its one request and taken the answer. One deadline for all: a
    /// place must not be held by somebody who shows no credential, however busy.
    pub(super) deadline: Duration,
    /// Cancelled once the server stops: nobody is upgraded any more.
    pub(super) stop: CancellationToken,
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
    pub(super) place: Arc<OwnedSemaphorePermit>,
}

/// Accepts until the server stops, and then serves nobody more. `connections` is the bound of sockets, upgraded ones included.
pub(super) async fn run(listener: Listener, serving: Serving, connections: usize) {
    let places = Arc::new(Semaphore::new(connections));
    let app = routes(serving.clone());
    let mut sockets = JoinSet::new();
    let begin = |(socket, ends): (Socket, Ends), sockets: &mut JoinSet<()>| match Arc::clone(&places).try_acquire_owned() {
        Ok(place) => drop(sockets.spawn(serve(socket, Arrival { ends, place: Arc::new(place) }, app.clone(), serving.deadline))),
        Err(_full) => {
            serving.metrics.refused(Refused::Full);
            refuse(&socket, connections);
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
            Ok(arrived) => begin(arrived, &mut sockets),
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
        begin(arrived, &mut sockets);
    }
    drop(listener);
    while sockets.join_next().await.is_some() {}
}

/// Answers the one request of a socket, or upgrades it.
async fn serve(socket: Socket, arrival: Arrival, app: Router, deadline: Duration) {
    let ends = arrival.ends.clone();
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
    // It ends with the upgrade, so what follows that has time.
    match timeout(deadline, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%ends, "http: {error}"),
        Err(_elapsed) => tracing::debug!(%ends, "http: neither upgraded nor answered within {} s", deadline.as_secs()),
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
        async move {
            let mut answer = app.oneshot(request).await?;
            // Not by a setting of the whole socket, which would say so of an upgrade too.
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
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
    place: Arc<OwnedSemaphorePermit>,
}

fn routes(serving: Serving) -> Router {
    let looks = Router::new().route("/readyz", get(ready)).route("/livez", get(StatusCode::OK)).route("/metrics", get(metrics));
    let all = if serving.upgrades.is_some() { looks.route("/", any(upgrade)) } else { looks };
    all.layer(middleware::from_fn_with_state(serving.clone(), refuse_pages)).with_state(serving)
}

async fn ready(State(serving): State<Serving>) -> Response {
    match serving.readiness.obstacle() {
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
    Extension(Arrival { ends, place }): Extension<Arrival>,
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
    let (answer, upgrading) = upgrade.answer();
    match upgrades.send(Upgraded { upgrading, ends, admitted, place }).await {
        Ok(()) => answer,
        Err(_shutting_down) => stopping(&serving.metrics),
    }
}

fn stopping(metrics: &Metrics) -> Response {
    metrics.refused(Refused::Stopping);
    (StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down; nothing was done\n").into_response()
}

/// The answer to a socket too many, as far as the system takes it at once.
fn refuse(socket: &Socket, connections: usize) {
    let text = format!("at most {connections} connections are served; try again later\n");
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{text}",
        text.len()
    );
    socket.try_write(answer.as_bytes());
}

/// Errors of `accept(2)` that say that one client gave up, and nothing of the listener.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused)
}

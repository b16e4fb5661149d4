//! Accepting: from a socket of the system, over TLS if it is spoken here, to one answer or an upgrade.

use axum::Router;
use axum::extract::Request;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// Sockets at a time, upgraded ones included: descriptors are finite. One more is closed.
pub(super) const SOCKETS: usize = 4096;
/// How long a socket may take until it is upgraded or has its answer, shaking hands included: nobody holds a place by being slow.
const EXCHANGE: Duration = Duration::from_secs(10);
/// Bytes of a request's line and headers.
const HEADERS: usize = 32 * 1024;
/// How long the listener waits after the system refused to accept, as when descriptors have run out.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// A socket's place among those that there may be; it is free when the last copy is gone.
pub(super) type Place = Arc<OwnedSemaphorePermit>;

/// Accepts until the stop is told, and ends when every exchange has. `sockets` is how many there may be.
pub(super) async fn run(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    app: Router,
    sockets: usize,
    mut stop: watch::Receiver<()>,
) {
    let places = Arc::new(Semaphore::new(sockets));
    let acceptor = tls.map(TlsAcceptor::from);
    let mut exchanges = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            _told = stop.changed() => break,
            Some(_ended) = exchanges.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            // One too many is dropped, which closes it.
            Ok((socket, _peer)) => {
                if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
                    exchanges.spawn(exchange(socket, acceptor.clone(), app.clone(), Arc::new(place)));
                }
            }
            Err(error) if is_of_one_client(&error) => {}
            Err(error) => {
                tracing::warn!("accept: {error}");
                tokio::select! {
                    () = sleep(AFTER_ERROR) => {}
                    _told = stop.changed() => break,
                }
            }
        }
    }
    drop(listener);
    while exchanges.join_next().await.is_some() {}
}

/// Answers the one request of a socket, or upgrades it.
async fn exchange(socket: TcpStream, acceptor: Option<TlsAcceptor>, app: Router, place: Place) {
    let exchanged = async {
        // Without this a frame waits 40 ms for the delayed acknowledgement of the one before it.
        socket.set_nodelay(true)?;
        match acceptor {
            Some(acceptor) => answer(acceptor.accept(socket).await?, app, place).await?,
            None => answer(socket, app, place).await?,
        }
        Ok::<(), Box<dyn Error + Send + Sync>>(())
    };
    // It ends with the upgrade, so what follows that has time.
    match timeout(EXCHANGE, exchanged).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("http: {error}"),
        Err(_elapsed) => tracing::debug!("http: neither upgraded nor answered within {} s", EXCHANGE.as_secs()),
    }
}

async fn answer<S>(stream: S, app: Router, place: Place) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let app = TowerToHyperService::new(app);
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let mut request: Request = request.map(axum::body::Body::new);
        request.extensions_mut().insert(Arc::clone(&place));
        hyper::service::Service::call(&app, request)
    });
    hyper::server::conn::http1::Builder::new()
        .max_buf_size(HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
}

/// Errors of `accept(2)` that say that one client gave up, and nothing of the listener.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

    /// What is answered to one request: nothing, if there was no place.
    async fn answered(mut socket: TcpStream) -> String {
        let mut answer = String::new();
        // A socket that was closed with the request unread is reset.
        let _reset = async {
            socket.write_all(REQUEST).await?;
            socket.read_to_string(&mut answer).await
        }
        .await;
        answer
    }

    #[tokio::test]
    async fn sockets_are_bounded_and_one_more_is_closed() {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, until) = watch::channel(());
        let mut accepting = JoinSet::new();
        accepting.spawn(run(listener, None, Router::new().route("/", get(|| async {})), 2, until));
        let held = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        assert_eq!(answered(TcpStream::connect(address).await.unwrap()).await, "");
        let [first, second] = held;
        // A place is free when its socket has its answer, which both ends see.
        assert!(answered(first).await.starts_with("HTTP/1.1 200"));
        let mut third = String::new();
        while third.is_empty() {
            third = answered(TcpStream::connect(address).await.unwrap()).await;
        }
        assert!(third.starts_with("HTTP/1.1 200"));
        assert!(answered(second).await.starts_with("HTTP/1.1 200"));
        drop(stop);
        accepting.join_all().await;
    }
}

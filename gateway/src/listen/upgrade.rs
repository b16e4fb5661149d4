//! From a request to a WebSocket (RFC 6455 section 4.2).

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

/// A WebSocket of a client.
pub(super) type WebSocket = WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>;

/// A request that asks for a WebSocket, and may have one.
#[derive(Debug)]
pub(super) struct Upgrade {
    accept: HeaderValue,
    on: OnUpgrade,
}

/// What becomes a WebSocket once the answer was sent.
#[derive(Debug)]
pub(super) struct Upgrading(OnUpgrade);

impl Upgrade {
    /// Reads what a request asks for.
    ///
    /// # Errors
    /// It asks for something else; the status and the text say what is missing.
    pub(super) fn of(request: &mut Request<Body>) -> Result<Self, (StatusCode, &'static str)> {
        let bad = |text| Err((StatusCode::BAD_REQUEST, text));
        if request.method() != Method::GET {
            return Err((StatusCode::METHOD_NOT_ALLOWED, "Request method must be `GET`"));
        }
        let headers = request.headers();
        if !says(headers, header::CONNECTION, "upgrade") {
            return bad("Connection header did not include 'upgrade'");
        }
        if !says(headers, header::UPGRADE, "websocket") {
            return bad("`Upgrade` header did not include 'websocket'");
        }
        let Some(key) = headers.get(header::SEC_WEBSOCKET_KEY) else {
            return bad("`Sec-WebSocket-Key` header missing");
        };
        if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
            return bad("`Sec-WebSocket-Version` header did not include '13'");
        }
        let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()));
        let Ok(accept) = accept else { return bad("`Sec-WebSocket-Key` header cannot be answered") };
        match request.extensions_mut().remove::<OnUpgrade>() {
            Some(on) => Ok(Self { accept, on }),
            None => Err((StatusCode::UPGRADE_REQUIRED, "this connection cannot be upgraded")),
        }
    }

    /// The answer, and what follows it.
    pub(super) fn answer(self) -> (Response, Upgrading) {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, self.accept);
        (answer, Upgrading(self.on))
    }
}

impl Upgrading {
    /// The WebSocket; none if the client left before.
    pub(super) async fn socket(self, config: WebSocketConfig) -> Option<WebSocket> {
        let upgraded = TokioIo::new(self.0.await.ok()?);
        Some(WebSocketStream::from_raw_socket(upgraded, Role::Server, Some(config)).await)
    }
}

/// Whether a header names this among others, in any case.
fn says(headers: &HeaderMap, name: header::HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|part| part.trim().eq_ignore_ascii_case(word))
}

//! Requests over HTTP that the server makes.

use crate::client::{decode, gone, text};
use crate::mailbox::{self, Listener};
use crate::task::{Order, Part};
use crate::{ExecServerClient, ExecServerError};
use futures_util::Stream;
use portcullis_protocol::base64::Chunk;
pub use portcullis_protocol::http::HttpHeader;
use serde::{Deserialize, Serialize};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::oneshot;

/// A request that the server makes from where it is.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct HttpRequest {
    /// As in `GET`.
    pub method: String,
    /// `http` or `https`.
    pub url: String,
    /// In their order.
    pub headers: Vec<HttpHeader>,
    /// The body, if there is one.
    #[serde(rename = "bodyBase64", skip_serializing_if = "Option::is_none")]
    pub body: Option<Chunk>,
    /// For the whole of it, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// `follow` or `stop`.
    pub redirect_policy: String,
    /// Names the request among those of this client.
    pub request_id: String,
}

impl HttpRequest {
    /// A request without headers and body that follows redirects. The id names it among those of this client.
    #[must_use]
    pub fn new(request_id: impl Into<String>, method: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            method: method.into(),
            url: url.into(),
            headers: Vec::new(),
            body: None,
            timeout_ms: None,
            redirect_policy: "follow".to_owned(),
            request_id: request_id.into(),
        }
    }
}

/// An answer over HTTP, whatever its status.
#[derive(Debug)]
pub struct HttpResponse {
    /// As in 200.
    pub status: u16,
    /// In their order, names in lower case.
    pub headers: Vec<HttpHeader>,
    /// What comes then.
    pub body: HttpBody,
}

/// The body of an answer: a stream of its bytes, in order. It does not survive a cut of the link, and fails at once then.
/// What is not taken of it holds up the whole client at 8 MiB; dropping it lets the rest go by.
#[derive(Debug)]
pub struct HttpBody(Listener<Part>);

impl HttpBody {
    /// The next part. None at the end.
    pub async fn next(&mut self) -> Option<Result<Vec<u8>, ExecServerError>> {
        std::future::poll_fn(|task| self.0.poll(task)).await
    }
}

impl Stream for HttpBody {
    type Item = Result<Vec<u8>, ExecServerError>;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll(task)
    }
}

#[derive(Deserialize)]
struct Head {
    status: u16,
    #[serde(default)]
    headers: Vec<HttpHeader>,
}

impl ExecServerClient {
    /// Makes a request over HTTP from where the server is. The body comes in parts.
    ///
    /// # Errors
    /// See [`ExecServerError`]. A request that was on its way when the link was cut is [`ExecServerError::Lost`].
    pub async fn http_request(&self, request: &HttpRequest) -> Result<HttpResponse, ExecServerError> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Streamed<'a> {
            #[serde(flatten)]
            request: &'a HttpRequest,
            stream_response: bool,
        }
        let method = "http/request";
        let params = text(method, &Streamed { request, stream_response: true })?;
        let (mailbox, listener) = mailbox::pair(self.bell());
        let (answer, answered) = oneshot::channel();
        let (request, fail_fast) = (request.request_id.clone(), self.is_fail_fast());
        self.send(Order::Http { request, params, fail_fast, mailbox, answer }).await?;
        let (result, _claim) = answered.await.map_err(|_| gone())??;
        let Head { status, headers } = decode(method, result)?;
        Ok(HttpResponse { status, headers, body: HttpBody(listener) })
    }
}

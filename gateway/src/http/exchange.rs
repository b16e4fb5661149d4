//! One request and its answer, over one wire. The wire is driven by whoever waits for something from it, so that nothing runs
//! beside the call.

use super::dial::Way;
use super::request::Request;
use super::{Outbound, failed};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, HOST, HeaderMap, HeaderValue, PROXY_AUTHORIZATION};
use hyper::{StatusCode, Uri};
use hyper_util::rt::TokioIo;
use portcullis_protocol::http::HttpHeader;
use portcullis_protocol::rpc::RpcError;
use std::error::Error as _;
use std::pin::{Pin, pin};
use url::{Host, Position};

/// The head of an answer, and the body that comes then.
pub(crate) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    body: Incoming,
    driver: Driver,
}

/// What moves bytes between a wire and an exchange; none once it has ended.
struct Driver(Option<Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>>);

impl Outbound {
    /// Sends a request to its place and waits for the head of the answer.
    pub(super) async fn exchange(&self, request: &Request) -> Result<Answer, RpcError> {
        let (host, port) = request.target().ok_or_else(|| failed("the URL has no host"))?;
        self.check_host_header(request)?;
        let Way { wire, proxy } = self.dial(&request.url, &host, port).await?;
        let whole = match proxy {
            Some(_) => &request.url[..Position::AfterQuery],
            None => &request.url[Position::BeforePath..Position::AfterQuery],
        };
        let uri = whole.parse::<Uri>().map_err(|error| failed(format!("the URL cannot be sent: {error}")))?;
        let mut message = hyper::Request::new(Full::new(request.body.clone()));
        (*message.method_mut(), *message.uri_mut()) = (request.method.clone(), uri);
        *message.headers_mut() = request.headers.clone();
        complete(message.headers_mut(), request)?;
        if let Some(credentials) = proxy.and_then(|proxy| proxy.credentials) {
            message.headers_mut().insert(PROXY_AUTHORIZATION, credentials);
        }
        let sent = |error: hyper::Error| failed(format!("error sending request to {host}:{port}: {}", causes(&error)));
        let (mut sender, connection) = http1::handshake(TokioIo::new(wire)).await.map_err(sent)?;
        let mut driver = Driver(Some(Box::pin(connection)));
        let answer = driver.drive(sender.send_request(message)).await.map_err(sent)?;
        let (head, body) = answer.into_parts();
        Ok(Answer { status: head.status, headers: head.headers, body, driver })
    }

    /// Behind one address many hosts may be served: under a rule the host that is asked for is the one that was judged.
    fn check_host_header(&self, request: &Request) -> Result<(), RpcError> {
        let authority = authority(request);
        let other =
            request.headers.get_all(HOST).iter().find(|value| !value.as_bytes().eq_ignore_ascii_case(authority.as_bytes()));
        match other {
            Some(_) if self.egress != super::egress::Egress::Open => Err(failed(format!(
                "its Host header is not `{authority}`, and the operator's egress rule holds for both, so nothing was sent: leave it out"
            ))),
            _ => Ok(()),
        }
    }
}

impl Answer {
    /// The length that it announces.
    pub(super) fn length(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    /// The next bytes of the body; none at its end.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, String>> {
        loop {
            match self.driver.drive(self.body.frame()).await? {
                // Trailers have no place on this wire.
                Ok(frame) => match frame.into_data() {
                    Ok(bytes) if !bytes.is_empty() => return Some(Ok(bytes)),
                    _ => {}
                },
                Err(error) => return Some(Err(causes(&error))),
            }
        }
    }

    /// The head as clients get it. A value that is no UTF-8 cannot be written in JSON, and is left out.
    pub(crate) fn head(&self) -> (u16, Vec<HttpHeader>) {
        let value = |value: &HeaderValue| std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned);
        let headers = self.headers.iter().filter_map(|(name, text)| {
            Some(HttpHeader { name: name.as_str().to_owned(), value: value(text)?, value_env_var: None })
        });
        (self.status.as_u16(), headers.collect())
    }
}

impl Driver {
    /// Waits for something from the wire, and moves what must move until then.
    async fn drive<T>(&mut self, awaited: impl Future<Output = T>) -> T {
        let mut awaited = pin!(awaited);
        std::future::poll_fn(|task| {
            // How it ended is told to who waits for the answer or the body.
            if self.0.as_mut().is_some_and(|connection| connection.as_mut().poll(task).is_ready()) {
                self.0 = None;
            }
            awaited.as_mut().poll(task)
        })
        .await
    }
}

/// What every request says. The length is counted when it is sent.
fn complete(headers: &mut HeaderMap, request: &Request) -> Result<(), RpcError> {
    headers.entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
    let host =
        HeaderValue::from_str(&authority(request)).map_err(|error| failed(format!("the URL's host cannot be sent: {error}")))?;
    headers.entry(HOST).or_insert(host);
    Ok(())
}

/// Host and port of the URL, as its Host header has them.
fn authority(request: &Request) -> String {
    let host = request.url.host().map(|host: Host<&str>| host.to_string()).unwrap_or_default();
    request.url.port().map_or_else(|| host.clone(), |port| format!("{host}:{port}"))
}

/// What went wrong, with what was behind it.
fn causes(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

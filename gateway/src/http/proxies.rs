//! Proxies that the server's environment names, as curl reads them.

use super::failed;
use crate::config::Config;
use hyper::Uri;
use hyper::header::HeaderValue;
use hyper_util::client::proxy::matcher::Matcher;
use portcullis_protocol::rpc::RpcError;
use std::fmt;
use url::{Host, Url};

/// Which proxy stands before which place.
pub(super) struct Proxies(Matcher);

/// One proxy.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) host: Host,
    pub(super) port: u16,
    /// It is spoken to over TLS.
    pub(super) is_secure: bool,
    /// What it asks for.
    pub(super) credentials: Option<HeaderValue>,
}

impl fmt::Debug for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Proxies").field(&self.0).finish()
    }
}

impl Proxies {
    /// From `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, or the same in lower case.
    pub(super) fn new(config: &Config) -> Self {
        let first = |names: [&str; 2]| {
            let value = names.into_iter().find_map(|name| config.variable(name));
            value.and_then(|value| value.to_str()).unwrap_or_default().to_owned()
        };
        // Where a web server starts us, HTTP_PROXY is a header that its client chose (CVE-2016-5385).
        if config.variable("REQUEST_METHOD").is_some() {
            return Self(Matcher::builder().build());
        }
        let matcher = Matcher::builder()
            .all(first(["ALL_PROXY", "all_proxy"]))
            .http(first(["HTTP_PROXY", "http_proxy"]))
            .https(first(["HTTPS_PROXY", "https_proxy"]))
            .no(first(["NO_PROXY", "no_proxy"]));
        Self(matcher.build())
    }

    /// The proxy that stands before a URL, if one does.
    pub(super) fn before(&self, url: &Url) -> Result<Option<Proxy>, RpcError> {
        let uri = url.as_str().parse::<Uri>().map_err(|error| failed(format!("the URL cannot be sent: {error}")))?;
        let Some(found) = self.0.intercept(&uri) else { return Ok(None) };
        let scheme = found.uri().scheme_str().unwrap_or("http");
        let (is_secure, usual) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            other => {
                return Err(failed(format!(
                    "the server's environment names a proxy of kind {other}, which is not supported: name one of kind http or \
                     https there, or exempt this host by NO_PROXY"
                )));
            }
        };
        let host = Host::parse(found.uri().host().unwrap_or_default());
        let host = host.map_err(|error| failed(format!("the proxy of the server's environment has no host: {error}")))?;
        let port = found.uri().port_u16().unwrap_or(usual);
        Ok(Some(Proxy { host, port, is_secure, credentials: found.basic_auth().cloned() }))
    }
}

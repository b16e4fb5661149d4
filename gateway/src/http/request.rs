//! A request over HTTP, checked: what does not parse is never sent.

use super::wrong;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use portcullis_protocol::http::{HttpHeader, HttpRequestParams, RedirectPolicy};
use portcullis_protocol::rpc::RpcError;
use std::ffi::OsString;
use tokio::time::{Duration, Instant};
use url::{Host, Url};

/// Bytes of a request's id, which comes again with each part of its answer.
const LONGEST_ID: usize = 1024;
/// Characters of a URL in a text.
const SHOWN: usize = 300;

/// Headers that speak of one hop of the way. That hop is ours, so those of the client are left out; so is the length, which is
/// counted here.
const OF_THE_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
];

/// One request to one place.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(super) method: Method,
    /// `http` or `https`, with a host, without user and fragment.
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) follows: bool,
    /// When all of it must be over.
    pub(super) deadline: Option<Instant>,
}

impl Request {
    /// Checks what the client sent. Variables that headers name are taken from the server's environment.
    pub(crate) fn new(params: HttpRequestParams, environment: &[(OsString, OsString)]) -> Result<Self, RpcError> {
        if params.request_id.len() > LONGEST_ID {
            return Err(wrong(format!(
                "http/request: requestId has {} bytes, at most {LONGEST_ID} are allowed",
                params.request_id.len()
            )));
        }
        let method = Method::from_bytes(params.method.as_bytes())
            .map_err(|error| wrong(format!("http/request: method is invalid: {error}")))?;
        let mut url =
            Url::parse(&params.url).map_err(|error| wrong(format!("http/request {method}: url is invalid: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") {
            let text = format!("http/request {method}: only supports http and https URLs, got {}", url.scheme());
            return Err(wrong(text));
        }
        let attempt = attempt(&method, &url);
        let mut headers = HeaderMap::new();
        for header in &params.headers {
            let (name, value) = read(header, environment).map_err(|text| wrong(format!("{attempt}: {text}")))?;
            if !OF_THE_HOP.contains(&name.as_str()) {
                let added = headers.try_append(name, value);
                added.map_err(|error| wrong(format!("{attempt}: {} headers: {error}", params.headers.len())))?;
            }
        }
        if let Some(credentials) = take_user(&mut url)
            && !headers.contains_key(AUTHORIZATION)
        {
            headers.insert(AUTHORIZATION, credentials);
        }
        url.set_fragment(None);
        Ok(Self {
            method,
            url,
            headers,
            body: params.body.map(|body| Bytes::from(body.0)).unwrap_or_default(),
            follows: params.redirect_policy == RedirectPolicy::Follow,
            deadline: params.timeout_ms.and_then(|time| Instant::now().checked_add(Duration::from_millis(time))),
        })
    }

    /// What is attempted, in words.
    pub(crate) fn attempt(&self) -> String {
        attempt(&self.method, &self.url)
    }

    /// When all of it must be over, the body of the answer included.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Where it goes by its URL.
    pub(super) fn target(&self) -> Option<(Host, u16)> {
        Some((self.url.host()?.to_owned(), self.url.port_or_known_default()?))
    }
}

/// As in `http/request GET https://host/path`: without query and user, which may be secrets.
fn attempt(method: &Method, url: &Url) -> String {
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let text = format!("http/request {method} {}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path());
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn read(header: &HttpHeader, environment: &[(OsString, OsString)]) -> Result<(HeaderName, HeaderValue), String> {
    let shown = &header.name;
    let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|error| format!("header name is invalid: {error}"))?;
    let mut value = header.value.clone().into_bytes();
    if let Some(variable) = &header.value_env_var {
        let own = environment.iter().find(|(key, _)| key == variable.as_str());
        let (_, more) = own.ok_or_else(|| format!("header {shown} requires executor environment variable {variable}"))?;
        if more.is_empty() {
            return Err(format!("header {shown} requires a non-empty executor environment variable {variable}"));
        }
        value.extend_from_slice(more.as_encoded_bytes());
    }
    let mut value = HeaderValue::from_bytes(&value).map_err(|error| format!("header value is invalid for {shown}: {error}"))?;
    // What comes from the server's environment is a secret; so are these by custom.
    value.set_sensitive(header.value_env_var.is_some() || matches!(name.as_str(), "authorization" | "cookie"));
    Ok((name, value))
}

/// Takes user and password out of a URL, as the header that they stand for.
pub(super) fn take_user(url: &mut Url) -> Option<HeaderValue> {
    let is_there = !url.username().is_empty() || url.password().is_some();
    let mut plain = decoded(url.username());
    plain.push(b':');
    plain.extend(decoded(url.password().unwrap_or_default()));
    let (_no_user, _no_password) = (url.set_username(""), url.set_password(None));
    let text = format!("Basic {}", portcullis_protocol::base64::encode(&plain));
    let mut value = HeaderValue::from_str(&text).ok().filter(|_| is_there)?;
    value.set_sensitive(true);
    Some(value)
}

/// The bytes behind percent escapes; what is none stays as it is.
fn decoded(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, more @ ..] = rest {
        let digit =
            |at: usize| more.get(at).and_then(|digit| char::from(*digit).to_digit(16)).and_then(|digit| u8::try_from(digit).ok());
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push(high << 4 | low);
                rest = &more[2..];
            }
            _ => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::rpc::code;
    use serde_json::json;

    fn request(more: serde_json::Value) -> Result<Request, RpcError> {
        let mut params = json!({"method": "GET", "url": "http://host/p", "requestId": "r"});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let environment =
            [("TOKEN", "secret"), ("EMPTY", ""), ("LINES", "a\nb")].map(|(name, value)| (name.into(), value.into()));
        Request::new(serde_json::from_value(params).unwrap(), &environment)
    }

    #[test]
    fn what_does_not_parse_is_named() {
        for (more, expect) in [
            (json!({"url": "ftp://host/x"}), "http/request GET: only supports http and https URLs, got ftp"),
            (json!({"url": "not a url"}), "http/request GET: url is invalid: relative URL without a base"),
            (json!({"url": "http://"}), "http/request GET: url is invalid: empty host"),
            (json!({"method": "BAD METHOD"}), "http/request: method is invalid: invalid HTTP method"),
            (json!({"method": ""}), "http/request: method is invalid: invalid HTTP method"),
            (
                json!({"headers": [{"name": "bad name", "value": "x"}]}),
                "http/request GET http://host/p: header name is invalid: invalid HTTP header name",
            ),
            (
                json!({"headers": [{"name": "X", "value": "a\nb"}]}),
                "http/request GET http://host/p: header value is invalid for X: failed to parse header value",
            ),
            (
                json!({"headers": [{"name": "X", "value": "a\r\nEvil: b"}]}),
                "http/request GET http://host/p: header value is invalid for X: failed to parse header value",
            ),
            (
                json!({"headers": [{"name": "X", "value": "", "valueEnvVar": "LINES"}]}),
                "http/request GET http://host/p: header value is invalid for X: failed to parse header value",
            ),
            (
                json!({"headers": [{"name": "X", "value": "", "valueEnvVar": "NONE"}]}),
                "http/request GET http://host/p: header X requires executor environment variable NONE",
            ),
            (
                json!({"headers": [{"name": "X", "value": "", "valueEnvVar": "EMPTY"}]}),
                "http/request GET http://host/p: header X requires a non-empty executor environment variable EMPTY",
            ),
        ] {
            let error = request(more).unwrap_err();
            assert_eq!((error.code, error.message.as_str()), (code::INVALID_PARAMS, expect));
        }
        assert!(request(json!({"requestId": "x".repeat(LONGEST_ID + 1)})).is_err());
        assert!(request(json!({"requestId": "x".repeat(LONGEST_ID)})).is_ok());
    }

    #[test]
    fn headers_of_the_hop_are_ours() {
        let names = [&OF_THE_HOP[..], &["x-own", "host", "accept", "user-agent"]].concat();
        let headers: Vec<_> = names.iter().map(|name| json!({"name": name.to_uppercase(), "value": "1"})).collect();
        let made = request(json!({"headers": headers})).unwrap();
        assert_eq!(made.headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-own", "host", "accept", "user-agent"]);
    }

    #[test]
    fn secrets_are_added_and_never_shown() {
        let made = request(json!({
            "url": "http://us%65r:pa%40ss@host/p?token=query#part",
            "headers": [{"name": "X-T", "value": "p-", "valueEnvVar": "TOKEN"}, {"name": "X-T", "value": "2"}],
        }))
        .unwrap();
        let values: Vec<_> = made.headers.get_all("x-t").iter().map(|value| value.to_str().unwrap()).collect();
        assert_eq!(values, ["p-secret", "2"]);
        assert_eq!(made.headers[AUTHORIZATION], "Basic dXNlcjpwYUBzcw==");
        assert_eq!(made.url.as_str(), "http://host/p?token=query");
        assert_eq!(made.attempt(), "http/request GET http://host/p");
        let shown = format!("{:?}", made.headers);
        assert!(!shown.contains("secret") && !shown.contains("dXNl"), "{shown}");
        let own = request(json!({"url": "http://u:p@host/", "headers": [{"name": "Authorization", "value": "X y"}]})).unwrap();
        assert_eq!(own.headers[AUTHORIZATION], "X y");
    }

    #[test]
    fn a_host_has_one_spelling() {
        for (url, host) in
            [("http://BÜCHER.example/", "xn--bcher-kva.example"), ("http://0x7f.1/", "127.0.0.1"), ("http:///x", "x")]
        {
            assert_eq!(request(json!({"url": url})).unwrap().url.host_str(), Some(host));
        }
        let long = request(json!({"url": format!("http://host/{}", "é".repeat(500))})).unwrap().attempt();
        assert!(long.chars().count() == SHOWN + 1 && long.ends_with('…'), "{long}");
    }
}

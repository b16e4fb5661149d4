//! Where an answer points, and what the request becomes on the way there: as browsers do it (the Fetch standard, section 4.4).

use super::failed;
use super::request::{Request, take_user};
use hyper::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION, CONTENT_TYPE, COOKIE, HOST, HeaderMap, HeaderName,
    HeaderValue, LOCATION, REFERER,
};
use hyper::{Method, StatusCode};
use portcullis_protocol::rpc::RpcError;
use url::Url;

/// What only the place that it was meant for may see.
const SECRETS: [HeaderName; 4] = [AUTHORIZATION, COOKIE, HeaderName::from_static("cookie2"), HOST];
/// What speaks of a body that is not sent any more.
const OF_THE_BODY: [HeaderName; 4] = [CONTENT_TYPE, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION];

/// The next request; none if this answer is the result.
pub(super) fn next(request: &Request, status: StatusCode, headers: &HeaderMap) -> Result<Option<Request>, RpcError> {
    let changes = match status {
        StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND => request.method == Method::POST,
        StatusCode::SEE_OTHER => request.method != Method::HEAD,
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => false,
        _ => return Ok(None),
    };
    let place = headers.get(LOCATION).and_then(|place| std::str::from_utf8(place.as_bytes()).ok());
    let Some(mut url) = place.and_then(|place| request.url.join(place).ok()).filter(|_| request.follows) else { return Ok(None) };
    if !matches!(url.scheme(), "http" | "https") {
        return Err(failed(format!("redirect target uses unsupported URL scheme: {}", url.scheme())));
    }
    // No server makes us send what it chose to somebody else.
    let _user_of_the_location = take_user(&mut url);
    url.set_fragment(None);
    let mut next = Request { url, ..request.clone() };
    if changes {
        next.method = Method::GET;
        next.body.clear();
        OF_THE_BODY.iter().for_each(|name| drop(next.headers.remove(name)));
    }
    if next.url.origin() != request.url.origin() {
        SECRETS.iter().for_each(|name| drop(next.headers.remove(name)));
        // What came out of the server's environment (`valueEnvVar`).
        let own = next.headers.iter().filter(|(_, value)| value.is_sensitive()).map(|(name, _)| name.clone());
        own.collect::<Vec<_>>().iter().for_each(|name| drop(next.headers.remove(name)));
    }
    match referer(&request.url, &next.url) {
        Some(value) => drop(next.headers.insert(REFERER, value)),
        None => drop(next.headers.remove(REFERER)),
    }
    Ok(Some(next))
}

/// Where the request comes from: all of it within one origin, the origin to another, nothing from https to http.
fn referer(from: &Url, to: &Url) -> Option<HeaderValue> {
    let text = match (from.origin() == to.origin(), from.scheme(), to.scheme()) {
        (true, ..) => from.as_str().to_owned(),
        (false, "https", "http") => return None,
        (false, ..) => format!("{}/", from.origin().ascii_serialization()),
    };
    HeaderValue::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(method: &str, url: &str, policy: &str) -> Request {
        let mut headers: Vec<_> =
            ["Authorization", "Cookie", "Content-Type", "X-K", "Host"].map(|name| json!({"name": name, "value": "v"})).into();
        headers.push(json!({"name": "X-Own", "value": "", "valueEnvVar": "TOKEN"}));
        let params = json!({"method": method, "url": url, "requestId": "r", "redirectPolicy": policy, "bodyBase64": "aGk=", "headers": headers});
        Request::new(serde_json::from_value(params).unwrap(), &[("TOKEN".into(), "s".into())]).unwrap()
    }

    fn follow(request: &Request, status: u16, place: &str) -> Result<Option<Request>, RpcError> {
        let headers = HeaderMap::from_iter([(LOCATION, HeaderValue::from_str(place).unwrap())]);
        next(request, StatusCode::from_u16(status).unwrap(), &headers)
    }

    #[test]
    fn methods_and_bodies() {
        for (method, status, expect, keeps_body) in [
            ("POST", 301, "GET", false),
            ("POST", 302, "GET", false),
            ("PUT", 301, "PUT", true),
            ("PUT", 303, "GET", false),
            ("HEAD", 303, "HEAD", true),
            ("POST", 307, "POST", true),
            ("POST", 308, "POST", true),
        ] {
            let next = follow(&request(method, "http://a/x?q=1", "follow"), status, "/y#f").unwrap().unwrap();
            assert_eq!((next.method.as_str(), next.url.as_str()), (expect, "http://a/y"), "{method} {status}");
            assert_eq!(
                (!next.body.is_empty(), next.headers.contains_key(CONTENT_TYPE)),
                (keeps_body, keeps_body),
                "{method} {status}"
            );
            assert_eq!(next.headers[REFERER], "http://a/x?q=1");
            assert!(next.headers.contains_key(AUTHORIZATION) && next.headers.contains_key(HOST));
        }
    }

    #[test]
    fn what_is_a_result_itself() {
        for status in [200, 300, 304, 305, 404] {
            assert!(follow(&request("GET", "http://a/", "follow"), status, "/y").unwrap().is_none());
        }
        assert!(follow(&request("GET", "http://a/", "stop"), 302, "/y").unwrap().is_none());
        assert!(follow(&request("GET", "http://a/", "follow"), 302, "http://[bad/").unwrap().is_none());
        assert!(next(&request("GET", "http://a/", "follow"), StatusCode::FOUND, &HeaderMap::new()).unwrap().is_none());
        let error = follow(&request("GET", "http://a/", "follow"), 302, "file:///etc/passwd").unwrap_err();
        assert_eq!(error.message, "redirect target uses unsupported URL scheme: file");
    }

    #[test]
    fn secrets_stay_with_their_origin() {
        let within = follow(&request("GET", "http://a/x", "follow"), 302, "/y").unwrap().unwrap();
        assert!(within.headers.contains_key("x-own") && within.headers.contains_key(AUTHORIZATION), "control");
        for (from, to, refers) in [
            ("http://a/x", "http://b/", Some("http://a/")),
            ("http://a/x", "http://a:81/", Some("http://a/")),
            ("http://a/x", "https://a/", Some("http://a/")),
            ("https://a/x", "http://a/", None),
            ("http://a/x", "http://u:p@b/", Some("http://a/")),
        ] {
            let next = follow(&request("GET", from, "follow"), 302, to).unwrap().unwrap();
            assert!(SECRETS.iter().all(|name| !next.headers.contains_key(name)), "{from} {to}");
            assert!(next.headers.contains_key("x-k") && next.url.username().is_empty());
            assert!(!next.headers.contains_key("x-own"), "out of the server's environment");
            assert_eq!(next.headers.get(REFERER).map(|value| value.to_str().unwrap()), refers, "{from} {to}");
        }
    }
}

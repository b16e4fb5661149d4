//! The `Host` header: a page whose name was bound anew to this machine's address must not reach a listener that serves
//! programs. Such a request names the page's host, which is a name; programs name an address, `localhost`, or a name that the
//! operator gave.

use axum::http::{HeaderMap, header};
use std::net::IpAddr;

/// Whether these headers name a host that may be meant. A request without one comes from no browser.
pub(super) fn is_allowed(headers: &HeaderMap, names: &[String]) -> bool {
    let Some(value) = headers.get(header::HOST) else { return true };
    let Ok(value) = value.to_str() else { return false };
    let host = without_port(value);
    let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    literal.parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || names.iter().any(|name| host.eq_ignore_ascii_case(name))
}

fn without_port(value: &str) -> &str {
    match value.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && (!host.contains(':') || host.ends_with(']')) => {
            host
        }
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn addresses_and_known_names_are_meant_and_others_are_not() {
        let names = ["box.example".to_owned()];
        for (host, expect) in [
            ("127.0.0.1", true),
            ("127.0.0.1:4500", true),
            ("[::1]:4500", true),
            ("[::1]", true),
            ("localhost:1", true),
            ("LOCALHOST", true),
            ("box.example:4500", true),
            ("evil.example", false),
            ("evil.example:4500", false),
            ("127.0.0.1.evil.example", false),
            ("localhost.evil.example:1", false),
            ("box.example.evil:4500", false),
            ("", false),
            (":80", false),
        ] {
            let headers: HeaderMap = [(header::HOST, HeaderValue::from_static(host))].into_iter().collect();
            assert_eq!(is_allowed(&headers, &names), expect, "{host}");
        }
        assert!(is_allowed(&HeaderMap::new(), &names));
    }
}

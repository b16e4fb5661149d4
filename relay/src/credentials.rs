//! What a registry is shown, asked for anew with every request.

mod agent;
mod file;

pub use agent::{AgentFuture, AgentIdentity, OfAgent};
pub use file::CredentialsFile;

use crate::registry::RegistryError;
use crate::wire::is_loopback;
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use url::Url;

/// Headers that are on their way.
pub type Headers<'a> = Pin<Box<dyn Future<Output = Result<HeaderMap, RegistryError>> + Send + 'a>>;

/// What a registry is shown.
pub trait Credentials: fmt::Debug + Send + Sync {
    /// The headers of one request to this registry. They count towards the 10 s that a request may take.
    ///
    /// # Errors
    /// There are none now, or none that this registry may see: [`RegistryError::Unusable`], and nothing is sent.
    fn headers<'a>(&'a self, registry: &'a Url) -> Headers<'a>;
}

/// A token that was made for the registry.
#[derive(Clone)]
pub struct Bearer(HeaderMap);

impl Bearer {
    /// # Errors
    /// It holds what no header can.
    pub fn new(token: &str) -> Result<Self, RegistryError> {
        bearer(token).map(Self)
    }

    /// The same, with the account that it is for in `ChatGPT-Account-ID`.
    ///
    /// # Errors
    /// One of them holds what no header can.
    pub fn of_account(token: &str, account: &str) -> Result<Self, RegistryError> {
        sign_in(token, Some(account)).map(Self)
    }
}

impl Credentials for Bearer {
    fn headers<'a>(&'a self, _registry: &'a Url) -> Headers<'a> {
        Box::pin(async { Ok(self.0.clone()) })
    }
}

/// An API key, which is shown to the hosts that give such keys out, to this machine, and to those that the operator names.
#[derive(Clone)]
pub struct ApiKey {
    headers: HeaderMap,
    allowed_hosts: Vec<String>,
}

impl ApiKey {
    /// # Errors
    /// It holds what no header can.
    pub fn new(key: &str, allowed_hosts: Vec<String>) -> Result<Self, RegistryError> {
        Ok(Self { headers: bearer(key)?, allowed_hosts })
    }
}

impl Credentials for ApiKey {
    fn headers<'a>(&'a self, registry: &'a Url) -> Headers<'a> {
        Box::pin(async { may_see_keys(registry, &self.allowed_hosts).map(|()| self.headers.clone()) })
    }
}

fn bearer(token: &str) -> Result<HeaderMap, RegistryError> {
    Ok(HeaderMap::from_iter([(AUTHORIZATION, secret(&format!("Bearer {}", token.trim()))?)]))
}

/// Of somebody who signed in.
fn sign_in(token: &str, account: Option<&str>) -> Result<HeaderMap, RegistryError> {
    let mut headers = bearer(token)?;
    if let Some(account) = account {
        headers.insert(HeaderName::from_static("chatgpt-account-id"), secret(account)?);
    }
    Ok(headers)
}

fn secret(text: &str) -> Result<HeaderValue, RegistryError> {
    let unusable = |_| RegistryError::Unusable("the registry's token holds what no header can".to_owned());
    let mut value = HeaderValue::from_str(text).map_err(unusable)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Whether the registry's host is one that API keys are for.
fn may_see_keys(url: &Url, allowed: &[String]) -> Result<(), RegistryError> {
    let host = url.host_str().unwrap_or_default();
    let is_usual = ["openai.com", "openai.org"]
        .iter()
        .any(|usual| host.strip_suffix(usual).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')));
    let is_allowed = is_usual || allowed.iter().any(|name| name.eq_ignore_ascii_case(host));
    if is_loopback(url) || (url.scheme() == "https" && is_allowed) {
        return Ok(());
    }
    let text = "remote exec-server API-key authentication is restricted to HTTPS openai.com and openai.org hosts and subdomains or loopback hosts; admit another one with --remote-allow-host HOST, or give a token of that registry's own";
    Err(RegistryError::Unusable(text.to_owned()))
}

/// Never the token.
impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bearer(..)")
    }
}

/// Never the key.
impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn api_keys_are_shown_to_those_who_give_them_out_and_to_this_machine() {
        let key = ApiKey::new("key", vec!["registry.example".to_owned()]).unwrap();
        for (url, expect) in [
            ("https://openai.com", true),
            ("https://api.openai.org/v1", true),
            ("http://api.openai.com", false),
            ("https://evilopenai.com", false),
            ("https://openai.com.evil.example", false),
            ("https://openai.com@evil.example", false),
            ("http://127.0.0.1:9", true),
            ("http://[::1]:9", true),
            ("http://localhost:9", true),
            ("http://127.0.0.1.evil.example", false),
            ("https://registry.example", true),
            ("http://registry.example", false),
        ] {
            let shown = key.headers(&Url::parse(url).unwrap()).now_or_never().unwrap();
            assert_eq!(shown.is_ok_and(|headers| headers[AUTHORIZATION] == "Bearer key"), expect, "{url}");
        }
        assert!(may_see_keys(&Url::parse("https://registry.example").unwrap(), &[]).is_err());
    }

    #[test]
    fn no_text_has_the_token() {
        let (bearer, key) = (Bearer::new("hush").unwrap(), ApiKey::new("hush", Vec::new()).unwrap());
        let shown = format!("{bearer:?} {key:?} {:?}", bearer.0);
        assert!(!shown.contains("hush"), "{shown}");
        assert!(!Bearer::new("hu\nsh").unwrap_err().to_string().contains("hu"));
    }
}

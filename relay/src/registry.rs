//! The registry, as both ends ask it: who serves an environment, where the rendezvous is, and whether a harness may.

use crate::credentials::{Bearer, Credentials};
use crate::keys::{PublicKeys, SECURITY_PROFILE};
use crate::wire::{self, Tls};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use url::Url;

/// How long one question may take, its body included.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of an answer: keys and a URL are a few thousand.
const LONGEST: usize = 64 * 1024;
/// Characters that are shown of an answer which says no.
const SHOWN: usize = 4096;

/// A registry, and what it is shown.
#[derive(Clone)]
pub struct Registry {
    base: Url,
    environment: String,
    credentials: Arc<dyn Credentials>,
    tls: Option<Tls>,
}

/// What an executor gets: where to go, and what it is called there.
#[derive(Clone, PartialEq, Eq, Deserialize)]
pub struct Registration {
    environment_id: String,
    security_profile: String,
    /// The rendezvous. A secret.
    pub url: String,
    /// The name of the registration.
    pub executor_registration_id: String,
}

/// What a harness gets for one attempt.
#[derive(Clone, PartialEq, Eq, Deserialize)]
pub struct Bundle {
    environment_id: String,
    security_profile: String,
    /// The rendezvous. A secret.
    pub url: String,
    /// Of the executor that serves the environment.
    pub executor_registration_id: String,
    /// Its keys: nobody else can read what is sent under them.
    pub executor_public_key: PublicKeys,
    /// A secret for the executor, which shows it to the registry.
    pub harness_key_authorization: String,
}

/// Why the registry is no help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The URL or the credential cannot be used at all.
    #[error("{0}")]
    Unusable(String),
    /// It said no.
    #[error("{} ({status}): {message}", if matches!(status, 401 | 403) { "environment registry authentication failed" } else { "the environment registry refused" })]
    Refused {
        /// The status of HTTP.
        status: u16,
        /// What kind of error it is, if the registry says so.
        code: Option<String>,
        /// For people.
        message: String,
    },
    /// It was not reached, or not in time. Nothing was asked.
    #[error("ask the environment registry: {0}")]
    Unreachable(String),
    /// It was asked and did not answer, or not in time. Whether it did what it was asked is not known.
    #[error("ask the environment registry: {0}; whether it did what it was asked is not known")]
    Unanswered(String),
    /// What it answered is no answer to what was asked.
    #[error("the environment registry's answer cannot be used: {0}")]
    Answer(String),
}

impl RegistryError {
    /// Whether the credential is not accepted: asking again changes nothing.
    #[must_use]
    pub fn is_authentication(&self) -> bool {
        matches!(self, Self::Unusable(_) | Self::Refused { status: 401 | 403, .. })
    }
}

impl Registry {
    /// A registry at a base URL, for one environment, which is shown a token that was made for it.
    ///
    /// # Errors
    /// The URL, the environment's name or the token cannot be used.
    pub fn new(base: &str, environment: &str, token: &str, tls: Option<Tls>) -> Result<Self, RegistryError> {
        Self::with(base, environment, Arc::new(Bearer::new(token)?), tls)
    }

    /// The same with any credentials. They are sent over TLS or to this very machine, and never in clear.
    ///
    /// # Errors
    /// The URL or the environment's name cannot be used.
    pub fn with(
        base: &str,
        environment: &str,
        credentials: Arc<dyn Credentials>,
        tls: Option<Tls>,
    ) -> Result<Self, RegistryError> {
        let wrong = |reason: String| RegistryError::Unusable(reason);
        let url =
            Url::parse(base.trim().trim_end_matches('/')).map_err(|error| wrong(format!("registry URL {base}: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(wrong(format!("registry URL {base}: it must begin with https:// or http:// and name a host")));
        }
        if url.scheme() == "http" && !wire::is_loopback(&url) {
            return Err(wrong(format!("registry URL {base}: a token is not sent in clear to another machine; use https://")));
        }
        if !is_environment(environment) {
            return Err(wrong(format!(
                "environment id {environment:?}: it has 1 to {MAX_ENVIRONMENT} letters, digits, `-`, `_` and `.`, not only dots"
            )));
        }
        Ok(Self { base: url, environment: environment.to_owned(), credentials, tls })
    }

    /// The environment.
    #[must_use]
    pub fn environment(&self) -> &str {
        &self.environment
    }

    /// Where it is, for people.
    #[must_use]
    pub fn url(&self) -> String {
        self.base.origin().ascii_serialization()
    }

    /// Whom to believe there, and at the rendezvous.
    #[must_use]
    pub fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Registers an executor.
    ///
    /// # Errors
    /// See [`RegistryError`]. After [`RegistryError::Unanswered`] it may have been registered.
    pub async fn register(&self, keys: &PublicKeys) -> Result<Registration, RegistryError> {
        #[derive(Serialize)]
        struct Question<'a> {
            security_profile: &'a str,
            executor_public_key: &'a PublicKeys,
        }
        let question = Question { security_profile: SECURITY_PROFILE, executor_public_key: keys };
        let answer: Registration = self.ask("register", &question).await?;
        self.check(&answer.environment_id, &answer.security_profile, &[&answer.url, &answer.executor_registration_id])?;
        Ok(answer)
    }

    /// Asks for the way to the executor of the environment: once for every attempt.
    ///
    /// # Errors
    /// See [`RegistryError`].
    pub async fn connect(&self, keys: &PublicKeys) -> Result<Bundle, RegistryError> {
        #[derive(Serialize)]
        struct Question<'a> {
            harness_public_key: &'a PublicKeys,
        }
        let answer: Bundle = self.ask("connect", &Question { harness_public_key: keys }).await?;
        let texts = [&answer.url, &answer.executor_registration_id, &answer.harness_key_authorization];
        self.check(&answer.environment_id, &answer.security_profile, &texts.map(String::as_str))?;
        Ok(answer)
    }

    /// Asks whether a harness with these keys may. Anything but a clear yes is no.
    pub async fn validate(&self, registration: &str, keys: &PublicKeys, authorization: &str) -> bool {
        #[derive(Serialize)]
        struct Question<'a> {
            executor_registration_id: &'a str,
            harness_public_key: &'a PublicKeys,
            harness_key_authorization: &'a str,
        }
        #[derive(Deserialize)]
        struct Answer {
            valid: bool,
        }
        let question = Question {
            executor_registration_id: registration,
            harness_public_key: keys,
            harness_key_authorization: authorization,
        };
        // Without the error, whose text might repeat the authorization.
        self.ask("validate", &question).await.is_ok_and(|answer: Answer| answer.valid)
    }

    fn check(&self, environment: &str, profile: &str, texts: &[&str]) -> Result<(), RegistryError> {
        let wrong = |reason: &str| Err(RegistryError::Answer(reason.to_owned()));
        if environment != self.environment {
            return wrong("it is about another environment");
        }
        if profile != SECURITY_PROFILE {
            return wrong("its security profile is not known");
        }
        if texts.iter().any(|text| text.trim().is_empty()) { wrong("a member of it is blank") } else { Ok(()) }
    }

    async fn ask<A: DeserializeOwned>(&self, call: &str, question: &impl Serialize) -> Result<A, RegistryError> {
        let mut shown = HeaderMap::new();
        let (status, body) = self.exchange(call, question, &mut shown).await?;
        if !(200..300).contains(&status) {
            return Err(refusal(status, &body, &shown));
        }
        // The kind of error alone: its text may repeat what stands there, maybe a secret.
        serde_json::from_slice(&body).map_err(|error| RegistryError::Answer(format!("{:?} error in it", error.classify())))
    }

    /// Asks, and leaves in `shown` what the registry was shown.
    async fn exchange(
        &self,
        call: &str,
        question: &impl Serialize,
        shown: &mut HeaderMap,
    ) -> Result<(u16, Bytes), RegistryError> {
        let unusable = |error: &dyn fmt::Display| RegistryError::Unusable(error.to_string());
        let unanswered = |error: &dyn fmt::Display| RegistryError::Unanswered(error.to_string());
        let late = |_elapsed| format!("nothing was answered within {} s", ANSWER.as_secs());
        let until = Instant::now() + ANSWER;
        let path = format!("{}/cloud/environment/{}/{call}", self.base.path().trim_end_matches('/'), self.environment);
        let host = match (self.base.host_str(), self.base.port()) {
            (Some(host), Some(port)) => format!("{host}:{port}"),
            (host, _) => host.unwrap_or_default().to_owned(),
        };
        let body = serde_json::to_vec(question).map_err(|error| unusable(&error))?;
        let request = Request::builder().method(Method::POST).uri(path).header(HOST, host);
        let request = request.header(CONTENT_TYPE, "application/json");
        let mut request = request.body(Full::new(Bytes::from(body))).map_err(|error| unusable(&error))?;
        let ready = timeout_at(until, async {
            *shown = self.credentials.headers(&self.base).await?;
            request.headers_mut().extend(shown.clone());
            wire::open(&self.base, self.tls.as_ref()).await.map_err(RegistryError::Unreachable)
        });
        let wire = ready.await.map_err(late).map_err(RegistryError::Unreachable)??;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(wire)).await;
        let (mut sender, connection) = shaken.map_err(|error| unanswered(&error))?;
        let mut exchange = pin!(async {
            // Redirects are not followed: nobody else is to see the token.
            let answer = sender.send_request(request).await.map_err(|error| unanswered(&error))?;
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), LONGEST).collect().await;
            Ok((status, body.map_err(|error| unanswered(&error))?.to_bytes()))
        });
        let answered = timeout_at(until, async {
            tokio::select! {
                biased;
                answer = &mut exchange => answer,
                _ended = connection => exchange.await,
            }
        });
        answered.await.map_err(late).map_err(RegistryError::Unanswered)?
    }
}

/// Longest name of an environment, in bytes.
pub const MAX_ENVIRONMENT: usize = 128;

/// Whether a text can name an environment: it becomes part of a path.
pub(crate) fn is_environment(text: &str) -> bool {
    let is_known = |letter: u8| letter.is_ascii_alphanumeric() || matches!(letter, b'-' | b'_' | b'.');
    (1..=MAX_ENVIRONMENT).contains(&text.len()) && text.bytes().all(is_known) && text.bytes().any(|letter| letter != b'.')
}

/// What the registry said when it said no. It chooses the words, and they are no orders to a terminal; if it repeats what it was
/// shown, we do not.
fn refusal(status: u16, body: &[u8], shown: &HeaderMap) -> RegistryError {
    #[derive(Deserialize)]
    struct Body {
        error: Reason,
    }
    #[derive(Deserialize)]
    struct Reason {
        code: Option<String>,
        message: Option<String>,
    }
    let plain = |text: &str| {
        let secrets = shown.values().filter(|value| value.is_sensitive()).filter_map(|value| value.to_str().ok());
        let secrets = secrets.filter_map(|value| value.split_whitespace().last());
        let text = secrets.fold(text.to_owned(), |text, secret| text.replace(secret, "(the token)"));
        text.trim().chars().take(SHOWN).map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect::<String>()
    };
    if let Ok(Body { error: Reason { code, message } }) = serde_json::from_slice(body) {
        let message = message.as_deref().map_or_else(|| "no reason was given".to_owned(), plain);
        return RegistryError::Refused { status, code: code.as_deref().map(plain), message };
    }
    let text = plain(&String::from_utf8_lossy(body));
    let message = if text.is_empty() { "empty or malformed error body".to_owned() } else { text };
    RegistryError::Refused { status, code: None, message }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({}, {})", self.url(), self.environment)
    }
}

/// Without what is secret.
impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({}, {})", self.environment_id, self.executor_registration_id)
    }
}

/// Without what is secret.
impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bundle({}, {})", self.environment_id, self.executor_registration_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sent_over_tls_or_to_this_machine_only() {
        for (url, is_taken) in [
            ("https://registry.example/", true),
            ("http://127.0.0.1:7", true),
            ("http://[::1]:7/base/", true),
            ("http://localhost:7", true),
            ("http://registry.example", false),
            ("http://127.0.0.1.evil.example", false),
            ("ws://127.0.0.1:7", false),
            ("", false),
        ] {
            assert_eq!(Registry::new(url, "box", "token", None).is_ok(), is_taken, "{url}");
        }
        for wrong in ["", "a/b", "..", "a b", &"a".repeat(MAX_ENVIRONMENT + 1)] {
            assert!(Registry::new("http://127.0.0.1:7", wrong, "token", None).is_err(), "{wrong}");
        }
        assert!(Registry::new("http://127.0.0.1:7", "box", "to\nken", None).is_err());
    }

    #[test]
    fn refusals_say_what_the_registry_said() {
        let text = refusal(401, br#"{"error":{"code":"bad","message":"no such token"}}"#, &HeaderMap::new()).to_string();
        assert_eq!(text, "environment registry authentication failed (401): no such token");
        assert_eq!(refusal(500, b"oops", &HeaderMap::new()).to_string(), "the environment registry refused (500): oops");
        assert!(refusal(500, b"", &HeaderMap::new()).to_string().contains("empty or malformed"));
    }
}

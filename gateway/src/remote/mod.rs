//! The gateway as the executor of an environment: it listens nowhere, dials out to a rendezvous, and serves whom its registry lets in.

mod drive;
mod pump;

use crate::config::Config;
use crate::core::Gateway;
use crate::http;
use crate::listen::{ListenError, stop_on_signals};
use drive::{Bounds, Drive};
use portcullis_relay::keys::{Identity, NoRandomness};
use portcullis_relay::registry::{Registry, RegistryError};
use std::fmt;
use std::io::{self, Write as _};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use url::{Host, Url};

/// Links on their way to the gateway.
const LINKS: usize = 16;

/// A credential for the registry.
#[derive(Clone, PartialEq, Eq)]
pub enum RegistryToken {
    /// One that was made for this registry.
    Bearer(String),
    /// An API key, which is shown to the hosts that give such keys out, and to this machine, and to nobody else.
    ApiKey(String),
}

/// Which environment to serve, and where it is registered.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteEnvironmentConfig {
    /// The registry, `https://HOST`, or `http://` on loopback.
    pub base_url: String,
    /// The environment.
    pub environment_id: String,
    /// A name for people. It stays here.
    pub name: Option<String>,
    /// What the registry is shown.
    pub token: RegistryToken,
    /// Hosts that an API key may be shown to, beside the usual ones.
    pub allowed_hosts: Vec<String>,
}

/// Why an environment is not served, or not any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// An API key would be shown to somebody who did not give it out.
    #[error(
        "remote exec-server API-key authentication is restricted to HTTPS openai.com and openai.org hosts and subdomains or loopback hosts; admit another one with --remote-allow-host HOST, or give a token of that registry's own"
    )]
    Host,
    /// The registry.
    #[error("serve the environment: {0}")]
    Registry(#[from] RegistryError),
    /// No keys.
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    /// No certificate of any authority.
    #[error("read the certificates to believe: {0}")]
    Certificates(String),
    /// The gateway, or the system.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

impl RemoteEnvironmentConfig {
    /// An environment at a registry.
    #[must_use]
    pub fn new(base_url: impl Into<String>, environment_id: impl Into<String>, token: RegistryToken) -> Self {
        let (base_url, environment_id) = (base_url.into(), environment_id.into());
        Self { base_url, environment_id, name: None, token, allowed_hosts: Vec::new() }
    }

    /// The token, if it may be shown to this registry.
    fn token(&self) -> Result<&str, RemoteError> {
        match &self.token {
            RegistryToken::Bearer(token) => Ok(token),
            RegistryToken::ApiKey(key) if may_see_keys(&self.base_url, &self.allowed_hosts) => Ok(key),
            RegistryToken::ApiKey(_) => Err(RemoteError::Host),
        }
    }
}

/// Serves an environment until SIGINT or SIGTERM, and says so on standard output once it can be used.
///
/// # Errors
/// See [`RemoteError`]. The first registration is tried once; what is lost later is tried again for ever, unless the registry does
/// not accept the token any more.
pub async fn run_remote_environment(remote: RemoteEnvironmentConfig, config: Config) -> Result<(), RemoteError> {
    let token = remote.token()?;
    let tls = match remote.base_url.starts_with("https:") {
        true => Some(http::believed(&config).await.map_err(RemoteError::Certificates)?),
        false => None,
    };
    let registry = Registry::new(&remote.base_url, &remote.environment_id, token, tls)?;
    let identity = Identity::generate()?;
    let registration = registry.register(&identity.public_keys()).await?;
    let stop = CancellationToken::new();
    let signals = stop_on_signals(stop.clone())?;
    if config.ceiling.is_none() {
        tracing::warn!("no operator's policy is set: clients themselves say what their requests may touch");
    }
    let bytes = config.buffer_bytes / 2;
    let gateway = Gateway::start(config).await.map_err(ListenError::from)?;
    let (links, mut opened) = mpsc::channel(LINKS);
    let (reached, mut is_reached) = oneshot::channel();
    let ended = CancellationToken::new();
    let bounds = Bounds { bytes, metrics: gateway.counters() };
    let drive = Drive::new(registry, identity, registration, links, reached, bounds);
    let mut driving = tokio::spawn(drive.run(ended.clone()));
    let idled = gateway.idled();
    let (mut lost, mut has_said) = (None, false);
    while lost.is_none() {
        tokio::select! {
            Ok(()) = &mut is_reached, if !has_said => {
                has_said = true;
                lost = say(&remote).err();
            }
            Some(link) = opened.recv() => gateway.accept(link).await,
            done = &mut driving => {
                lost = done.ok().and_then(Result::err).map(RemoteError::Registry);
                break;
            }
            () = idled.cancelled() => break,
            () = stop.cancelled() => break,
        }
    }
    // Clients hear of the end over their streams, so those outlive the gateway for a moment.
    opened.close();
    gateway.shutdown().await;
    ended.cancel();
    if !driving.is_finished() {
        let _lost_at_the_end = driving.await;
    }
    signals.abort();
    let _aborted = signals.await;
    lost.map_or(Ok(()), Err)
}

/// Says that the environment can be used.
fn say(remote: &RemoteEnvironmentConfig) -> Result<(), RemoteError> {
    let said = writeln!(io::stdout(), "environment {} is registered at {}", remote.environment_id, remote.base_url);
    let attempt = "say on standard output that the environment is registered".to_owned();
    said.map_err(|source| RemoteError::Listen(ListenError::Io { attempt, source }))
}

/// Whether the registry's host is one that API keys are for.
fn may_see_keys(base: &str, allowed: &[String]) -> bool {
    let Ok(url) = Url::parse(base.trim()) else { return false };
    match url.host() {
        Some(Host::Ipv4(address)) if address.is_loopback() => true,
        Some(Host::Ipv6(address)) if address.is_loopback() => true,
        Some(Host::Domain("localhost")) => true,
        Some(host) if url.scheme() == "https" => {
            let host = host.to_string();
            let is_usual = ["openai.com", "openai.org"]
                .iter()
                .any(|usual| host.strip_suffix(usual).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')));
            is_usual || allowed.iter().any(|name| name.eq_ignore_ascii_case(&host))
        }
        _ => false,
    }
}

/// Never the token.
impl fmt::Debug for RegistryToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bearer(_) => "Bearer(..)",
            Self::ApiKey(_) => "ApiKey(..)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_shown_to_those_who_give_them_out_and_to_this_machine() {
        let own = ["registry.example".to_owned()];
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
            ("", false),
        ] {
            assert_eq!(may_see_keys(url, &own), expect, "{url}");
        }
        assert!(!may_see_keys("https://registry.example", &[]));
    }
}

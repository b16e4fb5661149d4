//! The gateway as the executor of an environment: it listens nowhere, dials out to a rendezvous, and serves whom its registry lets in.

mod bridge;
mod drive;
mod forward;
mod pump;

pub use forward::run_forward;

use crate::config::Config;
use crate::core::Gateway;
use crate::http;
use crate::listen::{Health, ListenError, stop_on_signals};
use drive::{Attach, Bounds, Drive};
use portcullis_relay::credentials::Credentials;
use portcullis_relay::destination::DestinationError;
use portcullis_relay::keys::{Identity, NoRandomness, PublicKeys};
use portcullis_relay::registry::{Registration, Registry, RegistryError};
use portcullis_relay::retry::{Retries, Retry};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use thiserror::Error;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Links on their way to the gateway.
const LINKS: usize = 16;

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
    pub credentials: Arc<dyn Credentials>,
    /// Where to serve `/livez`, `/readyz` and `/metrics`: a loopback address. None: nowhere. Ready it is while the rendezvous is reached.
    pub health: Option<SocketAddr>,
    /// End once standard input does.
    pub exits_with_stdin: bool,
}

/// Why an environment is not served, or not any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The registry.
    #[error("serve the environment: {0}")]
    Registry(#[from] RegistryError),
    /// What is forwarded has nowhere to go.
    #[error(transparent)]
    Destination(#[from] DestinationError),
    /// No keys.
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    /// No certificate of any authority.
    #[error("read the certificates to believe: {0}")]
    Certificates(String),
    /// The gateway, or the system.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A task ended that does not end by itself.
    #[error("{0}; this is a defect of portcullis: start it again, and report it with its log")]
    Defect(String),
}

impl RemoteError {
    fn defect(attempt: &str, error: &JoinError) -> Self {
        Self::Defect(format!("{attempt}: {error}"))
    }
}

impl RemoteEnvironmentConfig {
    /// An environment at a registry.
    #[must_use]
    pub fn new(base_url: impl Into<String>, environment_id: impl Into<String>, credentials: Arc<dyn Credentials>) -> Self {
        let (base_url, environment_id) = (base_url.into(), environment_id.into());
        Self { base_url, environment_id, name: None, credentials, health: None, exits_with_stdin: false }
    }
}

/// Serves an environment until SIGINT or SIGTERM, and says so on standard output once it can be used.
///
/// # Errors
/// See [`RemoteError`]. The first registration is tried again only where the registry says that another time it may say yes; what is
/// lost later is tried again for ever, unless the registry does not accept the credentials any more.
pub async fn run_remote_environment(remote: RemoteEnvironmentConfig, config: Config) -> Result<(), RemoteError> {
    if let Some(address) = remote.health.filter(|address| !address.ip().is_loopback()) {
        return Err(ListenError::OpenHealth(address).into());
    }
    let stop = CancellationToken::new();
    let mut signals = stop_on_signals(stop.clone())?;
    let mut stdin = pin!(stdin_ended(remote.exits_with_stdin));
    let registered = tokio::select! {
        registered = registered(&remote, &config) => registered?,
        () = &mut stdin => return Ok(()),
        () = stop.cancelled() => return Ok(()),
    };
    if config.ceiling.is_none() {
        tracing::warn!("no operator's policy is set: clients themselves say what their requests may touch");
    }
    let (bytes, hosts) = (config.buffer_bytes / 2, Arc::from(config.allowed_hosts.clone()));
    let gateway = Gateway::start(config).await.map_err(ListenError::from)?;
    let (links, mut opened) = mpsc::channel(LINKS);
    let (reached, mut is_reached) = watch::channel(false);
    let health = match remote.health {
        Some(address) => match Health::listen(address, &gateway, hosts, is_reached.clone()).await {
            Ok(health) => Some(health),
            Err(error) => {
                gateway.shutdown().await;
                return Err(error.into());
            }
        },
        None => None,
    };
    let ended = CancellationToken::new();
    let bounds = Bounds { bytes, metrics: gateway.counters() };
    let drive = Drive::new(registered, Attach::Gateway(links), reached, bounds);
    let mut driving = tokio::spawn(drive.run(ended.clone()));
    let idled = gateway.idled();
    let (mut lost, mut has_said) = (None, false);
    while lost.is_none() {
        tokio::select! {
            Ok(_) = is_reached.wait_for(|is| *is), if !has_said => {
                has_said = true;
                lost = say(&remote).err();
            }
            Some(link) = opened.recv() => gateway.accept(link).await,
            done = &mut driving => {
                lost = driven(done).err();
                break;
            }
            () = idled.cancelled() => break,
            () = &mut stdin => break,
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
    if let Some(health) = health {
        health.end().await;
    }
    signals.shutdown().await;
    lost.map_or(Ok(()), Err)
}

/// A registration, and what it was made with.
struct Registered {
    registry: Registry,
    identity: Identity,
    registration: Registration,
}

/// How a driver's task ended.
fn driven(done: Result<Result<(), RemoteError>, JoinError>) -> Result<(), RemoteError> {
    done.unwrap_or_else(|error| Err(RemoteError::defect("carry the streams of the rendezvous", &error)))
}

/// Registers for the first time.
async fn registered(remote: &RemoteEnvironmentConfig, config: &Config) -> Result<Registered, RemoteError> {
    let tls = match remote.base_url.starts_with("https:") {
        true => Some(http::believed(config).await.map_err(RemoteError::Certificates)?),
        false => None,
    };
    let registry = Registry::with(&remote.base_url, &remote.environment_id, Arc::clone(&remote.credentials), tls)?;
    let identity = Identity::generate()?;
    let registration = register(&registry, &identity.public_keys()).await?;
    Ok(Registered { registry, identity, registration })
}

/// Asks until there is an answer to go by.
async fn register(registry: &Registry, keys: &PublicKeys) -> Result<Registration, RegistryError> {
    let mut retries = Retries::new();
    loop {
        let error = match registry.register(keys).await {
            Ok(registration) => return Ok(registration),
            Err(error) => error,
        };
        let Retry::After(wait) = retries.first(&error) else { return Err(error) };
        tracing::warn!("{error}; it is tried again in {} ms", wait.as_millis());
        sleep(wait).await;
    }
}

/// Waits for the end of standard input, if that is to end the program, or for ever. What comes there is of no interest.
async fn stdin_ended(counts: bool) {
    if !counts {
        return std::future::pending().await;
    }
    let mut input = tokio::io::stdin();
    let mut unread = [0; 4096];
    while matches!(input.read(&mut unread).await, Ok(1..)) {}
}

/// Says that the environment can be used.
fn say(remote: &RemoteEnvironmentConfig) -> Result<(), RemoteError> {
    let said = writeln!(io::stdout(), "environment {} is registered at {}", remote.environment_id, remote.base_url);
    let attempt = "say on standard output that the environment is registered".to_owned();
    said.map_err(|source| RemoteError::Listen(ListenError::Io { attempt, source }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_driver_that_panics_is_an_error() {
        let panicked = tokio::spawn(async { panic!("by the test") }).await;
        assert!(matches!(driven(panicked), Err(RemoteError::Defect(text)) if text.contains("by the test")));
        assert!(driven(tokio::spawn(async { Ok(()) }).await).is_ok());
    }
}

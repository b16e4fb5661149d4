//! A forwarder: the executor of an environment that serves nobody itself and passes each stream on to somebody who does.

use super::drive::{Attach, Bounds, Drive};
use super::{RemoteEnvironmentConfig, RemoteError, driven, registered, say, stdin_ended};
use crate::config::Config;
use crate::http;
use crate::listen::stop_on_signals;
use crate::metrics::Metrics;
use portcullis_relay::destination::Destination;
use portcullis_relay::wire::Tls;
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Registers as the executor of an environment, and passes each stream of a client on to a WebSocket of its own at `destination`,
/// until SIGINT or SIGTERM. It keeps no session and starts no process. Of the configuration it needs the environment, for whom
/// to believe, and the bound of bytes. `tls` says whom to believe at a `wss://` destination; without it those that the machine does.
///
/// # Errors
/// See [`RemoteError`]. The destination's URL is looked at before anybody is asked anything; that it is not reached ends a stream,
/// and no more.
pub async fn run_forward(
    remote: RemoteEnvironmentConfig,
    destination: &str,
    tls: Option<Tls>,
    config: Config,
) -> Result<(), RemoteError> {
    let tls = match tls {
        None if Destination::new(destination, None)?.is_secure() => {
            Some(http::believed(&config).await.map_err(RemoteError::Certificates)?)
        }
        tls => tls,
    };
    let destination = Arc::new(Destination::new(destination, tls)?);
    let (stop, ended) = (CancellationToken::new(), CancellationToken::new());
    let mut signals = stop_on_signals(stop.clone())?;
    let mut stdin = pin!(stdin_ended(remote.exits_with_stdin));
    let registered = tokio::select! {
        registered = registered(&remote, &config) => registered?,
        () = &mut stdin => return Ok(()),
        () = stop.cancelled() => return Ok(()),
    };
    let (reached, mut is_reached) = watch::channel(false);
    let bounds = Bounds { bytes: config.buffer_bytes / 2, metrics: Arc::new(Metrics::new()) };
    let attach = Attach::Destination(destination, stop.clone());
    let mut driving = tokio::spawn(Drive::new(registered, attach, reached, bounds).run(ended.clone()));
    let mut has_said = false;
    let result = loop {
        tokio::select! {
            Ok(_) = is_reached.wait_for(|is| *is), if !has_said => {
                has_said = true;
                if let Err(error) = say(&remote) {
                    break Err(error);
                }
            }
            done = &mut driving => break driven(done),
            () = &mut stdin => break Ok(()),
            () = stop.cancelled() => break Ok(()),
        }
    };
    stop.cancel();
    ended.cancel();
    if !driving.is_finished() {
        let _lost_at_the_end = driving.await;
    }
    signals.shutdown().await;
    result
}

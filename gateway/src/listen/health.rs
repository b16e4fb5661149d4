//! A listener that serves nobody: whoever is on this machine may look whether the gateway is ready, and how it goes.

use super::ListenError;
use super::accept::{self, Serving};
use super::credential::Guard;
use super::loopback::Port;
use super::pending::PendingConnections;
use super::socket::Listener;
use crate::core::Gateway;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Probes at a time: they are few, and their connections end at once.
const PROBES: usize = 64;
/// How long one of them may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// A listener for those who look.
#[derive(Debug)]
pub(crate) struct Health {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl Health {
    /// Listens on a loopback address, and says so on standard output. The gateway is ready while `reached` says so too.
    ///
    /// # Errors
    /// The address is in use.
    pub(crate) async fn listen(
        address: SocketAddr,
        gateway: &Gateway,
        hosts: Arc<[String]>,
        reached: watch::Receiver<bool>,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Io { attempt: format!("listen on {address} for those who look"), source };
        let listener = Port::bind(address).await.map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let stop = CancellationToken::new();
        let serving = Serving {
            upgrades: None,
            readiness: gateway.readiness().and(reached),
            metrics: gateway.counters(),
            audit: gateway.audit(),
            peers: gateway.peers(Some(local)),
            guard: Guard::Open,
            hosts,
            deadline: DEADLINE,
            stop: stop.clone(),
        };
        let said = writeln!(io::stdout(), "health is at http://{local}");
        let attempt = || format!("say on standard output that health is at {local}");
        said.map_err(|source| ListenError::Io { attempt: attempt(), source })?;
        let task = tokio::spawn(accept::run(Listener::Tcp(listener), serving, PendingConnections::new(PROBES)));
        Ok(Self { task, stop })
    }

    /// Ends it. Who asked before is answered.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        let _panicked = self.task.await;
    }
}

//! Whether clients can be served, and why not.

use crate::helper::spawner::Spawner;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Whether clients can be served.
#[derive(Debug, Clone)]
pub struct Readiness {
    pub(crate) closing: CancellationToken,
    pub(crate) spawner: Spawner,
    /// The places of sessions that are free, and the number of all places.
    pub(crate) sessions: (Arc<Semaphore>, usize),
    /// Whether clients reach it at all, where that may change.
    pub(crate) reached: Option<watch::Receiver<bool>>,
}

impl Readiness {
    /// True while clients can be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.obstacle().is_none()
    }

    /// Why clients cannot be served, if so.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        if self.closing.is_cancelled() {
            return Some("the server is shutting down".to_owned());
        }
        if let Some(trouble) = self.spawner.trouble() {
            return Some(format!("the spawner has died and is being replaced: {trouble}"));
        }
        let (free, all) = &self.sessions;
        if free.available_permits() == 0 {
            return Some(format!("max-sessions: all {all} sessions are in use, and new clients are refused until one ends"));
        }
        let is_reached = self.reached.as_ref().is_none_or(|reached| *reached.borrow());
        (!is_reached).then(|| "there is no connection to the rendezvous".to_owned())
    }

    /// The same, while that is true too.
    pub(crate) fn and(self, reached: watch::Receiver<bool>) -> Self {
        Self { reached: Some(reached), ..self }
    }
}

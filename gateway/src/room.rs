//! The room that all connections and sessions share.

use crate::budget::Budget;
use crate::config::Config;
use crate::descriptors;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// What all connections and sessions share of what there is.
#[derive(Debug)]
pub(crate) struct Room {
    /// Of messages on their way in. Apart from replies, since a message is held until its call is answered: a call must be able
    /// to wait for the room of its reply without holding up the replies that have theirs.
    pub(crate) incoming: Budget,
    pub(crate) replies: Budget,
    /// Of bodies over HTTP that come whole. Apart from both: a call that has the room of its message waits for that of the body,
    /// and then for that of its reply, and never the other way.
    pub(crate) bodies: Budget,
    /// What pipes of processes may grow by.
    pub(crate) pipes: Budget,
    /// Calls that run.
    pub(crate) calls: Arc<Semaphore>,
    pub(crate) sessions: Arc<Semaphore>,
    pub(crate) processes: Arc<Semaphore>,
    /// Open file handles: at most a quarter of the descriptors of this process, so that helpers can be started beside them.
    pub(crate) handles: Arc<Semaphore>,
}

impl Room {
    pub(crate) fn new(config: &Config) -> Self {
        let places = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Self {
            incoming: Budget::new(config.buffer_bytes / 2),
            replies: Budget::new(config.buffer_bytes / 4),
            bodies: Budget::new(config.buffer_bytes / 4),
            pipes: Budget::new(config.pipe_bytes),
            calls: places(config.calls),
            sessions: places(config.sessions),
            processes: places(config.processes),
            handles: places(descriptors::limit().map_or(usize::MAX, |all| all / 4)),
        }
    }
}

//! Where a client is in its life.

/// Where a client is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientStatus {
    /// Calls are sent as they come.
    Connected {
        /// How often the client was connected: 1 for the first link. File handles of an older one have ended, unless they are kept.
        generation: u64,
    },
    /// The link ended and the client is coming back: calls wait, processes run on.
    Recovering,
    /// The end. The text is that of the [`crate::ExecServerError::Failed`] of every later call.
    Failed(String),
}

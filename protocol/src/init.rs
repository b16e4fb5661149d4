//! The handshake.

use crate::environment::EnvironmentInfo;
use serde::{Deserialize, Serialize};

/// Parameters of `initialize`. What is behind `resume_session_id` is of this server alone; others ignore it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// Any text.
    pub client_name: String,
    /// The session to attach to again; none makes a new one.
    #[serde(default)]
    pub resume_session_id: Option<String>,
    /// Answer also, in the result's `environmentInfo`, what is understood beyond the wire that clients know.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub extensions: bool,
    /// The client says how far it has come, by `process/acknowledge` and by the `afterSeq` of its reads. Until then nothing
    /// that it was sent is forgotten, nor makes room for more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub acknowledge: bool,
    /// Keep this connection's file handles for the next one that resumes the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_handles: bool,
    /// Take the session although another connection is attached: that one is closed. Without it the answer is
    /// [`crate::rpc::code::ATTACHED`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub take_over: bool,
    /// How long the session and its closed processes are to be kept without a connection, in milliseconds from each detach; at
    /// most what the operator allows. None leaves it as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_ms: Option<u64>,
    /// Send content of files and output as bytes (see [`crate::binary`]). Whether it is so is in the result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub binary_frames: bool,
}

impl InitializeParams {
    /// A new session for a client of this name, without extensions.
    #[must_use]
    pub fn new(client_name: impl Into<String>) -> Self {
        Self { client_name: client_name.into(), ..Self::default() }
    }
}

/// Result of `initialize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeResult {
    /// The session's secret name.
    pub session_id: String,
    /// As `environment/info` answers; servers of other makes may leave it out.
    #[serde(default)]
    pub environment_info: Option<EnvironmentInfo>,
    /// Whether content of files and output come as bytes over this connection; only if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binary_frames: Option<bool>,
}

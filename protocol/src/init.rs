//! The handshake.

use crate::environment::EnvironmentInfo;
use serde::{Deserialize, Serialize};

/// Parameters of `initialize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// Any text.
    pub client_name: String,
    /// The session to attach to again; none makes a new one.
    #[serde(default)]
    pub resume_session_id: Option<String>,
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
}

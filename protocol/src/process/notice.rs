//! What is announced of a process.

use super::is_zero;
use crate::base64::Chunk;
use crate::denial::{self, Denial};
use crate::event::Stream;
use crate::limit::{self, LimitReached};
use serde::{Deserialize, Serialize};

/// Parameters of the notification `process/output`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputNotice {
    /// The process.
    pub process_id: String,
    /// Its number.
    pub seq: u64,
    /// Where it came from.
    pub stream: Stream,
    /// Its bytes.
    pub chunk: Chunk,
}

/// Parameters of the notification `process/exited`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitedNotice {
    /// The process.
    pub process_id: String,
    /// Its number.
    pub seq: u64,
    /// The status.
    pub exit_code: i32,
    /// Whether it failed and its sandbox was seen to refuse something.
    #[serde(default)]
    pub sandbox_denied: bool,
    /// What its sandbox was seen to refuse; absent if nothing.
    #[serde(default, deserialize_with = "denial::known", skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<Denial>,
    /// How many more there were; absent if none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub denials_more: u64,
    /// The limits that it reached, as far as they can be seen; absent if none.
    #[serde(default, deserialize_with = "limit::known", skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitReached>,
}

/// Parameters of the notification `process/closed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClosedNotice {
    /// The process.
    pub process_id: String,
    /// Its number, the last.
    pub seq: u64,
}

//! The events of a process as a client pages and acknowledges them.

use crate::base64::Chunk;
use crate::denial::{self, Denial};
use crate::event::Stream;
use crate::limit::{self, LimitReached};
use serde::{Deserialize, Serialize};

/// An event in an answer to `process/read` with `events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum LoggedEvent {
    /// It wrote.
    Output {
        /// Its number.
        seq: u64,
        /// Where.
        stream: Stream,
        /// What.
        chunk: Chunk,
    },
    /// It ended.
    Exited {
        /// Its number.
        seq: u64,
        /// Its status, or 128 + the signal that ended it.
        exit_code: i32,
        /// Whether it failed and its sandbox was seen to refuse something.
        sandbox_denied: bool,
        /// What its sandbox was seen to refuse; absent if nothing.
        #[serde(default, deserialize_with = "denial::known", skip_serializing_if = "Vec::is_empty")]
        denials: Vec<Denial>,
        /// How many more there were; absent if none.
        #[serde(default, skip_serializing_if = "is_zero")]
        denials_more: u64,
        /// The limits that it reached, as far as they can be seen; absent if none.
        #[serde(default, deserialize_with = "limit::known", skip_serializing_if = "Vec::is_empty")]
        limits: Vec<LimitReached>,
    },
    /// It ended and all its streams did. Nothing follows.
    Closed {
        /// Its number.
        seq: u64,
    },
    /// Events that are not kept any more.
    Gap(Gap),
}

impl LoggedEvent {
    /// The number of the last event that this speaks of.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        match self {
            Self::Output { seq, .. } | Self::Exited { seq, .. } | Self::Closed { seq } => *seq,
            Self::Gap(Gap { to_seq, .. }) => *to_seq,
        }
    }
}

/// A run of events that are not kept any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gap {
    /// The first of them.
    pub from_seq: u64,
    /// The last.
    pub to_seq: u64,
    /// The bytes of output in them. Absent where that is not known: the reader asked from within a run that clients were sent
    /// before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// What becomes of output that finds no room while no client is attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WhenFull {
    /// The process waits: its pipe is not read until somebody comes.
    #[default]
    Pause,
    /// The oldest that no client was sent goes, and a [`Gap`] says so.
    DropOldest,
}

/// Parameters of `process/acknowledge`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcknowledgeParams {
    /// The process.
    pub process_id: String,
    /// The last event that the client has, with all before it.
    pub seq: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_of_events() {
        for (event, text) in [
            (
                LoggedEvent::Output { seq: 1, stream: Stream::Pty, chunk: Chunk(b"x".to_vec()) },
                json!({"type": "output", "seq": 1, "stream": "pty", "chunk": "eA=="}),
            ),
            (
                LoggedEvent::Exited {
                    seq: 2,
                    exit_code: 3,
                    sandbox_denied: false,
                    denials: Vec::new(),
                    denials_more: 0,
                    limits: Vec::new(),
                },
                json!({"type": "exited", "seq": 2, "exitCode": 3, "sandboxDenied": false}),
            ),
            (LoggedEvent::Closed { seq: 3 }, json!({"type": "closed", "seq": 3})),
            (
                LoggedEvent::Gap(Gap { from_seq: 4, to_seq: 9, bytes: Some(7) }),
                json!({"type": "gap", "fromSeq": 4, "toSeq": 9, "bytes": 7}),
            ),
        ] {
            assert_eq!(serde_json::to_value(&event).unwrap(), text);
            assert_eq!(serde_json::from_value::<LoggedEvent>(text).unwrap(), event);
        }
        assert_eq!(serde_json::to_value(WhenFull::DropOldest).unwrap(), json!("dropOldest"));
    }
}

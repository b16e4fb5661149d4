//! What happens to a process: numbered from 1 without holes, Closed last.

use crate::base64;
use crate::binary::Message;
use crate::denial::Denials;
use crate::limit::LimitReached;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::sync::Arc;

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal, which is both.
    Pty,
}

impl Stream {
    /// The word on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Pty => "pty",
        }
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It wrote.
    Output {
        /// Where.
        stream: Stream,
        /// What; never empty. Clones share it, so that it goes from its log to a client as it is.
        chunk: Bytes,
    },
    /// It ended.
    Exited {
        /// Its status, or 128 + the signal that ended it.
        code: i32,
        /// What layers of its sandbox were seen to refuse. Shared with who remembers how it ended.
        denials: Arc<Denials>,
        /// The limits that it reached, each once.
        limits: Vec<LimitReached>,
    },
    /// It ended and all its streams did: the last event.
    Closed,
}

impl Event {
    /// The bytes that count against bounds of memory.
    #[must_use]
    pub fn size(&self) -> usize {
        match self {
            Self::Output { chunk, .. } => chunk.len(),
            Self::Exited { denials, limits, .. } => denials.size() + limits.iter().map(LimitReached::size).sum::<usize>(),
            Self::Closed => 0,
        }
    }

    /// The notification that tells a client; output with its bytes beside it, if it is `binary`.
    #[must_use]
    pub fn message(&self, process: &str, seq: u64, binary: bool) -> Message {
        match self {
            Self::Output { stream, chunk } if binary => {
                let head = output_head(process, seq, *stream, 2) + "}}";
                Message::binary(head, chunk.clone())
            }
            other => other.notification(process, seq).into(),
        }
    }

    /// The notification that tells a client, as JSON. Built by hand, since letting a serializer look for characters to escape in
    /// base64 costs more than everything else.
    #[must_use]
    pub fn notification(&self, process: &str, seq: u64) -> String {
        let id = serde_json::Value::from(process);
        let mut text = match self {
            Self::Output { stream, chunk } => {
                let mut text = output_head(process, seq, *stream, chunk.len() * 4 / 3 + 16);
                text.push_str(r#","chunk":""#);
                base64::encode_onto(chunk, &mut text);
                text.push('"');
                text
            }
            Self::Exited { code, denials, limits } => {
                let denied = denials.failed_it(*code);
                let mut text = format!(
                    r#"{{"method":"process/exited","params":{{"processId":{id},"seq":{seq},"exitCode":{code},"sandboxDenied":{denied}"#
                );
                // An ordinary exit has no more members than clients of this wire know.
                if !denials.is_empty()
                    && let Ok(list) = serde_json::to_string(&denials.list)
                {
                    let _infallible = write!(text, r#","denials":{list}"#);
                }
                if denials.more > 0 {
                    let _infallible = write!(text, r#","denialsMore":{}"#, denials.more);
                }
                if !limits.is_empty()
                    && let Ok(list) = serde_json::to_string(limits)
                {
                    let _infallible = write!(text, r#","limits":{list}"#);
                }
                text
            }
            Self::Closed => format!(r#"{{"method":"process/closed","params":{{"processId":{id},"seq":{seq}"#),
        };
        text.push_str("}}");
        text
    }
}

/// The notification of output up to the member that holds the bytes, with room for so many more.
fn output_head(process: &str, seq: u64, stream: Stream, more: usize) -> String {
    let mut text = String::with_capacity(process.len() + 128 + more);
    let (id, stream) = (serde_json::Value::from(process), stream.name());
    let _infallible = write!(text, r#"{{"method":"process/output","params":{{"processId":{id},"seq":{seq},"stream":"{stream}""#);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denial::{Denial, Layer, Wanted};
    use crate::limit::Scope;
    use serde_json::{Value, json};

    #[test]
    fn notifications_are_json_whatever_the_id() {
        let output = Event::Output { stream: Stream::Stderr, chunk: "hi".into() };
        let parsed: Value = serde_json::from_str(&output.notification("a\"\\\n", 7)).unwrap();
        let params = json!({"processId": "a\"\\\n", "seq": 7, "stream": "stderr", "chunk": "aGk="});
        assert_eq!(parsed, json!({"method": "process/output", "params": params}));
        let exited = |code, denials: Denials| -> Value {
            let exited = Event::Exited { code, denials: Arc::new(denials), limits: Vec::new() };
            serde_json::from_str(&exited.notification("p", 2)).unwrap()
        };
        let ordinary = exited(137, Denials::default());
        assert_eq!(ordinary["params"], json!({"processId": "p", "seq": 2, "exitCode": 137, "sandboxDenied": false}));
        let denial =
            Denial { path: "/e\"tc".to_owned(), access: Wanted::Write, layer: Layer::Mounts, rule: "r".to_owned(), grant: None };
        let denials = Denials { list: vec![denial.clone()], more: 0 };
        let exited_so = Event::Exited { code: 1, denials: Arc::new(denials.clone()), limits: Vec::new() };
        assert!(exited_so.size() > 6, "denials take room");
        let limits = vec![LimitReached { limit: "cpuMs".to_owned(), value: 9, used: 9, scope: Scope::Process }];
        let limited = Event::Exited { code: 9, denials: Arc::default(), limits };
        assert!(limited.size() > 5, "limits take room");
        let parsed: Value = serde_json::from_str(&limited.notification("p", 2)).unwrap();
        assert_eq!(parsed["params"]["limits"], json!([{"limit": "cpuMs", "value": 9, "used": 9, "scope": "process"}]));
        let list = json!([{"path": "/e\"tc", "access": "write", "layer": "mounts", "rule": "r", "grant": null}]);
        let failed = exited(1, denials.clone());
        assert_eq!(failed["params"], json!({"processId": "p", "seq": 2, "exitCode": 1, "sandboxDenied": true, "denials": list}));
        let succeeded = exited(0, Denials { more: 3, ..denials });
        let params =
            json!({"processId": "p", "seq": 2, "exitCode": 0, "sandboxDenied": false, "denials": list, "denialsMore": 3});
        assert_eq!(succeeded["params"], params);
        let closed: Value = serde_json::from_str(&Event::Closed.notification("p", 3)).unwrap();
        assert_eq!(closed, json!({"method": "process/closed", "params": {"processId": "p", "seq": 3}}));
    }
}

//! Messages that bring bytes as they are, and results with or without them.

use super::{Core, Output, Owner};
use crate::process::ProcessEvent;
use portcullis_protocol::binary;
use portcullis_protocol::event::Stream;
use portcullis_protocol::rpc::{self, Id, Message};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_tungstenite::tungstenite::Bytes;

/// A result.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    /// Its JSON, without the member that came as bytes.
    pub(crate) result: Box<RawValue>,
    /// What came as bytes.
    pub(crate) body: Option<Bytes>,
}

impl From<&RawValue> for Reply {
    fn from(result: &RawValue) -> Self {
        Self { result: result.to_owned(), body: None }
    }
}

impl Reply {
    /// `{}`
    pub(super) fn nothing() -> Self {
        let result = RawValue::from_string("{}".to_owned()).expect("Invariant: `{}` is JSON");
        Self { result, body: None }
    }

    /// The JSON with everything in it, for those who do not look for bytes.
    pub(crate) fn into_json(self, method: &str) -> Result<Box<RawValue>, String> {
        let (Some(body), Some(member)) = (self.body, binary::member(method)) else { return Ok(self.result) };
        let text = binary::with_member(self.result.get(), member, &body).ok_or("the result is no object")?;
        RawValue::from_string(text).map_err(|error| error.to_string())
    }
}

/// Parameters of `process/output` without its bytes.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OutputHead {
    process_id: String,
    seq: u64,
    stream: Stream,
}

impl Core {
    /// One binary message of the link that counts. What comes of it is what would have come of the same in JSON.
    ///
    /// # Errors
    /// It breaks the rules of the wire: the link is of no use any more.
    pub(super) fn binary(&mut self, message: Bytes) -> Result<(), String> {
        let (head, body) = binary::split(message).map_err(|error| format!("the server sent {error}"))?;
        let wrong = |error: String| format!("the server sent a binary message whose head is no message: {error}");
        match rpc::parse(&head).map_err(wrong)? {
            Message::Response { id: Id::Number(id), outcome: Ok(result) } => {
                let owner = self.pending.asked(id).filter(|call| binary::member(&call.method).is_some()).map(|call| call.owner);
                let Some(Owner::Caller(ticket)) = owner else {
                    return Err(format!("the server answered {id} with bytes, which nothing asked for"));
                };
                self.pending.answered(id);
                let reply = Reply { result: result.to_owned(), body: Some(body) };
                self.outputs.push_back(Output::Answer { ticket, outcome: Ok(reply) });
                Ok(())
            }
            Message::Notification { method, params: Some(params) } if method == "process/output" => {
                let wrong = |error| format!("the server's {method} is not understood: {error}");
                let OutputHead { process_id, seq, stream } = serde_json::from_str(params.get()).map_err(wrong)?;
                if let Some(route) = self.names.get(&process_id).copied() {
                    // Copied, since the whole of a message is kept for as long as a part of it.
                    self.live(route, ProcessEvent::Output { seq, stream, chunk: body.to_vec() });
                }
                Ok(())
            }
            _ => Err("the server sent a binary message of a kind that has no bytes".to_owned()),
        }
    }
}

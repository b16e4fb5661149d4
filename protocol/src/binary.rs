//! Messages whose bytes travel as they are, for clients that ask for it: the length of the head in four bytes, the greatest first;
//! the head, which is the JSON message without the one member that holds bytes; and the bytes, to the end of the message.

use crate::base64;
use bytes::Bytes;

/// The bytes in which the head's length is told.
const LENGTH: usize = 4;

/// The member that holds bytes in the result of a method or in the parameters of a notification, if it may travel as bytes.
#[must_use]
pub fn member(method: &str) -> Option<&'static str> {
    match method {
        "fs/readFile" => Some("dataBase64"),
        "fs/readBlock" | "process/output" => Some("chunk"),
        _ => None,
    }
}

/// A message on its way out: JSON, and what travels beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The JSON: all of it, or the head.
    pub text: String,
    /// What the head leaves out. None for a message of JSON alone.
    pub body: Option<Bytes>,
}

impl Message {
    /// A head and its bytes.
    #[must_use]
    pub fn binary(head: String, body: Bytes) -> Self {
        Self { text: head, body: Some(body) }
    }

    /// The bytes that it takes on the wire.
    #[must_use]
    pub fn size(&self) -> usize {
        self.text.len() + self.body.as_ref().map_or(0, |body| LENGTH + body.len())
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        Self { text, body: None }
    }
}

/// What goes before the body: the head with its length. The body follows from its own buffer.
#[must_use]
pub fn before_body(head: &str) -> Bytes {
    // A head is a message without its bytes, of a name or an id that the client chose in a message of 64 MiB at most.
    let length = u32::try_from(head.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], head.as_bytes()].concat().into()
}

/// A message that does not hold what it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a binary message of {size} bytes, {}", self.problem())]
pub struct Malformed {
    /// Of the message.
    pub size: usize,
    /// What it says of its head's length, if it is long enough to.
    pub head: Option<u32>,
}

impl Malformed {
    fn problem(&self) -> String {
        match self.head {
            None => format!("which begins with no length of {LENGTH} bytes"),
            Some(head) => format!("whose head would have {head}"),
        }
    }
}

/// Takes a message apart, into the head and the body. Nothing is copied.
///
/// # Errors
/// It is too short for the length that it begins with.
pub fn split(mut message: Bytes) -> Result<(Bytes, Bytes), Malformed> {
    let size = message.len();
    let length = message.first_chunk().map(|length| u32::from_be_bytes(*length)).ok_or(Malformed { size, head: None })?;
    let malformed = Malformed { size, head: Some(length) };
    let end = usize::try_from(length).ok().and_then(|length| length.checked_add(LENGTH)).filter(|end| *end <= size);
    let body = message.split_off(end.ok_or(malformed)?);
    Ok((message.split_off(LENGTH), body))
}

/// The JSON object of which `object` is the head: with its member again, for those who want to see nothing else. None if it is no
/// object.
#[must_use]
pub fn with_member(object: &str, member: &str, body: &[u8]) -> Option<String> {
    let rest = object.trim_ascii_start().strip_prefix('{')?;
    let mut text = String::with_capacity(body.len() / 3 * 4 + object.len() + member.len() + 16);
    text.push_str("{\"");
    text.push_str(member);
    text.push_str("\":\"");
    base64::encode_onto(body, &mut text);
    text.push_str(if rest.trim_ascii_start().starts_with('}') { "\"" } else { "\"," });
    text.push_str(rest);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, Stream};
    use crate::rpc::{self, Id};
    use proptest::prelude::*;
    use serde_json::Value;

    fn joined(message: &Message) -> Bytes {
        [before_body(&message.text), message.body.clone().unwrap()].concat().into()
    }

    #[test]
    fn what_is_too_short_is_said() {
        for (bytes, expect) in [
            (&b""[..], "a binary message of 0 bytes, which begins with no length of 4 bytes"),
            (&b"\0\0\0"[..], "a binary message of 3 bytes, which begins with no length of 4 bytes"),
            (&b"\0\0\0\x03{}"[..], "a binary message of 6 bytes, whose head would have 3"),
            (&b"\xff\xff\xff\xff{}"[..], "a binary message of 6 bytes, whose head would have 4294967295"),
        ] {
            assert_eq!(split(Bytes::from_static(bytes)).unwrap_err().to_string(), expect);
        }
        assert_eq!(split(Bytes::from_static(b"\0\0\0\x02{}x")).unwrap(), ("{}".into(), "x".into()));
        assert_eq!(split(Bytes::from_static(b"\0\0\0\0")).unwrap(), (Bytes::new(), Bytes::new()));
    }

    #[test]
    fn a_member_goes_back_to_its_place() {
        for (object, expect) in [
            ("{}", r#"{"chunk":"aGk="}"#),
            (" { } ", r#"{"chunk":"aGk=" } "#),
            (r#"{"eof":true}"#, r#"{"chunk":"aGk=","eof":true}"#),
        ] {
            assert_eq!(with_member(object, "chunk", b"hi").unwrap(), expect);
        }
        assert_eq!(with_member("[]", "chunk", b"hi"), None);
    }

    proptest! {
        #[test]
        fn what_is_taken_apart_is_what_was_put_together(head in ".{0,80}", body in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = Message::binary(head.clone(), body.clone().into());
            let bytes = joined(&message);
            prop_assert_eq!(bytes.len(), message.size());
            prop_assert_eq!(split(bytes), Ok((head.into(), body.into())));
        }

        #[test]
        fn no_bytes_panic_and_nothing_is_lost(bytes in prop::collection::vec(any::<u8>(), 0..40), head in 0_u8..40) {
            for bytes in [bytes.clone(), [&[0, 0, 0, head], &bytes[..]].concat()] {
                if let Ok((head, body)) = split(bytes.clone().into()) {
                    prop_assert_eq!([&bytes[..4], &head, &body].concat(), bytes);
                }
            }
        }

        #[test]
        fn a_head_with_its_bytes_says_what_the_json_says(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            id in ".{0,8}",
            eof in any::<bool>(),
        ) {
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            let (name, more) = (Id::Text(id.clone()), format!(r#","eof":{eof}"#));
            let whole = json(&rpc::bytes_result_text(&name, "chunk", &bytes, &more));
            let mut head = json(&rpc::bytes_result_head(&name, &more));
            let again = with_member(&head["result"].to_string(), "chunk", &bytes).unwrap();
            head["result"] = json(&again);
            prop_assert_eq!(head, whole);

            let output = Event::Output { stream: Stream::Pty, chunk: bytes.clone().into() };
            let whole = json(&output.notification(&id, 7));
            let message = output.message(&id, 7, true);
            prop_assert_eq!(message.body.as_deref(), Some(&bytes[..]));
            let mut head = json(&message.text);
            head["params"] = json(&with_member(&head["params"].to_string(), "chunk", &bytes).unwrap());
            prop_assert_eq!(head, whole);
            prop_assert_eq!(output.message(&id, 7, false), Message::from(output.notification(&id, 7)));
        }
    }
}

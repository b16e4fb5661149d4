//! The envelope: JSON-RPC 2.0 without its version member.

use crate::denial::{self, Denial};
use crate::limit::LimitReached;
use crate::scan::{Bulk, scan};
use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// Error codes of this wire.
pub mod code {
    /// Protocol state, text that is no message, an operation that makes no sense on its object.
    pub const INVALID_REQUEST: i32 = -32600;
    /// No such method.
    pub const METHOD_NOT_FOUND: i32 = -32601;
    /// Parameters do not decode or contradict each other.
    pub const INVALID_PARAMS: i32 = -32602;
    /// The system said no.
    pub const INTERNAL: i32 = -32603;
    /// No such file or handle.
    pub const NOT_FOUND: i32 = -32004;
    /// The session is attached to another connection; try again.
    pub const ATTACHED: i32 = -32010;
}

/// Bound of the JSON values in one message: a small message could otherwise cost a hundred times its bytes.
pub const MAX_VALUES: u32 = 262_144;

/// Bound of an id in bytes: it is kept until its request is answered, and goes out with the answer.
pub const MAX_ID: usize = 1024;

/// Bound of an error's text in bytes. Errors name what clients sent, which may be as long as a message; they are kept and sent without
/// being counted as large.
pub const MAX_ERROR: usize = 16 << 10;

/// A request's id, echoed unchanged. It need not be unique.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Id {
    /// An integer of 64 bits.
    Number(i64),
    /// Any text.
    Text(String),
}

impl Id {
    /// The id of errors about text that held none.
    #[must_use]
    pub fn unknown() -> Self {
        Self::Number(-1)
    }
}

/// What a peer may send.
#[derive(Debug)]
pub enum Message<'a> {
    /// Wants an answer.
    Request {
        /// Names the answer.
        id: Id,
        /// What is called.
        method: Cow<'a, str>,
        /// With what.
        params: Option<RawParams<'a>>,
    },
    /// Wants none.
    Notification {
        /// What is announced.
        method: Cow<'a, str>,
        /// With what.
        params: Option<RawParams<'a>>,
    },
    /// An answer.
    Response {
        /// To which request.
        id: Id,
        /// What came of it.
        outcome: Result<&'a RawValue, RpcError>,
    },
}

/// The parameters of a message: JSON that was checked with it, not decoded.
#[derive(Debug, Clone, Copy)]
pub struct RawParams<'a> {
    text: &'a str,
    /// A long text among their members, found by the way.
    pub(crate) bulk: Option<Bulk<'a>>,
}

impl<'a> RawParams<'a> {
    /// As they were written.
    #[must_use]
    pub fn get(self) -> &'a str {
        self.text
    }
}

impl<'a> From<&'a RawValue> for RawParams<'a> {
    fn from(raw: &'a RawValue) -> Self {
        Self { text: raw.get(), bulk: None }
    }
}

/// An error on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (code {code})")]
pub struct RpcError {
    /// See [`code`].
    pub code: i32,
    /// What was attempted, on what, and why it failed.
    pub message: String,
    /// More for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
}

impl RpcError {
    /// An error without more for programs.
    #[must_use]
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }

    /// The same error, with what was denied as `data`.
    #[must_use]
    pub fn with_denials(self, denials: &[Denial]) -> Self {
        Self { data: Some(serde_json::json!({ "denials": denials })), ..self }
    }

    /// The same error, with the limit for which it refuses as `data`.
    #[must_use]
    pub fn with_limit(self, reached: &LimitReached) -> Self {
        Self { data: serde_json::to_value(reached).ok(), ..self }
    }

    /// What was denied, as far as the error says so in a way that this version understands.
    #[must_use]
    pub fn denials(&self) -> Vec<Denial> {
        let list = self.data.as_ref().and_then(|data| data.get("denials"));
        list.and_then(|list| denial::known(list).ok()).unwrap_or_default()
    }

    /// The same error with a text of at most [`MAX_ERROR`] bytes.
    #[must_use]
    pub fn cut(mut self) -> Self {
        if self.message.len() > MAX_ERROR {
            self.message = cut(&self.message).into_owned();
        }
        self
    }

    /// −32601 in the words that clients of this wire know.
    #[must_use]
    pub fn unknown_method(method: &str) -> Self {
        Self::new(code::METHOD_NOT_FOUND, format!("exec-server stub does not implement `{}` yet", cut(method)))
    }
}

/// The beginning of a text that is longer than an error may be, and how much is left out.
fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_ERROR {
        return Cow::Borrowed(text);
    }
    // Room for the words behind it.
    let end = text.floor_char_boundary(MAX_ERROR - 64);
    Cow::Owned(format!("{}… ({} bytes more)", &text[..end], text.len() - end))
}

/// Parses one message.
///
/// # Errors
/// The text is not one JSON object, repeats a member at any depth, holds more than [`MAX_VALUES`] values, or is neither
/// request, notification nor response. The error says where.
pub fn parse(bytes: &[u8]) -> Result<Message<'_>, String> {
    usual(bytes).map_or_else(|| judge(bytes), Ok)
}

/// A request or a notification that is written as nearly all are; none of what only [`judge`] can say something about.
pub(crate) fn usual(bytes: &[u8]) -> Option<Message<'_>> {
    let found = scan(bytes, MAX_VALUES)?;
    let method = Cow::Borrowed(found.method);
    let params = found.params.map(|text| RawParams { text, bulk: found.bulk });
    Some(match found.id {
        None => Message::Notification { method, params },
        Some(id) => {
            let id = match id.strip_prefix('"') {
                Some(text) => Id::Text(text.strip_suffix('"').filter(|text| text.len() <= MAX_ID)?.to_owned()),
                None => Id::Number(id.parse().ok()?),
            };
            Message::Request { id, method, params }
        }
    })
}

/// Reads any message, or says what is wrong with it.
pub(crate) fn judge(bytes: &[u8]) -> Result<Message<'_>, String> {
    check(bytes).map_err(|error| error.to_string())?;
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let envelope: Envelope<'_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    envelope.message()
}

/// The text of a result.
///
/// # Errors
/// The result does not serialize: a defect of ours.
pub fn result_text(id: &Id, result: &impl Serialize) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Reply<'a, T> {
        id: &'a Id,
        result: &'a T,
    }
    serde_json::to_string(&Reply { id, result })
}

/// The text of a result whose one member is bytes: `{"id":…,"result":{"MEMBER":"BASE64"MORE}}`. `more` is raw JSON that
/// begins with a comma, or nothing. The bytes are copied once, into the text.
#[must_use]
pub fn bytes_result_text(id: &Id, member: &str, bytes: &[u8], more: &str) -> String {
    let id = serde_json::to_string(id).unwrap_or_else(|_| "-1".to_owned());
    let mut text = String::with_capacity(bytes.len() / 3 * 4 + id.len() + member.len() + more.len() + 40);
    for part in [r#"{"id":"#, &id, r#","result":{""#, member, r#"":""#] {
        text.push_str(part);
    }
    crate::base64::encode_onto(bytes, &mut text);
    for part in ["\"", more, "}}"] {
        text.push_str(part);
    }
    text
}

/// The same without that member: what goes before bytes that travel as they are (see [`crate::binary`]).
#[must_use]
pub fn bytes_result_head(id: &Id, more: &str) -> String {
    let id = serde_json::to_string(id).unwrap_or_else(|_| "-1".to_owned());
    format!(r#"{{"id":{id},"result":{{{}}}}}"#, more.strip_prefix(',').unwrap_or(more))
}

/// The text of an error, [cut](RpcError::cut).
#[must_use]
pub fn error_text(id: &Id, error: &RpcError) -> String {
    #[derive(Serialize)]
    struct Reply<'a> {
        error: Cow<'a, RpcError>,
        id: &'a Id,
    }
    let is_long = error.message.len() > MAX_ERROR;
    let error = if is_long { Cow::Owned(error.clone().cut()) } else { Cow::Borrowed(error) };
    serde_json::to_string(&Reply { error, id })
        .unwrap_or_else(|_| r#"{"error":{"code":-32603,"message":"an error could not be written"},"id":-1}"#.to_owned())
}

/// The text of a request.
///
/// # Errors
/// The parameters do not serialize.
pub fn request_text(id: &Id, method: &str, params: &impl Serialize) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Request<'a, T> {
        id: &'a Id,
        method: &'a str,
        params: &'a T,
    }
    serde_json::to_string(&Request { id, method, params })
}

/// The text of a notification.
///
/// # Errors
/// The parameters do not serialize.
pub fn notification_text(method: &str, params: &impl Serialize) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Notification<'a, T> {
        method: &'a str,
        params: &'a T,
    }
    serde_json::to_string(&Notification { method, params })
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    method: Option<&'a RawValue>,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
    #[serde(default, rename = "trace")]
    _trace: Option<Trace>,
}

/// W3C trace members; their types are checked.
#[derive(Deserialize)]
struct Trace {
    #[serde(default, rename = "traceparent")]
    _traceparent: Option<String>,
    #[serde(default, rename = "tracestate")]
    _tracestate: Option<String>,
}

/// Tells `null` from absence, which `Option` alone does not.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl<'a> Envelope<'a> {
    fn message(self) -> Result<Message<'a>, String> {
        let id = |raw: &RawValue| match serde_json::from_str(raw.get()) {
            Ok(Id::Text(text)) if text.len() > MAX_ID => {
                Err(format!("an id of {} bytes; at most {MAX_ID} are allowed", text.len()))
            }
            Ok(id) => Ok(id),
            Err(_) => Err("data did not match any variant of untagged enum RequestId".to_owned()),
        };
        let params = self.params.map(RawParams::from);
        if let Some(method) = self.method {
            let method = text(method)?;
            return Ok(match self.id {
                Some(raw) => Message::Request { id: id(raw)?, method, params },
                None => Message::Notification { method, params },
            });
        }
        let raw = self.id.ok_or("missing field `method`")?;
        let outcome = match (self.result, self.error) {
            (Some(result), None) => Ok(result),
            (None, Some(error)) => Err(serde_json::from_str(error.get()).map_err(|error| error.to_string())?),
            (None, None) => return Err("missing field `error`".to_owned()),
            (Some(_), Some(_)) => return Err("both `result` and `error`".to_owned()),
        };
        Ok(Message::Response { id: id(raw)?, outcome })
    }
}

/// A string, borrowed where it holds no escapes.
fn text(raw: &RawValue) -> Result<Cow<'_, str>, String> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<Text<'_>>(raw.get()).map(|Text(text)| text).map_err(|error| error.to_string())
}

/// Walks the whole message once: one object, no repeated member at any depth, a bounded number of values.
fn check(bytes: &[u8]) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut values = 0;
    json.deserialize_any(Walk { values: &mut values, top: true })?;
    json.end()
}

struct Walk<'a> {
    values: &'a mut u32,
    top: bool,
}

impl Walk<'_> {
    fn count<E: serde::de::Error>(self) -> Result<(), E> {
        if self.top {
            return Err(E::custom("expected a JSON-RPC object"));
        }
        *self.values += 1;
        if *self.values > MAX_VALUES {
            Err(E::custom(format!("more than {MAX_VALUES} JSON values in one message")))
        } else {
            Ok(())
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.count()
    }
    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<(), E> {
        self.count()
    }
    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<(), E> {
        self.count()
    }
    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<(), E> {
        self.count()
    }
    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<(), E> {
        self.count()
    }
    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<(), E> {
        self.count()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Walk { values, top } = self;
        Walk { values: &mut *values, top }.count()?;
        while items.next_element_seed(Walk { values: &mut *values, top: false })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let Walk { values, .. } = self;
        Walk { values: &mut *values, top: false }.count()?;
        let mut seen = HashSet::new();
        while let Some(Name(name)) = members.next_key()? {
            if !seen.insert(name.clone()) {
                return Err(serde::de::Error::custom(format!("duplicate JSON object key `{name}`")));
            }
            members.next_value_seed(Walk { values: &mut *values, top: false })?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn refused(text: &str, expect: &str) {
        assert_eq!(parse(text.as_bytes()).map(|_| ()).unwrap_err(), expect, "{text}");
    }

    #[test]
    fn text_that_is_no_message() {
        refused("{nope", "key must be a string at line 1 column 2");
        refused("", "EOF while parsing a value at line 1 column 0");
        for text in ["[]", "3", "null", r#"[{"id":1}]"#, r#""x""#] {
            assert!(parse(text.as_bytes()).unwrap_err().starts_with("expected a JSON-RPC object"), "{text}");
        }
        for id in ["1.5", "true", "{}", "null", "9223372036854775808"] {
            refused(&format!(r#"{{"id":{id},"method":"m"}}"#), "data did not match any variant of untagged enum RequestId");
        }
        refused(r#"{"id":3}"#, "missing field `error`");
        refused(r#"{"id":3,"error":{"message":"x"}}"#, "missing field `code` at line 1 column 15");
        refused(r#"{"id":3,"id":4,"method":"m"}"#, "duplicate JSON object key `id` at line 1 column 12");
        refused(r#"{"id":3,"method":"m","params":[{"q":1,"q":2}]}"#, "duplicate JSON object key `q` at line 1 column 41");
        refused(r#"{"id":3,"method":"m"}{}"#, "trailing characters at line 1 column 22");
        assert!(parse(b"\xff\xfe").is_err());
        assert!(parse(b"{\"method\":\"\xff\"}").is_err());
        assert!(parse(br#"{"id":3,"method":"m","trace":3}"#).is_err());
        assert!(parse(br#"{"id":3,"method":4}"#).is_err());
    }

    #[test]
    fn kinds_of_message() {
        assert!(
            matches!(parse(br#"{"id":"","method":"m"}"#), Ok(Message::Request { id: Id::Text(text), params: None, .. }) if text.is_empty())
        );
        assert!(matches!(
            parse(br#" {"jsonrpc":2,"id":-5,"method":"m","params":null,"x":{}} "#),
            Ok(Message::Request { id: Id::Number(-5), params: None, .. })
        ));
        assert!(
            matches!(parse(br#"{"method":"\u006d","params":{}}"#), Ok(Message::Notification { method, params: Some(_) }) if method == "m")
        );
        assert!(matches!(parse(br#"{"id":1,"result":null}"#), Ok(Message::Response { outcome: Ok(_), .. })));
        assert!(matches!(parse(br#"{"id":1,"error":{"code":-1,"message":"x"}}"#), Ok(Message::Response { outcome: Err(_), .. })));
    }

    #[test]
    fn a_flood_of_values_is_refused() {
        let many = format!(r#"{{"id":1,"method":"m","params":[{}1]}}"#, "1,".repeat(262_144));
        assert!(parse(many.as_bytes()).unwrap_err().contains("more than 262144 JSON values"));
        let deep = format!(r#"{{"id":1,"method":"m","params":{}{}}}"#, "[".repeat(10_000), "]".repeat(10_000));
        assert!(parse(deep.as_bytes()).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn an_id_has_a_bound_however_it_is_written() {
        let request = |id: &str| format!(r#"{{"id":"{id}","method":"m"}}"#);
        let (fits, long) = ("i".repeat(MAX_ID), "i".repeat(MAX_ID + 1));
        let escaped = |count: usize| "\\u0069".repeat(count);
        for (text, expect) in [(fits.clone(), true), (long.clone(), false), (escaped(MAX_ID), true), (escaped(MAX_ID + 1), false)]
        {
            let request = request(&text);
            match parse(request.as_bytes()) {
                Ok(Message::Request { id, .. }) => assert!(expect && id == Id::Text(fits.clone())),
                other => assert!(!expect && other.is_err_and(|error| error == "an id of 1025 bytes; at most 1024 are allowed")),
            }
        }
        assert!(parse(format!(r#"{{"id":"{long}","result":1}}"#).as_bytes()).is_err(), "responses too");
    }

    #[test]
    fn a_text_that_a_client_made_long_is_not_sent_back_whole() {
        let long = "ü".repeat(1 << 20);
        for error in [RpcError::unknown_method(&long), RpcError::new(code::INTERNAL, format!("x{long}"))] {
            let text = error_text(&Id::Number(1), &error);
            assert!(text.len() < MAX_ERROR + 200 && text.contains("bytes more"), "{}", text.len());
        }
        let short = RpcError::new(code::INTERNAL, "ü".repeat(MAX_ERROR / 2));
        assert_eq!(short.clone().cut(), short, "control: what fits stays as it is");
        assert!(error_text(&Id::Number(1), &short).contains(&short.message));
    }

    #[test]
    fn texts_of_answers() {
        let id = Id::Text("a\"b".to_owned());
        assert_eq!(result_text(&id, &[1]).unwrap(), r#"{"id":"a\"b","result":[1]}"#);
        assert_eq!(
            bytes_result_text(&Id::Number(7), "chunk", b"hi", r#","eof":true"#),
            r#"{"id":7,"result":{"chunk":"aGk=","eof":true}}"#
        );
        assert_eq!(bytes_result_head(&Id::Number(7), r#","eof":true"#), r#"{"id":7,"result":{"eof":true}}"#);
        assert_eq!(bytes_result_head(&Id::Number(7), ""), r#"{"id":7,"result":{}}"#);
        assert_eq!(error_text(&Id::unknown(), &RpcError::new(-32600, "x")), r#"{"error":{"code":-32600,"message":"x"},"id":-1}"#);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _any = parse(&bytes);
        }

        #[test]
        fn an_id_is_echoed_as_it_came(number in any::<i64>(), text in ".*") {
            for id in [Id::Number(number), Id::Text(text)] {
                let request = request_text(&id, "m", &()).unwrap();
                let Ok(Message::Request { id: got, .. }) = parse(request.as_bytes()) else { panic!("{request}") };
                prop_assert_eq!(&got, &id);
            }
        }
    }
}

//! Requests over HTTP that the server makes for its client.

use crate::base64::Chunk;
use serde::{Deserialize, Serialize};

/// Parameters of `http/request`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestParams {
    /// As in `GET`; sent as it is.
    pub method: String,
    /// `http` or `https`.
    pub url: String,
    /// In their order.
    #[serde(default)]
    pub headers: Vec<HttpHeader>,
    /// The body; absent and empty are the same.
    #[serde(default, rename = "bodyBase64")]
    pub body: Option<Chunk>,
    /// For the whole of it, the answer's body included, in milliseconds; absent: as long as it takes.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// What to do with an answer that points elsewhere.
    #[serde(default)]
    pub redirect_policy: RedirectPolicy,
    /// Names a streamed answer among those of its connection.
    pub request_id: String,
    /// The body comes in parts, as [`BodyDelta`]s behind the result.
    #[serde(default)]
    pub stream_response: bool,
}

/// What to do with an answer that points elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RedirectPolicy {
    /// Go there, a bounded number of times.
    #[default]
    Follow,
    /// It is the result.
    Stop,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpHeader {
    /// Its name; in lower case in answers.
    pub name: String,
    /// Its value.
    pub value: String,
    /// A variable of the server's environment whose value the server adds to the header's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_env_var: Option<String>,
}

/// Result of `http/request`, whatever the status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestResult {
    /// As in 200.
    pub status: u16,
    /// In their order.
    pub headers: Vec<HttpHeader>,
    /// The whole body, or nothing if it comes in parts.
    #[serde(rename = "bodyBase64")]
    pub body: Chunk,
}

/// Parameters of `http/request/bodyDelta`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BodyDelta {
    /// Of the request.
    pub request_id: String,
    /// From 1, without holes.
    pub seq: u64,
    /// What comes next of the body.
    #[serde(default, rename = "deltaBase64")]
    pub delta: Chunk,
    /// Nothing follows.
    #[serde(default)]
    pub done: bool,
    /// That the body is not whole, in the words that clients of this wire know.
    #[serde(default)]
    pub error: Option<String>,
    /// Why it is not, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

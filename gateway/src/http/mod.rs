//! Requests over HTTP that the gateway makes for its clients, from where it is.
//!
//! # How it works
//! A request is checked ([`request`]), then made ([`fetch`]): a place is judged by its name ([`egress`]), a proxy may stand in
//! between ([`proxies`]), the name is looked up once ([`look_up`]), its addresses are judged, and one of them is connected to ([`dial`]); over
//! that goes one exchange ([`exchange`]), and a redirect ([`redirect`]) begins all of it anew. The body goes to the client whole
//! ([`whole`]) or in parts ([`parts`]). No connection is kept for a second request, and nothing runs beside the call: whoever
//! drops it closes its socket.

mod dial;
mod egress;
mod exchange;
mod fetch;
mod look_up;
mod parts;
mod proxies;
mod redirect;
mod request;
mod trust;
mod whole;

pub(crate) use exchange::Answer;
pub(crate) use fetch::fetch;
pub(crate) use parts::{Bodies, Parts, send_parts};
pub(crate) use request::Request;
pub(crate) use whole::whole;

pub use egress::{EgressRule, EgressRuleError};

use crate::config::Config;
use egress::Egress;
use look_up::LookUps;
use portcullis_protocol::rpc::{RpcError, code};
use proxies::Proxies;
use rustls::ClientConfig;
use std::sync::Arc;
use trust::Trust;

/// What all requests share, decided at the start. Certificates are read when the first one needs them.
#[derive(Debug)]
pub(crate) struct Outbound {
    egress: Egress,
    proxies: Proxies,
    trust: Trust,
    look_ups: LookUps,
}

impl Outbound {
    pub(crate) fn new(config: &Config) -> Self {
        Self { egress: Egress::of(config), proxies: Proxies::new(config), trust: Trust::new(config), look_ups: LookUps::new() }
    }
}

/// Whom the gateway believes where it dials for itself.
pub(crate) async fn believed(config: &Config) -> Result<Arc<ClientConfig>, String> {
    Trust::new(config).config().await
}

/// Of parameters that are wrong.
fn wrong(text: impl Into<String>) -> RpcError {
    RpcError::new(code::INVALID_PARAMS, text)
}

/// Of the network, the server at its other end, or a rule of the operator.
fn failed(text: impl Into<String>) -> RpcError {
    RpcError::new(code::INTERNAL, text)
}

//! The server: connections, sessions, processes and workers.
//!
//! # How it works
//! A [`Link`] carries messages of one client; its connection task decodes them and routes each call. Files go to a worker, a
//! confined child that the pool keeps warm; processes belong to a session task and are started by the spawner, a
//! single-threaded child that is everyone's parent. Each piece of state has one owner, reached by messages; the table of
//! sessions is the only lock. The gateway itself opens no path that a client named.
#![forbid(unsafe_code)]

mod answer;
mod asked;
mod audit;
mod blocking;
mod budget;
mod caller;
mod config;
mod connection;
mod core;
mod descriptors;
mod environment;
mod fs_call;
mod handles;
mod handshake;
mod helper;
mod http;
mod ids;
mod limit_error;
mod limits;
mod link;
mod listen;
mod metrics;
#[cfg(feature = "otlp")]
mod otlp;
mod peer;
mod policies;
mod private;
mod process;
mod readiness;
mod registry;
mod remote;
mod reply;
mod room;
mod scope;
mod session;
mod stdio;
mod watch;

pub use crate::audit::{AuditError, AuditFault, AuditFile, Verified, verify_audit};
pub use crate::budget::Charge;
pub use crate::caller::Transport;
pub use crate::config::{Config, ExecServerRuntimePaths, ProcessTimes};
pub use crate::core::{Gateway, StartError};
pub use crate::http::{EgressRule, EgressRuleError};
pub use crate::limits::{LIMITS, Limit, LimitError, Unit};
pub use crate::link::{ConnectionEnded, Inlet, Link, LinkEnd, Outgoing};
pub use crate::listen::{
    Credential, DEFAULT_LISTEN_URL, ExecServerListenUrlParseError, ListenError, ListenUrl, SecretTooShort, SignError,
    SignedBearer, Tls, TlsError, run_main, serve, token_path,
};
pub use crate::readiness::Readiness;
pub use crate::remote::{RemoteEnvironmentConfig, RemoteError, run_forward, run_remote_environment};

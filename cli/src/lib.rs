//! Portcullis for programs that embed it: everything public of the server, the client and the helpers, in one crate.
//!
//! A program that embeds the gateway does two things. First in its `main` it asks [`dispatch`], which carries out a hidden
//! role if this start is one; then it hands [`ExecServerRuntimePaths`] to [`run_main`], or starts a [`Gateway`] of its own.
//! `examples/embed.rs` is such a program.

pub use portcullis_client as client;
pub use portcullis_gateway::{
    AuditError, AuditFault, AuditFile, Config, Credential, DEFAULT_LISTEN_URL, EgressRule, EgressRuleError,
    ExecServerListenUrlParseError, ExecServerRuntimePaths, Gateway, LIMITS, Limit, LimitError, Link, LinkEnd, ListenError,
    ListenUrl, Outgoing, ProcessTimes, RemoteEnvironmentConfig, RemoteError, SecretTooShort, SignError, SignedBearer, StartError,
    Tls, TlsError, Transport, Unit, Verified, run_forward, run_main, run_remote_environment, serve, token_path, verify_audit,
};
pub use portcullis_helpers::dispatch;
pub use portcullis_protocol as protocol;
pub use portcullis_relay::{credentials, rendezvous};
pub use portcullis_sandbox as sandbox;

mod link;

pub use link::connect;

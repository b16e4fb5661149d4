//! The library with which other programs use an exec-server.
//!
//! # How it works
//! A [`Transport`] carries texts both ways, over a WebSocket or within a process. The client's one task owns it: it matches
//! answers with their calls, and hands what happened to a process to whoever started it. This version does not come back
//! after a cut: every call then fails with [`ExecServerError::Disconnected`].
#![forbid(unsafe_code)]

mod client;
mod dial;
mod error;
mod process;
mod task;

pub use client::{ExecServerClient, ExecServerClientConnectOptions};
pub use error::ExecServerError;
pub use process::{Process, ProcessEvent, ProcessEvents, ProcessInput};
pub use task::Transport;

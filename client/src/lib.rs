//! The library with which other programs use an exec-server.
//!
//! # How it works
//! The client's one task owns the link, the calls without answers, and who hears of which process. What it decides is in
//! `recovery`, which has neither sockets nor a clock: one input, then its outputs. The task carries them out.
//!
//! When the link is cut the client comes back by itself: it dials again, resumes its session, reads what every process did
//! meanwhile, and goes on. Handles survive that. A call that was on its way is sent again where the server sees that it is the
//! same one, or where doing it twice is doing it once; else it fails, and the error says whether it may have been carried out.
//! `docs/client.md` has the whole of it.
#![forbid(unsafe_code)]

mod client;
mod dial;
mod environments;
mod error;
mod files;
mod http;
mod link;
mod mailbox;
mod options;
mod pending;
mod process;
mod recovery;
mod relay;
mod status;
mod task;
mod tls;

pub use client::ExecServerClient;
pub use environments::{Environment, EnvironmentWay, Environments, EnvironmentsError};
pub use error::ExecServerError;
pub use files::{FileReader, FileWriter};
pub use http::{HttpBody, HttpHeader, HttpRequest, HttpResponse};
pub use options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs, Token};
pub use process::{Finished, Process, ProcessEvent, ProcessEvents, ProcessInput};
pub use status::ClientStatus;
pub use task::Transport;
pub use tls::{Tls, TlsError};

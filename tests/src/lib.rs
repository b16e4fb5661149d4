//! The harness of the integration tests: the real program, a plain client, a place for files.
//!
//! Everything waits for events: a line of output, an answer, a notification, an end. The one clock is the deadline after
//! which a test gives up.

mod client;
mod place;
mod program;
mod proxy;
mod workspace;

pub use client::{Client, Events, Refusal};
pub use place::Place;
pub use program::{Program, Server, Watched, executable, portcullis, portcullis_at, without};
pub use proxy::Proxy;
pub use workspace::{Workspace, at, special};

use std::time::Duration;

/// How long a test waits for something that should come at once. Long, since a loaded machine must not fail a test.
pub const PATIENCE: Duration = Duration::from_secs(60);

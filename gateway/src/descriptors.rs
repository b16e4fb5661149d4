//! The server's own descriptors: it and its helpers may have twice as many as what they start.
//!
//! The kernel bounds the descriptors of a user that are on their way in sockets by the soft limit of the sender (unix(7),
//! ETOOMANYREFS). A program that fills that budget up to its own limit leaves the other half to the server, which hands descriptors to
//! its helpers at each start.

use portcullis_protocol::limit::DefaultBounds;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::num::NonZeroU64;

/// With a hard limit below this a program may have as many as the server: programs get 1,024 in any case.
const ENOUGH: u64 = 2048;

/// Raises the soft limit of this process to the hard one. The answer says what it was, with which programs begin.
pub(crate) fn raise(bounds: DefaultBounds) -> DefaultBounds {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if maximum.is_some_and(|most| most < ENOUGH) {
        tracing::warn!(
            hard = maximum,
            "the hard limit of open files is low: a program can use up what the server needs to start others; raise it to {ENOUGH} or more"
        );
    }
    // The hard limit stays, which anybody may.
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("raise the limit of open files of the server: {error}");
    }
    // Another gateway of this process may have raised it before.
    let before = current.filter(|current| maximum.is_none_or(|most| *current < most));
    DefaultBounds { open_files: before.and_then(NonZeroU64::new).or(NonZeroU64::new(1024)), ..bounds }
}

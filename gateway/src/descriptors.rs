//! The server's own descriptors: the server and its helpers may have twice as many as the programs that they start.
//!
//! The kernel bounds a user's descriptors in flight by the soft limit of the sender (unix(7), ETOOMANYREFS). A program that fills
//! that budget up to its own limit leaves the other half to the server, which passes descriptors to its helpers at each start.

use portcullis_protocol::limit::DefaultBounds;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::num::NonZeroU64;

/// With a hard limit below this a program may have as many as the server: programs get 1,024 in any case.
const ENOUGH: u64 = 2048;

/// The most descriptors that this process may have; none: the system sets no limit.
pub(crate) fn limit() -> Option<usize> {
    getrlimit(Resource::Nofile).current.map(|most| usize::try_from(most).unwrap_or(usize::MAX))
}

/// Raises the soft limit of this process to the hard one. The result has the previous soft limit, with which programs begin.
pub(crate) fn raise(bounds: DefaultBounds) -> DefaultBounds {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if maximum.is_some_and(|most| most < ENOUGH) {
        tracing::warn!(
            hard = maximum,
            "the hard limit of open files is low: a program can use up the descriptors that the server needs to start other programs; raise the limit to {ENOUGH} or more"
        );
    }
    // The hard limit stays, so every user may do this.
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("raise the limit of open files of the server: {error}");
    }
    // Another gateway of this process may have raised it before.
    let before = current.filter(|current| maximum.is_none_or(|most| *current < most));
    DefaultBounds { open_files: before.and_then(NonZeroU64::new).or(NonZeroU64::new(1024)), ..bounds }
}

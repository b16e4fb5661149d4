//! From the parameters of a start to a running child, and from its pipes to events.

pub(crate) mod env;
pub(crate) mod launch;
mod pipe;
pub(crate) mod pty;
pub(crate) mod pump;
pub(crate) mod running;
mod source;

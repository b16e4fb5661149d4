//! The gateway's end of its helpers.

pub(crate) mod pool;
pub(crate) mod socket;
pub(crate) mod spawner;
pub(crate) mod worker;

//! Remote mode: an executor behind a firewall and its clients meet at a rendezvous, end to end encrypted.
//!
//! Nothing of it is built yet; this crate holds its place in the dependency order (client, gateway → relay → protocol).
#![forbid(unsafe_code)]

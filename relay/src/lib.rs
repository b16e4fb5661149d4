//! Remote mode: an executor behind a firewall and its clients meet at a rendezvous, end to end encrypted.
#![forbid(unsafe_code)]

mod crypto;
pub mod fault;
pub mod frame;
mod inbox;
pub mod keys;
pub mod noise;
mod outbox;
pub mod segment;

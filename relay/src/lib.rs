//! Remote mode: an executor behind a firewall and its clients meet at a rendezvous, end to end encrypted.
#![forbid(unsafe_code)]

mod crypto;
pub mod fault;
pub mod frame;
pub mod harness;
mod inbox;
pub mod keys;
pub mod mux;
pub mod noise;
mod outbox;
mod records;
#[cfg(test)]
mod seeded;
pub mod segment;
mod stream;

//! Remote mode: an executor behind a firewall and its clients (harnesses) meet at a rendezvous, end to end encrypted.
//!
//! # How it works
//! Both ends dial out: each holds one WebSocket to the rendezvous, which passes [`frame`]s on by the name of their stream and can read
//! nothing else. A harness opens a stream with a Noise handshake ([`noise`]); the executor asks its registry whether the harness's
//! [`keys`] may, and only then answers. From then on a stream carries messages of up to 64 MiB both ways: [`segment`] cuts them into
//! records, the channel encrypts each once, and `records` delivers them in order and once, over more than one WebSocket if need be.
//!
//! [`harness::Harness`] is one end, [`mux::Mux`] the other, for all streams of an executor. Both are without sockets, clocks and tasks:
//! `handle(input, now)`, then `poll(now)` until there is nothing, then wait for what comes first: a message from the WebSocket, a
//! message to queue, or `deadline()`. `poll` takes the time too, because records are encrypted and stamped when they are asked for: a
//! socket that is slow to take them is thereby heard by whoever queues messages. The program around them is expected to drain `poll`
//! after every input, and so keeps what waits there small.
//!
//! # Invariants
//! 1. Nothing of a message is in any frame in clear, and nothing is delivered that the other end did not send: not changed, not twice,
//!    not out of order, not with a gap. Whatever is wrong ends that stream, and no other.
//! 2. There is no unencrypted mode to fall back to.
//! 3. No harness is answered before the registry agreed to its keys and its authorization.
//! 4. A record is encrypted once. What is repeated is its bytes.
//! 5. No input panics, and every queue has a bound.
//! 6. Private keys are never stored, and neither keys nor authorizations nor messages are printed.
//!
//! # Sockets
//! Beside them are the parts with sockets: [`registry`] asks who serves an environment and whether a harness may, and shows it
//! [`credentials`], [`socket`] carries
//! frames to the rendezvous and back, and `rendezvous` (a feature, which the ends do not need) is a registry and a rendezvous in one
//! program.
#![forbid(unsafe_code)]

pub mod credentials;
mod crypto;
pub mod destination;
pub mod fault;
pub mod frame;
pub mod harness;
mod inbox;
pub mod keys;
pub mod mux;
pub mod noise;
mod outbox;
mod records;
pub mod registry;
#[cfg(feature = "rendezvous")]
pub mod rendezvous;
pub mod retry;
#[cfg(test)]
mod seeded;
pub mod segment;
pub mod socket;
mod stream;
pub mod wire;

/// A name for a new stream: a random UUID, since names must be nobody else's.
#[must_use]
pub fn stream_name() -> String {
    uuid::Uuid::new_v4().to_string()
}

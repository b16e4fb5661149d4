//! What the nodes of one rendezvous share: the key that they sign with, who registered which environment, and at which node its
//! executor has its socket. Nothing that passes between the ends is in it.
//!
//! An executor's socket holds a lease, which its node renews. A lease that is not renewed runs out, so a node that died is forgotten;
//! a newer one has a greater generation, and the older learns at its next renewal that it was replaced.

mod memory;
mod redis;

pub(super) use self::memory::{Environments, Memory, run};
pub(super) use self::redis::Redis;
use super::signed::Signer;
use crate::keys::PublicKeys;
use std::time::Duration;

/// Environments that are kept of all tokens. A token without room gets none by those of others.
const ENVIRONMENTS: usize = 4096;
/// Environments that are kept of one token; its own longest unserved one goes for a new one. As many as it may have sockets at a node.
const SHARE: usize = 256;
/// How long a lease holds that is not renewed: as long as an executor whose node died is still looked for there.
const LEASE: Duration = Duration::from_secs(10);
/// From one renewal to the next: several may fail before the lease runs out, and a replaced socket ends within that time.
pub(super) const RENEWAL: Duration = Duration::from_secs(2);

/// Why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// Another token registered the environment.
    Taken,
    /// Nobody did.
    Unknown,
    /// Its executor has no socket.
    Offline,
    /// The registration is not the newest, or the lease is not.
    Stale,
    /// Too many environments, and none of the asker's own to give up.
    Full,
    /// Too many sockets of this token.
    Sockets,
    /// What nodes share cannot be asked now.
    Unreachable,
}

/// An environment as it is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Environment {
    /// The first 64 bits of its owner's digest.
    pub(super) owner: u64,
    /// The name of the registration.
    pub(super) registration: String,
    /// Of the executor.
    pub(super) keys: PublicKeys,
    /// Where the executor has its socket.
    pub(super) node: Option<String>,
}

/// That the newest socket of an executor is at a node. It has all that the store has to know, so that a store that lost everything
/// learns it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) environment: String,
    pub(super) owner: u64,
    pub(super) registration: String,
    pub(super) keys: PublicKeys,
    pub(super) node: String,
    /// Grows with each socket.
    pub(super) generation: u64,
}

/// What nodes share: with nobody, or through a server that all of them ask. Clones are the same store.
#[derive(Debug, Clone)]
pub(super) enum Store {
    /// Of one node alone.
    Memory(Memory),
    /// Of all nodes with the same URL of Redis.
    Redis(Redis),
}

impl Store {
    /// The key that URLs and authorizations are signed with.
    pub(super) async fn signer(&self) -> Result<Signer, Refused> {
        match self {
            Self::Memory(memory) => Ok(memory.signer()),
            Self::Redis(redis) => redis.signer().await,
        }
    }

    /// An executor's token registers an environment. Answers the name of the registration, which stays while the keys do.
    pub(super) async fn register(&self, owner: u64, environment: &str, keys: &PublicKeys) -> Result<String, Refused> {
        match self {
            Self::Memory(memory) => memory.register(owner, environment, keys).await,
            Self::Redis(redis) => redis.register(owner, environment, keys).await,
        }
    }

    /// Who registered an environment, and where its executor is.
    pub(super) async fn find(&self, environment: &str) -> Result<Environment, Refused> {
        match self {
            Self::Memory(memory) => memory.find(environment).await,
            Self::Redis(redis) => redis.find(environment).await,
        }
    }

    /// An executor's socket came to a node: it has the newest lease from now on.
    pub(super) async fn lease(&self, owner: u64, environment: &str, registration: &str, node: &str) -> Result<Lease, Refused> {
        match self {
            Self::Memory(memory) => memory.lease(owner, environment, registration, node).await,
            Self::Redis(redis) => redis.lease(owner, environment, registration, node).await,
        }
    }

    /// Keeps a lease. [`Refused::Stale`]: it is not the newest, and its socket is to end.
    pub(super) async fn renew(&self, lease: &Lease) -> Result<(), Refused> {
        match self {
            Self::Memory(memory) => memory.renew(lease).await,
            Self::Redis(redis) => redis.renew(lease).await,
        }
    }

    /// Gives a lease back, as far as that can be told now: it runs out by itself.
    pub(super) async fn release(&self, lease: &Lease) {
        match self {
            Self::Memory(memory) => memory.release(lease).await,
            Self::Redis(redis) => redis.release(lease).await,
        }
    }
}

//! A registry and a rendezvous in one program, which runs alone or as one of many nodes.
//!
//! # How it works
//! An executor registers its public keys under the name of an environment and gets a URL for its WebSocket; a harness asks for the
//! environment and gets the executor's keys, a URL, and an authorization, which the executor shows to `validate`. URLs and
//! authorizations are signed, and valid for a minute. Each WebSocket is carried by a task of its own, and frames pass from socket to
//! socket by the name of their stream, which belongs to the harness that claimed it first.
//!
//! What a node knows by itself (sockets, limits) one task owns, the board. What nodes share (the key they sign with, who registered
//! what, and where an executor has its socket) is in the store: memory, for one node, or a Redis. A harness may come to any node; the
//! one where its executor is not dials the one where it is, and passes frames on.
//!
//! What passes is encrypted from end to end: the rendezvous can lose, repeat and forge frames and so end a stream. It cannot read
//! one. It does hand out the executor's keys, so a harness believes it about who the executor is.

mod accept;
mod board;
mod forward;
mod line;
mod routes;
mod signed;
mod sockets;
mod store;
mod upgrade;

use self::board::Board;
use self::routes::Doors;
use self::store::{Environments, Memory, Redis, Store};
use rustls::ServerConfig;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Questions to the board in line.
const QUESTIONS: usize = 256;
/// Upgraded sockets on their way to their tasks.
const UPGRADES: usize = 16;
/// How long open exchanges, and then sockets, may hold up the end.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// How many tokens there may be of each kind.
pub const MAX_TOKENS: usize = 1024;

/// What a rendezvous asks of its callers and says of itself.
#[derive(Clone, Default)]
pub struct Rendezvous {
    /// Tokens that may register and serve environments. An environment belongs to the token that registered it first.
    pub executor_tokens: Vec<String>,
    /// Tokens that may connect to environments, all of them.
    pub harness_tokens: Vec<String>,
    /// Where clients reach the WebSocket, as `wss://HOST`; none: at the host that they asked.
    pub public_url: Option<String>,
    /// The certificate to show and its key; none: no TLS is spoken.
    pub tls: Option<Arc<ServerConfig>>,
    /// A Redis that other nodes of the same rendezvous ask too, as `redis://HOST:PORT`; none: this is the only node.
    pub store: Option<String>,
    /// Where other nodes reach this one, as `ws://IP:PORT`; none: this is the only node.
    pub node_url: Option<String>,
}

/// Neither tokens nor the store's password are shown.
impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rendezvous({} executor tokens, {} harness tokens)", self.executor_tokens.len(), self.harness_tokens.len())
    }
}

/// A token that nobody knows yet: 256 random bits.
///
/// # Errors
/// The system gives no randomness.
pub fn new_token() -> io::Result<String> {
    signed::random().ok_or_else(|| io::Error::other("make a token: the system gave no random bytes"))
}

/// A rendezvous that listens.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    address: SocketAddr,
    rendezvous: Rendezvous,
    /// None: the store is this node's memory.
    redis: Option<Redis>,
}

impl Rendezvous {
    /// Listens. Nothing is served before [`Listening::serve`].
    ///
    /// # Errors
    /// The system says no, or these choices do not go together.
    pub async fn listen(self, address: SocketAddr) -> io::Result<Listening> {
        self.check(address).map_err(io::Error::other)?;
        let redis = self.store.as_deref().map(Redis::new).transpose()?;
        let listener =
            TcpListener::bind(address).await.map_err(|error| io::Error::other(format!("listen on {address}: {error}")))?;
        let address = listener.local_addr()?;
        Ok(Listening { listener, address, rendezvous: self, redis })
    }

    fn check(&self, address: SocketAddr) -> Result<(), String> {
        if self.executor_tokens.len() > MAX_TOKENS || self.harness_tokens.len() > MAX_TOKENS {
            return Err(format!("at most {MAX_TOKENS} tokens of a kind are kept"));
        }
        let begins = |url: &Option<String>, schemes: &[&str]| {
            url.as_ref()
                .is_none_or(|url| schemes.iter().any(|scheme| url.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())))
        };
        if !begins(&self.public_url, &["wss://", "ws://"]) {
            return Err("--public-url: it begins with wss:// or ws://, and names a host".to_owned());
        }
        if !begins(&self.node_url, &["ws://"]) {
            return Err("--node-url: it is ws://IP:PORT, in a network of the nodes' own".to_owned());
        }
        if self.store.is_some() != self.node_url.is_some() {
            return Err("--store and --node-url go together: nodes with one store reach each other".to_owned());
        }
        if self.node_url.is_some() && self.tls.is_some() {
            return Err("--node-url: nodes reach each other without TLS; take --tls-cert away and put TLS in front".to_owned());
        }
        let is_secure = self.tls.is_some() || self.public_url.as_ref().is_some_and(|url| url.starts_with("wss://"));
        if !is_secure && !address.ip().is_loopback() {
            return Err("tokens would travel in clear; give --tls-cert and --tls-key, or put TLS in front and say with --public-url wss://HOST where".to_owned());
        }
        Ok(())
    }
}

impl Listening {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is done, and ends every socket then.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) -> io::Result<()> {
        let Self { listener, rendezvous, redis, .. } = self;
        // What sockets ask of, which ends after them.
        let mut asked = JoinSet::new();
        let store = match redis {
            Some(redis) => Store::Redis(redis),
            None => {
                let made = Memory::new().ok_or_else(|| io::Error::other("make a key: the system gave no random bytes"))?;
                asked.spawn(store::run(Environments::default(), made.1));
                Store::Memory(made.0)
            }
        };
        let (questions, questioned) = mpsc::channel(QUESTIONS);
        asked.spawn(board::run(Board::default(), questioned));
        let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
        let (end, until) = watch::channel(());
        let doors = Doors::new(&rendezvous, store, questions, upgrades, until.clone());
        let (mut accepting, mut sockets) = (JoinSet::new(), JoinSet::new());
        accepting.spawn(accept::run(listener, rendezvous.tls.clone(), routes::routes(doors), accept::SOCKETS, until));
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                Some(carry) = upgraded.recv() => drop(sockets.spawn(carry)),
                Some(_ended) = sockets.join_next() => {}
                () = &mut stop => break,
            }
        }
        drop(end);
        let exchanged = async { while accepting.join_next().await.is_some() {} };
        let _aborted_below = tokio::time::timeout(STRAGGLERS, exchanged).await;
        accepting.shutdown().await;
        drop(upgraded);
        // Those of executors give their leases back.
        let ended = async { while sockets.join_next().await.is_some() {} };
        let _aborted_below = tokio::time::timeout(STRAGGLERS, ended).await;
        sockets.shutdown().await;
        asked.shutdown().await;
        Ok(())
    }
}

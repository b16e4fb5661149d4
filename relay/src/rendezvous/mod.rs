//! A registry and a rendezvous in one program, which keeps what it knows in memory.
//!
//! # How it works
//! An executor registers its public keys under the name of an environment and gets a URL for its WebSocket; a harness asks for the
//! environment and gets the executor's keys, a URL, and an authorization, which the executor shows to `validate`. URLs and
//! authorizations are signed, and valid for a minute. One task owns the board; each WebSocket is carried by a task of its own,
//! and frames pass from socket to socket by the name of their stream, which belongs to the harness that claimed it first.
//!
//! What passes is encrypted from end to end: the rendezvous can lose, repeat and forge frames and so end a stream. It cannot read
//! one. It does hand out the executor's keys, so a harness believes it about who the executor is.

mod board;
mod routes;
mod signed;
mod sockets;

use self::board::Board;
use self::routes::Doors;
use self::signed::Signer;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Questions to the board in line.
const QUESTIONS: usize = 256;
/// Upgraded sockets on their way to their tasks.
const UPGRADES: usize = 16;
/// How long open exchanges may hold up the end.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// How many tokens there may be of each kind.
pub const MAX_TOKENS: usize = 1024;

/// What a rendezvous asks of its callers and says of itself.
#[derive(Clone)]
pub struct Rendezvous {
    /// Tokens that may register and serve environments. An environment belongs to the token that registered it first.
    pub executor_tokens: Vec<String>,
    /// Tokens that may connect to environments, all of them.
    pub harness_tokens: Vec<String>,
    /// Where clients reach the WebSocket, as `wss://HOST`; none: at the host that they asked.
    pub public_url: Option<String>,
}

/// Tokens are not shown.
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
    signer: Signer,
}

impl Rendezvous {
    /// Listens. Nothing is served before [`Listening::serve`].
    ///
    /// # Errors
    /// The system says no, or there are too many tokens.
    pub async fn listen(self, address: SocketAddr) -> io::Result<Listening> {
        if self.executor_tokens.len() > MAX_TOKENS || self.harness_tokens.len() > MAX_TOKENS {
            return Err(io::Error::other(format!("at most {MAX_TOKENS} tokens of a kind are kept")));
        }
        let signer = Signer::new().ok_or_else(|| io::Error::other("make a key: the system gave no random bytes"))?;
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Listening { listener, address, rendezvous: self, signer })
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
    /// The listener broke.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) -> io::Result<()> {
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let (upgrades, mut upgraded) = mpsc::channel(UPGRADES);
        let doors = Doors::new(&self.rendezvous, Arc::new(self.signer), questions, upgrades);
        let (ended, mut owner) = (tokio::sync::watch::channel(()), JoinSet::new());
        let (end, mut until) = ended;
        let board = tokio::spawn(board::run(Board::default(), asked));
        let accepting = axum::serve(self.listener, routes::routes(doors)).with_graceful_shutdown(async move {
            let _end_dropped = until.changed().await;
        });
        owner.spawn(async move { accepting.await });
        let mut sockets = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        let served = loop {
            tokio::select! {
                Some(carry) = upgraded.recv() => drop(sockets.spawn(carry)),
                Some(_ended) = sockets.join_next() => {}
                Some(served) = owner.join_next() => break served.unwrap_or_else(|panicked| Err(io::Error::other(panicked))),
                () = &mut stop => break Ok(()),
            }
        };
        drop(end);
        sockets.shutdown().await;
        drop(upgraded);
        let drained = async { while owner.join_next().await.is_some() {} };
        let _aborted_below = tokio::time::timeout(STRAGGLERS, drained).await;
        owner.shutdown().await;
        board.abort();
        let _aborted = board.await;
        served
    }
}

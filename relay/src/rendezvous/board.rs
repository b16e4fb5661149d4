//! What one node knows by itself: which executors have their sockets here, how many sockets each token has here, and how often it
//! asked. One task owns it; the rest asks.

use super::line::Line;
use super::signed::Role;
use super::sockets::Claim;
use super::store::{Lease, Refused};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// WebSockets at a time of one token.
const SOCKETS: usize = 256;
/// Questions of one token at once, and the time after which it has one more: a recovery asks a few, and nobody can keep us busy.
const BURST: u32 = 256;
const REFILL: Duration = Duration::from_millis(50);

/// A socket's place among those of its token; it is free when this is dropped, whoever has it then and whatever the board is doing.
pub(super) type Counted = OwnedSemaphorePermit;

/// Of which kind a token is, and the first 64 bits of its digest.
pub(super) type Token = (Role, u64);

/// What is asked of the board.
#[derive(Debug)]
pub(super) enum Question {
    /// May a token ask at all now?
    Admit { token: Token, answer: oneshot::Sender<bool> },
    /// A socket of a token comes, if it may. It is counted until the answer is dropped.
    Come { token: Token, answer: oneshot::Sender<Result<Counted, Refused>> },
    /// An executor's socket is here. Answers what ends when another one comes in its place.
    Serve { lease: Box<Lease>, executor: Executor, answer: oneshot::Sender<Replaced> },
    /// Who serves this registration here?
    Use { environment: String, registration: String, answer: oneshot::Sender<Result<Executor, Refused>> },
}

/// How to reach the socket of an executor.
#[derive(Debug, Clone)]
pub(super) struct Executor {
    /// Streams that harnesses claim, and give back.
    pub(super) claims: mpsc::Sender<Claim>,
    /// Frames for it.
    pub(super) frames: Line,
}

impl Executor {
    fn is_online(&self) -> bool {
        !self.claims.is_closed()
    }
}

/// Ends when another socket serves in the place of this one.
pub(super) type Replaced = oneshot::Receiver<()>;

#[derive(Debug)]
struct Served {
    registration: String,
    generation: u64,
    executor: Executor,
    /// Dropped when another one comes.
    _newest: oneshot::Sender<()>,
}

/// The board. No sockets, no clock.
#[derive(Debug, Default)]
pub(super) struct Board {
    executors: HashMap<String, Served>,
    /// Places that are free, one entry for each token that the node knows.
    sockets: HashMap<Token, Arc<Semaphore>>,
    /// When a token's questions are all forgotten.
    busy: HashMap<Token, Instant>,
}

/// Owns the board until nobody can ask any more.
pub(super) async fn run(mut board: Board, mut asked: mpsc::Receiver<Question>) {
    while let Some(question) = asked.recv().await {
        board.handle(question, Instant::now());
    }
}

impl Board {
    fn handle(&mut self, question: Question, now: Instant) {
        // Whoever does not wait for the answer any more does not need it.
        match question {
            Question::Admit { token, answer } => {
                let _gone = answer.send(self.admit(token, now));
            }
            Question::Come { token, answer } => {
                let _gone = answer.send(self.come(token));
            }
            Question::Serve { lease, executor, answer } => {
                let _gone = answer.send(self.serve(*lease, executor));
            }
            Question::Use { environment, registration, answer } => {
                let _gone = answer.send(self.executor(&environment, &registration));
            }
        }
    }

    fn admit(&mut self, token: Token, now: Instant) -> bool {
        let until = self.busy.entry(token).or_insert(now);
        let next = (*until).max(now) + REFILL;
        let is_admitted = next <= now + REFILL * BURST;
        if is_admitted {
            *until = next;
        }
        is_admitted
    }

    fn come(&mut self, token: Token) -> Result<Counted, Refused> {
        let places = self.sockets.entry(token).or_insert_with(|| Arc::new(Semaphore::new(SOCKETS)));
        Arc::clone(places).try_acquire_owned().map_err(|_taken| Refused::Sockets)
    }

    /// Two sockets may come here in another order than their leases were given; the newer lease counts.
    fn serve(&mut self, lease: Lease, executor: Executor) -> Replaced {
        // As many are left as there are sockets.
        self.executors.retain(|_, served| served.executor.is_online());
        let (newest, replaced) = oneshot::channel();
        let Lease { environment, registration, generation, .. } = lease;
        let known = self.executors.get(&environment);
        if known.is_some_and(|known| known.registration != registration) {
            ousted(&environment);
        }
        if known.is_none_or(|known| known.registration != registration || known.generation < generation) {
            self.executors.insert(environment, Served { registration, generation, executor, _newest: newest });
        }
        replaced
    }

    fn executor(&self, environment: &str, registration: &str) -> Result<Executor, Refused> {
        let served = self.executors.get(environment).filter(|served| served.executor.is_online()).ok_or(Refused::Offline)?;
        if served.registration == registration { Ok(served.executor.clone()) } else { Err(Refused::Stale) }
    }
}

/// Says that the lease of an executor whose socket was open is no more its own: a new start of it has the place, or a second one, or
/// the store was emptied.
pub(super) fn ousted(environment: &str) {
    tracing::warn!(
        "an executor's socket of the environment {environment} ends, since another one of the same token took its place, or the store has lost it; if this \
         repeats, two executors oust each other: give each an environment of its own"
    );
}

#[cfg(test)]
mod tests {
    use super::super::line;
    use super::*;
    use crate::keys::Identity;
    use oneshot::error::TryRecvError;

    fn executor() -> (Executor, mpsc::Receiver<Claim>, mpsc::Receiver<line::Waiting>) {
        let ((claims, claimed), (frames, framed)) = (mpsc::channel(1), Line::new(&line::room()));
        (Executor { claims, frames }, claimed, framed)
    }

    fn lease(registration: &str, generation: u64) -> Lease {
        let [environment, registration, node] = ["box", registration, ""].map(str::to_owned);
        let keys = Identity::generate().unwrap().public_keys();
        Lease { environment, owner: 1, registration, keys, node, generation }
    }

    #[test]
    fn the_newest_lease_of_the_newest_registration_serves() {
        let mut board = Board::default();
        let (end, claimed, _framed) = executor();
        assert_eq!(board.executor("box", "one").err(), Some(Refused::Offline));
        let mut second = board.serve(lease("one", 2), end.clone());
        // It was given before the other one.
        let mut first = board.serve(lease("one", 1), end.clone());
        assert_eq!((first.try_recv(), second.try_recv()), (Err(TryRecvError::Closed), Err(TryRecvError::Empty)));
        assert!(board.executor("box", "one").is_ok());
        let mut third = board.serve(lease("two", 1), end);
        assert_eq!((second.try_recv(), third.try_recv()), (Err(TryRecvError::Closed), Err(TryRecvError::Empty)));
        assert_eq!(board.executor("box", "one").err(), Some(Refused::Stale));
        assert!(board.executor("box", "two").is_ok());
        drop(claimed);
        assert_eq!(board.executor("box", "two").err(), Some(Refused::Offline));
    }

    #[test]
    fn sockets_and_questions_of_a_token_are_bounded() {
        let (mut board, now, token, other) = (Board::default(), Instant::now(), (Role::Harness, 0), (Role::Harness, 1));
        let mut open: Vec<_> = (0..SOCKETS).map(|_| board.come(token).unwrap()).collect();
        assert_eq!(board.come(token).err(), Some(Refused::Sockets));
        assert!(board.come(other).is_ok());
        // A place is free at once, and so are all of them, without the board being told.
        drop(open.pop());
        open.push(board.come(token).unwrap());
        assert_eq!(board.come(token).err(), Some(Refused::Sockets));
        open.clear();
        open.extend((0..SOCKETS).map(|_| board.come(token).unwrap()));
        assert_eq!((0..2 * BURST).filter(|_| board.admit(token, now)).count(), usize::try_from(BURST).unwrap());
        assert!(board.admit(other, now) && board.admit(token, now + REFILL));
        assert!(!board.admit(token, now + REFILL));
    }
}

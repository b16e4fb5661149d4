//! What the rendezvous knows: who serves which environment, how many sockets each token has, and how often it asked. One task owns
//! it; the rest asks.

use super::signed::Role;
use super::sockets::{Claim, Incoming};
use crate::keys::PublicKeys;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Environments that are kept; the longest unserved one goes for a new one.
const ENVIRONMENTS: usize = 4096;
/// WebSockets at a time of one token.
const SOCKETS: usize = 256;
/// Questions of one token at once, and the time after which it has one more: a recovery asks a few, and nobody can keep us busy.
const BURST: u32 = 256;
const REFILL: Duration = Duration::from_millis(50);

/// Of which kind a token is, and its number.
pub(super) type Token = (Role, usize);

/// What is asked of the board.
#[derive(Debug)]
pub(super) enum Question {
    /// May a token ask at all now?
    Admit { token: Token, answer: oneshot::Sender<bool> },
    /// An executor's token registers an environment. Answers the name of the registration.
    Register { token: usize, environment: String, keys: Box<PublicKeys>, answer: oneshot::Sender<Result<String, Refused>> },
    /// Who serves an environment?
    Find { environment: String, answer: oneshot::Sender<Result<(String, PublicKeys), Refused>> },
    /// Does this executor's token own the registration?
    Owns { token: usize, environment: String, registration: String, answer: oneshot::Sender<bool> },
    /// An executor's socket came. Answers what ends when another one comes in its place.
    Serve {
        token: usize,
        environment: String,
        registration: String,
        executor: Executor,
        answer: oneshot::Sender<Result<Replaced, Refused>>,
    },
    /// A harness's socket came.
    Use { token: usize, environment: String, registration: String, answer: oneshot::Sender<Result<Executor, Refused>> },
    /// A socket is gone.
    Gone { token: Token },
}

/// Why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// Another token registered the environment.
    Taken,
    /// Nobody did.
    Unknown,
    /// Its executor has no socket.
    Offline,
    /// The registration is not the newest.
    Stale,
    /// Too many environments.
    Full,
    /// Too many sockets of this token.
    Sockets,
}

/// How to reach the socket of an executor.
#[derive(Debug, Clone)]
pub(super) struct Executor {
    /// Streams that harnesses claim, and give back.
    pub(super) claims: mpsc::Sender<Claim>,
    /// Frames for it.
    pub(super) frames: mpsc::Sender<Incoming>,
}

/// Ends when another socket serves in the place of this one.
pub(super) type Replaced = oneshot::Receiver<()>;

#[derive(Debug)]
struct Environment {
    owner: usize,
    registration: String,
    keys: PublicKeys,
    registered: Instant,
    /// The newest socket, and what is dropped when another one comes.
    executor: Option<(Executor, oneshot::Sender<()>)>,
}

impl Environment {
    fn is_online(&self) -> bool {
        self.executor.as_ref().is_some_and(|(executor, _)| !executor.claims.is_closed())
    }
}

/// The board. No sockets, no clock.
#[derive(Debug, Default)]
pub(super) struct Board {
    environments: HashMap<String, Environment>,
    sockets: HashMap<Token, usize>,
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
            Question::Register { token, environment, keys, answer } => {
                let _gone = answer.send(self.register(token, environment, *keys, now));
            }
            Question::Find { environment, answer } => {
                let _gone = answer.send(self.find(&environment));
            }
            Question::Owns { token, environment, registration, answer } => {
                let owned = self.environments.get(&environment);
                let is_owner = owned.is_some_and(|owned| owned.owner == token && owned.registration == registration);
                let _gone = answer.send(is_owner);
            }
            Question::Serve { token, environment, registration, executor, answer } => {
                let served = self.serve(token, &environment, &registration, executor);
                if let Err(Ok(_replaced)) = answer.send(served) {
                    self.leave((Role::Environment, token));
                }
            }
            Question::Use { token, environment, registration, answer } => {
                if let Err(Ok(_executor)) = answer.send(self.enter(token, &environment, &registration)) {
                    self.leave((Role::Harness, token));
                }
            }
            Question::Gone { token } => self.leave(token),
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

    fn register(&mut self, token: usize, environment: String, keys: PublicKeys, now: Instant) -> Result<String, Refused> {
        if let Some(known) = self.environments.get_mut(&environment) {
            if known.owner != token {
                return Err(Refused::Taken);
            }
            // The same executor comes again: those who were told of it find it.
            if known.keys != keys {
                (known.registration, known.keys, known.executor) = (uuid::Uuid::new_v4().to_string(), keys, None);
            }
            known.registered = now;
            return Ok(known.registration.clone());
        }
        if self.environments.len() >= ENVIRONMENTS {
            let unserved = self.environments.iter().filter(|(_, environment)| !environment.is_online());
            let oldest = unserved.min_by_key(|(_, environment)| environment.registered).map(|(name, _)| name.clone());
            self.environments.remove(&oldest.ok_or(Refused::Full)?);
        }
        let registration = uuid::Uuid::new_v4().to_string();
        let new = Environment { owner: token, registration: registration.clone(), keys, registered: now, executor: None };
        self.environments.insert(environment, new);
        Ok(registration)
    }

    fn find(&self, environment: &str) -> Result<(String, PublicKeys), Refused> {
        let found = self.environments.get(environment).ok_or(Refused::Unknown)?;
        if found.is_online() { Ok((found.registration.clone(), found.keys.clone())) } else { Err(Refused::Offline) }
    }

    fn serve(&mut self, token: usize, environment: &str, registration: &str, executor: Executor) -> Result<Replaced, Refused> {
        let served = self.environments.get_mut(environment).ok_or(Refused::Unknown)?;
        if served.owner != token || served.registration != registration {
            return Err(Refused::Stale);
        }
        count(&mut self.sockets, (Role::Environment, token))?;
        let (newest, replaced) = oneshot::channel();
        served.executor = Some((executor, newest));
        Ok(replaced)
    }

    fn enter(&mut self, token: usize, environment: &str, registration: &str) -> Result<Executor, Refused> {
        let used = self.environments.get(environment).ok_or(Refused::Unknown)?;
        if used.registration != registration {
            return Err(Refused::Stale);
        }
        let executor = used.executor.as_ref().filter(|_| used.is_online()).map(|(executor, _)| executor.clone());
        let executor = executor.ok_or(Refused::Offline)?;
        count(&mut self.sockets, (Role::Harness, token))?;
        Ok(executor)
    }

    fn leave(&mut self, token: Token) {
        if let Some(sockets) = self.sockets.get_mut(&token) {
            *sockets = sockets.saturating_sub(1);
        }
    }
}

fn count(sockets: &mut HashMap<Token, usize>, token: Token) -> Result<(), Refused> {
    let open = sockets.entry(token).or_default();
    if *open >= SOCKETS {
        return Err(Refused::Sockets);
    }
    *open += 1;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Identity;

    fn keys() -> PublicKeys {
        Identity::generate().unwrap().public_keys()
    }

    fn executor() -> (Executor, mpsc::Receiver<Claim>, mpsc::Receiver<Incoming>) {
        let ((claims, claimed), (frames, framed)) = (mpsc::channel(1), mpsc::channel(1));
        (Executor { claims, frames }, claimed, framed)
    }

    #[test]
    fn an_environment_belongs_to_the_token_that_registered_it() {
        let (mut board, now) = (Board::default(), Instant::now());
        let (first, second) = (keys(), keys());
        let one = board.register(0, "box".to_owned(), first.clone(), now).unwrap();
        assert_eq!(board.register(1, "box".to_owned(), second.clone(), now), Err(Refused::Taken));
        assert_eq!(board.register(0, "box".to_owned(), first, now).as_ref(), Ok(&one));
        assert_eq!((board.find("other"), board.find("box")), (Err(Refused::Unknown), Err(Refused::Offline)));
        let (end, _claimed, _framed) = executor();
        assert!(board.serve(1, "box", &one, end.clone()).is_err() && board.serve(0, "box", "else", end.clone()).is_err());
        let mut replaced = board.serve(0, "box", &one, end.clone()).unwrap();
        assert!(board.find("box").is_ok() && board.enter(0, "box", &one).is_ok());
        assert_eq!(replaced.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let _newer = board.serve(0, "box", &one, end).unwrap();
        assert_eq!(replaced.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        // Other keys are another executor: what was said of the old one leads nowhere.
        let two = board.register(0, "box".to_owned(), second, now).unwrap();
        assert_ne!(one, two);
        assert_eq!(board.enter(0, "box", &one).err(), Some(Refused::Stale));
    }

    #[test]
    fn sockets_and_questions_of_a_token_are_bounded() {
        let (mut board, now) = (Board::default(), Instant::now());
        let one = board.register(0, "box".to_owned(), keys(), now).unwrap();
        let (end, _claimed, _framed) = executor();
        let _replaced = board.serve(0, "box", &one, end).unwrap();
        for _ in 0..SOCKETS {
            board.enter(0, "box", &one).unwrap();
        }
        assert_eq!(board.enter(0, "box", &one).err(), Some(Refused::Sockets));
        assert!(board.enter(1, "box", &one).is_ok());
        board.leave((Role::Harness, 0));
        assert!(board.enter(0, "box", &one).is_ok());
        let token = (Role::Harness, 0);
        assert_eq!((0..2 * BURST).filter(|_| board.admit(token, now)).count(), usize::try_from(BURST).unwrap());
        assert!(board.admit((Role::Harness, 1), now) && board.admit(token, now + REFILL));
        assert!(!board.admit(token, now + REFILL));
    }

    #[test]
    fn environments_are_bounded_and_the_longest_unserved_goes() {
        let (mut board, now, keys) = (Board::default(), Instant::now(), keys());
        for nth in 0..=ENVIRONMENTS {
            let nth_second = now + Duration::from_secs(nth as u64);
            board.register(0, nth.to_string(), keys.clone(), nth_second).unwrap();
        }
        assert_eq!(board.environments.len(), ENVIRONMENTS);
        assert!(!board.environments.contains_key("0") && board.environments.contains_key("1"));
    }
}

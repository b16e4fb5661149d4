//! The store of one node alone: one task owns it, the rest ask.

use super::{ENVIRONMENTS, Environment, LEASE, Lease, Refused, SHARE};
use crate::keys::PublicKeys;
use crate::rendezvous::signed::{self, Signer};
use std::collections::HashMap;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// Questions in line.
const QUESTIONS: usize = 256;

/// What is asked.
#[derive(Debug)]
pub(in crate::rendezvous) enum Question {
    Register { owner: u64, environment: String, keys: Box<PublicKeys>, answer: oneshot::Sender<Result<String, Refused>> },
    Find { environment: String, answer: oneshot::Sender<Result<Environment, Refused>> },
    Lease { owner: u64, environment: String, registration: String, node: String, answer: oneshot::Sender<Result<Lease, Refused>> },
    Renew { lease: Box<Lease>, answer: oneshot::Sender<Result<(), Refused>> },
    Release { lease: Box<Lease> },
}

/// The way to the environments.
#[derive(Debug, Clone)]
pub(in crate::rendezvous) struct Memory {
    signer: Signer,
    asked: mpsc::Sender<Question>,
}

impl Memory {
    /// The store, and the questions that [`run`] answers. None: the system gave no random bytes.
    pub(in crate::rendezvous) fn new() -> Option<(Self, mpsc::Receiver<Question>)> {
        let signer = Signer::new(&signed::random()?);
        let (asked, questions) = mpsc::channel(QUESTIONS);
        Some((Self { signer, asked }, questions))
    }

    pub(super) fn signer(&self) -> Signer {
        self.signer.clone()
    }

    pub(super) async fn register(&self, owner: u64, environment: &str, keys: &PublicKeys) -> Result<String, Refused> {
        let (environment, keys) = (environment.to_owned(), Box::new(keys.clone()));
        self.ask(|answer| Question::Register { owner, environment, keys, answer }).await
    }

    pub(super) async fn find(&self, environment: &str) -> Result<Environment, Refused> {
        let environment = environment.to_owned();
        self.ask(|answer| Question::Find { environment, answer }).await
    }

    pub(super) async fn lease(&self, owner: u64, environment: &str, registration: &str, node: &str) -> Result<Lease, Refused> {
        let [environment, registration, node] = [environment, registration, node].map(str::to_owned);
        self.ask(|answer| Question::Lease { owner, environment, registration, node, answer }).await
    }

    pub(super) async fn renew(&self, lease: &Lease) -> Result<(), Refused> {
        let lease = Box::new(lease.clone());
        self.ask(|answer| Question::Renew { lease, answer }).await
    }

    pub(super) async fn release(&self, lease: &Lease) {
        let _ending = self.asked.send(Question::Release { lease: Box::new(lease.clone()) }).await;
    }

    /// Nobody answers once the rendezvous ends.
    async fn ask<A>(&self, question: impl FnOnce(oneshot::Sender<Result<A, Refused>>) -> Question) -> Result<A, Refused> {
        let (answer, answered) = oneshot::channel();
        self.asked.send(question(answer)).await.map_err(|_ending| Refused::Unreachable)?;
        answered.await.map_err(|_ending| Refused::Unreachable)?
    }
}

/// Owns the environments until nobody can ask any more.
pub(in crate::rendezvous) async fn run(mut environments: Environments, mut questions: mpsc::Receiver<Question>) {
    while let Some(question) = questions.recv().await {
        environments.handle(question, Instant::now());
    }
}

#[derive(Debug)]
struct Known {
    environment: Environment,
    /// When it was last registered, leased or renewed.
    seen: Instant,
    generation: u64,
    /// When the lease runs out, if there is one.
    until: Option<Instant>,
}

impl Known {
    fn is_served(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// All environments. No sockets, no clock.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct Environments(HashMap<String, Known>);

impl Environments {
    fn handle(&mut self, question: Question, now: Instant) {
        // Whoever does not wait for the answer any more does not need it.
        match question {
            Question::Register { owner, environment, keys, answer } => {
                let _gone = answer.send(self.register(owner, environment, *keys, now));
            }
            Question::Find { environment, answer } => {
                let _gone = answer.send(self.find(&environment, now));
            }
            Question::Lease { owner, environment, registration, node, answer } => {
                let _gone = answer.send(self.lease(owner, environment, &registration, node, now));
            }
            Question::Renew { lease, answer } => {
                let _gone = answer.send(self.renew(&lease, now));
            }
            Question::Release { lease } => self.release(&lease),
        }
    }

    fn register(&mut self, owner: u64, name: String, keys: PublicKeys, now: Instant) -> Result<String, Refused> {
        if let Some(known) = self.0.get_mut(&name) {
            if known.environment.owner != owner {
                return Err(Refused::Taken);
            }
            // The same executor comes again: those who were told of it find it.
            if known.environment.keys != keys {
                (known.environment.registration, known.environment.keys, known.until) = (name_of_registration(), keys, None);
            }
            known.seen = now;
            return Ok(known.environment.registration.clone());
        }
        let own = || self.0.iter().filter(|(_, known)| known.environment.owner == owner);
        if self.0.len() >= ENVIRONMENTS || own().count() >= SHARE {
            // What another token registered is not for this one to take.
            let oldest = own().filter(|(_, known)| !known.is_served(now)).min_by_key(|(_, known)| known.seen);
            let oldest = oldest.map(|(name, _)| name.clone()).ok_or(Refused::Full)?;
            self.0.remove(&oldest);
        }
        let registration = name_of_registration();
        let environment = Environment { owner, registration: registration.clone(), keys, node: None };
        self.0.insert(name, Known { environment, seen: now, generation: 0, until: None });
        Ok(registration)
    }

    fn find(&self, name: &str, now: Instant) -> Result<Environment, Refused> {
        let known = self.0.get(name).ok_or(Refused::Unknown)?;
        let node = known.environment.node.clone().filter(|_| known.is_served(now));
        Ok(Environment { node, ..known.environment.clone() })
    }

    fn lease(&mut self, owner: u64, name: String, registration: &str, node: String, now: Instant) -> Result<Lease, Refused> {
        let known = self.0.get_mut(&name).ok_or(Refused::Unknown)?;
        let Environment { owner: known_owner, registration: newest, keys, .. } = &known.environment;
        if *known_owner != owner || newest != registration {
            return Err(Refused::Stale);
        }
        let (registration, keys) = (newest.clone(), keys.clone());
        known.generation += 1;
        (known.environment.node, known.until, known.seen) = (Some(node.clone()), Some(now + LEASE), now);
        Ok(Lease { environment: name, owner, registration, keys, node, generation: known.generation })
    }

    fn renew(&mut self, lease: &Lease, now: Instant) -> Result<(), Refused> {
        let known = self.newest(lease).ok_or(Refused::Stale)?;
        (known.until, known.seen) = (Some(now + LEASE), now);
        Ok(())
    }

    fn release(&mut self, lease: &Lease) {
        if let Some(known) = self.newest(lease) {
            known.until = None;
        }
    }

    /// The environment of a lease that was not replaced.
    fn newest(&mut self, lease: &Lease) -> Option<&mut Known> {
        let known = self.0.get_mut(&lease.environment)?;
        (known.environment.registration == lease.registration && known.generation == lease.generation).then_some(known)
    }
}

fn name_of_registration() -> String {
    uuid::Uuid::new_v4().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Identity;
    use std::time::Duration;

    fn keys() -> PublicKeys {
        Identity::generate().unwrap().public_keys()
    }

    #[test]
    fn an_environment_belongs_to_the_token_that_registered_it() {
        let (mut environments, now) = (Environments::default(), Instant::now());
        let (first, second, name) = (keys(), keys(), || "box".to_owned());
        let one = environments.register(1, name(), first.clone(), now).unwrap();
        assert_eq!(environments.register(2, name(), second.clone(), now), Err(Refused::Taken));
        assert_eq!(environments.register(1, name(), first, now).as_ref(), Ok(&one));
        assert_eq!(environments.find("other", now), Err(Refused::Unknown));
        assert_eq!(environments.lease(2, name(), &one, String::new(), now), Err(Refused::Stale));
        assert_eq!(environments.lease(1, name(), "else", String::new(), now), Err(Refused::Stale));
        let lease = environments.lease(1, name(), &one, "here".to_owned(), now).unwrap();
        assert_eq!(environments.find("box", now).unwrap().node.as_deref(), Some("here"));
        // Other keys are another executor: what was said of the old one leads nowhere.
        let two = environments.register(1, name(), second, now).unwrap();
        assert_ne!(one, two);
        assert_eq!((environments.renew(&lease, now), environments.find("box", now).unwrap().node), (Err(Refused::Stale), None));
    }

    #[test]
    fn the_newest_lease_counts_until_it_runs_out() {
        let (mut environments, now) = (Environments::default(), Instant::now());
        let registration = environments.register(1, "box".to_owned(), keys(), now).unwrap();
        let mut lease = || environments.lease(1, "box".to_owned(), &registration, String::new(), now).unwrap();
        let (older, newer) = (lease(), lease());
        assert!(older.generation < newer.generation);
        environments.release(&older);
        assert_eq!((environments.renew(&older, now), environments.renew(&newer, now)), (Err(Refused::Stale), Ok(())));
        let later = now + LEASE - Duration::from_nanos(1);
        assert!(environments.find("box", later).unwrap().node.is_some());
        assert_eq!(environments.find("box", now + LEASE).unwrap().node, None);
        // Nobody else came, so it may come back.
        assert_eq!(environments.renew(&newer, now + LEASE), Ok(()));
        environments.release(&newer);
        assert_eq!(environments.find("box", now).unwrap().node, None);
    }

    #[test]
    fn a_token_over_its_share_loses_its_own_longest_unserved() {
        let (mut environments, now, keys) = (Environments::default(), Instant::now(), keys());
        let second = |nth: usize| now + Duration::from_secs(nth as u64);
        environments.register(2, "of another".to_owned(), keys.clone(), now).unwrap();
        for nth in 0..SHARE {
            environments.register(1, nth.to_string(), keys.clone(), second(nth)).unwrap();
        }
        // One has a socket now; one had a socket long after it registered.
        let mut lease = |name: &str, time| {
            let registration = environments.find(name, now).unwrap().registration;
            environments.lease(1, name.to_owned(), &registration, String::new(), time).unwrap()
        };
        let (last, later) = (second(SHARE), second(SHARE) + LEASE);
        let (renewed, _served) = (lease("1", now), lease("0", later));
        environments.renew(&renewed, last).unwrap();
        environments.register(1, "new".to_owned(), keys, later).unwrap();
        assert_eq!(environments.0.len(), SHARE + 1);
        let kept = ["of another", "0", "1", "3", "new"].into_iter().all(|name| environments.0.contains_key(name));
        assert!(kept && !environments.0.contains_key("2"));
    }

    #[test]
    fn nobody_gets_room_by_anothers_environments() {
        let (mut environments, now, keys) = (Environments::default(), Instant::now(), keys());
        for nth in 0..ENVIRONMENTS {
            environments.register((nth / SHARE) as u64, nth.to_string(), keys.clone(), now).unwrap();
        }
        let newcomer = u64::MAX;
        assert_eq!(environments.register(newcomer, "new".to_owned(), keys.clone(), now), Err(Refused::Full));
        // Who has some makes room of its own, unless all of them are served.
        environments.register(0, "new".to_owned(), keys.clone(), now).unwrap();
        for known in environments.0.values_mut().filter(|known| known.environment.owner == 0) {
            known.until = Some(now + LEASE);
        }
        assert_eq!(environments.register(0, "newer".to_owned(), keys, now), Err(Refused::Full));
        assert_eq!(environments.0.len(), ENVIRONMENTS);
    }
}

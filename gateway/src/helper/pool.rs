//! The pool: it maps each session and policy to the worker that carries out its requests. The pool's task owns all workers.

use super::spawner::{Spawner, WorkerChild, WorkerEnd};
use super::worker::{Worker, WorkerError};
use crate::metrics::Metrics;
use crate::policies::Named;
use portcullis_protocol::helper::NamespaceLayer;
use portcullis_sandbox::mounts::MountChanges;
use portcullis_sandbox::policy::{Files, Policy, PolicyHash};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep, sleep_until, timeout};

/// The maximum number of workers of one session, one for each policy. Above it, the worker that was idle longest is dropped.
const PER_SESSION: usize = 16;
/// The maximum number of workers of all sessions.
const TOTAL: usize = 64;
/// The maximum number of workers that start at the same time: each needs a fork of the spawner, which also starts processes.
/// Further starts wait. The session with the fewest starting workers goes first.
const MAKING: usize = 4;
/// The maximum time for which a starting worker delays others. A slower one waits for a file system, not for a processor.
const HOLD_UP: Duration = Duration::from_millis(250);
/// The number of started children of each kind that wait for a policy. With one, the first request does not wait for a process
/// start.
const SPARES: usize = 1;
/// The maximum number of restarts of one worker because the machine's mounts or the policy's roots change meanwhile.
const VIEWS: u32 = 8;
/// The idle time after which a worker is ended. The next request starts another one.
const IDLE: Duration = Duration::from_secs(300);
/// The interval between checks for idle workers.
const SWEEP: Duration = Duration::from_secs(30);
/// The maximum number of spawners from which one worker is requested, if they die meanwhile.
const SPAWNERS: usize = 4;
/// The maximum time until it is known whether a worker ended by itself or with its spawner. It is longer than a warden needs to
/// end.
const SPAWNER_DEATH: Duration = Duration::from_secs(3);
/// The time for which the start of a worker is retried after the kernel refused it: other processes share the limits on tasks and
/// on descriptors in flight.
const SHORTAGE: Duration = Duration::from_secs(5);
/// The pause between two such attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// The maximum number of queued requests to the pool. Each is one call of a connection, and those are bounded.
const QUEUE: usize = 64;

/// A handle to the pool. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    orders: mpsc::Sender<Order>,
}

/// Identifies a worker by its session and its policy.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    session: Arc<str>,
    policy: Option<PolicyHash>,
}

type WorkerReply = oneshot::Sender<Result<Worker, WorkerError>>;
type WorkerTask = Pin<Box<dyn Future<Output = u64> + Send>>;

#[derive(Debug)]
enum Order {
    Worker { key: Key, policy: Option<Named>, unlike: Option<u64>, reply: WorkerReply },
    Forget { session: Arc<str> },
    Stop,
}

impl Pool {
    /// Starts the pool; the caller owns its task.
    pub(crate) fn start(spawner: Spawner, metrics: Arc<Metrics>) -> (Self, impl Future<Output = ()>) {
        let (orders, queue) = mpsc::channel(QUEUE);
        let has_views = matches!(spawner.namespaces(), NamespaceLayer::Available { .. });
        let (plain, in_view) = Default::default();
        let (mounts, work) = (MountChanges::observe(), JoinSet::new());
        let (entries, making, waiting) = Default::default();
        let task = Task { spawner, metrics, entries, has_views, plain, in_view, mounts, making, waiting, work };
        (Self { orders }, task.run(queue))
    }

    /// Returns the worker of a session under a policy, and starts it if necessary. `unlike` is the id of a worker that failed.
    pub(crate) async fn worker(
        &self,
        session: &Arc<str>,
        policy: Option<&Named>,
        unlike: Option<u64>,
    ) -> Result<Worker, WorkerError> {
        let (reply, answer) = oneshot::channel();
        let key = Key { session: Arc::clone(session), policy: policy.map(|named| named.hash) };
        let order = Order::Worker { key, policy: policy.cloned(), unlike, reply };
        let ended = || WorkerError::Start("the gateway is shutting down".to_owned());
        self.orders.send(order).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Ends the workers of a session.
    pub(crate) async fn forget(&self, session: Arc<str>) {
        let _pool_ended = self.orders.send(Order::Forget { session }).await;
    }

    /// Ends every worker and the task.
    pub(crate) async fn stop(&self) {
        let _pool_ended = self.orders.send(Order::Stop).await;
    }
}

enum Entry {
    Starting(Vec<WorkerReply>),
    Ready {
        worker: Worker,
        /// The state of the machine's mounts from which it made its view, if it has one.
        mounts: Option<u64>,
    },
}

/// A starting worker.
struct Start {
    key: Key,
    policy: Option<Named>,
    /// As in [`Entry::Ready`], read before the worker was requested.
    mounts: Option<u64>,
    /// The remaining number of restarts.
    tries: u32,
}

enum Happened {
    Spare { own_view: bool, child: Option<WorkerChild> },
    Confined(Start, Result<(Worker, WorkerTask), WorkerError>),
    Ended(u64),
}

/// Children of one kind that wait for a policy.
#[derive(Default)]
struct Spares {
    ready: Vec<WorkerChild>,
    filling: bool,
}

impl Spares {
    /// Takes a child that has not ended, as far as is known.
    fn take(&mut self) -> Option<WorkerChild> {
        while let Some(mut spare) = self.ready.pop() {
            if matches!(spare.ended.try_recv(), Err(oneshot::error::TryRecvError::Empty)) {
                return Some(spare);
            }
        }
        None
    }
}

struct Task {
    spawner: Spawner,
    metrics: Arc<Metrics>,
    entries: HashMap<Key, Entry>,
    /// The machine allows namespaces, so workers whose policy restricts files make their own view.
    has_views: bool,
    plain: Spares,
    in_view: Spares,
    mounts: MountChanges,
    /// The start times and sessions of starting workers: at most [`MAKING`], the oldest first.
    making: VecDeque<(Instant, Arc<str>)>,
    /// Starts that wait for a slot in `making`. Each has a waiting call, and the connections bound those.
    waiting: VecDeque<Start>,
    work: JoinSet<Happened>,
}

impl Task {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut sweep = tokio::time::interval_at(Instant::now() + SWEEP, SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.fill(false);
        self.fill(true);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Worker { key, policy, unlike, reply }) => self.find(key, policy, unlike, reply),
                    Some(Order::Forget { session }) => self.forget(&session).await,
                    Some(Order::Stop) | None => break,
                },
                Some(happened) = self.work.join_next() => {
                    if let Ok(happened) = happened {
                        self.happened(happened).await;
                    }
                }
                () = sleep_until(self.making.front().map_or_else(Instant::now, |(since, _)| *since + HOLD_UP)), if !self.waiting.is_empty() => {
                    self.making.pop_front();
                    self.make_next();
                }
                _tick = sweep.tick() => self.sweep().await,
            }
        }
        // When the spawner ends, it ends the remaining workers. The tasks end with their sockets.
        self.entries.clear();
        self.work.shutdown().await;
    }

    fn find(&mut self, key: Key, policy: Option<Named>, unlike: Option<u64>, reply: WorkerReply) {
        let own_view = self.has_views && policy.as_ref().is_some_and(|named| named.policy.files != Files::Unrestricted);
        let state = own_view.then(|| self.mounts.state());
        match self.entries.get_mut(&key) {
            // Later mounts are not visible in a view.
            Some(Entry::Ready { worker, mounts }) if worker.is_alive() && unlike != Some(worker.id()) && *mounts == state => {
                let _caller_gone = reply.send(Ok(worker.clone()));
                return;
            }
            Some(Entry::Starting(waiting)) => {
                waiting.push(reply);
                return;
            }
            // A failed or outdated worker ends when its last handle is dropped, after the pending requests of other callers.
            Some(Entry::Ready { .. }) | None => {}
        }
        self.entries.insert(key.clone(), Entry::Starting(vec![reply]));
        self.waiting.push_back(Start { key, policy, mounts: state, tries: VIEWS });
        self.make_next();
    }

    /// Begins waiting starts while there are free slots.
    fn make_next(&mut self) {
        while self.making.len() < MAKING {
            let of_session = |start: &Start| self.making.iter().filter(|(_, session)| *session == start.key.session).count();
            let least = self.waiting.iter().enumerate().min_by_key(|(_, start)| of_session(start)).map(|(at, _)| at);
            let Some(start) = least.and_then(|at| self.waiting.remove(at)) else { return };
            // The session may have ended while its start waited.
            if matches!(self.entries.get(&start.key), Some(Entry::Starting(_))) {
                self.making.push_back((Instant::now(), Arc::clone(&start.key.session)));
                self.confine(start);
            }
        }
    }

    /// Frees the slot of a start that succeeded or failed.
    fn made(&mut self, session: &Arc<str>) {
        if let Some(at) = self.making.iter().position(|(_, making)| making == session) {
            self.making.remove(at);
        }
        self.make_next();
    }

    fn confine(&mut self, start: Start) {
        let own_view = start.mounts.is_some();
        let (spawner, spare) = (self.spawner.clone(), self.spares(own_view).take());
        self.work.spawn(async move {
            let policy = start.policy.as_ref().map(|named| &*named.policy);
            let confined = confined(spare, policy, own_view, spawner, SHORTAGE).await;
            Happened::Confined(start, confined.map(|(worker, task)| (worker, Box::pin(task) as WorkerTask)))
        });
        self.fill(own_view);
    }

    fn spares(&mut self, own_view: bool) -> &mut Spares {
        if own_view { &mut self.in_view } else { &mut self.plain }
    }

    async fn happened(&mut self, happened: Happened) {
        match happened {
            Happened::Spare { own_view, child } => {
                let spares = self.spares(own_view);
                spares.filling = false;
                let failed = child.is_none();
                spares.ready.extend(child);
                if !failed {
                    self.fill(own_view);
                }
            }
            Happened::Confined(Start { key, policy, mounts: Some(before), tries }, Ok((worker, _not_run)))
                if tries > 0 && before != self.mounts.state() =>
            {
                // Callers that joined meanwhile came after the change, so they need a new worker. This one ends with its sockets.
                self.spawner.kill_worker(worker.id()).await;
                let mounts = Some(self.mounts.state());
                self.confine(Start { key, policy, mounts, tries: tries - 1 });
            }
            // A root was replaced while the view was made.
            Happened::Confined(start, Err(WorkerError::Unenforceable(failed)))
                if start.tries > 0 && failed.errno == Errno::STALE.raw_os_error() =>
            {
                self.confine(Start { tries: start.tries - 1, ..start });
            }
            Happened::Confined(Start { key, mounts, .. }, Ok((worker, task))) => {
                self.made(&key.session);
                let present = self.metrics.helper("worker");
                self.work.spawn(async move {
                    let _present = present;
                    Happened::Ended(task.await)
                });
                let Some(Entry::Starting(waiting)) = self.entries.remove(&key) else {
                    // The session ended meanwhile.
                    return self.spawner.kill_worker(worker.id()).await;
                };
                for reply in waiting {
                    let _caller_gone = reply.send(Ok(worker.clone()));
                }
                self.entries.insert(key.clone(), Entry::Ready { worker, mounts });
                self.make_room(&key);
            }
            Happened::Confined(Start { key, .. }, Err(error)) => {
                self.made(&key.session);
                if let Some(Entry::Starting(waiting)) = self.entries.remove(&key) {
                    for reply in waiting {
                        let _caller_gone = reply.send(Err(error.clone()));
                    }
                }
            }
            Happened::Ended(id) => {
                self.entries.retain(|_, entry| !matches!(entry, Entry::Ready { worker, .. } if worker.id() == id))
            }
        }
    }

    /// Starts spares in the background, one after the other.
    fn fill(&mut self, own_view: bool) {
        let is_of_use = !own_view || self.has_views;
        let spares = self.spares(own_view);
        if !is_of_use || spares.filling || spares.ready.len() >= SPARES {
            return;
        }
        spares.filling = true;
        let spawner = self.spawner.clone();
        self.work.spawn(async move { Happened::Spare { own_view, child: spawner.worker(own_view).await.ok() } });
    }

    async fn forget(&mut self, session: &str) {
        let (gone, kept): (HashMap<_, _>, HashMap<_, _>) = self.entries.drain().partition(|(key, _)| &*key.session == session);
        self.entries = kept;
        for entry in gone.into_values() {
            if let Entry::Ready { worker, .. } = entry {
                self.spawner.kill_worker(worker.id()).await;
            }
        }
    }

    async fn sweep(&mut self) {
        let idle: Vec<Key> = self.idle(|_| true).filter(|(_, idle)| *idle > IDLE).map(|(key, _)| key.clone()).collect();
        for key in idle {
            self.entries.remove(&key);
        }
        // A view keeps file systems in use that were unmounted on the machine since it was made. So a worker with an old view ends
        // after its pending requests.
        let state = self.mounts.state();
        self.entries.retain(|_, entry| !matches!(entry, Entry::Ready { mounts: Some(mounts), .. } if *mounts != state));
    }

    /// Drops the workers that were idle longest until the limits hold. A worker with a pending request stays. So busy workers can
    /// exceed the limits, but the calls in flight bound their number.
    fn make_room(&mut self, newest: &Key) {
        for (bound, of_session) in [(PER_SESSION, true), (TOTAL, false)] {
            let counts = |key: &Key| !of_session || key.session == newest.session;
            while self.entries.keys().filter(|key| counts(key)).count() > bound {
                let longest =
                    self.idle(counts).filter(|(key, idle)| *key != newest && !idle.is_zero()).max_by_key(|(_, idle)| *idle);
                let Some(key) = longest.map(|(key, _)| key.clone()) else { break };
                self.entries.remove(&key);
            }
        }
    }

    fn idle(&self, counts: impl Fn(&Key) -> bool) -> impl Iterator<Item = (&Key, Duration)> {
        self.entries.iter().filter(move |(key, _)| counts(key)).filter_map(|(key, entry)| match entry {
            Entry::Ready { worker, .. } => Some((key, worker.idle())),
            Entry::Starting(_) => None,
        })
    }
}

/// Confines a spare, or a new child. If the spare has ended a moment ago, that is detected here, before it got a request, so a new
/// child replaces it.
async fn confined(
    spare: Option<WorkerChild>,
    policy: Option<&Policy>,
    own_view: bool,
    spawner: Spawner,
    shortage: Duration,
) -> Result<(Worker, impl Future<Output = u64> + use<>), WorkerError> {
    if let Some(spare) = spare {
        match Worker::confine(spare, policy, spawner.clone()).await {
            Err(WorkerError::Start(reason)) => tracing::warn!("a spare worker failed: {reason}"),
            confined => return confined,
        }
    }
    let (mut deaths, since) = (0, Instant::now());
    loop {
        let mut child = spawner.worker(own_view).await?;
        let ended = std::mem::replace(&mut child.ended, oneshot::channel().1);
        // No request is sent to a child before it is confined, so another child can replace it.
        let reason = match Worker::confine(child, policy, spawner.clone()).await {
            Err(WorkerError::Start(reason)) => reason,
            confined => return confined,
        };
        match timeout(SPAWNER_DEATH, ended).await {
            // The spawner died with it. The next spawner starts another worker.
            Ok(Err(_)) if deaths + 1 < SPAWNERS => deaths += 1,
            Ok(Ok(WorkerEnd::NotStarted(_))) if since.elapsed() < shortage => sleep(PAUSE).await,
            Ok(Ok(WorkerEnd::NotStarted(cause))) => return Err(WorkerError::Start(cause)),
            Ok(Ok(WorkerEnd::Ran(status))) => {
                return Err(WorkerError::Start(format!("{reason} (exit status {})", status.code())));
            }
            Ok(Err(_)) | Err(_) => return Err(WorkerError::Start(reason)),
        }
    }
}

#[cfg(test)]
mod tests;

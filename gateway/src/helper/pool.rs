//! The pool: which worker carries out the requests of which session under which policy. Its task owns them all.

use super::mounts::MachineMounts;
use super::spawner::{Spawner, WorkerChild};
use super::worker::{Worker, WorkerError};
use crate::metrics::Metrics;
use crate::policies::Named;
use portcullis_protocol::helper::NamespaceLayer;
use portcullis_sandbox::policy::{Files, Policy, PolicyHash};
use rustix::io::Errno;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, timeout};

/// Workers of one session, one a policy; the one that idled longest makes room.
const PER_SESSION: usize = 16;
/// Workers of all sessions.
const TOTAL: usize = 64;
/// Started children that wait for a policy, of each kind: takes a process start off the first request's path.
const SPARES: usize = 1;
/// Workers that are made for one policy one after the other because the machine's mounts or its roots change meanwhile.
const VIEWS: u32 = 8;
/// A worker that nobody asked for this long is ended; its next request starts another.
const IDLE: Duration = Duration::from_secs(300);
/// How often idle workers are looked for.
const SWEEP: Duration = Duration::from_secs(30);
/// Spawners that are asked for one worker, if they die meanwhile.
const SPAWNERS: usize = 4;
/// How long it may take until it is known whether a worker ended by itself or with its spawner.
const SPAWNER_DEATH: Duration = Duration::from_secs(1);
/// Requests to the pool in line; each is one call of a connection, and those are bounded.
const QUEUE: usize = 64;

/// A handle to the pool. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    orders: mpsc::Sender<Order>,
}

/// Whose worker, and under what.
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
        let (mounts, work) = (MachineMounts::open(), JoinSet::new());
        let task = Task { spawner, metrics, entries: HashMap::new(), has_views, plain, in_view, mounts, work };
        (Self { orders }, task.run(queue))
    }

    /// The worker of a session under a policy, started if need be. `unlike` names a worker that proved of no use.
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
        /// The machine's mounts of which it made its view, if it has one.
        mounts: Option<u64>,
    },
}

/// A worker in the making.
struct Start {
    key: Key,
    policy: Option<Named>,
    /// As of [`Entry::Ready`], before it was asked for.
    mounts: Option<u64>,
    /// How often more it may be made anew.
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
    /// One that has not ended, as far as is known yet.
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
    /// The machine gives namespaces, so that workers whose policy restricts files make themselves a view.
    has_views: bool,
    plain: Spares,
    in_view: Spares,
    mounts: MachineMounts,
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
                _tick = sweep.tick() => self.sweep().await,
            }
        }
        // The spawner ends what is left with itself; the tasks end with their sockets.
        self.entries.clear();
        self.work.shutdown().await;
    }

    fn find(&mut self, key: Key, policy: Option<Named>, unlike: Option<u64>, reply: WorkerReply) {
        let own_view = self.has_views && policy.as_ref().is_some_and(|named| named.policy.files != Files::Unrestricted);
        let state = own_view.then(|| self.mounts.state());
        match self.entries.get_mut(&key) {
            // A view shows nothing that is mounted later.
            Some(Entry::Ready { worker, mounts }) if worker.is_alive() && unlike != Some(worker.id()) && *mounts == state => {
                let _caller_gone = reply.send(Ok(worker.clone()));
                return;
            }
            Some(Entry::Starting(waiting)) => {
                waiting.push(reply);
                return;
            }
            // A worker of no use ends with its last handle, after what others asked of it.
            Some(Entry::Ready { .. }) | None => {}
        }
        self.entries.insert(key.clone(), Entry::Starting(vec![reply]));
        self.confine(Start { key, policy, mounts: state, tries: VIEWS });
    }

    fn confine(&mut self, start: Start) {
        let own_view = start.mounts.is_some();
        let (spawner, spare) = (self.spawner.clone(), self.spares(own_view).take());
        self.work.spawn(async move {
            let policy = start.policy.as_ref().map(|named| &*named.policy);
            let confined = confined(spare, policy, own_view, spawner).await;
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
                // Who came meanwhile asked after the change. A worker that nobody hears of ends with its sockets.
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
        // A view keeps what was unmounted on the machine since it was made; a worker that has one ends after what was asked of it.
        let state = self.mounts.state();
        self.entries.retain(|_, entry| !matches!(entry, Entry::Ready { mounts: Some(mounts), .. } if *mounts != state));
    }

    /// Lets go of the workers that idled longest until the bounds hold. A worker whose reply is awaited stays, so the bounds
    /// can be overrun by what is busy, which the calls in flight bound.
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

/// Confines a spare, or a child started for it. A spare may have ended a moment ago, which is nobody's fault but shows only
/// here, before anything was asked of it: then a new child takes its place.
async fn confined(
    spare: Option<WorkerChild>,
    policy: Option<&Policy>,
    own_view: bool,
    spawner: Spawner,
) -> Result<(Worker, impl Future<Output = u64> + use<>), WorkerError> {
    if let Some(spare) = spare {
        match Worker::confine(spare, policy, spawner.clone()).await {
            Err(WorkerError::Start(reason)) => tracing::warn!("a spare worker was of no use: {reason}"),
            confined => return confined,
        }
    }
    for _attempt in 1..SPAWNERS {
        let mut child = spawner.worker(own_view).await?;
        let ended = std::mem::replace(&mut child.ended, oneshot::channel().1);
        match Worker::confine(child, policy, spawner.clone()).await {
            // Nothing was asked of it. If it ended with its spawner, the next one has another.
            Err(WorkerError::Start(_)) if matches!(timeout(SPAWNER_DEATH, ended).await, Ok(Err(_))) => {}
            confined => return confined,
        }
    }
    let child = spawner.worker(own_view).await?;
    Worker::confine(child, policy, spawner).await
}

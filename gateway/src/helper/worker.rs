//! A worker as the gateway sees it: a handle to send requests to, and the task that owns its socket and awaited replies.

use super::socket::{FrameReceiver, FrameSender, pair_up};
use super::spawner::{Spawner, SpawnerError, WorkerChild};
use crate::session::Turn;
use portcullis_protocol::helper::{
    BUILD, Enforced, Frame, FsDone, FsError, FsOperation, FsReply, FsRequest, INLINE_PAYLOAD, StepFailed, WorkerAnswer,
    WorkerSetup, decode, encode, encode_head,
};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::namespaces;
use portcullis_sandbox::policy::Policy;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Requests that one worker carries out side by side: a few hang and the rest goes on.
const CONCURRENCY: u16 = 16;
/// Requests that wait for one worker; the calls of a connection are bounded before that.
const QUEUE: usize = 64;
/// How long a worker may take to confine itself. It opens the roots of its policy then, on whatever file system they are.
const CONFINE_DEADLINE: Duration = Duration::from_secs(20);

/// A handle to a confined (or, without a policy, unconfined) worker. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    jobs: mpsc::Sender<Job>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: u64,
    started: Instant,
    /// Milliseconds from `started` to the last request.
    used: AtomicU64,
    awaited: AtomicUsize,
}

/// A request that has not been sent.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) operation: FsOperation,
    pub(crate) content: Content,
}

/// What a writeFile brings.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    None,
    Inline(Arc<Vec<u8>>),
    Descriptor(Arc<OwnedFd>),
}

/// A worker's answer, and the turn in the session's queue, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Result<Done, FsError>,
    pub(crate) turn: Turn,
}

/// What a successful operation brought.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) done: FsDone,
    pub(crate) payload: bytes::Bytes,
    pub(crate) descriptor: Option<OwnedFd>,
}

/// Why there is no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum WorkerError {
    /// It ended before the request was sent; another worker may be asked.
    #[error("the worker ended before the request reached it")]
    Gone,
    /// It ended, or overran its deadline, with the request in its hands.
    #[error("lost: {0}; whether it was carried out is not known")]
    Lost(String),
    /// It could not be started.
    #[error("no worker could be started: {0}")]
    Start(String),
    /// The kernel does not enforce what the policy asks.
    #[error("the policy cannot be enforced on this machine, nothing was done: {0}")]
    Unenforceable(StepFailed),
}

impl From<SpawnerError> for WorkerError {
    fn from(error: SpawnerError) -> Self {
        Self::Start(error.to_string())
    }
}

/// An error brings the turn back where the request was never sent, so that it can be tried again.
type Reply = oneshot::Sender<Result<Answer, (WorkerError, Option<Turn>)>>;

#[derive(Debug)]
struct Job {
    request: Request,
    turn: Turn,
    deadline: Duration,
    reply: Reply,
}

impl Worker {
    /// Tells a started child who it shall be, and waits until it is. Answers the handle and the task that its owner must run.
    pub(crate) async fn confine(
        child: WorkerChild,
        policy: Option<&Policy>,
        spawner: Spawner,
    ) -> Result<(Self, impl Future<Output = u64> + use<>), WorkerError> {
        let policy_bytes = policy.map(|policy| Bytes(policy.encode()));
        let own_user = namespaces::need_user();
        let (build, own_view) = (BUILD.to_owned(), child.own_view);
        let setup = WorkerSetup { build, policy: policy_bytes, own_view, own_user, concurrency: CONCURRENCY };
        let id = child.id;
        let confined = tokio::time::timeout(CONFINE_DEADLINE, converse(child.control, &setup)).await;
        let enforced = match confined {
            Ok(Ok(enforced)) => enforced,
            Ok(Err(error)) => {
                spawner.kill_worker(id).await;
                return Err(error);
            }
            Err(_elapsed) => {
                spawner.kill_worker(id).await;
                let text =
                    format!("it did not confine itself within {} s: a root of the policy may hang", CONFINE_DEADLINE.as_secs());
                return Err(WorkerError::Start(text));
            }
        };
        tracing::debug!(worker = id, ?enforced, "worker ready");
        let (jobs, queue) = mpsc::channel(QUEUE);
        let shared = Arc::new(Shared { id, started: Instant::now(), used: AtomicU64::new(0), awaited: AtomicUsize::new(0) });
        let worker = Self { jobs, shared: Arc::clone(&shared) };
        let (sender, receiver) = pair_up(child.requests);
        let task = Task {
            shared,
            sender: Some(sender),
            receiver,
            spawner,
            awaited: HashMap::new(),
            deadlines: VecDeque::new(),
            next: 0,
        };
        Ok((worker, task.run(queue)))
    }

    /// Carries out one request. `turn` ends when the worker answers, even if the caller has gone away by then.
    pub(crate) async fn call(
        &self,
        request: Request,
        turn: Turn,
        deadline: Duration,
    ) -> Result<Answer, (WorkerError, Option<Turn>)> {
        self.shared.used.store(self.age(), Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        if let Err(mpsc::error::SendError(job)) = self.jobs.send(Job { request, turn, deadline, reply }).await {
            return Err((WorkerError::Gone, Some(job.turn)));
        }
        // A task that is dropped with the runtime says nothing.
        answer.await.unwrap_or(Err((WorkerError::Gone, None)))
    }

    pub(crate) fn id(&self) -> u64 {
        self.shared.id
    }

    pub(crate) fn is_alive(&self) -> bool {
        !self.jobs.is_closed()
    }

    /// How long nothing was asked of it; zero while a reply is awaited.
    pub(crate) fn idle(&self) -> Duration {
        if self.shared.awaited.load(Ordering::Relaxed) > 0 || self.jobs.capacity() < QUEUE {
            return Duration::ZERO;
        }
        Duration::from_millis(self.age().saturating_sub(self.shared.used.load(Ordering::Relaxed)))
    }

    fn age(&self) -> u64 {
        u64::try_from(self.shared.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The one exchange on the control socket, which closes after it.
async fn converse(control: tokio::net::UnixStream, setup: &WorkerSetup) -> Result<Enforced, WorkerError> {
    let start = |error: String| WorkerError::Start(error);
    let (mut sender, mut receiver) = pair_up(control);
    let frame = encode(setup, &[], 0).map_err(|error| start(error.to_string()))?;
    sender.send(&frame, &[]).await.map_err(|error| start(error.to_string()))?;
    let (frame, _none) = receiver
        .recv()
        .await
        .map_err(|error| start(error.to_string()))?
        .ok_or_else(|| start("it ended while it confined itself; its standard error may say why".to_owned()))?;
    match decode(&frame.body).map_err(|error| start(error.to_string()))? {
        WorkerAnswer::Ready(enforced) => Ok(enforced),
        WorkerAnswer::Failed(failed) => Err(WorkerError::Unenforceable(failed)),
    }
}

struct Awaited {
    turn: Turn,
    reply: Reply,
}

struct Task {
    shared: Arc<Shared>,
    /// Lent to the sending future while it is on its way.
    sender: Option<FrameSender>,
    receiver: FrameReceiver,
    spawner: Spawner,
    awaited: HashMap<u64, Awaited>,
    deadlines: VecDeque<(Instant, u64)>,
    next: u64,
}

impl Task {
    /// Ends when the worker does, or when every handle is dropped; answers the worker's id.
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) -> u64 {
        let reason = self.exchange(&mut jobs).await;
        jobs.close();
        for (_id, awaited) in self.awaited.drain() {
            let _caller_gone = awaited.reply.send(Err((WorkerError::Lost(reason.clone()), None)));
        }
        // What is still in line was never sent.
        while let Some(job) = jobs.recv().await {
            let _caller_gone = job.reply.send(Err((WorkerError::Gone, Some(job.turn))));
        }
        self.spawner.kill_worker(self.shared.id).await;
        self.shared.id
    }

    async fn exchange(&mut self, jobs: &mut mpsc::Receiver<Job>) -> String {
        let mut sending = None;
        let mut wanted = true;
        loop {
            if !wanted && self.awaited.is_empty() && sending.is_none() {
                return "the gateway is done with its worker".to_owned();
            }
            let deadline = self.next_deadline();
            let is_sending = sending.is_some();
            tokio::select! {
                frame = self.receiver.recv() => match frame {
                    Ok(Some((frame, descriptors))) => {
                        if let Err(error) = self.answer(frame, descriptors) {
                            return error;
                        }
                    }
                    Ok(None) => return "its worker ended".to_owned(),
                    Err(error) => return format!("its worker's socket failed: {error}"),
                },
                job = jobs.recv(), if wanted && !is_sending => match job {
                    Some(job) => match self.accept(job) {
                        Ok((id, sender, frame, content)) => sending = Some((id, Box::pin(send(sender, frame, content)))),
                        Err(error) => return error,
                    },
                    None => wanted = false,
                },
                (id, (sender, sent)) = async {
                    let (id, sending) = sending.as_mut().expect("Invariant: guarded");
                    (*id, sending.await)
                }, if is_sending => {
                    sending = None;
                    self.sender = Some(sender);
                    match sent {
                        Ok(()) => {}
                        Err(error) if FrameSender::is_untouched(&error) => self.not_sent(id),
                        Err(error) => return format!("its worker's socket failed: {error}"),
                    }
                }
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    return "a call overran its deadline and its worker was killed".to_owned();
                }
            }
        }
    }

    /// A request whose descriptor the kernel did not take fails alone: not a byte of it was sent.
    fn not_sent(&mut self, id: u64) {
        let Some(awaited) = self.awaited.remove(&id) else { return };
        self.shared.awaited.store(self.awaited.len(), Ordering::Relaxed);
        let answer = Answer { outcome: Err(FsError::InFlight(INLINE_PAYLOAD)), turn: awaited.turn };
        let _caller_gone = awaited.reply.send(Ok(answer));
    }

    fn accept(&mut self, job: Job) -> Result<(u64, FrameSender, Vec<u8>, Content), String> {
        let id = self.next;
        self.next += 1;
        let (payload, descriptors) = match &job.request.content {
            Content::None => (0, 0),
            Content::Inline(bytes) => (bytes.len(), 0),
            Content::Descriptor(_) => (0, 1),
        };
        let request = FsRequest { id, operation: job.request.operation };
        let frame = encode_head(&request, payload, descriptors).map_err(|error| error.to_string())?;
        let sender = self.sender.take().ok_or("two frames at once")?;
        self.awaited.insert(id, Awaited { turn: job.turn, reply: job.reply });
        self.deadlines.push_back((Instant::now() + job.deadline, id));
        self.shared.awaited.store(self.awaited.len(), Ordering::Relaxed);
        Ok((id, sender, frame, job.request.content))
    }

    fn answer(&mut self, frame: Frame, descriptors: Vec<OwnedFd>) -> Result<(), String> {
        let reply: FsReply = decode(&frame.body).map_err(|error| format!("its worker answered nonsense: {error}"))?;
        let awaited = self.awaited.remove(&reply.id).ok_or("its worker answered what nobody asked")?;
        self.shared.awaited.store(self.awaited.len(), Ordering::Relaxed);
        let done = |done| Done { done, payload: frame.payload, descriptor: descriptors.into_iter().next() };
        let answer = Answer { outcome: reply.outcome.map(done), turn: awaited.turn };
        let _caller_gone = awaited.reply.send(Ok(answer));
        Ok(())
    }

    /// The earliest deadline of a request that still waits. Deadlines are about equal, so the queue is in their order.
    fn next_deadline(&mut self) -> Option<Instant> {
        while let Some((deadline, id)) = self.deadlines.front() {
            if self.awaited.contains_key(id) {
                return Some(*deadline);
            }
            self.deadlines.pop_front();
        }
        None
    }
}

async fn send(mut sender: FrameSender, frame: Vec<u8>, content: Content) -> (FrameSender, std::io::Result<()>) {
    let sent = match &content {
        Content::Descriptor(descriptor) => sender.send(&frame, &[descriptor.as_fd()]).await,
        Content::Inline(payload) => sender.send_parts([&frame, payload], &[]).await,
        Content::None => sender.send(&frame, &[]).await,
    };
    (sender, sent)
}

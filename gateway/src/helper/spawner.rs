//! The spawner helper seen from the gateway: parent of everything that is started.
//!
//! One task talks to it. Whoever holds the `exit` of a [`Child`] owns the process: when that is dropped before the process
//! ended, the task kills it, so that a caller that goes away at any moment leaks nothing. When the helper dies,
//! everything that waits for its answer fails as lost, each `exit` is an error, and its owner starts another one: the handles stay
//! good, and no id is given twice.

#[cfg(test)]
pub(crate) mod fake;
mod life;
mod owner;
mod task;

use self::life::{Begin, Executable, Found, Life};
use self::owner::{Now, Owner};
use self::task::Ask;
use crate::metrics::Metrics;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{CgroupLayer, Command, Enforced, ExitStatus, NamespaceLayer, SpawnerRequest, StepFailed};
use portcullis_protocol::limit::{DefaultBounds, LimitInForce, LimitReached, ProcessLimits, SessionLimits, TreeEnd};
use portcullis_protocol::path::Bytes;
use portcullis_protocol::uids::UidRange;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Requests in line; each holds up to three descriptors.
const QUEUE: usize = 64;

/// How long the end of a start that was killed is waited for: a process in a file system that hangs does not end.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// SIGKILL, by its number on every Linux.
pub(crate) const KILL: i32 = 9;

/// A handle to the spawner. Clones share it; it ends after the last was dropped.
#[derive(Debug, Clone)]
pub(crate) struct Spawner {
    asks: mpsc::Sender<Ask>,
    ids: Arc<AtomicU64>,
    now: watch::Receiver<Now>,
    /// Never taken back: a daemon outlives the process that was started, and the spawner knows no process's network.
    has_dialers: Arc<AtomicBool>,
    found: Arc<Found>,
    uids: Option<UidRange>,
}

/// The task behind the handles, for the one who started it.
#[derive(Debug)]
pub(crate) struct SpawnerTask {
    tasks: JoinSet<()>,
    stop: oneshot::Sender<Never>,
}

/// Nothing is ever said on a channel of these; it is there to be closed.
#[derive(Debug)]
pub(crate) enum Never {}

impl SpawnerTask {
    /// Ends the helper, and everything that it started, and waits until it is reaped.
    pub(crate) async fn stop(mut self) {
        drop(self.stop);
        while self.tasks.join_next().await.is_some() {}
    }
}

/// A worker that was asked for.
#[derive(Debug)]
pub(crate) struct WorkerChild {
    /// Names it to [`Spawner::kill_worker`].
    pub(crate) id: u64,
    /// In namespaces of its own, where it makes itself a view.
    pub(crate) own_view: bool,
    /// Its standard input and output.
    pub(crate) requests: UnixStream,
    /// Its control socket.
    pub(crate) control: UnixStream,
    /// How it ended. An error if the spawner died.
    pub(crate) ended: oneshot::Receiver<WorkerEnd>,
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WorkerEnd {
    /// It was not started. The reason may pass: the kernel bounds tasks, and descriptors in flight.
    NotStarted(String),
    /// It ran.
    Ran(ExitStatus),
}

/// A process to start.
#[derive(Debug)]
pub(crate) struct Launch {
    /// The session that it belongs to.
    pub(crate) session: Arc<str>,
    /// A policy of the sandbox crate, encoded; none starts it unconfined.
    pub(crate) policy: Option<Bytes>,
    /// The policy restricts files, so that it gets a view of its own where there can be one.
    pub(crate) own_view: bool,
    /// The operator accepts what the policy asks and cannot be enforced on a process without namespaces.
    pub(crate) allow_unprotected: bool,
    /// What it may use. The output is the session's to count.
    pub(crate) limits: ProcessLimits,
    /// It is confined and may use the network, so that it could dial whatever listens on this machine, the gateway too.
    pub(crate) may_dial: bool,
    /// Its policy names no device, which would keep it a process of the server's user.
    pub(crate) own_uid: bool,
    /// What is executed.
    pub(crate) command: Command,
    /// The child's ends.
    pub(crate) stdio: Stdio,
}

/// Descriptors 0 to 2 of a process.
#[derive(Debug)]
pub(crate) enum Stdio {
    /// One each.
    Pipes { stdin: OwnedFd, stdout: OwnedFd, stderr: OwnedFd },
    /// One terminal for all three, which shall control the process.
    Terminal(OwnedFd),
}

impl Stdio {
    /// In the order of the frame.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Pipes { stdin, stdout, stderr } => vec![stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            Self::Terminal(terminal) => vec![terminal.as_fd()],
        }
    }
}

/// A process that runs.
#[derive(Debug)]
pub(crate) struct Child {
    /// Names it to [`Spawner::signal`].
    pub(crate) id: u64,
    /// The process id of its keeper on this machine.
    pub(crate) pid: i32,
    /// What the kernel enforces on it.
    pub(crate) enforced: Enforced,
    /// The limits that the kernel holds it to.
    pub(crate) limits: Vec<LimitInForce>,
    /// How everything that comes of it is ended.
    pub(crate) tree: TreeEnd,
    /// How it ended; an error if the spawner died. Dropping it kills the process.
    pub(crate) exit: oneshot::Receiver<Ended>,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Its status.
    pub(crate) status: ExitStatus,
    /// What its sandbox was seen to refuse.
    pub(crate) denials: Denials,
    /// Why its sandbox ended it, if it did.
    pub(crate) failure: Option<String>,
    /// The limits that it reached, as far as they can be seen.
    pub(crate) limits: Vec<LimitReached>,
}

/// Why the spawner cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnerError {
    /// The executable does not start.
    #[error("start the spawner `{0}`: {1}")]
    Start(String, io::Error),
    /// It started and did not say that it is ready.
    #[error("start the spawner: {0}")]
    Handshake(String),
    /// A socket for a worker could not be made.
    #[error("make the sockets of a worker: {0}")]
    Socket(#[from] io::Error),
    /// The gateway stops.
    #[error("the spawner has ended")]
    Ended,
    /// It died, and another one does not start.
    #[error("the spawner has died and cannot be replaced yet ({0}); try again later")]
    Trouble(Arc<str>),
}

/// Why a process does not run.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LaunchError {
    /// Nothing runs.
    #[error("{0}")]
    Failed(StepFailed),
    /// The spawner died: whether something runs is not known.
    #[error("lost: {0}")]
    Lost(String),
}

impl Spawner {
    /// Starts the helper from an executable whose `main` dispatches hidden roles first.
    pub(crate) async fn start(
        executable: &Path,
        session_limits: SessionLimits,
        bounds: DefaultBounds,
        records: Option<PathBuf>,
        uids: Option<UidRange>,
        metrics: Arc<Metrics>,
    ) -> Result<(Self, SpawnerTask), SpawnerError> {
        let failed = |error| SpawnerError::Start(executable.display().to_string(), error);
        let executable = Executable::open(executable).map_err(failed)?;
        let begin = Begin { executable, session_limits, bounds, records, uids, metrics };
        let life = begin.life().await?;
        let (stop, stopped) = oneshot::channel();
        let (spawner, owner) = Self::over(&life, stopped, Some(begin));
        let mut tasks = JoinSet::new();
        tasks.spawn(owner.run(life));
        Ok((spawner, SpawnerTask { tasks, stop }))
    }

    fn over(life: &Life, stopped: oneshot::Receiver<Never>, begin: Option<Begin>) -> (Self, Owner) {
        let (asks, queue) = mpsc::channel(QUEUE);
        let (now, known) = watch::channel(Now::first(life.body.pid()));
        let uids = begin.as_ref().and_then(|begin| begin.uids);
        let (ids, has_dialers, found) = (Arc::default(), Arc::default(), Arc::new(life.found.clone()));
        let owner = Owner { asks: queue, unsent: None, stopped, now: Arc::new(now), begin, found: Arc::clone(&found) };
        (Self { asks, ids, now: known, has_dialers, found, uids }, owner)
    }

    /// What of the namespaces it can give a process, as it tried at its start.
    pub(crate) fn namespaces(&self) -> &NamespaceLayer {
        &self.found.namespaces
    }

    /// The user ids that its sandboxes may have on the machine, beside that of the server.
    pub(crate) fn uids(&self) -> Option<UidRange> {
        self.uids
    }

    /// What of the cgroups it can give, as it tried at its start.
    pub(crate) fn cgroups(&self) -> &CgroupLayer {
        &self.found.cgroups
    }

    /// Asks for a worker, with `own_view` for one in namespaces of its own. It ends when its sockets are dropped.
    pub(crate) async fn worker(&self, own_view: bool) -> Result<WorkerChild, SpawnerError> {
        let id = self.id();
        let (requests, stdio) = StdStream::pair()?;
        let (control, their_control) = StdStream::pair()?;
        requests.set_nonblocking(true)?;
        control.set_nonblocking(true)?;
        let (ended, receiver) = oneshot::channel();
        self.ask(Ask::Worker { id, own_view, descriptors: [stdio.into(), their_control.into()], ended }).await?;
        let (requests, control) = (UnixStream::from_std(requests)?, UnixStream::from_std(control)?);
        Ok(WorkerChild { id, own_view, requests, control, ended: receiver })
    }

    /// Starts a process and waits until it runs, or is known not to. Dropping the future kills what may have been started.
    ///
    /// A start that takes longer than `most` is killed, and the answer is `None`; its end is waited for, for a while, so that it is
    /// counted as long as it lives.
    pub(crate) async fn process_within(&self, most: Duration, launch: Launch) -> Option<Result<Child, LaunchError>> {
        let id = self.id();
        let mut start = pin!(self.process_as(id, launch));
        if let Ok(started) = timeout(most, start.as_mut()).await {
            return Some(started);
        }
        let killed = async {
            // With the spawner everything ends.
            let _spawner_ended = self.signal(id, KILL).await;
            drop(start.await);
        };
        let _not_dead_yet = timeout(KILL_PATIENCE, killed).await;
        None
    }

    /// Starts a process and waits until it runs.
    #[cfg(test)]
    pub(crate) async fn process(&self, launch: Launch) -> Result<Child, LaunchError> {
        self.process_as(self.id(), launch).await
    }

    async fn process_as(&self, id: u64, launch: Launch) -> Result<Child, LaunchError> {
        let lost = |error: SpawnerError| LaunchError::Lost(error.to_string());
        if launch.may_dial {
            // Before it runs, and so before it can dial.
            self.has_dialers.store(true, Ordering::SeqCst);
        }
        let (reply, answer) = oneshot::channel();
        let ask = Ask::Process { id, launch: Box::new(launch), reply };
        self.ask(ask).await.map_err(lost)?;
        answer.await.unwrap_or_else(|_| Err(lost(SpawnerError::Ended)))
    }

    /// Sends a signal to the process group of a process, and SIGKILL to everything that came of it; nothing happens if nothing is left.
    pub(crate) async fn signal(&self, id: u64, signal: i32) -> Result<(), SpawnerError> {
        self.ask(Ask::Request(SpawnerRequest::Signal { id, signal })).await
    }

    /// Ends what is left of the processes of a session: daemons of programs that have ended.
    pub(crate) async fn end_session(&self, session: &str) {
        // With the spawner everything ends.
        let _spawner_ended = self.ask(Ask::Request(SpawnerRequest::EndSession { session: session.to_owned() })).await;
    }

    /// Ends a worker; nothing happens if it has ended.
    pub(crate) async fn kill_worker(&self, id: u64) {
        // With the spawner its workers end too.
        let _spawner_ended = self.ask(Ask::Request(SpawnerRequest::KillWorker { id })).await;
    }

    /// Why nothing can be started now, if so.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        let now = self.now.borrow();
        match now.pid {
            Some(_) if !self.asks.is_closed() => None,
            _ => Some(now.trouble.clone().unwrap_or_else(|| "it has ended".into())),
        }
    }

    /// The processes below which everything is that was ever started and lives, of spawners that have died too.
    pub(crate) fn ancestors(&self) -> Vec<u32> {
        let now = self.now.borrow();
        now.pid.into_iter().chain(now.elders.iter().copied()).collect()
    }

    /// Whether a process was ever started that is confined and could dial the gateway.
    pub(crate) fn has_dialers(&self) -> bool {
        self.has_dialers.load(Ordering::SeqCst)
    }

    async fn ask(&self, ask: Ask) -> Result<(), SpawnerError> {
        let refusal = Some(self.now.borrow()).filter(|now| now.is_late).and_then(|now| now.trouble.clone());
        if let Some(trouble) = refusal {
            return Err(SpawnerError::Trouble(trouble));
        }
        self.asks.send(ask).await.map_err(|_| SpawnerError::Ended)
    }

    fn id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }
}

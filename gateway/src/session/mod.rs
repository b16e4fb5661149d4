//! Sessions: they outlive connections and own processes.
//!
//! A task owns a session. What it knows is in [`state`], without sockets and clocks; the task joins that with the spawner, the
//! pumps of its processes and the connection that is attached. Commands come in through one bounded queue, in order of
//! arrival, and are answered as soon as there is an answer: nothing that waits holds up what came later.

mod calls;
mod delivery;
mod guard;
mod ledger;
mod limit;
mod log;
mod message;
mod operations;
mod order;
mod paging;
mod process;
mod spool;
mod state;
mod task;

pub(crate) use delivery::Proof;
pub(crate) use message::{SpoolLimits, Terms};
pub(crate) use order::{Order, Turn};

use crate::audit::Audit;
use crate::budget::{Budget, Charge};
use crate::config::ProcessTimes;
use crate::handles::Handles;
use crate::helper::spawner::Spawner;
use crate::link::{Doubt, Outgoing};
use crate::metrics::Metrics;
use crate::scope::Digest;
use futures_util::future::BoxFuture;
use portcullis_protocol::fs::Empty;
use portcullis_protocol::limit::ProcessLimits;
use portcullis_protocol::logged::AcknowledgeParams;
use portcullis_protocol::process::{
    CloseStdinParams, ListResult, ReadParams, ReadResult, ResizeParams, SignalParams, StartParams, StartResult, TerminateParams,
    TerminateResult, WriteParams, WriteResult,
};
use portcullis_protocol::rpc::RpcError;
use portcullis_sandbox::policy::Policy;
use sha2::{Digest as _, Sha256};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Commands in line; the task takes them at once, so a few are enough.
const QUEUE: usize = 64;

/// What a session is told at its start.
#[derive(Debug, Clone)]
pub(crate) struct SessionConfig {
    /// How long a detached session and a closed process are kept.
    pub(crate) retention: Duration,
    /// What processes may inherit, if their policy says so.
    pub(crate) environment: Arc<[(OsString, OsString)]>,
    /// The operator accepts what policies ask and cannot be enforced on a process without namespaces.
    pub(crate) allow_unprotected: bool,
    /// SHELL of a process with a terminal.
    pub(crate) shell: String,
    /// The most that each start may use, whatever it asks for.
    pub(crate) process_limits: ProcessLimits,
    /// The same in time.
    pub(crate) process_times: ProcessTimes,
    /// Where output waits for which there is no room while nobody is attached, and how much of it.
    pub(crate) spool: PathBuf,
    pub(crate) spool_limits: SpoolLimits,
    /// Where it is counted.
    pub(crate) metrics: Arc<Metrics>,
    /// Where the ends of its processes are recorded.
    pub(crate) audit: Option<Audit>,
    /// The scope of its clients' tokens, if these have one: nobody else's gets it.
    pub(crate) scope: Option<Digest>,
    /// Processes of the session that may live at a time.
    pub(crate) most_processes: usize,
    /// What it shares of those of all sessions.
    pub(crate) processes: Places,
    /// Bytes that pipes of all processes may grow by.
    pub(crate) pipes: Budget,
}

/// The processes of all sessions that may live at a time.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub(crate) free: Arc<Semaphore>,
    pub(crate) all: usize,
}

/// A session as others reach it. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct SessionHandle {
    id: Arc<str>,
    mark: Arc<str>,
    scope: Option<Digest>,
    /// Boxed: a queue has room for 32 from the start, also in a session that is idle.
    commands: mpsc::Sender<Box<Command>>,
}

impl SessionHandle {
    /// The scope of the tokens of its clients.
    pub(crate) fn scope(&self) -> Option<Digest> {
        self.scope
    }

    /// Its name, which is a secret of its client.
    pub(crate) fn id(&self) -> Arc<str> {
        Arc::clone(&self.id)
    }

    /// What logs and records name it by.
    pub(crate) fn mark(&self) -> Arc<str> {
        Arc::clone(&self.mark)
    }

    /// Puts a command in line.
    pub(crate) async fn send(&self, command: Command) -> Result<(), SessionEnded> {
        self.commands.send(Box::new(command)).await.map_err(|_| SessionEnded)
    }
}

/// The session has expired or was closed. So it has if a reply is dropped without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session has ended")]
pub(crate) struct SessionEnded;

/// Another connection has the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session is attached to another connection")]
pub(crate) struct AttachError;

/// What an attached connection holds.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Which attachment this is; to be given back with [`Command::Detach`].
    pub(crate) generation: u64,
    /// The session's mutations; to be given back too, so that their order holds over a resume.
    pub(crate) order: Order,
    /// File handles that the connection before left, or this one leaves.
    pub(crate) handles: Handles,
}

/// A connection that wants a session.
#[derive(Debug)]
pub(crate) struct Newcomer {
    /// Where its client hears.
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    /// Cancelled when another connection takes the session over: then this one detaches and ends.
    pub(crate) evicted: CancellationToken,
    /// Told when somebody else wants the session: its peer may be gone without a word.
    pub(crate) doubt: Doubt,
    pub(crate) terms: Terms,
}

/// A change of files that its client may send again: what it does, and how to tell it from others.
pub(crate) struct Change {
    /// The client's name for it.
    pub(crate) operation: String,
    /// Of everything that it asks for: the same name with another digest is another change.
    pub(crate) digest: u64,
    /// Carries it out, when its turn comes.
    pub(crate) work: BoxFuture<'static, Result<(), RpcError>>,
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Change").field("operation", &self.operation).finish_non_exhaustive()
    }
}

/// A page of a process's events.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) result: ReadResult,
    /// What its text takes, if it is large.
    pub(crate) room: Option<Charge>,
    /// To be sent once the page is in the connection's queue.
    pub(crate) receipt: Option<Command>,
}

type Reply<T> = oneshot::Sender<Result<T, RpcError>>;

/// What a session can be told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Take the session. Notifications go to `outgoing` from now on; what was missed is to be paged.
    Attach { newcomer: Newcomer, reply: oneshot::Sender<Result<Attachment, AttachError>> },
    /// Leave the session. An attachment that is not the latest changes nothing.
    Detach(Attachment),
    /// A change of files that is carried out once, however often it is sent. It goes on if the caller goes away.
    Change { change: Change, reply: Reply<Empty> },
    /// `process/start`, under a policy that the caller has checked, when its turn comes. It goes on if the caller goes away.
    Start { params: Box<StartParams>, policy: Option<Arc<Policy>>, turn: Turn, reply: Reply<StartResult> },
    /// `process/read`; a large page takes its room from `replies`.
    Read { params: ReadParams, replies: Budget, reply: Reply<Page> },
    /// `process/acknowledge`
    Acknowledge { params: AcknowledgeParams, reply: Reply<Empty> },
    /// A mark was answered: everything before it has arrived.
    Delivered { generation: u64, mark: u64 },
    /// A page is in the connection's queue.
    HandedOut { generation: u64, page: u64 },
    /// `process/write`
    Write { params: WriteParams, reply: Reply<WriteResult> },
    /// `process/closeStdin`
    CloseStdin { params: CloseStdinParams, reply: Reply<Empty> },
    /// `process/resize`
    Resize { params: ResizeParams, reply: Reply<Empty> },
    /// `process/list`
    List { reply: Reply<ListResult> },
    /// `process/signal`
    Signal { params: SignalParams, reply: Reply<Empty> },
    /// `process/terminate`
    Terminate { params: TerminateParams, reply: Reply<TerminateResult> },
    /// Kill everything and end.
    Close,
}

/// Makes a session that waits for its first connection. The owner runs and joins the future: it ends after [`Command::Close`],
/// or when nobody came back in time, and then every process of the session is dead.
pub(crate) fn start(
    id: Arc<str>,
    spawner: Spawner,
    config: SessionConfig,
) -> (SessionHandle, impl Future<Output = ()> + Send + use<>) {
    let (commands, queue) = mpsc::channel(QUEUE);
    let (scope, mark) = (config.scope, mark(&id));
    // Boxed, since a future holds each thing that it is given and passes on twice.
    let task = Box::new(task::Task::new(Arc::clone(&id), Arc::clone(&mark), spawner, config));
    (SessionHandle { id, mark, scope, commands }, task.run(queue))
}

/// The beginning of the SHA-256 of a session's id. Whoever knows an id may have the session, so that no log names it; ids are
/// random, so that nobody finds one from this.
fn mark(id: &str) -> Arc<str> {
    let digest = Sha256::digest(id);
    digest[..6].iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
}

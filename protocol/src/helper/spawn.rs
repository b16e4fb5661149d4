//! Starting: what the gateway, the spawner and a new worker say to each other.

use super::errno_text;
use crate::denial::{Denial, Denials};
use crate::limit::{DefaultBounds, LimitInForce, LimitReached, ProcessLimits, SessionLimits, TreeEnd};
use crate::path::{AbsolutePath, Bytes};
use crate::uids::UidRange;
use serde::{Deserialize, Serialize};

/// What the gateway asks of the spawner. Every request carries an id of the gateway's choice.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum SpawnerRequest {
    /// First frame: both ends must be one build.
    Hello {
        /// [`BUILD`](super::BUILD) of the gateway.
        build: String,
        /// What all processes of each session together may use.
        session_limits: SessionLimits,
        /// What holds everything, where it can be held.
        bounds: DefaultBounds,
        /// A directory that is the user's alone, for records of what is made on the machine. Its path is real. Without it, what
        /// needs that is refused.
        records: Option<Bytes>,
        /// The user ids of which each sandbox of root has one; none: it has the server's.
        uids: Option<UidRange>,
    },
    /// Start a worker. Descriptors: its standard input and output (one socket), its control socket.
    Worker {
        /// Names the worker in [`SpawnerEvent::WorkerEnded`] and [`SpawnerEvent::WorkerFailed`].
        id: u64,
        /// In namespaces of its own, for a policy that restricts files. Only where the machine has them.
        own_view: bool,
    },
    /// Start a process. Descriptors: standard input, output, error; with a tty the one terminal.
    Start {
        /// Names the process in later requests and events.
        id: u64,
        /// The session that it belongs to.
        session: String,
        /// Whether the one descriptor is a terminal that shall control the process.
        tty: bool,
        /// A compiled policy of the sandbox crate; none starts the process unconfined.
        policy: Option<Bytes>,
        /// The policy restricts files, so that the process gets namespaces of its own where the machine has them.
        own_view: bool,
        /// The policy wants none of the machine's network, so that it gets one of its own with the view.
        own_network: bool,
        /// And on a server of root a user id of its own on the machine: its policy names no device.
        own_uid: bool,
        /// The operator accepts what the policy asks and the layers that are built cannot enforce on a process.
        allow_unprotected: bool,
        /// What it may use; the gateway sees to the output itself.
        limits: ProcessLimits,
        /// A [`Command`] in postcard, decoded only after the launcher is confined.
        command: Bytes,
    },
    /// Send a signal to the process group of a process; SIGKILL to everything that came of it, also after its end. Unknown
    /// processes are ignored, and those of which nothing is left.
    Signal {
        /// The process.
        id: u64,
        /// A signal number of this machine.
        signal: i32,
    },
    /// End with SIGKILL whatever is left of the processes of a session.
    EndSession {
        /// The session.
        session: String,
    },
    /// End a worker with SIGKILL. Unknown ones are ignored.
    KillWorker {
        /// The worker.
        id: u64,
    },
}

/// A command line as the launcher executes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// The program, then its arguments; never empty. A program without a slash is searched in the PATH of `env`.
    pub argv: Vec<Bytes>,
    /// What the program sees as `argv[0]`, if it is not the program.
    pub arg0: Option<Bytes>,
    /// The whole environment, in this order.
    pub env: Vec<(Bytes, Bytes)>,
    /// The working directory.
    pub cwd: AbsolutePath,
}

/// What the spawner tells the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpawnerEvent {
    /// Answer to [`SpawnerRequest::Hello`].
    Ready {
        /// What of the namespaces can be had here, as tried at the start.
        namespaces: NamespaceLayer,
        /// What of the cgroups can be had here, as tried at the start.
        cgroups: CgroupLayer,
    },
    /// The build differs; the spawner ends.
    WrongBuild {
        /// [`BUILD`](super::BUILD) of the spawner.
        build: String,
    },
    /// The program runs: its `execve` succeeded.
    Started {
        /// The process.
        id: u64,
        /// The process id of its keeper on this machine: its parent, and in a sandbox the init.
        pid: i32,
        /// What the kernel enforces on it.
        enforced: Enforced,
        /// The limits that hold it.
        limits: Vec<LimitInForce>,
        /// How everything that comes of it is ended.
        tree: TreeEnd,
    },
    /// Nothing runs.
    StartFailed {
        /// The process.
        id: u64,
        /// Where it ended.
        failure: StepFailed,
    },
    /// A started process ended.
    Exited {
        /// The process.
        id: u64,
        /// How.
        status: ExitStatus,
        /// What its sandbox was seen to refuse.
        denials: Denials,
        /// Why its sandbox ended it, if it did, in words.
        failure: Option<String>,
        /// The limits that it reached, as far as they can be seen.
        limits: Vec<LimitReached>,
    },
    /// A worker ended.
    WorkerEnded {
        /// The worker.
        id: u64,
        /// How.
        status: ExitStatus,
    },
    /// A worker could not be started.
    WorkerFailed {
        /// The worker.
        id: u64,
        /// The attempt and the kernel's answer.
        reason: String,
    },
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It called exit.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl ExitStatus {
    /// The number that shells and this wire use: the status itself, or 128 + signal.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// A step of a helper's way into confinement or to `execve` that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{attempt}{}", if *errno == 0 { String::new() } else { format!(": {}", errno_text(*errno)) })]
pub struct StepFailed {
    /// Which part failed: decides the error code on the wire.
    pub step: Step,
    /// What was attempted, on what, in words.
    pub attempt: String,
    /// The system's error number, or 0 if the system did not say.
    pub errno: i32,
    /// What the policy has to do with it, if it has.
    pub denial: Option<Box<Denial>>,
}

/// The parts of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// A frame between gateway and helper was wrong: a defect of ours.
    Frame,
    /// The confinement could not be had as asked.
    Enforce,
    /// `chdir`, `execve`, the terminal: the request's own fault.
    Execute,
    /// `fork` and the like: the machine's fault.
    Machine,
}

/// What the kernel enforces on a helper or a process, as it said when it was asked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Enforced {
    /// The Landlock ABI whose rights are handled; 0 for none.
    pub landlock_abi: u32,
    /// The namespaces of its own: `user`, `mount`, `pid`, `ipc`, `net`; none where that layer is not used.
    pub namespaces: Vec<String>,
    /// Whether its user is one of its own on the machine, which nothing else that runs has.
    #[serde(default)]
    pub own_uid: bool,
    /// Whether `/proc` is its own. False in its own pid namespace means that the machine's is seen, read-only.
    pub own_proc: bool,
    /// Whether changes that it tries are seen, so that what is denied of them is known.
    pub observed: bool,
    /// The names of the seccomp tables that are installed.
    pub seccomp: Vec<String>,
    /// What the policy asks and these layers do not enforce; empty unless the operator allowed it.
    pub missing: Vec<String>,
}

/// Whether this machine gives processes a view of mounts and namespaces of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum NamespaceLayer {
    /// It does, and every confined process gets them.
    Available {
        /// Whether with a user namespace of their own.
        user: bool,
        /// Whether a `/proc` of one's own can be had.
        own_proc: bool,
        /// Why they share the user namespace of the server, if they do.
        shared: String,
        /// Whose user id they have on the machine.
        #[serde(default)]
        uids: Uids,
    },
    /// It does not.
    Unavailable {
        /// What was tried and the system's answer.
        reason: String,
        /// What to do about it.
        remedy: String,
    },
}

/// Whose user id the processes of sandboxes have on the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Uids {
    /// That of the server, which is an ordinary user, or whose operator wants it so.
    #[default]
    Servers,
    /// Each sandbox of root has one of its own.
    Own,
    /// They are root's, although they were to have their own.
    Refused {
        /// What refused it.
        reason: String,
    },
}

/// Whether this machine lets the gateway make cgroups for what it starts, as tried at its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupLayer {
    /// That count tasks.
    pub processes: bool,
    /// That count memory.
    pub memory: bool,
    /// Why not both, if so.
    pub reason: String,
}

/// First frame on a worker's control socket: who it shall be.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerSetup {
    /// [`BUILD`](super::BUILD) of the gateway.
    pub build: String,
    /// A compiled policy of the sandbox crate; none makes an unconfined worker.
    pub policy: Option<Bytes>,
    /// It is in namespaces of its own, and makes itself a view of the file system there.
    pub own_view: bool,
    /// A user namespace is among them.
    pub own_user: bool,
    /// Bound of requests carried out side by side.
    pub concurrency: u16,
}

/// The worker's answer on its control socket; nothing else travels there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerAnswer {
    /// Confined, and reading requests.
    Ready(Enforced),
    /// It ends.
    Failed(StepFailed),
}

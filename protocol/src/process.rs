//! `process/*`: parameters, results and notifications.

mod notice;

pub use self::notice::{ClosedNotice, ExitedNotice, OutputNotice};

use crate::base64::Chunk;
use crate::denial::{self, Denial};
use crate::event::Stream;
use crate::helper::Enforced;
use crate::limit::{self, LimitInForce, LimitReached, ProcessLimits, TreeEnd};
use crate::logged::{Gap, LoggedEvent, WhenFull};
use crate::path::WirePath;
use crate::signal::Signal;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::num::{NonZeroU16, NonZeroU64};

/// Parameters of `process/start`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartParams {
    /// The client's name for it, any text.
    pub process_id: String,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Where it starts.
    pub cwd: WirePath,
    /// Its environment; laid over what `env_policy` gives.
    pub env: BTreeMap<String, String>,
    /// Whether it gets a terminal.
    pub tty: bool,
    /// Whether its standard input stays open for `process/write`.
    #[serde(default)]
    pub pipe_stdin: bool,
    /// What it sees as `argv[0]`.
    #[serde(default)]
    pub arg0: Option<String>,
    /// What it inherits of the server's environment; none: nothing.
    #[serde(default)]
    pub env_policy: Option<EnvPolicy>,
    /// What it may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
    /// Fails closed: managed networking is not built.
    #[serde(default)]
    pub enforce_managed_network: bool,
    /// Checked and without effect: it could only widen.
    #[serde(default)]
    pub managed_network: Option<ManagedNetwork>,
    /// Refused: managed networking is not built.
    #[serde(default)]
    pub network_proxy: Option<serde_json::Map<String, serde_json::Value>>,
    /// Checked and without effect: without a snapshot the command simply runs.
    #[serde(default)]
    pub shell_snapshot: Option<ShellSnapshot>,
    /// Names for the client's own records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Box<RawValue>>,
    /// Answer also what is enforced on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enforcement: bool,
    /// Of its terminal; none: 24 rows and 80 columns. Only with `tty`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Names this start, so that it can be sent again: 1 to 256 bytes. The same process id with the same operation id is the
    /// same start and answered as the first was; nothing is started twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<String>,
    /// What becomes of its output when there is no room for it and nobody is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when_full: Option<WhenFull>,
    /// Stop it once nothing came of it or went to it for so many milliseconds: it is interrupted, and killed 5 seconds later. The
    /// start itself may take no longer. At least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<NonZeroU64>,
    /// The same for all the time since the call. At least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling_ms: Option<NonZeroU64>,
    /// After its end, wait so many milliseconds for output that others hold open, and drop what comes later. Absent: wait for them.
    /// At least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_ms: Option<NonZeroU64>,
    /// What it may use. A limit that cannot be held here refuses the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
}

impl StartParams {
    /// A start with an empty environment, without a terminal, an open input or a sandbox.
    #[must_use]
    pub fn new(process_id: impl Into<String>, argv: Vec<String>, cwd: WirePath) -> Self {
        Self {
            process_id: process_id.into(),
            argv,
            cwd,
            env: BTreeMap::new(),
            tty: false,
            pipe_stdin: false,
            arg0: None,
            env_policy: None,
            sandbox: None,
            enforce_managed_network: false,
            managed_network: None,
            network_proxy: None,
            shell_snapshot: None,
            metadata: None,
            enforcement: false,
            size: None,
            operation_id: None,
            when_full: None,
            stall_ms: None,
            ceiling_ms: None,
            drain_ms: None,
            limits: None,
        }
    }
}

/// `managedNetwork` of a start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedNetwork {
    /// Ports that a proxy of the client listens on.
    pub loopback_ports: Vec<u16>,
    /// Whether the process may listen.
    pub allow_local_binding: bool,
}

/// `shellSnapshot` of a start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShellSnapshot {
    /// Whose snapshot.
    pub scope_id: String,
    /// Of which shell.
    pub shell: crate::environment::Shell,
}

/// What a process inherits of the server's environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvPolicy {
    /// What to begin with.
    pub inherit: Inherit,
    /// Keep names that look like secrets.
    pub ignore_default_excludes: bool,
    /// Patterns (`*`, `?`, case does not count) of names to drop.
    pub exclude: Vec<String>,
    /// Variables to set then.
    pub set: BTreeMap<String, String>,
    /// If not empty, only names that match are kept.
    pub include_only: Vec<String>,
}

/// How much of the server's environment to begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Inherit {
    /// A handful: HOME, LANG, PATH, SHELL and the like.
    Core,
    /// Everything.
    All,
    /// Nothing.
    None,
}

/// Result of `process/start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartResult {
    /// As asked.
    pub process_id: String,
    /// `none` or `linuxSeccomp`.
    #[serde(default)]
    pub sandbox_type: String,
    /// What the kernel enforces on it, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Box<Enforced>>,
    /// The limits that hold it; absent if none does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitInForce>,
}

/// Parameters of `process/read`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadParams {
    /// The process.
    pub process_id: String,
    /// The last event that is known.
    #[serde(default)]
    pub after_seq: Option<u64>,
    /// Bound of the chunks' bytes; one chunk always comes.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// How long to wait for news, in milliseconds.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// Answer every event behind `after_seq` as `events`, and no chunks. Then an answer always has a bound, `next_seq` is one
    /// past its last event, and a cursor from the future is an error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub events: bool,
}

/// Result of `process/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadResult {
    /// Output behind `after_seq`.
    pub chunks: Vec<OutputChunk>,
    /// One past the last event that this answer speaks of.
    pub next_seq: u64,
    /// Whether it ended.
    #[serde(default)]
    pub exited: bool,
    /// Its status, once it ended.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// Whether its streams ended too.
    pub closed: bool,
    /// Why it is lost, or why its sandbox ended it.
    #[serde(default)]
    pub failure: Option<String>,
    /// Whether it failed and its sandbox was seen to refuse something.
    #[serde(default)]
    pub sandbox_denied: bool,
    /// What its sandbox was seen to refuse, once it ended; absent if nothing.
    #[serde(default, deserialize_with = "denial::known", skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<Denial>,
    /// How many more there were; absent if none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub denials_more: u64,
    /// The limits that it reached, as far as they can be seen; absent if none.
    #[serde(default, deserialize_with = "limit::known", skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitReached>,
    /// What is behind `after_seq` and not kept any more; absent if nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap: Option<Gap>,
    /// Every event of this page, in order, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<LoggedEvent>>,
}

/// Output in a [`ReadResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputChunk {
    /// Its number.
    pub seq: u64,
    /// Where it came from.
    pub stream: Stream,
    /// Its bytes.
    pub chunk: Chunk,
}

/// Parameters of `process/write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// The process.
    pub process_id: String,
    /// Bytes for its standard input.
    pub chunk: Chunk,
    /// Names this write, so that it can be sent again; not empty.
    pub write_id: String,
}

/// Result of `process/write`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// What became of it.
    pub status: WriteStatus,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WriteStatus {
    /// Queued, now or by an earlier write of the same id.
    Accepted,
    /// No such process.
    UnknownProcess,
    /// It takes no input, or takes none any more.
    StdinClosed,
    /// It does not run yet.
    Starting,
}

/// Parameters of `process/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SignalParams {
    /// The process.
    pub process_id: String,
    /// What to send to its group.
    pub signal: Signal,
}

/// Parameters of `process/resize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizeParams {
    /// The process, which has a terminal.
    pub process_id: String,
    /// Lines of its terminal from now on.
    pub rows: NonZeroU16,
    /// Characters a line.
    pub cols: NonZeroU16,
}

/// The size of a terminal. Neither can be 0, which programs divide by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Lines.
    pub rows: NonZeroU16,
    /// Characters a line.
    pub cols: NonZeroU16,
}

/// Parameters of `process/closeStdin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseStdinParams {
    /// The process.
    pub process_id: String,
}

/// Parameters of `process/terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// The process.
    pub process_id: String,
    /// Send SIGTERM first, and kill it so many milliseconds later if it still runs. Absent or 0: kill it at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Answer also how everything that it started is ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub report: bool,
}

/// Result of `process/terminate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateResult {
    /// Whether it ran.
    #[serde(default)]
    pub running: bool,
    /// How everything that it started is ended, if that was asked for and it is known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<TreeEnd>,
}

/// Result of `process/list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResult {
    /// All that the session knows, in the order of their starts.
    pub processes: Vec<ListedProcess>,
}

/// A process in a [`ListResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedProcess {
    /// Its id.
    pub process_id: String,
    /// How far it is in its life.
    pub state: ProcessState,
    /// Its status; absent before it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// When its start was taken up, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// Whether it has a terminal.
    pub tty: bool,
    /// `none` or `linuxSeccomp`; absent while it is starting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_type: Option<String>,
    /// One past the last event that happened to it.
    pub next_seq: u64,
}

/// How far a process is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessState {
    /// It does not run yet.
    Starting,
    /// It runs.
    Running,
    /// It ended; its streams may still bring output of others.
    Exited,
    /// It ended and all its streams did.
    Closed,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

//! What the operator decides. The environment is read here and nowhere else.

use crate::audit::AuditFile;
use crate::http::EgressRule;
use crate::listen::{Credential, Tls, token_directory};
use crate::private;
use crate::process::env::looks_like_a_secret;
use portcullis_protocol::limit::{DefaultBounds, ProcessLimits, SessionLimits};
use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::policy::Policy;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What opens registries or says when the gateway ends, and is for it alone: no process inherits it, whatever its start asks for.
const OWN_VARIABLES: [&str; 7] = [
    "PORTCULLIS_EXECUTOR_TOKEN",
    "PORTCULLIS_HARNESS_TOKEN",
    "PORTCULLIS_STORE",
    "CODEX_API_KEY",
    "CODEX_ACCESS_TOKEN",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
];

/// Where things are on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecServerRuntimePaths {
    /// The executable to start in hidden roles; its `main` must ask `portcullis_helpers::dispatch()` first.
    pub executable: PathBuf,
    /// A directory for output that waits for its client: files without names, which end with the server.
    pub spool: PathBuf,
}

impl ExecServerRuntimePaths {
    /// The running executable; spools are in TMPDIR, else in `/var/tmp` or `/tmp`.
    ///
    /// # Errors
    /// The system does not say which one runs; mount `/proc`.
    pub fn of_this_process() -> std::io::Result<Self> {
        let named = std::env::var_os("TMPDIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
        #[expect(clippy::disallowed_methods, reason = "a constant path of the system, asked for once at the start")]
        let usual = || PathBuf::from(if Path::new("/var/tmp").is_dir() { "/var/tmp" } else { "/tmp" });
        Ok(Self { executable: std::env::current_exe()?, spool: named.unwrap_or_else(usual) })
    }
}

/// Bounds of processes in time; none: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessTimes {
    /// The longest silence, in milliseconds.
    pub stall_ms: Option<NonZeroU64>,
    /// The longest time altogether, in milliseconds.
    pub ceiling_ms: Option<NonZeroU64>,
    /// The longest wait for output that others hold open after the end, in milliseconds.
    pub drain_ms: Option<NonZeroU64>,
}

/// Everything a gateway is told at its start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where things are.
    pub paths: ExecServerRuntimePaths,
    /// Calls of one connection that run side by side; more wait. At least 1.
    pub concurrent_requests: usize,
    /// How long a detached session and a closed process are kept.
    pub retention: Duration,
    /// End after so much time without a connection and without a session; none: never.
    pub idle_exit: Option<Duration>,
    /// The most that a client may ask for instead of `retention`.
    pub max_retention: Duration,
    /// Bytes of output of one process that may wait on disk while its client is away; 0 for none, and then the process waits
    /// once memory is full.
    pub spool_bytes: u64,
    /// The same for all processes of a session together.
    pub session_spool_bytes: u64,
    /// What a listener asks of its clients.
    pub credential: Credential,
    /// What a listener on an address shows its clients; none: no TLS.
    pub tls: Option<Tls>,
    /// How long a client may take until its socket is upgraded, and from there to `initialized`.
    pub handshake: Duration,
    /// How often clients of a listener are pinged.
    pub ping: Duration,
    /// How long a client of a listener may say nothing, a pong included, before it counts as gone.
    pub silence: Duration,
    /// Connected clients, from upgrade to close; one more is refused with status 503. At least 1. Sockets whose request has not
    /// arrived have a bound of their own.
    pub connections: usize,
    /// Sessions at a time, detached ones included. At least 1.
    pub sessions: usize,
    /// Calls of all connections that run at a time. At least 1.
    pub calls: usize,
    /// Processes of all sessions that live at a time. At least 1.
    pub processes: usize,
    /// The same of one session. At least 1.
    pub session_processes: usize,
    /// Bytes of messages and large replies of all connections that are in memory.
    pub buffer_bytes: usize,
    /// Bytes that the pipes of all processes may grow by, while processes write more than is read; 0: they stay as they are made.
    pub pipe_bytes: usize,
    /// What the `Host` of a request may name beside addresses and `localhost`.
    pub allowed_hosts: Vec<String>,
    /// After this long a file call is lost and its worker killed, so that one hung call stops nothing.
    pub fs_deadline: Duration,
    /// Where there are no namespaces, accept write policies for processes although nothing keeps them from protected metadata.
    pub allow_unprotected_metadata: bool,
    /// Where the server is root: the user ids of the machine of which each sandbox has one while it lives; none: it has the server's. No
    /// user and no service may have one of them.
    pub sandbox_uids: Option<UidRange>,
    /// The operator's ceiling: every request gets what both it and this allow, and a request that asks for no sandbox gets this.
    /// None leaves the decision to the clients.
    pub ceiling: Option<Policy>,
    /// Where everything that is asked for is recorded; none: nowhere. No confined request gets to see it.
    pub audit: Option<AuditFile>,
    /// Where requests over HTTP may go, and nowhere else. None: nowhere under a ceiling without network, else anywhere.
    pub egress: Option<EgressRule>,
    /// The most that each start of a process may use: of this and what it asks for the smaller.
    pub process_limits: ProcessLimits,
    /// The longest silence, time altogether and wait for output that others hold open of each start: of each and what it asks for
    /// the smaller. See `stallMs`, `ceilingMs` and `drainMs` of `process/start`.
    pub process_times: ProcessTimes,
    /// What all processes of a session together may use. They need cgroups: where there are none the gateway does not start.
    pub session_limits: SessionLimits,
    /// Default bounds of all started processes, enforced where the machine supports them.
    pub bounds: DefaultBounds,
    /// Files of the operator's that no confined process gets to see, beside tokens that were made at the start: secrets, keys, sockets.
    pub hidden: Vec<PathBuf>,
    /// Files of the operator's that no confined process gets to change, beside the executable: policies and configuration.
    pub kept: Vec<PathBuf>,
    /// The server's environment, for policies of `process/start` that inherit it.
    pub environment: Arc<[(OsString, OsString)]>,
    /// The server's working directory at its start.
    pub cwd: PathBuf,
}

impl Config {
    /// The defaults, with the environment and working directory of this process. [`crate::LIMITS`] has their bounds.
    #[must_use]
    pub fn new(paths: ExecServerRuntimePaths) -> Self {
        Self {
            paths,
            environment: std::env::vars_os().filter(|(name, _)| !OWN_VARIABLES.iter().any(|own| name == own)).collect(),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            ..Self::bare()
        }
    }

    /// The defaults of what does not depend on this process and machine.
    pub(crate) fn bare() -> Self {
        Self {
            paths: ExecServerRuntimePaths { executable: PathBuf::new(), spool: PathBuf::new() },
            concurrent_requests: 64,
            retention: Duration::from_secs(90),
            idle_exit: None,
            credential: Credential::default(),
            tls: None,
            handshake: Duration::from_secs(10),
            ping: Duration::from_secs(15),
            silence: Duration::from_secs(45),
            connections: 4096,
            sessions: 8192,
            calls: 65_536,
            processes: 16_384,
            session_processes: 1024,
            buffer_bytes: 1 << 30,
            pipe_bytes: 16 << 20,
            allowed_hosts: Vec::new(),
            max_retention: Duration::from_secs(600),
            spool_bytes: 64 << 20,
            session_spool_bytes: 256 << 20,
            fs_deadline: Duration::from_secs(120),
            allow_unprotected_metadata: false,
            sandbox_uids: Some(UidRange::DEFAULT),
            ceiling: None,
            audit: None,
            egress: None,
            process_limits: ProcessLimits::default(),
            process_times: ProcessTimes::default(),
            session_limits: SessionLimits::default(),
            bounds: DefaultBounds {
                start_tasks: NonZeroU64::new(4096),
                all_tasks: NonZeroU64::new(65_536),
                leaves_tasks: true,
                memory_percent: NonZeroU64::new(80),
                open_files: None,
            },
            hidden: Vec::new(),
            kept: Vec::new(),
            environment: Arc::new([]),
            cwd: PathBuf::from("/"),
        }
    }

    /// What is the gateway's own, where no confined request gets to see it: tokens that open listeners of this user, the audit log,
    /// and what else the operator hides.
    pub(crate) fn token_places(&self) -> Vec<PathBuf> {
        let named = match &self.credential {
            Credential::Generated { file } => file.clone(),
            Credential::Capability(_) | Credential::SignedBearer(_) | Credential::Insecure => None,
        };
        let key = self.tls.as_ref().map(Tls::key);
        let audit = self.audit.as_ref().map(|file| file.path.as_path());
        let named = named.iter().chain(&self.hidden).map(PathBuf::as_path).chain(key).chain(audit);
        // A shell's `<(…)` is a descriptor of this process, which nobody inherits.
        const OURS: [&str; 5] = ["/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc"];
        let named = named.filter(|file| !OURS.iter().any(|own| file.starts_with(own))).map(|file| self.cwd.join(file));
        self.token_directory().into_iter().chain(named).collect()
    }

    /// The directories that servers of this user have by default for tokens and records, hidden from every request whose policy
    /// restricts files. They need not exist.
    #[must_use]
    pub fn private_places(&self) -> Vec<PathBuf> {
        private::places(self)
    }

    /// What the server's next start is made of, by the real paths that there are now.
    pub(crate) fn kept_places(&self) -> Vec<AbsolutePath> {
        #[expect(clippy::disallowed_methods, reason = "the operator's own files, which no client names, once at the start")]
        let real = |file: &PathBuf| std::fs::canonicalize(self.cwd.join(file)).ok();
        let files = self.kept.iter().chain([&self.paths.executable]);
        files.filter_map(|file| AbsolutePath::new(real(file)?).ok()).collect()
    }

    /// Where servers of this user put their tokens.
    pub(crate) fn token_directory(&self) -> Option<PathBuf> {
        token_directory(self.variable("XDG_RUNTIME_DIR"), self.variable("HOME"))
    }

    /// The variables that a process may inherit. Under a ceiling or a token's own policy the operator decides what clients see, so
    /// variables named like secrets are left out, and `ignoreDefaultExcludes` of a start does not bring them back.
    pub(crate) fn inheritable(&self, is_bounded: bool) -> Arc<[(OsString, OsString)]> {
        if !is_bounded {
            return Arc::clone(&self.environment);
        }
        self.environment.iter().filter(|(name, _)| !looks_like_a_secret(name)).cloned().collect()
    }

    /// A variable of the server's environment.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_os_str())
    }
}

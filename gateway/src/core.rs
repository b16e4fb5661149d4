//! The gateway: what all connections share, and the task that owns every connection and session.

use crate::audit::{Audit, AuditError, Entry};
use crate::config::Config;
use crate::connection;
use crate::descriptors;
use crate::environment;
use crate::helper::pool::Pool;
use crate::helper::spawner::{Spawner, SpawnerError};
use crate::http::Outbound;
use crate::link::Link;
use crate::metrics::Metrics;
use crate::peer::{Looks, Peers};
use crate::policies::{Ceiling, OwnPlaces, Policies};
use crate::private::Private;
use crate::process::launch;
use crate::readiness::Readiness;
use crate::registry::Registry;
use crate::reply;
use crate::room::Room;
use crate::scope::Digest;
use crate::session::{self, Command, Places, SessionConfig, SessionHandle, SpoolLimits, Turn};
use portcullis_protocol::environment::{Enforcement, EnvironmentInfo};
use portcullis_protocol::helper::{CgroupLayer, HIDDEN_FLAG, NamespaceLayer};
use portcullis_protocol::limit::{Scope, SessionLimits};
use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::process::StartParams;
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::report;
use portcullis_sandbox::resolve::Machine;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Connections and sessions on their way to their owner.
const QUEUE: usize = 64;
/// How long connections and sessions may take to end once they were told to.
const DRAIN: Duration = Duration::from_secs(3);
/// How long the audit log may take to be written to its end: its disk may hang.
const AUDIT_DRAIN: Duration = Duration::from_secs(4);
/// How long the spawner may take to end everything that is left; it is killed within that time.
const SPAWNER_DRAIN: Duration = Duration::from_secs(4);

/// A running gateway. Dropping it without [`Gateway::shutdown`] leaves the end to the runtime's.
#[derive(Debug)]
pub struct Gateway {
    core: Arc<Core>,
    closing: CancellationToken,
    idled: CancellationToken,
    owner: JoinHandle<()>,
}

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) machine: Machine,
    /// What no request may exceed.
    pub(crate) ceiling: Ceiling,
    pub(crate) environment: EnvironmentInfo,
    /// What can be enforced here, as found at the start.
    pub(crate) enforcement: Enforcement,
    pub(crate) registry: Registry,
    pub(crate) pool: Pool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) audit: Option<Audit>,
    connections: AtomicU64,
    /// What requests over HTTP share.
    pub(crate) outbound: Outbound,
    pub(crate) room: Room,
    spawner: Spawner,
    looks: Looks,
    work: mpsc::Sender<Work>,
}

enum Work {
    Connection(Link),
    Session(Arc<str>, OwnedSemaphorePermit, Pin<Box<dyn Future<Output = ()> + Send>>),
    /// A change that goes on although its connection has ended: its place in the session's order, and the sign of its end.
    Linger(Turn, oneshot::Receiver<()>),
}

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The program that embeds the gateway does not play the hidden roles.
    #[error(
        "start a gateway in a start that is a hidden helper's: `main` must call `portcullis::dispatch()` first, and end if it answers"
    )]
    NotDispatched,
    /// What happens could not be recorded.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// Its spawner does not run.
    #[error("start the spawner from `{executable}`: {reason}")]
    Spawner {
        /// The executable that was to play the role.
        executable: String,
        /// Why it does not.
        reason: String,
    },
    /// Its limits of sessions cannot be held here.
    #[error("hold the limits of sessions: {lacks} needs the cgroup layer, which is not to be had ({reason}): {remedy}")]
    SessionLimits {
        /// Which.
        lacks: &'static str,
        /// Why not.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
}

/// Less than the operator asked for is a refusal.
fn can_hold(limits: &SessionLimits, cgroups: &CgroupLayer) -> Result<(), StartError> {
    let lacks = if limits.processes.is_some() && !cgroups.processes {
        "processes"
    } else if limits.memory_bytes.is_some() && !cgroups.memory {
        "memory"
    } else {
        return Ok(());
    };
    Err(StartError::SessionLimits { lacks, reason: cgroups.reason.clone(), remedy: report::cgroup_remedy() })
}

impl Gateway {
    /// Starts the spawner and the pool. Must be called within a tokio runtime with its io and time drivers on.
    ///
    /// # Errors
    /// The executable does not play its hidden roles: see [`crate::ExecServerRuntimePaths`]. The audit log cannot be written.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        if std::env::args_os().nth(1).is_some_and(|argument| argument == HIDDEN_FLAG) {
            // This start is a helper's already: another gateway would start another helper, and so on.
            return Err(StartError::NotDispatched);
        }
        let failed = |error: SpawnerError| StartError::Spawner {
            executable: config.paths.executable.display().to_string(),
            reason: error.to_string(),
        };
        let metrics = Arc::new(Metrics::new());
        let bounds = descriptors::raise(config.bounds);
        let (audit, audit_task) = config.audit.as_ref().map(|file| Audit::open(file, &started(&config))).transpose()?.unzip();
        // Before the first confined process.
        let private = Private::prepare(&config);
        let (executable, session_limits, records) = (&config.paths.executable, config.session_limits, private.records.clone());
        let uids = config.sandbox_uids;
        let started = Spawner::start(executable, session_limits, bounds, records, uids, Arc::clone(&metrics)).await;
        let (spawner, spawner_task) = started.map_err(failed)?;
        if let Err(error) = can_hold(&config.session_limits, spawner.cgroups()) {
            spawner_task.stop().await;
            return Err(error);
        }
        let (pool, pool_task) = Pool::start(spawner.clone(), Arc::clone(&metrics));
        let (looks, looking) = Looks::new(spawner.clone());
        let (work, queue) = mpsc::channel(QUEUE);
        // By the given path, which may lead to another file later, and by the path of the file that is used now.
        #[expect(clippy::disallowed_methods, reason = "the operator's own files, which no client names, once at the start")]
        let real = |place: &PathBuf| std::fs::canonicalize(place).ok();
        let places = config.token_places().into_iter().chain(private.places).collect::<Vec<_>>();
        let hidden = places.iter().filter_map(real).chain(places.iter().cloned()).collect::<BTreeSet<_>>();
        let hidden = hidden.into_iter();
        let hidden = hidden.filter_map(|place| AbsolutePath::new(place).ok()).collect();
        let places = OwnPlaces { hidden, kept: config.kept_places() };
        let core = Arc::new(Core {
            machine: Machine::here(config.variable("TMPDIR")),
            ceiling: Ceiling::new(config.ceiling.clone(), Arc::new(places)),
            environment: environment::describe(&config),
            enforcement: report::enforcement(spawner.namespaces(), spawner.cgroups()),
            registry: Registry::default(),
            room: Room::new(&config),
            pool: pool.clone(),
            metrics,
            audit: audit.clone(),
            connections: AtomicU64::new(0),
            outbound: Outbound::new(&config),
            spawner,
            looks,
            work,
            config,
        });
        let (closing, idled) = (CancellationToken::new(), CancellationToken::new());
        #[cfg(feature = "otlp")]
        let exporter = crate::otlp::Exporter::start(core.config.clone(), Arc::clone(&core.metrics));
        let owner = own(Arc::clone(&core), queue, closing.clone(), idled.clone());
        let owner = tokio::spawn(async move {
            let pool_task = tokio::spawn(pool_task);
            let looking = tokio::spawn(looking);
            let audit_task = audit_task.map(tokio::spawn);
            owner.await;
            #[cfg(feature = "otlp")]
            exporter.stop().await;
            pool.stop().await;
            drop(pool);
            let _panicked = pool_task.await;
            // A listener may hold its handle for a moment longer; it accepts no more connections.
            looking.abort();
            let _aborted = looking.await;
            if tokio::time::timeout(SPAWNER_DRAIN, spawner_task.stop()).await.is_err() {
                tracing::error!("the spawner did not end in time");
            }
            if let (Some(audit), Some(audit_task)) = (audit, audit_task) {
                // Behind everything that there is to be recorded.
                let ended = async {
                    audit.stop().await;
                    let _panicked = audit_task.await;
                };
                if tokio::time::timeout(AUDIT_DRAIN, ended).await.is_err() {
                    tracing::error!("the audit log did not take its last lines in time");
                }
            }
        });
        Ok(Self { core, closing, idled, owner })
    }

    /// Serves a client over a link, until either ends.
    pub async fn accept(&self, link: Link) {
        let _closing = self.core.work.send(Work::Connection(link)).await;
    }

    /// Whether it still takes clients.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.closing.is_cancelled() && !self.owner.is_finished()
    }

    /// Says whether new clients can be served: not when it closes, nor while its spawner is being replaced or all sessions are in
    /// use.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let sessions = (Arc::clone(&self.core.room.sessions), self.core.config.sessions);
        Readiness { closing: self.closing.clone(), spawner: self.core.spawner.clone(), sessions, reached: None }
    }

    /// What is going on and how it went, in the text format of OpenMetrics 1.0, which Prometheus reads. No other gateway counts
    /// into it.
    #[must_use]
    pub fn metrics(&self) -> String {
        self.core.metrics.text()
    }

    /// The same for a listener, which may outlive the gateway for a moment.
    pub(crate) fn counters(&self) -> Arc<Metrics> {
        Arc::clone(&self.core.metrics)
    }

    pub(crate) fn audit(&self) -> Option<Audit> {
        self.core.audit.clone()
    }

    /// Cancelled once nobody was connected and no session was kept for as long as [`Config::idle_exit`] says.
    #[must_use]
    pub fn idled(&self) -> CancellationToken {
        self.idled.clone()
    }

    /// Tells the clients of a listener from what this gateway started itself.
    pub(crate) fn peers(&self, local: Option<SocketAddr>) -> Peers {
        Peers::new(local, self.core.spawner.clone(), self.core.looks.clone())
    }

    /// What can be enforced here, and what not and why.
    #[must_use]
    pub fn enforcement(&self) -> &Enforcement {
        &self.core.enforcement
    }

    /// Ends every connection, session, process and helper, and waits for them, a few seconds at most.
    pub async fn shutdown(self) {
        self.closing.cancel();
        drop(self.core);
        let _panicked = self.owner.await;
    }
}

impl Core {
    /// Names the next connection: the first is 1.
    pub(crate) fn number(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Makes a session for clients of a scope and gives its task to the owner.
    pub(crate) async fn new_session(&self, scope: Option<Digest>) -> Result<SessionHandle, RpcError> {
        let place = Arc::clone(&self.room.sessions).try_acquire_owned().map_err(|_full| {
            let text = format!(
                "initialize: at most {} sessions are kept on this server, detached ones included; resume one, or try again later",
                self.config.sessions
            );
            reply::limit(text, "max-sessions", self.config.sessions, Scope::Server)
        })?;
        let config = SessionConfig {
            scope,
            most_processes: self.config.session_processes,
            processes: Places { free: Arc::clone(&self.room.processes), all: self.config.processes },
            pipes: self.room.pipes.clone(),
            retention: self.config.retention,
            allow_unprotected: self.config.allow_unprotected_metadata,
            environment: self.config.inheritable(self.config.ceiling.is_some() || scope.is_some()),
            shell: self.environment.shell.path.clone(),
            process_limits: self.config.process_limits,
            process_times: self.config.process_times,
            spool: self.config.paths.spool.clone(),
            metrics: Arc::clone(&self.metrics),
            audit: self.audit.clone(),
            spool_limits: SpoolLimits { process: self.config.spool_bytes, session: self.config.session_spool_bytes },
        };
        let (handle, task) = session::start(uuid::Uuid::new_v4().to_string().into(), self.spawner.clone(), config);
        self.registry.insert(handle.clone());
        let work = Work::Session(handle.id(), place, Box::pin(task));
        self.work.send(work).await.map_err(|_| reply::internal("the server is shutting down"))?;
        Ok(handle)
    }

    /// Keeps a place in a session's order until a change has ended, or its deadline has passed.
    pub(crate) async fn linger(&self, turn: Turn, ended: oneshot::Receiver<()>) {
        // Where the gateway closes, there is no order to keep any more.
        let _closing = self.work.send(Work::Linger(turn, ended)).await;
    }

    /// The policy that a process is started under; refused if nothing here can hold it to it.
    pub(crate) fn process_policy(&self, policies: &Policies, params: &StartParams) -> Result<Option<Arc<Policy>>, RpcError> {
        let refused = |text: String| RpcError::new(code::INVALID_PARAMS, format!("process/start {}: {text}", params.process_id));
        let cwd = launch::working_directory(params)?;
        let named = policies.for_process(params.sandbox.as_deref(), cwd).map_err(|error| refused(error.message))?;
        let Some(named) = named else { return Ok(None) };
        let mut open = report::process_gaps(&named.policy, self.spawner.namespaces());
        open.retain(|gap| !(gap.waivable && self.config.allow_unprotected_metadata));
        if open.is_empty() {
            Ok(Some(self.without_own(named.policy)))
        } else {
            Err(refused(format!(
                "the policy cannot be enforced on a process here, nothing was started: {}",
                report::describe(&open)
            )))
        }
    }
}

impl Core {
    /// Without namespaces nothing can be taken out of what a process may read; there the listener refuses whatever the gateway
    /// started.
    fn without_own(&self, policy: Arc<Policy>) -> Arc<Policy> {
        match self.spawner.namespaces() {
            NamespaceLayer::Available { .. } => Arc::new(self.ceiling.without_own(Policy::clone(&policy))),
            NamespaceLayer::Unavailable { .. } => policy,
        }
    }
}

/// The first line of a gateway in its audit log.
fn started(config: &Config) -> Entry {
    let policy = config.ceiling.as_ref().map_or_else(|| "none".to_owned(), |policy| policy.hash().to_string());
    let on = serde_json::json!({"version": env!("CARGO_PKG_VERSION")});
    Entry { action: "serve/started", outcome: "ok", on, policy: Some(policy), ..Entry::default() }
}

/// Owns every connection and session: starts them, joins them, and ends them when the gateway closes.
async fn own(core: Arc<Core>, mut queue: mpsc::Receiver<Work>, closing: CancellationToken, idled: CancellationToken) {
    let mut idle_since = None;
    let (mut connections, mut sessions, mut changes) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    loop {
        let is_idle = connections.is_empty() && sessions.is_empty();
        idle_since = is_idle.then(|| idle_since.unwrap_or_else(Instant::now));
        let idle_until = idle_since.zip(core.config.idle_exit).and_then(|(since, time)| since.checked_add(time));
        tokio::select! {
            () = closing.cancelled() => break,
            // What came meanwhile is in the queue at the latest now, and is looked at first.
            () = sleep_until(idle_until.unwrap_or_else(Instant::now)), if idle_until.is_some() && queue.is_empty() => {
                tracing::info!("nobody was here for {} s: ending", core.config.idle_exit.unwrap_or_default().as_secs());
                idled.cancel();
                idle_since = None;
            }
            Some(work) = queue.recv() => match work {
                Work::Connection(link) => {
                    connections.spawn(connection::run(Arc::clone(&core), link, closing.clone()));
                }
                Work::Linger(turn, ended) => {
                    let deadline = core.config.fs_deadline;
                    changes.spawn(async move {
                        let _ended_or_lost = tokio::time::timeout(deadline, ended).await;
                        drop(turn);
                    });
                }
                Work::Session(id, place, task) => {
                    let core = Arc::clone(&core);
                    sessions.spawn(async move {
                        task.await;
                        core.registry.remove(&id);
                        core.spawner.end_session(&id).await;
                        core.pool.forget(id).await;
                        drop(place);
                    });
                }
            },
            Some(_ended) = connections.join_next() => {}
            Some(_ended) = sessions.join_next() => {}
            Some(_ended) = changes.join_next() => {}
        }
    }
    queue.close();
    let ended = async {
        while connections.join_next().await.is_some() {}
        for session in core.registry.all() {
            let _already_ended = session.send(Command::Close).await;
        }
        while sessions.join_next().await.is_some() {}
    };
    if tokio::time::timeout(DRAIN, ended).await.is_err() {
        tracing::warn!("connections or sessions did not end within {} s and are dropped", DRAIN.as_secs());
    }
    connections.shutdown().await;
    sessions.shutdown().await;
    changes.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    #[test]
    fn limits_of_sessions_that_nothing_holds_are_refused_with_the_reason() {
        let some = NonZeroU64::new(9);
        let limits = [(some, None), (None, some), (some, some), (None, None)];
        let limits = limits.map(|(processes, memory_bytes)| SessionLimits { processes, memory_bytes });
        for (processes, memory, expect) in
            [(true, true, [true; 4]), (true, false, [true, false, false, true]), (false, false, [false, false, false, true])]
        {
            let cgroups = CgroupLayer { processes, memory, reason: "it is mounted read-only".to_owned() };
            let held = limits.map(|limits| can_hold(&limits, &cgroups));
            assert_eq!(held.each_ref().map(Result::is_ok), expect, "{held:?}");
            let texts = held.iter().filter_map(|held| held.as_ref().err()).map(ToString::to_string);
            texts.for_each(|text| assert!(text.contains("mounted read-only") && text.contains("Delegate=yes"), "{text}"));
        }
    }
}

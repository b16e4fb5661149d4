//! Starting a process: from its turn to its pump.

use super::{Caller, Task};
use crate::config::ProcessTimes;
use crate::helper::spawner::{Child, Launch, LaunchError, Spawner};
use crate::process::launch::{self, Ends};
use crate::process::pump::Pump;
use crate::process::running::Running;
use crate::reply;
use crate::session::guard::Bounds;
use crate::session::message::{Call, Input};
use crate::session::{Places, SessionConfig, Turn};
use portcullis_protocol::limit::{LimitBy, LimitInForce, Scope};
use portcullis_protocol::process::StartParams;
use portcullis_protocol::rpc::{RpcError, code};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};

/// How long a start may take. A working directory on a file system that hangs would hold up the session's queue for ever.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// A start that came to an end.
pub(super) struct Begun {
    key: u64,
    ends: Ends,
    started: Result<Child, LaunchError>,
    /// Its client wants to know what is enforced on it.
    wants_enforcement: bool,
    /// What its client calls it.
    process: String,
    /// The limit of its output, which is the session's to hold.
    output: Option<LimitInForce>,
    /// Its place among the processes of all sessions.
    place: OwnedSemaphorePermit,
}

impl Task {
    /// Asks the spawner beside everything else. The spawner's answer comes back as [`Begun`].
    pub(super) fn launch(&mut self, call: Call, key: u64) {
        let Some(Caller::Prepare(params, policy, turn, reply)) = self.callers.remove(&call) else { return };
        self.callers.insert(call, Caller::Start(reply));
        let Places { free, all } = &self.config.processes;
        let Ok(place) = Arc::clone(free).try_acquire_owned() else {
            let text = format!(
                "process/start {}: at most {all} processes may run on this server; let some end, or try again later",
                params.process_id
            );
            return self.handle(Input::StartFailed { key, error: reply::limit(text, "max-processes", *all, Scope::Server) });
        };
        let SessionConfig { environment, allow_unprotected, shell, .. } = &self.config;
        match launch::prepare(Arc::clone(&self.id), &params, policy.as_deref(), *allow_unprotected, environment, shell) {
            Ok((launch, ends)) => {
                let (spawner, wants_enforcement) = (self.spawner.clone(), params.enforcement);
                let (bound, process) = (bounds(&params, &self.config.process_times).shortest(), params.process_id);
                let most = params.limits.and_then(|limits| limits.output_bytes);
                let output =
                    most.map(|most| LimitInForce { limit: "outputBytes".to_owned(), value: most.get(), by: LimitBy::Gateway });
                self.starts.push(Box::pin(async move {
                    let started = begin(&spawner, launch, turn, bound).await;
                    Begun { key, ends, started, wants_enforcement, process, output, place }
                }));
            }
            Err(error) => self.handle(Input::StartFailed { key, error }),
        }
    }

    pub(super) fn begun(&mut self, Begun { key, ends, started, wants_enforcement, process, output, place }: Begun) {
        let child = match started {
            Ok(child) => child,
            Err(error) => return self.handle(Input::StartFailed { key, error: launch::failed(&error) }),
        };
        let sandbox_type = launch::sandbox_type(&child.enforced);
        tracing::debug!(session = &*self.mark, process = key, pid = child.pid, enforced = ?child.enforced, "process runs");
        let (mut limits, tree) = (child.limits.clone(), child.tree);
        limits.extend(output);
        let enforcement = wants_enforcement.then(|| Box::new(child.enforced.clone()));
        let (metrics, audit) = (&self.config.metrics, self.config.audit.clone().map(|audit| (audit, process)));
        let running = Running::new(metrics, audit, Arc::clone(&self.mark), key, sandbox_type);
        match Pump::new(key, child, ends, self.spawner.clone(), self.feed.clone(), running, &self.config.pipes) {
            Ok((pump, controls)) => {
                self.controls.insert(key, controls);
                self.handle(Input::Started { key, sandbox_type, enforcement, limits, tree });
                // The caller is woken before the pump runs, so that the answer normally comes before the first event.
                self.act();
                let task = self.pumps.spawn(pump.run());
                self.places.insert(key, place);
                self.pump_keys.insert(task.id(), key);
            }
            Err(error) => {
                let remedy = match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::NOSPC) => "; end processes of the server's user, or raise fs.epoll.max_user_watches",
                    _ => "",
                };
                let text = format!("watch the pipes of the process, which was killed: {error}{remedy}");
                let error = RpcError::new(code::INTERNAL, text);
                self.handle(Input::StartFailed { key, error });
            }
        }
    }
}

/// Starts a process in its turn. The bounds of the process are bounds of its start too.
async fn begin(spawner: &Spawner, launch: Launch, turn: Turn, bound: Option<Duration>) -> Result<Child, LaunchError> {
    let since = Instant::now();
    match bound {
        Some(bound) => timeout(bound, turn.wait()).await.map_err(|_| late(bound))?,
        None => turn.wait().await,
    }
    let left = bound.map_or(START_DEADLINE, |bound| bound.saturating_sub(since.elapsed()).min(START_DEADLINE));
    let started = spawner.process_within(left, launch).await;
    // Its turn ends when it runs, or never will.
    drop(turn);
    started.unwrap_or_else(|| Err(late(bound.map_or(START_DEADLINE, |bound| bound.min(START_DEADLINE)))))
}

fn late(bound: Duration) -> LaunchError {
    LaunchError::Lost(format!("the process did not start within {} s and is killed if it does", bound.as_secs_f64()))
}

/// What a start bounds in time, and the operator.
pub(super) fn bounds(params: &StartParams, most: &ProcessTimes) -> Bounds {
    let smaller = |asked: Option<NonZeroU64>, most: Option<NonZeroU64>| {
        let bound = asked.into_iter().chain(most).min();
        bound.map(|bound| Duration::from_millis(bound.get()))
    };
    Bounds {
        stall: smaller(params.stall_ms, most.stall_ms),
        ceiling: smaller(params.ceiling_ms, most.ceiling_ms),
        drain: smaller(params.drain_ms, most.drain_ms),
    }
}

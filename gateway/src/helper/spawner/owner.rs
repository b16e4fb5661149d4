//! The owner of the spawner: it runs the helper, and replaces a helper that died.
//!
//! Requests that a dead spawner had got are lost. A request that it got no whole frame of, and requests made without a living
//! spawner, wait for the next. Before the next spawner starts, the warden of the dead one ends the processes that it left. If
//! this takes longer than [`SWEEP`], the next spawner starts beside it.

use super::Never;
use super::life::{Begin, Body, END_PATIENCE, Found, Life};
use super::task::{Ask, End, Task};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How long the end of a dead spawner's processes may delay the next spawner.
const SWEEP: Duration = Duration::from_millis(500);

/// How long a request waits for the next spawner. Then it fails, and later requests fail at once until there is a spawner.
const WAIT: Duration = Duration::from_secs(5);

/// A spawner that died sooner and had started no process died of its start, and the next waits for a while.
const INSTANT: Duration = Duration::from_millis(100);

/// How long the next waits after the first such death; with each more of them twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The state of the spawner, as its handles see it.
#[derive(Debug, Clone)]
pub(crate) struct Now {
    /// The ancestor of all processes that the spawner starts. `None` without a living spawner.
    pub(super) pid: Option<u32>,
    /// The same of spawners that have died, as long as anything of them is left.
    pub(super) elders: Vec<u32>,
    /// Why there is none.
    pub(super) trouble: Option<Arc<str>>,
    /// Whether requests are refused at once.
    pub(super) is_late: bool,
}

impl Now {
    pub(super) fn first(pid: u32) -> Self {
        Self { pid: Some(pid), elders: Vec::new(), trouble: None, is_late: false }
    }
}

pub(super) struct Owner {
    pub(super) asks: mpsc::Receiver<Ask>,
    /// The request that the last spawner got no whole frame of.
    pub(super) unsent: Option<Ask>,
    pub(super) stopped: oneshot::Receiver<Never>,
    pub(super) now: Arc<watch::Sender<Now>>,
    /// None: it is not replaced.
    pub(super) begin: Option<Begin>,
    /// The layers that clients were told of.
    pub(super) found: Arc<Found>,
}

impl Owner {
    /// Ends with the last handle, or when it is stopped; then nothing is left of any spawner.
    pub(super) async fn run(mut self, mut life: Life) {
        let (mut elders, mut deaths) = (JoinSet::new(), 0);
        loop {
            let (Life { sender, receiver, body, .. }, began) = (life, Instant::now());
            let task = Task::new(sender, receiver);
            let (reason, has_served) = match task.run(&mut self.unsent, &mut self.asks, &mut self.stopped).await {
                End::Stopped => {
                    self.asks.close();
                    let status = body.end().await;
                    tracing::debug!(status, "the spawner has ended");
                    break;
                }
                End::Died { reason, has_served } => (reason, has_served),
            };
            deaths = if began.elapsed() < INSTANT && !has_served { deaths + 1 } else { 0 };
            self.bury(body, &reason, &mut elders).await;
            match self.next(reason, deaths).await {
                Some(next) => life = next,
                None => break,
            }
        }
        self.asks.close();
        self.now.send_modify(|now| now.pid = None);
        let all = async { while elders.join_next().await.is_some() {} };
        if timeout(END_PATIENCE, all).await.is_err() {
            tracing::error!("processes of a spawner that had died cannot be ended");
        }
    }

    /// Waits until the processes of a dead spawner have ended. If that takes longer, another task waits.
    async fn bury(&self, mut body: Body, reason: &str, elders: &mut JoinSet<()>) {
        let pid = body.pid();
        self.now.send_modify(|now| {
            now.pid = None;
            now.elders.push(pid);
            now.trouble = Some(reason.into());
        });
        while elders.try_join_next().is_some() {}
        if let Ok(status) = timeout(SWEEP, body.ended()).await {
            tracing::error!(reason, status, "the spawner has died and is replaced: the processes that it started are lost");
            return self.now.send_modify(|now| now.elders.retain(|elder| *elder != pid));
        }
        tracing::error!(reason, "the spawner has died and is replaced: the processes that it started are lost and still ending");
        let now = Arc::clone(&self.now);
        elders.spawn(async move {
            let _status = body.ended().await;
            now.send_modify(|now| now.elders.retain(|elder| *elder != pid));
        });
    }

    /// Begins the next life, however often it has to be tried. None if it is stopped.
    async fn next(&mut self, mut reason: String, mut deaths: u32) -> Option<Life> {
        let begin = self.begin.take()?;
        let since = Instant::now();
        let life = loop {
            self.meanwhile(sleep(pause(deaths)), &reason, since).await?;
            let begun = self.meanwhile(begin.life(), &reason, since).await?;
            reason = match begun.map(|life| (life.found.lacks_of(&self.found), life)) {
                Ok((None, life)) => break life,
                Ok((Some(lacks), Life { sender, receiver, body, .. })) => {
                    drop((sender, receiver));
                    self.meanwhile(body.end(), &reason, since).await?;
                    format!("this machine no longer gives {lacks}, as it did when the server started")
                }
                Err(error) => error.to_string(),
            };
            deaths = deaths.saturating_add(1);
            let pause = pause(deaths);
            tracing::error!(reason, ?pause, "the spawner cannot be replaced: tried again after a pause");
            self.now.send_modify(|now| now.trouble = Some(reason.as_str().into()));
        };
        begin.metrics.spawner_replaced();
        self.begin = Some(begin);
        self.now.send_modify(|now| {
            *now = Now { elders: std::mem::take(&mut now.elders), ..Now::first(life.body.pid()) };
        });
        tracing::info!("another spawner serves");
        Some(life)
    }

    /// Waits for some work. Requests wait meanwhile, and fail once that takes too long. None if the owner is stopped.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>, reason: &str, since: Instant) -> Option<T> {
        let mut work = pin!(work);
        loop {
            let is_late = since.elapsed() >= WAIT;
            if let Some(unsent) = self.unsent.take_if(|_| is_late) {
                unsent.fail(reason);
            }
            tokio::select! {
                biased;
                _stopped = &mut self.stopped => return None,
                done = &mut work => return Some(done),
                ask = self.asks.recv(), if is_late => ask?.fail(reason),
                () = sleep_until(since + WAIT), if !is_late => self.now.send_modify(|now| now.is_late = true),
            }
        }
    }
}

/// How long the next spawner waits after so many that died at once.
fn pause(deaths: u32) -> Duration {
    match deaths.checked_sub(1) {
        None => Duration::ZERO,
        Some(more) => FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(more)).min(LONGEST_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_instant_deaths_and_have_a_bound() {
        let pauses: Vec<u128> = (0..9).map(|deaths| pause(deaths).as_millis()).collect();
        assert_eq!(pauses, [0, 50, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}

//! The audit log: what was asked of this gateway, by whom, and what came of it, in a file that shows if it was changed.
//!
//! Each line holds the SHA-256 of the line before it. A line is written before the answer that it is about leaves, so that no
//! client knows of anything that is not there. Where it cannot be written, calls fail: what was done by then is kept and written
//! first as soon as that is possible, and what comes next is refused before it is carried out. One task owns the file.

mod chain;
mod journal;
mod subject;
mod verify;

pub(crate) use self::subject::{bounded, is_recorded, must_be_possible, subject};
pub use self::verify::{AuditFault, Verified, verify_audit};

use self::chain::Chain;
use self::journal::Journal;
use crate::caller::{Caller, Who};
use portcullis_protocol::rpc::RpcError;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

/// Entries in line. Whoever can wait does; those who cannot, because their connection ends, find room for the calls of many.
const QUEUE: usize = 8192;
/// Lines that are written at once, so that many calls share one visit to the disk.
const BATCH: usize = 256;
/// Bytes of lines that wait for a disk that takes none. While it does not, only what had begun adds to them.
const BACKLOG: usize = 32 << 20;
/// Clients that are not let in and told of, in so long; the others are counted. Who shows no credential must not fill the disk.
const REFUSALS: u64 = 60;
const REFUSALS_IN: Duration = Duration::from_secs(60);

/// Where an audit log is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditFile {
    /// A regular file, made with mode 0600 if it is not there, and written by one server at a time.
    pub path: PathBuf,
    /// Whether a line has reached the disk, and not only the system, before an answer leaves.
    pub sync: bool,
}

/// Why there is no audit log.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The system said no.
    #[error("open the audit log `{path}`: {source}")]
    Open {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Another server writes it.
    #[error("the audit log `{0}` is written by another server: name another file, or end that server")]
    Taken(String),
    /// What is there would be lost among what we write.
    #[error("the audit log `{path}` does not end as one: {reason}; nothing was appended, move it away and keep it")]
    Broken {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// A call cannot be recorded.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the audit log cannot be written: {0}")]
pub(crate) struct Unrecorded(Arc<str>);

/// What a line says, beside its place in the chain and its time.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Entry {
    /// A method, or what happened without one.
    pub(crate) action: &'static str,
    pub(crate) outcome: &'static str,
    /// Of an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) connection: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "text")]
    pub(crate) peer: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) who: Option<Who>,
    /// The session's short name.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "text")]
    pub(crate) session: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(crate) on: Value,
    /// SHA-256 of the policy that held, or `none`; absent where none plays a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<String>,
    /// Clients that were not let in since the last such line, and have none of their own.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) omitted: u64,
}

fn text<S: Serializer>(text: &Option<Arc<str>>, serializer: S) -> Result<S::Ok, S::Error> {
    text.as_deref().serialize(serializer)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Entry {
    /// Something that a client did or wanted.
    pub(crate) fn of(caller: &Caller, connection: u64, action: &'static str) -> Self {
        let peer = (!caller.address.is_empty()).then(|| caller.address.as_str().into());
        Self { action, connection: Some(connection), peer, who: Some(caller.who.clone()), ..Self::default() }
    }

    /// It ended so.
    pub(crate) fn ended(self, outcome: Result<(), &RpcError>) -> Self {
        match outcome {
            Ok(()) => Self { outcome: "ok", ..self },
            Err(error) if !error.denials().is_empty() => Self { outcome: "denied", code: Some(error.code), ..self },
            Err(error) => Self { outcome: "error", code: Some(error.code), ..self },
        }
    }
}

#[derive(Debug)]
enum Order {
    Record(Box<Entry>, Option<Reply>),
    Refusal(Box<Entry>),
    /// Write what waits, if that is possible by now.
    Retry(Reply),
    Stop,
}

type Reply = oneshot::Sender<Result<(), Unrecorded>>;

/// A handle to the audit log. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Audit {
    orders: mpsc::Sender<Order>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The last attempt to write failed.
    is_broken: AtomicBool,
    /// Entries for which there was no room: they have no line, but their number has.
    lost: AtomicU64,
}

impl Audit {
    /// Opens the file, goes on with its chain, and writes the first line, blocking. The caller owns the task.
    pub(crate) fn open(file: &AuditFile, first: &Entry) -> Result<(Self, impl Future<Output = ()> + Send + use<>), AuditError> {
        let (journal, chain) = Journal::open(file)?;
        let (orders, queue) = mpsc::channel(QUEUE);
        let shared = Arc::new(Shared::default());
        let refusals = Refusals { since: Instant::now(), told: 0, omitted: 0 };
        let mut task = Task { journal: Some(journal), chain, refusals, shared: Arc::clone(&shared) };
        task.line(first);
        let journal = task.journal.as_mut().map_or(Ok(()), Journal::flush);
        journal.map_err(|source| AuditError::Open { path: file.path.display().to_string(), source })?;
        Ok((Self { orders, shared }, task.run(queue)))
    }

    /// Waits until an entry is written.
    pub(crate) async fn record(&self, entry: Entry) -> Result<(), Unrecorded> {
        let (reply, written) = oneshot::channel();
        // A caller that goes away while there is no room takes its entry along.
        let lost = Lost(Some(&self.shared));
        self.orders.send(Order::Record(Box::new(entry), Some(reply))).await.map_err(|_| stopped())?;
        lost.not();
        written.await.map_err(|_| stopped())?
    }

    /// Hands an entry over, for those who cannot wait.
    pub(crate) fn note(&self, entry: Entry) {
        if self.orders.try_send(Order::Record(Box::new(entry), None)).is_err() {
            drop(Lost(Some(&self.shared)));
        }
    }

    /// Hands over that a client was not let in.
    pub(crate) async fn refused(&self, entry: Entry) {
        let _stopped = self.orders.send(Order::Refusal(Box::new(entry))).await;
    }

    /// Whether what is done next can be recorded, as far as is known.
    pub(crate) async fn check(&self) -> Result<(), Unrecorded> {
        if !self.shared.is_broken.load(Ordering::Acquire) {
            return Ok(());
        }
        let (reply, written) = oneshot::channel();
        self.orders.send(Order::Retry(reply)).await.map_err(|_| stopped())?;
        written.await.map_err(|_| stopped())?
    }

    /// Writes the last line and ends the task.
    pub(crate) async fn stop(&self) {
        let _stopped = self.orders.send(Order::Stop).await;
    }
}

fn stopped() -> Unrecorded {
    Unrecorded("the server is shutting down".into())
}

/// Counts an entry that has no line, unless it gets one.
struct Lost<'a>(Option<&'a Shared>);

impl Lost<'_> {
    fn not(mut self) {
        self.0 = None;
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How many refusals were told of lately.
#[derive(Debug)]
struct Refusals {
    since: Instant,
    told: u64,
    omitted: u64,
}

struct Task {
    /// None while it is lent to a thread that may wait for the disk.
    journal: Option<Journal>,
    chain: Chain,
    refusals: Refusals,
    shared: Arc<Shared>,
}

impl Task {
    async fn run(mut self, mut queue: mpsc::Receiver<Order>) {
        let (mut orders, mut is_over) = (Vec::new(), false);
        while !is_over {
            is_over = queue.recv_many(&mut orders, BATCH).await == 0;
            let mut replies = Vec::new();
            for order in orders.drain(..) {
                match order {
                    Order::Record(entry, reply) => match (self.line(&entry), reply) {
                        (true, reply) => replies.extend(reply),
                        (false, Some(reply)) => {
                            let _caller_gone = reply.send(Err(Unrecorded("too much waits for the disk".into())));
                        }
                        (false, None) => {}
                    },
                    Order::Refusal(entry) => {
                        self.refusal(*entry);
                    }
                    Order::Retry(reply) => replies.push(reply),
                    Order::Stop => {
                        queue.close();
                    }
                }
            }
            if is_over {
                let omitted = self.refusals.omitted;
                self.line(&Entry { action: "serve/stopped", outcome: "ok", omitted, ..Entry::default() });
            }
            let written = self.write().await;
            for reply in replies {
                let _caller_gone = reply.send(written.clone());
            }
        }
    }

    /// Puts a line into the journal, behind those that have none; false if there is no room for it.
    fn line(&mut self, entry: &Entry) -> bool {
        let Some(journal) = &mut self.journal else { return false };
        if journal.waiting() > BACKLOG {
            drop(Lost(Some(&self.shared)));
            return false;
        }
        let lost = self.shared.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let on = serde_json::json!({ "entries": lost });
            let entry = Entry { action: "audit/lost", outcome: "error", on, ..Entry::default() };
            journal.put(self.chain.next(SystemTime::now(), &entry));
        }
        journal.put(self.chain.next(SystemTime::now(), entry));
        true
    }

    fn refusal(&mut self, entry: Entry) {
        if self.refusals.since.elapsed() >= REFUSALS_IN {
            (self.refusals.since, self.refusals.told) = (Instant::now(), 0);
        }
        if self.refusals.told >= REFUSALS {
            self.refusals.omitted += 1;
            return;
        }
        self.refusals.told += 1;
        let omitted = std::mem::take(&mut self.refusals.omitted);
        self.line(&Entry { omitted, ..entry });
    }

    /// Writes what waits, on a thread that may wait for the disk.
    async fn write(&mut self) -> Result<(), Unrecorded> {
        let Some(mut journal) = self.journal.take() else { return Err(stopped()) };
        let written = spawn_blocking(move || {
            let written = journal.flush();
            (journal, written)
        });
        let written = match written.await {
            Ok((journal, written)) => {
                self.journal = Some(journal);
                written.map_err(|error| Unrecorded(error.to_string().into()))
            }
            Err(_shutting_down) => Err(stopped()),
        };
        let was_broken = self.shared.is_broken.swap(written.is_err(), Ordering::AcqRel);
        match &written {
            Err(error) if !was_broken => tracing::error!("{error}: calls are refused until it can; make room for it"),
            Ok(()) if was_broken => tracing::warn!("the audit log can be written again"),
            _ => {}
        }
        written
    }
}

#[cfg(test)]
mod tests;

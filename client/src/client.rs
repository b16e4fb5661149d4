//! The client: a handle to its task.

use crate::mailbox;
use crate::pending::Again;
use crate::process::{Process, ProcessEvents, ProcessInput};
use crate::recovery::{Reply, Settings};
use crate::relay::Way;
use crate::task::{self, Claim, Dialler, Ends, Litter, Order, Transport};
use crate::{ClientStatus, ExecServerClientConnectOptions, ExecServerError};
use portcullis_protocol::environment::Extensions;
use portcullis_protocol::init::InitializeResult;
use portcullis_protocol::process::{ListResult, ListedProcess, StartParams, StartResult};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Write as _;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Calls on their way to the task.
const QUEUE: usize = 128;
/// What was dropped and is to be ended: as many as a server gives file handles to one connection, twice.
const LITTER: usize = 256;

/// A client of an exec-server. Clones share one session, whose connection ends when the last handle is dropped: this one and those
/// of processes and files.
#[derive(Debug, Clone)]
pub struct ExecServerClient {
    orders: mpsc::Sender<Order>,
    litter: mpsc::Sender<Litter>,
    bell: Arc<Notify>,
    status: watch::Receiver<ClientStatus>,
    initialized: Arc<InitializeResult>,
    extensions: Arc<Extensions>,
    keeps_handles: bool,
    fail_fast: bool,
}

impl ExecServerClient {
    /// Connects over a WebSocket, with a session of its own. Answers the client and its task, which the caller joins after
    /// dropping the client. The first connection is tried once.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn connect(options: &ExecServerClientConnectOptions) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        Self::begin(dialler(options)?, options, None).await
    }

    /// Connects to a session that is there, as [`Self::session_id`] of an earlier client named it. Processes of it are followed by
    /// [`Self::attach`]. Otherwise like [`Self::connect`].
    ///
    /// # Errors
    /// See [`ExecServerError`]. A session that another connection holds is refused with −32010, unless it is taken over.
    pub async fn resume(
        options: &ExecServerClientConnectOptions,
        session_id: &str,
    ) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        Self::begin(dialler(options)?, options, Some(session_id.to_owned())).await
    }

    /// Connects over a transport of the caller's. It cannot be opened again: its end is the client's. Otherwise like
    /// [`Self::connect`].
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn over(transport: Transport, client_name: &str) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        let mut options = ExecServerClientConnectOptions::new("", client_name);
        options.reconnect = false;
        Self::begin(Dialler::Given(transport), &options, None).await
    }

    async fn begin(
        dialler: Dialler,
        options: &ExecServerClientConnectOptions,
        resume: Option<String>,
    ) -> Result<(Self, JoinHandle<()>), ExecServerError> {
        let settings = Settings {
            asks_for_binary: matches!(dialler, Dialler::Url { .. }),
            client_name: options.client_name.clone(),
            resume,
            take_over: options.take_over,
            keep_handles: options.keep_handles,
            retention: options.retention,
            reconnect: options.reconnect,
            recovery_deadline: options.recovery_deadline,
            connect_timeout: options.connect_timeout,
            initialize_timeout: options.initialize_timeout,
        };
        let (orders, queue) = mpsc::channel(QUEUE);
        let (litter, litter_queue) = mpsc::channel(LITTER);
        let (ready, is_ready) = oneshot::channel();
        let (status_sender, status) = watch::channel(ClientStatus::Recovering);
        let bell = Arc::new(Notify::new());
        let ends = Ends {
            orders: queue,
            litter: litter_queue,
            litter_sender: litter.clone(),
            bell: Arc::clone(&bell),
            status: status_sender,
            ready,
        };
        let task = tokio::spawn(task::run(settings, dialler, ends));
        let initialized = match is_ready.await {
            Ok(Ok(initialized)) => *initialized,
            Ok(Err(error)) => {
                drop(orders);
                let _panicked = task.await;
                return Err(error);
            }
            Err(_task_gone) => return Err(gone()),
        };
        let info = initialized.environment_info.as_ref();
        let extensions = info.and_then(|info| info.extensions.as_deref().cloned()).unwrap_or_default();
        let keeps_handles = options.keep_handles && extensions.keep_handles;
        let (initialized, extensions) = (Arc::new(initialized), Arc::new(extensions));
        Ok((Self { orders, litter, bell, status, initialized, extensions, keeps_handles, fail_fast: false }, task))
    }

    /// What the server said of itself.
    #[must_use]
    pub fn initialized(&self) -> &InitializeResult {
        &self.initialized
    }

    /// The session's secret name, with which [`Self::resume`] finds it.
    #[must_use]
    pub fn session_id(&self) -> &str {
        &self.initialized.session_id
    }

    /// What the server understands beyond the wire that clients know.
    #[must_use]
    pub fn extensions(&self) -> &Extensions {
        &self.extensions
    }

    /// Where the client is in its life.
    #[must_use]
    pub fn status(&self) -> ClientStatus {
        self.status.borrow().clone()
    }

    /// The same, to be followed.
    #[must_use]
    pub fn watch_status(&self) -> watch::Receiver<ClientStatus> {
        self.status.clone()
    }

    /// The same client for those who must not wait: while it comes back, calls are [`ExecServerError::Recovering`] at once.
    #[must_use]
    pub fn fail_fast(&self) -> Self {
        Self { fail_fast: true, ..self.clone() }
    }

    /// Calls any method. What is on its way when the link is cut is sent again if nothing can be done twice by that.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn call<R: DeserializeOwned>(&self, method: &str, params: &impl Serialize) -> Result<R, ExecServerError> {
        self.call_again(method, params, again(method)).await
    }

    pub(crate) async fn call_again<R: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
        again: Again,
    ) -> Result<R, ExecServerError> {
        decode(method, self.ask(method, params, again).await?)
    }

    /// The same, with what the result brings as bytes if it does.
    pub(crate) async fn ask(&self, method: &str, params: &impl Serialize, again: Again) -> Result<Reply, ExecServerError> {
        let (answer, answered) = oneshot::channel();
        let is_cleanup = matches!(method, "process/terminate" | "fs/close");
        let (params, fail_fast) = (text(method, params)?, self.fail_fast);
        self.send(Order::Call { method: method.to_owned(), params, again, is_cleanup, fail_fast, answer }).await?;
        answered.await.map_err(|_| gone())?
    }

    /// What the session knows of its processes, in the order of their starts.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn processes(&self) -> Result<Vec<ListedProcess>, ExecServerError> {
        self.call("process/list", &serde_json::json!({})).await.map(|list: ListResult| list.processes)
    }

    /// Starts a process. Its events are kept from the first on, up to a bound. If this future is dropped the process is ended.
    ///
    /// A server that knows `operationId` is given one, unless there is one: then a start whose answer was lost in a cut is sent
    /// again and nothing starts twice.
    ///
    /// # Errors
    /// See [`ExecServerError`]. After [`ExecServerError::Lost`] it may have run; it is ended in the background, and until then its
    /// id is taken. An id whose process this client still follows is [`ExecServerError::InUse`].
    pub async fn start(&self, params: &StartParams) -> Result<Process, ExecServerError> {
        let mut params = params.clone();
        if self.extensions.operation_id && params.operation_id.is_none() {
            params.operation_id = operation_id();
        }
        let again = self.extensions.operation_id && params.operation_id.is_some();
        let (mailbox, listener) = mailbox::pair(&self.bell);
        let (answer, answered) = oneshot::channel();
        let (process, fail_fast) = (params.process_id.clone(), self.fail_fast);
        let text = text("process/start", &params)?;
        self.send(Order::Start { process, params: text, again, fail_fast, mailbox, answer }).await?;
        let (result, claim): (_, Claim) = answered.await.map_err(|_| gone())??;
        let started: StartResult = decode("process/start", result)?;
        claim.take();
        Ok(self.process(started, ProcessEvents(listener)))
    }

    /// Follows a process of the session that this client did not start, from behind the event of number `after_seq` on; 0 is from
    /// its beginning. What the server does not keep of it any more is a [`crate::ProcessEvent::Gap`] if the server can tell, and
    /// else an error. Its standard input is best left to one client, whose writes are numbered.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn attach(&self, process_id: &str, after_seq: u64) -> Result<Process, ExecServerError> {
        let (mailbox, listener) = mailbox::pair(&self.bell);
        let (answer, answered) = oneshot::channel();
        let process = process_id.to_owned();
        self.send(Order::Attach { process, after: after_seq, mailbox, answer }).await?;
        let (_nothing, claim): (_, Claim) = answered.await.map_err(|_| gone())??;
        claim.take();
        let started =
            StartResult { process_id: process_id.to_owned(), sandbox_type: String::new(), enforcement: None, limits: Vec::new() };
        Ok(self.process(started, ProcessEvents(listener)))
    }

    fn process(&self, started: StartResult, events: ProcessEvents) -> Process {
        let input = Some(ProcessInput::new(self.clone(), started.process_id.clone()));
        Process { client: self.clone(), started, input, events: Some(events) }
    }

    pub(crate) async fn send(&self, order: Order) -> Result<(), ExecServerError> {
        self.orders.send(order).await.map_err(|_| gone())
    }

    pub(crate) fn bell(&self) -> &Arc<Notify> {
        &self.bell
    }

    pub(crate) fn is_fail_fast(&self) -> bool {
        self.fail_fast
    }

    /// Whether file handles survive a cut.
    pub(crate) fn keeps_handles(&self) -> bool {
        self.keeps_handles
    }

    /// Ends something in the background, for those who cannot wait.
    pub(crate) fn drop_later(&self, litter: Litter) {
        // If the line is full the server ends it with the session.
        let _full = self.litter.try_send(litter);
    }
}

fn dialler(options: &ExecServerClientConnectOptions) -> Result<Dialler, ExecServerError> {
    if let Some(remote) = &options.remote {
        let failed = |reason| ExecServerError::Connect { url: remote.base_url.clone(), reason };
        return Way::new(remote, options.account.as_deref(), options.tls.as_ref()).map(Dialler::Relay).map_err(failed);
    }
    let ExecServerClientConnectOptions { url, token, tls, silence_timeout: silence, .. } = options.clone();
    Ok(Dialler::Url { url, token, tls, silence })
}

/// What becomes of a call on its way when the link is cut.
fn again(method: &str) -> Again {
    match method {
        // Named by a write id, without effect the second time, or a question that is asked in loops.
        "process/write" | "process/closeStdin" | "process/terminate" | "process/read" | "process/acknowledge" | "fs/close" => {
            Again::Send
        }
        "fs/readFile"
        | "fs/getMetadata"
        | "fs/canonicalize"
        | "fs/readDirectory"
        | "fs/walk"
        | "fs/readBlock"
        | "process/list"
        | "environment/info"
        | "environment/status"
        | "environmentConfig/read"
        | "capabilities/discoverV2"
        | "capabilityRoots/discoverV1" => Again::Fail,
        _change => Again::Lost,
    }
}

/// 128 random bits. None if the system has none: then nothing is sent twice.
pub(crate) fn operation_id() -> Option<String> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).ok()?;
    Some(bytes.iter().fold(String::with_capacity(32), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    }))
}

pub(crate) fn text(method: &str, params: &impl Serialize) -> Result<String, ExecServerError> {
    serde_json::to_string(params)
        .map_err(|error| ExecServerError::Parameters { method: method.to_owned(), reason: error.to_string() })
}

pub(crate) fn decode<R: DeserializeOwned>(method: &str, reply: Reply) -> Result<R, ExecServerError> {
    let wrong = |reason| ExecServerError::Answer { method: method.to_owned(), reason };
    let result = reply.into_json(method).map_err(wrong)?;
    serde_json::from_str(result.get()).map_err(|error| wrong(error.to_string()))
}

/// The task is gone: it panicked, or its runtime ends.
pub(crate) fn gone() -> ExecServerError {
    ExecServerError::Disconnected("the client's task is gone".to_owned())
}

#[cfg(test)]
mod tests;

//! A connection: decodes what one client sends, routes each call, and answers. Calls run side by side up to a bound.

mod control;
mod files;
mod http;
mod output;
mod watch;

use crate::answer::{Answer, answered, carry_out, text};
use crate::blocking::Blocking;
use crate::budget::{Budget, Charge};
use crate::core::Core;
use crate::environment;
use crate::handles::{Disk, Handles};
use crate::handshake::Handshake;
use crate::http::Bodies;
use crate::link::{Doubt, Incoming, Link, Outgoing};
use crate::policies::Policies;
use crate::reply;
use crate::session::{AttachError, Attachment, Command, Newcomer, SessionHandle, Terms};
use crate::watch::Watches;
use control::is_control;
use portcullis_protocol::environment::{EnvironmentInfo, EnvironmentStatus};
use portcullis_protocol::fs::Empty;
use portcullis_protocol::init::{InitializeParams, InitializeResult};
use portcullis_protocol::limit::Scope;
use portcullis_protocol::method::{Call, Decoded};
use portcullis_protocol::process::StartParams;
use portcullis_protocol::rpc::{self, Id, Message, RpcError, code};
use serde::Serialize;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Calls that wait for a slot, beyond those that run. When there are as many the link is not read: the transport's own flow
/// control holds the client up, and nothing is dropped.
const WAITING: usize = 256;
/// Bytes of large replies that are being made or wait for the client to take them. A larger one goes alone.
const REPLY_BYTES: usize = 64 << 20;
/// The WebSocket close code of a connection whose session another one took over: of the range that RFC 6455 section 7.4.2
/// leaves to applications.
const TAKEN_OVER: u16 = 4001;
/// Input that waits, or whose answer does. A session parks far less for one process, and what it refuses is answered at once.
const INPUTS: usize = 8192;
/// Control calls that run; each is one exchange with the session, so a few are many.
const CONTROL: usize = 64;

/// Serves one client until its link ends or the gateway closes.
pub(crate) async fn run(core: Arc<Core>, link: Link, closing: CancellationToken) {
    let Link { mut incoming, outgoing, mut answered, answers_pings, peer, resumable, doubt, handshake, budget } = link;
    budget.join(&core.room.incoming);
    let replies = Budget::new(REPLY_BYTES);
    replies.join(&core.room.replies);
    let bodies = Bodies::new(&core.room.bodies, &core.room.replies);
    let handshake_ends = handshake.map(|time| (time, Instant::now() + time));
    let disk = Disk { blocking: Blocking::new(), deadline: core.config.fs_deadline };
    let slots = core.config.concurrent_requests.max(1);
    let policies = Policies::new(core.machine.clone(), core.ceiling.clone());
    let mut connection = Connection {
        core,
        outgoing,
        doubt,
        answers_pings,
        peer,
        leaving: closing.child_token(),
        keeps_handles: false,
        handshake: Handshake::default(),
        attached: None,
        policies,
        handles: Handles::default(),
        calls: JoinSet::new(),
        control: JoinSet::new(),
        inputs: JoinSet::new(),
        waiting: VecDeque::new(),
        slots,
        disk,
        replies,
        bodies,
        watches: Watches::new(),
        charge: None,
        place: None,
    };
    loop {
        tokio::select! {
            biased;
            () = connection.leaving.cancelled() => {
                let (code, reason) = if closing.is_cancelled() {
                    (1001, "the server is shutting down")
                } else {
                    (TAKEN_OVER, "another connection took the session over")
                };
                let close = Outgoing::Close { code, reason: reason.to_owned() };
                let _link_full_or_gone = connection.outgoing.try_send(close);
                break;
            }
            time = overdue(handshake_ends), if !connection.handshake.is_done() => {
                let reason = format!("no initialize and initialized within {} s", time.as_secs());
                let _link_full_or_gone = connection.outgoing.try_send(Outgoing::Close { code: 1008, reason });
                break;
            }
            Some(_ended) = connection.calls.join_next() => connection.go_on().await,
            Some(_ended) = connection.control.join_next() => {}
            Some(_ended) = connection.inputs.join_next() => {}
            Some(_ended) = connection.bodies.tasks.join_next() => {}
            Some(_ended) = connection.watches.tasks.join_next() => {}
            // Before the messages, which may wait for what this makes room for.
            Ok(()) = answered.changed() => {
                let mark = *answered.borrow_and_update();
                connection.delivered(mark).await;
            }
            message = incoming.recv(), if connection.has_room() => match message {
                Some(Incoming { bytes, charge }) => {
                    connection.charge = Some(charge);
                    connection.message(&bytes).await;
                    connection.charge = None;
                }
                None => break,
            },
        }
    }
    connection.end(resumable).await;
}

/// Waits until it is too late, and answers how much time there was.
async fn overdue(ends: Option<(Duration, Instant)>) -> Duration {
    match ends {
        Some((time, at)) => {
            sleep_until(at).await;
            time
        }
        None => std::future::pending().await,
    }
}

struct Connection {
    core: Arc<Core>,
    outgoing: mpsc::Sender<Outgoing>,
    doubt: Doubt,
    answers_pings: bool,
    peer: String,
    /// The gateway closes, or another connection takes the session over.
    leaving: CancellationToken,
    /// Its client wants to find its file handles again after a cut.
    keeps_handles: bool,
    handshake: Handshake,
    attached: Option<(SessionHandle, Attachment)>,
    policies: Policies,
    handles: Handles,
    /// Calls that hold a slot.
    calls: JoinSet<()>,
    /// Calls that never wait for one.
    control: JoinSet<()>,
    /// Input that waits for its process. The session bounds it.
    inputs: JoinSet<()>,
    /// Calls without a slot yet, in order of arrival.
    waiting: VecDeque<(Id, Call, Option<Charge>)>,
    slots: usize,
    disk: Disk,
    /// What large replies may hold until they are sent.
    replies: Budget,
    /// Bodies of answers over HTTP.
    bodies: Bodies,
    /// Watches for what is not there.
    watches: Watches,
    /// The room of the message at hand, which goes with its call.
    charge: Option<Charge>,
    /// The place of the call at hand among all that run.
    place: Option<OwnedSemaphorePermit>,
}

impl Connection {
    async fn message(&mut self, bytes: &[u8]) {
        let complaint = match rpc::parse(bytes) {
            Ok(Message::Request { id, method, params }) => {
                let answered = match Call::decode(&method, params) {
                    Ok(Decoded { call, ignored }) => {
                        if ignored > 0 {
                            tracing::debug!(%method, ignored, "members of a request that nobody knows");
                        }
                        self.admit(id.clone(), call).await
                    }
                    Err(error) => Err(error),
                };
                if let Err(error) = answered {
                    self.send(rpc::error_text(&id, &error)).await;
                }
                return;
            }
            Ok(Message::Notification { method, .. }) if method == "initialized" => match self.handshake.initialized() {
                Ok(()) => return,
                Err(error) => error,
            },
            Ok(Message::Notification { method, .. }) => reply::invalid(format!(
                "`{method}` came without an id, so it is a notification, and this server knows only `initialized`; nothing was done"
            )),
            Ok(Message::Response { .. }) => reply::invalid("a response came, but this server asks nothing; it was ignored"),
            Err(detail) => reply::invalid(format!("failed to parse {}: {detail}", self.peer)),
        };
        self.send(rpc::error_text(&Id::unknown(), &complaint)).await;
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < WAITING && self.control.len() < CONTROL && self.inputs.len() < INPUTS
    }

    /// Routes a call now, or once it has a slot. Which come first is decided here, in order of arrival.
    async fn admit(&mut self, id: Id, call: Call) -> Result<(), RpcError> {
        self.handshake.admit(&call)?;
        if is_control(&call) || (self.waiting.is_empty() && self.calls.len() < self.slots) {
            return self.route(id, call).await;
        }
        self.waiting.push_back((id, call, self.charge.take()));
        Ok(())
    }

    /// Gives free slots to those who wait.
    async fn go_on(&mut self) {
        while self.calls.len() < self.slots
            && let Some((id, call, charge)) = self.waiting.pop_front()
        {
            self.charge = charge;
            if let Err(error) = self.route(id.clone(), call).await {
                self.send(rpc::error_text(&id, &error)).await;
            }
        }
    }

    /// Carries a call out, in a place among those that all connections have.
    async fn route(&mut self, id: Id, call: Call) -> Result<(), RpcError> {
        if !is_control(&call) {
            let place = Arc::clone(&self.core.room.calls).try_acquire_owned();
            self.place = Some(place.map_err(|_full| {
                let text =
                    format!("{}: at most {} calls run on this server; send it again", call.method(), self.core.config.calls);
                reply::limit(text, "max-calls", self.core.config.calls, Scope::Server)
            })?);
        }
        let routed = self.dispatch(id, call).await;
        self.place = None;
        routed
    }

    /// One match over every call. An error is answered by the caller; everything else answers for itself.
    async fn dispatch(&mut self, id: Id, call: Call) -> Result<(), RpcError> {
        match call {
            Call::Initialize(params) => self.initialize(id, params).await,
            Call::EnvironmentInfo(params) => {
                let enforcement = params.enforcement.then(|| Box::new(self.core.enforcement.clone()));
                let extensions = params.extensions.then(|| Box::new(environment::extensions(&self.core.config)));
                let limits = params.limits.then(|| environment::limits(&self.core.config));
                self.answer(&id, &EnvironmentInfo { enforcement, extensions, limits, ..self.core.environment.clone() }).await
            }
            Call::EnvironmentStatus => self.answer(&id, &EnvironmentStatus { status: "ready".to_owned() }).await,
            Call::ProcessStart(params) => self.start(id, params).await,
            Call::ProcessRead(params) => self.read(id, params).await,
            Call::ProcessAcknowledge(params) => self.control(id, |reply| Command::Acknowledge { params, reply }).await,
            Call::ProcessWrite(params) => self.input(id, |reply| Command::Write { params, reply }).await,
            Call::ProcessCloseStdin(params) => self.input(id, |reply| Command::CloseStdin { params, reply }).await,
            Call::ProcessList => self.ask(id, |reply| Command::List { reply }).await,
            Call::ProcessResize(params) => self.control(id, |reply| Command::Resize { params, reply }).await,
            Call::ProcessSignal(params) => self.control(id, |reply| Command::Signal { params, reply }).await,
            Call::ProcessTerminate(params) => self.control(id, |reply| Command::Terminate { params, reply }).await,
            Call::FsOpen(params) => self.open(id, params),
            Call::FsReadBlock(params) => self.read_block(id, params),
            Call::FsWriteBlock(params) => self.write_block(id, params),
            Call::FsClose(params) => {
                self.handles.close(&params.handle_id);
                self.answer(&id, &Empty {}).await
            }
            Call::FsWatchMissing(params) => self.watch_missing(id, params).await,
            Call::HttpRequest(params) => self.http(id, *params),
            Call::NotBuilt { method, .. } => Err(RpcError::unknown_method(method)),
            files => self.files(id, files).await,
        }
    }

    async fn initialize(&mut self, id: Id, params: InitializeParams) -> Result<(), RpcError> {
        let session = match params.resume_session_id {
            None => self.core.new_session().await?,
            Some(wanted) => {
                let unknown = || reply::invalid(format!("unknown session id {wanted}"));
                self.core.registry.get(&wanted).ok_or_else(unknown)?
            }
        };
        let (reply, attached) = oneshot::channel();
        let unknown = || reply::invalid(format!("unknown session id {}", session.id()));
        let longest = self.core.config.max_retention;
        let terms = Terms {
            take_over: params.take_over,
            retention: params.retention_ms.map(|asked| Duration::from_millis(asked).min(longest)),
            proof: self.proof(params.acknowledge),
        };
        let newcomer =
            Newcomer { outgoing: self.outgoing.clone(), evicted: self.leaving.clone(), doubt: self.doubt.clone(), terms };
        session.send(Command::Attach { newcomer, reply }).await.map_err(|_| unknown())?;
        let mut attachment = attached.await.map_err(|_| unknown())?.map_err(|AttachError| {
            RpcError::new(code::ATTACHED, format!("session {} is already attached to another connection", session.id()))
        })?;
        let extensions = params.extensions.then(|| Box::new(environment::extensions(&self.core.config)));
        let environment_info = Some(EnvironmentInfo { extensions, ..self.core.environment.clone() });
        let result = InitializeResult { session_id: session.id().to_string(), environment_info };
        self.handles = std::mem::take(&mut attachment.handles);
        self.keeps_handles = params.keep_handles;
        self.attached = Some((session, attachment));
        self.handshake.attached();
        self.answer(&id, &result).await
    }

    async fn start(&mut self, id: Id, params: Box<StartParams>) -> Result<(), RpcError> {
        let policy = self.core.process_policy(&self.policies, &params)?;
        let turn = self.order()?.mutation();
        self.ask(id, |reply| Command::Start { params, policy, turn, reply }).await
    }

    /// Asks the session and holds a slot until it answers.
    async fn ask<T: Serialize + Send + 'static>(
        &mut self,
        id: Id,
        command: impl FnOnce(oneshot::Sender<Result<T, RpcError>>) -> Command,
    ) -> Result<(), RpcError> {
        let answer = self.command(command).await?;
        self.run(id.clone(), answered(id, answer));
        Ok(())
    }

    /// Hands input to the session, in its turn among the calls, and holds no slot until that is answered: a process that reads
    /// nothing would stop every call, and with them the words by which its client makes room for what it writes.
    async fn input<T: Serialize + Send + 'static>(
        &mut self,
        id: Id,
        command: impl FnOnce(oneshot::Sender<Result<T, RpcError>>) -> Command,
    ) -> Result<(), RpcError> {
        let answer = self.command(command).await?;
        let (held, outgoing, replies) = (self.held(), self.outgoing.clone(), self.replies.clone());
        self.inputs.spawn(async move {
            let _room_and_place = held;
            carry_out(id.clone(), outgoing, replies, answered(id, answer)).await;
        });
        Ok(())
    }

    /// Asks the session without holding a slot.
    async fn control<T: Serialize + Send + 'static>(
        &mut self,
        id: Id,
        command: impl FnOnce(oneshot::Sender<Result<T, RpcError>>) -> Command,
    ) -> Result<(), RpcError> {
        let answer = self.command(command).await?;
        self.control.spawn(carry_out(id.clone(), self.outgoing.clone(), self.replies.clone(), answered(id, answer)));
        Ok(())
    }

    /// Sends a command to the session at once, in order of arrival.
    async fn command<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, RpcError>>) -> Command,
    ) -> Result<oneshot::Receiver<Result<T, RpcError>>, RpcError> {
        let (reply, answer) = oneshot::channel();
        let (session, _attachment) = self.attached.as_ref().ok_or_else(reply::session_ended)?;
        session.send(command(reply)).await.map_err(|_| reply::session_ended())?;
        Ok(answer)
    }

    /// Runs a call in a slot.
    fn run(&mut self, id: Id, call: impl Future<Output = Result<Answer, RpcError>> + Send + 'static) {
        let held = self.held();
        let answered = carry_out(id, self.outgoing.clone(), self.replies.clone(), call);
        self.calls.spawn(async move {
            let _room_and_place = held;
            answered.await;
        });
    }

    /// What the call at hand holds until it is answered.
    fn held(&mut self) -> (Option<Charge>, Option<OwnedSemaphorePermit>) {
        (self.charge.take(), self.place.take())
    }

    async fn answer(&self, id: &Id, result: &impl Serialize) -> Result<(), RpcError> {
        self.send(text(id, result)?).await;
        Ok(())
    }

    /// Waits for room towards the client, but not when the connection is to end.
    async fn send(&self, text: String) {
        tokio::select! {
            _link_gone = self.outgoing.send(Outgoing::Text(text)) => {}
            () = self.leaving.cancelled() => {}
        }
    }

    fn order(&mut self) -> Result<&mut crate::session::Order, RpcError> {
        self.attached
            .as_mut()
            .map(|(_, attachment)| &mut attachment.order)
            .ok_or_else(|| reply::invalid("no session is attached"))
    }

    fn session(&self) -> Result<Arc<str>, RpcError> {
        self.attached.as_ref().map(|(session, _)| session.id()).ok_or_else(|| reply::invalid("no session is attached"))
    }

    /// Detaches at once. Calls that wait are dropped; what a worker or the session has begun is finished by them.
    async fn end(mut self, resumable: bool) {
        self.waiting.clear();
        self.calls.shutdown().await;
        self.control.shutdown().await;
        self.inputs.shutdown().await;
        self.bodies.tasks.shutdown().await;
        self.watches.tasks.shutdown().await;
        let Some((session, attachment)) = self.attached else { return };
        let handles = if self.keeps_handles { self.handles } else { Handles::default() };
        let command = if resumable { Command::Detach(Attachment { handles, ..attachment }) } else { Command::Close };
        let _session_ended = session.send(command).await;
    }
}

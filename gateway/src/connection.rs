//! A connection: decodes what one client sends, routes each call, and answers. Calls run side by side up to a bound.

mod answers;
mod control;
mod files;
mod http;
mod initialize;
mod output;
mod waits;
mod watch;

use crate::answer::{Answer, Form, answered, carry_out};
use crate::asked::Asked;
use crate::blocking::Blocking;
use crate::budget::{Budget, Charge};
use crate::caller::Caller;
use crate::core::Core;
use crate::environment;
use crate::handles::{Disk, Handles};
use crate::handshake::Handshake;
use crate::http::Bodies;
use crate::link::{Abilities, Doubt, Incoming, Link, Outgoing};
use crate::metrics::Direction;
use crate::policies::Policies;
use crate::reply;
use crate::scope::TokenScope;
use crate::session::{Attachment, Command, SessionHandle};
use crate::watch::Watches;
use control::is_control;
use portcullis_protocol::environment::{EnvironmentInfo, EnvironmentStatus};
use portcullis_protocol::fs::Empty;
use portcullis_protocol::limit::Scope;
use portcullis_protocol::method::Call;
use portcullis_protocol::process::StartParams;
use portcullis_protocol::rpc::{self, Id, Message, RpcError};
use portcullis_sandbox::policy::Policy;
use serde::Serialize;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use waits::{expired, one_ended, overdue};

/// Calls that wait for a slot, beyond those that run. When there are as many the link is not read: the transport's own flow
/// control holds the client up, and nothing is dropped.
const WAITING: usize = 256;
/// Bytes of large replies that are being made or wait for the client to take them. A larger one goes alone.
const REPLY_BYTES: usize = 64 << 20;
/// The WebSocket close code of a connection whose session another one took over: of the range that RFC 6455 section 7.4.2
/// leaves to applications.
const TAKEN_OVER: u16 = 4001;
/// The same of a connection whose token has expired.
const EXPIRED: u16 = 4003;
/// Input that waits, or whose answer does. A session parks far less for one process, and what it refuses is answered at once.
const INPUTS: usize = 8192;
/// Control calls that run; each is one exchange with the session, so a few are many.
const CONTROL: usize = 64;

/// Serves one client until its link ends or the gateway closes, and says so to those who watch.
pub(crate) async fn run(core: Arc<Core>, link: Link, closing: CancellationToken) {
    let (_present, number) = (core.metrics.connection(link.caller.transport), core.number());
    let Caller { transport, address, who } = &link.caller;
    tracing::info!(connection = number, transport = transport.name(), address, ?who, "connection opened");
    let began = Instant::now();
    serve(core, link, closing, number).await;
    tracing::info!(connection = number, seconds = began.elapsed().as_secs(), "connection closed");
}

async fn serve(core: Arc<Core>, link: Link, closing: CancellationToken, number: u64) {
    let Link { mut incoming, outgoing, mut answered, can, peer, resumable, doubt, handshake, budget, caller, scope } = link;
    budget.join(&core.room.incoming);
    let replies = Budget::new(REPLY_BYTES);
    replies.join(&core.room.replies);
    let bodies = Bodies::new(&core.room.bodies, &core.room.replies);
    let handshake_ends = handshake.map(|time| (time, Instant::now() + time));
    let disk = Disk { blocking: Blocking::new(), deadline: core.config.fs_deadline };
    let slots = core.config.concurrent_requests.max(1);
    let ceiling = match core.ceiling.within(scope.as_ref().and_then(|scope| scope.policy())) {
        Ok(ceiling) => ceiling,
        Err(error) => return tracing::error!("{peer}: the ceiling of its token: {error}"),
    };
    let policies = Policies::new(core.machine.clone(), ceiling);
    let mut connection = Connection {
        core,
        outgoing,
        doubt,
        can,
        form: Form::Json,
        peer,
        caller,
        number,
        leaving: closing.child_token(),
        keeps_handles: false,
        handshake: Handshake::default(),
        attached: None,
        policies,
        scope: scope.clone(),
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
        asked: None,
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
            () = expired(scope.as_deref()) => {
                let close = Outgoing::Close { code: EXPIRED, reason: "the token of this connection has expired".to_owned() };
                let _link_full_or_gone = connection.outgoing.try_send(close);
                break;
            }
            Some(_ended) = connection.calls.join_next() => connection.go_on().await,
            () = one_ended([&mut connection.control, &mut connection.inputs, &mut connection.bodies.tasks, &mut connection.watches.tasks]) => {}
            // Before the messages, which may wait for what this makes room for.
            Ok(()) = answered.changed() => {
                let mark = *answered.borrow_and_update();
                connection.delivered(mark).await;
            }
            message = incoming.recv(), if connection.has_room() => match message {
                Some(incoming) => connection.message(incoming).await,
                None => break,
            },
        }
    }
    connection.end(resumable).await;
}

struct Connection {
    core: Arc<Core>,
    outgoing: mpsc::Sender<Outgoing>,
    doubt: Doubt,
    can: Abilities,
    /// As its client asked.
    form: Form,
    peer: String,
    caller: Caller,
    number: u64,
    /// The gateway closes, or another connection takes the session over.
    leaving: CancellationToken,
    /// Its client wants to find its file handles again after a cut.
    keeps_handles: bool,
    handshake: Handshake,
    attached: Option<(SessionHandle, Attachment)>,
    policies: Policies,
    /// What its token narrows it to.
    scope: Option<Arc<TokenScope>>,
    handles: Handles,
    /// Calls that hold a slot.
    calls: JoinSet<()>,
    /// Calls that never wait for one.
    control: JoinSet<()>,
    /// Input that waits for its process. The session bounds it.
    inputs: JoinSet<()>,
    /// Calls without a slot yet, in order of arrival.
    waiting: VecDeque<(Id, Call, Option<Charge>, Option<Asked>)>,
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
    /// The request at hand, until its answer is on its way.
    asked: Option<Asked>,
    /// The place of the call at hand among all that run.
    place: Option<OwnedSemaphorePermit>,
}

impl Connection {
    async fn message(&mut self, Incoming { bytes, charge }: Incoming) {
        self.core.metrics.message(Direction::In, bytes.len());
        self.charge = Some(charge);
        self.obey(&bytes).await;
        self.charge = None;
    }

    async fn obey(&mut self, bytes: &[u8]) {
        let complaint = match rpc::parse(bytes) {
            Ok(Message::Request { id, method, params }) => {
                let admitted = match self.asked(&method, params).await {
                    Ok(call) => self.admit(id.clone(), call).await,
                    Err(error) => Err(error),
                };
                return self.admitted(&id, admitted).await;
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
        self.waiting.push_back((id, call, self.charge.take(), self.asked.take()));
        Ok(())
    }

    /// Gives free slots to those who wait.
    async fn go_on(&mut self) {
        while self.calls.len() < self.slots
            && let Some((id, call, charge, asked)) = self.waiting.pop_front()
        {
            (self.charge, self.asked) = (charge, asked);
            let admitted = self.route(id.clone(), call).await;
            self.admitted(&id, admitted).await;
            // What was refused, or needed no room, gives it back now: the next message may be waiting for it.
            self.charge = None;
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

    async fn start(&mut self, id: Id, params: Box<StartParams>) -> Result<(), RpcError> {
        let policy = self.core.process_policy(&self.policies, &params)?;
        self.asked.iter_mut().for_each(|asked| asked.under(|| policy.as_deref().map(Policy::hash)));
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
        let carried = self.beside(id, answer);
        self.inputs.spawn(carried);
        Ok(())
    }

    /// Answers without a slot as the session does.
    fn beside<T: Serialize + Send + 'static>(
        &mut self,
        id: Id,
        answer: oneshot::Receiver<Result<T, RpcError>>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (held, way) = (self.held(), self.way());
        carry_out(id.clone(), way, async move {
            let answer = answered(id, answer).await;
            // The session has done with the message, or has refused it. The answer may have to wait for a client that sends before it
            // reads, and the room of what it sends next must not wait for that.
            drop(held);
            answer
        })
    }

    /// Asks the session without holding a slot.
    async fn control<T: Serialize + Send + 'static>(
        &mut self,
        id: Id,
        command: impl FnOnce(oneshot::Sender<Result<T, RpcError>>) -> Command,
    ) -> Result<(), RpcError> {
        let answer = self.command(command).await?;
        let carried = self.beside(id, answer);
        self.control.spawn(carried);
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
        let answered = carry_out(id, self.way(), call);
        self.calls.spawn(async move {
            let _room_and_place = held;
            answered.await;
        });
    }

    /// What the call at hand holds until it is answered.
    fn held(&mut self) -> (Option<Charge>, Option<OwnedSemaphorePermit>) {
        (self.charge.take(), self.place.take())
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
    async fn end(&mut self, resumable: bool) {
        self.waiting.clear();
        self.calls.shutdown().await;
        self.control.shutdown().await;
        self.inputs.shutdown().await;
        self.bodies.tasks.shutdown().await;
        self.watches.tasks.shutdown().await;
        let Some((session, attachment)) = self.attached.take() else { return };
        let handles = if self.keeps_handles { std::mem::take(&mut self.handles) } else { Handles::default() };
        let command = if resumable { Command::Detach(Attachment { handles, ..attachment }) } else { Command::Close };
        let _session_ended = session.send(command).await;
    }
}

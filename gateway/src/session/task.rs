//! The task of a session: joins its state with the spawner, the pumps and the attached connection.

mod attach;
mod output;
mod start;

use self::start::Begun;
use super::message::{Answer, Call, Input, Output, Retention, Start};
use super::spool::{Done, Spools};
use super::state::State;
use super::{AttachError, Attachment, Change, Command, Newcomer, Order, Page, Reply, SessionConfig, Turn};
use crate::budget::{Budget, Charge};
use crate::handles::Handles;
use crate::helper::spawner::{KILL, Spawner};
use crate::link::Outgoing;
use crate::metrics::Present;
use crate::process::launch;
use crate::process::pump::{Controls, Feed};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use portcullis_protocol::fs::Empty;
use portcullis_protocol::process::{
    ListResult, ResizeParams, SignalParams, Size, StartParams, StartResult, TerminateResult, WriteResult,
};
use portcullis_protocol::rpc::RpcError;
use portcullis_sandbox::policy::Policy;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout_at};

/// What pumps have said and the session has not taken in; beyond, they wait. Credit bounds it in bytes.
const FEEDS: usize = 128;

/// How long the killed processes of a session may take to be reaped.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

pub(super) struct Task {
    id: Arc<str>,
    /// What logs name it by.
    mark: Arc<str>,
    /// Counts it, and once more while nobody is connected to it.
    present: (Present, Option<Present>),
    spawner: Spawner,
    config: SessionConfig,
    state: State,
    next_call: Call,
    /// Who wants the answer to which call. The calls in flight of the attached connection bound it.
    callers: HashMap<Call, Caller>,
    /// What the last connection left, while nobody is attached.
    left: Option<(Order, Handles)>,
    generation: u64,
    attached: Option<Newcomer>,
    changes: FuturesUnordered<BoxFuture<'static, (String, Result<(), RpcError>)>>,
    starts: FuturesUnordered<BoxFuture<'static, Begun>>,
    /// Pages that wait for room on their connection.
    rooms: FuturesUnordered<BoxFuture<'static, (Call, Charge)>>,
    /// Words to the spawner about what ended processes have left. The calls that want it bound them.
    kills: FuturesUnordered<BoxFuture<'static, ()>>,
    spools: Spools,
    controls: HashMap<u64, Controls>,
    /// Of the processes that live, among those of all sessions.
    places: HashMap<u64, OwnedSemaphorePermit>,
    pumps: JoinSet<u64>,
    pump_keys: HashMap<tokio::task::Id, u64>,
    feeds: mpsc::Receiver<(u64, Box<Feed>)>,
    feed: mpsc::Sender<(u64, Box<Feed>)>,
    has_ended: bool,
}

/// Who waits for an answer, and with what a start is carried out.
enum Caller {
    Attach(Newcomer, oneshot::Sender<Result<Attachment, AttachError>>),
    Change(Change, Reply<Empty>),
    Prepare(Box<StartParams>, Option<Arc<Policy>>, Turn, Reply<StartResult>),
    Start(Reply<StartResult>),
    Read(Reply<Page>, Budget, Option<Charge>),
    Write(Reply<WriteResult>),
    Done(Reply<Empty>),
    List(Reply<ListResult>),
    Terminate(Reply<TerminateResult>),
}

enum Wake {
    Command(Option<Box<Command>>),
    Feed(u64, Box<Feed>),
    Begun(Begun),
    Changed(String, Result<(), RpcError>),
    Pump(Result<(tokio::task::Id, u64), JoinError>),
    Spool(u64, Done),
    Reserved(Call, Charge),
    Room(bool),
    Killed,
    Timeout,
}

impl Task {
    pub(super) fn new(id: Arc<str>, mark: Arc<str>, spawner: Spawner, config: SessionConfig) -> Self {
        tracing::info!(session = &*mark, "session made");
        let present = (config.metrics.session(), Some(config.metrics.detached_session()));
        let retention = Retention { detached: config.retention, closed: config.retention };
        let (feed, feeds) = mpsc::channel(FEEDS);
        let spools = Spools::new(config.spool.clone());
        let state = State::new(retention, config.spool_limits, config.most_processes, now());
        Self {
            id,
            mark,
            present,
            spawner,
            config,
            state,
            next_call: 0,
            callers: HashMap::new(),
            left: None,
            generation: 0,
            attached: None,
            changes: FuturesUnordered::new(),
            starts: FuturesUnordered::new(),
            rooms: FuturesUnordered::new(),
            kills: FuturesUnordered::new(),
            spools,
            controls: HashMap::new(),
            places: HashMap::new(),
            pumps: JoinSet::new(),
            pump_keys: HashMap::new(),
            feeds,
            feed,
            has_ended: false,
        }
    }

    pub(super) async fn run(mut self: Box<Self>, mut commands: mpsc::Receiver<Box<Command>>) {
        while !self.has_ended {
            let wake = self.wait(&mut commands).await;
            self.take_in(wake);
            self.act();
            self.count();
            self.announce();
        }
        tracing::info!(session = &*self.mark, "session ended");
        // Whoever is in line learns from the drop of its reply that it came too late.
        commands.close();
        while commands.try_recv().is_ok() {}
        self.callers.clear();
        self.attached = None;
        self.finish().await;
    }

    fn count(&mut self) {
        let is_detached = self.state.is_detached();
        if is_detached != self.present.1.is_some() {
            self.present.1 = is_detached.then(|| self.config.metrics.detached_session());
        }
    }

    async fn wait(&mut self, commands: &mut mpsc::Receiver<Box<Command>>) -> Wake {
        let deadline = self.state.deadline().map(Instant::from_std);
        let connection = self.attached.as_ref().map(|attached| &attached.outgoing).filter(|_| self.state.has_unsent());
        tokio::select! {
            command = commands.recv() => Wake::Command(command),
            Some((key, feed)) = self.feeds.recv() => Wake::Feed(key, feed),
            Some(begun) = self.starts.next() => Wake::Begun(begun),
            Some((operation, outcome)) = self.changes.next() => Wake::Changed(operation, outcome),
            Some(ended) = self.pumps.join_next_with_id() => Wake::Pump(ended),
            Some((key, done)) = self.spools.next() => Wake::Spool(key, done),
            Some(()) = self.kills.next() => Wake::Killed,
            Some((call, room)) = self.rooms.next() => Wake::Reserved(call, room),
            room = reserve(connection), if connection.is_some() => Wake::Room(room),
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Wake::Timeout,
        }
    }

    fn take_in(&mut self, wake: Wake) {
        match wake {
            Wake::Command(Some(command)) => self.command(*command),
            // Everybody who could come back is gone.
            Wake::Command(None) => self.handle(Input::Close),
            Wake::Feed(key, feed) => {
                // Before anybody hears of the close, and starts the next one.
                if matches!(*feed, Feed::Closed) {
                    self.places.remove(&key);
                }
                self.handle(Input::Feed { key, feed: *feed });
            }
            Wake::Begun(begun) => self.begun(begun),
            Wake::Changed(operation, outcome) => self.handle(Input::Changed { operation, outcome }),
            Wake::Pump(ended) => self.pump_ended(ended),
            Wake::Spool(key, done) => self.spool_done(key, done),
            Wake::Reserved(call, room) => {
                if let Some(Caller::Read(_, _, reserved)) = self.callers.get_mut(&call) {
                    *reserved = Some(room);
                }
                self.handle(Input::RoomReserved { call });
            }
            // The connection is on its way out: its detach will come.
            Wake::Room(false) => self.attached = None,
            Wake::Room(true) | Wake::Killed => {}
            Wake::Timeout => self.handle(Input::Timeout),
        }
    }

    fn command(&mut self, command: Command) {
        let call = self.next_call;
        self.next_call += 1;
        let (caller, input) = match command {
            Command::Attach { newcomer, reply } => {
                let terms = newcomer.terms;
                (Caller::Attach(newcomer, reply), Input::Attach { call, terms })
            }
            Command::Detach(attachment) => return self.detach(attachment),
            Command::Delivered { generation, mark } => return self.handle(Input::Delivered { generation, mark }),
            Command::HandedOut { generation, page } => return self.handle(Input::HandedOut { generation, page }),
            Command::Change { change, reply } => {
                let (operation, digest) = (change.operation.clone(), change.digest);
                (Caller::Change(change, reply), Input::Change { call, operation, digest })
            }
            Command::Start { mut params, policy, turn, reply } => {
                let limits = params.limits.unwrap_or_default().narrowed_by(&self.config.process_limits);
                params.limits = Some(limits);
                if let Err(error) = launch::check(&params, policy.is_some()) {
                    let _caller_gone = reply.send(Err(error));
                    return;
                }
                let start = Start {
                    process: params.process_id.clone(),
                    tty: params.tty,
                    takes_input: params.tty || params.pipe_stdin,
                    operation: params.operation_id.clone(),
                    at_ms: unix_ms(),
                    when_full: params.when_full.unwrap_or_default(),
                    bounds: start::bounds(&params, &self.config.process_times),
                    output: limits.output_bytes,
                };
                (Caller::Prepare(params, policy, turn, reply), Input::Start { call, start })
            }
            Command::Read { params, replies, reply } => (Caller::Read(reply, replies, None), Input::Read { call, params }),
            Command::Acknowledge { params, reply } => (Caller::Done(reply), Input::Acknowledge { call, params }),
            Command::Write { params, reply } => (Caller::Write(reply), Input::Write { call, params }),
            Command::CloseStdin { params, reply } => {
                (Caller::Done(reply), Input::CloseStdin { call, process: params.process_id })
            }
            Command::Resize { params: ResizeParams { process_id: process, rows, cols }, reply } => {
                (Caller::Done(reply), Input::Resize { call, process, size: Size { rows, cols } })
            }
            Command::List { reply } => (Caller::List(reply), Input::List { call }),
            Command::Signal { params: SignalParams { process_id: process, signal }, reply } => {
                (Caller::Done(reply), Input::Signal { call, process, signal })
            }
            Command::Terminate { params, reply } => {
                let grace = Duration::from_millis(params.grace_ms.unwrap_or(0));
                (Caller::Terminate(reply), Input::Terminate { call, process: params.process_id, grace, report: params.report })
            }
            Command::Close => return self.handle(Input::Close),
        };
        self.callers.insert(call, caller);
        self.handle(input);
    }

    fn handle(&mut self, input: Input) {
        self.state.handle(input, now());
    }

    /// Does what the state says, until it says no more.
    fn act(&mut self) {
        while let Some(output) = self.state.poll() {
            match output {
                Output::Reply(call, answer) => {
                    if let Some(caller) = self.callers.remove(&call) {
                        self.reply(caller, answer);
                    }
                }
                Output::Evict => {
                    if let Some(attached) = &self.attached {
                        attached.evicted.cancel();
                    }
                }
                Output::Doubt => {
                    if let Some(attached) = &self.attached {
                        attached.doubt.raise();
                    }
                }
                Output::Repeated { call } => self.repeated(call),
                Output::Change { call } => self.change(call),
                Output::Launch { call, key } => self.launch(call, key),
                Output::ReserveRoom { call, bytes } => self.reserve_room(call, bytes),
                Output::Spool { key, write } => self.spools.write(key, write),
                Output::ReadSpool { call, key, extents } => self.spools.read(key, call, extents),
                Output::SpoolDrained { key } => self.spools.close(key),
                Output::Grant { key, total } => self.with(key, |controls| controls.grant(total)),
                Output::Write { key, chunk } => self.with(key, |controls| controls.write(chunk)),
                Output::CloseStdin { key } => self.with(key, Controls::close_input),
                Output::Resize { key, size } => self.with(key, |controls| controls.resize(size)),
                Output::Signal { key, signal } => self.with(key, |controls| controls.signal(signal)),
                Output::Kill { key } => self.with(key, |controls| controls.kill()),
                Output::KillLeft { key } => self.kill_left(key),
                Output::Abandon { key } => self.with(key, |controls| controls.leave_output()),
                Output::Forget { key } => {
                    self.controls.remove(&key);
                    self.spools.forget(key);
                }
                Output::End => self.has_ended = true,
            }
        }
    }

    /// The pump may have ended, so the spawner is told directly.
    fn kill_left(&mut self, key: u64) {
        if let Some(child) = self.controls.get(&key).map(Controls::child) {
            let spawner = self.spawner.clone();
            // With the spawner everything ends.
            self.kills.push(Box::pin(async move { drop(spawner.signal(child, KILL).await) }));
        }
    }

    fn with(&mut self, key: u64, once: impl FnOnce(&mut Controls)) {
        self.controls.get_mut(&key).map(once);
    }

    /// Answers a caller, who may have gone away: then the answer is dropped, and an attachment is given back.
    fn reply(&mut self, caller: Caller, answer: Answer) {
        match (caller, answer) {
            (Caller::Attach(newcomer, reply), Answer::Attach(Some(generation))) => self.attach(newcomer, reply, generation),
            (Caller::Attach(_, reply), Answer::Attach(None)) => drop(reply.send(Err(AttachError))),
            (Caller::Start(reply) | Caller::Prepare(_, _, _, reply), Answer::Start(result)) => drop(reply.send(result)),
            (Caller::Read(reply, _, room), Answer::Read(result, page)) => {
                let receipt = page.map(|page| Command::HandedOut { generation: self.generation, page });
                drop(reply.send(result.map(|result| Page { result, room, receipt })));
            }
            (Caller::Write(reply), Answer::Write(result)) => drop(reply.send(result)),
            (Caller::Done(reply) | Caller::Change(_, reply), Answer::Done(result)) => drop(reply.send(result.map(|()| Empty {}))),
            (Caller::List(reply), Answer::List(result)) => drop(reply.send(Ok(result))),
            (Caller::Terminate(reply), Answer::Terminate(result)) => drop(reply.send(Ok(result))),
            (_caller, answer) => tracing::error!(?answer, "an answer to another call: its caller is told that the session ended"),
        }
    }

    fn pump_ended(&mut self, ended: Result<(tokio::task::Id, u64), JoinError>) {
        let error = match ended {
            Ok((task, _key)) => {
                self.pump_keys.remove(&task);
                return;
            }
            Err(error) => error,
        };
        tracing::error!(%error, "the pump of a process failed: the process is killed");
        let Some(key) = self.pump_keys.remove(&error.id()) else { return };
        // What it said before comes first.
        while let Ok((key, feed)) = self.feeds.try_recv() {
            self.handle(Input::Feed { key, feed: *feed });
        }
        self.places.remove(&key);
        self.handle(Input::PumpLost { key });
    }

    /// Waits until what was killed is dead, for a while, and joins the pumps.
    async fn finish(mut self: Box<Self>) {
        let deadline = Instant::now() + CLOSE_DEADLINE;
        while self.state.is_live() {
            let wake = async {
                tokio::select! {
                    Some((key, feed)) = self.feeds.recv() => Wake::Feed(key, feed),
                    Some(begun) = self.starts.next() => Wake::Begun(begun),
                    Some(ended) = self.pumps.join_next_with_id() => Wake::Pump(ended),
                }
            };
            let Ok(wake) = timeout_at(deadline, wake).await else {
                tracing::warn!(session = &*self.mark, "processes of a closed session are not dead yet");
                break;
            };
            self.take_in(wake);
            self.act();
        }
        // A pump that is dropped, and a start that is, kills its process.
        self.starts.clear();
        self.pumps.shutdown().await;
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Waits for room in the connection's queue; false when the connection is gone.
async fn reserve(connection: Option<&mpsc::Sender<Outgoing>>) -> bool {
    match connection {
        Some(connection) => connection.reserve().await.is_ok(),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;

//! The task that talks to the spawner helper.

use super::{Child, Ended, KILL, Launch, LaunchError, Never, SpawnerError, Stdio, WorkerEnd};
use crate::helper::socket::{FrameReceiver, FrameSender, SocketError};
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use portcullis_protocol::helper::{
    ExitStatus, Frame, FrameError, HEADER, SpawnerEvent, SpawnerRequest, Step, StepFailed, decode, encode,
};
use portcullis_protocol::path::Bytes;
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::{mpsc, oneshot};

/// What the handles ask for.
#[derive(Debug)]
pub(super) enum Ask {
    Worker { id: u64, own_view: bool, descriptors: [OwnedFd; 2], ended: oneshot::Sender<WorkerEnd> },
    Process { id: u64, launch: Box<Launch>, reply: StartReply },
    Request(SpawnerRequest),
}

pub(super) type StartReply = oneshot::Sender<Result<Child, LaunchError>>;

impl Ask {
    /// Fails, since there is no spawner.
    pub(super) fn fail(self, reason: &str) {
        match self {
            Self::Process { reply, .. } => {
                let attempt = format!("start: {}", SpawnerError::Trouble(reason.into()));
                let failed = StepFailed { step: Step::Machine, attempt, errno: 0, denial: None };
                let _caller_gone = reply.send(Err(LaunchError::Failed(failed)));
            }
            Self::Worker { ended, .. } => {
                let _owner_gone = ended.send(WorkerEnd::NotStarted(SpawnerError::Trouble(reason.into()).to_string()));
            }
            // The processes of a dead spawner have ended, and so the request has no object.
            Self::Request(_) => {}
        }
    }
}

/// Why the task ended.
#[derive(Debug)]
pub(super) enum End {
    /// Every handle was dropped, or it was stopped.
    Stopped,
    /// The helper died, or is of no use: why, and whether it started any process before.
    Died { reason: String, has_served: bool },
}

/// Owns the helper's socket and everything that waits for the helper. The bounds of what waits are those of the sessions on
/// their processes and of the pool on its workers.
pub(super) struct Task {
    sender: FrameSender,
    receiver: FrameReceiver,
    starting: HashMap<u64, StartReply>,
    running: HashMap<u64, oneshot::Sender<Ended>>,
    workers: HashMap<u64, oneshot::Sender<WorkerEnd>>,
    /// One for each process that starts, and one for each that runs: ends with the start or the process, or names it when its owner
    /// went away.
    leashes: FuturesUnordered<BoxFuture<'static, Option<u64>>>,
    has_served: bool,
}

impl Task {
    pub(super) fn new(sender: FrameSender, receiver: FrameReceiver) -> Self {
        let (starting, running, workers) = Default::default();
        Self { sender, receiver, starting, running, workers, leashes: FuturesUnordered::new(), has_served: false }
    }

    /// Ends when every handle was dropped or it was stopped, or if the helper dies. What waits for the helper is lost then.
    ///
    /// `unsent` is sent first, once. At the end it holds the request that the helper did not get as a whole, which another helper
    /// may still get.
    pub(super) async fn run(
        mut self,
        unsent: &mut Option<Ask>,
        asks: &mut mpsc::Receiver<Ask>,
        stopped: &mut oneshot::Receiver<Never>,
    ) -> End {
        let end = self.exchange(unsent, asks, stopped).await;
        let reason = end.as_ref().err().map_or("it was stopped", String::as_str);
        for (_id, reply) in self.starting.drain() {
            let _caller_gone = reply.send(Err(LaunchError::Lost(format!("the spawner has ended: {reason}"))));
        }
        // The leashes pass these answers on.
        while let Some(Some(_passed_on)) = self.leashes.next().now_or_never() {}
        let has_served = self.has_served;
        end.map_or_else(|reason| End::Died { reason, has_served }, |()| End::Stopped)
    }

    async fn exchange(
        &mut self,
        unsent: &mut Option<Ask>,
        asks: &mut mpsc::Receiver<Ask>,
        stopped: &mut oneshot::Receiver<Never>,
    ) -> Result<(), String> {
        if let Some(ask) = unsent.take() {
            self.forward(ask).await.map_err(|(ask, error)| {
                ask.fail(&error);
                error
            })?;
        }
        loop {
            tokio::select! {
                ask = asks.recv() => match ask {
                    Some(ask) => self.forward(ask).await.map_err(|(ask, error)| {
                        *unsent = Some(ask);
                        error
                    })?,
                    None => return Ok(()),
                },
                _stopped = &mut *stopped => return Ok(()),
                frame = self.receiver.recv() => self.event(frame).await?,
                Some(abandoned) = self.leashes.next() => if let Some(id) = abandoned {
                    self.send(&SpawnerRequest::Signal { id, signal: KILL }, &[]).await.map_err(|error| error.to_string())?;
                },
            }
        }
    }

    /// Sends what was asked for. The helper reads at all times, so this waits for no other work. An error ends the task: the helper
    /// got no whole frame of this request, so it did nothing of it.
    async fn forward(&mut self, ask: Ask) -> Result<(), (Ask, String)> {
        let sent = match &ask {
            Ask::Request(request) => self.send(request, &[]).await,
            Ask::Worker { id, own_view, descriptors: [stdio, control], .. } => {
                let request = SpawnerRequest::Worker { id: *id, own_view: *own_view };
                self.send(&request, &[stdio.as_fd(), control.as_fd()]).await
            }
            // Its caller has gone.
            Ask::Process { reply, .. } if reply.is_closed() => return Ok(()),
            Ask::Process { id, launch, .. } => self.launch(*id, launch).await,
        };
        match (ask, sent) {
            (ask, Err(SendError::Broken(error))) => return Err((ask, error)),
            (Ask::Request(_), _) => {}
            (Ask::Worker { id, ended, .. }, Ok(())) => drop(self.workers.insert(id, ended)),
            (Ask::Worker { ended, .. }, Err(SendError::Untouched(failed))) => {
                let _owner_gone = ended.send(WorkerEnd::NotStarted(failed.to_string()));
            }
            (Ask::Process { id, reply, .. }, Ok(())) => {
                // A caller that goes away while the process starts has it killed, as an owner has later.
                let (answer, answered) = oneshot::channel();
                self.starting.insert(id, answer);
                self.leashes.push(Box::pin(leash(id, answered, reply)));
            }
            (Ask::Process { reply, .. }, Err(SendError::Untouched(failed))) => {
                let _caller_gone = reply.send(Err(LaunchError::Failed(failed)));
            }
        }
        Ok(())
    }

    async fn launch(&mut self, id: u64, launch: &Launch) -> Result<(), SendError> {
        let frame = encode(&launch.command, &[], 0).map_err(too_large)?;
        let tty = matches!(launch.stdio, Stdio::Terminal(_));
        let command = Bytes(frame[HEADER..].to_vec());
        let Launch { session, policy, own_view, allow_unprotected, limits, may_dial, own_uid, .. } = &launch;
        let own_network = policy.is_some() && !may_dial;
        let own_uid = *own_uid;
        let (session, policy) = (session.as_ref().to_owned(), policy.clone());
        let (own_view, allow_unprotected, limits) = (*own_view, *allow_unprotected, *limits);
        let request = SpawnerRequest::Start {
            id,
            session,
            tty,
            policy,
            own_view,
            own_network,
            own_uid,
            allow_unprotected,
            limits,
            command,
        };
        self.send(&request, &launch.stdio.descriptors()).await
    }

    async fn send(&mut self, request: &SpawnerRequest, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let frame = encode(request, &[], descriptors.len()).map_err(too_large)?;
        self.sender.send(&frame, descriptors).await.map_err(|error| {
            if FrameSender::is_untouched(&error) {
                let errno = error.raw_os_error().unwrap_or_default();
                let attempt = "hand descriptors to the spawner".to_owned();
                SendError::Untouched(StepFailed { step: Step::Machine, attempt, errno, denial: None })
            } else {
                SendError::Broken(format!("send to the spawner: {error}"))
            }
        })
    }

    /// Takes in what the helper said. Errors end the task.
    async fn event(&mut self, frame: Result<Option<(Frame, Vec<OwnedFd>)>, SocketError>) -> Result<(), String> {
        let (frame, _none) = frame.map_err(|error| error.to_string())?.ok_or("the spawner died")?;
        match decode(&frame.body).map_err(|error| format!("the spawner talks nonsense: {error}"))? {
            SpawnerEvent::Ready { .. } | SpawnerEvent::WrongBuild { .. } => return Err("the spawner greeted twice".to_owned()),
            SpawnerEvent::Started { id, pid, enforced, limits, tree } => {
                self.has_served = true;
                let (exit, receiver) = oneshot::channel();
                let (running, ended) = oneshot::channel();
                self.running.insert(id, running);
                self.leashes.push(Box::pin(leash(id, ended, exit)));
                let child = Child { id, pid, enforced, limits, tree, exit: receiver };
                // If the caller has gone, the child is dropped here and its leash kills it.
                if let Some(reply) = self.starting.remove(&id) {
                    let _unwanted = reply.send(Ok(child));
                }
            }
            SpawnerEvent::StartFailed { id, failure } => {
                if let Some(reply) = self.starting.remove(&id) {
                    let _caller_gone = reply.send(Err(LaunchError::Failed(failure)));
                }
            }
            SpawnerEvent::Exited { id, status, denials, failure, limits } => {
                let ended = Ended { status, denials, failure, limits };
                let _owner_gone = self.running.remove(&id).map(|running| running.send(ended));
            }
            SpawnerEvent::WorkerEnded { id, status } => {
                if !matches!(status, ExitStatus::Code(0) | ExitStatus::Signal(KILL)) {
                    tracing::warn!(worker = id, ?status, "a worker died");
                }
                let _owner_gone = self.workers.remove(&id).map(|ended| ended.send(WorkerEnd::Ran(status)));
            }
            SpawnerEvent::WorkerFailed { id, reason } => {
                let _owner_gone = self.workers.remove(&id).map(|ended| ended.send(WorkerEnd::NotStarted(reason)));
            }
        }
        Ok(())
    }
}

/// Passes the end on, or names the process if its owner went away first.
async fn leash<T>(id: u64, ended: oneshot::Receiver<T>, mut exit: oneshot::Sender<T>) -> Option<u64> {
    tokio::select! {
        biased;
        ended = ended => {
            let _owner_gone = ended.map(|ended| exit.send(ended));
            None
        }
        () = exit.closed() => Some(id),
    }
}

enum SendError {
    /// Nothing of it was sent.
    Untouched(StepFailed),
    /// The socket is of no use any more.
    Broken(String),
}

impl std::fmt::Display for SendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Untouched(failed) => failed.fmt(f),
            Self::Broken(error) => error.fmt(f),
        }
    }
}

/// A command line that no frame holds is one that no `execve` takes.
fn too_large(error: FrameError) -> SendError {
    let attempt = format!("send the command to the spawner ({error})");
    SendError::Untouched(StepFailed { step: Step::Execute, attempt, errno: Errno::TOOBIG.raw_os_error(), denial: None })
}

#[cfg(test)]
mod tests {
    use super::super::{Spawner, fake};
    use super::*;
    use crate::helper::socket::pair_up;
    use portcullis_protocol::helper::{Command, Enforced};
    use portcullis_protocol::limit::{LimitReached, ProcessLimits, Scope, TreeEnd};
    use portcullis_protocol::path::AbsolutePath;
    use rustix::pipe::{PipeFlags, pipe_with};
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::task::JoinSet;

    fn launch() -> Launch {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).unwrap();
        let ((stdin, _), (_, stdout), (_, stderr)) = (pipe(), pipe(), pipe());
        let command =
            Command { argv: vec![Bytes(b"true".to_vec())], arg0: None, env: Vec::new(), cwd: AbsolutePath::new("/").unwrap() };
        let stdio = Stdio::Pipes { stdin, stdout, stderr };
        Launch {
            session: "s".into(),
            policy: None,
            own_view: false,
            allow_unprotected: false,
            limits: ProcessLimits::default(),
            may_dial: false,
            own_uid: true,
            command,
            stdio,
        }
    }

    async fn start_id(receiver: &mut FrameReceiver) -> u64 {
        match fake::hear(receiver).await {
            Some((SpawnerRequest::Start { id, .. }, descriptors)) if descriptors.len() == 3 => id,
            other => panic!("{other:?}"),
        }
    }

    fn started(id: u64) -> SpawnerEvent {
        SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants }
    }

    async fn started_child(spawner: &Spawner, sender: &mut FrameSender, receiver: &mut FrameReceiver) -> Child {
        let starting = tokio::spawn({
            let spawner = spawner.clone();
            async move { spawner.process(launch()).await.unwrap() }
        });
        let id = start_id(receiver).await;
        fake::say(sender, &started(id)).await;
        starting.await.unwrap()
    }

    #[track_caller]
    fn is_kill(heard: Option<(SpawnerRequest, Vec<OwnedFd>)>, expected: u64) {
        assert!(matches!(heard, Some((SpawnerRequest::Signal { id, signal: KILL }, _)) if id == expected), "{heard:?}");
    }

    #[tokio::test]
    async fn a_process_starts_and_its_exit_is_passed_on() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let child = started_child(&spawner, &mut sender, &mut receiver).await;
        let ended = Ended {
            status: ExitStatus::Code(3),
            denials: fake::denials(&["/etc/x"]),
            failure: Some("too much memory".to_owned()),
            limits: vec![LimitReached { limit: "processes".to_owned(), value: 7, used: 7, scope: Scope::Process }],
        };
        let Ended { status, denials, failure, limits } = ended.clone();
        fake::say(&mut sender, &SpawnerEvent::Exited { id: child.id, status, denials, failure, limits }).await;
        assert_eq!(child.exit.await, Ok(ended));
        // Its leash is gone with it: the next word is about the next process.
        let child = started_child(&spawner, &mut sender, &mut receiver).await;
        drop(child);
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_before_the_answer_leaks_nothing() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let starting = tokio::spawn({
            let spawner = spawner.clone();
            async move { spawner.process(launch()).await }
        });
        let id = start_id(&mut receiver).await;
        starting.abort();
        assert!(starting.await.unwrap_err().is_cancelled());
        // While it starts, and again if it runs all the same.
        is_kill(fake::hear(&mut receiver).await, id);
        fake::say(&mut sender, &started(id)).await;
        is_kill(fake::hear(&mut receiver).await, id);
    }

    #[tokio::test]
    async fn an_owner_that_drops_the_exit_kills_the_process() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let child = started_child(&spawner, &mut sender, &mut receiver).await;
        let id = child.id;
        drop(child);
        is_kill(fake::hear(&mut receiver).await, id);
    }

    #[tokio::test]
    async fn when_the_helper_dies_everything_is_lost() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let child = started_child(&spawner, &mut sender, &mut receiver).await;
        let worker = spawner.worker(false).await.unwrap();
        fake::hear(&mut receiver).await.unwrap();
        let starting = tokio::spawn({
            let spawner = spawner.clone();
            async move { spawner.process(launch()).await }
        });
        start_id(&mut receiver).await;
        drop((sender, receiver));
        assert!(matches!(starting.await.unwrap(), Err(LaunchError::Lost(_))));
        assert!(child.exit.await.is_err());
        assert!(worker.ended.await.is_err());
        // Nothing replaces a helper that the test played.
        tasks.join_next().await.unwrap().unwrap();
        assert!(spawner.trouble().is_some());
        assert!(matches!(spawner.process(launch()).await, Err(LaunchError::Lost(_))));
        assert!(spawner.signal(1, KILL).await.is_err());
    }

    #[tokio::test]
    async fn a_request_that_a_dead_helper_did_not_get_is_sent_once_more() {
        let (asks, mut queue) = mpsc::channel(1);
        let (_running, mut stopped) = oneshot::channel();
        let (reply, mut answer) = oneshot::channel();
        asks.send(Ask::Process { id: 7, launch: Box::new(launch()), reply }).await.unwrap();
        let mut unsent = None;
        // The helper ends its output only: the task learns of its death when it sends.
        let dead = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            rustix::net::shutdown(&theirs, rustix::net::Shutdown::Read).unwrap();
            let (sender, receiver) = pair_up(ours);
            (Task::new(sender, receiver), theirs)
        };
        let (task, _theirs) = dead();
        assert!(matches!(task.run(&mut unsent, &mut queue, &mut stopped).await, End::Died { has_served: false, .. }));
        assert!(matches!(unsent, Some(Ask::Process { id: 7, .. })));
        assert_eq!(answer.try_recv().unwrap_err(), oneshot::error::TryRecvError::Empty);
        // The next gets it as it was.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ((sender, receiver), (mut said, mut heard)) = (pair_up(ours), pair_up(theirs));
        let next = async { Task::new(sender, receiver).run(&mut unsent, &mut queue, &mut stopped).await };
        let helper = async {
            assert_eq!(start_id(&mut heard).await, 7);
            fake::say(&mut said, &started(7)).await;
            answer.await.unwrap().unwrap()
        };
        let child = tokio::select! {
            child = helper => child,
            _end = next => panic!("the task ended"),
        };
        assert_eq!(child.id, 7);
        // One that a second helper did not get fails.
        let (reply, answer) = oneshot::channel();
        unsent = Some(Ask::Process { id: 8, launch: Box::new(launch()), reply });
        let (task, _theirs) = dead();
        task.run(&mut unsent, &mut queue, &mut stopped).await;
        assert!(unsent.is_none());
        assert!(matches!(answer.await.unwrap(), Err(LaunchError::Failed(failed)) if failed.step == Step::Machine));
    }

    #[tokio::test]
    async fn a_failed_start_is_told_and_a_worker_gets_its_sockets() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let starting = tokio::spawn({
            let spawner = spawner.clone();
            async move { spawner.process(launch()).await }
        });
        let id = start_id(&mut receiver).await;
        let failure = StepFailed { step: Step::Execute, attempt: "start `x`".to_owned(), errno: 2, denial: None };
        fake::say(&mut sender, &SpawnerEvent::StartFailed { id, failure: failure.clone() }).await;
        assert!(matches!(starting.await.unwrap(), Err(LaunchError::Failed(failed)) if failed == failure));
        let worker = spawner.worker(false).await.unwrap();
        let Some((SpawnerRequest::Worker { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
        assert_eq!((id, descriptors.len()), (worker.id, 2));
        rustix::io::write(&descriptors[0], b"r").unwrap();
        rustix::io::write(&descriptors[1], b"c").unwrap();
        drop(descriptors);
        for (mut socket, expected) in [(worker.requests, "r"), (worker.control, "c")] {
            let mut said = String::new();
            socket.read_to_string(&mut said).await.unwrap();
            assert_eq!(said, expected);
        }
        spawner.kill_worker(id).await;
        assert!(matches!(fake::hear(&mut receiver).await, Some((SpawnerRequest::KillWorker { id: of }, _)) if of == id));
        let status = ExitStatus::Signal(KILL);
        fake::say(&mut sender, &SpawnerEvent::WorkerEnded { id, status }).await;
        assert_eq!(worker.ended.await, Ok(WorkerEnd::Ran(status)));
    }

    #[tokio::test]
    async fn a_command_that_no_frame_holds_fails_alone() {
        let mut tasks = JoinSet::new();
        let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
        let mut huge = launch();
        huge.command.argv.push(Bytes(vec![b'x'; 17 << 20]));
        let Err(LaunchError::Failed(failed)) = spawner.process(huge).await else { panic!() };
        assert_eq!(failed.errno, Errno::TOOBIG.raw_os_error());
        started_child(&spawner, &mut sender, &mut receiver).await;
    }

    #[tokio::test]
    async fn the_socket_closes_after_the_last_handle() {
        let mut tasks = JoinSet::new();
        let (spawner, sender, mut receiver) = fake::scripted(&mut tasks);
        let other = spawner.clone();
        drop(spawner);
        drop(other);
        assert!(fake::hear(&mut receiver).await.is_none());
        drop(sender);
        tasks.join_next().await.unwrap().unwrap();
    }
}

//! The spawner: one single-threaded process, parent and subreaper of everything that is started.
//!
//! It is the one parent because a parent-death signal fires when the *thread* that forked ends, and because only the parent
//! learns how a child ended. It never waits for one child, for the gateway, or for a launcher: everything that can take
//! time is a descriptor in one poll.

use crate::children::{Children, Name, describe, kill_all};
use crate::dispatch::{clear_standard, complain};
use crate::frames::{Inlet, ReceiveError, Received, Wait, send};
use crate::launch::{self, Order, Report, failed};
use crate::sys::{self, Fork};
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{
    BUILD, Deframer, Enforced, ExitStatus, Frame, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step, StepFailed, decode, encode,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, getpid};
use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

/// Bytes of events that the gateway has not read. One that lets so many pile up does not read at all: it is dead.
const MOST_UNREAD: usize = 16 << 20;

/// Launchers between fork and execve. Each takes milliseconds; more than this at once is a defect, not a load.
const MOST_LAUNCHES: usize = 4096;

/// Runs until the gateway closes its end.
pub(crate) fn run(socket: OwnedFd) -> ExitCode {
    let mut spawner = match Spawner::new(socket) {
        Ok(spawner) => spawner,
        Err(error) => {
            complain(format_args!("set up the spawner: {error}"));
            return ExitCode::FAILURE;
        }
    };
    if let Err(End::Failed(reason)) = spawner.serve() {
        complain(format_args!("{reason}; ending everything that was started"));
    }
    kill_all(&spawner.children);
    ExitCode::SUCCESS
}

/// Why the spawner ends.
enum End {
    /// The gateway closed its end.
    Closed,
    /// Something that it cannot go on without.
    Failed(String),
}

#[derive(Debug)]
struct Spawner {
    socket: OwnedFd,
    inlet: Inlet,
    unsent: VecDeque<u8>,
    /// The build was compared.
    greeted: bool,
    signals: OwnedFd,
    children: Children,
    launches: Vec<Launch>,
    me: Pid,
    /// Tried at the start.
    namespaces: NamespaceLayer,
    /// `argv[0]` of the workers: what this process was called.
    program: CString,
}

/// A launcher that has not reached `execve`.
#[derive(Debug)]
struct Launch {
    id: u64,
    pid: Pid,
    pipe: OwnedFd,
    reports: Deframer,
    enforced: Option<Enforced>,
    failure: Option<StepFailed>,
    /// Nothing more comes from the pipe.
    ended: bool,
}

impl Spawner {
    fn new(socket: OwnedFd) -> std::io::Result<Self> {
        // Terminal signals are for the gateway, which then closes the socket.
        sys::ignore_group_signals();
        // The starter may have made this process a group leader; then it is out of the terminal's reach already.
        let _leader = rustix::process::setsid();
        // What loses its parent becomes our child, daemons included.
        rustix::process::set_child_subreaper(Some(getpid()))?;
        // Requests hold environments of clients; no process of the same user may look.
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
        let socket = clear_standard(socket)?;
        let signals = sys::child_events()?;
        let program = std::env::args_os().next().unwrap_or_else(|| "portcullis".into());
        Ok(Self {
            socket,
            inlet: Inlet::new(),
            unsent: VecDeque::new(),
            greeted: false,
            signals,
            children: Children::default(),
            launches: Vec::new(),
            me: getpid(),
            namespaces: NamespaceLayer::Unavailable { reason: "not built yet".to_owned(), remedy: String::new() },
            program: CString::new(program.as_bytes()).unwrap_or_default(),
        })
    }

    fn serve(&mut self) -> Result<(), End> {
        loop {
            let ready = self.wait()?;
            for (launch, ready) in self.launches.iter_mut().zip(&ready.launches) {
                if *ready {
                    launch.read();
                }
            }
            self.conclude_launches();
            if ready.signals {
                self.reap()?;
            }
            if ready.socket {
                self.receive()?;
            }
            self.flush()?;
        }
    }

    fn wait(&self) -> Result<Ready, End> {
        let mut interest = PollFlags::IN;
        interest.set(PollFlags::OUT, !self.unsent.is_empty());
        let mut polled = vec![PollFd::new(&self.socket, interest), PollFd::new(&self.signals, PollFlags::IN)];
        polled.extend(self.launches.iter().map(|launch| {
            // Once the end was seen, the pipe would be ready for ever; the launcher's exit is what is waited for then.
            PollFd::new(&launch.pipe, if launch.ended { PollFlags::empty() } else { PollFlags::IN })
        }));
        loop {
            match poll(&mut polled, None) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(End::Failed(format!("wait for requests: {errno}"))),
            }
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        Ok(Ready { socket: ready[0], signals: ready[1], launches: ready[2..].to_vec() })
    }

    fn receive(&mut self) -> Result<(), End> {
        loop {
            match self.inlet.next(self.socket.as_fd(), Wait::No) {
                Ok(Received::Frame(frame, descriptors)) => self.carry_out(&frame, descriptors)?,
                Ok(Received::Later) => return Ok(()),
                Ok(Received::End) => return Err(End::Closed),
                Err(error @ (ReceiveError::Socket(_) | ReceiveError::Frame(_) | ReceiveError::Descriptors)) => {
                    return Err(End::Failed(error.to_string()));
                }
            }
        }
    }

    fn carry_out(&mut self, frame: &Frame, descriptors: Vec<OwnedFd>) -> Result<(), End> {
        let request = decode(&frame.body).map_err(|error| End::Failed(error.to_string()))?;
        if let SpawnerRequest::Hello { build } = &request {
            self.greeted = build == BUILD;
        }
        if !self.greeted {
            self.tell(&SpawnerEvent::WrongBuild { build: BUILD.to_owned() });
            self.flush()?;
            return Err(End::Failed("the gateway is of another build".to_owned()));
        }
        match request {
            SpawnerRequest::Hello { .. } => self.tell(&SpawnerEvent::Ready { namespaces: self.namespaces.clone() }),
            SpawnerRequest::Worker { id } => self.start_worker(id, &descriptors),
            SpawnerRequest::Start { id, tty, policy, allow_unprotected, command } => {
                self.start(id, Order { tty, policy, allow_unprotected, command, descriptors });
            }
            SpawnerRequest::Signal { id, signal } => self.signal(id, signal),
            SpawnerRequest::KillWorker { id } => {
                if let Some(pid) = self.children.pid(Name::Worker(id)) {
                    // It cannot be gone: only `reap` removes it, and it was not reaped.
                    let _ignored = sys::kill(pid, libc::SIGKILL, false);
                }
            }
        }
        Ok(())
    }

    fn start_worker(&mut self, id: u64, descriptors: &[OwnedFd]) {
        let name = Name::Worker(id);
        let ([stdio, control], false) = (descriptors, self.children.contains(name)) else {
            return self.tell(&SpawnerEvent::WorkerEnded { id, status: None });
        };
        match sys::fork() {
            Ok(Fork::Child) => launch::worker(&self.program, stdio, control, self.me),
            Ok(Fork::Parent(pid)) => self.children.add(name, pid),
            Err(error) => {
                complain(format_args!("fork a worker: {error}"));
                self.tell(&SpawnerEvent::WorkerEnded { id, status: None });
            }
        }
    }

    fn start(&mut self, id: u64, order: Order) {
        let wanted = if order.tty { 1 } else { 3 };
        let refusal = if order.descriptors.len() != wanted {
            Some(failed(Step::Frame, "start: wrong number of descriptors", Some(Errno::INVAL)))
        } else if self.children.contains(Name::Process(id)) {
            Some(failed(Step::Frame, "start: the id is in use", Some(Errno::EXIST)))
        } else if self.launches.len() >= MOST_LAUNCHES {
            Some(failed(Step::Machine, "start: too many starts at once", Some(Errno::AGAIN)))
        } else {
            None
        };
        if let Some(failure) = refusal {
            return self.tell(&SpawnerEvent::StartFailed { id, failure });
        }
        let (pipe, result) = match pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) {
            Ok(ends) => ends,
            Err(errno) => {
                let failure = failed(Step::Machine, "start: make a pipe to the launcher", Some(errno));
                return self.tell(&SpawnerEvent::StartFailed { id, failure });
            }
        };
        match sys::fork() {
            Ok(Fork::Child) => launch::process(order, &result, self.me),
            Ok(Fork::Parent(pid)) => {
                self.children.add(Name::Process(id), pid);
                let reports = Deframer::default();
                self.launches.push(Launch { id, pid, pipe, reports, enforced: None, failure: None, ended: false });
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
                let failure = failed(Step::Machine, "start: fork a launcher", Some(Errno::from_raw_os_error(errno)));
                self.tell(&SpawnerEvent::StartFailed { id, failure });
            }
        }
    }

    fn signal(&mut self, id: u64, signal: i32) {
        let Some(pid) = self.children.pid(Name::Process(id)) else {
            if let Some(group) = self.children.leaderless_group(id) {
                let _ended = sys::kill(group, signal, true);
            }
            return;
        };
        if signal == libc::SIGKILL {
            self.children.mark_killed(pid);
        }
        // A launcher that has not begun its session yet has no group; the number is still its own, for it is not reaped.
        if sys::kill(pid, signal, true).is_err() {
            let _ended = sys::kill(pid, signal, false);
        }
    }

    /// Tells of launches that reached `execve` or failed on the way there.
    fn conclude_launches(&mut self) {
        let mut at = 0;
        while let Some(launch) = self.launches.get(at) {
            // Without either report the launcher died; how, its exit will tell.
            if launch.ended && (launch.enforced.is_some() || launch.failure.is_some()) {
                let launch = self.launches.swap_remove(at);
                self.conclude(launch, None);
            } else {
                at += 1;
            }
        }
    }

    fn conclude(&mut self, launch: Launch, status: Option<ExitStatus>) {
        let id = launch.id;
        let (event, started) = match (launch.failure, launch.enforced) {
            (None, Some(enforced)) => (SpawnerEvent::Started { id, pid: launch.pid.as_raw_nonzero().get(), enforced }, true),
            (Some(failure), _) => (SpawnerEvent::StartFailed { id, failure }, false),
            (None, None) => {
                let how = status.map_or_else(|| "nothing known of it".to_owned(), describe);
                let failure = failed(Step::Machine, &format!("start: the launcher ended early ({how})"), Some(Errno::CHILD));
                (SpawnerEvent::StartFailed { id, failure }, false)
            }
        };
        self.tell(&event);
        if !started {
            // What remains of it is a launcher about to exit; nobody shall hear of that.
            self.children.disown(launch.pid);
        }
    }

    /// Reaps every child that ended.
    fn reap(&mut self) -> Result<(), End> {
        // The counter of the signalfd only says that there is something; how many is waitid's to say.
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        loop {
            match sys::ended_child() {
                Ok(Some((pid, status))) => self.bury(pid, status),
                Ok(None) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(()),
                Err(error) => return Err(End::Failed(format!("wait for children: {error}"))),
            }
        }
    }

    fn bury(&mut self, pid: Pid, status: ExitStatus) {
        // Started comes before Exited, however quick the program was: what the launcher had to say is in the pipe by now.
        if let Some(at) = self.launches.iter().position(|launch| launch.pid == pid) {
            let mut launch = self.launches.swap_remove(at);
            launch.read();
            self.conclude(launch, Some(status));
        }
        let name = self.children.name(pid);
        if self.children.was_killed(pid) {
            // Members that were born while the first signal was on its way. The zombie still holds the number.
            let _alone = sys::kill(pid, libc::SIGKILL, true);
        }
        sys::reap(pid);
        match name {
            Some(Name::Process(id)) => {
                self.children.remove(pid);
                self.tell(&SpawnerEvent::Exited { id, status, denials: Denials::default(), failure: None });
            }
            Some(Name::Worker(id)) => {
                self.children.remove(pid);
                self.tell(&SpawnerEvent::WorkerEnded { id, status: Some(status) });
            }
            None => self.children.drop_empty_groups(),
        }
    }

    fn tell(&mut self, event: &SpawnerEvent) {
        match encode(event, b"", 0) {
            Ok(bytes) => self.unsent.extend(bytes),
            // Events are small; only a text that grew beyond all measure could do this.
            Err(error) => complain(format_args!("tell the gateway: {error}")),
        }
    }

    fn flush(&mut self) -> Result<(), End> {
        while !self.unsent.is_empty() {
            let (bytes, _rest) = self.unsent.as_slices();
            match send(self.socket.as_fd(), bytes, None, Wait::No) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN) if self.unsent.len() > MOST_UNREAD => {
                    return Err(End::Failed("the gateway does not read".to_owned()));
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(_broken) => return Err(End::Closed),
            }
        }
        Ok(())
    }
}

/// What a poll found.
struct Ready {
    socket: bool,
    signals: bool,
    launches: Vec<bool>,
}

impl Launch {
    /// Takes what the launcher has reported so far.
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        while !self.ended {
            match rustix::io::read(&self.pipe, &mut buffer[..]) {
                Ok(0) => self.ended = true,
                Ok(length) => self.reports.push(&buffer[..length]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_broken) => self.ended = true,
            }
        }
        while let Ok(Some(frame)) = self.reports.next_frame() {
            match decode(&frame.body) {
                Ok(Report::AboutToExec(enforced)) => self.enforced = Some(enforced),
                Ok(Report::Failed(failure)) => self.failure = Some(failure),
                Err(error) => self.failure = Some(failed(Step::Frame, &format!("start: {error}"), Some(Errno::PROTO))),
            }
        }
    }
}

//! The spawner: one single-threaded process, parent and subreaper of everything that is started.
//!
//! There is only one parent, because a parent-death signal is sent when the *thread* that forked ends, and because only the parent
//! gets the exit status of a child. It never waits for one child, for the gateway, or for a launcher: everything that can take time
//! is a descriptor in one poll.

mod end;
mod events;
mod removing;
mod start;
mod users;

use crate::cgroup::Groups;
use crate::children::{Children, Name, describe};
use crate::dispatch::{clear_standard, complain};
use crate::frames::{Inlet, ReceiveError, Received, Wait, send};
use crate::launch::{Order, failed};
use crate::limit::Limits;
use crate::pending::Launch;
use crate::probe;
use crate::spare::Spares;
use crate::sys;
use crate::tether::Tether;
use crate::tree;
use crate::uids::Uids;
use portcullis_protocol::helper::{BUILD, ExitStatus, Frame, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::mounts::{self, RecordsAt};
use removing::Removing;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The maximum size of unsent events in bytes. A gateway that lets more accumulate does not read at all and is treated as dead.
const MOST_UNREAD: usize = 16 << 20;

/// The maximum number of launchers between fork and execve. Each takes milliseconds, so a larger number at once is a defect, not a
/// load.
const MOST_LAUNCHES: usize = 4096;

/// The number of requests that are carried out before other events are checked again.
const MOST_REQUESTS: usize = 16;

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
    // The remover exits by itself, once all other processes are dead and nothing is left to remove.
    let remover = spawner.removing.close();
    let mut is_clean = true;
    let ended = |pid, status| is_clean &= Some(pid) != remover || status == ExitStatus::Code(0);
    tree::end_all(&spawner.children.all(), spawner.signals.as_fd(), |pid| Some(pid) == remover, ended, || ());
    spawner.groups.iter_mut().for_each(Groups::remove);
    if !is_clean && let Some(records) = spawner.removing.records().and_then(|records| records.open().ok()) {
        mounts::remove_left(&records);
    }
    ExitCode::SUCCESS
}

/// Why the spawner ends.
enum End {
    /// The gateway closed its end.
    Closed,
    /// Something failed without which the spawner cannot continue.
    Failed(String),
}

#[derive(Debug)]
struct Spawner {
    socket: OwnedFd,
    inlet: Inlet,
    unsent: VecDeque<u8>,
    /// The gateway's build was compared and is the same.
    greeted: bool,
    signals: OwnedFd,
    children: Children,
    launches: Vec<Launch>,
    /// The tethers, by the process id of the keeper.
    tethers: HashMap<Pid, Tether>,
    /// Inits that were forked ahead and wait for an order.
    spares: Spares,
    /// The user ids of sandboxes of a root server.
    uids: Uids,
    /// An epoll of tethers, with the process id as the data: thousands may be silent for days, and each poll(2) would check all of
    /// them.
    said: OwnedFd,
    /// The remover of mount points.
    removing: Removing,
    me: Pid,
    /// Tried at the start.
    namespaces: NamespaceLayer,
    /// Found when the gateway's `Hello` arrives, which says what sessions may use.
    groups: Option<Groups>,
    /// `argv[0]` of the workers: the name of this process.
    program: CString,
}

impl Spawner {
    fn new(socket: OwnedFd) -> std::io::Result<Self> {
        // Only the gateway handles terminal signals. It then closes the socket.
        sys::ignore_group_signals();
        // This fails if the starter made this process a group leader. Then terminal signals do not reach it anyway.
        let _leader = rustix::process::setsid();
        // Processes that lose their parent become our children, daemons included.
        rustix::process::set_child_subreaper(Some(getpid()))?;
        // Requests contain environments of clients, which no process of the same user may read.
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
            tethers: HashMap::new(),
            spares: Spares::new(),
            uids: Uids::default(),
            said: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            removing: Removing::default(),
            me: getpid(),
            namespaces: probe::namespaces(),
            groups: None,
            program: CString::new(program.as_bytes()).unwrap_or_default(),
        })
    }

    fn serve(&mut self) -> Result<(), End> {
        loop {
            self.end_late_launches();
            let is_behind = self.inlet.has_frame();
            // Making a spare would compete with a running start for mount locks and a processor.
            let for_spare = self.spares.patience().filter(|_| self.launches.is_empty());
            let Some(ready) = self.wait(if is_behind { Some(Duration::ZERO) } else { for_spare })? else {
                if is_behind {
                    self.receive()?;
                    self.flush()?;
                    continue;
                }
                // The spawner is idle.
                if for_spare.is_some() {
                    self.make_spare()
                } else {
                    self.spares.let_go(Instant::now())
                }
                continue;
            };
            for (launch, ready) in self.launches.iter_mut().zip(&ready.launches) {
                if *ready {
                    launch.read();
                }
            }
            if ready.mounts {
                self.spares.hear_of_mounts();
            }
            self.conclude_launches();
            for pid in ready.said {
                self.listen(pid);
            }
            if ready.remover {
                self.hear_remover();
            }
            if ready.signals {
                self.reap()?;
            }
            if ready.socket || is_behind {
                self.receive()?;
            }
            self.flush()?;
        }
    }

    fn receive(&mut self) -> Result<(), End> {
        // The remaining requests are read in the next round: launches, keepers and ends must not wait for a queue of requests.
        for _request in 0..MOST_REQUESTS {
            match self.inlet.next(self.socket.as_fd(), Wait::No) {
                Ok(Received::Frame(frame, descriptors)) => self.carry_out(&frame, descriptors)?,
                Ok(Received::Later) => return Ok(()),
                Ok(Received::End) => return Err(End::Closed),
                Err(error @ (ReceiveError::Socket(_) | ReceiveError::Frame(_) | ReceiveError::Descriptors)) => {
                    return Err(End::Failed(error.to_string()));
                }
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, frame: &Frame, descriptors: Vec<OwnedFd>) -> Result<(), End> {
        let request = decode(&frame.body).map_err(|error| End::Failed(error.to_string()))?;
        if let SpawnerRequest::Hello { build, .. } = &request {
            self.greeted = build == BUILD;
        }
        if !self.greeted {
            self.tell(&SpawnerEvent::WrongBuild { build: BUILD.to_owned() });
            self.flush()?;
            return Err(End::Failed("the gateway is of another build".to_owned()));
        }
        match request {
            SpawnerRequest::Hello { session_limits, bounds, records, uids, .. } => {
                self.find_records(records);
                self.find_uids(uids);
                let groups = self.groups.get_or_insert_with(|| Groups::find(session_limits, bounds));
                let cgroups = groups.layer();
                self.tell(&SpawnerEvent::Ready { namespaces: self.namespaces.clone(), cgroups });
            }
            SpawnerRequest::Worker { id, own_view } => self.start_worker(id, own_view, &descriptors),
            SpawnerRequest::Start {
                id,
                session,
                tty,
                policy,
                own_view,
                own_network,
                own_uid,
                allow_unprotected,
                limits: asked,
                command,
            } => {
                let limits = Limits::default();
                let records = self.removing.records();
                let order = Order {
                    session,
                    tty,
                    policy,
                    own_view,
                    own_network,
                    own_uid,
                    allow_unprotected,
                    limits,
                    command,
                    records,
                    descriptors,
                };
                self.start(id, order, &asked);
            }
            SpawnerRequest::Signal { id, signal } => self.signal(id, signal),
            SpawnerRequest::EndSession { session } => {
                // A keeper is not reaped while its tether is listed, so the pids cannot have been reused.
                let tethers = self.tethers.iter().filter(|(_, tether)| tether.session == session);
                tethers.for_each(|(pid, tether)| tether.end(*pid));
                self.groups.iter_mut().for_each(|groups| groups.end_session(&session));
            }
            SpawnerRequest::KillWorker { id } => {
                if let Some(pid) = self.children.pid(Name::Worker(id)) {
                    // The pid cannot have been reused: only `bury` reaps a worker, and removes it from the list.
                    let _ignored = sys::kill(pid, libc::SIGKILL, false);
                }
            }
        }
        Ok(())
    }

    /// Forks the remover before the first sandbox, so that mount points left by servers that are gone are removed.
    fn find_records(&mut self, directory: Option<Bytes>) {
        if matches!(self.namespaces, NamespaceLayer::Available { .. }) && self.groups.is_none() {
            let records = directory.map(|Bytes(path)| RecordsAt::new(Path::new(OsStr::from_bytes(&path))));
            self.removing = Removing::new(records);
            if let Err(error) = self.engage_remover() {
                complain(format_args!("fork the remover of mount points: {error}"));
            }
        }
    }

    /// Receives the messages of a keeper, and reports how its program ended.
    fn listen(&mut self, pid: Pid) {
        let Some(tether) = self.tethers.get_mut(&pid) else { return };
        tether.read();
        if tether.socket().is_none() {
            // The socket would stay readable forever. If it closed before, it is already removed.
            let _out_already = epoll::delete(&self.said, &*tether);
        }
        let Some(end) = self.tethers.get_mut(&pid).and_then(Tether::take_end) else { return };
        // `Started` is sent before `Exited` even if the program ended at once.
        if let Some(at) = self.launches.iter().position(|launch| launch.pid == pid) {
            let mut launch = self.launches.swap_remove(at);
            launch.read();
            self.conclude(launch, Some(end.status), end.failure.clone());
        }
        // The end of a program that never ran is not reported.
        if let Some(Name::Process(id)) = self.children.name(pid) {
            self.tell_end(id, end);
        }
    }

    fn signal(&self, id: u64, signal: i32) {
        let keeper = self.children.pid(Name::Process(id));
        let Some((pid, tether)) = keeper.and_then(|pid| Some((pid, self.tethers.get(&pid)?))) else { return };
        if signal == libc::SIGKILL {
            tether.end(pid);
        } else {
            tether.signal(signal);
        }
    }

    /// Ends launches that take too long. The ends of their keepers conclude them.
    fn end_late_launches(&mut self) {
        let now = Instant::now();
        for launch in self.launches.iter_mut().filter(|launch| launch.until.is_some_and(|until| until <= now)) {
            launch.until = None;
            if let Some(tether) = self.tethers.get(&launch.pid) {
                complain(format_args!("a process did not start in time; its start is ended"));
                tether.end(launch.pid);
            }
        }
    }

    /// Reports launches that reached `execve` or failed before it.
    fn conclude_launches(&mut self) {
        let mut at = 0;
        while let Some(launch) = self.launches.get(at) {
            // Without either report the launcher died, and its exit status follows.
            if launch.ended && (launch.enforced.is_some() || launch.failure.is_some()) {
                let launch = self.launches.swap_remove(at);
                self.conclude(launch, None, None);
            } else {
                at += 1;
            }
        }
    }

    /// Reports the result of a launch. If the launcher sent no report, `failure` is the reason why its keeper ended it.
    fn conclude(&mut self, launch: Launch, status: Option<ExitStatus>, failure: Option<String>) {
        let id = launch.id;
        self.uids.tell_shared(launch.shared_uid);
        let (event, started) = match (launch.failure, launch.enforced) {
            (None, Some(enforced)) => {
                let (limits, tree) = (launch.limits, launch.tree);
                (SpawnerEvent::Started { id, pid: launch.pid.as_raw_nonzero().get(), enforced, limits, tree }, true)
            }
            (Some(failure), _) => (SpawnerEvent::StartFailed { id, failure }, false),
            (None, None) => {
                let how = status.map_or_else(|| "exit status unknown".to_owned(), describe);
                let failure = match failure {
                    Some(failure) => failed(Step::Enforce, &format!("start: {failure}; start again"), None),
                    None => failed(Step::Machine, &format!("start: the launcher ended early ({how})"), Some(Errno::CHILD)),
                };
                (SpawnerEvent::StartFailed { id, failure }, false)
            }
        };
        self.tell(&event);
        if !started {
            // Only a launcher that is about to exit remains; its end is not reported.
            self.children.remove(launch.pid);
        }
    }

    fn tell(&mut self, event: &SpawnerEvent) {
        match encode(event, b"", 0) {
            Ok(bytes) => self.unsent.extend(bytes),
            // Events are small; only an extremely large text could cause this.
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

//! The spawner: one single-threaded process, parent and subreaper of everything that is started.
//!
//! It is the one parent because a parent-death signal fires when the *thread* that forked ends, and because only the parent
//! learns how a child ended. It never waits for one child, for the gateway, or for a launcher: everything that can take
//! time is a descriptor in one poll.

mod end;
mod removing;
mod start;

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
use portcullis_protocol::helper::{BUILD, ExitStatus, Frame, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::mounts::{self, RecordsAt};
use removing::Removing;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, OsStr};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

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
    // It ends by itself, once everybody else is dead and nothing is left.
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
    /// By the process id of the keeper.
    tethers: HashMap<Pid, Tether>,
    /// Inits that wait for an order.
    spares: Spares,
    /// An epoll of tethers, with the process id as the data: thousands may be silent for days, and a poll would look at each.
    said: OwnedFd,
    /// Of mount points.
    removing: Removing,
    me: Pid,
    /// Tried at the start.
    namespaces: NamespaceLayer,
    /// Found with the first word of the gateway, which says what sessions may use.
    groups: Option<Groups>,
    /// `argv[0]` of the workers: what this process was called.
    program: CString,
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
            tethers: HashMap::new(),
            spares: Spares::default(),
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
            let is_short = self.spares.is_short();
            let Some(ready) = self.wait(is_short)? else {
                // Nobody waits for anything, so there is time for it.
                if is_short {
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
            if ready.socket {
                self.receive()?;
            }
            self.flush()?;
        }
    }

    /// Waits for something to happen, unless there is something else to do. None if nothing has.
    fn wait(&self, is_busy: bool) -> Result<Option<Ready>, End> {
        let mut interest = PollFlags::IN;
        interest.set(PollFlags::OUT, !self.unsent.is_empty());
        let read = PollFlags::IN;
        // Without a remover a descriptor stands in for it of which nothing is asked.
        let (remover, of_remover) = self.removing.socket().map_or((&self.said, PollFlags::empty()), |remover| (remover, read));
        let mut polled = vec![
            PollFd::new(&self.socket, interest),
            PollFd::new(&self.signals, read),
            PollFd::new(&self.said, read),
            PollFd::new(remover, of_remover),
        ];
        polled.extend(self.launches.iter().map(|launch| {
            // Once the end was seen, the pipe would be ready for ever; the launcher's exit is what is waited for then.
            PollFd::new(&launch.pipe, if launch.ended { PollFlags::empty() } else { read })
        }));
        loop {
            let until = if is_busy {
                Some(Duration::ZERO)
            } else {
                self.spares.deadline().map(|at| at.saturating_duration_since(Instant::now()))
            };
            match poll(&mut polled, until.and_then(|until| Timespec::try_from(until).ok()).as_ref()) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(End::Failed(format!("wait for requests: {errno}"))),
            }
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let said = if ready[2] { self.spoken()? } else { Vec::new() };
        Ok(Some(Ready { socket: ready[0], signals: ready[1], remover: ready[3], launches: ready[4..].to_vec(), said }))
    }

    /// Keepers that have said something or have closed their ends.
    fn spoken(&self) -> Result<Vec<Pid>, End> {
        let mut space = [MaybeUninit::<Event>::uninit(); 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spoken = match epoll::wait(&self.said, &mut space, Some(&now)) {
            Ok((spoken, _rest)) => spoken,
            // The next look finds them.
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(End::Failed(format!("wait for keepers: {errno}"))),
        };
        let pid = |event: &Event| Pid::from_raw(i32::try_from(event.data.u64()).ok()?);
        Ok(spoken.iter().filter_map(pid).collect())
    }

    /// Waits for a keeper from here on. One that cannot be heard is ended, and its end is told as any other.
    fn hear(&self, pid: Pid, tether: &Tether) {
        if let Some(socket) = tether.socket()
            && let Err(errno) = epoll::modify(&self.said, socket, data_of(pid), EventFlags::IN)
        {
            complain(format_args!("wait for a keeper: {errno}; it is ended"));
            tether.end(pid);
        }
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
        if let SpawnerRequest::Hello { build, .. } = &request {
            self.greeted = build == BUILD;
        }
        if !self.greeted {
            self.tell(&SpawnerEvent::WrongBuild { build: BUILD.to_owned() });
            self.flush()?;
            return Err(End::Failed("the gateway is of another build".to_owned()));
        }
        match request {
            SpawnerRequest::Hello { session_limits, bounds, records, .. } => {
                self.find_records(records);
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
                // None is reaped while it has its tether, so the numbers are their own.
                let tethers = self.tethers.iter().filter(|(_, tether)| tether.session == session);
                tethers.for_each(|(pid, tether)| tether.end(*pid));
                self.groups.iter_mut().for_each(|groups| groups.end_session(&session));
            }
            SpawnerRequest::KillWorker { id } => {
                if let Some(pid) = self.children.pid(Name::Worker(id)) {
                    // It cannot be gone: only `bury` removes it, and it was not buried.
                    let _ignored = sys::kill(pid, libc::SIGKILL, false);
                }
            }
        }
        Ok(())
    }

    /// Before the first sandbox, so that what was left by servers that are gone is removed.
    fn find_records(&mut self, directory: Option<Bytes>) {
        if matches!(self.namespaces, NamespaceLayer::Available { .. }) && self.groups.is_none() {
            let records = directory.map(|Bytes(path)| RecordsAt::new(Path::new(OsStr::from_bytes(&path))));
            self.removing = Removing::new(records);
            if let Err(error) = self.engage_remover() {
                complain(format_args!("fork the remover of mount points: {error}"));
            }
        }
    }

    /// Takes what a keeper says, and passes on how its program ended.
    fn listen(&mut self, pid: Pid) {
        let Some(tether) = self.tethers.get_mut(&pid) else { return };
        tether.read();
        if tether.socket().is_none() {
            // It would be ready for ever. It is out already if it closed before.
            let _out_already = epoll::delete(&self.said, &*tether);
        }
        let Some(end) = self.tethers.get_mut(&pid).and_then(Tether::take_end) else { return };
        // Started comes before Exited, however quick the program was.
        if let Some(at) = self.launches.iter().position(|launch| launch.pid == pid) {
            let mut launch = self.launches.swap_remove(at);
            launch.read();
            self.conclude(launch, Some(end.status), end.failure.clone());
        }
        // Nobody hears of what never ran.
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

    /// Tells of launches that reached `execve` or failed on the way there.
    fn conclude_launches(&mut self) {
        let mut at = 0;
        while let Some(launch) = self.launches.get(at) {
            // Without either report the launcher died; how, its exit will tell.
            if launch.ended && (launch.enforced.is_some() || launch.failure.is_some()) {
                let launch = self.launches.swap_remove(at);
                self.conclude(launch, None, None);
            } else {
                at += 1;
            }
        }
    }

    /// Tells how a launch came out. Without a word of the launcher, `failure` is why its keeper ended it.
    fn conclude(&mut self, launch: Launch, status: Option<ExitStatus>, failure: Option<String>) {
        let id = launch.id;
        let (event, started) = match (launch.failure, launch.enforced) {
            (None, Some(enforced)) => {
                let (limits, tree) = (launch.limits, launch.tree);
                (SpawnerEvent::Started { id, pid: launch.pid.as_raw_nonzero().get(), enforced, limits, tree }, true)
            }
            (Some(failure), _) => (SpawnerEvent::StartFailed { id, failure }, false),
            (None, None) => {
                let how = status.map_or_else(|| "nothing known of it".to_owned(), describe);
                let failure = match failure {
                    Some(failure) => failed(Step::Enforce, &format!("start: {failure}; start again"), None),
                    None => failed(Step::Machine, &format!("start: the launcher ended early ({how})"), Some(Errno::CHILD)),
                };
                (SpawnerEvent::StartFailed { id, failure }, false)
            }
        };
        self.tell(&event);
        if !started {
            // What remains of it is a launcher about to exit; nobody shall hear of that.
            self.children.remove(launch.pid);
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

/// What `said` tells of who spoke.
fn data_of(pid: Pid) -> EventData {
    EventData::new_u64(u64::from(pid.as_raw_nonzero().get().unsigned_abs()))
}

/// What a poll found.
struct Ready {
    socket: bool,
    signals: bool,
    remover: bool,
    launches: Vec<bool>,
    said: Vec<Pid>,
}

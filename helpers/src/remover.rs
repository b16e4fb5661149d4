//! The remover: one process of a spawner that removes mount points from the machine when the sandboxes that used them are gone.
//!
//! Init cannot do this: it is confined. The spawner must not: a file system that hangs would delay all requests, and a killed
//! spawner would leave the mount points behind. So the remover holds only one socket to the spawner, stays in the machine's mount
//! namespace, and outlives a killed spawner until all mount points are removed.
//!
//! Each init has a socket to the remover. On it init names each mount point before it makes it, and reports when it has released
//! all of them. If init dies without a report, its pidfd becomes ready, but only when all processes in its pid namespace are dead.
//! The end of the socket would be too early: when an init exits, its descriptors are closed first. If the remover is killed, the
//! spawner forks another one and passes it the same sockets; mount points that were named before are found in the records.

mod message;

use crate::closing;
use crate::dispatch::complain;
use crate::removal::{self, Child, Removal, Said};
use crate::sys::{self, Fork};
use message::{CLOSE, COVERS, DESCRIPTORS, LET_GO, POINT, SWEEP, receive};
use portcullis_sandbox::mounts::RecordsAt;
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::process::Pid;
use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(crate) use message::{Line, Token, next_gone, sweep, watch, way};

/// Its name in the list of processes.
pub(crate) const NAME: &std::ffi::CStr = c"remover";

/// The maximum number of mount points of one sandbox.
const MOST_POINTS: usize = 1 << 16;

/// The number of killed children that are replaced for one removal. More kills are taken as deliberate, and the remaining mount
/// points are removed with their next use.
const MOST_KILLED: u32 = 2;

/// The maximum number of children that wait for their next removal.
const MOST_READY: usize = 2;

/// The delay before the inotify descriptor of the covers is closed after a sandbox ends. By then init has closed its own, and the
/// descriptors of several sandboxes can be closed at once.
const CLOSE_AFTER: Duration = Duration::from_millis(100);

/// The maximum number of descriptors that are closed at once.
const MOST_CLOSED: usize = 64;

/// Forks the remover, and returns the spawner's end of the socket to it.
pub(crate) fn fork(records: Option<&RecordsAt>) -> std::io::Result<(Pid, OwnedFd)> {
    let (ours, theirs) = way()?;
    match sys::fork()? {
        Fork::Child => {
            // A panic must not unwind into the spawner's frames, of which this process has a copy.
            let served = catch_unwind(AssertUnwindSafe(|| {
                let _named = rustix::thread::set_name(NAME);
                // Signals to the spawner's group do not reach it.
                let _leader = rustix::process::setsid();
                let left = closing::close_all_but(&[theirs.as_raw_fd()]);
                left.is_ok() && Remover::new(theirs, records.cloned()).and_then(|mut remover| remover.serve()).is_ok()
            }));
            sys::end(i32::from(!matches!(served, Ok(true))))
        }
        Fork::Parent(pid) => Ok((pid, ours)),
    }
}

/// An init that the remover watches.
#[derive(Debug)]
struct Watched {
    socket: OwnedFd,
    init: OwnedFd,
    points: Vec<PathBuf>,
    covers: Option<OwnedFd>,
    is_known: bool,
}

/// The kind of an epoll event, in the lowest bits of its data; above it the token or the child.
const OF_SPAWNER: u64 = 0;
const OF_CHILDREN: u64 = 1;
const OF_SOCKET: u64 = 2;
const OF_INIT: u64 = 3;
const OF_REMOVAL: u64 = 4;
const BITS: u32 = 3;

#[derive(Debug)]
struct Remover {
    /// `None` once the spawner is gone.
    spawner: Option<OwnedFd>,
    records: Option<RecordsAt>,
    signals: OwnedFd,
    events: OwnedFd,
    watched: HashMap<Token, Watched>,
    /// The number of sandboxes that use each mount point. A killed init loses its locks a moment before its processes end. Until
    /// they end, this count keeps their mount points.
    used: HashMap<PathBuf, usize>,
    /// Children that carry out a removal.
    removals: HashMap<Pid, (Child, Removal)>,
    ready: Vec<Child>,
    /// Inotify descriptors of covers, to be closed.
    covers: Vec<OwnedFd>,
    close_at: Option<Instant>,
    /// Reports that the spawner's socket could not take yet.
    untold: VecDeque<Token>,
}

impl Remover {
    fn new(spawner: OwnedFd, records: Option<RecordsAt>) -> std::io::Result<Self> {
        let (signals, events) = (sys::child_events()?, epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&events, &spawner, EventData::new_u64(OF_SPAWNER), EventFlags::IN)?;
        epoll::add(&events, &signals, EventData::new_u64(OF_CHILDREN), EventFlags::IN)?;
        Ok(Self {
            spawner: Some(spawner),
            records,
            signals,
            events,
            watched: HashMap::new(),
            used: HashMap::new(),
            removals: HashMap::new(),
            ready: Vec::new(),
            covers: Vec::new(),
            close_at: None,
            untold: VecDeque::new(),
        })
    }

    fn serve(&mut self) -> std::io::Result<()> {
        // Mount points left by servers of this user that were killed together with their removers.
        self.begin(Vec::new(), true, None, None);
        while self.spawner.is_some() || !self.watched.is_empty() || !self.removals.is_empty() {
            let mut space = [MaybeUninit::<Event>::uninit(); 64];
            let until = self.close_at.map(|at| at.saturating_duration_since(Instant::now()));
            let until = until.and_then(|until| Timespec::try_from(until).ok());
            let ready = match epoll::wait(&self.events, &mut space, until.as_ref()) {
                Ok((ready, _rest)) => ready.iter().map(|event| event.data.u64()).collect::<Vec<_>>(),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            if self.close_at.is_some_and(|at| at <= Instant::now()) {
                self.close_covers();
            }
            for data in ready {
                let of = data >> BITS;
                match data & ((1 << BITS) - 1) {
                    OF_SPAWNER => self.obey(),
                    OF_CHILDREN => self.reap(),
                    OF_SOCKET => self.listen(of),
                    OF_INIT => self.finish(of),
                    _removal => {
                        if let Some(pid) = i32::try_from(of).ok().and_then(Pid::from_raw) {
                            self.hear(pid);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Receives the requests of the spawner.
    fn obey(&mut self) {
        self.tell_rest();
        while let Some(spawner) = &self.spawner {
            let (bytes, descriptors) = match receive(spawner.as_fd()) {
                Ok(Some(message)) => message,
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => {
                    self.spawner = None;
                    return;
                }
            };
            let Some((&[kind, is_known], token)) = bytes.split_first_chunk() else { continue };
            let Ok(token) = token.try_into().map(Token::from_le_bytes) else { continue };
            if kind == SWEEP {
                self.begin(Vec::new(), true, None, Some(token));
            } else if let Ok([socket, init]) = <[OwnedFd; DESCRIPTORS]>::try_from(descriptors) {
                self.watch(token, socket, init, is_known == 1);
            } else {
                complain(format_args!("watch a sandbox: the message has no descriptors"));
                // Without its socket, its mount points are found in the records.
                self.begin(Vec::new(), true, None, Some(token));
            }
        }
    }

    fn watch(&mut self, token: Token, socket: OwnedFd, init: OwnedFd, is_known: bool) {
        let add = |descriptor: &OwnedFd, of: u64| {
            epoll::add(&self.events, descriptor, EventData::new_u64(token << BITS | of), EventFlags::IN)
        };
        if let Err(errno) = add(&socket, OF_SOCKET).and_then(|()| add(&init, OF_INIT)) {
            complain(format_args!("watch a sandbox: {errno}"));
        }
        self.watched.insert(token, Watched { socket, init, points: Vec::new(), covers: None, is_known });
    }

    /// Receives messages of an init.
    fn listen(&mut self, token: Token) {
        if self.hear_of(token) {
            self.finish(token);
        }
    }

    /// Reads the messages of an init. Returns true if it has released its mount points.
    fn hear_of(&mut self, token: Token) -> bool {
        while let Some(watched) = self.watched.get_mut(&token) {
            match receive(watched.socket.as_fd()) {
                Ok(Some((bytes, mut descriptors))) => match bytes.split_first() {
                    Some((&POINT, path)) if watched.points.len() < MOST_POINTS => {
                        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
                        *self.used.entry(path.clone()).or_default() += 1;
                        watched.points.push(path);
                    }
                    Some((&COVERS, _)) => watched.covers = descriptors.pop(),
                    Some((&CLOSE, _)) => drop(descriptors),
                    Some((&LET_GO, _)) => return true,
                    _other => {}
                },
                Err(Errno::AGAIN) => return false,
                Ok(None) | Err(_) => {
                    // The socket would stay readable forever. The pidfd of init reports its end.
                    let _out_already = epoll::delete(&self.events, &watched.socket);
                    return false;
                }
            }
        }
        false
    }

    /// Removes the mount points of an init that has released them or is dead.
    fn finish(&mut self, token: Token) {
        let _let_go = self.hear_of(token);
        let Some(Watched { socket, init, points, covers, is_known }) = self.watched.remove(&token) else { return };
        // The spawner holds a duplicate of the socket, so closing it here would not remove it from the epoll.
        let _out_already = (epoll::delete(&self.events, &socket), epoll::delete(&self.events, &init));
        let used = &mut self.used;
        let mut is_last = |path: &PathBuf| {
            let left = used.get(path).map_or(0, |count| count - 1);
            if left == 0 {
                used.remove(path)
            } else {
                used.insert(path.clone(), left)
            };
            left == 0
        };
        let points: Vec<PathBuf> = points.into_iter().filter(|path| is_last(path)).collect();
        self.begin(points, !is_known, covers, Some(token));
    }

    /// Removes mount points in a child, and reports the token when they are gone.
    fn begin(&mut self, points: Vec<PathBuf>, all_left: bool, covers: Option<OwnedFd>, token: Option<Token>) {
        let has_work = self.records.is_some() && (all_left || !points.is_empty());
        if !has_work && let Some(token) = token {
            self.tell(token);
        }
        if has_work {
            self.attend(Removal { points, all_left, token, ..Removal::default() });
        }
        if let Some(covers) = covers {
            self.covers.push(covers);
            self.close_at.get_or_insert_with(|| Instant::now() + CLOSE_AFTER);
        }
        if self.covers.len() >= MOST_CLOSED {
            self.close_covers();
        }
    }

    fn close_covers(&mut self) {
        self.close_at = None;
        removal::close_in_child(std::mem::take(&mut self.covers));
    }

    /// Passes a removal to a waiting child, or to a new one.
    fn attend(&mut self, removal: Removal) {
        // A child that does not take the removal ends when its socket is closed.
        while let Some(child) = self.ready.pop() {
            if child.take(&removal) {
                self.removals.insert(child.pid, (child, removal));
                return;
            }
        }
        match Child::fork(self.records.as_ref(), &removal) {
            Ok(child) => {
                let of = u64::from(child.pid.as_raw_nonzero().get().unsigned_abs()) << BITS | OF_REMOVAL;
                // If this fails, the end of the child serves as the report.
                let _unheard = epoll::add(&self.events, &child.way, EventData::new_u64(of), EventFlags::IN);
                self.removals.insert(child.pid, (child, removal));
            }
            Err(error) => {
                // The mount points are recorded, and are removed with their next use.
                complain(format_args!("fork a removal: {error}"));
                removal.token.into_iter().for_each(|token| self.tell(token));
            }
        }
    }

    /// Receives the messages of a child.
    fn hear(&mut self, pid: Pid) {
        while let Some((child, removal)) = self.removals.get_mut(&pid) {
            match child.hear() {
                Some(Said::Gone) => {
                    removal.is_done = true;
                    if let Some(token) = removal.token.take() {
                        self.tell(token);
                    }
                }
                Some(Said::Ready) => {
                    if let Some((child, _done)) = self.removals.remove(&pid)
                        && self.ready.len() < MOST_READY
                    {
                        self.ready.push(child);
                    }
                }
                Some(Said::End) => {
                    // The socket would stay readable forever.
                    let _out_already = epoll::delete(&self.events, &child.way);
                    return;
                }
                None => return,
            }
        }
        // A waiting child sends nothing more, so this is its end.
        if let Some(nth) = self.ready.iter().position(|child| child.pid == pid && child.hear().is_some()) {
            self.ready.swap_remove(nth);
        }
    }

    fn reap(&mut self) {
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        while let Ok(Some((pid, _status))) = sys::ended_child() {
            self.hear(pid);
            sys::reap(pid);
            self.ready.retain(|child| child.pid != pid);
            let Some((_child, removal)) = self.removals.remove(&pid) else { continue };
            if !removal.is_done && removal.killed < MOST_KILLED {
                self.attend(Removal { killed: removal.killed + 1, ..removal });
            } else if let Some(token) = removal.token {
                self.tell(token);
            }
        }
    }

    /// Reports to the spawner that nothing is left of a sandbox.
    fn tell(&mut self, token: Token) {
        self.untold.push_back(token);
        self.tell_rest();
    }

    fn tell_rest(&mut self) {
        let Some(spawner) = &self.spawner else { return self.untold.clear() };
        let mut is_full = false;
        while let Some(token) = self.untold.front() {
            match send(spawner, &token.to_le_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    is_full = true;
                    break;
                }
                _told_or_gone => drop(self.untold.pop_front()),
            }
        }
        let interest = if is_full { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        let _kept = epoll::modify(&self.events, spawner, EventData::new_u64(OF_SPAWNER), interest);
    }
}

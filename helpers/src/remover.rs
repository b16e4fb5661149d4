//! The remover: one process of a spawner that removes mount points from the machine when the sandboxes that used them are gone.
//!
//! Init could not: it is confined. The spawner must not: a file system that hangs would hold up everybody, and whoever kills the
//! spawner would leave the mount points behind. So the remover holds nothing of the spawner's but one socket, lives in the machine's
//! mounts, and outlives a spawner that was killed until everything is removed.
//!
//! Each init has a socket to it, on which it names each mount point before that is made, and says when it has let go of all. If it
//! dies without a word, that is seen by its pidfd, which is ready only when everything in its pid namespace is dead: the end of the
//! socket would come before that (exit(2) of an init closes its descriptors first). If the remover is killed the spawner makes
//! another one and hands it the same sockets; what was named before is found by the records.

use crate::closing;
use crate::dispatch::complain;
use crate::removal::Removal;
use crate::sys::{self, Fork};
use portcullis_sandbox::mounts::RecordsAt;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use rustix::process::Pid;
use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// What it is called among processes.
pub(crate) const NAME: &std::ffi::CStr = c"remover";

/// Bytes of a message: a path and what it is.
const MESSAGE: usize = 4096 + 8;

/// Descriptors of a message: an init's socket and its pidfd.
const DESCRIPTORS: usize = 2;

/// Bound of the mount points of one sandbox.
const MOST_POINTS: usize = 1 << 16;

/// So many children that were killed are replaced: whoever kills more means it. What is left goes with the next use.
const MOST_KILLED: u32 = 2;

/// Names a sandbox between the spawner and the remover. Never used again.
pub(crate) type Token = u64;

/// What is said to and by the remover: a byte, and what belongs to it.
const WATCH: u8 = b'w';
const SWEEP: u8 = b's';
const POINT: u8 = b'p';
const COVERS: u8 = b'c';
const LET_GO: u8 = b'g';

/// Both ends of a way: to the remover, and to an init.
pub(crate) fn way() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    // A message comes whole, with its descriptors, or not at all.
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Init's end.
#[derive(Debug)]
pub(crate) struct Line(pub(crate) OwnedFd);

impl Line {
    /// A mount point will be made there.
    pub(crate) fn name(&self, path: &Path) {
        // Without a remover the records tell the next one.
        let _gone = post(self.0.as_fd(), &[&[POINT], path.as_os_str().as_bytes()].concat(), &[], SendFlags::empty());
    }

    /// Another end of what tells of covers: the kernel takes its time to close the last one, and that shall not be init's.
    pub(crate) fn lend(&self, covers: BorrowedFd<'_>) {
        let _gone = post(self.0.as_fd(), &[COVERS], &[covers], SendFlags::empty());
    }

    /// Nobody else is left in the sandbox, and all locks are given up.
    pub(crate) fn let_go(self) {
        let _gone = post(self.0.as_fd(), &[LET_GO], &[], SendFlags::empty());
    }
}

/// Has the remover look after an init. `is_known` unless what the init named so far was read by a remover that is dead.
pub(crate) fn watch(
    remover: BorrowedFd<'_>,
    token: Token,
    socket: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
    is_known: bool,
) -> Result<(), Errno> {
    let bytes = [&[WATCH, u8::from(is_known)][..], &token.to_le_bytes()].concat();
    post(remover, &bytes, &[socket, init], SendFlags::empty())
}

/// Has the remover remove all that is left, and tell that under a token.
pub(crate) fn sweep(remover: BorrowedFd<'_>, token: Token) -> Result<(), Errno> {
    post(remover, &[&[SWEEP, 0][..], &token.to_le_bytes()].concat(), &[], SendFlags::empty())
}

/// The next of which nothing is left, if one is told now.
pub(crate) fn next_gone(remover: BorrowedFd<'_>) -> Option<Token> {
    let mut token = [0; 8];
    match rustix::net::recv(remover, &mut token[..], RecvFlags::DONTWAIT) {
        Ok((8, _)) => Some(Token::from_le_bytes(token)),
        _none => None,
    }
}

fn post(to: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::MSGSIZE);
    }
    loop {
        match sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// The bytes of a message, and what came along.
type Message = (Vec<u8>, Vec<OwnedFd>);

/// A message that has come; none at the end.
fn receive(from: BorrowedFd<'_>) -> Result<Option<Message>, Errno> {
    let mut bytes = vec![0; MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = loop {
        match recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    bytes.truncate(got.bytes);
    Ok((got.bytes > 0).then_some((bytes, descriptors)))
}

/// Forks the remover, and yields the spawner's end of the socket to it.
pub(crate) fn fork(records: Option<&RecordsAt>) -> std::io::Result<(Pid, OwnedFd)> {
    let (ours, theirs) = way()?;
    match sys::fork()? {
        Fork::Child => {
            // A panic must not unwind into the spawner's frames, of which this process has a copy.
            let served = catch_unwind(AssertUnwindSafe(|| {
                let _named = rustix::thread::set_name(NAME);
                // Out of the reach of whatever signals the spawner's group.
                let _leader = rustix::process::setsid();
                let left = closing::close_all_but(&[theirs.as_raw_fd()]);
                left.is_ok() && Remover::new(theirs, records.cloned()).and_then(|mut remover| remover.serve()).is_ok()
            }));
            sys::end(i32::from(!matches!(served, Ok(true))))
        }
        Fork::Parent(pid) => Ok((pid, ours)),
    }
}

/// An init that it looks after.
#[derive(Debug)]
struct Watched {
    socket: OwnedFd,
    init: OwnedFd,
    points: Vec<PathBuf>,
    covers: Option<OwnedFd>,
    is_known: bool,
}

/// What an epoll event is about, in the lowest bits of its data; above it the token or the child.
const OF_SPAWNER: u64 = 0;
const OF_CHILDREN: u64 = 1;
const OF_SOCKET: u64 = 2;
const OF_INIT: u64 = 3;
const OF_REMOVAL: u64 = 4;
const BITS: u32 = 3;

#[derive(Debug)]
struct Remover {
    /// None once the spawner is gone.
    spawner: Option<OwnedFd>,
    records: Option<RecordsAt>,
    signals: OwnedFd,
    events: OwnedFd,
    watched: HashMap<Token, Watched>,
    /// How many of them use a mount point: what one of them uses is not removed when another's lock is gone a moment before its
    /// processes are.
    used: HashMap<PathBuf, usize>,
    removals: HashMap<Pid, Removal>,
    /// What the spawner had no room for.
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
            untold: VecDeque::new(),
        })
    }

    fn serve(&mut self) -> std::io::Result<()> {
        // What servers of this user left that were killed with their removers.
        self.begin(Vec::new(), true, None, None);
        while self.spawner.is_some() || !self.watched.is_empty() || !self.removals.is_empty() {
            let mut space = [MaybeUninit::<Event>::uninit(); 64];
            let ready = match epoll::wait(&self.events, &mut space, None) {
                Ok((ready, _rest)) => ready.iter().map(|event| event.data.u64()).collect::<Vec<_>>(),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
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

    /// Takes what the spawner orders.
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
                complain(format_args!("look after a sandbox: its descriptors did not come along"));
                // Without its socket the records tell.
                self.begin(Vec::new(), true, None, Some(token));
            }
        }
    }

    fn watch(&mut self, token: Token, socket: OwnedFd, init: OwnedFd, is_known: bool) {
        let add = |descriptor: &OwnedFd, of: u64| {
            epoll::add(&self.events, descriptor, EventData::new_u64(token << BITS | of), EventFlags::IN)
        };
        if let Err(errno) = add(&socket, OF_SOCKET).and_then(|()| add(&init, OF_INIT)) {
            complain(format_args!("look after a sandbox: {errno}"));
        }
        self.watched.insert(token, Watched { socket, init, points: Vec::new(), covers: None, is_known });
    }

    /// Takes what an init says.
    fn listen(&mut self, token: Token) {
        if self.hear_of(token) {
            self.finish(token);
        }
    }

    /// Whether an init has let go.
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
                    Some((&LET_GO, _)) => return true,
                    _other => {}
                },
                Err(Errno::AGAIN) => return false,
                Ok(None) | Err(_) => {
                    // It would be ready for ever; its pidfd is what counts.
                    let _out_already = epoll::delete(&self.events, &watched.socket);
                    return false;
                }
            }
        }
        false
    }

    /// Removes what an init used that has let go or is dead.
    fn finish(&mut self, token: Token) {
        let _let_go = self.hear_of(token);
        let Some(Watched { socket, init, points, covers, is_known }) = self.watched.remove(&token) else { return };
        // The spawner has another end of the one, so that closing it here would not do.
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

    /// Removes in a child, and tells of it then.
    fn begin(&mut self, points: Vec<PathBuf>, all_left: bool, covers: Option<OwnedFd>, token: Option<Token>) {
        let has_work = self.records.is_some() && (all_left || !points.is_empty());
        if !has_work && let Some(token) = token {
            self.tell(token);
        }
        if has_work || covers.is_some() {
            let token = token.filter(|_| has_work);
            self.attend(Removal { points, all_left: all_left && has_work, token, ..Removal::default() }, covers);
        }
    }

    fn attend(&mut self, removal: Removal, covers: Option<OwnedFd>) {
        let token = removal.token;
        match removal.begin(self.records.as_ref(), covers) {
            Ok((pid, removal)) => {
                if let Some(done) = &removal.done {
                    let of = u64::from(pid.as_raw_nonzero().get().unsigned_abs()) << BITS | OF_REMOVAL;
                    // Without it the child's end is what is heard of.
                    let _unheard = epoll::add(&self.events, done, EventData::new_u64(of), EventFlags::IN);
                }
                self.removals.insert(pid, removal);
            }
            Err(error) => {
                // What is recorded goes with its next use.
                complain(format_args!("fork a removal: {error}"));
                token.into_iter().for_each(|token| self.tell(token));
            }
        }
    }

    /// A child says that the names are gone, or is about to end.
    fn hear(&mut self, pid: Pid) {
        let Some(removal) = self.removals.get_mut(&pid) else { return };
        if let Some(done) = removal.hear() {
            let _was_there = epoll::delete(&self.events, &done);
        }
        if removal.is_done
            && let Some(token) = removal.token.take()
        {
            self.tell(token);
        }
    }

    fn reap(&mut self) {
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        while let Ok(Some((pid, _status))) = sys::ended_child() {
            self.hear(pid);
            sys::reap(pid);
            let Some(removal) = self.removals.remove(&pid) else { continue };
            if !removal.is_done && removal.killed < MOST_KILLED {
                self.attend(Removal { killed: removal.killed + 1, ..removal }, None);
            } else if let Some(token) = removal.token {
                self.tell(token);
            }
        }
    }

    /// Tells the spawner that nothing is left of a sandbox.
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

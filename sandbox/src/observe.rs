//! Seeing what the view of mounts refuses.
//!
//! The kernel tells nobody that a read-only mount refused a change. So the calls that change something are told to the
//! sandbox's init before they are carried out (`seccomp_unotify(2)`): it reads which path is meant, asks the policy's tables,
//! notes what they deny, and lets the call go on. Nothing is decided here: the mounts and Landlock do that, whatever is read.
//! Opening for reading is not told, since that would cost too much; nor is what goes through an open descriptor.
//!
//! One call is never let go on: setting a mode with the group's bit, which only directories may have: `observe/directory.rs`.

mod directory;

use crate::compiled::{Compiled, Verdict};
use crate::policy::Access;
use crate::sys::{self, Notification};
use directory::ChangeOfMode;
use portcullis_protocol::denial::{Denial, Denials, Layer, SuggestedEntry, Wanted};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat2, readlinkat, statat};
use rustix::io::Errno;
use seccompiler::sock_filter;
use std::ffi::{OsStr, c_long};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Longest path that the kernel takes, its NUL included.
const LONGEST_PATH: usize = 4096;

/// A page: memory beyond one may not be there.
const PAGE: usize = 4096;

/// Flags of open(2) that say that something is to be changed: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC.
const CHANGES: u32 = 0o1 | 0o2 | 0o100 | 0o1000;

/// S_ISGID, the bit in modes that is not let pass without a look.
const LISTENED_MODES: u32 = 0o2000;

/// O_CREAT.
const CREATE: u64 = 0o100;

/// A call that is told.
#[derive(Debug, Clone, Copy)]
struct Told {
    number: c_long,
    /// Index of the argument that holds the flags of an open, if it is one.
    flags: Option<u8>,
    /// Index of the path, and of the directory that it is relative to; none means the working directory.
    path: (u8, Option<u8>),
    /// The same of a second path, which a move makes or replaces.
    target: Option<(u8, Option<u8>)>,
    what: What,
}

/// What a call does to its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// Fails unless it is missing.
    Makes,
    /// Fails if it is missing.
    Changes,
    /// By its flags.
    Opens,
}

const fn told(number: c_long, path: u8, directory: Option<u8>, what: What) -> Told {
    Told { number, flags: None, path: (path, directory), target: None, what }
}

const fn moves(number: c_long, from: (u8, Option<u8>), to: (u8, Option<u8>)) -> Told {
    Told { number, flags: None, path: from, target: Some(to), what: What::Changes }
}

const fn opens(number: c_long, path: u8, directory: Option<u8>, flags: u8) -> Told {
    Told { number, flags: Some(flags), path: (path, directory), target: None, what: What::Opens }
}

/// Those of both architectures.
const COMMON: [Told; 10] = [
    opens(libc::SYS_openat, 1, Some(0), 2),
    told(libc::SYS_mkdirat, 1, Some(0), What::Makes),
    told(libc::SYS_mknodat, 1, Some(0), What::Makes),
    told(libc::SYS_symlinkat, 2, Some(1), What::Makes),
    told(libc::SYS_linkat, 3, Some(2), What::Makes),
    told(libc::SYS_unlinkat, 1, Some(0), What::Changes),
    moves(libc::SYS_renameat2, (1, Some(0)), (3, Some(2))),
    told(libc::SYS_fchmodat, 1, Some(0), What::Changes),
    told(libc::SYS_fchownat, 1, Some(0), What::Changes),
    told(libc::SYS_truncate, 0, None, What::Changes),
];

/// Older spellings of the same, which newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLD: [Told; 13] = [
    opens(libc::SYS_open, 0, None, 1),
    told(libc::SYS_creat, 0, None, What::Changes),
    told(libc::SYS_mkdir, 0, None, What::Makes),
    told(libc::SYS_mknod, 0, None, What::Makes),
    told(libc::SYS_symlink, 1, None, What::Makes),
    told(libc::SYS_link, 1, None, What::Makes),
    told(libc::SYS_unlink, 0, None, What::Changes),
    told(libc::SYS_rmdir, 0, None, What::Changes),
    moves(libc::SYS_rename, (0, None), (1, None)),
    moves(libc::SYS_renameat, (1, Some(0)), (3, Some(2))),
    told(libc::SYS_chmod, 0, None, What::Changes),
    told(libc::SYS_chown, 0, None, What::Changes),
    told(libc::SYS_lchown, 0, None, What::Changes),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [Told; 0] = [];

fn all() -> impl Iterator<Item = &'static Told> {
    COMMON.iter().chain(&OLD)
}

/// Has the changes that this thread, and whatever it starts, tries told on the descriptor that is answered. Whoever holds it
/// must answer each, or the calls wait for ever.
///
/// # Errors
/// The kernel has no such notifications, or somebody listens to this process already.
pub fn tell_of_changes() -> std::io::Result<OwnedFd> {
    let listener = sys::listen_to(&program())?;
    // Whoever waits hands over to the listener and back at once (Linux 6.6); without it each takes a little longer.
    let _older_kernel = sys::wake_in_turn(listener.as_fd());
    Ok(listener)
}

/// The classic BPF program: which call, then for those that open which flags.
fn program() -> Vec<sock_filter> {
    /// Offsets in `struct seccomp_data`: the number, and the low half of an argument on a little-endian machine.
    const NUMBER: u32 = 0;
    let argument = |nth: u8| 16 + 8 * u32::from(nth);
    let load = |offset| sock_filter { code: 0x20, jt: 0, jf: 0, k: offset };
    let equal = |k, jt, jf| sock_filter { code: 0x15, jt, jf, k };
    let and = |k| sock_filter { code: 0x54, jt: 0, jf: 0, k };
    let answer = |k| sock_filter { code: 0x06, jt: 0, jf: 0, k };
    let tell = || answer(libc::SECCOMP_RET_USER_NOTIF);
    let allow = || answer(libc::SECCOMP_RET_ALLOW);
    // Calls of another architecture never come here: the other tables end the process.
    let mut program = vec![load(NUMBER)];
    for call in directory::ALL {
        // The other modes of a call may be told by the rules below, which want the number again.
        let number = u32::try_from(call.number).unwrap_or(u32::MAX);
        program.extend([
            equal(number, 0, 5),
            load(argument(call.mode)),
            and(LISTENED_MODES),
            equal(0, 1, 0),
            tell(),
            load(NUMBER),
        ]);
    }
    for call in all() {
        let number = u32::try_from(call.number).unwrap_or(u32::MAX);
        match call.flags {
            None => program.extend([equal(number, 0, 1), tell()]),
            Some(flags) => {
                program.extend([equal(number, 0, 5), load(argument(flags)), and(CHANGES), equal(0, 0, 1), allow(), tell()]);
            }
        }
    }
    program.push(allow());
    program
}

/// Takes notes of what is told.
#[derive(Debug)]
pub struct Observer {
    listener: OwnedFd,
    tables: Compiled,
    /// Whether `/proc` knows threads by the numbers that this process knows.
    own_proc: bool,
    /// What was denied so far.
    pub denials: Denials,
}

impl Observer {
    /// Over a descriptor of [`tell_of_changes`]; `tables` must be those of the view. Without a `/proc` of its own, in which
    /// numbers are those of this pid namespace, relative paths are not understood.
    #[must_use]
    pub fn new(listener: OwnedFd, tables: Compiled, own_proc: bool) -> Self {
        Self { listener, tables, own_proc, denials: Denials::default() }
    }

    /// Takes one notification, when the listener is readable. False if nobody is left who could make one.
    pub fn take(&mut self) -> bool {
        let notification = match sys::next_notification(self.listener.as_fd()) {
            Ok(notification) => notification,
            // The caller was killed meanwhile.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => return true,
            Err(_ended) => return false,
        };
        for (path, real) in self.meant(&notification) {
            if let Some(denial) = self.judge(path, &real) {
                self.denials.add(denial);
            }
        }
        let listener = self.listener.as_fd();
        // A caller that is gone needs no answer.
        let _gone = match ChangeOfMode::of(&notification) {
            None => sys::let_go_on(listener, notification.id),
            Some(_unseen) if !self.own_proc => sys::answer(listener, notification.id, Errno::PERM.raw_os_error()),
            Some(call) => {
                let done = call.carry_out(listener, &notification, &self.tables);
                sys::answer(listener, notification.id, done.err().map_or(0, Errno::raw_os_error))
            }
        };
        true
    }

    /// The paths that a call means and that may be denied, each as its maker would write it from the root, and the real one.
    /// None if it would fail whatever the policy says, or cannot be read.
    fn meant(&self, notification: &Notification) -> Vec<(PathBuf, PathBuf)> {
        let Some(call) = all().find(|call| call.number == c_long::from(notification.call)) else {
            return Vec::new();
        };
        let named = |argument| path(notification, argument, self.own_proc).filter(|path| !self.is_plainly_writable(path));
        let target = call.target.and_then(named).and_then(resolved);
        let first = named(call.path).and_then(resolved).filter(|(_, real)| would_try(notification, call, real));
        let follow_last = |(named, real): (PathBuf, PathBuf)| {
            // Where the last name is a link, an open goes on to where it leads.
            let real = if call.what == What::Opens { real_path(&real).unwrap_or(real) } else { real };
            (named, real)
        };
        first.map(follow_last).into_iter().chain(target).collect()
    }

    /// Most changes are of what may be changed. Those cost no look at any file: a link that leads out of a writable place is then
    /// not seen here, and refused all the same.
    fn is_plainly_writable(&self, path: &Path) -> bool {
        let is_plain = path.components().all(|part| !matches!(part, Component::ParentDir));
        is_plain && self.tables.verdict(path) == Verdict::Write
    }

    fn judge(&self, path: PathBuf, real: &Path) -> Option<Denial> {
        // The sandbox's own, whatever the policy says of the machine's.
        let is_own = [path.as_path(), real].into_iter().any(|path| path.starts_with("/dev") || path.starts_with("/proc"));
        if is_own || self.tables.verdict(real) == Verdict::Write {
            return None;
        }
        let exists = |place: &Path| statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        let (rule, entry) = self.tables.why(real, Access::Write, exists);
        let grant =
            entry.and_then(|(path, _)| AbsolutePath::new(path).ok()).map(|path| SuggestedEntry::new(&path, Wanted::Write));
        Some(Denial { path: path.to_string_lossy().into_owned(), access: Wanted::Write, layer: Layer::Mounts, rule, grant })
    }
}

impl AsFd for Observer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Whether a call would come as far as being refused.
fn would_try(notification: &Notification, call: &Told, real: &Path) -> bool {
    let exists = match statat(CWD, real, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT | Errno::NOTDIR) => false,
        // What cannot be looked at is what a denied place looks like.
        Ok(_) | Err(_) => true,
    };
    let makes = call.flags.and_then(|nth| argument(notification, nth)).is_some_and(|flags| flags & CREATE != 0);
    match call.what {
        What::Makes => !exists,
        What::Changes => exists || call.number == creat(),
        What::Opens => exists || makes,
    }
}

/// A path among the arguments, from the root, without `.`.
fn path(notification: &Notification, (nth, directory): (u8, Option<u8>), own_proc: bool) -> Option<PathBuf> {
    let thread = notification.thread;
    let given = read_path(thread, argument(notification, nth)?)?;
    if given.is_absolute() {
        return Some(given.components().collect());
    }
    if !own_proc {
        // Under the same number the machine knows another process.
        return None;
    }
    // A descriptor is an int: the kernel looks at the low half, and AT_FDCWD is negative.
    let directory = match directory.map(|nth| argument(notification, nth).map_or(-1, low_half)) {
        Some(number) if number >= 0 => format!("/proc/{thread}/fd/{number}"),
        _working => format!("/proc/{thread}/cwd"),
    };
    Some(std::fs::read_link(directory).ok()?.join(given).components().collect())
}

/// With the links on its way followed, but for its last name.
fn resolved(named: PathBuf) -> Option<(PathBuf, PathBuf)> {
    let real = match (named.parent(), named.file_name()) {
        (Some(parent), Some(name)) => real_path(parent)?.join(name),
        // It ends in `..` or is the root.
        _ => real_path(&named)?,
    };
    Some((named, real))
}

/// The real path of something that exists. The kernel follows its links, in one call: by name, each link of a deep path would cost a walk
/// of the whole path, and a process could keep init from the covers for as long as it likes.
fn real_path(path: &Path) -> Option<PathBuf> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS).ok()?;
    let link = readlinkat(CWD, format!("/proc/self/fd/{}", opened.as_raw_fd()), Vec::new()).ok()?;
    Some(PathBuf::from(OsStr::from_bytes(link.as_bytes())))
}

fn argument(notification: &Notification, nth: u8) -> Option<u64> {
    notification.args.get(usize::from(nth)).copied()
}

#[cfg(target_arch = "x86_64")]
fn creat() -> c_long {
    libc::SYS_creat
}

#[cfg(not(target_arch = "x86_64"))]
fn creat() -> c_long {
    -1
}

fn low_half(argument: u64) -> i32 {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

fn read_path(process: i32, address: u64) -> Option<PathBuf> {
    let mut bytes = Vec::new();
    while bytes.len() < LONGEST_PATH {
        let at = address.checked_add(bytes.len() as u64)?;
        let mut page = [0; PAGE];
        let room = PAGE - usize::try_from(at % PAGE as u64).unwrap_or(0);
        let length = sys::read_memory(process, at, &mut page[..room]).ok()?;
        let part = page.get(..length).filter(|part| !part.is_empty())?;
        if let Some(end) = part.iter().position(|byte| *byte == 0) {
            bytes.extend_from_slice(&part[..end]);
            return (!bytes.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(&bytes)));
        }
        bytes.extend_from_slice(part);
    }
    None
}

//! The calls that no safe crate offers: fork, execve, signal set-up, waiting without reaping, descriptors by number.
//! Whoever calls `fork` is the spawner or a sandbox's init, itself a forked child; neither ever starts a thread.
#![expect(unsafe_code, reason = "fork, execve, sigaction, signalfd, waitid and raw descriptors have no safe form")]

use portcullis_protocol::helper::ExitStatus;
use rustix::process::Pid;
use std::ffi::{CStr, CString, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Which side of a fork this is.
#[derive(Debug)]
pub(crate) enum Fork {
    /// The new process; it must end by `execve` or [`end`].
    Child,
    /// The old process.
    Parent(Pid),
}

/// Forks this process.
pub(crate) fn fork() -> io::Result<Fork> {
    // SAFETY: fork(2) asks that the child of a multi-threaded process calls only async-signal-safe functions. The callers
    // are the spawner and the init of a sandbox, and neither starts one, so the child has a whole and consistent copy and may allocate.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => Ok(Fork::Child),
        pid => Pid::from_raw(pid).filter(|_| pid > 0).map(Fork::Parent).ok_or_else(io::Error::last_os_error),
    }
}

/// Forks this process into new namespaces, of which the child is the first process.
pub(crate) fn fork_into(namespaces: u64) -> io::Result<Fork> {
    // The same signal as fork(2) sends at the child's end.
    let flags = namespaces | libc::SIGCHLD as u64;
    // SAFETY: clone(2) without CLONE_VM and with a null stack copies the process like fork(2), of which the precondition holds
    // as in `fork`; null pointers are not written without the flags that ask for it. The C library does not hear of it: no
    // handler of pthread_atfork runs, of which there is none, and its note of the thread's id is the parent's, which only
    // calls about threads look at, and there are no threads.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    match i32::try_from(pid) {
        Ok(0) => Ok(Fork::Child),
        Ok(pid) if pid > 0 => Pid::from_raw(pid).map(Fork::Parent).ok_or_else(io::Error::last_os_error),
        _negative => Err(io::Error::last_os_error()),
    }
}

/// Ends this process at once: no destructors, no exit handlers, which belong to the parent of a forked child.
pub(crate) fn end(status: i32) -> ! {
    // SAFETY: _exit(2) has no precondition and does not return.
    unsafe { libc::_exit(status) }
}

/// Replaces this process; returns only on failure.
pub(crate) fn execve(program: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>();
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: execve(2) wants a C string and two arrays of C strings that end with a null pointer: `program`, and the two
    // arrays built above, whose strings are borrowed for the whole call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Takes the descriptor with a number that the starter of this process promised, if it is open.
pub(crate) fn take(number: RawFd) -> Option<OwnedFd> {
    let open = is_open(number);
    // SAFETY: the descriptor is open, as just asked, and nothing in this process owns it: dispatch runs first in main,
    // and takes each number once.
    open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes `number` a copy of `from` that survives `execve`; what had the number is closed.
pub(crate) fn place(from: RawFd, number: RawFd) -> io::Result<()> {
    // SAFETY: dup2(2) takes no pointer. The numbers that are overwritten belong to no value that is used or dropped
    // afterwards: this runs in forked children only, which forget what they own and end by execve or _exit.
    check(unsafe { libc::dup2(from, number) })
}

/// Whether a descriptor's number is open.
pub(crate) fn is_open(number: RawFd) -> bool {
    // SAFETY: F_GETFD takes no pointer and changes nothing; a closed number is an answer, EBADF.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// Locks one byte of a file for who holds this descriptor or a copy of it (`F_OFD_SETLK` of fcntl_locking(2)). False if another
/// description of the file has it locked.
pub(crate) fn lock_byte(file: BorrowedFd<'_>, at: u32) -> io::Result<bool> {
    // SAFETY: a struct flock is plain integers: zeros are valid, and the kernel wants a process id of zero.
    let mut lock: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    lock.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap_or(1);
    // From the beginning of the file (SEEK_SET), which is zero.
    (lock.l_start, lock.l_len) = (at.into(), 1);
    // SAFETY: the request reads one struct flock, which lives for the call.
    match check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Closes every descriptor from `first` to `last` (inclusive).
pub(crate) fn close_range(first: u32, last: u32) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: close_range(2) takes no pointer. As with `place`, the caller is a forked child that never uses or drops the
    // values that owned these descriptors.
    check(c_int::try_from(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).unwrap_or(-1))
}

/// The lowest open descriptor from `first` to below `end` that is not among `kept`.
pub(crate) fn first_open(first: RawFd, end: RawFd, kept: &[RawFd]) -> io::Result<Option<RawFd>> {
    let mut asked: Vec<libc::pollfd> =
        (first..end).filter(|number| !kept.contains(number)).map(|fd| libc::pollfd { fd, events: 0, revents: 0 }).collect();
    let count = libc::nfds_t::try_from(asked.len()).map_err(|_too_many| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: poll(2) reads and writes `count` entries, which live for the call. Numbers that are not open are allowed: the kernel
    // marks them with POLLNVAL, and looks at none of the others' memory.
    check(unsafe { libc::poll(asked.as_mut_ptr(), count, 0) })?;
    Ok(asked.iter().find(|asked| asked.revents & libc::POLLNVAL == 0).map(|asked| asked.fd))
}

/// Ignores the signals by which terminals and service managers end a whole group: the spawner ends with its socket.
pub(crate) fn ignore_group_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: signal(2) with SIG_IGN installs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Gives every signal its default disposition and unblocks all, as a program expects that is started from a shell.
pub(crate) fn default_signals() {
    // A struct sigaction of the kernel, whatever the architecture: SIG_DFL, no flags, no restorer, an empty mask.
    let action = [0_u64; 4];
    // 64 is the last signal of Linux. The kernel refuses SIGKILL and SIGSTOP, which is as well. The C library would refuse
    // its own two as well, and those may have been inherited as ignored.
    for signal in 1..=64 {
        // SAFETY: rt_sigaction(2) reads one kernel sigaction, of at most 32 bytes, from memory that lives for the call, and
        // may be told null for the old one; 8 is the size of the kernel's signal set. SIG_DFL installs no code.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), ptr::null_mut::<u64>(), 8) };
    }
    let set = signal_set(None);
    // SAFETY: sigprocmask(2) reads one set that lives for the call and may be told null for the old one.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut()) };
}

/// Blocks SIGCHLD and yields a descriptor that is readable when one is pending.
pub(crate) fn child_events() -> io::Result<OwnedFd> {
    let set = signal_set(Some(libc::SIGCHLD));
    // SAFETY: sigprocmask(2) reads one set that lives for the call and may be told null for the old one.
    check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) })?;
    // SAFETY: signalfd(2) with -1 makes a new descriptor and reads one set that lives for the call.
    let number = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    check(number)?;
    // SAFETY: signalfd just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn signal_set(signal: Option<c_int>) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset(3) initialises the set that it is pointed to.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the call above.
    let mut set = unsafe { set.assume_init() };
    if let Some(signal) = signal {
        // SAFETY: sigaddset(3) changes an initialised set that is borrowed for the call.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// A child that ended. It stays a zombie, so its process id and its group's id cannot be used again before [`reap`].
pub(crate) fn ended_child() -> io::Result<Option<(Pid, ExitStatus)>> {
    wait_without_reaping(libc::WNOHANG)
}

/// The next child that ends, waiting for it; a zombie still. An error of ECHILD means that there is no child at all.
pub(crate) fn next_ended_child() -> io::Result<Option<(Pid, ExitStatus)>> {
    wait_without_reaping(0)
}

fn wait_without_reaping(flags: c_int) -> io::Result<Option<(Pid, ExitStatus)>> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: waitid(2) writes one siginfo_t; with WNOHANG and no child it leaves the zeros.
    check(unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT | flags) })?;
    // SAFETY: a siginfo_t is plain integers and pointers: zeros are valid, and so is what the kernel wrote.
    let info = unsafe { info.assume_init() };
    // SAFETY: waitid fills the fields of SIGCHLD, of which si_pid is one; with no child it is zero.
    let pid = unsafe { info.si_pid() };
    // SAFETY: as above, for si_status.
    let status = unsafe { info.si_status() };
    let status = if info.si_code == libc::CLD_EXITED { ExitStatus::Code(status) } else { ExitStatus::Signal(status) };
    Ok(Pid::from_raw(pid).map(|pid| (pid, status)))
}

/// Waits for one child's end, and removes it. Its status; none if a signal ended it.
pub(crate) fn wait_for(pid: Pid) -> Option<i32> {
    loop {
        match rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.ok().flatten().and_then(|(_, status)| status.exit_status()),
        }
    }
}

/// Removes a zombie. False if the child has not ended.
pub(crate) fn reap(pid: Pid) -> bool {
    // An error would mean that there is no such zombie, and then there is nothing to remove.
    !matches!(rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG), Ok(None))
}

/// Sends a signal of any number to a process, or to a group if `group`.
pub(crate) fn kill(pid: Pid, signal: c_int, group: bool) -> io::Result<()> {
    let target = pid.as_raw_nonzero().get();
    // SAFETY: kill(2) takes no pointer; the kernel checks the numbers.
    check(unsafe { libc::kill(if group { -target } else { target }, signal) })
}

/// Kills every process that this one may signal, but itself: for the first process of a pid namespace, all in it.
pub(crate) fn kill_everybody_else() -> io::Result<()> {
    if std::process::id() != 1 {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    // SAFETY: kill(2) takes no pointer.
    check(unsafe { libc::kill(-1, libc::SIGKILL) })
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

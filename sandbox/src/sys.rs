//! The only unsafe code of this crate.
#![expect(unsafe_code, reason = "no crate offers the system calls of this module")]

use seccompiler::sock_filter;
use std::ffi::{CStr, c_long};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The Landlock ABI of the running kernel.
///
/// # Errors
/// `EOPNOTSUPP`: Landlock is built in and not enabled. `ENOSYS`: it is not built in.
pub(crate) fn landlock_abi() -> io::Result<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const VERSION: libc::c_ulong = 1;
    // SAFETY: landlock_create_ruleset(2): with this flag `attr` must be NULL and `size` 0, as they are; the call then reads
    // and writes no memory, makes no descriptor, and returns the version.
    let answer = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0_usize, VERSION) };
    u32::try_from(answer).map_err(|_negative| io::Error::last_os_error())
}

/// `struct mount_attr` of `linux/mount.h`, as it was first (32 bytes, Linux 5.12).
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets attributes (`MOUNT_ATTR_*`) of the mount that `path` below `at` names, and with `recursive` of all mounts below it; a
/// propagation of 0 leaves that as it is.
pub(crate) fn mount_setattr(at: BorrowedFd<'_>, path: &CStr, recursive: bool, set: u64, propagation: u64) -> io::Result<()> {
    set_attributes(at, path, recursive, &MountAttributes { set, clear: 0, propagation, user_namespace: 0 })
}

/// Has a mount that was never attached show the ids of its file system as the ids that a user namespace maps them to.
pub(crate) fn map_mount(mount: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    let user_namespace = u64::try_from(map.as_raw_fd()).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    let attributes = MountAttributes { set: libc::MOUNT_ATTR_IDMAP, clear: 0, propagation: 0, user_namespace };
    set_attributes(mount, c"", false, &attributes)
}

fn set_attributes(at: BorrowedFd<'_>, path: &CStr, recursive: bool, attributes: &MountAttributes) -> io::Result<()> {
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    let size = size_of::<MountAttributes>();
    // SAFETY: mount_setattr(2) reads a C string and a structure of the size given; both live for the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_mount_setattr, at.as_raw_fd(), path.as_ptr(), flags, &raw const *attributes, size) };
    check(answer)
}

/// Moves this process into a new network namespace.
pub(crate) fn own_network() -> io::Result<()> {
    // SAFETY: unshare(2) takes no pointer; of its flags only CLONE_FILES and CLONE_VM concern memory safety.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) }.into())
}

/// Moves this process into a new mount namespace, a copy of its present one.
pub(crate) fn own_mounts() -> io::Result<()> {
    // SAFETY: as in `own_network`.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into())
}

/// Moves this process into a new user namespace.
pub(crate) fn own_users() -> io::Result<()> {
    // SAFETY: as in `own_network`.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into())
}

/// Fails with EINVAL where this process has more than one thread: unshare(2), CLONE_THREAD.
pub(crate) fn is_single_threaded() -> io::Result<()> {
    // SAFETY: as in `own_network`; for a process with one thread the flag does nothing, and for others the call fails.
    check(unsafe { libc::unshare(libc::CLONE_THREAD) }.into())
}

/// Brings the loopback interface of this network namespace up, through any socket of it.
pub(crate) fn loopback_up(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: an ifreq is plain integers and arrays of bytes: zeros are valid.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed() as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).unwrap_or(1);
    // SAFETY: netdevice(7): SIOCSIFFLAGS reads one ifreq, which lives for the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as libc::Ioctl, &raw const request) }.into())
}

/// Installs a seccomp program on this thread, and yields the descriptor on which its notifications arrive. A notified call
/// waits in a way that only a fatal signal interrupts once it was received (Linux 5.19).
pub(crate) fn listen_to(program: &[sock_filter]) -> io::Result<OwnedFd> {
    let length = libc::c_ushort::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // seccompiler's filter and the C library's have the layout of `struct sock_filter`; the kernel does not write to it.
    let program = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: seccomp(2) reads a program of the length given, from memory that lives for the call.
    let number = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    check(number)?;
    let number = RawFd::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: seccomp just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Has whoever makes a notified call and whoever answers it take turns on one processor.
pub(crate) fn wake_in_turn(listener: BorrowedFd<'_>) -> io::Result<()> {
    /// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP` of `linux/seccomp.h`.
    const SYNC_WAKE_UP: libc::c_ulong = 1;
    // SAFETY: the request takes a number, not a pointer.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) }.into())
}

/// A call that waits for an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Notification {
    /// Names it in the answer.
    pub(crate) id: u64,
    /// The thread that made it, as this process sees it.
    pub(crate) thread: i32,
    /// Its number.
    pub(crate) call: i32,
    /// Its arguments.
    pub(crate) args: [u64; 6],
}

/// Takes the next notification. `ENOENT`: the caller is gone meanwhile.
pub(crate) fn next_notification(listener: BorrowedFd<'_>) -> io::Result<Notification> {
    // SAFETY: a seccomp_notif is plain integers: zeros are valid, and the kernel wants zeros.
    let mut notification: libc::seccomp_notif = unsafe { MaybeUninit::zeroed().assume_init() };
    let request = libc::SECCOMP_IOCTL_NOTIF_RECV;
    // SAFETY: seccomp_unotify(2): the request writes one seccomp_notif, which lives for the call.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), request, &raw mut notification) }.into())?;
    Ok(Notification {
        id: notification.id,
        thread: notification.pid.cast_signed(),
        call: notification.data.nr,
        args: notification.data.args,
    })
}

/// Lets a notified call go on as if nobody had listened.
pub(crate) fn let_go_on(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    /// `SECCOMP_USER_NOTIF_FLAG_CONTINUE` of `linux/seccomp.h`, in the width of the field.
    const CONTINUE: u32 = 1;
    let response = libc::seccomp_notif_resp { id, val: 0, error: 0, flags: CONTINUE };
    // SAFETY: seccomp_unotify(2): the request reads one seccomp_notif_resp, which lives for the call.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const response) }.into())
}

/// Answers a notified call with an error number, or with success if that is 0; the call itself is not carried out.
pub(crate) fn answer(listener: BorrowedFd<'_>, id: u64, errno: i32) -> io::Result<()> {
    let response = libc::seccomp_notif_resp { id, val: 0, error: -errno, flags: 0 };
    // SAFETY: seccomp_unotify(2): the request reads one seccomp_notif_resp, which lives for the call.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const response) }.into())
}

/// Whether the thread that made a notified call still waits for its answer.
pub(crate) fn is_waiting(listener: BorrowedFd<'_>, id: u64) -> bool {
    // SAFETY: seccomp_unotify(2): the request reads one number, which lives for the call.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id) }.into()).is_ok()
}

/// Reads memory of another process; how much was there to read.
pub(crate) fn read_memory(process: i32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: process_vm_readv(2) writes at most `iov_len` bytes to `into`, which is borrowed for the call; the remote address
    // is the other process's, and is only looked up there.
    let length = unsafe { libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(length).map_err(|_negative| io::Error::last_os_error())
}

fn check(answer: c_long) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

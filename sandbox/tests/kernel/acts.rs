//! The attacker: one act, and what came of it: `ok` or the name of the error.

use super::sys;
use rustix::io::Errno;
use std::fs;
use std::io::{Error, Result, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Does `act` on `place`.
pub(crate) fn outcome(act: &str, place: &str) -> String {
    match perform(act, place) {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.raw_os_error().map_or_else(|| error.to_string(), name),
    }
}

/// The names that the tables use.
pub(crate) fn name(number: i32) -> String {
    let name = match Errno::from_raw_os_error(number) {
        Errno::PERM => "EPERM",
        Errno::ACCESS => "EACCES",
        Errno::ROFS => "EROFS",
        Errno::NOSYS => "ENOSYS",
        Errno::INVAL => "EINVAL",
        Errno::FAULT => "EFAULT",
        Errno::NOENT => "ENOENT",
        Errno::XDEV => "EXDEV",
        Errno::SRCH => "ESRCH",
        Errno::CONNREFUSED => "ECONNREFUSED",
        Errno::BADF => "EBADF",
        Errno::NODATA => "ENODATA",
        Errno::AGAIN => "EAGAIN",
        Errno::EXIST => "EEXIST",
        Errno::ISDIR => "EISDIR",
        Errno::NOTDIR => "ENOTDIR",
        Errno::LOOP => "ELOOP",
        Errno::NOTTY => "ENOTTY",
        Errno::NXIO => "ENXIO",
        Errno::NODEV => "ENODEV",
        Errno::BUSY => "EBUSY",
        Errno::TXTBSY => "ETXTBSY",
        Errno::IO => "EIO",
        Errno::OPNOTSUPP => "EOPNOTSUPP",
        Errno::PROTONOSUPPORT => "EPROTONOSUPPORT",
        Errno::AFNOSUPPORT => "EAFNOSUPPORT",
        Errno::SOCKTNOSUPPORT => "ESOCKTNOSUPPORT",
        other => return other.to_string(),
    };
    name.to_owned()
}

#[expect(clippy::too_many_lines, reason = "a table of acts, most of them a line each")]
fn perform(act: &str, place: &str) -> Result<()> {
    let path = Path::new(place);
    let below = path.join("made");
    match act {
        "read" => fs::read(path).map(drop),
        "list" => fs::read_dir(path).map(drop),
        "write" => fs::OpenOptions::new().append(true).open(path).map(drop),
        "truncate" => fs::OpenOptions::new().write(true).truncate(true).open(path).map(drop),
        "create" => fs::write(&below, "x"),
        "mkdir" => fs::create_dir(&below),
        "remove" => fs::remove_file(path),
        "rename" => fs::rename(path, path.with_extension("moved")),
        "symlink" => std::os::unix::fs::symlink("x", &below),
        "chmod" => fs::set_permissions(path, fs::Permissions::from_mode(0o640)),
        "set-id" => fs::set_permissions(path, fs::Permissions::from_mode(0o4755)),
        "set-group-id" => fs::set_permissions(path, fs::Permissions::from_mode(0o2755)),
        "openat2" => number(sys::openat2(place)),
        "chown" => std::os::unix::fs::chown(path, Some(rustix::process::getuid().as_raw()), None),
        "utime" => fs::File::open(path)?.set_modified(std::time::UNIX_EPOCH),
        "xattr" => number(sys::setxattr(place)),
        "setflags" => number(sys::keep_flags(fs::File::open(path)?.as_raw_fd())),
        "setversion" => number(sys::ioctl(fs::File::open(path)?.as_raw_fd(), 0x4008_7602)),
        "getflags" => number(sys::ioctl(fs::File::open(path)?.as_raw_fd(), 0x8008_6601)),
        "ext4-setversion" => number(sys::ioctl(fs::File::open(path)?.as_raw_fd(), 0x4008_6604)),
        "ext4-allocate" => number(sys::ioctl(fs::File::open(path)?.as_raw_fd(), 0x660c)),
        "ext4-clear-cache" => number(sys::ioctl(fs::File::open(path)?.as_raw_fd(), 0x6628)),
        "lease" => number(sys::set_lease(fs::File::open(path)?.as_raw_fd())),
        "hint" => number(sys::set_hint(fs::File::open(path)?.as_raw_fd())),
        "read-terminal" => fs::OpenOptions::new().read(true).custom_flags(libc::O_NOCTTY).open(path).map(drop),
        "take-terminal" => {
            rustix::process::setsid()?;
            // Without O_NOCTTY, so that it becomes the terminal of this new session.
            let _terminal = fs::File::open(path)?;
            fs::OpenOptions::new().read(true).write(true).open("/dev/tty")?.write_all(b"written")
        }
        "setxattrat" => number(sys::setxattrat(place)),
        "removexattr" => rustix::fs::removexattr(path, c"user.probe").map_err(Into::into),
        "removexattrat" => number(sys::call_on(466, place, c"user.probe", [0, 0, 0])),
        "fchmodat2" => number(sys::fchmodat2(place)),
        "file-setattr" => number(sys::keep_attributes(place)),
        "mkfifo" => make_node(&below, rustix::fs::FileType::Fifo),
        "mksocket" => make_node(&below, rustix::fs::FileType::Socket),
        "link" => fs::hard_link(path, path.with_extension("linked")),
        "execute" => std::process::Command::new(path).spawn()?.wait().map(drop),
        "socket" => {
            let mut numbers = place.split(',').map(|part| part.parse::<usize>().expect("three numbers"));
            let mut next = || numbers.next().expect("three numbers");
            number(sys::call(libc::SYS_socket, [next(), next(), next(), 0, 0]))
        }
        "connect-tcp" => std::net::TcpStream::connect(place).map(drop),
        "udp" => datagrams(place),
        "unix-stream" => number(sys::call(libc::SYS_socket, [1, 1, 0, 0, 0])),
        "unix-dgram" => number(sys::call(libc::SYS_socket, [1, 2, 0, 0, 0])),
        "netlink" => number(sys::call(libc::SYS_socket, [16, 3, 0, 0, 0])),
        "raw" => number(sys::call(libc::SYS_socket, [2, 3, 1, 0, 0])),
        "vsock" => number(sys::call(libc::SYS_socket, [40, 1, 0, 0, 0])),
        "bpf" => number(sys::call(libc::SYS_bpf, [0; 5])),
        "perf" => number(sys::call(libc::SYS_perf_event_open, [0; 5])),
        "userfaultfd" => number(sys::call(libc::SYS_userfaultfd, [0; 5])),
        "io-uring" => number(sys::call(libc::SYS_io_uring_setup, [1, 0, 0, 0, 0])),
        // ADDR_NO_RANDOMIZE
        "personality" => number(sys::call(libc::SYS_personality, [0x0004_0000, 0, 0, 0, 0])),
        "ptrace" | "signal" if place == "own" => {
            // Ended by its standard input closing, when it goes out of scope.
            let mut child = std::process::Command::new("/bin/cat").stdin(std::process::Stdio::piped()).spawn()?;
            let outcome = perform(act, &child.id().to_string());
            drop(child.stdin.take());
            child.wait()?;
            outcome
        }
        "socketpair" => std::os::unix::net::UnixStream::pair().map(drop),
        "socketpair-dgram" => std::os::unix::net::UnixDatagram::pair().map(drop),
        "x32" => number(sys::call(0x4000_0000 + 39, [0; 5])),
        "clone3" => number(sys::call(libc::SYS_clone3, [0; 5])),
        "unshare" => number(sys::call(libc::SYS_unshare, [place.parse().expect("flags"), 0, 0, 0, 0])),
        // CLONE_NEWUSER with CLONE_FS, which goes no further than to be looked at.
        "clone" => number(sys::call(libc::SYS_clone, [0x1000_0200, 0, 0, 0, 0])),
        "pivot-root" => number(sys::call(libc::SYS_pivot_root, [0; 5])),
        "chroot" => number(sys::call(libc::SYS_chroot, [0; 5])),
        "setns" => number(sys::call(libc::SYS_setns, [usize::MAX, 0, 0, 0, 0])),
        "umount" => number(sys::call(libc::SYS_umount2, [0; 5])),
        "fsopen" => number(sys::call(libc::SYS_fsopen, [0; 5])),
        "open-tree" => number(sys::call(libc::SYS_open_tree, [usize::MAX, 0, 1, 0, 0])),
        "move-mount" => number(sys::call(libc::SYS_move_mount, [usize::MAX, 0, usize::MAX, 0, 0])),
        "mount-setattr" => number(sys::call(libc::SYS_mount_setattr, [usize::MAX, 0, 0, 0, 0])),
        "add-key" => number(sys::call(libc::SYS_add_key, [0; 5])),
        "request-key" => number(sys::call(libc::SYS_request_key, [0; 5])),
        "fanotify" => number(sys::call(libc::SYS_fanotify_init, [0x200, 0, 0, 0, 0])),
        "init-module" => number(sys::call(libc::SYS_init_module, [0; 5])),
        "finit-module" => number(sys::call(libc::SYS_finit_module, [usize::MAX, 0, 0, 0, 0])),
        "delete-module" => number(sys::call(libc::SYS_delete_module, [0; 5])),
        "open-by-handle" => number(sys::call(libc::SYS_open_by_handle_at, [usize::MAX, 0, 0, 0, 0])),
        "swapon" => number(sys::call(libc::SYS_swapon, [0; 5])),
        #[cfg(target_arch = "x86_64")]
        "int80" => number(sys::int80()),
        "tiocsti" => number(sys::ioctl(0, libc::TIOCSTI)),
        "line-discipline" => number(sys::ioctl(0, libc::TIOCSETD)),
        "bridge" => number(sys::ioctl(0, 0x8940)),
        "tioclinux" => number(sys::ioctl(0, libc::TIOCLINUX)),
        "mount" => number(sys::call(libc::SYS_mount, [0; 5])),
        "statmount" => number(sys::call(457, [0; 5])),
        "process-madvise" => number(sys::call(libc::SYS_process_madvise, [usize::MAX, 0, 0, 0, 0])),
        "kcmp" => number(sys::call(libc::SYS_kcmp, [usize::MAX, 0, 0, 0, 0])),
        // 470 to 999: calls of kernels to come.
        "newer" => number(sys::call(999, [0; 5])),
        "keyctl" => number(sys::call(libc::SYS_keyctl, [0, usize::MAX - 2, 0, 0, 0])),
        "shmget" => number(sys::call(libc::SYS_shmget, [0, 4096, 0o1600, 0, 0])),
        // PTRACE_SEIZE: it stops nothing.
        "ptrace" => number(sys::call(libc::SYS_ptrace, [0x4206, place.parse().expect("a pid"), 0, 0, 0])),
        "signal" => number(sys::call(libc::SYS_kill, [place.parse().expect("a pid"), 0, 0, 0, 0])),
        "prlimit" => number(sys::call(libc::SYS_prlimit64, [place.parse().expect("a pid"), 7, 8, 0, 0])),
        "process-vm-read" => number(sys::process_vm(libc::SYS_process_vm_readv, place.parse().expect("a pid"))),
        "process-vm-write" => number(sys::process_vm(libc::SYS_process_vm_writev, place.parse().expect("a pid"))),
        "pidfd-signal" => number(sys::call(libc::SYS_pidfd_send_signal, [pidfd(place)?, 0, 0, 0, 0])),
        "pidfd-getfd" => number(sys::call(libc::SYS_pidfd_getfd, [pidfd(place)?, 0, 0, 0, 0])),
        "affinity" => number(sys::call(libc::SYS_sched_setaffinity, [place.parse().expect("a pid"), 8, 8, 0, 0])),
        "scheduler" => number(sys::call(libc::SYS_sched_setscheduler, [place.parse().expect("a pid"), 0, 8, 0, 0])),
        // To the weakest there is, which nobody needs a right for on a process of his own.
        "priority" => number(sys::call(libc::SYS_setpriority, [0, place.parse().expect("a pid"), 19, 0, 0])),
        "io-priority" => number(sys::call(libc::SYS_ioprio_set, [1, place.parse().expect("a pid"), 0x4007, 0, 0])),
        "caps" => {
            let status = fs::read_to_string("/proc/self/status")?;
            // Only a privileged process can empty its bounding set. An ordinary user's stays, and no_new_privs makes it moot.
            let can_empty_all = rustix::process::getuid().is_root();
            let sets = status.lines().filter(|line| line.starts_with("Cap") && (can_empty_all || !line.starts_with("CapBnd")));
            let held = sets.filter(|line| line.split_whitespace().nth(1).is_none_or(|set| set.chars().any(|digit| digit != '0')));
            Err(Error::other(format!("held: {}", held.count())))
        }
        "thread" => std::thread::Builder::new().spawn(|| ())?.join().map_err(|_panic| Error::other("panicked")),
        "fork" => std::process::Command::new("/bin/true").status().map(drop),
        other => panic!("no act {other}"),
    }
}

fn datagrams(to: &str) -> Result<()> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(to)?;
    // Where nobody listens, the second one meets the answer to the first.
    socket.send(b"x").and_then(|_| socket.send(b"x")).map(drop)
}

/// A descriptor that leads to a process. It is left open: the attacker ends soon.
fn pidfd(place: &str) -> Result<usize> {
    let pid = rustix::process::Pid::from_raw(place.parse().expect("a pid")).expect("no zero");
    let descriptor = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    Ok(usize::try_from(std::os::fd::IntoRawFd::into_raw_fd(descriptor)).expect("not negative"))
}

fn make_node(path: &Path, kind: rustix::fs::FileType) -> Result<()> {
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, rustix::fs::Mode::from_raw_mode(0o600), 0).map_err(Into::into)
}

fn number(errno: i32) -> Result<()> {
    if errno == 0 { Ok(()) } else { Err(Error::from_raw_os_error(errno)) }
}

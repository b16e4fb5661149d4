//! `/dev` and `/proc` of a sandbox.

use super::MountError;
use super::tree::{self, FileSystem, Lock, Tree};
use rustix::fs::{AtFlags, CWD, FileType, fstat, statat, symlinkat};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Devices without a state of their own, and the terminal that controls whoever opens it.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Where programs look for the descriptors of their own, and for a new terminal.
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
];

/// Bound of what a sandbox keeps in `/dev/shm`.
const SHARED_MEMORY: &str = "512m";

/// Bound of the terminals of a sandbox. The machine has 4,096 for all (`kernel.pty.max`).
const TERMINALS: &str = "256";

/// Bound of the directory itself: names and links only.
const DEVICE_DIRECTORY: &str = "64k";

/// What of the machine's devices goes into a sandbox, taken before anything is mounted.
#[derive(Debug)]
pub(super) struct Devices {
    nodes: Vec<(&'static str, Tree)>,
    /// The terminal that the process was given.
    console: Option<Tree>,
}

impl Devices {
    pub(super) fn take(terminal: Option<BorrowedFd<'_>>) -> Result<Self, MountError> {
        let mut nodes = Vec::new();
        for name in DEVICES {
            let path = Path::new("/dev").join(name);
            // What the machine does not have the sandbox has not either; a plain file under the name of a device neither.
            if let Ok(node) = tree::try_open(&path)
                && fstat(&node).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
            {
                let tree = Tree::clone_of(node.as_fd(), &path)?;
                tree.lock(Lock::Device, &path)?;
                nodes.push((name, tree));
            }
        }
        let console = terminal.and_then(|terminal| console(terminal).ok());
        Ok(Self { nodes, console })
    }

    /// Mounts them at `/dev`. The directory is still to be locked.
    pub(super) fn mount(&self, target: BorrowedFd<'_>) -> Result<Tree, MountError> {
        let path = Path::new("/dev");
        let directory = tree::memory("755", DEVICE_DIRECTORY)?;
        directory.attach(target, path)?;
        let top = directory.top();
        for (name, node) in &self.nodes {
            attach_file(top, name, node)?;
        }
        if let Some(console) = &self.console {
            attach_file(top, "console", console)?;
        }
        for (to, name) in LINKS {
            symlinkat(to, top, name).map_err(MountError::at("link", &path.join(name)))?;
        }
        let shared = tree::memory("1777", SHARED_MEMORY)?;
        attach_directory(top, "shm", &shared)?;
        let lock = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let strings = [("ptmxmode", "0666"), ("mode", "0620"), ("max", TERMINALS)];
        // A kernel that has one instance only takes the flag all the same: since Linux 4.7 each mount is one.
        let terminals = Tree::new(FileSystem { name: "devpts", flags: &["newinstance"], strings: &strings, lock })?;
        attach_directory(top, "pts", &terminals)?;
        Ok(directory)
    }
}

/// The terminal under the name by which it can be found inside, as `ttyname(3)` looks for it. Only the name is lost if it
/// cannot be had: the descriptors are there.
fn console(terminal: BorrowedFd<'_>) -> Result<Tree, Errno> {
    let mut buffer = Vec::with_capacity(64);
    let name = rustix::termios::ttyname(terminal, std::mem::take(&mut buffer))?;
    let path = PathBuf::from(name.to_str().map_err(|_| Errno::INVAL)?);
    // In the view of this mount namespace; what the descriptor itself came through is another one's.
    let node = tree::try_open(&path)?;
    let (given, found) = (fstat(terminal)?, fstat(&node)?);
    if (given.st_rdev, given.st_ino) != (found.st_rdev, found.st_ino) {
        return Err(Errno::NODEV);
    }
    let tree = Tree::clone_of(node.as_fd(), &path).map_err(|_error| Errno::NODEV)?;
    tree.lock(Lock::Device, &path).map_err(|_error| Errno::NODEV)?;
    Ok(tree)
}

/// What becomes `/proc`. The kernel gives a fresh one only where the machine's can be seen as a whole, so it is taken before the
/// ground is laid.
#[derive(Debug)]
pub(super) enum Processes {
    /// Those of this pid namespace.
    Own(Tree),
    /// The machine's, read-only, with those parts masked that are masked for everybody here, as in many containers.
    Machine(Option<Tree>),
}

impl Processes {
    pub(super) fn take() -> Result<Self, MountError> {
        match own_proc() {
            Err(MountError { errno, .. }) if errno == Errno::PERM.raw_os_error() => machine_proc().map(Self::Machine),
            own => own.map(Self::Own),
        }
    }

    /// Mounts them at `/proc`. Whether they are this namespace's own.
    pub(super) fn mount(&self, target: BorrowedFd<'_>) -> Result<bool, MountError> {
        let (Self::Own(tree) | Self::Machine(Some(tree))) = self else { return Ok(false) };
        tree.attach(target, Path::new("/proc"))?;
        Ok(matches!(self, Self::Own(_)))
    }
}

fn own_proc() -> Result<Tree, MountError> {
    let lock = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Tree::new(FileSystem { name: "proc", flags: &[], strings: &[], lock })
}

fn attach_file(at: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), MountError> {
    let path = Path::new("/dev").join(name);
    tree.attach(tree::make_file(at, OsStr::new(name), &path)?.as_fd(), &path)
}

fn attach_directory(at: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), MountError> {
    let path = Path::new("/dev").join(name);
    tree.attach(tree::make_directory(at, OsStr::new(name), &path)?.as_fd(), &path)
}

/// The machine's, if it is one.
fn machine_proc() -> Result<Option<Tree>, MountError> {
    let path = Path::new("/proc");
    let is_directory = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
    let Some(proc) = is_directory.then(|| tree::try_open(path).ok()).flatten() else { return Ok(None) };
    let tree = Tree::clone_of(proc.as_fd(), path)?;
    tree.lock(Lock::ReadOnly, path)?;
    Ok(Some(tree))
}

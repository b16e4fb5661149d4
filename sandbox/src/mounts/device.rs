//! `/dev` and `/proc` of a sandbox.

use super::MountError;
use super::tree::{self, FileSystem, Lock, Tree};
use rustix::fs::{AtFlags, CWD, FileType, fstat, statat, symlinkat};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Devices without state, and the controlling terminal of the process that opens it.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Links by which programs find their own descriptors, and a new terminal.
pub(super) const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
];

/// The maximum size of the content of `/dev/shm`.
const SHARED_MEMORY: &str = "512m";

/// The maximum number of terminals of a sandbox. The machine has 4,096 (`kernel.pty.max`), of which 1,024 are reserved for the
/// initial instance.
const TERMINALS: &str = "32";

/// The maximum size of the directory itself, which has only names and links.
const DEVICE_DIRECTORY: &str = "64k";

/// The directory `/dev` of a sandbox, and the machine's devices that go into it.
#[derive(Debug)]
pub(super) struct Devices {
    directory: Tree,
    nodes: Vec<(&'static str, Tree)>,
}

impl Devices {
    /// Takes the machine's devices, before anything is mounted.
    pub(super) fn take() -> Result<Self, MountError> {
        let mut nodes = Vec::new();
        for name in DEVICES {
            let path = Path::new("/dev").join(name);
            // A device that the machine does not have is left out, and so is a regular file with the name of a device.
            if let Ok(node) = tree::try_open(&path)
                && fstat(&node).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
            {
                let tree = Tree::clone_of(node.as_fd(), &path)?;
                tree.lock(Lock::Device, &path)?;
                nodes.push((name, tree));
            }
        }
        Ok(Self { directory: tree::memory("755", DEVICE_DIRECTORY)?, nodes })
    }

    /// Puts all entries into the directory. `EINVAL`: it is not attached yet, and this kernel requires that.
    pub(super) fn fill(&mut self) -> Result<(), MountError> {
        let (path, top) = (Path::new("/dev"), self.directory.top());
        for (name, node) in &self.nodes {
            attach_file(top, name, node)?;
        }
        for (to, name) in LINKS {
            symlinkat(to, top, name).map_err(MountError::at("link", &path.join(name)))?;
        }
        let shared = tree::memory("1777", SHARED_MEMORY)?;
        attach_directory(top, "shm", &shared)?;
        let lock = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let strings = [("ptmxmode", "0666"), ("mode", "0620"), ("max", TERMINALS)];
        // The flag is for kernels before 4.7. Since then each mount is a separate instance, and the flag has no effect.
        let terminals = Tree::new(FileSystem { name: "devpts", flags: &["newinstance"], strings: &strings, lock })?;
        attach_directory(top, "pts", &terminals)?;
        // All are attached.
        self.nodes.clear();
        Ok(())
    }

    /// The detached mounts.
    pub(super) fn mounts(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nodes.iter().map(|(_, node)| node).chain([&self.directory]).map(Tree::top)
    }

    /// Takes the terminal of a process, before anything is mounted. If that fails, the terminal only has no name inside: the
    /// descriptors still work.
    pub(super) fn console(terminal: BorrowedFd<'_>) -> Option<Tree> {
        console(terminal).ok()
    }

    /// Attaches the terminal under the name by which `ttyname(3)` finds it inside.
    pub(super) fn add_console(&self, console: &Tree) -> Result<(), MountError> {
        attach_file(self.directory.top(), "console", console)
    }

    /// Attaches the directory, which is still to be locked.
    pub(super) fn attach(&self, target: BorrowedFd<'_>) -> Result<(), MountError> {
        self.directory.attach(target, Path::new("/dev"))
    }

    pub(super) fn into_directory(self) -> Tree {
        self.directory
    }
}

fn console(terminal: BorrowedFd<'_>) -> Result<Tree, Errno> {
    let mut buffer = Vec::with_capacity(64);
    let name = rustix::termios::ttyname(terminal, std::mem::take(&mut buffer))?;
    let path = PathBuf::from(name.to_str().map_err(|_| Errno::INVAL)?);
    // Opened in this mount namespace: the descriptor itself belongs to another one.
    let node = tree::try_open(&path)?;
    let (given, found) = (fstat(terminal)?, fstat(&node)?);
    if (given.st_rdev, given.st_ino) != (found.st_rdev, found.st_ino) {
        return Err(Errno::NODEV);
    }
    let tree = Tree::clone_of(node.as_fd(), &path).map_err(|_error| Errno::NODEV)?;
    tree.lock(Lock::Device, &path).map_err(|_error| Errno::NODEV)?;
    Ok(tree)
}

/// The mount that becomes `/proc`. The kernel allows a new procfs only while the machine's is visible without covers, so it is made
/// before the ground is laid.
#[derive(Debug)]
pub(super) enum Processes {
    /// A new procfs of this pid namespace.
    Own(Tree),
    /// The machine's, read-only, with the parts masked that are already masked here for all users, as in many containers.
    Machine(Option<Tree>),
}

impl Processes {
    pub(super) fn take() -> Result<Self, MountError> {
        match own_proc() {
            Err(MountError { errno, .. }) if errno == Errno::PERM.raw_os_error() => machine_proc().map(Self::Machine),
            own => own.map(Self::Own),
        }
    }

    /// Attaches the mount at `/proc`, if there is one. Returns whether it is this namespace's own.
    pub(super) fn attach(&self, target: impl FnOnce() -> Result<OwnedFd, MountError>) -> Result<bool, MountError> {
        let Some(tree) = self.tree() else { return Ok(false) };
        tree.attach(target()?.as_fd(), Path::new("/proc"))?;
        Ok(matches!(self, Self::Own(_)))
    }

    /// The mount, if there is one.
    pub(super) fn tree(&self) -> Option<&Tree> {
        match self {
            Self::Own(tree) | Self::Machine(Some(tree)) => Some(tree),
            Self::Machine(None) => None,
        }
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

/// A clone of the machine's `/proc`, if it has one.
fn machine_proc() -> Result<Option<Tree>, MountError> {
    let path = Path::new("/proc");
    let is_directory = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
    let Some(proc) = is_directory.then(|| tree::try_open(path).ok()).flatten() else { return Ok(None) };
    let tree = Tree::clone_of(proc.as_fd(), path)?;
    tree.lock(Lock::ReadOnly, path)?;
    Ok(Some(tree))
}

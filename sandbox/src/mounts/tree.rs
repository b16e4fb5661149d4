//! Detached mounts, and attaching them. Every source and every target is a descriptor: the checked file is the mounted one, even if
//! a path is renamed meanwhile.

use super::MountError;
use crate::sys;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fchmod, mkdirat, mknodat, openat, openat2, statx,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Restrictions of a mount. They only add to those of the machine: a mount that is read-only there stays read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// No set-user-ID programs and no devices.
    Writable,
    /// No set-user-ID programs, no devices and no changes.
    ReadOnly,
    /// No set-user-ID programs and no changes; for device files.
    Device,
}

impl Lock {
    fn attributes(self) -> MountAttrFlags {
        let least = MountAttrFlags::MOUNT_ATTR_NOSUID;
        match self {
            Self::Writable => least | MountAttrFlags::MOUNT_ATTR_NODEV,
            Self::ReadOnly => least | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_RDONLY,
            Self::Device => least | MountAttrFlags::MOUNT_ATTR_RDONLY,
        }
    }
}

/// A detached tree of mounts. It vanishes if it is dropped before it is attached.
#[derive(Debug)]
pub(super) struct Tree {
    mount: OwnedFd,
}

impl Tree {
    /// Clones the mount of an open file or directory, and every mount below it. The descriptor must be from this mount namespace.
    pub(super) fn clone_of(source: BorrowedFd<'_>, path: &Path) -> Result<Self, MountError> {
        // Without the mounts below, an unprivileged namespace would see the files under them. So the kernel does not allow that.
        Self::clone_with(source, OpenTreeFlags::AT_RECURSIVE, path)
    }

    /// Clones a mount without the mounts below it, which only root may do. The caller must mount those as well.
    pub(super) fn clone_one(source: BorrowedFd<'_>, path: &Path) -> Result<Self, MountError> {
        Self::clone_with(source, OpenTreeFlags::empty(), path)
    }

    fn clone_with(source: BorrowedFd<'_>, more: OpenTreeFlags, path: &Path) -> Result<Self, MountError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH | more;
        let mount = open_tree(source, c"", flags).map_err(MountError::at("clone the mounts of", path))?;
        Ok(Self { mount })
    }

    /// Maps the ids of its file system by the map of a user namespace.
    pub(super) fn map(&self, map: BorrowedFd<'_>) -> Result<(), Errno> {
        sys::map_mount(self.mount.as_fd(), map).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
    }

    /// Attaches the tree over the root, and makes it the root of this process and its mounts. The old root is unmounted.
    pub(super) fn become_root(&self) -> Result<(), MountError> {
        self.become_root_with(|| Ok(()))
    }

    /// As [`Self::become_root`], with a step that mounts more in the tree after it is attached: mounts need an attached target.
    pub(super) fn become_root_with(&self, mount: impl FnOnce() -> Result<(), MountError>) -> Result<(), MountError> {
        let root = Path::new("/");
        self.attach(open(root)?.as_fd(), root)?;
        mount()?;
        let fail = MountError::at("make a tree of mounts the root, on", root);
        rustix::process::fchdir(&self.mount).map_err(&fail)?;
        // The old root is stacked over the new one, and then unmounted: pivot_root(2), "pivot_root(".", ".")".
        rustix::process::pivot_root(".", ".").map_err(&fail)?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(&fail)?;
        rustix::process::chdir("/").map_err(&fail)
    }

    /// Makes a new file system in memory or of the kernel.
    pub(super) fn new(kind: FileSystem<'_>) -> Result<Self, MountError> {
        let FileSystem { name, flags, strings, lock } = kind;
        let made = || -> rustix::io::Result<OwnedFd> {
            let configuration = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)?;
            for flag in flags {
                fsconfig_set_flag(configuration.as_fd(), *flag)?;
            }
            for (key, value) in strings {
                fsconfig_set_string(configuration.as_fd(), *key, *value)?;
            }
            fsconfig_create(configuration.as_fd())?;
            fsmount(configuration.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, lock)
        };
        Ok(Self { mount: made().map_err(MountError::at("make a file system of kind", Path::new(name)))? })
    }

    /// Restricts all mounts of the tree.
    pub(super) fn lock(&self, lock: Lock, path: &Path) -> Result<(), MountError> {
        lock_below(self.mount.as_fd(), c"", true, lock, path)
    }

    /// Restricts only the top mount of the tree.
    pub(super) fn lock_top(&self, lock: Lock, path: &Path) -> Result<(), MountError> {
        lock_below(self.mount.as_fd(), c"", false, lock, path)
    }

    /// Makes its top directory searchable, but not readable.
    pub(super) fn shut(&self, path: &Path) -> Result<(), MountError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(self.top(), ".", flags, Mode::empty());
        let shut = opened.and_then(|directory| fchmod(&directory, Mode::from_raw_mode(0o111)));
        shut.map_err(MountError::at("make unreadable", path))
    }

    /// Attaches the tree over `target`. `path` names the target in errors.
    pub(super) fn attach(&self, target: BorrowedFd<'_>, path: &Path) -> Result<(), MountError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(self.mount.as_fd(), c"", target, c"", flags).map_err(MountError::at("mount on", path))
    }

    /// The mount id of its top mount.
    pub(super) fn mount(&self, path: &Path) -> Result<u64, MountError> {
        let stat = statx(&self.mount, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
        stat.map(|stat| stat.stx_mnt_id).map_err(MountError::at("look at the mount on", path))
    }

    /// Returns only the descriptor. If the mount must outlive it, it must be attached.
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.mount
    }

    /// Its top directory or file.
    pub(super) fn top(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// The parameters of [`Tree::new`].
#[derive(Debug, Clone, Copy)]
pub(super) struct FileSystem<'a> {
    pub(super) name: &'a str,
    pub(super) flags: &'a [&'a str],
    pub(super) strings: &'a [(&'a str, &'a str)],
    pub(super) lock: MountAttrFlags,
}

/// Makes a file system in memory with a maximum size in bytes.
pub(super) fn memory(mode: &str, size: &str) -> Result<Tree, MountError> {
    let lock = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Tree::new(FileSystem { name: "tmpfs", flags: &[], strings: &[("mode", mode), ("size", size)], lock })
}

/// Restricts the mount at a path, and with `recursive` all mounts below it.
pub(super) fn lock_path(path: &Path, recursive: bool, lock: Lock) -> Result<(), MountError> {
    let place = open(path)?;
    lock_below(place.as_fd(), c"", recursive, lock, path)
}

/// Restricts the mount whose root is open.
pub(super) fn lock_place(place: BorrowedFd<'_>, lock: Lock, path: &Path) -> Result<(), MountError> {
    lock_below(place, c"", false, lock, path)
}

fn lock_below(at: BorrowedFd<'_>, below: &CStr, recursive: bool, lock: Lock, path: &Path) -> Result<(), MountError> {
    let attributes = u64::from(lock.attributes().bits());
    sys::mount_setattr(at, below, recursive, attributes, 0)
        .map_err(|error| MountError::system("restrict the mounts of", path, &error))
}

/// Makes the mounts private: later mounts here do not reach the machine, and later mounts of the machine do not reach this
/// namespace.
pub(super) fn part_from_the_machine() -> Result<(), MountError> {
    sys::mount_setattr(CWD, c"/", true, 0, libc::MS_PRIVATE)
        .map_err(|error| MountError::system("make the mounts private below", Path::new("/"), &error))
}

/// Opens a path without following links, and without access to its content (`O_PATH`).
pub(super) fn open(path: &Path) -> Result<OwnedFd, MountError> {
    try_open(path).map_err(MountError::at("open", path))
}

/// As [`open`], with the plain error for callers that handle it.
pub(super) fn try_open(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// Makes an empty file as a mount point.
pub(super) fn make_file(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    match mknodat(at, name, FileType::RegularFile, Mode::from_raw_mode(0o444), 0) {
        Ok(()) | Err(Errno::EXIST) => open_below(at, name, path),
        Err(errno) => Err(MountError::at("make", path)(errno)),
    }
}

/// Makes an empty directory as a mount point, or as a parent of others.
pub(super) fn make_directory(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    match mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => open_below(at, name, path),
        Err(errno) => Err(MountError::at("make", path)(errno)),
    }
}

pub(super) fn open_below(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    try_open_below(at, name).map_err(MountError::at("open", path))
}

/// Opens one name in a directory without following a link.
pub(super) fn try_open_below(at: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    openat(at, name, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
}

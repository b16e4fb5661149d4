//! Mounts that are not attached yet, and attaching them. Every source and every target is a descriptor: what was looked at is
//! what is mounted, whoever renames things meanwhile.

use super::MountError;
use crate::sys;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fchmod, mkdirat, mknodat, openat, openat2, statx,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// What a mount takes away. Nothing gives anything back: what the machine mounted read-only stays so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// No set-user-id programs, no devices.
    Writable,
    /// Neither, and no changes.
    ReadOnly,
    /// No set-user-id programs and no changes; for device files.
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

/// A tree of mounts that is attached nowhere yet; it vanishes when it is dropped before.
#[derive(Debug)]
pub(super) struct Tree {
    mount: OwnedFd,
}

impl Tree {
    /// Clones what a descriptor stands for, and every mount below it. The descriptor must be of this mount namespace.
    pub(super) fn clone_of(source: BorrowedFd<'_>, path: &Path) -> Result<Self, MountError> {
        // Without what is mounted below, the kernel would show an unprivileged namespace what lies under those mounts.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH
            | OpenTreeFlags::AT_RECURSIVE;
        let mount = open_tree(source, c"", flags).map_err(MountError::at("clone the mounts of", path))?;
        Ok(Self { mount })
    }

    /// A new file system that lives in memory or in the kernel.
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

    /// Takes rights away from all mounts of the tree.
    pub(super) fn lock(&self, lock: Lock, path: &Path) -> Result<(), MountError> {
        lock_below(self.mount.as_fd(), c"", true, lock, path)
    }

    /// Takes rights away from its first mount only.
    pub(super) fn lock_top(&self, lock: Lock, path: &Path) -> Result<(), MountError> {
        lock_below(self.mount.as_fd(), c"", false, lock, path)
    }

    /// Lets its first directory be walked through and no longer be listed.
    pub(super) fn shut(&self, path: &Path) -> Result<(), MountError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(self.top(), ".", flags, Mode::empty());
        let shut = opened.and_then(|directory| fchmod(&directory, Mode::from_raw_mode(0o111)));
        shut.map_err(MountError::at("shut", path))
    }

    /// Attaches it over `target`, which says what `path` is.
    pub(super) fn attach(&self, target: BorrowedFd<'_>, path: &Path) -> Result<(), MountError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(self.mount.as_fd(), c"", target, c"", flags).map_err(MountError::at("mount on", path))
    }

    /// The kernel's number of its first mount.
    pub(super) fn mount(&self, path: &Path) -> Result<u64, MountError> {
        let stat = statx(&self.mount, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
        stat.map(|stat| stat.stx_mnt_id).map_err(MountError::at("look at the mount on", path))
    }

    /// The descriptor alone; the mount must be attached by now.
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.mount
    }

    /// Its first directory or file.
    pub(super) fn top(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// What to make with [`Tree::new`].
#[derive(Debug, Clone, Copy)]
pub(super) struct FileSystem<'a> {
    pub(super) name: &'a str,
    pub(super) flags: &'a [&'a str],
    pub(super) strings: &'a [(&'a str, &'a str)],
    pub(super) lock: MountAttrFlags,
}

/// A file system in memory with a bound of its content in bytes.
pub(super) fn memory(mode: &str, size: &str) -> Result<Tree, MountError> {
    let lock = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Tree::new(FileSystem { name: "tmpfs", flags: &[], strings: &[("mode", mode), ("size", size)], lock })
}

/// Takes rights away from the mount at a path, and with `recursive` from all below it.
pub(super) fn lock_path(path: &Path, recursive: bool, lock: Lock) -> Result<(), MountError> {
    let place = open(path)?;
    lock_below(place.as_fd(), c"", recursive, lock, path)
}

fn lock_below(at: BorrowedFd<'_>, below: &CStr, recursive: bool, lock: Lock, path: &Path) -> Result<(), MountError> {
    let attributes = u64::from(lock.attributes().bits());
    sys::mount_setattr(at, below, recursive, attributes, 0)
        .map_err(|error| MountError::system("take rights away from the mounts of", path, &error))
}

/// Keeps what is mounted here from the machine, and what the machine mounts from here.
pub(super) fn part_from_the_machine() -> Result<(), MountError> {
    sys::mount_setattr(CWD, c"/", true, 0, libc::MS_PRIVATE)
        .map_err(|error| MountError::system("make private the mounts of", Path::new("/"), &error))
}

/// Opens a place as it is, link-free, without a right to its content.
pub(super) fn open(path: &Path) -> Result<OwnedFd, MountError> {
    try_open(path).map_err(MountError::at("open", path))
}

/// The same, for whoever knows what an error means.
pub(super) fn try_open(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// Makes an empty file to mount over.
pub(super) fn make_file(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    match mknodat(at, name, FileType::RegularFile, Mode::from_raw_mode(0o444), 0) {
        Ok(()) | Err(Errno::EXIST) => open_below(at, name, path),
        Err(errno) => Err(MountError::at("make", path)(errno)),
    }
}

/// Makes an empty directory to mount over, or to make others in.
pub(super) fn make_directory(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    match mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => open_below(at, name, path),
        Err(errno) => Err(MountError::at("make", path)(errno)),
    }
}

pub(super) fn open_below(at: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<OwnedFd, MountError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat(at, name, flags, Mode::empty()).map_err(MountError::at("open", path))
}

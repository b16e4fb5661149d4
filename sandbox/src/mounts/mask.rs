//! Empty files and directories that serve as covers.

use super::MountError;
use super::tree::{self, Lock, Tree};
use rustix::fs::{FileType, Mode, mkdirat, mknodat};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// A kind of cover.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mask {
    /// An empty directory that can be listed.
    Empty,
    /// A directory that no process may open.
    Denied,
    /// A file that no process may open.
    File,
}

impl Mask {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Denied => "denied",
            Self::File => "file",
        }
    }
}

/// One cover of each kind, on a separate mount.
#[derive(Debug)]
pub(super) struct Masks {
    mount: Tree,
}

impl Masks {
    /// Makes the covers on a detached mount.
    pub(super) fn new() -> Result<Self, MountError> {
        let path = Path::new("memory");
        let masks = tree::memory("755", "64k")?;
        let fail = MountError::at("make the covers of denied places in", path);
        for (mask, mode) in [(Mask::Empty, 0o555), (Mask::Denied, 0o000)] {
            mkdirat(masks.top(), mask.name(), Mode::from_raw_mode(mode)).map_err(&fail)?;
        }
        mknodat(masks.top(), Mask::File.name(), FileType::RegularFile, Mode::empty(), 0).map_err(&fail)?;
        masks.lock_top(Lock::ReadOnly, path)?;
        Ok(Self { mount: masks })
    }

    /// Attaches the covers at `target`, which another mount will cover: before Linux 6.15 only an attached mount can be cloned.
    pub(super) fn attach(&self, target: BorrowedFd<'_>) -> Result<(), MountError> {
        self.mount.attach(target, Path::new("the covers of denied places"))
    }

    pub(super) fn top(&self) -> BorrowedFd<'_> {
        self.mount.top()
    }

    /// A clone of one cover, to be attached.
    pub(super) fn tree(&self, mask: Mask) -> Result<Tree, MountError> {
        let path = Path::new(mask.name());
        let source = tree::open_below(self.mount.top(), OsStr::new(mask.name()), path)?;
        Tree::clone_of(source.as_fd(), path)
    }
}

//! Empty things to cover others with.

use super::MountError;
use super::tree::{self, Lock, Tree};
use rustix::fs::{FileType, Mode, mkdirat, mknodat};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// An empty thing.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mask {
    /// A directory that can be listed and holds nothing.
    Empty,
    /// A directory that nobody may open.
    Denied,
    /// A file that nobody may open.
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

/// One of each, on a mount of their own.
#[derive(Debug)]
pub(super) struct Masks {
    directory: OwnedFd,
}

impl Masks {
    /// Makes them on a mount at `target`, which the private `/dev` is going to cover: a mount can be cloned only where it is
    /// attached.
    pub(super) fn new(target: BorrowedFd<'_>) -> Result<Self, MountError> {
        let path = Path::new("/dev");
        let masks = tree::memory("755", "64k")?;
        masks.attach(target, path)?;
        let fail = MountError::at("make the covers of denied places in", path);
        for (mask, mode) in [(Mask::Empty, 0o555), (Mask::Denied, 0o000)] {
            mkdirat(masks.top(), mask.name(), Mode::from_raw_mode(mode)).map_err(&fail)?;
        }
        mknodat(masks.top(), Mask::File.name(), FileType::RegularFile, Mode::empty(), 0).map_err(&fail)?;
        masks.lock_top(Lock::ReadOnly, path)?;
        Ok(Self { directory: masks.into_descriptor() })
    }

    /// One of them, to be attached.
    pub(super) fn tree(&self, mask: Mask) -> Result<Tree, MountError> {
        let path = Path::new(mask.name());
        let source = tree::open_below(self.directory.as_fd(), OsStr::new(mask.name()), path)?;
        Tree::clone_of(source.as_fd(), path)
    }
}

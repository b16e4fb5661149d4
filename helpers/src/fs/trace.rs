//! Resolves the links of a path step by step, judging each step before it is taken.
//!
//! The result is a string. Whoever acts on it opens exactly that string with `RESOLVE_NO_SYMLINKS`, so that a link that was
//! put in meanwhile is not followed but noticed.

use super::os;
use portcullis_protocol::helper::FsError;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Links that one path may lead through; the kernel's own bound.
const MOST_LINKS: usize = 40;

/// How often a resolution is begun again because the tree changed under it.
pub(super) const MOST_TRIES: usize = 16;

/// Whether the last component is followed if it is a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    Follow,
    Keep,
}

/// Where a path leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace {
    /// Absolute and without links, as far as it exists; what is missing is appended as it was named.
    pub(super) real: PathBuf,
    pub(super) ending: Ending,
    /// What is missing was named by a link, not by the path itself.
    pub(super) dangling: bool,
}

/// How much of a path exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Exists,
    /// All but the last name.
    Missing,
    /// Not even the directory of the last name.
    NoParent,
    /// Something on the way is not a directory.
    NotDirectory,
}

impl Trace {
    /// That the path exists.
    pub(super) fn exists(&self) -> Result<(), FsError> {
        match self.ending {
            Ending::Exists => Ok(()),
            Ending::Missing | Ending::NoParent => Err(os(Errno::NOENT)),
            Ending::NotDirectory => Err(os(Errno::NOTDIR)),
        }
    }

    /// That the directory of the last name exists.
    pub(super) fn has_parent(&self) -> Result<(), FsError> {
        if self.ending == Ending::Missing { Ok(()) } else { self.exists() }
    }
}

/// Opens an absolute path that must not lead through a link anywhere. With `O_PATH | O_NOFOLLOW` the last component may be
/// one, and is opened itself.
pub(super) fn open_exact(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// A step of a resolution.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step<'a> {
    /// A name that is about to be looked at, without links before it.
    Name(&'a Path),
    /// The file of that name, opened with `O_PATH`.
    Found(&'a Path, &'a OwnedFd),
    /// A link that is about to be followed, and the names behind it as they stand: what the path is called here.
    Spelling(&'a Path),
}

/// Resolves `path`. `see` is asked before each step; its error ends the resolution.
pub(super) fn trace(path: &Path, last: Last, mut see: impl FnMut(Step<'_>) -> Result<(), FsError>) -> Result<Trace, FsError> {
    for _ in 0..MOST_TRIES {
        match attempt(path, last, &mut see) {
            Err(Stop::Swapped) => {}
            Err(Stop::Error(error)) => return Err(error),
            Ok(trace) => return Ok(trace),
        }
    }
    Err(os(Errno::LOOP))
}

enum Stop {
    Error(FsError),
    /// A directory that was one is a link now.
    Swapped,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Error(os(errno))
    }
}

impl From<FsError> for Stop {
    fn from(error: FsError) -> Self {
        Self::Error(error)
    }
}

fn attempt(path: &Path, last: Last, see: &mut impl FnMut(Step<'_>) -> Result<(), FsError>) -> Result<Trace, Stop> {
    let mut walk = Walk { todo: Vec::new(), real: PathBuf::from("/"), here: root()?, is_directory: true, links: 0, floor: 0 };
    walk.push(path.as_os_str().as_bytes());
    while let Some(name) = walk.todo.pop() {
        if name == "." || name == ".." {
            if !walk.is_directory {
                return Ok(walk.missing(walk.real.clone(), true));
            }
            if name == ".." {
                walk.up()?;
            }
            continue;
        }
        let candidate = walk.real.join(&name);
        see(Step::Name(&candidate))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat(&walk.here, &name, flags, Mode::empty()) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(walk.missing(candidate, false)),
            Err(Errno::NOTDIR) => return Ok(walk.missing(candidate, true)),
            Err(errno) => return Err(errno.into()),
        };
        see(Step::Found(&candidate, &found))?;
        let is_last = walk.todo.is_empty();
        let kind = FileType::from_raw_mode(fstat(&found)?.st_mode);
        if kind == FileType::Symlink && !(is_last && last == Last::Keep) {
            if let Some(spelling) = walk.spelling(&candidate) {
                see(Step::Spelling(&spelling))?;
            }
            walk.enter_link(&found)?;
        } else {
            walk.real = candidate;
            walk.here = found;
            walk.is_directory = kind == FileType::Directory;
        }
    }
    Ok(Trace { real: walk.real, ending: Ending::Exists, dangling: false })
}

struct Walk {
    /// Names still to be looked up, the next one last.
    todo: Vec<OsString>,
    real: PathBuf,
    here: OwnedFd,
    is_directory: bool,
    links: usize,
    /// Names in `todo` that the path itself named; what lies above them came from a link.
    floor: usize,
}

impl Walk {
    fn push(&mut self, path: &[u8]) {
        // What ends in a slash or a dot must be a directory, which the dot says.
        if path.len() > 1 && path.ends_with(b"/") {
            self.todo.push(OsString::from("."));
        }
        let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        self.todo.extend(names.rev().map(|name| OsStr::from_bytes(name).to_owned()));
    }

    fn up(&mut self) -> Result<(), Stop> {
        // `..` of a link-free path is what the string says; the descriptor's own `..` may have moved elsewhere.
        self.real.pop();
        self.here = match open_exact(&self.real, OFlags::PATH | OFlags::DIRECTORY) {
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => return Err(Stop::Swapped),
            other => other?,
        };
        Ok(())
    }

    /// A link and the names still to be looked up behind it; none if they go back up, for then it depends on the link which
    /// path that is.
    fn spelling(&self, link: &Path) -> Option<PathBuf> {
        let mut spelling = link.to_owned();
        for name in self.todo.iter().rev().filter(|name| *name != ".") {
            if name == ".." {
                return None;
            }
            spelling.push(name);
        }
        Some(spelling)
    }

    fn enter_link(&mut self, link: &OwnedFd) -> Result<(), Stop> {
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        // Links of /proc lead where their text says, never by magic.
        let text = OsString::from_vec(readlinkat(link, "", Vec::new())?.into_bytes());
        if self.links == 1 || self.todo.len() < self.floor {
            self.floor = self.todo.len();
        }
        if text.as_bytes().first() == Some(&b'/') {
            self.real = PathBuf::from("/");
            self.here = root()?;
            self.is_directory = true;
        }
        self.push(text.as_bytes());
        Ok(())
    }

    fn missing(&self, mut real: PathBuf, not_directory: bool) -> Trace {
        let ending = match (not_directory, self.todo.is_empty()) {
            (true, _) => Ending::NotDirectory,
            (false, true) => Ending::Missing,
            (false, false) => Ending::NoParent,
        };
        for name in self.todo.iter().rev() {
            if name == ".." {
                real.pop();
            } else if name != "." {
                real.push(name);
            }
        }
        Trace { real, ending, dangling: self.links > 0 && self.todo.len() >= self.floor }
    }
}

fn root() -> Result<OwnedFd, Errno> {
    open_exact(Path::new("/"), OFlags::PATH | OFlags::DIRECTORY)
}

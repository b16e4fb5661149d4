//! Walking a path of a client component by component, as a process that is confined: magic links are refused by name.
//!
//! A magic link is a link of procfs that the kernel follows to an open file of a process, regardless of its text
//! (path_resolution(7), openat2(2): `RESOLVE_NO_MAGICLINKS`). Neither chdir(2) nor execve(2) takes flags of resolution, and the
//! tables forbid openat2(2) by the time a command is decoded. The protection is that no descriptor is open that such a link could
//! lead to; the walk only names the component in the error.

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstatfs, openat, readlinkat, statat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// `PROC_SUPER_MAGIC` of `linux/magic.h`.
const PROCFS: u64 = 0x9fa0;

/// Bound of the links on one way, the kernel's own.
const MAX_LINKS: usize = 40;

/// Bound of a path, the kernel's own.
const MAX_PATH: usize = 4096;

/// Why a path leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    /// This component is a magic link.
    Magic(PathBuf),
    /// The system refuses.
    System(Errno),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// Where a path leads, without rights to the content (`O_PATH`).
#[derive(Debug)]
pub(crate) struct Reached {
    /// The last place; none if it is the working directory itself.
    place: Option<OwnedFd>,
    /// The directory in which it was found, and its name there; none at a root, and after `..`.
    entry: Option<(Option<OwnedFd>, Vec<u8>)>,
}

impl Reached {
    /// The place, for fchdir(2).
    pub(crate) fn place(&self) -> BorrowedFd<'_> {
        at(self.place.as_ref())
    }

    /// Opens it for reading if it is a regular file.
    pub(crate) fn read(&self) -> Option<OwnedFd> {
        let (directory, name) = self.entry.as_ref()?;
        let (directory, name) = (at(directory.as_ref()), OsStr::from_bytes(name));
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        // To open anything else may wait, or do something.
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        openat(directory, name, flags, Mode::empty()).ok()
    }
}

fn at(directory: Option<&OwnedFd>) -> BorrowedFd<'_> {
    directory.map_or(CWD, AsFd::as_fd)
}

/// Follows a path from the working directory, or from the root, to the file that it names.
pub(crate) fn walk(path: &[u8]) -> Result<Reached, Stop> {
    match path {
        [] => return Err(Errno::NOENT.into()),
        long if long.len() >= MAX_PATH => return Err(Errno::NAMETOOLONG.into()),
        _fits => {}
    }
    let mut way = Way { place: None, entry: None, walked: PathBuf::new(), left: Vec::new() };
    way.turn_to(path)?;
    let mut links = 0;
    while let Some(name) = way.left.pop() {
        let Some(link) = way.step(name)? else { continue };
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        way.turn_to(&link)?;
    }
    Ok(Reached { place: way.place, entry: way.entry })
}

/// A walk that is not at its end.
struct Way {
    place: Option<OwnedFd>,
    entry: Option<(Option<OwnedFd>, Vec<u8>)>,
    /// The same in words.
    walked: PathBuf,
    /// The components that are left, the next one last.
    left: Vec<Vec<u8>>,
}

impl Way {
    /// Goes on with the text of a path.
    fn turn_to(&mut self, text: &[u8]) -> Result<(), Errno> {
        if text.starts_with(b"/") {
            self.place = Some(openat(CWD, "/", PLACE | OFlags::DIRECTORY, Mode::empty())?);
            self.entry = None;
            self.walked = PathBuf::from("/");
        }
        let names = text.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
        self.left.extend(names.rev().map(<[u8]>::to_vec));
        Ok(())
    }

    /// Takes one component. The text of the link, if it is one.
    fn step(&mut self, name: Vec<u8>) -> Result<Option<Vec<u8>>, Stop> {
        let next = OsStr::from_bytes(&name);
        // As a directory first: so an automount point is mounted (open(2), O_PATH), and nothing more has to be asked of it.
        let opened = match openat(at(self.place.as_ref()), next, PLACE | OFlags::DIRECTORY, Mode::empty()) {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let other = openat(at(self.place.as_ref()), next, PLACE, Mode::empty())?;
                if let Some(link) = text_of(&other, &name, &self.walked)? {
                    return Ok(Some(link));
                }
                other
            }
            opened => opened?,
        };
        self.walked.push(next);
        let before = self.place.replace(opened);
        self.entry = (name != b"..").then_some((before, name));
        Ok(None)
    }
}

/// Opens a path without rights to its content; a link itself, not its target.
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The text of a link; none if it is something else.
fn text_of(place: &OwnedFd, name: &[u8], directory: &std::path::Path) -> Result<Option<Vec<u8>>, Stop> {
    let text = match readlinkat(place, c"", Vec::new()) {
        // If it is not a link: ENOENT with an empty path, EINVAL with a name (readlink(2)).
        Err(Errno::NOENT | Errno::INVAL) => return Ok(None),
        other => other.map(|text| text.into_bytes()),
    };
    // Only procfs has magic links. Only they check their reader, so that reading the text may be refused.
    if is_of_procfs(place)? && !text.as_ref().is_ok_and(|text| is_plain(name, text)) {
        return Err(Stop::Magic(directory.join(OsStr::from_bytes(name))));
    }
    Ok(Some(text?))
}

fn is_of_procfs(place: &OwnedFd) -> Result<bool, Errno> {
    Ok(u64::try_from(fstatfs(place)?.f_type).is_ok_and(|kind| kind == PROCFS))
}

/// The links of procfs that are texts like any other, by name and text: `/proc/self`, `/proc/thread-self`, `/proc/mounts` and
/// `/proc/net` (proc(5)). Magic ones have other names, or texts with a root, a colon or other words.
fn is_plain(name: &[u8], text: &[u8]) -> bool {
    let is_number = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    let parts: Vec<&[u8]> = text.split(|byte| *byte == b'/').collect();
    match (name, parts.as_slice()) {
        (b"self", [process]) => is_number(process),
        (b"thread-self", [process, b"task", thread]) => is_number(process) && is_number(thread),
        (b"mounts", [b"self", b"mounts"]) | (b"net", [b"self", b"net"]) => true,
        _other => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn identity(place: impl AsFd) -> (u64, u64) {
        let stat = rustix::fs::fstat(place).unwrap();
        (stat.st_dev, stat.st_ino)
    }

    fn stop(path: impl AsRef<Path>) -> Stop {
        walk(path.as_ref().as_os_str().as_bytes()).map(|_| ()).unwrap_err()
    }

    #[test]
    fn a_walk_ends_where_the_kernel_does() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::write(top.join("a/file"), "").unwrap();
        symlink("../a/b/..", top.join("a/up")).unwrap();
        symlink(top.join("a"), top.join("whole")).unwrap();
        symlink("file", top.join("a/last")).unwrap();
        let paths =
            ["", "a", "a/", "./a//b/.", "a/b/../..", "a/up/file", "whole/up/b", "whole/last", "a/../../../../../../../.."];
        let below = paths.iter().map(|path| top.join(path));
        for path in below
            .chain(["/", "/proc/self", "/proc/self/task", "/proc/thread-self/fdinfo", "/dev/fd", "/bin/sh"].map(PathBuf::from))
        {
            let reached = walk(path.as_os_str().as_bytes()).unwrap();
            let opened = openat(CWD, &path, OFlags::PATH, Mode::empty()).unwrap();
            assert_eq!(identity(reached.place()), identity(&opened), "{}", path.display());
        }
        assert!(walk(top.join("whole/last").as_os_str().as_bytes()).unwrap().read().is_some());
        assert!(walk(top.join("a").as_os_str().as_bytes()).unwrap().read().is_none(), "a directory is not read");
    }

    #[test]
    fn a_walk_fails_as_the_kernel_does() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::write(top.join("file"), "").unwrap();
        symlink("loop", top.join("loop")).unwrap();
        symlink("nowhere", top.join("dangling")).unwrap();
        for path in ["missing", "file/x", "loop", "dangling", "missing/../file"] {
            let path = top.join(path);
            let errno = openat(CWD, &path, OFlags::PATH, Mode::empty()).unwrap_err();
            assert_eq!(stop(&path), Stop::System(errno), "{}", path.display());
        }
        assert_eq!(stop("x".repeat(5000)), Stop::System(Errno::NAMETOOLONG));
        assert_eq!(stop(""), Stop::System(Errno::NOENT));
    }

    #[test]
    fn magic_links_are_named_by_their_component() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let opened = fs::File::open(&top).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&opened);
        symlink(format!("/proc/self/fd/{number}"), top.join("link")).unwrap();
        let me = std::process::id();
        let (fd, task) = (format!("/proc/{me}/fd/{number}"), rustix::thread::gettid().as_raw_nonzero());
        for (path, component) in [
            (format!("/proc/self/fd/{number}"), fd.clone()),
            (format!("/proc/self/fd/{number}/x/y"), fd.clone()),
            (format!("/dev/fd/{number}"), fd.clone()),
            (top.join("link").to_str().unwrap().to_owned(), fd),
            ("/proc/self/root/etc".to_owned(), format!("/proc/{me}/root")),
            ("/proc/self/cwd".to_owned(), format!("/proc/{me}/cwd")),
            ("/proc/self/exe".to_owned(), format!("/proc/{me}/exe")),
            ("/proc/self/ns/net".to_owned(), format!("/proc/{me}/ns/net")),
            (format!("/proc/thread-self/fd/{number}"), format!("/proc/{me}/task/{task}/fd/{number}")),
            (format!("/proc/self/task/{task}/cwd"), format!("/proc/{me}/task/{task}/cwd")),
        ] {
            assert_eq!(stop(&path), Stop::Magic(component.into()), "{path}");
        }
        // The control: the kernel follows them.
        assert!(fs::metadata(format!("/proc/self/fd/{number}")).is_ok());
    }
}

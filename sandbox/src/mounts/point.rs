//! Mount points for names that do not exist.
//!
//! Nothing in the kernel denies a name that is not there: it has to exist to be mounted over, on the machine itself. So such a
//! name is an empty directory for as long as a sandbox needs it, and goes with the last one.
//!
//! What may be removed is said by [`Records`] and by nothing else: a directory of the same look that has no record stays. A sandbox
//! holds a shared lock (`flock(2)`) on its mount points, which ends with the holder however that dies, and only with the exclusive
//! one is a mount point removed, so that no sandbox's end lifts another's protection. The lock does no more than put off removals:
//! a process that holds the exclusive one keeps no sandbox from starting, whose cover is watched in any case.

use super::MountError;
use super::record::{Intent, Mark, Records};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, RawMode, ResolveFlags, Stat, chmod, flock, fstat, mkdirat, openat,
    openat2, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{geteuid, umask};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Its owner's to write, with a bit that means nothing on such a directory. It is a hint to look for a record, or to put a lock on
/// what may be another user's. Others may look, since those who share `/tmp` share its mount points.
const MODE: RawMode = 0o1755;

/// Bound of the tries to make one while another sandbox removes it.
const MAX_TRIES: u32 = 64;

/// Bound of the looks whether what was made a moment ago gets its record. Then it is young no more.
const MAX_LOOKS: u32 = 1024;

/// Longer than it takes to remove a directory.
const A_MOMENT: std::time::Duration = std::time::Duration::from_millis(1);

/// A mount point in use. It stays at least until this is dropped, if no other process held the exclusive lock when it was made.
#[derive(Debug)]
pub struct Point {
    /// Holds the shared lock.
    directory: OwnedFd,
}

impl Point {
    /// Makes the mount point, or shares the one that another sandbox made, whoever's. None if nobody of this user can make the
    /// name: the directory is not writable for it and never can be, or its file system is not for anybody.
    pub(super) fn make(path: &Path, records: &Records) -> Result<Option<Self>, MountError> {
        let fail = MountError::at("make a mount point at", path);
        let Some((parent, name)) = parent_of(path) else {
            return Ok(None);
        };
        for attempt in 0..MAX_TRIES {
            let parent = open_directory(parent).map_err(&fail)?;
            let held = match openat(&parent, name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => match make(&parent, name, note(path, records)?, records) {
                    // Of another user's directory the owner could allow it any time.
                    Err(Errno::ACCESS | Errno::PERM) if fstat(&parent).is_ok_and(|stat| stat.st_uid != geteuid().as_raw()) => {
                        return Ok(None);
                    }
                    Err(Errno::ROFS) => return Ok(None),
                    made => made.map_err(&fail)?,
                },
                Ok(directory) => hold(directory, &parent, name, records).map_err(&fail)?,
                // It cannot be locked, and what covers it is watched.
                Err(Errno::ACCESS) => match openat(&parent, name, DIRECTORY | OFlags::PATH, Mode::empty()) {
                    Ok(directory) => looks_like_one(&directory).map_err(&fail)?.then_some(Self { directory }),
                    Err(_gone) => None,
                },
                Err(errno @ (Errno::NOTDIR | Errno::LOOP)) if attempt + 1 == MAX_TRIES => return Err(fail(errno)),
                Err(Errno::NOTDIR | Errno::LOOP) => None,
                Err(errno) => return Err(fail(errno)),
            };
            if let Some(point) = held {
                return Ok(Some(point));
            }
            // Gone again, or something else by now.
            if attempt > 0 {
                std::thread::sleep(A_MOMENT);
            }
        }
        Err(MountError::refused(format!("hold `{}`: others make and remove it all the time; start again", path.display())))
    }

    /// The directory itself.
    pub(super) fn directory(&self) -> &OwnedFd {
        &self.directory
    }
}

impl AsFd for Point {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// What is not noted could never be removed.
fn note(path: &Path, records: &Records) -> Result<Intent, MountError> {
    records.intend(path).map_err(MountError::at("note that a mount point will be made at", path))
}

/// Makes a mount point with its record, and holds it. None if it was removed or replaced meanwhile.
fn make(parent: &OwnedFd, name: &OsStr, intent: Intent, records: &Records) -> Result<Option<Point>, Errno> {
    // Exact from the start: a mode that is set afterwards, by name, may be set on something else.
    let mask = umask(Mode::empty());
    let made = mkdirat(parent, name, Mode::from_raw_mode(MODE));
    umask(mask);
    let held = made.and_then(|()| {
        let directory = match openat(parent, name, DIRECTORY, Mode::empty()) {
            Err(Errno::ACCESS) => open_narrowed(parent, name, &intent)?,
            opened => opened?,
        };
        let mark = Mark::of(&directory)?;
        // What was moved there meanwhile is older: it gets no record, and is looked at anew as what it is.
        if !intent.made(&directory, mark)? {
            return Ok(None);
        }
        // A process with capabilities opens it although a default ACL took the permissions.
        if !looks_like_one(&directory)? {
            set_mode(&directory, MODE)?;
        }
        lock_shared(&directory, records)?;
        if !is_at(&directory, parent, name)? {
            return Ok(None);
        }
        records.keep(&intent, mark)?;
        Ok(Some(Point { directory }))
    });
    match held {
        Ok(Some(point)) => Ok(Some(point)),
        Ok(None) => {
            records.drop_intent(&intent);
            Ok(None)
        }
        Err(errno) => {
            records.drop_intent(&intent);
            match errno {
                // Another made it first, or it was removed, or taken for what a dead process left.
                Errno::EXIST | Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Ok(None),
                errno => Err(errno),
            }
        }
    }
}

/// Opens a new mount point from which a default ACL of its parent took the owner's permissions (acl(5)). A confined process may set such
/// an ACL on its workspace.
fn open_narrowed(parent: &OwnedFd, name: &OsStr, intent: &Intent) -> Result<OwnedFd, Errno> {
    let made = openat(parent, name, DIRECTORY | OFlags::PATH, Mode::empty())?;
    if !intent.is_own_and_newer(&made, Mark::of(&made)?)? {
        return Err(Errno::NOENT);
    }
    set_mode(&made, MODE)?;
    openat(parent, name, DIRECTORY, Mode::empty())
}

/// Sets the mode of what a descriptor stands for, also one opened by `O_PATH`, which fchmod(2) refuses.
fn set_mode(place: &OwnedFd, mode: RawMode) -> Result<(), Errno> {
    chmod(format!("/proc/self/fd/{}", place.as_raw_fd()), Mode::from_raw_mode(mode))
}

/// Shares what stands there, if it looks like a mount point, so that its owner leaves it as long as it is used here. Whether it may be
/// removed is another question.
fn hold(directory: OwnedFd, parent: &OwnedFd, name: &OsStr, records: &Records) -> Result<Option<Point>, Errno> {
    lock_shared(&directory, records)?;
    // Removed between opening and locking, the lock would protect nothing.
    let is_held = match is_at(&directory, parent, name) {
        Err(Errno::NOENT) => false,
        other => other? && (looks_like_one(&directory)? || records.has(Mark::of(&directory)?)),
    };
    Ok(is_held.then_some(Point { directory }))
}

/// The remover holds the exclusive lock for the moment of a removal, which is waited for. A process that means to disturb holds it for
/// as long as it likes, which is not: what the lock would guard, the cover guards.
fn lock_shared(directory: &OwnedFd, records: &Records) -> Result<(), Errno> {
    loop {
        match flock(directory, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) if records.has_patience() => std::thread::sleep(A_MOMENT),
            Ok(()) | Err(Errno::WOULDBLOCK | Errno::OPNOTSUPP | Errno::NOLCK | Errno::BADF | Errno::INVAL) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}

fn looks_like_one(directory: &OwnedFd) -> Result<bool, Errno> {
    Ok(has_mode(&fstat(directory)?))
}

fn has_mode(stat: &Stat) -> bool {
    /// A directory may pass on its group to what is made in it.
    const INHERITED: RawMode = 0o2000;
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_mode & 0o7777 & !INHERITED == MODE
}

/// Whether a directory may be a mount point of a sandbox, whoever's: it is empty and of that mode. That says no more than that a
/// lock should be put on it. One that is gone by now is one too, and is made again.
pub(super) fn may_be_one(place: &OwnedFd, path: &Path) -> bool {
    fstat(place).is_ok_and(|stat| has_mode(&stat)) && is_empty(path)
}

/// Whether a directory is a mount point that a server of this user made, by its record. One that was made a moment ago may not have it yet.
pub(super) fn is_ours(place: &OwnedFd, path: &Path, records: Option<&Records>) -> bool {
    let Some(records) = records else { return false };
    // A default ACL may have taken permissions away, and never this bit: every other directory costs one call.
    let may_be = |stat: &Stat| stat.st_mode & Mode::SVTX.bits() != 0 && stat.st_uid == geteuid().as_raw();
    if !fstat(place).is_ok_and(|stat| may_be(&stat)) {
        return false;
    }
    let Ok(mark) = Mark::of(place) else { return false };
    for _look in 0..MAX_LOOKS {
        if records.has(mark) {
            return is_empty(path);
        }
        if !mark.is_young() || !may_be_one(place, path) {
            return false;
        }
        std::thread::sleep(A_MOMENT);
    }
    false
}

/// Whether nobody made anything in it. One that is gone by now is empty too: its last sandbox has just ended, and what was opened of
/// it can be covered no more.
fn is_empty(path: &Path) -> bool {
    match open_directory(path).and_then(|directory| has_nothing(&directory)) {
        Ok(is_empty) => is_empty,
        Err(errno) => errno == Errno::NOENT,
    }
}

/// Whether an open directory is empty.
pub(super) fn has_nothing(directory: &OwnedFd) -> Result<bool, Errno> {
    let mut entries = Dir::read_from(directory)?;
    Ok(entries.all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b".."))))
}

/// A mount point that was removed, and whose record is left. To close the directory takes the file system as long as to remove it.
#[derive(Debug)]
pub struct Removed {
    _directory: OwnedFd,
    mark: Mark,
}

impl Removed {
    /// Forgets the record, whenever the caller likes: a record of which nothing is left harms nothing.
    pub fn forget(self, records: &Records) {
        records.forget(self.mark);
    }
}

/// Removes a mount point of this user's servers that no sandbox uses any more. Anything else that stands there stays.
#[must_use]
pub fn take(path: &Path, records: &Records) -> Option<Removed> {
    match try_remove(path, records) {
        Ok(removed) => Some(removed),
        // Nothing stands there, or something else: what is recorded of the path is over.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::PERM) => {
            records.forget_all_but(path, || open_directory(path).and_then(|directory| Mark::of(&directory)).ok());
            None
        }
        // In use, or out of reach for now: it goes with its next use, or when the next server of this user starts.
        Err(_later) => None,
    }
}

/// The same with its record.
pub(super) fn remove(path: &Path, records: &Records) {
    if let Some(removed) = take(path, records) {
        removed.forget(records);
    }
}

/// Removes what dead processes of this user's servers left behind, or what another user's process kept in use.
pub fn remove_left(records: &Records) {
    for path in records.left() {
        remove(&path, records);
    }
}

fn try_remove(path: &Path, records: &Records) -> Result<Removed, Errno> {
    let parent = parent_of(path).ok_or(Errno::INVAL)?.0;
    match try_remove_as_it_is(path, records) {
        // A confined process may have closed its own workspace; it belongs to this user, who may open it.
        Err(Errno::ACCESS) => {
            let place = openat2(CWD, parent, DIRECTORY | OFlags::PATH, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
            let stat = fstat(&place)?;
            if stat.st_uid != geteuid().as_raw() || stat.st_mode & Mode::RWXU.bits() == Mode::RWXU.bits() {
                return Err(Errno::ACCESS);
            }
            let mode = stat.st_mode & 0o7777;
            set_mode(&place, mode | Mode::RWXU.bits())?;
            let removed = try_remove_as_it_is(path, records);
            set_mode(&place, mode)?;
            removed
        }
        other => other,
    }
}

fn try_remove_as_it_is(path: &Path, records: &Records) -> Result<Removed, Errno> {
    let (parent, name) = parent_of(path).ok_or(Errno::INVAL)?;
    let parent = open_directory(parent)?;
    let directory = openat(&parent, name, DIRECTORY, Mode::empty())?;
    let mark = Mark::of(&directory)?;
    if !records.has(mark) && !records.adopt(&directory, path)? {
        return Err(Errno::PERM);
    }
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    if !is_at(&directory, &parent, name)? {
        return Err(Errno::NOENT);
    }
    match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
        Ok(()) => {}
        Err(Errno::NOTEMPTY | Errno::EXIST) => {
            // It is in use as what it looks like.
            records.forget(mark);
            return Err(Errno::NOTEMPTY);
        }
        Err(errno) => return Err(errno),
    }
    // Whoever waits for it need not wait until it is closed.
    let _closed_soon = flock(&directory, FlockOperation::Unlock);
    Ok(Removed { _directory: directory, mark })
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn parent_of(path: &Path) -> Option<(&Path, &OsStr)> {
    Some((path.parent()?, path.file_name()?))
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

fn is_at(directory: &OwnedFd, parent: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    let (opened, found) = (fstat(directory.as_fd())?, statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?);
    Ok((opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino))
}

#[cfg(test)]
mod tests;

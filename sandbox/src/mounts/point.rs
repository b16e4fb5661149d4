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
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, RawMode, ResolveFlags, Stat, flock, fstat, mkdirat, openat,
    openat2, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{geteuid, umask};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
        let directory = openat(parent, name, DIRECTORY, Mode::empty())?;
        let mark = Mark::of(&directory)?;
        // What was moved there meanwhile is older: it gets no record, and is looked at anew as what it is.
        if !intent.made(&directory, mark)? {
            return Ok(None);
        }
        lock_shared(&directory)?;
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

/// Shares what stands there, if it looks like a mount point, so that its owner leaves it as long as it is used here. Whether it may be
/// removed is another question.
fn hold(directory: OwnedFd, parent: &OwnedFd, name: &OsStr, records: &Records) -> Result<Option<Point>, Errno> {
    lock_shared(&directory)?;
    // Removed between opening and locking, the lock would protect nothing.
    let is_held = match is_at(&directory, parent, name) {
        Err(Errno::NOENT) => false,
        other => other? && (looks_like_one(&directory)? || records.has(Mark::of(&directory)?)),
    };
    Ok(is_held.then_some(Point { directory }))
}

/// Whoever removes one holds the exclusive lock for a moment, and so does a process that means to disturb, for as long as it likes.
fn lock_shared(directory: &OwnedFd) -> Result<(), Errno> {
    match flock(directory, FlockOperation::NonBlockingLockShared) {
        // What is removed now is seen to be gone next; what is not, its cover guards.
        Ok(()) | Err(Errno::WOULDBLOCK | Errno::OPNOTSUPP | Errno::NOLCK | Errno::BADF | Errno::INVAL) => Ok(()),
        Err(errno) => Err(errno),
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

/// Removes a mount point of this user's servers that no sandbox uses any more. Anything else that stands there stays. Answers the
/// directory that was removed: to close it takes the file system as long again, whenever the caller likes.
#[expect(clippy::must_use_candidate, reason = "who has no hurry drops it")]
pub fn remove(path: &Path, records: &Records) -> Option<OwnedFd> {
    match try_remove(path, records) {
        Ok(directory) => Some(directory),
        // Nothing stands there, or something else: what is recorded of the path is over.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::PERM) => {
            records.forget_all_but(path, || open_directory(path).and_then(|directory| Mark::of(&directory)).ok());
            None
        }
        // In use, or out of reach for now: it goes with its next use, or when the next server of this user starts.
        Err(_later) => None,
    }
}

/// Removes what dead processes of this user's servers left behind, or what another user's process kept in use.
pub fn remove_left(records: &Records) {
    for path in records.left() {
        let _removed = remove(&path, records);
    }
}

fn try_remove(path: &Path, records: &Records) -> Result<OwnedFd, Errno> {
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
    records.forget(mark);
    // Whoever waits for it need not wait until it is closed.
    let _closed_soon = flock(&directory, FlockOperation::Unlock);
    Ok(directory)
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
mod tests {
    use super::super::record::RecordsAt;
    use super::*;
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    use std::path::PathBuf;

    /// A directory to work in, and records beside it.
    fn place() -> (tempfile::TempDir, PathBuf, Records) {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir(top.join("ws")).unwrap();
        fs::DirBuilder::new().mode(0o700).create(top.join("records")).unwrap();
        let records = RecordsAt::new(&top.join("records")).open().unwrap();
        (directory, top.join("ws"), records)
    }

    fn recorded(workspace: &Path) -> usize {
        fs::read_dir(workspace.with_file_name("records")).unwrap().count()
    }

    #[test]
    fn the_last_user_removes_it() {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        let make = || Point::make(&path, &records).unwrap().unwrap();
        let (first, second) = (make(), make());
        remove(&path, &records);
        assert!(path.is_dir(), "in use twice");
        drop(first);
        remove(&path, &records);
        assert!(path.is_dir(), "in use");
        drop(second);
        remove(&path, &records);
        assert!(!path.exists());
        assert_eq!(recorded(&top), 0);
    }

    #[test]
    fn one_that_is_removed_while_it_is_looked_at_is_made_again() {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        let point = Point::make(&path, &records).unwrap().unwrap();
        assert!(is_ours(point.directory(), &path, Some(&records)) && may_be_one(point.directory(), &path));
        fs::write(path.join("file"), "").unwrap();
        assert!(!is_ours(point.directory(), &path, Some(&records)), "control: somebody uses it as a directory");
        fs::remove_file(path.join("file")).unwrap();
        let place = open_directory(&path).unwrap();
        drop(point);
        remove(&path, &records);
        assert!(may_be_one(&place, &path) && !path.exists(), "its last user ended between two looks");
    }

    #[test]
    fn what_is_not_ours_or_not_empty_stays() {
        let (_directory, top, records) = place();
        for mode in [0o755, MODE] {
            let plain = top.join(format!("{mode:o}"));
            fs::create_dir(&plain).unwrap();
            fs::set_permissions(&plain, fs::Permissions::from_mode(mode)).unwrap();
            remove(&plain, &records);
            assert!(plain.is_dir());
        }
        drop(Point::make(&top.join("used"), &records).unwrap());
        fs::write(top.join("used/file"), "").unwrap();
        remove(&top.join("used"), &records);
        assert!(top.join("used/file").exists());
        assert_eq!(recorded(&top), 0, "in use as a directory, it is nobody's mount point any more");
    }

    #[test]
    fn a_directory_of_the_same_mode_is_shared_and_stays() {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(MODE)).unwrap();
        let before = fs::metadata(&path).unwrap();
        let point = Point::make(&path, &records).unwrap().unwrap();
        // It has a lock, so that the one whose it is leaves it.
        let other = open_directory(&path).unwrap();
        assert_eq!(flock(&other, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
        drop(point);
        remove(&path, &records);
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino());
    }

    #[test]
    fn a_stranger_with_the_exclusive_lock_only_puts_off_the_removal() {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        drop(Point::make(&path, &records).unwrap().unwrap());
        let stranger = open_directory(&path).unwrap();
        flock(&stranger, FlockOperation::NonBlockingLockExclusive).unwrap();
        drop(Point::make(&path, &records).unwrap().expect("it can be used all the same"));
        remove(&path, &records);
        assert!(path.is_dir() && recorded(&top) == 1, "left for the next use, or the next server");
        drop(stranger);
        remove_left(&records);
        assert!(!path.exists() && recorded(&top) == 0);
    }

    #[test]
    fn one_that_was_left_behind_is_taken_over() {
        let (_directory, top, records) = place();
        let path = top.join(".codex");
        drop(Point::make(&path, &records).unwrap());
        assert!(path.is_dir(), "left behind");
        drop(Point::make(&path, &records).unwrap().unwrap());
        remove(&path, &records);
        assert!(!path.exists());
    }

    #[test]
    fn what_was_replaced_stays_and_its_record_goes() {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        drop(Point::make(&path, &records).unwrap().unwrap());
        // Renamed, so that the inode is not used again.
        fs::rename(&path, top.join("moved")).unwrap();
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(MODE)).unwrap();
        remove(&path, &records);
        assert!(path.is_dir() && top.join("moved").is_dir());
        assert_eq!(recorded(&top), 0);
    }

    #[test]
    fn a_crash_between_the_intent_and_the_record_leaves_nothing() {
        let (_directory, top, records) = place();
        let (made, older) = (top.join("made"), top.join("older"));
        fs::create_dir(&older).unwrap();
        fs::set_permissions(&older, fs::Permissions::from_mode(MODE)).unwrap();
        // Until the clock that stamps files has gone on.
        let born = Mark::of(&open_directory(&older).unwrap()).unwrap().born.unwrap();
        let intend = |path: &Path| records.intend(path).unwrap();
        let mut intent = intend(&older);
        while intent.time <= born {
            records.drop_intent(&intent);
            intent = intend(&older);
        }
        intend(&made);
        fs::create_dir(&made).unwrap();
        remove_left(&records);
        assert!(!made.exists(), "made after the intent");
        assert!(older.is_dir(), "it was there before the intent");
    }

    #[test]
    fn what_is_moved_there_meanwhile_gets_no_record() {
        let (_directory, top, records) = place();
        let (path, own) = (top.join(".git"), top.join("own"));
        fs::create_dir(&own).unwrap();
        let born = Mark::of(&open_directory(&own).unwrap()).unwrap().born.unwrap();
        let mut intent = records.intend(&path).unwrap();
        while intent.time <= born {
            records.drop_intent(&intent);
            intent = records.intend(&path).unwrap();
        }
        fs::rename(&own, &path).unwrap();
        let directory = open_directory(&path).unwrap();
        assert!(!intent.made(&directory, Mark::of(&directory).unwrap()).unwrap());
        fs::remove_dir(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let directory = open_directory(&path).unwrap();
        assert!(intent.made(&directory, Mark::of(&directory).unwrap()).unwrap(), "control: made after the intent");
    }
}

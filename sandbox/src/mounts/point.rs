//! Mount points for names that do not exist.
//!
//! Nothing in the kernel denies a name that is not there: it has to exist to be mounted over, on the machine itself. So such a
//! name is an empty directory for as long as a sandbox needs it, and goes with the last one.
//!
//! Whoever uses a mount point holds a shared lock (`flock(2)`) on it, which ends with the holder however that dies. It is
//! removed by whoever of its owners gets the exclusive one, so that no sandbox's end lifts another's protection; and it is
//! recognised by its mode, so that one that was left behind is taken over by the next sandbox there, and goes with that.

use super::MountError;
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RawMode, ResolveFlags, Stat, flock, fstat, mkdirat, openat2, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Its owner's to write, with a bit that means nothing on such a directory: nobody makes one by habit. Others may look, since
/// those who share `/tmp` share its mount points.
const MARK: RawMode = 0o1755;

/// Bound of the tries to make one while another sandbox removes it.
const MAX_TRIES: u32 = 64;

/// Longer than it takes to remove a directory.
const A_MOMENT: std::time::Duration = std::time::Duration::from_millis(1);

/// A mount point in use. It stays at least until this is dropped.
#[derive(Debug)]
pub struct Point {
    path: PathBuf,
    /// Holds the shared lock.
    directory: OwnedFd,
}

impl Point {
    /// Makes the mount point, or shares the one that another sandbox made, whoever's. None if nobody of this user can make the
    /// name: the directory is not writable for it and never can be, or its file system is not for anybody.
    pub(super) fn make(path: &Path) -> Result<Option<Self>, MountError> {
        let fail = MountError::at("make a mount point at", path);
        let Some((parent, name)) = parent_of(path) else {
            return Ok(None);
        };
        for attempt in 0..MAX_TRIES {
            let parent = open_directory(parent).map_err(&fail)?;
            let made = mkdirat(&parent, name, Mode::from_raw_mode(MARK));
            let is_made = made.is_ok();
            match made {
                // Whatever the mask of this process took away.
                Ok(()) => drop(rustix::fs::chmodat(&parent, name, Mode::from_raw_mode(MARK), AtFlags::empty())),
                Err(Errno::EXIST) => {}
                Err(Errno::ROFS) => return Ok(None),
                // Its owner could allow it any time.
                Err(Errno::ACCESS | Errno::PERM) if fstat(&parent).is_ok_and(|stat| stat.st_uid != geteuid().as_raw()) => {
                    return Ok(None);
                }
                Err(errno) => return Err(fail(errno)),
            }
            match Self::hold(path) {
                Ok(Some(point)) => return Ok(Some(point)),
                // Gone again.
                Ok(None) | Err(Errno::NOENT) => {}
                // Its maker is about to mark it, or it is no mount point at all.
                Err(Errno::OPNOTSUPP) if !is_made && attempt + 1 < MAX_TRIES => std::thread::sleep(A_MOMENT),
                Err(Errno::OPNOTSUPP) => {
                    // One of ours that nobody would know again is of no use to anybody.
                    if is_made {
                        let _not_empty = unlinkat(&parent, name, AtFlags::REMOVEDIR);
                    }
                    return Err(MountError::refused(format!(
                        "hold `{}`: its file system keeps no modes, or a directory was made there just now; start again, or let an \
                         entry of its own make it writable",
                        path.display()
                    )));
                }
                Err(Errno::WOULDBLOCK) => {
                    let text = format!("hold `{}`: somebody keeps a lock (flock) on it; end that process", path.display());
                    return Err(MountError::refused(text));
                }
                Err(errno) => return Err(fail(errno)),
            }
        }
        Err(MountError::refused(format!("hold `{}`: others make and remove it all the time; start again", path.display())))
    }

    /// Shares a mount point that exists; none if what stands there is another directory by now.
    fn hold(path: &Path) -> Result<Option<Self>, Errno> {
        let directory = open_directory(path)?;
        // Somebody who removes one holds it for a moment. Without the lock it could be removed while it is used.
        let mut attempt = 0;
        while let Err(errno) = flock(&directory, FlockOperation::NonBlockingLockShared) {
            if errno != Errno::WOULDBLOCK || attempt == MAX_TRIES {
                return Err(errno);
            }
            std::thread::sleep(A_MOMENT * attempt);
            attempt += 1;
        }
        // Removed between opening and locking, the lock would protect nothing.
        if !is_at(&directory, path)? {
            return Ok(None);
        }
        if is_mount_point(&fstat(&directory)?) {
            return Ok(Some(Self { path: path.to_owned(), directory }));
        }
        Err(Errno::OPNOTSUPP)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
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

/// Whether a directory is such a mount point, whoever's, by its mark.
#[must_use]
pub fn is_mount_point(stat: &Stat) -> bool {
    /// A directory may pass on its group to what is made in it.
    const INHERITED: RawMode = 0o2000;
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_mode & 0o7777 & !INHERITED == MARK
}

/// Whether it is one still: nobody made anything in it. One that is gone by now is one too, and is made again: its last sandbox has
/// just ended, and what was opened of it can be covered no more.
pub(super) fn is_empty(path: &Path) -> bool {
    match open_directory(path).and_then(rustix::fs::Dir::new) {
        Ok(entries) => entries.flatten().all(|entry| matches!(entry.file_name().to_bytes(), b"." | b"..")),
        Err(errno) => errno == Errno::NOENT,
    }
}

/// Removes a mount point that no sandbox uses any more. Anything else that stands there by now stays. Answers the directory that was
/// removed: to close it takes the file system as long again, whenever the caller likes.
#[expect(clippy::must_use_candidate, reason = "who has no hurry drops it")]
pub fn remove(path: &Path) -> Option<OwnedFd> {
    // Every failure means that it is somebody else's, in use, or not empty; whoever uses it next removes it.
    try_remove(path).ok()
}

fn try_remove(path: &Path) -> Result<OwnedFd, Errno> {
    let (parent, name) = parent_of(path).ok_or(Errno::INVAL)?;
    let parent = open_directory(parent)?;
    let directory = open_directory(path)?;
    let stat = fstat(&directory)?;
    if !is_mount_point(&stat) || stat.st_uid != geteuid().as_raw() {
        return Err(Errno::PERM);
    }
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    if !is_at(&directory, path)? {
        return Err(Errno::NOENT);
    }
    unlinkat(&parent, name, AtFlags::REMOVEDIR)?;
    // Whoever waits for it need not wait until it is closed.
    flock(&directory, FlockOperation::Unlock)?;
    Ok(directory)
}

fn parent_of(path: &Path) -> Option<(&Path, &OsStr)> {
    Some((path.parent()?, path.file_name()?))
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

fn is_at(directory: &OwnedFd, path: &Path) -> Result<bool, Errno> {
    let (opened, found) = (fstat(directory.as_fd())?, statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?);
    Ok((opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_last_user_removes_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join(".git");
        let (first, second) = (Point::make(&path).unwrap().unwrap(), Point::make(&path).unwrap().unwrap());
        remove(&path);
        assert!(path.is_dir(), "in use twice");
        drop(first);
        remove(&path);
        assert!(path.is_dir(), "in use");
        drop(second);
        remove(&path);
        assert!(!path.exists());
    }

    #[test]
    fn one_that_is_removed_while_it_is_looked_at_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join(".git");
        let point = Point::make(&path).unwrap().unwrap();
        assert!(is_empty(&path));
        fs::write(path.join("file"), "").unwrap();
        assert!(!is_empty(&path), "control: somebody uses it as a directory");
        fs::remove_file(path.join("file")).unwrap();
        drop(point);
        remove(&path);
        assert!(is_empty(&path) && !path.exists(), "its last user ended between two looks");
    }

    #[test]
    fn what_is_not_ours_or_not_empty_stays() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir(top.join("plain")).unwrap();
        remove(&top.join("plain"));
        assert!(top.join("plain").is_dir());
        drop(Point::make(&top.join("used")).unwrap());
        fs::write(top.join("used/file"), "").unwrap();
        remove(&top.join("used"));
        assert!(top.join("used/file").exists());
    }

    #[test]
    fn one_that_was_left_behind_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join(".codex");
        drop(Point::make(&path).unwrap());
        assert!(path.is_dir(), "left behind");
        drop(Point::make(&path).unwrap().unwrap());
        remove(&path);
        assert!(!path.exists());
    }
}

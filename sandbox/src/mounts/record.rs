//! Records of the mount points that servers of this user made on the machine: what has one may be removed, and nothing else.
//!
//! A record is a symbolic link in a private directory of the server's user. Its name is the identity of the mount point (device,
//! inode, birth time), and it leads to `HERE:PATH`, where HERE names the boot and the mount namespace, so that one system call makes it, or finds it, and none is ever half
//! written. Before a mount point is made there is an **intent**, a link named by the time; as soon as the identity is known that is
//! renamed. What an intent names and is an empty directory of this user that was born later is therefore ours too, whatever crashed
//! in between.

use super::MountError;
use super::tree::Tree;
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, StatxFlags, fstat, fstatfs, openat, openat2, readlinkat, renameat, statat,
    statx, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes of the digest that names a boot and a mount namespace.
const HERE: usize = 6;

/// Begins the name of an intent.
const INTENT: &str = "new-";

/// The name of the file for locks, which is no record: those are links.
const LOCKS: &str = "uids";

/// Bound of the entries that one look through the directory takes in.
const MOST: usize = 1 << 16;

/// Bound of the intents of one instant.
const MOST_AT_ONCE: u32 = 1 << 12;

/// So long after an intent its directory is made, or never.
const ABOUT_TO: i128 = 10_000_000_000;

/// A record from another machine, boot or container, of which the path leads nowhere here, is kept for a week.
const ELSEWHERE: i128 = 7 * 24 * 3600 * 1_000_000_000;

/// So often a lock is waited for, a millisecond each, in one sandbox.
const PATIENCE: u32 = 64;

/// How far the clock of a file server may be behind.
const SKEW: i128 = 3600 * 1_000_000_000;

/// Where the records are, and what this process would write into them of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordsAt {
    directory: Vec<u8>,
    here: String,
}

/// The records of this user's servers.
#[derive(Debug)]
pub struct Records {
    directory: OwnedFd,
    here: String,
    /// How often more a lock that another process holds is waited for.
    patience: Cell<u32>,
}

/// Which directory it is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mark {
    device: (u32, u32),
    inode: u64,
    /// In nanoseconds; none where the file system does not tell.
    pub(super) born: Option<i128>,
}

/// What is about to be made.
#[derive(Debug)]
pub(super) struct Intent {
    name: String,
    /// In nanoseconds, by the clock that stamps files.
    pub(super) time: i128,
}

impl RecordsAt {
    /// The records in a directory, as a process outside every sandbox names them. The path must be real.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::metadata("/proc/self/ns/mnt").map_or(0, |stat| stat.ino());
        // A digest, since ext4 keeps a link of up to 59 bytes in its inode and allocates a block for a longer one.
        let digest = Sha256::digest(format!("{boot}-{namespace}"));
        let here = digest.iter().take(HERE).map(|byte| format!("{byte:02x}")).collect();
        Self { directory: directory.as_os_str().as_bytes().to_vec(), here }
    }

    /// Opens them.
    ///
    /// # Errors
    /// `EPERM`: the directory is not this user's alone. Otherwise the system's.
    pub fn open(&self) -> Result<Records, Errno> {
        let path = PathBuf::from(OsString::from_vec(self.directory.clone()));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat2(CWD, &path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
        let stat = fstat(&directory)?;
        if stat.st_uid != geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
            return Err(Errno::PERM);
        }
        Ok(Records { directory, here: self.here.clone(), patience: Cell::new(PATIENCE) })
    }
}

impl Mark {
    /// That of an open directory.
    pub(super) fn of(directory: &OwnedFd) -> Result<Self, Errno> {
        let stat = statx(directory, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME)?;
        let born = i128::from(stat.stx_btime.tv_sec) * 1_000_000_000 + i128::from(stat.stx_btime.tv_nsec);
        let born = (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(born);
        Ok(Self { device: (stat.stx_dev_major, stat.stx_dev_minor), inode: stat.stx_ino, born })
    }

    fn name(self) -> String {
        let Self { device: (major, minor), inode, born } = self;
        format!("{major:x}.{minor:x}-{inode:x}-{}", born.map_or_else(|| "none".to_owned(), |born| format!("{born:x}")))
    }

    /// Whether it was born a moment ago, so that its maker may be about to record it.
    pub(super) fn is_young(self) -> bool {
        self.born.is_some_and(|born| now() - born < 1_000_000_000)
    }
}

impl Records {
    /// The same in a mount of its own, which stays writable when the machine's tree is locked.
    pub(super) fn detached(&self) -> Result<Self, MountError> {
        let tree = Tree::clone_of(self.directory.as_fd(), Path::new("the records of mount points"))?;
        Ok(Self { directory: tree.into_descriptor(), here: self.here.clone(), patience: self.patience.clone() })
    }

    /// The directory itself.
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.directory
    }

    /// The file on whose bytes servers lock what each of them uses of what they share.
    ///
    /// # Errors
    /// The system's.
    pub fn locks(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(&self.directory, LOCKS, flags, Mode::RUSR | Mode::WUSR)
    }

    /// Whether a lock that another process holds is to be waited for once more. Bounded for all mount points of a sandbox together, so
    /// that a process that keeps such locks delays a start by no more than that.
    pub(super) fn has_patience(&self) -> bool {
        let left = self.patience.get();
        self.patience.set(left.saturating_sub(1));
        left > 0
    }

    /// Says that a mount point will be made at a path.
    pub(super) fn intend(&self, path: &Path) -> Result<Intent, Errno> {
        let time = now();
        let target = [self.here.as_bytes(), b":", path.as_os_str().as_bytes()].concat();
        for nth in 0..MOST_AT_ONCE {
            let name = format!("{INTENT}{time:x}-{nth:x}");
            match symlinkat(&target[..], &self.directory, &name) {
                Err(Errno::EXIST) => {}
                made => return made.map(|()| Intent { name, time }),
            }
        }
        Err(Errno::EXIST)
    }

    /// Makes a record of an intent. `NOENT`: another process took the intent for that of a dead one, and may have removed what was
    /// made.
    pub(super) fn keep(&self, intent: &Intent, mark: Mark) -> Result<(), Errno> {
        renameat(&self.directory, &intent.name, &self.directory, mark.name())
    }

    pub(super) fn drop_intent(&self, intent: &Intent) {
        let _gone_already = unlinkat(&self.directory, &intent.name, AtFlags::empty());
    }

    pub(super) fn forget(&self, mark: Mark) {
        let _gone_already = unlinkat(&self.directory, mark.name(), AtFlags::empty());
    }

    pub(super) fn has(&self, mark: Mark) -> bool {
        statat(&self.directory, mark.name(), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Whether a directory without a record is what an intent was about, of which the maker is gone or has to try again. If so the
    /// intent becomes its record.
    pub(super) fn adopt(&self, directory: &OwnedFd, path: &Path) -> Result<bool, Errno> {
        let mark = Mark::of(directory)?;
        for entry in self.entries()? {
            if let Some(intent) = entry.intent()
                && entry.path == path
                && mark.born.is_some_and(|born| born <= intent.time + ABOUT_TO)
                && intent.made(directory, mark)?
            {
                return Ok(self.keep(&intent, mark).is_ok());
            }
        }
        Ok(false)
    }

    /// The paths of mount points that may have been left behind, those of one file system together. Records and intents of which
    /// nothing is left on this machine are forgotten.
    pub(super) fn left(&self) -> Vec<PathBuf> {
        let mut left = Vec::new();
        for entry in self.entries().unwrap_or_default() {
            match statat(CWD, &entry.path, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => left.push((stat.st_dev, entry.path)),
                Err(Errno::NOENT | Errno::NOTDIR) if entry.is_over(&self.here) => {
                    let _gone_already = unlinkat(&self.directory, &entry.name, AtFlags::empty());
                }
                // It cannot be told now.
                Err(_unknown) => {}
            }
        }
        left.sort();
        left.dedup();
        left.into_iter().map(|(_, path)| path).collect()
    }

    /// Forgets what is recorded of a path but of what stands there now. That is asked after the look at the records, so that none is
    /// forgotten that is made meanwhile.
    pub(super) fn forget_all_but(&self, path: &Path, now: impl FnOnce() -> Option<Mark>) {
        let entries = self.entries().unwrap_or_default();
        let now = now().map(Mark::name);
        for entry in entries.iter().filter(|entry| entry.path == path && Some(&entry.name) != now.as_ref()) {
            if entry.is_over(&self.here) {
                let _gone_already = unlinkat(&self.directory, &entry.name, AtFlags::empty());
            }
        }
    }

    fn entries(&self) -> Result<Vec<Entry>, Errno> {
        let listed = Dir::read_from(&self.directory)?;
        let names = listed.flatten().filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).take(MOST);
        Ok(names.filter_map(|name| self.entry(name)).collect())
    }

    fn entry(&self, name: String) -> Option<Entry> {
        let target = readlinkat(&self.directory, &name, Vec::new()).ok()?.into_bytes();
        let at = target.iter().position(|byte| *byte == b':')?;
        let path = PathBuf::from(OsString::from_vec(target.get(at + 1..)?.to_vec()));
        let stat = statat(&self.directory, &name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let made = i128::from(stat.st_mtime) * 1_000_000_000;
        let of = String::from_utf8(target.get(..at)?.to_vec()).ok()?;
        path.is_absolute().then_some(Entry { name, of, path, made })
    }
}

/// A record or an intent, as it was read.
#[derive(Debug)]
struct Entry {
    name: String,
    /// What made it.
    of: String,
    path: PathBuf,
    made: i128,
}

impl Entry {
    fn intent(&self) -> Option<Intent> {
        let (time, _nth) = self.name.strip_prefix(INTENT)?.split_once('-')?;
        Some(Intent { name: self.name.clone(), time: i128::from_str_radix(time, 16).ok()? })
    }

    /// Whether it is of no use any more if its path leads nowhere.
    fn is_over(&self, here: &str) -> bool {
        let age = now() - self.made;
        if self.of == here { self.intent().is_none() || age > ABOUT_TO } else { age > ELSEWHERE }
    }
}

impl Intent {
    /// Whether a directory can be what was made of it: this user's, empty, and not older. What was moved there instead is older.
    pub(super) fn made(&self, directory: &OwnedFd, mark: Mark) -> Result<bool, Errno> {
        Ok(self.is_own_and_newer(directory, mark)? && super::point::has_nothing(directory)?)
    }

    /// The same of a directory that may not be listed, and is opened by `O_PATH`.
    pub(super) fn is_own_and_newer(&self, directory: &OwnedFd, mark: Mark) -> Result<bool, Errno> {
        let tolerance = if is_remote(directory) { SKEW } else { 0 };
        let is_newer = mark.born.is_none_or(|born| born >= self.time - tolerance);
        Ok(is_newer && fstat(directory)?.st_uid == geteuid().as_raw())
    }
}

/// Whether another machine, or a program, stamps what is made on its file system.
fn is_remote(directory: &OwnedFd) -> bool {
    /// NFS, SMB (three of them), FUSE, 9p, Ceph, AFS: `linux/magic.h`.
    const REMOTE: [u32; 8] = [0x6969, 0x517B, 0xFF53_4D42, 0xFE53_4D42, 0x6573_5546, 0x0102_1997, 0x00C3_6400, 0x5346_414F];
    fstatfs(directory.as_fd()).is_ok_and(|stat| u32::try_from(stat.f_type).is_ok_and(|kind| REMOTE.contains(&kind)))
}

/// The clock that stamps files, in nanoseconds.
fn now() -> i128 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}

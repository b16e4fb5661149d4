//! The machine's tree of mounts, in which root's files belong to the sandbox's own user.
//!
//! A sandbox of a root server has its own user id, so that it does not use root's kernel budgets. But its files are to stay root's.
//! So each mount of the machine is cloned separately with an id map: files that root owns on the disk belong to that user here, and
//! files that the user makes here are root's on the disk. All other ids stay the same. This is the first change of the mounts, so
//! that everything that is later cloned from them has the map, too.
//!
//! A FUSE file system of an ordinary user has none of root's files, and is cloned without a map. A file system of the kernel does
//! not support a map, and needs none: no files are made in it, and a sandbox does not need the parts that only root may read. If
//! another file system does not support a map, root's files there would be out of reach. Then this tree cannot be made, and the
//! sandbox has the server's user id.

use super::MountError;
use super::kernel::{self, KernelMounts};
use super::mountinfo::{self, Line};
use super::tree::{self, Tree};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Directories below which only file systems of the kernel are mounted. They are cloned as a whole.
const KERNELS: [&str; 2] = ["/proc", "/sys"];

/// A further kind beside those of [`kernel::of_kind`]: its entries are namespaces, not files.
const WITHOUT_FILES: &str = "nsfs";

/// If it is mounted read-only, it contains service credentials of systemd.
const OF_SECRETS: &str = "ramfs";

/// The reason why the tree could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unmapped {
    /// A file system does not support a map; with a description. Nothing was changed.
    Refused(String),
    /// Another step failed: the process must end.
    Failed(MountError),
}

impl From<MountError> for Unmapped {
    fn from(error: MountError) -> Self {
        Self::Failed(error)
    }
}

/// Makes the mapped tree the root of this process, for [`super::Machine::take_mapped`]. The mounts must already be private.
pub(super) fn map_machine(map: BorrowedFd<'_>) -> Result<KernelMounts, Unmapped> {
    let text = mountinfo::read()?;
    let mut mounts: Vec<(PathBuf, Line<'_>)> =
        text.split(|byte| *byte == b'\n').filter_map(Line::parse).map(|line| (line.path(), line)).collect();
    // Parents first.
    mounts.sort_by_cached_key(|(path, _)| path.components().count());
    let mut clones = Vec::new();
    let users: Vec<&Path> = mounts.iter().filter(|(_, line)| is_users_fuse(line)).map(|(path, _)| path.as_path()).collect();
    for (path, line) in &mounts {
        // Looking up a path there waits for that user's process, which may never reply.
        if users.iter().any(|above| path.starts_with(above) && path != above) {
            continue;
        }
        if KERNELS.iter().any(|kernel| path.starts_with(kernel) && path != Path::new(kernel)) {
            continue;
        }
        let is_users = is_users_fuse(line);
        let source = match seen(path, line) {
            // Only that user's processes may access it, and no process of the sandbox is one.
            Err(Unmapped::Refused(_)) if is_users => continue,
            seen => seen?,
        };
        let Some(source) = source else { continue };
        let tree = match KERNELS.iter().any(|kernel| path == Path::new(kernel)) {
            true => Tree::clone_of(source.as_fd(), path)?,
            false => Tree::clone_one(source.as_fd(), path)?,
        };
        if !is_kernels(path, line)
            && !is_users
            && let Err(errno) = tree.map(map)
        {
            return Err(refused(path, line, "takes no map of ids", errno));
        }
        clones.push((path, tree));
    }
    let mut clones = clones.into_iter();
    let Some((_, ground)) = clones.next().filter(|(path, _)| path.as_path() == Path::new("/")) else {
        // The root is a directory that is not a mount point (chroot).
        return Err(Unmapped::Refused("`/` is not a mount of its own".to_owned()));
    };
    ground.become_root_with(|| {
        for (path, tree) in clones {
            match place(&ground, path) {
                Ok(target) => tree.attach(target.as_fd(), path)?,
                // The directory on the disk was renamed since the list was read. This must not prevent a start. Paths below it are
                // judged by their new names.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(errno) => return Err(MountError::at("open", path)(errno)),
            }
        }
        Ok(())
    })?;
    // The tree has the mounts of the list. Which mount is on top is judged by the files themselves.
    Ok(KernelMounts::parse(&text))
}

/// Opens the root of the mount in `line`. `None` if another mount covers it.
fn seen(path: &Path, line: &Line<'_>) -> Result<Option<OwnedFd>, Unmapped> {
    let opened = match tree::try_open(path) {
        Ok(opened) => opened,
        // It is below another mount, or its directory was removed.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        Err(errno) => return Err(MountError::at("open", path)(errno).into()),
    };
    // The server of the file system is not asked: it may never reply.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match statx(&opened, c"", flags, StatxFlags::MNT_ID) {
        Ok(stat) => Ok((Some(stat.stx_mnt_id) == line.number()).then_some(opened)),
        // A user's FUSE file system may deny access to all other users.
        Err(errno) => Err(refused(path, line, "cannot be accessed", errno)),
    }
}

fn refused(path: &Path, line: &Line<'_>, what: &str, errno: Errno) -> Unmapped {
    Unmapped::Refused(format!("`{}` ({}) {what}: {errno}", path.display(), String::from_utf8_lossy(line.kind)))
}

fn is_kernels(path: &Path, line: &Line<'_>) -> bool {
    KERNELS.iter().any(|kernel| path == Path::new(kernel))
        || kernel::of_kind(line.kind).is_some()
        || line.kind == WITHOUT_FILES.as_bytes()
        || line.kind == OF_SECRETS.as_bytes() && line.is_read_only()
}

/// Whether it is a FUSE file system of an ordinary user. Its files are that user's and not root's, so it needs no map. And an
/// ordinary user must not be able to prevent sandboxes of root from having their own user ids.
fn is_users_fuse(line: &Line<'_>) -> bool {
    (line.kind == b"fuseblk" || line.kind == b"fuse" || line.kind.starts_with(b"fuse."))
        && line.user().is_some_and(|user| user != 0)
}

/// Opens a path below the new root, while the old root is still in place.
fn place(root: &Tree, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    openat2(root.top(), path, flags, Mode::empty(), resolve)
}

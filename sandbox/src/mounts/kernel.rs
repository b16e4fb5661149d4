//! File systems of the kernel that are mounted anywhere in a view, for example below a workspace that contains a build root. At any
//! path, a write to them changes the machine, and a read shows other processes.

use super::MountError;
use super::mask::{Mask, Masks};
use super::mountinfo::{self, Line};
use super::place::{Builder, Spot, nearest};
use super::tree::{self, Lock, Tree};
use crate::compiled::Verdict;
use crate::kernel_files::MASKED_IN_PROC;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags, fstat, makedev, openat2, statx};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The treatment of such a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Treatment {
    /// It is hidden.
    Denied,
    /// It is read-only. As everywhere in a view, its devices cannot be opened.
    ReadOnly,
}

/// Treatments by the names in `/proc/filesystems`.
const KINDS: [(&str, Treatment); 25] = [
    // Memory, environment and descriptors of every process in the mount's pid namespace, and settings of the machine.
    ("proc", Treatment::Denied),
    // Internal state of the kernel, and messages of its last crash.
    ("debugfs", Treatment::Denied),
    ("tracefs", Treatment::Denied),
    ("pstore", Treatment::Denied),
    ("resctrl", Treatment::Denied),
    // Named kernel objects.
    ("bpf", Treatment::Denied),
    ("configfs", Treatment::Denied),
    ("binder", Treatment::Denied),
    ("functionfs", Treatment::Denied),
    ("mqueue", Treatment::Denied),
    ("nfsd", Treatment::Denied),
    ("rpc_pipefs", Treatment::Denied),
    ("xenfs", Treatment::Denied),
    // Settings of security modules and of the firmware.
    ("securityfs", Treatment::Denied),
    ("selinuxfs", Treatment::Denied),
    ("smackfs", Treatment::Denied),
    ("efivarfs", Treatment::Denied),
    // Each name that is looked up there is sent to a program of the machine.
    (AUTOMOUNTER, Treatment::Denied),
    // Interpreters for other binary formats, and connections of FUSE servers.
    ("binfmt_misc", Treatment::Denied),
    ("fusectl", Treatment::Denied),
    // Programs read their limits and the machine's processors there.
    ("sysfs", Treatment::ReadOnly),
    ("cgroup", Treatment::ReadOnly),
    ("cgroup2", Treatment::ReadOnly),
    // One instance for the whole machine, or terminals of other users.
    ("devtmpfs", Treatment::ReadOnly),
    ("devpts", Treatment::ReadOnly),
];

/// The kind of file system in which a program of the machine makes mounts on demand.
const AUTOMOUNTER: &str = "autofs";

/// Paths of `/sys` that are masked likewise where the sandbox has root's user id: other users can read only names there.
const ROOTS_MASKED: [&str; 2] = ["sys/firmware", "sys/devices/virtual/powercap"];

/// The file systems of the kernel that are mounted in this mount namespace.
#[derive(Debug, Default)]
pub(super) struct KernelMounts {
    /// In the order of the mount list.
    pub(super) all: Vec<KernelMount>,
    by_device: HashMap<u64, Treatment>,
}

/// One mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KernelMount {
    pub(super) path: PathBuf,
    pub(super) device: u64,
    pub(super) treatment: Treatment,
    is_automounter: bool,
}

impl KernelMounts {
    /// Reads the mounts of this process.
    pub(super) fn read() -> Result<Self, MountError> {
        mountinfo::read().map(|text| Self::parse(&text))
    }

    /// Parses a text of proc_pid_mountinfo(5) in one pass: most lines are dropped by their type.
    pub(super) fn parse(text: &[u8]) -> Self {
        let mut found = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            let Some(mount) = parse(line) else { continue };
            found.by_device.insert(mount.device, mount.treatment);
            found.all.push(mount);
        }
        found
    }

    /// The treatment of files on a device, if the device is one of a file system of the kernel.
    pub(super) fn of_device(&self, device: u64) -> Option<Treatment> {
        self.by_device.get(&device).copied()
    }
}

fn parse(line: &[u8]) -> Option<KernelMount> {
    let line = Line::parse(line)?;
    let treatment = of_kind(line.kind)?;
    let (major, minor) = std::str::from_utf8(line.device).ok()?.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    let is_automounter = line.kind == AUTOMOUNTER.as_bytes();
    Some(KernelMount { path: line.path(), device, treatment, is_automounter })
}

/// The treatment of a file system by its name, if it is one of the kernel.
pub(super) fn of_kind(kind: &[u8]) -> Option<Treatment> {
    KINDS.iter().find(|(name, _)| name.as_bytes() == kind).map(|(_, treatment)| *treatment)
}

impl Builder<'_> {
    /// Masks automounters below granted paths, and paths that only root could read.
    pub(super) fn narrow_kernel_mounts(&mut self, spots: &BTreeMap<PathBuf, Spot>) -> Result<(), MountError> {
        let mounts = std::mem::take(&mut self.kernel);
        // An automounter with an entry of the policy at it or below it is in use as a file system.
        let automounters = mounts.all.iter().filter(|mount| mount.is_automounter && !has_at_or_below(spots, &mount.path));
        for KernelMount { path, device, .. } in automounters.filter(|mount| !is_own(&mount.path)) {
            let spot = spots.get(path).or_else(|| nearest(spots, path));
            if !spot.is_some_and(|spot| spot.verdict.is_granted()) {
                continue;
            }
            let target = match tree::try_open(path) {
                Ok(target) => target,
                // It is under another mount, or below a cover.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => continue,
                Err(errno) => return Err(MountError::at("open", path)(errno)),
            };
            let stat = fstat(&target).map_err(MountError::at("look at", path))?;
            if stat.st_dev == *device {
                self.mask(mask_for(&stat))?.attach(target.as_fd(), path)?;
            }
        }
        if geteuid().is_root() && spots.get(Path::new("/")).is_some_and(|spot| spot.verdict.is_granted()) {
            let root = tree::open(Path::new("/"))?;
            mask_all(root.as_fd(), Path::new("/"), &ROOTS_MASKED, |mask| self.mask(mask))?;
            // A mask lies on a cover of the policy there, and below a mask no cover is seen. Files of the kernel are not moved.
            self.covered.retain(|cover| !ROOTS_MASKED.iter().any(|name| cover.path.starts_with(Path::new("/").join(name))));
        }
        Ok(())
    }
}

/// Covers, or makes read-only, each file system of the kernel that is mounted here, except at the paths for which `is_ours` is
/// true. A mount is identified by its id: a process that may rename a directory above it can move it to another path, but does not
/// change the mount. A cover is on the root of the mount and moves with it. Returns the paths of the mounts in directories of other
/// users that this user may not search.
pub(super) fn cover_all(masks: &Masks, is_ours: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, MountError> {
    let mut unsettled = None;
    for _look in 0..MAX_LOOKS {
        unsettled = None;
        let mut locked = Vec::new();
        let text = mountinfo::read()?;
        let mounts = Mounts::of(&text);
        for (number, (path, line)) in &mounts.all {
            let Some(treatment) = of_kind(line.kind).filter(|_| line.kind != AUTOMOUNTER.as_bytes()) else { continue };
            let is_done = treatment == Treatment::ReadOnly && line.is_read_only() || mounts.is_under_another(*number);
            // The directory that it was mounted on is removed, so no path leads to it (proc_pid_mountinfo(5)).
            let is_gone = path.as_os_str().as_encoded_bytes().ends_with(b"//deleted");
            if is_ours(path) || is_done || is_gone {
                continue;
            }
            match open_mount(path, *number) {
                Ok(target) => treat(&target, path, treatment, masks)?,
                Err(Errno::ACCESS) => locked.push(path.clone()),
                Err(errno) => unsettled = Some((path.clone(), errno)),
            }
        }
        if unsettled.is_none() {
            return Ok(locked);
        }
    }
    let (path, errno) = unsettled.unwrap_or((PathBuf::new(), Errno::NOENT));
    Err(MountError::at("cover the file system of the kernel that is mounted on", &path)(errno))
}

/// The maximum number of passes over the list while directories above mounts are renamed.
const MAX_LOOKS: u32 = 64;

/// Opens the root of a mount. `NOENT`: the mount is at another path by now.
fn open_mount(path: &Path, number: u64) -> Result<OwnedFd, Errno> {
    let opened = tree::try_open(path)?;
    let stat = statx(&opened, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?;
    if stat.stx_mnt_id == number { Ok(opened) } else { Err(Errno::NOENT) }
}

fn treat(target: &OwnedFd, path: &Path, treatment: Treatment, masks: &Masks) -> Result<(), MountError> {
    match treatment {
        // The view's devices are cloned from these mounts later.
        Treatment::ReadOnly if path.starts_with("/dev") => tree::lock_place(target.as_fd(), Lock::Device, path),
        Treatment::ReadOnly => tree::lock_place(target.as_fd(), Lock::ReadOnly, path),
        Treatment::Denied => {
            let stat = fstat(target).map_err(MountError::at("look at", path))?;
            masks.tree(mask_for(&stat))?.attach(target.as_fd(), path)
        }
    }
}

/// The list of mounts by their ids.
struct Mounts<'a> {
    all: BTreeMap<u64, (PathBuf, Line<'a>)>,
    /// The ids of the mounts that are mounted on each mount.
    on: HashMap<u64, Vec<u64>>,
}

impl<'a> Mounts<'a> {
    fn of(text: &'a [u8]) -> Self {
        let lines = text.split(|byte| *byte == b'\n').filter_map(Line::parse);
        let all: BTreeMap<_, _> = lines.filter_map(|line| Some((line.number()?, (line.path(), line)))).collect();
        let mut on = HashMap::<u64, Vec<u64>>::new();
        for (number, (_, line)) in &all {
            on.entry(line.parent().unwrap_or(0)).or_default().push(*number);
        }
        Self { all, on }
    }

    /// Whether no path leads to the root of a mount, because another mount is on it or on a directory above it.
    fn is_under_another(&self, number: u64) -> bool {
        let path = |number: u64| self.all.get(&number).map(|(path, _)| path.as_path());
        let Some(own) = path(number) else { return false };
        if self.on.get(&number).into_iter().flatten().any(|other| path(*other) == Some(own)) {
            return true;
        }
        let mut below = number;
        // Each mount has a different id, so the loop ends.
        for _above in 0..self.all.len() {
            let Some(parent) = self.all.get(&below).and_then(|(_, line)| line.parent()).filter(|parent| *parent != below) else {
                return false;
            };
            let siblings = self.on.get(&parent).into_iter().flatten().filter(|other| **other != below);
            if siblings.filter_map(|other| path(*other)).any(|over| own.starts_with(over) && over != path(below).unwrap_or(own)) {
                return true;
            }
            below = parent;
        }
        false
    }
}

/// Whether one of the paths is a directory or is below it.
fn has_at_or_below<T>(places: &BTreeMap<PathBuf, T>, directory: &Path) -> bool {
    places
        .range::<Path, _>((Bound::Included(directory), Bound::Unbounded))
        .next()
        .is_some_and(|(path, _)| path.starts_with(directory))
}

/// Covers the directories of automounters in a worker's view, except those at or above a path of the policy: a check by path comes
/// too late for a name that is sent on when it is looked up.
pub(super) fn mask_automounters(places: &BTreeMap<PathBuf, Verdict>, masks: &Masks) -> Result<(), MountError> {
    let mounts = KernelMounts::read()?;
    for mount in mounts.all.iter().filter(|mount| mount.is_automounter && !has_at_or_below(places, &mount.path)) {
        let Ok(target) = tree::try_open(&mount.path) else { continue };
        let stat = fstat(&target).map_err(MountError::at("look at", &mount.path))?;
        // Another file system may be mounted over it.
        if stat.st_dev == mount.device {
            masks.tree(Mask::Denied)?.attach(target.as_fd(), &mount.path)?;
        }
    }
    Ok(())
}

/// Masks the information about the machine in a `/proc`, beside its processes.
pub(super) fn mask_processes(proc: BorrowedFd<'_>, masks: &Masks) -> Result<(), MountError> {
    mask_all(proc, Path::new("/proc"), &MASKED_IN_PROC, |mask| masks.tree(mask))
}

/// Masks each of the paths that exists in a directory. A path that this user cannot access by its mode needs no mask, which would
/// cost a mount.
fn mask_all(
    at: BorrowedFd<'_>,
    place: &Path,
    names: &[&str],
    mask: impl Fn(Mask) -> Result<Tree, MountError>,
) -> Result<(), MountError> {
    for name in names {
        let path = place.join(name);
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let Ok(target) = openat2(at, *name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH) else {
            continue;
        };
        let stat = fstat(&target).map_err(MountError::at("look at", &path))?;
        if stat.st_uid != geteuid().as_raw() && stat.st_mode & 0o077 == 0 {
            continue;
        }
        mask(mask_for(&stat))?.attach(target.as_fd(), &path)?;
    }
    Ok(())
}

/// The mask for a file or a directory.
fn mask_for(stat: &Stat) -> Mask {
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory { Mask::Denied } else { Mask::File }
}

/// The masked path at `real` or above it, and whether it is masked for every user. Paths of `/sys` are masked only in a view of the
/// whole tree, if the sandbox has root's user id.
pub(crate) fn masked(real: &Path) -> Option<(PathBuf, bool)> {
    let of_proc = MASKED_IN_PROC.iter().map(|name| (Path::new("/proc").join(name), true));
    let of_root = ROOTS_MASKED.iter().map(|name| (Path::new("/").join(name), false));
    of_proc.chain(of_root).find(|(path, _)| real.starts_with(path))
}

/// The mount of a file system of the kernel that contains a path, and whether a view hides it. `None` if there is no such mount,
/// and for paths where every view has its own mount.
pub(crate) fn mount_above(real: &Path) -> Option<(PathBuf, bool)> {
    let mounts = KernelMounts::read().ok()?.all;
    let above = mounts.into_iter().filter(|mount| real.starts_with(&mount.path) && !is_own(&mount.path));
    // Of several mounts at one path, the last covers the others.
    let nearest = above.max_by_key(|mount| mount.path.as_os_str().len())?;
    Some((nearest.path, nearest.treatment == Treatment::Denied))
}

/// Whether every view has its own mount there, independent of the machine's.
pub(super) fn is_own(path: &Path) -> bool {
    ["/proc", "/dev"].into_iter().any(|own| path.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_the_kernel_are_known_by_their_type() {
        let text = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            23 22 0:21 / /proc rw shared:12 master:3 - proc proc rw\n\
            24 22 0:22 / /w/a\\040b\\134c/sys ro - sysfs none rw\n\
            25 22 0:23 / /w/proc rw - tmpfs proc rw\n\
            26 22 0:21 /sys /w/\xff rw - proc proc rw\n\
            27 22 259:300 / /w/x rw - debugfs - rw\n28 broken\n";
        let found = KernelMounts::parse(text);
        let mounts: Vec<_> = found.all.iter().map(|mount| (mount.path.as_os_str().as_encoded_bytes(), mount.treatment)).collect();
        let expect: [(&[u8], Treatment); 4] = [
            (b"/proc", Treatment::Denied),
            (b"/w/a b\\c/sys", Treatment::ReadOnly),
            (b"/w/\xff", Treatment::Denied),
            (b"/w/x", Treatment::Denied),
        ];
        assert_eq!(mounts, expect);
        assert_eq!(found.of_device(makedev(0, 21)), Some(Treatment::Denied));
        assert_eq!(found.of_device(makedev(259, 300)), Some(Treatment::Denied));
        assert_eq!(found.of_device(makedev(8, 1)), None);
    }
}

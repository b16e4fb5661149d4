//! File systems of the kernel that are mounted anywhere in a view: below a workspace that holds a build root, for instance. A write
//! there changes the machine, and a read tells of other processes, whatever the path is called.

use super::MountError;
use super::mask::Mask;
use super::place::{Builder, Spot, nearest};
use super::tree::{self, Lock, Tree};
use crate::compiled::Verdict;
use rustix::fs::{AtFlags, CWD, FileType, Stat, fstat, makedev, statat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// What becomes of such a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Treatment {
    /// Nothing of it is seen.
    Denied,
    /// Nothing in it is changed. As everywhere in a view its devices cannot be opened.
    ReadOnly,
}

/// By their names in `/proc/filesystems`.
const KINDS: [(&str, Treatment); 24] = [
    // Memory, environment and descriptors of every process that the mount knows, and settings of the machine.
    ("proc", Treatment::Denied),
    // Inner state of the kernel, and messages of its last crash.
    ("debugfs", Treatment::Denied),
    ("tracefs", Treatment::Denied),
    ("pstore", Treatment::Denied),
    ("resctrl", Treatment::Denied),
    // Objects of the kernel under names.
    ("bpf", Treatment::Denied),
    ("configfs", Treatment::Denied),
    ("binder", Treatment::Denied),
    ("functionfs", Treatment::Denied),
    ("mqueue", Treatment::Denied),
    ("nfsd", Treatment::Denied),
    ("rpc_pipefs", Treatment::Denied),
    ("xenfs", Treatment::Denied),
    // Settings of what guards the machine, and of its firmware.
    ("securityfs", Treatment::Denied),
    ("selinuxfs", Treatment::Denied),
    ("smackfs", Treatment::Denied),
    ("efivarfs", Treatment::Denied),
    // What runs programs of other kinds, and who serves FUSE.
    ("binfmt_misc", Treatment::Denied),
    ("fusectl", Treatment::Denied),
    // Programs read their limits and the machine's processors there.
    ("sysfs", Treatment::ReadOnly),
    ("cgroup", Treatment::ReadOnly),
    ("cgroup2", Treatment::ReadOnly),
    // One instance for the whole machine, or a terminal of somebody else.
    ("devtmpfs", Treatment::ReadOnly),
    ("devpts", Treatment::ReadOnly),
];

/// What of `/proc` tells of the machine, as container runtimes mask it (runc's `maskedPaths`), and more of the same: keys, memory and
/// its layout, what each processor does and when, messages of the kernel. Programs look for none of them.
const MASKED: [&str; 19] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
];

/// The same of `/sys`, which shows others no more than names.
const ROOTS_MASKED: [&str; 2] = ["/sys/firmware", "/sys/devices/virtual/powercap"];

/// Those that are mounted in this mount namespace.
#[derive(Debug, Default)]
pub(super) struct KernelMounts {
    /// In the order in which they were mounted.
    pub(super) all: Vec<KernelMount>,
    by_device: HashMap<u64, Treatment>,
}

/// One mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KernelMount {
    pub(super) path: PathBuf,
    pub(super) device: u64,
    pub(super) treatment: Treatment,
}

impl KernelMounts {
    /// Of this process.
    pub(super) fn read() -> Result<Self, MountError> {
        const FILE: &str = "/proc/self/mountinfo";
        match std::fs::read(FILE) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) => Err(MountError {
                attempt: format!("read {FILE} for file systems of the kernel; mount /proc"),
                errno: error.raw_os_error().unwrap_or(0),
            }),
        }
    }

    /// One pass over a text of proc_pid_mountinfo(5): most lines end at their type.
    fn parse(text: &[u8]) -> Self {
        let mut found = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            let Some(mount) = parse(line) else { continue };
            found.by_device.insert(mount.device, mount.treatment);
            found.all.push(mount);
        }
        found
    }

    /// What becomes of what lies on a device, if it is the kernel's.
    pub(super) fn of_device(&self, device: u64) -> Option<Treatment> {
        self.by_device.get(&device).copied()
    }
}

/// `36 35 98:0 /root /mount/point options [optional fields] - type source options`.
fn parse(line: &[u8]) -> Option<KernelMount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = fields.nth(2)?;
    let place = fields.nth(1)?;
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    let (_, treatment) = KINDS.iter().find(|(name, _)| name.as_bytes() == kind)?;
    let (major, minor) = std::str::from_utf8(device).ok()?.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    Some(KernelMount { path: PathBuf::from(OsString::from_vec(unescape(place))), device, treatment: *treatment })
}

/// Space, tab, line feed and backslash are written as a backslash and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let code = match (first, after) {
            (b'\\', [high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', ..]) => {
                Some(((high - b'0') << 6) | ((middle - b'0') << 3) | (low - b'0'))
            }
            _plain => None,
        };
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    plain
}

impl Builder<'_> {
    /// Takes away what mounts of the kernel show below what is granted. The mount that is found at a path is judged by its device:
    /// one that lies under another cannot be reached.
    pub(super) fn narrow_kernel_mounts(&mut self, spots: &BTreeMap<PathBuf, Spot>) -> Result<(), MountError> {
        let mounts = std::mem::take(&mut self.kernel);
        // Below `/dev` only what an entry took from the machine is not the view's own.
        let is_taken = |path: &Path| path.ancestors().any(|above| spots.get(above).is_some_and(Spot::is_taken));
        let is_ours = |path: &Path| is_own(path) && !(path.starts_with("/dev") && is_taken(path));
        for KernelMount { path, device, treatment } in mounts.all.iter().filter(|mount| !is_ours(&mount.path)) {
            let spot = spots.get(path).or_else(|| nearest(spots, path));
            let verdict = spot.map_or(Verdict::Unlisted, |spot| spot.verdict);
            if !verdict.is_granted() || *treatment == Treatment::ReadOnly && verdict != Verdict::Write {
                continue;
            }
            let target = match tree::try_open(path) {
                Ok(target) => target,
                // Under another mount, or below what is covered.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(Errno::ACCESS) => {
                    self.cover_locked(path, verdict)?;
                    continue;
                }
                Err(errno) => return Err(MountError::at("open", path)(errno)),
            };
            let stat = fstat(&target).map_err(MountError::at("look at", path))?;
            match treatment {
                _other if stat.st_dev != *device => {}
                Treatment::ReadOnly => tree::lock_path(path, true, Lock::ReadOnly)?,
                Treatment::Denied => self.mask_for(&stat)?.attach(target.as_fd(), path)?,
            }
        }
        if geteuid().is_root() && spots.get(Path::new("/")).is_some_and(|spot| spot.verdict.is_granted()) {
            self.mask_all(&ROOTS_MASKED)?;
        }
        Ok(())
    }

    /// Masks what `/proc` tells of the machine beside its processes.
    pub(super) fn mask_processes(&self) -> Result<(), MountError> {
        self.mask_all(&MASKED)
    }

    /// What its mode keeps from this user needs no mask: each is a mount.
    fn mask_all(&self, paths: &[&str]) -> Result<(), MountError> {
        for path in paths.iter().map(Path::new) {
            let Ok(stat) = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if stat.st_uid != geteuid().as_raw() && stat.st_mode & 0o077 == 0 {
                continue;
            }
            let tree = self.mask_for(&stat)?;
            tree.attach(tree::open(path)?.as_fd(), path)?;
        }
        Ok(())
    }

    fn mask_for(&self, stat: &Stat) -> Result<Tree, MountError> {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        self.mask(if is_directory { Mask::Denied } else { Mask::File })
    }
}

/// Where a view has its own, whatever the machine has mounted there.
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

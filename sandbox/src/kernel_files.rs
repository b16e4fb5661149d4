//! Files that the kernel makes up: by the type of the file system that an opened descriptor lies on, and by their names in `/proc`
//! and `/sys`. A path says nothing of it: a procfs may be mounted anywhere.

use rustix::fs::{FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, fstatfs, makedev};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// The kinds of file systems, by their effect on a confined process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// Files on a disk or in memory of this machine: a read ends soon, and checks nothing but how the file was opened.
    Local,
    /// Files of a network or of a program.
    Other,
    /// A write here changes the machine, not a file.
    Kernel,
    /// The same, and a read here shows the activity of processes.
    Tracing,
    /// A procfs: the same for everything in it.
    Processes,
}

impl FileSystem {
    /// The file system of an opened file, regardless of its path; also of one that was opened with `O_PATH` (since Linux 3.12).
    ///
    /// # Errors
    /// The system refuses.
    pub fn of(file: impl AsFd) -> Result<Self, Errno> {
        let magic = u64::try_from(fstatfs(&file)?.f_type).unwrap_or(0);
        if magic == TMPFS && devtmpfs().contains(&fstat(&file)?.st_dev) {
            return Ok(Self::Kernel);
        }
        Ok(Self::by_magic(magic))
    }

    /// Reads the mounts of this process for [`Self::of`], which otherwise reads them when it first meets a tmpfs. A process calls this
    /// before it is confined.
    pub(crate) fn learn() {
        let _devices = devtmpfs();
    }

    fn by_magic(magic: u64) -> Self {
        match magic {
            PROC => Self::Processes,
            magic if LOCAL.contains(&magic) => Self::Local,
            magic if TRACING.contains(&magic) => Self::Tracing,
            magic if KERNEL.contains(&magic) => Self::Kernel,
            _unknown => Self::Other,
        }
    }

    /// Whether something may be written, made or removed here under a policy.
    #[must_use]
    pub fn can_be_changed(self) -> bool {
        matches!(self, Self::Local | Self::Other)
    }
}

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// The devices of devtmpfs. It has the magic number of a tmpfs, and one instance for the machine wherever it is mounted: the kernel
/// makes it before the first process, so that its device number never changes (drivers/base/devtmpfs.c).
fn devtmpfs() -> &'static [u64] {
    static DEVICES: OnceLock<Vec<u64>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
        String::from_utf8_lossy(&mounts).lines().filter_map(device_of_devtmpfs).collect()
    })
}

/// The device in a line of proc_pid_mountinfo(5), if it is for a devtmpfs.
fn device_of_devtmpfs(line: &str) -> Option<u64> {
    let (mount, system) = line.split_once(" - ")?;
    let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
    system.starts_with("devtmpfs ").then(|| Some(makedev(major.parse().ok()?, minor.parse().ok()?)))?
}

/// `PROC_SUPER_MAGIC` of linux/magic.h.
const PROC: u64 = 0x9fa0;

/// By their numbers in linux/magic.h, or in the sources of the file system where they stand there alone: ext2 to ext4, xfs, btrfs,
/// tmpfs (also memory behind a descriptor), ramfs, overlayfs, zfs, f2fs, bcachefs, erofs, squashfs, vfat, exfat, ntfs3, iso9660, udf, jfs, nilfs2,
/// reiserfs. An overlay opens the files below it with its mounter's rights, and only at the open.
const LOCAL: [u64; 19] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x8584_58f6,
    0x794c_7630,
    0x2fc1_2fc1,
    0xf2f5_2010,
    0xca45_1a4e,
    0xe0f5_e1e2,
    0x7371_7368,
    0x4d44,
    0x2011_bab0,
    0x7366_746e,
    0x9660,
    0x1501_3346,
    0x3153_464a,
    0x3434,
    0x5265_4973,
];

/// debugfs and tracefs.
const TRACING: [u64; 2] = [0x6462_6720, 0x7472_6163];

/// sysfs, cgroup, cgroup2, securityfs, selinuxfs, smackfs, bpf, configfs, pstore, efivarfs, devpts, mqueue, binfmt_misc, nsfs,
/// sockfs, pipefs, anonymous inodes, pidfs, rpc_pipefs, fusectl, nfsd, usbfs, resctrl, xenfs, binderfs, openpromfs, hypfs, spufs,
/// functionfs, gadgetfs, dlmfs, oprofilefs, bdev, dma-buf, secretmem, guest_memfd.
const KERNEL: [u64; 36] = [
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x7363_6673,
    0xf97c_ff8c,
    0x4341_5d53,
    0xcafe_4a11,
    0x6265_6570,
    0x6165_676c,
    0xde5e_81e4,
    0x1cd1,
    0x1980_0202,
    0x4249_4e4d,
    0x6e73_6673,
    0x534f_434b,
    0x5049_5045,
    0x0904_1934,
    0x5049_4446,
    0x6759_6969,
    0x6573_5543,
    0x6e66_7364,
    0x9fa2,
    0x0765_5821,
    0xabba_1974,
    0x6c6f_6f70,
    0x9fa1,
    0x6879_7066,
    0x23c9_b64e,
    0x0a64_7361,
    0xaee7_1ee7,
    0x76a9_f425,
    0x6f70_726f,
    0x6264_6576,
    0x444d_4142,
    0x5345_434d,
    0x474d_454d,
];

/// Names in `/proc` with information about the machine, or with its settings; each with all below it. They are those that container
/// runtimes mask (runc's `maskedPaths`), and similar ones: keys, memory and its layout, activity of each processor, messages of the
/// kernel. Ordinary programs need none of them.
pub(crate) const MASKED_IN_PROC: [&str; 20] = [
    "acpi",
    "asound",
    "interrupts",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "sched_debug",
    "scsi",
    "slabinfo",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
    "vmcore",
];

/// Names in `/proc` that list processes and their objects. Processes have namespaces of their own and see only their own there.
const LISTS_OF_PROCESSES: [&str; 2] = ["locks", "sysvipc"];

/// Paths of `/sys` that are masked likewise.
pub(crate) const MASKED_IN_SYS: [&str; 3] = ["firmware", "devices/virtual/powercap", "kernel/vmcoreinfo"];

/// Why file calls under a policy do not see a name of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden<'a> {
    /// It stands for a process: by number, or by the reader's own link. All files of the process are reached through it, magic
    /// links too.
    Process(&'a Path),
    /// It tells of the machine: messages of the kernel, keys, the layout of memory.
    Masked(&'a Path),
}

/// Whether a link-free path is at or below a name that file calls under a policy do not see. It asks for the name alone, so that the
/// answer is the same whether there is such a process.
#[must_use]
pub fn hidden(real: &Path) -> Option<Hidden<'_>> {
    let component = |depth: usize| real.ancestors().find(|above| above.components().count() == depth).unwrap_or(real);
    if let Ok(below) = real.strip_prefix("/proc") {
        let name = below.iter().next()?;
        if names_process(name) {
            return Some(Hidden::Process(component(3)));
        }
        let mut masked = MASKED_IN_PROC.iter().chain(&LISTS_OF_PROCESSES);
        return masked.any(|masked| name == *masked).then(|| Hidden::Masked(component(3)));
    }
    let below = real.strip_prefix("/sys").ok()?;
    MASKED_IN_SYS.iter().any(|masked| below.starts_with(masked)).then_some(Hidden::Masked(real))
}

fn names_process(name: &OsStr) -> bool {
    name == "self" || name == "thread-self" || name.as_bytes().iter().all(u8::is_ascii_digit)
}

/// Checks that an opened file may be read by a process with more rights than the one that opened it. It must be a regular file of
/// a local file system, where a read checks only how the file was opened, and it must not be writable through the descriptor. The
/// worker checks before it passes a descriptor to the gateway, and the gateway checks the received descriptor again.
///
/// # Errors
/// The problem, in words.
pub fn check_handed_over(file: impl AsFd) -> Result<(), String> {
    check_local(&file)?;
    let flags = fcntl_getfl(&file).map_err(in_words)?;
    let is_sealed = || fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::WRITE));
    if flags.intersection(OFlags::RWMODE) == OFlags::RDONLY && !flags.contains(OFlags::PATH) || is_sealed() {
        Ok(())
    } else {
        Err("it is not open read-only".to_owned())
    }
}

/// Checks that an opened file is a regular one of a local file system.
///
/// # Errors
/// The problem, in words.
pub fn check_local(file: impl AsFd) -> Result<(), String> {
    if FileType::from_raw_mode(fstat(&file).map_err(in_words)?.st_mode) != FileType::RegularFile {
        return Err("it is not a regular file".to_owned());
    }
    match FileSystem::of(&file).map_err(in_words)? {
        FileSystem::Local => Ok(()),
        _other => Err("it is on a file system that is not known as local".to_owned()),
    }
}

fn in_words(errno: Errno) -> String {
    format!("it cannot be examined: {errno}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, MemfdFlags, Mode, fcntl_add_seals, memfd_create, openat};

    #[test]
    fn file_systems_are_told_by_their_descriptors() {
        for (path, expect) in [("/proc", FileSystem::Processes), ("/proc/version", FileSystem::Processes)] {
            let file = openat(CWD, path, OFlags::PATH, Mode::empty()).unwrap();
            assert_eq!(FileSystem::of(file), Ok(expect), "{path}");
        }
        let local = tempfile::tempfile().unwrap();
        assert!(FileSystem::of(&local).unwrap().can_be_changed());
        if let Ok(sys) = openat(CWD, "/sys/kernel", OFlags::PATH, Mode::empty()) {
            assert_eq!(FileSystem::of(sys), Ok(FileSystem::Kernel));
        }
    }

    #[test]
    fn a_devtmpfs_is_told_from_a_tmpfs() {
        let line = "25 30 0:6 / /a/dev rw,nosuid shared:2 - devtmpfs udev rw,size=1k";
        assert_eq!(device_of_devtmpfs(line), Some(makedev(0, 6)));
        assert_eq!(device_of_devtmpfs(&line.replace("devtmpfs", "tmpfs")), None);
        assert_eq!(device_of_devtmpfs("25 30 0:6 /"), None);
        // Where this machine has one.
        for line in std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().filter(|line| line.contains(" - devtmpfs "))
        {
            let path = line.split(' ').nth(4).unwrap();
            let file = openat(CWD, path, OFlags::PATH, Mode::empty()).unwrap();
            // Something else may be mounted over it.
            if Some(fstat(&file).unwrap().st_dev) == device_of_devtmpfs(line) {
                assert_eq!(FileSystem::of(&file), Ok(FileSystem::Kernel), "{line}");
            }
        }
    }

    #[test]
    fn no_number_stands_in_two_lists() {
        let all: Vec<u64> = [PROC].into_iter().chain(LOCAL).chain(TRACING).chain(KERNEL).collect();
        let different: std::collections::BTreeSet<u64> = all.iter().copied().collect();
        assert_eq!(different.len(), all.len());
    }

    #[test]
    fn processes_and_masked_names_are_hidden_by_name() {
        let process = |path| Some(Hidden::Process(Path::new(path)));
        for (path, expect) in [
            ("/proc/self", process("/proc/self")),
            ("/proc/thread-self/maps", process("/proc/thread-self")),
            ("/proc/1", process("/proc/1")),
            ("/proc/4194305/fd/1", process("/proc/4194305")),
            ("/proc/keys", Some(Hidden::Masked(Path::new("/proc/keys")))),
            ("/proc/acpi/wakeup", Some(Hidden::Masked(Path::new("/proc/acpi")))),
            ("/sys/firmware/efi", Some(Hidden::Masked(Path::new("/sys/firmware/efi")))),
            ("/proc", None),
            ("/proc/cpuinfo", None),
            ("/proc/sys/kernel/1", None),
            ("/proc/1a", None),
            ("/sys/firmwares", None),
            ("/srv/proc/1", None),
        ] {
            assert_eq!(hidden(Path::new(path)), expect, "{path}");
        }
    }

    #[test]
    fn only_readable_local_regular_files_are_handed_over() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("f");
        std::fs::write(&file, "x").unwrap();
        let open = |path: &Path, flags| openat(CWD, path, flags, Mode::empty()).unwrap();
        assert_eq!(check_handed_over(open(&file, OFlags::RDONLY)), Ok(()));
        for (path, flags, expect) in [
            (file.as_path(), OFlags::RDWR, "it is not open read-only"),
            (&file, OFlags::WRONLY, "it is not open read-only"),
            (&file, OFlags::PATH, ""),
            (directory.path(), OFlags::RDONLY, "it is not a regular file"),
            (Path::new("/dev/null"), OFlags::RDONLY, "it is not a regular file"),
            (Path::new("/proc/version"), OFlags::RDONLY, "it is on a file system that is not known as local"),
        ] {
            let refused = check_handed_over(open(path, flags)).unwrap_err();
            assert!(refused.contains(expect), "{} {flags:?}: {refused}", path.display());
        }
        let memory = memfd_create("m", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(check_handed_over(&memory).is_err());
        fcntl_add_seals(&memory, SealFlags::WRITE).unwrap();
        assert_eq!(check_handed_over(&memory), Ok(()));
    }
}

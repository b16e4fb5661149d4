//! The seccomp tables of `policies/seccomp-*.json`, compiled when the crate was built, and their installation.
//!
//! A process may have several: the kernel runs all, and the strictest answer holds. None is ever taken away.

use seccompiler::{BpfProgram, sock_filter};
use sha2::{Digest, Sha256};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the system call tables cover x86_64 and aarch64 only");

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    /// All that an fs worker may call.
    Worker,
    /// All that the first process of a sandbox may call once its launcher is forked.
    Init,
    /// What no confined program may call.
    Process,
    /// What changes files and Landlock does not see.
    ReadOnly,
    /// No System V objects, which would be everybody's.
    SharedIpc,
    /// No sockets but pairs.
    NoNetwork,
    /// No sockets but those of the internet.
    Internet,
    /// No port that another program serves is joined.
    MachineNetwork,
    /// No file that runs with its owner's or group's rights is made.
    SetId,
    /// Nor by the group's bit alone, which directories may have where init checks the target.
    SetGroupId,
}

const ALL: [Table; 10] = [
    Table::Worker,
    Table::Init,
    Table::Process,
    Table::ReadOnly,
    Table::SharedIpc,
    Table::NoNetwork,
    Table::Internet,
    Table::MachineNetwork,
    Table::SetId,
    Table::SetGroupId,
];

macro_rules! program {
    ($table:literal) => {
        if cfg!(target_arch = "x86_64") {
            include_bytes!(concat!(env!("OUT_DIR"), "/", $table, ".x86_64.bpf")).as_slice()
        } else {
            include_bytes!(concat!(env!("OUT_DIR"), "/", $table, ".aarch64.bpf")).as_slice()
        }
    };
}

impl Table {
    /// As in the name of its file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Init => "init",
            Self::Process => "process",
            Self::ReadOnly => "read-only",
            Self::SharedIpc => "shared-ipc",
            Self::NoNetwork => "no-network",
            Self::Internet => "internet",
            Self::MachineNetwork => "machine-network",
            Self::SetId => "set-id",
            Self::SetGroupId => "set-group-id",
        }
    }

    /// Of this architecture.
    fn bytes(self) -> &'static [u8] {
        match self {
            Self::Worker => program!("worker"),
            Self::Init => program!("init"),
            Self::Process => program!("process"),
            Self::ReadOnly => program!("read-only"),
            Self::SharedIpc => program!("shared-ipc"),
            Self::NoNetwork => program!("no-network"),
            Self::Internet => program!("internet"),
            Self::MachineNetwork => program!("machine-network"),
            Self::SetId => program!("set-id"),
            Self::SetGroupId => program!("set-group-id"),
        }
    }

    fn program(self) -> BpfProgram {
        let (instructions, rest) = self.bytes().as_chunks::<8>();
        debug_assert!(rest.is_empty());
        let decode = |&[c0, c1, jt, jf, k0, k1, k2, k3]: &[u8; 8]| sock_filter {
            code: u16::from_le_bytes([c0, c1]),
            jt,
            jf,
            k: u32::from_le_bytes([k0, k1, k2, k3]),
        };
        instructions.iter().map(decode).collect()
    }
}

/// Every table by its name, with the SHA-256 of its program in hexadecimal.
pub(crate) fn hashes() -> Vec<(&'static str, String)> {
    let hex = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    ALL.into_iter().map(|table| (table.name(), hex(table.bytes()))).collect()
}

/// Installs a table on this thread, and whatever it starts.
pub(crate) fn install(table: Table) -> Result<(), seccompiler::Error> {
    seccompiler::apply_filter(&table.program())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program says of a call; a slow reader of the few instructions that the compiler writes.
    fn run(table: Table, architecture: u32, call: u32, args: [u64; 6]) -> u32 {
        let program = table.program();
        let word = |offset: u32| match offset {
            0 => call,
            4 => architecture,
            at => {
                let at = usize::try_from(at).unwrap() - 16;
                let bytes = args[at / 8].to_le_bytes();
                u32::from_le_bytes(bytes[at % 8..at % 8 + 4].try_into().unwrap())
            }
        };
        let (mut at, mut register) = (0_usize, 0_u32);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let jump = |condition: bool| usize::from(if condition { jt } else { jf });
            match code {
                0x20 => register = word(k),
                0x54 => register &= k,
                0x05 => at += usize::try_from(k).unwrap(),
                0x15 => at += jump(register == k),
                0x25 => at += jump(register > k),
                0x35 => at += jump(register >= k),
                0x06 => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    const ALLOW: u32 = 0x7fff_0000;
    const KILL: u32 = 0x8000_0000;
    const fn errno(number: i32) -> u32 {
        0x0005_0000 | number.cast_unsigned()
    }
    #[cfg(target_arch = "x86_64")]
    const OWN: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const OWN: u32 = 0xc000_00b7;

    #[track_caller]
    fn check(table: Table, call: i64, args: &[u64], expect: u32) {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        let got = run(table, OWN, u32::try_from(call).unwrap(), all);
        assert_eq!(got, expect, "{table:?}: call {call} {args:x?} gives {got:#x}, not {expect:#x}");
    }

    #[test]
    fn foreign_architectures_end_the_process() {
        let i386 = 0x4000_0003;
        for table in ALL {
            assert_eq!(run(table, i386, 20, [0; 6]), KILL, "{table:?}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn x32_calls_do_not_exist() {
        for (table, call) in ALL.into_iter().flat_map(|table| [(table, 0x4000_0000), (table, 0x4000_0029), (table, u32::MAX)]) {
            assert_eq!(run(table, OWN, call, [0; 6]), errno(libc::ENOSYS), "{table:?}, {call:#x}");
        }
    }

    #[test]
    fn clone_may_make_children_and_threads_but_no_namespaces() {
        let thread = 0x3d_0f00;
        check(Table::Process, libc::SYS_clone, &[u64::from(libc::SIGCHLD.cast_unsigned())], ALLOW);
        check(Table::Process, libc::SYS_clone, &[thread], ALLOW);
        check(Table::Worker, libc::SYS_clone, &[thread], ALLOW);
        check(Table::Worker, libc::SYS_clone, &[u64::from(libc::SIGCHLD.cast_unsigned())], errno(libc::EPERM));
        for flag in [0x2_0000, 0x200_0000, 0x400_0000, 0x800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000] {
            check(Table::Process, libc::SYS_clone, &[flag | 17], errno(libc::EPERM));
            check(Table::Process, libc::SYS_unshare, &[flag], errno(libc::EPERM));
            check(Table::Worker, libc::SYS_clone, &[flag | thread], errno(libc::EPERM));
        }
        check(Table::Process, libc::SYS_unshare, &[0x80], errno(libc::EPERM));
        for table in [Table::Process, Table::Worker] {
            check(table, libc::SYS_clone3, &[], errno(libc::ENOSYS));
        }
    }

    #[test]
    fn sockets_by_family() {
        let stream = 1 | 0x8_0000;
        for family in 0..=46 {
            check(Table::NoNetwork, libc::SYS_socket, &[family, stream, 0], errno(libc::EPERM));
            let on = if matches!(family, 2 | 10 | 16) { ALLOW } else { errno(libc::EPERM) };
            check(Table::Internet, libc::SYS_socket, &[family, stream, 0], on);
        }
        let (mptcp, route) = (262, 0);
        check(Table::Internet, libc::SYS_socket, &[2, 1, mptcp], ALLOW);
        check(Table::Internet, libc::SYS_socket, &[2, 2, 0], ALLOW);
        check(Table::Internet, libc::SYS_socket, &[2, 3, 1], errno(libc::EPERM));
        check(Table::Internet, libc::SYS_socket, &[10, 10, 0], errno(libc::EPERM));
        check(Table::Internet, libc::SYS_socket, &[16, 3 | 0x8_0000, route], ALLOW);
        check(Table::Internet, libc::SYS_socket, &[16, 3, 4], errno(libc::EPERM));
        // The kernel takes 32 bits of each argument.
        check(Table::Internet, libc::SYS_socket, &[0x1_0000_0001, 1, 0], errno(libc::EPERM));
    }

    #[test]
    fn sockets_are_bound_by_the_lengths_of_internet_addresses() {
        for length in [12, 16, 28, 128] {
            check(Table::Internet, libc::SYS_bind, &[3, 0, length], ALLOW);
        }
        // 2 has the kernel choose a name; 110 is sizeof(sockaddr_un).
        for length in (0..=129).filter(|length| !matches!(length, 12 | 16 | 28 | 128)).chain([u64::from(u32::MAX)]) {
            check(Table::Internet, libc::SYS_bind, &[3, 0, length], errno(libc::EPERM));
        }
        // The kernel takes 32 bits.
        check(Table::Internet, libc::SYS_bind, &[3, 0, 0x1_0000_0002], errno(libc::EPERM));
    }

    #[test]
    fn no_port_of_the_machine_is_joined() {
        let (level, reuse_address, reuse_port) = (1, 2, 15);
        check(Table::MachineNetwork, libc::SYS_setsockopt, &[3, level, reuse_port], errno(libc::ENOPROTOOPT));
        check(Table::MachineNetwork, libc::SYS_setsockopt, &[3, 0x1_0000_0001, reuse_port], errno(libc::ENOPROTOOPT));
        check(Table::MachineNetwork, libc::SYS_setsockopt, &[3, level, reuse_address], ALLOW);
        // TCP has an option of the same number.
        check(Table::MachineNetwork, libc::SYS_setsockopt, &[3, 6, reuse_port], ALLOW);
        check(Table::Internet, libc::SYS_setsockopt, &[3, level, reuse_port], ALLOW);
    }

    #[test]
    fn pairs_that_cannot_be_pointed_elsewhere() {
        for table in [Table::NoNetwork, Table::Internet] {
            for kind in [1, 5, 1 | 0x8_0000, 5 | 0x8_0000 | 0x800] {
                check(table, libc::SYS_socketpair, &[1, kind, 0], ALLOW);
            }
            for kind in [2, 2 | 0x8_0000, 3, 4, 0, 10] {
                check(table, libc::SYS_socketpair, &[1, kind, 0], errno(libc::EPERM));
            }
            check(table, libc::SYS_socketpair, &[2, 1, 0], errno(libc::EPERM));
            for call in [libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_sendto, libc::SYS_shutdown, libc::SYS_sendmsg] {
                check(table, call, &[], ALLOW);
            }
        }
    }

    #[test]
    fn what_landlock_does_not_see_is_read_only() {
        let by_number = [463, 466, 469, 452];
        let by_name = [libc::SYS_fchmod, libc::SYS_fchownat, libc::SYS_utimensat, libc::SYS_setxattr, libc::SYS_fremovexattr];
        for call in by_number.into_iter().chain(by_name) {
            check(Table::ReadOnly, call, &[], errno(libc::EROFS));
        }
        check(Table::ReadOnly, libc::SYS_openat, &[], ALLOW);
    }

    #[test]
    fn a_read_only_process_asks_of_descriptors_and_changes_nothing_by_them() {
        for request in [
            0x4008_6602,   // FS_IOC_SETFLAGS
            0x1_4008_6602, // the kernel takes 32 bits
            0x4008_7602,   // FS_IOC_SETVERSION
            0x4008_6604,   // EXT4_IOC_SETVERSION
            0x660c,        // EXT4_IOC_ALLOC_DA_BLKS
            0x6628,        // EXT4_IOC_CLEAR_ES_CACHE
            0x401c_5820,   // FS_IOC_FSSETXATTR
            0x4004_9409,   // FICLONE
            0xc004_5877,   // FIFREEZE
            0x4004_5431,   // TIOCSPTLCK
            0x4004_5436,   // TIOCSIG
            0x8933 + 1,    // one of those that set
            0,
            1, // FIBMAP
            3,
            0x53ff,
            0x5500,
            u64::from(u32::MAX),
        ] {
            check(Table::ReadOnly, libc::SYS_ioctl, &[3, request], errno(libc::EROFS));
            check(Table::Process, libc::SYS_ioctl, &[3, 0x4008_6602], ALLOW);
        }
        for request in [
            0x5401,                // TCGETS
            0x5402,                // TCSETS
            0x540e,                // TIOCSCTTY
            0x5410,                // TIOCSPGRP
            0x5413,                // TIOCGWINSZ
            0x541b,                // FIONREAD
            0x5421,                // FIONBIO
            0x5450,                // FIONCLEX
            0x5451,                // FIOCLEX
            0x5452,                // FIOASYNC
            2,                     // FIGETBSZ
            0x802c_542a,           // TCGETS2
            0x402c_542b,           // TCSETS2
            0x8008_6601,           // FS_IOC_GETFLAGS
            0x801c_581f,           // FS_IOC_FSGETXATTR
            0xc020_660b,           // FS_IOC_FIEMAP
            0x8933,                // SIOCGIFINDEX
            0xffff_ffff_0000_5401, // the kernel takes 32 bits
        ] {
            check(Table::ReadOnly, libc::SYS_ioctl, &[3, request], ALLOW);
        }
        for command in [1024, 1026, 1036, 1038, 1040, 0x1_0000_0400] {
            check(Table::ReadOnly, libc::SYS_fcntl, &[3, command], errno(libc::EROFS));
            check(Table::Process, libc::SYS_fcntl, &[3, command], errno(libc::EPERM));
        }
        // F_DUPFD, F_GETFL, F_SETFL, F_SETLK, F_GETLEASE, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GET_RW_HINT
        for command in [0, 3, 4, 6, 1025, 1030, 1031, 1035] {
            check(Table::ReadOnly, libc::SYS_fcntl, &[3, command], ALLOW);
            check(Table::Process, libc::SYS_fcntl, &[3, command], ALLOW);
        }
    }

    #[test]
    fn requests_of_file_systems_are_those_that_are_named() {
        for request in [
            0x800c_6613,   // FS_IOC_SET_ENCRYPTION_POLICY
            0x4010_6614,   // FS_IOC_GET_ENCRYPTION_PWSALT, which makes a salt
            0xc050_6617,   // FS_IOC_ADD_ENCRYPTION_KEY
            0x1_c050_6617, // the kernel takes 32 bits
            0xc040_6618,   // FS_IOC_REMOVE_ENCRYPTION_KEY
            0xc040_6619,   // FS_IOC_REMOVE_ENCRYPTION_KEY_ALL_USERS
            0x6628,        // EXT4_IOC_CLEAR_ES_CACHE
            0xc0ff_66fe,   // one of later kernels
            0xc004_5877,   // FIFREEZE
            0xc018_5879,   // FITRIM
            0x8004_587d,   // FS_IOC_SHUTDOWN
            0x4008_7603,
            0x5000_940f, // BTRFS_IOC_SNAP_DESTROY
        ] {
            check(Table::Process, libc::SYS_ioctl, &[3, request], errno(libc::EPERM));
        }
        for request in [
            0x8008_6601, // FS_IOC_GETFLAGS
            0x4008_6602, // FS_IOC_SETFLAGS
            0xc020_660b, // FS_IOC_FIEMAP
            0xc009_6616, // FS_IOC_GET_ENCRYPTION_POLICY_EX
            0x4080_6685, // FS_IOC_ENABLE_VERITY
            0x801c_581f, // FS_IOC_FSGETXATTR
            0x401c_5820, // FS_IOC_FSSETXATTR
            0x4030_5828, // FS_IOC_RESVSP
            0x4008_7602, // FS_IOC_SETVERSION
            0x4004_9409, // FICLONE
            0xc018_9436, // FIDEDUPERANGE
            0x5401,      // TCGETS
            0x541b,      // FIONREAD
            0x8912,      // SIOCGIFCONF
            0xae80,      // KVM_RUN: of a device that a policy names
            0x4004_4601, // one of a graphics card, as above
        ] {
            check(Table::Process, libc::SYS_ioctl, &[3, request], ALLOW);
        }
    }

    #[test]
    fn huge_pages_of_the_machine_are_for_no_process() {
        let (shared, private, fixed) = (0x21, 0x22, 0x10);
        let (two_mib, one_gib) = (21 << 26, 30 << 26);
        for flags in [shared, private, private | fixed, 0x4022, 0x10_0022] {
            check(Table::Process, libc::SYS_mmap, &[0, 4096, 3, flags], ALLOW);
            for size in [0, two_mib, one_gib] {
                check(Table::Process, libc::SYS_mmap, &[0, 4096, 3, flags | 0x4_0000 | size], errno(libc::EPERM));
            }
        }
        for flags in [0, 1, 2, 3, 8, 0x10] {
            check(Table::Process, libc::SYS_memfd_create, &[0, flags], ALLOW);
            check(Table::Process, libc::SYS_memfd_create, &[0, flags | 4], errno(libc::EPERM));
        }
        check(Table::Process, libc::SYS_shmget, &[0, 4096, 0o1600], ALLOW);
        check(Table::Process, libc::SYS_shmget, &[0, 4096, 0o5600], errno(libc::EPERM));
    }

    #[test]
    fn set_id_bits_are_for_no_file() {
        const PERM: u32 = errno(libc::EPERM);
        let (create, tmpfile) = (0o100, 0o20_200_000);
        let both = |call, args: &[u64], set_id, group| {
            check(Table::SetId, call, args, set_id);
            check(Table::SetGroupId, call, args, group);
        };
        for (mode, user, group) in [
            (0o755, ALLOW, ALLOW),
            (0o1777, ALLOW, ALLOW),
            (0o4755, PERM, ALLOW),
            (0o6755, PERM, PERM),
            (0o2755, ALLOW, PERM),
            // The kernel takes 16 bits.
            (0xffff_ffff_ffff_0000 | 0o4000, PERM, ALLOW),
            (0xffff_ffff_ffff_f000 | 0o777, ALLOW, ALLOW),
        ] {
            both(libc::SYS_fchmod, &[3, mode], user, group);
            both(libc::SYS_fchmodat, &[3, 0, mode], user, group);
            both(452, &[3, 0, mode, 0x1000], user, group);
            let made = if mode & 0o6000 == 0 { ALLOW } else { PERM };
            both(libc::SYS_mknodat, &[3, 0, mode | 0o100_000], made, ALLOW);
            both(libc::SYS_mkdirat, &[3, 0, mode], ALLOW, ALLOW);
            for flags in [create, tmpfile, create | 0o1, tmpfile | 0o2] {
                both(libc::SYS_openat, &[3, 0, flags, mode], made, ALLOW);
                #[cfg(target_arch = "x86_64")]
                both(libc::SYS_open, &[0, flags, mode], made, ALLOW);
            }
            both(libc::SYS_mq_open, &[0, create, mode], made, ALLOW);
            // O_DIRECTORY, which O_TMPFILE contains, makes nothing.
            for flags in [0, 0o1, 0o200_000, 0o40_000, 0o2_000_000] {
                both(libc::SYS_openat, &[3, 0, flags, mode], ALLOW, ALLOW);
            }
            #[cfg(target_arch = "x86_64")]
            {
                both(libc::SYS_chmod, &[0, mode], user, group);
                both(libc::SYS_creat, &[0, mode], made, ALLOW);
                both(libc::SYS_mknod, &[0, mode], made, ALLOW);
            }
        }
        both(libc::SYS_openat2, &[], errno(libc::ENOSYS), ALLOW);
    }

    #[test]
    fn calls_newer_than_the_tables_do_not_exist() {
        for table in ALL {
            for call in [470, 471, 500, 512, 520, 547, 1023, 1024, 0x3fff_ffff] {
                assert_eq!(run(table, OWN, call, [0; 6]), errno(libc::ENOSYS), "{table:?}, {call}");
            }
        }
    }

    #[test]
    fn calls_that_no_program_needs_do_not_exist() {
        for call in [440, 447, 448, 450, 451, 457, 458, 459, 460, 461, libc::SYS_kcmp] {
            check(Table::Process, call, &[], errno(libc::ENOSYS));
        }
        #[cfg(target_arch = "x86_64")]
        for call in [libc::SYS_modify_ldt, libc::SYS_uselib, libc::SYS_vserver, 337, 400, 423] {
            check(Table::Process, call, &[], errno(libc::ENOSYS));
        }
        check(Table::Process, libc::SYS_pidfd_getfd, &[], errno(libc::EPERM));
        for call in [444, 446, 449, 453, 456, 462, 463, 468, 469, libc::SYS_rseq, libc::SYS_ptrace, libc::SYS_execveat] {
            check(Table::Process, call, &[], ALLOW);
        }
    }

    #[test]
    fn socket_requests_that_load_modules_are_refused() {
        for request in [0x8940, 0x8941, 0x8982, 0x8983, 0x89a0, 0x89a1, 0xffff_ffff_0000_89a0] {
            check(Table::Process, libc::SYS_ioctl, &[3, request], errno(libc::EPERM));
        }
        for request in [0x8910, 0x8933, 0x8942, 0x8984, 0x89a2] {
            check(Table::Process, libc::SYS_ioctl, &[3, request], ALLOW);
        }
        for family in [2, 10] {
            let sets = [(1, vec![0, 6, 262]), (2, vec![0, 17, 1, 58])];
            for (kind, free) in sets {
                for protocol in 0..=512 {
                    let expect = if free.contains(&protocol) { ALLOW } else { errno(libc::EPERM) };
                    check(Table::Internet, libc::SYS_socket, &[family, kind | 0x8_0800, protocol], expect);
                }
            }
        }
    }

    #[test]
    fn terminals_cannot_be_typed_into() {
        for request in [0x5412, 0x541c, 0x5423, 0xffff_ffff_0000_5412] {
            check(Table::Process, libc::SYS_ioctl, &[0, request], errno(libc::EPERM));
        }
        check(Table::Process, libc::SYS_ioctl, &[0, 0x5413], ALLOW);
    }

    #[test]
    fn limits_and_scheduling_of_oneself_only() {
        check(Table::Process, libc::SYS_prlimit64, &[0, 7, 1, 0], ALLOW);
        check(Table::Process, libc::SYS_prlimit64, &[77, 7, 0, 1], ALLOW);
        check(Table::Process, libc::SYS_prlimit64, &[77, 7, 0x7fff_0000_0000, 0], errno(libc::EPERM));
        // The limit of core files stays, and setting it succeeds.
        check(Table::Process, libc::SYS_prlimit64, &[0, 4, 1, 0], errno(0));
        check(Table::Process, libc::SYS_prlimit64, &[0, 4, 0, 1], ALLOW);
        check(Table::Process, libc::SYS_prlimit64, &[77, 4, 1, 0], errno(libc::EPERM));
        check(Table::Process, libc::SYS_setrlimit, &[4, 1], errno(0));
        check(Table::Process, libc::SYS_setrlimit, &[7, 1], ALLOW);
        check(Table::Process, libc::SYS_sched_setaffinity, &[77], errno(libc::EPERM));
        check(Table::Process, libc::SYS_sched_setaffinity, &[0], ALLOW);
        check(Table::Process, libc::SYS_setpriority, &[0, 0, 5], ALLOW);
        check(Table::Process, libc::SYS_setpriority, &[2, 0, 5], errno(libc::EPERM));
        check(Table::Process, libc::SYS_setpriority, &[0, 9, 5], errno(libc::EPERM));
    }

    #[test]
    fn an_init_opens_starts_and_mounts_nothing() {
        for call in [libc::SYS_waitid, libc::SYS_kill, libc::SYS_process_vm_readv, libc::SYS_readlinkat, libc::SYS_sendmsg] {
            check(Table::Init, call, &[], ALLOW);
        }
        // O_PATH gives no right to the content; the flags of openat2 lie in memory, where Landlock bounds what it gives.
        check(Table::Init, libc::SYS_openat, &[3, 0, 0o10_000_000], ALLOW);
        check(Table::Init, libc::SYS_openat2, &[], ALLOW);
        for flags in [0, 1, 0o102, 0o1001] {
            check(Table::Init, libc::SYS_openat, &[3, 0, flags], errno(libc::EPERM));
        }
        for call in [
            libc::SYS_clone,
            libc::SYS_execve,
            libc::SYS_socket,
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_unlinkat,
            libc::SYS_process_vm_writev,
            libc::SYS_ptrace,
            libc::SYS_pidfd_getfd,
        ] {
            check(Table::Init, call, &[], errno(libc::EPERM));
        }
        let receive = u64::from(u32::try_from(libc::SECCOMP_IOCTL_NOTIF_RECV).unwrap());
        let send = u64::from(u32::try_from(libc::SECCOMP_IOCTL_NOTIF_SEND).unwrap());
        let put_descriptor = u64::from(u32::try_from(libc::SECCOMP_IOCTL_NOTIF_ADDFD).unwrap());
        check(Table::Init, libc::SYS_ioctl, &[3, receive], ALLOW);
        check(Table::Init, libc::SYS_ioctl, &[3, send], ALLOW);
        check(Table::Init, libc::SYS_ioctl, &[3, put_descriptor], errno(libc::EPERM));
    }

    #[test]
    fn a_worker_calls_what_it_needs_and_nothing_else() {
        for call in [libc::SYS_openat2, libc::SYS_renameat2, libc::SYS_futex, libc::SYS_exit_group, libc::SYS_getdents64] {
            check(Table::Worker, call, &[], ALLOW);
        }
        for call in [libc::SYS_execve, libc::SYS_socket, libc::SYS_kill, libc::SYS_ptrace, libc::SYS_ioctl, libc::SYS_mount] {
            check(Table::Worker, call, &[], errno(libc::EPERM));
        }
        check(Table::Worker, libc::SYS_prctl, &[15], ALLOW);
        check(Table::Worker, libc::SYS_prctl, &[1], errno(libc::EPERM));
    }
}

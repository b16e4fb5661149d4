//! Acts of several words. All other acts are those of the sandbox's own tests on one place.

use super::{acts, raw};
use rustix::process::{Resource, getrlimit};
use std::ffi::CString;
use std::fs;
use std::io::{Error, Read as _, Result};
use std::os::fd::IntoRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

/// Does the act that the words name, and returns `ok`, the name of an error, or its output.
pub(crate) fn outcome(words: &[&str]) -> String {
    match perform(words) {
        Ok(answer) => answer,
        Err(error) => error.raw_os_error().map_or_else(|| error.to_string(), acts::name),
    }
}

fn perform(words: &[&str]) -> Result<String> {
    match words {
        ["print", path] => print(path),
        ["print-first-of", paths @ ..] => first_of(paths),
        ["fd-list"] => descriptors(),
        ["chdir", path, rest @ ..] => std::env::set_current_dir(path).and_then(|()| perform(rest)),
        ["syscall", name, arguments @ ..] => system_call(name, arguments),
        ["twice", first, rest @ ..] => perform(&first.split(',').collect::<Vec<_>>()).and_then(|_| perform(rest)),
        ["limit", name, least, most] => limit(name, number(least)? as u64, number(most)? as u64),
        ["exec", program, arguments @ ..] => {
            let status = std::process::Command::new(program).args(arguments).status()?;
            Ok(status.code().map_or_else(
                || "ended by a signal".to_owned(),
                |code| if code == 0 { "ok".to_owned() } else { format!("ended {code}") },
            ))
        }
        ["fork", count] => fork(number(count)?),
        [act, place] => Ok(acts::outcome(act, place)),
        [act] => Ok(acts::outcome(act, "-")),
        [] | [_, _, ..] => panic!("no act {words:?}"),
    }
}

/// At most 4 KiB of a file.
fn print(path: &str) -> Result<String> {
    let mut content = Vec::new();
    fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(path)?
        .take(4096)
        .read_to_end(&mut content)?;
    Ok(format!("ok {}", String::from_utf8_lossy(&content)))
}

/// The first that can be read and has something in it; else the last error.
fn first_of(paths: &[&str]) -> Result<String> {
    let mut last = Error::from_raw_os_error(libc::ENOENT);
    for path in paths {
        match print(path) {
            Ok(said) => return Ok(said),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// `ok`, or the open descriptors beside the three streams.
fn descriptors() -> Result<String> {
    let listing = fs::read_dir("/proc/self/fd")?;
    let mut open = Vec::new();
    for entry in listing {
        let number = entry?.file_name().into_string().unwrap_or_default();
        let target = fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        // The listing's own descriptor is one of its entries.
        let is_own = target.to_string_lossy().ends_with("/fd");
        if !matches!(number.as_str(), "0" | "1" | "2") && !is_own {
            open.push(format!("{number} is {}", target.display()));
        }
    }
    Ok(if open.is_empty() { "ok".to_owned() } else { format!("open: {}", open.join(", ")) })
}

/// Whether the hard limit lies between two bounds.
fn limit(name: &str, least: u64, most: u64) -> Result<String> {
    let resource = match name {
        "nofile" => Resource::Nofile,
        "core" => Resource::Core,
        "nproc" => Resource::Nproc,
        other => panic!("no limit {other}"),
    };
    let hard = getrlimit(resource).maximum;
    let is_within = hard.is_some_and(|hard| (least..=most).contains(&hard));
    Ok(if is_within { "ok".to_owned() } else { format!("{name} is {hard:?}") })
}

/// Starts so many children at once, each of which waits for its input to end; then all are ended and joined.
fn fork(count: usize) -> Result<String> {
    let mut children = Vec::new();
    let mut outcome = Ok("ok".to_owned());
    for _ in 0..count.min(100_000) {
        match std::process::Command::new("/bin/cat").stdin(std::process::Stdio::piped()).spawn() {
            Ok(child) => children.push(child),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    for mut child in children {
        drop(child.stdin.take());
        child.wait()?;
    }
    outcome
}

/// Numbers: decimal, `0x`, `0o` and negative ones. `text:`, `zeros:N`, `open:PATH`, `path:PATH` and `cwd` become addresses and descriptors.
fn system_call(name: &str, words: &[&str]) -> Result<String> {
    let mut arguments = [0; 6];
    for (argument, word) in arguments.iter_mut().zip(words) {
        *argument = self::argument(word)?;
    }
    raw::call(by_name(name), arguments)?;
    Ok("ok".to_owned())
}

fn argument(word: &str) -> Result<usize> {
    let open = |path: &str, flags: i32| {
        let file = fs::OpenOptions::new().read(true).custom_flags(flags | libc::O_NOCTTY | libc::O_NONBLOCK).open(path)?;
        usize::try_from(file.into_raw_fd()).map_err(Error::other)
    };
    match word.split_once(':') {
        Some(("text", text)) => Ok(CString::new(text)?.into_raw().addr()),
        Some(("zeros", count)) => Ok(vec![0_u64; number(count)?.div_ceil(8)].leak().as_mut_ptr().expose_provenance()),
        Some(("open", path)) => open(path, 0),
        Some(("path", path)) => open(path, libc::O_PATH),
        _ if word == "cwd" => Ok((libc::AT_FDCWD as isize).cast_unsigned()),
        _ => number(word),
    }
}

fn number(word: &str) -> Result<usize> {
    let parsed = if let Some(digits) = word.strip_prefix("0x") {
        usize::from_str_radix(digits, 16)
    } else if let Some(digits) = word.strip_prefix("0o") {
        usize::from_str_radix(digits, 8)
    } else if word.starts_with('-') {
        word.parse::<isize>().map(isize::cast_unsigned)
    } else {
        word.parse()
    };
    parsed.map_err(|error| Error::other(format!("{word}: {error}")))
}

/// By name where both architectures have the call; a call newer than the C library's table is given as a number, which both
/// share.
fn by_name(name: &str) -> libc::c_long {
    match name {
        "fchmod" => libc::SYS_fchmod,
        "fchmodat" => libc::SYS_fchmodat,
        "fchmodat2" => 452,
        "fchownat" => libc::SYS_fchownat,
        "openat" => libc::SYS_openat,
        "openat2" => libc::SYS_openat2,
        "mknodat" => libc::SYS_mknodat,
        "mkdirat" => libc::SYS_mkdirat,
        "linkat" => libc::SYS_linkat,
        "symlinkat" => libc::SYS_symlinkat,
        "renameat2" => libc::SYS_renameat2,
        "unlinkat" => libc::SYS_unlinkat,
        "truncate" => libc::SYS_truncate,
        "fcntl" => libc::SYS_fcntl,
        "flock" => libc::SYS_flock,
        "ioctl" => libc::SYS_ioctl,
        "socket" => libc::SYS_socket,
        "mount" => libc::SYS_mount,
        "umount2" => libc::SYS_umount2,
        "setns" => libc::SYS_setns,
        "unshare" => libc::SYS_unshare,
        "ptrace" => libc::SYS_ptrace,
        "kill" => libc::SYS_kill,
        "pidfd_open" => libc::SYS_pidfd_open,
        "name_to_handle_at" => libc::SYS_name_to_handle_at,
        "memfd_create" => libc::SYS_memfd_create,
        "syslog" => libc::SYS_syslog,
        "acct" => libc::SYS_acct,
        "quotactl" => libc::SYS_quotactl,
        "sethostname" => libc::SYS_sethostname,
        "settimeofday" => libc::SYS_settimeofday,
        "adjtimex" => libc::SYS_adjtimex,
        "reboot" => libc::SYS_reboot,
        "kexec_load" => libc::SYS_kexec_load,
        "seccomp" => libc::SYS_seccomp,
        "mq_open" => libc::SYS_mq_open,
        "msgget" => libc::SYS_msgget,
        "semget" => libc::SYS_semget,
        "utimensat" => libc::SYS_utimensat,
        #[cfg(target_arch = "x86_64")]
        "modify_ldt" => libc::SYS_modify_ldt,
        #[cfg(target_arch = "x86_64")]
        "ioperm" => libc::SYS_ioperm,
        #[cfg(target_arch = "x86_64")]
        "iopl" => libc::SYS_iopl,
        number => number.parse().unwrap_or_else(|_| panic!("no system call {number}")),
    }
}

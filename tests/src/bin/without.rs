//! A machine that offers less: `portcullis-without THING… -- COMMAND` really takes each thing away, for itself and all that it
//! starts, and becomes the command. What it cannot take away ends it with status 125 before that.
//!
//! | thing | is gone by |
//! |---|---|
//! | `landlock` | its calls answer ENOSYS, as where it is not built in |
//! | `landlock-enabled` | they answer EOPNOTSUPP, as where it is built in and switched off |
//! | `seccomp` | seccomp and its prctl answer EINVAL, as where filters are not built in |
//! | `namespaces` | unshare, clone and setns of namespaces answer EPERM, clone3 ENOSYS, as in a default container |
//! | `users` | unshare and clone of user namespaces answer EPERM, clone3 ENOSYS |
//! | `mounts` | all calls that mount answer EPERM |
//! | `userns-count` | a user namespace without capabilities that may make no other |
//! | `proc` | a user namespace whose /proc is partly masked, so that a fresh one is refused |
//! | `sock-diag` | its sockets answer EPROTONOSUPPORT, as where it is not built in |
//! | `cgroups` | nothing but an empty directory where they are mounted; an ordinary user keeps what was delegated |
//! | `capabilities` | none in any set, the bounding set included |

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use seccompiler::sock_filter;
use std::error::Error;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::{fs, io};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let at = arguments.iter().position(|argument| argument == "--");
    let error: Box<dyn Error> = match at.map(|at| (&arguments[..at], &arguments[at + 1..])) {
        Some((things, [program, rest @ ..])) => {
            take_away(things).map_or_else(|error| error, |()| Command::new(program).args(rest).exec().into())
        }
        _ => "usage: portcullis-without THING… -- COMMAND".into(),
    };
    let _stderr_closed = writeln!(io::stderr(), "portcullis-without: {error}");
    ExitCode::from(125)
}

fn take_away(things: &[String]) -> Result<(), Box<dyn Error>> {
    let mut refused = Vec::new();
    let mut drops = false;
    for thing in things {
        match thing.as_str() {
            "landlock" => refused.extend(LANDLOCK.map(|call| Refusal::of(call, libc::ENOSYS))),
            "landlock-enabled" => refused.extend(LANDLOCK.map(|call| Refusal::of(call, libc::EOPNOTSUPP))),
            "seccomp" => {
                refused.push(Refusal::of(libc::SYS_seccomp, libc::EINVAL));
                refused.push(Refusal { when: vec![(0, When::Is(PR_SET_SECCOMP))], ..Refusal::of(libc::SYS_prctl, libc::EINVAL) });
            }
            "namespaces" => {
                for call in [libc::SYS_unshare, libc::SYS_clone] {
                    refused.push(Refusal { when: vec![(0, When::Has(NAMESPACES))], ..Refusal::of(call, libc::EPERM) });
                }
                refused.extend([Refusal::of(libc::SYS_setns, libc::EPERM), Refusal::of(libc::SYS_clone3, libc::ENOSYS)]);
            }
            "users" => {
                for call in [libc::SYS_unshare, libc::SYS_clone] {
                    refused.push(Refusal { when: vec![(0, When::Has(NEWUSER))], ..Refusal::of(call, libc::EPERM) });
                }
                refused.push(Refusal::of(libc::SYS_clone3, libc::ENOSYS));
            }
            "mounts" => refused.extend(MOUNTS.map(|call| Refusal::of(call, libc::EPERM))),
            "userns-count" => {
                new_namespaces(UnshareFlags::NEWUSER)?;
                fs::write("/proc/sys/user/max_user_namespaces", "0")?;
                drops = true;
            }
            "proc" => mask_proc()?,
            "cgroups" => cover_cgroups()?,
            "sock-diag" => {
                let when = vec![(0, When::Is(AF_NETLINK)), (2, When::Is(NETLINK_SOCK_DIAG))];
                refused.push(Refusal { when, ..Refusal::of(libc::SYS_socket, libc::EPROTONOSUPPORT) });
            }
            "capabilities" => drops = true,
            other => return Err(format!("no thing `{other}`").into()),
        }
    }
    if drops {
        drop_capabilities()?;
    }
    // Last, for what came before needs some of the calls that now go.
    if !refused.is_empty() {
        seccompiler::apply_filter(&program(&refused))?;
    }
    Ok(())
}

/// `linux/prctl.h`.
const PR_SET_SECCOMP: u32 = 22;

/// `linux/socket.h` and `linux/netlink.h`.
const AF_NETLINK: u32 = 16;
const NETLINK_SOCK_DIAG: u32 = 4;

/// `linux/sched.h`.
const NEWUSER: u32 = 0x1000_0000;

/// Every kind of namespace that clone and unshare both know.
const NAMESPACES: u32 = 0x7e02_0000;

const LANDLOCK: [libc::c_long; 3] =
    [libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self];

const MOUNTS: [libc::c_long; 9] = [
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
];

/// New namespaces, in which user and group are who they were.
fn new_namespaces(flags: UnshareFlags) -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    #[expect(deprecated, reason = "its successor is unsafe for the sake of descriptor tables, which are not unshared here")]
    rustix::thread::unshare(flags)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))
}

/// Masks what container engines mask, and locks that by a second pair of namespaces, in which nobody can take it off.
fn mask_proc() -> io::Result<()> {
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    new_namespaces(flags)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount_bind("/dev/null", "/proc/timer_list")?;
    mount("tmpfs", "/proc/fs", "tmpfs", MountFlags::RDONLY, None)?;
    new_namespaces(flags)
}

/// For root only: others may not make groups, unless somebody delegated one to them.
fn cover_cgroups() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    #[expect(deprecated, reason = "its successor is unsafe for the sake of descriptor tables, which are not unshared here")]
    rustix::thread::unshare(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(mount("tmpfs", "/sys/fs/cgroup", "tmpfs", MountFlags::RDONLY, None)?)
}

fn drop_capabilities() -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    let held = rustix::thread::capabilities(None)?.effective;
    for capability in CapabilitySet::all().iter().filter(|_| held.contains(CapabilitySet::SETPCAP)) {
        // One that the kernel does not know is not there either.
        let _unknown = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}

/// A call that shall fail.
struct Refusal {
    call: libc::c_long,
    /// Only if the low half of the argument of each number is so.
    when: Vec<(u32, When)>,
    errno: i32,
}

#[derive(Clone, Copy)]
enum When {
    Is(u32),
    Has(u32),
}

impl Refusal {
    fn of(call: libc::c_long, errno: i32) -> Self {
        Self { call, when: Vec::new(), errno }
    }
}

/// The filter. Each refusal is a stretch of its own that begins with loading the number of the call.
fn program(refused: &[Refusal]) -> Vec<sock_filter> {
    const LOAD: u16 = 0x20;
    const IS: u16 = 0x15;
    const HAS: u16 = 0x45;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;
    let one = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let mut program = Vec::new();
    for Refusal { call, when, errno } in refused {
        let call = u32::try_from(*call).expect("numbers of calls are small");
        // Whatever does not match jumps behind the refusal: two instructions a condition, and the refusal itself.
        let mut behind = u8::try_from(2 * when.len() + 1).expect("few conditions");
        program.extend([one(LOAD, 0, 0, 0), one(IS, call, 0, behind)]);
        for (argument, when) in when {
            let (code, value) = match when {
                When::Is(value) => (IS, *value),
                When::Has(bits) => (HAS, *bits),
            };
            behind -= 2;
            program.extend([one(LOAD, 16 + 8 * argument, 0, 0), one(code, value, 0, behind)]);
        }
        program.push(one(RETURN, ERRNO | errno.cast_unsigned(), 0, 0));
    }
    program.push(one(RETURN, ALLOW, 0, 0));
    program
}

//! Resource limits and capabilities.

use crate::roots::Roots;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Budgets that the kernel counts for each user, and compares with the limit of the requesting process: queued signals including
/// timers, bytes of POSIX message queues, bytes locked in memory (getrlimit(2)).
const OF_USER: [Resource; 3] = [Resource::Sigpending, Resource::Msgqueue, Resource::Memlock];

/// The divisor of a user's limits for one program: the program gets a quarter, and the rest stays for the server and the user's
/// other programs.
const SHARE: u64 = 4;

/// The limit of core files in bytes. With 1 the kernel writes no core file, because one byte is too small, and does not start the
/// handler of a `core_pattern` that is a pipe, which would run as root outside every sandbox. With 0 it would start the handler
/// (core(5)).
const NO_CORE: u64 = 1;

/// Disables core files: they would be written outside the policy, with the memory of the helper in them. A program gets back the
/// original descriptor limit, which was raised to open its roots, a quarter of its user's limits for the kernel's budgets, and no
/// priority above the default.
pub(crate) fn set(roots: &Roots, is_program: bool) -> Result<(), Errno> {
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(NO_CORE), maximum: Some(NO_CORE) })?;
    if is_program {
        for resource in OF_USER {
            let Rlimit { current, maximum } = rustix::process::getrlimit(resource);
            let share = |limit: Option<u64>| limit.map(|limit| limit / SHARE);
            rustix::process::setrlimit(resource, Rlimit { current: share(current), maximum: share(maximum) })?;
        }
        // A server that may use real-time scheduling or raise its priority does not pass that on.
        for resource in [Resource::Rtprio, Resource::Nice] {
            rustix::process::setrlimit(resource, Rlimit { current: Some(0), maximum: Some(0) })?;
        }
    }
    match &roots.raised_limit {
        Some(limit) if is_program => {
            rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.current, maximum: limit.maximum })
        }
        _ => Ok(()),
    }
}

/// Keeps only the capabilities for making mounts and giving up capabilities. With `over_execve` the next executed program keeps
/// them, too, independent of this process's user: in a new user namespace that user is rarely root, and `execve(2)` takes all
/// capabilities from other users (capabilities(7)).
pub(crate) fn keep_mounting(over_execve: bool) -> Result<(), Errno> {
    let needed = [CapabilitySet::SYS_ADMIN, CapabilitySet::SETPCAP];
    let held = rustix::thread::capabilities(None)?.permitted;
    let kept = needed.into_iter().filter(|capability| held.contains(*capability)).collect::<CapabilitySet>();
    let inheritable = if over_execve { kept } else { CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
    if over_execve {
        kept.iter().try_for_each(|capability| rustix::thread::configure_capability_in_ambient_set(capability, true))?;
    }
    Ok(())
}

/// Makes every permitted capability of this process effective.
pub(crate) fn use_permitted() -> Result<(), Errno> {
    let held = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(None, CapabilitySets { effective: held.permitted, ..held })
}

/// Drops the capabilities by which root reads and changes files against their modes. A process that makes a view for a process
/// without capabilities then sees the same files as that one: a path that the process cannot reach looks the same whether it exists
/// or not.
pub(crate) fn drop_file_capabilities() -> Result<(), Errno> {
    let files = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::FOWNER;
    let held = rustix::thread::capabilities(None)?;
    let kept = CapabilitySets {
        effective: held.effective - files,
        permitted: held.permitted - files,
        inheritable: held.inheritable - files,
    };
    rustix::thread::set_capabilities(None, kept)
}

/// Drops every capability in every set, for good.
pub(crate) fn drop_capabilities() -> Result<(), Errno> {
    keep_capabilities(CapabilitySet::empty())
}

/// Drops every capability except these, which executed programs do not inherit.
pub(crate) fn keep_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    rustix::thread::clear_ambient_capability_set()?;
    let held = rustix::thread::capabilities(None)?;
    // Only a process with this capability can reduce the bounding set. A process without it cannot gain anything from the set
    // either: no_new_privs is set before the first execve.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // `EINVAL`: this kernel does not know the capability.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    let kept = held.permitted & kept;
    let inheritable = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })
}

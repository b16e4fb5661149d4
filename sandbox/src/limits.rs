//! Resource limits and capabilities.

use crate::roots::Roots;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// No core files: they would be written outside the policy, with the memory of the helper in them. A program gets back the
/// limit of descriptors that its roots needed to be raised.
pub(crate) fn set(roots: &Roots, restore_descriptors: bool) -> Result<(), Errno> {
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    match &roots.raised_limit {
        Some(limit) if restore_descriptors => {
            rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.current, maximum: limit.maximum })
        }
        _ => Ok(()),
    }
}

/// Keeps what making mounts and giving up capabilities needs, and with `over_execve` also in a program that is executed next, whoever
/// this process's user is: in a new user namespace that is mostly nobody to whom `execve(2)` leaves any (capabilities(7)).
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

/// Gives up what lets root see and change files that their modes keep from it. Whoever makes a view for a process without
/// capabilities then sees what that process will: a path that the process cannot reach looks the same whether it exists or not.
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

/// Gives up every capability in every set, for good.
pub(crate) fn drop_capabilities() -> Result<(), Errno> {
    keep_capabilities(CapabilitySet::empty())
}

/// Gives up every capability but these, which no program that is executed has.
pub(crate) fn keep_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    rustix::thread::clear_ambient_capability_set()?;
    let held = rustix::thread::capabilities(None)?;
    // The bounding set can be reduced only by who holds this capability. Whoever does not hold it cannot gain anything from
    // the set either: no_new_privs comes before the first execve.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // A capability that this kernel does not know yet.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    let kept = held.permitted & kept;
    let inheritable = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })
}

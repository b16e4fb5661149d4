//! Landlock: the rights that a policy needs under each ABI, and the ruleset that enforces them.
//!
//! Landlock rules only add rights: a right that is granted on a directory cannot be removed below it. Landlock does not control
//! stat, chmod, chown, utime and xattr. [`crate::report::process_gaps`] lists the consequences.

use crate::compiled::{Compiled, Verdict};
use crate::enforce::Own;
use crate::policy::{Access, Files, Grants, Network, Policy};
use crate::roots::Roots;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::os::fd::AsFd;
use std::path::Path;

/// The lowest supported ABI. Below it, files outside the policy can be truncated: the right exists since Linux 6.2.
pub(crate) const MINIMUM_ABI: u32 = 3;

/// The first ABI with scopes for signals and abstract unix sockets, since Linux 6.12.
pub(crate) const SCOPES_ABI: u32 = 6;

/// The newest ABI whose rights this version handles; a newer kernel is used as if it had this one.
const KNOWN_ABI: u32 = 9;

/// Devices without state, which programs expect wherever they can read the system's directories.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The controlling terminal of the process that opens it.
const TERMINAL: &str = "/dev/tty";

/// The kind of process that is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// An fs worker: opens, makes and removes regular files, directories and links.
    Worker,
    /// A client's program.
    Process {
        /// It has its own terminal.
        tty: bool,
    },
}

/// The rights of one ruleset. Empty sets are not handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rights {
    /// The handled rights, which are denied unless granted.
    files: BitFlags<AccessFs>,
    read: BitFlags<AccessFs>,
    write: BitFlags<AccessFs>,
    device: BitFlags<AccessFs>,
    /// Handled and never granted.
    network: BitFlags<AccessNet>,
    /// The scopes that are handled: signals and abstract sockets stay inside.
    scope: BitFlags<Scope>,
}

impl Rights {
    /// The rights that `who` needs under an ABI. The function is pure, so that every ABI can be tested on any kernel.
    pub(crate) fn new(policy: &Policy, own_network: bool, who: Who, abi: u32) -> Self {
        let abi = ABI::from(i32::try_from(abi).unwrap_or(i32::MAX));
        let files = match policy.files {
            Files::Unrestricted => BitFlags::EMPTY,
            Files::Restricted(_) => AccessFs::from_all(abi),
        };
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let content = AccessFs::WriteFile | AccessFs::Truncate;
        let tree = AccessFs::MakeReg | AccessFs::MakeDir | AccessFs::MakeSym | AccessFs::Refer;
        let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
        let (read, write, device) = match who {
            Who::Worker => (read, read | content | tree | remove, BitFlags::EMPTY),
            Who::Process { .. } => {
                let read = read | AccessFs::Execute;
                let nodes = AccessFs::MakeFifo | AccessFs::MakeSock | AccessFs::MakeChar | AccessFs::MakeBlock;
                let write = read | content | tree | remove | nodes | AccessFs::IoctlDev;
                (read, write, content | AccessFs::ReadFile | AccessFs::IoctlDev)
            }
        };
        // A process in its own network can reach only itself.
        let no_network = who == Who::Worker || (policy.network == Network::Restricted && !own_network);
        let network = if no_network { AccessNet::from_all(abi) } else { BitFlags::EMPTY };
        Self { files, read: read & files, write: write & files, device: device & files, network, scope: Scope::from_all(abi) }
    }

    fn is_empty(self) -> bool {
        self.files.is_empty() && self.network.is_empty() && self.scope.is_empty()
    }

    fn of(self, access: Access) -> BitFlags<AccessFs> {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Deny => BitFlags::EMPTY,
        }
    }

    fn of_verdict(self, verdict: Verdict) -> BitFlags<AccessFs> {
        match verdict {
            Verdict::Write => self.write,
            Verdict::Read | Verdict::Protected => self.read,
            Verdict::Denied | Verdict::Unlisted => BitFlags::EMPTY,
        }
    }
}

/// The reason why there is no domain.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    #[error("{0}")]
    Ruleset(#[from] RulesetError),
    #[error("{0}")]
    Device(#[from] landlock::PathFdError),
    #[error("the kernel enforced only a part of the ruleset")]
    Partial,
}

/// Confines this thread and every process that it starts. Returns the ABI that is in force; 0 if the policy needs no Landlock
/// rights.
///
/// Each set of grants is a separate domain. Domains nest, so the kernel allows only what all of them allow.
pub(crate) fn restrict(
    policy: &Policy,
    roots: &Roots,
    own: Option<(&Own, &Compiled)>,
    who: Who,
    abi: u32,
) -> Result<u32, LandlockError> {
    let rights = Rights::new(policy, own.is_some_and(|(own, _)| own.network), who, abi);
    if rights.is_empty() {
        return Ok(0);
    }
    if policy.files == Files::Unrestricted {
        enforce(ruleset(rights)?)?;
    }
    for (set, grants) in policy.files.sets().enumerate() {
        let mut ruleset = ruleset(rights)?;
        for root in roots.all().iter().filter(|root| root.set == set) {
            let rights = rights.of(root.access);
            if let (Some((descriptor, _)), false) = (&root.descriptor, rights.is_empty()) {
                ruleset = grant(ruleset, descriptor, rights)?;
            }
        }
        if let Some((own, tables)) = own {
            if own.view.began_empty {
                ruleset = grant_places(ruleset, set, roots, tables, rights)?;
            }
            ruleset = grant_own(ruleset, own, tables, rights)?;
        } else if needs_devices(grants) && !rights.device.is_empty() {
            let terminal = (who == Who::Process { tty: true }).then_some(TERMINAL);
            for device in DEVICES.into_iter().chain(terminal).filter(|device| Path::new(device).exists()) {
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(device)?, rights.device))?;
            }
        }
        enforce(ruleset)?;
    }
    Ok(abi.min(KNOWN_ABI))
}

/// Confines the first process of a sandbox, and all processes that it starts, to reading, and to the changes that the policy
/// allows. The domains of [`restrict`] nest in this one and grant no more.
pub(crate) fn restrict_first(
    policy: &Policy,
    roots: &Roots,
    own: &Own,
    tables: &Compiled,
    abi: u32,
) -> Result<(), LandlockError> {
    // The launcher restricts the network: init has no system call that makes a socket.
    let rights = Rights { network: BitFlags::EMPTY, ..Rights::new(policy, own.network, Who::Process { tty: true }, abi) };
    if rights.is_empty() {
        return Ok(());
    }
    let mut ruleset = ruleset(rights)?;
    if !rights.files.is_empty() {
        ruleset = grant(ruleset, &PathFd::new("/")?, rights.read)?;
        for (descriptor, _) in
            roots.all().iter().filter(|root| root.access == Access::Write).filter_map(|root| root.descriptor.as_ref())
        {
            ruleset = grant(ruleset, descriptor, rights.write)?;
        }
        ruleset = grant_own(ruleset, own, tables, rights)?;
    }
    enforce(ruleset)
}

/// Makes a ruleset that handles these rights and grants none.
fn ruleset(rights: Rights) -> Result<RulesetCreated, RulesetError> {
    // A right that the kernel does not know is an error; it is never left out.
    let mut ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if !rights.files.is_empty() {
        ruleset = ruleset.handle_access(rights.files)?;
    }
    if !rights.network.is_empty() {
        ruleset = ruleset.handle_access(rights.network)?;
    }
    if !rights.scope.is_empty() {
        ruleset = ruleset.scope(rights.scope)?;
    }
    ruleset.create()
}

fn enforce(ruleset: RulesetCreated) -> Result<(), LandlockError> {
    let status = ruleset.restrict_self()?;
    if status.ruleset == RulesetStatus::FullyEnforced { Ok(()) } else { Err(LandlockError::Partial) }
}

/// In a view that began empty, each granted path is a separate mount on a ground that the policy does not name. The kernel walks
/// from a file up through the mounts of the view, so it never reaches an entry above the granted path. So a set that has only such
/// an entry repeats its rights at the granted path.
fn grant_places(
    mut ruleset: RulesetCreated,
    set: usize,
    roots: &Roots,
    tables: &Compiled,
    rights: Rights,
) -> Result<RulesetCreated, LandlockError> {
    for root in roots.all().iter().filter(|root| root.set != set && tables.verdict(&root.real).is_granted()) {
        let rights = rights.of_verdict(tables.verdict_of_set(set, &root.real));
        if let (Some((descriptor, _)), false) = (&root.descriptor, rights.is_empty()) {
            ruleset = grant(ruleset, descriptor, rights)?;
        }
    }
    Ok(ruleset)
}

/// Grants rights on the parts that the view made: the sandbox's own devices, terminals, memory and processes.
fn grant_own(mut ruleset: RulesetCreated, own: &Own, tables: &Compiled, rights: Rights) -> Result<RulesetCreated, LandlockError> {
    let list = rights.files & AccessFs::ReadDir;
    let own_places = [
        ("/dev", list),
        ("/dev/shm", rights.write),
        ("/dev/pts", rights.device | list),
        ("/dev/console", rights.device),
        (TERMINAL, rights.device),
        ("/proc", rights.read),
    ];
    // Directories that only lead to granted paths. Covers below them stay in force.
    let ground = own.view.began_empty.then_some(("/", list));
    let devices = DEVICES.map(|device| (device, rights.device));
    for (path, rights) in own_places.into_iter().chain(devices).chain(ground) {
        // A denied path is covered, or only leads to paths below it.
        if path != "/" && tables.verdict(Path::new(path)) == Verdict::Denied {
            continue;
        }
        if Path::new(path).exists() {
            let place = PathFd::new(path)?;
            ruleset = grant(ruleset, &place, rights)?;
        }
    }
    Ok(ruleset)
}

fn grant(ruleset: RulesetCreated, descriptor: &impl AsFd, rights: BitFlags<AccessFs>) -> Result<RulesetCreated, RulesetError> {
    // For anything except a directory the kernel accepts only file rights; the others would have no meaning there.
    let is_directory = rustix::fs::fstat(descriptor)
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory);
    let rights = if is_directory { rights } else { rights & AccessFs::from_file(ABI::V5) };
    ruleset.add_rule(PathBeneath::new(descriptor, rights))
}

/// Whether programs can run under these grants, so that they expect `/dev/null` and similar devices, and no entry denies those.
fn needs_devices(grants: &Grants) -> bool {
    let covers = |path: &str, access: Access| {
        grants.entries.iter().any(|grant| grant.access == access && Path::new(path).starts_with(grant.path.as_path()))
    };
    let runs = |access| covers("/usr/bin", access);
    (runs(Access::Read) || runs(Access::Write))
        && !DEVICES.into_iter().chain([TERMINAL]).any(|device| covers(device, Access::Deny))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Grant;
    use portcullis_protocol::path::AbsolutePath;

    fn policy(network: Network) -> Policy {
        let entries = vec![Grant::new(AbsolutePath::new("/w").unwrap(), Access::Write)];
        Policy { files: Files::Restricted(Grants::new(entries, Vec::new()).unwrap().into()), network }
    }

    #[test]
    fn every_abi_handles_all_that_it_knows() {
        for abi in 1..=9 {
            let rights = Rights::new(&policy(Network::Restricted), false, Who::Process { tty: true }, abi);
            let all = AccessFs::from_all(ABI::from(i32::try_from(abi).unwrap()));
            assert_eq!(rights.files, all, "ABI {abi}");
            assert!(all.contains(rights.read | rights.write | rights.device), "ABI {abi}");
            assert_eq!(rights.files.contains(AccessFs::Refer), abi >= 2, "ABI {abi}");
            assert_eq!(rights.files.contains(AccessFs::Truncate), abi >= MINIMUM_ABI, "ABI {abi}");
            assert_eq!(!rights.network.is_empty(), abi >= 4, "ABI {abi}");
            assert_eq!(rights.files.contains(AccessFs::IoctlDev), abi >= 5, "ABI {abi}");
            assert_eq!(!rights.scope.is_empty(), abi >= SCOPES_ABI, "ABI {abi}");
        }
    }

    #[test]
    fn reading_grants_nothing_that_changes() {
        for (abi, who) in (1..=9).flat_map(|abi| [(abi, Who::Worker), (abi, Who::Process { tty: true })]) {
            let rights = Rights::new(&policy(Network::Enabled), false, who, abi);
            let changes = AccessFs::from_write(ABI::V9);
            assert!((rights.read & changes).is_empty(), "ABI {abi}, {who:?}");
            assert!((rights.of(Access::Deny)).is_empty());
            assert!(!rights.write.contains(AccessFs::ResolveUnix), "host sockets stay out of reach");
        }
    }

    #[test]
    fn a_worker_executes_nothing_makes_no_device_and_has_no_network() {
        for abi in 1..=9 {
            let rights = Rights::new(&policy(Network::Enabled), false, Who::Worker, abi);
            let never = AccessFs::Execute | AccessFs::IoctlDev | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeSock;
            assert!(((rights.read | rights.write | rights.device) & never).is_empty(), "ABI {abi}");
            assert_eq!(!rights.network.is_empty(), abi >= 4, "ABI {abi}");
        }
    }

    #[test]
    fn unrestricted_files_still_get_scopes_where_there_are_any() {
        let policy = Policy { files: Files::Unrestricted, network: Network::Restricted };
        assert!(Rights::new(&policy, false, Who::Process { tty: true }, 3).is_empty());
        let rights = Rights::new(&policy, false, Who::Process { tty: true }, 7);
        assert!(rights.files.is_empty() && !rights.scope.is_empty() && !rights.network.is_empty());
    }
}

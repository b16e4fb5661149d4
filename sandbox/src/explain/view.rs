//! What file calls and processes find where the policy's tables are not the whole answer: in `/proc`, `/sys` and `/dev`, and on other
//! file systems of the kernel.
//!
//! A file call sees the machine's files, without names that stand for processes or show the kernel. A process in a sandbox with
//! namespaces has a `/proc` and a `/dev` of its own, in which the sandbox masks names of the same kind.

use crate::compiled::{Compiled, Verdict};
use crate::kernel_files::{Hidden, hidden};
use crate::mounts::{is_made, masked, mount_above};
use crate::policy::{Access, Files, Policy};
use std::path::Path;

/// What a policy comes to at such a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Views {
    /// For file calls.
    pub file_calls: Seen,
    /// For processes, in a sandbox with namespaces.
    pub processes: Seen,
    /// Whether an entry of the policy could allow more.
    pub has_grant: bool,
}

/// What may be done with a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Whether it can be read.
    pub read: bool,
    /// Whether it can be changed.
    pub change: bool,
    /// The reason.
    pub why: String,
}

impl Seen {
    fn nothing(why: impl Into<String>) -> Self {
        Self { read: false, change: false, why: why.into() }
    }

    fn read_only(why: impl Into<String>) -> Self {
        Self { read: true, change: false, why: why.into() }
    }

    fn all(why: impl Into<String>) -> Self {
        Self { read: true, change: true, why: why.into() }
    }

    fn by_policy(verdict: Verdict) -> Self {
        Self { read: verdict.is_granted(), change: verdict == Verdict::Write, why: "as the policy says".to_owned() }
    }

    /// The same without changes.
    fn unchanged(verdict: Verdict) -> Self {
        Self { read: verdict.is_granted(), change: false, why: KERNELS.to_owned() }
    }
}

const KERNELS: &str = "as the policy says, and the kernel's own files are never changed under a policy";
const OWN_PROC: &str = "a sandbox has its own read-only `/proc`, with its own processes";

/// What a policy comes to at a path without links where that differs from [`Compiled::verdict`]. None elsewhere, and where the policy
/// restricts no files.
#[must_use]
pub fn views(policy: &Policy, tables: &Compiled, real: &Path) -> Option<Views> {
    let verdict = tables.verdict(real);
    if policy.files == Files::Unrestricted {
        return None;
    }
    if verdict == Verdict::Denied {
        let is_kernels = ["/proc", "/sys", "/dev"].into_iter().any(|own| real.starts_with(own));
        let denied = || Seen::nothing("the policy denies it");
        return is_kernels.then(|| Views { file_calls: denied(), processes: denied(), has_grant: false });
    }
    if real.starts_with("/dev") {
        return Some(device(policy, verdict, real));
    }
    let mount = mount_above(real);
    let is_proc = real.starts_with("/proc");
    if !is_proc && !real.starts_with("/sys") && mount.is_none() {
        return None;
    }
    let processes = match (masked(real), mount) {
        (Some((name, true)), _) => Seen::nothing(format!("a sandbox masks `{}`", name.display())),
        (None, _) if is_proc => Seen::read_only(OWN_PROC),
        (_, Some((mount, true))) => Seen::nothing(format!("a sandbox hides the kernel's file system at `{}`", mount.display())),
        // Which user id a sandbox of root has depends on the file systems of the machine.
        (Some((name, false)), _) => {
            let why = format!("as the policy says, but a sandbox with root's own user id masks `{}`", name.display());
            Seen { why, ..Seen::unchanged(verdict) }
        }
        (None, _) => Seen::unchanged(verdict),
    };
    let file_calls = match hidden(real) {
        Some(Hidden::Process(name)) => {
            Seen::nothing(format!("`{}` stands for a process, and file calls see no process", name.display()))
        }
        Some(Hidden::Masked(name)) => Seen::nothing(format!("`{}` shows the machine's kernel, and is masked", name.display())),
        None => Seen::unchanged(verdict),
    };
    let has_grant = verdict == Verdict::Unlisted && hidden(real).is_none();
    Some(Views { file_calls, processes, has_grant })
}

/// The same of a path at or below `/dev`.
fn device(policy: &Policy, verdict: Verdict, real: &Path) -> Views {
    let is_in_memory = real.starts_with("/dev/shm");
    let processes = if is_named(policy, real) {
        Seen::by_policy(verdict)
    } else if real == Path::new("/dev") {
        Seen::read_only("a sandbox has its own `/dev`")
    } else if is_made(real) {
        Seen::all(match real.to_str() {
            _memory if is_in_memory => "a sandbox has its own `/dev/shm`",
            Some("/dev/console") => "it is the terminal of a process that has one, in a sandbox's own `/dev`",
            _made => "a sandbox has it in its own `/dev`",
        })
    } else {
        Seen::nothing("a sandbox has its own `/dev`, without this name; only an entry for the name itself adds it")
    };
    let file_calls = if is_in_memory || real == Path::new("/dev") {
        Seen { why: "as the policy says, of the machine's own directory".to_owned(), ..Seen::by_policy(verdict) }
    } else {
        Seen::nothing("file calls read and write no device")
    };
    let has_grant = is_in_memory || !is_made(real) && (verdict == Verdict::Unlisted || is_named(policy, real));
    Views { file_calls, processes, has_grant }
}

/// Whether every set of grants has an entry below `/dev` for a path or a directory above it.
fn is_named(policy: &Policy, real: &Path) -> bool {
    policy.files.sets().all(|set| {
        let mut granted = set.entries.iter().filter(|entry| entry.access != Access::Deny);
        granted.any(|entry| {
            let path = entry.path.as_path();
            path != Path::new("/dev") && path.starts_with("/dev") && real.starts_with(path)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiled::Resolved;
    use crate::policy::{Grant, Grants, Network};
    use Access::{Deny, Read, Write};
    use portcullis_protocol::path::AbsolutePath;

    fn policy(entries: &[(&str, Access)]) -> Policy {
        let entries = entries.iter().map(|(path, access)| Grant::new(AbsolutePath::new(path).unwrap(), *access)).collect();
        Policy { files: Files::Restricted(Grants::new(entries, Vec::new()).unwrap().into()), network: Network::Restricted }
    }

    fn of(policy: &Policy, real: &str) -> Option<Views> {
        views(policy, &Compiled::new(policy, Resolved::same).unwrap(), Path::new(real))
    }

    /// Reading and changing, by file calls and by processes.
    fn acts(policy: &Policy, real: &str) -> [(bool, bool); 2] {
        let Views { file_calls, processes, .. } = of(policy, real).unwrap();
        [file_calls, processes].map(|seen| (seen.read, seen.change))
    }

    const NO: (bool, bool) = (false, false);
    const READ: (bool, bool) = (true, false);
    const ALL: (bool, bool) = (true, true);

    #[test]
    fn masks_and_own_places_decide_before_the_tables() {
        let all = policy(&[("/", Read), ("/dev/fuse", Write), ("/sys/kernel/mm", Write), ("/w", Write), ("/proc/bus", Deny)]);
        for (path, expect) in [
            ("/proc/kcore", [NO, NO]),
            ("/proc/acpi/wakeup", [NO, NO]),
            ("/proc/self/maps", [NO, READ]),
            ("/proc/1", [NO, READ]),
            ("/proc/locks", [NO, READ]),
            ("/proc/cpuinfo", [READ, READ]),
            ("/proc/bus/pci", [NO, NO]),
            ("/sys/kernel/mm/x", [READ, READ]),
            ("/dev/null", [NO, ALL]),
            ("/dev/ptmx", [NO, ALL]),
            ("/dev/pts/3", [NO, ALL]),
            ("/dev/shm/x", [READ, ALL]),
            ("/dev/sda", [NO, NO]),
            ("/dev/fuse", [NO, ALL]),
            ("/dev", [READ, READ]),
        ] {
            assert_eq!(acts(&all, path), expect, "{path}");
        }
        assert_eq!(acts(&all, "/sys/firmware/acpi"), [NO, READ]);
        assert!(of(&all, "/sys/firmware/acpi").unwrap().processes.why.contains("masks `/sys/firmware`"));
        assert_eq!((of(&all, "/w/x"), of(&all, "/procs")), (None, None));
        let free = Policy { files: Files::Unrestricted, network: Network::Restricted };
        assert_eq!(of(&free, "/proc/kcore"), None);
    }

    #[test]
    fn an_entry_is_named_only_where_it_adds_something() {
        let own = policy(&[("/w", Write)]);
        for (path, expect, has_grant) in [
            ("/proc/cpuinfo", [NO, READ], true),
            ("/proc/kcore", [NO, NO], false),
            ("/sys/kernel/mm", [NO, NO], true),
            ("/dev/null", [NO, ALL], false),
            ("/dev/sda", [NO, NO], true),
            ("/dev/shm/x", [NO, ALL], true),
        ] {
            assert_eq!((acts(&own, path), of(&own, path).unwrap().has_grant), (expect, has_grant), "{path}");
        }
        let both = policy(&[("/", Read), ("/dev/sda", Read)]).bounded_by(&policy(&[("/", Read)])).unwrap();
        assert_eq!(acts(&both, "/dev/sda"), [NO, NO], "the ceiling does not name it");
    }
}

//! What was asked and what can be had: of this machine, and of the layers that this version builds.

use crate::core_handler;
use crate::landlock::{MINIMUM_ABI, SCOPES_ABI};
use crate::policy::{Access, Grants, Policy};
use crate::roots::Roots;
use crate::{remedy, seccomp, sys};
use portcullis_protocol::environment::{Enforcement, LayerState, SeccompTable, SeccompTables};
use portcullis_protocol::helper::{CgroupLayer, NamespaceLayer};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const USER_NAMESPACES: &str = "user namespaces";

const CGROUP: &str = "cgroup v2";

const CGROUP_REMEDY: &str = "delegate a cgroup to the server: Delegate=yes in its systemd unit, or systemd-run --user --scope -p Delegate=yes \
     portcullis serve; in a container a cgroup namespace of its own and /sys/fs/cgroup mounted writable";

/// What this machine offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineReport {
    /// Release of the kernel.
    pub kernel: String,
    /// Of the kernel's Landlock; 0 for none.
    pub landlock_abi: u32,
    /// Each layer, in the order in which a helper uses them.
    pub layers: Vec<Layer>,
}

/// One layer on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// `landlock`, `seccomp`, `user namespaces` or `cgroup v2`.
    pub name: &'static str,
    /// Whether it can be used, as far as can be told without using it.
    pub available: bool,
    /// What was found.
    pub reason: String,
    /// What to do about it; empty if nothing need be done.
    pub remedy: &'static str,
}

/// Something that a policy asks and that cannot be enforced on a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// Its kind.
    pub what: GapKind,
    /// Whether the operator can accept it; the others are refused whatever the operator says.
    pub waivable: bool,
    /// Says what is not enforced, and names the layer and the remedy.
    pub text: String,
}

/// Kinds of gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapKind {
    /// chmod, chown, utime and xattr reach files outside the writable roots.
    MetadataOutside,
    /// Places below a writable root that should be read-only.
    CarveOuts,
    /// Places below a granted root that should be out of reach.
    DenyEntries,
    /// Signals reach processes outside: the kernel's Landlock is too old.
    Signals,
}

impl GapKind {
    /// The word in reports and in [`portcullis_protocol::helper::Enforced::missing`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MetadataOutside => "metadata-outside",
            Self::CarveOuts => "carve-outs",
            Self::DenyEntries => "deny-entries",
            Self::Signals => "signals",
        }
    }

    fn gap(self) -> Gap {
        const MOUNTS: &str = "needs the namespaces layer";
        let text = match self {
            Self::MetadataOutside => {
                format!("keeping chmod, chown, utime and xattr from files outside the writable roots {MOUNTS}")
            }
            Self::CarveOuts => format!("keeping .git and other places below a writable root read-only {MOUNTS}"),
            Self::DenyEntries => {
                format!(
                    "denying places below a granted one {MOUNTS}: grant only what may be reached, or use file calls, which hold it"
                )
            }
            Self::Signals => {
                format!(
                    "keeping signals from processes outside needs the Landlock layer with ABI {SCOPES_ABI}: use Linux 6.12 or later"
                )
            }
        };
        Gap { what: self, waivable: matches!(self, Self::MetadataOutside | Self::CarveOuts), text }
    }
}

/// The gaps in words, each once, with what to do where the operator can accept them.
#[must_use]
pub fn describe(gaps: &[Gap]) -> String {
    let mut text = gaps.iter().map(|gap| gap.text.as_str()).collect::<Vec<_>>().join("; ");
    if !gaps.is_empty() && gaps.iter().all(|gap| gap.waivable) {
        text.push_str("; start the gateway with --allow-unprotected-metadata to accept that");
    }
    text
}

/// What the layers of this machine cannot enforce on a process under this policy: nothing, where it gives namespaces. Links are
/// not followed: a helper
/// asks again with real paths, and refuses what it finds then.
#[must_use]
pub fn process_gaps(policy: &Policy, namespaces: &NamespaceLayer) -> Vec<Gap> {
    match namespaces {
        NamespaceLayer::Available { .. } => Vec::new(),
        NamespaceLayer::Unavailable { reason, remedy } => explained(gaps_by_name(policy), reason, remedy),
    }
}

/// Says once, behind the last gap that namespaces would close, why that layer cannot be had.
fn explained(mut gaps: Vec<Gap>, reason: &str, remedy: &str) -> Vec<Gap> {
    if let Some(last) = gaps.iter_mut().rfind(|gap| gap.what != GapKind::Signals) {
        let then = if remedy.is_empty() { String::new() } else { format!(": {remedy}") };
        last.text.push_str(&format!(" (not to be had here, since {reason}{then})"));
    }
    gaps
}

fn gaps_by_name(policy: &Policy) -> Vec<Gap> {
    let abi = sys::landlock_abi().unwrap_or(0);
    gaps_of_sets(policy, |_set, grants| gaps_between(&named(grants), &named_bases(grants), abi))
}

/// What to do where no cgroups can be made.
#[must_use]
pub fn cgroup_remedy() -> &'static str {
    CGROUP_REMEDY
}

/// What to do on this machine where namespaces or mounts are refused.
#[must_use]
pub fn namespace_remedy() -> String {
    remedy::here()
}

/// The same, by the real paths of opened roots and by their names.
pub(crate) fn gaps(policy: &Policy, roots: &Roots, abi: u32) -> Vec<Gap> {
    gaps_of_sets(policy, |set, grants| {
        let real =
            roots.all().iter().filter(|root| root.set == set && !root.is_skipped).map(|root| (root.real.as_path(), root.access));
        let real_bases: Vec<PathBuf> = grants.deny_globs.iter().filter_map(|glob| roots.real(&glob.base)).collect();
        let entries: Vec<_> = named(grants).into_iter().chain(real).collect();
        let bases: Vec<_> = named_bases(grants).into_iter().chain(real_bases.iter().map(PathBuf::as_path)).collect();
        gaps_between(&entries, &bases, abi)
    })
}

/// Without what is skipped where it is missing: that is known only once the roots are open, and then it counts by its real path.
fn named(grants: &Grants) -> Vec<(&Path, Access)> {
    grants.entries.iter().filter(|grant| !grant.skip_missing).map(|grant| (grant.path.as_path(), grant.access)).collect()
}

fn named_bases(grants: &Grants) -> Vec<&Path> {
    grants.deny_globs.iter().map(|glob| glob.base.as_path()).collect()
}

/// What is a gap in one set of grants is one in the policy: no other set takes away what this one means to. Only where one of
/// them grants no writing at all nothing can be changed, whatever the others grant.
fn gaps_of_sets(policy: &Policy, of_set: impl Fn(usize, &Grants) -> Vec<Gap>) -> Vec<Gap> {
    let mut gaps: Vec<Gap> = Vec::new();
    for (set, grants) in policy.files.sets().enumerate() {
        let new = of_set(set, grants).into_iter().filter(|gap| !gaps.contains(gap)).collect::<Vec<_>>();
        gaps.extend(new);
    }
    if policy.files.is_read_only() {
        gaps.retain(|gap| !matches!(gap.what, GapKind::MetadataOutside | GapKind::CarveOuts));
    }
    gaps
}

/// Landlock adds up the grants on the way down to a path. So whatever says less than any entry above it is a gap.
fn gaps_between(entries: &[(&Path, Access)], glob_bases: &[&Path], abi: u32) -> Vec<Gap> {
    let mut granted: HashMap<&Path, Access> = HashMap::new();
    for (path, access) in entries.iter().filter(|(_, access)| *access != Access::Deny) {
        let most = granted.entry(path).or_insert(*access);
        *most = (*most).max(*access);
    }
    let above = |path: &Path, least: Access| path.ancestors().any(|above| granted.get(above).is_some_and(|it| *it >= least));
    let any = |access: Access| entries.iter().any(|entry| entry.1 == access);
    let narrowed = |access: Access, least: Access| entries.iter().any(|entry| entry.1 == access && above(entry.0, least));
    let globs = glob_bases.iter().any(|base| above(base, Access::Read) || granted.keys().any(|path| path.starts_with(base)));

    let mut kinds = Vec::new();
    if any(Access::Write) {
        kinds.push(GapKind::MetadataOutside);
    }
    // Every writable root has protected names.
    if any(Access::Write) || narrowed(Access::Read, Access::Write) {
        kinds.push(GapKind::CarveOuts);
    }
    if narrowed(Access::Deny, Access::Read) || globs {
        kinds.push(GapKind::DenyEntries);
    }
    if (MINIMUM_ABI..SCOPES_ABI).contains(&abi) {
        kinds.push(GapKind::Signals);
    }
    kinds.into_iter().map(GapKind::gap).collect()
}

/// What this machine offers. It looks and tries nothing that would change the caller.
#[must_use]
pub fn machine() -> MachineReport {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let abi = sys::landlock_abi();
    let layers = vec![landlock(&abi), seccomp_filters(), user_namespaces(), cgroup()];
    MachineReport { kernel, landlock_abi: abi.unwrap_or(0), layers }
}

/// What can be enforced here, with the namespaces and cgroups as they were tried.
#[must_use]
pub fn enforcement(namespaces: &NamespaceLayer, cgroups: &CgroupLayer) -> Enforcement {
    let MachineReport { kernel, landlock_abi, layers } = machine();
    let state = |layer: Layer| LayerState {
        name: layer.name.to_owned(),
        available: layer.available,
        reason: layer.reason,
        remedy: layer.remedy.to_owned(),
    };
    let mut layers: Vec<LayerState> =
        layers.into_iter().filter(|layer| layer.name != USER_NAMESPACES && layer.name != CGROUP).map(state).collect();
    layers.push(tried_cgroups(cgroups));
    layers.extend(remedy::namespaces(namespaces, &remedy::Facts::here()));
    layers.extend(core_handler::reached());
    let tables = tables().into_iter().map(|(name, sha256)| SeccompTable { name: name.to_owned(), sha256 }).collect();
    Enforcement { kernel, landlock_abi, layers, namespaces: namespaces.clone(), seccomp: SeccompTables { tables } }
}

fn tried_cgroups(cgroups: &CgroupLayer) -> LayerState {
    let (available, reason) = match (cgroups.processes, cgroups.memory) {
        (true, true) => (true, "for processes and memory".to_owned()),
        (true, false) => (false, format!("for processes only: {}", cgroups.reason)),
        (false, true) => (false, format!("for memory only: {}", cgroups.reason)),
        (false, false) => (false, cgroups.reason.clone()),
    };
    let remedy = if available { String::new() } else { CGROUP_REMEDY.to_owned() };
    LayerState { name: "cgroups".to_owned(), available, reason, remedy }
}

/// The tables of system calls by their names, with the SHA-256 of what the kernel gets, in hexadecimal.
#[must_use]
pub fn tables() -> Vec<(&'static str, String)> {
    seccomp::hashes()
}

fn landlock(abi: &std::io::Result<u32>) -> Layer {
    let (available, reason, remedy) = match abi {
        Ok(abi) if *abi >= SCOPES_ABI => (true, format!("ABI {abi}"), ""),
        Ok(abi) if *abi >= MINIMUM_ABI => (true, format!("ABI {abi}, without scopes for signals"), "use Linux 6.12 or later"),
        Ok(abi) => (false, format!("ABI {abi}, which cannot deny truncation"), "use Linux 6.2 or later"),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            (false, "built into the kernel and not enabled".to_owned(), "boot with lsm=landlock,…")
        }
        Err(error) => (false, format!("not offered: {error}"), "use Linux 6.2 or later with CONFIG_SECURITY_LANDLOCK"),
    };
    Layer { name: "landlock", available, reason, remedy }
}

fn seccomp_filters() -> Layer {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
    let (available, reason, remedy) = match actions {
        Ok(actions) if actions.split_whitespace().any(|action| action == "errno") => (true, "filters".to_owned(), ""),
        Ok(actions) => (false, format!("actions: {}", actions.trim()), "use a kernel with CONFIG_SECCOMP_FILTER"),
        Err(error) => {
            (false, format!("/proc/sys/kernel/seccomp: {error}"), "mount /proc; use a kernel with CONFIG_SECCOMP_FILTER")
        }
    };
    Layer { name: "seccomp", available, reason, remedy }
}

fn user_namespaces() -> Layer {
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let is = |path: &str, value: &str| read(path).as_deref() == Some(value);
    let root = rustix::process::geteuid().is_root();
    let (available, reason, remedy) = if !Path::new("/proc/self/ns/user").exists() {
        (false, "not offered", "use a kernel with CONFIG_USER_NS")
    } else if is("/proc/sys/user/max_user_namespaces", "0") {
        (false, "user.max_user_namespaces is 0", "raise it with sysctl")
    } else if !root && is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        (false, "kernel.unprivileged_userns_clone is 0", "set it to 1 with sysctl")
    } else if !root && is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        (false, "restricted by AppArmor", "give the server a profile with userns")
    } else {
        (true, "offered; a container may still refuse them", "")
    };
    Layer { name: USER_NAMESPACES, available, reason: reason.to_owned(), remedy }
}

fn cgroup() -> Layer {
    let layer =
        |available, reason: String| Layer { name: CGROUP, available, reason, remedy: if available { "" } else { CGROUP_REMEDY } };
    let Ok(own) = fs::read_to_string("/proc/self/cgroup") else {
        return layer(false, "/proc/self/cgroup cannot be read".to_owned());
    };
    let Some(own) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return layer(false, "no unified hierarchy".to_owned());
    };
    let directory = Path::new("/sys/fs/cgroup").join(own);
    let controllers = fs::read_to_string(directory.join("cgroup.controllers")).unwrap_or_default();
    let lacks: Vec<_> =
        ["pids", "memory", "cpu"].into_iter().filter(|name| !controllers.split_whitespace().any(|it| it == *name)).collect();
    if !lacks.is_empty() {
        return layer(false, format!("{} has no controller for {}", directory.display(), lacks.join(", ")));
    }
    let writable = rustix::fs::access(&directory, rustix::fs::Access::WRITE_OK).is_ok();
    layer(writable, format!("{} is {}writable", directory.display(), if writable { "" } else { "not " }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Files, Grant, Grants, Network};
    use Access::{Deny, Read, Write};
    use portcullis_protocol::path::AbsolutePath;

    #[track_caller]
    fn check(entries: &[(&str, Access)], globs: &[&str], abi: u32, expect: &[&str]) {
        let entries: Vec<_> = entries.iter().map(|(path, access)| (Path::new(*path), *access)).collect();
        let globs: Vec<_> = globs.iter().map(Path::new).collect();
        let gaps: Vec<_> = gaps_between(&entries, &globs, abi).iter().map(|gap| gap.what.name()).collect();
        assert_eq!(gaps, expect, "{entries:?} {globs:?}");
    }

    #[test]
    fn a_gap_is_what_says_less_than_something_above() {
        check(&[("/", Read)], &[], 7, &[]);
        check(&[("/", Read), ("/w", Write)], &[], 7, &["metadata-outside", "carve-outs"]);
        check(&[("/", Read), ("/a", Deny)], &[], 7, &["deny-entries"]);
        check(&[("/a", Deny), ("/a/b", Read)], &[], 7, &[]);
        check(&[("/a", Read), ("/a/b", Deny), ("/a/b/c", Read)], &[], 7, &["deny-entries"]);
        check(&[("/a", Read), ("/ab", Deny)], &[], 7, &[]);
    }

    #[test]
    fn a_glob_is_a_gap_wherever_it_can_meet_a_grant() {
        check(&[("/a", Read)], &["/a/b"], 7, &["deny-entries"]);
        check(&[("/a/b", Read)], &["/a"], 7, &["deny-entries"]);
        check(&[("/a", Read)], &["/b"], 7, &[]);
    }

    #[test]
    fn old_kernels_do_not_keep_signals_inside() {
        check(&[("/", Read)], &[], 5, &["signals"]);
    }

    #[test]
    fn with_namespaces_nothing_is_missing_and_without_them_it_is_said_why() {
        let grant = |path, access| Grant::new(AbsolutePath::new(path).unwrap(), access);
        let grants = Grants { entries: vec![grant("/", Read), grant("/w", Write)], ..Grants::default() };
        let policy = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
        assert_eq!(
            process_gaps(
                &policy,
                &NamespaceLayer::Available { user: true, own_proc: false, shared: String::new(), uids: Default::default() }
            ),
            []
        );
        let (reason, remedy) = ("unshare says EPERM".to_owned(), "ask the administrator".to_owned());
        let gaps = process_gaps(&policy, &NamespaceLayer::Unavailable { reason, remedy });
        let text = describe(&gaps);
        assert!(gaps.len() > 1 && text.matches("since unshare says EPERM: ask the administrator").count() == 1, "{text}");
    }

    #[test]
    fn tables_have_hashes_of_their_own() {
        let tables = tables();
        let hashes: std::collections::BTreeSet<&str> = tables.iter().map(|(_, hash)| hash.as_str()).collect();
        assert!(hashes.len() == tables.len() && hashes.iter().all(|hash| hash.len() == 64), "{tables:?}");
    }

    #[test]
    fn each_text_names_layer_and_remedy() {
        for kind in [GapKind::MetadataOutside, GapKind::CarveOuts, GapKind::DenyEntries, GapKind::Signals] {
            let gap = kind.gap();
            assert!(gap.text.contains("layer"), "{}", gap.text);
            let text = describe(std::slice::from_ref(&gap));
            assert_eq!(gap.waivable, text.contains("--allow-unprotected-metadata"), "{text}");
        }
    }
}

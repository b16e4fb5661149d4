//! Why a machine gives no namespaces, and what to do about each cause.

use portcullis_protocol::environment::LayerState;
use portcullis_protocol::helper::{NamespaceLayer, Uids};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Files that say what keeps namespaces away. Each is read once; what cannot be read is not held against the machine.
const FILES: [&str; 5] = [MAXIMUM, CLONE, APPARMOR, "/proc/self/status", "/proc/self/mountinfo"];
const MAXIMUM: &str = "/proc/sys/user/max_user_namespaces";
const CLONE: &str = "/proc/sys/kernel/unprivileged_userns_clone";
const APPARMOR: &str = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns";

/// What of a machine has to do with it.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    files: HashMap<&'static str, String>,
    is_root: bool,
    /// Whether the kernel knows user namespaces.
    are_built: bool,
    executable: String,
}

impl Facts {
    /// Of this machine.
    pub(crate) fn here() -> Self {
        let text = |path: &'static str| fs::read_to_string(path).ok().map(|text| (path, text.trim().to_owned()));
        Self {
            files: FILES.into_iter().filter_map(text).collect(),
            is_root: rustix::process::geteuid().is_root(),
            are_built: Path::new("/proc/self/ns/user").exists(),
            executable: fs::read_link("/proc/self/exe").map_or_else(|_| "PATH".to_owned(), |path| path.display().to_string()),
        }
    }

    fn says(&self, file: &str, value: &str) -> bool {
        self.files.get(file).is_some_and(|text| text == value)
    }
}

/// The layers `namespaces`, `own proc` and `own users` as they were tried, with what to do on this machine where one cannot be had.
pub(crate) fn namespaces(tried: &NamespaceLayer, facts: &Facts) -> [LayerState; 3] {
    let layer = |name: &str, available, reason: &str, remedy: String| LayerState {
        name: name.to_owned(),
        available,
        reason: reason.to_owned(),
        remedy,
    };
    match tried {
        NamespaceLayer::Available { user, own_proc, shared, uids } => {
            let users = if *user {
                match uids {
                    Uids::Servers => layer("own users", true, "a user namespace each", String::new()),
                    Uids::Own => layer("own users", true, "a user namespace and a user id of the machine each", String::new()),
                    Uids::Refused { reason } => {
                        let reason = format!("a user namespace each, with root's user id on the machine: {reason}");
                        layer("own users", true, &reason, UIDS.to_owned())
                    }
                }
            } else {
                let reason =
                    format!("sandboxes share the user namespace of the server ({shared}): root in one is the server's root");
                layer("own users", false, &reason, remedy(facts, USERS))
            };
            let proc = if *own_proc {
                layer("own proc", true, "mounted", String::new())
            } else {
                layer("own proc", false, "the machine's is seen, read-only", unmask(facts))
            };
            [layer("namespaces", true, "made; processes and fs workers have them", String::new()), proc, users]
        }
        NamespaceLayer::Unavailable { reason, remedy } => {
            let remedy = self::remedy(facts, if remedy.is_empty() { ANYWHERE } else { remedy });
            let needs = |name| layer(name, false, "needs the namespaces layer", "see there".to_owned());
            [layer("namespaces", false, reason, remedy), needs("own proc"), needs("own users")]
        }
    }
}

/// What to do on this machine where namespaces or mounts are refused, a line for each cause that is known.
pub(crate) fn here() -> String {
    remedy(&Facts::here(), ANYWHERE)
}

/// The same, or what is to be done where no cause is known.
fn remedy(facts: &Facts, otherwise: &str) -> String {
    let causes = causes(facts);
    if causes.is_empty() { otherwise.to_owned() } else { causes.join("\n") }
}

/// Where nothing is known to keep them away.
const ANYWHERE: &str = "run the server where it may make namespaces and mounts: as root, or where user namespaces are allowed";

/// The same for a server that may make all namespaces but that of users.
const USERS: &str = "run the server outside of any chroot, with CAP_SETFCAP and a /proc that can be written";

/// The same for one that could give no user ids.
const UIDS: &str = "have `/` and all that is mounted below on file systems that take id-mapped mounts, as ext4, xfs, btrfs and tmpfs do \
                    and overlay does not; sandboxes share the kernel's budgets of root until then";

/// What is known to keep namespaces away, each with its remedy.
fn causes(facts: &Facts) -> Vec<String> {
    let mut causes = Vec::new();
    if !facts.are_built {
        causes.push("the kernel knows no user namespaces: use one with CONFIG_USER_NS".to_owned());
    }
    if facts.says(MAXIMUM, "0") {
        causes.push("user.max_user_namespaces is 0: sysctl -w user.max_user_namespaces=15000".to_owned());
    }
    if !facts.is_root && facts.says(CLONE, "0") {
        causes.push("kernel.unprivileged_userns_clone is 0: sysctl -w kernel.unprivileged_userns_clone=1".to_owned());
    }
    if !facts.is_root && facts.says(APPARMOR, "1") {
        let executable = &facts.executable;
        causes.push(format!(
            "AppArmor keeps user namespaces from programs without a profile: write to /etc/apparmor.d/portcullis\n  \
             abi <abi/4.0>,\n  include <tunables/global>\n  profile portcullis {executable} flags=(unconfined) {{\n    userns,\n  }}\n\
             and run apparmor_parser -r /etc/apparmor.d/portcullis; or, for all programs, \
             sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        ));
    }
    let is_filtered = |status: &String| status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]));
    if facts.files.get("/proc/self/status").is_some_and(is_filtered) {
        causes.push(
            "a seccomp filter holds the server already, as in a container: docker run or podman run with --security-opt \
             seccomp=unconfined --security-opt apparmor=unconfined, or with profiles that allow unshare, clone, setns, mount, umount2 and pivot_root"
                .to_owned(),
        );
    }
    causes
}

/// A /proc of one's own is refused where parts of the machine's are covered.
fn unmask(facts: &Facts) -> String {
    let mounts = facts.files.get("/proc/self/mountinfo").map_or("", String::as_str);
    let covered: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        // A mount on an empty directory of the kernel's covers nothing.
        .filter(|place| place.starts_with("/proc/") && *place != "/proc/sys/fs/binfmt_misc")
        .collect();
    let found = match covered.first() {
        Some(first) => format!("{} places in /proc are covered ({first} is one): ", covered.len()),
        None => String::new(),
    };
    format!(
        "{found}docker run --security-opt systempaths=unconfined, podman run --security-opt unmask=ALL, Kubernetes \
         procMount: Unmasked"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(files: &[(&'static str, &str)], is_root: bool) -> Facts {
        let files = files.iter().map(|(path, text)| (*path, (*text).to_owned())).collect();
        Facts { files, is_root, are_built: true, executable: "/opt/portcullis".to_owned() }
    }

    #[track_caller]
    fn check(files: &[(&'static str, &str)], is_root: bool, expect: &[&str]) {
        let unavailable = NamespaceLayer::Unavailable { reason: "EPERM".to_owned(), remedy: "as the spawner says".to_owned() };
        let [layer, ..] = namespaces(&unavailable, &facts(files, is_root));
        assert!(!layer.available && layer.reason == "EPERM");
        for word in expect {
            assert!(layer.remedy.contains(word), "`{word}` is not in: {}", layer.remedy);
        }
    }

    #[test]
    fn each_cause_has_its_remedy() {
        check(&[(MAXIMUM, "0")], true, &["sysctl -w user.max_user_namespaces="]);
        check(&[(CLONE, "0")], false, &["sysctl -w kernel.unprivileged_userns_clone=1"]);
        let snippet = ["profile portcullis /opt/portcullis flags=(unconfined) {", "userns,", "apparmor_parser -r"];
        check(&[(APPARMOR, "1")], false, &snippet);
        check(&[(APPARMOR, "1")], false, &["sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"]);
        check(&[("/proc/self/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1")], true, &["seccomp=unconfined"]);
        check(&[(APPARMOR, "1"), (MAXIMUM, "0")], false, &["apparmor_parser", "max_user_namespaces"]);
    }

    #[test]
    fn where_no_cause_is_known_the_spawner_has_the_word() {
        check(&[(MAXIMUM, "100"), (CLONE, "1"), (APPARMOR, "0")], false, &["as the spawner says"]);
        check(&[(CLONE, "0"), (APPARMOR, "1")], true, &["as the spawner says"]);
    }

    #[test]
    fn a_covered_proc_is_named_with_what_uncovers_it() {
        let mounts = "1 2 0:5 / /proc rw - proc proc rw\n3 1 0:6 / /proc/kcore rw - tmpfs tmpfs rw";
        let available = NamespaceLayer::Available { user: true, own_proc: false, shared: String::new(), uids: Uids::Servers };
        let [layer, proc, users] = namespaces(&available, &facts(&[("/proc/self/mountinfo", mounts)], false));
        assert!(layer.available && !proc.available && users.available);
        for word in ["1 places", "/proc/kcore", "systempaths=unconfined", "unmask=ALL"] {
            assert!(proc.remedy.contains(word), "{}", proc.remedy);
        }
        let own = NamespaceLayer::Available { user: true, own_proc: true, shared: String::new(), uids: Uids::Own };
        assert!(namespaces(&own, &Facts::default()).iter().all(|layer| layer.available && layer.remedy.is_empty()));
    }

    #[test]
    fn users_that_are_the_servers_are_named_with_cause_and_remedy() {
        let shared = NamespaceLayer::Available {
            user: false,
            own_proc: true,
            shared: "make a user namespace: ENOSPC".to_owned(),
            uids: Uids::Servers,
        };
        for (files, remedy) in [(&[(MAXIMUM, "0")][..], "sysctl -w user.max_user_namespaces="), (&[], "chroot")] {
            let [layer, proc, users] = namespaces(&shared, &facts(files, true));
            assert!(layer.available && proc.available && !users.available);
            assert!(users.reason.contains("ENOSPC") && users.remedy.contains(remedy), "{users:?}");
        }
    }

    #[test]
    fn user_ids_that_are_the_servers_are_named_with_cause() {
        let uids = Uids::Refused { reason: "`/` (overlay) takes no map of ids".to_owned() };
        let shared = NamespaceLayer::Available { user: true, own_proc: true, shared: String::new(), uids };
        let [_, _, users] = namespaces(&shared, &facts(&[], true));
        assert!(users.available && users.reason.contains("`/` (overlay)") && users.remedy.contains("ext4"), "{users:?}");
    }
}

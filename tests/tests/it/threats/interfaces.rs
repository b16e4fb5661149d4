//! The kernel's interfaces that programs do not need, and those of terminals.

use super::{Set, is_root, workspace_write};

/// Acts with the error that they meet inside. Those marked are refused to whoever is not root even without a sandbox.
const CLOSED: [(&str, &str, bool); 33] = [
    ("mount", "EPERM", true),
    ("umount", "EPERM", false),
    ("pivot-root", "EPERM", true),
    ("chroot", "EPERM", false),
    ("fsopen", "EPERM", true),
    ("open-tree", "EPERM", true),
    ("move-mount", "EPERM", true),
    ("mount-setattr", "EPERM", false),
    ("setns", "EPERM", false),
    ("clone", "EPERM", false),
    ("clone3", "ENOSYS", false),
    ("keyctl", "EPERM", false),
    ("add-key", "EPERM", false),
    ("request-key", "EPERM", false),
    ("bpf", "EPERM", true),
    ("perf", "EPERM", true),
    ("userfaultfd", "EPERM", true),
    ("fanotify", "EPERM", true),
    ("io-uring", "EPERM", true),
    ("init-module", "EPERM", true),
    ("finit-module", "EPERM", true),
    ("delete-module", "EPERM", true),
    ("swapon", "EPERM", true),
    ("open-by-handle", "EPERM", true),
    ("personality", "EPERM", false),
    ("unshare", "EPERM", true),
    ("tiocsti", "EPERM", false),
    ("tioclinux", "EPERM", false),
    ("line-discipline", "EPERM", false),
    ("bridge", "EPERM", false),
    ("statmount", "ENOSYS", false),
    ("process-madvise", "ENOSYS", false),
    ("kcmp", "ENOSYS", false),
];

#[tokio::test]
async fn closed_interfaces_stay_closed_on_every_machine() {
    let mut set = Set::new().await;
    for (act, expect, needs_root) in CLOSED {
        let on = if act == "unshare" { "268435456" } else { "-" };
        // What is no network at all is no way around either, so the wider policy is tried.
        let sandbox = workspace_write(&set.place, &[]);
        let [with, without, free] = set.act(&sandbox, act, on).await;
        assert_eq!([with.as_str(), &without], [expect; 2], "{act}");
        // The control: the kernel goes on to look at what it was given, which is good for some and nonsense for most.
        if is_root() || !needs_root {
            assert_ne!(free, expect, "{act}: without a sandbox");
        }
    }
    // This kernel lacks these calls too, so they have no control.
    let sandbox = workspace_write(&set.place, &[]);
    assert_eq!(set.act(&sandbox, "newer", "-").await[..2], ["ENOSYS"; 2]);
}

//! What Landlock does not see, the kernel's own files, and protected names: for processes.

use super::{Set, entry, entry_at, is_root, managed, read_only, workspace_write};
use portcullis_tests::Place;
use serde_json::json;

/// Acts on a file, and whether some kernels of today do not know the call.
const METADATA: [(&str, bool); 10] = [
    ("chmod", false),
    ("chown", false),
    ("utime", false),
    ("xattr", false),
    ("setflags", false),
    ("fchmodat2", false),
    ("setxattrat", true),
    ("removexattr", false),
    ("removexattrat", true),
    ("file-setattr", true),
];

fn set_attribute(place: &Place) {
    for file in ["ws/file", "out/file"] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(place.path(file), "user.probe", b"v", flags).unwrap();
    }
}

#[tokio::test]
async fn metadata_outside_is_kept_from_every_call_that_changes_it() {
    let mut set = Set::new().await;
    let (inside, outside) = (set.at("ws/file"), set.at("out/file"));
    let writable = workspace_write(&set.place, &[]);
    let probe = set.probe.clone();
    for (act, is_new) in METADATA {
        set_attribute(&set.place);
        // With a writable root this needs the view; without one, nothing can be changed on either machine.
        for (sandbox, which) in [(&writable, 0), (&read_only(), 0), (&read_only(), 1)] {
            let argv = [&probe, act, &outside].map(|word: &str| word);
            assert_eq!(set.run_one(which, sandbox, &argv, &json!({})).await, "EROFS", "{act}, {which}");
        }
        let control = set.run_one(2, &writable, &[&probe, act, &outside], &json!({})).await;
        assert!(control == "ok" || is_new && control == "ENOSYS", "{act}: {control}");
        // Nor is anything in the workspace kept from its owner.
        let within = set.run_one(0, &writable, &[&probe, act, &inside], &json!({})).await;
        assert_eq!(within, control, "{act}");
    }
}

#[tokio::test]
async fn nodes_and_links_are_not_made_outside() {
    let mut set = Set::new().await;
    let writable = workspace_write(&set.place, &[]);
    let (inside, outside) = (set.at("ws"), set.at("out"));
    for act in ["mkfifo", "mksocket"] {
        for sandbox in [&read_only(), &writable] {
            set.denied(sandbox, act, &outside, ["EROFS", "EACCES"]).await;
            std::fs::remove_file(set.place.path("out/made")).unwrap();
        }
        for which in [0, 1] {
            assert_eq!(set.run_one(which, &writable, &[&set.probe.clone(), act, &inside], &json!({})).await, "ok");
            std::fs::remove_file(set.place.path("ws/made")).unwrap();
        }
    }
    // By way of the links that /proc offers, and by a second name in the workspace.
    for script in [
        "echo x >/proc/self/root/$OUT/file",
        "cd $OUT && echo x >/proc/self/cwd/file",
        "ln $OUT/file l && echo x >l",
        "mv $OUT/file m",
    ] {
        let more = json!({"env": {"PATH": "/usr/bin:/bin", "OUT": outside}});
        for which in [0, 1] {
            let ended = set.run_one(which, &writable, &["sh", "-c", script], &more).await;
            assert!(ended.contains("ended with"), "{script}: {ended}");
            assert_eq!(set.place.content("out/file"), "content", "{script}");
        }
        let free = set.run_one(2, &writable, &["sh", "-c", script], &more).await;
        assert_eq!(free, "", "{script}");
        assert!(!set.place.has("out/file") || set.place.content("out/file") == "x\n", "{script}");
        set.place.put("out/file", "content");
        for name in ["ws/l", "ws/m"] {
            let _absent = std::fs::remove_file(set.place.path(name));
        }
    }
}

#[tokio::test]
async fn the_kernels_own_files_are_not_for_root_either() {
    if !is_root() {
        // There is no control: whoever is not root may not write them anyway.
        return;
    }
    let mut set = Set::new().await;
    // As another user of the machine a sandbox does not own them either.
    let kept = if set.with.has_own_uids().await { "EACCES" } else { "EROFS" };
    let narrowed = entry_at(&set.place.uri("out"), "read");
    let everything = managed(&set.place, "restricted", &[entry("root", "write"), narrowed]);
    let cgroup = std::fs::read_to_string("/proc/mounts").unwrap();
    let cgroup = cgroup.lines().find(|line| line.split(' ').nth(2).is_some_and(|kind| kind.starts_with("cgroup")));
    let cgroup = cgroup.map(|line| format!("{}/cgroup.procs", line.split(' ').nth(1).unwrap()));
    for file in ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/sys/power/state"]
        .into_iter()
        .map(str::to_owned)
        .chain(cgroup)
        .filter(|file| std::path::Path::new(file).exists())
    {
        set.denied(&read_only(), "write", &file, [kept, "EACCES"]).await;
        let writable = workspace_write(&set.place, &[]);
        set.denied(&writable, "write", &file, [kept, "EACCES"]).await;
        // Without a view of its own, a process that may write to everything may write to these: a limit of that machine.
        set.denied(&everything, "write", &file, [kept, "ok"]).await;
        // File calls are refused on every machine. Opened for writing, and not written to.
        let uri = portcullis_protocol::path::AbsolutePath::new(&file).unwrap().to_uri();
        for (sandbox, is_open) in [(&read_only(), false), (&writable, false), (&everything, false), (&json!(null), true)] {
            let open = json!({"handleId": "h", "path": uri, "mode": "replace", "sandbox": sandbox});
            let opened = set.with.call("fs/open", open).await;
            assert_eq!(opened.is_ok(), is_open, "{file}: {opened:?}");
            set.with.ok("fs/close", json!({"handleId": "h"})).await;
        }
    }
}

/// A workspace with a repository at its top and others below.
fn repositories(place: &Place) {
    for file in [".git/config", "sub/repo/.git/config", "sub/repo/file", "plain/file"] {
        place.put(&format!("ws/{file}"), "before");
    }
}

#[tokio::test]
async fn a_protected_file_cannot_be_changed_by_another_name() {
    let mut set = Set::new().await;
    repositories(&set.place);
    let writable = workspace_write(&set.place, &[]);
    for script in [
        "ln .git/config c && echo x >c",
        "mv .git g && echo x >g/config",
        "echo x >/proc/self/cwd/.git/config",
        "cp -r .git g && mv g .git/new",
        "ln -s .git g && echo x >g/config",
    ] {
        let ended = set.run_one(0, &writable, &["sh", "-c", script], &json!({})).await;
        assert!(ended.contains("ended with"), "{script}: {ended}");
        assert_eq!(set.place.content("ws/.git/config"), "before", "{script}");
        for name in ["ws/g", "ws/c"] {
            let _absent = std::fs::remove_dir_all(set.place.path(name)).or_else(|_| std::fs::remove_file(set.place.path(name)));
        }
        let free = set.run_one(2, &writable, &["sh", "-c", script], &json!({})).await;
        assert_eq!(free, "", "{script}");
        let _moved = std::fs::remove_dir_all(set.place.path("ws"));
        repositories(&set.place);
    }
}

#[tokio::test]
async fn nested_repositories_are_held_for_processes_too_where_they_exist() {
    let mut set = Set::new().await;
    repositories(&set.place);
    let mut nested = workspace_write(&set.place, &[]);
    nested["protectNestedRepositories"] = json!(true);
    for script in [
        "echo x >sub/repo/.git/config",
        "rm -rf sub/repo/.git",
        "mv sub/repo/.git g",
        "mv sub/repo r && echo x >r/.git/config",
        "mv sub s && echo x >s/repo/.git/config",
        "touch sub/repo/.git/new",
    ] {
        let ended = set.run_one(0, &nested, &["sh", "-c", script], &json!({})).await;
        assert!(ended.contains("ended with"), "{script}: {ended}");
        assert_eq!(set.place.content("ws/sub/repo/.git/config"), "before", "{script}");
        // The control: the member is what holds it.
        let plain = workspace_write(&set.place, &[]);
        assert_eq!(set.run_one(0, &plain, &["sh", "-c", script], &json!({})).await, "", "{script}");
        std::fs::remove_dir_all(set.place.path("ws")).unwrap();
        repositories(&set.place);
    }
    // The limit of the mount layer, shown to be so: what is not there at the start, and not at the top, can be made.
    assert_eq!(set.run_one(0, &nested, &["mkdir", "plain/.git"], &json!({})).await, "");
    let uri = set.place.uri("ws/sub/.git");
    set.with.refused("fs/createDirectory", json!({"path": uri, "sandbox": nested})).await;
}

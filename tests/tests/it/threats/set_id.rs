//! Files that would run with the rights of their owner or group.

use super::{Set, entry_at, is_root, read_only, workspace_write};
use serde_json::json;
use std::os::unix::fs::{MetadataExt as _, chown};

const FILES: &str = include_str!("set_id.py");
const DIRECTORIES: &str = include_str!("set_gid.py");

#[tokio::test]
async fn no_confined_process_makes_a_set_id_file() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    for which in [0, 1, 2] {
        let directory = format!("ws/{which}");
        set.place.directory(&directory);
        let more = json!({"cwd": set.place.uri(&directory)});
        let said = set.run_one(which, &sandbox, &["/usr/bin/python3", "-c", FILES], &more).await;
        let (last, attempts) = said.lines().collect::<Vec<_>>().split_last().map(|(last, rest)| (*last, rest.to_vec())).unwrap();
        assert!(attempts.len() >= 24, "{said}");
        for line in attempts {
            let [name, outcome, mode] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{said}") };
            // The control: without a sandbox each of them makes one.
            let expect = match which {
                2 => "ok",
                _ if name.starts_with("openat2") => "ENOSYS",
                _ => "EPERM",
            };
            assert_eq!(outcome, expect, "{which}: {line}");
            assert_eq!(mode == "0o0", which != 2, "{which}: {line}");
        }
        let capable = u8::from(which == 2 && is_root());
        assert_eq!(last.split(' ').next_back(), Some(capable.to_string().as_str()), "{which}: {last}");
        assert_eq!(last.starts_with("left 0 "), which != 2, "{which}: {last}");
    }
    // Under a policy that changes nothing there is nothing to make, also by the call that the filter above takes away.
    let open = "import ctypes,struct; l=ctypes.CDLL(None,use_errno=True); h=struct.pack('QQQ',0o102,0o4755,0); print(l.syscall(437,-100,b'ws/new',h,24))";
    for which in [0, 1] {
        let more = json!({"cwd": set.place.uri("")});
        assert_eq!(set.run_one(which, &read_only(), &["/usr/bin/python3", "-c", open], &more).await, "-1");
    }
    assert!(!set.place.has("ws/new"));
}

#[tokio::test]
async fn a_directory_gets_the_bit_of_its_group_where_init_looks() {
    let mut set = Set::new().await;
    set.place.directory("ws/d");
    set.place.directory("ws/.git");
    set.place.directory("out/d");
    set.place.link("ws/link", "d");
    set.place.link("ws/leads-out", set.at("out/d"));
    let sandbox = workspace_write(&set.place, &[]);
    let all = |word: &str| -> Vec<String> { vec![word.to_owned(); 8] };
    let cases = [
        ("d", all("ok set"), all("EPERM plain")),
        ("./link/../d", all("ok set"), all("EPERM plain")),
        ("file", all("EPERM plain"), all("EPERM plain")),
        // Links of /proc would be init's own.
        ("/proc/self/cwd/d", all(""), all("EPERM plain")),
        (".git", all("EPERM plain"), all("EPERM plain")),
        ("leads-out", all("EPERM plain"), all("EPERM plain")),
        ("../out/d", all("EPERM plain"), all("EPERM plain")),
    ];
    for (path, with, without) in cases {
        for (which, expect) in [(0, with), (1, without), (2, all("ok set"))] {
            let argv = ["/usr/bin/python3", "-c", DIRECTORIES, path];
            let said = set.run_one(which, &sandbox, &argv, &json!({})).await;
            for (line, expect) in said.lines().zip(expect) {
                let (way, outcome) = line.split_once(' ').unwrap();
                match (path, way) {
                    // A file held by a descriptor has no path that leads through links.
                    ("/proc/self/cwd/d", _) if which == 0 => {
                        let by_descriptor = ["fchmod", "fchmodat2-empty", "fchmodat-from", "by-proc"].contains(&way);
                        assert_eq!(outcome, if by_descriptor { "ok set" } else { "EPERM plain" }, "{path}: {said}");
                    }
                    // A link itself has no mode to change.
                    ("leads-out", "fchmodat2-no-link") if which == 2 => assert_eq!(outcome, "ENOTSUP plain", "{said}"),
                    _usual => assert_eq!(outcome, expect, "{path}, {which}: {said}"),
                }
            }
            assert!(said.lines().count() >= 6, "{path}, {which}: {said}");
        }
    }
}

#[tokio::test]
async fn init_lends_no_right_to_who_sets_the_bit_of_a_group() {
    let mut set = Set::new().await;
    set.place.directory("ws/d");
    let denied = set.place.directory("ws/denied/d");
    let sandbox = workspace_write(&set.place, &[entry_at(&set.place.uri("ws/denied"), "deny")]);
    let argv = |path: &str| ["/usr/bin/python3", "-c", DIRECTORIES, path, "fchmodat"].map(str::to_owned);
    let run = async |set: &mut Set, which: usize, path: &str| {
        let argv = argv(path);
        set.run_one(which, &sandbox, &argv.each_ref().map(String::as_str), &json!({})).await
    };
    let denials = run(&mut set, 0, "denied/d").await;
    assert!(!denials.contains("set"), "{denials}");
    assert_eq!(run(&mut set, 2, "denied/d").await, "fchmodat ok set", "{denied}");
    if !is_root() {
        // Only root can make directories of others.
        eprintln!("skipped: directories of another user, which only root can make");
        return;
    }
    // Of another user: root without capabilities may not change its mode, and neither look into one that is closed.
    let others = set.place.path("ws/others");
    set.place.directory("ws/others");
    set.place.directory("ws/closed/d");
    set.place.mode("ws/closed", 0o700);
    for name in [&others, &set.place.path("ws/closed")] {
        chown(name, Some(65_534), Some(65_534)).unwrap();
    }
    assert_eq!(run(&mut set, 0, "others").await, "fchmodat EPERM plain");
    assert_eq!(run(&mut set, 2, "others").await, "fchmodat ok set");
    let closed = run(&mut set, 0, "closed/d").await;
    assert!(closed.starts_with("fchmodat EACCES"), "{closed}");
    assert_eq!(run(&mut set, 2, "closed/d").await, "fchmodat ok set");
}

#[tokio::test]
async fn a_link_swapped_with_a_directory_turns_no_bit_of_a_group() {
    let mut set = Set::new().await;
    set.place.directory("ws/d");
    set.place.directory("out/d");
    // Swaps `d` with a link to outside and with one to a file, while another process asks for the bit by that name.
    let script = "
import os, subprocess, sys
os.symlink(sys.argv[1], 'out'); os.symlink('file', 'inside')
ask = '''
import os
done = 0
for _ in range(3000):
    try: os.chmod('d', 0o2755); done += 1
    except OSError: pass
print(done > 0)
'''
asking = subprocess.Popen([sys.executable, '-c', ask])
import ctypes
libc = ctypes.CDLL(None)
while asking.poll() is None:
    for other in (b'out', b'inside'):
        libc.renameat2(-100, b'd', -100, other, 2); libc.renameat2(-100, b'd', -100, other, 2)
";
    let outside = set.at("out/d");
    let sandbox = workspace_write(&set.place, &[]);
    let said = set.run_one(0, &sandbox, &["/usr/bin/python3", "-c", script, &outside], &json!({})).await;
    assert_eq!(said, "True");
    let bits = |name: &str| std::fs::metadata(set.place.path(name)).unwrap().mode() & 0o6000;
    assert_eq!([bits("ws/file"), bits("out/d"), bits("out/file")], [0; 3]);
}

#[tokio::test]
async fn leases_are_for_no_confined_process() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let script = "
import errno, fcntl, os, sys
for command, argument in ((1024, fcntl.F_RDLCK), (1026, 0), (1040, 0)):
    try: fcntl.fcntl(os.open('file' if command != 1026 else '.', os.O_RDONLY), command, argument); print('ok', end=' ')
    except OSError as error: print(errno.errorcode[error.errno], end=' ')
";
    let said = set.run(&sandbox, &["/usr/bin/python3", "-c", script], &json!({})).await;
    assert_eq!(said[..2], ["EPERM EPERM EPERM"; 2]);
    // The control; the newest of the three wants a structure, or is unknown.
    assert!(said[2].starts_with("ok ok "), "{said:?}");
    let inside = set.at("ws/file");
    let outcomes = set.act(&sandbox, "lease", &inside).await;
    assert_eq!(outcomes, ["EPERM", "EPERM", "ok"]);
}

#[tokio::test]
async fn what_a_file_call_writes_or_copies_has_no_set_id_bit() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let bits = |set: &Set, name: &str| std::fs::metadata(set.place.path(name)).unwrap().mode() & 0o6000;
    // CAP_SETUID, effective, in the second form of `struct vfs_cap_data` (linux/capability.h).
    let capability = [0x0200_0001_u32, 1 << 7, 0, 0, 0].map(u32::to_le_bytes).concat();
    let capable =
        |set: &Set, name: &str| rustix::fs::getxattr(set.place.path(name), "security.capability", &mut [0_u8; 32][..]).is_ok();
    for name in ["ws/written", "ws/emptied", "ws/opened", "ws/over", "ws/from"] {
        set.place.put(name, "content");
        if is_root() {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(set.place.path(name), "security.capability", &capability, flags).unwrap();
            assert!(capable(&set, name), "{name}");
        }
        set.place.mode(name, 0o6755);
        assert_eq!(bits(&set, name), 0o6000, "{name}");
    }
    let uri = |set: &Set, name: &str| set.place.uri(name);
    for (name, content) in [("ws/written", "eA=="), ("ws/emptied", "")] {
        let write = json!({"path": uri(&set, name), "dataBase64": content, "sandbox": sandbox});
        set.with.ok("fs/writeFile", write).await;
    }
    let open = json!({"handleId": "h", "path": uri(&set, "ws/opened"), "mode": "replace", "sandbox": sandbox});
    set.with.ok("fs/open", open).await;
    set.with.ok("fs/close", json!({"handleId": "h"})).await;
    for to in ["ws/over", "ws/new"] {
        let copy =
            json!({"sourcePath": uri(&set, "ws/from"), "destinationPath": uri(&set, to), "recursive": false, "sandbox": sandbox});
        set.with.ok("fs/copy", copy).await;
    }
    for name in ["ws/written", "ws/emptied", "ws/opened", "ws/over", "ws/new"] {
        assert_eq!((bits(&set, name), capable(&set, name)), (0, false), "{name}");
    }
    // The control: a file that is only read keeps them.
    assert_eq!((bits(&set, "ws/from"), capable(&set, "ws/from")), (0o6000, is_root()));
}

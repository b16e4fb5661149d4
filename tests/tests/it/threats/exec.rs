//! What a program may become, and what the request plants for it.

use super::{Set, is_root, read_only, workspace_write};
use serde_json::json;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};

#[tokio::test]
async fn a_program_in_memory_gains_nothing() {
    let mut set = Set::new().await;
    // execveat on a file that has no name anywhere.
    let script = "import os, sys\nm = os.memfd_create('m')\nopen(m, 'wb', closefd=False).write(open(sys.argv[1], 'rb').read())\nos.execve(m, sys.argv[1:], {})";
    let (probe, outside, inside) = (set.probe.clone(), set.at("out/file"), set.at("ws/file"));
    let sandbox = workspace_write(&set.place, &[]);
    let program = |act: &'static str, on: &str| ["python3", "-c", script, &probe, act, on].map(str::to_owned);
    for (act, on, expect) in [("write", &outside, ["EROFS", "EACCES", "ok"]), ("write", &inside, ["ok"; 3])] {
        let argv = program(act, on);
        let got = set.run(&sandbox, &argv.each_ref().map(String::as_str), &json!({})).await;
        assert_eq!(got, expect, "{act} {on}");
    }
    let argv = program("chmod", &outside);
    let got = set.run(&read_only(), &argv.each_ref().map(String::as_str), &json!({})).await;
    assert_eq!(got, ["EROFS", "EROFS", "ok"]);
}

#[tokio::test]
async fn set_user_id_programs_and_capabilities_gain_nothing() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let flag = set.run(&sandbox, &["grep", "NoNewPrivs", "/proc/self/status"], &json!({})).await;
    assert_eq!(flag, ["NoNewPrivs:\t1", "NoNewPrivs:\t1", "NoNewPrivs:\t0"]);
    // Only root can make a program of somebody else, and has capabilities to lose.
    if is_root() {
        let nobodys = set.place.path("id");
        fs::copy("/usr/bin/id", &nobodys).unwrap();
        chown(&nobodys, Some(65_534), Some(65_534)).unwrap();
        fs::set_permissions(&nobodys, fs::Permissions::from_mode(0o6755)).unwrap();
        let names = set.run(&sandbox, &[nobodys.to_str().unwrap(), "-u"], &json!({})).await;
        assert_eq!(names, ["0", "0", "65534"]);
        let [with, without, free] = set.act(&sandbox, "caps", "-").await;
        assert_eq!([with.as_str(), &without], ["held: 0"; 2]);
        assert_ne!(free, "held: 0");
    }
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn calls_of_foreign_architectures_do_not_get_past_the_tables() {
    let mut set = Set::new().await;
    for sandbox in [read_only(), workspace_write(&set.place, &[])] {
        let [with, without, free] = set.act(&sandbox, "int80", "-").await;
        // SIGSYS; where the kernel has no such calls at all it is SIGSEGV.
        assert_eq!([with.as_str(), &without], ["ended with 159"; 2]);
        assert!(free == "ok" || free == "ended with 139", "{free}");
        // Few kernels have these, so there is no control to be had.
        assert_eq!(set.act(&sandbox, "x32", "-").await[..2], ["ENOSYS"; 2]);
    }
}

#[tokio::test]
async fn a_planted_library_acts_inside_only() {
    let mut set = Set::new().await;
    let (source, library) = (set.place.path("mark.c"), set.at("mark.so"));
    set.place.put(
        "mark.c",
        "#include <fcntl.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void mark(void) { open(getenv(\"MARK\"), O_CREAT | O_WRONLY, 0600); }\n",
    );
    let built = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o", &library]).arg(&source).status();
    assert!(built.expect("a C compiler (Debian package gcc)").success());
    let sandbox = workspace_write(&set.place, &[]);
    for (mark, marked) in [("out/mark", [false, false, true]), ("ws/mark", [true; 3])] {
        let env = json!({"PATH": "/usr/bin:/bin", "LD_PRELOAD": library, "MARK": set.at(mark)});
        for (which, expect) in marked.into_iter().enumerate() {
            set.run_one(which, &sandbox, &["true"], &json!({"env": env})).await;
            assert_eq!(set.place.has(mark), expect, "{mark}, {which}");
            let _absent = fs::remove_file(set.place.path(mark));
        }
    }
}

#[tokio::test]
async fn nothing_on_the_path_of_a_request_is_run_for_it() {
    let mut set = Set::new().await;
    // Names of what a server might call to help itself.
    for name in ["sh", "bash", "env", "bwrap", "unshare", "newuidmap", "newgidmap", "mount", "ip", "git", "cat", "setsid"] {
        set.place.put(&format!("bin/{name}"), format!("#!/bin/sh\n: >{}/{name}\n", set.at("out")));
        set.place.mode(&format!("bin/{name}"), 0o755);
    }
    let more = json!({"env": {"PATH": format!("{}:/usr/bin:/bin", set.at("bin"))}});
    for sandbox in [read_only(), workspace_write(&set.place, &[])] {
        set.run(&sandbox, &["true"], &more).await;
    }
    let names = |set: &Set| fs::read_dir(set.place.path("out")).unwrap().count();
    assert_eq!(names(&set), 1, "nothing but the file that was there");
    // The control: who is asked to run one does, and unless it is confined it leaves its mark.
    let sandbox = read_only();
    for (which, expect) in [1, 1, 2].into_iter().enumerate() {
        set.run_one(which, &sandbox, &["git"], &more).await;
        assert_eq!(names(&set), expect, "{which}");
    }
}

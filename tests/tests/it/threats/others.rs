//! Other processes, the gateway among them, and what could be inherited from it.

use super::{Set, read_only, workspace_write};
use portcullis_tests::{Client, Place, Program, Server, executable, portcullis, without};
use serde_json::json;

#[tokio::test]
async fn processes_outside_cannot_be_changed_or_looked_into() {
    let mut set = Set::new().await;
    let mut command = tokio::process::Command::new("/bin/cat");
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).kill_on_drop(true);
    let victim = Program::start(command);
    let pid = victim.child.id().unwrap().to_string();
    for sandbox in [read_only(), workspace_write(&set.place, &[])] {
        for (act, expect) in [
            ("signal", ["ESRCH", "EPERM", "ok"]),
            ("ptrace", ["ESRCH", "EPERM", "ok"]),
            ("pidfd-signal", ["ESRCH", "EPERM", "ok"]),
            ("pidfd-getfd", ["ESRCH", "EPERM", "ok"]),
            ("priority", ["EPERM", "EPERM", "ok"]),
            ("io-priority", ["EPERM", "EPERM", "ok"]),
            // EFAULT: the pointer of the attacker is bad, and the kernel got as far as to look.
            ("process-vm-read", ["EPERM", "EPERM", "EFAULT"]),
            ("process-vm-write", ["EPERM", "EPERM", "EFAULT"]),
            ("affinity", ["EPERM", "EPERM", "EFAULT"]),
            ("scheduler", ["EPERM", "EPERM", "EFAULT"]),
            ("prlimit", ["EPERM", "EPERM", "EFAULT"]),
        ] {
            assert_eq!(set.act(&sandbox, act, &pid).await, expect, "{act}");
        }
    }
}

#[tokio::test]
async fn the_gateways_own_entries_in_proc_stay_closed() {
    let mut set = Set::new().await;
    let gateways = [&set.whole, &set.bare].map(|server| server.program.child.id().unwrap());
    for pid in gateways {
        for (act, file) in [
            ("read", "environ"),
            ("read", "maps"),
            ("write", "mem"),
            ("write", "fd/0"),
            ("list", "cwd/"),
            ("read", "root/etc/passwd"),
        ] {
            for sandbox in [read_only(), workspace_write(&set.place, &[])] {
                set.denied(&sandbox, act, &format!("/proc/{pid}/{file}"), ["ENOENT", "EACCES"]).await;
            }
        }
    }
}

#[tokio::test]
async fn a_proc_of_the_machine_tells_nothing_of_the_gateway() {
    let mut set = Set::new().await;
    // Parts of `/proc` are masked, so that no sandbox can have one of its own.
    let masked = Server::without(&["proc"], &[]).await;
    let mut client = Client::connect(&masked).await;
    let pid = masked.program.child.id().unwrap();
    let writable = workspace_write(&set.place, &[]);
    let started = json!({"sandbox": writable, "enforcement": true});
    let enforced = client.start(&set.place, "which", &["true"], started).await["enforcement"].take();
    assert_eq!(enforced["ownProc"], json!(false), "{enforced}");
    set.with = client;
    for (act, file, expect) in [
        ("read", "environ", "EACCES"),
        ("read", "maps", "EACCES"),
        ("write", "mem", "EROFS"),
        ("read", "root/etc/passwd", "EACCES"),
    ] {
        for sandbox in [read_only(), writable.clone()] {
            set.denied(&sandbox, act, &format!("/proc/{pid}/{file}"), [expect, "EACCES"]).await;
        }
    }
}

#[tokio::test]
async fn secrets_of_the_server_are_not_found_from_inside() {
    let place = Place::new();
    place.put("ws/kept", "kept");
    let serve = executable("portcullis");
    let bare = ["serve", "--insecure-no-auth", "--allow-unprotected-metadata"];
    // The name looks like no secret, so that nothing but the sandbox keeps it; a descriptor is left open in the server.
    let script = format!("exec 9<{}/ws/kept; exec \"$@\"", place.path("").display());
    for (command, which) in
        [(portcullis(&["serve", "--insecure-no-auth"]), "with"), (without(&["namespaces"], &serve, &bare), "without")]
    {
        let inner = command.as_std();
        let mut shell = tokio::process::Command::new("/bin/sh");
        shell.args(["-c", &script, "sh"]).arg(inner.get_program()).args(inner.get_args()).kill_on_drop(true);
        shell.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        shell.env("PLAIN_NAME", "very-hidden");
        let server = Server::with(shell).await;
        let mut client = Client::connect(&server).await;
        let descriptor = format!("/proc/{}/fd/9", server.program.child.id().unwrap());
        assert!(std::fs::read_link(&descriptor).is_ok_and(|path| path.ends_with("ws/kept")), "the server has it");
        let look = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '^PLAIN_NAME='; test -e /proc/self/fd/9 && echo inherited; true";
        for (id, sandbox) in [("r", read_only()), ("w", workspace_write(&place, &[]))] {
            let events = client.run(&place, id, &["sh", "-c", look], json!({"sandbox": sandbox})).await;
            assert_eq!(events.output(None), "0\n", "{which}");
        }
        // The control: the environment can be found by who is not confined, though nobody inherits the descriptor.
        let found = client.run(&place, "free", &["sh", "-c", look], json!({})).await.output(None);
        assert!(found.trim().parse::<u32>().unwrap() >= 1, "{found}");
    }
}

#[tokio::test]
async fn nothing_can_be_typed_into_a_terminal() {
    let mut set = Set::new().await;
    let probe = set.probe.clone();
    for sandbox in [read_only(), workspace_write(&set.place, &[])] {
        for act in ["tiocsti", "tioclinux"] {
            let [with, without, free] = set.run(&sandbox, &[&probe, act, "-"], &json!({"tty": true})).await;
            assert_eq!([with.as_str(), &without], ["EPERM"; 2], "{act}");
            // The kernel may have it switched off, or this is no such terminal, which it says by another number.
            assert_ne!(free, "EPERM", "{act}");
        }
    }
}

//! Sockets, interfaces of the kernel, and other processes.

use super::*;
use std::net::TcpListener;

pub(super) fn no_network_and_no_host_sockets() {
    let places = Places::new();
    let policy = read_only(Network::Restricted);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    places.check("process", &policy, "connect-tcp", &address, "EPERM");
    control("connect-tcp", &address);
    for socket in ["1,1,0", "1,2,0", "2,1,0", "2,2,0", "2,1,262", "10,1,0", "16,3,0"] {
        places.check("process", &policy, "socket", socket, "EPERM");
    }
    for socket in ["1,1,0", "1,2,0", "2,1,0", "2,2,0", "16,3,0"] {
        control("socket", socket);
    }
    places.check("process", &policy, "socketpair", "", "ok");
    places.check("process", &policy, "socketpair-dgram", "", "EPERM");
    control("socketpair-dgram", "");
}

pub(super) fn network_without_host_sockets() {
    let places = Places::new();
    let policy = read_only(Network::Enabled);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    places.check("process", &policy, "connect-tcp", listener.local_addr().unwrap().to_string(), "ok");
    for socket in ["2,2,0", "16,3,0"] {
        places.check("process", &policy, "socket", socket, "ok");
    }
    for socket in ["1,1,0", "1,2,0", "40,1,0", "16,3,4", "38,5,0"] {
        places.check("process", &policy, "socket", socket, "EPERM");
    }
    places.check("process", &policy, "socketpair", "", "ok");
    places.check("process", &policy, "socketpair-dgram", "", "EPERM");
}

pub(super) fn kernel_interfaces_that_no_program_needs() {
    let places = Places::new();
    let policy = read_only(Network::Enabled);
    for (act, place, expect) in [
        ("x32", "", "ENOSYS"),
        ("clone3", "", "ENOSYS"),
        // CLONE_NEWUSER
        ("unshare", "268435456", "EPERM"),
        ("mount", "", "EPERM"),
        ("keyctl", "", "EPERM"),
        ("shmget", "", "EPERM"),
        ("caps", "", "held: 0"),
        ("fork", "", "ok"),
        ("thread", "", "ok"),
    ] {
        if cfg!(target_arch = "x86_64") || act != "x32" {
            places.check("process", &policy, act, place, expect);
        }
    }
    // Controls: the kernel does more than refuse where there is no table. (x32 is built into few kernels.)
    control("unshare", "0");
    assert_eq!(free("clone3", ""), "EINVAL");
    assert_ne!(free("keyctl", ""), "EPERM");
}

pub(super) fn others_are_out_of_reach() {
    let places = Places::new();
    // Ended by its own standard input closing, which happens when this function ends, however it ends.
    let mut other = Command::new("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = other.id().to_string();
    let environ = format!("/proc/{pid}/environ");
    let outcomes = [("signal", pid.as_str()), ("ptrace", &pid), ("read", &environ), ("prlimit", &pid)];
    let policy = read_only(Network::Restricted);
    let confined = outcomes.map(|(act, place)| places.confined("process", &policy, act, place));
    let worker = places.confined("worker", &policy, "read", &environ);
    let free = outcomes.map(|(act, place)| free(act, place));
    drop(other.stdin.take());
    other.wait().unwrap();
    assert_eq!(confined, ["EPERM", "EPERM", "EACCES", "EPERM"]);
    assert_eq!(worker, "EACCES");
    // EFAULT: the pointer of the attacker is bad, and the kernel got as far as to look.
    assert_eq!(free, ["ok", "ok", "ok", "EFAULT"]);
}

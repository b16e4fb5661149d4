//! The expectations of the named policies.

use super::*;
use portcullis_sandbox::resolve::{Machine, resolve};
use std::net::{TcpListener, UdpSocket};

/// Runs the lines of `policies/*.expect` that speak of processes.
pub(super) fn expectations_hold_for_processes() {
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
    let (tcp, udp) = (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let (tcp, udp_address) = (tcp.local_addr().unwrap().to_string(), udp.local_addr().unwrap().to_string());
    // Ended by its standard input closing, when the test ends, however it ends.
    let mut other = Command::new("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = other.id().to_string();
    let mut wrong = Vec::new();
    for name in portcullis_sandbox::file::BUILTIN {
        let text = fs::read_to_string(policies.join(format!("{name}.expect"))).unwrap();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or("");
            let words: Vec<_> = line.split_whitespace().collect();
            let [who @ ("process" | "view" | "bare" | "worker" | "both"), act, place, expect] = words[..] else {
                assert!(words.is_empty(), "{name}.expect: {line}");
                continue;
            };
            // Workers, and processes with a view of their own, are for tests with the parts that make them.
            if matches!(who, "worker" | "view") {
                continue;
            }
            let places = Places::new();
            let tmp = tempfile::tempdir_in("/tmp").unwrap();
            fs::write(tmp.path().join("file"), "content").unwrap();
            for inner in [".git", "sub"] {
                fs::create_dir(places.workspace.join(inner)).unwrap();
                fs::write(places.workspace.join(inner).join("file"), "content").unwrap();
            }
            let is_new = matches!(act, "create" | "mkdir" | "symlink" | "mkfifo" | "list");
            let in_directory = |directory: &Path| if is_new { directory.to_owned() } else { directory.join("file") };
            let on = match (place, act) {
                ("outside", _) => in_directory(&places.outside),
                ("tmp", _) => in_directory(tmp.path()),
                ("system", _) => "/etc/passwd".into(),
                ("dev-null", _) => "/dev/null".into(),
                ("proc-gateway", _) => format!("/proc/{pid}/environ").into(),
                ("proc-self", _) => "/proc/self/environ".into(),
                ("proc-sys", _) => "/proc/sys/kernel/core_pattern".into(),
                ("host", "connect-tcp") => PathBuf::from(&tcp),
                ("host", "udp") => PathBuf::from(&udp_address),
                ("host", _) => PathBuf::from(&pid),
                ("-", "unshare") => "268435456".into(),
                ("-" | "own", _) => PathBuf::from(place),
                (within, _) => in_directory(&places.workspace.join(within.strip_prefix("workspace").unwrap().trim_matches('/'))),
            };
            let sandbox = portcullis_sandbox::file::builtin(name).unwrap().sandbox;
            let cwd = AbsolutePath::new(&places.workspace).unwrap();
            let machine = Machine { slash_tmp: true, ..Machine::default() };
            let outcome = match resolve(&sandbox, Some(&cwd), &machine).unwrap() {
                Some(policy) => places.confined("waived", &policy, act, on),
                None => free(act, on),
            };
            if outcome != expect {
                wrong.push(format!("{name}: {act} {place}: expected {expect}, got {outcome}"));
            }
        }
    }
    drop(other.stdin.take());
    other.wait().unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

//! Programs that must work, and terminals.

use super::*;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::os::fd::OwnedFd;

/// A terminal outside, of the same user.
fn terminal() -> (OwnedFd, PathBuf) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("/dev/ptmx");
    grantpt(&master).expect("own terminal");
    unlockpt(&master).expect("own terminal");
    let name = ptsname(&master, Vec::new()).expect("has a name").into_string().expect("UTF-8");
    rustix::io::ioctl_fionbio(&master, true).expect("a terminal");
    (master, name.into())
}

/// The output to the terminal; empty if there was none.
fn written(master: &OwnedFd) -> String {
    let mut buffer = [0; 64];
    // EIO: no process has it open any more, and no output is left. EAGAIN: it was never opened.
    let length = rustix::io::read(master, &mut buffer).unwrap_or(0);
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

pub(super) fn a_terminal_that_can_be_read_cannot_be_written() {
    let places = Places::new();
    let system = |network| [read_only(network), workspace_write(&places)];
    for policy in [Network::Restricted, Network::Enabled].into_iter().flat_map(system) {
        let (master, name) = terminal();
        places.check("waived", &policy, "read-terminal", &name, "ok");
        places.check("waived", &policy, "write", &name, "EACCES");
        places.check("waived", &policy, "take-terminal", &name, "EACCES");
        assert_eq!(written(&master), "");
    }
    // The limit of this layer, shown to be so: a process with a terminal of its own may use `/dev/tty`, and can make a session
    // that takes another one. The day that is prevented this line has to change.
    let (_master, name) = terminal();
    places.check("terminal", &read_only(Network::Restricted), "take-terminal", &name, "ok");
    let (master, name) = terminal();
    control("take-terminal", &name);
    assert_eq!(written(&master), "written");
}

pub(super) fn programs_that_must_work() {
    let places = Places::new();
    let policy = read_only(Network::Restricted);
    // Asked whether standard input is a socket, the kernel must say that it is none, or bash takes itself for a remote shell.
    places.check("process", &policy, "run:/bin/bash", "echo $((6*7)) | (read x; echo got $x)", "got 42");
    let loop_and_pair = r#"
import asyncio, errno, os, socket
async def child():
    process = await asyncio.create_subprocess_exec("/bin/echo", "from a child", stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()
print(asyncio.run(child()))
a, b = socket.socketpair()
a.send(b"x"); a.getsockname(); a.getpeername(); a.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE); a.shutdown(socket.SHUT_WR)
assert b.recv(1) == b"x"
r, w = os.pipe()
try: socket.socket(fileno=r)
except OSError as error: print(errno.errorcode[error.errno])
"#;
    places.check("process", &policy, "run:/usr/bin/python3", loop_and_pair, "from a child\nENOTSOCK");
}

/// Starts the launcher in a terminal, as its controlling one, and returns the program's output.
fn in_terminal(places: &Places, policy: &Policy, script: &str) -> String {
    let encoded = places.directory.path().join("policy");
    fs::write(&encoded, policy.encode()).expect("own directory");
    let exe = std::env::current_exe().expect("known");
    let spawn = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", spawn]).arg(exe).args(["--confine", "terminal"]).arg(&encoded).args(["run:/bin/bash", script]);
    let output = command.env("TERM", "xterm").stdin(Stdio::null()).output().expect("starts");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).replace('\r', "")
}

pub(super) fn programs_in_a_terminal_that_must_work() {
    let places = Places::new();
    let policy = read_only(Network::Restricted);
    let run = |script: &str| in_terminal(&places, &policy, script);
    // Job control gives the terminal to each job in turn; a prompt is written to the terminal itself.
    let jobs = "set -m; test -t 0 && stty -echo && stty rows 30 columns 90 && stty size; (exit 3) & wait $! 2>/dev/null; echo status $?; /bin/echo fore; echo prompt >/dev/tty";
    assert_eq!(run(jobs), "30 90\nstatus 3\nfore\nprompt\n");
    let colours = run("ls --color=auto -d /usr");
    assert!(colours.contains("\u{1b}[") && colours.contains("/usr"), "{colours:?}");
    let python = run(
        "python3 -c 'import os, sys, termios; print(os.isatty(0), len(termios.tcgetattr(0)), os.get_terminal_size().columns >= 0, os.ttyname(0) != \"\")'",
    );
    assert_eq!(python, "True 7 True True\n");
}

pub(super) fn git_reads_a_repository() {
    let places = Places::new();
    let git = "git -c safe.directory=* -c user.name=n -c user.email=e@example.org -C";
    let workspace = places.workspace.to_str().unwrap();
    let shell = |script: &str| Command::new("/bin/bash").args(["-c", script]).env("HOME", "/").output().unwrap();
    let made = shell(&format!("{git} {workspace} init -q && {git} {workspace} add file && {git} {workspace} commit -qm first"));
    assert!(made.status.success(), "{made:?}");
    fs::write(places.workspace.join("file"), "changed").unwrap();
    let ask = format!(
        "export HOME=/; {git} {workspace} status --short; {git} {workspace} log --format=%s; {git} {workspace} diff --stat"
    );
    let policy = read_only(Network::Restricted);
    let answer = places.confined("process", &policy, "run:/bin/bash", &ask);
    assert_eq!(answer, String::from_utf8_lossy(&shell(&ask).stdout).trim());
    assert!(answer.starts_with("M file\nfirst\n") && answer.contains("1 file changed"), "{answer}");
    // Control: a change of the repository fails.
    let commit = format!("export HOME=/; {git} {workspace} commit -qam second 2>/dev/null; echo $?");
    assert_ne!(places.confined("process", &policy, "run:/bin/bash", &commit), "0");
    assert_eq!(String::from_utf8_lossy(&shell(&commit).stdout).trim(), "0");
}

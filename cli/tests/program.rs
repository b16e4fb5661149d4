//! The program by itself. An integration test of this package, so that `cargo test --workspace` builds the program, which
//! the tests of other packages start.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};

fn portcullis(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_portcullis")).args(arguments).output().expect("start the program")
}

#[track_caller]
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

#[test]
fn help_and_version() {
    let help = portcullis(&["--help"]);
    assert!(help.status.success());
    for command in ["serve", "exec", "explain", "doctor"] {
        assert!(text(&help.stdout).contains(command), "{command}");
    }
    assert!(text(&portcullis(&["--version"]).stdout).starts_with("portcullis 0."));
}

#[test]
fn wrong_usage_ends_with_status_2() {
    for arguments in [&["serve", "--concurrent-requests", "0"][..], &["serve", "--no-such-flag"], &["exec"], &[]] {
        let ended = portcullis(arguments);
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}");
        assert!(!ended.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn listen_urls_that_cannot_be_ended_with_status_1_and_say_why() {
    for (url, why) in [
        ("ws://localhost:1", "invalid websocket --listen URL `ws://localhost:1`; expected `ws://IP:PORT`"),
        ("ws://0.0.0.0:0", "only loopback addresses are allowed"),
        ("http://127.0.0.1:1", "unsupported --listen URL `http://127.0.0.1:1`; expected `ws://IP:PORT` or `stdio`"),
    ] {
        let ended = portcullis(&["serve", "--insecure-no-auth", "--listen", url]);
        assert_eq!(ended.status.code(), Some(1), "{url}");
        assert!(text(&ended.stderr).contains(why), "{}", text(&ended.stderr));
        assert!(ended.stdout.is_empty(), "{url}");
    }
}

#[test]
fn a_ceiling_that_cannot_be_is_said_at_the_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    std::os::unix::fs::symlink("/var", path("link")).expect("a link");
    let head = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n[[entries]]\naccess = 'write'\npath = ";
    std::fs::write(path("linked.toml"), format!("{head}'{}'\n", path("link"))).expect("a file");
    std::fs::write(path("wrong.toml"), format!("{head}'x'\n")).expect("a file");
    let (linked, wrong) = (path("linked.toml"), path("wrong.toml"));
    for (arguments, status, why) in [
        (&["--policy", "no-such"][..], 1, &["no policy is named `no-such`: known are read-only"][..]),
        (&["--policy", "/no/such.toml"], 1, &["read the policy file `/no/such.toml`"]),
        (&["--policy", &wrong], 1, &["wrong.toml, line 4: path `x`"]),
        (&["--policy", &linked], 1, &["linked.toml", "it is a symbolic link; name the real path `/var`"]),
        (&["--policy", "workspace-write"], 1, &["--policy workspace-write speaks of a workspace: give --workspace DIR"]),
        (&["--policy", "workspace-write", "--workspace", "/no/dir"], 1, &["open the workspace `/no/dir`"]),
        (&["--policy", "workspace-write", "--workspace", "/etc/passwd"], 1, &["`/etc/passwd` is not a directory"]),
        (&["--workspace", "/var"], 2, &["--policy", "--workspace"]),
    ] {
        let ended = portcullis(&[&["serve", "--listen", "stdio"], arguments].concat());
        let stderr = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(status), "{arguments:?}: {stderr}");
        assert!(why.iter().all(|why| stderr.contains(why)), "{arguments:?}: {stderr}");
    }
}

#[test]
fn an_occupied_port_is_an_error_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let ended = portcullis(&["serve", "--listen", &format!("ws://{address}")]);
    assert_eq!(ended.status.code(), Some(1));
    let stderr = text(&ended.stderr);
    assert!(stderr.contains(&address) && stderr.contains("Address already in use"), "{stderr}");
}

#[test]
fn a_hidden_role_started_by_hand_says_so_and_ends_with_122() {
    for role in ["spawner", "worker", "no-such-role"] {
        let ended = portcullis(&["--portcullis-helper", role, "0"]);
        assert_eq!(ended.status.code(), Some(122), "{role}");
        assert!(!ended.stderr.is_empty(), "{role}");
    }
}

fn text_of<'a>(layer: &'a serde_json::Value, member: &str) -> &'a str {
    layer[member].as_str().expect("text")
}

#[test]
fn doctor_names_layers_and_policies() {
    let report = portcullis(&["doctor"]);
    let status = report.status.code();
    let report = text(&report.stdout);
    for word in [
        "kernel",
        "landlock",
        "seccomp",
        "namespaces",
        "own proc",
        "own users",
        "cgroups",
        "policy read-only",
        "policy workspace-write",
        "policy full-access",
    ] {
        assert!(report.contains(word), "{word} is not in:\n{report}");
    }
    let json = portcullis(&["doctor", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    let layers = found["layers"].as_array().expect("layers");
    let has = |name: &str| layers.iter().any(|layer| layer["name"] == name && layer["available"] == true);
    let can_write = ["landlock", "seccomp", "namespaces"].into_iter().all(has);
    assert_eq!((status, json.status.code()), (Some(i32::from(!can_write)), Some(i32::from(!can_write))), "{found}");
    assert_eq!(has("namespaces"), found["namespaces"].get("available").is_some(), "{found}");
    for layer in layers.iter().filter(|layer| layer["available"] == false) {
        assert!(!text_of(layer, "reason").is_empty() && !text_of(layer, "remedy").is_empty(), "{layer}");
    }
    // What the gateway would refuse is what the report says.
    assert_eq!(can_write, !report.contains("processes refused unless"), "{report}");
}

#[test]
fn explain_says_what_holds_and_why() {
    let directory = tempfile::Builder::new().tempdir_in("/var/tmp").expect("a directory");
    let top = directory.path().canonicalize().expect("exists");
    let top = top.to_str().expect("UTF-8");
    for name in ["ws/.git", "ws/no"] {
        std::fs::create_dir_all(format!("{top}/{name}")).expect("a directory");
    }
    std::fs::write(format!("{top}/ws/a.env"), "").expect("a file");
    for (link, target) in [("ws/out", "/etc"), ("ws/yes", "no"), ("ws/git", ".git")] {
        std::os::unix::fs::symlink(target, format!("{top}/{link}")).expect("a link");
    }
    let head = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n";
    let entries = "[[entries]]\nspecial = 'project_roots'\naccess = 'write'\n[[entries]]\nspecial = 'project_roots'\nsubpath = 'no'\naccess = 'deny'\n[[entries]]\nglob = '*.env'\naccess = 'deny'\n";
    std::fs::write(format!("{top}/own.toml"), format!("{head}{entries}")).expect("a file");
    let (policy, workspace) = (format!("{top}/own.toml"), format!("{top}/ws"));
    let asked = |path: &str| {
        let ended = portcullis(&["explain", "--policy", &policy, "--workspace", &workspace, path]);
        assert_eq!(ended.status.code(), Some(0), "{path}: {}", text(&ended.stderr));
        text(&ended.stdout).to_owned()
    };
    for (path, expect) in [
        ("ws/new", &["(does not exist)", "read yes, change yes: entry `write TOP/ws`", "hold only for what exists when"][..]),
        (
            "ws/.git/x",
            &["read yes, change no: protected name `.git` of writable `TOP/ws`", "`write TOP/ws/.git/x`, once it exists"],
        ),
        (
            "ws/git",
            &["real path   TOP/ws/.git", "change no: protected name `.git`", "to change it   an entry `write TOP/ws/.git`\n"],
        ),
        ("ws/a.env", &["read no, change no: deny glob `*.env` below `TOP/ws`"]),
        ("ws/no/x", &["read no, change no: entry `deny TOP/ws/no`"]),
        ("ws/yes", &["real path   TOP/ws/no", "read no, change no: entry `deny TOP/ws/no`"]),
        (
            "ws/out/hosts",
            &["real path   /etc/hosts", "read no, change no: no entry covers it", "to read it   an entry `read /etc"],
        ),
        ("else/where", &["read no, change no: no entry covers it", "to read it   an entry `read TOP`"]),
    ] {
        let said = asked(&format!("{top}/{path}"));
        assert!(said.starts_with(&format!("{top}/{path}\n")), "{said}");
        for words in expect {
            assert!(said.contains(&words.replace("TOP", top)), "{path}: {words} is not in\n{said}");
        }
    }
    let free = portcullis(&["explain", "--policy", "full-access", "/etc", "/var"]);
    assert_eq!(text(&free.stdout).matches("the policy confines nothing").count(), 2);
    for (arguments, status, why) in [
        (&["--policy", "workspace-write", "/etc"][..], 1, "--policy workspace-write speaks of a workspace: give --workspace DIR"),
        (&["--policy", "no-such", "/etc"], 1, "no policy is named `no-such`"),
        (&["--policy", "read-only", "--workspace", "/no/such", "/etc"], 1, "open the workspace `/no/such`"),
        (&["--policy", "read-only"], 2, "<PATH>"),
        (&["/etc"], 2, "--policy"),
    ] {
        let ended = portcullis(&[&["explain"], arguments].concat());
        assert_eq!(ended.status.code(), Some(status), "{arguments:?}");
        assert!(text(&ended.stderr).contains(why), "{arguments:?}: {}", text(&ended.stderr));
    }
}

#[test]
fn exec_refuses_what_it_cannot_do_and_says_what_to_do() {
    for (arguments, why) in [
        (&["exec", "--workspace", "/no/such/directory", "--", "true"][..], "open the workspace `/no/such/directory`"),
        (&["exec", "--workspace", "/etc/passwd", "--", "true"], "is not a directory"),
        (&["exec", "--env", "=x", "--", "true"], "a name must stand before the `=`"),
        (&["exec", "--policy", "no-such-policy", "--", "true"], "known are read-only, workspace-write"),
        (&["exec", "--policy", "/no/such/file.toml", "--", "true"], "read the policy file `/no/such/file.toml`"),
        (&["exec", "--url", "ws://127.0.0.1:1", "--", "true"], "connect to ws://127.0.0.1:1"),
        (&["exec", "--env", "NO_SUCH_VARIABLE_HERE", "--", "true"], "write NO_SUCH_VARIABLE_HERE=VALUE"),
        (&["exec", "--", "/no/such/program"], "No such file or directory"),
    ] {
        let ended = portcullis(arguments);
        assert_eq!(ended.status.code(), Some(125), "{arguments:?}");
        assert!(text(&ended.stderr).contains(why), "{arguments:?}: {}", text(&ended.stderr));
    }
}

fn exec_with_input(arguments: &[&str], input: impl Into<Stdio>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    command.args(["exec", "--policy", "read-only"]).args(arguments);
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start the program")
}

#[test]
fn exec_passes_standard_input_on_and_its_end() {
    for input in [&b"abc"[..], &vec![b'x'; 1_000_000], b""] {
        let mut child = exec_with_input(&["--", "cat"], Stdio::piped());
        let mut stdin = child.stdin.take().expect("piped");
        let input = input.to_owned();
        let copy = input.clone();
        let writer = std::thread::spawn(move || stdin.write_all(&copy));
        let ended = child.wait_with_output().expect("an end");
        writer.join().expect("no panic").expect("all of it is taken");
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        assert!(ended.stdout == input, "{} of {} bytes", ended.stdout.len(), input.len());
    }
}

#[test]
fn a_command_ends_exec_though_its_input_is_open() {
    for script in ["exit 5", "exec <&-; exit 5"] {
        let mut child = exec_with_input(&["--", "sh", "-c", script], Stdio::piped());
        let held = child.stdin.take();
        assert_eq!(child.wait().expect("an end").code(), Some(5), "{script}");
        drop(held);
    }
}

#[test]
fn standard_input_is_not_read_for_a_command_that_does_not_start() {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(b"for somebody else").expect("room");
    for (program, read) in [("/no/such/program", false), ("cat", true)] {
        file.rewind().expect("a file");
        let ended =
            exec_with_input(&["--", program], file.try_clone().expect("a descriptor")).wait_with_output().expect("an end");
        assert_eq!(ended.status.success(), read, "{}", text(&ended.stderr));
        assert_eq!(file.stream_position().expect("a file") > 0, read, "{program}");
    }
}

/// The far side of a terminal on which the program runs, which a test types at and looks at.
struct Screen {
    master: OwnedFd,
    peer: OwnedFd,
    seen: Vec<u8>,
}

impl Screen {
    fn new(rows: u16, cols: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a terminal");
        grantpt(&master).expect("a terminal");
        unlockpt(&master).expect("a terminal");
        let peer = ioctl_tiocgptpeer(&master, flags).expect("a terminal");
        let screen = Self { master, peer, seen: Vec::new() };
        screen.resize(rows, cols);
        screen
    }

    fn resize(&self, rows: u16, cols: u16) {
        tcsetwinsize(&self.master, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }).expect("a size");
    }

    fn exec(&self, command: &[&str]) -> Child {
        let end = || self.peer.try_clone().expect("a descriptor");
        let mut program = Command::new(env!("CARGO_BIN_EXE_portcullis"));
        program.args(["exec", "-t", "--policy", "read-only", "--"]).args(command).env("TERM", "vt52");
        program.stdin(end()).stdout(end()).stderr(end()).spawn().expect("start the program")
    }

    fn type_in(&self, keys: &[u8]) {
        rustix::io::write(&self.master, keys).expect("type");
    }

    /// Waits until something is on the screen.
    fn wait_for(&mut self, words: &str) {
        while !self.seen.windows(words.len()).any(|window| window == words.as_bytes()) {
            let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
            let mut polled = [PollFd::new(&self.master, PollFlags::IN)];
            let shown = String::from_utf8_lossy(&self.seen).into_owned();
            assert_eq!(poll(&mut polled, Some(&patience)).expect("poll"), 1, "`{words}` is not in {shown}");
            let mut bytes = [0; 4096];
            let length = rustix::io::read(&self.master, &mut bytes).expect("read");
            self.seen.extend(&bytes[..length]);
        }
    }

    /// Whether keys go to the program as they are typed.
    fn is_raw(&self) -> bool {
        !tcgetattr(&self.peer)
            .expect("a terminal")
            .local_modes
            .intersects(LocalModes::ICANON | LocalModes::ISIG | LocalModes::ECHO)
    }
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs");
}

#[test]
fn exec_gives_a_terminal_with_the_size_of_this_one_and_leaves_this_one_as_it_was() {
    let mut screen = Screen::new(33, 101);
    assert!(!screen.is_raw());
    let script = "trap 'stty size; kill $!; exit 6' WINCH; stty size; echo $TERM ready; sleep 600 & wait";
    let mut child = screen.exec(&["sh", "-c", script]);
    screen.wait_for("33 101\r\nvt52 ready\r\n");
    assert!(screen.is_raw());
    screen.resize(44, 120);
    // The kernel sends it to those whose terminal this is; the test has another one.
    send(&child, Signal::WINCH);
    screen.wait_for("44 120\r\n");
    assert_eq!(child.wait().expect("an end").code(), Some(6));
    assert!(!screen.is_raw());
}

#[test]
fn keys_go_to_the_command_and_every_way_out_restores_the_terminal() {
    let mut screen = Screen::new(24, 80);
    let mut child =
        screen.exec(&["sh", "-c", "trap 'echo interrupted' INT; echo ready; read line; read line; echo got $line; cat"]);
    screen.wait_for("ready\r\n");
    // dash and bash differ in whether a trap ends a `read`, so there is a line for either.
    screen.type_in(b"\x03");
    screen.wait_for("interrupted\r\n");
    screen.type_in(b"one\rtwo\r");
    screen.wait_for("got ");
    screen.type_in(b"\x04");
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    assert!(!screen.is_raw());
    for signal in [Signal::TERM, Signal::HUP, Signal::QUIT] {
        let mut screen = Screen::new(24, 80);
        let mut child = screen.exec(&["sh", "-c", "echo ready; exec cat"]);
        screen.wait_for("ready\r\n");
        assert!(screen.is_raw());
        send(&child, signal);
        assert_eq!(child.wait().expect("an end").code(), Some(137));
        assert!(!screen.is_raw(), "{signal:?}");
    }
    let screen = Screen::new(24, 80);
    let mut child = screen.exec(&["/no/such/program"]);
    assert_eq!(child.wait().expect("an end").code(), Some(125));
    assert!(!screen.is_raw());
}

#[test]
fn a_terminal_is_refused_where_there_is_none() {
    let screen = Screen::new(24, 80);
    for (input, name) in
        [(Stdio::null(), "standard input"), (screen.peer.try_clone().expect("a descriptor").into(), "standard output")]
    {
        let mut child = exec_with_input(&["--tty", "--", "true"], input);
        let mut stderr = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
        assert_eq!(child.wait().expect("an end").code(), Some(125));
        assert!(stderr.contains(&format!("--tty: {name} is not a terminal")), "{stderr}");
    }
}

#[test]
fn a_sandbox_that_had_to_end_says_why() {
    let place = tempfile::tempdir().expect("a directory");
    let top = place.path().canonicalize().expect("it exists");
    std::fs::create_dir(top.join(".git")).expect("fresh");
    let workspace = top.to_str().expect("UTF-8");
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    command.args(["exec", "--workspace", workspace, "--", "sh", "-c", "echo ready; exec sleep 600"]);
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().expect("start the program");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("text");
    assert_eq!(line, "ready\n");
    std::fs::rename(top.join(".git"), top.join("moved")).expect("own directory");
    let mut stderr = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
    assert_eq!(child.wait().expect("an end").code(), Some(137), "{stderr}");
    assert!(stderr.contains("/.git` was made, moved or replaced from outside"), "{stderr}");
}

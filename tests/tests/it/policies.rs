//! Every line of every `.expect` file, by the real gateway: `fs/*` calls, and processes that play the attacker.

use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_sandbox::file;
use portcullis_tests::{Client, Place, Refusal, Server, executable};
use serde_json::{Value, json};
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};

/// What an act acts on, beside the files.
struct Surroundings {
    tcp: TcpListener,
    udp: UdpSocket,
    /// A process of the same user outside, which the gateway does not know.
    process: tokio::process::Child,
    /// A copy of the attacker that every user may execute.
    probe: PathBuf,
    _directory: Place,
}

impl Surroundings {
    fn new() -> Self {
        let directory = Place::new();
        let probe = directory.path("probe");
        fs::copy(executable("portcullis-probe"), &probe).unwrap();
        let mut command = tokio::process::Command::new("/bin/cat");
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).kill_on_drop(true);
        Self {
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            process: command.spawn().unwrap(),
            probe,
            _directory: directory,
        }
    }

    /// The argument for an act of a line on a place of a line.
    fn place(&self, files: &Files, act: &str, place: &str) -> PathBuf {
        let is_new = matches!(act, "create" | "mkdir" | "symlink" | "mkfifo" | "list");
        let within = |directory: PathBuf| if is_new { directory } else { directory.join("file") };
        match (place, act) {
            ("outside", _) => within(files.place.path("out")),
            ("tmp", _) => within(files.tmp.path().to_owned()),
            ("system", _) => "/etc/passwd".into(),
            ("dev-null", _) => "/dev/null".into(),
            ("proc-gateway", _) => format!("/proc/{}/environ", self.process.id().unwrap()).into(),
            ("proc-self", _) => "/proc/self/environ".into(),
            ("proc-sys", _) => "/proc/sys/kernel/core_pattern".into(),
            ("host", "connect-tcp") => self.tcp.local_addr().unwrap().to_string().into(),
            ("host", "udp") => self.udp.local_addr().unwrap().to_string().into(),
            ("host", _) => self.process.id().unwrap().to_string().into(),
            ("-", "unshare") => "268435456".into(),
            ("-" | "own", _) => place.into(),
            (workspace, _) => {
                within(files.place.path("ws").join(workspace.strip_prefix("workspace").unwrap().trim_start_matches('/')))
            }
        }
    }
}

/// A workspace, a place outside and one below `/tmp`, made anew for every line.
struct Files {
    place: Place,
    tmp: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self { place: Place::new(), tmp: tempfile::tempdir_in("/tmp").unwrap() };
        for directory in ["ws", "ws/sub", "ws/.git", "out"] {
            files.place.put(&format!("{directory}/file"), "content");
        }
        fs::write(files.tmp.path().join("file"), "content").unwrap();
        files
    }

    /// The named policy as an object of the wire.
    fn sandbox(&self, name: &str) -> Value {
        let mut sandbox = file::builtin(name).unwrap().sandbox;
        let workspace = WirePath::Local(AbsolutePath::new(self.place.path("ws")).unwrap());
        sandbox.cwd = Some(workspace.clone());
        sandbox.workspace_roots = vec![workspace];
        sandbox.to_json()
    }
}

/// The act as a call of a client.
async fn by_worker(client: &mut Client, act: &str, on: &Path, sandbox: Value) -> String {
    let uri = |path: &Path| AbsolutePath::new(path).unwrap().to_uri();
    let made = uri(&on.join("made"));
    let (method, params) = match act {
        "read" => ("fs/readFile", json!({"path": uri(on), "sandbox": sandbox})),
        "list" => ("fs/readDirectory", json!({"path": uri(on), "sandbox": sandbox})),
        "write" => ("fs/writeFile", json!({"path": uri(on), "dataBase64": "eA==", "sandbox": sandbox})),
        "create" => ("fs/writeFile", json!({"path": made, "dataBase64": "eA==", "sandbox": sandbox})),
        "mkdir" => ("fs/createDirectory", json!({"path": made, "sandbox": sandbox})),
        "remove" => ("fs/remove", json!({"path": uri(on), "force": false, "sandbox": sandbox})),
        other => panic!("a worker does not {other}"),
    };
    match client.call(method, params).await {
        Ok(_) => "ok".to_owned(),
        Err(Refusal { message, .. }) => {
            let number = message.rsplit_once("(os error ").and_then(|(_, rest)| rest.strip_suffix(')'));
            match number {
                Some("1") => "EPERM".to_owned(),
                Some("2") => "ENOENT".to_owned(),
                Some("13") => "EACCES".to_owned(),
                Some("30") => "EROFS".to_owned(),
                _ => message,
            }
        }
    }
}

/// The act as a program under the policy.
async fn by_process(client: &mut Client, probe: &Path, id: &str, act: &str, on: &Path, files: &Files, sandbox: Value) -> String {
    let argv = [probe.to_str().unwrap(), act, on.to_str().unwrap()];
    let mut params = Client::start_params(&files.place, id, &argv);
    params["sandbox"] = sandbox;
    match client.call("process/start", params).await {
        Ok(_) => client.events(id).await.output(None).trim().to_owned(),
        Err(refusal) => format!("refused: {}", refusal.message),
    }
}

/// Who does an act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Worker,
    /// A process with namespaces.
    View,
    /// A process on a machine that gives none.
    Bare,
}

fn parts(who: &str) -> &'static [Part] {
    match who {
        "worker" => &[Part::Worker],
        "view" => &[Part::View],
        "bare" => &[Part::Bare],
        "process" => &[Part::View, Part::Bare],
        "both" => &[Part::Worker, Part::View, Part::Bare],
        other => panic!("{other} is nobody"),
    }
}

/// Of two results the first is for whom the file belongs to: the system asks for the user's own rights before it looks at the mount.
/// Files on disks are root's, also where a sandbox has a user id of its own; those of the kernel are then not.
fn for_this_user<'a>(expect: &'a str, place: &str, has_own_uid: bool) -> &'a str {
    let (owner, other) = expect.split_once('|').unwrap_or((expect, expect));
    let is_owner = rustix::process::getuid().is_root() && !(has_own_uid && place == "proc-sys");
    if is_owner { owner } else { other }
}

#[tokio::test]
async fn every_expectation_of_every_policy_holds_through_the_gateway() {
    let server = Server::start().await;
    let less = Server::without(&["namespaces"], &["--allow-unprotected-metadata"]).await;
    let (mut client, mut bare) = (Client::connect(&server).await, Client::connect(&less).await);
    let has_own_uids = client.has_own_uids().await;
    let surroundings = Surroundings::new();
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for name in file::BUILTIN {
        let text = fs::read_to_string(policies.join(format!("{name}.expect"))).unwrap();
        for line in text.lines().map(|line| line.split('#').next().unwrap_or("")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [who, act, place, expect] = words[..] else {
                assert!(words.is_empty(), "{name}.expect: {line}");
                continue;
            };
            for part in parts(who) {
                let files = Files::new();
                let (on, sandbox) = (surroundings.place(&files, act, place), files.sandbox(name));
                let (id, probe) = (format!("p{checked}"), &surroundings.probe);
                let got = match part {
                    Part::Worker => by_worker(&mut client, act, &on, sandbox).await,
                    Part::View => by_process(&mut client, probe, &id, act, &on, &files, sandbox).await,
                    Part::Bare => by_process(&mut bare, probe, &id, act, &on, &files, sandbox).await,
                };
                checked += 1;
                if got != for_this_user(expect, place, *part == Part::View && has_own_uids) {
                    wrong.push(format!("{name}.expect: {line}: {part:?}: got {got}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 200, "only {checked} expectations were found");
}

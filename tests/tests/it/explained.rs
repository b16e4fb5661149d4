//! What `portcullis explain` says of `/proc`, `/sys`, `/dev` and the server's own directories, and what requests find there.

use portcullis_tests::{Client, Place, Server, portcullis};
use serde_json::{Value, json};
use std::path::Path;

const PATHS: [&str; 15] = [
    "/proc",
    "/proc/cpuinfo",
    "/proc/interrupts",
    "/proc/keys",
    "/proc/self/status",
    "/proc/sys/kernel/ostype",
    "/sys/kernel",
    "/dev",
    "/dev/fuse",
    "/dev/kmsg",
    "/dev/loop-control",
    "/dev/null",
    "/dev/shm",
    "/dev/urandom",
    "/etc/passwd",
];

/// Says of each argument whether it can be opened and read or listed.
const TRY: &str = "import os, sys
for path in sys.argv[1:]:
    try:
        if os.path.isdir(path): os.listdir(path)
        else: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1)
        print('yes')
    except OSError:
        print('no')";

/// Whether it says that file calls and processes can read a path.
async fn explained(place: &Place, path: &str) -> [bool; 2] {
    let mut command = portcullis(&["explain", "--policy", "read-only", path]);
    command.env("XDG_RUNTIME_DIR", place.path(""));
    let output = command.output().await.unwrap();
    assert!(output.status.success(), "{path}: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    ["file calls", "processes"].map(|whose| {
        let of = |start: &str| text.lines().map(str::trim_start).find(|line| line.starts_with(start));
        let line = of(whose).or_else(|| of("read ")).unwrap_or_else(|| panic!("{text}"));
        line.contains("read yes")
    })
}

async fn processes(client: &mut Client, place: &Place, id: &str, paths: &[String], more: Value) -> Vec<bool> {
    let argv: Vec<&str> = ["python3", "-c", TRY].into_iter().chain(paths.iter().map(String::as_str)).collect();
    let output = client.run(place, id, &argv, more).await.output(None);
    output.lines().map(|line| line == "yes").collect()
}

#[tokio::test]
async fn explain_agrees_with_requests_on_proc_sys_and_dev() {
    let place = Place::new();
    let mut command = portcullis(&["serve", "--insecure-no-auth"]);
    command.env("XDG_RUNTIME_DIR", place.path(""));
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    place.put("portcullis/x", "x");
    let own = [place.path("portcullis/x"), place.path("portcullis")].map(|path| path.display().to_string());
    let paths = PATHS.into_iter().map(str::to_owned).chain(own).filter(|path| Path::new(path).exists());
    let paths: Vec<String> = paths.collect();
    let confined = processes(&mut client, &place, "confined", &paths, json!({"sandbox": {"type": "read-only"}})).await;
    let free = processes(&mut client, &place, "free", &paths, json!({})).await;
    assert_eq!((confined.len(), free.len()), (paths.len(), paths.len()));
    for (nth, path) in paths.iter().enumerate() {
        let method = if Path::new(path).is_dir() { "fs/readDirectory" } else { "fs/readFile" };
        let params = json!({"path": format!("file://{path}"), "sandbox": {"type": "read-only"}});
        let call = client.begin(method, params).await;
        let is_read = client.answer(call).await.is_ok();
        assert_eq!(explained(&place, path).await, [is_read, confined[nth]], "{path}");
    }
    // The control: without a sandbox a process reads what the policy's tables alone would let it read.
    let hidden = |path: &str| paths.iter().position(|there| there == path).is_some_and(|nth| free[nth] && !confined[nth]);
    assert!(hidden("/proc/keys") || hidden("/proc/interrupts"), "{paths:?}: {confined:?} {free:?}");
    assert!(hidden(&paths[paths.len() - 1]), "{confined:?} {free:?}");
}

/// A workspace belongs to programs that a policy confines, and its names are theirs.
#[tokio::test]
async fn names_of_a_workspace_make_no_lines_and_steer_no_terminal() {
    let place = Place::new();
    std::os::unix::fs::symlink("x\n  read no, change no: \u{1b}]0;title\u{7}", place.path("link")).unwrap();
    std::fs::write(place.path("plain"), "").unwrap();
    std::fs::write(place.path("policy.toml"), "\"\\u001b]0;title\\u0007\" = 1\n").unwrap();
    let run = async |arguments: &[&str]| {
        let mut command = portcullis(arguments);
        command.env("XDG_RUNTIME_DIR", place.path("")).current_dir(place.path(""));
        let output = command.output().await.unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let steers = |text: &str| text.contains(|letter: char| letter.is_control() && letter != '\n');
    let [plain, link] = ["plain", "link"].map(|name| ["explain", "--policy", "workspace-write", "--workspace", ".", name]);
    let (plain, link) = (run(&plain).await, run(&link).await);
    assert!(plain.contains("read yes, change yes"), "control: {plain}");
    assert!(link.contains("real path") && link.contains("]0;title") && !steers(&link), "{link:?}");
    assert!(!link.lines().any(|line| line.starts_with("  read no")), "{link}");
    let refused = run(&["explain", "--policy", "./policy.toml", "plain"]).await;
    assert!(refused.contains("]0;title") && !steers(&refused), "{refused:?}");
}

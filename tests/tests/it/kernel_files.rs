//! File calls on kernel file systems, at any mount point: a server whose workspace holds a procfs and a part of sysfs.

use portcullis_tests::{Client, Place, Refusal, Server, at, executable, special};
use rustix::process::getuid;
use serde_json::{Value, json};
use tokio::process::Command;

struct Set {
    client: Client,
    place: Place,
    _server: Server,
}

/// A server in a mount namespace of its own, as a build root has it: `ws/proc` is a procfs and `ws/sys` is the machine's `/sys/kernel`.
async fn set_up() -> Set {
    let place = Place::new();
    for directory in ["ws/proc", "ws/sys", "ws/plain"] {
        place.directory(directory);
    }
    let more: &[&str] = if getuid().is_root() { &[] } else { &["--user", "--map-root-user"] };
    let script = r#"mount -t proc proc "$1/proc" && mount --rbind /sys/kernel "$1/sys" && exec "$2" serve --insecure-no-auth"#;
    let mut command = Command::new("unshare");
    command.args(more).args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh"]);
    command.arg(place.path("ws")).arg(executable("portcullis"));
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let server = {
        command.kill_on_drop(true);
        Server::with(command).await
    };
    Set { client: Client::connect(&server).await, place, _server: server }
}

impl Set {
    fn sandbox(&self) -> Value {
        json!({
            "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted",
                "entries": [special("root", "read"), special("project_roots", "write"), at(&self.place.uri("ws/sys"), "write")]}},
            "cwd": self.place.uri("ws"), "workspaceRoots": [self.place.uri("ws")], "windowsSandboxLevel": "disabled",
        })
    }

    async fn refused(&mut self, method: &str, params: &Value) -> Refusal {
        let mut params = params.clone();
        params["sandbox"] = self.sandbox();
        self.client.refused(method, params).await
    }
}

fn check(refusal: &Refusal, errno: i32, rule: &str) {
    let text = format!("{refusal:?}");
    assert!(refusal.message.contains(&format!("(os error {errno})")) && text.contains(rule), "{text}");
}

#[tokio::test]
async fn a_procfs_elsewhere_shows_file_calls_nothing() {
    let mut set = set_up().await;
    let uri = |name: &str| set.place.uri(&format!("ws/proc{name}"));
    let [whole, version, own, link, link_2] = ["", "/version", "/self/status", "/self/exe", "/mounts"].map(uri);
    let options = json!({"maxDepth": 9, "maxDirectories": 99, "maxEntries": 99, "followDirectorySymlinks": false});
    let copy = set.place.uri("ws/copy");
    for (method, params) in [
        ("fs/readFile", json!({"path": version})),
        ("fs/readFile", json!({"path": own})),
        ("fs/readFile", json!({"path": link_2})),
        ("fs/getMetadata", json!({"path": own})),
        ("fs/getMetadata", json!({"path": version, "followSymlinks": false})),
        ("fs/canonicalize", json!({"path": link})),
        ("fs/readDirectory", json!({"path": whole})),
        ("fs/open", json!({"handleId": "h", "path": version})),
        ("fs/copy", json!({"sourcePath": version, "destinationPath": copy, "recursive": false})),
    ] {
        check(&set.refused(method, &params).await, 13, "a procfs that is mounted elsewhere than /proc");
        set.client.ok(method, params).await;
    }
    set.client.ok("fs/remove", json!({"path": copy})).await;
    // A walk reports the directories that it could not enter.
    let walk = |sandbox: &Value| json!({"path": set.place.uri("ws"), "options": options, "sandbox": sandbox});
    let (confined, free) = (walk(&set.sandbox()), walk(&Value::Null));
    let confined = set.client.ok("fs/walk", confined).await;
    assert!(!confined["entries"].to_string().contains("/proc/"), "{confined}");
    assert!(confined["errors"].to_string().contains("/proc"), "{confined}");
    assert!(set.client.ok("fs/walk", free).await["entries"].to_string().contains("/proc/"));
}

#[tokio::test]
async fn kernel_files_below_a_workspace_are_never_changed() {
    let mut set = set_up().await;
    let workspace = set.place.uri("ws");
    let uri = |name: &str| format!("{workspace}/{name}");
    let [made, below, file, plain] = ["sys/made", "sys/mm/made/deep", "sys/mm/ksm/run", "plain/f"].map(uri);
    set.place.put("ws/plain/f", "0");
    let write = json!({"path": file, "dataBase64": "MA=="});
    for (method, params) in [
        ("fs/writeFile", write.clone()),
        ("fs/writeFile", json!({"path": made, "dataBase64": ""})),
        ("fs/createDirectory", json!({"path": made, "recursive": false})),
        ("fs/createDirectory", json!({"path": below, "recursive": true})),
        ("fs/copy", json!({"sourcePath": plain, "destinationPath": file, "recursive": false})),
        ("fs/copy", json!({"sourcePath": plain, "destinationPath": made, "recursive": false})),
        ("fs/open", json!({"handleId": "h", "path": file, "mode": "replace"})),
        ("fs/remove", json!({"path": file, "recursive": false})),
        ("fs/remove", json!({"path": uri("sys/mm")})),
        ("fs/remove", json!({"path": uri("sys")})),
    ] {
        let refusal = set.refused(method, &params).await;
        // A debugfs or tracefs that the machine has mounted below may be met first.
        if method == "fs/remove" && format!("{refusal:?}").contains("a file system that shows the activity of processes") {
            continue;
        }
        // A file that its mode hides from an ordinary user needs no rule.
        if getuid().is_root() || !refusal.message.contains("(os error 13)") {
            check(&refusal, 30, "the kernel's own files are never changed");
        }
    }
    check(&set.refused("fs/writeFile", &json!({"path": uri("proc/self/comm"), "dataBase64": "eA=="})).await, 13, "a procfs");
    // Other files beside it can be changed, and readable files can be read.
    for (method, params) in [
        ("fs/writeFile", json!({"path": plain, "dataBase64": "MQ=="})),
        ("fs/readFile", json!({"path": file})),
        ("fs/copy", json!({"sourcePath": file, "destinationPath": plain, "recursive": false})),
    ] {
        let mut params = params;
        params["sandbox"] = set.sandbox();
        set.client.ok(method, params).await;
    }
    // The control: opened for writing, and not written to.
    let files = [uri("proc/self/comm"), file].into_iter().take(if getuid().is_root() { 2 } else { 1 });
    for file in files {
        set.client.ok("fs/open", json!({"handleId": "h", "path": file, "mode": "replace"})).await;
        set.client.ok("fs/close", json!({"handleId": "h"})).await;
    }
}

#[tokio::test]
async fn file_calls_under_a_policy_see_no_process() {
    let mut set = set_up().await;
    let sandbox = set.sandbox();
    let list = |sandbox: &Value| json!({"path": "file:///proc", "sandbox": sandbox});
    let names = |listing: &Value| -> Vec<String> {
        listing["entries"].as_array().unwrap().iter().map(|entry| entry["fileName"].as_str().unwrap().to_owned()).collect()
    };
    let is_process = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit()) || name == "self";
    let confined = names(&set.client.ok("fs/readDirectory", list(&sandbox)).await);
    assert!(!confined.iter().any(is_process) && confined.contains(&"cpuinfo".to_owned()), "{confined:?}");
    assert!(!confined.contains(&"keys".to_owned()) && !confined.contains(&"kcore".to_owned()), "{confined:?}");
    assert!(names(&set.client.ok("fs/readDirectory", list(&Value::Null)).await).iter().any(is_process));
    for path in ["/proc/1/cmdline", "/proc/1/status", "/proc/self/status", "/proc/1"] {
        let params = json!({"path": format!("file://{path}")});
        check(&set.refused("fs/getMetadata", &params).await, 2, "stands for a process");
        set.client.ok("fs/getMetadata", params).await;
    }
    // The answer is the same for a number that no process has.
    let missing = json!({"path": "file:///proc/4194304"});
    check(&set.refused("fs/getMetadata", &missing).await, 2, "stands for a process");
    for path in ["/proc/cpuinfo", "/proc/meminfo", "/proc/version"] {
        let params = json!({"path": format!("file://{path}"), "sandbox": sandbox});
        assert_ne!(set.client.ok("fs/readFile", params).await["dataBase64"], json!(""), "{path}");
    }
}

#[tokio::test]
async fn a_path_through_a_magic_link_names_the_component() {
    let mut set = set_up().await;
    set.place.link("ws/link", "/proc/self/cwd/f");
    for path in [set.place.uri("ws/link"), "file:///proc/self/root/etc/hostname".to_owned(), "file:///dev/fd/0".to_owned()] {
        let refusal = set.refused("fs/readFile", &json!({"path": path})).await;
        check(&refusal, 2, "`/proc/self` stands for a process");
        check(&refusal, 2, "name the file itself");
    }
}

//! File calls: ways that lead out by other names, names that are odd, and files that are no plain ones.

use super::{Set, entry, managed, read_only, workspace_write};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;

fn with(params: &Value, sandbox: &Value) -> Value {
    let mut params = params.clone();
    params["sandbox"] = sandbox.clone();
    params
}

impl Set {
    /// The call is refused on both machines, and succeeds without a sandbox.
    async fn call_denied(&mut self, method: &str, params: &Value, sandbox: &Value) {
        for client in [&mut self.with, &mut self.without] {
            client.refused(method, with(params, sandbox)).await;
        }
        self.with.ok(method, params.clone()).await;
    }

    /// The call succeeds on both machines.
    async fn call_allowed(&mut self, method: &str, params: &Value, sandbox: &Value) {
        for client in [&mut self.with, &mut self.without] {
            client.ok(method, with(params, sandbox)).await;
        }
    }
}

#[tokio::test]
async fn links_in_proc_lead_no_file_call_out() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let gateway = set.whole.program.child.id().unwrap();
    let out = set.at("out");
    for process in ["self".to_owned(), "thread-self".to_owned(), gateway.to_string()] {
        let uri = format!("file:///proc/{process}/root{out}");
        set.call_denied("fs/writeFile", &json!({"path": format!("{uri}/made"), "dataBase64": "eA=="}), &sandbox).await;
        set.call_denied("fs/createDirectory", &json!({"path": format!("{uri}/d"), "recursive": false}), &sandbox).await;
        set.call_denied("fs/readFile", &json!({"path": format!("{uri}/file")}), &read_only()).await;
        set.call_denied("fs/remove", &json!({"path": format!("{uri}/d"), "force": false}), &sandbox).await;
        std::fs::remove_file(set.place.path("out/made")).unwrap();
    }
    // The worker's own streams are nobody's files: neither as such nor without a sandbox.
    for stream in ["/dev/stdin", "/dev/stdout", "/proc/self/fd/0", "/proc/self/fd/1", "/dev/fd/1"] {
        for params in [json!({}), json!({"sandbox": sandbox})] {
            let mut write = json!({"path": format!("file://{stream}"), "dataBase64": "eA=="});
            write.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
            set.with.refused("fs/writeFile", write.clone()).await;
            write.as_object_mut().unwrap().remove("dataBase64");
            set.with.refused("fs/readFile", write).await;
        }
    }
    set.with.ok("fs/readFile", json!({"path": set.place.uri("ws/file"), "sandbox": sandbox})).await;
}

#[tokio::test]
async fn copies_cross_the_boundary_in_neither_direction() {
    let mut set = Set::new().await;
    let only_workspace = managed(&set.place, "restricted", &[entry("project_roots", "write")]);
    set.place.put("out/tree/file", "content");
    set.place.put("ws/tree/file", "content");
    for (from, to) in [("out/file", "ws/in"), ("ws/file", "out/made"), ("out/tree", "ws/in"), ("ws/tree", "out/made")] {
        let copy = json!({"sourcePath": set.place.uri(from), "destinationPath": set.place.uri(to), "recursive": true});
        set.call_denied("fs/copy", &copy, &only_workspace).await;
        let path = set.place.path(to);
        std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path)).unwrap();
    }
}

#[tokio::test]
async fn trees_with_links_do_not_lead_out() {
    let mut set = Set::new().await;
    let sandbox = managed(&set.place, "restricted", &[entry("project_roots", "write")]);
    set.place.put("out/tree/secret", "secret");
    set.place.put("ws/tree/plain", "plain");
    for (name, target) in [("to-tree", "out/tree"), ("to-file", "out/tree/secret"), ("dangling", "out/made"), ("up", "")] {
        symlink(set.place.path(target), set.place.path(&format!("ws/tree/{name}"))).unwrap();
    }
    let uri = |name: &str| set.place.uri(name);
    let copy = json!({"sourcePath": uri("ws/tree"), "destinationPath": uri("ws/copy"), "recursive": true});
    let options = json!({"maxDepth": 9, "maxDirectories": 99, "maxEntries": 99, "followDirectorySymlinks": true});
    let (walk, remove) = (json!({"path": uri("ws/tree"), "options": options}), json!({"path": uri("ws/copy")}));
    for client in [&mut set.with, &mut set.without] {
        client.ok("fs/copy", with(&copy, &sandbox)).await;
        for link in ["to-tree", "to-file", "dangling", "up"] {
            assert!(set.place.path(&format!("ws/copy/{link}")).is_symlink(), "{link} is copied as what it is");
        }
        client.ok("fs/remove", with(&remove, &sandbox)).await;
        assert!(!set.place.has("ws/copy") && set.place.content("out/tree/secret") == "secret" && set.place.has("ws/tree"));
    }
    let walked = set.with.ok("fs/walk", with(&walk, &sandbox)).await["entries"].to_string();
    assert!(walked.contains("plain") && !walked.contains("secret"), "{walked}");
    let free = set.with.ok("fs/walk", walk).await["entries"].to_string();
    assert!(free.contains("secret"), "the control: without a sandbox the walk is led out");
}

#[tokio::test]
async fn a_hard_link_made_before_is_the_same_file_under_both_names() {
    let mut set = Set::new().await;
    std::fs::hard_link(set.place.path("out/file"), set.place.path("ws/same")).unwrap();
    let sandbox = workspace_write(&set.place, &[]);
    let write = |name: &str| json!({"path": set.place.uri(name), "dataBase64": STANDARD.encode(name)});
    let (outside, inside) = (write("out/file"), write("ws/same"));
    // The name decides, for there is nothing else to tell them by: a limit, shown to be so.
    set.with.refused("fs/writeFile", with(&outside, &sandbox)).await;
    set.with.ok("fs/writeFile", with(&inside, &sandbox)).await;
    assert_eq!(set.place.content("out/file"), "ws/same");
    let script = "echo x >../out/file || echo y >same";
    for which in [0, 1] {
        set.run_one(which, &sandbox, &["sh", "-c", script], &json!({})).await;
        assert_eq!(set.place.content("out/file"), "y\n");
        set.place.put("out/file", "content");
    }
    // Nobody confined can make such a name: `nodes_and_links_are_not_made_outside` tries. No file call makes any.
    set.with.ok("fs/writeFile", outside).await;
}

#[tokio::test]
async fn odd_names_are_held_like_others() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let (ws, out) = (set.place.uri("ws"), set.place.uri("out"));
    let file = |uri: String| json!({"path": uri, "dataBase64": "eA=="});
    // No UTF-8, blanks, controls, and what other systems take for separators.
    for name in ["%FF%FE", "%20", "%0A%1B", "a%5Cb", "%C3%A9", "...", "-rf"] {
        set.call_allowed("fs/writeFile", &file(format!("{ws}/{name}")), &sandbox).await;
        set.call_denied("fs/writeFile", &file(format!("{out}/{name}")), &sandbox).await;
    }
    let long = "n".repeat(256);
    let deep = "d/".repeat(3000);
    for path in [format!("{ws}/a%00b"), format!("{ws}/{long}"), format!("{ws}/{deep}file"), format!("{out}/%00")] {
        for sandbox in [Some(&sandbox), None] {
            let params = sandbox.map_or_else(|| file(path.clone()), |sandbox| with(&file(path.clone()), sandbox));
            set.with.refused("fs/writeFile", params).await;
        }
    }
    // Deeper than a path can name: made from within, and removed by one call that does not leave the workspace.
    let script = "import os\nos.mkdir('deep'); os.chdir('deep')\nfor n in range(2000):\n    os.mkdir('dddd'); os.chdir('dddd')\nos.symlink('/', 'up')";
    assert_eq!(set.run_one(0, &sandbox, &["python3", "-c", script], &json!({})).await, "");
    set.with.ok("fs/remove", json!({"path": format!("{ws}/deep"), "sandbox": sandbox})).await;
    assert!(!set.place.has("ws/deep") && set.place.has("out/file"));
}

#[tokio::test]
async fn what_is_no_plain_file_is_refused_under_a_policy_too() {
    let mut set = Set::new().await;
    let sandbox = workspace_write(&set.place, &[]);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, set.place.path("ws/pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(set.place.path("ws/socket")).unwrap();
    for path in
        [set.place.uri("ws/pipe"), set.place.uri("ws/socket"), "file:///dev/zero".to_owned(), "file:///dev/tty".to_owned()]
    {
        for client in [&mut set.with, &mut set.without] {
            client.refused("fs/readFile", with(&json!({"path": path}), &sandbox)).await;
            client.refused("fs/writeFile", with(&json!({"path": path, "dataBase64": "eA=="}), &sandbox)).await;
            client.refused("fs/open", with(&json!({"handleId": "h", "path": path}), &sandbox)).await;
            client.refused("fs/open", with(&json!({"handleId": "h", "path": path, "mode": "replace"}), &sandbox)).await;
        }
    }
    // The control: none of them held up the worker.
    set.call_allowed("fs/readFile", &json!({"path": set.place.uri("ws/file")}), &sandbox).await;
}

#[tokio::test]
async fn what_a_glob_denies_a_process_is_what_there_is_at_its_start() {
    let mut set = Set::new().await;
    let secrets = |set: &Set| {
        std::fs::remove_dir_all(set.place.path("ws")).unwrap();
        for file in ["ws/a.env", "ws/deep/b.env"] {
            set.place.put(file, "secret");
        }
    };
    secrets(&set);
    let glob = json!({"path": {"type": "glob_pattern", "pattern": "**/*.env"}, "access": "deny"});
    let sandbox = workspace_write(&set.place, &[glob]);
    for script in ["cat a.env", "cat deep/b.env", "mv deep d && cat d/b.env", "ln a.env l && cat l", "mv a.env c && cat c"] {
        let confined = set.run_one(0, &sandbox, &["sh", "-c", script], &json!({})).await;
        assert!(confined.contains("ended with") && !confined.contains("secret"), "{script}: {confined}");
        secrets(&set);
        let free = set.run_one(2, &sandbox, &["sh", "-c", script], &json!({})).await;
        assert_eq!(free, "secret", "{script}");
        secrets(&set);
    }
    // The limit of the mount layer, shown to be so: what is made later is not covered in what runs, only for who comes next.
    let made = set.run_one(0, &sandbox, &["sh", "-c", "echo own >c.env; cat c.env"], &json!({})).await;
    assert_eq!(made, "own");
    assert!(set.run_one(0, &sandbox, &["cat", "c.env"], &json!({})).await.contains("ended with"));
    // Without namespaces such a process is refused, whatever the operator accepts.
    let mut params = portcullis_tests::Client::start_params(&set.place, "refused", &["true"]);
    params["sandbox"] = sandbox;
    assert_eq!(set.without.refused("process/start", params).await.code, -32602);
}

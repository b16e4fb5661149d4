//! fs/* under policies: each refusal with its control, the same call without a sandbox.

use portcullis_tests::{Workspace, at, special};
use serde_json::{Value, json};

struct Set(Workspace);

async fn set_up() -> Set {
    Set(Workspace::new().await)
}

impl Set {
    fn workspace_write(&self) -> Value {
        self.0.profile(&[special("root", "read"), special("project_roots", "write")])
    }

    /// The call fails with `code` and `errno` under the sandbox, and succeeds without it.
    async fn denied(&mut self, method: &str, params: Value, sandbox: &Value, code: i64, errno: i32) {
        let mut confined = params.clone();
        confined["sandbox"] = sandbox.clone();
        let refusal = self.0.client.refused(method, confined).await;
        assert!(
            refusal.code == code && refusal.message.contains(&format!("(os error {errno})")),
            "{method} {params}: {refusal:?}"
        );
        self.0.client.ok(method, params).await;
    }

    async fn allowed(&mut self, method: &str, mut params: Value, sandbox: &Value) -> Value {
        params["sandbox"] = sandbox.clone();
        self.0.client.ok(method, params).await
    }
}

const READ_ONLY: (i64, i32) = (-32603, 30);
const ABSENT: (i64, i32) = (-32004, 2);
const DENIED: (i64, i32) = (-32600, 13);

#[tokio::test]
async fn workspace_write_allows_the_workspace() {
    let mut set = set_up().await;
    let sandbox = set.workspace_write();
    let ws = |name: &str| set.0.place.uri(&format!("ws/{name}"));
    let (x, d, c, w) = (ws("x"), ws("d"), ws("c"), ws("w"));
    let source = set.0.place.uri("out/o");
    set.allowed("fs/writeFile", json!({"path": x, "dataBase64": "aGk="}), &sandbox).await;
    set.allowed("fs/createDirectory", json!({"path": d}), &sandbox).await;
    set.allowed("fs/copy", json!({"sourcePath": source, "destinationPath": c, "recursive": false}), &sandbox).await;
    set.allowed("fs/remove", json!({"path": c}), &sandbox).await;
    set.allowed("fs/open", json!({"handleId": "h", "path": w, "mode": "replace"}), &sandbox).await;
    set.0.client.ok("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": "YmxvY2s="})).await;
    assert_eq!((set.0.place.content("ws/x"), set.0.place.content("ws/w")), ("hi".to_owned(), "block".to_owned()));
    let large = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, vec![b'l'; 1 << 20]);
    set.allowed("fs/writeFile", json!({"path": x, "dataBase64": large}), &sandbox).await;
    assert_eq!(set.allowed("fs/readFile", json!({"path": x}), &sandbox).await["dataBase64"], json!(large));
}

#[tokio::test]
async fn writes_outside_are_refused_through_every_spelling() {
    let mut set = set_up().await;
    let (code, errno) = READ_ONLY;
    set.0.place.link("ws/to-out", set.0.place.path("out"));
    set.0.place.link("ws/to-o", set.0.place.path("out/o"));
    set.0.place.link("ws/dangling", set.0.place.path("out/made"));
    set.0.place.link("ws/chain", "to-o");
    for sandbox in [
        set.workspace_write(),
        json!({"type": "read-only"}),
        json!({"type": "workspace-write", "cwd": set.0.place.uri("ws"), "exclude_slash_tmp": true, "exclude_tmpdir_env_var": true}),
    ] {
        for path in [
            set.0.place.uri("out/x"),
            set.0.place.uri("ws/../out/x"),
            set.0.place.uri("ws/to-out/x"),
            set.0.place.uri("ws/to-o"),
            set.0.place.uri("ws/dangling"),
            set.0.place.uri("ws/chain"),
            format!("{}/ws/%2e%2e/out/x", set.0.place.uri("")),
        ] {
            set.denied("fs/writeFile", json!({"path": path, "dataBase64": "eA=="}), &sandbox, code, errno).await;
        }
        set.denied("fs/createDirectory", json!({"path": set.0.place.uri("out/new")}), &sandbox, code, errno).await;
        set.0.place.put("out/gone", "");
        set.denied("fs/remove", json!({"path": set.0.place.uri("out/gone")}), &sandbox, code, errno).await;
        let copy =
            json!({"sourcePath": set.0.place.uri("ws/in"), "destinationPath": set.0.place.uri("out/copy"), "recursive": false});
        set.denied("fs/copy", copy, &sandbox, code, errno).await;
        set.denied(
            "fs/open",
            json!({"handleId": "h", "path": set.0.place.uri("out/x"), "mode": "replace"}),
            &sandbox,
            code,
            errno,
        )
        .await;
        set.0.client.ok("fs/close", json!({"handleId": "h"})).await;
        std::fs::remove_dir_all(set.0.place.path("out")).unwrap();
        set.0.place.put("out/o", "o");
    }
}

#[tokio::test]
async fn protected_names_stay_read_only_whether_they_exist_or_not() {
    let mut set = set_up().await;
    let (code, errno) = READ_ONLY;
    let sandbox = set.workspace_write();
    set.0.place.put("ws/.git/config", "original");
    for path in ["ws/.git/config", "ws/.git/new", "ws/.codex", "ws/.agents", "ws/.aws"] {
        set.denied("fs/writeFile", json!({"path": set.0.place.uri(path), "dataBase64": "eA=="}), &sandbox, code, errno).await;
        set.0.place.put("ws/.git/config", "original");
    }
    set.denied("fs/createDirectory", json!({"path": set.0.place.uri("ws/.git/hooks")}), &sandbox, code, errno).await;
    // The whole tree cannot go either, and nothing of it goes.
    let whole = json!({"path": set.0.place.uri("ws"), "sandbox": sandbox});
    assert_eq!(set.0.client.refused("fs/remove", whole).await.code, code);
    assert!(set.0.place.has("ws/in") && set.0.place.has("ws/.git/config"));
    set.denied("fs/remove", json!({"path": set.0.place.uri("ws/.git")}), &sandbox, code, errno).await;
    // What is named by an entry is granted.
    let granted =
        set.0.profile(&[special("root", "read"), special("project_roots", "write"), at(&set.0.place.uri("ws/.git"), "write")]);
    set.0.place.put("ws/.git/config", "original");
    let path = set.0.place.uri("ws/.git/config");
    set.allowed("fs/writeFile", json!({"path": path, "dataBase64": "eA=="}), &granted).await;
    assert_eq!(set.0.place.content("ws/.git/config"), "x");
}

#[tokio::test]
async fn a_gitdir_pointer_protects_what_it_points_at() {
    let mut set = set_up().await;
    let (code, errno) = READ_ONLY;
    let sandbox = set.workspace_write();
    set.0.place.put("ws/real/config", "original");
    set.0.place.put("ws/other/config", "original");
    set.0.place.put("ws/.git", "gitdir: real\n");
    set.denied("fs/writeFile", json!({"path": set.0.place.uri("ws/real/config"), "dataBase64": "eA=="}), &sandbox, code, errno)
        .await;
    let other = set.0.place.uri("ws/other/config");
    set.allowed("fs/writeFile", json!({"path": other, "dataBase64": "eA=="}), &sandbox).await;
}

#[tokio::test]
async fn deny_entries_and_globs_hold_for_files_made_later() {
    let mut set = set_up().await;
    let (code, errno) = DENIED;
    let glob = json!({"path": {"type": "glob_pattern", "pattern": "**/*.env"}, "access": "deny"});
    let sandbox =
        set.0.profile(&[special("root", "read"), special("project_roots", "write"), at(&set.0.place.uri("out"), "deny"), glob]);
    set.0.place.put("ws/a.env", "secret");
    set.denied("fs/readFile", json!({"path": set.0.place.uri("out/o")}), &sandbox, code, errno).await;
    set.denied("fs/readFile", json!({"path": set.0.place.uri("ws/a.env")}), &sandbox, code, errno).await;
    set.0.place.put("ws/deep/later.env", "secret");
    set.0.place.link("ws/alias", "deep/later.env");
    set.denied("fs/readFile", json!({"path": set.0.place.uri("ws/deep/later.env")}), &sandbox, code, errno).await;
    set.denied("fs/readFile", json!({"path": set.0.place.uri("ws/alias")}), &sandbox, code, errno).await;
    set.denied("fs/writeFile", json!({"path": set.0.place.uri("ws/b.env"), "dataBase64": ""}), &sandbox, code, errno).await;
    let plain = set.0.place.uri("ws/in");
    set.allowed("fs/readFile", json!({"path": plain}), &sandbox).await;
}

#[tokio::test]
async fn what_no_entry_grants_does_not_exist() {
    let mut set = set_up().await;
    let (code, errno) = ABSENT;
    let sandbox = set.0.profile(&[at(&set.0.place.uri("ws"), "read")]);
    set.0.place.link("ws/to-o", set.0.place.path("out/o"));
    for path in
        [set.0.place.uri("out/o"), set.0.place.uri("ws/to-o"), "file:///etc/hostname".to_owned(), set.0.place.uri("ws/../out/o")]
    {
        set.denied("fs/readFile", json!({"path": path}), &sandbox, code, errno).await;
    }
    set.denied("fs/getMetadata", json!({"path": set.0.place.uri("out")}), &sandbox, code, errno).await;
    // A directory on the way to what is granted shows nothing else.
    let parent = set.0.place.uri("");
    let listed = set.allowed("fs/readDirectory", json!({"path": parent}), &sandbox).await;
    assert_eq!(listed["entries"], json!([{"fileName": "ws", "isDirectory": true, "isFile": false}]));
    let content = set.0.place.uri("ws/in");
    set.allowed("fs/readFile", json!({"path": content}), &sandbox).await;
}

#[tokio::test]
async fn the_helpers_own_secrets_are_out_of_reach() {
    let mut set = set_up().await;
    let sandbox = json!({"type": "read-only"});
    for file in ["environ", "maps", "mem", "fd/0", "cmdline"] {
        for process in ["self".to_owned(), "thread-self".to_owned()] {
            let refusal = set
                .0
                .client
                .refused("fs/readFile", json!({"path": format!("file:///proc/{process}/{file}"), "sandbox": sandbox}))
                .await;
            assert!([-32600, -32004, -32603].contains(&refusal.code), "{process}/{file}: {refusal:?}");
        }
    }
    let gateway = set.0.server.program.child.id().unwrap();
    let environ = format!("file:///proc/{gateway}/environ");
    set.denied("fs/readFile", json!({"path": environ}), &sandbox, ABSENT.0, ABSENT.1).await;
}

#[tokio::test]
async fn dynamic_entries_need_a_cwd_and_roots_come_from_workspace_roots_only() {
    let mut set = set_up().await;
    let ws = set.0.place.uri("ws");
    let mut sandbox = set.workspace_write();
    sandbox.as_object_mut().unwrap().remove("cwd");
    let refusal = set.0.client.refused("fs/readFile", json!({"path": set.0.place.uri("ws/in"), "sandbox": sandbox})).await;
    assert_eq!(refusal.code, -32602);
    assert!(refusal.message.contains("file system sandbox context with dynamic permissions requires cwd"), "{refusal:?}");
    let mut rootless = set.workspace_write();
    rootless.as_object_mut().unwrap().remove("workspaceRoots");
    let x = json!({"path": set.0.place.uri("ws/x"), "dataBase64": ""});
    set.denied("fs/writeFile", x.clone(), &rootless, -32603, 30).await;
    let mut elsewhere = rootless.clone();
    elsewhere.as_object_mut().unwrap().remove("cwd");
    elsewhere["policyContext"] = json!({"cwd": ws, "workspaceRoots": [ws]});
    set.allowed("fs/writeFile", x, &elsewhere).await;
}

#[tokio::test]
async fn a_writable_root_that_is_a_link_is_refused_and_a_new_one_is_seen() {
    let mut set = set_up().await;
    let sandbox = set.workspace_write();
    let x = json!({"path": set.0.place.uri("ws/x"), "dataBase64": "eA=="});
    set.allowed("fs/writeFile", x.clone(), &sandbox).await;
    // The workspace is made anew at the same path: what was granted is the path, not the old directory.
    std::fs::remove_dir_all(set.0.place.path("ws")).unwrap();
    set.0.place.directory("ws");
    set.allowed("fs/writeFile", x.clone(), &sandbox).await;
    assert_eq!(set.0.place.content("ws/x"), "x");
    // It is swapped for a link that leads out.
    std::fs::remove_dir_all(set.0.place.path("ws")).unwrap();
    set.0.place.link("ws", set.0.place.path("out"));
    let mut confined = x.clone();
    confined["sandbox"] = sandbox;
    let refusal = set.0.client.refused("fs/writeFile", confined).await;
    assert!(!set.0.place.has("out/x"), "{refusal:?}");
    set.0.client.ok("fs/writeFile", x).await;
    assert!(set.0.place.has("out/x"));
}

#[tokio::test]
async fn no_sandbox_is_asked_for_by_disabled_external_and_unrestricted() {
    let mut set = set_up().await;
    for permissions in [
        json!({"type": "disabled"}),
        json!({"type": "external", "network": "restricted"}),
        json!({"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"}),
    ] {
        let sandbox = json!({"permissions": permissions, "windowsSandboxLevel": "disabled"});
        let w = json!({"path": set.0.place.uri("out/w"), "dataBase64": ""});
        set.allowed("fs/writeFile", w, &sandbox).await;
    }
    for bad in [
        json!(3),
        json!({}),
        json!("read-only"),
        json!({"permissions": {"type": "read-only"}, "windowsSandboxLevel": "disabled"}),
    ] {
        let refusal = set.0.client.refused("fs/readFile", json!({"path": set.0.place.uri("ws/in"), "sandbox": bad})).await;
        assert_eq!(refusal.code, -32602, "{refusal:?}");
    }
}

#[tokio::test]
async fn a_directory_out_of_reach_gives_away_no_names() {
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: only root's capabilities pass over the modes of others' directories");
        return;
    }
    let mut set = set_up().await;
    set.0.place.put("closed/there", "x");
    let give_away = |path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    give_away(set.0.place.path("closed/there"));
    give_away(set.0.place.path("closed"));
    set.0.place.mode("closed", 0o700);
    for access in ["read", "deny", "write"] {
        let mut answers = Vec::new();
        for name in ["there", "gone!"] {
            let uri = set.0.place.uri(&format!("closed/{name}"));
            let sandbox = set.0.profile(&[special("root", "read"), at(&uri, access)]);
            let mut said = String::new();
            for (method, path) in [("fs/readFile", &uri), ("fs/getMetadata", &uri), ("fs/readFile", &set.0.place.uri("ws/in"))] {
                let answer = set.0.client.call(method, json!({"path": path, "sandbox": sandbox})).await;
                said += &format!("{method}: {answer:?}\n");
            }
            let write = json!({"path": uri, "dataBase64": "", "sandbox": sandbox});
            said += &format!("{:?}", set.0.client.call("fs/writeFile", write).await);
            answers.push(said.replace(name, "NAME").replace("gone%21", "NAME"));
        }
        assert_eq!(answers[0], answers[1], "{access}");
    }
    // The control: without a sandbox root tells them apart.
    set.0.client.ok("fs/readFile", json!({"path": set.0.place.uri("closed/there")})).await;
    assert_eq!(set.0.client.refused("fs/readFile", json!({"path": set.0.place.uri("closed/gone!")})).await.code, ABSENT.0);
}

//! The operator's ceiling: no request exceeds it, whatever its sandbox says or leaves out. Each refusal has its control, the same
//! call to a server without a ceiling.

use portcullis_tests::{Client, Place, Server, portcullis};
use serde_json::{Value, json};

/// A server that may change the workspace `ws`, one that may do anything, and a place outside, `out`.
struct Set {
    bounded: Client,
    free: Client,
    place: Place,
    _servers: [Server; 2],
}

async fn set_up(policy: &str) -> Set {
    let place = Place::new();
    place.put("ws/in", "in");
    place.put("out/o", "o");
    let workspace = place.path("ws");
    let arguments = ["--policy", policy, "--workspace", workspace.to_str().unwrap()];
    let bounded = Server::with_arguments(&arguments).await;
    let servers = [bounded, Server::start().await];
    let (bounded, free) = (Client::connect(&servers[0]).await, Client::connect(&servers[1]).await);
    Set { bounded, free, place, _servers: servers }
}

/// What a client can say to ask for nothing, or for more than it may have; the last two name `out` as theirs.
fn sandboxes(place: &Place) -> Vec<Value> {
    let all = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "write"});
    let own = json!({"path": {"type": "path", "path": place.uri("out")}, "access": "write"});
    let readable = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
    let managed = |entries: &[&Value]| {
        json!({
            "permissions": {"type": "managed", "network": "enabled", "file_system": {"type": "restricted", "entries": entries}},
            "windowsSandboxLevel": "disabled",
        })
    };
    vec![
        Value::Null,
        json!({"type": "danger-full-access"}),
        json!({"type": "external-sandbox"}),
        json!({"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}),
        json!({"permissions": {"type": "managed", "network": "enabled", "file_system": {"type": "unrestricted"}}, "windowsSandboxLevel": "disabled"}),
        managed(&[&all]),
        managed(&[&readable, &own]),
        json!({"type": "workspace-write", "cwd": place.uri("out"), "writable_roots": [place.uri("out")], "network_access": true}),
    ]
}

fn with(mut params: Value, sandbox: &Value) -> Value {
    if !sandbox.is_null() {
        params["sandbox"] = sandbox.clone();
    }
    params
}

impl Set {
    /// Refused under the ceiling, carried out without it.
    async fn refused(&mut self, method: &str, params: Value) {
        let refusal = self.bounded.refused(method, params.clone()).await;
        assert!(refusal.message.contains("(os error 30)"), "{method} {params}: {refusal:?}");
        self.free.ok(method, params).await;
    }
}

#[tokio::test]
async fn file_calls_change_nothing_outside_of_the_ceiling() {
    let mut set = set_up("workspace-write").await;
    for sandbox in sandboxes(&set.place) {
        let (made, directory) = (set.place.uri("out/made"), set.place.uri("out/d"));
        set.refused("fs/writeFile", with(json!({"path": made, "dataBase64": ""}), &sandbox)).await;
        set.refused("fs/createDirectory", with(json!({"path": directory, "recursive": false}), &sandbox)).await;
        set.refused("fs/remove", with(json!({"path": directory}), &sandbox)).await;
        let copy = json!({"sourcePath": set.place.uri("out/o"), "destinationPath": set.place.uri("out/c"), "recursive": false});
        set.refused("fs/copy", with(copy, &sandbox)).await;
        set.refused("fs/open", with(json!({"handleId": "h", "path": made, "mode": "replace"}), &sandbox)).await;
        set.bounded.refused("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": ""})).await;
        set.free.ok("fs/close", json!({"handleId": "h"})).await;
        for name in ["out/made", "out/c"] {
            std::fs::remove_file(set.place.path(name)).unwrap();
        }
    }
    // The workspace is the ceiling's, and open to who asks for nothing.
    let ws = set.place.uri("ws/new");
    set.bounded.ok("fs/writeFile", json!({"path": ws, "dataBase64": "eA=="})).await;
    set.bounded.ok("fs/open", json!({"handleId": "w", "path": ws, "mode": "replace"})).await;
    set.bounded.ok("fs/writeBlock", json!({"handleId": "w", "offset": 0, "chunk": "eQ=="})).await;
    assert_eq!(set.place.content("ws/new"), "y");
    // A request may ask for less than the ceiling.
    let read_only = json!({"path": ws, "dataBase64": "", "sandbox": {"type": "read-only"}});
    assert!(set.bounded.refused("fs/writeFile", read_only).await.message.contains("(os error 30)"));
}

#[tokio::test]
async fn links_out_of_the_workspace_give_nothing() {
    let mut set = set_up("workspace-write").await;
    set.place.link("ws/to-out", set.place.path("out"));
    set.place.link("ws/dangling", set.place.path("out/made"));
    for sandbox in sandboxes(&set.place) {
        for path in ["ws/to-out/x", "ws/dangling"] {
            let params = json!({"path": set.place.uri(path), "dataBase64": ""});
            set.refused("fs/writeFile", with(params, &sandbox)).await;
        }
        std::fs::remove_file(set.place.path("out/made")).unwrap();
    }
    // Nor where the request itself names the link as its own.
    let linked = json!({"type": "workspace-write", "cwd": set.place.uri("ws/to-out/"), "exclude_slash_tmp": true});
    let refusal =
        set.bounded.refused("fs/writeFile", json!({"path": set.place.uri("out/x"), "dataBase64": "", "sandbox": linked}));
    let refusal = refusal.await;
    assert!(refusal.message.contains("symbolic link"), "{refusal:?}");
}

#[tokio::test]
async fn what_the_ceiling_denies_cannot_be_read() {
    let place = Place::new();
    let secret = place.put("ws/.env", "secret");
    let outside = place.put("out/o", "o");
    let plain = place.put("ws/plain", "plain");
    place.link("ws/link", ".env");
    place.put(
        "own.toml",
        "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\n[[entries]]\nspecial = 'project_roots'\naccess = 'write'\n[[entries]]\nglob = '**/*.env'\naccess = 'deny'\n",
    );
    let (policy, workspace) = (place.path("own.toml"), place.path("ws"));
    let arguments = ["--policy", policy.to_str().unwrap(), "--workspace", workspace.to_str().unwrap()];
    let server = Server::with_arguments(&arguments).await;
    let free = Server::start().await;
    let (mut bounded, mut free) = (Client::connect(&server).await, Client::connect(&free).await);
    for sandbox in sandboxes(&place).into_iter().chain([json!({"type": "read-only"})]) {
        for (path, error) in [(&secret, 13), (&place.uri("ws/link"), 13), (&outside, 2)] {
            let refusal = bounded.refused("fs/readFile", with(json!({"path": path}), &sandbox)).await;
            assert!(refusal.message.contains(&format!("(os error {error})")), "{path} {sandbox}: {refusal:?}");
            free.ok("fs/readFile", json!({"path": path})).await;
            bounded.refused("fs/open", with(json!({"handleId": "h", "path": path}), &sandbox)).await;
            bounded.refused("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 1})).await;
        }
    }
    bounded.ok("fs/readFile", json!({"path": plain})).await;
    bounded.ok("fs/open", json!({"handleId": "h", "path": plain})).await;
    assert_eq!(bounded.ok("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 9})).await["chunk"], "cGxhaW4=");
}

#[tokio::test]
async fn processes_change_nothing_outside_of_the_ceiling() {
    let mut set = set_up("workspace-write").await;
    let script = "echo x >../out/made; echo x >made";
    for (nth, sandbox) in sandboxes(&set.place).into_iter().enumerate() {
        let mut params = Client::start_params(&set.place, &format!("p{nth}"), &["sh", "-c", script]);
        params["cwd"] = json!(set.place.uri("ws"));
        let params = with(params, &sandbox);
        set.bounded.ok("process/start", params.clone()).await;
        set.bounded.events(&format!("p{nth}")).await;
        assert!(!set.place.has("out/made"), "{sandbox}");
        set.free.ok("process/start", params).await;
        set.free.events(&format!("p{nth}")).await;
        std::fs::remove_file(set.place.path("out/made")).unwrap_or_else(|error| panic!("{sandbox}: {error}"));
    }
    assert!(set.place.has("ws/made"));
}

#[tokio::test]
async fn under_a_read_only_ceiling_a_process_is_read_only_and_has_no_network() {
    let mut set = set_up("read-only").await;
    for (nth, sandbox) in sandboxes(&set.place).into_iter().enumerate() {
        let params = Client::start_params(&set.place, &format!("p{nth}"), &["sh", "-c", "echo x >made; chmod 700 out"]);
        set.bounded.ok("process/start", with(params, &sandbox)).await;
        assert_ne!(set.bounded.events(&format!("p{nth}")).await.code(), 0);
        assert!(!set.place.has("made"), "{sandbox}");
    }
}

#[tokio::test]
async fn serve_says_who_decides() {
    for (arguments, words) in [
        (&["serve", "--listen", "stdio"][..], "no operator's policy is set"),
        (&["serve", "--listen", "stdio", "--policy", "full-access"], "no operator's policy is set"),
        (&["serve", "--listen", "stdio", "--policy", "read-only"], ""),
    ] {
        let output = portcullis(arguments).output().await.unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert_eq!(stderr.lines().count(), usize::from(!words.is_empty()), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    }
}

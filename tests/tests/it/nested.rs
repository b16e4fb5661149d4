//! Repositories below a workspace, and entries for what may not exist, for file calls on the wire.

use portcullis_tests::{Client, Place, Server};
use serde_json::{Value, json};

struct Set {
    client: Client,
    place: Place,
    _server: Server,
}

async fn set_up() -> Set {
    let server = Server::start().await;
    let place = Place::new();
    place.put("ws/sub/repo/.git/config", "good");
    place.put("ws/sub/repo/.git/hooks/sample", "");
    place.put("ws/sub/repo/file", "");
    place.put("ws/plain/file", "");
    place.put("out/.git/config", "");
    place.link("ws/link", "sub/repo");
    Set { client: Client::connect(&server).await, place, _server: server }
}

/// The workspace is writable, with more entries and members.
fn sandbox(place: &Place, entries: &[Value], more: &Value) -> Value {
    let at = |kind: &str, access: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access});
    let mut all = vec![at("root", "read"), at("project_roots", "write")];
    all.extend(entries.iter().cloned());
    let mut sandbox = json!({
        "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": all}},
        "cwd": place.uri("ws"), "workspaceRoots": [place.uri("ws")], "windowsSandboxLevel": "disabled",
    });
    for (name, value) in more.as_object().unwrap() {
        sandbox[name] = value.clone();
    }
    sandbox
}

fn with(params: &Value, sandbox: &Value) -> Value {
    let mut params = params.clone();
    params["sandbox"] = sandbox.clone();
    params
}

/// What would plant or change a nested repository; the last ones take it away with its parents.
fn acts(place: &Place) -> Vec<(&'static str, Value)> {
    let at = |name: &str| place.uri(&format!("ws/{name}"));
    let copy = |to: &str| json!({"sourcePath": place.uri("out/.git"), "destinationPath": at(to), "recursive": true});
    let write = |to: &str| json!({"path": at(to), "dataBase64": ""});
    vec![
        ("fs/writeFile", write("sub/repo/.git/hooks/new")),
        ("fs/writeFile", write("sub/repo/.git/config")),
        ("fs/writeFile", write("link/.git/config")),
        ("fs/writeFile", write("plain/.aws")),
        ("fs/createDirectory", json!({"path": at("plain/.git"), "recursive": false})),
        ("fs/createDirectory", json!({"path": at("deep/er/.codex/x"), "recursive": true})),
        ("fs/copy", copy("sub/.git")),
        ("fs/copy", json!({"sourcePath": place.uri("out"), "destinationPath": at("copied"), "recursive": true})),
        ("fs/open", json!({"handleId": "h", "path": at("sub/repo/.git/config"), "mode": "replace"})),
        ("fs/remove", json!({"path": at("sub/repo/.git/hooks/sample")})),
        ("fs/remove", json!({"path": at("sub/repo/.git")})),
        ("fs/remove", json!({"path": at("sub")})),
    ]
}

#[tokio::test]
async fn nested_repositories_are_read_only_where_the_request_says_so() {
    let mut set = set_up().await;
    let protected = sandbox(&set.place, &[], &json!({"protectNestedRepositories": true}));
    for (method, params) in acts(&set.place) {
        let refusal = set.client.refused(method, with(&params, &protected)).await;
        assert!(refusal.message.contains("(os error 30)"), "{method} {params}: {refusal:?}");
    }
    assert_eq!(set.place.content("ws/sub/repo/.git/config"), "good");
    assert!(set.place.has("ws/sub/repo/.git/hooks/sample") && !set.place.has("ws/copied/.git"));
    set.client.ok("fs/readFile", with(&json!({"path": set.place.uri("ws/sub/repo/.git/config")}), &protected)).await;
    for name in ["ws/sub/repo/file", "ws/plain/.gitignore", "ws/sub/repo/.github"] {
        let write = json!({"path": set.place.uri(name), "dataBase64": ""});
        set.client.ok("fs/writeFile", with(&write, &protected)).await;
    }
    // An entry of its own lifts it for what lies there.
    let hooks = json!({"path": {"type": "path", "path": set.place.uri("ws/sub/repo/.git/hooks")}, "access": "write"});
    let lifted = sandbox(&set.place, &[hooks], &json!({"protectNestedRepositories": true}));
    for (name, is_free) in [("hooks/new", true), ("config", false), ("hooks/.git", false)] {
        let write = json!({"path": set.place.uri(&format!("ws/sub/repo/.git/{name}")), "dataBase64": ""});
        let answer = set.client.call("fs/writeFile", with(&write, &lifted)).await;
        assert_eq!(answer.is_ok(), is_free, "{name}: {answer:?}");
    }
    // The control: without the member all of it can be done, but for the names at the top.
    let plain = sandbox(&set.place, &[], &json!({}));
    std::fs::remove_dir_all(set.place.path("ws/copied")).unwrap_or_default();
    for (method, params) in acts(&set.place) {
        set.client.ok(method, with(&params, &plain)).await;
    }
}

#[tokio::test]
async fn what_is_skipped_when_missing_holds_once_it_exists() {
    let mut set = set_up().await;
    let at = |uri: String, access: &str, behavior: &Value| json!({"path": {"type": "path", "path": uri}, "access": access, "missing_path_behavior": behavior});
    let (later, secret) = (set.place.uri("ws/later"), set.place.uri("ws/secret"));
    let of = |behavior: Value| {
        sandbox(&set.place, &[at(later.clone(), "read", &behavior), at(secret.clone(), "deny", &behavior)], &json!({}))
    };
    let (strict, skipping) = (of(Value::Null), of(json!("skip")));
    for (path, strict_error, later_error) in [(&later, 30, 30), (&secret, 13, 13)] {
        let write = json!({"path": path, "dataBase64": ""});
        let refusal = set.client.refused("fs/writeFile", with(&write, &strict)).await;
        assert!(refusal.message.contains(&format!("(os error {strict_error})")), "{refusal:?}");
        set.client.ok("fs/writeFile", with(&write, &skipping)).await;
        let refusal = set.client.refused("fs/writeFile", with(&write, &skipping)).await;
        assert!(refusal.message.contains(&format!("(os error {later_error})")), "{refusal:?}");
    }
    set.client.refused("fs/readFile", with(&json!({"path": secret}), &skipping)).await;
    set.client.ok("fs/readFile", with(&json!({"path": later}), &skipping)).await;
}

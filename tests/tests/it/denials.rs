//! Denials as data: what was refused, by which rule, and what would allow it. They come from what a layer saw, never from words.

use portcullis_tests::{Workspace, at, special};
use serde_json::{Value, json};

struct Set(Workspace);

async fn set_up() -> Set {
    Set(Workspace::new().await)
}

impl Set {
    /// The one denial of a call that must be refused.
    async fn denial(&mut self, method: &str, mut params: Value, entries: &[Value]) -> Value {
        params["sandbox"] = self.0.profile(entries);
        let refusal = self.0.client.refused(method, params.clone()).await;
        assert!(refusal.message.contains("the request's policy refuses it: "), "{refusal:?}");
        let data = refusal.data.unwrap_or_else(|| panic!("{method} {params}: no data"));
        let denials = data["denials"].as_array().unwrap();
        assert_eq!((data.as_object().unwrap().len(), denials.len()), (1, 1), "{data}");
        assert_eq!(denials[0]["layer"], "worker");
        denials[0].clone()
    }

    /// A denied call, and the control: with the entry that its denial suggests the same call succeeds.
    async fn granted(&mut self, method: &str, params: Value, path: &str, rule: &str, entries: &[Value]) {
        let denial = self.denial(method, params.clone(), entries).await;
        assert_eq!(denial["path"], json!(self.0.place.path(path)), "{denial}");
        assert!(denial["rule"].as_str().unwrap().contains(rule), "{denial} does not name `{rule}`");
        let grant = &denial["grant"];
        assert!(grant.is_object() && grant["access"] == denial["access"], "{denial}");
        let mut wider = params;
        wider["sandbox"] = self.0.profile(&[entries, std::slice::from_ref(grant)].concat());
        self.0.client.ok(method, wider).await;
    }
}

#[tokio::test]
async fn a_denied_file_call_says_by_which_rule_and_what_would_allow_it() {
    let mut set = set_up().await;
    let entries = [special("root", "read"), special("project_roots", "write")];
    let reading = "entry `read /`";
    let write = |path: &str| json!({"path": set.0.place.uri(path), "dataBase64": "eA=="});
    let calls = [
        ("fs/writeFile", write("out/new"), "out/new", reading),
        ("fs/writeFile", write("out/o"), "out/o", reading),
        ("fs/writeFile", write("ws/../out/via-dots"), "out/via-dots", reading),
        ("fs/open", json!({"handleId": "h", "path": set.0.place.uri("out/opened"), "mode": "replace"}), "out/opened", reading),
        ("fs/createDirectory", json!({"path": set.0.place.uri("out/a/b")}), "out/a/b", reading),
        (
            "fs/copy",
            json!({"sourcePath": set.0.place.uri("ws/in"), "destinationPath": set.0.place.uri("out/copy"), "recursive": false}),
            "out/copy",
            reading,
        ),
        ("fs/remove", json!({"path": set.0.place.uri("out/o")}), "out/o", reading),
    ];
    for (method, params, path, rule) in calls {
        set.granted(method, params, path, rule, &entries).await;
    }
    set.0.place.put("ws/.git/config", "original");
    for path in ["ws/.git/config", "ws/.git/hooks"] {
        let params = json!({"path": set.0.place.uri(path), "dataBase64": "eA=="});
        set.granted("fs/writeFile", params, path, "protected name", &entries).await;
    }
    // Through a link the client's own word stands for the path, and the entry is for what is there.
    set.0.place.link("ws/alias", set.0.place.path("out"));
    let params = json!({"path": set.0.place.uri("ws/alias/linked"), "dataBase64": "eA=="});
    set.granted("fs/writeFile", params, "ws/alias/linked", reading, &entries).await;
    assert_eq!(set.0.place.content("out/linked"), "x");
}

#[tokio::test]
async fn where_no_entry_would_allow_it_none_is_suggested() {
    let mut set = set_up().await;
    let glob = json!({"path": {"type": "glob_pattern", "pattern": "**/*.env"}, "access": "deny"});
    let out = at(&set.0.place.uri("out"), "deny");
    let entries = [special("root", "read"), special("project_roots", "write"), out, glob];
    set.0.place.put("ws/a.env", "secret");
    set.0.place.put("ws/tree/deep/b.env", "secret");
    set.0.place.link("ws/alias", "a.env");
    let read = |path: &str| json!({"path": set.0.place.uri(path)});
    let write = |path: &str| json!({"path": set.0.place.uri(path), "dataBase64": ""});
    let calls = [
        ("fs/readFile", read("out/o"), "out/o", "read", "deny"),
        ("fs/readFile", read("out/absent"), "out/absent", "read", "deny"),
        ("fs/readFile", read("ws/a.env"), "ws/a.env", "read", "deny"),
        ("fs/readFile", read("ws/alias"), "ws/alias", "read", "deny"),
        ("fs/writeFile", write("ws/b.env"), "ws/b.env", "write", "deny"),
        // An entry for what does not exist makes nothing writable.
        ("fs/writeFile", write("ws/.codex"), "ws/.codex", "write", "protected name"),
        // The whole tree stays for the sake of what is denied in it, of which nothing is told.
        ("fs/remove", json!({"path": set.0.place.uri("ws/tree")}), "ws/tree", "write", "something below it"),
    ];
    for (method, params, path, access, rule) in calls {
        let denial = set.denial(method, params, &entries).await;
        assert_eq!((&denial["path"], &denial["access"]), (&json!(set.0.place.path(path)), &json!(access)));
        assert!(denial["grant"].is_null() && denial["rule"].as_str().unwrap().contains(rule), "{denial}");
    }
    assert!(set.0.place.has("ws/tree/deep/b.env"));
    // The control: without a sandbox the same paths can be read and written.
    for path in ["out/o", "ws/a.env"] {
        set.0.client.ok("fs/readFile", json!({"path": set.0.place.uri(path)})).await;
    }
    set.0.client.ok("fs/remove", json!({"path": set.0.place.uri("ws/tree")})).await;
    for path in ["ws/b.env", "ws/.codex"] {
        set.0.client.ok("fs/writeFile", json!({"path": set.0.place.uri(path), "dataBase64": ""})).await;
    }
}

#[tokio::test]
async fn what_is_hidden_is_told_by_the_clients_own_words_only() {
    let mut set = set_up().await;
    set.0.place.put("deep/secret-name/o", "o");
    set.0.place.link("ws/alias", set.0.place.path("deep/secret-name/o"));
    let entries = [at(&set.0.place.uri("ws"), "read")];
    let denial = set.denial("fs/readFile", json!({"path": set.0.place.uri("ws/alias")}), &entries).await;
    assert!(!denial.to_string().contains("secret-name"), "{denial}");
    let unlisted = "no entry covers it";
    for path in ["ws/alias", "out/o"] {
        set.granted("fs/readFile", json!({"path": set.0.place.uri(path)}), path, unlisted, &entries).await;
    }
    set.granted("fs/getMetadata", json!({"path": set.0.place.uri("out")}), "out", unlisted, &entries).await;
    let write = json!({"path": set.0.place.uri("out/new"), "dataBase64": ""});
    set.granted("fs/writeFile", write, "out/new", unlisted, &entries).await;
    // Whether it exists cannot be told from the answers.
    let mut answers = Vec::new();
    for path in ["out/o", "out/absent"] {
        let params = json!({"path": set.0.place.uri(path), "sandbox": set.0.profile(&entries)});
        let refusal = set.0.client.refused("fs/readFile", params).await;
        answers.push(format!("{refusal:?}").replace("absent", "o"));
    }
    assert_eq!(answers[0], answers[1]);
}

#[tokio::test]
async fn an_error_of_the_system_carries_no_denial() {
    let mut set = set_up().await;
    let sandbox = set.0.profile(&[special("root", "read"), special("project_roots", "write")]);
    for sandbox in [Value::Null, sandbox] {
        for (method, params) in [
            ("fs/readFile", json!({"path": set.0.place.uri("ws/absent")})),
            ("fs/readFile", json!({"path": set.0.place.uri("ws")})),
            ("fs/writeFile", json!({"path": set.0.place.uri("ws/no/such"), "dataBase64": ""})),
        ] {
            let mut params = params;
            params["sandbox"] = sandbox.clone();
            assert_eq!(set.0.client.refused(method, params).await.data, None);
        }
    }
}

#[tokio::test]
async fn words_in_the_output_are_no_denial() {
    let mut set = set_up().await;
    let script = "echo 'Permission denied: Read-only file system' >&2; exit 1";
    for (id, sandbox) in [("p", Value::Null), ("q", json!({"type": "read-only"}))] {
        let events = set.0.client.run(&set.0.place, id, &["sh", "-c", script], json!({ "sandbox": sandbox })).await;
        let exited = events.notices.iter().find(|notice| notice["method"] == "process/exited").unwrap();
        let params = json!({"processId": id, "seq": exited["params"]["seq"], "exitCode": 1, "sandboxDenied": false});
        assert_eq!(exited["params"], params, "an ordinary exit has these members and no more");
        let read = set.0.client.ok("process/read", json!({ "processId": id })).await;
        let members: Vec<&str> = read.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(members, ["chunks", "closed", "exitCode", "exited", "failure", "nextSeq", "sandboxDenied"]);
    }
}

#[tokio::test]
async fn what_is_enforced_is_told_to_whoever_asks_and_to_nobody_else() {
    let mut set = set_up().await;
    let plain = set.0.client.ok("environment/info", json!({})).await;
    assert!(plain.get("enforcement").is_none());
    assert_eq!(set.0.client.ok("environment/info", json!({"enforcement": false})).await, plain);
    let mut asked = set.0.client.ok("environment/info", json!({"enforcement": true})).await;
    let found = asked["enforcement"].take();
    asked.as_object_mut().unwrap().remove("enforcement");
    assert_eq!(asked, plain);
    let layers: Vec<&str> = found["layers"].as_array().unwrap().iter().map(|layer| layer["name"].as_str().unwrap()).collect();
    assert_eq!(layers, ["landlock", "seccomp", "cgroups", "namespaces", "own proc", "own users"]);
    let tables = found["seccomp"]["tables"].as_array().unwrap();
    assert!(tables.iter().all(|table| table["sha256"].as_str().unwrap().len() == 64), "{found}");

    let started = set.0.client.start(&set.0.place, "plain", &["true"], json!({"sandbox": {"type": "read-only"}})).await;
    assert_eq!(started, json!({"processId": "plain", "sandboxType": "linuxSeccomp"}));
    let more = json!({"sandbox": {"type": "read-only"}, "enforcement": true});
    let started = set.0.client.start(&set.0.place, "asked", &["true"], more).await;
    let enforced = &started["enforcement"];
    let members: Vec<&str> = enforced.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, ["landlockAbi", "missing", "namespaces", "observed", "ownProc", "ownUid", "seccomp"]);
    assert_eq!((&enforced["landlockAbi"], &enforced["missing"]), (&found["landlockAbi"], &json!([])));
    // Its tables are among those of the report, so that their hashes say what it runs under.
    let of_report = |name: &Value| tables.iter().any(|table| table["name"] == *name);
    let installed = enforced["seccomp"].as_array().unwrap();
    assert!(!installed.is_empty() && installed.iter().all(of_report), "{enforced}");
    let unconfined = set.0.client.start(&set.0.place, "free", &["true"], json!({"enforcement": true})).await;
    assert_eq!((&unconfined["enforcement"]["landlockAbi"], &unconfined["enforcement"]["seccomp"]), (&json!(0), &json!([])));
}

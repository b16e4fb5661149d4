//! The files that the operator starts the server from: no confined request changes them where they lie in a writable place.

use portcullis_tests::{Client, Place, Refusal, Server, executable, portcullis_at, without};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;

const POLICY: &str = r#"
description = "reads everything, and changes its workspace"
files = "restricted"
network = "restricted"
[[entries]]
special = "root"
access = "read"
[[entries]]
special = "project_roots"
access = "write"
"#;

const FILES: [&str; 3] = ["bin/portcullis", "p.toml", "c.toml"];

/// Tries to change each file and its directory, by every way.
const ATTACK: &str = "cd ws && for f in bin/portcullis p.toml c.toml; do
    echo >>$f; rm -f $f; mv $f $f.old; echo new >new && mv new $f; ln -f p.new $f; chmod 777 $f; done
    mv bin other; rm -rf bin; echo done";

#[tokio::test]
async fn no_confined_request_changes_what_the_server_runs_from() {
    for is_own in [true, false] {
        let place = Place::new();
        place.directory("ws/bin");
        let at = |name: &str| place.path(&format!("ws/{name}"));
        let path = |name: &str| at(name).to_str().unwrap().to_owned();
        fs::copy(executable("portcullis"), at("bin/portcullis")).unwrap();
        place.put("ws/p.toml", POLICY);
        place.put("ws/c.toml", "max-sessions = 100\n");
        // The control is a server whose own files lie elsewhere.
        let (program, policy, config) = if is_own {
            (at("bin/portcullis"), path("p.toml"), path("c.toml"))
        } else {
            place.put("p.toml", POLICY);
            place.put("c.toml", "");
            let elsewhere = |name: &str| place.path(name).to_str().unwrap().to_owned();
            (executable("portcullis"), elsewhere("p.toml"), elsewhere("c.toml"))
        };
        let workspace = path("");
        let flags = ["serve", "--insecure-no-auth", "--policy", &policy, "--config", &config, "--workspace", &workspace];
        let server = Server::with(portcullis_at(&program, &flags)).await;
        let mut client = Client::connect(&server).await;
        // Within the ceiling, and with entries of its own for the very files.
        let entry = |uri: String, access: &str| json!({"path": {"type": "path", "path": uri}, "access": access});
        let mut entries = vec![json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"})];
        entries.extend(FILES.map(|name| entry(place.uri(&format!("ws/{name}")), "write")));
        let own = json!({
            "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": entries}},
            "windowsSandboxLevel": "disabled",
        });
        let length = |name: &str| fs::symlink_metadata(at(name)).map(|file| file.len()).ok();
        let before = FILES.map(length);
        for sandbox in [json!(null), own] {
            for name in FILES {
                let write = json!({"path": place.uri(&format!("ws/{name}")), "dataBase64": "", "sandbox": sandbox});
                let written = client.call("fs/writeFile", write).await;
                assert_eq!(written.is_err(), is_own, "{name}: {written:?}");
            }
        }
        let remove = json!({"path": place.uri("ws/bin"), "recursive": true, "force": true});
        assert_eq!(client.call("fs/remove", remove).await.is_err(), is_own);
        let events = client.run(&place, "p", &["sh", "-c", ATTACK], json!({})).await;
        assert!(events.output(Some("stdout")).ends_with("done\n"));
        assert_eq!(FILES.map(length) == before, is_own);
        // What lies beside them is free.
        client.ok("fs/writeFile", json!({"path": place.uri("ws/beside"), "dataBase64": ""})).await;
    }
}

#[tokio::test]
async fn an_entry_behind_a_link_finds_no_token() {
    for things in [&[][..], &["namespaces"]] {
        let place = Place::new();
        place.directory("ws");
        let named = place.path("named-token");
        let arguments = ["serve", "--token-file", named.to_str().unwrap(), "--policy", "workspace-write", "--workspace"];
        let workspace = place.path("ws");
        let mut command = without(things, &executable("portcullis"), &[&arguments[..], &[workspace.to_str().unwrap()]].concat());
        command.env("XDG_RUNTIME_DIR", place.path(""));
        let server = Server::with(command).await;
        let token = fs::read_to_string(&named).unwrap();
        let file = format!("{}.token", server.url.strip_prefix("ws://").unwrap());
        place.put("other/file", "other");
        let mut client = Client::connect_with_token(&server.url, &token).await;
        for (link, to) in
            [("file", &*format!("portcullis/{file}")), ("directory", "portcullis"), ("named", "named-token"), ("other", "other")]
        {
            symlink(place.path(to), place.path(&format!("ws/{link}"))).unwrap();
        }
        let below = format!("directory/{file}");
        for (entry, target, is_own) in [
            ("file", format!("portcullis/{file}"), true),
            ("directory", format!("portcullis/{file}"), true),
            (below.as_str(), format!("portcullis/{file}"), true),
            ("named", "named-token".to_owned(), true),
            // The control.
            ("other/file", "other/file".to_owned(), false),
        ] {
            let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
            let entry = json!({"path": {"type": "path", "path": place.uri(&format!("ws/{entry}"))}, "access": "read"});
            let files = json!({"type": "restricted", "entries": [root, entry]});
            let permissions = json!({"type": "managed", "network": "restricted", "file_system": files});
            let sandbox = json!({"permissions": permissions, "windowsSandboxLevel": "disabled"});
            let read = client.call("fs/readFile", json!({"path": place.uri(&target), "sandbox": sandbox})).await;
            let more = json!({"sandbox": sandbox, "cwd": place.uri("ws")});
            let params = json!({"processId": entry["path"]["path"], "argv": ["cat", place.path(&target)], "env": {"PATH": "/usr/bin:/bin"}, "tty": false});
            let start = client.call("process/start", merged(params, more)).await;
            let is_refused = |answer: &Result<Value, Refusal>| {
                answer.as_ref().is_err_and(|refusal| refusal.message.contains("files of the server itself"))
            };
            if is_own {
                assert!(is_refused(&read), "{read:?}");
                // Without namespaces nothing is hidden from processes: SECURITY.md says so.
                assert_eq!(is_refused(&start), things.is_empty(), "{start:?}");
            } else {
                assert!(read.is_ok() && start.is_ok(), "{read:?} {start:?}");
            }
        }
    }
}

fn merged(mut params: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("{more}") };
    params.as_object_mut().unwrap().extend(more);
    params
}

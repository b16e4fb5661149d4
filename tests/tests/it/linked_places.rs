//! Paths of a policy, and the server's own directories, that lead through links which no confined process can change.

use portcullis_tests::{Client, Place, Server, Workspace, at, portcullis, special};
use serde_json::json;
use std::os::unix::fs::symlink;

#[tokio::test]
async fn a_denial_named_through_a_link_holds_and_starts() {
    let mut ws = Workspace::new().await;
    ws.place.put("real/deep/secret", "secret\n");
    ws.place.put("real/deep/plain", "plain\n");
    symlink(ws.place.path("real"), ws.place.path("link")).unwrap();
    let script = "cat ../real/deep/secret ../link/deep/secret 2>/dev/null; cat ../link/deep/plain";
    let sandbox = ws.profile(&[
        special("root", "read"),
        special("project_roots", "write"),
        at(&ws.place.uri("link/deep/secret"), "deny"),
        at(&ws.place.uri("link/later/missing"), "deny"),
    ]);
    for (id, more, expect) in
        [("held", json!({"sandbox": sandbox}), "plain\n"), ("control", json!({}), "secret\nsecret\nplain\n")]
    {
        let mut params = Client::start_params(&ws.place, id, &["sh", "-c", script]);
        params["cwd"] = json!(ws.place.uri("ws"));
        if let Some(sandbox) = more.get("sandbox") {
            params["sandbox"] = sandbox.clone();
        }
        ws.client.ok("process/start", params).await;
        assert_eq!(ws.client.events(id).await.output(None), expect, "{id}");
    }
}

#[tokio::test]
async fn a_server_whose_home_is_behind_a_link_starts_sandboxes() {
    let place = Place::new();
    place.directory("real/home");
    place.directory("ws");
    symlink(place.path("real"), place.path("link")).unwrap();
    for variable in ["HOME", "XDG_RUNTIME_DIR"] {
        let mut command = portcullis(&["serve", "--insecure-no-auth"]);
        command.env(variable, place.path("link/home"));
        let server = Server::with(command).await;
        let mut client = Client::connect(&server).await;
        let sandbox = json!({"type": "workspace-write", "cwd": place.uri("ws"), "writable_roots": []});
        let directory = if variable == "HOME" { ".local/state/portcullis" } else { "portcullis" };
        for way in ["real", "link"] {
            // What the server keeps there is hidden by either name.
            let private = place.path(&format!("{way}/home/{directory}"));
            let script = format!("cd {} 2>/dev/null || echo hidden", private.display());
            let run = |sandbox: serde_json::Value| json!({"cwd": place.uri("ws"), "sandbox": sandbox});
            let id = format!("{variable}-{way}");
            let events = client.run(&place, &id, &["sh", "-c", &script], run(sandbox.clone())).await;
            assert_eq!((events.output(None).as_str(), events.code()), ("hidden\n", 0), "{id}");
            let control = client.run(&place, &format!("{id}-control"), &["sh", "-c", &script], json!({})).await;
            assert_eq!(control.output(None), "", "{id}");
        }
    }
}

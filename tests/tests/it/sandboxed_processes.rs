//! Processes under policies.

use portcullis_tests::{Client, Place, Server, portcullis};
use serde_json::json;
use std::os::unix::fs::MetadataExt as _;

fn read_only() -> serde_json::Value {
    json!({"sandbox": {"type": "read-only"}})
}

#[tokio::test]
async fn a_read_only_process_reads_and_changes_nothing() {
    let server = Server::start().await;
    let place = Place::new();
    for file in ["file", "removed", "moved", "linked"] {
        place.put(file, "content");
        place.mode(file, 0o600);
    }
    let mut client = Client::connect(&server).await;
    let started = client.start(&place, "p", &["cat", "file"], read_only()).await;
    assert_eq!(started["sandboxType"], "linuxSeccomp");
    assert_eq!(client.events("p").await.output(None), "content");
    let script = "echo x >file; echo x >new; mkdir d; rm -f removed; mv moved m; ln linked l; ln -s file s; chmod 777 file; TZ=UTC touch -d 2001-01-01 file";
    let listing = |place: &Place| {
        let mut names: Vec<_> = std::fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let facts = |place: &Place| {
        let found = place.path("file").metadata().unwrap();
        (place.content("file"), found.mode(), found.mtime(), listing(place))
    };
    let before = facts(&place);
    let events = client.run(&place, "q", &["sh", "-c", script], read_only()).await;
    assert_eq!(facts(&place), before, "{}", events.output(None));
    // The control: the same script without a sandbox does all of it.
    client.run(&place, "r", &["sh", "-c", script], json!({})).await;
    let after = facts(&place);
    assert_eq!((after.0.as_str(), after.1 & 0o777, after.2), ("x\n", 0o777, 978_307_200));
    assert_eq!(after.3, ["d", "file", "l", "linked", "m", "new", "s"]);
}

#[tokio::test]
async fn a_write_policy_is_refused_with_layer_and_remedy_unless_the_operator_accepts() {
    let place = Place::new();
    let sandbox = json!({"type": "workspace-write", "cwd": place.uri("")});
    let mut params = Client::start_params(&place, "p", &["touch", "made"]);
    params["sandbox"] = sandbox.clone();
    let server = Server::without(&["namespaces"], &[]).await;
    let mut client = Client::connect(&server).await;
    let refusal = client.refused("process/start", params.clone()).await;
    assert_eq!(refusal.code, -32602);
    for word in ["cannot be enforced", ".git", "mount", "--allow-unprotected-metadata"] {
        assert!(refusal.message.contains(word), "{word}: {refusal:?}");
    }
    assert!(!place.has("made"));
    let accepting = Server::without(&["namespaces"], &["--allow-unprotected-metadata"]).await;
    let mut client = Client::connect(&accepting).await;
    let events = client.run(&place, "p", &["touch", "made"], json!({"sandbox": sandbox})).await;
    assert_eq!(events.code(), 0, "{}", events.output(None));
    assert!(place.has("made"));
    // What is denied to processes cannot be waived.
    let denying = json!({"windowsSandboxLevel": "disabled", "cwd": place.uri(""), "permissions": {"type": "managed", "network": "restricted",
        "file_system": {"type": "restricted", "entries": [
            {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
            {"path": {"type": "path", "path": place.uri("secret")}, "access": "deny"}]}}});
    params["sandbox"] = denying.clone();
    params["processId"] = json!("q");
    assert_eq!(client.refused("process/start", params).await.code, -32602);
    // With namespaces both run, and nobody needs to accept anything.
    let whole = Server::start().await;
    let mut client = Client::connect(&whole).await;
    for (id, sandbox) in [("p", sandbox), ("q", denying)] {
        let more = json!({"sandbox": sandbox, "enforcement": true});
        let started = client.start(&place, id, &["cat", "made"], more).await;
        assert_eq!(started["enforcement"]["missing"], json!([]), "{started}");
        assert_eq!(client.events(id).await.code(), 0);
    }
}

#[tokio::test]
async fn the_network_is_off_and_what_needs_no_network_works() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connect = format!("import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('connected')");
    let confined = client.run(&place, "p", &["python3", "-c", &connect], read_only()).await;
    assert!(confined.code() != 0 && !confined.output(None).contains("connected"), "{}", confined.output(None));
    let free = client.run(&place, "q", &["python3", "-c", &connect], json!({})).await;
    assert_eq!(free.output(None), "connected\n");
    let pairs = "import socket, asyncio\na, b = socket.socketpair()\na.send(b'x'); assert b.recv(1) == b'x'\nasyncio.run(asyncio.wait_for(asyncio.to_thread(int), None))\nprint('works')";
    let works = client.run(&place, "r", &["python3", "-c", pairs], read_only()).await;
    assert_eq!(works.output(None), "works\n");
    let datagrams = "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nprint('made')";
    assert!(client.run(&place, "s", &["python3", "-c", datagrams], read_only()).await.code() != 0);
    assert_eq!(client.run(&place, "t", &["python3", "-c", datagrams], json!({})).await.output(None), "made\n");
}

#[tokio::test]
async fn nothing_outside_can_be_signalled_or_looked_into() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "victim", &["sh", "-c", "echo $$; exec sleep 600"], json!({})).await;
    let pid = client.process_id("victim").await;
    let kill = client
        .run(&place, "p", &["sh", "-c", &format!("kill -9 {pid}; cat /proc/{pid}/environ && echo seen")], read_only())
        .await;
    assert!(kill.code() != 0 && !kill.output(None).contains("seen"), "{}", kill.output(None));
    assert_eq!(client.ok("process/read", json!({"processId": "victim"})).await["exited"], json!(false));
    let control =
        client.run(&place, "q", &["sh", "-c", &format!("cat /proc/{pid}/environ >/dev/null && kill -9 {pid}")], json!({})).await;
    assert_eq!(control.code(), 0);
    assert_eq!(client.events("victim").await.code(), 137);
}

#[tokio::test]
async fn a_sandboxed_start_that_fails_says_why() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    let mut params = Client::start_params(&place, "p", &["/no/such/program"]);
    params["sandbox"] = json!({"type": "read-only"});
    let refusal = client.refused("process/start", params).await;
    assert!(refusal.code == -32603 && refusal.message.contains("No such file or directory (os error 2)"), "{refusal:?}");
    let mut managed = Client::start_params(&place, "p", &["true"]);
    managed["enforceManagedNetwork"] = json!(true);
    managed["sandbox"] = json!({"type": "read-only"});
    assert_eq!(client.refused("process/start", managed).await.code, -32602);
    let disabled = json!({"sandbox": {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}});
    assert_eq!(client.start(&place, "p", &["true"], disabled).await["sandboxType"], "none");
}

#[tokio::test]
async fn a_terminal_works_under_a_policy() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    let more = json!({"tty": true, "sandbox": {"type": "read-only"}});
    let events = client.run(&place, "p", &["sh", "-c", "test -t 0 && echo tty >/dev/tty; echo >/dev/null"], more).await;
    assert_eq!((events.output(Some("pty")).as_str(), events.code()), ("tty\r\n", 0));
}

#[tokio::test]
async fn tmpdir_is_the_servers_own() {
    let place = Place::new();
    for directory in ["ws", "servers", "requests"] {
        place.directory(directory);
    }
    let mut command = portcullis(&["serve", "--insecure-no-auth"]);
    command.env("TMPDIR", place.path("servers"));
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    let script = format!("touch {0}/servers/made; touch {0}/requests/made", place.path("").display());
    let env = json!({"PATH": "/usr/bin:/bin", "TMPDIR": place.path("requests")});
    let sandbox = json!({"type": "workspace-write", "cwd": place.uri("ws")});
    client.run(&place, "p", &["sh", "-c", &script], json!({"env": env, "sandbox": sandbox})).await;
    assert!(place.has("servers/made") && !place.has("requests/made"));
    for (path, may) in [("servers/file", true), ("requests/file", false)] {
        let written = client.call("fs/writeFile", json!({"path": place.uri(path), "dataBase64": "", "sandbox": sandbox})).await;
        assert_eq!(written.is_ok(), may, "{path}: {written:?}");
    }
    client.run(&place, "q", &["sh", "-c", &script], json!({"env": env})).await;
    assert!(place.has("requests/made"), "the control: without a sandbox both can be written");
}

#[tokio::test]
async fn what_the_request_plants_acts_inside_only() {
    let server = Server::start().await;
    let place = Place::new();
    // A program on the request's PATH, and a script that bash reads first: each tries to leave a mark.
    let mark = |name: &str| format!("#!/bin/sh\necho x >{}/{name}\n", place.path("").display());
    place.put("bin/true", mark("by-path"));
    place.mode("bin/true", 0o755);
    place.put("rc", mark("by-bash-env"));
    let env = json!({"PATH": format!("{}:/usr/bin:/bin", place.path("bin").display()), "BASH_ENV": place.path("rc")});
    let script = "true; exit 0";
    let mut client = Client::connect(&server).await;
    let confined = json!({"env": env, "sandbox": {"type": "read-only"}});
    client.run(&place, "p", &["true"], confined.clone()).await;
    client.run(&place, "q", &["bash", "-c", script], confined).await;
    assert!(!place.has("by-path") && !place.has("by-bash-env"));
    client.run(&place, "r", &["true"], json!({"env": env})).await;
    client.run(&place, "s", &["bash", "-c", script], json!({"env": env})).await;
    assert!(place.has("by-path") && place.has("by-bash-env"), "the control: without a sandbox both leave their marks");
}

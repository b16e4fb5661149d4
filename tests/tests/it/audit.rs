//! The audit log: what was done is in it, in order, and nothing is done that cannot be.

use portcullis_tests::{Client, PATIENCE, Place, Program, Server, executable, portcullis};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use tokio::process::Command;
use tokio::time::timeout;

/// Arguments of a server that records in `audit`.
fn arguments(place: &Place) -> Vec<String> {
    ["serve", "--insecure-no-auth", "--audit", place.path("audit").to_str().unwrap()].map(str::to_owned).to_vec()
}

async fn server(place: &Place) -> Server {
    let arguments = arguments(place);
    Server::with(portcullis(&arguments.iter().map(String::as_str).collect::<Vec<_>>())).await
}

async fn stop(server: &mut Server) {
    server.program.signal(Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
}

fn lines(place: &Place) -> Vec<Value> {
    place.content("audit").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Status and words of `audit verify`.
async fn verify(place: &Place, more: &[&str]) -> (i32, String) {
    let file = place.path("audit");
    let mut program = Program::start(portcullis(&[&["audit", "verify", file.to_str().unwrap()], more].concat()));
    let status = program.wait().await;
    let said = if status == 0 { program.line().await } else { program.stderr().await };
    (status, said)
}

/// Waits until the log holds a line.
async fn until(place: &Place, wanted: impl Fn(&Value) -> bool) -> Value {
    let found = async {
        loop {
            let whole = place.content("audit");
            let lines = whole.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            let found = lines.map(|line| serde_json::from_str::<Value>(line).unwrap()).find(&wanted);
            match found {
                Some(line) => return line,
                None => tokio::task::yield_now().await,
            }
        }
    };
    timeout(PATIENCE, found).await.expect("the line is written")
}

#[tokio::test]
async fn what_was_done_is_recorded_in_order_and_no_secret_with_it() {
    let place = Place::new();
    let mut server = server(&place).await;
    let mut client = Client::connect(&server).await;
    let session = client.session.clone();
    let file = place.uri("file");
    client.ok("fs/writeFile", json!({"path": file, "dataBase64": "bWFyay1jb250ZW50"})).await;
    // Before the answer came, it was there.
    assert_eq!(lines(&place).last().unwrap()["action"], "fs/writeFile");
    client.ok("fs/readFile", json!({"path": file})).await;
    client.refused("fs/readFile", json!({"path": place.uri("missing")})).await;
    let sandbox = json!({"type": "read-only"});
    client.refused("fs/writeFile", json!({"path": file, "dataBase64": "", "sandbox": sandbox})).await;
    client.ok("environment/status", json!(null)).await;
    let more = json!({"env": {"PATH": "/usr/bin:/bin", "MARK": "mark-env"}, "pipeStdin": true});
    client.start(&place, "p", &["sh", "-c", "read line; echo $0 $MARK $line; exit 3", "mark-argument"], more).await;
    client.ok("process/write", json!({"processId": "p", "chunk": "bWFyay1pbnB1dAo=", "writeId": "1"})).await;
    let output = client.events("p").await.output(None);
    assert_eq!(output, "mark-argument mark-env mark-input\n", "the control: all of it was there to be told");
    client.refused("no/such", json!({})).await;
    client.close().await;
    stop(&mut server).await;

    let lines = lines(&place);
    let told: Vec<(&str, &str)> =
        lines.iter().map(|line| (line["action"].as_str().unwrap(), line["outcome"].as_str().unwrap())).collect();
    let expect = [
        ("serve/started", "ok"),
        ("initialize", "ok"),
        ("fs/writeFile", "ok"),
        ("fs/readFile", "ok"),
        ("fs/readFile", "error"),
        ("fs/writeFile", "denied"),
        ("process/start", "ok"),
        ("process/write", "ok"),
        ("process/ended", "error"),
        ("invalid", "error"),
        ("serve/stopped", "ok"),
    ];
    assert_eq!(told, expect);
    let (written, started, ended) = (&lines[2], &lines[6], &lines[8]);
    assert_eq!(written["on"], json!({"path": file, "bytes": 12}));
    assert_eq!((&written["policy"], &written["connection"], &written["seq"]), (&json!("none"), &json!(1), &json!(3)));
    assert_eq!(written["who"], json!({"credential": "none"}));
    assert!(written["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{written}");
    assert_eq!(lines[4]["code"], -32004);
    assert_eq!(lines[5]["policy"].as_str().unwrap().len(), 64);
    let on = json!({"process": "p", "program": "sh", "arguments": 3, "cwd": place.uri(""), "terminal": false});
    assert_eq!(started["on"], on);
    assert_eq!((&ended["on"]["exit"], &ended["on"]["process"]), (&json!(3), &json!("p")));
    assert_eq!((started["session"].as_str().unwrap().len(), &started["session"]), (12, &ended["session"]));
    let text = place.content("audit");
    for secret in ["mark-content", "mark-env", "mark-argument", "mark-input", "bWFyay1", &session] {
        assert!(!text.contains(secret), "{secret} is in the audit log:\n{text}");
    }
    let mode = std::fs::metadata(place.path("audit")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn the_chain_goes_on_after_a_restart_and_tampering_is_found() {
    let place = Place::new();
    for _server in 0..2 {
        let mut server = server(&place).await;
        let mut client = Client::connect(&server).await;
        client.ok("fs/writeFile", json!({"path": place.uri("file"), "dataBase64": ""})).await;
        stop(&mut server).await;
    }
    let (status, said) = verify(&place, &[]).await;
    assert!(status == 0 && said.starts_with("ok: 8 lines, head "), "{said}");
    let head = said.rsplit(' ').next().unwrap().to_owned();
    assert_eq!(verify(&place, &["--head", &head]).await.0, 0);
    let whole = place.content("audit");
    place.put("audit", whole.replacen("file", "elif", 1));
    let (status, said) = verify(&place, &[]).await;
    assert!(status == 1 && said.contains("line 4 is wrong"), "{said}");
    // What nothing in the file shows, who kept its head sees.
    let shorter = whole.lines().take(5).flat_map(|line| [line, "\n"]).collect::<String>();
    place.put("audit", shorter);
    assert_eq!(verify(&place, &[]).await.0, 0);
    assert_eq!(verify(&place, &["--head", &head]).await.0, 1);
    // A server that was killed while it wrote.
    let torn = &whole[..whole.len() - 20];
    place.put("audit", torn);
    assert_eq!(verify(&place, &[]).await.0, 1);
    let mut again = server(&place).await;
    stop(&mut again).await;
    let (status, said) = verify(&place, &[]).await;
    assert_eq!(status, 0, "{said}");
    assert!(place.content("audit").starts_with(torn));
}

#[tokio::test]
async fn a_server_that_cannot_record_does_not_start() {
    let place = Place::new();
    place.put("other", "notes of somebody\n");
    place.directory("directory");
    let one = server(&place).await;
    for (file, words) in [
        ("none/audit", "No such file or directory"),
        ("other", "does not end as one"),
        ("directory", "Is a directory"),
        ("audit", "is written by another server"),
    ] {
        let path = place.path(file);
        let mut refused = Program::start(portcullis(&["serve", "--audit", path.to_str().unwrap()]));
        assert_eq!(refused.wait().await, 1);
        let said = refused.stderr().await;
        assert!(said.contains(words) && said.contains(path.to_str().unwrap()), "{said}");
    }
    assert_eq!(place.content("other"), "notes of somebody\n");
    drop(one);
}

/// A server whose files may have so many bytes, for which a shell ignores the signal that would end it otherwise.
async fn on_a_full_disk(arguments: &[String], bytes: u64) -> Server {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(executable("portcullis")).args(arguments);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let server = Server::with({
        command.kill_on_drop(true);
        command
    })
    .await;
    limit(&server, bytes);
    server
}

/// The soft limit alone, so that it can be lifted.
fn limit(server: &Server, bytes: u64) {
    let pid = Pid::from_raw(i32::try_from(server.program.child.id().unwrap()).unwrap());
    prlimit(pid, Resource::Fsize, Rlimit { current: Some(bytes), maximum: None }).unwrap();
}

#[tokio::test]
async fn on_a_full_disk_nothing_is_done_that_is_not_recorded() {
    let place = Place::new();
    let room = 3000;
    let mut server = on_a_full_disk(&arguments(&place), room).await;
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sleep", "600"], json!({})).await;
    let make = |nth: usize| json!({"path": place.uri(&nth.to_string())});
    let mut made = 0;
    // The disk becomes full: that call was carried out and could not be recorded.
    let refusal = loop {
        match client.call("fs/createDirectory", make(made)).await {
            Ok(_) => made += 1,
            Err(refusal) => break refusal,
        }
    };
    assert!(made > 0 && refusal.code == -32603, "{made} {refusal:?}");
    assert!(refusal.message.contains("it was carried out, but the audit log cannot be written: "), "{refusal:?}");
    assert!(place.has(&made.to_string()));
    // From then on nothing is done.
    let refusal = client.refused("fs/createDirectory", make(made + 1)).await;
    assert!(refusal.message.ends_with("nothing was done"), "{refusal:?}");
    assert!(!place.has(&(made + 1).to_string()));
    client.refused("process/start", Client::start_params(&place, "q", &["true"])).await;
    client.refused("fs/readFile", json!({"path": place.uri("audit")})).await;
    // But what runs can be ended, and what the gateway says of itself it says.
    client.ok("environment/status", json!(null)).await;
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap_err();
    client.events("p").await;
    // There is room again: first what was owed, then what comes.
    limit(&server, 1 << 20);
    client.ok("fs/createDirectory", make(made + 1)).await;
    stop(&mut server).await;
    let lines = lines(&place);
    let directories = lines.iter().filter(|line| line["action"] == "fs/createDirectory" && line["outcome"] == "ok").count();
    assert_eq!(directories, made + 2);
    assert!(lines.iter().any(|line| line["action"] == "process/terminate"));
    assert!(lines.iter().any(|line| line["action"] == "process/ended"));
    assert_eq!(verify(&place, &[]).await.0, 0);
    assert!(server.program.stderr().await.contains("the audit log cannot be written"));
}

#[tokio::test]
async fn without_an_audit_log_a_full_disk_is_nobodys_matter() {
    let place = Place::new();
    let open = ["serve", "--insecure-no-auth"].map(str::to_owned);
    let server = on_a_full_disk(&open, 0).await;
    let mut client = Client::connect(&server).await;
    client.ok("fs/createDirectory", json!({"path": place.uri("made")})).await;
    assert!(place.has("made"));
}

#[tokio::test]
async fn who_is_not_let_in_is_recorded_and_the_token_is_not() {
    let place = Place::new();
    let token = place.path("token");
    std::fs::write(&token, "mark-token").unwrap();
    let (audit, token) = (place.path("audit"), token.to_str().unwrap().to_owned());
    let arguments = ["serve", "--audit", audit.to_str().unwrap(), "--ws-auth", "capability-token", "--ws-token-file", &token];
    let mut server = Server::with(portcullis(&arguments)).await;
    let address = server.url.strip_prefix("ws://").unwrap().to_owned();
    for headers in ["Authorization: Bearer mark-other\r\n", "Origin: http://mark-page\r\n"] {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut socket = tokio::net::TcpStream::connect(&address).await.unwrap();
        socket.write_all(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        timeout(PATIENCE, socket.read_to_end(&mut answer)).await.unwrap().unwrap();
    }
    let _client = Client::connect_with_token(&server.url, "mark-token").await;
    stop(&mut server).await;
    let lines = lines(&place);
    let reasons: Vec<&Value> =
        lines.iter().filter(|line| line["action"] == "connect").map(|line| &line["on"]["reason"]).collect();
    assert_eq!(reasons, ["auth", "origin"]);
    let initialize = lines.iter().find(|line| line["action"] == "initialize").unwrap();
    assert_eq!(initialize["who"], json!({"credential": "token"}));
    assert!(!place.content("audit").contains("mark-"));
}

#[tokio::test]
async fn a_call_whose_connection_ends_first_is_recorded_too() {
    let place = Place::new();
    let server = server(&place).await;
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sleep", "600"], json!({"pipeStdin": true})).await;
    // More than its pipe and its queue take: the last of these waits.
    let chunk = "A".repeat(1 << 20);
    for nth in 0..40 {
        client.begin("process/write", json!({"processId": "p", "chunk": chunk, "writeId": nth.to_string()})).await;
    }
    client.ok("process/list", json!(null)).await;
    client.cut();
    let line = until(&place, |line| line["outcome"] == "unanswered").await;
    assert_eq!(line["action"], "process/write");
}

#[tokio::test]
async fn no_confined_request_sees_the_audit_log() {
    let place = Place::new();
    let arguments = arguments(&place);
    let workspace = place.path("");
    let ceiling = ["--policy", "workspace-write", "--workspace", workspace.to_str().unwrap()];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(ceiling).collect();
    let server = Server::with(portcullis(&arguments)).await;
    let mut client = Client::connect(&server).await;
    let (audit, other) = (place.uri("audit"), place.uri("other"));
    client.ok("fs/writeFile", json!({"path": other, "dataBase64": ""})).await;
    client.ok("fs/readFile", json!({"path": other})).await;
    client.refused("fs/readFile", json!({"path": audit})).await;
    client.refused("fs/writeFile", json!({"path": audit, "dataBase64": ""})).await;
    client.refused("fs/remove", json!({"path": audit})).await;
    let script = "echo x >> other && ! echo x >> audit && ! cat audit";
    assert_eq!(client.run(&place, "p", &["sh", "-c", script], json!({})).await.code(), 0);
    assert_eq!(verify(&place, &[]).await.0, 0);
}

//! The log: what happens is in it, and what is a secret is not.

use portcullis_tests::{Client, Place, Server, portcullis};
use serde_json::{Value, json};

/// Words that a client says in one place each, and that no log may repeat.
const MARKERS: [&str; 9] =
    ["mark-argv", "mark-env", "mark-name", "mark-content", "mark-process", "mark-input", "mark-method", "mark-handle", "mark-op"];

/// Everything that a server logs at a level while a session does a bit of everything, and the session's id.
async fn log_of_a_session(level: &str, format: &str) -> (String, String) {
    let place = Place::new();
    let token_file = place.path("token");
    std::fs::write(&token_file, "mark-token-0123456789").unwrap();
    let arguments = ["serve", "--log-format", format, "--ws-auth", "capability-token", "--ws-token-file"];
    let mut command = portcullis(&[&arguments[..], &[token_file.to_str().unwrap()]].concat());
    command.env("RUST_LOG", level);
    let mut server = Server::with(command).await;
    let mut client = Client::connect_with_token(&server.url, "mark-token-0123456789").await;
    let session = client.session.clone();
    // The control: all of this was there to be told, since the process knew it.
    let script = "read line; echo $0 $MARK $line; cat mark-name; exit 3";
    let more = json!({"env": {"PATH": "/usr/bin:/bin", "MARK": "mark-env"}, "pipeStdin": true, "operationId": "mark-op"});
    client.ok("fs/writeFile", json!({"path": place.uri("mark-name"), "dataBase64": "bWFyay1jb250ZW50"})).await;
    client.ok("fs/open", json!({"path": place.uri("mark-name"), "handleId": "mark-handle"})).await;
    client.start(&place, "mark-process", &["sh", "-c", script, "mark-argv"], more).await;
    client.ok("process/write", json!({"processId": "mark-process", "chunk": "bWFyay1pbnB1dAo=", "writeId": "1"})).await;
    let output = client.events("mark-process").await.output(None);
    assert_eq!(output, "mark-argv mark-env mark-input\nmark-content");
    client.refused("mark-method", json!({})).await;
    client.refused("fs/readFile", json!({"path": place.uri("mark-name/below")})).await;
    let sandbox = json!({"type": "read-only"});
    let denied = json!({"path": place.uri("mark-name"), "dataBase64": "", "sandbox": sandbox});
    client.refused("fs/writeFile", denied).await;
    // A policy that a worker refuses, since its writable root is a link.
    place.link("mark-link", "mark-name");
    let entry = json!({"path": {"type": "path", "path": place.uri("mark-link")}, "access": "write"});
    let permissions =
        json!({"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": [entry]}});
    let sandbox = json!({"permissions": permissions, "windowsSandboxLevel": "disabled"});
    let refusal = client.refused("fs/readFile", json!({"path": place.uri("mark-name"), "sandbox": sandbox})).await;
    assert!(refusal.message.contains("it is a symbolic link"), "{refusal:?}");
    client.cut();
    let mut again = Client::resume_with_token(&server.url, "mark-token-0123456789", &session).await;
    again.ok("process/list", json!(null)).await;
    server.program.signal(rustix::process::Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
    (server.program.stderr().await, session)
}

fn holds_no_secret(log: &str, session: &str) {
    for marker in MARKERS.into_iter().chain(["mark-token", session, "bWFyay1", "portcullis-test-"]) {
        assert!(!log.contains(marker), "{marker} is in the log:\n{log}");
    }
}

#[tokio::test]
async fn the_log_tells_what_happens_and_no_secret() {
    let (log, session) = log_of_a_session("info", "text").await;
    holds_no_secret(&log, &session);
    for words in [
        "connection opened",
        "session made",
        "session attached",
        "process started",
        "process ended",
        "code=3",
        "session detached",
        "connection closed",
        "session resumed",
        "session ended",
    ] {
        assert!(log.contains(words), "{words} is not in the log:\n{log}");
    }
}

#[tokio::test]
async fn nothing_that_the_program_itself_logs_at_any_level_is_a_secret() {
    // What libraries say of the bytes that they carry is theirs, and nobody gets it without asking.
    let (log, session) = log_of_a_session("portcullis=trace,portcullis_gateway=trace", "text").await;
    assert!(log.contains("process runs"), "{log}");
    holds_no_secret(&log, &session);
}

#[tokio::test]
async fn as_json_each_line_is_an_object() {
    let (log, session) = log_of_a_session("info", "json").await;
    holds_no_secret(&log, &session);
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let ended = lines.iter().find(|line| line["message"] == "process ended").unwrap();
    assert_eq!((&ended["code"], &ended["result"], &ended["level"]), (&json!(3), &json!("error"), &json!("INFO")));
    let made = lines.iter().find(|line| line["message"] == "session made").unwrap();
    assert_eq!(made["session"], ended["session"]);
    assert_eq!(made["session"].as_str().unwrap().len(), 12);
}

#[tokio::test]
async fn without_being_asked_nothing_is_logged_of_what_goes_well() {
    let place = Place::new();
    let mut server = Server::with_arguments(&["--policy", "full-access"]).await;
    let mut client = Client::connect(&server).await;
    client.run(&place, "p", &["true"], json!({})).await;
    server.program.signal(rustix::process::Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
    let log = server.program.stderr().await;
    assert!(!log.contains("INFO") && !log.contains("process"), "{log}");
}

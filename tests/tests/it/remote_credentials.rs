//! What an executor shows its registry, and how often, at a registry that a test speaks for.

use crate::remote::{EXECUTOR, HARNESS, Remote, exec, rendezvous};
use portcullis_relay::keys::Identity;
use portcullis_tests::{PATIENCE, Place, Program, portcullis};
use std::os::unix::fs::PermissionsExt as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

const CONFLICT: (u16, &str) = (503, r#"{"error":{"code":"registration_conflict","message":"another one registers"}}"#);
const UNAVAILABLE: (u16, &str) = (502, r#"{"error":{"code":"authentication_service_unavailable","message":"later"}}"#);

/// A registry that answers when it is told to.
struct Registry {
    listener: TcpListener,
    url: String,
}

/// A request that waits for its answer.
struct Asked {
    stream: BufReader<TcpStream>,
    /// Its lines, in small letters, but for the last one: its body.
    head: Vec<String>,
}

impl Registry {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        Self { listener, url }
    }

    fn executor(&self, arguments: &[&str]) -> tokio::process::Command {
        portcullis(&[&["serve", "--remote", &self.url, "--environment-id", "box"], arguments].concat())
    }

    async fn asked(&self) -> Asked {
        let (stream, _address) = timeout(PATIENCE, self.listener.accept()).await.expect("a request in time").unwrap();
        let (mut stream, mut head) = (BufReader::new(stream), Vec::new());
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            match line.trim() {
                "" => break,
                line => head.push(line.to_owned()),
            }
        }
        let mut asked = Asked { stream, head };
        let length = asked.header("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        asked.stream.read_exact(&mut body).await.unwrap();
        asked
    }
}

impl Asked {
    fn header(&self, name: &str) -> Option<&str> {
        let headers = self.head.iter().filter_map(|line| line.split_once(": "));
        headers.into_iter().find(|(there, _)| there.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    async fn answer(mut self, (status, body): (u16, &str)) {
        let head = format!("HTTP/1.1 {status} Answer\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        self.stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        self.stream.shutdown().await.unwrap();
    }
}

fn put(place: &Place, text: &str) {
    place.put("new", text);
    std::fs::set_permissions(place.path("new"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(place.path("new"), place.path("credential")).unwrap();
}

async fn fails(mut program: Program, expect: &str) -> String {
    assert_eq!(program.wait().await, 1);
    let stderr = program.stderr().await;
    assert!(stderr.contains(expect), "{stderr}");
    stderr
}

#[tokio::test]
async fn a_token_is_read_again_for_every_request_and_a_conflict_is_tried_again() {
    let (registry, place) = (Registry::start().await, Place::new());
    let file = place.path("credential");
    put(&place, "first-token");
    let mut executor = registry.executor(&["--registration-token-file", file.to_str().unwrap()]);
    executor.env("RUST_LOG", "trace");
    let executor = Program::start(executor);
    let asked = registry.asked().await;
    assert_eq!(asked.head[0], "POST /cloud/environment/box/register HTTP/1.1");
    assert_eq!(asked.header("authorization"), Some("Bearer first-token"));
    put(&place, "second-token");
    asked.answer(CONFLICT).await;
    let asked = registry.asked().await;
    assert_eq!(asked.header("authorization"), Some("Bearer second-token"));
    std::fs::remove_file(&file).unwrap();
    asked.answer(UNAVAILABLE).await;
    let asked = registry.asked().await;
    assert_eq!(asked.header("authorization"), Some("Bearer second-token"));
    asked.answer((401, "{}")).await;
    let stderr = fails(executor, "environment registry authentication failed (401)").await;
    assert!(stderr.contains("what it held before is used") && stderr.contains("another one registers"), "{stderr}");
    assert!(!stderr.contains("first-token") && !stderr.contains("second-token"), "{stderr}");
}

#[tokio::test]
async fn what_may_have_been_registered_is_not_registered_again() {
    for (answer, expect) in [
        (Some((500, "oops")), "the environment registry refused (500): oops"),
        (Some((503, "{}")), "the environment registry refused (503)"),
        (Some((200, "{}")), "cannot be used"),
        // It is gone before it answers.
        (None, "is not known"),
    ] {
        let registry = Registry::start().await;
        let mut executor = registry.executor(&[]);
        executor.env("PORTCULLIS_EXECUTOR_TOKEN", "a-token");
        let executor = Program::start(executor);
        let asked = registry.asked().await;
        match answer {
            Some(answer) => asked.answer(answer).await,
            None => drop(asked),
        }
        fails(executor, expect).await;
        // Whoever came before the end is in line, and the listener does not block.
        assert!(registry.listener.into_std().unwrap().accept().is_err(), "it was asked again");
    }
}

/// A URL lives for a moment, so that one is refused may be a matter of time. Two are not.
#[tokio::test]
async fn a_client_whose_url_is_refused_asks_once_more() {
    let (registry, place) = (Registry::start().await, Place::new());
    let keys = serde_json::to_value(Identity::generate().unwrap().public_keys()).unwrap();
    let workspace = place.path("");
    let usual = ["exec", "--remote", &registry.url, "--environment-id", "box", "--workspace", workspace.to_str().unwrap()];
    let mut client = portcullis(&[&usual[..], &["--", "true"]].concat());
    client.env("PORTCULLIS_HARNESS_TOKEN", "mark-token").env("RUST_LOG", "trace");
    let mut client = Program::start(client);
    for signature in ["mark-first", "mark-second"] {
        let asked = registry.asked().await;
        assert_eq!(asked.head[0], "POST /cloud/environment/box/connect HTTP/1.1");
        let path = format!("/ws?role=harness&sig={signature}");
        let bundle = serde_json::json!({
            "environment_id": "box", "security_profile": "noise_hybrid_ik_v1", "executor_registration_id": "one",
            "url": format!("{}{path}", registry.url.replace("http", "ws")),
            "executor_public_key": keys, "harness_key_authorization": "mark-authorization",
        });
        asked.answer((200, &bundle.to_string())).await;
        let dialled = registry.asked().await;
        assert_eq!((&dialled.head[0], dialled.header("authorization")), (&format!("GET {path} HTTP/1.1"), None));
        dialled.answer((401, "mark-body")).await;
    }
    assert_eq!(client.wait().await, 125);
    let stderr = client.stderr().await;
    assert!(stderr.contains("refused the WebSocket with status 401"), "{stderr}");
    assert!(registry.listener.into_std().unwrap().accept().is_err(), "it was asked again");
    // Neither the token, nor what the URLs are signed with, nor the authorization is in a log at any level.
    assert!(!stderr.contains("mark-"), "{stderr}");
}

#[tokio::test]
async fn a_sign_in_is_shown_with_its_account() {
    let (registry, place) = (Registry::start().await, Place::new());
    put(&place, r#"{"OPENAI_API_KEY":null,"tokens":{"access_token":"signed-in","account_id":"an-account"}}"#);
    let executor = Program::start(registry.executor(&["--auth-file", place.path("credential").to_str().unwrap()]));
    let asked = registry.asked().await;
    assert_eq!(asked.header("authorization"), Some("Bearer signed-in"));
    assert_eq!(asked.header("chatgpt-account-id"), Some("an-account"));
    asked.answer((403, "{}")).await;
    let stderr = fails(executor, "authentication failed (403)").await;
    assert!(!stderr.contains("signed-in") && !stderr.contains("an-account"), "{stderr}");
}

#[tokio::test]
async fn without_a_credential_that_can_be_used_nobody_is_asked() {
    let (registry, place) = (Registry::start().await, Place::new());
    place.put("open", "a-token");
    std::fs::set_permissions(place.path("open"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let open = place.path("open");
    let open = ["--registration-token-file", open.to_str().unwrap()];
    for (arguments, variable, expect) in [
        (&[][..], None, "remote exec-server registration requires a credential"),
        (&["--use-agent-identity-auth"], None, "how it registers a task"),
        (&[], Some("CODEX_ACCESS_TOKEN"), "portcullis::credentials::AgentIdentity"),
        (&open, None, "chmod 600"),
    ] {
        let mut executor = registry.executor(arguments);
        executor.env_remove("CODEX_API_KEY").envs(variable.map(|name| (name, "a.b.c")));
        fails(Program::start(executor), expect).await;
    }
    // Nobody came, and the control is the next that does.
    let mut executor = registry.executor(&[]);
    executor.env("CODEX_API_KEY", "a-key");
    let executor = Program::start(executor);
    let asked = registry.asked().await;
    assert_eq!(asked.header("authorization"), Some("Bearer a-key"));
    asked.answer((401, "{}")).await;
    fails(executor, "authentication failed (401)").await;
}

#[tokio::test]
async fn no_log_of_an_executor_has_its_token_or_a_signed_url() {
    let (rendezvous, url, place) = rendezvous().await;
    let mut command = portcullis(&["serve", "--remote", &url, "--environment-id", "box"]);
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR).env("RUST_LOG", "trace");
    let mut executor = Program::start(command);
    let mut stderr = executor.child.stderr.take().unwrap();
    let log = tokio::spawn(async move {
        let mut log = String::new();
        stderr.read_to_string(&mut log).await.unwrap();
        log
    });
    executor.line().await;
    let (output, _stdout, stderr) = exec(&url, "box", HARNESS, &Place::new().path(""), &["true"]).await;
    assert!(output.status.success(), "{stderr}");
    Remote { rendezvous, executor, url, place }.end().await;
    let log = log.await.unwrap();
    assert!(log.contains("the rendezvous was reached") && log.contains("connection opened"), "{log}");
    for secret in [EXECUTOR, "role=", "sig=", "signature"] {
        assert!(!log.contains(secret), "{secret} is in the log");
    }
}

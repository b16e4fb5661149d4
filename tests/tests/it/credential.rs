//! Who may connect.

use portcullis_tests::{Client, PATIENCE, Place, Program, Server, executable, portcullis, without};
use serde_json::json;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Status and body of the answer to an upgrade with more header lines.
async fn upgrade(url: &str, headers: &str) -> (u16, String) {
    let address = url.strip_prefix("ws://").unwrap();
    let mut socket = TcpStream::connect(address).await.unwrap();
    let host = if headers.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    let request = format!(
        "GET / HTTP/1.1\r\n{host}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut reader = BufReader::new(socket);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(timeout(PATIENCE, reader.read_line(&mut head)).await.unwrap().unwrap(), 0, "{head}");
    }
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let length = head.to_lowercase().lines().find_map(|line| line.strip_prefix("content-length: ").map(str::to_owned));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    timeout(PATIENCE, reader.read_exact(&mut body)).await.unwrap().unwrap();
    (status, String::from_utf8(body).unwrap())
}

/// A server whose user has a runtime directory of the test's.
async fn server(place: &Place, arguments: &[&str]) -> Server {
    let mut command = portcullis(&[&["serve"], arguments].concat());
    command.env("XDG_RUNTIME_DIR", place.path(""));
    Server::with(command).await
}

/// Where the server at a URL puts its token.
fn token_file(place: &Place, url: &str) -> PathBuf {
    place.path(&format!("portcullis/{}.token", url.strip_prefix("ws://").unwrap()))
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn a_token_is_made_at_the_start_and_nothing_is_served_without_it() {
    let place = Place::new();
    let mut server = server(&place, &[]).await;
    let file = token_file(&place, &server.url);
    let token = std::fs::read_to_string(&file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let (status, body) = upgrade(&server.url, "").await;
    assert_eq!(status, 401);
    for words in ["missing websocket bearer token", "Authorization: Bearer", &file.display().to_string()] {
        assert!(body.contains(words), "{words}: {body}");
    }
    assert!(!body.contains(&token));
    let wrong: String = token.chars().rev().collect();
    assert_eq!(upgrade(&server.url, &bearer(&wrong)).await.0, 401);
    assert_eq!(upgrade(&server.url, &bearer("")).await.0, 401);
    assert_eq!(upgrade(&server.url, &bearer(&token)).await.0, 101);
    // Whoever wants to know whether it runs need not belong.
    let ready = http(&server.url, "GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    server.program.signal(rustix::process::Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
    assert!(!file.exists(), "the token goes with its server");
    let stderr = server.program.stderr().await;
    assert!(stderr.contains(&format!("token: {token}")), "{stderr}");
}

#[tokio::test]
async fn the_token_goes_to_the_file_that_the_operator_names() {
    let place = Place::new();
    let file = place.path("token");
    std::fs::write(&file, "an old one").unwrap();
    let mut server = server(&place, &["--token-file", file.to_str().unwrap()]).await;
    let token = std::fs::read_to_string(&file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(upgrade(&server.url, &bearer(&token)).await.0, 101);
    server.program.signal(rustix::process::Signal::TERM);
    server.program.wait().await;
    assert!(!server.program.stderr().await.contains(&token), "it is said in one place");
    let mut refused = Program::start(portcullis(&["serve", "--token-file", "/no/such/directory/token"]));
    assert_eq!(refused.wait().await, 1);
    let stderr = refused.stderr().await;
    assert!(stderr.contains("/no/such/directory/token"), "{stderr}");
}

#[tokio::test]
async fn tokens_from_elsewhere_are_checked_in_the_words_of_this_wire() {
    let place = Place::new();
    let token_file = place.path("token");
    std::fs::write(&token_file, " tok\n").unwrap();
    // SHA-256 of `tok`.
    let digest = "1a7674eb4ee78df7e1ac439a93c3fa8e3c945784d4dec9fd8e3011738b2f1d62";
    for arguments in [["--ws-token-file", token_file.to_str().unwrap()], ["--ws-token-sha256", digest]] {
        let server = server(&place, &[&["--ws-auth", "capability-token"][..], &arguments].concat()).await;
        for (headers, expect) in [
            ("", (401, "missing websocket bearer token")),
            ("Authorization: Bearer bad\r\n", (401, "invalid websocket bearer token")),
            ("Authorization: Basic tok\r\n", (401, "invalid authorization header")),
            ("Authorization: bearer tok\r\n", (101, "")),
        ] {
            let got = upgrade(&server.url, headers).await;
            assert_eq!((got.0, got.1.as_str()), expect, "{headers}");
        }
    }
    for (arguments, words) in [
        (&["--ws-auth", "capability-token"][..], "exactly one of"),
        (&["--ws-auth", "capability-token", "--ws-token-sha256", "abc"], "64 hexadecimal digits"),
        (&["--ws-auth", "capability-token", "--ws-token-file", "token"], "must be absolute"),
        (&["--ws-auth", "capability-token", "--ws-token-file", "/dev/null"], "is empty"),
        (&["--ws-auth", "signed-bearer-token"], "--ws-shared-secret-file"),
        (&["--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", token_file.to_str().unwrap()], "at least 32"),
        // What would be ignored is refused by its name.
        (&["--ws-auth", "capability-token", "--ws-token-sha256", digest, "--ws-issuer", "x"], "--ws-issuer"),
        (&["--ws-auth", "capability-token", "--ws-token-sha256", digest, "--ws-audience", "x"], "--ws-audience"),
        (
            &["--ws-auth", "capability-token", "--ws-token-sha256", digest, "--ws-max-clock-skew-seconds", "1"],
            "--ws-max-clock-skew-seconds",
        ),
        (
            &["--ws-auth", "capability-token", "--ws-token-sha256", digest, "--ws-shared-secret-file", "/dev/null"],
            "--ws-shared-secret-file",
        ),
        (&["--ws-auth", "signed-bearer-token", "--ws-token-file", "/dev/null"], "--ws-token-file"),
        (&["--ws-auth", "signed-bearer-token", "--ws-token-sha256", digest], "--ws-token-sha256"),
    ] {
        let mut refused = Program::start(portcullis(&[&["serve"], arguments].concat()));
        assert_eq!(refused.wait().await, 1, "{arguments:?}");
        let stderr = refused.stderr().await;
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
}

#[tokio::test]
async fn a_page_of_another_name_is_refused() {
    let place = Place::new();
    let server = server(&place, &["--insecure-no-auth", "--allow-host", "box.example"]).await;
    for (host, status) in
        [("localhost:1", 101), ("127.0.0.1", 101), ("[::1]:80", 101), ("box.example", 101), ("evil.example", 403), ("", 403)]
    {
        let (got, body) = upgrade(&server.url, &format!("Host: {host}\r\n")).await;
        assert_eq!(got, status, "{host}: {body}");
    }
}

#[tokio::test]
async fn an_address_that_others_reach_needs_a_credential() {
    let place = Place::new();
    let mut refused = Program::start(portcullis(&["serve", "--insecure-no-auth", "--listen", "ws://0.0.0.0:0"]));
    assert_eq!(refused.wait().await, 1);
    let stderr = refused.stderr().await;
    assert!(stderr.contains("0.0.0.0") && stderr.contains("--insecure-no-auth"), "{stderr}");
    let server = server(&place, &["--listen", "ws://0.0.0.0:0"]).await;
    let url = server.url.replace("0.0.0.0", "127.0.0.1");
    assert_eq!(upgrade(&url, "").await.0, 401);
}

async fn http(url: &str, request: &str) -> String {
    let mut socket = TcpStream::connect(url.strip_prefix("ws://").unwrap()).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    answer
}

#[tokio::test]
async fn who_does_not_shake_hands_is_sent_away() {
    let server = Server::start().await;
    // Half a request, nothing at all, an upgrade without initialize, and initialize without initialized.
    let half = http(&server.url, "GET / HTTP/1.1\r\nHost: localhost\r\n");
    let nothing = http(&server.url, "");
    let mut upgraded = Client::dial(&server.url).await;
    let mut initialized = Client::dial(&server.url).await;
    initialized.initialize(None).await.unwrap();
    let mut served = Client::connect(&server).await;
    let (_half, _nothing, code, other) = tokio::join!(half, nothing, upgraded.closed(), initialized.closed());
    assert_eq!((code, other), (Some(1008), Some(1008)));
    served.ok("environment/status", json!({})).await;
}

#[tokio::test]
async fn a_socket_without_a_credential_gets_one_answer_and_goes() {
    let server = Server::start().await;
    let mut socket = TcpStream::connect(server.url.strip_prefix("ws://").unwrap()).await.unwrap();
    let mut answer = String::new();
    let one_after_the_other = async {
        loop {
            // Once the server has closed, this fails or is in vain.
            let _closed = socket.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
            let mut bytes = [0; 1024];
            match socket.read(&mut bytes).await {
                Ok(0) | Err(_) => break,
                Ok(length) => answer.push_str(std::str::from_utf8(&bytes[..length]).unwrap()),
            }
        }
    };
    timeout(PATIENCE, one_after_the_other).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.to_lowercase().contains("connection: close"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
}

#[tokio::test]
async fn how_many_sockets_there_may_be_has_a_range() {
    drop(Server::with_arguments(&["--max-connections", "65536"]).await);
    for (flag, number, words) in [
        ("--max-connections", "65537", "between 1 and 65536"),
        ("--max-connections", "0", "between 1 and 65536"),
        ("--concurrent-requests", "4097", "between 1 and 4096"),
    ] {
        let mut refused = Program::start(portcullis(&["serve", flag, number]));
        assert_eq!(refused.wait().await, 2);
        let stderr = refused.stderr().await;
        assert!(stderr.contains(words), "{flag} {number}: {stderr}");
    }
}

#[tokio::test]
async fn more_sockets_than_there_may_be_are_refused_and_the_next_is_served() {
    let server = Server::with_arguments(&["--max-connections", "2"]).await;
    let address = server.url.strip_prefix("ws://").unwrap();
    // Sockets that say nothing are no clients yet.
    let _silent = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    let (one, _two) = (Client::connect(&server).await, Client::connect(&server).await);
    let (status, answer) = upgrade(&server.url, "").await;
    assert!(status == 503 && answer.contains("at most 2 connections"), "{status}: {answer}");
    one.cut();
    let served = async { while upgrade(&server.url, "").await.0 != 101 {} };
    timeout(PATIENCE, served).await.unwrap();
}

#[tokio::test]
async fn no_confined_process_finds_the_token() {
    let place = Place::new();
    let named = place.path("named-token");
    let server = server(&place, &["--token-file", named.to_str().unwrap()]).await;
    let (directory, file) = (place.path("portcullis"), token_file(&place, &server.url));
    let token = std::fs::read_to_string(&named).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), token);
    let mut client = Client::connect_with_token(&server.url, &token).await;
    let script = format!(
        "cat {file} {named}; ls -A {directory}; rmdir {directory}; mv {named} {named}-moved; mv {directory} {directory}-moved; true",
        file = file.display(),
        named = named.display(),
        directory = directory.display()
    );
    let workspace = json!({"type": "workspace-write", "cwd": place.uri(""), "network_access": true});
    for (id, sandbox) in [("read-only", json!({"type": "read-only"})), ("writes", workspace)] {
        let events = client.run(&place, id, &["sh", "-c", &script], json!({"sandbox": sandbox})).await;
        assert_eq!(events.output(Some("stdout")), "", "{id}");
        for file in [&file, &named] {
            assert_eq!(std::fs::read_to_string(file).unwrap(), token, "{id}: {}", file.display());
        }
    }
    // The control: the same words find and move it without a sandbox.
    let events = client.run(&place, "plain", &["sh", "-c", &script], json!({})).await;
    let name = file.file_name().unwrap().to_str().unwrap();
    assert_eq!(events.output(Some("stdout")), format!("{token}{token}{name}\n"));
    assert_eq!((directory.exists(), named.exists()), (false, false));
    assert!(place.has("portcullis-moved") && place.has("named-token-moved"));
}

#[tokio::test]
async fn a_token_made_later_is_hidden_from_who_ran_before() {
    let place = Place::new();
    // A server that writes no token itself.
    let mut command = portcullis(&["serve", "--insecure-no-auth"]);
    command.env("XDG_RUNTIME_DIR", place.path(""));
    let first = Server::with(command).await;
    let mut client = Client::connect(&first).await;
    let top = place.path("").display().to_string();
    let script = format!("echo ready; while ! test -e {top}/go; do :; done; cat {top}/portcullis/*.token");
    for (id, more) in [("confined", json!({"sandbox": {"type": "read-only"}})), ("plain", json!({}))] {
        client.start(&place, id, &["sh", "-c", &script], more).await;
        client.output(id, "ready").await;
    }
    let second = server(&place, &[]).await;
    let token = std::fs::read_to_string(token_file(&place, &second.url)).unwrap();
    place.put("go", "");
    assert!(!client.events("confined").await.output(None).contains(&token));
    assert!(client.events("plain").await.output(None).contains(&token), "the control");
}

#[tokio::test]
async fn no_file_call_under_a_policy_finds_the_token() {
    for things in [&[][..], &["namespaces"]] {
        for ceiling in [&[][..], &["--policy", "read-only"]] {
            let place = Place::new();
            let named = place.path("named-token");
            let arguments = [&["serve", "--token-file", named.to_str().unwrap()], ceiling].concat();
            let mut command = without(things, &executable("portcullis"), &arguments);
            command.env("XDG_RUNTIME_DIR", place.path(""));
            let server = Server::with(command).await;
            place.put("other", "other");
            let token = std::fs::read_to_string(&named).unwrap();
            let mut client = Client::connect_with_token(&server.url, &token).await;
            let name = token_file(&place, &server.url).file_name().unwrap().to_str().unwrap().to_owned();
            let (file, directory) = (place.uri(&format!("portcullis/{name}")), place.uri("portcullis"));
            for sandbox in [json!({"type": "read-only"}), json!({"type": "workspace-write", "cwd": place.uri("")}), json!(null)] {
                let is_confined = !sandbox.is_null() || !ceiling.is_empty();
                for (method, params) in [
                    ("fs/readFile", json!({"path": file, "sandbox": sandbox})),
                    ("fs/readFile", json!({"path": place.uri("named-token"), "sandbox": sandbox})),
                    ("fs/readDirectory", json!({"path": directory, "sandbox": sandbox})),
                ] {
                    // The control of each: without any policy it is read.
                    if is_confined {
                        let refusal = client.refused(method, params.clone()).await;
                        assert!(refusal.message.contains("os error 13"), "{things:?} {ceiling:?} {params}: {refusal:?}");
                    } else {
                        client.ok(method, params).await;
                    }
                }
                client.ok("fs/readFile", json!({"path": place.uri("other"), "sandbox": sandbox})).await;
            }
        }
    }
}

#[tokio::test]
async fn no_confined_process_reads_a_secret_that_the_operator_named() {
    let place = Place::new();
    let file = place.path("token");
    std::fs::write(&file, "tok").unwrap();
    let server = server(&place, &["--ws-auth", "capability-token", "--ws-token-file", file.to_str().unwrap()]).await;
    let mut client = Client::connect_with_token(&server.url, "tok").await;
    let argv = ["cat", file.to_str().unwrap()];
    let events = client.run(&place, "confined", &argv, json!({"sandbox": {"type": "read-only"}})).await;
    assert_eq!(events.output(Some("stdout")), "");
    let refusal = client.refused("fs/readFile", json!({"path": place.uri("token"), "sandbox": {"type": "read-only"}})).await;
    assert!(refusal.message.contains("os error 13"), "{refusal:?}");
    assert_eq!(client.run(&place, "plain", &argv, json!({})).await.output(None), "tok");
}

#[tokio::test]
async fn exec_finds_the_token_of_a_server_of_its_user() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let server = server(&place, &[]).await;
    let file = token_file(&place, &server.url);
    let workspace = place.path("").display().to_string();
    let command = |runtime: &Place, more: &[&str]| {
        let words = ["exec", "--url", &server.url, "--policy", "read-only", "--workspace", &workspace];
        let mut command = portcullis(&[&words[..], more, &["--", "echo", "done"]].concat());
        command.env("XDG_RUNTIME_DIR", runtime.path(""));
        command
    };
    let found = command(&place, &[]).output().await.unwrap();
    assert_eq!((found.status.code(), &found.stdout[..]), (Some(0), &b"done\n"[..]));
    let named = command(&elsewhere, &["--token-file", file.to_str().unwrap()]).output().await.unwrap();
    assert_eq!(named.status.code(), Some(0));
    let refused = command(&elsewhere, &[]).output().await.unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125));
    for words in ["401", "missing websocket bearer token", &file.display().to_string()] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
}

#[tokio::test]
async fn the_token_of_one_address_is_not_sent_to_another() {
    let place = Place::new();
    let listening = server(&place, &[]).await;
    let port: u16 = listening.url.rsplit(':').next().unwrap().parse().unwrap();
    let exec = |url: String| {
        let mut command = portcullis(&["exec", "--url", &url, "--policy", "read-only", "--", "echo", "done"]);
        command.env("XDG_RUNTIME_DIR", place.path("")).current_dir(place.path(""));
        command
    };
    // Somebody else's server has the same port of another loopback address, and says what it was sent.
    let other = TcpListener::bind(("127.0.0.2", port)).await.unwrap();
    let asked = Program::start(exec(format!("ws://127.0.0.2:{port}")));
    let (mut socket, _) = timeout(PATIENCE, other.accept()).await.unwrap().unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        assert_ne!(timeout(PATIENCE, socket.read_buf(&mut head)).await.unwrap().unwrap(), 0);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    assert!(head.contains("upgrade: websocket") && !head.contains("authorization"), "{head}");
    drop((socket, asked));
    // The control: it is sent to its own, which `localhost` means too.
    for host in ["127.0.0.1", "localhost"] {
        let found = exec(format!("ws://{host}:{port}")).output().await.unwrap();
        assert_eq!((found.status.code(), &found.stdout[..]), (Some(0), &b"done\n"[..]), "{host}");
    }
}

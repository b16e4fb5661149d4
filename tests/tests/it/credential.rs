//! Who may connect.

use portcullis_tests::{Client, PATIENCE, Place, Program, Server, portcullis};
use serde_json::json;
use std::os::unix::fs::PermissionsExt as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
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

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn a_token_is_made_at_the_start_and_nothing_is_served_without_it() {
    let place = Place::new();
    let mut server = server(&place, &[]).await;
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    let file = place.path(&format!("portcullis/{port}.token"));
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
async fn more_sockets_than_there_may_be_are_refused_and_the_next_is_served() {
    let server = Server::with_arguments(&["--max-connections", "2"]).await;
    let (one, _two) = (Client::connect(&server).await, Client::connect(&server).await);
    let address = server.url.strip_prefix("ws://").unwrap();
    let mut third = TcpStream::connect(address).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, third.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("at most 2 connections"), "{answer}");
    one.cut();
    let served = async { while upgrade(&server.url, "").await.0 != 101 {} };
    timeout(PATIENCE, served).await.unwrap();
}

#[tokio::test]
async fn no_confined_process_finds_the_token() {
    let place = Place::new();
    let server = server(&place, &["--insecure-no-auth"]).await;
    let directory = place.path("portcullis");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("1.token"), "secret").unwrap();
    let mut client = Client::connect(&server).await;
    let script = format!("cat {0}/1.token; ls -A {0}; rmdir {0}; mv {0} {0}-moved; true", directory.display());
    let workspace = json!({"type": "workspace-write", "cwd": place.uri(""), "network_access": true});
    for (id, sandbox, finds) in
        [("plain", json!(null), true), ("read-only", json!({"type": "read-only"}), false), ("writes", workspace, false)]
    {
        // The control goes last in effect: without a sandbox the same words find and move it.
        let script = if finds { format!("cat {}/1.token", directory.display()) } else { script.clone() };
        let events = client.run(&place, id, &["sh", "-c", &script], json!({"sandbox": sandbox})).await;
        assert_eq!(events.output(Some("stdout")), if finds { "secret" } else { "" }, "{id}");
        assert!(directory.join("1.token").exists(), "{id}");
    }
}

#[tokio::test]
async fn exec_finds_the_token_of_a_server_of_its_user() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let server = server(&place, &[]).await;
    let file = place.path(&format!("portcullis/{}.token", server.url.rsplit(':').next().unwrap()));
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

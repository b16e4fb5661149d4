//! The listener: HTTP, browsers, sizes, readiness, shutdown.

use portcullis_tests::{Client, PATIENCE, Place, Server, Watched, portcullis};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

async fn http(server: &Server, request: &str) -> String {
    let mut socket = TcpStream::connect(server.url.strip_prefix("ws://").unwrap()).await.unwrap();
    socket.write_all(format!("{request}Host: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    answer
}

#[tokio::test]
async fn plain_http_is_answered_and_browsers_are_refused() {
    let server = Server::start().await;
    for (request, status) in [
        ("GET /readyz HTTP/1.1\r\n", "200"),
        ("HEAD /readyz HTTP/1.1\r\n", "200"),
        ("GET /livez HTTP/1.1\r\n", "200"),
        ("POST /readyz HTTP/1.1\r\nContent-Length: 0\r\n", "405"),
        ("GET / HTTP/1.1\r\n", "400"),
        ("GET /other HTTP/1.1\r\n", "404"),
        ("GET /readyz HTTP/1.1\r\nOrigin: http://localhost\r\n", "403"),
        ("GET / HTTP/1.1\r\nOrigin: null\r\nUpgrade: websocket\r\n", "403"),
    ] {
        let answer = http(&server, request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:?}: {answer}");
    }
}

#[tokio::test]
async fn readyz_names_the_limit_that_keeps_clients_out() {
    let ready = "GET /readyz HTTP/1.1\r\n";
    for (limits, expect) in [
        (["--max-sessions", "1", "--max-connections", "9"], "max-sessions: all 1 sessions are in use"),
        (["--max-sessions", "9", "--max-connections", "1"], "max-connections: all 1 connections are in use"),
    ] {
        let server = Server::with_arguments(&[&limits[..], &["--detached-retention", "1"]].concat()).await;
        assert!(http(&server, ready).await.starts_with("HTTP/1.1 200"), "the control: {expect}");
        let client = Client::connect(&server).await;
        let answer = http(&server, ready).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains(expect), "{answer}");
        assert!(http(&server, "GET /livez HTTP/1.1\r\n").await.starts_with("HTTP/1.1 200"), "{expect}");
        // The session of a client that left is kept for a second.
        client.cut();
        let again = async { while !http(&server, ready).await.starts_with("HTTP/1.1 200") {} };
        timeout(PATIENCE, again).await.unwrap();
    }
}

#[tokio::test]
async fn a_frame_above_its_bound_ends_that_connection_and_no_other() {
    let server = Server::start().await;
    let place = Place::new();
    let (mut client, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    let fits = "x".repeat((16 << 20) - 200);
    let refused = client.refused("no/such", json!({"filler": fits})).await;
    assert_eq!(refused.code, -32601, "a frame of almost 16 MiB is read");
    let large = "x".repeat(16 << 20);
    client.send_and_be_cut(&json!({"id": 1, "method": "environment/status", "filler": large}).to_string()).await;
    other.ok("fs/getMetadata", json!({"path": place.uri("")})).await;
}

#[tokio::test]
async fn sigterm_ends_everything_with_status_0() {
    let mut server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    // A daemon of a session of its own, which a signal to the group does not reach.
    client.start(&place, "p", &["sh", "-c", "setsid sh -c 'echo $$; exec sleep 600' & wait"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    server.program.signal(rustix::process::Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
    assert_eq!(client.next().await, None);
    watched.ended().await;
}

#[tokio::test]
async fn kill_9_of_the_gateway_ends_every_child() {
    let mut server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sh", "-c", "setsid sh -c 'echo $$; exec sleep 600' & wait"], json!({})).await;
    let watched = Watched::new(client.process_id("p").await);
    server.program.signal(rustix::process::Signal::KILL);
    server.program.wait().await;
    watched.ended().await;
}

#[tokio::test]
async fn standard_output_carries_the_url_and_nothing_else() {
    let mut server = Server::with(portcullis(&["serve", "--insecure-no-auth", "--listen", "ws://127.0.0.1:0"])).await;
    assert!(server.url.strip_prefix("ws://127.0.0.1:").unwrap().parse::<u16>().unwrap() > 0);
    server.program.signal(rustix::process::Signal::INT);
    assert_eq!(server.program.wait().await, 0);
    assert_eq!(server.program.stdout.next_line().await.unwrap(), None);
}

#[tokio::test]
async fn a_server_that_nobody_uses_ends_by_itself_and_not_before() {
    let mut server = Server::with_arguments(&["--idle-exit", "1", "--detached-retention", "1"]).await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    // Longer than it would wait for somebody.
    assert_eq!(client.run(&place, "p", &["sleep", "1.5"], json!({})).await.code(), 0);
    client.cut();
    assert_eq!(server.program.wait().await, 0);
    let mut unused = Server::with_arguments(&["--idle-exit", "1"]).await;
    assert_eq!(unused.program.wait().await, 0);
}

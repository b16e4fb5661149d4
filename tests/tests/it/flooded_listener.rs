//! A confined process with the network on that floods its own gateway's listener.

use crate::listener_peers::{networked, port};
use portcullis_tests::{Client, PATIENCE, Place, Server, executable};
use serde_json::json;
use std::process::Stdio;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::timeout;

/// Keeps as many connections open as it may have descriptors for, up to a number, and opens each one again that the server closes.
/// It sends nothing, a part of a request, or a whole one. The first line of its output means that the server closed the first one.
const FLOOD: &str = r#"
import resource, select, socket, sys
mode, port, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
most = min(most, hard - 64)
part = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
words = {"silent": b"", "part": part, "whole": part + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"}[mode]
opened, closed, poll = {}, 0, select.epoll()
while True:
    while len(opened) < most:
        try:
            s = socket.create_connection(("127.0.0.1", port), 60)
            s.sendall(words)
        except OSError:
            break
        opened[s.fileno()] = s
        poll.register(s, select.EPOLLIN | select.EPOLLRDHUP)
    for number, _ in poll.poll(0 if len(opened) < most else -1):
        poll.unregister(number)
        opened.pop(number).close()
        closed += 1
        if closed == 1: print("closed one", flush=True)
"#;

const UPGRADE: &str = "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";

/// Connects and sends a request at once. The connection and its whole answer. A client that this machine stops for long between the
/// two steps may find its connection closed before its request was sent, and then connects again, as clients do.
async fn ask(server: &Server, request: &str) -> (TcpStream, String) {
    let address = server.url.strip_prefix("ws://").unwrap();
    let attempts = async {
        loop {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let (mut answer, request) = (Vec::new(), format!("{request}Host: localhost\r\n\r\n"));
            let mut is_open = socket.write_all(request.as_bytes()).await.is_ok();
            // Only an upgraded connection stays open.
            while is_open && !(answer.starts_with(b"HTTP/1.1 101") && answer.ends_with(b"\r\n\r\n")) {
                is_open = socket.read_buf(&mut answer).await.is_ok_and(|bytes| bytes > 0);
            }
            let answer = String::from_utf8(answer).unwrap();
            if !answer.is_empty() && !answer.contains("have sent no request") {
                return (socket, answer);
            }
        }
    };
    timeout(PATIENCE, attempts).await.unwrap()
}

/// No timeout ends what the flood holds. A quarter of its descriptors is what the server lets be pending.
async fn server(place: &Place) -> Server {
    let mut command = Command::new("/bin/sh");
    let words = "ulimit -n 4096; exec \"$0\" serve --insecure-no-auth --max-connections 21 --handshake-timeout 3600";
    command.args(["-c", words]).arg(executable("portcullis")).env("HOME", place.path(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    Server::with(command).await
}

#[tokio::test]
async fn a_flood_from_inside_keeps_no_client_out() {
    for (mode, most) in [("silent", "1500"), ("part", "1500"), ("whole", "400")] {
        let place = Place::new();
        let server = server(&place).await;
        let mut client = Client::connect(&server).await;
        let mut slow = TcpStream::connect(server.url.strip_prefix("ws://").unwrap()).await.unwrap();
        let flood = ["python3", "-c", FLOOD, mode, &port(&server), most];
        client.start(&place, "flood", &flood, json!({"sandbox": networked(&place)})).await;
        client.output("flood", "closed one\n").await;
        let mut clients = Vec::new();
        // Where a sandbox has a user of its own, a client on this machine may take its time.
        if client.has_own_uids().await {
            slow.write_all(format!("{UPGRADE}Host: localhost\r\n\r\n").as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                assert_ne!(timeout(PATIENCE, slow.read_buf(&mut answer)).await.unwrap().unwrap(), 0, "{mode}: the slow client");
            }
            assert!(answer.starts_with(b"HTTP/1.1 101"), "{mode}: the slow client: {}", String::from_utf8_lossy(&answer));
            clients.push(slow);
        }
        for nth in clients.len()..20 {
            let (socket, answer) = ask(&server, UPGRADE).await;
            assert!(answer.starts_with("HTTP/1.1 101"), "{mode}: client {nth}: {answer}");
            clients.push(socket);
        }
        // The control: the bound holds for those that are served.
        let (_socket, answer) = ask(&server, UPGRADE).await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{mode}: {answer}");
        let (_, ready) = ask(&server, "GET /readyz HTTP/1.1\r\n").await;
        assert!(ready.contains("max-connections: all 21 connections are in use"), "{mode}: {ready}");
        let (_, metrics) = ask(&server, "GET /metrics HTTP/1.1\r\n").await;
        let refused = if mode == "whole" { "peer" } else { "silent" };
        assert!(metrics.contains(&format!("exec_server_refused_total{{reason=\"{refused}\"}} ")), "{mode}: {metrics}");
        client.ok("process/terminate", json!({"processId": "flood"})).await;
    }
}

//! Metrics: what was done is what the numbers say, and nobody makes a label up.

use portcullis_tests::{Client, PATIENCE, Place, Server, Workspace, portcullis, special};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::UdpSocket;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Status, content type and body of a request.
pub(super) async fn http(url: &str, path: &str, headers: &str) -> (u16, String, String) {
    let address = url.strip_prefix("ws://").unwrap();
    let mut socket = TcpStream::connect(address).await.unwrap();
    let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
    let request = format!("{path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let kind = head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap_or_default();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), kind.to_owned(), body.to_owned())
}

/// The series of a scrape, by name and labels.
pub(super) async fn scrape(url: &str) -> BTreeMap<String, f64> {
    let (status, kind, body) = http(url, "GET /metrics", "").await;
    assert_eq!((status, kind.as_str()), (200, "application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(body.ends_with("# EOF\n"), "{body}");
    let series = body.lines().filter(|line| !line.starts_with('#'));
    series.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

pub(super) fn of(series: &BTreeMap<String, f64>, name: &str) -> f64 {
    series.get(&format!("exec_server_{name}")).copied().unwrap_or(0.0)
}

/// Scrapes until a series has a value: what ends, ends beside its answers.
pub(super) async fn until(url: &str, name: &str, value: f64) -> BTreeMap<String, f64> {
    let reached = async {
        loop {
            let series = scrape(url).await;
            if (of(&series, name) - value).abs() < f64::EPSILON {
                return series;
            }
        }
    };
    timeout(PATIENCE, reached).await.unwrap_or_else(|_| panic!("{name} does not become {value}"))
}

#[track_caller]
fn check(series: &BTreeMap<String, f64>, name: &str, expect: f64) {
    assert!((of(series, name) - expect).abs() < f64::EPSILON, "{name} should be {expect}: {series:#?}");
}

#[tokio::test]
async fn numbers_go_up_by_what_was_done() {
    let server = Server::start().await;
    let place = Place::new();
    let file = place.put("file", "x");
    let mut client = Client::connect(&server).await;
    for _call in 0..3 {
        client.ok("fs/readFile", json!({"path": file})).await;
    }
    client.refused("fs/readFile", json!({"path": place.uri("missing")})).await;
    client.refused("fs/readFile", json!({"path": 7})).await;
    client.run(&place, "good", &["true"], json!({})).await;
    client.run(&place, "bad", &["sh", "-c", "exit 3"], json!({})).await;
    client.start(&place, "killed", &["sleep", "600"], json!({})).await;
    client.start(&place, "left", &["sleep", "600"], json!({})).await;
    client.ok("process/terminate", json!({"processId": "killed"})).await;
    client.events("killed").await;
    let series = until(&server.url, "processes_active", 1.0).await;
    for (name, expect) in [
        ("connections_active{transport=\"websocket\"}", 1.0),
        ("connections_total{transport=\"websocket\"}", 1.0),
        ("requests_total{transport=\"websocket\",method=\"initialize\",result=\"success\"}", 1.0),
        ("requests_total{transport=\"websocket\",method=\"fs/readFile\",result=\"success\"}", 3.0),
        ("requests_total{transport=\"websocket\",method=\"fs/readFile\",result=\"error\"}", 1.0),
        ("requests_total{transport=\"websocket\",method=\"invalid\",result=\"error\"}", 1.0),
        ("requests_total{transport=\"websocket\",method=\"process/start\",result=\"success\"}", 4.0),
        ("request_duration_seconds_count{transport=\"websocket\",method=\"fs/readFile\"}", 4.0),
        ("processes_finished_total{result=\"success\"}", 1.0),
        ("processes_finished_total{result=\"error\"}", 1.0),
        ("processes_finished_total{result=\"terminated\"}", 1.0),
        ("process_duration_seconds_count{result=\"error\"}", 1.0),
        ("helpers_active{role=\"spawner\"}", 1.0),
        ("helpers_active{role=\"worker\"}", 1.0),
        ("sessions_active", 1.0),
        ("sessions_detached", 0.0),
    ] {
        check(&series, name, expect);
    }
    assert!(of(&series, "bytes_total{direction=\"in\"}") > 500.0 && of(&series, "bytes_total{direction=\"out\"}") > 500.0);
    client.ok("fs/writeFile", json!({"path": place.uri("large"), "dataBase64": "A".repeat(40_000)})).await;
    client.ok("fs/readFile", json!({"path": place.uri("large")})).await;
    let more = scrape(&server.url).await;
    for direction in ["bytes_total{direction=\"in\"}", "bytes_total{direction=\"out\"}"] {
        let grown = of(&more, direction) - of(&series, direction);
        assert!((40_000.0..42_000.0).contains(&grown), "{direction}: {grown}");
    }
}

#[tokio::test]
async fn what_is_active_is_so_no_more_after_a_close_a_cut_and_a_kill() {
    let server = Server::with_arguments(&["--detached-retention", "1"]).await;
    let place = Place::new();
    let (mut closed, mut cut) = (Client::connect(&server).await, Client::connect(&server).await);
    closed.start(&place, "a", &["sleep", "600"], json!({})).await;
    cut.start(&place, "b", &["sleep", "600"], json!({})).await;
    cut.ok("fs/readFile", json!({"path": place.put("f", "x")})).await;
    let series = scrape(&server.url).await;
    for (name, expect) in [
        ("connections_active{transport=\"websocket\"}", 2.0),
        ("sessions_active", 2.0),
        ("sessions_detached", 0.0),
        ("processes_active", 2.0),
        ("helpers_active{role=\"worker\"}", 1.0),
    ] {
        check(&series, name, expect);
    }
    closed.close().await;
    cut.cut();
    let series = until(&server.url, "connections_active{transport=\"websocket\"}", 0.0).await;
    check(&series, "connections_total{transport=\"websocket\"}", 2.0);
    for name in ["sessions_active", "sessions_detached", "processes_active", "helpers_active{role=\"worker\"}"] {
        until(&server.url, name, 0.0).await;
    }
    check(&scrape(&server.url).await, "processes_finished_total{result=\"terminated\"}", 2.0);
}

#[tokio::test]
async fn a_detached_session_is_counted_as_such() {
    let server = Server::start().await;
    let client = Client::connect(&server).await;
    let session = client.session.clone();
    client.cut();
    let series = until(&server.url, "sessions_detached", 1.0).await;
    check(&series, "sessions_active", 1.0);
    let _client = Client::resume(&server, &session).await;
    let series = until(&server.url, "sessions_detached", 0.0).await;
    check(&series, "sessions_active", 1.0);
}

#[tokio::test]
async fn no_client_makes_a_label() {
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    let before = scrape(&server.url).await.len();
    for method in ["mark\"} 1\nforged_total 7", "fs/mark", "mark"] {
        client.refused(method, json!({})).await;
    }
    let after = scrape(&server.url).await;
    assert!(after.keys().all(|name| !name.contains("mark") && !name.contains("forged")), "{after:#?}");
    check(&after, "requests_total{transport=\"websocket\",method=\"invalid\",result=\"error\"}", 3.0);
    // The series of `invalid`, once: a counter, and a histogram with its buckets.
    let grown = after.len() - before;
    assert!(grown < 20, "{grown}");
}

#[tokio::test]
async fn denials_are_counted_by_layer() {
    let mut workspace = Workspace::new().await;
    let sandbox = workspace.profile(&[special("root", "read"), special("project_roots", "write")]);
    let denied = workspace.place.uri("out/new");
    let params = json!({"path": denied, "dataBase64": "", "sandbox": sandbox});
    for _call in 0..2 {
        workspace.client.refused("fs/writeFile", params.clone()).await;
    }
    check(&scrape(&workspace.server.url).await, "denials_total{layer=\"worker\"}", 2.0);
    let allowed = json!({"path": workspace.place.uri("ws/new"), "dataBase64": "", "sandbox": params["sandbox"]});
    workspace.client.ok("fs/writeFile", allowed).await;
    check(&scrape(&workspace.server.url).await, "denials_total{layer=\"worker\"}", 2.0);
}

#[tokio::test]
async fn who_is_not_let_in_is_counted_by_reason() {
    let server =
        Server::with(portcullis(&["serve", "--ws-auth", "capability-token", "--ws-token-sha256", &"0".repeat(64)])).await;
    assert_eq!(http(&server.url, "GET /", "").await.0, 401);
    assert_eq!(http(&server.url, "GET /livez", "Origin: http://x\r\n").await.0, 403);
    assert_eq!(http(&server.url, "GET /metrics", "Origin: http://x\r\n").await.0, 403);
    assert_eq!(http(&server.url, "GET /metrics", "Host: evil.example\r\n").await.0, 403);
    assert_eq!(http(&server.url, "POST /metrics", "Content-Length: 0\r\n").await.0, 405);
    let (status, _, body) = http(&server.url, "HEAD /metrics", "").await;
    assert_eq!((status, body.as_str()), (200, ""));
    let series = scrape(&server.url).await;
    for (reason, expect) in [("auth", 1.0), ("origin", 2.0), ("host", 1.0), ("full", 0.0)] {
        check(&series, &format!("refused_total{{reason=\"{reason}\"}}"), expect);
    }
}

/// An address of this machine that is not loopback, if it has one.
fn outer_address() -> Option<String> {
    // Nothing is sent: the kernel only says from where it would be.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then(|| address.to_string())
}

#[tokio::test]
async fn off_loopback_a_scrape_shows_what_an_upgrade_shows() {
    let Some(address) = outer_address() else {
        return eprintln!("not shown: this machine has no address but loopback ones");
    };
    let place = Place::new();
    let file = place.path("token");
    std::fs::write(&file, "tok").unwrap();
    let arguments = ["serve", "--ws-auth", "capability-token", "--ws-token-file", file.to_str().unwrap(), "--listen"];
    let server = Server::with(portcullis(&[&arguments[..], &["ws://0.0.0.0:0"]].concat())).await;
    let port = server.url.rsplit_once(':').unwrap().1;
    let (outer, inner) = (format!("ws://{address}:{port}"), format!("ws://127.0.0.1:{port}"));
    assert_eq!(http(&outer, "GET /metrics", "").await.0, 401);
    assert_eq!(http(&outer, "GET /metrics", "Authorization: Bearer other\r\n").await.0, 401);
    assert_eq!(http(&outer, "GET /metrics", "Authorization: Bearer tok\r\n").await.0, 200);
    assert_eq!(http(&outer, "GET /readyz", "").await.0, 200);
    check(&scrape(&inner).await, "refused_total{reason=\"auth\"}", 2.0);
}

#[tokio::test]
async fn no_confined_process_scrapes() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    let address = server.url.strip_prefix("ws://").unwrap();
    let (host, port) = address.rsplit_once(':').unwrap();
    let script = format!(
        "exec 3<>/dev/tcp/{host}/{port}; printf 'GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n' >&3; head -n 1 <&3"
    );
    let sandbox = json!({"type": "read-only", "network_access": true});
    let confined = client.run(&place, "p", &["bash", "-c", &script], json!({"sandbox": sandbox})).await;
    assert!(confined.output(None).starts_with("HTTP/1.1 403"), "{}", confined.output(None));
    let outside = tokio::process::Command::new("bash").args(["-c", &script]).output().await.unwrap();
    let outside = String::from_utf8(outside.stdout).unwrap();
    assert!(outside.starts_with("HTTP/1.1 200"), "{outside}");
    check(&scrape(&server.url).await, "refused_total{reason=\"peer\"}", 1.0);
}

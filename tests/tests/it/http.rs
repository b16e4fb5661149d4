//! Requests over HTTP that the server makes, against small servers on loopback.

mod egress;
mod origin;
mod tls;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use origin::{FLOOD, Origin, part_of_the_flood, server};
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, HttpHeader, HttpRequest};
use portcullis_protocol::base64::Chunk;
use portcullis_tests::{Client, PATIENCE, Server};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use tokio::time::timeout;

fn request(url: &str, more: Value) -> Value {
    let mut params = json!({"method": "GET", "url": url, "requestId": "r"});
    params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    params
}

fn body(result: &Value) -> String {
    String::from_utf8(STANDARD.decode(result["bodyBase64"].as_str().unwrap()).unwrap()).unwrap()
}

/// The parts of one streamed body, to its end.
async fn parts(client: &mut Client, id: &str) -> (Vec<u8>, Value) {
    let (mut bytes, mut seq) = (Vec::new(), 0);
    loop {
        let part =
            client.wait(|message| message["method"] == "http/request/bodyDelta" && message["params"]["requestId"] == id).await;
        seq += 1;
        assert_eq!(part["params"]["seq"], seq);
        bytes.extend(STANDARD.decode(part["params"]["deltaBase64"].as_str().unwrap()).unwrap());
        if part["params"]["done"] == true {
            return (bytes, part["params"].clone());
        }
    }
}

fn descriptors(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.program.child.id().unwrap())).unwrap().count()
}

/// Waits until something holds.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn an_answer_comes_whole_with_its_status_and_its_headers() {
    let (server, origin) = (server(&[], &[("OWN_SECRET", "word")]).await, Origin::start().await);
    let mut client = Client::connect(&server).await;
    let headers = json!([
        {"name": "X-Own", "value": "1"}, {"name": "Upgrade", "value": "x"}, {"name": "X-Key", "value": "Bearer ", "valueEnvVar": "OWN_SECRET"},
    ]);
    let more = json!({"method": "POST", "bodyBase64": STANDARD.encode("hello"), "headers": headers});
    let result = client.ok("http/request", request(&origin.url("/echo?q=1#part"), more)).await;
    assert_eq!(result["status"], 200);
    assert_eq!(result["headers"][0], json!({"name": "x-two", "value": "1"}));
    assert_eq!(result["headers"][1], json!({"name": "x-two", "value": "2"}));
    let seen = body(&result);
    assert!(seen.starts_with("POST /echo?q=1 HTTP/1.1\r\n") && seen.ends_with("\r\n\r\nhello"), "{seen}");
    assert!(seen.contains("x-own: 1\r\n") && seen.contains("x-key: Bearer word\r\n") && !seen.contains("upgrade"), "{seen}");
    let large = client.ok("http/request", request(&origin.url("/megabytes"), json!({}))).await;
    assert!(body(&large).len() == 3 << 20);
    assert!(client.ok("environment/info", json!({})).await["capabilities"]["httpHeaderEnvVars"] == true);
}

#[tokio::test]
async fn our_client_streams_over_the_real_server() {
    let (server, origin) = (server(&[], &[]).await, Origin::start().await);
    let (client, task) = ExecServerClient::connect(&ExecServerClientConnectOptions::new(&server.url, "test")).await.unwrap();
    let header = HttpHeader { name: "X-Own".to_owned(), value: "1".to_owned(), value_env_var: None };
    let mut request = HttpRequest::new("r", "PUT", origin.url("/echo"));
    (request.headers, request.body) = (vec![header], Some(Chunk(b"hello".to_vec())));
    let mut response = client.http_request(&request).await.unwrap();
    let mut seen = Vec::new();
    while let Some(part) = response.body.next().await {
        seen.extend(part.unwrap());
    }
    let seen = String::from_utf8(seen).unwrap();
    assert!(response.status == 200 && seen.contains("x-own: 1") && seen.ends_with("hello"), "{seen}");
    let mut broken = client.http_request(&HttpRequest::new("r", "GET", origin.url("/breaks"))).await.unwrap();
    assert_eq!(broken.body.next().await.unwrap().unwrap(), b"abc");
    let error = broken.body.next().await.unwrap().unwrap_err().to_string();
    assert!(error.contains("error decoding response body: ") && error.contains("end of file"), "{error}");
    drop(client);
    task.await.unwrap();
}

#[tokio::test]
async fn what_goes_wrong_is_named_and_nothing_of_it_stays() {
    let (server, origin) = (server(&[], &[]).await, Origin::start().await);
    let mut client = Client::connect(&server).await;
    client.ok("http/request", request(&origin.url("/"), json!({}))).await;
    let before = descriptors(&server);
    let nobody = {
        let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://127.0.0.1:{}/", gone.local_addr().unwrap().port())
    };
    let url = |path: &str| origin.url(path);
    for (url, more, code, expect) in [
        ("ftp://127.0.0.1/".to_owned(), json!({}), -32602, "only supports http and https URLs, got ftp"),
        (url("/"), json!({"headers": [{"name": "a b", "value": ""}]}), -32602, "header name is invalid"),
        (url("/"), json!({"headers": [{"name": "A", "value": "a\r\nb: c"}]}), -32602, "header value is invalid for A"),
        (url("/"), json!({"headers": [{"name": "A", "value": "", "valueEnvVar": "NOT_THERE"}]}), -32602, "variable NOT_THERE"),
        (url("/"), json!({"bodyBase64": "!!"}), -32602, "Invalid symbol 33, offset 0."),
        (nobody, json!({}), -32603, "connect to 127.0.0.1:"),
        ("http://nobody.invalid/".to_owned(), json!({}), -32603, "look up `nobody.invalid`"),
        (url("/loop"), json!({}), -32603, "too many redirects"),
        (url("/to?gopher://x/"), json!({}), -32603, "unsupported URL scheme: gopher"),
        (url("/silent"), json!({"timeoutMs": 50}), -32603, "timed out: timeoutMs ran out before the answer began"),
        (url("/stalls"), json!({"timeoutMs": 50}), -32603, "failed to read the response body: timed out"),
        (url("/breaks"), json!({}), -32603, "failed to read the response body: after 3 bytes"),
        (url("/garbage"), json!({}), -32603, "error sending request to 127.0.0.1:"),
        (url("/announced"), json!({}), -32603, "larger than 50331648 bytes"),
        (url("/endless"), json!({}), -32603, "larger than 50331648 bytes"),
    ] {
        let params = request(&url, more);
        let refusal = client.refused("http/request", params.clone()).await;
        assert_eq!(refusal.code, code, "{refusal:?}");
        assert!(refusal.message.starts_with("http/request") && refusal.message.contains(expect), "{refusal:?}");
        until(&format!("{before} descriptors after {params}"), || descriptors(&server) == before).await;
        client.ok("http/request", request(&origin.url("/"), json!({}))).await;
    }
    until("the same descriptors", || descriptors(&server) == before).await;
}

#[tokio::test]
async fn parts_come_behind_the_result_and_say_how_they_end() {
    let (server, origin) = (server(&[], &[]).await, Origin::start().await);
    let mut client = Client::connect(&server).await;
    let streamed = |path: &str, more: Value| {
        let mut params = request(&origin.url(path), more);
        params["streamResponse"] = json!(true);
        params
    };
    let result = client.ok("http/request", streamed("/megabytes", json!({}))).await;
    assert_eq!((&result["status"], &result["bodyBase64"]), (&json!(200), &json!("")));
    let (bytes, last) = parts(&mut client, "r").await;
    assert!(bytes == vec![b'm'; 3 << 20]);
    assert!(last["error"].is_null() && last["deltaBase64"] == "", "{last}");
    for (path, more, detail) in
        [("/breaks", json!({}), "end of file"), ("/stalls", json!({"timeoutMs": 300}), "timed out: timeoutMs ran out")]
    {
        // The id is free again each time.
        client.ok("http/request", streamed(path, more)).await;
        let (bytes, last) = parts(&mut client, "r").await;
        assert_eq!((bytes.as_slice(), &last["error"]), (&b"abc"[..], &json!("error decoding response body")));
        assert!(last["detail"].as_str().unwrap().contains(detail), "{last}");
    }
    client.refused("http/request", streamed("/garbage", json!({}))).await;
    client.ok("http/request", streamed("/stalls", json!({}))).await;
    let refusal = client.refused("http/request", streamed("/", json!({}))).await;
    assert_eq!((refusal.code, refusal.message.as_str()), (-32602, "http/request streamResponse requestId `r` is already active"));
    // One that comes whole has no parts, so it takes no id.
    client.ok("http/request", request(&origin.url("/"), json!({}))).await;
}

#[tokio::test]
async fn requests_end_with_their_connection() {
    let (server, origin) = (server(&[], &[]).await, Origin::start().await);
    // Another client, for whom the server made what it keeps.
    let mut other = Client::connect(&server).await;
    other.ok("fs/getMetadata", json!({"path": "file:///"})).await;
    let before = descriptors(&server);
    let mut client = Client::connect(&server).await;
    for (id, path, streams) in [("a", "/silent", false), ("b", "/silent", true), ("c", "/stalls", false), ("d", "/stalls", true)]
    {
        client.begin("http/request", request(&origin.url(path), json!({"requestId": id, "streamResponse": streams}))).await;
    }
    until("four connections", || origin.accepted() == 4).await;
    assert_eq!(origin.counts.left.load(Ordering::SeqCst), 0);
    drop(client);
    until("the end of each", || origin.counts.left.load(Ordering::SeqCst) == 4).await;
    until("the same descriptors", || descriptors(&server) == before).await;
    other.ok("http/request", request(&origin.url("/"), json!({}))).await;
}

#[tokio::test]
async fn a_client_that_reads_slowly_slows_the_server_at_the_other_end() {
    // What may be on its way: the room for parts, and the buffers of four sockets.
    const ON_THE_WAY: u64 = 40 << 20;
    let (server, origin) = (server(&[], &[]).await, Origin::start().await);
    let (mut slow, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    let written = || origin.counts.written.load(Ordering::SeqCst);
    slow.ok("http/request", request(&origin.url("/flood"), json!({"streamResponse": true}))).await;
    // Others are served meanwhile, and so much as they are served the flood does not grow.
    let still = async {
        let mut seen = (written(), 0);
        while seen.1 < 50 {
            other.ok("environment/status", json!({})).await;
            seen = if written() == seen.0 { (seen.0, seen.1 + 1) } else { (written(), 0) };
        }
    };
    timeout(PATIENCE, still).await.expect("it stands still");
    assert!(written() < ON_THE_WAY, "{} bytes were read for a client that reads nothing", written());
    let (bytes, last) = parts(&mut slow, "r").await;
    assert!(last["error"].is_null() && bytes.len() as u64 == FLOOD, "{} bytes", bytes.len());
    let part = part_of_the_flood();
    assert!(bytes.chunks(part.len()).all(|chunk| chunk == part), "every byte, in its order");
}

//! process/* without a sandbox.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_tests::{Client, Place, Server, portcullis};
use serde_json::{Value, json};

async fn set_up() -> (Server, Client, Place) {
    let server = Server::start().await;
    let client = Client::connect(&server).await;
    (server, client, Place::new())
}

fn none() -> Value {
    json!({})
}

fn write(id: &str, text: &str, write_id: &str) -> Value {
    json!({"processId": id, "chunk": STANDARD.encode(text), "writeId": write_id})
}

#[tokio::test]
async fn output_then_exit_then_close_in_one_dense_sequence() {
    let (_server, mut client, place) = set_up().await;
    let started = client.start(&place, "p", &["sh", "-c", "echo out; echo err >&2; exit 3"], none()).await;
    assert_eq!(started, json!({"processId": "p", "sandboxType": "none"}));
    let events = client.events("p").await;
    assert_eq!(
        (events.output(Some("stdout")), events.output(Some("stderr")), events.code()),
        ("out\n".to_owned(), "err\n".to_owned(), 3)
    );
    assert_eq!(events.seqs(), (1..=events.seqs().len() as u64).collect::<Vec<_>>());
    assert_eq!(events.notices.last().unwrap()["method"], "process/closed");
}

#[tokio::test]
async fn the_environment_is_exactly_what_the_request_says() {
    let (_server, mut client, place) = set_up().await;
    let events = client.run(&place, "p", &["/usr/bin/env"], json!({"env": {"A": "1", "B": "two words"}})).await;
    assert_eq!(events.output(None), "A=1\nB=two words\n");
    let policy = json!({"inherit": "none", "ignoreDefaultExcludes": false, "exclude": [], "set": {"S": "1", "T": "2"}, "includeOnly": ["S"]});
    let events = client.run(&place, "q", &["/usr/bin/env"], json!({"env": {"E": "x"}, "envPolicy": policy})).await;
    assert_eq!(events.output(None), "E=x\nS=1\n");
}

#[tokio::test]
async fn under_a_ceiling_no_secret_of_the_server_is_inherited() {
    let place = Place::new();
    let workspace = place.path("").to_str().unwrap().to_owned();
    let everything =
        json!({"inherit": "all", "ignoreDefaultExcludes": true, "exclude": [], "set": {}, "includeOnly": ["SERVERS_*"]});
    for (ceiling, expect) in [
        (&["--policy", "read-only"][..], "SERVERS_NAME=n\n"),
        (&["--policy", "workspace-write", "--workspace", &workspace], "SERVERS_NAME=n\n"),
        // The control: without a ceiling the client decides, as with the reference.
        (&[], "SERVERS_NAME=n\nSERVERS_TOKEN=t\n"),
    ] {
        let mut command = portcullis(&[&["serve", "--insecure-no-auth"], ceiling].concat());
        command.env("SERVERS_TOKEN", "t").env("SERVERS_NAME", "n");
        let server = Server::with(command).await;
        let mut client = Client::connect(&server).await;
        let events = client.run(&place, "p", &["/usr/bin/env"], json!({"env": {}, "envPolicy": everything})).await;
        assert_eq!(events.output(None), expect, "{ceiling:?}");
    }
}

#[tokio::test]
async fn programs_are_found_on_the_requests_path_only() {
    let (_server, mut client, place) = set_up().await;
    place.put("only-here", "#!/bin/sh\necho found\n");
    place.mode("only-here", 0o755);
    let here = place.path("").to_str().unwrap().to_owned();
    assert_eq!(client.run(&place, "p", &["only-here"], json!({"env": {"PATH": here}})).await.output(None), "found\n");
    assert_eq!(client.run(&place, "q", &["ls", "/dev/null"], json!({"env": {}})).await.output(None), "/dev/null\n");
    let named = client.run(&place, "r", &["sh", "-c", "echo $0"], json!({"arg0": "another-name"})).await;
    assert_eq!(named.output(None), "another-name\n");
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_leaves_its_id_free() {
    let (_server, mut client, place) = set_up().await;
    place.put("script", "#!/bin/sh\n");
    place.put("file", "");
    for (argv, more, code, text) in [
        (json!([]), none(), -32602, "argv must not be empty"),
        (json!([""]), none(), -32603, "missing program"),
        (json!(["/no/such/program"]), none(), -32603, "`/no/such/program`: No such file or directory (os error 2)"),
        (json!(["no-such-program"]), none(), -32603, "No such file or directory (os error 2)"),
        (json!([place.path("script")]), none(), -32603, "Permission denied (os error 13)"),
        (json!(["true"]), json!({"cwd": place.uri("nope")}), -32603, "No such file or directory (os error 2)"),
        (json!(["true"]), json!({"cwd": place.uri("file")}), -32603, "Not a directory (os error 20)"),
        (json!(["true"]), json!({"cwd": "file://host/x"}), -32602, "is not valid on this exec-server host"),
        (json!(["a\0b"]), none(), -32603, "nul byte"),
        (json!(["true"]), json!({"env": {"A": "x\0"}}), -32603, "nul byte"),
        (json!(["true"]), json!({"networkProxy": {}}), -32602, "networkProxy"),
    ] {
        let mut params = Client::start_params(&place, "p", &[]);
        params["argv"] = argv;
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refusal = client.refused("process/start", params.clone()).await;
        assert!(refusal.code == code && refusal.message.contains(text), "{params}: {refusal:?}");
    }
    assert_eq!(client.run(&place, "p", &["true"], none()).await.code(), 0);
    let taken = client.refused("process/start", Client::start_params(&place, "p", &["true"])).await;
    assert_eq!((taken.code, taken.message.as_str()), (-32600, "process p already exists"));
}

#[tokio::test]
async fn a_terminal_echoes_and_controls() {
    let (_server, mut client, place) = set_up().await;
    client.start(&place, "p", &["cat"], json!({"tty": true})).await;
    assert_eq!(client.ok("process/write", write("p", "hey\n", "1")).await, json!({"status": "accepted"}));
    client.output("p", "hey\r\nhey\r\n").await;
    client.ok("process/write", write("p", "\u{4}", "2")).await;
    assert_eq!(client.events("p").await.code(), 0);
    let size = client
        .run(
            &place,
            "q",
            &["sh", "-c", "stty size; test -t 0 && test -t 1 && test -t 2 && echo tty; echo ok >/dev/tty"],
            json!({"tty": true}),
        )
        .await;
    assert_eq!(size.output(Some("pty")), "24 80\r\ntty\r\nok\r\n");
}

#[tokio::test]
async fn input_is_written_once_and_in_order() {
    let (_server, mut client, place) = set_up().await;
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    for (text, id) in [("a\n", "same"), ("a\n", "same"), ("b\n", "same"), ("end\n", "other")] {
        assert_eq!(client.ok("process/write", write("p", text, id)).await, json!({"status": "accepted"}));
    }
    client.output("p", "a\nend\n").await;
    client.ok("process/terminate", json!({"processId": "p"})).await;
    let events = client.events("p").await;
    assert_eq!((events.output(None).as_str(), events.code()), ("", 137));
    assert_eq!(client.ok("process/write", write("p", "late", "new")).await, json!({"status": "stdinClosed"}));
    assert_eq!(client.ok("process/write", write("p", "late", "other")).await, json!({"status": "accepted"}), "it was, once");
    assert_eq!(client.ok("process/write", write("zz", "", "1")).await, json!({"status": "unknownProcess"}));
    assert_eq!(client.refused("process/write", write("zz", "", "")).await.message, "writeId must not be empty");
    client.start(&place, "q", &["cat"], none()).await;
    assert_eq!(client.events("q").await.code(), 0, "without a pipe the input ends at once");
}

#[tokio::test]
async fn signals_and_terminate_reach_the_whole_group() {
    let (_server, mut client, place) = set_up().await;
    client.start(&place, "p", &["sleep", "600"], none()).await;
    assert_eq!(client.ok("process/signal", json!({"processId": "p", "signal": "interrupt"})).await, json!({}));
    assert_eq!(client.events("p").await.code(), 130);
    client.start(&place, "q", &["sh", "-c", "trap '' TERM INT HUP; sleep 600 & echo ready; wait"], none()).await;
    client.output("q", "ready\n").await;
    assert_eq!(client.ok("process/terminate", json!({"processId": "q"})).await, json!({"running": true}));
    // Closed comes only when the grandchild, which holds the pipes, is gone too.
    assert_eq!(client.events("q").await.code(), 137);
    assert_eq!(client.ok("process/terminate", json!({"processId": "q"})).await, json!({"running": false}));
    assert_eq!(client.ok("process/terminate", json!({"processId": "zz"})).await, json!({"running": false}));
    assert_eq!(client.ok("process/signal", json!({"processId": "zz", "signal": "interrupt"})).await, json!({}));
}

#[tokio::test]
async fn pages_hold_what_the_cursor_and_the_bound_say() {
    let (_server, mut client, place) = set_up().await;
    // Each line is read, so that each is a chunk of its own.
    client.start(&place, "p", &["sh", "-c", "echo aa; read x; echo bbb; read x; echo c"], json!({"pipeStdin": true})).await;
    client.output("p", "aa\n").await;
    client.ok("process/write", write("p", "\n", "1")).await;
    client.output("p", "bbb\n").await;
    client.ok("process/write", write("p", "\n", "2")).await;
    client.events("p").await;
    for (bound, seqs, next) in [
        (0, vec![1], 2),
        (3, vec![1], 2),
        (6, vec![1], 2),
        (7, vec![1, 2], 3),
        (9, vec![1, 2, 3], 4),
        (1 << 30, vec![1, 2, 3], 4),
    ] {
        let page = client.ok("process/read", json!({"processId": "p", "afterSeq": 0, "maxBytes": bound})).await;
        let got: Vec<i64> = page["chunks"].as_array().unwrap().iter().map(|chunk| chunk["seq"].as_i64().unwrap()).collect();
        assert_eq!((got, page["nextSeq"].as_i64().unwrap()), (seqs, next), "{bound}");
    }
    let whole = client.ok("process/read", json!({"processId": "p"})).await;
    assert_eq!(
        (&whole["nextSeq"], &whole["exited"], &whole["exitCode"], &whole["closed"]),
        (&json!(6), &json!(true), &json!(0), &json!(true))
    );
    let unknown = client.refused("process/read", json!({"processId": "zz"})).await;
    assert_eq!((unknown.code, unknown.message.as_str()), (-32600, "unknown process id zz"));
}

#[tokio::test]
async fn a_long_poll_holds_up_nobody_and_ends_with_news() {
    let (_server, mut client, place) = set_up().await;
    client.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let poll = client.begin("process/read", json!({"processId": "p", "afterSeq": 0, "waitMs": 600_000})).await;
    client.ok("environment/status", json!({})).await;
    client.ok("fs/getMetadata", json!({"path": place.uri("")})).await;
    client.ok("process/write", write("p", "news\n", "1")).await;
    let page = client.answer(poll).await.unwrap();
    assert_eq!(page["chunks"][0]["chunk"], json!(STANDARD.encode("news\n")));
    let poll = client.begin("process/read", json!({"processId": "p", "afterSeq": 1, "waitMs": 600_000})).await;
    client.ok("process/terminate", json!({"processId": "p"})).await;
    let page = client.answer(poll).await.unwrap();
    assert_eq!((&page["chunks"], &page["exited"], &page["exitCode"]), (&json!([]), &json!(true), &json!(137)));
    let timed = client.ok("process/read", json!({"processId": "p", "afterSeq": 99, "waitMs": 600_000})).await;
    assert_eq!(timed["closed"], json!(true), "a closed process has no more news to wait for");
}

#[tokio::test]
async fn a_great_deal_of_output_arrives_whole_in_chunks_of_8_kib() {
    let (_server, mut client, place) = set_up().await;
    let events = client.run(&place, "p", &["sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' a; echo END"], none()).await;
    let output = events.output(None);
    assert_eq!(output.len(), 5_000_004);
    assert!(output.ends_with("aEND\n"));
    let chunks = events.notices.iter().filter_map(|notice| notice["params"]["chunk"].as_str());
    assert!(chunks.clone().all(|chunk| STANDARD.decode(chunk).unwrap().len() <= 8192));
    assert_eq!(events.seqs(), (1..=events.seqs().len() as u64).collect::<Vec<_>>());
}

#[tokio::test]
async fn descriptors_are_0_1_2_and_the_leader_has_a_group_of_its_own() {
    let (_server, mut client, place) = set_up().await;
    let script = "ls /proc/self/fd | tr '\\n' ' '; test $(cut -d' ' -f5 /proc/$$/stat) = $$ && echo leader";
    let events = client.run(&place, "p", &["sh", "-c", script], none()).await;
    // The 3 is ls's own look at the directory.
    assert_eq!(events.output(None), "0 1 2 3 leader\n");
}

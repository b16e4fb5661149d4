//! The operator's limits on what all clients together may have, and where they are set.

use portcullis_tests::{Client, Place, Program, Server, portcullis};
use serde_json::{Value, json};
use std::io::Write as _;

fn reached(limit: &str, value: u64, scope: &str) -> Option<Value> {
    Some(json!({"limit": limit, "value": value, "used": value, "scope": scope}))
}

#[tokio::test]
async fn sessions_are_bounded_and_one_that_ends_makes_room() {
    let server = Server::with_arguments(&["--max-sessions", "2", "--detached-retention", "1"]).await;
    let (first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    let mut third = Client::dial(&server.url).await;
    let refusal = third.initialize(None).await.unwrap_err();
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        (
            -32600,
            "initialize: at most 2 sessions are kept on this server, detached ones included; resume one, or try again later"
        )
    );
    assert_eq!(refusal.data, reached("max-sessions", 2, "server"));

    // A session that is kept can be resumed, whatever the bound.
    let session = first.session.clone();
    first.cut();
    let resumed = Client::resume(&server, &session).await;
    third.initialize(None).await.unwrap_err();

    // Once one has expired, the same connection gets its session.
    resumed.cut();
    while third.initialize(None).await.is_err() {
        tokio::task::yield_now().await;
    }
    drop(second);
}

#[tokio::test]
async fn processes_are_bounded_by_session_and_by_server() {
    let server = Server::with_arguments(&["--session-processes", "2", "--max-processes", "3"]).await;
    let (place, mut one, mut other) = (Place::new(), Client::connect(&server).await, Client::connect(&server).await);
    for id in ["a", "b"] {
        one.start(&place, id, &["sleep", "100"], json!({})).await;
    }
    let third = |place: &Place| Client::start_params(place, "c", &["sleep", "100"]);
    let refusal = one.refused("process/start", third(&place)).await;
    assert_eq!(refusal.message, "process/start c: at most 2 processes may run in a session; let some end");
    assert_eq!(refusal.data, reached("session-processes", 2, "session"));

    other.start(&place, "a", &["sleep", "100"], json!({})).await;
    let refusal = other.refused("process/start", third(&place)).await;
    assert_eq!(refusal.message, "process/start c: at most 3 processes may run on this server; let some end, or try again later");
    assert_eq!(refusal.data, reached("max-processes", 3, "server"));

    // What ended makes room, and the id of what was refused is free.
    one.ok("process/terminate", json!({"processId": "a"})).await;
    one.events("a").await;
    other.start(&place, "c", &["true"], json!({})).await;
    assert_eq!(other.events("c").await.code(), 0);
    one.start(&place, "c", &["true"], json!({})).await;
    assert_eq!(one.events("c").await.code(), 0);
}

#[tokio::test]
async fn calls_are_bounded_and_control_goes_on() {
    let server = Server::with_arguments(&["--max-calls", "2"]).await;
    let (place, mut one, mut other) = (Place::new(), Client::connect(&server).await, Client::connect(&server).await);
    one.start(&place, "p", &["cat"], json!({"pipeStdin": true})).await;
    let wait = json!({"processId": "p", "waitMs": 600_000});
    let (first, second) = (one.begin("process/read", wait.clone()).await, one.begin("process/read", wait).await);
    // Control comes after what was sent before it, so both run once it is answered.
    one.ok("environment/status", Value::Null).await;

    let path = place.path("x");
    let write = json!({"path": path, "dataBase64": ""});
    let refusal = other.refused("fs/writeFile", write.clone()).await;
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        (-32600, "fs/writeFile: at most 2 calls run on this server; send it again")
    );
    assert_eq!(refusal.data, reached("max-calls", 2, "server"));
    assert!(!std::path::Path::new(&path).exists());

    one.ok("process/terminate", json!({"processId": "p"})).await;
    for call in [first, second] {
        one.answer(call).await.unwrap();
    }
    other.ok("fs/writeFile", write).await;
}

#[tokio::test]
async fn limits_come_from_the_file_and_the_environment_and_are_told() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "insecure-no-auth = true\nmax-sessions = 7\nidle-exit = 1000").unwrap();
    let path = file.path().to_str().unwrap();
    let mut command = portcullis(&["serve", "--config", path, "--max-calls", "9"]);
    command.env("PORTCULLIS_IDLE_EXIT", "2000");
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    let limits = client.ok("environment/info", json!({"limits": true})).await["limits"].clone();
    assert_eq!((&limits["max-sessions"], &limits["max-calls"], &limits["idle-exit"]), (&json!(7), &json!(9), &json!(2000)));
    assert_eq!(limits["max-connections"], json!(4096));
    let without = client.ok("environment/info", Value::Null).await;
    assert_eq!(without.get("limits"), None);
}

#[tokio::test]
async fn absurd_limits_serve_nobody() {
    for (arguments, variable, expect) in [
        (&["--max-sessions", "0"][..], None, "0 is not between 1 and 65536"),
        (&["--max-sessions", "-1"], None, "`-1` is not a whole number"),
        (&["--idle-exit", "NaN"], None, "`NaN` is not a whole number of seconds"),
        (&[], Some(("PORTCULLIS_BUFFER_BYTES", "1")), "(`buffer-bytes` comes from the environment (PORTCULLIS_BUFFER_BYTES))"),
    ] {
        let mut command = portcullis(&[&["serve", "--insecure-no-auth"], arguments].concat());
        command.envs(variable);
        let mut program = Program::start(command);
        assert_eq!(program.wait().await, 2);
        let text = program.stderr().await;
        assert!(text.contains(expect), "{text}");
        assert_eq!(program.stdout.next_line().await.unwrap(), None);
    }
}

#[tokio::test]
async fn the_operator_bounds_every_start_and_the_smaller_of_two_counts() {
    let limits = ["--process-open-files", "40", "--process-output-bytes", "100000", "--process-ceiling-ms", "60000"];
    let server = Server::with_arguments(&limits).await;
    let (place, mut client) = (Place::new(), Client::connect(&server).await);
    let in_force = |answer: &Value, limit: &str| {
        let list =
            answer["limits"].as_array().unwrap().iter().find(|one| one["limit"] == limit).unwrap_or_else(|| panic!("{answer}"));
        list["value"].clone()
    };
    let show = &["sh", "-c", "ulimit -n"];
    let answer = client.start(&place, "theirs", show, json!({})).await;
    assert_eq!((in_force(&answer, "openFiles"), in_force(&answer, "outputBytes")), (json!(40), json!(100_000)));
    assert_eq!(client.events("theirs").await.output(None), "40\n");
    let answer = client.start(&place, "less", show, json!({"limits": {"openFiles": 30}})).await;
    assert_eq!(in_force(&answer, "openFiles"), json!(30));
    assert_eq!(client.events("less").await.output(None), "30\n");
    let answer = client.start(&place, "more", show, json!({"limits": {"openFiles": 50}})).await;
    assert_eq!(in_force(&answer, "openFiles"), json!(40));
    assert_eq!(client.events("more").await.output(None), "40\n");

    // The control: where the operator says nothing, what the start says counts.
    let free = Server::start().await;
    let mut client = Client::connect(&free).await;
    let answer = client.start(&place, "free", show, json!({"limits": {"openFiles": 50}})).await;
    assert_eq!(in_force(&answer, "openFiles"), json!(50));
    assert_eq!(client.start(&place, "none", show, json!({})).await.get("limits"), None);
}

#[tokio::test]
async fn a_client_that_says_nothing_is_gone_after_the_time_that_the_operator_gives() {
    let server = Server::with_arguments(&["--handshake-timeout", "3"]).await;
    let mut shaken = Client::connect(&server).await;
    let mut client = Client::dial(&server.url).await;
    assert_eq!(client.closed().await, Some(1008));
    // The control: who has shaken hands stays.
    shaken.ok("environment/status", Value::Null).await;
}

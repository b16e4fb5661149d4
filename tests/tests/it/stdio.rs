//! One session on standard input and output.

use portcullis_tests::{Place, Program, Watched, portcullis};
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::io::AsyncWriteExt as _;

#[tokio::test]
async fn lines_in_lines_out_and_the_end_of_input_ends_everything() {
    let mut command = portcullis(&["serve", "--listen", "stdio"]);
    command.stdin(Stdio::piped());
    let mut program = Program::start(command);
    let mut stdin = program.stdin();
    let place = Place::new();
    let start = json!({"id": 4, "method": "process/start", "params": {"processId": "p", "argv": ["sh", "-c", "echo $$; exec sleep 600"],
        "cwd": place.uri(""), "env": {"PATH": "/usr/bin:/bin"}, "tty": false}});
    let lines = format!(
        "{}\r\n\n  \r\n{}\n{{nope\n{}\n{start}\n",
        json!({"id": 1, "method": "initialize", "params": {"clientName": "test"}}),
        json!({"method": "initialized"}),
        json!({"id": 3, "method": "environment/status"}),
    );
    stdin.write_all(lines.as_bytes()).await.unwrap();
    let parse = |line: String| serde_json::from_str::<Value>(&line).unwrap();
    assert!(parse(program.line().await)["result"]["sessionId"].is_string());
    let complaint = parse(program.line().await);
    assert_eq!(complaint["id"], -1);
    assert!(
        complaint["error"]["message"].as_str().unwrap().starts_with("failed to parse JSON-RPC message from exec-server stdio:")
    );
    assert_eq!(parse(program.line().await), json!({"id": 3, "result": {"status": "ready"}}));
    let pid = loop {
        let message = parse(program.line().await);
        if message["method"] == "process/output" {
            let chunk = message["params"]["chunk"].as_str().unwrap();
            let text = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, chunk).unwrap();
            break String::from_utf8(text).unwrap().trim().parse().unwrap();
        }
    };
    let watched = Watched::new(pid);
    drop(stdin);
    assert_eq!(program.wait().await, 0);
    watched.ended().await;
}

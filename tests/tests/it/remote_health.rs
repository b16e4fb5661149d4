//! Whether an executor can be used, and when it ends.

use crate::metrics::{http, until};
use crate::remote::{EXECUTOR, Remote, rendezvous, rendezvous_at};
use portcullis_tests::{PATIENCE, Program, portcullis};
use std::process::Stdio;
use tokio::time::timeout;

fn executor(url: &str, arguments: &[&str]) -> tokio::process::Command {
    let mut command = portcullis(&[&["serve", "--remote", url, "--environment-id", "box"], arguments].concat());
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
    command
}

/// Looks until the answer is this status.
async fn is_ready(health: &str, status: u16) {
    let seen = async { while http(health, "GET /readyz", "").await.0 != status {} };
    timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("it does not become {status}"));
}

#[tokio::test]
async fn an_executor_is_ready_while_it_reaches_the_rendezvous() {
    let (mut first, url, place) = rendezvous().await;
    let mut executor = Program::start(executor(&url, &["--health-listen", "127.0.0.1:0"]));
    let health = executor.line().await.replace("health is at http://", "ws://");
    assert_eq!(executor.line().await, format!("environment box is registered at {url}"));
    is_ready(&health, 200).await;
    until(&health, "relay_connected", 1.0).await;
    first.signal(rustix::process::Signal::TERM);
    assert_eq!(first.wait().await, 0);
    is_ready(&health, 503).await;
    until(&health, "relay_connected", 0.0).await;
    assert_eq!(http(&health, "GET /livez", "").await.0, 200);
    // It serves nobody, and no page.
    assert_eq!(http(&health, "GET /", "Connection: Upgrade\r\nUpgrade: websocket\r\n").await.0, 404);
    assert_eq!(http(&health, "GET /metrics", "Origin: http://localhost\r\n").await.0, 403);
    let (rendezvous, url, _place) = rendezvous_at(&url.replace("http://", "ws://")).await;
    is_ready(&health, 200).await;
    Remote { rendezvous, executor, url, place }.end().await;
}

#[tokio::test]
async fn how_an_executor_does_is_told_on_its_own_machine_alone() {
    let mut refused = Program::start(executor("http://127.0.0.1:9", &["--health-listen", "0.0.0.0:0"]));
    assert_eq!(refused.wait().await, 1);
    let stderr = refused.stderr().await;
    assert!(stderr.contains("only loopback addresses are allowed"), "{stderr}");
}

#[tokio::test]
async fn an_executor_ends_with_its_standard_input_where_that_is_asked_for() {
    let (mut rendezvous, url, _place) = rendezvous().await;
    let said = format!("environment box is registered at {url}");
    let (flag, variable) = ("--exit-on-stdin-close", "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE");
    for (flags, variables) in [(&[flag][..], &[][..]), (&[], &[(variable, "1")])] {
        let mut command = executor(&url, flags);
        command.envs(variables.iter().copied()).stdin(Stdio::piped());
        let mut executor = Program::start(command);
        assert_eq!(executor.line().await, said);
        drop(executor.stdin());
        assert_eq!(executor.wait().await, 0);
    }
    // The control: its input has ended before it begins, and it ends by a signal.
    let mut control = Program::start(executor(&url, &[]));
    assert_eq!(control.line().await, said);
    for program in [&mut control, &mut rendezvous] {
        program.signal(rustix::process::Signal::TERM);
        assert_eq!(program.wait().await, 0);
    }
}

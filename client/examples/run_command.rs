//! Runs one command on a server and shows what it writes as it comes.
//!
//! `portcullis serve` in one place, then `cargo run --example run_command -- ws://127.0.0.1:PORT ls -l /`, with the token
//! that `serve` says in the variable EXEC_SERVER_TOKEN.

use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ExecServerError, ProcessEvent, Token};
use portcullis_protocol::event::Stream;
use portcullis_protocol::path::WirePath;
use portcullis_protocol::process::{EnvPolicy, Inherit, StartParams};
use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().ok_or("usage: run_command URL PROGRAM [ARGUMENT]…")?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(&url, arguments.collect()))
}

async fn run(url: &str, argv: Vec<String>) -> Result<ExitCode, Box<dyn Error>> {
    let mut options = ExecServerClientConnectOptions::new(url, "run_command");
    options.token = std::env::var("EXEC_SERVER_TOKEN").ok().map(Token::new);
    let (client, task) = ExecServerClient::connect(&options).await?;
    let code = follow(client, argv).await?;
    // The client is dropped by now, so its task ends.
    task.await?;
    Ok(ExitCode::from(u8::try_from(code & 0xff)?))
}

async fn follow(client: ExecServerClient, argv: Vec<String>) -> Result<i32, Box<dyn Error>> {
    let mut params = StartParams::new("command", argv, WirePath::parse("file:///")?);
    let (exclude, include_only) = (Vec::new(), Vec::new());
    let set = std::collections::BTreeMap::new();
    params.env_policy = Some(EnvPolicy { inherit: Inherit::Core, ignore_default_excludes: false, exclude, set, include_only });
    let mut process = client.start(&params).await?;
    let mut code = None;
    // A cut of the link is not seen here: the client comes back, and what was missed comes first.
    while let Some(event) = process.event().await {
        match event {
            ProcessEvent::Output { stream: Stream::Stderr, chunk, .. } => io::stderr().write_all(&chunk)?,
            ProcessEvent::Output { chunk, .. } => io::stdout().write_all(&chunk)?,
            ProcessEvent::Exited { code: status, .. } => code = Some(status),
            ProcessEvent::Gap { from, to, .. } => writeln!(io::stderr(), "(events {from} to {to} were not kept)")?,
            ProcessEvent::Failed { message } => return Err(ExecServerError::Failed(message).into()),
            ProcessEvent::Closed { .. } => {}
        }
    }
    code.ok_or_else(|| "it closed without an exit status".into())
}

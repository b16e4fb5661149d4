//! A program that embeds the gateway: its own executable plays the hidden roles, and a client in the same process uses it.
//!
//! Run it with a directory: `cargo run --example embed -- .`

use portcullis::protocol::fs::Empty;
use portcullis::protocol::path::{AbsolutePath, WirePath};
use portcullis::protocol::process::StartParams;
use portcullis::{Config, ExecServerRuntimePaths, Gateway};
use std::error::Error;
use std::process::ExitCode;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // First of all: this start may be a helper's.
    if let Some(code) = portcullis::dispatch() {
        return Ok(code);
    }
    let workspace = std::env::args().nth(1).unwrap_or_else(|| ".".to_owned());
    let workspace = AbsolutePath::new(std::fs::canonicalize(workspace)?)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(&workspace))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(workspace: &AbsolutePath) -> Result<(), Box<dyn Error>> {
    let gateway = Gateway::start(Config::new(ExecServerRuntimePaths::of_this_process()?)).await?;
    let (client, task) = portcullis::connect(&gateway, "embed").await?;

    let read_only = serde_json::json!({"type": "read-only"});
    let mut params = StartParams::new("ls", vec!["ls".to_owned()], WirePath::Local(workspace.clone()));
    params.sandbox = Some(serde_json::value::to_raw_value(&read_only)?);
    let mut process = client.start(&params).await?;
    let mut listing = Vec::new();
    while let Some(event) = process.event().await {
        if let portcullis::client::ProcessEvent::Output { chunk, .. } = event {
            listing.extend(chunk);
        }
    }
    say(&format!("ls says: {}", String::from_utf8_lossy(&listing).trim()))?;
    drop(process);

    let made = AbsolutePath::new(workspace.as_path().join("made"))?.to_uri();
    let write = serde_json::json!({"path": made, "dataBase64": "", "sandbox": read_only});
    match client.call::<Empty>("fs/writeFile", &write).await {
        Ok(_) => return Err("the sandbox did not hold".into()),
        Err(refusal) => say(&format!("a write is refused: {refusal}"))?,
    }
    drop(client);
    gateway.shutdown().await;
    task.await?;
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    writeln!(std::io::stdout(), "{line}")
}

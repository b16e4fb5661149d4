//! What the way through a rendezvous costs, beside a socket to the same program: three programs on this machine, one client.

use crate::Failure;
use crate::ground::Ground;
use crate::table::{Summary, figure};
use futures_util::future::try_join_all;
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent, RemoteExecServerConnectArgs, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const ROUNDS: u32 = 200;
const BULK_ROUNDS: u32 = 3;
/// Files of 1 MiB that are read, and how many at a time.
const FILES: usize = 64;
const AT_ONCE: usize = 4;
const OUTPUT_MIB: u32 = 64;

/// Prints a table of this program, directly and through its own rendezvous.
pub(crate) async fn run(program: &Path, ground: &Ground) -> Result<(), Failure> {
    let (executor, harness) = (secret(ground, "executor-token")?, secret(ground, "harness-token")?);
    let local = ["--listen", "ws://127.0.0.1:0"].map(str::to_owned);
    let tokens = |flag: &str, path: &Path| [flag.to_owned(), path.display().to_string()];
    let rendezvous = [tokens("--executor-token-file", &executor), tokens("--harness-token-file", &harness)].concat();
    let rendezvous = Running::start(program, "rendezvous", &[&local[..], &rendezvous].concat(), "http://")?;
    let remote = ["--remote", &rendezvous.said, "--environment-id", "bench"].map(str::to_owned);
    let remote = [&remote[..], &tokens("--registration-token-file", &executor)].concat();
    let _executor = Running::start(program, "serve", &remote, "environment bench")?;
    let direct = Running::start(program, "serve", &[&local[..], &["--insecure-no-auth".to_owned()]].concat(), "ws://")?;

    let (one, first) = ExecServerClient::connect(&ExecServerClientConnectOptions::new(&direct.said, "bench")).await?;
    let (base_url, environment_id) = (rendezvous.said.clone(), "bench".to_owned());
    let remote = RemoteExecServerConnectArgs { base_url, environment_id, token: Token::new(HARNESS) };
    let (other, second) = ExecServerClient::connect(&ExecServerClientConnectOptions::remote(remote, "bench")).await?;
    let clients = [one, other];
    let mut out = io::stdout();
    writeln!(
        out,
        "| | unit, rounds | direct: median (min, p99) | through the rendezvous: median (min, p99) |\n|---|---|---|---|"
    )?;
    for (name, unit, rounds, row) in ROWS {
        let mut figures = [Vec::new(), Vec::new()];
        for round in 0..=rounds {
            for (client, figures) in clients.iter().zip(&mut figures) {
                let figure = measure(row, client, ground, &format!("{name} {round}")).await?;
                // The first is not counted.
                if round > 0 {
                    figures.push(figure);
                }
            }
        }
        let cells = figures.map(|figures| {
            Summary::of(&figures).map_or_else(String::new, |Summary { min, median, p99, .. }| {
                format!("{} ({}, {})", figure(median), figure(min), figure(p99))
            })
        });
        writeln!(out, "| {name} | {unit}, {rounds} | {} | {} |", cells[0], cells[1])?;
    }
    drop(clients);
    first.await?;
    second.await?;
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Row {
    Metadata,
    Read,
    Files,
    Output,
}

const ROWS: [(&str, &str, u32, Row); 4] = [
    ("getMetadata", "ms", ROUNDS, Row::Metadata),
    ("readFile 1 KiB", "ms", ROUNDS, Row::Read),
    ("64 files of 1 MiB, 4 in flight", "MB/s", BULK_ROUNDS, Row::Files),
    ("output of 64 MiB", "MB/s", BULK_ROUNDS, Row::Output),
];

async fn measure(row: Row, client: &ExecServerClient, ground: &Ground, name: &str) -> Result<f64, Failure> {
    let begun = Instant::now();
    let rate = |mib: f64| mib * f64::from(1_u32 << 20) / 1e6 / begun.elapsed().as_secs_f64();
    match row {
        Row::Metadata => {
            client.call::<Value>("fs/getMetadata", &json!({"path": ground.uri("read-1024")})).await?;
            Ok(begun.elapsed().as_secs_f64() * 1000.0)
        }
        Row::Read => {
            client.call::<Value>("fs/readFile", &json!({"path": ground.uri("read-1024")})).await?;
            Ok(begun.elapsed().as_secs_f64() * 1000.0)
        }
        Row::Files => {
            let params = json!({"path": ground.uri("read-1048576")});
            for _many in 0..FILES / AT_ONCE {
                try_join_all((0..AT_ONCE).map(|_one| client.call::<Value>("fs/readFile", &params))).await?;
            }
            Ok(rate(64.0))
        }
        Row::Output => {
            let argv = ["/bin/dd", "if=/dev/zero", "bs=1M", &format!("count={OUTPUT_MIB}"), "status=none"].map(str::to_owned);
            let cwd = WirePath::Local(AbsolutePath::new(ground.file(""))?);
            let mut process = client.start(&StartParams::new(name, argv.to_vec(), cwd)).await?;
            let mut seen = 0;
            while let Some(event) = process.event().await {
                if let ProcessEvent::Output { chunk, .. } = event {
                    seen += chunk.len();
                }
            }
            if seen != 64 << 20 {
                return Err(format!("of 64 MiB of output {seen} bytes arrived").into());
            }
            Ok(rate(64.0))
        }
    }
}

const HARNESS: &str = "harness-token";

/// A file that only its owner may read, with its own name as the token.
fn secret(ground: &Ground, name: &str) -> Result<PathBuf, Failure> {
    let path = ground.file(name);
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?.write_all(name.as_bytes())?;
    Ok(path)
}

/// A program that said what was waited for.
struct Running {
    child: Child,
    said: String,
}

impl Running {
    /// Starts it, and waits until a line of its standard output has the word.
    fn start(program: &Path, command: &str, arguments: &[String], word: &str) -> Result<Self, Failure> {
        let mut started = Command::new(program);
        started.arg(command).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = started.spawn().map_err(|error| format!("start {}: {error}", program.display()))?;
        let output = child.stdout.take().ok_or("no standard output")?;
        let mut running = Self { child, said: String::new() };
        for line in BufReader::new(output).lines() {
            let line = line?;
            if let Some(at) = line.find(word) {
                running.said = line[at..].split_whitespace().next().unwrap_or_default().to_owned();
                return Ok(running);
            }
        }
        Err(format!("`{command}` ended before it said `{word}`").into())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

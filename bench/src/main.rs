//! Benchmarks: what a call costs over a socket, for one server or for several interleaved (A B A B …), so that whatever else
//! the machine does falls on all alike.
//!
//! `portcullis serve` in one place, then `cargo run --release -p portcullis-bench -- --url ws://127.0.0.1:PORT`; a second
//! `--url` adds a column. A server that asks for a token is started with `--token-file FILE`, and so is this. It prints minimum, median and 99th percentile in milliseconds, and asserts nothing about them.

mod idle;
mod load;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Parser;
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use serde_json::{Value, json};
use std::error::Error;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

#[derive(Debug, Parser)]
struct Arguments {
    /// A server that runs on this machine; may be repeated.
    #[arg(long, required = true)]
    url: Vec<String>,
    /// A file with the token that a server asks for; may be repeated, in the order of the URLs. Servers behind the last one are
    /// given none.
    #[arg(long, value_name = "FILE")]
    token_file: Vec<PathBuf>,
    /// Rounds of each row.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// Say instead what so many idle sessions and processes cost the first server, whose process id is --pid.
    #[arg(long, requires = "pid")]
    idle: Option<u32>,
    /// The process id of the first server.
    #[arg(long)]
    pid: Option<u32>,
    #[command(flatten)]
    loads: load::Loads,
}

/// What a row does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    Status,
    Metadata,
    Read { bytes: usize, confined: bool },
    Write { bytes: usize, confined: bool },
    Spawn { confined: bool },
}

const ROWS: [(&str, Row); 10] = [
    ("environment/status", Row::Status),
    ("fs/getMetadata", Row::Metadata),
    ("fs/readFile 1 KiB", Row::Read { bytes: 1 << 10, confined: false }),
    ("fs/readFile 1 KiB, reads restricted", Row::Read { bytes: 1 << 10, confined: true }),
    ("fs/readFile 1 MiB", Row::Read { bytes: 1 << 20, confined: false }),
    ("fs/writeFile 1 KiB", Row::Write { bytes: 1 << 10, confined: false }),
    ("fs/writeFile 1 KiB, workspace-write", Row::Write { bytes: 1 << 10, confined: true }),
    ("fs/writeFile 1 MiB", Row::Write { bytes: 1 << 20, confined: false }),
    ("true, start to close", Row::Spawn { confined: false }),
    ("true, start to close, read-only", Row::Spawn { confined: true }),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match (arguments.idle, arguments.pid, arguments.url.first()) {
        (Some(count), Some(pid), Some(url)) => runtime.block_on(idle::run(url, token(&arguments, 0)?, pid, count.max(1))),
        (None, Some(pid), Some(url)) if !arguments.loads.is_empty() => {
            runtime.block_on(load::run(url, token(&arguments, 0)?, pid, &arguments.loads))
        }
        _ => runtime.block_on(run(&arguments)),
    }
}

async fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    // Outside of /tmp, which policies may grant as such.
    let place = tempfile::Builder::new().prefix("portcullis-bench-").tempdir_in("/var/tmp")?;
    for bytes in [1_usize << 10, 1 << 20] {
        std::fs::write(place.path().join(format!("read-{bytes}")), vec![b'x'; bytes])?;
    }
    let (mut servers, mut tasks) = (Vec::new(), Vec::new());
    for (nth, url) in arguments.url.iter().enumerate() {
        let (client, task) = connect(url, token(arguments, nth)?).await?;
        servers.push(Server { client, starts: 0 });
        tasks.push(task);
    }
    let mut out = io::stdout();
    writeln!(out, "{:<38} {}", "milliseconds", arguments.url.iter().map(|url| format!("{url:>30}")).collect::<String>())?;
    for (name, row) in ROWS {
        let mut times = vec![Vec::new(); servers.len()];
        for _round in 0..arguments.rounds {
            for (server, times) in servers.iter_mut().zip(&mut times) {
                times.push(server.time(row, place.path()).await?);
            }
        }
        let columns: String = times.into_iter().map(summary).collect();
        writeln!(out, "{name:<38} {columns}")?;
    }
    drop(servers);
    for task in tasks {
        task.await?;
    }
    Ok(())
}

/// The token of a server, if there is a file for it.
fn token(arguments: &Arguments, nth: usize) -> Result<Option<Token>, Box<dyn Error>> {
    let Some(path) = arguments.token_file.get(nth) else { return Ok(None) };
    let text = std::fs::read_to_string(path).map_err(|error| format!("--token-file {}: {error}", path.display()))?;
    Ok(Some(Token::new(text.trim())))
}

async fn connect(url: &str, token: Option<Token>) -> Result<(ExecServerClient, JoinHandle<()>), Box<dyn Error>> {
    let mut options = ExecServerClientConnectOptions::new(url, "bench");
    options.token = token;
    Ok(ExecServerClient::connect(&options).await?)
}

/// Minimum, median, 99th percentile.
fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1000.0;
    format!("{:>10.3}{:>10.3}{:>10.3}", at(0), at(50), at(99))
}

struct Server {
    client: ExecServerClient,
    starts: u64,
}

impl Server {
    async fn time(&mut self, row: Row, place: &Path) -> Result<Duration, Box<dyn Error>> {
        let uri = |name: &str| AbsolutePath::new(place.join(name)).map(|path| path.to_uri());
        let call = |method: &'static str, params: Value| {
            let client = self.client.clone();
            async move {
                let begin = Instant::now();
                client.call::<Value>(method, &params).await?;
                Ok::<_, Box<dyn Error>>(begin.elapsed())
            }
        };
        match row {
            Row::Status => call("environment/status", json!({})).await,
            Row::Metadata => call("fs/getMetadata", json!({"path": uri("read-1024")?})).await,
            Row::Read { bytes, confined } => {
                let params = json!({"path": uri(&format!("read-{bytes}"))?, "sandbox": confined.then(|| sandbox(place, "project_roots", "read"))});
                call("fs/readFile", params).await
            }
            Row::Write { bytes, confined } => {
                let content = STANDARD.encode(vec![b'y'; bytes]);
                let sandbox = confined.then(|| sandbox(place, "project_roots", "write"));
                call("fs/writeFile", json!({"path": uri("written")?, "dataBase64": content, "sandbox": sandbox})).await
            }
            Row::Spawn { confined } => self.spawn(place, confined).await,
        }
    }

    async fn spawn(&mut self, place: &Path, confined: bool) -> Result<Duration, Box<dyn Error>> {
        self.starts += 1;
        let cwd = WirePath::Local(AbsolutePath::new(place)?);
        let mut params = StartParams::new(format!("p{}", self.starts), vec!["/bin/true".to_owned()], cwd);
        if confined {
            params.sandbox = Some(serde_json::value::to_raw_value(&sandbox(place, "root", "read"))?);
        }
        let begin = Instant::now();
        let mut process = self.client.start(&params).await?;
        while let Some(event) = process.event().await {
            if let ProcessEvent::Exited { code, .. } = event
                && code != 0
            {
                return Err(format!("/bin/true ended with {code}").into());
            }
        }
        Ok(begin.elapsed())
    }
}

/// A profile in the spelling that every server of this wire knows: what programs need, and one entry.
fn sandbox(place: &Path, kind: &str, access: &str) -> Value {
    let entry = |kind: &str, access: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access});
    // As a URI: other servers take no native paths.
    let place = AbsolutePath::new(place).map(|path| path.to_uri()).unwrap_or_default();
    json!({
        "permissions": {"type": "managed", "network": "restricted",
            "file_system": {"type": "restricted", "entries": [entry("minimal", "read"), entry(kind, access)]}},
        "cwd": place, "workspaceRoots": [place], "windowsSandboxLevel": "disabled",
    })
}

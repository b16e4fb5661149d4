//! Benchmarks: what calls cost over a socket, for one server or for several interleaved (A B A B …), so that whatever else the
//! machine does falls on all alike; what idle sessions and processes hold; how cost grows; what loads do.
//!
//! ```text
//! portcullis-bench --server 'ours=PATH/portcullis serve --insecure-no-auth --listen ws://127.0.0.1:0' [--server OTHER=…]
//! ```
//!
//! A server is a command, which is started and ended here, or the URL of one that runs on this machine. The tables are Markdown; in
//! them a ratio says how many times better the first server is than the second. Nothing is asserted.

mod ground;
mod idle;
mod load;
mod machine;
mod plot;
mod relay;
mod rows;
mod scale;
mod server;
mod table;
mod wire;

use clap::Parser;
use ground::Ground;
use machine::Machine;
use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, Token};
use rows::{Row, Side};
use serde_json::json;
use server::{Server, Source};
use std::error::Error;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use table::{Line, figure};
use tokio::task::JoinHandle;
use wire::Acks;

/// Why a run was given up.
pub(crate) type Failure = Box<dyn Error>;

#[derive(Debug, Parser)]
struct Arguments {
    /// A server: a name, and its URL or the command that starts it and prints its URL. May be repeated.
    #[arg(long, value_name = "NAME=URL|COMMAND", required_unless_present_any = ["emit", "relay"])]
    server: Vec<Source>,
    /// A file with the token that a server asks for; may be repeated, in the order of the servers. Those behind the last one are
    /// given none.
    #[arg(long, value_name = "FILE")]
    token_file: Vec<PathBuf>,
    /// Measure the rows whose names contain this only; may be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// So many percent of each row's rounds, one at least.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    percent: u32,
    /// Measure each row a second time by a client that acknowledges at once.
    #[arg(long)]
    acks: bool,
    /// Write the figures here too, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Say instead what so many idle sessions and processes cost each server, which must be commands.
    #[arg(long, value_name = "N")]
    idle: Option<u32>,
    /// Say instead how cost grows with sessions, entries, policies and bytes, and draw it into this directory.
    #[arg(long, value_name = "DIR")]
    scale: Option<PathBuf>,
    /// Say instead what the way through a rendezvous costs this program, a `portcullis`.
    #[arg(long, value_name = "PROGRAM")]
    relay: Option<PathBuf>,
    /// The process id of the first server, if it is a URL, for the loads.
    #[arg(long)]
    pid: Option<u32>,
    #[command(flatten)]
    loads: load::Loads,
    /// Write so many MiB a second to standard output instead: what a row runs.
    #[arg(long, hide = true)]
    emit: Option<u32>,
    /// For so long.
    #[arg(long, hide = true, default_value_t = 3)]
    seconds: u32,
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    if let Some(rate) = arguments.emit {
        return emit(rate, arguments.seconds);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(program) = &arguments.relay {
        return runtime.block_on(relay::run(program, &Ground::new()?));
    }
    if arguments.loads.is_empty() {
        return measure(&arguments);
    }
    let first = arguments.server.first().ok_or("no server")?;
    let (server, _taken) = first.open(token(&arguments, 0)?)?;
    let pid = server.pid.or(arguments.pid).ok_or("--pid is needed for a server that runs already")?;
    let token = server.address.token.clone().map(Token::new);
    runtime.block_on(load::run(&server.address.url, token, pid, &arguments.loads))
}

fn measure(arguments: &Arguments) -> Result<(), Failure> {
    let mut out = io::stdout();
    let (mut servers, mut grounds, mut facts) = (Vec::new(), Vec::new(), Vec::new());
    for (nth, source) in arguments.server.iter().enumerate() {
        let (server, fact) = begin(source, token(arguments, nth)?)?;
        if let Some(fact) = fact {
            writeln!(out, "{fact}")?;
            facts.push(json!({"server": server.name, "fact": fact}));
        }
        servers.push(server);
        // Each has its own: servers hold names in a workspace while they sandbox there, and some remove those of others.
        grounds.push(Ground::new()?);
    }
    writeln!(out)?;
    if let Some(count) = arguments.idle {
        return idle::run(&servers, &grounds, count.max(1));
    }
    if let Some(directory) = &arguments.scale {
        return scale::run(&servers, &grounds, directory);
    }
    let names: Vec<String> = servers.iter().map(|server| server.name.clone()).collect();
    writeln!(out, "{}", table::heading(&names, arguments.acks))?;
    let mut machine = Machine::new()?;
    let mut lines = Vec::new();
    for row in rows::all() {
        if arguments.only.is_empty() || arguments.only.iter().any(|text| row.name.contains(text.as_str())) {
            let line = run(row, &servers, &grounds, &mut machine, arguments)?;
            writeln!(out, "{}", line.text(servers.len()))?;
            lines.push(line.json(&names));
        }
    }
    arguments.json.as_ref().map_or(Ok(()), |path| table::save(path, &lines, &facts))
}

/// One row, the servers in turn.
fn run(row: Row, servers: &[Server], grounds: &[Ground], machine: &mut Machine, arguments: &Arguments) -> Result<Line, Failure> {
    let mut sides = Vec::new();
    for acks in if arguments.acks { &[Acks::Ordinary, Acks::AtOnce][..] } else { &[Acks::Ordinary] } {
        for server in servers {
            sides.push(Side::open(&server.address, *acks)?);
        }
    }
    let rounds = (row.rounds * arguments.percent / 100).max(1);
    let (mut columns, mut limit) = (vec![Vec::new(); sides.len()], Vec::new());
    // The first is not counted, where there are many: what is made once is not what is looked for.
    for round in 0..rounds + u32::from(rounds > 3) {
        let counts = round > 0 || rounds <= 3;
        for (nth, side) in sides.iter_mut().enumerate() {
            let failed = |error| format!("{} of {}: {error}", row.name, servers[nth % servers.len()].name);
            let taken = (row.measure)(side, &grounds[nth % servers.len()]).map_err(failed)?;
            // What a server does not offer is no number.
            if counts && !taken.is_nan() {
                columns[nth].push(taken);
            }
        }
        if let Some((_, measure)) = row.limit
            && counts
        {
            limit.push(measure(machine, &grounds[0])?);
        }
    }
    Ok(Line { row, columns, limit })
}

/// Starts a server; several times, if it is a command, to say how long that takes.
fn begin(source: &Source, token: Option<String>) -> Result<(Server, Option<String>), Failure> {
    const STARTS: usize = 10;
    if !source.is_command() {
        return Ok((source.open(token)?.0, None));
    }
    let mut times = Vec::new();
    for _start in 0..STARTS {
        let (_server, taken) = source.open(token.clone())?;
        times.push(taken.as_secs_f64() * 1000.0);
    }
    let server = source.open(token)?.0;
    let summary = table::Summary::of(&times).ok_or("nothing was measured")?;
    // Until what it does behind its first line has settled.
    std::thread::sleep(Duration::from_millis(500));
    let held = server.pid.and_then(|pid| idle::held(pid).ok()).unwrap_or_default();
    let fact = format!(
        "{}: listens after {} ms (median of {}; {} at least), then {} MiB (PSS, with what it started), {} MB on disk",
        source.name,
        figure(summary.median),
        summary.rounds,
        figure(summary.min),
        figure(held as f64 / 1024.0),
        figure(source.program_bytes().unwrap_or_default() as f64 / 1e6),
    );
    Ok((server, Some(fact)))
}

/// The token of a server, if there is a file for it.
fn token(arguments: &Arguments, nth: usize) -> Result<Option<String>, Failure> {
    let Some(path) = arguments.token_file.get(nth) else { return Ok(None) };
    let text = std::fs::read_to_string(path).map_err(|error| format!("--token-file {}: {error}", path.display()))?;
    Ok(Some(text.trim().to_owned()))
}

async fn connect(url: &str, token: Option<Token>) -> Result<(ExecServerClient, JoinHandle<()>), Failure> {
    let mut options = ExecServerClientConnectOptions::new(url, "bench");
    options.token = token;
    Ok(ExecServerClient::connect(&options).await?)
}

/// Writes at a rate.
fn emit(rate: u32, seconds: u32) -> Result<(), Failure> {
    /// Writes a second.
    const TICKS: u32 = 64;
    let (block, begun) = (vec![b'e'; (rate as usize) * (1 << 20) / TICKS as usize], Instant::now());
    let mut out = io::stdout();
    for tick in 0..seconds * TICKS {
        out.write_all(&block)?;
        out.flush()?;
        let due = Duration::from_secs(1) * (tick + 1) / TICKS;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

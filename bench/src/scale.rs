//! How cost grows: with sessions, with a policy's entries, with policies in turn, with processes, with bytes.

use crate::Failure;
use crate::ground::Ground;
use crate::idle::held;
use crate::plot::{Plot, Series};
use crate::rows::{milliseconds, start, stream};
use crate::server::Server;
use crate::table::{Summary, figure};
use crate::wire::{Acks, Wire};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Instant;

const STEPS: [u32; 3] = [1, 100, 1000];
const POLICIES: [u32; 3] = [1, 10, 100];
const ROUNDS: u32 = 60;
const GIBS: u32 = 10;

type Point = (f64, f64);
/// What grows, and what is measured then; each point is (how many, milliseconds or MiB).
type Measure = fn(&Server, &Ground) -> Result<Vec<Point>, Failure>;

/// Measures every growth of every server, prints tables, and draws.
pub(crate) fn run(servers: &[Server], grounds: &[Ground], directory: &Path) -> Result<(), Failure> {
    let rows: [(&str, &str, &str, &str, Measure); 7] = [
        ("sessions", "readFile 1 KiB, read-only policy, beside idle sessions", "sessions", "ms", sessions),
        ("entries", "readFile 1 KiB, reads restricted, second call of a policy", "entries", "ms", entries),
        ("first", "the same, first call of a policy", "entries", "ms", first_of_entries),
        ("policies", "readFile 1 KiB, reads restricted, policies in turn", "policies", "ms", policies),
        ("processes", "true, start to exited, beside idle processes", "processes", "ms", processes),
        ("memory-sessions", "memory (PSS of all its processes) with idle sessions", "sessions", "MiB", memory_of_sessions),
        ("memory-stream", "memory (PSS of all its processes) while 10 GiB are streamed", "GiB", "MiB", memory_of_stream),
    ];
    fs::create_dir_all(directory).map_err(|error| format!("make {}: {error}", directory.display()))?;
    let mut out = io::stdout();
    for (file, title, x, y, measure) in rows {
        writeln!(out, "\n{title} ({y})\n\n| {x} | {} |", join(servers.iter().map(|server| server.name.clone())))?;
        writeln!(out, "|{}", "---|".repeat(servers.len() + 1))?;
        let mut series = Vec::new();
        for (server, ground) in servers.iter().zip(grounds) {
            let points = measure(server, ground).map_err(|error| format!("{title}, {}: {error}", server.name))?;
            series.push(Series { name: server.name.clone(), points });
        }
        let longest = series.iter().map(|series| series.points.len()).max().unwrap_or(0);
        for nth in 0..longest {
            let many = series.iter().find_map(|series| series.points.get(nth)).map_or(0.0, |point| point.0);
            let cells =
                series.iter().map(|series| series.points.get(nth).map_or_else(|| "–".to_owned(), |point| figure(point.1)));
            writeln!(out, "| {many} | {} |", join(cells))?;
        }
        let path = directory.join(format!("{file}.svg"));
        let svg = Plot { title, x, y, series: &series }.svg();
        fs::write(&path, svg).map_err(|error| format!("write {}: {error}", path.display()))?;
    }
    Ok(())
}

fn join(cells: impl Iterator<Item = String>) -> String {
    cells.collect::<Vec<_>>().join(" | ")
}

/// The median of a call.
fn median(wire: &mut Wire, method: &str, params: &[String], rounds: u32) -> Result<f64, Failure> {
    let mut taken = Vec::new();
    for params in params.iter().cycle().take(rounds as usize) {
        let begun = Instant::now();
        wire.call(method, params)?;
        taken.push(milliseconds(begun));
    }
    Ok(Summary::of(&taken).ok_or("nothing was measured")?.median)
}

fn read(ground: &Ground, sandbox: &Value) -> String {
    json!({"path": ground.uri("read-1024"), "sandbox": sandbox}).to_string()
}

fn sessions(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let params = [read(ground, &ground.read_only())];
    let mut wires = vec![Wire::connect(&server.address, Acks::AtOnce)?];
    let mut points = Vec::new();
    for many in STEPS {
        while wires.len() < many as usize {
            wires.push(Wire::connect(&server.address, Acks::AtOnce)?);
        }
        let wire = wires.first_mut().ok_or("no connection")?;
        wire.call("fs/readFile", &params[0])?;
        points.push((f64::from(many), median(wire, "fs/readFile", &params, ROUNDS)?));
    }
    Ok(points)
}

fn memory_of_sessions(server: &Server, _ground: &Ground) -> Result<Vec<Point>, Failure> {
    let pid = server.pid.ok_or("memory is asked of a server's own process: give a command")?;
    let mut wires = Vec::new();
    let mut points = Vec::new();
    for many in STEPS {
        while wires.len() < many as usize {
            wires.push(Wire::connect(&server.address, Acks::AtOnce)?);
        }
        points.push((f64::from(many), mib(pid)?));
    }
    Ok(points)
}

fn entries(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let mut wire = Wire::connect(&server.address, Acks::AtOnce)?;
    let mut points = Vec::new();
    for many in STEPS {
        let params = [read(ground, &ground.reads_restricted(0..many as usize))];
        wire.call("fs/readFile", &params[0])?;
        points.push((f64::from(many), median(&mut wire, "fs/readFile", &params, ROUNDS / 6)?));
    }
    Ok(points)
}

fn first_of_entries(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let mut points = Vec::new();
    for many in STEPS {
        // In a session of its own nothing was asked before.
        let mut taken = Vec::new();
        for _session in 0..5 {
            let mut wire = Wire::connect(&server.address, Acks::AtOnce)?;
            taken.push(median(&mut wire, "fs/readFile", &[read(ground, &ground.reads_restricted(0..many as usize))], 1)?);
        }
        points.push((f64::from(many), Summary::of(&taken).ok_or("nothing was measured")?.median));
    }
    Ok(points)
}

fn policies(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let mut wire = Wire::connect(&server.address, Acks::AtOnce)?;
    let mut points = Vec::new();
    for many in POLICIES {
        let params: Vec<String> = (0..many as usize).map(|nth| read(ground, &ground.reads_restricted(nth..nth + 1))).collect();
        // Once round without counting.
        median(&mut wire, "fs/readFile", &params, many)?;
        points.push((f64::from(many), median(&mut wire, "fs/readFile", &params, ROUNDS.max(many))?));
    }
    Ok(points)
}

fn processes(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let mut wire = Wire::connect(&server.address, Acks::AtOnce)?;
    let (mut points, mut idle) = (Vec::new(), 0);
    for many in STEPS {
        while idle < many {
            let start = start(&format!("idle {idle}"), &["/bin/sleep", "600"], ground, &Value::Null, false, false);
            wire.call("process/start", &start)?;
            idle += 1;
        }
        let mut taken = Vec::new();
        for _round in 0..ROUNDS / 2 {
            let name = wire.name();
            let begun = Instant::now();
            wire.send("process/start", &start(&name, &["/bin/true"], ground, &Value::Null, false, false))?;
            crate::rows::wait(&mut wire, "process/exited", &name)?;
            taken.push(milliseconds(begun));
            crate::rows::wait(&mut wire, "process/closed", &name)?;
        }
        points.push((f64::from(many), Summary::of(&taken).ok_or("nothing was measured")?.median));
    }
    for nth in 0..idle {
        wire.call("process/terminate", &json!({"processId": format!("idle {nth}")}).to_string())?;
    }
    Ok(points)
}

fn memory_of_stream(server: &Server, ground: &Ground) -> Result<Vec<Point>, Failure> {
    let pid = server.pid.ok_or("memory is asked of a server's own process: give a command")?;
    let mut wire = Wire::connect(&server.address, Acks::AtOnce)?;
    let mut points = vec![(0.0, mib(pid)?)];
    for gib in 1..=GIBS {
        stream(&mut wire, ground, 1 << 30)?;
        points.push((f64::from(gib), mib(pid)?));
    }
    Ok(points)
}

fn mib(pid: u32) -> Result<f64, Failure> {
    Ok(held(pid)? as f64 / 1024.0)
}

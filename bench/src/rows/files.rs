//! Connections, and files one by one.

use super::{Limit, Row, Side, Unit, milliseconds};
use crate::Failure;
use crate::ground::{Ground, PLACES};
use crate::machine::Machine;
use crate::wire::Wire;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long rates are counted.
const COUNTED: Duration = Duration::from_millis(700);
/// Calls on their way on one connection.
const IN_FLIGHT: usize = 16;
/// Connections at a time.
const CONNECTIONS: usize = 16;

pub(super) fn rows() -> Vec<Row> {
    use Unit::{Milliseconds, PerSecond};
    let row = |name, unit, rounds, target, measure, limit| Row { name, unit, rounds, target, measure, limit };
    let echo = Some(("WebSocket echo", Machine::echo as Limit));
    vec![
        row("connect and initialize", Milliseconds, 60, 2.0, connect, Some(("upgrade", Machine::upgrade))),
        row("getMetadata", Milliseconds, 400, 1.0, metadata, echo),
        row("readFile 1 KiB", Milliseconds, 400, 1.0, |side, ground| read(side, ground, 1 << 10), echo),
        row("readFile 1 KiB, 16 in flight", PerSecond, 4, 4.0, in_flight, None),
        row("readFile 64 KiB", Milliseconds, 100, 2.0, |side, ground| read(side, ground, 64 << 10), None),
        row("readFile 8 MiB", Milliseconds, 12, 4.0, |side, ground| read(side, ground, 8 << 20), None),
        row(
            "writeFile 1 KiB, over an old file",
            Milliseconds,
            200,
            10.0,
            |side, ground| write(side, ground, 1 << 10, &Value::Null),
            Some(("open, write, close", |_machine, ground| Machine::write(ground, 1 << 10))),
        ),
        row(
            "writeFile 1 MiB",
            Milliseconds,
            30,
            2.0,
            |side, ground| write(side, ground, 1 << 20, &Value::Null),
            Some(("open, write, close", |_machine, ground| Machine::write(ground, 1 << 20))),
        ),
        row("readDirectory of 1,000", Milliseconds, 40, 2.0, list, None),
        row("walk of 10,000", Milliseconds, 8, 5.0, walk, None),
        row("readFile 1 KiB, reads restricted", Milliseconds, 40, 150.0, read_restricted, echo),
        row("the same, a policy's first", Milliseconds, 15, 10.0, read_first, None),
        row(
            "writeFile 1 KiB, workspace-write",
            Milliseconds,
            40,
            150.0,
            |side, ground| write(side, ground, 1 << 10, &ground.workspace_write()),
            None,
        ),
        row("the same over 16 connections", PerSecond, 3, 60.0, write_side_by_side, None),
        row("readFile 1 KiB, read-only policy", Milliseconds, 400, 1.0, read_only, echo),
    ]
}

fn connect(side: &mut Side, _ground: &Ground) -> Result<f64, Failure> {
    let begun = Instant::now();
    let wire = Wire::connect(&side.address, side.acks)?;
    let taken = milliseconds(begun);
    wire.cut()?;
    Ok(taken)
}

fn metadata(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    timed(side, "fs/getMetadata", &json!({"path": ground.uri("read-1024")}))
}

fn read(side: &mut Side, ground: &Ground, bytes: usize) -> Result<f64, Failure> {
    timed(side, "fs/readFile", &json!({"path": ground.uri(&format!("read-{bytes}"))}))
}

fn read_restricted(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    timed(side, "fs/readFile", &json!({"path": ground.uri("read-1024"), "sandbox": ground.reads_restricted(0..0)}))
}

fn read_only(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    timed(side, "fs/readFile", &json!({"path": ground.uri("read-1024"), "sandbox": ground.read_only()}))
}

/// Under a policy that this server saw never before.
fn read_first(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed) % PLACES;
    timed(side, "fs/readFile", &json!({"path": ground.uri("read-1024"), "sandbox": ground.reads_restricted(nth..nth + 1)}))
}

fn write(side: &mut Side, ground: &Ground, bytes: usize, sandbox: &Value) -> Result<f64, Failure> {
    let content = STANDARD.encode(vec![b'y'; bytes]);
    let params = json!({"path": ground.uri(&format!("written-{bytes}")), "dataBase64": content, "sandbox": sandbox});
    timed(side, "fs/writeFile", &params)
}

fn list(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    timed(side, "fs/readDirectory", &json!({"path": ground.uri("flat")}))
}

fn walk(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    let options = json!({"maxDepth": 8, "maxDirectories": 10_000, "maxEntries": 50_000,
        "followDirectorySymlinks": false, "pruneHiddenDirectories": false});
    timed(side, "fs/walk", &json!({"path": ground.uri("deep"), "options": options}))
}

fn in_flight(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    let params = json!({"path": ground.uri("read-1024")}).to_string();
    rate(&mut side.wire, "fs/readFile", &params, IN_FLIGHT)
}

fn write_side_by_side(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    let wires: Result<Vec<Wire>, Failure> = (0..CONNECTIONS).map(|_nth| Wire::connect(&side.address, side.acks)).collect();
    let content = STANDARD.encode(vec![b'y'; 1 << 10]);
    let sandbox = ground.workspace_write();
    std::thread::scope(|scope| {
        let threads: Vec<_> = wires?
            .into_iter()
            .enumerate()
            .map(|(nth, mut wire)| {
                let path = ground.uri(&format!("written-by-{nth}"));
                let params = json!({"path": path, "dataBase64": content, "sandbox": sandbox}).to_string();
                scope.spawn(move || {
                    // The first call of a session is another row.
                    wire.call("fs/writeFile", &params).map_err(|error| error.to_string())?;
                    rate(&mut wire, "fs/writeFile", &params, 1).map_err(|error| error.to_string())
                })
            })
            .collect();
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_panic| "a thread panicked")??;
        }
        Ok(sum)
    })
}

/// Calls a second with so many on their way.
pub(super) fn rate(wire: &mut Wire, method: &str, params: &str, in_flight: usize) -> Result<f64, Failure> {
    let begun = Instant::now();
    let mut answered = 0_u32;
    let mut sent = 0;
    while sent < in_flight {
        wire.send(method, params)?;
        sent += 1;
    }
    loop {
        let incoming = wire.receive()?;
        let parts = incoming.parts()?;
        if let Some(error) = parts.error {
            return Err(format!("{method}: {error}").into());
        }
        if parts.id.is_none() {
            continue;
        }
        answered += 1;
        if begun.elapsed() >= COUNTED {
            break;
        }
        wire.send(method, params)?;
    }
    let rate = f64::from(answered) / begun.elapsed().as_secs_f64();
    for _left in 1..in_flight {
        wire.receive()?;
    }
    Ok(rate)
}

/// One call, without what its params cost to make.
pub(super) fn timed(side: &mut Side, method: &str, params: &Value) -> Result<f64, Failure> {
    let params = params.to_string();
    let begun = Instant::now();
    side.wire.call(method, &params)?;
    Ok(milliseconds(begun))
}

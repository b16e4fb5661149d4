//! Much at a time: files by blocks, output, and what a cut costs.

use super::processes::{Event, start};
use super::{Limit, Row, Side, Unit, milliseconds};
use crate::Failure;
use crate::ground::Ground;
use crate::machine::Machine;
use crate::wire::Wire;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::time::{Duration, Instant};

const STREAMED: u64 = 256 << 20;
const FILE: u64 = 8 << 20;
const BLOCK: u64 = 1 << 20;
const BLOCKS_IN_FLIGHT: u64 = 4;
const OUTPUT_MIB: u64 = 512;

pub(super) fn rows() -> Vec<Row> {
    use Unit::{Lost, Megabytes, Milliseconds};
    let row = |name, unit, rounds, target, measure, limit| Row { name, unit, rounds, target, measure, limit };
    let copy = Some(("loopback TCP", Machine::copy as Limit));
    vec![
        row(
            "a file of 256 MiB by blocks of 1 MiB, 4 in flight",
            Megabytes,
            3,
            3.0,
            |side, ground| stream(&mut side.wire, ground, STREAMED),
            copy,
        ),
        row("output of 512 MiB", Megabytes, 2, 3.0, |side, ground| output(&mut side.wire, ground), copy),
        row("readFile 8 MiB, binary", Milliseconds, 12, 4.0, |side, ground| as_bytes(side, ground, file), None),
        row(
            "a file of 256 MiB by blocks of 1 MiB, 4 in flight, binary",
            Megabytes,
            3,
            3.0,
            |side, ground| as_bytes(side, ground, |wire, ground| stream(wire, ground, STREAMED)),
            copy,
        ),
        row("output of 512 MiB, binary", Megabytes, 2, 3.0, |side, ground| as_bytes(side, ground, output), copy),
        row("32 MiB/s for 3 s, 0.7 s of them away", Lost, 1, 0.0, away, None),
    ]
}

/// The same over a connection of its own, where bytes travel as bytes.
fn as_bytes(side: &Side, ground: &Ground, once: fn(&mut Wire, &Ground) -> Result<f64, Failure>) -> Result<f64, Failure> {
    match Wire::connect_binary(&side.address, side.acks)? {
        Some(mut wire) => once(&mut wire, ground),
        None => Ok(f64::NAN),
    }
}

fn file(wire: &mut Wire, ground: &Ground) -> Result<f64, Failure> {
    let params = json!({"path": ground.uri(&format!("read-{FILE}"))}).to_string();
    let begun = Instant::now();
    let incoming = wire.call("fs/readFile", &params)?;
    let taken = milliseconds(begun);
    match incoming.bytes() {
        Some(FILE) => Ok(taken),
        other => Err(format!("of a file of {FILE} bytes {other:?} came as bytes").into()),
    }
}

/// Reads a file by blocks. It is sparse: what the disk does is not looked for.
pub(crate) fn stream(wire: &mut Wire, ground: &Ground, bytes: u64) -> Result<f64, Failure> {
    let path = ground.file(&format!("stream-{bytes}"));
    File::options().create(true).truncate(false).write(true).open(&path)?.set_len(bytes)?;
    let name = wire.name();
    wire.call("fs/open", &json!({"handleId": name, "path": ground.uri(&format!("stream-{bytes}"))}).to_string())?;
    let begun = Instant::now();
    let (mut sent, mut received) = (0, 0);
    while received < bytes {
        while sent < bytes && sent < received + BLOCK * BLOCKS_IN_FLIGHT {
            wire.send("fs/readBlock", &format!(r#"{{"handleId":"{name}","offset":{sent},"len":{BLOCK}}}"#))?;
            sent += BLOCK;
        }
        received += block(wire)?;
    }
    let taken = begun.elapsed();
    wire.call("fs/close", &json!({"handleId": name}).to_string())?;
    Ok(rate(bytes, taken))
}

/// The length of the next block.
fn block(wire: &mut Wire) -> Result<u64, Failure> {
    #[derive(Deserialize)]
    struct Block<'a> {
        chunk: &'a str,
    }
    let incoming = wire.receive()?;
    let parts = incoming.parts()?;
    let result = parts.result.ok_or_else(|| format!("fs/readBlock: {:?}", parts.error.map(ToString::to_string)))?;
    match incoming.bytes() {
        Some(bytes) => Ok(bytes),
        None => Ok(length(serde_json::from_str::<Block<'_>>(result.get())?.chunk)),
    }
}

/// How many bytes base64 stands for.
fn length(chunk: &str) -> u64 {
    let padding = chunk.bytes().rev().take_while(|&letter| letter == b'=').count();
    (chunk.len() / 4 * 3 - padding) as u64
}

fn output(wire: &mut Wire, ground: &Ground) -> Result<f64, Failure> {
    let name = wire.name();
    let argv = ["/bin/dd", "if=/dev/zero", "bs=1M", &format!("count={OUTPUT_MIB}"), "status=none"];
    let begun = Instant::now();
    wire.send("process/start", &start(&name, &argv, ground, &Value::Null, false, false))?;
    let mut seen = 0;
    loop {
        let incoming = wire.receive()?;
        let parts = incoming.parts()?;
        if let Some(error) = parts.error {
            return Err(format!("process/start: {error}").into());
        }
        let (Some(method), Some(params)) = (parts.method, parts.params) else { continue };
        match method {
            "process/output" => {
                let event: Event<'_> = serde_json::from_str(params.get())?;
                seen += incoming.bytes().unwrap_or_else(|| length(event.chunk.unwrap_or_default()));
            }
            "process/closed" => break,
            _ => {}
        }
    }
    if seen != OUTPUT_MIB << 20 {
        return Err(format!("of {} bytes of output {seen} arrived", OUTPUT_MIB << 20).into());
    }
    Ok(rate(seen, begun.elapsed()))
}

fn rate(bytes: u64, taken: Duration) -> f64 {
    bytes as f64 / 1e6 / taken.as_secs_f64()
}

/// A process writes on while its client is away, which then asks for everything behind what it has.
fn away(side: &mut Side, ground: &Ground) -> Result<f64, Failure> {
    const SECONDS: u64 = 3;
    let own = std::env::current_exe()?;
    let name = "writes";
    let argv = [&own.to_string_lossy(), "--emit", "32", "--seconds", &SECONDS.to_string()];
    let mut wire = Wire::connect(&side.address, side.acks)?;
    wire.call("process/start", &start(name, &argv, ground, &Value::Null, false, false))?;
    let mut kept = BTreeMap::new();
    let mut closed = None;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        keep(&mut wire, &mut kept, &mut closed)?;
    }
    let session = wire.session().to_owned();
    wire.cut()?;
    std::thread::sleep(Duration::from_millis(700));
    let mut wire = Wire::resume(&side.address, side.acks, &session)?;
    let mut after = kept.keys().next_back().copied().unwrap_or(0);
    // Behind what was kept, until what is read meets what comes by itself; the rest comes by itself.
    loop {
        let params = json!({"processId": name, "afterSeq": after, "maxBytes": 1 << 20, "waitMs": 1000}).to_string();
        let call = wire.send("process/read", &params)?;
        let (next, is_closed) = answer(&mut wire, call, &mut kept, &mut closed)?;
        let progress = next.saturating_sub(1);
        if progress <= after && (is_closed || closed.is_some()) {
            break;
        }
        after = after.max(progress);
    }
    let arrived: u64 = kept.values().sum();
    Ok((SECONDS * (32 << 20)).saturating_sub(arrived) as f64 / 1e6)
}

/// Takes in what comes next.
fn keep(wire: &mut Wire, kept: &mut BTreeMap<u64, u64>, closed: &mut Option<u64>) -> Result<(), Failure> {
    let incoming = wire.receive()?;
    let parts = incoming.parts()?;
    note(parts.method, parts.params.map(serde_json::value::RawValue::get), kept, closed)
}

fn note(
    method: Option<&str>,
    params: Option<&str>,
    kept: &mut BTreeMap<u64, u64>,
    closed: &mut Option<u64>,
) -> Result<(), Failure> {
    let (Some(method), Some(params)) = (method, params) else { return Ok(()) };
    let event: Event<'_> = serde_json::from_str(params)?;
    match method {
        "process/output" => drop(kept.insert(event.seq, length(event.chunk.unwrap_or_default()))),
        "process/closed" => *closed = Some(event.seq),
        _ => {}
    }
    Ok(())
}

/// Waits for the answer to a read, and keeps what it brings and what comes meanwhile.
fn answer(wire: &mut Wire, call: u64, kept: &mut BTreeMap<u64, u64>, closed: &mut Option<u64>) -> Result<(u64, bool), Failure> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Page<'a> {
        #[serde(borrow)]
        chunks: Vec<Chunk<'a>>,
        next_seq: u64,
        closed: bool,
    }
    #[derive(Deserialize)]
    struct Chunk<'a> {
        seq: u64,
        chunk: &'a str,
    }
    loop {
        let incoming = wire.receive()?;
        let parts = incoming.parts()?;
        if parts.id != Some(call) {
            note(parts.method, parts.params.map(serde_json::value::RawValue::get), kept, closed)?;
            continue;
        }
        let result = parts.result.ok_or_else(|| format!("process/read: {:?}", parts.error.map(ToString::to_string)))?;
        let page: Page<'_> = serde_json::from_str(result.get())?;
        for Chunk { seq, chunk } in &page.chunks {
            kept.insert(*seq, length(chunk));
        }
        return Ok((page.next_seq, page.closed));
    }
}

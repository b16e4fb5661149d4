//! Processes: starts, ends, and small input and output.

use super::{Limit, Row, Side, Unit, milliseconds};
use crate::Failure;
use crate::ground::Ground;
use crate::machine::Machine;
use crate::wire::Wire;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::Instant;

/// Starts at a time.
const AT_ONCE: usize = 100;

pub(super) fn rows() -> Vec<Row> {
    use Unit::{Milliseconds, PerSecond};
    let row = |name, unit, rounds, target, measure, limit| Row { name, unit, rounds, target, measure, limit };
    let spawn = Some(("posix_spawn, wait", Machine::spawn as Limit));
    vec![
        row("true, start to exited", Milliseconds, 60, 20.0, |side, ground| run(side, ground, &Value::Null), spawn),
        row("true, sandboxed", Milliseconds, 40, 20.0, |side, ground| run(side, ground, &ground.workspace_write()), None),
        row("100 starts at once", PerSecond, 3, 5.0, |side, ground| run_many(side, ground, &Value::Null), None),
        row(
            "100 starts at once, sandboxed",
            PerSecond,
            3,
            5.0,
            |side, ground| run_many(side, ground, &ground.workspace_write()),
            None,
        ),
        row("a line through cat", Milliseconds, 30, 100.0, |side, ground| through_cat(side, ground, false), None),
        row("a line through cat, terminal", Milliseconds, 30, 1.0, |side, ground| through_cat(side, ground, true), None),
    ]
}

/// The params of a start.
pub(crate) fn start(name: &str, argv: &[&str], ground: &Ground, sandbox: &Value, tty: bool, stdin: bool) -> String {
    let start = json!({"processId": name, "argv": argv, "cwd": ground.uri(""), "env": {"PATH": "/usr/bin:/bin"},
        "tty": tty, "pipeStdin": stdin, "sandbox": sandbox});
    start.to_string()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Event<'a> {
    pub(crate) process_id: &'a str,
    pub(crate) seq: u64,
    pub(crate) chunk: Option<&'a str>,
    pub(crate) exit_code: Option<i32>,
}

fn run(side: &mut Side, ground: &Ground, sandbox: &Value) -> Result<f64, Failure> {
    let name = side.wire.name();
    let params = start(&name, &["/bin/true"], ground, sandbox, false, false);
    let begun = Instant::now();
    side.wire.send("process/start", &params)?;
    wait(&mut side.wire, "process/exited", &name)?;
    let taken = milliseconds(begun);
    wait(&mut side.wire, "process/closed", &name)?;
    Ok(taken)
}

fn run_many(side: &mut Side, ground: &Ground, sandbox: &Value) -> Result<f64, Failure> {
    let names: Vec<String> = (0..AT_ONCE).map(|_nth| side.wire.name()).collect();
    let mut open: HashSet<&str> = names.iter().map(String::as_str).collect();
    let starts: Vec<String> = names.iter().map(|name| start(name, &["/bin/true"], ground, sandbox, false, false)).collect();
    let begun = Instant::now();
    for start in &starts {
        side.wire.send("process/start", start)?;
    }
    while !open.is_empty() {
        let incoming = side.wire.receive()?;
        let parts = incoming.parts()?;
        if let Some(error) = parts.error {
            return Err(format!("process/start: {error}").into());
        }
        if let (Some("process/closed"), Some(params)) = (parts.method, parts.params) {
            open.remove(serde_json::from_str::<Event<'_>>(params.get())?.process_id);
        }
    }
    Ok(AT_ONCE_RATE / begun.elapsed().as_secs_f64())
}

/// [`AT_ONCE`], to divide.
const AT_ONCE_RATE: f64 = 100.0;

fn through_cat(side: &mut Side, ground: &Ground, tty: bool) -> Result<f64, Failure> {
    let name = side.wire.name();
    side.wire.call("process/start", &start(&name, &["/bin/cat"], ground, &Value::Null, tty, !tty))?;
    let mut last = 0.0;
    // A terminal shows what is typed besides.
    let expect = if tty { "line\r\nline\r\n".len() } else { "line\n".len() };
    for nth in 0..4 {
        let chunk = STANDARD.encode("line\n");
        let write = json!({"processId": name, "chunk": chunk, "writeId": format!("{nth}")}).to_string();
        let begun = Instant::now();
        side.wire.send("process/write", &write)?;
        let mut seen = 0;
        while seen < expect {
            let incoming = side.wire.receive()?;
            let parts = incoming.parts()?;
            if let (Some("process/output"), Some(params)) = (parts.method, parts.params) {
                let event: Event<'_> = serde_json::from_str(params.get())?;
                seen += STANDARD.decode(event.chunk.unwrap_or_default())?.len();
            }
        }
        last = milliseconds(begun);
    }
    side.wire.call("process/terminate", &json!({"processId": name}).to_string())?;
    wait(&mut side.wire, "process/closed", &name)?;
    Ok(last)
}

/// Waits until this is said of a process. An error that is answered meanwhile ends the run, and so does a status that is not 0, but
/// of what was terminated.
pub(crate) fn wait(wire: &mut Wire, method: &str, name: &str) -> Result<(), Failure> {
    loop {
        let incoming = wire.receive()?;
        let parts = incoming.parts()?;
        if let Some(error) = parts.error {
            return Err(format!("waiting for {method}: {error}").into());
        }
        let (Some(found), Some(params)) = (parts.method, parts.params) else { continue };
        let event: Event<'_> = serde_json::from_str(params.get())?;
        if found == "process/exited" && method == found && event.exit_code != Some(0) {
            return Err(format!("the program ended with {:?}", event.exit_code).into());
        }
        if found == method && event.process_id == name {
            return Ok(());
        }
    }
}

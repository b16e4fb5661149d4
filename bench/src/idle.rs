//! What a server holds while nothing happens: memory by session and by process, as the kernel counts it.

use crate::Failure;
use crate::ground::Ground;
use crate::rows::start;
use crate::server::Server;
use crate::wire::{Acks, Wire};
use serde_json::Value;
use std::io::{self, Write as _};

/// A server and its children at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Footprint {
    /// The server's own proportional set, in KiB: what it shares is divided among who shares it.
    server: u64,
    /// That of everything below it.
    children: u64,
    /// Processes below it.
    processes: u64,
}

/// Prints what sessions and processes add to each server.
pub(crate) fn run(servers: &[Server], grounds: &[Ground], count: u32) -> Result<(), Failure> {
    let mut out = io::stdout();
    writeln!(out, "| each of {count}, idle | server, kB | its children, kB | OS processes |")?;
    writeln!(out, "|---|---|---|---|")?;
    for (server, ground) in servers.iter().zip(grounds) {
        let pid = server.pid.ok_or("what a server holds is asked of its own process: give a command")?;
        let mut before = settled(pid)?;
        let mut wires = Vec::new();
        for name in ["the first session", "a session, attached"] {
            let many = if wires.is_empty() { 1 } else { count };
            for _one in 0..many {
                wires.push(Wire::connect(&server.address, Acks::Ordinary)?);
            }
            before = row(&mut out, &server.name, name, before, pid, many)?;
        }
        for (name, sandbox) in [("a process", Value::Null), ("a sandboxed process", ground.workspace_write())] {
            let wire = wires.first_mut().ok_or("no connection")?;
            for nth in 0..=count {
                if nth == 1 {
                    // The first brings what is made once.
                    before = settled(pid)?;
                }
                let start = start(&format!("{nth} {name}"), &["/bin/sleep", "600"], ground, &sandbox, false, false);
                wire.call("process/start", &start)?;
            }
            before = row(&mut out, &server.name, name, before, pid, count)?;
        }
        for wire in wires {
            wire.cut()?;
        }
    }
    Ok(())
}

fn row(
    out: &mut impl io::Write,
    server: &str,
    name: &str,
    before: Footprint,
    pid: u32,
    count: u32,
) -> Result<Footprint, Failure> {
    let after = settled(pid)?;
    let each = |before: u64, after: u64| format!("{:.1}", (after as f64 - before as f64) / f64::from(count));
    let (own, children) = (each(before.server, after.server), each(before.children, after.children));
    writeln!(out, "| {server}: {name} | {own} | {children} | {} |", each(before.processes, after.processes))?;
    Ok(after)
}

/// The footprint once it does not change any more.
fn settled(pid: u32) -> Result<Footprint, Failure> {
    let mut last = footprint(pid)?;
    for _try in 0..50 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = footprint(pid)?;
        if now.server.abs_diff(last.server) < 8 && now.processes == last.processes {
            return Ok(now);
        }
        last = now;
    }
    Ok(last)
}

fn footprint(pid: u32) -> Result<Footprint, Failure> {
    let mut sum = Footprint { server: proportional(pid)?, ..Footprint::default() };
    let mut below = children(pid);
    while let Some(child) = below.pop() {
        sum.processes += 1;
        // One that ends meanwhile holds nothing.
        sum.children += proportional(child).unwrap_or(0);
        below.extend(children(child));
    }
    Ok(sum)
}

/// KiB that a process and all below it hold; what they share with others is divided among them.
pub(crate) fn held(pid: u32) -> Result<u64, Failure> {
    let Footprint { server, children, .. } = footprint(pid)?;
    Ok(server + children)
}

pub(crate) fn proportional(pid: u32) -> Result<u64, Failure> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).ok_or("no Pss in smaps_rollup")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|child| child.parse().ok()).collect::<Vec<u32>>()).collect()
}

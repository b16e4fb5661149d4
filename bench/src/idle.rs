//! What a server holds while nothing happens: memory by session and by process, as the kernel counts it.

use crate::{connect, sandbox};
use portcullis_client::{ExecServerClient, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::Path;

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

/// Prints what sessions and processes add to the server of this process id.
pub(crate) async fn run(url: &str, token: Option<Token>, pid: u32, count: u32) -> Result<(), Box<dyn Error>> {
    let place = tempfile::Builder::new().prefix("portcullis-bench-").tempdir_in("/var/tmp")?;
    let mut out = io::stdout();
    let header = ["", "server kB each", "children kB each", "processes each"];
    writeln!(out, "{:<34}{:>16}{:>18}{:>16}", header[0], header[1], header[2], header[3])?;
    let (mut clients, mut tasks) = (Vec::new(), Vec::new());
    let mut before = settled(pid)?;
    for name in ["the first session", "a session, attached"] {
        let many = if clients.is_empty() { 1 } else { count };
        for _one in 0..many {
            let (client, task) = connect(url, token.clone()).await?;
            clients.push(client);
            tasks.push(task);
        }
        before = row(&mut out, name, before, pid, many)?;
    }
    let first = clients.first().cloned().ok_or("no client")?;
    for (name, confined) in [("a plain process", false), ("a process, read-only", true)] {
        start(&first, place.path(), &format!("warm {name}"), confined).await?;
        before = settled(pid)?;
        for nth in 0..count {
            start(&first, place.path(), &format!("{nth} {name}"), confined).await?;
        }
        before = row(&mut out, name, before, pid, count)?;
    }
    drop(clients.drain(1..));
    for task in tasks.drain(1..) {
        task.await?;
    }
    row(&mut out, "a session, detached instead", before, pid, count)?;
    drop((clients, first));
    for task in tasks {
        task.await?;
    }
    Ok(())
}

async fn start(client: &ExecServerClient, place: &Path, id: &str, confined: bool) -> Result<(), Box<dyn Error>> {
    let argv = vec!["/bin/sleep".to_owned(), "600".to_owned()];
    let mut params = StartParams::new(id, argv, WirePath::Local(AbsolutePath::new(place)?));
    if confined {
        params.sandbox = Some(serde_json::value::to_raw_value(&sandbox(place, "root", "read"))?);
    }
    client.start(&params).await?;
    Ok(())
}

fn row(out: &mut impl io::Write, name: &str, before: Footprint, pid: u32, count: u32) -> Result<Footprint, Box<dyn Error>> {
    let after = settled(pid)?;
    let each = |before: u64, after: u64| {
        let (before, after) = (i64::try_from(before).unwrap_or(i64::MAX), i64::try_from(after).unwrap_or(i64::MAX));
        // Tenths, by integers.
        let tenths = (after - before) * 10 / i64::from(count);
        format!("{}{}.{}", if tenths < 0 { "-" } else { "" }, tenths.abs() / 10, tenths.abs() % 10)
    };
    let (server, children) = (each(before.server, after.server), each(before.children, after.children));
    writeln!(out, "{name:<34}{server:>16}{children:>18}{:>16}", each(before.processes, after.processes))?;
    Ok(after)
}

/// The footprint once it does not change any more.
fn settled(pid: u32) -> Result<Footprint, Box<dyn Error>> {
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

fn footprint(pid: u32) -> Result<Footprint, Box<dyn Error>> {
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

pub(crate) fn proportional(pid: u32) -> Result<u64, Box<dyn Error>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).ok_or("no Pss in smaps_rollup")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|child| child.parse().ok()).collect::<Vec<u32>>()).collect()
}

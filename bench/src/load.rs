//! What a server holds under loads that are out of proportion: many connections, calls without end that nobody reads the answers
//! of, many starts. Prints memory and descriptors before, at the height, and after.

use crate::connect;
use crate::idle::proportional;
use clap::Args;
use futures_util::{SinkExt as _, StreamExt as _};
use portcullis_client::{ExecServerClient, ProcessEvent, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use serde_json::{Value, json};
use std::error::Error;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

/// When nothing could be sent for so long, the server takes no more.
const HELD_UP: Duration = Duration::from_secs(2);
/// How long a server may take to let go of what has ended.
const SETTLED: Duration = Duration::from_secs(30);
/// Starts, and connections, that are on their way at a time.
const AT_ONCE: u32 = 64;

/// Loads to put on a server.
#[derive(Debug, Args)]
pub(crate) struct Loads {
    /// Put so many connections on the first server at a time, each with a session of its own.
    #[arg(long, value_name = "N", requires = "pid")]
    connections: Option<u32>,
    /// Send it so many calls on one connection, and read none of the answers before it takes no more. It must ask for no token.
    #[arg(long, value_name = "N", requires = "pid")]
    pipelined: Option<u32>,
    /// Have it start so many processes one after the other, some at a time.
    #[arg(long, value_name = "N", requires = "pid")]
    starts: Option<u32>,
}

impl Loads {
    pub(crate) fn is_empty(&self) -> bool {
        self.connections.or(self.pipelined).or(self.starts).is_none()
    }
}

type Failure = Box<dyn Error>;

/// Prints what each load does to the server of this process id.
pub(crate) async fn run(url: &str, token: Option<Token>, pid: u32, loads: &Loads) -> Result<(), Failure> {
    let mut out = io::stdout();
    // What is made once for whoever comes first is not what is looked for.
    drop_all(vec![connect(url, token.clone()).await?]).await?;
    if let Some(count) = loads.connections {
        let before = Held::by(pid)?;
        let mut clients = Vec::new();
        for _one in 0..count {
            clients.push(connect(url, token.clone()).await?);
        }
        for (client, _task) in &clients {
            client.call::<Value>("environment/status", &json!({})).await?;
        }
        let height = Held::by(pid)?;
        drop_all(clients).await?;
        writeln!(
            out,
            "{count} connections at a time, all of them answered: {before}; then {height}; after {}",
            settled(pid, before).await?
        )?;
    }
    if let Some(count) = loads.pipelined {
        pipelined(&mut out, url, pid, count).await?;
    }
    if let Some(count) = loads.starts {
        let (client, task) = connect(url, token).await?;
        let before = Held::by(pid)?;
        let (begun, mut height) = (Instant::now(), before);
        let mut started = 0;
        while started < count {
            let many = AT_ONCE.min(count - started);
            let runs = (0..many).map(|nth| run_true(&client, started + nth));
            for ended in futures_util::future::join_all(runs).await {
                ended?;
            }
            started += many;
            height = height.max(Held::by(pid)?);
        }
        let took = begun.elapsed();
        drop_all(vec![(client, task)]).await?;
        writeln!(
            out,
            "{count} starts in {:.1} s: {before}; then {height}; after {}",
            took.as_secs_f64(),
            settled(pid, before).await?
        )?;
    }
    Ok(())
}

async fn run_true(client: &ExecServerClient, nth: u32) -> Result<(), Failure> {
    let params = StartParams::new(nth.to_string(), vec!["/bin/true".to_owned()], WirePath::Local(AbsolutePath::new("/")?));
    let mut process = client.start(&params).await?;
    while let Some(event) = process.event().await {
        if let ProcessEvent::Exited { code, .. } = event
            && code != 0
        {
            return Err(format!("process {nth} ended with {code}").into());
        }
    }
    Ok(())
}

async fn pipelined(out: &mut impl io::Write, url: &str, pid: u32, count: u32) -> Result<(), Failure> {
    let (mut sink, mut stream) = tokio_tungstenite::connect_async(url).await?.0.split();
    for hello in [json!({"id": 0, "method": "initialize", "params": {"clientName": "load"}}), json!({"method": "initialized"})] {
        sink.send(Message::text(hello.to_string())).await?;
    }
    let _initialized = stream.next().await.ok_or("the server closed the connection")??;
    let before = Held::by(pid)?;
    let path = json!({"path": "file:///"});
    let call = |id: u32| Message::text(json!({"id": id, "method": "fs/getMetadata", "params": path}).to_string());
    let mut sent = 0;
    while sent < count && timeout(HELD_UP, sink.feed(call(sent + 1))).await.is_ok_and(|fed| fed.is_ok()) {
        sent += 1;
    }
    let (held_up_at, height) = (sent, Held::by(pid)?);
    // From here on somebody reads, and everything is answered.
    let mut answered = 0;
    let begun = Instant::now();
    let write = async {
        while sent < count {
            sink.feed(call(sent + 1)).await?;
            sent += 1;
        }
        sink.flush().await
    };
    let read = async {
        while answered < count
            && let Some(Ok(message)) = stream.next().await
        {
            answered += u32::from(message.is_text());
        }
    };
    let (written, ()) = tokio::join!(write, read);
    written?;
    let took = begun.elapsed();
    drop((sink, stream));
    let after = settled(pid, before).await?;
    writeln!(
        out,
        "{count} pipelined calls: {before}; held up after {held_up_at} that nobody read: {height}; read then, {answered} answers in {:.1} s; after {after}",
        took.as_secs_f64()
    )?;
    Ok(())
}

async fn drop_all(clients: Vec<(ExecServerClient, tokio::task::JoinHandle<()>)>) -> Result<(), Failure> {
    let (clients, tasks): (Vec<_>, Vec<_>) = clients.into_iter().unzip();
    drop(clients);
    for task in tasks {
        task.await?;
    }
    Ok(())
}

/// What the server holds once its descriptors are as few as before, or no fewer after a while.
async fn settled(pid: u32, before: Held) -> Result<Held, Failure> {
    let until = Instant::now() + SETTLED;
    loop {
        let now = Held::by(pid)?;
        if now.descriptors <= before.descriptors || Instant::now() > until {
            return Ok(now);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What a server holds at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    /// Its own proportional set, in KiB.
    memory: u64,
    descriptors: usize,
}

impl Held {
    fn by(pid: u32) -> Result<Self, Failure> {
        Ok(Self { memory: proportional(pid)?, descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() })
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} MiB, {} descriptors",
            f64::from(u32::try_from(self.memory).unwrap_or(u32::MAX)) / 1024.0,
            self.descriptors
        )
    }
}

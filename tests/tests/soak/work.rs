//! What clients do meanwhile, each job checking that nothing of it is lost or doubled.

use portcullis_client::{ExecServerClient, ExecServerError, Process, ProcessEvent};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::{StartParams, WriteStatus};
use portcullis_tests::PATIENCE;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::{Instant, timeout};

/// Bytes of one numbered line.
const LINE: usize = 64;

/// Kinds of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Numbered lines, about 1 KiB a second.
    Slow,
    /// About 1 MiB a second.
    Middle,
    /// About 32 MiB a second.
    Fast,
    /// What is written comes back.
    Echo,
    /// The same through a terminal.
    Terminal,
    /// Many short processes, each started once.
    Starts,
    /// Changes of files, each done once.
    Changes,
}

impl Kind {
    pub(crate) const ALL: [Self; 7] =
        [Self::Slow, Self::Middle, Self::Fast, Self::Echo, Self::Terminal, Self::Starts, Self::Changes];
}

/// What was counted, of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    processes: AtomicU64,
    bytes: AtomicU64,
    events: AtomicU64,
    writes: AtomicU64,
    starts: AtomicU64,
    changes: AtomicU64,
    lost: AtomicU64,
    doubled: AtomicU64,
}

impl Counts {
    /// Nothing may be lost or doubled.
    pub(crate) fn check_whole(&self) {
        for (name, count) in [("lost", &self.lost), ("doubled", &self.doubled)] {
            assert_eq!(count.load(Ordering::Relaxed), 0, "{name}: {self}");
        }
    }

    /// The same, and something must have been done of everything.
    pub(crate) fn check(&self) {
        self.check_whole();
        for (name, count) in
            [("bytes", &self.bytes), ("writes", &self.writes), ("starts", &self.starts), ("changes", &self.changes)]
        {
            assert_ne!(count.load(Ordering::Relaxed), 0, "{name}: {self}");
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        write!(
            f,
            "{} processes, {} bytes in {} events, {} writes, {} starts and {} changes counted one by one: {} lost, {} doubled",
            read(&self.processes),
            read(&self.bytes),
            read(&self.events),
            read(&self.writes),
            read(&self.starts),
            read(&self.changes),
            read(&self.lost),
            read(&self.doubled)
        )
    }
}

/// One that does a kind of job again and again.
pub(crate) struct Worker {
    pub(crate) client: ExecServerClient,
    pub(crate) directory: PathBuf,
    pub(crate) name: String,
    pub(crate) counts: Arc<Counts>,
}

/// Writes so many numbered lines, so many at a time, and waits between.
const WRITER: &str = "
import sys, time, os
lines, at_a_time, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for first in range(0, lines, at_a_time):
    data = b''.join(b'%063d\\n' % n for n in range(first, min(first + at_a_time, lines)))
    while data: data = data[os.write(1, data):]
    time.sleep(pause)
";

impl Worker {
    /// Begins jobs until the deadline; the last one is finished.
    pub(crate) async fn run(self, kind: Kind, deadline: Instant) {
        let mut nth = 0;
        while Instant::now() < deadline {
            nth += 1;
            let id = format!("{}-{nth}", self.name);
            match kind {
                Kind::Slow => self.lines(&id, 48, 1, 0.06).await,
                Kind::Middle => self.lines(&id, 16_384, 1024, 0.06).await,
                Kind::Fast => self.lines(&id, 262_144, 8192, 0.015).await,
                Kind::Echo => self.echo(&id, &["cat"], false).await,
                Kind::Terminal => self.echo(&id, &["sh", "-c", "stty raw -echo; echo ready; exec head -c 65536"], true).await,
                Kind::Starts => self.starts(&id).await,
                Kind::Changes => self.changes(&id).await,
            }
        }
    }

    async fn lines(&self, id: &str, lines: u64, at_a_time: u64, pause: f64) {
        let words = [lines.to_string(), at_a_time.to_string(), pause.to_string()];
        let argv = ["python3", "-c", WRITER, &words[0], &words[1], &words[2]];
        let mut process = self.start(id, &argv, |_params| {}).await;
        let output = self.whole(&mut process).await;
        assert_eq!(output.len() as u64, lines * LINE as u64, "{id}: every byte comes, once");
        for (nth, line) in output.chunks(LINE).enumerate() {
            assert_eq!(line, format!("{nth:063}\n").as_bytes(), "{id}");
        }
    }

    /// One process that writes numbered lines at this rate for so long, and all of them come. Answers their bytes.
    pub(crate) async fn flood(&self, seconds: u64, rate: u64) -> u64 {
        const A_SECOND: u64 = 64;
        let lines = seconds * rate / LINE as u64;
        self.lines(&self.name, lines, rate / LINE as u64 / A_SECOND, 0.9 / A_SECOND as f64).await;
        lines * LINE as u64
    }

    async fn echo(&self, id: &str, argv: &[&str], tty: bool) {
        let mut process = self
            .start(id, argv, |params| {
                params.tty = tty;
                params.pipe_stdin = !tty;
            })
            .await;
        let mut input = process.take_input().unwrap();
        let sent: Vec<u8> = (0..1024).flat_map(|nth| format!("{nth:063}\n").into_bytes()).collect();
        if tty {
            // Only then does the terminal pass everything on as it is.
            let mut ready = Vec::new();
            while !ready.ends_with(b"\n") {
                match process.event().await {
                    Some(ProcessEvent::Output { chunk, .. }) => ready.extend(chunk),
                    other => panic!("{id}: {other:?} before it was ready"),
                }
            }
        }
        let writing = async {
            for piece in sent.chunks(4096) {
                let status = input.write(piece.to_vec()).await.unwrap();
                assert_eq!(status, WriteStatus::Accepted, "{id}");
                self.counts.writes.fetch_add(1, Ordering::Relaxed);
            }
            if !tty {
                input.close().await.unwrap();
            }
        };
        let (output, ()) = tokio::join!(self.whole(&mut process), writing);
        assert!(output == sent, "{id}: {} bytes came back of {}", output.len(), sent.len());
    }

    /// Each process leaves one line; a start that was carried out twice would leave two, and one that was not carried out no file.
    async fn starts(&self, id: &str) {
        let file = format!("{id}.starts");
        let script = format!("echo x >>{file}");
        let mut process = self.start(id, &["sh", "-c", &script], |_params| {}).await;
        self.whole(&mut process).await;
        let path = self.directory.join(file);
        match std::fs::read_to_string(&path).unwrap_or_default().as_str() {
            "x\n" => std::fs::remove_file(path).unwrap(),
            "" => drop(self.counts.lost.fetch_add(1, Ordering::Relaxed)),
            _more => drop(self.counts.doubled.fetch_add(1, Ordering::Relaxed)),
        }
        self.counts.starts.fetch_add(1, Ordering::Relaxed);
    }

    /// Each of these fails if it is done a second time.
    async fn changes(&self, id: &str) {
        let path = |name: &str| WirePath::Local(AbsolutePath::new(self.directory.join(format!("{id}.{name}"))).unwrap());
        self.client.create_directory(&path("directory"), false, None).await.unwrap_or_else(|error| panic!("{id}: {error}"));
        self.client.write_file(&path("file"), id.as_bytes().to_vec(), None).await.unwrap();
        let content = loop {
            match self.client.read_file(&path("file"), None).await {
                // A read changes nothing, so it is for the caller to ask again.
                Err(ExecServerError::Disconnected(_)) => {}
                content => break content.unwrap(),
            }
        };
        assert_eq!(content, id.as_bytes(), "{id}");
        for name in ["file", "directory"] {
            self.client.remove(&path(name), true, false, None).await.unwrap_or_else(|error| panic!("{id}: {error}"));
        }
        self.counts.changes.fetch_add(4, Ordering::Relaxed);
    }

    async fn start(&self, id: &str, argv: &[&str], change: impl FnOnce(&mut StartParams)) -> Process {
        let cwd = WirePath::Local(AbsolutePath::new(&self.directory).unwrap());
        let mut params = StartParams::new(id, argv.iter().map(|word| (*word).to_owned()).collect(), cwd);
        params.env.insert("PATH".to_owned(), "/usr/bin:/bin".to_owned());
        change(&mut params);
        let process = self.client.start(&params).await.unwrap_or_else(|error| panic!("{id}: {error}"));
        self.counts.processes.fetch_add(1, Ordering::Relaxed);
        process
    }

    /// All output of a process until its close, while every event is counted.
    async fn whole(&self, process: &mut Process) -> Vec<u8> {
        let (mut output, mut last, mut code) = (Vec::new(), None, None);
        loop {
            let event = match timeout(PATIENCE, process.event()).await {
                Ok(event) => event.unwrap_or_else(|| panic!("{}: no end", process.id())),
                Err(_elapsed) => {
                    let known = self.client.fail_fast().processes().await;
                    panic!(
                        "{}: nothing after {last:?}, {:?}, while the server knows {known:#?}",
                        process.id(),
                        self.client.status()
                    )
                }
            };
            self.counts.events.fetch_add(1, Ordering::Relaxed);
            let seq = event.last_seq().unwrap_or_else(|| panic!("{}: {event:?}", process.id()));
            if let Some(last) = last {
                match seq {
                    seq if seq == last + 1 => {}
                    seq if seq <= last => drop(self.counts.doubled.fetch_add(1, Ordering::Relaxed)),
                    _hole => drop(self.counts.lost.fetch_add(1, Ordering::Relaxed)),
                }
            }
            last = Some(seq);
            match event {
                ProcessEvent::Output { chunk, .. } => {
                    self.counts.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    output.extend(chunk);
                }
                ProcessEvent::Exited { code: status, .. } => code = Some(status),
                ProcessEvent::Closed { .. } => break,
                ProcessEvent::Gap { .. } | ProcessEvent::Failed { .. } => panic!("{}: {event:?}", process.id()),
            }
        }
        assert_eq!(code, Some(0), "{}", process.id());
        output
    }
}

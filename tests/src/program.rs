//! The real program.

use crate::PATIENCE;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// A server that asks for no credential: most tests are not about that.
const OPEN: [&str; 2] = ["serve", "--insecure-no-auth"];

/// An executable that was built beside the running test.
///
/// # Panics
/// It is missing: `cargo test --workspace` builds it.
#[must_use]
pub fn executable(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the system says which test runs");
    let folder = test.ancestors().find(|folder| folder.join(name).is_file());
    folder
        .map(|folder| folder.join(name))
        .unwrap_or_else(|| panic!("`{name}` is not beside {}: run `cargo test --workspace`, which builds it", test.display()))
}

/// The `portcullis` program with arguments, in an environment of the test's choice.
#[must_use]
pub fn portcullis(arguments: &[&str]) -> Command {
    portcullis_at(&executable("portcullis"), arguments)
}

/// The same from a copy of its executable.
#[must_use]
pub fn portcullis_at(executable: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(executable);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env("HOME", home());
    command
}

/// A program on a machine that offers less: `portcullis-without` takes the `things` away first.
#[must_use]
pub fn without(things: &[&str], program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(executable("portcullis-without"));
    command.args(things).arg("--").arg(program).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env("HOME", home());
    command
}

/// The home of every server under test, beside the program: tokens and records of this user's own servers stay as they are.
fn home() -> PathBuf {
    let home = executable("portcullis").with_file_name("home-of-tests");
    std::fs::create_dir_all(&home).expect("make the home of servers under test");
    home
}

/// A running program with its output.
#[derive(Debug)]
pub struct Program {
    /// The child; killed when dropped.
    pub child: Child,
    /// Lines of its standard output.
    pub stdout: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Starts it.
    ///
    /// # Panics
    /// The system refuses.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        let mut child = command.spawn().expect("start the program");
        let stdout = child.stdout.take().expect("standard output is piped");
        Self { child, stdout: BufReader::new(stdout).lines() }
    }

    /// The next line of its standard output.
    ///
    /// # Panics
    /// There is none.
    pub async fn line(&mut self) -> String {
        let line = timeout(PATIENCE, self.stdout.next_line()).await.expect("a line in time").expect("readable output");
        match line {
            Some(line) => line,
            None => panic!("the program ended: {}", self.stderr().await),
        }
    }

    /// Its standard input, to write to or to close.
    ///
    /// # Panics
    /// It was taken before, or is not piped.
    pub fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("standard input is piped")
    }

    /// All of its standard error.
    pub async fn stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _unreadable = stderr.read_to_string(&mut text).await;
        }
        text
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// It ended before.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("the program runs"), signal).expect("send the signal");
    }

    /// Waits for its end and answers its status: the code, or 128 + the signal.
    ///
    /// # Panics
    /// It does not end.
    pub async fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt as _;
        let status = timeout(PATIENCE, self.child.wait()).await.expect("an end in time").expect("a status");
        status.code().or_else(|| status.signal().map(|signal| 128 + signal)).expect("a code or a signal")
    }
}

/// `portcullis serve` on loopback.
#[derive(Debug)]
pub struct Server {
    /// The program.
    pub program: Program,
    /// Where it listens.
    pub url: String,
}

impl Server {
    /// Starts one that can hold every policy it accepts.
    pub async fn start() -> Self {
        Self::with(portcullis(&OPEN)).await
    }

    /// Starts one with more arguments.
    pub async fn with_arguments(arguments: &[&str]) -> Self {
        Self::with(portcullis(&[&OPEN, arguments].concat())).await
    }

    /// Starts one with more arguments on a machine that offers less.
    pub async fn without(things: &[&str], arguments: &[&str]) -> Self {
        Self::with(without(things, &executable("portcullis"), &[&OPEN, arguments].concat())).await
    }

    /// Starts one from a command of the test's choice.
    pub async fn with(command: Command) -> Self {
        let mut program = Program::start(command);
        let url = program.line().await;
        Self { program, url }
    }
}

/// A process that a test watches, by a descriptor that no other process can take over.
#[derive(Debug)]
pub struct Watched(std::os::fd::OwnedFd);

impl Watched {
    /// Begins to watch a process that runs.
    ///
    /// # Panics
    /// It does not run.
    #[must_use]
    pub fn new(pid: i32) -> Self {
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        Self(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("the process runs"))
    }

    /// The same of a process that may have ended; none if it has.
    #[must_use]
    pub fn if_running(pid: i32) -> Option<Self> {
        let pid = rustix::process::Pid::from_raw(pid)?;
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok().map(Self)
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// It does not end.
    pub async fn ended(self) {
        let waited = tokio::task::spawn_blocking(move || {
            let mut watched = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
            let patience = rustix::event::Timespec::try_from(PATIENCE).expect("a short time");
            loop {
                match rustix::event::poll(&mut watched, Some(&patience)) {
                    Err(rustix::io::Errno::INTR) => {}
                    ready => break ready.expect("poll"),
                }
            }
        });
        assert_eq!(waited.await.expect("no panic"), 1, "it still runs");
    }
}

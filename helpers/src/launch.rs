//! The launcher: a forked, single-threaded child on its way from the spawner to a client's program.
//!
//! It never runs the client's command before it is confined, and does not even decode it: program, arguments, environment
//! and working directory are looked at by a process that can do no more than the program itself.

use crate::dispatch::complain;
use crate::sys;
use portcullis_protocol::helper::{
    BUILD, CONTROL_DESCRIPTOR, Command, Enforced, HIDDEN_FLAG, Role, Step, StepFailed, decode, encode,
};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::enforce::{self, Choices};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Where the C library searches when the environment has no PATH.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// What runs a file that has no `#!` line and is no program, as `execvp` does.
const SHELL: &str = "/bin/sh";

/// Status of a launcher that could not execute anything; nobody sees it, for the failure itself is reported.
const EXIT_FAILED: i32 = 127;

/// What a launcher is to start.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) tty: bool,
    pub(crate) policy: Option<Bytes>,
    pub(crate) allow_unprotected: bool,
    pub(crate) command: Bytes,
    /// Standard input, output and error; with a tty the one terminal.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// What a launcher writes into its result pipe. The pipe's end without more after the first is success.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// `execve` comes next.
    AboutToExec(Enforced),
    /// It ends.
    Failed(StepFailed),
}

/// Goes all the way in a forked child.
pub(crate) fn process(order: Order, result: &OwnedFd, spawner: Pid) -> ! {
    // A panic must not unwind into the spawner's frames, of which this child has a copy.
    let ended = catch_unwind(AssertUnwindSafe(|| steps(order, result.as_fd(), spawner)));
    let failure = match ended {
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the launcher panicked", None),
    };
    report(result.as_fd(), &Report::Failed(failure));
    sys::end(EXIT_FAILED)
}

/// No value, for a way that ends in `execve` or in a failure.
enum Never {}

fn steps(order: Order, result: BorrowedFd<'_>, spawner: Pid) -> Result<Never, StepFailed> {
    // From here on the numbers of the received descriptors are reused; their owners must not close them again.
    let descriptors: Vec<RawFd> = order.descriptors.into_iter().map(std::os::fd::IntoRawFd::into_raw_fd).collect();

    // Die with the spawner. It has one thread, so this cannot fire because some thread of it ended.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(machine("tie the process to its spawner"))?;
    if rustix::process::getppid() != Some(spawner) {
        return Err(failed(Step::Machine, "start: the spawner is gone", Some(Errno::SRCH)));
    }

    // No signal is blocked or ignored in a program that a shell would start.
    sys::default_signals();

    // A session and a process group of its own.
    rustix::process::setsid().map_err(machine("start a session"))?;

    // The terminal controls the session.
    if order.tty {
        take_terminal(descriptors[0])?;
    }

    // Standard descriptors, and nothing else but the result pipe, which closes at execve.
    let sources = if order.tty { [descriptors[0]; 3] } else { [descriptors[0], descriptors[1], descriptors[2]] };
    for (number, from) in (0..).zip(sources) {
        sys::place(from, number).map_err(system(Step::Machine, "place the standard descriptors"))?;
    }
    close_others(result.as_raw_fd())?;

    // Confinement, before anything of the command is decoded.
    let enforced = confine(order.policy.as_ref(), Choices { allow_unprotected: order.allow_unprotected, tty: order.tty })?;

    // Only now the client's words.
    let command: Command =
        decode(&order.command.0).map_err(|error| failed(Step::Frame, &format!("decode the command: {error}"), None))?;
    let program = Program::new(&command)?;
    rustix::process::chdir(command.cwd.as_path()).map_err(execute(format!("change to directory `{}`", command.cwd)))?;
    report(result, &Report::AboutToExec(enforced));
    Err(program.execute())
}

fn take_terminal(number: RawFd) -> Result<(), StepFailed> {
    let fail = system(Step::Execute, "make the terminal control the process");
    // A copy that is closed at execve at the latest, because the number itself is about to be reused.
    let terminal = sys::take(number).ok_or_else(|| fail(io::Error::from_raw_os_error(libc::EBADF)))?;
    let taken = rustix::process::ioctl_tiocsctty(&terminal);
    std::mem::forget(terminal);
    taken.map_err(|errno| fail(errno.into()))
}

fn close_others(result: RawFd) -> Result<(), StepFailed> {
    let fail = || system(Step::Machine, "close the descriptors of the spawner");
    let result = u32::try_from(result).map_err(|_| fail()(io::Error::from_raw_os_error(libc::EBADF)))?;
    sys::close_range(3, result.saturating_sub(1)).map_err(fail())?;
    sys::close_range(result + 1, u32::MAX).map_err(fail())
}

fn confine(policy: Option<&Bytes>, choices: Choices) -> Result<Enforced, StepFailed> {
    let Some(Bytes(policy)) = policy else {
        return Ok(Enforced::default());
    };
    let policy = Policy::decode(policy).map_err(|error| failed(Step::Frame, &format!("decode the policy: {error}"), None))?;
    let roots = Roots::open(&policy)?;
    Ok(enforce::process(&policy, &roots, choices)?)
}

/// Becomes a worker: this executable again, with nothing but its sockets and the error stream.
pub(crate) fn worker(program: &CString, stdio: &OwnedFd, control: &OwnedFd, spawner: Pid) -> ! {
    let failure = match prepare_worker(stdio, control, spawner) {
        Ok(()) => {
            let argv: Vec<CString> = [HIDDEN_FLAG, Role::Worker.name(), BUILD]
                .into_iter()
                .map(|text| CString::new(text).unwrap_or_default())
                .collect();
            let argv = [vec![program.clone()], argv].concat();
            // The link leads to the running file itself, also after it was replaced or removed in place.
            sys::execve(c"/proc/self/exe", &argv, &[])
        }
        Err(error) => error,
    };
    complain(format_args!("start a worker: {failure}"));
    sys::end(EXIT_FAILED)
}

fn prepare_worker(stdio: &OwnedFd, control: &OwnedFd, spawner: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(spawner) {
        sys::end(EXIT_FAILED);
    }
    sys::default_signals();
    rustix::process::chdir("/")?;
    // Copies out of the way first: the numbers may be among those that are about to be overwritten.
    let stdio = rustix::io::fcntl_dupfd_cloexec(stdio, CONTROL_DESCRIPTOR + 1)?;
    let control = rustix::io::fcntl_dupfd_cloexec(control, CONTROL_DESCRIPTOR + 1)?;
    let (stdio, control) = (std::mem::ManuallyDrop::new(stdio), std::mem::ManuallyDrop::new(control));
    sys::place(stdio.as_raw_fd(), 0)?;
    sys::place(stdio.as_raw_fd(), 1)?;
    sys::place(control.as_raw_fd(), CONTROL_DESCRIPTOR)?;
    sys::close_range(4, u32::MAX)
}

/// A command line in the form that `execve` takes.
struct Program {
    name: Vec<u8>,
    argv: Vec<CString>,
    env: Vec<CString>,
    search: Vec<u8>,
}

impl Program {
    fn new(command: &Command) -> Result<Self, StepFailed> {
        let name = match command.argv.first() {
            Some(Bytes(name)) if !name.is_empty() => name.clone(),
            _empty => return Err(failed(Step::Execute, "missing program", None)),
        };
        // The gateway refuses NUL bytes with the texts that clients know; this is the same check where it matters.
        let text = |bytes: &[u8]| {
            CString::new(bytes).map_err(|_nul| failed(Step::Execute, "nul byte found in provided data", Some(Errno::INVAL)))
        };
        let mut argv = command.argv.iter().map(|Bytes(argument)| text(argument)).collect::<Result<Vec<_>, _>>()?;
        if let Some(Bytes(arg0)) = &command.arg0 {
            argv[0] = text(arg0)?;
        }
        let pair = |(Bytes(name), Bytes(value)): &(Bytes, Bytes)| text(&[name, b"=".as_slice(), value].concat());
        let env = command.env.iter().map(pair).collect::<Result<_, _>>()?;
        let search = command.env.iter().find(|(Bytes(name), _)| name == b"PATH");
        let search = search.map_or(DEFAULT_PATH, |(_, Bytes(value))| value).to_vec();
        Ok(Self { name, argv, env, search })
    }

    /// Executes the program, found as `execvp` finds it. Returns only with a failure.
    fn execute(&self) -> StepFailed {
        if self.name.contains(&b'/') {
            return self.failure(self.try_file(&self.name));
        }
        let mut denied = None;
        for folder in self.search.split(|byte| *byte == b':') {
            // An empty folder means the working directory.
            let file = if folder.is_empty() { self.name.clone() } else { [folder, b"/", &self.name].concat() };
            let error = self.try_file(&file);
            match error.raw_os_error() {
                // Not here; maybe in the next one.
                Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT) => {}
                // A later folder may have one that may be executed; if none does, this is the answer.
                Some(libc::EACCES) => denied = Some(error),
                _final => return self.failure(error),
            }
        }
        self.failure(denied.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENOENT)))
    }

    fn try_file(&self, file: &[u8]) -> io::Error {
        let Ok(path) = CString::new(file) else {
            return io::Error::from_raw_os_error(libc::EINVAL);
        };
        let error = sys::execve(&path, &self.argv, &self.env);
        if error.raw_os_error() != Some(libc::ENOEXEC) {
            return error;
        }
        // A script without a `#!` line: the shell is to read it.
        let Ok(shell) = CString::new(SHELL) else {
            return error;
        };
        let argv: Vec<CString> = [shell.clone(), path].into_iter().chain(self.argv.iter().skip(1).cloned()).collect();
        sys::execve(&shell, &argv, &self.env)
    }

    fn failure(&self, error: io::Error) -> StepFailed {
        let name = Path::new(OsStr::from_bytes(&self.name)).display().to_string();
        system(Step::Execute, &format!("start `{name}`"))(error)
    }
}

fn report(result: BorrowedFd<'_>, report: &Report) {
    // Neither part can be lost: a report is far smaller than its bound, and than the empty pipe it is written to. If the
    // spawner is gone, so is this process.
    if let Ok(bytes) = encode(report, b"", 0) {
        let _gone = rustix::io::write(result, &bytes);
    }
}

/// A failure, with the system's number if the system had a say in it.
pub(crate) fn failed(step: Step, attempt: &str, errno: Option<Errno>) -> StepFailed {
    StepFailed { step, attempt: attempt.to_owned(), errno: errno.map_or(0, Errno::raw_os_error), denial: None }
}

fn machine(attempt: &'static str) -> impl Fn(Errno) -> StepFailed {
    move |errno| failed(Step::Machine, attempt, Some(errno))
}

fn execute(attempt: String) -> impl Fn(Errno) -> StepFailed {
    move |errno| failed(Step::Execute, &attempt, Some(errno))
}

fn system(step: Step, attempt: &str) -> impl Fn(io::Error) -> StepFailed {
    let attempt = attempt.to_owned();
    move |error| StepFailed { step, attempt: attempt.clone(), errno: error.raw_os_error().unwrap_or(0), denial: None }
}

//! The launcher: a forked, single-threaded child of the spawner or a keeper that becomes a client's program.
//!
//! Before it is confined it neither runs nor decodes the client's command: the process that reads program, arguments, environment
//! and working directory can do no more than the program itself.

use crate::closing::{self, Witness};
use crate::dispatch::complain;
use crate::frames::send_all;
use crate::limit::Limits;
use crate::program::Program;
use crate::sys;
use crate::walk::{Stop, walk};
use portcullis_protocol::denial::{Denial, Layer, SuggestedEntry, Wanted};
use portcullis_protocol::helper::{
    BUILD, CONTROL_DESCRIPTOR, Command, Enforced, HIDDEN_FLAG, Role, Step, StepFailed, decode, encode,
};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::enforce::{self, Choices, EnforceError, Own};
use portcullis_sandbox::mounts::RecordsAt;
use portcullis_sandbox::namespaces;
use portcullis_sandbox::observe;
use portcullis_sandbox::policy::{Access, Policy};
use portcullis_sandbox::roots::Roots;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, geteuid};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Exit status of a launcher that could not execute the program. It is never shown, because the failure itself is reported.
const EXIT_FAILED: i32 = 127;

/// A start that a launcher carries out.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) session: String,
    pub(crate) tty: bool,
    pub(crate) policy: Option<Bytes>,
    pub(crate) allow_unprotected: bool,
    pub(crate) command: Bytes,
    /// The policy restricts files, so the process gets its own view where the machine allows one.
    pub(crate) own_view: bool,
    /// The process also gets its own network.
    pub(crate) own_network: bool,
    /// The process also gets its own user id, if the server has a range of them.
    pub(crate) own_uid: bool,
    /// Where mount points made on the machine are recorded.
    pub(crate) records: Option<RecordsAt>,
    pub(crate) limits: Limits,
    /// Standard input, output and error; with a tty, only the terminal.
    #[serde(skip)]
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Order {
    /// The number of its standard descriptors.
    pub(crate) fn standard(&self) -> usize {
        if self.tty { 1 } else { 3 }
    }
}

/// A message in the result pipe of a launcher. If the pipe ends after the first message, the start has succeeded.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// `execve` comes next. The text says why the process has the server's user id on the machine although it was to have its own.
    AboutToExec(Enforced, Option<String>),
    /// The launcher ends.
    Failed(StepFailed),
}

/// Confines itself and executes the command, in a child of its keeper.
pub(crate) fn process(order: Order, result: &OwnedFd, keeper: Pid) -> ! {
    // A panic must not unwind into the spawner's frames, of which this child has a copy.
    let ended = catch_unwind(AssertUnwindSafe(|| steps(order, result.as_fd(), keeper)));
    let failure = match ended {
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the launcher panicked", None),
    };
    report_failure(result.as_fd(), failure);
    sys::end(EXIT_FAILED)
}

/// A type without values, for code that ends in `execve` or in a failure.
enum Never {}

fn steps(order: Order, result: BorrowedFd<'_>, keeper: Pid) -> Result<Never, StepFailed> {
    let Order { descriptors, mut limits, tty, policy, allow_unprotected, command, .. } = order;
    // From now on the numbers of the received descriptors are reused, so their owners must not close them again.
    let descriptors: Vec<RawFd> = descriptors.into_iter().map(std::os::fd::IntoRawFd::into_raw_fd).collect();

    // Die with the keeper. The keeper has only one thread, so the signal is sent only when the keeper ends.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(machine("tie the process to its keeper"))?;
    if rustix::process::getppid() != Some(keeper) {
        return Err(failed(Step::Machine, "start: the keeper is gone", Some(Errno::SRCH)));
    }

    limits.enter_groups()?;
    limits.doors.clear();

    // Only the standard descriptors and the result pipe stay open. The pipe closes at execve.
    place_standard(&descriptors, tty)?;
    closing::close_all_but(&[result.as_raw_fd()])?;

    begin_session(tty)?;

    // Confinement, before any part of the command is decoded. The descriptors that the policy needed are closed again.
    let witness = Witness::open()?;
    let choices = Choices { allow_unprotected, tty };
    let confined = policy.as_ref().map(|policy| confine(policy, choices)).transpose()?;
    let (enforced, rules) = confined.map_or((Enforced::default(), None), |(enforced, rules)| (enforced, Some(rules)));
    witness.close_all_but(&[result.as_raw_fd()])?;

    // Only now is the client's command decoded.
    execute(&command, &limits, (enforced, None), rules.as_ref(), result)
}

/// The inputs of a launcher inside a sandbox.
pub(crate) struct Inside<'a> {
    pub(crate) command: &'a Bytes,
    pub(crate) limits: &'a Limits,
    pub(crate) policy: &'a Policy,
    pub(crate) roots: &'a Roots,
    /// Made of the policy and the roots.
    pub(crate) tables: &'a Compiled,
    pub(crate) own: &'a Own,
    /// Why the process has the server's user id on the machine although it was to have its own.
    pub(crate) shared_uid: Option<String>,
    pub(crate) choices: Choices,
    /// The socket on which init receives the listener that reports changes.
    pub(crate) outgoing: BorrowedFd<'a>,
    pub(crate) result: BorrowedFd<'a>,
}

/// Runs the remaining steps in a child of a sandbox's init, in which the descriptors are in place.
pub(crate) fn inside(inside: &Inside<'_>) -> ! {
    let ended = catch_unwind(AssertUnwindSafe(|| steps_inside(inside)));
    let failure = match ended {
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the launcher panicked", None),
    };
    report_failure(inside.result, failure);
    sys::end(EXIT_FAILED)
}

fn steps_inside(inside: &Inside<'_>) -> Result<Never, StepFailed> {
    inside.limits.enter_groups()?;
    if inside.choices.tty {
        reopen_terminal()?;
    }
    begin_session(inside.choices.tty)?;
    let witness = Witness::open()?;
    let mut enforced = enforce::process(inside.policy, inside.roots, inside.tables, Some(inside.own), inside.choices)?;

    // From now on the kernel reports attempted changes to init, if it can. If it cannot, changes that init would allow are refused.
    match observe::tell_of_changes() {
        Ok(listener) => {
            let frame = encode(&(), b"", 1).map_err(|error| failed(Step::Frame, &error.to_string(), None))?;
            let sent = send_all(inside.outgoing, &frame, Some(listener.as_fd()));
            sent.map_err(machine("send the seccomp listener to init"))?;
            enforced.observed = true;
        }
        Err(_cannot) => enforce::without_listener(inside.policy, &mut enforced)?,
    }

    // No descriptor of init and none of the policy's roots stays open: each would lead past the view. Only now is the client's
    // command decoded.
    witness.close_all_but(&[inside.result.as_raw_fd()])?;
    let report = (enforced, inside.shared_uid.clone());
    execute(inside.command, inside.limits, report, Some(inside.tables), inside.result)
}

/// Replaces the received descriptors of the terminal by those of the view's `/dev/console`. The received ones were opened on the
/// machine's mount, which is writable: a process could change the terminal's mode by them, and open it to other users.
fn reopen_terminal() -> Result<(), StepFailed> {
    let stdin = rustix::stdio::stdin();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let console = match rustix::fs::open("/dev/console", flags, Mode::empty()) {
        Ok(console) => console,
        // The terminal has no name in this mount namespace, so the view has none for it.
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(machine("open the terminal by its name in the view")(errno)),
    };
    let number = |terminal: BorrowedFd<'_>| rustix::fs::fstat(terminal).map(|stat| stat.st_rdev);
    let compare = machine("compare the terminal with its name in the view");
    if number(stdin).map_err(&compare)? != number(console.as_fd()).map_err(&compare)? {
        return Err(compare(Errno::NODEV));
    }
    for standard in 0..=2 {
        sys::place(console.as_raw_fd(), standard).map_err(system(Step::Machine, "place the terminal"))?;
    }
    Ok(())
}

/// Starts a new session and process group. As after a start by a shell, no signal is blocked or ignored in the program.
fn begin_session(tty: bool) -> Result<(), StepFailed> {
    sys::default_signals();
    rustix::process::setsid().map_err(machine("start a session"))?;
    // The terminal becomes the controlling terminal of the session.
    if tty {
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())
            .map_err(|errno| system(Step::Execute, "make the terminal control the process")(errno.into()))?;
    }
    Ok(())
}

/// Decodes the client's command and executes it.
fn execute(
    command: &Bytes,
    limits: &Limits,
    (enforced, shared_uid): (Enforced, Option<String>),
    rules: Option<&Compiled>,
    result: BorrowedFd<'_>,
) -> Result<Never, StepFailed> {
    let command: Command =
        decode(&command.0).map_err(|error| failed(Step::Frame, &format!("decode the command: {error}"), None))?;
    let program = Program::new(&command, rules.is_some())?;
    enter(&command.cwd, rules)?;
    limits.bound_process()?;
    report(result, &Report::AboutToExec(enforced, shared_uid));
    let failure = program.execute();
    let name = Path::new(OsStr::from_bytes(&program.name));
    let denial =
        rules.filter(|_| program.name.contains(&b'/')).and_then(|rules| denial(rules, &command.cwd.as_path().join(name)));
    Err(StepFailed { denial, ..failure })
}

/// Changes to the command's working directory. Under a policy the path is walked name by name, and magic links are refused.
fn enter(cwd: &AbsolutePath, rules: Option<&Compiled>) -> Result<(), StepFailed> {
    let attempt = format!("change to directory `{cwd}`");
    let entered = match rules {
        None => rustix::process::chdir(cwd.as_path()).map_err(Stop::System),
        Some(_) => walk(cwd.as_path().as_os_str().as_bytes())
            .and_then(|reached| rustix::process::fchdir(reached.place()).map_err(Stop::System)),
    };
    entered.map_err(|stop| match stop {
        Stop::System(errno) => {
            let denial = rules.and_then(|rules| denial(rules, cwd.as_path()));
            StepFailed { denial, ..failed(Step::Execute, &attempt, Some(errno)) }
        }
        Stop::Magic(link) => {
            let text = format!(
                "{attempt}: it is reached through `{}`, a magic link of procfs; name the directory by its real path",
                link.display()
            );
            failed(Step::Enforce, &text, None)
        }
    })
}

/// The policy's denial of a path that could not be used, if the policy denies it: a denied program looks like a missing one.
fn denial(rules: &Compiled, path: &Path) -> Option<Box<Denial>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if rules.verdict(&real).is_granted() {
        return None;
    }
    let (rule, entry) = rules.why(&real, Access::Read, |_| true);
    let grant = entry.and_then(|(path, _)| AbsolutePath::new(path).ok()).map(|path| SuggestedEntry::new(&path, Wanted::Read));
    let path = path.to_string_lossy().into_owned();
    Some(Box::new(Denial { path, access: Wanted::Read, layer: Layer::Launcher, rule, grant }))
}

/// Places the received descriptors at the numbers of the standard ones.
pub(crate) fn place_standard(descriptors: &[RawFd], tty: bool) -> Result<(), StepFailed> {
    let sources = match descriptors {
        [terminal] if tty => [*terminal; 3],
        [stdin, stdout, stderr] if !tty => [*stdin, *stdout, *stderr],
        _wrong => return Err(failed(Step::Frame, "start: wrong number of descriptors", Some(Errno::INVAL))),
    };
    for (number, from) in (0..).zip(sources) {
        sys::place(from, number).map_err(system(Step::Machine, "place the standard descriptors"))?;
    }
    Ok(())
}

fn confine(Bytes(policy): &Bytes, choices: Choices) -> Result<(Enforced, Compiled), StepFailed> {
    let policy = Policy::decode(policy).map_err(|error| failed(Step::Frame, &format!("decode the policy: {error}"), None))?;
    let roots = Roots::open(&policy)?;
    let rules = tables(&policy, &roots)?;
    Ok((enforce::process(&policy, &roots, &rules, None, choices)?, rules))
}

/// The policy's tables, with its paths as they are on this machine.
pub(crate) fn tables(policy: &Policy, roots: &Roots) -> Result<Compiled, StepFailed> {
    Compiled::new(policy, |path| roots.resolve(path)).map_err(|error| failed(Step::Enforce, &error.to_string(), None))
}

/// The process that forked a new worker, as the worker sees it.
#[derive(Debug)]
pub(crate) enum Starter {
    /// Its parent.
    Parent(Pid),
    /// A process outside the namespaces of which the worker is the first process. `ids` are the worker's effective user and group
    /// outside, if it is in a new user namespace.
    Outside { spawner: OwnedFd, ids: Option<(u32, u32)> },
}

/// Becomes a worker: executes this executable again, with only its sockets and the error stream.
pub(crate) fn worker(program: &CString, stdio: &OwnedFd, control: &OwnedFd, starter: &Starter) -> ! {
    let failure = match prepare_worker(stdio, control, starter) {
        Ok(()) => {
            let argv: Vec<CString> = [HIDDEN_FLAG, Role::Worker.name(), BUILD]
                .into_iter()
                .map(|text| CString::new(text).unwrap_or_default())
                .collect();
            let argv = [vec![program.clone()], argv].concat();
            // The link leads to the running file itself, even after another file replaced it or its name was removed.
            sys::execve(c"/proc/self/exe", &argv, &[])
        }
        Err(error) => error,
    };
    complain(format_args!("start a worker: {failure}"));
    sys::end(EXIT_FAILED)
}

fn prepare_worker(stdio: &OwnedFd, control: &OwnedFd, starter: &Starter) -> io::Result<()> {
    // A signal from an ancestor's pid namespace kills the first process of a pid namespace, too (pid_namespaces(7)).
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if has_ended(starter) {
        sys::end(EXIT_FAILED);
    }
    if let Starter::Outside { ids, .. } = starter {
        let refused = |error: EnforceError| io::Error::new(io::Error::from_raw_os_error(error.errno()).kind(), error.to_string());
        if let Some((user, group)) = ids {
            namespaces::map_ids(*user, *group).map_err(refused)?;
        }
        // Root has all capabilities after `execve` in any case. If it gave up some before, the kernel would clear the parent-death
        // signal (`commit_creds` of kernel/cred.c).
        if !geteuid().is_root() {
            enforce::hand_on_mounting().map_err(refused)?;
        }
    }
    sys::default_signals();
    rustix::process::chdir("/")?;
    // Duplicates to higher numbers first: the present numbers may be among those that are about to be overwritten.
    let stdio = rustix::io::fcntl_dupfd_cloexec(stdio, CONTROL_DESCRIPTOR + 1)?;
    let control = rustix::io::fcntl_dupfd_cloexec(control, CONTROL_DESCRIPTOR + 1)?;
    let (stdio, control) = (std::mem::ManuallyDrop::new(stdio), std::mem::ManuallyDrop::new(control));
    sys::place(stdio.as_raw_fd(), 0)?;
    sys::place(stdio.as_raw_fd(), 1)?;
    sys::place(control.as_raw_fd(), CONTROL_DESCRIPTOR)?;
    sys::close_range(CONTROL_DESCRIPTOR.unsigned_abs() + 1, u32::MAX)
}

/// Whether the spawner ended before the worker was tied to it.
fn has_ended(starter: &Starter) -> bool {
    match starter {
        Starter::Parent(spawner) => rustix::process::getppid() != Some(*spawner),
        // A process outside has no pid in this namespace.
        Starter::Outside { spawner, .. } => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            !matches!(poll(&mut [PollFd::new(spawner, PollFlags::IN)], Some(&now)), Ok(0))
        }
    }
}

pub(crate) fn report_failure(result: BorrowedFd<'_>, failure: StepFailed) {
    report(result, &Report::Failed(failure));
}

fn report(result: BorrowedFd<'_>, report: &Report) {
    // The report cannot be lost: it is far smaller than the bound of a message and than the capacity of the empty pipe. If the
    // spawner is gone, this process ends too.
    if let Ok(bytes) = encode(report, b"", 0) {
        let _gone = rustix::io::write(result, &bytes);
    }
}

/// A failure, with the errno if a system call failed.
pub(crate) fn failed(step: Step, attempt: &str, errno: Option<Errno>) -> StepFailed {
    StepFailed { step, attempt: attempt.to_owned(), errno: errno.map_or(0, Errno::raw_os_error), denial: None }
}

pub(crate) fn machine(attempt: &'static str) -> impl Fn(Errno) -> StepFailed {
    move |errno| failed(Step::Machine, attempt, Some(errno))
}

pub(crate) fn system(step: Step, attempt: &str) -> impl Fn(io::Error) -> StepFailed {
    let attempt = attempt.to_owned();
    move |error| StepFailed { step, attempt: attempt.clone(), errno: error.raw_os_error().unwrap_or(0), denial: None }
}

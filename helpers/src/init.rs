//! The first process of a sandbox: it makes the view and the namespaces, starts the client's program, and stays as pid 1 of
//! its pid namespace, so that with its end the kernel ends everything in it.
//!
//! It is tied to the spawner by a socket, its **tether**. From it come signals to send, a byte each; it tells there which mount
//! points it uses, and how the program ended. When the spawner is gone the tether closes, and everything ends.

use crate::cover::Covers;
use crate::frames::send_all;
use crate::launch::{self, Order, failed};
use crate::sys::{self, Fork};
use crate::told::Told;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{Deframer, ExitStatus, HEADER, MAX_BODY, Step, StepFailed, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::enforce::{self, Choices, EnforceError, Own};
use portcullis_sandbox::mounts::{self, Found, Plan, Point};
use portcullis_sandbox::namespaces;
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::survey;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{DumpableBehavior, Pid, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Status of an init that could not start anything; the failure itself is reported.
const EXIT_FAILED: i32 = 127;

/// What init says on its tether.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitReport {
    /// It is about to use a mount point there, which has to be removed from the machine after its end.
    Point(Bytes),
    /// Another end of what tells of covers comes along. The kernel takes its time to close the last one: that shall not be init's.
    Watch,
    /// The program ended. Others of the sandbox may live on.
    Ended {
        /// How.
        status: ExitStatus,
        /// What was seen to be refused.
        denials: Denials,
        /// Why everything was ended, if it was.
        failure: Option<String>,
        /// Nobody else is left, so that this process ends next.
        is_alone: bool,
    },
}

/// What init is given beside its order.
#[derive(Debug)]
pub(crate) struct Given {
    /// Where a launcher reports.
    pub(crate) result: OwnedFd,
    pub(crate) tether: OwnedFd,
    /// The effective user and group outside, if this is a new user namespace.
    pub(crate) ids: Option<(u32, u32)>,
}

/// Makes the sandbox, starts the program and serves until the end of both, in the first process of new namespaces.
pub(crate) fn run(order: Order, given: Given) -> ! {
    let Given { result, tether, ids } = given;
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let ended = catch_unwind(AssertUnwindSafe(|| prepare(order, result.as_fd(), tether.as_fd(), ids)));
    let failure = match ended {
        Ok(Ok((sandbox, program))) => {
            drop(result);
            let served = catch_unwind(AssertUnwindSafe(|| sandbox.serve(tether.as_fd(), program)));
            sys::end(if served.is_ok() { 0 } else { EXIT_FAILED })
        }
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the sandbox's init panicked", None),
    };
    launch::report_failure(result.as_fd(), failure);
    sys::end(EXIT_FAILED)
}

/// A sandbox with its program running.
struct Sandbox {
    told: Told,
    points: Vec<Point>,
    /// What must stay covered.
    covers: Covers,
    signals: OwnedFd,
}

fn prepare(
    order: Order,
    result: BorrowedFd<'_>,
    tether: BorrowedFd<'_>,
    ids: Option<(u32, u32)>,
) -> Result<(Sandbox, Pid), StepFailed> {
    let Order { tty, policy, command, descriptors, .. } = order;
    // From here on the numbers of the received descriptors are reused; their owners must not close them again.
    let descriptors: Vec<RawFd> = descriptors.into_iter().map(std::os::fd::IntoRawFd::into_raw_fd).collect();
    launch::place_standard(&descriptors, tty)?;
    launch::close_all_but(&[result.as_raw_fd(), tether.as_raw_fd()])?;

    // Out of the reach of whatever signals the spawner's group.
    rustix::process::setsid().map_err(launch::machine("start a session"))?;

    // Users first: whatever else is made belongs to their namespace.
    if let Some((user, group)) = ids {
        namespaces::map_ids(user, group)?;
    }
    // No process of the same user may look at the copy of the spawner's memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(launch::machine("hide the memory of init"))?;

    // The policy's paths, as this mount namespace has them.
    let Some(Bytes(policy)) = policy else {
        return Err(failed(Step::Frame, "start: a sandbox without a policy", None));
    };
    let policy = Policy::decode(&policy).map_err(|error| failed(Step::Frame, &format!("decode the policy: {error}"), None))?;
    let roots = Roots::open(&policy)?;
    let tables = launch::tables(&policy, &roots)?;

    // What deny globs match and where `.git` files lead is for a confined process to say.
    let found = if survey::is_needed(&policy, &tables, &roots) { look(&policy, &tables, &roots)? } else { Vec::new() };

    // The view and the network.
    let terminal = tty.then(rustix::stdio::stdin);
    let plan = Plan { tables: &tables, roots: &roots, found: &found, terminal };
    let mut own = Own::make(&policy, plan, ids.is_some(), &mut |path| tell(tether, &InitReport::Point(bytes(path))))?;
    let own_proc = own.view.own_proc;
    let points = std::mem::take(&mut own.view.points);
    let mut covers = Covers::watch(&own.view.covered, &own.view.awaited);
    if let Some(watch) = covers.descriptor() {
        let frame = encode(&InitReport::Watch, b"", 1).map_err(|error| failed(Step::Frame, &error.to_string(), None))?;
        let _gone = send_all(tether, &frame, Some(watch));
    }
    if let Some(path) = covers.lost() {
        let attempt = format!("hold `{}`: it was replaced while the sandbox was made; start again", path.display());
        return Err(failed(Step::Enforce, &attempt, None));
    }

    // The program is a child of this process, and confines itself.
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (incoming, outgoing) = pair.map_err(launch::machine("make a socket for what is told"))?;
    let signals = sys::child_events().map_err(|error| launch::system(Step::Machine, "watch children")(error))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the launcher"))? {
        Fork::Child => launch::inside(&launch::Inside {
            command: &command,
            policy: &policy,
            roots: &roots,
            own: &own,
            choices: Choices { allow_unprotected: false, tty },
            outgoing: outgoing.as_fd(),
            result,
        }),
        Fork::Parent(program) => {
            drop(outgoing);
            leave_standard()?;
            Ok((Sandbox { told: Told::new(incoming, tables, own_proc), points, covers, signals }, program))
        }
    }
}

/// What a confined child says of the files.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Found(Vec<Found>),
    Failed(StepFailed),
}

/// Has a confined child look at the files, and reads what it says.
fn look(policy: &Policy, tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, StepFailed> {
    let (answers, pen) = pipe_with(PipeFlags::CLOEXEC).map_err(launch::machine("make a pipe to the survey"))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the survey"))? {
        Fork::Child => {
            let looked = catch_unwind(AssertUnwindSafe(|| {
                enforce::reader()?;
                survey::survey(policy, tables, roots).map_err(|error| failed(Step::Enforce, &error.to_string(), None))
            }));
            let answer = match looked {
                Ok(Ok(found)) => Answer::Found(found),
                Ok(Err(failure)) => Answer::Failed(failure),
                Err(_panic) => Answer::Failed(failed(Step::Frame, "look at the files before the start: it panicked", None)),
            };
            let written = encode(&answer, b"", 0).map(|bytes| File::from(pen).write_all(&bytes));
            sys::end(if matches!(written, Ok(Ok(()))) { 0 } else { EXIT_FAILED })
        }
        Fork::Parent(child) => {
            drop(pen);
            let mut bytes = Vec::new();
            let read = File::from(answers).take((MAX_BODY + HEADER) as u64).read_to_end(&mut bytes);
            sys::wait_for(child);
            read.map_err(launch::system(Step::Machine, "read the survey"))?;
            let mut deframer = Deframer::default();
            deframer.push(&bytes);
            let answer = deframer.next_frame().ok().flatten().and_then(|frame| decode(&frame.body).ok());
            match answer {
                Some(Answer::Found(found)) => Ok(found),
                Some(Answer::Failed(failure)) => Err(failure),
                None => Err(failed(Step::Machine, "look at the files before the start: the survey died", None)),
            }
        }
    }
}

/// The program's pipes are the program's: as long as init held them, they would not end with it.
fn leave_standard() -> Result<(), StepFailed> {
    let open = || -> rustix::io::Result<()> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let null = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)
    };
    open().map_err(launch::machine("let go of the program's descriptors"))
}

impl Sandbox {
    /// Serves until nothing is left in the sandbox, or the spawner is gone.
    fn serve(mut self, tether: BorrowedFd<'_>, program: Pid) {
        loop {
            let ready = self.wait(tether);
            if !ready.told.is_empty() {
                self.told = self.told.take(ready.told);
            }
            if ready.tether && !obey(tether, program) {
                end_everybody();
                return self.leave();
            }
            if ready.covers
                && let Some(path) = self.covers.lost()
            {
                end_everybody();
                let failure = format!(
                    "the sandbox ended: `{}` was made, moved or replaced from outside, so that its rule could be held no longer",
                    path.display()
                );
                return self.tell_end(tether, ExitStatus::Signal(libc::SIGKILL), Some(failure), true);
            }
            if ready.signals {
                let (ended, is_alone) = self.reap(program);
                if let Some(status) = ended {
                    self.tell_end(tether, status, None, is_alone);
                }
                if is_alone {
                    return;
                }
            }
        }
    }

    fn wait(&self, tether: BorrowedFd<'_>) -> Ready {
        let mut polled = vec![PollFd::new(&tether, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
        let others = [self.covers.descriptor(), self.told.descriptor()];
        polled.extend(others.iter().flatten().map(|other| PollFd::from_borrowed_fd(*other, PollFlags::IN)));
        let patience = self.covers.patience().and_then(|patience| Timespec::try_from(patience).ok());
        let woken = loop {
            match poll(&mut polled, patience.as_ref()) {
                Err(Errno::INTR) => {}
                other => break other.unwrap_or(0),
            }
        };
        let mut found = polled.iter().map(PollFd::revents);
        let (tether, signals) = (found.next(), found.next());
        let mut of_other = |is_polled: bool| if is_polled { found.next() } else { None }.unwrap_or(PollFlags::empty());
        let [covers, told] = others.map(|other| of_other(other.is_some()));
        let is_ready = |flags: Option<PollFlags>| flags.is_some_and(|flags| !flags.is_empty());
        Ready { tether: is_ready(tether), signals: is_ready(signals), covers: woken == 0 || !covers.is_empty(), told }
    }

    /// Reaps what ended: how the program did, if it is among that, and whether nobody is left.
    fn reap(&mut self, program: Pid) -> (Option<ExitStatus>, bool) {
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        let mut end = None;
        loop {
            match sys::ended_child() {
                Ok(Some((pid, status))) => {
                    sys::reap(pid);
                    if pid == program {
                        end = Some(status);
                    }
                }
                Ok(None) => return (end, false),
                Err(_no_child) => return (end, true),
            }
        }
    }

    /// Removes the mount points: the spawner, who would after this process's end, is gone.
    fn leave(&mut self) {
        for point in self.points.drain(..).rev() {
            let path = point.path().to_owned();
            // What covers it here comes off first, and then the lock.
            if unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {
                drop(point);
                mounts::remove(&path);
            }
        }
    }

    fn tell_end(&mut self, tether: BorrowedFd<'_>, status: ExitStatus, failure: Option<String>, is_alone: bool) {
        let denials = self.told.denials();
        tell(tether, &InitReport::Ended { status, denials, failure, is_alone });
    }
}

/// Ends every process of the sandbox but this one.
fn end_everybody() {
    let _none_left = sys::kill_everybody_else();
    while let Ok(Some((pid, _))) = sys::next_ended_child() {
        sys::reap(pid);
    }
}

/// What a poll found.
struct Ready {
    tether: bool,
    signals: bool,
    covers: bool,
    told: PollFlags,
}

/// Sends the signals that the spawner asks for to the program's group. False if the spawner is gone.
fn obey(tether: BorrowedFd<'_>, program: Pid) -> bool {
    let mut orders = [0; 64];
    match rustix::io::read(tether, &mut orders[..]) {
        Ok(0) => false,
        Ok(length) => {
            for signal in &orders[..length] {
                // Before the program has begun its session it has no group yet.
                if sys::kill(program, i32::from(*signal), true).is_err() {
                    let _ended = sys::kill(program, i32::from(*signal), false);
                }
            }
            true
        }
        Err(Errno::INTR | Errno::AGAIN) => true,
        Err(_broken) => false,
    }
}

fn tell(tether: BorrowedFd<'_>, report: &InitReport) {
    // If the spawner is gone, the tether is closed, and that is seen next.
    if let Ok(bytes) = encode(report, b"", 0) {
        let _gone = send_all(tether, &bytes, None);
    }
}

fn bytes(path: &Path) -> Bytes {
    Bytes(path.as_os_str().as_bytes().to_vec())
}

/// Tries namespaces, a view over the machine's tree and a network, in the first process of new namespaces. Whether `/proc` can be its own.
pub(crate) fn try_all(ids: Option<(u32, u32)>) -> Result<bool, EnforceError> {
    if let Some((user, group)) = ids {
        namespaces::map_ids(user, group)?;
    }
    let policy = Policy::read_everything();
    let roots = Roots::open(&policy)?;
    let tables = Compiled::new(&policy, |path| roots.resolve(path))
        .map_err(|error| EnforceError::Namespace { attempt: error.to_string(), errno: 0 })?;
    let plan = Plan { tables: &tables, roots: &roots, found: &[], terminal: None };
    Own::make(&policy, plan, ids.is_some(), &mut |_| ()).map(|own| own.view.own_proc)
}

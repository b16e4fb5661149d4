//! Keeps a program that was started and everything that comes of it: passes on signals, tells how the program ended, and ends
//! all of it when it is told to.
//!
//! In a sandbox the keeper is its init, with whose end the kernel ends the rest. Elsewhere it is a child of the spawner that
//! everybody below it comes to who loses its parent (`PR_SET_CHILD_SUBREAPER`), so that no daemon gets away from it.
//!
//! It is tied to the spawner by a socket, its **tether**. From it come signals to send, a byte each; it tells there how the
//! program ended. When the spawner is gone the tether closes, and everything ends. It stays for as
//! long as anybody whom it keeps.

use crate::closing;
use crate::cover::Covers;
use crate::frames::send_all;
use crate::launch::{self, Order, failed};
use crate::remover::Line;
use crate::spare::Ends;
use crate::sys::{self, Fork};
use crate::told::Told;
use crate::tree;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{ExitStatus, Step, StepFailed, encode};
use portcullis_sandbox::core_handler;
use portcullis_sandbox::mounts::Point;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Pid, getpid, set_child_subreaper, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Status of a keeper that could not start anything; the failure itself is reported.
pub(crate) const EXIT_FAILED: i32 = 127;

/// Bound of the children that are reaped at one go: a process may make orphans as fast as they are reaped.
const MOST_REAPED: usize = 256;

/// What a keeper says on its tether.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperReport {
    /// The program ended. Others whom it keeps may live on.
    Ended {
        /// How.
        status: ExitStatus,
        /// What was seen to be refused.
        denials: Denials,
        /// Why everything was ended, if it was.
        failure: Option<String>,
        /// Nobody else is left: this process has let go of its mount points and ends next.
        is_alone: bool,
    },
}

/// A program that runs, as its keeper sees it.
pub(crate) struct Keeper {
    pub(crate) told: Told,
    pub(crate) points: Vec<Point>,
    /// The socket to the remover of the mount points, which tells of them.
    pub(crate) line: Option<Line>,
    /// What must stay covered.
    pub(crate) covers: Covers,
    pub(crate) signals: OwnedFd,
    pub(crate) program: Pid,
    /// The program's number is its own: it was not reaped.
    pub(crate) has_program: bool,
    /// Some that ended may not be reaped yet.
    pub(crate) has_more: bool,
}

/// Starts a program that gets no namespaces, and serves until the end of everything that comes of it, in a child of the spawner.
pub(crate) fn run(order: Order, ends: Ends) -> ! {
    let Ends { result, tether, line: _none } = ends;
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let begun = catch_unwind(AssertUnwindSafe(|| begin(order, &result, tether.as_fd())));
    let failure = match begun {
        Ok(Ok(keeper)) => {
            // Success is the end of this descriptor.
            drop(result);
            let served = catch_unwind(AssertUnwindSafe(|| keeper.serve(tether.as_fd())));
            sys::end(if served.is_ok() { 0 } else { EXIT_FAILED })
        }
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the keeper panicked", None),
    };
    launch::report_failure(result.as_fd(), failure);
    sys::end(EXIT_FAILED)
}

fn begin(order: Order, result: &OwnedFd, tether: BorrowedFd<'_>) -> Result<Keeper, StepFailed> {
    // Whoever loses its parent below this process becomes its child. Before there is anybody.
    set_child_subreaper(Some(getpid())).map_err(launch::machine("become the reaper of what is started"))?;
    if order.policy.is_some() {
        core_handler::tell_little();
    }
    // It has a copy of the spawner's memory, with environments of clients.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(launch::machine("hide the memory of the keeper"))?;
    let signals = sys::child_events().map_err(|error| launch::system(Step::Machine, "watch children")(error))?;
    let me = getpid();
    let program = match sys::fork().map_err(launch::system(Step::Machine, "fork the launcher"))? {
        Fork::Child => launch::process(order, result, me),
        Fork::Parent(program) => program,
    };
    // The gateway's socket and the program's pipes are not this process's: as long as it held them, they would not end.
    drop(order);
    let kept = [result.as_raw_fd(), tether.as_raw_fd(), signals.as_raw_fd()];
    let left = closing::close_all_but(&kept).and_then(|()| leave_standard(null()?));
    let keeper = Keeper {
        told: Told::Silent(Denials::default()),
        points: Vec::new(),
        line: None,
        covers: Covers::default(),
        signals,
        program,
        has_program: true,
        has_more: false,
    };
    match left {
        Ok(()) => Ok(keeper),
        Err(failure) => {
            keeper.end_everybody(None);
            Err(failure)
        }
    }
}

/// Replaces the program's descriptors in its keeper. To be opened before a view is made, since the view may deny it.
pub(crate) fn null() -> Result<OwnedFd, StepFailed> {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty()).map_err(launch::machine("open /dev/null"))
}

/// The program's pipes are the program's: as long as its keeper held them, they would not end with it.
pub(crate) fn leave_standard(null: OwnedFd) -> Result<(), StepFailed> {
    let place = || -> rustix::io::Result<()> {
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)
    };
    place().map_err(launch::machine("replace the program's descriptors"))
}

impl Keeper {
    /// Serves until nothing is left of what it keeps, or the spawner is gone.
    pub(crate) fn serve(mut self, tether: BorrowedFd<'_>) {
        loop {
            let ready = self.wait(tether);
            match if ready.tether { self.obey(tether) } else { Obeyed::All } {
                Obeyed::All => {}
                Obeyed::End => {
                    let killed = self.has_program.then_some(ExitStatus::Signal(libc::SIGKILL));
                    if let Some(status) = self.end_everybody(Some(tether)).or(killed) {
                        self.tell_end(tether, status, None, true);
                    }
                    return;
                }
                Obeyed::Gone => {
                    self.end_everybody(None);
                    return self.give_up();
                }
            }
            if ready.covers
                && let Some(path) = self.covers.lost()
            {
                self.end_everybody(None);
                let failure = format!(
                    "the sandbox ended: `{}` was made, moved or replaced from outside, so that its rule could be held no longer",
                    path.display()
                );
                return self.tell_end(tether, ExitStatus::Signal(libc::SIGKILL), Some(failure), true);
            }
            // After the covers: a process decides what this costs.
            if !ready.told.is_empty() {
                self.told = self.told.take(ready.told);
            }
            if ready.signals {
                let (ended, is_alone) = self.reap();
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
        let patience = if self.has_more { Some(Duration::ZERO) } else { self.covers.patience() };
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        while let Err(Errno::INTR) = poll(&mut polled, patience.as_ref()) {}
        let mut found = polled.iter().map(PollFd::revents);
        let (tether, signals) = (found.next(), found.next());
        let mut of_other = |is_polled: bool| if is_polled { found.next() } else { None }.unwrap_or(PollFlags::empty());
        let [covers, told] = others.map(|other| of_other(other.is_some()));
        let is_ready = |flags: Option<PollFlags>| flags.is_some_and(|flags| !flags.is_empty());
        Ready {
            tether: is_ready(tether),
            signals: is_ready(signals) || self.has_more,
            // Also if another descriptor was ready: a process inside can keep one ready all the time.
            covers: !covers.is_empty() || self.covers.is_due(),
            told,
        }
    }

    /// Reaps what ended: how the program did, if it is among that, and whether nobody is left.
    fn reap(&mut self) -> (Option<ExitStatus>, bool) {
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        let mut end = None;
        self.has_more = true;
        for _ in 0..MOST_REAPED {
            match sys::ended_child() {
                Ok(Some((pid, status))) => {
                    sys::reap(pid);
                    // Without `has_program` the number is another's, who came by it later.
                    if self.has_program && pid == self.program {
                        self.has_program = false;
                        end = Some(status);
                    }
                }
                Ok(None) => {
                    self.has_more = false;
                    return (end, false);
                }
                Err(_no_child) => return (end, true),
            }
        }
        (end, false)
    }

    /// Releases the mount points: no process is left that they restrict, so they are removed while this process ends.
    fn give_up(&mut self) {
        self.points.clear();
        self.line.take().into_iter().for_each(Line::let_go);
    }

    fn tell_end(&mut self, tether: BorrowedFd<'_>, status: ExitStatus, failure: Option<String>, is_alone: bool) {
        let denials = self.told.denials();
        if is_alone {
            self.give_up();
        }
        tell(tether, &KeeperReport::Ended { status, denials, failure, is_alone });
    }

    /// Sends the signals that the spawner asks for to the program's group.
    fn obey(&self, tether: BorrowedFd<'_>) -> Obeyed {
        let mut orders = [0; 64];
        match rustix::io::read(tether, &mut orders[..]) {
            Ok(0) => Obeyed::Gone,
            Ok(length) => {
                for signal in orders[..length].iter().map(|signal| i32::from(*signal)) {
                    if signal == libc::SIGKILL {
                        return Obeyed::End;
                    }
                    self.signal(signal);
                }
                Obeyed::All
            }
            Err(Errno::INTR | Errno::AGAIN) => Obeyed::All,
            Err(_broken) => Obeyed::Gone,
        }
    }

    fn signal(&self, signal: i32) {
        if self.has_program {
            // Before the program has begun its session it has no group yet.
            if sys::kill(self.program, signal, true).is_err() {
                let _ended = sys::kill(self.program, signal, false);
            }
        } else if is_init() || tree::has_group(self.program) {
            // Its number is free for others, unless a member of its group holds it. In a sandbox all of them are its own.
            let _ended = sys::kill(self.program, signal, true);
        }
    }

    /// Ends all that it keeps. How the program ended, if that was not known before. If somebody else cannot be ended for a while,
    /// the end of the program is told without them.
    fn end_everybody(&self, tether: Option<BorrowedFd<'_>>) -> Option<ExitStatus> {
        if is_init() {
            let _none_left = sys::kill_everybody_else();
            while let Ok(Some((pid, _))) = sys::next_ended_child() {
                sys::reap(pid);
            }
            return None;
        }
        let end = Cell::new(None);
        if self.has_program {
            // All of its group at one blow, so that none of them is born meanwhile.
            let _ended = sys::kill(self.program, libc::SIGKILL, true);
        }
        let ended = |pid, status| {
            if self.has_program && pid == self.program && end.get().is_none() {
                end.set(Some(status));
            }
        };
        let stuck = || {
            if let (Some(status), Some(tether)) = (end.get(), tether) {
                // The spawner takes the first such word and no other.
                tell(tether, &KeeperReport::Ended { status, denials: Denials::default(), failure: None, is_alone: false });
            }
        };
        tree::end_all(&HashSet::from([self.program]), self.signals.as_fd(), |_| false, ended, stuck);
        end.get()
    }
}

/// Whether this process is the first of its pid namespace.
fn is_init() -> bool {
    std::process::id() == 1
}

/// What came of orders.
enum Obeyed {
    /// They are carried out.
    All,
    /// Everything is to be ended.
    End,
    /// The spawner is gone.
    Gone,
}

/// What a poll found.
struct Ready {
    tether: bool,
    signals: bool,
    covers: bool,
    told: PollFlags,
}

pub(crate) fn tell(tether: BorrowedFd<'_>, report: &KeeperReport) {
    // If the spawner is gone, the tether is closed, and that is seen next.
    if let Ok(bytes) = encode(report, b"", 0) {
        let _gone = send_all(tether, &bytes, None);
    }
}

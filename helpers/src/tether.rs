//! The spawner's end of the socket to a keeper, which in a sandbox is its init.

use crate::cgroup::Group;
use crate::frames::{Inlet, Received, Wait, send};
use crate::keeper::KeeperReport;
use crate::remover::Token;
use crate::sys;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{ExitStatus, decode};
use portcullis_protocol::limit::{LimitReached, ProcessLimits, Scope};
use rustix::process::Pid;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that are asked of a tether at once. Reports are small, and there is a tether for every process.
const READ: usize = 2048;

/// What a keeper is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The first process of a pid namespace: with it the kernel ends the rest.
    Init,
    /// The reaper of what it started, without namespaces.
    Reaper,
}

/// A keeper, as the spawner holds it.
#[derive(Debug)]
pub(crate) struct Tether {
    /// For whom it keeps what it started.
    pub(crate) session: String,
    kind: Kind,
    /// What the process may use, and the group that holds it to that.
    limits: ProcessLimits,
    group: Option<Group>,
    socket: OwnedFd,
    inlet: Inlet,
    /// Nothing more comes from it.
    closed: bool,
    /// An init's name for the remover, and the remover's end of the socket between them.
    line: Option<(Token, OwnedFd)>,
    /// How the program ended, once the keeper has told, until it is taken.
    ended: Option<Outcome>,
    /// The keeper ends next, so that nothing is left when anybody hears of the end: no process, and nothing on the machine.
    is_alone: bool,
    /// Whether that was taken.
    told: bool,
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    /// What was seen to be refused to it.
    pub(crate) denials: Denials,
    /// Why its sandbox ended it, if it did.
    pub(crate) failure: Option<String>,
    /// What it ran into.
    pub(crate) limits: Vec<LimitReached>,
}

impl Outcome {
    /// Of one of which nothing else is known.
    pub(crate) fn of(status: ExitStatus) -> Self {
        Self { status, denials: Denials::default(), failure: None, limits: Vec::new() }
    }
}

impl AsFd for Tether {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Tether {
    pub(crate) fn new(
        socket: OwnedFd,
        session: String,
        line: Option<(Token, OwnedFd)>,
        limits: ProcessLimits,
        group: Option<Group>,
    ) -> Self {
        let kind = if line.is_some() { Kind::Init } else { Kind::Reaper };
        Self {
            session,
            kind,
            limits,
            group,
            socket,
            inlet: Inlet::reading(READ),
            closed: false,
            line,
            ended: None,
            is_alone: false,
            told: false,
        }
    }

    /// What to wait for; none once it is closed.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        (!self.closed).then_some(&self.socket)
    }

    /// Takes what the keeper has said so far.
    pub(crate) fn read(&mut self) {
        while !self.closed {
            let frame = match self.inlet.next(self.socket.as_fd(), Wait::No) {
                Ok(Received::Frame(frame, _none)) => frame,
                Ok(Received::Later) => return,
                Ok(Received::End) | Err(_) => {
                    self.closed = true;
                    return;
                }
            };
            match decode(&frame.body) {
                Ok(KeeperReport::Ended { status, denials, failure, is_alone }) if !self.told => {
                    self.ended = self.ended.take().or(Some(Outcome { status, denials, failure, limits: Vec::new() }));
                    self.is_alone = is_alone;
                }
                Ok(_more) => {}
                Err(_not_ours) => self.closed = true,
            }
        }
    }

    /// How the program ended, the first time that it is known, if its keeper lives on.
    pub(crate) fn take_end(&mut self) -> Option<Outcome> {
        let end = self.ended.take_if(|_| !self.is_alone);
        self.told |= end.is_some();
        end.map(|end| self.with_limits(end))
    }

    /// Why the keeper ended everything, if it did and has told.
    pub(crate) fn failure(&mut self) -> Option<String> {
        self.read();
        self.ended.as_ref().and_then(|end| end.failure.clone())
    }

    /// The remover's token for it, and the remover's end of the socket between them.
    pub(crate) fn line(&self) -> Option<&(Token, OwnedFd)> {
        self.line.as_ref()
    }

    /// Has a signal sent to the program's group.
    pub(crate) fn signal(&self, signal: i32) {
        // A full socket means that the keeper has not taken thousands of signals: one more makes no difference.
        let _unsent = self.order(signal);
    }

    /// Has everything ended that the keeper keeps. `keeper` is its number, which is its own as long as it was not reaped.
    pub(crate) fn end(&self, keeper: Pid) {
        // At one blow where the kernel can. The keeper is not in it, and reaps.
        self.group.iter().for_each(Group::kill);
        let is_told = self.kind == Kind::Reaper && {
            // Those whom it keeps may be of the same user, and may have stopped it.
            let _ended = sys::kill(keeper, libc::SIGCONT, false);
            self.order(libc::SIGKILL)
        };
        if !is_told {
            // Init takes the rest along; what another leaves behind comes to the spawner, which ends it.
            let _ended = sys::kill(keeper, libc::SIGKILL, false);
        }
    }

    /// With the limits that can be seen to have been reached.
    fn with_limits(&self, end: Outcome) -> Outcome {
        let mut limits = self.group.as_ref().map(Group::reached).unwrap_or_default();
        if end.status == ExitStatus::Signal(libc::SIGXCPU)
            && let Some(most) = self.limits.cpu_ms.map(NonZeroU64::get)
        {
            limits.push(LimitReached { limit: "cpuMs".to_owned(), value: most, used: most, scope: Scope::Process });
        }
        Outcome { limits, ..end }
    }

    fn order(&self, signal: i32) -> bool {
        u8::try_from(signal).is_ok_and(|signal| send(self.socket.as_fd(), &[signal], None, Wait::No).is_ok())
    }

    /// Whether a keeper that ended so leaves those behind whom it kept.
    pub(crate) fn leaves_others(&self, status: ExitStatus) -> bool {
        self.kind == Kind::Reaper && status != ExitStatus::Code(0)
    }

    /// After the keeper was reaped with `status`: how the program ended, unless that was taken before, and the mount points that
    /// have to be given back.
    pub(crate) fn finish(mut self, status: ExitStatus) -> (Option<Outcome>, Leftovers) {
        self.read();
        // Without a word from it, the program ended with it: an init takes it along, and what another leaves behind is ended.
        let outcome = self.ended.take().unwrap_or_else(|| Outcome::of(status));
        let outcome = (!self.told).then(|| self.with_limits(outcome));
        (outcome, Leftovers { token: self.line.map(|(token, _)| token), group: self.group })
    }
}

/// What a keeper left.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Mount points that the remover gives back.
    pub(crate) token: Option<Token>,
    /// Where it was, to be removed.
    pub(crate) group: Option<Group>,
}

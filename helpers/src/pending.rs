//! Launchers on their way to `execve`, as the spawner sees them.

use crate::launch::{Report, failed};
use portcullis_protocol::helper::{Deframer, Enforced, Step, StepFailed, decode};
use portcullis_protocol::limit::{LimitInForce, TreeEnd};
use rustix::io::Errno;
use rustix::process::Pid;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long a launch may take. The gateway gives up earlier; this holds if it does not.
const DEADLINE: Duration = Duration::from_secs(90);

/// A launcher that has not reached `execve`.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) id: u64,
    pub(crate) pid: Pid,
    pub(crate) pipe: OwnedFd,
    reports: Deframer,
    pub(crate) enforced: Option<Enforced>,
    /// Why it has the server's user id on the machine, if it was to have its own.
    pub(crate) shared_uid: Option<String>,
    /// The limits that hold it.
    pub(crate) limits: Vec<LimitInForce>,
    pub(crate) tree: TreeEnd,
    pub(crate) failure: Option<StepFailed>,
    /// Nothing more comes from the pipe.
    pub(crate) ended: bool,
    /// When it is ended if it has not concluded; none once it is.
    pub(crate) until: Option<Instant>,
}

impl Launch {
    pub(crate) fn new(id: u64, pid: Pid, pipe: OwnedFd, limits: Vec<LimitInForce>, tree: TreeEnd) -> Self {
        let reports = Deframer::default();
        Self {
            id,
            pid,
            pipe,
            reports,
            enforced: None,
            shared_uid: None,
            limits,
            tree,
            failure: None,
            ended: false,
            until: Some(Instant::now() + DEADLINE),
        }
    }

    /// Takes what the launcher has reported so far.
    pub(crate) fn read(&mut self) {
        let mut buffer = [0; 4096];
        while !self.ended {
            match rustix::io::read(&self.pipe, &mut buffer[..]) {
                Ok(0) => self.ended = true,
                Ok(length) => self.reports.push(&buffer[..length]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_broken) => self.ended = true,
            }
        }
        while let Ok(Some(frame)) = self.reports.next_frame() {
            match decode(&frame.body) {
                Ok(Report::AboutToExec(enforced, shared_uid)) => (self.enforced, self.shared_uid) = (Some(enforced), shared_uid),
                Ok(Report::Failed(failure)) => self.failure = Some(failure),
                Err(error) => self.failure = Some(failed(Step::Frame, &format!("start: {error}"), Some(Errno::PROTO))),
            }
        }
    }
}

//! The spawner's end of the socket to a sandbox's init.

use crate::frames::{Inlet, Received, Wait, send};
use crate::init::InitReport;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{ExitStatus, decode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::mounts;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Bound of the mount points of one sandbox: each costs init a descriptor, of which it has no more.
const MOST_POINTS: usize = 1 << 16;

/// A sandbox's init, as the spawner holds it.
#[derive(Debug)]
pub(crate) struct Tether {
    /// Whose sandbox it is.
    pub(crate) session: String,
    socket: OwnedFd,
    inlet: Inlet,
    /// Nothing more comes from it.
    closed: bool,
    /// Keeps what tells of covers from being closed by init.
    watch: Option<OwnedFd>,
    /// Mount points that have to be removed after its end.
    points: Vec<PathBuf>,
    /// How the program ended, once init has told, until it is taken.
    ended: Option<Outcome>,
    /// Init ends next, and then what it used of the machine can be given back: before anybody hears of the end.
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
}

impl Outcome {
    /// Of one of which nothing else is known.
    pub(crate) fn of(status: ExitStatus) -> Self {
        Self { status, denials: Denials::default(), failure: None }
    }
}

impl Tether {
    pub(crate) fn new(socket: OwnedFd, session: String) -> Self {
        Self {
            session,
            socket,
            inlet: Inlet::new(),
            closed: false,
            watch: None,
            points: Vec::new(),
            ended: None,
            is_alone: false,
            told: false,
        }
    }

    /// What to wait for; none once it is closed.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        (!self.closed).then_some(&self.socket)
    }

    /// Takes what init has said so far.
    pub(crate) fn read(&mut self) {
        while !self.closed {
            let (frame, mut descriptors) = match self.inlet.next(self.socket.as_fd(), Wait::No) {
                Ok(Received::Frame(frame, descriptors)) => (frame, descriptors),
                Ok(Received::Later) => return,
                Ok(Received::End) | Err(_) => {
                    self.closed = true;
                    return;
                }
            };
            match decode(&frame.body) {
                Ok(InitReport::Point(Bytes(path))) if self.points.len() < MOST_POINTS => {
                    self.points.push(PathBuf::from(OsString::from_vec(path)));
                }
                Ok(InitReport::Watch) => self.watch = descriptors.pop(),
                Ok(InitReport::Ended { status, denials, failure, is_alone }) if !self.told => {
                    self.ended = Some(Outcome { status, denials, failure });
                    self.is_alone = is_alone;
                }
                Ok(_more) => {}
                Err(_not_ours) => self.closed = true,
            }
        }
    }

    /// How the program ended, the first time that it is known, if init lives on.
    pub(crate) fn take_end(&mut self) -> Option<Outcome> {
        let end = self.ended.take_if(|_| !self.is_alone);
        self.told |= end.is_some();
        end
    }

    /// Has a signal sent to the program's group.
    pub(crate) fn signal(&self, signal: i32) {
        if let Ok(signal) = u8::try_from(signal) {
            // A full socket means that init has not taken thousands of signals: one more makes no difference.
            let _unsent = send(self.socket.as_fd(), &[signal], None, Wait::No);
        }
    }

    /// After init was reaped with `status`: how the program ended, unless that was taken before, and the mount points that
    /// have to be given back.
    pub(crate) fn finish(mut self, status: ExitStatus) -> (Option<Outcome>, Leftovers) {
        self.read();
        // Without a word from it, the program ended with its init.
        let outcome = (!self.told).then(|| self.ended.unwrap_or_else(|| Outcome::of(status)));
        (outcome, Leftovers { points: self.points, watch: self.watch })
    }
}

/// What an init left.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Mount points that have to be given back.
    pub(crate) points: Vec<PathBuf>,
    /// What told of covers, to be closed by somebody who has time.
    pub(crate) watch: Option<OwnedFd>,
}

/// Removes mount points of which nobody else takes care.
pub(crate) fn remove(points: &[PathBuf]) {
    for point in points.iter().rev() {
        mounts::remove(point);
    }
}

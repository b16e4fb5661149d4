//! What a sandbox's init is told of the changes that are tried in it.

use crate::frames::{Inlet, Received, Wait};
use portcullis_protocol::denial::Denials;
use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::observe::Observer;
use rustix::event::PollFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where it comes from.
#[derive(Debug)]
pub(crate) enum Told {
    /// The launcher has not handed over the descriptor yet.
    Awaited(Box<Awaited>),
    /// It tells.
    Heard(Box<Observer>),
    /// Nobody tells anything, or any more; what was denied until then.
    Silent(Denials),
}

/// What the observer will be made of.
#[derive(Debug)]
pub(crate) struct Awaited {
    incoming: OwnedFd,
    inlet: Inlet,
    tables: Compiled,
    own_proc: bool,
}

impl Told {
    /// Waits for the descriptor on a socket. `tables` must be those of the view; `own_proc` as [`Observer::new`] has it.
    pub(crate) fn new(incoming: OwnedFd, tables: Compiled, own_proc: bool) -> Self {
        Self::Awaited(Box::new(Awaited { incoming, inlet: Inlet::new(), tables, own_proc }))
    }

    /// What to wait for. None when nothing more comes: such a descriptor would be ready for ever.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Awaited(awaited) => Some(awaited.incoming.as_fd()),
            Self::Heard(observer) => Some(observer.as_fd()),
            Self::Silent(_) => None,
        }
    }

    /// Takes up the descriptor, or one thing that is told.
    pub(crate) fn take(self, ready: PollFlags) -> Self {
        match self {
            Self::Awaited(mut awaited) => match awaited.inlet.next(awaited.incoming.as_fd(), Wait::No) {
                Ok(Received::Frame(_, mut descriptors)) => match descriptors.pop() {
                    Some(listener) => Self::Heard(Box::new(Observer::new(listener, awaited.tables, awaited.own_proc))),
                    None => Self::Silent(Denials::default()),
                },
                Ok(Received::Later) => Self::Awaited(awaited),
                // This kernel cannot tell, or the launcher failed before.
                Ok(Received::End) | Err(_) => Self::Silent(Denials::default()),
            },
            Self::Heard(mut observer) => {
                // Without anything to take, the last process that could have told is gone.
                if ready.contains(PollFlags::IN) && observer.take() {
                    Self::Heard(observer)
                } else {
                    Self::Silent(observer.denials)
                }
            }
            Self::Silent(denials) => Self::Silent(denials),
        }
    }

    /// What was denied so far.
    pub(crate) fn denials(&mut self) -> Denials {
        match self {
            Self::Awaited(_) => Denials::default(),
            Self::Heard(observer) => std::mem::take(&mut observer.denials),
            Self::Silent(denials) => std::mem::take(denials),
        }
    }
}

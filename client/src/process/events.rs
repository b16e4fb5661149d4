//! What happens to a process.

use crate::mailbox::Listener;
use futures_util::Stream;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Something that happened to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// It wrote.
    Output {
        /// Its number.
        seq: u64,
        /// Where.
        stream: event::Stream,
        /// What.
        chunk: Vec<u8>,
    },
    /// It ended.
    Exited {
        /// Its number.
        seq: u64,
        /// Its status, or 128 + the signal that ended it.
        code: i32,
        /// Whether it failed and its sandbox was seen to refuse something.
        denied: bool,
        /// What its sandbox was seen to refuse.
        denials: Denials,
    },
    /// It ended and all its streams did. Nothing follows.
    Closed {
        /// Its number.
        seq: u64,
    },
    /// Events that the server did not keep until this client came back. The process goes on.
    Gap {
        /// The number of the first.
        from: u64,
        /// The number of the last.
        to: u64,
        /// The bytes of output in them, if the server knows.
        bytes: Option<u64>,
    },
    /// What happened to it further is not known, and this is why. Nothing follows.
    Failed {
        /// Why.
        message: String,
    },
}

impl ProcessEvent {
    /// The number of the last event that this speaks of; none for what is not the server's.
    #[must_use]
    pub fn last_seq(&self) -> Option<u64> {
        match self {
            Self::Output { seq, .. } | Self::Exited { seq, .. } | Self::Closed { seq } => Some(*seq),
            Self::Gap { to, .. } => Some(*to),
            Self::Failed { .. } => None,
        }
    }

    /// The bytes that count against bounds.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Output { chunk, .. } => chunk.len(),
            Self::Exited { denials, .. } => denials.size(),
            Self::Closed { .. } | Self::Gap { .. } => 0,
            Self::Failed { message } => message.len(),
        }
    }
}

/// What happens to a process, in order: a stream. It ends after [`ProcessEvent::Closed`] or [`ProcessEvent::Failed`], and when
/// the client is dropped. Dropping it drops what happens from then on; the process runs on.
///
/// What is not taken waits in a bounded queue. A server that is told how far its client has come stops sending for this one
/// process. Of any other server nothing is read while 8 MiB wait here, so that then everything of this client is held up.
#[derive(Debug)]
pub struct ProcessEvents(pub(crate) Listener<ProcessEvent>);

impl ProcessEvents {
    /// The next event, in order.
    pub async fn next(&mut self) -> Option<ProcessEvent> {
        std::future::poll_fn(|task| self.0.poll(task)).await
    }
}

impl Stream for ProcessEvents {
    type Item = ProcessEvent;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<ProcessEvent>> {
        self.0.poll(task)
    }
}

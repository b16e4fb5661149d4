//! What goes into a session's state and what comes out.

use crate::process::pump::Feed;
use portcullis_protocol::helper::Enforced;
use portcullis_protocol::process::{
    ListResult, ReadParams, ReadResult, Size, StartResult, TerminateResult, WriteParams, WriteResult,
};
use portcullis_protocol::rpc::RpcError;
use portcullis_protocol::signal::Signal;
use std::time::Duration;

/// Names a call that wants an answer.
pub(super) type Call = u64;

/// How long things are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retention {
    /// A session without a connection.
    pub(super) detached: Duration,
    /// A process after its close.
    pub(super) closed: Duration,
}

/// A start, as far as it matters before it is carried out.
#[derive(Debug, Clone)]
pub(super) struct Start {
    pub(super) process: String,
    pub(super) tty: bool,
    pub(super) takes_input: bool,
    /// Tells a start that is sent again from another one.
    pub(super) operation: Option<String>,
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
}

/// On what terms a connection takes a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The connection that has it is to give way.
    pub(crate) take_over: bool,
    /// How long it is to be kept from now on without a connection, and its closed processes.
    pub(crate) retention: Option<Duration>,
}

/// Why a change that was sent again is not answered as the first was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Twice {
    /// The name belongs to another change.
    #[error("this operationId belongs to another call")]
    Another,
    /// Too many are on their way.
    #[error("too many changes with an operationId are on their way")]
    TooMany,
}

/// What happened.
#[derive(Debug)]
pub(super) enum Input {
    Attach {
        call: Call,
        terms: Terms,
    },
    /// A change of files that may have been sent before.
    Change {
        call: Call,
        operation: String,
        digest: [u8; 32],
    },
    /// A change came to its end.
    Changed {
        operation: String,
        outcome: Result<(), RpcError>,
    },
    Detach {
        generation: u64,
    },
    Start {
        call: Call,
        start: Start,
    },
    Started {
        key: u64,
        sandbox_type: &'static str,
        /// What is enforced on it, if its client wants to know.
        enforcement: Option<Box<Enforced>>,
    },
    StartFailed {
        key: u64,
        error: RpcError,
    },
    Read {
        call: Call,
        params: ReadParams,
    },
    Write {
        call: Call,
        params: WriteParams,
    },
    CloseStdin {
        call: Call,
        process: String,
    },
    Resize {
        call: Call,
        process: String,
        size: Size,
    },
    List {
        call: Call,
    },
    Signal {
        call: Call,
        process: String,
        signal: Signal,
    },
    Terminate {
        call: Call,
        process: String,
    },
    Feed {
        key: u64,
        feed: Feed,
    },
    /// The pump ended without a close: a defect of ours, but nobody shall wait for it.
    PumpLost {
        key: u64,
    },
    Timeout,
    Close,
}

/// What to do.
#[derive(Debug)]
pub(super) enum Output {
    Reply(Call, Answer),
    /// The attached connection is to leave; its `Detach` must follow.
    Evict,
    /// Somebody else wanted the session: is the attached connection's client still there?
    Doubt,
    /// Carry out the change of this call; `Changed` must follow.
    Change {
        call: Call,
    },
    /// Start the process of this call; `Started` or `StartFailed` must follow.
    Launch {
        call: Call,
        key: u64,
    },
    Grant {
        key: u64,
        total: u64,
    },
    Write {
        key: u64,
        chunk: Vec<u8>,
    },
    /// The input ends behind what was written.
    CloseStdin {
        key: u64,
    },
    Resize {
        key: u64,
        size: Size,
    },
    Signal {
        key: u64,
        signal: Signal,
    },
    Kill {
        key: u64,
    },
    /// The process is forgotten.
    Forget {
        key: u64,
    },
    /// The session has expired or was closed: nothing more is answered.
    End,
}

/// An answer to a call.
#[derive(Debug)]
pub(super) enum Answer {
    /// The generation, or none if another connection has the session.
    Attach(Option<u64>),
    Start(Result<StartResult, RpcError>),
    Read(Result<ReadResult, RpcError>),
    Write(Result<WriteResult, RpcError>),
    /// Of a call that answers nothing but that it was carried out.
    Done(Result<(), RpcError>),
    List(ListResult),
    Terminate(TerminateResult),
}

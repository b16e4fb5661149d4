//! What goes into a session's state and what comes out.

use super::delivery::Proof;
use super::guard::Bounds;
use super::log::{Extent, Write};
use crate::answer::Form;
use crate::process::pump::Feed;
use portcullis_protocol::helper::Enforced;
use portcullis_protocol::limit::{LimitInForce, TreeEnd};
use portcullis_protocol::logged::{AcknowledgeParams, WhenFull};
use portcullis_protocol::process::{
    ListResult, ReadParams, ReadResult, Size, StartResult, TerminateResult, WriteParams, WriteResult,
};
use portcullis_protocol::rpc::RpcError;
use portcullis_protocol::signal::Signal;
use std::num::NonZeroU64;
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
    /// What becomes of its output when there is no room for it and nobody is attached.
    pub(super) when_full: WhenFull,
    pub(super) bounds: Bounds,
    /// Bytes of output.
    pub(super) output: Option<NonZeroU64>,
}

/// On what terms a connection takes a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The connection that has it is to give way.
    pub(crate) take_over: bool,
    /// How long it is to be kept from now on without a connection, and its closed processes.
    pub(crate) retention: Option<Duration>,
    /// What proves that its client has received what it was sent.
    pub(crate) proof: Proof,
    /// How output travels to it.
    pub(crate) form: Form,
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
        digest: u64,
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
        /// By the kernel.
        limits: Vec<LimitInForce>,
        tree: TreeEnd,
    },
    StartFailed {
        key: u64,
        error: RpcError,
    },
    Read {
        call: Call,
        params: ReadParams,
    },
    Acknowledge {
        call: Call,
        params: AcknowledgeParams,
    },
    /// A mark was answered.
    Delivered {
        generation: u64,
        mark: u64,
    },
    /// A page that was answered with a receipt is in the connection's queue.
    HandedOut {
        generation: u64,
        page: u64,
    },
    /// As a page wanted it.
    RoomReserved {
        call: Call,
    },
    SpoolWritten {
        key: u64,
        is_written: bool,
    },
    SpoolRead {
        call: Call,
        slots: Result<Vec<Vec<u8>>, RpcError>,
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
        /// Between SIGTERM and SIGKILL; zero for SIGKILL at once.
        grace: Duration,
        /// The answer is to say how everything is ended.
        report: bool,
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
    /// The change of this call is on its way already: what would carry it out a second time is to be dropped, with its place in
    /// the order, for which the first may be waiting.
    Repeated {
        call: Call,
    },
    /// Carry out the change of this call; `Changed` must follow.
    Change {
        call: Call,
    },
    /// Start the process of this call; `Started` or `StartFailed` must follow.
    Launch {
        call: Call,
        key: u64,
    },
    /// A page needs so many bytes of its connection's room; `RoomReserved` must follow, or its call was answered.
    ReserveRoom {
        call: Call,
        bytes: usize,
    },
    /// Write this to the spool of the process; `SpoolWritten` must follow.
    Spool {
        key: u64,
        write: Write,
    },
    /// Read this of the spool of the process, behind what was to be written before; `SpoolRead` must follow.
    ReadSpool {
        call: Call,
        key: u64,
        extents: Vec<Extent>,
    },
    /// The spool of the process holds nothing any more.
    SpoolDrained {
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
    /// What an ended process has left behind is to end.
    KillLeft {
        key: u64,
    },
    /// Output that others hold open after the end is not waited for any more.
    Abandon {
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
    /// And the number under which it is to be reported once it is handed out, if it is.
    Read(Result<ReadResult, RpcError>, Option<u64>),
    Write(Result<WriteResult, RpcError>),
    /// Of a call that answers nothing but that it was carried out.
    Done(Result<(), RpcError>),
    List(ListResult),
    Terminate(TerminateResult),
}

impl Answer {
    pub(super) fn read_failed(error: RpcError) -> Self {
        Self::Read(Err(error), None)
    }
}

/// What spools may take, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SpoolLimits {
    /// That of a process.
    pub(crate) process: u64,
    /// Those of a session together.
    pub(crate) session: u64,
}

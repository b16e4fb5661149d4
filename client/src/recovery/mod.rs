//! The client without sockets and clocks: one input, then its outputs until there is none.
//!
//! It has at most one link at a time. A link that is to be the next one is a candidate until its session is attached and, of a
//! server that cannot answer pages of events, every process was caught up on it; what an older link still says changes nothing.
//! One deadline is for the whole of a recovery.

mod attempt;
mod binary;
mod calls;
pub(crate) mod catch_up;
mod http;
pub(crate) mod order;
mod process;
#[cfg(test)]
mod tests;

use crate::pending::{Again, Call, Pending, Slot};
use crate::process::ProcessEvent;
use crate::{ClientStatus, ExecServerError};
pub(crate) use binary::Reply;
use http::Body;
use portcullis_protocol::environment::Extensions;
use portcullis_protocol::init::InitializeResult;
use process::Route;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};
use tokio_tungstenite::tungstenite::Bytes;

/// Bytes of output in a page of events: what a server answers at most, and what is asked for at least.
const MOST_PAGE: u64 = 1 << 20;
const LEAST_PAGE: u64 = 16 << 10;
/// Between two attempts on a plain WebSocket.
pub(crate) const RETRY: Duration = Duration::from_millis(100);
/// Bound of what waits for one listener, if the server is not told how far its client has come. Then no more is read.
pub(crate) const MOST_UNREAD: usize = 8 << 20;
/// The same if it is told: then it holds up the process alone, long before this.
const MOST_UNREAD_ACKNOWLEDGED: usize = 32 << 20;
/// What an event counts for beyond its bytes.
pub(crate) const EVENT_COST: usize = 128;

/// Names a link, newer ones by greater numbers.
pub(crate) type LinkId = u64;
/// Names an answer that a handle waits for.
pub(crate) type Ticket = u64;
/// Names a process as long as somebody follows it, or the body of an answer over HTTP. Never used again.
pub(crate) type RouteId = u64;

/// What does not change in a client's life.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) client_name: String,
    /// The session to begin with.
    pub(crate) resume: Option<String>,
    pub(crate) take_over: bool,
    pub(crate) keep_handles: bool,
    pub(crate) retention: Option<Duration>,
    /// The way to the server carries messages with bytes, all the way: between a rendezvous and a server there may be somebody who
    /// passes a request for them on, and their answers as what they are not.
    pub(crate) asks_for_binary: bool,
    pub(crate) reconnect: bool,
    pub(crate) recovery_deadline: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) initialize_timeout: Duration,
}

/// What happens to the client.
#[derive(Debug)]
pub(crate) enum Input {
    /// A handle calls.
    Call { ticket: Ticket, method: String, params: String, again: Again, is_cleanup: bool, fail_fast: bool },
    /// A handle starts a process; `again` if the server knows a start that it has seen.
    Start { ticket: Ticket, route: RouteId, process: String, params: String, again: bool, fail_fast: bool },
    /// A handle follows a process that runs.
    Attach { ticket: Ticket, route: RouteId, process: String, after: u64 },
    /// A handle makes a request over HTTP whose body comes in parts.
    Http { ticket: Ticket, route: RouteId, request: String, params: String, fail_fast: bool },
    /// Nobody took the process that was started: it is to be ended.
    Abandon { route: RouteId },
    /// Somebody took events or parts of a body, up to `seq`, or does not listen any more.
    Taken { route: RouteId, seq: u64, cost: usize, events: usize, gone: bool },
    /// A link is there.
    Opened { link: LinkId },
    /// It could not be had.
    Unreachable { link: LinkId, reason: String },
    /// It brought a message.
    Message { link: LinkId, text: String },
    /// It brought a binary one.
    Binary { link: LinkId, message: Bytes },
    /// It ended.
    Ended { link: LinkId, reason: String },
    /// Time went by.
    Tick,
}

/// What the client wants done.
#[derive(Debug)]
pub(crate) enum Output {
    /// Try to open a link.
    Dial { link: LinkId },
    /// Stop trying, or close it.
    HangUp { link: LinkId },
    /// Send a message.
    Send { link: LinkId, text: String },
    /// The first handshake succeeded or failed.
    Ready(Result<Box<InitializeResult>, ExecServerError>),
    /// The answer of a ticket, the only one.
    Answer { ticket: Ticket, outcome: Result<Reply, ExecServerError> },
    /// Something happened to a process.
    Event { route: RouteId, event: ProcessEvent, cost: usize },
    /// A part of a body.
    Part { route: RouteId, part: Result<Vec<u8>, ExecServerError>, seq: u64, cost: usize },
    /// Nothing follows on this route.
    End { route: RouteId },
    /// Where the client is in its life.
    Status(ClientStatus),
}

/// Whose a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Caller(Ticket),
    Start(RouteId, Ticket),
    /// A read of what was missed.
    CatchUp(RouteId),
    Acknowledge(RouteId),
    /// The end of a process that nobody follows.
    CleanUp(RouteId),
    Http(RouteId, Ticket),
    Initialize,
}

#[derive(Debug)]
enum Phase {
    /// The first link.
    First(Attempt),
    Connected(LinkId),
    Recovering {
        deadline: Instant,
        disconnect: String,
        last_error: Option<String>,
        next: Next,
    },
    Failed(String),
}

#[derive(Debug)]
enum Next {
    Retry(Instant),
    Attempt(Attempt),
}

/// A candidate.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    link: LinkId,
    step: Step,
    until: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Dialling,
    Initializing,
    CatchingUp,
}

/// The client.
#[derive(Debug)]
pub(crate) struct Core {
    settings: Settings,
    phase: Phase,
    session: Option<String>,
    extensions: Extensions,
    links: LinkId,
    generation: u64,
    /// The link may bring binary messages: they were asked for, and not refused.
    takes_binary: bool,
    pending: Pending<Owner>,
    routes: BTreeMap<RouteId, Route>,
    /// Who follows which process; one at a time.
    names: HashMap<String, RouteId>,
    bodies: BTreeMap<RouteId, Body>,
    /// How much is asked for in one page of events: less after each cut on the way, so that also a link that breaks all the time
    /// brings something over.
    page_bytes: u64,
    outputs: VecDeque<Output>,
}

impl Core {
    /// A client that dials its first link.
    pub(crate) fn new(settings: Settings, now: Instant) -> Self {
        let attempt = Attempt { link: 1, step: Step::Dialling, until: now + settings.connect_timeout };
        Self {
            session: settings.resume.clone(),
            settings,
            phase: Phase::First(attempt),
            extensions: Extensions::default(),
            links: 1,
            generation: 0,
            takes_binary: false,
            pending: Pending::new(),
            routes: BTreeMap::new(),
            names: HashMap::new(),
            bodies: BTreeMap::new(),
            page_bytes: MOST_PAGE,
            outputs: VecDeque::from([Output::Dial { link: 1 }]),
        }
    }

    /// Takes one input.
    pub(crate) fn handle(&mut self, input: Input, now: Instant) {
        self.expire(now);
        match input {
            Input::Call { ticket, method, params, again, is_cleanup, fail_fast } => {
                self.call(Owner::Caller(ticket), ticket, (method, params), again, is_cleanup, fail_fast);
            }
            Input::Start { ticket, route, process, params, again, fail_fast } => {
                self.start(ticket, route, process, params, again, fail_fast);
            }
            Input::Attach { ticket, route, process, after } => self.attach(ticket, route, process, after),
            Input::Http { ticket, route, request, params, fail_fast } => self.http(ticket, route, request, params, fail_fast),
            Input::Abandon { route } => self.abandon(route),
            Input::Taken { route, seq, cost, events, gone } => self.taken(route, seq, cost, events, gone),
            Input::Opened { link } => self.opened(link, now),
            Input::Unreachable { link, reason } => self.unreachable(link, reason, now),
            Input::Message { link, text } if self.link() == Some(link) => {
                let taken = self.message(&text, now);
                taken.unwrap_or_else(|reason| self.lost(link, &reason, now));
            }
            Input::Binary { link, message } if self.link() == Some(link) && self.takes_binary => {
                let taken = self.binary(message);
                taken.unwrap_or_else(|reason| self.lost(link, &reason, now));
            }
            Input::Ended { link, reason } => self.lost(link, &reason, now),
            Input::Message { .. } | Input::Binary { .. } | Input::Tick => {}
        }
        self.install_if_caught_up();
    }

    /// The next thing to do.
    pub(crate) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Input::Tick`] is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::First(attempt) => (attempt.step != Step::CatchingUp).then_some(attempt.until),
            Phase::Recovering { deadline, next, .. } => Some((*deadline).min(match next {
                Next::Retry(at) => *at,
                Next::Attempt(attempt) => attempt.until,
            })),
            Phase::Connected(_) | Phase::Failed(_) => None,
        }
    }

    /// False while too much waits for a listener: then nothing is to be read from the link. A recovery does not wait for
    /// listeners, since its time is short and what it reads has the server's bound.
    pub(crate) fn wants_messages(&self) -> bool {
        if !self.is_connected() {
            return true;
        }
        let most = if self.extensions.process_acknowledge { MOST_UNREAD_ACKNOWLEDGED } else { MOST_UNREAD };
        self.routes.values().all(|route| route.unread <= most) && self.bodies.values().all(|body| body.unread <= MOST_UNREAD)
    }

    pub(crate) fn has_failed(&self) -> bool {
        matches!(self.phase, Phase::Failed(_))
    }

    /// The link whose messages count: the current one, or the candidate.
    fn link(&self) -> Option<LinkId> {
        match &self.phase {
            Phase::First(attempt) | Phase::Recovering { next: Next::Attempt(attempt), .. } => Some(attempt.link),
            Phase::Connected(link) => Some(*link),
            Phase::Recovering { next: Next::Retry(_), .. } | Phase::Failed(_) => None,
        }
    }

    fn attempt(&mut self) -> Option<&mut Attempt> {
        match &mut self.phase {
            Phase::First(attempt) | Phase::Recovering { next: Next::Attempt(attempt), .. } => Some(attempt),
            _ => None,
        }
    }

    fn is_connected(&self) -> bool {
        matches!(self.phase, Phase::Connected(_))
    }

    fn expire(&mut self, now: Instant) {
        let (seconds, connect, initialize) =
            (self.settings.recovery_deadline.as_secs_f64(), self.settings.connect_timeout, self.settings.initialize_timeout);
        let late = |step| match step {
            Step::Dialling => format!("no connection within {} s", connect.as_secs_f64()),
            Step::Initializing => format!("no answer to initialize within {} s", initialize.as_secs_f64()),
            Step::CatchingUp => format!("no answer to process/read within {} s", initialize.as_secs_f64()),
        };
        match &self.phase {
            Phase::Recovering { deadline, disconnect, last_error, .. } if *deadline <= now => {
                let last = last_error.as_ref().map_or_else(String::new, |error| format!("; last: {error}"));
                let text =
                    format!("{disconnect}; failed to resume exec-server session: recovery timed out after {seconds}s{last}");
                self.fail(text);
            }
            Phase::Recovering { next: Next::Retry(at), .. } if *at <= now => self.dial(now),
            Phase::Recovering { next: Next::Attempt(Attempt { link, step, until }), .. } if *until <= now => {
                let (link, reason) = (*link, late(*step));
                self.lost(link, &reason, now);
            }
            Phase::First(Attempt { step, until, .. }) if *until <= now => {
                let reason = late(*step);
                self.first_failed(ExecServerError::Disconnected(reason));
            }
            _ => {}
        }
    }

    /// A link ended, or is to be ended. Only the newest one counts.
    fn lost(&mut self, link: LinkId, reason: &str, now: Instant) {
        if self.link() != Some(link) {
            return;
        }
        if let Phase::First(_) = self.phase {
            self.first_failed(ExecServerError::Disconnected(reason.to_owned()));
            return;
        }
        self.outputs.push_back(Output::HangUp { link });
        if let Phase::Recovering { next, last_error, .. } = &mut self.phase {
            *next = Next::Retry(now + RETRY);
            *last_error = Some(reason.to_owned());
            self.cut(reason);
            return;
        }
        let disconnect = format!("exec-server transport disconnected: {reason}");
        let (deadline, next) = (now + self.settings.recovery_deadline, Next::Retry(now));
        // First of all, so that nothing more is sent on the old link.
        self.phase = Phase::Recovering { deadline, disconnect: disconnect.clone(), last_error: None, next };
        self.end_bodies(&disconnect);
        self.cut(reason);
        if !self.settings.reconnect || self.session.is_none() {
            self.fail(disconnect);
            return;
        }
        self.outputs.push_back(Output::Status(ClientStatus::Recovering));
        self.dial(now);
    }

    /// What was on the way is answered, stands in line again, or is read anew.
    fn cut(&mut self, reason: &str) {
        for call in self.pending.cut() {
            let error = call.failed(reason, None);
            self.unanswered(call.owner, error);
        }
        if self.routes.values().any(Route::is_reading) {
            self.page_bytes = (self.page_bytes / 2).max(LEAST_PAGE);
        }
        for route in self.routes.values_mut() {
            route.cut();
        }
    }

    fn first_failed(&mut self, error: ExecServerError) {
        if let Some(link) = self.link() {
            self.outputs.push_back(Output::HangUp { link });
        }
        self.outputs.push_back(Output::Ready(Err(error.clone())));
        self.fail(error.to_string());
    }

    /// The end, once: the first message stays.
    fn fail(&mut self, message: String) {
        if self.has_failed() {
            return;
        }
        if let Some(link) = self.link() {
            self.outputs.push_back(Output::HangUp { link });
        }
        self.phase = Phase::Failed(message.clone());
        self.end_bodies(&message);
        for call in self.pending.end() {
            let error = call.failed(&message, Some(&message));
            self.unanswered(call.owner, error);
        }
        for (id, mut route) in std::mem::take(&mut self.routes) {
            self.end_route(id, &mut route, &message);
        }
        self.names.clear();
        self.outputs.push_back(Output::Status(ClientStatus::Failed(message)));
    }

    /// Sends a call, or puts it in line.
    fn send_or_line_up(&mut self, call: Call<Owner>) {
        if self.is_connected() { self.send(call) } else { self.pending.line_up(call) }
    }

    fn send(&mut self, call: Call<Owner>) {
        let Some(link) = self.link() else { return self.pending.line_up(call) };
        let (method, params) = (serde_json::Value::from(call.method.as_str()), call.params.clone());
        let id = self.pending.send(call);
        let text = format!(r#"{{"id":{id},"method":{method},"params":{params}}}"#);
        self.outputs.push_back(Output::Send { link, text });
    }

    /// Sends a call of the client itself at once, on the candidate too.
    fn send_own(&mut self, owner: Owner, method: &str, params: &impl Serialize, again: Again) {
        let params = serde_json::to_string(params).expect("Invariant: parameters of texts and numbers can be written");
        self.send(Call { owner, method: method.to_owned(), params, again, slot: Slot::Own, sent: false });
    }
}

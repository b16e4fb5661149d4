//! Processes that are followed: started or attached to, live, behind, abandoned.

use super::order::Order;
use super::{Core, EVENT_COST, MOST_PAGE, Output, Owner, Phase, Reply, RouteId, Ticket, catch_up};
use crate::ExecServerError;
use crate::pending::{Again, Call, Slot};
use crate::process::ProcessEvent;
use portcullis_protocol::logged::AcknowledgeParams;
use portcullis_protocol::process::{ReadParams, ReadResult, TerminateParams};
use portcullis_protocol::rpc::RpcError;
use serde_json::value::RawValue;

/// What may wait for its listener before a process that is behind is read no further.
const PAUSE_UNREAD: usize = 4 << 20;
/// What must not wait any more before it is read further.
const RESUME_UNREAD: usize = 2 << 20;
/// The server is told how far its client has come after so many bytes.
const ACKNOWLEDGE_BYTES: usize = 256 * 1024;
/// And after so many events.
const ACKNOWLEDGE_EVENTS: usize = 64;

/// A process that is followed.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) process: String,
    order: Order<ProcessEvent>,
    stage: Stage,
    /// The greatest number of what came live and was not kept, to be read.
    dropped: u64,
    has_exited: bool,
    is_heard: bool,
    /// What waits for the listener counts for this much.
    pub(super) unread: usize,
    taken: Taken,
}

#[derive(Debug)]
enum Stage {
    /// Its start is not answered. `is_again` if more than one link had it: what happened in between is to be read.
    Starting {
        is_again: bool,
    },
    /// To be read from the last event on before it is live. `ticket` if somebody waits to be attached.
    Behind {
        is_asked: bool,
        ticket: Option<Ticket>,
    },
    Live,
    /// Nobody follows it and it is being ended.
    Abandoned,
    /// Its last event came out.
    Closed,
}

/// How far the listener has come.
#[derive(Debug, Default)]
struct Taken {
    seq: u64,
    told: u64,
    bytes: usize,
    events: usize,
    is_telling: bool,
}

impl Route {
    fn new(process: String, after: u64, stage: Stage) -> Self {
        Self {
            process,
            order: Order::new(after),
            stage,
            dropped: 0,
            has_exited: false,
            is_heard: true,
            unread: 0,
            taken: Taken { seq: after, told: after, ..Taken::default() },
        }
    }

    /// Whether something must be read before its link is installed. One whose listener is far behind goes on after that.
    pub(super) fn is_reading(&self) -> bool {
        matches!(self.stage, Stage::Behind { is_asked: true, .. })
    }

    /// Its link is gone.
    pub(super) fn cut(&mut self) {
        if std::mem::take(&mut self.taken.is_telling) {
            // Whether it was heard is not known.
            self.taken.told = 0;
        }
        match &mut self.stage {
            Stage::Live => self.stage = Stage::Behind { is_asked: false, ticket: None },
            Stage::Behind { is_asked, .. } => *is_asked = false,
            Stage::Starting { is_again } => *is_again = true,
            Stage::Abandoned | Stage::Closed => {}
        }
    }
}

impl Core {
    pub(super) fn start(&mut self, ticket: Ticket, id: RouteId, process: String, params: String, again: bool, fail_fast: bool) {
        if self.names.contains_key(&process) {
            self.outputs.push_back(Output::Answer { ticket, outcome: Err(ExecServerError::InUse(process)) });
            self.outputs.push_back(Output::End { route: id });
            return;
        }
        let again = if again { Again::Send } else { Again::Lost };
        self.names.insert(process.clone(), id);
        self.routes.insert(id, Route::new(process, 0, Stage::Starting { is_again: false }));
        let call = ("process/start".to_owned(), params);
        if !self.call(Owner::Start(id, ticket), ticket, call, again, false, fail_fast) {
            self.outputs.push_back(Output::End { route: id });
            self.forget(id);
        }
    }

    pub(super) fn attach(&mut self, ticket: Ticket, id: RouteId, process: String, after: u64) {
        let refused = match self.may_call(false) {
            Ok(()) if self.names.contains_key(&process) => Some(ExecServerError::InUse(process.clone())),
            Ok(()) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = refused {
            self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
            self.outputs.push_back(Output::End { route: id });
            return;
        }
        self.names.insert(process.clone(), id);
        self.routes.insert(id, Route::new(process, after, Stage::Behind { is_asked: false, ticket: Some(ticket) }));
        if self.is_connected() {
            self.read(id);
        }
    }

    /// The answer to a start.
    pub(super) fn started(&mut self, id: RouteId, ticket: Ticket, outcome: Result<&RawValue, RpcError>) {
        let is_ok = outcome.is_ok();
        let outcome = outcome.map(Reply::from).map_err(ExecServerError::Server);
        self.outputs.push_back(Output::Answer { ticket, outcome });
        let Some(route) = self.routes.get_mut(&id) else { return };
        let Stage::Starting { is_again } = route.stage else { return };
        if !is_ok {
            self.outputs.push_back(Output::End { route: id });
            self.forget(id);
        } else if is_again || route.dropped > 0 {
            route.stage = Stage::Behind { is_asked: false, ticket: None };
            self.read(id);
        } else {
            route.stage = Stage::Live;
            self.publish_contiguous(id);
        }
    }

    /// Asks for what every process missed.
    pub(super) fn catch_up_all(&mut self) {
        let behind = self.routes.iter().filter(|(_, route)| matches!(route.stage, Stage::Behind { is_asked: false, .. }));
        let behind: Vec<RouteId> = behind.map(|(id, _)| *id).collect();
        for id in behind {
            self.read(id);
        }
    }

    /// Tells of every process how far its listener has come.
    pub(super) fn acknowledge_all(&mut self) {
        let ids: Vec<RouteId> = self.routes.keys().copied().collect();
        for id in ids {
            self.acknowledge(id);
        }
    }

    /// Asks for what a process missed, unless its listener has enough to do.
    fn read(&mut self, id: RouteId) {
        let events = self.extensions.process_events;
        let Some(route) = self.routes.get_mut(&id) else { return };
        let Stage::Behind { is_asked: is_asked @ false, .. } = &mut route.stage else { return };
        if events && route.unread > PAUSE_UNREAD {
            return;
        }
        *is_asked = true;
        let (process_id, after_seq) = (route.process.clone(), Some(route.order.last()));
        // Of a server of another make everything must come in one answer.
        let max_bytes = events.then_some(self.page_bytes);
        let params = ReadParams { process_id, after_seq, max_bytes, wait_ms: Some(0), events };
        self.send_own(Owner::CatchUp(id), "process/read", &params, Again::Fail);
    }

    /// The answer to such a read.
    pub(super) fn caught(&mut self, id: RouteId, outcome: Result<&RawValue, RpcError>) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        let Stage::Behind { is_asked, ticket } = &mut route.stage else { return };
        *is_asked = false;
        let ticket = ticket.take();
        let read: Result<ReadResult, (String, Option<RpcError>)> = match outcome {
            Ok(result) => serde_json::from_str(result.get()).map_err(|error| (error.to_string(), None)),
            Err(error) => Err((error.message.clone(), Some(error))),
        };
        if read.is_ok() {
            self.page_bytes = (self.page_bytes * 2).min(MOST_PAGE);
        }
        let brought = match read {
            Ok(read) if self.extensions.process_events => catch_up::page(&mut route.order, read)
                .map(|events| events.map_or((Vec::new(), true), |events| (events, false)))
                .map_err(|reason| (reason, None)),
            Ok(read) => {
                let is_done = read.next_seq > route.dropped;
                catch_up::chunks(&mut route.order, route.has_exited, read)
                    .map(|events| (events, is_done))
                    .map_err(|reason| (reason, None))
            }
            Err(wrong) => Err(wrong),
        };
        match (brought, ticket) {
            (Err((reason, error)), Some(ticket)) => {
                let process = route.process.clone();
                let error = error.map_or(ExecServerError::Process { process, reason }, ExecServerError::Server);
                self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
                self.outputs.push_back(Output::End { route: id });
                self.forget(id);
            }
            (Err((reason, _)), None) => {
                let message = format!("failed to recover process {}: {reason}", route.process);
                self.lose(id, &message);
            }
            (Ok((events, is_done)), ticket) => {
                if let Some(ticket) = ticket {
                    self.outputs.push_back(Output::Answer { ticket, outcome: Ok(Reply::nothing()) });
                }
                self.brought(id, events, is_done);
            }
        }
    }

    /// What a read brought: on with the next one, or live.
    fn brought(&mut self, id: RouteId, events: Vec<ProcessEvent>, is_done: bool) {
        let is_empty = events.is_empty();
        for event in events {
            self.publish(id, event);
        }
        let Some(route) = self.routes.get(&id) else { return };
        let is_short = if is_done { route.dropped > route.order.last() } else { is_empty };
        if is_short && matches!(route.stage, Stage::Behind { .. }) {
            let (process, seq) = (&route.process, route.dropped);
            let message = format!("failed to recover process {process}: the server sent number {seq} and does not know it");
            return self.lose(id, &message);
        }
        match self.routes.get_mut(&id) {
            Some(route) if is_done && matches!(route.stage, Stage::Behind { .. }) => {
                route.stage = Stage::Live;
                self.publish_contiguous(id);
            }
            Some(_) => self.read(id),
            None => {}
        }
    }

    /// Something was announced.
    pub(super) fn live(&mut self, id: RouteId, event: ProcessEvent) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        let Some(seq) = event.last_seq() else { return };
        match route.stage {
            Stage::Live => {
                if route.order.insert(seq, event.size(), event).is_err() {
                    let message = format!(
                        "events of process {} came too far out of order: {} did not come, and {seq} did",
                        route.process,
                        route.order.last() + 1
                    );
                    return self.lose(id, &message);
                }
                self.publish_contiguous(id);
            }
            Stage::Starting { .. } | Stage::Behind { .. } => {
                if route.order.keep(seq, event.size(), event).is_err() {
                    route.dropped = route.dropped.max(seq);
                }
            }
            Stage::Abandoned | Stage::Closed => {}
        }
    }

    fn publish_contiguous(&mut self, id: RouteId) {
        while let Some(event) = self.routes.get_mut(&id).and_then(|route| route.order.pop()) {
            self.publish(id, event);
        }
    }

    fn publish(&mut self, id: RouteId, event: ProcessEvent) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        route.has_exited |= matches!(event, ProcessEvent::Exited { .. });
        let is_last = matches!(event, ProcessEvent::Closed { .. });
        let (cost, seq) = (event.size() + EVENT_COST, event.last_seq());
        route.unread += cost;
        let is_heard = route.is_heard;
        if is_heard {
            self.outputs.push_back(Output::Event { route: id, event, cost });
        }
        if is_last {
            route.stage = Stage::Closed;
            self.names.remove(&route.process);
            self.outputs.push_back(Output::End { route: id });
        }
        if !is_heard {
            self.taken(id, seq.unwrap_or_default(), cost, 1, true);
        }
    }

    /// A listener took events, or is gone and takes what comes by dropping it.
    pub(super) fn taken(&mut self, id: RouteId, seq: u64, cost: usize, events: usize, gone: bool) {
        if self.body_taken(id, cost, gone) {
            return;
        }
        let Some(route) = self.routes.get_mut(&id) else { return };
        route.unread = if gone { 0 } else { route.unread.saturating_sub(cost) };
        let taken = &mut route.taken;
        taken.seq = taken.seq.max(seq);
        taken.bytes += cost.saturating_sub(events * EVENT_COST);
        taken.events += events;
        if gone {
            // What waited for the listener will not be taken by anyone.
            taken.seq = taken.seq.max(route.order.last());
            route.is_heard = false;
        }
        let is_behind = matches!(route.stage, Stage::Behind { is_asked: false, .. });
        if is_behind && route.unread <= RESUME_UNREAD && self.is_connected() {
            self.read(id);
        }
        self.acknowledge(id);
    }

    /// Tells the server how far the listener has come: now and then, one at a time, and at the end.
    fn acknowledge(&mut self, id: RouteId) {
        let is_connected = self.is_connected();
        let Some(route) = self.routes.get_mut(&id) else { return };
        let (taken, is_closed) = (&mut route.taken, matches!(route.stage, Stage::Closed));
        let is_end = is_closed && taken.seq == route.order.last();
        let is_known = self.extensions.process_acknowledge;
        let is_due = taken.bytes >= ACKNOWLEDGE_BYTES || taken.events >= ACKNOWLEDGE_EVENTS || is_end;
        if is_known && is_connected && is_due && !taken.is_telling && taken.seq > taken.told {
            *taken = Taken { seq: taken.seq, told: taken.seq, is_telling: true, ..Taken::default() };
            let params = AcknowledgeParams { process_id: route.process.clone(), seq: taken.seq };
            self.send_own(Owner::Acknowledge(id), "process/acknowledge", &params, Again::Fail);
        } else if is_end && (!is_known || taken.told == taken.seq) && !taken.is_telling {
            self.forget(id);
        }
    }

    pub(super) fn acknowledged(&mut self, id: RouteId) {
        if let Some(route) = self.routes.get_mut(&id) {
            route.taken.is_telling = false;
            self.acknowledge(id);
        }
    }

    /// A process cannot be followed any more: it is ended, and its listener told.
    fn lose(&mut self, id: RouteId, message: &str) {
        if let Some(mut route) = self.routes.remove(&id) {
            self.end_route(id, &mut route, message);
            self.routes.insert(id, route);
            self.clean_up(id);
        }
    }

    /// Tells the listener of a route why nothing follows.
    pub(super) fn end_route(&mut self, id: RouteId, route: &mut Route, message: &str) {
        match std::mem::replace(&mut route.stage, Stage::Abandoned) {
            Stage::Behind { ticket: Some(ticket), .. } => {
                let error = ExecServerError::Failed(message.to_owned());
                self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
            }
            Stage::Behind { ticket: None, .. } | Stage::Live => {
                let event = ProcessEvent::Failed { message: message.to_owned() };
                let cost = event.size() + EVENT_COST;
                self.outputs.push_back(Output::Event { route: id, event, cost });
            }
            // Told before.
            Stage::Abandoned | Stage::Closed => return,
            // Its caller has the answer.
            Stage::Starting { .. } => {}
        }
        route.unread = 0;
        self.outputs.push_back(Output::End { route: id });
    }

    /// Nobody will follow a process that runs, or may run: it is ended. Its id is free again after that.
    pub(super) fn abandon(&mut self, id: RouteId) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        if !matches!(route.stage, Stage::Abandoned | Stage::Closed) && !matches!(self.phase, Phase::Failed(_)) {
            route.stage = Stage::Abandoned;
            route.unread = 0;
            self.outputs.push_back(Output::End { route: id });
            self.clean_up(id);
        }
    }

    fn clean_up(&mut self, id: RouteId) {
        let Some(route) = self.routes.get(&id) else { return };
        let params = TerminateParams { process_id: route.process.clone(), grace_ms: None, report: false };
        let params = serde_json::to_string(&params).expect("Invariant: a text can be written");
        let (owner, method) = (Owner::CleanUp(id), "process/terminate".to_owned());
        let call = Call { owner, method, params, again: Again::Send, slot: Slot::Own, sent: false };
        self.send_or_line_up(call);
    }

    pub(super) fn cleaned_up(&mut self, id: RouteId) {
        self.forget(id);
    }
}

//! Bodies of answers over HTTP that come in parts. They end with their link.

use super::order::Order;
use super::{Core, EVENT_COST, Output, Owner, RouteId, Ticket};
use crate::ExecServerError;
use crate::pending::Again;
use portcullis_protocol::http::BodyDelta;
use portcullis_protocol::rpc::RawParams;

/// A body that comes.
#[derive(Debug)]
pub(super) struct Body {
    request: String,
    order: Order<BodyDelta>,
    /// What waits for the listener counts for this much.
    pub(super) unread: usize,
    is_heard: bool,
    /// Its last part came out.
    is_ended: bool,
}

impl Core {
    pub(super) fn http(&mut self, ticket: Ticket, id: RouteId, request: String, params: String, fail_fast: bool) {
        let is_known = self.bodies.values().any(|body| body.request == request && !body.is_ended);
        if is_known {
            self.outputs.push_back(Output::Answer { ticket, outcome: Err(ExecServerError::InUse(request)) });
            self.outputs.push_back(Output::End { route: id });
            return;
        }
        self.bodies.insert(id, Body { request, order: Order::new(0), unread: 0, is_heard: true, is_ended: false });
        let call = ("http/request".to_owned(), params);
        if !self.call(Owner::Http(id, ticket), ticket, call, Again::Lost, false, fail_fast) {
            self.end_body(id, None);
        }
    }

    pub(super) fn body_delta(&mut self, params: RawParams<'_>) -> Result<(), String> {
        let delta: BodyDelta = serde_json::from_str(params.get())
            .map_err(|error| format!("the server's http/request/bodyDelta is not understood: {error}"))?;
        let found = self.bodies.iter_mut().find(|(_, body)| body.request == delta.request_id && !body.is_ended);
        let Some((id, body)) = found else { return Ok(()) };
        let id = *id;
        if body.order.insert(delta.seq, delta.delta.0.len(), delta).is_err() {
            self.end_body(id, Some("its parts came too far out of order"));
            return Ok(());
        }
        while let Some(BodyDelta { seq, delta, done, error, detail, .. }) = body.order.pop() {
            if !delta.0.is_empty() && body.is_heard {
                let cost = delta.0.len() + EVENT_COST;
                body.unread += cost;
                self.outputs.push_back(Output::Part { route: id, part: Ok(delta.0), seq, cost });
            }
            if done || error.is_some() {
                let reason = match (error, detail) {
                    (Some(error), Some(detail)) => Some(format!("{error}: {detail}")),
                    (error, _) => error,
                };
                self.end_body(id, reason.as_deref());
                break;
            }
        }
        Ok(())
    }

    /// A body is at its end, or breaks off.
    pub(super) fn end_body(&mut self, id: RouteId, error: Option<&str>) {
        let Some(body) = self.bodies.get_mut(&id).filter(|body| !body.is_ended) else { return };
        body.is_ended = true;
        if let Some(reason) = error {
            let error = ExecServerError::Body { request: body.request.clone(), reason: reason.to_owned() };
            self.outputs.push_back(Output::Part { route: id, part: Err(error), seq: 0, cost: 0 });
        }
        self.outputs.push_back(Output::End { route: id });
        if body.unread == 0 {
            self.bodies.remove(&id);
        }
    }

    /// The link of all bodies is gone. A request that is still in line has no body yet.
    pub(super) fn end_bodies(&mut self, reason: &str) {
        let ids: Vec<RouteId> = self.bodies.keys().copied().filter(|id| !self.is_in_line(*id)).collect();
        for id in ids {
            self.end_body(id, Some(reason));
        }
    }

    fn is_in_line(&self, id: RouteId) -> bool {
        !self.has_failed() && self.pending.in_line().any(|call| matches!(call.owner, Owner::Http(route, _) if route == id))
    }

    pub(super) fn body_taken(&mut self, id: RouteId, cost: usize, gone: bool) -> bool {
        let Some(body) = self.bodies.get_mut(&id) else { return false };
        body.unread = if gone { 0 } else { body.unread.saturating_sub(cost) };
        body.is_heard &= !gone;
        if body.is_ended && body.unread == 0 {
            self.bodies.remove(&id);
        }
        true
    }
}

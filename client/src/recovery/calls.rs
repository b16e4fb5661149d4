//! Calls and their answers, and what the server says of itself.

use super::{Core, Output, Owner, Phase, Reply, RouteId, Ticket};
use crate::ExecServerError;
use crate::pending::{Again, Call};
use crate::process::ProcessEvent;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::method::Notice;
use portcullis_protocol::process::{ClosedNotice, ExitedNotice, OutputNotice};
use portcullis_protocol::rpc::{self, Id, Message, RawParams, RpcError};
use serde_json::value::RawValue;
use std::time::Instant;

impl Core {
    /// A handle's call: sent, put in line, or refused.
    pub(super) fn call(
        &mut self,
        owner: Owner,
        ticket: Ticket,
        (method, params): (String, String),
        again: Again,
        is_cleanup: bool,
        fail_fast: bool,
    ) -> bool {
        let again = if fail_fast && again == Again::Send { Again::Lost } else { again };
        match self.may_call(fail_fast).and_then(|()| self.pending.admit(is_cleanup)) {
            Ok(slot) => {
                self.send_or_line_up(Call { owner, method, params, again, slot, sent: false });
                true
            }
            Err(error) => {
                self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
                false
            }
        }
    }

    pub(super) fn may_call(&self, fail_fast: bool) -> Result<(), ExecServerError> {
        match &self.phase {
            Phase::Failed(message) => Err(ExecServerError::Failed(message.clone())),
            Phase::First(_) | Phase::Recovering { .. } if fail_fast => Err(ExecServerError::Recovering),
            _ => Ok(()),
        }
    }

    /// One message of the link that counts.
    ///
    /// # Errors
    /// It breaks the rules of the wire: the link is of no use any more.
    pub(super) fn message(&mut self, text: &str, now: Instant) -> Result<(), String> {
        match rpc::parse(text.as_bytes()).map_err(|error| format!("the server sent what is no message: {error}"))? {
            Message::Response { id: Id::Number(id), outcome } => match self.pending.answered(id) {
                Some(call) => self.answered(call, outcome, now),
                None => Ok(()),
            },
            // Of the server, about text that held no id, or to nothing that this client asked.
            Message::Response { .. } | Message::Notification { params: None, .. } => Ok(()),
            Message::Notification { method, params: Some(params) } => self.notice(&method, params),
            Message::Request { id, method, .. } => {
                if let Some(link) = self.link() {
                    let text = rpc::error_text(&id, &RpcError::unknown_method(&method));
                    self.outputs.push_back(Output::Send { link, text });
                }
                Ok(())
            }
        }
    }

    fn notice(&mut self, method: &str, params: RawParams<'_>) -> Result<(), String> {
        if method == "http/request/bodyDelta" {
            return self.body_delta(params);
        }
        let wrong = |error: serde_json::Error| format!("the server's {method} is not understood: {error}");
        let (process, event) = match Notice::decode(method, params).map_err(wrong)? {
            Some(Notice::Output(OutputNotice { process_id, seq, stream, chunk })) => {
                (process_id, ProcessEvent::Output { seq, stream, chunk: chunk.0 })
            }
            Some(Notice::Exited(exited)) => {
                let ExitedNotice { process_id, seq, exit_code: code, sandbox_denied: denied, denials, denials_more, .. } = exited;
                let denials = Denials { list: denials, more: denials_more };
                (process_id, ProcessEvent::Exited { seq, code, denied, denials })
            }
            Some(Notice::Closed(ClosedNotice { process_id, seq })) => (process_id, ProcessEvent::Closed { seq }),
            // What this client did not ask for, or what a newer server announces.
            Some(Notice::MissingChanged(_)) | None => return Ok(()),
        };
        if let Some(route) = self.names.get(&process).copied() {
            self.live(route, event);
        }
        Ok(())
    }

    fn answered(&mut self, call: Call<Owner>, outcome: Result<&RawValue, RpcError>, now: Instant) -> Result<(), String> {
        match call.owner {
            Owner::Caller(ticket) => self.answer(ticket, outcome),
            Owner::Start(route, ticket) => self.started(route, ticket, outcome),
            Owner::Http(route, ticket) => {
                if outcome.is_err() {
                    self.end_body(route, None);
                }
                self.answer(ticket, outcome);
            }
            Owner::CatchUp(route) => {
                let until = now + self.settings.initialize_timeout;
                if let Some(attempt) = self.attempt() {
                    attempt.until = until;
                }
                self.caught(route, outcome);
            }
            Owner::Acknowledge(route) => self.acknowledged(route),
            Owner::CleanUp(route) => self.cleaned_up(route),
            Owner::Initialize => return self.initialized(outcome, now),
        }
        Ok(())
    }

    fn answer(&mut self, ticket: Ticket, outcome: Result<&RawValue, RpcError>) {
        let outcome = outcome.map(Reply::from).map_err(ExecServerError::Server);
        self.outputs.push_back(Output::Answer { ticket, outcome });
    }

    /// A call will not be answered.
    pub(super) fn unanswered(&mut self, owner: Owner, error: ExecServerError) {
        match owner {
            Owner::Caller(ticket) => self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) }),
            Owner::Start(route, ticket) => {
                self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
                // It may run.
                self.abandon(route);
            }
            Owner::Http(route, ticket) => {
                self.outputs.push_back(Output::Answer { ticket, outcome: Err(error) });
                self.end_body(route, None);
            }
            // A cut route reads and acknowledges anew by itself; of the others nobody waits for the answer.
            Owner::CatchUp(_) | Owner::Acknowledge(_) | Owner::CleanUp(_) | Owner::Initialize => {}
        }
    }

    pub(super) fn forget(&mut self, route: RouteId) {
        if let Some(gone) = self.routes.remove(&route)
            && self.names.get(&gone.process) == Some(&route)
        {
            self.names.remove(&gone.process);
        }
    }
}

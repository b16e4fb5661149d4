//! Links that come: how one is dialled, shakes hands, and becomes the one that counts.

use super::process::Route;
use super::{Attempt, Core, Next, Output, Owner, Phase, Step};
use crate::pending::Again;
use crate::recovery::LinkId;
use crate::{ClientStatus, ExecServerError};
use portcullis_protocol::init::{InitializeParams, InitializeResult};
use portcullis_protocol::rpc::{self, RpcError, code};
use serde_json::value::RawValue;
use std::time::Instant;

impl Core {
    pub(super) fn dial(&mut self, now: Instant) {
        self.links += 1;
        let attempt = Attempt { link: self.links, step: Step::Dialling, until: now + self.settings.connect_timeout };
        if let Phase::Recovering { next, .. } = &mut self.phase {
            *next = Next::Attempt(attempt);
            self.outputs.push_back(Output::Dial { link: self.links });
        }
    }

    pub(super) fn opened(&mut self, link: LinkId, now: Instant) {
        let until = now + self.settings.initialize_timeout;
        match self.attempt() {
            Some(attempt) if attempt.link == link && attempt.step == Step::Dialling => {
                (attempt.step, attempt.until) = (Step::Initializing, until);
            }
            _ => {
                self.outputs.push_back(Output::HangUp { link });
                return;
            }
        }
        let is_resume = self.generation > 0;
        // Output may come before the answer.
        self.takes_binary = self.settings.asks_for_binary;
        let params = InitializeParams {
            client_name: self.settings.client_name.clone(),
            resume_session_id: self.session.clone(),
            extensions: true,
            acknowledge: true,
            keep_handles: self.settings.keep_handles,
            take_over: if is_resume { self.extensions.take_over } else { self.settings.take_over },
            retention_ms: self.settings.retention.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            binary_frames: self.settings.asks_for_binary,
        };
        self.send_own(Owner::Initialize, "initialize", &params, Again::Fail);
    }

    pub(super) fn unreachable(&mut self, link: LinkId, reason: String, now: Instant) {
        if self.link() != Some(link) {
            return;
        }
        if let Phase::First(_) = self.phase {
            // The url is known to who dials.
            self.first_failed(ExecServerError::Connect { url: String::new(), reason });
        } else {
            self.lost(link, &reason, now);
        }
    }

    pub(super) fn initialized(&mut self, outcome: Result<&RawValue, RpcError>, now: Instant) -> Result<(), String> {
        let is_first = matches!(self.phase, Phase::First(_));
        let result: InitializeResult = match outcome {
            Ok(result) => match serde_json::from_str(result.get()) {
                Ok(result) => result,
                Err(error) => {
                    self.give_up(&format!("the server's answer to initialize is not understood: {error}"));
                    return Ok(());
                }
            },
            Err(error) if is_first => {
                self.first_failed(ExecServerError::Server(error));
                return Ok(());
            }
            Err(error) if error.code == code::ATTACHED || is_closed_transport(&error) => return Err(error.message),
            Err(error) => {
                self.give_up(&error.message);
                return Ok(());
            }
        };
        if self.session.as_ref().is_some_and(|session| *session != result.session_id) {
            self.give_up("exec-server initialized an unexpected session");
            return Ok(());
        }
        let text = rpc::notification_text("initialized", &serde_json::json!({})).map_err(|error| error.to_string())?;
        if let Some(link) = self.link() {
            self.outputs.push_back(Output::Send { link, text });
        }
        self.takes_binary = self.settings.asks_for_binary && result.binary_frames == Some(true);
        let until = now + self.settings.initialize_timeout;
        if let Some(attempt) = self.attempt() {
            (attempt.step, attempt.until) = (Step::CatchingUp, until);
        }
        if is_first {
            self.session = Some(result.session_id.clone());
            let info = result.environment_info.as_ref();
            self.extensions = info.and_then(|info| info.extensions.as_deref().cloned()).unwrap_or_default();
            self.outputs.push_back(Output::Ready(Ok(Box::new(result))));
        }
        self.catch_up_all();
        Ok(())
    }

    /// What no further attempt would change.
    fn give_up(&mut self, reason: &str) {
        match &self.phase {
            Phase::Recovering { disconnect, .. } => {
                let text = format!("{disconnect}; failed to resume exec-server session: {reason}");
                self.fail(text);
            }
            Phase::First(_) => self.first_failed(ExecServerError::Disconnected(reason.to_owned())),
            Phase::Connected(_) | Phase::Failed(_) => {}
        }
    }

    /// The candidate becomes the link once nothing more is to be read before. Then the line moves on. A server that answers
    /// pages of events says with each of them where to go on, so that the reading can go on beside everything else, and over the
    /// next cut: only of others all must be had at once.
    pub(super) fn install_if_caught_up(&mut self) {
        let (Phase::First(attempt) | Phase::Recovering { next: Next::Attempt(attempt), .. }) = &self.phase else { return };
        let waits = !self.extensions.process_events && self.routes.values().any(Route::is_reading);
        if attempt.step != Step::CatchingUp || waits {
            return;
        }
        self.phase = Phase::Connected(attempt.link);
        self.generation += 1;
        self.outputs.push_back(Output::Status(ClientStatus::Connected { generation: self.generation }));
        while let Some(call) = self.pending.first_in_line() {
            self.send(call);
        }
        self.catch_up_all();
        self.acknowledge_all();
    }
}

/// As servers of other makes say that the link is gone.
fn is_closed_transport(error: &RpcError) -> bool {
    error.code == -32000 && error.message == "JSON-RPC transport closed"
}

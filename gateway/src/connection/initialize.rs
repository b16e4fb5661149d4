//! The route of `initialize`: a session of its own, or one that was there before.

use super::Connection;
use crate::answer::Form;
use crate::environment;
use crate::reply;
use crate::session::{AttachError, Command, Newcomer, Terms};
use portcullis_protocol::environment::EnvironmentInfo;
use portcullis_protocol::init::{InitializeParams, InitializeResult};
use portcullis_protocol::rpc::{Id, RpcError, code};
use std::time::Duration;
use tokio::sync::oneshot;

impl Connection {
    pub(super) async fn initialize(&mut self, id: Id, params: InitializeParams) -> Result<(), RpcError> {
        let scope = self.scope.as_ref().map(|scope| scope.digest());
        let session = match params.resume_session_id {
            None => self.core.new_session(scope).await?,
            Some(wanted) => {
                let unknown = || reply::invalid(format!("unknown session id {wanted}"));
                // Of another scope it is nobody's business that there is one.
                self.core.registry.get(&wanted).filter(|session| session.scope() == scope).ok_or_else(unknown)?
            }
        };
        let (reply, attached) = oneshot::channel();
        let unknown = || reply::invalid(format!("unknown session id {}", session.id()));
        let longest = self.core.config.max_retention;
        let terms = Terms {
            take_over: params.take_over,
            retention: params.retention_ms.map(|asked| Duration::from_millis(asked).min(longest)),
            proof: self.proof(params.acknowledge),
            form: if params.binary_frames && self.can.carries_binary { Form::Binary } else { Form::Json },
        };
        let newcomer =
            Newcomer { outgoing: self.outgoing.clone(), evicted: self.leaving.clone(), doubt: self.doubt.clone(), terms };
        session.send(Command::Attach { newcomer, reply }).await.map_err(|_| unknown())?;
        let mut attachment = attached.await.map_err(|_| unknown())?.map_err(|AttachError| {
            RpcError::new(code::ATTACHED, format!("session {} is already attached to another connection", session.id()))
        })?;
        let extensions = params.extensions.then(|| Box::new(environment::extensions(&self.core.config)));
        let environment_info = Some(EnvironmentInfo { extensions, ..self.core.environment.clone() });
        let binary_frames = params.binary_frames.then_some(terms.form == Form::Binary);
        let result = InitializeResult { session_id: session.id().to_string(), environment_info, binary_frames };
        tracing::info!(connection = self.number, session = &*session.mark(), "session attached");
        self.asked.iter_mut().for_each(|asked| asked.of(|| session.mark()));
        self.handles = std::mem::take(&mut attachment.handles);
        self.keeps_handles = params.keep_handles;
        self.form = terms.form;
        self.attached = Some((session, attachment));
        self.handshake.attached();
        self.answer(&id, &result).await
    }
}

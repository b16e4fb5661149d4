//! Connections that come and leave, and what goes on without them.

use super::{Caller, Task};
use crate::session::message::{Call, Input};
use crate::session::{AttachError, Attachment, Change, Newcomer};
use tokio::sync::oneshot;

impl Task {
    pub(super) fn attach(
        &mut self,
        newcomer: Newcomer,
        reply: oneshot::Sender<Result<Attachment, AttachError>>,
        generation: u64,
    ) {
        self.generation = generation;
        self.attached = Some(newcomer);
        if generation > 1 {
            tracing::info!(session = &*self.mark, "session resumed");
        }
        let (order, handles) = self.left.take().unwrap_or_default();
        if let Err(Ok(attachment)) = reply.send(Ok(Attachment { generation, order, handles })) {
            self.detach(attachment);
        }
    }

    pub(super) fn detach(&mut self, Attachment { generation, order, handles }: Attachment) {
        if generation == self.generation {
            self.left = Some((order, handles));
            self.attached = None;
            tracing::info!(session = &*self.mark, "session detached");
        }
        self.handle(Input::Detach { generation });
    }

    /// A change is on its way already: this call only waits for its answer.
    pub(super) fn repeated(&mut self, call: Call) {
        if let Some(Caller::Change(_unused, reply)) = self.callers.remove(&call) {
            self.callers.insert(call, Caller::Done(reply));
        }
    }

    /// Carries a change out beside everything else, as a part of the session: its connection may be cut meanwhile.
    pub(super) fn change(&mut self, call: Call) {
        let Some(Caller::Change(Change { operation, work, .. }, reply)) = self.callers.remove(&call) else { return };
        self.callers.insert(call, Caller::Done(reply));
        self.changes.push(Box::pin(async move { (operation, work.await) }));
    }
}

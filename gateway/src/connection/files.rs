//! Routes of the file calls and of file handles.

use super::Connection;
use crate::answer::{Answer, text};
use crate::core::Core;
use crate::fs_call::{self, FsCall};
use crate::handles::{self, Disk};
use crate::helper::worker::Done;
use crate::policies::Named;
use crate::reply;
use crate::session::{Change, Command, Turn};
use portcullis_protocol::fs::{Empty, HandleParams, OpenParams, ReadBlockParams, WriteBlockParams};
use portcullis_protocol::helper::{FsDone, FsOperation, MAX_BODY};
use portcullis_protocol::method::Call;
use portcullis_protocol::rpc::{Id, RpcError};
use std::sync::Arc;
use tokio::sync::oneshot;

/// What a listing may take on its way: the bound of a worker's frame.
const LISTING: usize = MAX_BODY;

impl Connection {
    pub(super) async fn files(&mut self, id: Id, call: Call) -> Result<(), RpcError> {
        let (core, disk, replies, form) = (Arc::clone(&self.core), self.disk.clone(), self.replies.clone(), self.form);
        let carried = self.prepare(call)?;
        if carried.call.operation_id.is_some() {
            return self.change(id, carried).await;
        }
        self.run(id.clone(), async move {
            let attempt = carried.call.attempt.clone();
            let listing = match carried.call.operation {
                FsOperation::ReadDirectory { .. } | FsOperation::Walk { .. } => Some(replies.charge(LISTING).await),
                // Small, or charged by its size once that is known.
                _ => None,
            };
            let done = carried.out(&core, &disk).await?;
            let room = match (listing, &done.done) {
                (None, FsDone::Descriptor { size }) => {
                    Some(replies.charge(form.size(usize::try_from(*size).unwrap_or(usize::MAX))).await)
                }
                (listing, _) => listing,
            };
            let message = fs_call::reply(&id, &attempt, done, form, &disk.blocking).await?;
            Ok(Answer { message, room })
        });
        Ok(())
    }

    /// A change that may have been sent before: the session carries it out, so that its outcome is known whatever becomes of
    /// this connection. It is the session's before anything that came later is looked at.
    async fn change(&mut self, id: Id, carried: Prepared) -> Result<(), RpcError> {
        let (core, disk, charge) = (Arc::clone(&self.core), self.disk.clone(), self.charge.take());
        let (digest, operation) = (carried.call.digest(), carried.call.operation_id.clone().unwrap_or_default());
        let work = Box::pin(async move {
            let _room_of_the_message = charge;
            carried.out(&core, &disk).await.map(|_changed| ())
        });
        let change = Change { operation, digest, work };
        self.ask(id, |reply| Command::Change { change, reply }).await
    }

    pub(super) fn open(&mut self, id: Id, params: OpenParams) -> Result<(), RpcError> {
        let slot = self.handles.reserve(&params.handle_id, &self.core.room.handles)?;
        let name = params.handle_id.clone();
        let opened = self.open_in(id, Call::FsOpen(params), name.clone(), slot.clone());
        if opened.is_err() {
            slot.opened(None);
            self.handles.close(&name);
        }
        opened
    }

    fn open_in(&mut self, id: Id, call: Call, name: String, slot: handles::Slot) -> Result<(), RpcError> {
        let (core, disk) = (Arc::clone(&self.core), self.disk.clone());
        let carried = self.prepare(call)?;
        self.run(id.clone(), async move {
            // However this ends, blocks that wait for the handle must hear of it.
            let slot = OpenEnd(slot);
            let attempt = carried.call.attempt.clone();
            let done = carried.out(&core, &disk).await?;
            let file = done.descriptor.ok_or_else(|| reply::internal(format!("{attempt}: the worker sent no descriptor")))?;
            slot.0.opened(Some(file));
            Ok(text(&id, &HandleParams { handle_id: name })?.into())
        });
        Ok(())
    }

    pub(super) fn read_block(&mut self, id: Id, params: ReadBlockParams) -> Result<(), RpcError> {
        let length = handles::check_length("read", params.len)?;
        let slot = self.handles.get(&params.handle_id)?;
        let (disk, turn, replies, form) = (self.disk.clone(), self.order()?.read(), self.replies.clone(), self.form);
        self.run(id.clone(), async move {
            turn.wait().await;
            let room = replies.charge(form.size(length)).await;
            let bytes = slot.read(&params.handle_id, params.offset, length, &disk).await?;
            let eof = if bytes.len() < length { r#","eof":true"# } else { r#","eof":false"# };
            Ok(Answer::large(form.bytes_result(&id, "chunk", bytes, eof), room))
        });
        Ok(())
    }

    pub(super) fn write_block(&mut self, id: Id, params: WriteBlockParams) -> Result<(), RpcError> {
        handles::check_length("write", params.chunk.0.len() as u64)?;
        let slot = self.handles.get(&params.handle_id)?;
        let (disk, turn, core) = (self.disk.clone(), self.order()?.mutation(), Arc::clone(&self.core));
        self.run(id.clone(), async move {
            turn.wait().await;
            let (ended, end) = oneshot::channel();
            // From here on the turn lasts as long as the write, whatever becomes of this connection.
            core.linger(turn, end).await;
            slot.write(&params.handle_id, params.offset, params.chunk.0, &disk, ended).await?;
            Ok(text(&id, &Empty {})?.into())
        });
        Ok(())
    }

    /// Takes a file call apart, resolves its policy, and enters it into the session's order.
    pub(super) fn prepare(&mut self, call: Call) -> Result<Prepared, RpcError> {
        let Ok(call) = FsCall::prepare(call) else { return Err(reply::internal("a call has no route")) };
        let call = call?;
        let policy = self.policies.for_files(call.sandbox.as_deref()).map_err(|error| named(&call.attempt, error))?;
        self.asked.iter_mut().for_each(|asked| asked.under(|| policy.as_ref().map(|named| named.hash)));
        let session = self.session()?;
        let order = self.order()?;
        let turn = if call.operation.is_mutation() { order.mutation() } else { order.read() };
        Ok(Prepared { call, policy, session, turn })
    }
}

/// A file call that has its place in the session's order.
pub(super) struct Prepared {
    call: FsCall,
    policy: Option<Named>,
    session: Arc<str>,
    turn: Turn,
}

impl Prepared {
    pub(super) async fn out(self, core: &Core, disk: &Disk) -> Result<Done, RpcError> {
        self.call.carry_out(core, &disk.blocking, &self.session, self.policy.as_ref(), self.turn).await
    }
}

/// Tells those who wait for a handle that its open failed, unless it succeeded first.
struct OpenEnd(handles::Slot);

impl Drop for OpenEnd {
    fn drop(&mut self) {
        self.0.opened_or_failed();
    }
}

/// An error about a policy, with what was attempted under it.
fn named(attempt: &str, error: RpcError) -> RpcError {
    RpcError { message: format!("{attempt}: {}", error.message), ..error }
}

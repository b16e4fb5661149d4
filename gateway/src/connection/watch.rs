//! The route of watches for what is not there.

use super::Connection;
use crate::answer::{Answer, carry_out, text};
use crate::helper::worker::Done;
use crate::watch::{Armed, tell};
use portcullis_protocol::fs::{WatchMissingParams, WatchMissingResult};
use portcullis_protocol::helper::FsDone;
use portcullis_protocol::method::Call;
use portcullis_protocol::path::WirePath;
use portcullis_protocol::rpc::{Id, RpcError};
use portcullis_sandbox::policy::MAX_PATH_LENGTH;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Paths of one watch. Clients with more look for themselves.
const PATHS: usize = 1024;

impl Connection {
    /// `fs/watchMissing`. What cannot be watched is no error: the client looks for itself.
    pub(super) async fn watch_missing(&mut self, id: Id, params: WatchMissingParams) -> Result<(), RpcError> {
        let watch_id = params.watch_id;
        let paths = params.missing.iter().chain(&params.present);
        let is_path = |path: &WirePath| path.local().is_ok_and(|path| path.len() <= MAX_PATH_LENGTH);
        let can_be = !params.missing.is_empty() && params.missing.len() <= PATHS && paths.into_iter().all(is_path);
        let in_use = can_be.then(|| self.watches.ids.reserve(watch_id).ok()).flatten();
        let Some(in_use) = in_use else { return self.answer(&id, &WatchMissingResult { watching: false }).await };
        let carried = self.prepare(Call::FsWatchMissing(params))?;
        let (core, disk, way, held) = (Arc::clone(&self.core), self.disk.clone(), self.way(), self.held());
        let ((armings, armed), (begin, begun)) = (oneshot::channel(), oneshot::channel());
        let (answer_id, notices, metrics) = (id.clone(), self.outgoing.clone(), Arc::clone(&self.core.metrics));
        let call = async move {
            let Done { done, descriptor, .. } = carried.out(&core, &disk).await?;
            let armed = match (done, descriptor) {
                (FsDone::Watching(names), Some(events)) if !names.is_empty() => Some(Armed { events, names }),
                _ => None,
            };
            let watching = armed.is_some();
            if let Some(armed) = armed {
                let _connection_gone = armings.send((armed, in_use));
            }
            Ok(Answer::from(text(&answer_id, &WatchMissingResult { watching })?))
        };
        self.calls.spawn(async move {
            let _room_and_place = held;
            carry_out(id, way, call).await;
            // The notification comes behind the result.
            if let Ok(armed) = armed.await {
                let _connection_gone = begin.send(armed);
            }
        });
        self.watches.tasks.spawn(async move {
            if let Ok((armed, in_use)) = begun.await {
                tell(watch_id, armed, notices, metrics, in_use).await;
            }
        });
        Ok(())
    }
}

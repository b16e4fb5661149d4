//! Output on its way through the session's task: to the connection, and to spools and back.

use super::{Caller, Task};
use crate::link::Outgoing;
use crate::metrics::Direction;
use crate::session::message::{Call, Input};
use crate::session::spool::Done;
use portcullis_protocol::rpc::{RpcError, code};

/// Notifications handed over in one turn, so that commands are looked at in between.
const BURST: usize = 64;

impl Task {
    /// Hands notifications over as far as the connection has room. A client that reads nothing holds up its processes'
    /// output, and nothing else.
    pub(super) fn announce(&mut self) {
        for _turn in 0..BURST {
            let Some(attached) = self.attached.as_ref().filter(|_| self.state.has_unsent()) else { break };
            let Ok(place) = attached.outgoing.try_reserve() else { break };
            // A mark is behind everything that was announced before it.
            match self.state.mark() {
                Some(mark) => place.send(Outgoing::Ping(mark)),
                None => match self.state.announce() {
                    Some(message) => {
                        self.config.metrics.message(Direction::Out, message.size());
                        place.send(Outgoing::message(message, None));
                    }
                    None => break,
                },
            }
        }
        self.act();
    }

    /// Waits, beside everything else, for the room that a page takes on its connection.
    pub(super) fn reserve_room(&mut self, call: Call, bytes: usize) {
        let Some(Caller::Read(_, replies, _)) = self.callers.get(&call) else { return };
        let replies = replies.clone();
        self.rooms.push(Box::pin(async move { (call, replies.charge(bytes).await) }));
    }

    pub(super) fn spool_done(&mut self, key: u64, done: Done) {
        match done {
            Done::Written(written) => {
                if let Err(error) = &written {
                    let folder = self.config.spool.display();
                    tracing::warn!(session = &*self.mark, %error, "output cannot be spooled in {folder}: its process waits instead");
                }
                self.handle(Input::SpoolWritten { key, is_written: written.is_ok() });
            }
            Done::Read(call, read) => {
                let failed = |error| RpcError::new(code::INTERNAL, format!("read spooled output of the process: {error}"));
                self.handle(Input::SpoolRead { call, slots: read.map_err(failed) });
            }
            Done::Closed => {}
        }
    }
}

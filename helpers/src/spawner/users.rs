//! User ids of the machine for sandboxes: whether there are any, and which sandbox has which.

use super::Spawner;
use crate::keeper;
use crate::probe;
use crate::sys::{self, Fork};
use crate::uids::Lease;
use portcullis_protocol::helper::{NamespaceLayer, Uids};
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::namespaces;
use rustix::process::Pid;
use std::time::Duration;

/// The number of milliseconds that a killed spare may take to end. It waits for a message, or makes namespaces.
const MOST_WAITS: u32 = 100;

/// The attempt named in the error if no id is free.
pub(super) const NO_UID: &str =
    "take a user id for the sandbox (all of --sandbox-uids may be in use: end processes, or give the server a larger range)";

impl Spawner {
    /// Checks whether sandboxes can have their own user ids, if the operator gives a range of them to a server of root.
    pub(super) fn find_uids(&mut self, range: Option<UidRange>) {
        let NamespaceLayer::Available { user: true, uids: told, .. } = &mut self.namespaces else { return };
        let Some(range) = range.filter(|_| !namespaces::need_user()) else { return };
        let tried = match self.removing.records() {
            Some(records) => probe::uids(range, &records),
            None => Err("the server has no private directory for the locks of user ids".to_owned()),
        };
        match tried {
            Ok(uids) => (self.uids, *told) = (uids, Uids::Own),
            Err(reason) => *told = Uids::Refused { reason },
        }
    }

    /// Leases a user id. If all are in use, a spare is killed and its id is taken.
    pub(super) fn lease(&mut self) -> std::io::Result<Option<Lease>> {
        loop {
            match self.uids.lease() {
                Err(error) if error.raw_os_error() == Some(libc::EUSERS) => match self.spares.give_way() {
                    // The spare has become that user, so the id is in use until the spare is gone.
                    Some(spare) if ends_soon(spare) => {
                        self.children.remove(spare);
                        self.uids.take_back(spare);
                    }
                    Some(_hangs) => {}
                    None => return Err(error),
                },
                leased => return leased,
            }
        }
    }

    /// Assigns a leased user id to the process that was forked for it, in its parent.
    pub(super) fn lend(&mut self, lease: Option<Lease>, forked: std::io::Result<Fork>) -> std::io::Result<Pid> {
        match (forked, lease) {
            (Ok(Fork::Parent(pid)), lease) => {
                lease.into_iter().for_each(|lease| self.uids.give(lease, pid));
                Ok(pid)
            }
            // The child never gets here.
            (Ok(Fork::Child), _) => sys::end(keeper::EXIT_FAILED),
            (Err(error), lease) => {
                lease.into_iter().for_each(|lease| self.uids.put_back(lease));
                Err(error)
            }
        }
    }
}

/// Kills a spare, and reaps it if it ends at once. A spare that a file system keeps from ending is reaped later.
fn ends_soon(spare: Pid) -> bool {
    let _gone_already = sys::kill(spare, libc::SIGKILL, false);
    (0..MOST_WAITS).any(|_wait| {
        let has_ended = sys::reap(spare);
        if !has_ended {
            std::thread::sleep(Duration::from_millis(1));
        }
        has_ended
    })
}

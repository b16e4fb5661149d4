//! Handling the ends of children.

use super::{End, Spawner};
use crate::children::Name;
use crate::sys;
use crate::tether::{Leftovers, Outcome, Tether};
use crate::tree;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent};
use rustix::event::epoll;
use rustix::process::Pid;
use std::collections::HashSet;

impl Spawner {
    /// Reaps every child that ended.
    pub(super) fn reap(&mut self) -> Result<(), End> {
        // The signalfd reports only that some child ended; waitid finds which ones.
        let _drained = rustix::io::read(&self.signals, &mut [0_u8; 1024][..]);
        loop {
            match sys::ended_child() {
                Ok(Some((pid, status))) => self.bury(pid, status),
                Ok(None) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(()),
                Err(error) => return Err(End::Failed(format!("wait for children: {error}"))),
            }
        }
    }

    fn bury(&mut self, pid: Pid, status: ExitStatus) {
        // `Started` is sent before `Exited` even if the program ended at once: the launcher's report is in the pipe by now.
        if let Some(at) = self.launches.iter().position(|launch| launch.pid == pid) {
            let mut launch = self.launches.swap_remove(at);
            launch.read();
            let failure = self.tethers.get_mut(&pid).and_then(Tether::failure);
            self.conclude(launch, Some(status), failure);
        }
        self.listen(pid);
        let name = self.children.name(pid);
        sys::reap(pid);
        self.uids.take_back(pid);
        let is_remover = self.removing.pid() == Some(pid);
        let tether = self.tethers.remove(&pid);
        // If another process holds a duplicate, closing this one would not remove it from the epoll.
        let _out_already = tether.as_ref().map(|tether| epoll::delete(&self.said, tether));
        let is_stranger = name.is_none() && !is_remover && tether.is_none();
        let has_left_others = is_stranger || tether.as_ref().is_some_and(|tether| tether.leaves_others(status));
        if is_remover {
            self.replace_remover();
        }
        let (end, mut left) = match tether {
            Some(tether) => tether.finish(status),
            None => (Some(Outcome::of(status)), Leftovers::default()),
        };
        if let Some(groups) = &mut self.groups {
            match left.group.take() {
                Some(group) => groups.retire(group),
                // This may have been the last process in a retired group.
                None => groups.sweep(),
            }
        }
        match name {
            Some(Name::Process(id)) => {
                self.children.remove(pid);
                self.bury_init(left.token, end.map(|outcome| (id, outcome)));
            }
            Some(Name::Spare(_)) => {
                self.children.remove(pid);
                self.spares.lose(pid);
            }
            Some(Name::Worker(id)) => {
                self.children.remove(pid);
                self.tell(&SpawnerEvent::WorkerEnded { id, status });
            }
            None => self.bury_init(left.token, None),
        }
        // A process that becomes a child of the spawner has lost its keeper, and may have killed it. It is killed.
        if has_left_others {
            let is_ours =
                |pid| self.children.name(pid).is_some() || self.removing.pid() == Some(pid) || self.tethers.contains_key(&pid);
            tree::kill_all(&HashSet::new(), is_ours);
        }
    }

    pub(super) fn tell_end(&mut self, id: u64, end: Outcome) {
        let Outcome { status, denials, failure, limits } = end;
        self.tell(&SpawnerEvent::Exited { id, status, denials, failure, limits });
    }
}

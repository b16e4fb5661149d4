//! Ends: of children, and of what they leave on the machine.

use super::{End, Spawner, data_of};
use crate::children::Name;
use crate::dispatch::complain;
use crate::removal::Removal;
use crate::sys;
use crate::tether::{self, Leftovers, Outcome, Tether};
use crate::tree;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent};
use rustix::event::epoll::{self, EventFlags};
use rustix::process::Pid;
use std::collections::HashSet;

/// So many children that were killed are replaced: whoever kills more means it. The next sandbox there removes what is left.
const MOST_KILLED: u32 = 2;

impl Spawner {
    /// Reaps every child that ended.
    pub(super) fn reap(&mut self) -> Result<(), End> {
        // The counter of the signalfd only says that there is something; how many is waitid's to say.
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
        // Started comes before Exited, however quick the program was: what the launcher had to say is in the pipe by now.
        if let Some(at) = self.launches.iter().position(|launch| launch.pid == pid) {
            let mut launch = self.launches.swap_remove(at);
            launch.read();
            let failure = self.tethers.get_mut(&pid).and_then(Tether::failure);
            self.conclude(launch, Some(status), failure);
        }
        self.listen(pid);
        self.hear_removal(pid);
        let name = self.children.name(pid);
        sys::reap(pid);
        let removal = self.removals.remove(&pid);
        let is_removal = removal.is_some();
        let tether = self.tethers.remove(&pid);
        // A copy of it in somebody's hands would keep it there otherwise.
        let _out_already = tether.as_ref().map(|tether| epoll::delete(&self.said, tether));
        let is_stranger = name.is_none() && !is_removal && tether.is_none();
        let has_left_others = is_stranger || tether.as_ref().is_some_and(|tether| tether.leaves_others(status));
        if let Some(removal) = removal {
            self.bury_removal(removal);
        }
        let (end, mut left) = match tether {
            Some(tether) => tether.finish(status),
            None => (Some(Outcome::of(status)), Leftovers::default()),
        };
        if let Some(groups) = &mut self.groups {
            match left.group.take() {
                Some(group) => groups.retire(group),
                // The last of those who held one may just have ended.
                None => groups.sweep(),
            }
        }
        match name {
            Some(Name::Process(id)) => {
                self.children.remove(pid);
                self.bury_keeper(pid, left, end.map(|outcome| (id, outcome)));
            }
            Some(Name::Spare(_)) => {
                self.children.remove(pid);
                self.spares.lose(pid);
            }
            Some(Name::Worker(id)) => {
                self.children.remove(pid);
                self.tell(&SpawnerEvent::WorkerEnded { id, status: Some(status) });
            }
            None => self.bury_keeper(pid, left, None),
        }
        // Whoever comes up to the spawner has lost its keeper, by its own hand maybe, and is ended.
        if has_left_others {
            let is_ours =
                |pid| self.children.name(pid).is_some() || self.removals.contains_key(&pid) || self.tethers.contains_key(&pid);
            tree::kill_all(&HashSet::new(), is_ours);
        }
    }

    pub(super) fn tell_end(&mut self, id: u64, end: Outcome) {
        let Outcome { status, denials, failure, limits } = end;
        self.tell(&SpawnerEvent::Exited { id, status, denials, failure, limits });
    }

    /// What a child removed is gone, or the child is about to end, of which is heard next.
    pub(super) fn hear_removal(&mut self, pid: Pid) {
        let Some(removal) = self.removals.get_mut(&pid) else { return };
        if let Some(done) = removal.hear() {
            // A copy of it in a child that was just forked would keep it there otherwise.
            let _was_there = epoll::delete(&self.said, &done);
        }
        if removal.is_done
            && let Some((id, outcome)) = removal.then.take()
        {
            self.tell_end(id, outcome);
        }
    }

    /// After its child was reaped: if somebody killed that, another one tries, unless they are all killed.
    fn bury_removal(&mut self, removal: Removal) {
        let Removal { points, then, keeper, killed, is_done, .. } = removal;
        if !is_done && killed < MOST_KILLED {
            match Removal::begin(points, None, keeper) {
                Ok((pid, again)) => return self.await_removal(pid, Removal { killed: killed + 1, then, ..again }),
                Err((points, _none)) => tether::remove(&points),
            }
        }
        if let Some((id, outcome)) = then {
            self.tell_end(id, outcome);
        }
    }

    /// Removes mount points, and then tells of an end, which waits for names only, not for a watch to be closed.
    fn give_back(&mut self, left: Leftovers, then: Option<(u64, Outcome)>) {
        let Leftovers { points, watch, .. } = left;
        let has_points = !points.is_empty();
        if has_points || watch.is_some() {
            match Removal::begin(points, watch, None) {
                Ok((pid, removal)) if has_points => return self.await_removal(pid, Removal { then, ..removal }),
                Ok((pid, removal)) => self.await_removal(pid, removal),
                Err((points, _closed)) => tether::remove(&points),
            }
        }
        if let Some((id, outcome)) = then {
            self.tell_end(id, outcome);
        }
    }

    /// Removes what a keeper has let go of while it ends.
    pub(super) fn take_back(&mut self, keeper: Pid) {
        let Some((points, watch)) = self.tethers.get_mut(&keeper).and_then(Tether::let_go) else { return };
        match Removal::begin(points, watch, Some(keeper)) {
            Ok((pid, removal)) => self.await_removal(pid, removal),
            Err((points, _closed)) => tether::remove(&points),
        }
    }

    /// After a keeper was reaped: what it left is given back, and its end told once nothing of it is on the machine.
    fn bury_keeper(&mut self, pid: Pid, left: Leftovers, then: Option<(u64, Outcome)>) {
        match self.removals.values_mut().find(|removal| removal.keeper == Some(pid)) {
            Some(removal) => {
                removal.keeper = None;
                if !removal.is_done {
                    removal.then = then;
                    // It let go of all its points; there is a watch left at most.
                    return self.give_back(left, None);
                }
                self.give_back(left, then);
            }
            None => self.give_back(left, then),
        }
    }

    /// Waits for the end of a removal from here on. Without that its child's end is what is heard of.
    fn await_removal(&mut self, pid: Pid, removal: Removal) {
        if let Some(done) = &removal.done
            && let Err(errno) = epoll::add(&self.said, done, data_of(pid), EventFlags::IN)
        {
            complain(format_args!("wait for a removal: {errno}"));
        }
        self.removals.insert(pid, removal);
    }
}

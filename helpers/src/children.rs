//! Who the spawner's children are.
//!
//! A number may stand for another process as soon as its old owner was reaped, so a signal is sent only while the number
//! is certainly ours. Before a leader is reaped that is trivial. Afterwards its group lives on if it has other members,
//! and while it has one, the kernel gives the number to nobody else. So an ended leader is kept in the table until its
//! group is seen empty, and before a late signal the group is looked for among the spawner's own descendants.

use crate::sys;
use portcullis_protocol::helper::ExitStatus;
use rustix::process::{Pid, getpgid, getsid, test_kill_process_group};
use std::collections::{HashMap, HashSet};
use std::fs;

/// Bound of the descendants that are looked at before a late signal: far above what one machine runs.
const MOST_DESCENDANTS: usize = 1 << 16;

/// A child that is known by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    /// A process, or the launcher on its way to become one.
    Process(u64),
    /// An fs worker.
    Worker(u64),
}

/// Children by name and by process id.
#[derive(Debug, Default)]
pub(crate) struct Children {
    pids: HashMap<Name, Pid>,
    names: HashMap<Pid, Name>,
    killed: HashSet<Pid>,
    /// Groups whose leader was reaped and that were not empty then.
    leaderless: HashMap<u64, Pid>,
}

impl Children {
    pub(crate) fn contains(&self, name: Name) -> bool {
        self.pids.contains_key(&name)
    }

    pub(crate) fn add(&mut self, name: Name, pid: Pid) {
        // The number is a new process's now, so no group of an ended one can have it, and the name is used anew.
        self.leaderless.retain(|id, group| *group != pid && Name::Process(*id) != name);
        self.pids.insert(name, pid);
        self.names.insert(pid, name);
    }

    pub(crate) fn pid(&self, name: Name) -> Option<Pid> {
        self.pids.get(&name).copied()
    }

    pub(crate) fn name(&self, pid: Pid) -> Option<Name> {
        self.names.get(&pid).copied()
    }

    /// Remembers that a process's group was killed.
    pub(crate) fn mark_killed(&mut self, pid: Pid) {
        self.killed.insert(pid);
    }

    /// Whether its group was killed. Members may have been born between that signal and now.
    pub(crate) fn was_killed(&self, pid: Pid) -> bool {
        self.killed.contains(&pid)
    }

    /// Forgets a child that was just reaped, but for its group if that has other members.
    pub(crate) fn remove(&mut self, pid: Pid) {
        self.killed.remove(&pid);
        let Some(name) = self.names.remove(&pid) else {
            return;
        };
        self.pids.remove(&name);
        if let Name::Process(id) = name
            && test_kill_process_group(pid).is_ok()
        {
            self.leaderless.insert(id, pid);
        }
    }

    /// Makes a child a stranger: it will be reaped without a word.
    pub(crate) fn disown(&mut self, pid: Pid) {
        self.killed.remove(&pid);
        if let Some(name) = self.names.remove(&pid) {
            self.pids.remove(&name);
        }
    }

    /// Forgets groups that have become empty; to be called whenever an adopted process was reaped.
    pub(crate) fn drop_empty_groups(&mut self) {
        self.leaderless.retain(|_, group| test_kill_process_group(*group).is_ok());
    }

    /// The group of a process that has ended, if it certainly still exists.
    pub(crate) fn leaderless_group(&self, id: u64) -> Option<Pid> {
        let group = *self.leaderless.get(&id)?;
        // The leader began a session too, so the group's members are in a session and a group of one and the same number.
        let belongs = |pid: &Pid| getpgid(Some(*pid)) == Ok(group) && getsid(Some(*pid)) == Ok(group);
        descendants().iter().any(belongs).then_some(group)
    }
}

/// The direct children of this process as the kernel lists them; none if it does not.
fn own_children() -> Option<Vec<Pid>> {
    children_of("self")
}

fn descendants() -> Vec<Pid> {
    let mut found = own_children().unwrap_or_default();
    let mut at = 0;
    while at < found.len() && found.len() < MOST_DESCENDANTS {
        found.extend(children_of(&found[at].as_raw_nonzero().to_string()).unwrap_or_default());
        at += 1;
    }
    found
}

/// Children of all threads of a process.
fn children_of(process: &str) -> Option<Vec<Pid>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten() {
        let text = fs::read_to_string(thread.path().join("children")).ok()?;
        found.extend(text.split_ascii_whitespace().filter_map(|word| Pid::from_raw(word.parse().ok()?)));
    }
    Some(found)
}

/// Ends everything below this process. What loses its parent on the way becomes our child and is met in a later round, so
/// the loop ends only when there is nothing left, or what is left cannot be killed by this user.
pub(crate) fn kill_all(known: &Children) {
    // Only where the kernel does not list children; then daemons that left their group are out of reach.
    let mut known: HashSet<Pid> = known.names.keys().copied().collect();
    loop {
        for pid in own_children().unwrap_or_else(|| known.iter().copied().collect()) {
            // Children that have ended are zombies until the end of this round, so the numbers are theirs.
            let _ended = sys::kill(pid, libc::SIGKILL, false);
        }
        match sys::next_ended_child() {
            Ok(Some((pid, _status))) => {
                sys::reap(pid);
                known.remove(&pid);
            }
            Ok(None) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_no_child) => return,
        }
        while let Ok(Some((pid, _status))) = sys::ended_child() {
            sys::reap(pid);
            known.remove(&pid);
        }
    }
}

/// In words.
pub(crate) fn describe(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("status {code}"),
        ExitStatus::Signal(signal) => format!("signal {signal}"),
    }
}

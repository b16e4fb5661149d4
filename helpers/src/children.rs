//! Who the spawner's children are. A number is a child's own until it was reaped, and only then it is forgotten here.

use portcullis_protocol::helper::ExitStatus;
use rustix::process::Pid;
use std::collections::{HashMap, HashSet};

/// A child that is known by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    /// A process: its keeper.
    Process(u64),
    /// An fs worker.
    Worker(u64),
    /// An init that waits for an order.
    Spare(Pid),
}

/// Children by name and by process id.
#[derive(Debug, Default)]
pub(crate) struct Children {
    pids: HashMap<Name, Pid>,
    names: HashMap<Pid, Name>,
}

impl Children {
    pub(crate) fn contains(&self, name: Name) -> bool {
        self.pids.contains_key(&name)
    }

    pub(crate) fn add(&mut self, name: Name, pid: Pid) {
        self.pids.insert(name, pid);
        self.names.insert(pid, name);
    }

    pub(crate) fn pid(&self, name: Name) -> Option<Pid> {
        self.pids.get(&name).copied()
    }

    pub(crate) fn name(&self, pid: Pid) -> Option<Name> {
        self.names.get(&pid).copied()
    }

    /// Forgets a child that was reaped, or of which nobody shall hear.
    pub(crate) fn remove(&mut self, pid: Pid) {
        if let Some(name) = self.names.remove(&pid) {
            self.pids.remove(&name);
        }
    }

    /// All that have a name.
    pub(crate) fn all(&self) -> HashSet<Pid> {
        self.names.keys().copied().collect()
    }
}

/// In words.
pub(crate) fn describe(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("status {code}"),
        ExitStatus::Signal(signal) => format!("signal {signal}"),
    }
}

//! Starting: workers, and processes with their keepers.

use super::{MOST_LAUNCHES, Removal, Spawner};
use crate::cgroup::Group;
use crate::children::Name;
use crate::dispatch::complain;
use crate::init::{self, Given};
use crate::keeper;
use crate::launch::{self, Order, failed};
use crate::limit::{self, Decided};
use crate::pending::Launch;
use crate::probe;
use crate::sys::{self, Fork};
use crate::tether::{self, Kind, Leftovers, Outcome, Tether};
use portcullis_protocol::helper::{NamespaceLayer, SpawnerEvent, Step, StepFailed};
use portcullis_protocol::limit::{ProcessLimits, TreeEnd};
use portcullis_sandbox::namespaces;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use std::os::fd::{AsRawFd, OwnedFd};

impl Spawner {
    pub(super) fn start_worker(&mut self, id: u64, descriptors: &[OwnedFd]) {
        let name = Name::Worker(id);
        let ([stdio, control], false) = (descriptors, self.children.contains(name)) else {
            return self.tell(&SpawnerEvent::WorkerEnded { id, status: None });
        };
        match sys::fork() {
            Ok(Fork::Child) => launch::worker(&self.program, stdio, control, self.me),
            Ok(Fork::Parent(pid)) => self.children.add(name, pid),
            Err(error) => {
                complain(format_args!("fork a worker: {error}"));
                self.tell(&SpawnerEvent::WorkerEnded { id, status: None });
            }
        }
    }

    pub(super) fn start(&mut self, id: u64, order: Order, asked: &ProcessLimits) {
        let wanted = if order.tty { 1 } else { 3 };
        let refusal = if order.descriptors.len() != wanted {
            Some(failed(Step::Frame, "start: wrong number of descriptors", Some(Errno::INVAL)))
        } else if self.children.contains(Name::Process(id)) {
            Some(failed(Step::Frame, "start: the id is in use", Some(Errno::EXIST)))
        } else if self.launches.len() >= MOST_LAUNCHES {
            Some(failed(Step::Machine, "start: too many starts at once", Some(Errno::AGAIN)))
        } else {
            None
        };
        if let Some(failure) = refusal {
            return self.tell(&SpawnerEvent::StartFailed { id, failure });
        }
        let (pipe, result) = match pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) {
            Ok(ends) => ends,
            Err(errno) => {
                let failure = failed(Step::Machine, "start: make a pipe to the launcher", Some(errno));
                return self.tell(&SpawnerEvent::StartFailed { id, failure });
            }
        };
        let decided = match self.decide(&order, id, asked) {
            Ok(decided) => decided,
            Err(failure) => return self.tell(&SpawnerEvent::StartFailed { id, failure }),
        };
        let Decided { limits, in_force, group } = decided;
        let tree = self.tree_end(&order, group.as_ref());
        match self.fork_keeper(Order { limits, ..order }, result) {
            Ok((pid, kind, session, socket)) => {
                let tether = Tether::new(socket, session, kind, *asked, group);
                self.hear(pid, &tether);
                self.tethers.insert(pid, tether);
                self.children.add(Name::Process(id), pid);
                self.launches.push(Launch::new(id, pid, pipe, in_force, tree));
            }
            Err((attempt, error)) => {
                if let (Some(group), Some(groups)) = (group, &mut self.groups) {
                    groups.retire(group);
                }
                let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
                let failure = failed(Step::Machine, &format!("start: {attempt}"), Some(Errno::from_raw_os_error(errno)));
                self.tell(&SpawnerEvent::StartFailed { id, failure });
            }
        }
    }

    fn has_namespaces(&self, order: &Order) -> bool {
        order.own_view && matches!(self.namespaces, NamespaceLayer::Available { .. })
    }

    fn decide(&mut self, order: &Order, id: u64, asked: &ProcessLimits) -> Result<Decided, StepFailed> {
        let is_init = self.has_namespaces(order);
        let groups = self.groups.as_mut().ok_or_else(|| failed(Step::Frame, "start: before the first word", None))?;
        limit::decide(asked, groups, &order.session, id, is_init)
    }

    fn tree_end(&self, order: &Order, group: Option<&Group>) -> TreeEnd {
        if self.has_namespaces(order) {
            TreeEnd::PidNamespace
        } else if group.is_some_and(Group::can_kill) {
            TreeEnd::Cgroup
        } else {
            TreeEnd::Descendants
        }
    }

    fn fork_keeper(&self, order: Order, result: OwnedFd) -> Result<(Pid, Kind, String, OwnedFd), (&'static str, std::io::Error)> {
        let session = order.session.clone();
        let (ours, tether) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| ("make a socket to the keeper", errno.into()))?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| ("make a socket to the keeper", errno.into()))?;
        let (pid, kind) = match self.namespaces {
            NamespaceLayer::Available { user, .. } if order.own_view => {
                let ids = user.then(probe::own_ids);
                match sys::fork_into(namespaces::flags(user)).map_err(|error| ("make the namespaces of a sandbox", error))? {
                    Fork::Child => init::run(order, Given { result, tether, ids }),
                    Fork::Parent(pid) => (pid, Kind::Init),
                }
            }
            _ => match sys::fork().map_err(|error| ("fork a keeper", error))? {
                Fork::Child => keeper::run(order, result, &tether),
                Fork::Parent(pid) => (pid, Kind::Reaper),
            },
        };
        Ok((pid, kind, session, ours))
    }

    /// Removes mount points in a child, for on a file system that hangs it must not hold up everybody, and then tells of an end.
    pub(super) fn give_back(&mut self, left: Leftovers, then: Option<(u64, Outcome)>) {
        let Leftovers { points, watch, .. } = left;
        if points.is_empty() {
            // It is nobody's by name, and no stranger either.
            if let Some(pid) = close_aside(watch) {
                self.removals.insert(pid, Removal { points, then: None });
            }
        } else {
            match sys::fork() {
                Ok(Fork::Child) => {
                    // Above all the gateway's socket, of which this would be another end.
                    let kept: Vec<_> = watch.iter().map(AsRawFd::as_raw_fd).collect();
                    let _open = launch::close_all_but(&kept);
                    tether::remove(&points);
                    let _another = close_aside(watch);
                    sys::end(0)
                }
                // It is nobody's by name.
                Ok(Fork::Parent(pid)) => return drop(self.removals.insert(pid, Removal { points, then })),
                Err(_no_child) => tether::remove(&points),
            }
        }
        if let Some((id, outcome)) = then {
            self.tell_end(id, outcome);
        }
    }
}

/// Has a child close the last end of what told of covers, which takes the kernel some ten milliseconds.
fn close_aside(watch: Option<OwnedFd>) -> Option<Pid> {
    /// Long enough for everybody else to have closed theirs.
    const LAST: std::time::Duration = std::time::Duration::from_millis(100);
    let watch = watch?;
    match sys::fork() {
        Ok(Fork::Child) => {
            let _open = launch::close_all_but(&[watch.as_raw_fd()]);
            std::thread::sleep(LAST);
            sys::end(0)
        }
        Ok(Fork::Parent(pid)) => Some(pid),
        Err(_no_child) => None,
    }
}

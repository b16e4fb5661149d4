//! Starting workers, and processes with their keepers.

use super::{MOST_LAUNCHES, Spawner, users};
use crate::cgroup::Group;
use crate::children::Name;
use crate::dispatch::complain;
use crate::init;
use crate::keeper;
use crate::launch::{self, Order, Starter, failed};
use crate::limit::{self, Decided};
use crate::pending::Launch;
use crate::remover::Token;
use crate::spare::{self, Ends, Spare};
use crate::sys::{self, Fork};
use crate::tether::Tether;
use portcullis_protocol::helper::{NamespaceLayer, SpawnerEvent, Step, StepFailed};
use portcullis_protocol::limit::{ProcessLimits, TreeEnd};
use portcullis_sandbox::namespaces::{self, Users};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::time::Instant;

impl Spawner {
    pub(super) fn start_worker(&mut self, id: u64, own_view: bool, descriptors: &[OwnedFd]) {
        let name = Name::Worker(id);
        let ([stdio, control], false) = (descriptors, self.children.contains(name)) else {
            let reason = format!("start worker {id}: wrong descriptors, or the id is in use");
            return self.tell(&SpawnerEvent::WorkerFailed { id, reason });
        };
        match self.fork_worker(own_view) {
            Ok((Fork::Child, starter)) => launch::worker(&self.program, stdio, control, &starter),
            Ok((Fork::Parent(pid), _)) => self.children.add(name, pid),
            Err(error) => {
                let reason = format!("fork a worker: {error}");
                complain(&reason);
                self.tell(&SpawnerEvent::WorkerFailed { id, reason });
            }
        }
    }

    /// Forks a worker. A worker that makes its own view is forked into new namespaces, except the mount namespace: it copies the
    /// machine's mounts when it knows its policy.
    fn fork_worker(&self, own_view: bool) -> std::io::Result<(Fork, Starter)> {
        match self.namespaces {
            NamespaceLayer::Available { .. } if own_view => {
                let spawner = pidfd_open(self.me, PidfdFlags::empty())?;
                // A worker of root makes its view with root's rights, and has no capability afterwards.
                let users = Users::here(false);
                let ids = if let Users::First(user, group) = users { Some((user, group)) } else { None };
                Ok((sys::fork_into(namespaces::flags(users.is_first()))?, Starter::Outside { spawner, ids }))
            }
            // The gateway was told that there are no namespaces, and should not request this.
            NamespaceLayer::Unavailable { .. } if own_view => Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            _ => Ok((sys::fork()?, Starter::Parent(self.me))),
        }
    }

    pub(super) fn start(&mut self, id: u64, order: Order, asked: &ProcessLimits) {
        let refusal = if order.descriptors.len() != order.standard() {
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
        match self.keeper(Order { limits, ..order }, result) {
            Ok((pid, line, session, socket)) => {
                let watched = line.as_ref().map(|(token, socket)| self.removing.watch(*token, socket, pid, true));
                let tether = Tether::new(socket, session, line, *asked, group);
                if let Some(Err(errno)) = watched {
                    complain(format_args!("register a sandbox with the remover: {errno}; the sandbox is ended"));
                    tether.end(pid);
                }
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
        let groups = self.groups.as_mut().ok_or_else(|| failed(Step::Frame, "start: the request came before `Hello`", None))?;
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

    /// Gives an order to a keeper: to a spare, or to one that is forked for it.
    fn keeper(&mut self, order: Order, result: OwnedFd) -> Result<Kept, (&'static str, std::io::Error)> {
        let session = order.session.clone();
        let (ours, tether) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| ("make a socket to the keeper", errno.into()))?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| ("make a socket to the keeper", errno.into()))?;
        // Added before any process is started: programs of the same user may have used up the watches. The process id is set when
        // it is known.
        epoll::add(&self.said, &ours, EventData::new_u64(0), EventFlags::empty()).map_err(|errno| {
            (
                "wait for the keeper (processes of this user may use up fs.epoll.max_user_watches: end some, or raise it)",
                errno.into(),
            )
        })?;
        let (pid, line) = match self.namespaces {
            NamespaceLayer::Available { user, .. } if order.own_view => {
                let (token, socket, line) =
                    self.begin_removing().map_err(|error| ("register the sandbox with the remover of mount points", error))?;
                let ends = Ends { result, tether, line: Some(line) };
                // Spares have their own network, and their own user id if the server has a range of them.
                let ready = if order.own_network && order.own_uid { self.hand_to_spare(&order, &ends) } else { None };
                let pid = match ready {
                    Some(pid) => pid,
                    None => self.fork_init(order, ends, user)?,
                };
                (pid, Some((token, socket)))
            }
            _ => match sys::fork().map_err(|error| ("fork a keeper", error))? {
                Fork::Child => keeper::run(order, Ends { result, tether, line: None }),
                Fork::Parent(pid) => (pid, None),
            },
        };
        Ok((pid, line, session, ours))
    }

    /// Makes a spare the init of the ordered sandbox, if there is a spare that takes the order.
    fn hand_to_spare(&mut self, order: &Order, ends: &Ends) -> Option<Pid> {
        let bytes = spare::written(order)?;
        while let Some(spare) = self.spares.take(Instant::now()) {
            if spare.hand(&bytes, order, ends).is_ok() {
                // From now on it is listed as a process.
                self.children.remove(spare.pid);
                return Some(spare.pid);
            }
            // It has ended, or ends when its socket is closed.
        }
        None
    }

    /// Forks an init that waits for an order.
    pub(super) fn make_spare(&mut self) {
        let NamespaceLayer::Available { user, .. } = self.namespaces else { return self.spares.give_up() };
        let mounts = self.spares.mounts();
        let forked = spare::way().map_err(std::io::Error::from).and_then(|(ours, theirs)| {
            let (users, lease) = (Users::here(user), self.uids.lease()?);
            match sys::fork_into(namespaces::flags(users.is_first())) {
                Ok(Fork::Child) => init::wait(&theirs, users, lease),
                forked => Ok((self.lend(lease, forked)?, ours)),
            }
        });
        match forked {
            Ok((pid, way)) => {
                let spare = Spare { pid, way, mounts };
                self.children.add(Name::Spare(spare.pid), spare.pid);
                self.spares.add(spare);
            }
            // The next start forks an init itself, and reports the error.
            Err(_error) => self.spares.give_up(),
        }
    }

    fn fork_init(&mut self, order: Order, ends: Ends, user: bool) -> Result<Pid, (&'static str, std::io::Error)> {
        let users = Users::here(user);
        let lease = self.lease().map_err(|error| (users::NO_UID, error))?;
        match sys::fork_into(namespaces::flags(users.is_first())) {
            Ok(Fork::Child) => init::run(order, ends, users, lease),
            forked => self.lend(lease, forked).map_err(|error| ("make the namespaces of a sandbox", error)),
        }
    }
}

/// A keeper with its session and its tether; an init also with its token and its socket to the remover.
type Kept = (Pid, Option<(Token, OwnedFd)>, String, OwnedFd);

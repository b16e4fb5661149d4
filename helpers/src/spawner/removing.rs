//! The spawner's side of the remover: the sandboxes that the remover watches, and the ends that wait for it.

use super::Spawner;
use crate::dispatch::complain;
use crate::remover::{self, Token};
use crate::tether::Outcome;
use portcullis_sandbox::mounts::RecordsAt;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};

/// The number of consecutive removers that are replaced at once although they ended without a report. After that the next start
/// forks another one.
const MOST_LOST: u32 = 8;

/// The state of the remover.
#[derive(Debug, Default)]
pub(super) struct Removing {
    records: Option<RecordsAt>,
    remover: Option<(Pid, OwnedFd)>,
    newest: Token,
    /// The sandboxes that the remover watches and has not reported as gone. The value is `None` until init is reaped.
    waiting: HashMap<Token, Option<(u64, Outcome)>>,
    /// Those of them whose init is reaped.
    reaped: HashSet<Token>,
    lost: u32,
}

impl Removing {
    pub(super) fn new(records: Option<RecordsAt>) -> Self {
        Self { records, ..Self::default() }
    }

    pub(super) fn records(&self) -> Option<RecordsAt> {
        self.records.clone()
    }

    pub(super) fn pid(&self) -> Option<Pid> {
        self.remover.as_ref().map(|(pid, _)| *pid)
    }

    /// The socket to the remover, to be polled.
    pub(super) fn socket(&self) -> Option<&OwnedFd> {
        self.remover.as_ref().map(|(_, socket)| socket)
    }

    /// Closes the socket to the remover, which ends when nothing is left to remove.
    pub(super) fn close(&mut self) -> Option<Pid> {
        self.remover.take().map(|(pid, _closed)| pid)
    }

    /// A token for a sandbox that is about to be made, with both ends of its socket.
    fn begin(&mut self) -> std::io::Result<(Token, OwnedFd, OwnedFd)> {
        let (ours, theirs) = remover::way()?;
        self.newest += 1;
        Ok((self.newest, ours, theirs))
    }

    /// Requests that the remover watches an init that is not reaped yet.
    pub(super) fn watch(&mut self, token: Token, socket: &OwnedFd, init: Pid, is_known: bool) -> Result<(), Errno> {
        self.waiting.insert(token, None);
        let Some((_, remover)) = &self.remover else { return Ok(()) };
        let init = pidfd_open(init, PidfdFlags::empty())?;
        match remover::watch(remover.as_fd(), token, socket.as_fd(), init.as_fd(), is_known) {
            // The remover was killed. The next one gets the request when this one is reaped.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            other => other,
        }
    }

    /// The sandboxes whose mount points are removed, and whose ends are to be reported now.
    fn take_gone(&mut self) -> Vec<(u64, Outcome)> {
        let mut ends = Vec::new();
        while let Some(token) = self.remover.as_ref().and_then(|(_, socket)| remover::next_gone(socket.as_fd())) {
            self.lost = 0;
            self.reaped.remove(&token);
            ends.extend(self.waiting.remove(&token).flatten());
        }
        ends
    }
}

impl Spawner {
    /// Reports the ends of the sandboxes of which nothing is left.
    pub(super) fn hear_remover(&mut self) {
        for (id, end) in self.removing.take_gone() {
            self.tell_end(id, end);
        }
    }

    /// Called after an init was reaped: its end is reported once nothing of the sandbox is left on the machine.
    pub(super) fn bury_init(&mut self, token: Option<Token>, then: Option<(u64, Outcome)>) {
        let removing = &mut self.removing;
        match token.filter(|token| removing.waiting.contains_key(token)) {
            Some(token) if removing.remover.is_some() => {
                removing.waiting.insert(token, then);
                removing.reaped.insert(token);
            }
            // Its mount points are gone already, or there is no remover that could report it. Recorded mount points are removed
            // with their next use.
            nothing_left => {
                nothing_left.iter().for_each(|token| drop(removing.waiting.remove(token)));
                if let Some((id, end)) = then {
                    self.tell_end(id, end);
                }
            }
        }
    }

    /// A token for a sandbox that is about to be made, with both ends of its socket to the remover.
    pub(super) fn begin_removing(&mut self) -> std::io::Result<(Token, OwnedFd, OwnedFd)> {
        if self.removing.remover.is_none() {
            self.engage_remover()?;
        }
        self.removing.begin()
    }

    /// Called after a killed remover was reaped: another one takes its place.
    pub(super) fn replace_remover(&mut self) {
        // The reports that it sent before.
        self.hear_remover();
        self.removing.remover = None;
        self.removing.lost += 1;
        if self.removing.lost > MOST_LOST {
            complain(format_args!("the remover of mount points dies repeatedly; the next start forks another one"));
        } else if let Err(error) = self.engage_remover() {
            complain(format_args!("fork the remover of mount points: {error}"));
        }
        if self.removing.remover.is_none() {
            // Recorded mount points are removed with their next use.
            let reaped: Vec<Token> = self.removing.reaped.drain().collect();
            for token in reaped {
                if let Some((id, end)) = self.removing.waiting.remove(&token).flatten() {
                    self.tell_end(id, end);
                }
            }
        }
    }

    /// Forks the remover, and passes it all sandboxes that are to be watched.
    pub(super) fn engage_remover(&mut self) -> std::io::Result<()> {
        let (pid, socket) = remover::fork(self.removing.records.as_ref())?;
        for token in &self.removing.reaped {
            // If this remover is killed meanwhile, the next one gets the request.
            let _killed = remover::sweep(socket.as_fd(), *token);
        }
        self.removing.remover = Some((pid, socket));
        for (init, tether) in &self.tethers {
            if let Some((token, socket)) = tether.line()
                && self.removing.waiting.contains_key(token)
                && let Err(errno) = self.removing.watch(*token, socket, *init, false)
            {
                complain(format_args!("pass a sandbox to the new remover: {errno}; the sandbox is ended"));
                tether.end(*init);
            }
        }
        Ok(())
    }
}

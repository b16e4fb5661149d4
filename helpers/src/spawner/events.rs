//! Waiting for events on the descriptors of the spawner.

use super::{End, Spawner};
use crate::dispatch::complain;
use crate::tether::Tether;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Pid;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// The descriptors that one poll found ready.
pub(super) struct Ready {
    pub(super) socket: bool,
    pub(super) signals: bool,
    pub(super) remover: bool,
    /// The machine's mounts have changed.
    pub(super) mounts: bool,
    pub(super) launches: Vec<bool>,
    pub(super) said: Vec<Pid>,
}

impl Spawner {
    /// Waits for an event, and at most for `until`. `None` if the time passes without one.
    pub(super) fn wait(&self, until: Option<Duration>) -> Result<Option<Ready>, End> {
        let mut interest = PollFlags::IN;
        interest.set(PollFlags::OUT, !self.unsent.is_empty());
        let read = PollFlags::IN;
        // If there is no remover, another descriptor takes its position, polled for no events.
        let (remover, of_remover) = self.removing.socket().map_or((&self.said, PollFlags::empty()), |remover| (remover, read));
        let mut polled = vec![
            PollFd::new(&self.socket, interest),
            PollFd::new(&self.signals, read),
            PollFd::new(&self.said, read),
            PollFd::new(remover, of_remover),
            match self.spares.of_mounts() {
                Some(mounts) => PollFd::from_borrowed_fd(mounts, PollFlags::PRI),
                None => PollFd::new(&self.said, PollFlags::empty()),
            },
        ];
        polled.extend(self.launches.iter().map(|launch| {
            // After its end the pipe would stay readable forever. Then only the exit of the launcher is awaited.
            PollFd::new(&launch.pipe, if launch.ended { PollFlags::empty() } else { read })
        }));
        let late = self.launches.iter().filter_map(|launch| launch.until).min();
        let late = late.map(|at| at.saturating_duration_since(Instant::now()));
        let until = until.into_iter().chain(late).min();
        loop {
            let until = until.or_else(|| self.spares.deadline().map(|at| at.saturating_duration_since(Instant::now())));
            match poll(&mut polled, until.and_then(|until| Timespec::try_from(until).ok()).as_ref()) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(End::Failed(format!("wait for requests: {errno}"))),
            }
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let said = if ready[2] { self.spoken()? } else { Vec::new() };
        Ok(Some(Ready {
            socket: ready[0],
            signals: ready[1],
            remover: ready[3],
            mounts: ready[4],
            launches: ready[5..].to_vec(),
            said,
        }))
    }

    /// The keepers that have sent a message or closed their sockets.
    fn spoken(&self) -> Result<Vec<Pid>, End> {
        let mut space = [MaybeUninit::<Event>::uninit(); 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spoken = match epoll::wait(&self.said, &mut space, Some(&now)) {
            Ok((spoken, _rest)) => spoken,
            // The next call finds them.
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(End::Failed(format!("wait for keepers: {errno}"))),
        };
        let pid = |event: &Event| Pid::from_raw(i32::try_from(event.data.u64()).ok()?);
        Ok(spoken.iter().filter_map(pid).collect())
    }

    /// Waits for a keeper from now on. If that fails, the keeper is killed, and its end is reported as any other.
    pub(super) fn hear(&self, pid: Pid, tether: &Tether) {
        if let Some(socket) = tether.socket()
            && let Err(errno) = epoll::modify(&self.said, socket, data_of(pid), EventFlags::IN)
        {
            complain(format_args!("wait for a keeper: {errno}; the keeper is ended"));
            tether.end(pid);
        }
    }
}

/// The data of a keeper's events in the epoll `said`.
fn data_of(pid: Pid) -> EventData {
    EventData::new_u64(u64::from(pid.as_raw_nonzero().get().unsigned_abs()))
}

//! How large a pipe is: as it was made, or, while it runs full, larger.
//!
//! A larger pipe lets a process that writes much go on while its output is on its way. An ordinary user gets few of them: beyond
//! `pipe-user-pages-soft` (pipe(7)) each new pipe of that user has room for two pages. So a pipe grows only once it runs full, what
//! all of them have grown by comes out of one budget, and what is not used for a while, or is left, goes back there.

use crate::budget::{Budget, Charge};
use rustix::fd::AsFd;
use rustix::io::ioctl_fionread;
use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};
use std::time::Duration;
use tokio::time::Instant;

/// Bytes of a pipe that has grown: the most that an ordinary user may ask for, unless `pipe-max-size` (pipe(7)) says otherwise.
pub(super) const GROWN: usize = 1 << 20;

/// So many reads one after the other find a pipe full before it grows: one burst is not worth it.
const FULL: u32 = 8;

/// How long a pipe that has grown may hold no more than it did before, until it shrinks.
const QUIET: Duration = Duration::from_secs(1);

/// The size of one pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    /// Bytes that it was made for.
    made: usize,
    /// Reads that found it full, one after the other.
    full: u32,
    growth: Option<Growth>,
    budget: Budget,
}

#[derive(Debug)]
struct Growth {
    _room: Charge,
    /// When it is to shrink, if it is not used.
    until: Instant,
}

impl Pipe {
    /// None for what is no pipe, or as large already.
    pub(super) fn of(fd: impl AsFd, budget: &Budget) -> Option<Self> {
        let made = fcntl_getpipe_size(fd).ok().filter(|made| *made < GROWN)?;
        Some(Self { made, full: 0, growth: None, budget: budget.clone() })
    }

    /// A read brought so many bytes of so many that it asked for. Writers leave pages partly empty, so half of what the pipe was
    /// made for is taken as full. One that asked for less
    /// says nothing, unless it brought less than it asked for: then the pipe was empty.
    pub(super) fn was_read(&mut self, fd: impl AsFd, bytes: usize, asked: usize, now: Instant) {
        if bytes < self.made / 2 {
            if bytes < asked {
                self.full = 0;
            }
            return;
        }
        match &mut self.growth {
            Some(growth) => growth.until = now + QUIET,
            None if self.full + 1 < FULL => self.full += 1,
            None => self.grow(fd, now),
        }
    }

    /// When [`Self::settle`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.growth.as_ref().map(|growth| growth.until)
    }

    /// Shrinks it if that is due, unless it holds too much for that by now.
    pub(super) fn settle(&mut self, fd: impl AsFd, now: Instant) {
        if let Some(growth) = &mut self.growth
            && growth.until <= now
        {
            growth.until = now + QUIET;
            self.shrink(fd);
        }
    }

    /// Gives back what it grew by, as far as it does not hold that: others may have it open for long after we have left it.
    pub(super) fn shrink(&mut self, fd: impl AsFd) {
        let holds = |fd| ioctl_fionread(fd).is_ok_and(|bytes| usize::try_from(bytes).is_ok_and(|bytes| bytes > self.made));
        if self.growth.is_some() && !holds(fd.as_fd()) && fcntl_setpipe_size(fd, self.made).is_ok() {
            self.growth = None;
        }
    }

    /// Without room in the budget, or where the system says no, it stays as it is, and is tried again when it has run full again.
    fn grow(&mut self, fd: impl AsFd, now: Instant) {
        self.full = 0;
        let Some(room) = self.budget.try_charge(GROWN.saturating_sub(self.made)) else { return };
        if fcntl_setpipe_size(fd, GROWN).is_ok() {
            self.growth = Some(Growth { _room: room, until: now + QUIET });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::io::{read, write};
    use std::os::fd::OwnedFd;

    struct Ends {
        reader: OwnedFd,
        writer: OwnedFd,
        pipe: Pipe,
    }

    impl Ends {
        fn new(budget: &Budget) -> Self {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
            let pipe = Pipe::of(&reader, budget).unwrap();
            Self { reader, writer, pipe }
        }

        fn size(&self) -> usize {
            fcntl_getpipe_size(&self.reader).unwrap()
        }

        /// Runs full so many times.
        fn flood(&mut self, times: u32, now: Instant) {
            for _time in 0..times {
                let written = write(&self.writer, &vec![0; self.size()]).unwrap();
                let bytes = read(&self.reader, vec![0; written].as_mut_slice()).unwrap();
                self.pipe.was_read(&self.reader, bytes, bytes, now);
            }
        }
    }

    #[test]
    fn what_runs_full_grows_and_shrinks_when_it_is_not_used() {
        let budget = Budget::new(GROWN);
        let (mut ends, now) = (Ends::new(&budget), Instant::now());
        let made = ends.size();
        assert!(made < GROWN);
        ends.flood(FULL - 1, now);
        ends.pipe.was_read(&ends.reader, 1, 2, now);
        ends.flood(FULL - 1, now);
        ends.pipe.was_read(&ends.reader, 1, 1, now);
        assert_eq!(ends.size(), made, "not so many times in a row");
        ends.flood(1, now);
        assert_eq!(ends.size(), GROWN);
        let later = ends.pipe.deadline().unwrap();
        ends.pipe.settle(&ends.reader, later - Duration::from_millis(1));
        assert_eq!(ends.size(), GROWN, "it is not time yet");
        ends.flood(1, later);
        ends.pipe.settle(&ends.reader, later);
        assert_eq!(ends.size(), GROWN, "it was used meanwhile");
        let later = ends.pipe.deadline().unwrap();
        let held = write(&ends.writer, &vec![0; 2 * made]).unwrap();
        ends.pipe.settle(&ends.reader, later);
        assert_eq!(ends.size(), GROWN, "it holds more than it was made for");
        read(&ends.reader, vec![0; held].as_mut_slice()).unwrap();
        ends.pipe.settle(&ends.reader, ends.pipe.deadline().unwrap());
        assert_eq!((ends.size(), ends.pipe.deadline()), (made, None));
        ends.flood(FULL, now);
        assert_eq!(ends.size(), GROWN, "control: it may grow again");
    }

    #[test]
    fn the_budget_bounds_what_all_grow_by_and_what_was_given_back_is_had_again() {
        let (budget, now) = (Budget::new(2 * GROWN), Instant::now());
        let mut all: Vec<Ends> = (0..8).map(|_| Ends::new(&budget)).collect();
        let made = all[0].size();
        all.iter_mut().for_each(|ends| ends.flood(3 * FULL, now));
        let grown = |all: &[Ends]| all.iter().map(|ends| ends.size() - made).collect::<Vec<_>>();
        let by = GROWN - made;
        assert_eq!(grown(&all), [by, by, 0, 0, 0, 0, 0, 0]);
        drop(all.remove(0));
        all.iter_mut().skip(1).for_each(|ends| ends.flood(FULL, now));
        assert_eq!(grown(&all), [by, by, 0, 0, 0, 0, 0]);
        let later = now + QUIET;
        let Ends { reader, pipe, .. } = &mut all[0];
        pipe.settle(&*reader, later);
        all.iter_mut().skip(2).for_each(|ends| ends.flood(FULL, later));
        assert_eq!(grown(&all), [0, by, by, 0, 0, 0, 0]);
    }

    #[test]
    fn without_a_budget_it_stays_as_it_is() {
        let mut ends = Ends::new(&Budget::new(0));
        let made = ends.size();
        ends.flood(3 * FULL, Instant::now());
        assert_eq!((ends.size(), ends.pipe.deadline()), (made, None));
    }

    #[test]
    fn a_terminal_is_no_pipe() {
        let terminal = crate::process::pty::Terminal::open(None).unwrap();
        assert!(Pipe::of(&terminal.master, &Budget::new(GROWN)).is_none());
    }
}

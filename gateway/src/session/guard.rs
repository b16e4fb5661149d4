//! Bounds in time that a process was started with, and its end by degrees. Sans-IO.
//!
//! A guard that runs out interrupts the process, so that it can tidy up, and kills it if it does not end soon. Its clock begins
//! with the call that starts the process.

use std::time::{Duration, Instant};

/// How long a process may take to end after it was interrupted.
const INTERRUPTED: Duration = Duration::from_secs(5);

/// What a start asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    /// The longest silence: no output, and no input that it took.
    pub(super) stall: Option<Duration>,
    /// The longest time altogether.
    pub(super) ceiling: Option<Duration>,
    /// How long others may hold its output open after its end.
    pub(super) drain: Option<Duration>,
}

impl Bounds {
    /// The shorter of those that hold for its start.
    pub(super) fn shortest(&self) -> Option<Duration> {
        self.stall.into_iter().chain(self.ceiling).min()
    }
}

/// Watches one process.
#[derive(Debug)]
pub(super) struct Guard {
    bounds: Bounds,
    begun: Instant,
    heard: Instant,
    /// Once somebody wants it to end: when it is killed.
    kill_at: Option<Instant>,
    /// Once it ended: when its output is not waited for any more.
    drained_at: Option<Instant>,
}

/// What is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Interrupt it; this is why it will have ended.
    Interrupt(String),
    Kill,
    /// Its output ends here; in words, what may be missing.
    Abandon(String),
}

impl Guard {
    pub(super) fn new(bounds: Bounds, now: Instant) -> Self {
        Self { bounds, begun: now, heard: now, kill_at: None, drained_at: None }
    }

    /// It wrote, or took input.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// It was told to end, and is killed at this time unless an earlier one was said before.
    pub(super) fn ends(&mut self, at: Instant) {
        self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// It was interrupted, and is killed if it does not end soon.
    pub(super) fn interrupted(&mut self, now: Instant) {
        self.ends(now + INTERRUPTED);
    }

    /// Whether somebody or something wants it to end.
    pub(super) fn is_to_end(&self) -> bool {
        self.kill_at.is_some()
    }

    /// It ended: whether there is still something to guard.
    pub(super) fn exited(&mut self, now: Instant) -> bool {
        let drain = self.bounds.drain;
        self.drained_at = drain.and_then(|drain| now.checked_add(drain));
        (self.bounds, self.kill_at) = (Bounds { drain, ..Bounds::default() }, None);
        self.drained_at.is_some()
    }

    /// When to look again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.drained_at.or(self.kill_at).or_else(|| self.stalls_at().into_iter().chain(self.ceiling_at()).min())
    }

    /// What is to be done now. Once it was told to kill there is nothing more to do.
    pub(super) fn due(&mut self, now: Instant) -> Option<Due> {
        let ms = |bound: Option<Duration>| bound.unwrap_or_default().as_millis();
        if let Some(at) = self.drained_at {
            return (at <= now).then(|| {
                self.drained_at = None;
                Due::Abandon(format!(
                    "others held the output of the process open for {} ms after its end, as long as its start allows (drainMs): what they write from then on is dropped",
                    ms(self.bounds.drain)
                ))
            });
        }
        if let Some(at) = self.kill_at {
            return (at <= now).then(|| {
                (self.kill_at, self.bounds) = (None, Bounds::default());
                Due::Kill
            });
        }
        let reason = if self.ceiling_at().is_some_and(|at| at <= now) {
            format!("it ran for {} ms, as long as its start allows (ceilingMs)", ms(self.bounds.ceiling))
        } else if self.stalls_at().is_some_and(|at| at <= now) {
            format!("nothing came of it or went to it for {} ms, as long as its start allows (stallMs)", ms(self.bounds.stall))
        } else {
            return None;
        };
        self.kill_at = Some(now + INTERRUPTED);
        Some(Due::Interrupt(format!("the process was stopped: {reason}")))
    }

    fn stalls_at(&self) -> Option<Instant> {
        self.bounds.stall.and_then(|bound| self.heard.checked_add(bound))
    }

    fn ceiling_at(&self) -> Option<Instant> {
        self.bounds.ceiling.and_then(|bound| self.begun.checked_add(bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn guard(stall: u32, ceiling: u32) -> (Guard, Instant) {
        let (now, bound) = (Instant::now(), |seconds: u32| (seconds > 0).then(|| SECOND * seconds));
        (Guard::new(Bounds { stall: bound(stall), ceiling: bound(ceiling), drain: None }, now), now)
    }

    #[test]
    fn silence_is_counted_from_the_last_word_and_the_ceiling_from_the_first() {
        let (mut guard, begin) = guard(3, 10);
        for nth in 1..5 {
            assert_eq!(guard.due(begin + SECOND * 2 * nth), None);
            guard.heard(begin + SECOND * 2 * nth);
        }
        assert_eq!(guard.deadline(), Some(begin + SECOND * 10));
        let Some(Due::Interrupt(reason)) = guard.due(begin + SECOND * 10) else { panic!("it is due") };
        assert!(reason.contains("10000 ms") && reason.contains("ceilingMs"), "{reason}");
        guard.heard(begin + SECOND * 11);
        assert_eq!(guard.due(begin + SECOND * 14), None, "it has its time to end");
        assert_eq!(guard.due(begin + SECOND * 15), Some(Due::Kill));
        assert_eq!((guard.due(begin + SECOND * 99), guard.deadline()), (None, None), "once");
    }

    #[test]
    fn a_stall_says_so() {
        let (mut guard, begin) = guard(3, 0);
        let Some(Due::Interrupt(reason)) = guard.due(begin + SECOND * 3) else { panic!("it is due") };
        assert!(reason.contains("3000 ms") && reason.contains("stallMs"), "{reason}");
    }

    #[test]
    fn after_the_end_only_the_drain_is_left() {
        let now = Instant::now();
        let bounds = Bounds { stall: Some(SECOND), ceiling: Some(SECOND), drain: Some(SECOND * 3) };
        let mut guard = Guard::new(bounds, now);
        assert_eq!(guard.deadline(), Some(now + SECOND));
        assert!(guard.exited(now));
        assert_eq!((guard.deadline(), guard.due(now + SECOND * 2)), (Some(now + SECOND * 3), None));
        let Some(Due::Abandon(reason)) = guard.due(now + SECOND * 3) else { panic!("it is due") };
        assert!(reason.contains("3000 ms") && reason.contains("drainMs"), "{reason}");
        assert_eq!((guard.due(now + SECOND * 99), guard.deadline()), (None, None), "once");
        assert!(!Guard::new(Bounds { drain: None, ..bounds }, now).exited(now), "nothing is left to guard");
    }

    #[test]
    fn the_earlier_end_counts() {
        let (mut guard, begin) = guard(0, 0);
        assert_eq!(guard.deadline(), None);
        guard.ends(begin + SECOND * 5);
        guard.ends(begin + SECOND * 9);
        assert_eq!((guard.deadline(), guard.due(begin + SECOND * 4)), (Some(begin + SECOND * 5), None));
        assert_eq!(guard.due(begin + SECOND * 5), Some(Due::Kill));
    }

    #[test]
    fn a_bound_beyond_all_time_never_comes() {
        let now = Instant::now();
        let mut guard =
            Guard::new(Bounds { stall: Some(Duration::MAX), ceiling: Some(Duration::MAX), drain: Some(Duration::MAX) }, now);
        assert_eq!((guard.deadline(), guard.due(now)), (None, None));
    }
}

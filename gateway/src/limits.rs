//! The bounds that an operator may set, in one table: flags, the environment, the configuration file, the documents and what
//! the server says of itself all come from it.

use crate::config::Config;
pub use crate::limit_error::LimitError;
use std::num::NonZeroU64;
use std::time::Duration;

/// One bound of a server.
#[derive(Debug)]
pub struct Limit {
    /// As in `--name`, and as the key of a configuration file.
    pub name: &'static str,
    /// What is counted.
    pub unit: Unit,
    /// The smallest value but 0.
    pub least: u64,
    /// The largest value.
    pub most: u64,
    /// What 0 means; none: 0 is refused.
    pub zero: Option<&'static str>,
    /// What is bounded, and what happens beyond.
    pub about: &'static str,
    get: fn(&Config) -> u64,
    set: fn(&mut Config, u64),
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
}

impl Unit {
    /// How its values are called, as in `<SECONDS>`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Count => "N",
            Self::Bytes => "BYTES",
            Self::Seconds => "SECONDS",
            Self::Milliseconds => "MS",
        }
    }

    /// What a message says behind "a whole number".
    fn of(self) -> &'static str {
        match self {
            Self::Count => "",
            Self::Bytes => " of bytes",
            Self::Seconds => " of seconds",
            Self::Milliseconds => " of milliseconds",
        }
    }
}

impl Limit {
    /// The value that a text means.
    ///
    /// # Errors
    /// See [`LimitError`].
    pub fn parse(&self, text: &str) -> Result<u64, LimitError> {
        let value = text.parse().map_err(|_| LimitError::NotWhole(text.to_owned(), self.unit.of()))?;
        self.check(value)?;
        Ok(value)
    }

    /// Sets it.
    ///
    /// # Errors
    /// The value is out of its bounds.
    pub fn set(&self, config: &mut Config, value: u64) -> Result<(), LimitError> {
        self.check(value)?;
        (self.set)(config, value);
        Ok(())
    }

    /// What it is set to.
    #[must_use]
    pub fn value(&self, config: &Config) -> u64 {
        (self.get)(config)
    }

    /// What it is unless it is set.
    #[must_use]
    pub fn default_value(&self) -> u64 {
        self.value(&Config::bare())
    }

    fn check(&self, value: u64) -> Result<(), LimitError> {
        if (self.least..=self.most).contains(&value) || (value == 0 && self.zero.is_some()) {
            return Ok(());
        }
        let or_zero = self.zero.map(|means| format!(", nor 0 ({means})")).unwrap_or_default();
        Err(LimitError::OutOfBounds { value, least: self.least, most: self.most, or_zero })
    }
}

/// The longest time that is taken: a year.
const YEAR: u64 = 31_536_000;
const YEAR_MS: u64 = YEAR * 1000;
const DAY: u64 = 86_400;
/// The most bytes: beyond a pebibyte somebody has mistaken the unit.
const MOST_BYTES: u64 = 1 << 50;

/// Every bound that an operator may set, in the order of the documents.
pub const LIMITS: &[Limit] = &[
    Limit {
        name: "max-connections",
        unit: Unit::Count,
        least: 1,
        most: 65_536,
        zero: None,
        about: "Connected clients, from upgrade to close; one more is refused with status 503",
        get: |config| count(config.connections),
        set: |config, value| config.connections = size(value),
    },
    Limit {
        name: "handshake-timeout",
        unit: Unit::Seconds,
        least: 1,
        most: 3600,
        zero: None,
        about: "How long a client may take until its socket is upgraded, and from there to `initialized`; then it is closed",
        get: |config| config.handshake.as_secs(),
        set: |config, value| config.handshake = Duration::from_secs(value),
    },
    Limit {
        name: "ping-interval",
        unit: Unit::Seconds,
        least: 1,
        most: 3600,
        zero: None,
        about: "How often clients are pinged",
        get: |config| config.ping.as_secs(),
        set: |config, value| config.ping = Duration::from_secs(value),
    },
    Limit {
        name: "silence-timeout",
        unit: Unit::Seconds,
        least: 1,
        most: DAY,
        zero: None,
        about: "How long a client may say nothing, a pong included, before it counts as gone",
        get: |config| config.silence.as_secs(),
        set: |config, value| config.silence = Duration::from_secs(value),
    },
    Limit {
        name: "max-sessions",
        unit: Unit::Count,
        least: 1,
        most: 65_536,
        zero: None,
        about: "Sessions at a time, detached ones included; an `initialize` for one more is refused",
        get: |config| count(config.sessions),
        set: |config, value| config.sessions = size(value),
    },
    Limit {
        name: "max-calls",
        unit: Unit::Count,
        least: 1,
        most: 1 << 20,
        zero: None,
        about: "Calls of all connections that run at a time; one more is refused",
        get: |config| count(config.calls),
        set: |config, value| config.calls = size(value),
    },
    Limit {
        name: "max-processes",
        unit: Unit::Count,
        least: 1,
        most: 1 << 20,
        zero: None,
        about: "Processes of all sessions that live at a time; a start of one more is refused",
        get: |config| count(config.processes),
        set: |config, value| config.processes = size(value),
    },
    Limit {
        name: "buffer-bytes",
        unit: Unit::Bytes,
        least: 64 << 20,
        most: MOST_BYTES,
        zero: None,
        about: "Bytes of messages and large replies of all connections in memory; beyond, connections are not read and replies wait",
        get: |config| count(config.buffer_bytes),
        set: |config, value| config.buffer_bytes = size(value),
    },
    Limit {
        name: "pipe-bytes",
        unit: Unit::Bytes,
        least: 1 << 20,
        most: MOST_BYTES,
        zero: Some("none: they stay as they are made"),
        about: "Bytes by which pipes that run full are made larger, all together; beyond, they stay as they are made",
        get: |config| count(config.pipe_bytes),
        set: |config, value| config.pipe_bytes = size(value),
    },
    Limit {
        name: "concurrent-requests",
        unit: Unit::Count,
        least: 1,
        most: 4096,
        zero: None,
        about: "Calls of one connection that run side by side; more wait",
        get: |config| count(config.concurrent_requests),
        set: |config, value| config.concurrent_requests = size(value),
    },
    Limit {
        name: "session-processes",
        unit: Unit::Count,
        least: 1,
        most: 65_536,
        zero: None,
        about: "Processes of one session that live at a time; a start of one more is refused",
        get: |config| count(config.session_processes),
        set: |config, value| config.session_processes = size(value),
    },
    Limit {
        name: "detached-retention",
        unit: Unit::Seconds,
        least: 1,
        most: DAY,
        zero: None,
        about: "How long a detached session and a closed process are kept",
        get: |config| config.retention.as_secs(),
        set: |config, value| config.retention = Duration::from_secs(value),
    },
    Limit {
        name: "max-retention",
        unit: Unit::Seconds,
        least: 1,
        most: DAY,
        zero: None,
        about: "The longest that a client may ask for instead; it gets no more",
        get: |config| config.max_retention.as_secs(),
        set: |config, value| config.max_retention = Duration::from_secs(value),
    },
    Limit {
        name: "spool-bytes",
        unit: Unit::Bytes,
        least: 1,
        most: MOST_BYTES,
        zero: Some("none: the process waits"),
        about: "Output of one process on disk while its client is away; then the process waits",
        get: |config| config.spool_bytes,
        set: |config, value| config.spool_bytes = value,
    },
    Limit {
        name: "session-spool-bytes",
        unit: Unit::Bytes,
        least: 1,
        most: MOST_BYTES,
        zero: Some("none: processes wait"),
        about: "The same of all processes of a session together",
        get: |config| config.session_spool_bytes,
        set: |config, value| config.session_spool_bytes = value,
    },
    Limit {
        name: "idle-exit",
        unit: Unit::Seconds,
        least: 1,
        most: YEAR,
        zero: Some("never"),
        about: "The server ends by itself after so long without a connection and without a session that is kept",
        get: |config| config.idle_exit.map_or(0, |time| time.as_secs()),
        set: |config, value| config.idle_exit = (value > 0).then(|| Duration::from_secs(value)),
    },
    Limit {
        name: "file-timeout",
        unit: Unit::Seconds,
        least: 1,
        most: DAY,
        zero: None,
        about: "How long a file call may take; then it is lost, and its worker is killed",
        get: |config| config.fs_deadline.as_secs(),
        set: |config, value| config.fs_deadline = Duration::from_secs(value),
    },
    Limit {
        name: "process-tasks",
        unit: Unit::Count,
        least: 1,
        most: 4 << 20,
        zero: Some("no limit"),
        about: "The most tasks (processes and threads) of each start; see `limits.processes` below, and \"Bounds by default\" for the default",
        get: |config| of(config.process_limits.processes.or(config.bounds.start_tasks)),
        set: set_tasks,
    },
    Limit {
        name: "process-memory-bytes",
        unit: Unit::Bytes,
        least: 1,
        most: MOST_BYTES,
        zero: Some("no limit"),
        about: "The most memory of each start; see `limits.memoryBytes` below",
        get: |config| of(config.process_limits.memory_bytes),
        set: |config, value| config.process_limits.memory_bytes = NonZeroU64::new(value),
    },
    Limit {
        name: "process-cpu-ms",
        unit: Unit::Milliseconds,
        least: 1,
        most: YEAR_MS,
        zero: Some("no limit"),
        about: "The most processor time of each start; see `limits.cpuMs` below",
        get: |config| of(config.process_limits.cpu_ms),
        set: |config, value| config.process_limits.cpu_ms = NonZeroU64::new(value),
    },
    Limit {
        name: "process-open-files",
        unit: Unit::Count,
        least: 1,
        most: 1 << 20,
        zero: Some("no limit"),
        about: "The most descriptors of each start; see `limits.openFiles` below",
        get: |config| of(config.process_limits.open_files),
        set: |config, value| config.process_limits.open_files = NonZeroU64::new(value),
    },
    Limit {
        name: "process-output-bytes",
        unit: Unit::Bytes,
        least: 1,
        most: MOST_BYTES,
        zero: Some("no limit"),
        about: "The most output of each start; see `limits.outputBytes` below",
        get: |config| of(config.process_limits.output_bytes),
        set: |config, value| config.process_limits.output_bytes = NonZeroU64::new(value),
    },
    Limit {
        name: "process-stall-ms",
        unit: Unit::Milliseconds,
        least: 1,
        most: YEAR_MS,
        zero: Some("no limit"),
        about: "The longest silence of each start, of this and its `stallMs` the shorter; then it is interrupted, and killed 5 s later",
        get: |config| of(config.process_times.stall_ms),
        set: |config, value| config.process_times.stall_ms = NonZeroU64::new(value),
    },
    Limit {
        name: "process-ceiling-ms",
        unit: Unit::Milliseconds,
        least: 1,
        most: YEAR_MS,
        zero: Some("no limit"),
        about: "The longest time altogether of each start, likewise with `ceilingMs`",
        get: |config| of(config.process_times.ceiling_ms),
        set: |config, value| config.process_times.ceiling_ms = NonZeroU64::new(value),
    },
    Limit {
        name: "process-drain-ms",
        unit: Unit::Milliseconds,
        least: 1,
        most: YEAR_MS,
        zero: Some("no limit"),
        about: "The longest wait for output that others hold open after a process has ended, likewise with `drainMs`",
        get: |config| of(config.process_times.drain_ms),
        set: |config, value| config.process_times.drain_ms = NonZeroU64::new(value),
    },
    Limit {
        name: "all-tasks",
        unit: Unit::Count,
        least: 1,
        most: 4 << 20,
        zero: Some("no limit"),
        about: "Tasks of everything that the server starts, together; enforced where cgroups are available. The default is at most half of the machine's; see \"Bounds by default\"",
        get: |config| of(config.bounds.all_tasks),
        set: set_all_tasks,
    },
    Limit {
        name: "memory-percent",
        unit: Unit::Count,
        least: 1,
        most: 100,
        zero: Some("no limit"),
        about: "Memory of everything that the server starts, together, in percent of the machine's memory or of the server's cgroup limit; enforced where cgroups are available",
        get: |config| of(config.bounds.memory_percent),
        set: |config, value| config.bounds.memory_percent = NonZeroU64::new(value),
    },
    Limit {
        name: "session-tasks",
        unit: Unit::Count,
        least: 1,
        most: 4 << 20,
        zero: Some("no limit"),
        about: "Tasks of all processes of a session together; needs cgroups",
        get: |config| of(config.session_limits.processes),
        set: |config, value| config.session_limits.processes = NonZeroU64::new(value),
    },
    Limit {
        name: "session-memory-bytes",
        unit: Unit::Bytes,
        least: 1,
        most: MOST_BYTES,
        zero: Some("no limit"),
        about: "Memory of all processes of a session together; needs cgroups",
        get: |config| of(config.session_limits.memory_bytes),
        set: |config, value| config.session_limits.memory_bytes = NonZeroU64::new(value),
    },
];

/// A value from the operator is enforced, or starts are refused; it replaces the default.
fn set_tasks(config: &mut Config, value: u64) {
    config.bounds.start_tasks = None;
    config.process_limits.processes = NonZeroU64::new(value);
}

/// The same: what the machine can have does not lower it.
fn set_all_tasks(config: &mut Config, value: u64) {
    config.bounds.leaves_tasks = false;
    config.bounds.all_tasks = NonZeroU64::new(value);
}

fn of(limit: Option<NonZeroU64>) -> u64 {
    limit.map_or(0, NonZeroU64::get)
}

fn count(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

fn size(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_keeps_what_it_is_set_to_and_its_default_is_within_its_bounds() {
        for limit in LIMITS {
            let mut config = Config::bare();
            assert_eq!(limit.set(&mut config, limit.default_value()), Ok(()), "{}", limit.name);
            for value in [limit.least, limit.most].into_iter().chain(limit.zero.map(|_| 0)) {
                limit.set(&mut config, value).unwrap();
                assert_eq!(limit.value(&config), value, "{}", limit.name);
                let others = LIMITS.iter().filter(|other| other.name != limit.name);
                let touched: Vec<_> = others.filter(|other| other.value(&config) != other.default_value()).collect();
                assert!(touched.is_empty(), "{} sets {touched:?} too", limit.name);
            }
        }
    }

    #[test]
    fn what_is_no_value_is_refused_in_words() {
        let limit = LIMITS.iter().find(|limit| limit.name == "idle-exit").unwrap();
        for (text, expect) in [
            ("NaN", "`NaN` is not a whole number of seconds from 0 to 18446744073709551615"),
            ("-1", "`-1` is not a whole number of seconds from 0 to 18446744073709551615"),
            ("1.5", "`1.5` is not a whole number of seconds from 0 to 18446744073709551615"),
            ("", "`` is not a whole number of seconds from 0 to 18446744073709551615"),
            ("99999999999999999999", "`99999999999999999999` is not a whole number of seconds from 0 to 18446744073709551615"),
            ("31536001", "31536001 is not between 1 and 31536000, nor 0 (never)"),
        ] {
            assert_eq!(limit.parse(text).unwrap_err().to_string(), expect);
        }
        assert_eq!(limit.parse("0"), Ok(0));
        let without_zero = LIMITS.iter().find(|limit| limit.name == "max-sessions").unwrap();
        assert_eq!(without_zero.parse("0").unwrap_err().to_string(), "0 is not between 1 and 65536");
    }
}

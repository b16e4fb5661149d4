//! The chain of an audit log: each line names the one before it by its SHA-256. Sans-IO.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::time::{SystemTime, UNIX_EPOCH};

/// What the first line has before it.
pub(super) const NOTHING: Digest = Digest([0; 32]);

/// The action of the line that follows one that was not written to its end.
pub(super) const TORN: &str = "audit/torn";

/// SHA-256 of a line without its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Digest(pub(super) [u8; 32]);

impl Digest {
    pub(super) fn of(line: &[u8]) -> Self {
        Self(Sha256::digest(line).into())
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The end of a chain, to which lines are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chain {
    /// The number of the last line; 0 before the first.
    pub(super) seq: u64,
    /// That line's digest.
    pub(super) head: Digest,
}

/// A line as it is written.
#[derive(Serialize)]
struct Line<'a, T> {
    seq: u64,
    prev: String,
    time: String,
    #[serde(flatten)]
    says: &'a T,
}

/// The same as far as the chain is concerned.
#[derive(Debug, Deserialize)]
pub(super) struct Known {
    pub(super) seq: u64,
    prev: String,
    pub(super) action: String,
    /// Of the line that follows a torn one: the digest of the last whole line.
    after: Option<String>,
}

impl Known {
    /// None if it is no line of an audit log.
    pub(super) fn read(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }

    pub(super) fn follows(&self, digest: Digest) -> bool {
        self.prev == digest.to_string()
    }

    /// Whether it says that the line of this digest was torn, after this end of the chain.
    pub(super) fn closes(&self, torn: Digest, end: &Chain) -> bool {
        self.action == TORN
            && self.seq == end.seq + 1
            && self.follows(torn)
            && self.after.as_deref() == Some(&*end.head.to_string())
    }
}

/// What follows a torn line.
#[derive(Serialize)]
struct Torn {
    action: &'static str,
    outcome: &'static str,
    after: String,
}

impl Chain {
    /// Before the first line.
    pub(super) fn new() -> Self {
        Self { seq: 0, head: NOTHING }
    }

    /// The next line, with its end.
    pub(super) fn next(&mut self, now: SystemTime, says: &impl Serialize) -> Vec<u8> {
        self.seq += 1;
        let line = Line { seq: self.seq, prev: self.head.to_string(), time: rfc3339(now), says };
        // Entries are texts and numbers with names that are texts: they can be written.
        let mut line = serde_json::to_vec(&line).unwrap_or_default();
        self.head = Digest::of(&line);
        line.push(b'\n');
        line
    }

    /// The line that closes one off that was not written to its end.
    pub(super) fn close_torn(&mut self, now: SystemTime, torn: Digest) -> Vec<u8> {
        let says = Torn { action: TORN, outcome: "ok", after: self.head.to_string() };
        self.head = torn;
        self.next(now, &says)
    }
}

/// As in `2026-03-01T12:00:00.000Z`.
fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years that begin in March, so that the leap day is their last; 719,468 days lie between March of year 0 and 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second, milli) = (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z", era * 400 + year + next_year)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_as_rfc_3339_has_them() {
        for (seconds, expect) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (951_868_800, "2000-03-01T00:00:00.007Z"),
            (1_709_164_800, "2024-02-29T00:00:00.007Z"),
            (1_767_225_599, "2025-12-31T23:59:59.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(7)), expect);
        }
    }
}

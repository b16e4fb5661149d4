//! Checking an audit log.

use super::chain::{Chain, Digest, Known};
use std::io::{self, BufRead};

/// Bytes of a line, more than any entry takes.
pub(super) const LINE: usize = 256 << 10;

/// An audit log whose lines all follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// How many there are.
    pub lines: u64,
    /// SHA-256 of the last one, in hexadecimal: to be kept elsewhere, since nothing in a file shows that its end is missing.
    pub head: String,
    /// Whether a digest that was asked for is that of one of the lines.
    pub has_known: bool,
}

/// What is wrong with an audit log.
#[derive(Debug, thiserror::Error)]
pub enum AuditFault {
    /// It cannot be read.
    #[error("read the audit log: {0}")]
    Read(#[from] io::Error),
    /// A line that was changed, or is no line of such a file.
    #[error("line {line} is wrong: {reason}")]
    Line {
        /// Its number in the file, from 1.
        line: u64,
        /// In what way.
        reason: &'static str,
    },
}

/// Reads an audit log from its beginning to its end, a line at a time. `known` is the digest of a line that was kept from an
/// earlier time, in hexadecimal.
///
/// # Errors
/// See [`AuditFault`].
pub fn verify_audit(mut log: impl BufRead, known: Option<&str>) -> Result<Verified, AuditFault> {
    let (mut chain, mut number, mut torn) = (Chain::new(), 0, None);
    let mut has_known = false;
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = io::Read::take(&mut log, LINE as u64 + 1).read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        number += 1;
        let wrong = |reason| AuditFault::Line { line: number, reason };
        if line.pop() != Some(b'\n') {
            return Err(wrong(if read > LINE { "it is too long" } else { "it has no end: it was cut off" }));
        }
        let digest = Digest::of(&line);
        match (Known::read(&line), torn.take()) {
            (Some(next), None) if next.seq == chain.seq + 1 && next.follows(chain.head) => {
                chain = Chain { seq: next.seq, head: digest };
            }
            (Some(next), Some(torn)) if next.closes(torn, &chain) => chain = Chain { seq: next.seq, head: digest },
            (_, Some(_torn)) => {
                let reason = "it is not whole, and the line after it does not say so";
                return Err(AuditFault::Line { line: number - 1, reason });
            }
            (Some(_), None) => {
                return Err(wrong("it does not follow the line before it: one of the two was changed, or lines are gone"));
            }
            (None, None) => torn = Some(digest),
        }
        has_known |= known.is_some_and(|known| known.eq_ignore_ascii_case(&digest.to_string()));
    }
    match torn {
        Some(_) => Err(AuditFault::Line { line: number, reason: "it is not whole" }),
        None => Ok(Verified { lines: number, head: chain.head.to_string(), has_known }),
    }
}

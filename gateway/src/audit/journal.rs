//! The file of an audit log.

use super::chain::{Chain, Digest, Known};
use super::verify::LINE;
use super::{AuditError, AuditFile};
use crate::blocking;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::SystemTime;

/// The file, and what was not written to it yet.
#[derive(Debug)]
pub(super) struct Journal {
    file: OwnedFd,
    sync: bool,
    /// From a line's beginning on, or from where a write ended in the middle of one: that line is completed first.
    waiting: Vec<u8>,
    /// The disk did not take what was written. The kernel says so once and forgets (fsync(2), EIO), so it is remembered here: nothing
    /// can be promised of this file any more.
    is_lost: bool,
}

impl Journal {
    /// Opens or makes the file, and finds the end of its chain.
    pub(super) fn open(AuditFile { path, sync }: &AuditFile) -> Result<(Self, Chain), AuditError> {
        let shown = || path.display().to_string();
        let failed = |source| AuditError::Open { path: shown(), source };
        #[expect(clippy::disallowed_types, reason = "the operator's own file, which no client names")]
        let file = std::fs::OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        let file = OwnedFd::from(file);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(AuditError::Taken(shown())),
            Err(errno) => return Err(failed(errno.into())),
        }
        let size = u64::try_from(rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?.st_size).unwrap_or(0);
        // The last line, a torn one, and the one before: more is not looked at, since a log may be of any size.
        let tail = size.min(3 * LINE as u64);
        let tail =
            blocking::read_at(&file, size - tail, usize::try_from(tail).unwrap_or(0)).map_err(|errno| failed(errno.into()))?;
        let (chain, waiting) = go_on(&tail, SystemTime::now()).map_err(|reason| {
            let reason = reason.to_owned();
            AuditError::Broken { path: shown(), reason }
        })?;
        Ok((Self { file, sync: *sync, waiting, is_lost: false }, chain))
    }

    /// Puts a line behind those that wait.
    pub(super) fn put(&mut self, mut line: Vec<u8>) {
        self.waiting.append(&mut line);
    }

    /// Bytes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Writes what waits. What was not written waits on.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        write_out(&mut Descriptor(&self.file), &mut self.waiting)?;
        if self.is_lost {
            return Err(io::Error::other("the disk lost what was written before: start the server anew when it is mended"));
        }
        if self.sync {
            rustix::fs::fdatasync(&self.file).inspect_err(|_| self.is_lost = true)?;
        }
        Ok(())
    }
}

struct Descriptor<'a>(&'a OwnedFd);

impl Write for Descriptor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes and takes away what was written, as far as it goes.
pub(super) fn write_out(file: &mut impl Write, waiting: &mut Vec<u8>) -> io::Result<()> {
    let mut written = 0;
    let outcome = loop {
        if written == waiting.len() {
            break Ok(());
        }
        match file.write(&waiting[written..]) {
            Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
            Ok(more) => written += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Err(error),
        }
    };
    waiting.drain(..written);
    outcome
}

/// From the end of a file to the end of its chain, and what has to be written before the next line.
pub(super) fn go_on(tail: &[u8], now: SystemTime) -> Result<(Chain, Vec<u8>), &'static str> {
    let (whole, torn) = match tail.iter().rposition(|byte| *byte == b'\n') {
        Some(end) => (&tail[..end], &tail[end + 1..]),
        None => (&[][..], tail),
    };
    let mut lines = whole.rsplit(|byte| *byte == b'\n');
    let mut chain = match lines.next().filter(|line| !line.is_empty()) {
        None if torn.len() >= LINE => return Err("its last line is too long"),
        None => Chain::new(),
        Some(last) => {
            let known = Known::read(last).ok_or("its last line is none of an audit log")?;
            // The one before that is whole only if something lies before it, or nothing of the file does.
            if let Some(before) = lines.next()
                && !known.follows(Digest::of(before))
                && (lines.next().is_some() || tail.len() < 3 * LINE)
            {
                return Err("its last line does not follow the one before it");
            }
            Chain { seq: known.seq, head: Digest::of(last) }
        }
    };
    if torn.is_empty() {
        return Ok((chain, Vec::new()));
    }
    let digest = Digest::of(torn);
    let mut waiting = vec![b'\n'];
    match Known::read(torn) {
        // Only its end is missing.
        Some(known) if known.seq == chain.seq + 1 && known.follows(chain.head) => {
            chain = Chain { seq: known.seq, head: digest };
        }
        _ => waiting.append(&mut chain.close_torn(now, digest)),
    }
    Ok((chain, waiting))
}

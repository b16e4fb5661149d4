//! Where the output of a process comes from, and how much of it is read at a time.
//!
//! A process that writes a line gets a small buffer, and its line goes on at once. One that writes more than is read finds larger
//! reads: each costs a wake and a lock that its writer wants too, however much it brings. See [`super::pipe`] for its pipe.

use super::pipe::Pipe;
use super::pump::CHUNK;
use crate::budget::Budget;
use crate::helper::socket::watch_fd;
use bytes::Bytes;
use portcullis_protocol::event::Stream;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Bytes of one read at most: what a pipe holds as it is made. Twice as many of one that has grown took more memory and no less time.
const MOST: usize = 64 << 10;

/// One pipe or terminal, until its end.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) stream: Stream,
    fd: AsyncFd<OwnedFd>,
    /// Bytes that the next read asks for.
    wanted: usize,
    /// None for a terminal.
    pipe: Option<Pipe>,
}

impl Source {
    /// Watches a descriptor that does not block. If it is a pipe it may grow, by what is left of the budget.
    pub(super) fn new(stream: Stream, fd: OwnedFd, pipes: &Budget) -> io::Result<Self> {
        let pipe = Pipe::of(&fd, pipes);
        Ok(Self { stream, fd: watch_fd(fd, Interest::READABLE)?, wanted: CHUNK, pipe })
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        self.fd.get_ref()
    }

    /// Reads once, at most `credit` bytes; nothing at the end.
    pub(super) fn poll_read(&mut self, credit: usize, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        loop {
            let Poll::Ready(ready) = self.fd.poll_read_ready(cx) else { return Poll::Pending };
            let mut ready = ready?;
            match read(ready.get_inner(), self.wanted.min(credit)) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                read => {
                    let read = read.map_err(io::Error::from);
                    return Poll::Ready(read.inspect(|bytes| self.learn(bytes.len(), credit)));
                }
            }
        }
    }

    /// The same, not by way of the runtime, which may not have heard yet that there is something to read. None if there is not.
    pub(super) fn read_now(&mut self, credit: usize) -> Option<io::Result<Bytes>> {
        loop {
            match read(self.fd.get_ref(), self.wanted.min(credit)) {
                Err(Errno::AGAIN) => return None,
                Err(Errno::INTR) => {}
                read => return Some(read.map_err(io::Error::from).inspect(|bytes| self.learn(bytes.len(), credit))),
            }
        }
    }

    /// When [`Self::settle`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pipe.as_ref().and_then(Pipe::deadline)
    }

    /// Gives back what the pipe does not need any more.
    pub(super) fn settle(&mut self, now: Instant) {
        if let Some(pipe) = &mut self.pipe {
            pipe.settle(self.fd.get_ref(), now);
        }
    }

    /// What a read brought says how much the next one is worth asking for.
    fn learn(&mut self, length: usize, credit: usize) {
        if let Some(pipe) = &mut self.pipe {
            pipe.was_read(self.fd.get_ref(), length, self.wanted.min(credit), Instant::now());
        }
        if length >= self.wanted {
            self.wanted = (self.wanted * 2).min(MOST);
        } else if length < self.wanted / 4 && length < credit {
            self.wanted = (self.wanted / 2).max(CHUNK);
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(pipe) = &mut self.pipe {
            pipe.shrink(self.fd.get_ref());
        }
    }
}

/// Reads into a buffer that goes on as it is, without a copy. What of it stays empty is given back, since what was read may be kept
/// for long.
fn read(fd: &OwnedFd, wanted: usize) -> rustix::io::Result<Bytes> {
    let mut buffer = Vec::with_capacity(wanted);
    rustix::io::read(fd, spare_capacity(&mut buffer))?;
    buffer.shrink_to_fit();
    Ok(buffer.into())
}

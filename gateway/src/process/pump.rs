//! One task a process: from its pipes to events, from orders to signals and input.
//!
//! The pump alone feeds the session about its process, so events are in their order by construction: output as it was read,
//! then the exit, then maybe output of others who hold the pipes, then the close. It reads no more than the session gave
//! credit for; without credit the pipe fills up and the child waits, so nothing is lost.

use super::launch::Ends;
use super::running::Running;
use super::source::Source;
use super::{pipe, pty};
use crate::budget::Budget;
use crate::helper::socket::watch_fd;
use crate::helper::spawner::{Child, Ended, KILL, Spawner};
use bytes::Bytes;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::event::Stream;
use portcullis_protocol::helper::ExitStatus;
use portcullis_protocol::limit::LimitReached;
use portcullis_protocol::process::Size;
use portcullis_protocol::signal::Signal;
use rustix::io::Errno;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::task::Poll;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

/// Bytes of one event at most; clients of this wire count on it.
pub(crate) const CHUNK: usize = 8192;

/// Chunks of input that wait for the child. Clients of this wire count on it.
pub(crate) const INPUT_QUEUE: usize = 128;

/// Credit that every process gets once, when it ends: what its full pipes hold comes out even if the session gives none, so
/// that the end of a process never waits for a reader. Both of its pipes may have grown; behind that, their ends are read.
const RESERVE: u64 = (2 * pipe::GROWN + CHUNK) as u64;

/// What a pump says to its session.
#[derive(Debug)]
pub(crate) enum Feed {
    /// The process wrote. What one read brought may be several events.
    Output { stream: Stream, bytes: Bytes },
    /// It ended, and this is what its sandbox was seen to refuse, and what limits it reached. `failure` says why its status is not known, or why its
    /// sandbox ended it.
    Exited { code: i32, denials: Denials, failure: Option<String>, limits: Vec<LimitReached> },
    /// It ended and its streams did; the pump's last word.
    Closed,
    /// So many bytes of one chunk of input were written, which makes room in the queue.
    Taken { bytes: usize },
    /// The process closed its input; what is still queued goes nowhere.
    InputClosed,
}

/// What a session wants of a pump: a state, not messages, so that giving an order never waits and none is lost.
#[derive(Debug, Default)]
struct Orders {
    granted: u64,
    /// Each signal once, numbered in the order in which they were last wanted. One that is wanted twice before it is sent is
    /// sent once, as the kernel does with what is pending.
    signals: Vec<(u64, Signal)>,
    /// The last size that was wanted, and how many were.
    size: Option<(u64, Size)>,
    kill: bool,
    /// Once it has ended, nothing more is read.
    leave_output: bool,
}

/// The session's end of a pump.
#[derive(Debug)]
pub(crate) struct Controls {
    child: u64,
    orders: watch::Sender<Orders>,
    /// None once the input shall end.
    input: Option<mpsc::Sender<Vec<u8>>>,
}

impl Controls {
    /// The pump may have read so many bytes since its start.
    pub(crate) fn grant(&self, total: u64) {
        self.orders.send_modify(|orders| orders.granted = total);
    }

    /// A signal to the process group.
    pub(crate) fn signal(&self, signal: Signal) {
        self.orders.send_modify(|Orders { signals, .. }| {
            let next = signals.last().map_or(1, |(latest, _)| latest + 1);
            signals.retain(|(_, earlier)| *earlier != signal);
            signals.push((next, signal));
        });
    }

    /// A size for the terminal, if there is one.
    pub(crate) fn resize(&self, size: Size) {
        self.orders.send_modify(|orders| orders.size = Some((orders.size.map_or(1, |(count, _)| count + 1), size)));
    }

    /// SIGKILL to everything that came of the process.
    pub(crate) fn kill(&self) {
        self.orders.send_modify(|orders| orders.kill = true);
    }

    /// Names the process to the spawner.
    pub(crate) fn child(&self) -> u64 {
        self.child
    }

    /// What others hold open after the end is not read any more.
    pub(crate) fn leave_output(&self) {
        self.orders.send_modify(|orders| orders.leave_output = true);
    }

    /// Queues a chunk of input, of which at most [`INPUT_QUEUE`] may be there: each is there until its [`Feed::Taken`].
    pub(crate) fn write(&self, chunk: Vec<u8>) {
        // The queue is as long as the bound that its sender keeps, so it can only be closed, and then nobody wants the bytes.
        let _input_closed = self.input.as_ref().map(|input| input.try_send(chunk));
    }

    /// The input ends behind the chunks that were queued.
    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }
}

/// The task of one process. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Pump {
    key: u64,
    child: u64,
    spawner: Spawner,
    /// Those that have not ended.
    sources: Vec<Source>,
    sink: Option<AsyncFd<OwnedFd>>,
    exit: oneshot::Receiver<Ended>,
    orders: watch::Receiver<Orders>,
    input: mpsc::Receiver<Vec<u8>>,
    /// The chunk that is being written, and how much of it was.
    writing: Option<(Vec<u8>, usize)>,
    feeds: mpsc::Sender<(u64, Box<Feed>)>,
    read: u64,
    /// The number of the last signal that was sent.
    signalled: u64,
    /// How many sizes were wanted when the last was set.
    resized: u64,
    has_killed: bool,
    has_exited: bool,
    running: Running,
}

/// The session does not listen any more.
#[derive(Debug)]
struct SessionGone;

impl Pump {
    /// A pump for a child that runs; `key` names it in what it feeds. `pipes` is what all pipes may grow by.
    pub(crate) fn new(
        key: u64,
        child: Child,
        ends: Ends,
        spawner: Spawner,
        feeds: mpsc::Sender<(u64, Box<Feed>)>,
        running: Running,
        pipes: &Budget,
    ) -> io::Result<(Self, Controls)> {
        let mut sources = Vec::new();
        for (stream, fd) in ends.sources {
            sources.push(Source::new(stream, fd, pipes)?);
        }
        let sink = ends.sink.map(|fd| watch_fd(fd, Interest::WRITABLE)).transpose()?;
        let (orders, ordered) = watch::channel(Orders::default());
        let (input, queue) = mpsc::channel(INPUT_QUEUE);
        let pump = Self {
            key,
            child: child.id,
            spawner,
            sources,
            sink,
            exit: child.exit,
            orders: ordered,
            input: queue,
            writing: None,
            feeds,
            read: 0,
            signalled: 0,
            resized: 0,
            has_killed: false,
            has_exited: false,
            running,
        };
        Ok((pump, Controls { child: child.id, orders, input: Some(input) }))
    }

    /// Ends after the close, or when the session is gone; answers its key.
    pub(crate) async fn run(mut self) -> u64 {
        // Whoever drops the session's end wants the process ended, and dropping `exit` with this does that.
        let _session_gone = self.follow().await;
        self.key
    }

    async fn follow(&mut self) -> Result<(), SessionGone> {
        loop {
            self.obey().await;
            if self.has_exited && self.sources.is_empty() {
                return self.feed(Feed::Closed).await;
            }
            let credit = self.credit();
            let quiet = self.sources.iter().filter_map(Source::deadline).min();
            let takes_input = self.sink.is_some() && self.writing.is_none();
            tokio::select! {
                changed = self.orders.changed() => changed.map_err(|_| SessionGone)?,
                (at, read) = read_some(&mut self.sources, credit), if credit > 0 => self.output(at, read).await?,
                ended = &mut self.exit, if !self.has_exited => self.exited(ended.ok()).await?,
                chunk = self.input.recv(), if takes_input => match chunk {
                    Some(chunk) => self.writing = Some((chunk, 0)),
                    // The end of the input, or of the session, and then of everything.
                    None => self.sink = None,
                },
                written = write_some(self.sink.as_ref(), self.writing.as_ref()), if self.writing.is_some() => self.wrote(written).await?,
                () = sleep_until(quiet.unwrap_or_else(Instant::now)), if quiet.is_some() => {
                    self.sources.iter_mut().for_each(|source| source.settle(Instant::now()));
                }
            }
        }
    }

    /// Carries out what was ordered and not done yet.
    async fn obey(&mut self) {
        let (kill, signals, size) = {
            let Orders { kill, signals, size, leave_output, .. } = &*self.orders.borrow_and_update();
            if *leave_output && self.has_exited {
                self.sources.clear();
            }
            let unsent = signals.iter().filter(|(number, _)| *number > self.signalled).copied();
            (*kill, unsent.collect::<Vec<_>>(), size.filter(|(count, _)| *count > self.resized))
        };
        if kill && !self.has_killed {
            self.has_killed = true;
            // If the spawner died, so did the process.
            let _spawner_ended = self.spawner.signal(self.child, KILL).await;
        }
        if let Some((count, size)) = size {
            self.resized = count;
            // A terminal that nobody has open any more has no size that anybody could ask for.
            if let Some(terminal) = self.sources.iter().find(|source| source.stream == Stream::Pty)
                && let Err(errno) = pty::resize(terminal.descriptor(), size)
            {
                tracing::warn!(child = self.child, %errno, "a terminal keeps its size");
            }
        }
        for (number, signal) in signals {
            self.signalled = number;
            let _spawner_ended = self.spawner.signal(self.child, signal.number()).await;
        }
    }

    /// Bytes that may be read now.
    fn credit(&self) -> usize {
        let reserve = if self.has_exited { RESERVE } else { 0 };
        let left = (self.orders.borrow().granted + reserve).saturating_sub(self.read);
        usize::try_from(left).unwrap_or(usize::MAX)
    }

    /// Takes in what a read of a source brought; the end of a source removes it.
    async fn output(&mut self, at: usize, read: io::Result<Bytes>) -> Result<(), SessionGone> {
        let bytes = read.unwrap_or_else(|error| {
            // A terminal says EIO when nobody has its other side open: that is its end.
            if error.raw_os_error() != Some(Errno::IO.raw_os_error()) {
                tracing::warn!(child = self.child, %error, "reading output failed: taken as its end");
            }
            Bytes::new()
        });
        if bytes.is_empty() {
            self.sources.remove(at);
            return Ok(());
        }
        self.read += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let stream = self.sources[at].stream;
        self.feed(Feed::Output { stream, bytes }).await?;
        // It goes to the end of the line.
        let last = self.sources.remove(at);
        self.sources.push(last);
        Ok(())
    }

    /// The process ended. What it wrote before is in its pipes already, and comes out before its exit is told.
    async fn exited(&mut self, ended: Option<Ended>) -> Result<(), SessionGone> {
        self.has_exited = true;
        // Somebody else may go on writing to the pipes, so the reserve is also the bound of this.
        let bound = self.read + RESERVE;
        for stream in [Stream::Stdout, Stream::Stderr, Stream::Pty] {
            while let Some(at) = self.sources.iter().position(|source| source.stream == stream)
                && self.read < bound
            {
                let credit = self.credit();
                if credit == 0 {
                    break;
                }
                let Some(read) = self.sources[at].read_now(credit) else { break };
                self.output(at, read).await?;
            }
        }
        let feed = match ended {
            Some(Ended { status, denials, failure, limits }) => {
                self.running.ended(Some(status), &denials).await;
                Feed::Exited { code: status.code(), denials, failure, limits }
            }
            None => {
                self.running.ended(None, &Denials::default()).await;
                // What it may have left behind cannot be ended any more, so nobody shall wait for the end of its output.
                self.sources.clear();
                let text = "the spawner died: whether the process lives on is not known, and nothing can reach it";
                let code = ExitStatus::Signal(KILL).code();
                Feed::Exited { code, denials: Denials::default(), failure: Some(text.to_owned()), limits: Vec::new() }
            }
        };
        self.feed(feed).await?;
        // Others who share its input see the end of it, after the session has heard of the exit.
        self.stop_input();
        Ok(())
    }

    /// Takes in what a write of input brought.
    async fn wrote(&mut self, written: io::Result<usize>) -> Result<(), SessionGone> {
        match (written, &mut self.writing) {
            (Ok(length), Some((chunk, done))) => {
                *done += length;
                let bytes = chunk.len();
                if *done < bytes {
                    return Ok(());
                }
                self.writing = None;
                self.feed(Feed::Taken { bytes }).await
            }
            // EPIPE of a pipe, EIO of a terminal: nobody reads any more.
            (Err(_), _) | (Ok(_), None) => {
                self.stop_input();
                self.feed(Feed::InputClosed).await
            }
        }
    }

    fn stop_input(&mut self) {
        self.sink = None;
        self.writing = None;
        self.input.close();
    }

    async fn feed(&self, feed: Feed) -> Result<(), SessionGone> {
        self.feeds.send((self.key, Box::new(feed))).await.map_err(|_| SessionGone)
    }
}

/// Reads once from the first source that has something, and says which.
async fn read_some(sources: &mut [Source], credit: usize) -> (usize, io::Result<Bytes>) {
    poll_fn(|cx| {
        for (at, source) in sources.iter_mut().enumerate() {
            if let Poll::Ready(read) = source.poll_read(credit, cx) {
                return Poll::Ready((at, read));
            }
        }
        Poll::Pending
    })
    .await
}

/// Writes once of a chunk. An empty chunk is written at once.
async fn write_some(sink: Option<&AsyncFd<OwnedFd>>, writing: Option<&(Vec<u8>, usize)>) -> io::Result<usize> {
    let (Some(sink), Some((chunk, done))) = (sink, writing) else { return Err(io::ErrorKind::BrokenPipe.into()) };
    loop {
        let rest = &chunk[*done..];
        if rest.is_empty() {
            return Ok(0);
        }
        match sink.writable().await?.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), rest)?)) {
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(written) => return written,
            Err(_would_block) => {}
        }
    }
}

#[cfg(test)]
mod tests;

//! Serves the socket of a worker.
//!
//! Leader and followers: whoever is woken reads one frame and carries the request out itself, so the usual request is handed to
//! nobody and wakes nobody else. The threads wait in one epoll whose event fires once and is armed anew when a frame was read
//! (`EPOLLONESHOT`, epoll_ctl(2)); the kernel wakes the thread that slept last. If no other thread waits then, a new one is begun
//! first, up to a bound: a request that hangs never holds up the next.

use super::Answer;
use crate::frames::{Inlet, ReceiveError, Received, Wait, send_parts};
use portcullis_protocol::helper::{FsDone, FsError, FsOperation, FsReply, FsRequest, INLINE_PAYLOAD, decode, encode_head};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::{Errno, pread};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Stack of a thread: nothing here recurses, and paths and blocks are on the heap.
const STACK: usize = 512 * 1024;

/// Why a worker ends before its socket closes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error("a request does not decode: {0}")]
    Decode(#[from] portcullis_protocol::helper::FrameError),
    #[error("send a reply: {0}")]
    Send(Errno),
    #[error("begin a thread: {0}")]
    Thread(#[from] std::io::Error),
    #[error("wait for requests: {0}")]
    Wait(Errno),
}

/// Serves requests until the peer closes. Requests that hang then are left behind, for the process is about to end.
pub(crate) fn serve<C>(socket: OwnedFd, concurrency: u16, carry: Arc<C>) -> Result<(), ServeError>
where
    C: Fn(FsOperation, &[u8], Vec<OwnedFd>) -> Answer + Send + Sync + 'static,
{
    // Room for the first to end; those who end after it have nothing to add.
    let (ended, end) = sync_channel(1);
    let arrivals = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(ServeError::Wait)?;
    epoll::add(&arrivals, &socket, EventData::new_u64(0), armed(false)).map_err(ServeError::Wait)?;
    let crew = Arc::new(Crew {
        socket,
        arrivals,
        inlet: Mutex::new(Inlet::new()),
        outlet: Mutex::new(()),
        waiting: AtomicUsize::new(0),
        members: AtomicUsize::new(0),
        most: usize::from(concurrency.max(1)),
        carry,
        ended,
    });
    Crew::begin(&crew)?;
    // Every member holds a sender, so this ends at the latest with the last of them.
    end.recv().unwrap_or(Ok(()))
}

struct Crew<C> {
    socket: OwnedFd,
    /// Where the threads wait for the socket.
    arrivals: OwnedFd,
    inlet: Mutex<Inlet>,
    /// Held while one reply is written.
    outlet: Mutex<()>,
    /// Threads that wait for a request.
    waiting: AtomicUsize,
    members: AtomicUsize,
    /// Bound of the threads, and so of the requests in flight; more wait in the socket.
    most: usize,
    carry: Arc<C>,
    ended: SyncSender<Result<(), ServeError>>,
}

impl<C> Crew<C>
where
    C: Fn(FsOperation, &[u8], Vec<OwnedFd>) -> Answer + Send + Sync + 'static,
{
    fn begin(crew: &Arc<Self>) -> std::io::Result<()> {
        crew.members.fetch_add(1, Ordering::Relaxed);
        let member = Arc::clone(crew);
        let begun = thread::Builder::new().stack_size(STACK).spawn(move || {
            let end = member.work();
            // Somebody else may have told already.
            let _second = member.ended.try_send(end);
        });
        if begun.is_err() {
            crew.members.fetch_sub(1, Ordering::Relaxed);
        }
        begun.map(drop)
    }

    fn work(self: &Arc<Self>) -> Result<(), ServeError> {
        loop {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            let woken = wait(&self.arrivals);
            let others = self.waiting.fetch_sub(1, Ordering::AcqRel) - 1;
            woken.map_err(ServeError::Wait)?;
            let (received, has_more) = {
                let mut inlet = lock(&self.inlet);
                // Nobody else could read on in the middle of a frame, and the gateway sends whole ones.
                (inlet.next(self.socket.as_fd(), Wait::Rest)?, inlet.has_frame())
            };
            // Somebody must be woken by the next request from here on.
            let arm = || epoll::modify(&self.arrivals, &self.socket, EventData::new_u64(0), armed(has_more));
            let (frame, descriptors) = match received {
                Received::Frame(frame, descriptors) => {
                    arm().map_err(ServeError::Wait)?;
                    (frame, descriptors)
                }
                Received::Later => {
                    arm().map_err(ServeError::Wait)?;
                    continue;
                }
                Received::End => return Ok(()),
            };
            if others == 0 && self.members.load(Ordering::Relaxed) < self.most {
                // Without another thread this one does the work all the same, only alone.
                let _alone = Self::begin(self);
            }
            let request: FsRequest = decode(&frame.body)?;
            let is_read = matches!(request.operation, FsOperation::ReadFile { .. });
            let carried = catch_unwind(AssertUnwindSafe(|| (self.carry)(request.operation, &frame.payload, descriptors)));
            let answer = carried.unwrap_or_else(|_panic| {
                // What was panicked about went to standard error; one request must not take the others with it.
                FsError::Unsupported("internal error: the request could not be carried out".to_owned()).into()
            });
            match self.reply(request.id, answer)? {
                None => {}
                Some(unsent) => drop(self.reply(request.id, without_descriptor(unsent, is_read))?),
            }
        }
    }

    /// Sends an answer. One whose descriptor the kernel does not take comes back, and nothing of it was sent.
    fn reply(&self, id: u64, answer: Answer) -> Result<Option<Answer>, ServeError> {
        let Answer { outcome, payload, descriptor } = answer;
        let reply = FsReply { id, outcome };
        let (head, payload, descriptor) = match encode_head(&reply, payload.len(), usize::from(descriptor.is_some())) {
            Ok(head) => (head, payload, descriptor),
            // More than a frame holds is an error of this request, not the end of the worker.
            Err(_too_large) => {
                let outcome = Err(FsError::Os(Errno::OVERFLOW.raw_os_error()));
                (encode_head(&FsReply { id, outcome }, 0, 0)?, Vec::new(), None)
            }
        };
        let _turn = lock(&self.outlet);
        match send_parts(self.socket.as_fd(), [&head, &payload], descriptor.as_ref().map(AsFd::as_fd)) {
            Ok(()) => Ok(None),
            // The gateway is gone; the next read will say so too.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(None),
            // The descriptors of this user that are on their way are too many (unix(7)). That is said before a byte is sent.
            Err(Errno::TOOMANYREFS) if descriptor.is_some() => Ok(Some(Answer { outcome: reply.outcome, payload, descriptor })),
            Err(errno) => Err(ServeError::Send(errno)),
        }
    }
}

/// The same answer without its descriptor: content that was read goes in the frame if it fits, a watch becomes none, and else it is an
/// error of this request alone.
fn without_descriptor(answer: Answer, is_read: bool) -> Answer {
    let too_large = FsError::InFlight(INLINE_PAYLOAD);
    match (answer.outcome, answer.descriptor) {
        (Ok(FsDone::Descriptor { .. }), Some(file)) if is_read => match read_inline(&file) {
            Ok(Some(payload)) => Answer { outcome: Ok(FsDone::Content), payload, descriptor: None },
            Ok(None) => too_large.into(),
            Err(errno) => FsError::Os(errno.raw_os_error()).into(),
        },
        (Ok(FsDone::Watching(_)), _) => Ok(FsDone::Watching(Vec::new())).into(),
        (Ok(_done), _) => too_large.into(),
        (error, _) => error.into(),
    }
}

/// The whole of a file, if a frame holds it.
fn read_inline(file: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    let mut content = vec![0; INLINE_PAYLOAD + 1];
    let mut length = 0;
    while length < content.len() {
        match pread(file, &mut content[length..], length as u64) {
            Ok(0) => break,
            Ok(got) => length += got,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    content.truncate(length);
    Ok((length <= INLINE_PAYLOAD).then_some(content))
}

/// When the event fires: when there is something to read, or at once if a whole frame was read already, for a socket can nearly
/// always be written to, and where it cannot, its reader is about to make room.
fn armed(has_more: bool) -> EventFlags {
    let fires = if has_more { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
    fires | EventFlags::ONESHOT
}

/// Sleeps until the event fires for this thread.
fn wait(arrivals: &OwnedFd) -> Result<(), Errno> {
    let mut space = [MaybeUninit::<Event>::uninit(); 1];
    loop {
        match epoll::wait(arrivals, &mut space, None) {
            Ok((fired, _rest)) if !fired.is_empty() => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// A panic while the lock was held left nothing half done that the next holder could trip over: the inlet only ever moves
/// whole frames out.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Tree;
    use super::super::{View, carry_out};
    use super::*;
    use crate::frames::send_all;
    use portcullis_protocol::helper::encode;
    use portcullis_protocol::path::AbsolutePath;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::JoinHandle;

    struct Worker {
        socket: OwnedFd,
        inlet: Inlet,
        serving: JoinHandle<Result<(), ServeError>>,
    }

    impl Worker {
        fn new(concurrency: u16, carry: impl Fn(FsOperation, &[u8], Vec<OwnedFd>) -> Answer + Send + Sync + 'static) -> Self {
            let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            let serving = thread::spawn(move || serve(theirs, concurrency, Arc::new(carry)));
            Self { socket, inlet: Inlet::new(), serving }
        }

        fn ask(&self, id: u64, path: &AbsolutePath, payload: &[u8]) {
            let operation = if payload.is_empty() {
                FsOperation::ReadFile { path: path.clone(), follow: true, limit: 1 << 30 }
            } else {
                FsOperation::WriteFile { path: path.clone(), follow: true }
            };
            let bytes = encode(&FsRequest { id, operation }, payload, 0).unwrap();
            send_all(self.socket.as_fd(), &bytes, None).unwrap();
        }

        fn reply(&mut self) -> (FsReply, Vec<u8>) {
            let Received::Frame(frame, _none) = self.inlet.next(self.socket.as_fd(), Wait::Yes).unwrap() else { panic!() };
            (decode(&frame.body).unwrap(), frame.payload.to_vec())
        }

        fn end(self) -> Result<(), ServeError> {
            drop(self.socket);
            self.serving.join().unwrap()
        }
    }

    #[test]
    fn a_write_and_a_read() {
        let tree = Tree::new();
        let view = View::unconfined();
        let mut worker = Worker::new(4, move |operation, payload, files| carry_out(&view, operation, payload, files));
        worker.ask(1, &tree.path("f"), b"content");
        assert_eq!(worker.reply().0, FsReply { id: 1, outcome: Ok(FsDone::Changed) });
        worker.ask(2, &tree.path("f"), b"");
        assert_eq!(worker.reply(), (FsReply { id: 2, outcome: Ok(FsDone::Content) }, b"content".to_vec()));
        worker.end().unwrap();
    }

    /// A worker whose requests for `/hang` wait until they are let go.
    fn hanging(concurrency: u16, release: Receiver<()>) -> Worker {
        let release = Mutex::new(release);
        Worker::new(concurrency, move |operation, _payload, _files| {
            if matches!(&operation, FsOperation::ReadFile { path, .. } if path.as_path() == "/hang") {
                lock(&release).recv().unwrap();
            }
            Ok(FsDone::Changed).into()
        })
    }

    #[test]
    fn a_hanging_request_does_not_hold_up_the_next() {
        let (let_go, release) = channel();
        let mut worker = hanging(2, release);
        let (hang, quick) = (AbsolutePath::new("/hang").unwrap(), AbsolutePath::new("/quick").unwrap());
        worker.ask(1, &hang, b"");
        for id in 2..100 {
            worker.ask(id, &quick, b"");
            assert_eq!(worker.reply().0.id, id);
        }
        let_go.send(()).unwrap();
        assert_eq!(worker.reply().0.id, 1);
        worker.end().unwrap();
    }

    #[test]
    fn a_hanging_request_does_not_keep_a_worker_alive() {
        let (let_go, release) = channel();
        let worker = hanging(2, release);
        worker.ask(1, &AbsolutePath::new("/hang").unwrap(), b"");
        worker.end().unwrap();
        drop(let_go);
    }

    #[test]
    fn a_panic_answers_its_own_request_only() {
        let mut worker = Worker::new(2, |operation, _payload, _files| {
            assert!(matches!(operation, FsOperation::WriteFile { .. }), "panics on purpose");
            Ok(FsDone::Changed).into()
        });
        let path = AbsolutePath::new("/x").unwrap();
        worker.ask(1, &path, b"");
        assert!(matches!(worker.reply().0.outcome, Err(FsError::Unsupported(_))));
        worker.ask(2, &path, b"x");
        assert_eq!(worker.reply().0.outcome, Ok(FsDone::Changed));
        worker.end().unwrap();
    }

    #[test]
    fn an_answer_above_the_bound_is_an_error_reply() {
        let mut worker = Worker::new(1, |_operation, _payload, _files| {
            let errors = vec![(AbsolutePath::new("/x").unwrap(), "x".repeat(17 << 20))];
            Ok(FsDone::Walk { entries: Vec::new(), errors, truncated: false }).into()
        });
        worker.ask(1, &AbsolutePath::new("/x").unwrap(), b"");
        assert_eq!(worker.reply().0.outcome, Err(FsError::Os(75)));
        worker.end().unwrap();
    }

    #[test]
    fn a_request_that_does_not_decode_ends_the_worker() {
        let worker = Worker::new(1, |_operation, _payload, _files| Ok(FsDone::Changed).into());
        send_all(worker.socket.as_fd(), &encode(&7_u8, b"", 0).unwrap(), None).unwrap();
        assert!(matches!(worker.serving.join().unwrap(), Err(ServeError::Decode(_))));
    }
}

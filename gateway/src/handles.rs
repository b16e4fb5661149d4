//! File handles: open files that a client reads and writes in blocks, by names of its own.

use crate::blocking::{self, Blocking};
use crate::reply;
use portcullis_protocol::limit::Scope;
use portcullis_protocol::rpc::{RpcError, code};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SetOnce, oneshot};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// Where blocks are read and written, and how long that may take.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    pub(crate) blocking: Blocking,
    pub(crate) deadline: Duration,
}

/// Its drop says that a write has come to its end.
pub(crate) type Ended = oneshot::Sender<()>;

/// Handles of one connection.
const BOUND: usize = 128;
/// Bytes of a name: it is kept for as long as the handle.
const NAME_BOUND: usize = 32;
/// Bytes of one block.
pub(crate) const BLOCK: u64 = 1 << 20;

/// The handles of one connection. They end with it.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    open: HashMap<String, Slot>,
}

/// A handle, perhaps still being opened. Blocks that were asked for before the open was answered wait for it.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// None once the open failed.
    file: Arc<SetOnce<Option<Arc<OwnedFd>>>>,
    dropped: Arc<AtomicBool>,
    /// Among those of the server.
    _place: Arc<OwnedSemaphorePermit>,
}

impl Handles {
    /// Takes a name, before its path is looked at, and one of the places that all connections share.
    pub(crate) fn reserve(&mut self, name: &str, places: &Arc<Semaphore>) -> Result<Slot, RpcError> {
        if name.len() > NAME_BOUND {
            return Err(RpcError::new(
                code::INVALID_PARAMS,
                format!("file handle id of {} bytes: at most {NAME_BOUND} are allowed", name.len()),
            ));
        }
        self.open.retain(|_, slot| !slot.is_dropped());
        if self.open.contains_key(name) {
            return Err(reply::invalid(format!("file handle `{name}` already exists")));
        }
        if self.open.len() >= BOUND {
            let text = format!("at most {BOUND} file handles may be open per connection");
            return Err(reply::limit(text, "file-handles", BOUND, Scope::Connection));
        }
        let Ok(place) = Arc::clone(places).try_acquire_owned() else {
            let text = "no more file handles may be open on this server, those of detached sessions included; close some";
            return Err(reply::limit(text, "file-handles", self.open.len(), Scope::Server));
        };
        let (file, dropped) = (Arc::new(SetOnce::new()), Arc::new(AtomicBool::new(false)));
        let slot = Slot { file, dropped, _place: Arc::new(place) };
        self.open.insert(name.to_owned(), slot.clone());
        Ok(slot)
    }

    /// The handle of a name.
    pub(crate) fn get(&self, name: &str) -> Result<Slot, RpcError> {
        self.open.get(name).filter(|slot| !slot.is_dropped()).cloned().ok_or_else(|| reply::unknown_handle(name))
    }

    /// Gives a name back; blocks on their way end well.
    pub(crate) fn close(&mut self, name: &str) {
        self.open.remove(name);
    }
}

impl Slot {
    /// The open ended: with a file, or not.
    pub(crate) fn opened(&self, file: Option<OwnedFd>) {
        if file.is_none() {
            self.dropped.store(true, Ordering::Release);
        }
        let _set_once = self.file.set(file.map(Arc::new));
    }

    /// Whoever opened has ended: if no file came by now, none will.
    pub(crate) fn opened_or_failed(&self) {
        if !self.file.initialized() {
            self.opened(None);
        }
    }

    fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }

    async fn file(&self, name: &str) -> Result<Arc<OwnedFd>, RpcError> {
        let file = self.file.wait().await.clone();
        file.filter(|_| !self.is_dropped()).ok_or_else(|| reply::unknown_handle(name))
    }

    /// Reads a block. A system's error drops the handle, and so does a deadline that passes.
    pub(crate) async fn read(&self, name: &str, offset: u64, length: usize, disk: &Disk) -> Result<Vec<u8>, RpcError> {
        let file = self.file(name).await?;
        let read = disk.blocking.run(move || blocking::read_at(&file, offset, length));
        self.ended(&format!("fs/readBlock of `{name}` at {offset}"), timeout(disk.deadline, read).await)
    }

    /// Writes a block. A system's error drops the handle, and so does a deadline that passes. `ended` is dropped when nothing
    /// more is written, which may be long after this future was dropped.
    pub(crate) async fn write(&self, name: &str, offset: u64, bytes: Vec<u8>, disk: &Disk, ended: Ended) -> Result<(), RpcError> {
        let file = self.file(name).await?;
        let write = disk.blocking.run(move || {
            let _ended = ended;
            blocking::write_at(&file, offset, &bytes)
        });
        self.ended(&format!("fs/writeBlock of `{name}` at {offset}"), timeout(disk.deadline, write).await)
    }

    fn ended<T>(&self, attempt: &str, outcome: Result<Result<Result<T, Errno>, blocking::Lost>, Elapsed>) -> Result<T, RpcError> {
        let error = match outcome {
            Ok(Ok(Ok(value))) => return Ok(value),
            Ok(Ok(Err(errno))) => reply::os_error(attempt, errno),
            Ok(Err(lost)) => return Err(reply::internal(format!("{attempt}: {lost}"))),
            Err(_elapsed) => {
                reply::internal(format!("{attempt}: lost: the file system did not answer in time; the handle is closed"))
            }
        };
        self.dropped.store(true, Ordering::Release);
        Err(error)
    }
}

/// Whether a block's length is within the bounds; `what` is `read` or `write`.
pub(crate) fn check_length(what: &str, length: u64) -> Result<usize, RpcError> {
    let refused = || reply::invalid(format!("file {what} block length must be between 1 and {BLOCK}"));
    if (1..=BLOCK).contains(&length) { usize::try_from(length).map_err(|_| refused()) } else { Err(refused()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_unique_and_free_again() {
        let (mut handles, places) = (Handles::default(), Arc::new(Semaphore::new(1000)));
        assert_eq!(handles.reserve(&"x".repeat(33), &places).unwrap_err().code, code::INVALID_PARAMS);
        let first = handles.reserve("h", &places).unwrap();
        assert_eq!(handles.reserve("h", &places).unwrap_err().message, "file handle `h` already exists");
        first.opened(None);
        handles.reserve("h", &places).unwrap();
        for nth in 1..BOUND {
            handles.reserve(&nth.to_string(), &places).unwrap();
        }
        assert_eq!(handles.reserve("more", &places).unwrap_err().message, "at most 128 file handles may be open per connection");
        handles.close("1");
        handles.reserve("more", &places).unwrap();
        assert_eq!(handles.get("nope").unwrap_err().code, code::NOT_FOUND);
    }

    #[test]
    fn lengths_of_blocks() {
        for length in [0, BLOCK + 1, u64::MAX] {
            assert_eq!(check_length("read", length).unwrap_err().message, "file read block length must be between 1 and 1048576");
        }
        assert_eq!(check_length("write", BLOCK).unwrap(), 1 << 20);
    }
}

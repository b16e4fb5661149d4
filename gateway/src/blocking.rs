//! Reading and writing of open local files, on a bounded pool of threads.

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Threads of one connection that may wait for disks at once; its other calls wait in line. A disk that hangs holds up
/// whoever uses it and nobody else.
const THREADS: usize = 4;

/// The threads of one connection. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Blocking {
    slots: Arc<Semaphore>,
}

impl Blocking {
    pub(crate) fn new() -> Self {
        Self { slots: Arc::new(Semaphore::new(THREADS)) }
    }

    /// Runs one piece of blocking work. A caller that goes away leaves the work to its end, but nobody hears of it.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Lost> {
        let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(|_| Lost)?;
        let work = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            work()
        });
        work.await.map_err(|_| Lost)
    }
}

/// The work panicked, or the runtime ends.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the outcome is lost: the gateway is shutting down or has a defect")]
pub(crate) struct Lost;

/// Reads up to `length` bytes at `offset`; fewer only at the end of the file.
pub(crate) fn read_at(file: &OwnedFd, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = offset.checked_add(bytes.len() as u64).ok_or(Errno::INVAL)?;
        let got = match rustix::io::pread(file.as_fd(), rustix::buffer::spare_capacity(&mut bytes), at) {
            Ok(got) => got,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        };
        if got == 0 {
            break;
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Writes all bytes at `offset`, as workers write: set-ID bits go, and neither reserved blocks nor quotas are passed, also where the
/// server is root.
pub(crate) fn write_at(file: &OwnedFd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    give_up_writers_rights()?;
    let mut written = 0;
    while written < bytes.len() {
        let at = offset.checked_add(written as u64).ok_or(Errno::INVAL)?;
        match rustix::io::pwrite(file.as_fd(), &bytes[written..], at) {
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Gives up the capabilities that a write(2) looks at: CAP_FSETID keeps set-ID bits, CAP_SYS_RESOURCE passes quotas and reserved blocks
/// (capabilities(7)). Capabilities belong to the thread; the threads of this pool use neither for anything else.
fn give_up_writers_rights() -> Result<(), Errno> {
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if !DONE.get() {
        let held = rustix::thread::capabilities(None)?;
        let effective = held.effective - (CapabilitySet::FSETID | CapabilitySet::SYS_RESOURCE);
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..held })?;
        DONE.set(true);
    }
    Ok(())
}

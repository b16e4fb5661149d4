//! Watches for what is not there. A worker judged the paths and armed the descriptor; here it is waited for.

use crate::helper::socket::watch_fd;
use crate::ids::{Ids, InUse};
use crate::link::Outgoing;
use crate::metrics::{Direction, Metrics};
use portcullis_protocol::fs::MissingChangedNotice;
use portcullis_protocol::path::Bytes;
use portcullis_protocol::rpc;
use rustix::fs::inotify::{ReadFlags, Reader};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Watches of one connection. A user has few of the kernel's (`fs.inotify.max_user_instances`, often 128); clients that get none
/// look for themselves.
const WATCHES: usize = 16;
/// Room for some events with long names at once.
const BUFFER: usize = 4096;

/// The watches of one connection.
#[derive(Debug)]
pub(crate) struct Watches {
    /// What waits; it ends with the connection.
    pub(crate) tasks: JoinSet<()>,
    pub(crate) ids: Ids<u64>,
}

impl Watches {
    pub(crate) fn new() -> Self {
        Self { tasks: JoinSet::new(), ids: Ids::new(WATCHES) }
    }
}

/// What a worker armed.
#[derive(Debug)]
pub(crate) struct Armed {
    pub(crate) events: OwnedFd,
    /// Names, by the numbers of the watches of their directories.
    pub(crate) names: Vec<(i32, Bytes)>,
}

/// Waits for one of the names, or for the end of a directory, and tells the client once.
pub(crate) async fn tell(watch_id: u64, armed: Armed, outgoing: mpsc::Sender<Outgoing>, metrics: Arc<Metrics>, in_use: InUse) {
    if let Err(error) = changed(armed).await {
        // The client is told all the same: it looks, which is never wrong.
        tracing::warn!(%error, "a watch is lost");
    }
    if let (Ok(text), Ok(line)) =
        (rpc::notification_text("fs/missingChanged", &MissingChangedNotice { watch_id }), outgoing.reserve().await)
    {
        // Who has seen it may use the id.
        drop(in_use);
        metrics.message(Direction::Out, text.len());
        line.send(Outgoing::Text(text));
    }
}

async fn changed(Armed { events, names }: Armed) -> std::io::Result<()> {
    let events = watch_fd(events, Interest::READABLE)?;
    loop {
        let mut ready = events.readable().await?;
        if is_told(&events, &names) {
            return Ok(());
        }
        ready.clear_ready();
    }
}

/// Reads all events there are: whether one of them is waited for, or none can be waited for any more.
fn is_told(events: &AsyncFd<OwnedFd>, names: &[(i32, Bytes)]) -> bool {
    let ends =
        ReadFlags::QUEUE_OVERFLOW | ReadFlags::IGNORED | ReadFlags::UNMOUNT | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
    let mut buffer = [MaybeUninit::uninit(); BUFFER];
    let mut reader = Reader::new(events.get_ref(), &mut buffer);
    // Ends when nothing is left to read.
    while let Ok(event) = reader.next() {
        let name = event.file_name().map(std::ffi::CStr::to_bytes);
        if event.events().intersects(ends) || names.iter().any(|(watch, own)| *watch == event.wd() && name == Some(&own.0)) {
            return true;
        }
    }
    false
}

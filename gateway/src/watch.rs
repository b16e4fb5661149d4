//! Watches for what is not there. A worker judged the paths and armed the descriptor; here it is waited for.

use crate::helper::socket::watch_fd;
use crate::ids::{Ids, InUse};
use crate::link::Outgoing;
use crate::metrics::{Direction, Metrics};
use portcullis_protocol::fs::MissingChangedNotice;
use portcullis_protocol::path::Bytes;
use portcullis_protocol::rpc;
use rustix::fs::inotify::{ReadFlags, Reader};
use std::collections::{HashMap, HashSet};
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
/// Events that are looked at before others get their turn, and those that were read with the last of them.
const AT_ONCE: usize = 256;

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
    let mut awaited: Awaited = HashMap::new();
    for (watch, Bytes(name)) in names {
        awaited.entry(watch).or_default().insert(name);
    }
    loop {
        let mut ready = events.readable().await?;
        match look(&events, &awaited) {
            Look::Told => return Ok(()),
            Look::Nothing => ready.clear_ready(),
            // A process that renames files without end gets no more of this thread than others.
            Look::More => tokio::task::yield_now().await,
        }
    }
}

/// Names, by the watches of their directories.
type Awaited = HashMap<i32, HashSet<Vec<u8>>>;

/// What one look at the events found.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// One of the names, or that a directory ends.
    Told,
    /// Other names, and maybe more events.
    More,
    /// All events were read.
    Nothing,
}

/// Reads events, at most [`AT_ONCE`].
fn look(events: &AsyncFd<OwnedFd>, awaited: &Awaited) -> Look {
    let ends =
        ReadFlags::QUEUE_OVERFLOW | ReadFlags::IGNORED | ReadFlags::UNMOUNT | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
    let mut buffer = [MaybeUninit::uninit(); BUFFER];
    let mut reader = Reader::new(events.get_ref(), &mut buffer);
    let mut looked = 0;
    // What was read and not looked at would be lost.
    while looked < AT_ONCE || !reader.is_buffer_empty() {
        looked += 1;
        let Ok(event) = reader.next() else { return Look::Nothing };
        let name = event.file_name().map(std::ffi::CStr::to_bytes);
        let is_awaited = |name: &[u8]| awaited.get(&event.wd()).is_some_and(|names| names.contains(name));
        if event.events().intersects(ends) || name.is_some_and(is_awaited) {
            return Look::Told;
        }
    }
    Look::More
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};

    #[tokio::test]
    async fn many_other_names_are_read_in_turns_and_none_is_lost() {
        let place = tempfile::tempdir().unwrap();
        let events = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        let watch = add_watch(&events, place.path(), WatchFlags::CREATE).unwrap();
        let events = watch_fd(events, Interest::READABLE).unwrap();
        #[expect(clippy::disallowed_methods, reason = "the test's own place")]
        let make = |name: String| std::fs::write(place.path().join(name), "").unwrap();
        let awaited = Awaited::from([(watch, HashSet::from([b"late".to_vec()])), (watch + 1, HashSet::from([b"n0".to_vec()]))]);
        (0..3 * AT_ONCE).for_each(|nth| make(format!("n{nth}")));
        let mut turns = 0;
        while look(&events, &awaited) == Look::More {
            turns += 1;
        }
        assert!((2..=3).contains(&turns), "{turns}");
        (0..3 * AT_ONCE).for_each(|nth| make(format!("m{nth}")));
        make("late".to_owned());
        let tell = changed(Armed { events: events.into_inner(), names: vec![(watch, Bytes(b"late".to_vec()))] });
        tell.await.unwrap();
    }
}

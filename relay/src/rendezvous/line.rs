//! Frames in line for one socket: bounded by their number, by their bytes, and by the bytes of all lines of the node.
//!
//! While all lines together hold what they may, each of them has one frame at a time. So a socket that takes what is sent to it goes
//! on, whatever others do not take, and all lines hold at most what they may and one frame each.

use crate::frame::MAX_FRAME;
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Frames of one line: four times the 32 that a stream has on its way.
const FRAMES: usize = 128;
/// Bytes of one line. Ends that keep to the protocol have 2 MiB of a stream on their way, so a harness that does never fills one.
const BYTES: u32 = 4 << 20;
const _: () = assert!(MAX_FRAME <= BYTES as usize);
/// Bytes of all lines of a node: 64 full ones.
const NODE: usize = 256 << 20;

/// What all lines of a node have together.
pub(super) type Room = Arc<Semaphore>;

/// The room of a node.
pub(super) fn room() -> Room {
    Arc::new(Semaphore::new(NODE))
}

/// The end of a line at which frames come. Clones are the same line.
#[derive(Debug, Clone)]
pub(super) struct Line {
    frames: mpsc::Sender<Waiting>,
    own: Room,
    node: Room,
}

/// A line that may end meanwhile.
#[derive(Debug)]
pub(super) struct WeakLine {
    frames: mpsc::WeakSender<Waiting>,
    own: Room,
    node: Room,
}

/// A frame in line, and its room, which is free when this is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    frame: Bytes,
    _own: OwnedSemaphorePermit,
    /// None: it is the only one of its line.
    _node: Option<OwnedSemaphorePermit>,
}

impl From<Waiting> for Bytes {
    fn from(waiting: Waiting) -> Self {
        waiting.frame
    }
}

/// Why a frame is not in line.
#[derive(Debug)]
pub(super) enum Full {
    /// There is no room for it now.
    Now(Bytes),
    /// Nobody takes frames any more.
    Gone,
}

impl Line {
    /// A line in the room of a node, and the end at which frames are taken.
    pub(super) fn new(node: &Room) -> (Self, mpsc::Receiver<Waiting>) {
        let (frames, taken) = mpsc::channel(FRAMES);
        (Self { frames, own: Arc::new(Semaphore::new(BYTES as usize)), node: Arc::clone(node) }, taken)
    }

    /// The room that it is in.
    pub(super) fn node(&self) -> &Room {
        &self.node
    }

    pub(super) fn downgrade(&self) -> WeakLine {
        WeakLine { frames: self.frames.downgrade(), own: Arc::clone(&self.own), node: Arc::clone(&self.node) }
    }

    /// Puts a frame in line, if there is room for it now.
    pub(super) fn try_send(&self, frame: Bytes) -> Result<(), Full> {
        let Ok(place) = self.frames.try_reserve() else {
            return Err(if self.frames.is_closed() { Full::Gone } else { Full::Now(frame) });
        };
        let length = length(&frame);
        let Ok(own) = Arc::clone(&self.own).try_acquire_many_owned(length) else { return Err(Full::Now(frame)) };
        let Ok(node) = Arc::clone(&self.node).try_acquire_many_owned(length) else { return Err(Full::Now(frame)) };
        place.send(Waiting { frame, _own: own, _node: Some(node) });
        Ok(())
    }

    /// Waits for room. False: nobody takes frames any more.
    pub(super) async fn send(&self, frame: Bytes) -> bool {
        let length = length(&frame);
        let Ok(mut own) = Arc::clone(&self.own).acquire_many_owned(length).await else { return false };
        let node = Arc::clone(&self.node).try_acquire_many_owned(length).ok();
        if node.is_none() {
            drop(own);
            // All of it: then nothing else is in line.
            let Ok(mut all) = Arc::clone(&self.own).acquire_many_owned(BYTES).await else { return false };
            let Some(part) = all.split(length as usize) else { return false };
            own = part;
        }
        self.frames.send(Waiting { frame, _own: own, _node: node }).await.is_ok()
    }

    /// Waits until nobody takes frames any more.
    pub(super) async fn closed(&self) {
        self.frames.closed().await;
    }
}

impl WeakLine {
    /// None: the line has ended.
    pub(super) fn upgrade(&self) -> Option<Line> {
        Some(Line { frames: self.frames.upgrade()?, own: Arc::clone(&self.own), node: Arc::clone(&self.node) })
    }
}

/// At most [`MAX_FRAME`], since no longer one is read.
fn length(frame: &Bytes) -> u32 {
    u32::try_from(frame.len()).unwrap_or(BYTES).min(BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn a_line_is_bounded_by_its_frames_and_by_their_bytes() {
        let room = room();
        let (line, mut taken) = Line::new(&room);
        for _ in 0..FRAMES {
            line.try_send(Bytes::new()).unwrap();
        }
        assert!(matches!(line.try_send(Bytes::new()), Err(Full::Now(_))));
        assert!(line.send(Bytes::new()).now_or_never().is_none());
        while taken.try_recv().is_ok() {}
        let long = Bytes::from(vec![0; MAX_FRAME]);
        for _ in 0..BYTES as usize / MAX_FRAME {
            line.try_send(long.clone()).unwrap();
        }
        assert!(matches!(line.try_send(Bytes::from_static(b"x")), Err(Full::Now(_))));
        assert!(line.send(Bytes::from_static(b"x")).now_or_never().is_none());
        assert_eq!(room.available_permits(), NODE - BYTES as usize);
        assert_eq!(Bytes::from(taken.recv().await.unwrap()), long);
        assert_eq!(line.send(long.clone()).now_or_never(), Some(true));
        drop(taken);
        // What was in line takes no room any more, and nobody waits for it.
        assert!(matches!(line.try_send(long.clone()), Err(Full::Gone)) && !line.send(long).await);
        assert_eq!(room.available_permits(), NODE);
    }

    #[tokio::test]
    async fn without_room_at_the_node_each_line_has_one_frame_at_a_time() {
        let room: Room = Arc::new(Semaphore::new(2));
        let ((slow, _untaken), (quick, mut taken)) = (Line::new(&room), Line::new(&room));
        let frame = Bytes::from_static(b"xx");
        slow.try_send(frame.clone()).unwrap();
        assert!(slow.send(frame.clone()).now_or_never().is_none());
        for _ in 0..3 {
            assert_eq!(quick.send(frame.clone()).now_or_never(), Some(true));
            assert!(quick.send(frame.clone()).now_or_never().is_none());
            assert_eq!(Bytes::from(taken.recv().await.unwrap()), frame);
        }
    }
}

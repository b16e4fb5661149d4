//! Why a stream ends.

use crate::frame::FrameError;
use crate::noise::NoiseError;
use crate::segment::SegmentError;
use thiserror::Error;

/// Why a stream ended. Nothing of it is told to the peer, and what the peer says of it is not believed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// This end closed it, and what was queued was delivered as far as can be known.
    #[error("the relay stream was closed by this end")]
    Done,
    /// The peer (or who carries its frames) ended it.
    #[error("the relay stream was reset")]
    Reset,
    /// The physical connection ended, and the peer repeats nothing.
    #[error("the connection to the rendezvous was lost")]
    Lost,
    /// Nothing came for 90 s, or not since the connection was replaced, and another stream needs its place.
    #[error("nothing was heard on the relay stream for 90 s, or since the connection was replaced while others need its place")]
    Silent,
    /// Records were repeated for 60 s and the peer never confirmed them.
    #[error("the peer of the relay stream confirmed nothing for 60 s")]
    Stalled,
    /// The handshake was not answered in 10 s.
    #[error("the executor did not answer the relay handshake within 10 s")]
    NoAnswer,
    /// The peer confirmed what was never sent.
    #[error("the peer of the relay stream confirmed a record that was never sent")]
    AckBeyond,
    /// The peer says for 30 s that it holds less than it confirmed.
    #[error("the peer of the relay stream takes its confirmation back")]
    AckBack,
    /// A record is too far ahead of the one that is due.
    #[error("record {seq} exceeds the reorder window; record {due} is due")]
    Ahead {
        /// Its number.
        seq: u32,
        /// The number that is due.
        due: u32,
    },
    /// Too many bytes wait for an earlier record.
    #[error("more than 1 MiB waits for an earlier record of the relay stream")]
    Waiting,
    /// All 2^32 - 2 records of a direction were sent.
    #[error("the relay stream has no record numbers left")]
    Exhausted,
    /// A frame came where none of its kind may.
    #[error("a relay frame came that is not allowed now")]
    Unexpected,
    /// A frame that no end may send.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The handshake or the encryption failed.
    #[error(transparent)]
    Noise(#[from] NoiseError),
    /// The records do not make messages.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

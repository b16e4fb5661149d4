//! Frames: what travels in one binary WebSocket message between an end and the rendezvous.
//!
//! The wire is protobuf, package `codex.exec_server.relay.v1`. Nothing in a frame but the payloads is authenticated: whoever
//! carries frames may drop, repeat and forge them, and can thereby end a stream, but neither read nor change what is in it.

use bytes::Bytes;
use prost::Message;
use thiserror::Error;

/// The only version of frames.
pub const VERSION: u32 = 1;
/// Longest WebSocket frame and message that an end accepts, in bytes: four times the longest frame that carries a record.
pub const MAX_FRAME: usize = 256 * 1024;
/// Longest name of a stream, in bytes. Ours are UUIDs; what is kept for each stream needs a bound.
pub const MAX_STREAM_ID: usize = 256;

/// One frame of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The stream's name, chosen by the harness. Never blank.
    pub stream_id: String,
    /// What its sender received: 0 says nothing.
    pub ack: u32,
    /// Which later records its sender holds already.
    pub ack_bits: u32,
    /// What it carries.
    pub body: Body,
}

/// What a frame carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// One encrypted record, never empty.
    Record {
        /// Its number, from 0, one more for each record of its direction.
        seq: u32,
        /// Ciphertext and tag.
        payload: Bytes,
    },
    /// Only the acknowledgement in the frame's head.
    Ack,
    /// The sender has a new physical connection (or its first).
    Resume {
        /// The record that it waits for.
        next_seq: u32,
    },
    /// The stream is over.
    Reset {
        /// Why, unauthenticated: never shown to people. Never empty.
        reason: String,
    },
    /// The sender is alive.
    Heartbeat,
    /// A message of the Noise handshake, never empty.
    Handshake {
        /// The message.
        payload: Bytes,
    },
}

/// A frame that no end may send.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not the protobuf message that it should be.
    #[error("malformed relay frame: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// Longer than [`MAX_FRAME`].
    #[error("relay frame of {0} bytes; at most {MAX_FRAME} are allowed")]
    TooLong(usize),
    /// Of a version that is not ours.
    #[error("unsupported relay message frame version {0}")]
    Version(u32),
    /// Without a name, with a blank one, or with one above [`MAX_STREAM_ID`].
    #[error("relay frame without a usable stream id")]
    StreamId,
    /// Without a body, or with one of an unknown kind.
    #[error("relay frame without a body")]
    NoBody,
    /// A record in parts. Messages are cut inside the encryption, never around it.
    #[error("relay data frame is part {index} of {count}; only whole records are allowed")]
    Parts {
        /// Number of the part.
        index: u32,
        /// How many parts there are.
        count: u32,
    },
    /// An empty payload or reason.
    #[error("relay {0} frame is empty")]
    Empty(&'static str),
}

impl Frame {
    /// Reads a frame and checks all that can be checked without knowing its stream. Unknown fields are ignored.
    ///
    /// # Errors
    /// [`FrameError`]: the frame is to be dropped; the connection goes on.
    pub fn decode(bytes: Bytes) -> Result<Self, FrameError> {
        if bytes.len() > MAX_FRAME {
            return Err(FrameError::TooLong(bytes.len()));
        }
        let frame = wire::Frame::decode(bytes)?;
        if frame.version != VERSION {
            return Err(FrameError::Version(frame.version));
        }
        if frame.stream_id.trim().is_empty() || frame.stream_id.len() > MAX_STREAM_ID {
            return Err(FrameError::StreamId);
        }
        let body = match frame.body.ok_or(FrameError::NoBody)? {
            wire::Body::Data(wire::Data { segment_index: index, segment_count: count, .. }) if (index, count) != (0, 1) => {
                return Err(FrameError::Parts { index, count });
            }
            wire::Body::Data(data) if data.payload.is_empty() => return Err(FrameError::Empty("data")),
            wire::Body::Data(data) => Body::Record { seq: data.seq, payload: data.payload },
            wire::Body::Ack(wire::Ack {}) => Body::Ack,
            wire::Body::Resume(resume) => Body::Resume { next_seq: resume.next_seq },
            wire::Body::Reset(reset) if reset.reason.is_empty() => return Err(FrameError::Empty("reset")),
            wire::Body::Reset(reset) => Body::Reset { reason: reset.reason },
            wire::Body::Heartbeat(wire::Heartbeat {}) => Body::Heartbeat,
            wire::Body::Handshake(handshake) if handshake.payload.is_empty() => return Err(FrameError::Empty("handshake")),
            wire::Body::Handshake(handshake) => Body::Handshake { payload: handshake.payload },
        };
        Ok(Self { stream_id: frame.stream_id, ack: frame.ack, ack_bits: frame.ack_bits, body })
    }

    /// The frame's bytes: one binary WebSocket message.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let body = match self.body.clone() {
            Body::Record { seq, payload } => wire::Body::Data(wire::Data { seq, segment_index: 0, segment_count: 1, payload }),
            Body::Ack => wire::Body::Ack(wire::Ack {}),
            Body::Resume { next_seq } => wire::Body::Resume(wire::Resume { next_seq }),
            Body::Reset { reason } => wire::Body::Reset(wire::Reset { reason }),
            Body::Heartbeat => wire::Body::Heartbeat(wire::Heartbeat {}),
            Body::Handshake { payload } => wire::Body::Handshake(wire::Handshake { payload }),
        };
        let frame = wire::Frame {
            version: VERSION,
            stream_id: self.stream_id.clone(),
            ack: self.ack,
            ack_bits: self.ack_bits,
            body: Some(body),
        };
        frame.encode_to_vec().into()
    }
}

/// The schema.
mod wire {
    use bytes::Bytes;

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Frame {
        #[prost(uint32, tag = "1")]
        pub(super) version: u32,
        #[prost(string, tag = "2")]
        pub(super) stream_id: String,
        #[prost(uint32, tag = "3")]
        pub(super) ack: u32,
        #[prost(uint32, tag = "4")]
        pub(super) ack_bits: u32,
        #[prost(oneof = "Body", tags = "5, 6, 7, 8, 9, 10")]
        pub(super) body: Option<Body>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Body {
        #[prost(message, tag = "5")]
        Data(Data),
        #[prost(message, tag = "6")]
        Ack(Ack),
        #[prost(message, tag = "7")]
        Resume(Resume),
        #[prost(message, tag = "8")]
        Reset(Reset),
        #[prost(message, tag = "9")]
        Heartbeat(Heartbeat),
        #[prost(message, tag = "10")]
        Handshake(Handshake),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Data {
        #[prost(uint32, tag = "1")]
        pub(super) seq: u32,
        #[prost(uint32, tag = "2")]
        pub(super) segment_index: u32,
        #[prost(uint32, tag = "3")]
        pub(super) segment_count: u32,
        #[prost(bytes = "bytes", tag = "4")]
        pub(super) payload: Bytes,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Ack {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Resume {
        #[prost(uint32, tag = "1")]
        pub(super) next_seq: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Reset {
        #[prost(string, tag = "1")]
        pub(super) reason: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Heartbeat {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Handshake {
        #[prost(bytes = "bytes", tag = "1")]
        pub(super) payload: Bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(body: Body) -> Frame {
        Frame { stream_id: "s1".to_owned(), ack: 0, ack_bits: 0, body }
    }

    fn decode(bytes: &[u8]) -> Result<Frame, FrameError> {
        Frame::decode(Bytes::copy_from_slice(bytes))
    }

    /// The wire by hand: tag = field number * 8 + type (0 number, 2 length), and zero is left out.
    #[test]
    fn frames_are_the_bytes_of_the_schema() {
        let payload = Bytes::from_static(b"xy");
        let head = b"\x08\x01\x12\x02s1";
        for (body, rest) in [
            (Body::Record { seq: 0, payload: payload.clone() }, &b"\x2a\x06\x18\x01\x22\x02xy"[..]),
            (Body::Record { seq: 300, payload: payload.clone() }, b"\x2a\x09\x08\xac\x02\x18\x01\x22\x02xy"),
            (Body::Ack, b"\x32\x00"),
            (Body::Resume { next_seq: 0 }, b"\x3a\x00"),
            (Body::Resume { next_seq: 7 }, b"\x3a\x02\x08\x07"),
            (Body::Reset { reason: "no".to_owned() }, b"\x42\x04\x0a\x02no"),
            (Body::Heartbeat, b"\x4a\x00"),
            (Body::Handshake { payload }, b"\x52\x04\x0a\x02xy"),
        ] {
            let bytes = [head, rest].concat();
            assert_eq!(&frame(body.clone()).encode()[..], &bytes[..], "{body:?}");
            assert_eq!(decode(&bytes).unwrap(), frame(body));
        }
        let acked = Frame { ack: 5, ack_bits: 3, ..frame(Body::Ack) };
        let bytes = b"\x08\x01\x12\x02s1\x18\x05\x20\x03\x32\x00";
        assert_eq!(&acked.encode()[..], bytes);
        assert_eq!(decode(bytes).unwrap(), acked);
    }

    #[test]
    fn unknown_fields_are_ignored() {
        // Field 100 of the frame, and field 9 of its data.
        let bytes = b"\x08\x01\x12\x02s1\xa2\x06\x01z\x2a\x0a\x18\x01\x22\x02xy\x4a\x02id";
        assert_eq!(decode(bytes).unwrap().body, Body::Record { seq: 0, payload: Bytes::from_static(b"xy") });
    }

    #[test]
    fn frames_that_no_end_may_send_are_refused() {
        let id = |id: &str| Frame { stream_id: id.to_owned(), ..frame(Body::Ack) }.encode();
        assert_eq!(Frame::decode(id(&"x".repeat(MAX_STREAM_ID + 1))), Err(FrameError::StreamId));
        assert!(Frame::decode(id(&"x".repeat(MAX_STREAM_ID))).is_ok());
        assert_eq!(Frame::decode(id(" \t\n")), Err(FrameError::StreamId));
        assert_eq!(Frame::decode(vec![0; MAX_FRAME + 1].into()), Err(FrameError::TooLong(MAX_FRAME + 1)));
        for (bytes, error) in [
            (&b""[..], FrameError::Version(0)),
            (b"\x08\x02\x12\x02s1\x32\x00", FrameError::Version(2)),
            (b"\x08\x01\x32\x00", FrameError::StreamId),
            (b"\x08\x01\x12\x02s1", FrameError::NoBody),
            (b"\x08\x01\x12\x02s1\x2a\x04\x22\x02xy", FrameError::Parts { index: 0, count: 0 }),
            (b"\x08\x01\x12\x02s1\x2a\x06\x18\x02\x22\x02xy", FrameError::Parts { index: 0, count: 2 }),
            (b"\x08\x01\x12\x02s1\x2a\x08\x10\x01\x18\x01\x22\x02xy", FrameError::Parts { index: 1, count: 1 }),
            (b"\x08\x01\x12\x02s1\x2a\x02\x18\x01", FrameError::Empty("data")),
            (b"\x08\x01\x12\x02s1\x42\x00", FrameError::Empty("reset")),
            (b"\x08\x01\x12\x02s1\x52\x00", FrameError::Empty("handshake")),
        ] {
            assert_eq!(decode(bytes), Err(error), "{bytes:x?}");
        }
        assert!(matches!(decode(b"\x08\x01\x12\x02s"), Err(FrameError::Malformed(_))));
        assert!(matches!(decode(b"\x08\x01\x12\x01\xff\x32\x00"), Err(FrameError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        #[test]
        fn a_frame_comes_back_and_its_beginnings_never_panic(
            seq: u32, ack: u32, ack_bits: u32, payload in proptest::collection::vec(any::<u8>(), 1..200),
        ) {
            let body = Body::Record { seq, payload: payload.into() };
            let frame = Frame { stream_id: "s".to_owned(), ack, ack_bits, body };
            let bytes = frame.encode();
            for end in 0..bytes.len() {
                let _ = Frame::decode(bytes.slice(..end));
            }
            prop_assert_eq!(Frame::decode(bytes), Ok(frame));
        }
    }
}

//! Frames: where one ends and the next begins.

use super::{HEADER, INLINE_PAYLOAD, MAX_BODY, MAX_DESCRIPTORS};
use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A frame that was taken apart.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    /// In postcard; see [`decode`].
    pub body: Bytes,
    /// Raw bytes.
    pub payload: Bytes,
    /// How many descriptors of those that arrived belong to it.
    pub descriptors: usize,
}

/// Why bytes are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length above its bound.
    #[error(
        "frame with {body} bytes of body, {payload} of payload and {descriptors} descriptors: bounds are {MAX_BODY}, {INLINE_PAYLOAD} and {MAX_DESCRIPTORS}"
    )]
    TooLarge {
        /// As the header says.
        body: usize,
        /// As the header says.
        payload: usize,
        /// As the header says.
        descriptors: usize,
    },
    /// The body does not hold what it should.
    #[error("frame body does not decode: {0}")]
    Body(String),
}

/// Builds a frame: header, body, payload.
///
/// # Errors
/// A part is above its bound.
pub fn encode(body: &impl Serialize, payload: &[u8], descriptors: usize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = encode_head(body, payload.len(), descriptors)?;
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Builds a frame without its payload, which follows from its own buffer.
///
/// # Errors
/// A part is above its bound.
pub fn encode_head(body: &impl Serialize, payload: usize, descriptors: usize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; HEADER];
    bytes = postcard::to_extend(body, bytes).map_err(|error| FrameError::Body(error.to_string()))?;
    let body = bytes.len() - HEADER;
    let too_large = || FrameError::TooLarge { body, payload, descriptors };
    if body > MAX_BODY || payload > INLINE_PAYLOAD || descriptors > MAX_DESCRIPTORS {
        return Err(too_large());
    }
    for (at, length) in [body, payload, descriptors].into_iter().enumerate() {
        let length = u32::try_from(length).map_err(|_| too_large())?;
        bytes[at * 4..at * 4 + 4].copy_from_slice(&length.to_le_bytes());
    }
    Ok(bytes)
}

/// Decodes the body of a frame.
///
/// # Errors
/// The bytes are not a `T`, or more than a `T`.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (value, rest) = postcard::take_from_bytes(body).map_err(|error| FrameError::Body(error.to_string()))?;
    if rest.is_empty() { Ok(value) } else { Err(FrameError::Body(format!("{} bytes too many", rest.len()))) }
}

/// Bytes that are kept between frames. What a larger one took goes with it.
const KEPT: usize = 64 * 1024;

/// Finds frames in a stream of bytes. Sans-IO: push what was read, then take frames until there is none.
#[derive(Debug, Default)]
pub struct Deframer {
    bytes: BytesMut,
}

impl Deframer {
    /// Adds bytes that were read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // Room for the rest of a large frame at once, so that what came of it is not moved again and again.
        if let Ok(Some(Header { body, payload, .. })) = self.header() {
            self.bytes.reserve((HEADER + body + payload).saturating_sub(self.bytes.len()));
        }
    }

    /// The next whole frame, if there is one. Its bytes are not copied.
    ///
    /// # Errors
    /// The header says more than the bounds allow; the stream is of no use after that.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(Header { body, payload, descriptors }) = self.whole()? else { return Ok(None) };
        let mut frame = self.bytes.split_to(HEADER + body + payload).freeze();
        if frame.len() > KEPT {
            self.bytes = BytesMut::from(&self.bytes[..]);
        }
        let payload = frame.split_off(HEADER + body);
        Ok(Some(Frame { body: frame.split_off(HEADER), payload, descriptors }))
    }

    /// Whether [`Self::next_frame`] has something to say without another push.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        !matches!(self.whole(), Ok(None))
    }

    /// The next header, if the frame behind it is there to its end.
    fn whole(&self) -> Result<Option<Header>, FrameError> {
        Ok(self.header()?.filter(|header| self.bytes.len() >= HEADER + header.body + header.payload))
    }

    fn header(&self) -> Result<Option<Header>, FrameError> {
        let Some(header) = self.bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let field = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&header[at..at + 4]);
            usize::try_from(u32::from_le_bytes(word)).unwrap_or(usize::MAX)
        };
        let (body, payload, descriptors) = (field(0), field(4), field(8));
        if body > MAX_BODY || payload > INLINE_PAYLOAD || descriptors > MAX_DESCRIPTORS {
            return Err(FrameError::TooLarge { body, payload, descriptors });
        }
        Ok(Some(Header { body, payload, descriptors }))
    }

    /// Whether bytes of an unfinished frame are held: the peer ended in the middle.
    #[must_use]
    pub fn is_mid_frame(&self) -> bool {
        !self.bytes.is_empty()
    }
}

/// The numbers of a frame's header, within their bounds.
struct Header {
    body: usize,
    payload: usize,
    descriptors: usize,
}

#[cfg(test)]
mod tests {
    use super::super::{FsOperation, FsReply, FsRequest, SpawnerRequest};
    use super::*;
    use crate::path::AbsolutePath;
    use proptest::prelude::*;

    fn request(id: u64, name: &str) -> FsRequest {
        let path = AbsolutePath::new(format!("/{name}")).unwrap();
        FsRequest { id, operation: FsOperation::WriteFile { path, follow: true } }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(names in prop::collection::vec("[a-z]{1,20}", 1..8), payload in prop::collection::vec(any::<u8>(), 0..300), step in 1_usize..64) {
            let mut stream = Vec::new();
            for (id, name) in names.iter().enumerate() {
                stream.extend(encode(&request(id as u64, name), &payload, id % 3).unwrap());
            }
            let (mut deframer, mut seen) = (Deframer::default(), 0);
            for chunk in stream.chunks(step) {
                deframer.push(chunk);
                while let Some(frame) = deframer.next_frame().unwrap() {
                    let got: FsRequest = decode(&frame.body).unwrap();
                    prop_assert_eq!(got.id, seen as u64);
                    prop_assert_eq!(got.operation, request(0, &names[seen]).operation);
                    prop_assert_eq!(&frame.payload, &payload);
                    prop_assert_eq!(frame.descriptors, seen % 3);
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, names.len());
            prop_assert!(!deframer.is_mid_frame());
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut deframer = Deframer::default();
            deframer.push(&bytes);
            while let Ok(Some(frame)) = deframer.next_frame() {
                let _any: Result<SpawnerRequest, _> = decode(&frame.body);
                let _any: Result<FsReply, _> = decode(&frame.body);
            }
        }
    }

    #[test]
    fn bounds_are_refused_on_both_sides() {
        assert!(matches!(encode(&0_u8, &vec![0; INLINE_PAYLOAD + 1], 0), Err(FrameError::TooLarge { .. })));
        let mut deframer = Deframer::default();
        deframer.push(&[255; HEADER]);
        assert!(matches!(deframer.next_frame(), Err(FrameError::TooLarge { .. })));
    }

    #[test]
    fn a_body_with_a_tail_is_refused() {
        let bytes = encode(&7_u8, b"", 0).unwrap();
        let mut body = bytes[HEADER..].to_vec();
        assert_eq!(decode::<u8>(&body), Ok(7));
        body.push(0);
        assert!(decode::<u8>(&body).is_err());
    }

    #[test]
    fn a_small_frame_behind_a_large_one_does_not_keep_what_that_took() {
        let [large, small] = [vec![7; 20 * KEPT / 2], vec![8; 1]].map(|payload| encode(&1_u8, &payload, 0).unwrap());
        let mut deframer = Deframer::default();
        deframer.push(&[large, small].concat());
        drop(deframer.next_frame().unwrap().unwrap());
        assert!(deframer.bytes.capacity() < KEPT, "{}", deframer.bytes.capacity());
        assert_eq!(deframer.next_frame().unwrap().unwrap().payload, [8][..]);
    }
}

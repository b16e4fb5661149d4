//! Messages and records: each message is its length (4 bytes, big endian) and its bytes; the stream of all of them is cut into
//! records of at most 60 KiB. A record may end several messages and begin another.

use crate::noise::MAX_PLAINTEXT;
use bytes::Bytes;
use std::collections::VecDeque;
use thiserror::Error;

/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 64 << 20;
const HEAD: usize = 4;
/// How many messages may wait to be sent, as in the queues behind a stream.
pub const MAX_QUEUED: usize = 128;
/// How many bytes of them: one of the longest.
pub const MAX_QUEUED_BYTES: usize = MAX_MESSAGE + HEAD;
/// What is reserved for a message before its bytes came: its length alone costs its sender nothing.
const RESERVE: usize = 1 << 20;

/// A message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// It is empty or above [`MAX_MESSAGE`].
    #[error("a message of {0} bytes cannot be sent over the relay; 1 to {MAX_MESSAGE} are allowed")]
    Length(usize),
    /// Too much waits already: send frames first, then try again.
    #[error("too much waits to be sent over the relay; at most {MAX_QUEUED} messages or {MAX_QUEUED_BYTES} bytes may")]
    Full,
    /// The stream is not open, or was closed.
    #[error("the relay stream is not open")]
    NotOpen,
}

/// The peer's records do not make messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// A length of 0 or above [`MAX_MESSAGE`].
    #[error("the peer announced a message of {0} bytes; 1 to {MAX_MESSAGE} are allowed")]
    Length(usize),
    /// A record whose plaintext is above 60 KiB.
    #[error("the peer sent a record of {0} bytes; at most {MAX_PLAINTEXT} are allowed")]
    Record(usize),
}

/// Messages that wait to be cut into records.
#[derive(Default)]
pub(crate) struct Cutter {
    /// Head and bytes of each message.
    pieces: VecDeque<Bytes>,
    bytes: usize,
}

impl Cutter {
    /// Takes a message.
    pub(crate) fn push(&mut self, message: Bytes) -> Result<(), QueueError> {
        let length = message.len();
        let head =
            u32::try_from(length).ok().filter(|_| (1..=MAX_MESSAGE).contains(&length)).ok_or(QueueError::Length(length))?;
        if self.pieces.len() >= 2 * MAX_QUEUED || (self.bytes > 0 && self.bytes + HEAD + length > MAX_QUEUED_BYTES) {
            return Err(QueueError::Full);
        }
        self.bytes += HEAD + length;
        self.pieces.extend([Bytes::copy_from_slice(&head.to_be_bytes()), message]);
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes that wait.
    pub(crate) fn held(&self) -> usize {
        self.bytes
    }

    /// The plaintext of the next record: as much as waits and fits.
    pub(crate) fn record(&mut self) -> Option<Vec<u8>> {
        let mut record = Vec::with_capacity(self.bytes.min(MAX_PLAINTEXT));
        while let Some(piece) = self.pieces.front_mut() {
            let part = piece.split_to(piece.len().min(MAX_PLAINTEXT - record.len()));
            record.extend_from_slice(&part);
            if !piece.is_empty() {
                break;
            }
            self.pieces.pop_front();
        }
        self.bytes -= record.len();
        (!record.is_empty()).then_some(record)
    }
}

/// Records that become messages again.
#[derive(Default)]
pub(crate) struct Joiner {
    /// The head as far as it came, then the message as far as it came.
    head: Vec<u8>,
    message: Vec<u8>,
}

impl Joiner {
    /// Bytes that the message at hand takes in memory: what is reserved for it, not only what came of it.
    pub(crate) fn held(&self) -> usize {
        self.message.capacity()
    }

    /// Takes a record's plaintext and puts out the messages that it ends.
    pub(crate) fn push(&mut self, mut record: &[u8], out: &mut VecDeque<Bytes>) -> Result<(), SegmentError> {
        if record.len() > MAX_PLAINTEXT {
            return Err(SegmentError::Record(record.len()));
        }
        while !record.is_empty() {
            let missing = HEAD - self.head.len();
            let (head, rest) = record.split_at(missing.min(record.len()));
            self.head.extend_from_slice(head);
            record = rest;
            let Ok(head) = <[u8; HEAD]>::try_from(&self.head[..]) else { return Ok(()) };
            let announced = u32::from_be_bytes(head);
            let length = usize::try_from(announced).unwrap_or(usize::MAX);
            if !(1..=MAX_MESSAGE).contains(&length) {
                return Err(SegmentError::Length(length));
            }
            if self.message.capacity() == 0 {
                self.message.reserve_exact(length.min(RESERVE));
            }
            let missing = length - self.message.len();
            let (part, rest) = record.split_at(missing.min(record.len()));
            self.message.extend_from_slice(part);
            record = rest;
            if self.message.len() == length {
                out.push_back(std::mem::take(&mut self.message).into());
                self.head.clear();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn join(records: &[Vec<u8>]) -> Result<Vec<Bytes>, SegmentError> {
        let (mut joiner, mut out) = (Joiner::default(), VecDeque::new());
        for record in records {
            joiner.push(record, &mut out)?;
        }
        Ok(out.into())
    }

    fn cut(messages: &[Bytes]) -> Vec<Vec<u8>> {
        let mut cutter = Cutter::default();
        messages.iter().for_each(|message| cutter.push(message.clone()).unwrap());
        let records: Vec<_> = std::iter::from_fn(|| cutter.record()).collect();
        assert!(cutter.is_empty());
        records
    }

    #[test]
    fn messages_are_their_length_and_their_bytes() {
        let two = [Bytes::from_static(b"{}"), Bytes::from_static(b"[1]")];
        assert_eq!(cut(&two), [b"\0\0\0\x02{}\0\0\0\x03[1]"]);
        let long = Bytes::from(vec![7; 3 * MAX_PLAINTEXT]);
        let lengths: Vec<_> = cut(&[long]).iter().map(Vec::len).collect();
        assert_eq!(lengths, [MAX_PLAINTEXT, MAX_PLAINTEXT, MAX_PLAINTEXT, 4]);
    }

    #[test]
    fn the_longest_message_passes_and_a_longer_one_does_not() {
        let long = Bytes::from(vec![7; MAX_MESSAGE]);
        assert!(join(&cut(std::slice::from_ref(&long))).unwrap() == [long]);
        assert_eq!(Cutter::default().push(vec![7; MAX_MESSAGE + 1].into()), Err(QueueError::Length(MAX_MESSAGE + 1)));
        assert_eq!(Cutter::default().push(Bytes::new()), Err(QueueError::Length(0)));
    }

    #[test]
    fn an_impossible_length_is_refused_before_its_bytes_come() {
        for announced in [0, 0x0400_0001, u32::MAX] {
            let length = usize::try_from(announced).unwrap();
            assert_eq!(join(&[announced.to_be_bytes().to_vec()]), Err(SegmentError::Length(length)));
        }
        assert_eq!(join(&[0x0400_0000_u32.to_be_bytes().to_vec()]), Ok(Vec::new()));
        assert_eq!(join(&[vec![0; MAX_PLAINTEXT + 1]]), Err(SegmentError::Record(MAX_PLAINTEXT + 1)));
    }

    #[test]
    fn what_waits_is_bounded_in_number_and_in_bytes() {
        let mut cutter = Cutter::default();
        for _ in 0..MAX_QUEUED {
            cutter.push(Bytes::from_static(b"x")).unwrap();
        }
        assert_eq!(cutter.push(Bytes::from_static(b"x")), Err(QueueError::Full));
        cutter.record().unwrap();
        let half = Bytes::from(vec![7; MAX_MESSAGE / 2]);
        cutter.push(half.clone()).unwrap();
        assert_eq!(cutter.push(half), Err(QueueError::Full));
        cutter.push(Bytes::from_static(b"x")).unwrap();
    }

    proptest! {
        #[test]
        fn any_cuts_give_the_same_messages(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..20),
            cuts in proptest::collection::vec(1..30usize, 1..50),
        ) {
            let messages: Vec<Bytes> = messages.into_iter().map(Bytes::from).collect();
            let stream = cut(&messages).concat();
            let (mut rest, mut records) = (&stream[..], Vec::new());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (record, after) = rest.split_at((*cut).min(rest.len()));
                records.push(record.to_vec());
                rest = after;
            }
            prop_assert_eq!(join(&records).unwrap(), messages);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            let _ = join(&[bytes]);
        }
    }
}

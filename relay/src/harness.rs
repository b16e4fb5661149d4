//! The harness's end: one stream to one executor, over one WebSocket at a time.

use crate::fault::Fault;
use crate::frame::{Body, Frame};
use crate::keys::{Identity, PublicKeys};
use crate::noise::{Binding, Initiator, NoiseError};
use crate::records::REPEATS;
use crate::segment::QueueError;
use crate::stream::{Stream, frame, reset};
use bytes::Bytes;
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// For so long the executor may ask its registry and answer: as long as `initialize` may take.
const ANSWER: Duration = Duration::from_secs(10);

/// A harness's stream. Owns no socket and no clock: give it what happened, then take what is to be done until there is no more,
/// and come back at the deadline.
pub struct Harness {
    id: String,
    state: State,
    /// There is a socket to send on.
    is_connected: bool,
    outputs: VecDeque<HarnessOutput>,
}

enum State {
    Waiting { initiator: Box<Initiator>, until: Instant },
    Open(Box<Stream>),
    Closed,
}

/// What happened.
#[derive(Debug)]
pub enum HarnessInput {
    /// A binary message came from the rendezvous.
    Frame(Bytes),
    /// The deadline came.
    Timer,
    /// The WebSocket ended. An open stream outlives it for 90 s if the executor repeats; otherwise it is closed.
    Disconnected,
    /// There is another WebSocket to the same rendezvous.
    Connected,
    /// No more messages: those that are queued are delivered, and then the stream ends, or after 5 s without progress.
    Close,
}

/// What is to be done.
#[derive(PartialEq, Eq)]
pub enum HarnessOutput {
    /// Send this binary message.
    Send(Bytes),
    /// The executor answered and let us in: messages can be queued.
    Opened,
    /// The executor sent a message.
    Message(Bytes),
    /// The stream is over. This is the last output.
    Closed(Fault),
}

impl Harness {
    /// Begins a stream: `binding` and `executor` are what the registry gave, with a new name for the stream (a random UUID), and the
    /// authorization is a secret for the executor's eyes. The first outputs are the two frames that open it.
    ///
    /// # Errors
    /// The authorization is too long, or the executor's keys are no keys.
    pub fn start(
        identity: &Identity,
        executor: &PublicKeys,
        binding: Binding<'_>,
        authorization: &str,
        now: Instant,
    ) -> Result<Self, NoiseError> {
        let (initiator, message) = Initiator::start(identity, executor, binding, authorization)?;
        let id = binding.stream.to_owned();
        // The first frame claims the name at the rendezvous.
        let claim = frame(&id, 0, Body::Resume { next_seq: 0 });
        let first = frame(&id, REPEATS, Body::Handshake { payload: message.into() });
        let outputs = VecDeque::from([HarnessOutput::Send(claim), HarnessOutput::Send(first)]);
        let state = State::Waiting { initiator: Box::new(initiator), until: now + ANSWER };
        Ok(Self { id, state, is_connected: true, outputs })
    }

    /// Takes what happened.
    pub fn handle(&mut self, input: HarnessInput, now: Instant) {
        if matches!(self.state, State::Closed) {
            return;
        }
        let result = match input {
            HarnessInput::Frame(bytes) => self.frame(bytes, now),
            HarnessInput::Timer => self.timer(now),
            HarnessInput::Disconnected => self.disconnected(),
            HarnessInput::Connected => {
                self.is_connected = true;
                if let State::Open(stream) = &mut self.state {
                    stream.connected(now);
                }
                Ok(())
            }
            HarnessInput::Close => match &mut self.state {
                State::Open(stream) => {
                    stream.close(now);
                    Ok(())
                }
                State::Waiting { .. } => Err(Fault::Done),
                State::Closed => Ok(()),
            },
        };
        if let State::Open(stream) = &mut self.state {
            self.outputs.extend(std::iter::from_fn(|| stream.message()).map(HarnessOutput::Message));
        }
        if let Err(fault) = result {
            self.end(fault);
        }
    }

    /// Queues a message of 1 byte to 64 MiB.
    ///
    /// # Errors
    /// The stream is not open, the message is empty or too long, or too much waits: send frames first.
    pub fn queue(&mut self, message: Bytes) -> Result<(), QueueError> {
        let State::Open(stream) = &mut self.state else { return Err(QueueError::NotOpen) };
        stream.queue(message)
    }

    /// What is to be done next. Records are encrypted when they are asked for: ask when the socket can take them.
    pub fn poll(&mut self, now: Instant) -> Option<HarnessOutput> {
        if let (true, State::Open(stream)) = (self.outputs.is_empty(), &mut self.state) {
            match stream.poll(now) {
                Ok(bytes) => self.outputs.extend(bytes.map(HarnessOutput::Send)),
                Err(fault) => self.end(fault),
            }
        }
        self.outputs.pop_front()
    }

    /// When to come back with [`HarnessInput::Timer`], if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { until, .. } => Some(*until),
            State::Open(stream) => stream.deadline(),
            State::Closed => None,
        }
    }

    fn frame(&mut self, bytes: Bytes, now: Instant) -> Result<(), Fault> {
        let frame = match (Frame::decode(bytes), &self.state) {
            (Ok(frame), _) => frame,
            // What is dropped will be repeated.
            (Err(_), State::Open(stream)) if stream.is_reliable() => return Ok(()),
            (Err(_), State::Closed) => return Ok(()),
            (Err(error), _) => return Err(error.into()),
        };
        if frame.stream_id != self.id {
            return Ok(());
        }
        match (&mut self.state, frame.body) {
            (State::Waiting { .. }, Body::Handshake { payload }) => self.answer(&payload, frame.ack, now),
            (State::Waiting { .. }, Body::Reset { .. }) => Err(Fault::Reset),
            (State::Waiting { .. }, Body::Record { .. }) => Err(Fault::Unexpected),
            // A handshake may be repeated by who carries it; it says nothing new.
            (State::Waiting { .. } | State::Closed, _) | (State::Open(_), Body::Handshake { .. }) => Ok(()),
            (State::Open(stream), body) => stream.handle(Frame { body, ..frame }, now),
        }
    }

    fn answer(&mut self, message: &[u8], ack: u32, now: Instant) -> Result<(), Fault> {
        let State::Waiting { initiator, .. } = std::mem::replace(&mut self.state, State::Closed) else { return Ok(()) };
        let channel = initiator.finish(message)?;
        self.state = State::Open(Box::new(Stream::new(self.id.clone(), channel, ack == REPEATS, now)));
        self.outputs.push_back(HarnessOutput::Opened);
        Ok(())
    }

    fn timer(&mut self, now: Instant) -> Result<(), Fault> {
        match &mut self.state {
            State::Waiting { until, .. } if now >= *until => Err(Fault::NoAnswer),
            State::Open(stream) => stream.timeout(now),
            State::Waiting { .. } | State::Closed => Ok(()),
        }
    }

    fn disconnected(&mut self) -> Result<(), Fault> {
        self.is_connected = false;
        // There is nobody to send them to; what matters of them is sent again.
        self.outputs.retain(|output| !matches!(output, HarnessOutput::Send(_)));
        match &mut self.state {
            State::Waiting { .. } => Err(Fault::Lost),
            State::Open(stream) => stream.disconnected(),
            State::Closed => Ok(()),
        }
    }

    fn end(&mut self, fault: Fault) {
        self.state = State::Closed;
        if self.is_connected && !matches!(fault, Fault::Reset | Fault::Lost) {
            self.outputs.push_back(HarnessOutput::Send(reset(&self.id)));
        }
        self.outputs.push_back(HarnessOutput::Closed(fault));
    }
}

impl fmt::Debug for Harness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Waiting { .. } => "waiting",
            State::Open(_) => "open",
            State::Closed => "closed",
        };
        write!(f, "Harness({}, {state})", self.id)
    }
}

/// Without what the messages say.
impl fmt::Debug for HarnessOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(bytes) => write!(f, "Send({} bytes)", bytes.len()),
            Self::Opened => f.write_str("Opened"),
            Self::Message(bytes) => write!(f, "Message({} bytes)", bytes.len()),
            Self::Closed(fault) => write!(f, "Closed({fault:?})"),
        }
    }
}

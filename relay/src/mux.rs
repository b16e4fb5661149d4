//! The executor's end: many harnesses' streams over one WebSocket to the rendezvous.
//!
//! A stream that breaks a rule is reset and forgotten, and the others never notice. What costs the registry's or the machine's time is
//! bounded: streams, questions to the registry, and failed handshakes, after eight of which nobody is let in for ten seconds. What all
//! streams together hold in messages is not bounded here (128 times 64 MiB in each direction at worst): [`Mux::held`] says how much it
//! is, and the program around it, which knows what else it holds, aborts the stream that holds too much.

use crate::crypto::sha256;
use crate::fault::Fault;
use crate::frame::{Body, Frame, FrameError};
use crate::keys::{Identity, PublicKeys};
use crate::noise::{Authorization, Binding, Pending};
use crate::records::REPEATS;
use crate::segment::QueueError;
use crate::stream::{Stream, frame, reset};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Bound;
use std::time::{Duration, Instant};

/// How many streams may be open.
pub const MAX_STREAMS: usize = 128;
/// How many questions to the registry may be unanswered, those of streams that are gone among them.
pub const MAX_VALIDATIONS: usize = 32;
/// For so long the registry may take.
pub const VALIDATION: Duration = Duration::from_secs(10);
/// So many failed handshakes on one WebSocket pause the admission of others.
pub const MAX_FAILURES: u32 = 8;
/// The pause: long enough that guessing is hopeless, short enough that a harness's next attempt succeeds.
pub const PAUSE: Duration = Duration::from_secs(10);

/// Names a stream to the program around the multiplexer. Never used twice: an answer for a stream that is gone finds none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(u64);

/// The multiplexer. Owns no socket and no clock: give it what happened, then take what is to be done until there is no more, and come
/// back at the deadline.
pub struct Mux {
    identity: Identity,
    environment: String,
    registration: String,
    is_connected: bool,
    /// Since when there is this WebSocket.
    since: Option<Instant>,
    streams: BTreeMap<String, Entry>,
    names: BTreeMap<StreamKey, String>,
    /// Questions to the registry that are not answered, and until when an answer counts.
    questions: BTreeMap<StreamKey, Instant>,
    failures: u32,
    paused: Option<Instant>,
    next_key: u64,
    outputs: VecDeque<MuxOutput>,
    /// The stream that sent last: the next one is next.
    turn: String,
}

/// Of a stream's first message, to know it again.
type Digest = [u8; 32];

struct Entry {
    key: StreamKey,
    state: State,
}

enum State {
    Asking { pending: Box<Pending>, first: Digest, is_reliable: bool },
    Open { stream: Box<Stream>, first: Digest },
}

/// What happened.
#[derive(Debug)]
pub enum MuxInput {
    /// A binary message came from the rendezvous.
    Frame(Bytes),
    /// The deadline came.
    Timer,
    /// The registry answered. An error or no answer is no.
    Validated {
        /// Of which stream.
        stream: StreamKey,
        /// Whether the harness may.
        is_allowed: bool,
    },
    /// The stream takes no more messages: those that are queued are delivered, and then it ends, or after 5 s without progress.
    Close(StreamKey),
    /// The stream ends now: whoever takes its messages is not fast enough, or gone.
    Abort(StreamKey),
    /// The WebSocket ended. Streams whose peers repeat outlive it for 90 s; the others end.
    Disconnected,
    /// There is another WebSocket.
    Connected,
    /// The executor was registered anew: handshakes are for this registration from now on. Open streams go on.
    Registered(String),
}

/// What is to be done.
#[derive(PartialEq, Eq)]
pub enum MuxOutput {
    /// Send this binary message.
    Send(Bytes),
    /// Ask the registry whether this harness may, and say so within 10 s.
    Validate {
        /// Which stream it would be.
        stream: StreamKey,
        /// Whose keys they are.
        harness: PublicKeys,
        /// What the registry gave the harness. A secret.
        authorization: Authorization,
    },
    /// A harness was let in: messages can be queued.
    Opened(StreamKey),
    /// A harness sent a message. If it cannot be taken at once, abort the stream.
    Message(StreamKey, Bytes),
    /// A stream that was open is over. The last output of it.
    Closed(StreamKey, Fault),
    /// A message from the rendezvous was no frame and was dropped: worth a warning.
    Dropped(FrameError),
}

impl Mux {
    /// An executor that is registered and has a WebSocket to the rendezvous.
    #[must_use]
    pub fn new(identity: Identity, environment: String, registration: String) -> Self {
        Self {
            identity,
            environment,
            registration,
            is_connected: true,
            since: None,
            streams: BTreeMap::new(),
            names: BTreeMap::new(),
            questions: BTreeMap::new(),
            failures: 0,
            paused: None,
            next_key: 0,
            outputs: VecDeque::new(),
            turn: String::new(),
        }
    }

    /// Takes what happened.
    pub fn handle(&mut self, input: MuxInput, now: Instant) {
        match input {
            MuxInput::Frame(bytes) => match Frame::decode(bytes) {
                Ok(frame) => self.frame(frame, now),
                Err(error) => self.outputs.push_back(MuxOutput::Dropped(error)),
            },
            MuxInput::Timer => self.timer(now),
            MuxInput::Validated { stream, is_allowed } => self.validated(stream, is_allowed, now),
            MuxInput::Close(stream) => {
                if let Some(stream) = self.open_stream(stream) {
                    stream.close(now);
                }
            }
            MuxInput::Abort(stream) => {
                if let Some(name) = self.names.get(&stream).cloned() {
                    self.end(&name, Fault::Done);
                }
            }
            MuxInput::Disconnected => self.disconnected(),
            MuxInput::Connected => self.connected(now),
            MuxInput::Registered(registration) => self.registration = registration,
        }
    }

    /// Queues a message of 1 byte to 64 MiB for a stream.
    ///
    /// # Errors
    /// The stream is not open, the message is empty or too long, or too much waits: send frames first.
    pub fn queue(&mut self, stream: StreamKey, message: Bytes) -> Result<(), QueueError> {
        self.open_stream(stream).ok_or(QueueError::NotOpen)?.queue(message)
    }

    /// What is to be done next. The streams take turns. Records are encrypted when they are asked for: ask when the socket can take
    /// them.
    pub fn poll(&mut self, now: Instant) -> Option<MuxOutput> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        let turn = std::mem::take(&mut self.turn);
        let (from, to) = (Bound::Excluded(&turn), Bound::Included(&turn));
        let names = self
            .streams
            .range::<String, _>((from, Bound::Unbounded))
            .chain(self.streams.range::<String, _>((Bound::Unbounded, to)));
        let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(Entry { state: State::Open { stream, .. }, .. }) = self.streams.get_mut(&name) else { continue };
            match stream.poll(now) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    self.turn = name;
                    return Some(MuxOutput::Send(bytes));
                }
                Err(fault) => self.end(&name, fault),
            }
        }
        self.outputs.pop_front()
    }

    /// When to come back with [`MuxInput::Timer`], if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let streams = self.streams.values().filter_map(|entry| match &entry.state {
            State::Open { stream, .. } => stream.deadline(),
            State::Asking { .. } => None,
        });
        streams.chain(self.questions.values().copied()).min()
    }

    /// What each open stream holds in memory, in bytes: messages that came in part, and those that are not sent or not confirmed yet.
    pub fn held(&self) -> impl Iterator<Item = (StreamKey, usize)> {
        self.streams.values().filter_map(|entry| match &entry.state {
            State::Open { stream, .. } => Some((entry.key, stream.held())),
            State::Asking { .. } => None,
        })
    }

    fn open_stream(&mut self, key: StreamKey) -> Option<&mut Stream> {
        match &mut self.streams.get_mut(self.names.get(&key)?)?.state {
            State::Open { stream, .. } => Some(stream),
            State::Asking { .. } => None,
        }
    }

    fn frame(&mut self, frame: Frame, now: Instant) {
        let name = frame.stream_id.clone();
        let is_asking = matches!(self.streams.get(&name), Some(Entry { state: State::Asking { .. }, .. }));
        match frame.body {
            Body::Handshake { payload } => self.handshake(name, payload, frame.ack == REPEATS, now),
            Body::Reset { .. } if self.streams.contains_key(&name) => self.end(&name, Fault::Reset),
            // It may not speak before it is answered.
            Body::Record { .. } if is_asking => self.refuse(&name, now),
            _ if is_asking => {}
            _ if self.streams.contains_key(&name) => self.deliver(&name, frame, now),
            Body::Record { .. } => self.send(reset(&name)),
            // Only who had a stream acknowledges, so it learns that it has none any more.
            Body::Ack | Body::Heartbeat | Body::Resume { .. } if frame.ack != 0 => self.send(reset(&name)),
            Body::Ack | Body::Heartbeat | Body::Resume { .. } | Body::Reset { .. } => {}
        }
    }

    fn deliver(&mut self, name: &str, frame: Frame, now: Instant) {
        let Some(Entry { key, state: State::Open { stream, .. } }) = self.streams.get_mut(name) else { return };
        let result = stream.handle(frame, now);
        self.outputs.extend(std::iter::from_fn(|| stream.message()).map(|message| MuxOutput::Message(*key, message)));
        if let Err(fault) = result {
            self.end(name, fault);
        }
    }

    fn handshake(&mut self, name: String, message: Bytes, is_reliable: bool, now: Instant) {
        let digest = sha256(&message);
        match self.streams.get(&name).map(|entry| &entry.state) {
            // Who carries frames may have repeated it. An end that repeats nothing never sends one twice, and is told.
            Some(State::Asking { first, .. } | State::Open { first, .. }) if is_reliable && *first == digest => return,
            Some(State::Open { .. }) => return self.send(reset(&name)),
            Some(State::Asking { .. }) => return self.refuse(&name, now),
            None => {}
        }
        // Those that may be gone keep nobody out: see `make_room`.
        let places = MAX_STREAMS + self.unheard().count();
        if self.is_paused(now) || self.streams.len() >= places || self.questions.len() >= MAX_VALIDATIONS {
            return self.send(reset(&name));
        }
        let binding = Binding { environment: &self.environment, registration: &self.registration, stream: &name };
        let Ok(pending) = Pending::read(&self.identity, binding, &message) else { return self.refuse(&name, now) };
        let key = StreamKey(self.next_key);
        self.next_key += 1;
        self.questions.insert(key, now + VALIDATION);
        self.names.insert(key, name.clone());
        let (harness, authorization) = (pending.harness.clone(), pending.authorization.clone());
        self.outputs.push_back(MuxOutput::Validate { stream: key, harness, authorization });
        self.streams.insert(name, Entry { key, state: State::Asking { pending: Box::new(pending), first: digest, is_reliable } });
    }

    fn validated(&mut self, key: StreamKey, is_allowed: bool, now: Instant) {
        // One that comes too late was counted as a failure then.
        if self.questions.remove(&key).is_none() {
            return;
        }
        let Some(name) = self.names.get(&key).cloned() else { return };
        if !is_allowed {
            return self.refuse(&name, now);
        }
        if !self.make_room() {
            return self.end(&name, Fault::Done);
        }
        let Some(Entry { state: State::Asking { pending, first, is_reliable }, .. }) = self.streams.remove(&name) else { return };
        let Ok((second, channel)) = pending.accept() else {
            self.names.remove(&key);
            return self.refuse(&name, now);
        };
        let ack = if is_reliable { REPEATS } else { 0 };
        self.send(frame(&name, ack, Body::Handshake { payload: second.into() }));
        let stream = Box::new(Stream::new(name.clone(), channel, is_reliable, now));
        self.streams.insert(name, Entry { key, state: State::Open { stream, first } });
        self.outputs.push_back(MuxOutput::Opened(key));
    }

    /// Whether one more stream may be open. If all places are taken, the one whose peer has been silent for longest makes room, if that
    /// said nothing over this WebSocket yet: its peer lost its connection too, and may be the very one that comes in anew.
    fn make_room(&mut self) -> bool {
        let open = self.streams.values().filter(|entry| matches!(entry.state, State::Open { .. })).count();
        if open < MAX_STREAMS {
            return true;
        }
        let Some((_, name)) = self.unheard().min().map(|(heard, name)| (heard, name.clone())) else { return false };
        self.end(&name, Fault::Silent);
        true
    }

    /// Open streams whose peers said nothing over this WebSocket yet, and when they did last.
    fn unheard(&self) -> impl Iterator<Item = (Instant, &String)> {
        let since = self.since;
        self.streams.iter().filter_map(move |(name, entry)| match &entry.state {
            State::Open { stream, .. } => {
                Some((stream.heard(), name)).filter(|(heard, _)| since.is_some_and(|since| *heard < since))
            }
            State::Asking { .. } => None,
        })
    }

    fn timer(&mut self, now: Instant) {
        let late: Vec<StreamKey> = self.questions.iter().filter(|(_, until)| now >= **until).map(|(key, _)| *key).collect();
        for key in late {
            self.validated(key, false, now);
        }
        let faults = self.streams.iter_mut().filter_map(|(name, entry)| match &mut entry.state {
            State::Open { stream, .. } => stream.timeout(now).err().map(|fault| (name.clone(), fault)),
            State::Asking { .. } => None,
        });
        for (name, fault) in faults.collect::<Vec<_>>() {
            self.end(&name, fault);
        }
    }

    fn disconnected(&mut self) {
        self.is_connected = false;
        // There is nobody to send them to; what matters of them is sent again.
        self.outputs.retain(|output| !matches!(output, MuxOutput::Send(_)));
        let faults = self.streams.iter_mut().filter_map(|(name, entry)| match &mut entry.state {
            State::Open { stream, .. } => stream.disconnected().err().map(|fault| (name.clone(), fault)),
            State::Asking { .. } => Some((name.clone(), Fault::Lost)),
        });
        for (name, fault) in faults.collect::<Vec<_>>() {
            self.end(&name, fault);
        }
    }

    fn connected(&mut self, now: Instant) {
        self.is_connected = true;
        self.since = Some(now);
        self.failures = 0;
        self.paused = None;
        for entry in self.streams.values_mut() {
            if let State::Open { stream, .. } = &mut entry.state {
                stream.connected(now);
            }
        }
    }

    /// A handshake failed.
    fn refuse(&mut self, name: &str, now: Instant) {
        // Those that fail during a pause do not make it longer.
        self.failures += u32::from(!self.is_paused(now));
        if self.failures >= MAX_FAILURES {
            self.failures = 0;
            self.paused = Some(now + PAUSE);
        }
        if self.streams.contains_key(name) {
            self.end(name, Fault::Unexpected);
        } else {
            self.send(reset(name));
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused.is_some_and(|until| now < until)
    }

    /// Forgets a stream and tells both sides.
    fn end(&mut self, name: &str, fault: Fault) {
        let Some(entry) = self.streams.remove(name) else { return };
        self.names.remove(&entry.key);
        if !matches!(fault, Fault::Reset | Fault::Lost) {
            self.send(reset(name));
        }
        if matches!(entry.state, State::Open { .. }) {
            self.outputs.push_back(MuxOutput::Closed(entry.key, fault));
        }
    }

    fn send(&mut self, bytes: Bytes) {
        if self.is_connected {
            self.outputs.push_back(MuxOutput::Send(bytes));
        }
    }
}

impl fmt::Debug for Mux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mux({} streams, {} unanswered questions)", self.streams.len(), self.questions.len())
    }
}

/// Without what the messages say.
impl fmt::Debug for MuxOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(bytes) => write!(f, "Send({} bytes)", bytes.len()),
            Self::Validate { stream, .. } => write!(f, "Validate({stream:?})"),
            Self::Opened(stream) => write!(f, "Opened({stream:?})"),
            Self::Message(stream, bytes) => write!(f, "Message({stream:?}, {} bytes)", bytes.len()),
            Self::Closed(stream, fault) => write!(f, "Closed({stream:?}, {fault:?})"),
            Self::Dropped(error) => write!(f, "Dropped({error:?})"),
        }
    }
}

#[cfg(test)]
mod tests;

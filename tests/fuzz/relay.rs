//! What arrives over a relay: frames, handshakes, records and keys from anybody, and a network that does what it wants.

use portcullis_relay::frame::{Body, Frame};
use portcullis_relay::harness::{Harness, HarnessInput, HarnessOutput};
use portcullis_relay::keys::{Identity, PublicKeys};
use portcullis_relay::mux::{Mux, MuxInput, MuxOutput, StreamKey};
use portcullis_relay::noise::{Binding, Initiator, Pending};
use portcullis_relay::registry::Bundle;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const BINDING: Binding<'static> = Binding { environment: "box", registration: "one", stream: "s" };

/// A harness's and an executor's keys, the same for all inputs.
fn ends() -> &'static (Identity, Identity) {
    static ENDS: OnceLock<(Identity, Identity)> = OnceLock::new();
    ENDS.get_or_init(|| (Identity::generate().expect("randomness"), Identity::generate().expect("randomness")))
}

/// Bytes are a frame, and the same frame once it is written again, or refused.
pub(crate) fn frame(data: &[u8]) -> bool {
    let Ok(frame) = Frame::decode(data.to_vec().into()) else { return false };
    assert!(!frame.stream_id.trim().is_empty());
    assert_eq!(Frame::decode(frame.encode()).as_ref(), Ok(&frame));
    true
}

/// A message of a handshake that was changed is refused; the input says which message, and where it is changed by how much.
pub(crate) fn handshake(data: &[u8]) -> bool {
    let Some((which, data)) = data.split_first() else { return false };
    let (harness, executor) = ends();
    let (initiator, first) = Initiator::start(harness, &executor.public_keys(), BINDING, "may").expect("keys");
    if which % 3 == 0 {
        assert!(Pending::read(executor, BINDING, data).is_err());
        assert!(initiator.finish(data).is_err());
        return true;
    }
    if which % 3 == 1 {
        let changed = changed(&first, data);
        assert_eq!(Pending::read(executor, BINDING, &changed).is_ok(), changed == first);
        return true;
    }
    let (second, mut channel) = Pending::read(executor, BINDING, &first).and_then(Pending::accept).expect("an honest message");
    let answer = changed(&second, data);
    let opened = initiator.finish(&answer);
    assert_eq!(opened.is_ok(), answer == second);
    let Ok(mut own) = opened else { return true };
    // Records are the next one or nothing.
    let record = own.seal(data.get(..100).unwrap_or(data)).expect("a short record");
    let other = changed(&record, data);
    assert_eq!(channel.open(&other).is_ok(), other == record);
    true
}

/// Bytes with some of them changed, and perhaps cut or made longer.
fn changed(bytes: &[u8], how: &[u8]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    for change in how.chunks_exact(3).take(8) {
        let at = (usize::from(change[0]) << 8 | usize::from(change[1])) % changed.len().max(1);
        match change[2] {
            255 => changed.truncate(at),
            254 => changed.extend_from_slice(change),
            mask => changed.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= mask),
        }
    }
    changed
}

/// Text is what a registry answers, or refused; keys are the same once they are written again.
pub(crate) fn answer(data: &[u8]) -> bool {
    if let Ok(keys) = serde_json::from_slice::<PublicKeys>(data) {
        let text = serde_json::to_string(&keys).expect("keys are JSON");
        assert_eq!(serde_json::from_str::<PublicKeys>(&text).ok(), Some(keys));
        return true;
    }
    let Ok(bundle) = serde_json::from_slice::<Bundle>(data) else { return false };
    let shown = format!("{bundle:?}");
    for secret in [&bundle.url, &bundle.harness_key_authorization] {
        assert!(secret.len() < 40 || !shown.contains(secret.as_str()), "{shown}");
    }
    true
}

/// A harness and an executor, and between them whoever carries frames: the input says what is delivered, lost, repeated, forged or
/// cut, and how much time passes. What is delivered is what was sent, in order and once, as far as it comes.
pub(crate) fn network(data: &[u8]) -> bool {
    let mut pair = Pair::new();
    let mut choices = data.iter().copied();
    while let Some(choice) = choices.next() {
        pair.step(choice, choices.next().unwrap_or_default());
        pair.check();
    }
    !pair.heard.is_empty() || !pair.understood.is_empty()
}

struct Pair {
    harness: Harness,
    mux: Mux,
    stream: Option<StreamKey>,
    now: Instant,
    /// On the way to the executor, and to the harness.
    to_mux: Vec<Vec<u8>>,
    to_harness: Vec<Vec<u8>>,
    said: Vec<Vec<u8>>,
    heard: Vec<Vec<u8>>,
    answered: Vec<Vec<u8>>,
    understood: Vec<Vec<u8>>,
    is_open: bool,
}

impl Pair {
    fn new() -> Self {
        let (harness, _) = ends();
        let (executor, now) = (Identity::generate().expect("randomness"), Instant::now());
        let harness = Harness::start(harness, &executor.public_keys(), BINDING, "may", now).expect("keys");
        let mux = Mux::new(executor, BINDING.environment.to_owned(), BINDING.registration.to_owned());
        let mut pair = Self {
            harness,
            mux,
            stream: None,
            now,
            to_mux: Vec::new(),
            to_harness: Vec::new(),
            said: Vec::new(),
            heard: Vec::new(),
            answered: Vec::new(),
            understood: Vec::new(),
            is_open: false,
        };
        // It opens undisturbed.
        for _ in 0..4 {
            pair.drain();
            for frame in std::mem::take(&mut pair.to_mux) {
                pair.mux.handle(MuxInput::Frame(frame.into()), now);
            }
            pair.drain();
            for frame in std::mem::take(&mut pair.to_harness) {
                pair.harness.handle(HarnessInput::Frame(frame.into()), now);
            }
        }
        assert!(pair.is_open && pair.stream.is_some(), "it opened");
        pair
    }

    fn step(&mut self, choice: u8, more: u8) {
        match choice % 12 {
            0 | 1 => {
                let message = vec![more; 1 + usize::from(more) * 700];
                if self.harness.queue(message.clone().into()).is_ok() {
                    self.said.push(message);
                }
            }
            2 => {
                let message = vec![more; 1 + usize::from(more) * 700];
                if self.stream.is_some_and(|stream| self.mux.queue(stream, message.clone().into()).is_ok()) {
                    self.answered.push(message);
                }
            }
            // One is delivered, perhaps not the first; or lost; or repeated; or its head is forged.
            3..=6 => {
                if let Some(frame) = take(&mut self.to_mux, more) {
                    self.mux.handle(MuxInput::Frame(frame.into()), self.now);
                }
                if let Some(frame) = take(&mut self.to_harness, more) {
                    self.harness.handle(HarnessInput::Frame(frame.into()), self.now);
                }
            }
            7 => drop((take(&mut self.to_mux, more), take(&mut self.to_harness, more))),
            8 => {
                let (way, at) = if more & 1 == 0 { (&mut self.to_mux, more >> 1) } else { (&mut self.to_harness, more >> 1) };
                if let Some(frame) = way.get(usize::from(at) % way.len().max(1)).cloned() {
                    way.push(frame);
                }
            }
            9 => {
                let forged =
                    Frame { stream_id: "s".to_owned(), ack: u32::from(more >> 2), ack_bits: u32::from(more), body: Body::Ack };
                let way = if more & 1 == 0 { &mut self.to_mux } else { &mut self.to_harness };
                way.push(forged.encode().to_vec());
            }
            10 => {
                self.harness.handle(HarnessInput::Disconnected, self.now);
                self.harness.handle(HarnessInput::Connected, self.now);
                self.mux.handle(MuxInput::Disconnected, self.now);
                self.mux.handle(MuxInput::Connected, self.now);
                self.to_mux.clear();
                self.to_harness.clear();
            }
            _ => {
                self.now += Duration::from_millis(u64::from(more) * 8);
                self.harness.handle(HarnessInput::Timer, self.now);
                self.mux.handle(MuxInput::Timer, self.now);
            }
        }
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(output) = self.harness.poll(self.now) {
            match output {
                HarnessOutput::Send(bytes) => self.to_mux.push(bytes.to_vec()),
                HarnessOutput::Opened => self.is_open = true,
                HarnessOutput::Message(bytes) => self.understood.push(bytes.to_vec()),
                HarnessOutput::Closed(_) => break,
            }
        }
        while let Some(output) = self.mux.poll(self.now) {
            match output {
                MuxOutput::Send(bytes) => self.to_harness.push(bytes.to_vec()),
                MuxOutput::Validate { stream, .. } => self.mux.handle(MuxInput::Validated { stream, is_allowed: true }, self.now),
                MuxOutput::Opened(stream) => self.stream = Some(stream),
                MuxOutput::Message(_, bytes) => self.heard.push(bytes.to_vec()),
                _ => {}
            }
        }
    }

    fn check(&self) {
        assert!(self.said.starts_with(&self.heard), "the executor heard what was not said");
        assert!(self.answered.starts_with(&self.understood), "the harness understood what was not answered");
    }
}

/// Takes one of the first frames.
fn take(way: &mut Vec<Vec<u8>>, choice: u8) -> Option<Vec<u8>> {
    let at = if choice < 200 { 0 } else { usize::from(choice) % way.len().max(1) };
    (at < way.len()).then(|| way.remove(at))
}

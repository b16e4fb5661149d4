mod simulation;

use super::*;
use crate::harness::{Harness, HarnessInput, HarnessOutput};
use crate::noise::{Channel, Initiator, MAX_AUTHORIZATION};
use crate::segment::{Cutter, Joiner};
use proptest::prelude::*;

const ENVIRONMENT: &str = "env-1";
const REGISTRATION: &str = "registration-1";

fn binding(stream: &str) -> Binding<'_> {
    Binding { environment: ENVIRONMENT, registration: REGISTRATION, stream }
}

fn executor() -> (Mux, PublicKeys) {
    let identity = Identity::generate().unwrap();
    let keys = identity.public_keys();
    (Mux::new(identity, ENVIRONMENT.to_owned(), REGISTRATION.to_owned()), keys)
}

fn drain(mux: &mut Mux, now: Instant) -> Vec<MuxOutput> {
    std::iter::from_fn(|| mux.poll(now)).collect()
}

fn give(mux: &mut Mux, bytes: Bytes, now: Instant) -> Vec<MuxOutput> {
    mux.handle(MuxInput::Frame(bytes), now);
    drain(mux, now)
}

/// The only frame that was sent.
fn only(outputs: Vec<MuxOutput>) -> Frame {
    match <[MuxOutput; 1]>::try_from(outputs) {
        Ok([MuxOutput::Send(bytes)]) => Frame::decode(bytes).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn assert_reset(outputs: Vec<MuxOutput>, stream: &str) {
    let frame = only(outputs);
    assert_eq!(frame.stream_id, stream);
    assert_eq!(frame.body, Body::Reset { reason: "noise_relay_protocol_error".to_owned() });
}

fn handshake_of(identity: &Identity, keys: &PublicKeys, stream: &str) -> (Initiator, Bytes) {
    let (initiator, message) = Initiator::start(identity, keys, binding(stream), "may").unwrap();
    (initiator, frame(stream, 0, Body::Handshake { payload: message.into() }))
}

/// A harness without repetition, by hand: as those of the wire's first years are.
struct Old {
    stream: String,
    channel: Channel,
    key: StreamKey,
    seq: u32,
}

fn question(outputs: &[MuxOutput]) -> StreamKey {
    match outputs {
        [MuxOutput::Validate { stream, authorization, .. }] if authorization.reveal() == "may" => *stream,
        other => panic!("{other:?}"),
    }
}

impl Old {
    fn open(mux: &mut Mux, keys: &PublicKeys, stream: &str, now: Instant) -> Self {
        let (initiator, first) = handshake_of(&Identity::generate().unwrap(), keys, stream);
        let key = question(&give(mux, first, now));
        mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, now);
        let outputs = drain(mux, now);
        let [MuxOutput::Send(answer), MuxOutput::Opened(opened)] = &outputs[..] else { panic!("{outputs:?}") };
        let answer = Frame::decode(answer.clone()).unwrap();
        let Body::Handshake { payload } = answer.body else { panic!("{answer:?}") };
        assert_eq!((answer.ack, answer.ack_bits, *opened), (0, 0, key));
        Self { stream: stream.to_owned(), channel: initiator.finish(&payload).unwrap(), key, seq: 0 }
    }

    fn frames(&mut self, message: &[u8]) -> Vec<Bytes> {
        let mut cutter = Cutter::default();
        cutter.push(Bytes::copy_from_slice(message)).unwrap();
        std::iter::from_fn(|| cutter.record())
            .map(|plaintext| {
                let body = Body::Record { seq: self.seq, payload: self.channel.seal(&plaintext).unwrap() };
                self.seq += 1;
                frame(&self.stream, 0, body)
            })
            .collect()
    }

    /// Both directions, with a message of several records.
    fn talk(&mut self, mux: &mut Mux, now: Instant) {
        let message = Bytes::from(vec![b'm'; 150_000]);
        let mut outputs = Vec::new();
        for bytes in self.frames(&message) {
            outputs.extend(give(mux, bytes, now));
        }
        assert_eq!(outputs, [MuxOutput::Message(self.key, message.clone())]);
        mux.queue(self.key, message.clone()).unwrap();
        let (mut joiner, mut received) = (Joiner::default(), VecDeque::new());
        for output in drain(mux, now) {
            let MuxOutput::Send(bytes) = output else { panic!("{output:?}") };
            let sent = Frame::decode(bytes).unwrap();
            assert_eq!((sent.ack, sent.ack_bits), (0, 0));
            let Body::Record { payload, .. } = sent.body else { panic!("{sent:?}") };
            joiner.push(&self.channel.open(&payload).unwrap(), &mut received).unwrap();
        }
        assert_eq!(received, [message]);
    }
}

#[test]
fn a_harness_that_repeats_nothing_is_served_as_ever() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let mut old = Old::open(&mut mux, &keys, "old", now);
    old.talk(&mut mux, now);
    old.talk(&mut mux, now);
    assert_eq!(mux.deadline(), None, "there are no timers for it");
    // Out of order it waits, and twice is once.
    let frames = old.frames(&vec![b'x'; 150_000]);
    for at in [2, 2, 1, 2] {
        assert!(give(&mut mux, frames[at].clone(), now).is_empty());
    }
    assert_eq!(give(&mut mux, frames[0].clone(), now).len(), 1);
    // Its connection is its life.
    mux.handle(MuxInput::Disconnected, now);
    assert_eq!(drain(&mut mux, now), [MuxOutput::Closed(old.key, Fault::Lost)]);
}

#[test]
fn an_executor_that_repeats_nothing_is_used_as_ever() {
    let now = Instant::now();
    let executor = Identity::generate().unwrap();
    let identity = Identity::generate().unwrap();
    let mut harness = Harness::start(&identity, &executor.public_keys(), binding("s"), "may", now).unwrap();
    let mut sent = Vec::new();
    while let Some(output) = harness.poll(now) {
        let HarnessOutput::Send(bytes) = output else { panic!("{output:?}") };
        sent.push(Frame::decode(bytes).unwrap());
    }
    assert_eq!((sent[0].ack, &sent[0].body), (0, &Body::Resume { next_seq: 0 }));
    let Body::Handshake { payload } = &sent[1].body else { panic!("{sent:?}") };
    let (answer, mut channel) = Pending::read(&executor, binding("s"), payload).unwrap().accept().unwrap();
    assert_eq!(harness.queue(Bytes::from_static(b"x")), Err(QueueError::NotOpen));
    harness.handle(HarnessInput::Frame(frame("s", 0, Body::Handshake { payload: answer.into() })), now);
    assert_eq!(harness.poll(now), Some(HarnessOutput::Opened));
    harness.queue(Bytes::from_static(b"hello")).unwrap();
    let Some(HarnessOutput::Send(bytes)) = harness.poll(now) else { panic!() };
    let said = Frame::decode(bytes).unwrap();
    assert_eq!((said.ack, said.ack_bits), (0, 0));
    let Body::Record { seq: 0, payload } = said.body else { panic!("{said:?}") };
    assert_eq!(channel.open(&payload).unwrap(), b"\0\0\0\x05hello");
    let record = Body::Record { seq: 0, payload: channel.seal(b"\0\0\0\x02ok").unwrap() };
    harness.handle(HarnessInput::Frame(frame("s", 0, record)), now);
    assert_eq!(harness.poll(now), Some(HarnessOutput::Message(Bytes::from_static(b"ok"))));
    assert_eq!((harness.poll(now), harness.deadline()), (None, None));
    harness.handle(HarnessInput::Frame(reset("s")), now);
    assert_eq!(harness.poll(now), Some(HarnessOutput::Closed(Fault::Reset)));
    assert_eq!(harness.poll(now), None);
}

#[test]
fn a_harness_gives_up_on_what_is_no_answer() {
    let now = Instant::now();
    let keys = Identity::generate().unwrap().public_keys();
    let identity = Identity::generate().unwrap();
    let end_of = |bytes: Bytes| {
        let mut harness = Harness::start(&identity, &keys, binding("s"), "may", now).unwrap();
        harness.handle(HarnessInput::Frame(bytes), now);
        std::iter::from_fn(|| harness.poll(now)).last().unwrap()
    };
    let record = || Body::Record { seq: 0, payload: Bytes::from_static(b"x") };
    assert!(matches!(end_of(frame("s", 0, Body::Heartbeat)), HarnessOutput::Send(_)), "the control: it waits on");
    assert!(matches!(end_of(frame("other", 0, record())), HarnessOutput::Send(_)));
    assert_eq!(end_of(frame("s", 0, record())), HarnessOutput::Closed(Fault::Unexpected));
    assert_eq!(end_of(reset("s")), HarnessOutput::Closed(Fault::Reset));
    assert!(matches!(end_of(Bytes::from_static(b"?")), HarnessOutput::Closed(Fault::Frame(_))));
    let wrong = Body::Handshake { payload: vec![0; 3424].into() };
    assert!(matches!(end_of(frame("s", 0, wrong)), HarnessOutput::Closed(Fault::Noise(_))));
    let mut harness = Harness::start(&identity, &keys, binding("s"), "may", now).unwrap();
    let deadline = harness.deadline().unwrap();
    assert_eq!(deadline, now + Duration::from_secs(10));
    harness.handle(HarnessInput::Timer, deadline);
    assert_eq!(std::iter::from_fn(|| harness.poll(now)).last(), Some(HarnessOutput::Closed(Fault::NoAnswer)));
}

#[test]
fn what_a_stream_may_not_send_resets_it_and_no_other() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let mut other = Old::open(&mut mux, &keys, "other", now);
    let record = |seq| Body::Record { seq, payload: vec![0; 32].into() };
    for (body, fault) in [
        (record(0), Fault::Noise(crate::noise::NoiseError::Decrypt)),
        (record(65), Fault::Ahead { seq: 65, due: 0 }),
        (Body::Record { seq: 0, payload: vec![0; 15].into() }, Fault::Noise(crate::noise::NoiseError::Length(15))),
    ] {
        let old = Old::open(&mut mux, &keys, "s", now);
        let mut outputs = give(&mut mux, frame("s", 0, body), now);
        assert_eq!(outputs.pop(), Some(MuxOutput::Closed(old.key, fault)));
        assert_reset(outputs, "s");
        assert_eq!(mux.queue(old.key, Bytes::from_static(b"x")), Err(QueueError::NotOpen));
        other.talk(&mut mux, now);
    }
    // What it encrypts may be wrong, too.
    let mut old = Old::open(&mut mux, &keys, "s", now);
    let zero = Body::Record { seq: 0, payload: old.channel.seal(&[0; 4]).unwrap() };
    assert!(matches!(give(&mut mux, frame("s", 0, zero), now)[..], [_, MuxOutput::Closed(_, Fault::Segment(_))]));
    // A second handshake is answered by a reset; the stream's own end decides what that means.
    let mut old = Old::open(&mut mux, &keys, "s", now);
    let (_, again) = handshake_of(&Identity::generate().unwrap(), &keys, "s");
    assert_reset(give(&mut mux, again, now), "s");
    old.talk(&mut mux, now);
    // A reset ends it without an answer.
    assert_eq!(give(&mut mux, reset("s"), now), [MuxOutput::Closed(old.key, Fault::Reset)]);
    assert_reset(give(&mut mux, frame("s", 0, record(0)), now), "s");
    for body in [Body::Ack, Body::Heartbeat, Body::Resume { next_seq: 0 }] {
        assert!(give(&mut mux, frame("s", 0, body.clone()), now).is_empty());
        assert_reset(give(&mut mux, frame("s", 1, body), now), "s");
    }
    assert!(give(&mut mux, reset("s"), now).is_empty());
    assert!(matches!(give(&mut mux, Bytes::from_static(b"?"), now)[..], [MuxOutput::Dropped(_)]));
    other.talk(&mut mux, now);
}

#[test]
fn who_the_registry_does_not_know_is_not_let_in() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let ask = |mux: &mut Mux, stream: &str| {
        let (_, first) = handshake_of(&Identity::generate().unwrap(), &keys, stream);
        question(&give(mux, first, now))
    };
    let key = ask(&mut mux, "s");
    mux.handle(MuxInput::Validated { stream: key, is_allowed: false }, now);
    assert_reset(drain(&mut mux, now), "s");
    // No answer is no, and one that comes later is none.
    let key = ask(&mut mux, "s");
    assert_eq!(mux.deadline(), Some(now + VALIDATION));
    mux.handle(MuxInput::Timer, now + VALIDATION);
    assert_reset(drain(&mut mux, now), "s");
    mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, now + VALIDATION);
    assert!(drain(&mut mux, now).is_empty());
    // Nor does an answer let a later stream of that name in.
    let key = ask(&mut mux, "s");
    assert!(give(&mut mux, reset("s"), now).is_empty());
    let later = ask(&mut mux, "s");
    assert_ne!(key, later);
    mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, now);
    assert!(drain(&mut mux, now).is_empty());
    mux.handle(MuxInput::Validated { stream: later, is_allowed: true }, now);
    assert!(matches!(drain(&mut mux, now)[..], [MuxOutput::Send(_), MuxOutput::Opened(_)]));
    // For another registration: not even asked.
    mux.handle(MuxInput::Registered("registration-2".to_owned()), now);
    let (_, first) = handshake_of(&Identity::generate().unwrap(), &keys, "t");
    assert_reset(give(&mut mux, first, now), "t");
}

#[test]
fn an_oversized_authorization_is_refused_before_the_registry_is_asked() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let identity = Identity::generate().unwrap();
    let most = "x".repeat(MAX_AUTHORIZATION);
    let (_, message) = Initiator::start(&identity, &keys, binding("s"), &most).unwrap();
    let first = frame("s", 0, Body::Handshake { payload: message.into() });
    assert!(matches!(give(&mut mux, first, now)[..], [MuxOutput::Validate { .. }]));
    // Noise allows a longer one, which no harness of ours sends; what is no UTF-8 goes the same way.
    assert_reset(give(&mut mux, frame("t", 0, Body::Handshake { payload: vec![0; 65_535].into() }), now), "t");
}

/// Eight failures of any kind pause the admission of others, and of nothing else.
#[test]
fn eight_failed_handshakes_pause_admission_and_nothing_else() {
    let began = Instant::now();
    let (mut mux, keys) = executor();
    let mut open = Old::open(&mut mux, &keys, "open", began);
    let garbage = |stream: &str| frame(stream, 0, Body::Handshake { payload: Bytes::from_static(b"garbage") });
    let valid = |stream: &str| handshake_of(&Identity::generate().unwrap(), &keys, stream).1;
    for round in 0..2 {
        let now = began + round * PAUSE;
        // One by data before the answer, one by a second handshake before it, one by the registry, the rest by garbage.
        let early = frame("a", 0, Body::Record { seq: 0, payload: vec![0; 32].into() });
        question(&give(&mut mux, valid("a"), now));
        assert_reset(give(&mut mux, early, now), "a");
        question(&give(&mut mux, valid("a"), now));
        assert_reset(give(&mut mux, valid("a"), now), "a");
        let key = question(&give(&mut mux, valid("a"), now));
        mux.handle(MuxInput::Validated { stream: key, is_allowed: false }, now);
        assert_reset(drain(&mut mux, now), "a");
        for _ in 0..4 {
            assert_reset(give(&mut mux, garbage("b"), now), "b");
        }
        let key = question(&give(&mut mux, valid("c"), now));
        assert_reset(give(&mut mux, garbage("b"), now), "b");
        // Paused: not even asked, and attempts make the pause no longer.
        for part in [0, 1, 2] {
            let at = now + part * PAUSE / 3;
            for _ in 0..10 {
                assert_reset(give(&mut mux, valid("d"), at), "d");
                assert_reset(give(&mut mux, garbage("b"), at), "b");
            }
            open.talk(&mut mux, at);
        }
        // Who was asked about before is not kept out.
        mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, now);
        assert!(matches!(drain(&mut mux, now)[..], [MuxOutput::Send(_), MuxOutput::Opened(_)]));
        assert_eq!(give(&mut mux, reset("c"), now).len(), 1);
    }
    // Another physical connection begins with a clean sheet; here it is the time that passed.
    let key = question(&give(&mut mux, valid("e"), began + 2 * PAUSE));
    mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, began);
    assert!(matches!(drain(&mut mux, began)[..], [MuxOutput::Send(_), MuxOutput::Opened(_)]));
}

#[test]
fn those_that_fail_during_a_pause_do_not_make_it_longer() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let identity = Identity::generate().unwrap();
    let valid = |stream: &str| handshake_of(&identity, &keys, stream).1;
    let asked: Vec<StreamKey> = (0..10).map(|name| question(&give(&mut mux, valid(&name.to_string()), now))).collect();
    for _ in 0..MAX_FAILURES {
        let garbage = frame("b", 0, Body::Handshake { payload: Bytes::from_static(b"garbage") });
        assert_reset(give(&mut mux, garbage, now), "b");
    }
    // They were asked about before.
    let later = now + PAUSE / 2;
    for stream in asked {
        mux.handle(MuxInput::Validated { stream, is_allowed: false }, later);
    }
    assert_eq!(drain(&mut mux, later).len(), 10);
    assert_reset(give(&mut mux, valid("c"), later), "c");
    question(&give(&mut mux, valid("c"), now + PAUSE));
}

#[test]
fn questions_and_streams_are_bounded() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let identity = Identity::generate().unwrap();
    let (mut number, mut open) = (0, Vec::new());
    while open.len() < MAX_STREAMS {
        let mut asked = Vec::new();
        while asked.len() < MAX_VALIDATIONS {
            number += 1;
            asked.push(question(&give(&mut mux, handshake_of(&identity, &keys, &number.to_string()).1, now)));
        }
        if open.is_empty() {
            // What is not answered counts, whether its stream is still there or not.
            assert!(give(&mut mux, reset("1"), now).is_empty());
            assert_reset(give(&mut mux, handshake_of(&identity, &keys, "more").1, now), "more");
            mux.handle(MuxInput::Validated { stream: asked.remove(0), is_allowed: true }, now);
            number += 1;
            asked.push(question(&give(&mut mux, handshake_of(&identity, &keys, &number.to_string()).1, now)));
        }
        for stream in asked {
            mux.handle(MuxInput::Validated { stream, is_allowed: true }, now);
            assert_eq!(drain(&mut mux, now).len(), 2);
            open.push(stream);
        }
    }
    assert_reset(give(&mut mux, handshake_of(&identity, &keys, "more").1, now), "more");
    mux.handle(MuxInput::Abort(open[5]), now);
    assert!(matches!(drain(&mut mux, now)[..], [MuxOutput::Send(_), MuxOutput::Closed(_, Fault::Done)]));
    question(&give(&mut mux, handshake_of(&identity, &keys, "more").1, now));
}

#[test]
fn streams_of_a_lost_connection_keep_nobody_out() {
    let began = Instant::now();
    let (mut mux, keys) = executor();
    let second = |count| began + Duration::from_secs(count);
    let open: Vec<StreamKey> =
        (0..MAX_STREAMS).map(|number| open_reliable(&mut mux, &keys, &number.to_string(), began)).collect();
    let says = |mux: &mut Mux, number: usize, now| assert_eq!(give(mux, frame(&number.to_string(), 1, Body::Ack), now), []);
    let ask = |mux: &mut Mux, stream: &str, now| give(mux, handshake_of(&Identity::generate().unwrap(), &keys, stream).1, now);
    assert_reset(ask(&mut mux, "more", second(1)), "more");
    says(&mut mux, 5, second(1));
    mux.handle(MuxInput::Disconnected, second(2));
    mux.handle(MuxInput::Connected, second(2));
    assert_eq!(drain(&mut mux, second(2)).len(), MAX_STREAMS, "each says what it waits for");
    // All but three are heard of again: the one that spoke last before, and two others.
    (0..MAX_STREAMS).filter(|number| ![5, 70, 100].contains(number)).for_each(|number| says(&mut mux, number, second(3)));
    // Names are in the order of their letters: of those that were heard of last at the same time, "100" is the first.
    for (stream, replaced) in [("more", 100), ("and more", 70)] {
        let key = question(&ask(&mut mux, stream, second(3)));
        mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, second(3));
        let mut outputs = drain(&mut mux, second(3));
        let of_new = outputs.split_off(2);
        assert!(matches!(of_new[..], [MuxOutput::Send(_), MuxOutput::Opened(opened)] if opened == key), "{of_new:?}");
        assert_eq!(outputs.pop(), Some(MuxOutput::Closed(open[replaced], Fault::Silent)));
        assert_reset(outputs, &replaced.to_string());
    }
    // One that the registry does not let in replaces nobody, and nor does one that is let in when the last was heard of.
    let refused = question(&ask(&mut mux, "refused", second(3)));
    mux.handle(MuxInput::Validated { stream: refused, is_allowed: false }, second(3));
    assert_reset(drain(&mut mux, second(3)), "refused");
    let late = question(&ask(&mut mux, "late", second(3)));
    says(&mut mux, 5, second(4));
    mux.handle(MuxInput::Validated { stream: late, is_allowed: true }, second(4));
    assert_reset(drain(&mut mux, second(4)), "late");
    assert_reset(ask(&mut mux, "last", second(4)), "last");
    assert!(mux.queue(open[5], Bytes::from_static(b"x")).is_ok());
}

#[test]
fn streams_take_turns() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let open: Vec<Old> = ["a", "b", "c"].into_iter().map(|name| Old::open(&mut mux, &keys, name, now)).collect();
    for old in &open {
        mux.queue(old.key, vec![b'x'; 150_000].into()).unwrap();
    }
    let order: Vec<String> = drain(&mut mux, now)
        .into_iter()
        .map(|output| match output {
            MuxOutput::Send(bytes) => Frame::decode(bytes).unwrap().stream_id,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(order.concat(), "abcabcabc");
}

#[test]
fn what_streams_hold_is_counted_until_it_is_delivered_or_confirmed() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let held = |mux: &Mux| mux.held().map(|(_, bytes)| bytes).collect::<Vec<_>>();
    let mut old = Old::open(&mut mux, &keys, "old", now);
    assert_eq!(held(&mux), [0]);
    // A head of four bytes reserves memory, and that is what counts.
    let frames = old.frames(&vec![b'x'; 3 << 20]);
    assert!(give(&mut mux, frames[0].clone(), now).is_empty());
    assert_eq!(held(&mux), [1 << 20]);
    let last = frames.len() - 1;
    give(&mut mux, frames[last].clone(), now);
    assert!(held(&mux)[0] > 1 << 20, "what is out of order is held too");
    for frame in &frames[1..last] {
        give(&mut mux, frame.clone(), now);
    }
    assert_eq!(held(&mux), [0], "it was delivered");
    mux.queue(old.key, vec![b'x'; 100_000].into()).unwrap();
    assert_eq!(held(&mux), [100_004]);
    assert_eq!(drain(&mut mux, now).len(), 2);
    assert_eq!(held(&mux), [0], "it was sent");
    mux.handle(MuxInput::Abort(old.key), now);
    assert!(held(&mux).is_empty());
}

#[test]
fn a_stream_that_closes_delivers_first() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let old = Old::open(&mut mux, &keys, "s", now);
    mux.queue(old.key, vec![b'x'; 150_000].into()).unwrap();
    mux.handle(MuxInput::Close(old.key), now);
    assert_eq!(mux.queue(old.key, Bytes::from_static(b"x")), Err(QueueError::NotOpen));
    let mut outputs = drain(&mut mux, now);
    assert_eq!(outputs.pop(), Some(MuxOutput::Closed(old.key, Fault::Done)));
    assert_reset(outputs.split_off(3), "s");
    assert_eq!(outputs.len(), 3);
}

/// A stream whose peer says that it repeats, and whose frames are made by hand.
fn open_reliable(mux: &mut Mux, keys: &PublicKeys, stream: &str, now: Instant) -> StreamKey {
    let (_, message) = Initiator::start(&Identity::generate().unwrap(), keys, binding(stream), "may").unwrap();
    let key = question(&give(mux, frame(stream, REPEATS, Body::Handshake { payload: message.into() }), now));
    mux.handle(MuxInput::Validated { stream: key, is_allowed: true }, now);
    assert!(matches!(drain(mux, now)[..], [MuxOutput::Send(_), MuxOutput::Opened(_)]));
    key
}

#[test]
fn a_stream_that_closes_has_time_for_as_long_as_its_peer_confirms() {
    let now = Instant::now();
    let (mut mux, keys) = executor();
    let flush = Duration::from_secs(5);
    let message = Bytes::from(vec![b'x'; 6 << 20]);
    let key = open_reliable(&mut mux, &keys, "slow", now);
    mux.queue(key, message.clone()).unwrap();
    mux.handle(MuxInput::Close(key), now);
    let (mut at, mut records, mut bytes) = (now, 0, 0);
    let mut outputs = drain(&mut mux, at);
    while !matches!(outputs.last(), Some(MuxOutput::Closed(..))) {
        for output in outputs {
            let MuxOutput::Send(sent) = output else { panic!("{output:?}") };
            let Body::Record { payload, .. } = Frame::decode(sent).unwrap().body else { panic!("no record") };
            (records, bytes) = (records + 1, bytes + payload.len());
        }
        at += flush - Duration::from_millis(1);
        outputs = give(&mut mux, frame("slow", records + 1, Body::Ack), at);
    }
    assert_eq!(outputs.last(), Some(&MuxOutput::Closed(key, Fault::Done)));
    assert!(bytes > message.len() && at > now + 2 * flush, "{bytes} bytes in {:?}", at - now);
    // One that confirms nothing more has as long as ever.
    let key = open_reliable(&mut mux, &keys, "still", now);
    mux.queue(key, message).unwrap();
    mux.handle(MuxInput::Close(key), now);
    drain(&mut mux, now);
    let at = now + flush - Duration::from_millis(1);
    assert!(give(&mut mux, frame("still", 1, Body::Ack), at).is_empty());
    assert_eq!(drain(&mut mux, now + flush).last(), Some(&MuxOutput::Closed(key, Fault::Done)));
}

fn any_body() -> impl Strategy<Value = Body> {
    let payload = || proptest::collection::vec(any::<u8>(), 1..100).prop_map(Bytes::from);
    prop_oneof![
        (0..70_u32, payload()).prop_map(|(seq, payload)| Body::Record { seq, payload }),
        (any::<u32>(), payload()).prop_map(|(seq, payload)| Body::Record { seq, payload }),
        Just(Body::Ack),
        Just(Body::Heartbeat),
        any::<u32>().prop_map(|next_seq| Body::Resume { next_seq }),
        Just(Body::Reset { reason: "no".to_owned() }),
        payload().prop_map(|payload| Body::Handshake { payload }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Frames that the harness did not send, among those that it did: on its stream, on one that is asked about, and on another.
    #[test]
    fn forged_frames_never_panic_and_never_become_messages(
        forged in proptest::collection::vec((0..3_usize, 0..4_u32, 0..4_u32, any_body()), 0..60),
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), 0..8_u8), 0..20),
    ) {
        let now = Instant::now();
        let (mut mux, keys) = executor();
        let mut old = Old::open(&mut mux, &keys, "open", now);
        give(&mut mux, handshake_of(&Identity::generate().unwrap(), &keys, "asked").1, now);
        let true_ones = old.frames(b"true");
        let mut received = Vec::new();
        let mut take = |mux: &mut Mux, bytes: Bytes| {
            received.extend(give(mux, bytes, now).into_iter().filter_map(|output| match output {
                MuxOutput::Message(_, bytes) => Some(bytes),
                _ => None,
            }));
        };
        for (at, bit) in flips {
            let mut bytes = true_ones[0].to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            take(&mut mux, true_ones[0].slice(..at));
            take(&mut mux, bytes.into());
        }
        for (name, ack, ack_bits, body) in forged {
            let stream_id = ["open", "asked", "other"][name].to_owned();
            take(&mut mux, Frame { stream_id, ack, ack_bits, body }.encode());
        }
        for _ in 0..3 {
            take(&mut mux, true_ones[0].clone());
        }
        // The true one arrives once, or not at all when something else ended the stream before.
        prop_assert!(received.len() <= 1 && received.iter().all(|bytes| &bytes[..] == b"true"));
    }
}

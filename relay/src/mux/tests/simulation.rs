//! Several harnesses and one executor over a bad network, with a clock that jumps.

use super::*;
use crate::seeded::Seeded;
use std::collections::HashMap;

/// Networks for the whole stack. Each costs several handshakes; the layer that repeats is tried on a thousand more by itself.
const SEEDS: u64 = 120;
const HARNESSES: usize = 3;
const MESSAGES: usize = 8;
/// In every message, and in no frame.
const MARK: &[u8] = b"in the clear";

enum Arrival {
    Executor(Bytes),
    Harness(String, Bytes),
}

/// One harness: it begins again, with another stream, when its stream ends.
struct Guest {
    harness: Harness,
    name: String,
    talk: Option<Talk>,
    attempts: usize,
}

/// One end of an open stream: how many messages it queued, and how many it received.
struct Talk {
    from: usize,
    queued: usize,
    received: usize,
}

impl Talk {
    fn new(from: usize) -> Self {
        Self { from, queued: 0, received: 0 }
    }

    /// Messages come once, in order, and as they were sent.
    fn receive(&mut self, bytes: &Bytes) {
        assert!(*bytes == message(self.from, self.received), "message {} of {}", self.received, self.from);
        self.received += 1;
    }

    fn is_done(&self) -> bool {
        self.received == MESSAGES
    }
}

struct World {
    random: Seeded,
    began: Instant,
    now: Instant,
    mux: Mux,
    keys: PublicKeys,
    identity: Identity,
    guests: Vec<Guest>,
    streams: HashMap<StreamKey, Talk>,
    /// Harnesses whose messages the executor got, all of them.
    served: [bool; HARNESSES],
    wire: BTreeMap<(Instant, u64), Arrival>,
    count: u64,
    /// Bits of the first harness's frames are changed on their way.
    is_corrupted: bool,
    /// Streams that ended while they were open.
    faults: Vec<(usize, Fault)>,
}

fn message(from: usize, number: usize) -> Bytes {
    let mut text = [MARK, format!("{from} {number}").as_bytes()].concat();
    // Most are short, some take several records.
    text.resize(text.len() + [0, 100, 3000, 70_000][number % 4], b'.');
    text.into()
}

fn number_of(name: &str) -> usize {
    name.split_once('-').unwrap().0.parse().unwrap()
}

impl World {
    fn new(seed: u64) -> Self {
        let (mux, keys) = executor();
        let now = Instant::now();
        let identity = Identity::generate().unwrap();
        let guests = (0..HARNESSES).map(|number| Guest::new(&identity, &keys, number, 0, now)).collect();
        Self {
            random: Seeded::new(seed),
            began: now,
            now,
            mux,
            keys,
            identity,
            guests,
            streams: HashMap::new(),
            served: [false; HARNESSES],
            wire: BTreeMap::new(),
            count: 0,
            is_corrupted: seed % 2 == 1,
            faults: Vec::new(),
        }
    }

    /// Loses one frame in ten, doubles one in ten, and lets them overtake each other.
    fn send(&mut self, bytes: &Bytes, is_to_executor: bool) {
        // In some frames, for it takes longer than all else.
        let is_clear = || bytes.windows(MARK.len()).any(|window| window == MARK);
        assert!(!self.count.is_multiple_of(8) || !is_clear(), "a message is in the clear");
        let name = Frame::decode(bytes.clone()).unwrap().stream_id;
        let copies = match self.random.below(10) {
            0 => 0,
            1 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let mut bytes = bytes.clone();
            if self.is_corrupted && number_of(&name) == 0 && self.random.below(20) == 0 {
                let mut changed = bytes.to_vec();
                // Behind the name, which would make it another stream's frame.
                let head = 4 + name.len();
                let at = head + usize::try_from(self.random.below((changed.len() - head) as u64)).unwrap();
                changed[at] ^= 1 << self.random.below(8);
                bytes = changed.into();
            }
            self.count += 1;
            let at = self.now + Duration::from_millis(self.random.below(100));
            let arrival = if is_to_executor { Arrival::Executor(bytes) } else { Arrival::Harness(name.clone(), bytes) };
            self.wire.insert((at, self.count), arrival);
        }
    }

    fn drive_executor(&mut self) {
        self.mux.handle(MuxInput::Timer, self.now);
        loop {
            for (key, talk) in &mut self.streams {
                while talk.queued < MESSAGES && self.mux.queue(*key, message(talk.from, talk.queued)).is_ok() {
                    talk.queued += 1;
                }
            }
            match self.mux.poll(self.now) {
                None => return,
                Some(MuxOutput::Send(bytes)) => self.send(&bytes, false),
                Some(MuxOutput::Validate { stream, .. }) => {
                    self.mux.handle(MuxInput::Validated { stream, is_allowed: true }, self.now);
                }
                Some(MuxOutput::Opened(key)) => {
                    self.streams.insert(key, Talk::new(number_of(&self.mux.names[&key])));
                }
                Some(MuxOutput::Message(key, bytes)) => {
                    let talk = self.streams.get_mut(&key).unwrap();
                    talk.receive(&bytes);
                    self.served[talk.from] |= talk.is_done();
                }
                Some(MuxOutput::Closed(key, _)) => {
                    self.streams.remove(&key);
                }
                Some(MuxOutput::Dropped(_)) => assert!(self.is_corrupted),
            }
        }
    }

    fn drive_guest(&mut self, number: usize) {
        self.guests[number].harness.handle(HarnessInput::Timer, self.now);
        loop {
            let guest = &mut self.guests[number];
            if let Some(talk) = &mut guest.talk {
                while talk.queued < MESSAGES && guest.harness.queue(message(number, talk.queued)).is_ok() {
                    talk.queued += 1;
                }
            }
            match guest.harness.poll(self.now) {
                None => return,
                Some(HarnessOutput::Send(bytes)) => self.send(&bytes, true),
                Some(HarnessOutput::Opened) => guest.talk = Some(Talk::new(number)),
                Some(HarnessOutput::Message(bytes)) => guest.talk.as_mut().unwrap().receive(&bytes),
                Some(HarnessOutput::Closed(fault)) => {
                    if guest.talk.is_some() {
                        self.faults.push((number, fault));
                    }
                    let attempts = guest.attempts + 1;
                    *guest = Guest::new(&self.identity, &self.keys, number, attempts, self.now);
                }
            }
        }
    }

    fn is_done(&self) -> bool {
        self.served == [true; HARNESSES] && self.guests.iter().all(|guest| guest.talk.as_ref().is_some_and(Talk::is_done))
    }

    fn run(&mut self) {
        loop {
            self.drive_executor();
            for number in 0..HARNESSES {
                self.drive_guest(number);
            }
            if self.is_done() {
                return;
            }
            let deadlines = self.guests.iter().filter_map(|guest| guest.harness.deadline()).chain(self.mux.deadline());
            let arrival = self.wire.first_key_value().map(|((at, _), _)| *at);
            let next = deadlines.chain(arrival).min().unwrap();
            assert!(next < self.began + Duration::from_secs(3600), "no end is in sight");
            self.now = self.now.max(next);
            if self.random.below(300) == 0 {
                self.cut();
            }
            while let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= self.now) {
                match entry.remove() {
                    Arrival::Executor(bytes) => self.mux.handle(MuxInput::Frame(bytes), self.now),
                    Arrival::Harness(name, bytes) => {
                        if let Some(guest) = self.guests.iter_mut().find(|guest| guest.name == name) {
                            guest.harness.handle(HarnessInput::Frame(bytes), self.now);
                        }
                    }
                }
            }
        }
    }

    /// A connection ends, the executor's or a harness's, and another begins. What was on the way is lost.
    fn cut(&mut self) {
        self.wire.clear();
        let number = usize::try_from(self.random.below(6)).unwrap();
        if let Some(guest) = self.guests.get_mut(number) {
            guest.harness.handle(HarnessInput::Disconnected, self.now);
            self.drive_guest(number);
            self.guests[number].harness.handle(HarnessInput::Connected, self.now);
        } else {
            self.mux.handle(MuxInput::Disconnected, self.now);
            self.drive_executor();
            self.mux.handle(MuxInput::Connected, self.now);
        }
    }
}

impl Guest {
    fn new(identity: &Identity, keys: &PublicKeys, number: usize, attempts: usize, now: Instant) -> Self {
        let name = format!("{number}-{attempts}");
        let harness = Harness::start(identity, keys, binding(&name), "may", now).unwrap();
        Self { harness, name, talk: None, attempts }
    }
}

/// Where nothing is changed on its way no open stream ends; where it is, only that harness's do, and it gets through in the end.
#[test]
fn all_messages_arrive_once_and_in_order_over_bad_networks() {
    let mut faults = 0;
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.run();
            for (number, fault) in &world.faults {
                assert!(world.is_corrupted && *number == 0, "the stream of {number}: {fault}");
            }
        }));
        faults += world.faults.len();
        if let Err(panic) = result {
            println!("seed {seed}, {:?} after the begin", world.now.duration_since(world.began));
            std::panic::resume_unwind(panic);
        }
    }
    assert!(faults > 0, "no change was noticed: none was made");
}

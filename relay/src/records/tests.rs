use super::*;
use crate::seeded::Seeded;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// How many networks the layer is tried on. Each takes about a millisecond of the machine's time.
const SEEDS: u64 = 1000;
const RECORDS: u32 = 60;

/// A stand-in for the cipher: the record's number, so that a wrong one shows.
fn record(number: u32) -> Bytes {
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.resize(16, 0);
    bytes.into()
}

struct World {
    random: Seeded,
    now: Instant,
    ends: [Records; 2],
    pushed: [u32; 2],
    received: [u32; 2],
    /// What is on its way: when it arrives, to whom.
    wire: BTreeMap<(Instant, u64), (usize, Piece)>,
    sent: u64,
    first: BTreeMap<(usize, u32), Bytes>,
    loss: bool,
}

impl World {
    fn new(seed: u64, reliable: bool, loss: bool) -> Self {
        let now = Instant::now();
        let end = || Records::new(reliable, now);
        Self {
            random: Seeded::new(seed),
            now,
            ends: [end(), end()],
            pushed: [0; 2],
            received: [0; 2],
            wire: BTreeMap::new(),
            sent: 0,
            first: BTreeMap::new(),
            loss,
        }
    }

    /// Loses one frame in ten, doubles one in ten, and delays each by up to 100 ms, so that they overtake each other.
    fn send(&mut self, to: usize, piece: Piece) {
        if let Body::Record { seq, payload } = &piece.body {
            let first = self.first.entry((to, *seq)).or_insert_with(|| payload.clone());
            assert_eq!(first, payload, "record {seq} was sent with other bytes");
        }
        let copies = match self.random.below(10) {
            0 if self.loss => 0,
            1 if self.loss => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let delay = if self.loss { self.random.below(100) } else { 5 };
            self.sent += 1;
            let piece = Piece { body: piece.body.clone(), ..piece };
            self.wire.insert((self.now + Duration::from_millis(delay), self.sent), (to, piece));
        }
    }

    fn drive(&mut self, end: usize) -> Result<(), Fault> {
        self.ends[end].timeout(self.now)?;
        while let Some(got) = self.ends[end].pop() {
            assert_eq!(got, record(self.received[end]), "records come once and in order");
            self.received[end] += 1;
        }
        loop {
            while self.pushed[end] < RECORDS && self.ends[end].has_room() {
                self.ends[end].push(record(self.pushed[end]), self.now)?;
                self.pushed[end] += 1;
            }
            let Some(piece) = self.ends[end].poll(self.now) else { return Ok(()) };
            self.send(1 - end, piece);
        }
    }

    fn is_done(&self) -> bool {
        self.received == [RECORDS; 2] && self.ends.iter().all(Records::is_delivered)
    }

    /// Until all is delivered and confirmed.
    fn run(&mut self) -> Result<(), Fault> {
        let began = self.now;
        loop {
            self.drive(0)?;
            self.drive(1)?;
            if self.is_done() {
                return Ok(());
            }
            if self.random.below(200) == 0 && self.loss {
                // Both ends get another connection, and nothing on the old one arrives.
                self.wire.clear();
                for end in &mut self.ends {
                    end.disconnected()?;
                    assert!(end.poll(self.now).is_none());
                    end.connected(self.now);
                }
                continue;
            }
            let deadline = self.ends.iter().filter_map(Records::deadline).min();
            let arrival = self.wire.first_key_value().map(|((at, _), _)| *at);
            // Nothing is under way and nothing is waited for.
            let Some(next) = deadline.into_iter().chain(arrival).min() else { return Err(Fault::Stalled) };
            assert!(next.duration_since(began) < Duration::from_secs(600), "no end is in sight");
            self.now = self.now.max(next);
            while let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= self.now) {
                let (to, piece) = entry.remove();
                self.ends[to].handle(piece, self.now)?;
            }
        }
    }
}

#[test]
fn everything_arrives_once_and_in_order_over_a_thousand_bad_networks() {
    let mut sent = 0;
    for seed in 0..SEEDS {
        let mut world = World::new(seed, true, true);
        world.run().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        sent += world.sent;
    }
    assert!(sent > SEEDS * u64::from(RECORDS) * 2, "nothing was repeated: the networks were not bad");
}

#[test]
fn ends_that_repeat_nothing_work_where_nothing_is_lost() {
    let mut world = World::new(0, false, false);
    world.run().unwrap();
    assert_eq!(world.sent, u64::from(RECORDS) * 2, "there are frames that are no records");
    // And they fail, rather than deliver something else, where something is.
    let mut stuck = 0;
    for seed in 0..50 {
        let mut world = World::new(seed, false, true);
        stuck += u32::from(world.run().is_err());
    }
    assert!(stuck > 40, "{stuck}");
}

fn piece(ack: u32, ack_bits: u32, body: Body) -> Piece {
    Piece { ack, ack_bits, body }
}

#[test]
fn an_idle_end_says_that_it_lives_and_gives_a_silent_peer_up() {
    let now = Instant::now();
    let mut end = Records::new(true, now);
    assert!(end.poll(now).is_none());
    let mut beats = 0;
    let (fault, at) = loop {
        let at = end.deadline().unwrap();
        if let Err(fault) = end.timeout(at) {
            break (fault, at);
        }
        while let Some(said) = end.poll(at) {
            assert_eq!((said.ack, said.body), (1, Body::Heartbeat));
            beats += 1;
        }
    };
    assert_eq!((fault, at, beats), (Fault::Silent, now + SILENCE, 5));
    // The control: one that is heard.
    let mut end = Records::new(true, now);
    end.handle(piece(1, 0, Body::Heartbeat), now + HEARTBEAT).unwrap();
    assert_eq!(end.timeout(now + SILENCE), Ok(()));
    // One that repeats nothing says nothing, and waits for ever.
    let mut end = Records::new(false, now);
    assert!(end.poll(now + SILENCE).is_none() && end.deadline().is_none());
    assert_eq!(end.timeout(now + SILENCE), Ok(()));
}

#[test]
fn acknowledgements_wait_a_little_and_travel_with_records() {
    let now = Instant::now();
    let mut end = Records::new(true, now);
    let data = |seq| piece(1, 0, Body::Record { seq, payload: record(seq) });
    end.handle(data(0), now).unwrap();
    end.pop().unwrap();
    assert!(end.poll(now).is_none());
    assert_eq!(end.deadline(), Some(now + ACK_AFTER));
    let said = end.poll(now + ACK_AFTER).unwrap();
    assert_eq!((said.ack, said.ack_bits, said.body), (2, 0, Body::Ack));
    // Out of order: at once.
    end.handle(data(2), now).unwrap();
    let said = end.poll(now).unwrap();
    assert_eq!((said.ack, said.ack_bits, said.body), (2, 0b1, Body::Ack));
    // With a record.
    end.handle(data(1), now).unwrap();
    while end.pop().is_some() {}
    end.push(record(0), now).unwrap();
    let said = end.poll(now).unwrap();
    assert_eq!((said.ack, said.body), (4, Body::Record { seq: 0, payload: record(0) }));
    assert!(end.poll(now + ACK_AFTER).is_none());
    // Many at once: at once.
    for seq in 3..11 {
        assert!(end.poll(now).is_none());
        end.handle(data(seq), now).unwrap();
        end.pop().unwrap();
    }
    assert_eq!(end.poll(now).unwrap().ack, 12);
}

#[test]
fn a_new_connection_is_resumed_and_without_repetition_the_stream_ends() {
    let now = Instant::now();
    let mut end = Records::new(true, now);
    end.push(record(0), now).unwrap();
    assert!(end.poll(now).is_some() && end.poll(now).is_none());
    end.disconnected().unwrap();
    assert!(!end.has_room() && end.poll(now).is_none());
    end.connected(now);
    let said = end.poll(now).unwrap();
    assert_eq!((said.ack, said.body), (1, Body::Resume { next_seq: 0 }));
    assert_eq!(end.poll(now).unwrap().body, Body::Record { seq: 0, payload: record(0) });
    assert!(end.poll(now).is_none());
    // The peer's new connection has the same effect.
    end.handle(piece(1, 0, Body::Resume { next_seq: 0 }), now).unwrap();
    assert_eq!(end.poll(now).unwrap().body, Body::Record { seq: 0, payload: record(0) });
    end.handle(piece(2, 0, Body::Resume { next_seq: 1 }), now).unwrap();
    assert_eq!(end.poll(now).unwrap().body, Body::Ack);
    assert_eq!(Records::new(false, now).disconnected(), Err(Fault::Lost));
}

#[test]
fn a_peer_that_repeats_nothing_is_not_believed_to_confirm() {
    let now = Instant::now();
    let mut end = Records::new(false, now);
    end.handle(piece(99, u32::MAX, Body::Ack), now).unwrap();
    assert_eq!(Records::new(true, now).handle(piece(99, 0, Body::Ack), now), Err(Fault::AckBeyond));
    end.handle(piece(0, 0, Body::Resume { next_seq: 5 }), now).unwrap();
    assert!(end.poll(now).is_none());
}

proptest! {
    #[test]
    fn no_piece_panics(pieces in proptest::collection::vec((any::<u32>(), any::<u32>(), 0..70_u32, 0..4), 0..100)) {
        let now = Instant::now();
        let mut end = Records::new(true, now);
        let mut expected = 0;
        for (number, bits, small, kind) in pieces {
            let body = match kind {
                0 => Body::Ack,
                1 => Body::Resume { next_seq: number },
                2 => Body::Record { seq: number, payload: record(number) },
                _ => Body::Record { seq: small, payload: record(small) },
            };
            let ack = if kind == 0 { number } else { small };
            let _ = end.handle(piece(ack, bits, body), now);
            while let Some(got) = end.pop() {
                prop_assert_eq!(got, record(expected));
                expected += 1;
            }
            if end.has_room() {
                let _ = end.push(record(0), now);
            }
            let _ = end.poll(now);
        }
    }
}

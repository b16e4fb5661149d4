//! Two ends, a seeded network, a clock that jumps: the client against a small server of its own, over links that are cut at any
//! moment. What each run must show is at the end of [`World::judge`]. A failing seed names itself.

mod server;

use crate::pending::Again;
use crate::process::ProcessEvent;
use crate::recovery::{Core, EVENT_COST, Input, LinkId, Output, RouteId, Settings, Ticket};
use crate::{ClientStatus, ExecServerError};
use portcullis_protocol::rpc::{self, Message};
use serde_json::{Value, json};
use server::{Rules, Server};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio_tungstenite::tungstenite::Bytes;

/// A generator of numbers: the same for the same seed, on every machine.
#[derive(Debug)]
pub(super) struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(super) fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }
}

#[derive(Debug)]
enum Happening {
    Dialled(LinkId),
    ToServer(LinkId, String),
    ToClient(LinkId, String),
    Cut(LinkId),
    ClientEnd(LinkId),
    ServerEnd(LinkId),
    Application,
    Processes,
}

/// One connection. What is on the way when it is cut may arrive up to a point.
#[derive(Debug, Default)]
struct Wire {
    last: [Option<Instant>; 2],
    until: [Option<Instant>; 2],
    is_cut: bool,
}

#[derive(Debug)]
struct Followed {
    process: String,
    ticket: Ticket,
    events: Vec<ProcessEvent>,
    taken: usize,
    has_ended: bool,
    /// Begins behind this number.
    after: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Start { again: bool },
    Look,
    Change(String),
    Write(String),
    Attach,
}

struct World {
    start: Instant,
    now: Instant,
    random: Seeded,
    core: Core,
    server: Server,
    agenda: BTreeMap<(Instant, u64), Happening>,
    count: u64,
    wires: BTreeMap<LinkId, Wire>,
    /// When the network works.
    calm: Instant,
    outage: Option<(Instant, Instant)>,
    asked: BTreeMap<Ticket, Kind>,
    answers: BTreeMap<Ticket, Vec<Result<Value, ExecServerError>>>,
    followed: BTreeMap<RouteId, Followed>,
    statuses: Vec<(Instant, ClientStatus)>,
}

/// So many that some starts are on their way at the very last cut.
const MOST_FOLLOWED: usize = 16;

const DEADLINE: Duration = Duration::from_secs(45);

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let now = Instant::now();
        let mut random = Seeded(seed);
        let settings = Settings {
            asks_for_binary: true,
            client_name: "simulated".to_owned(),
            resume: None,
            take_over: false,
            keep_handles: false,
            retention: None,
            reconnect: true,
            recovery_deadline: DEADLINE,
            connect_timeout: Duration::from_secs(10),
            initialize_timeout: Duration::from_secs(10),
        };
        // Now and then nothing can be reached for longer than a recovery may take.
        let outage = random.one_in(20).then(|| {
            let begin = now + random.millis(8_000);
            (begin, begin + Duration::from_secs(30) + random.millis(30_000))
        });
        let mut world = Self {
            start: now,
            now,
            core: Core::new(settings, now),
            server: Server::new(rules),
            agenda: BTreeMap::new(),
            count: 0,
            wires: BTreeMap::new(),
            calm: outage.map_or(now + Duration::from_secs(10), |(_, end)| end),
            outage,
            asked: BTreeMap::new(),
            answers: BTreeMap::new(),
            followed: BTreeMap::new(),
            statuses: Vec::new(),
            random,
        };
        world.schedule(Duration::from_millis(50), Happening::Application);
        world.schedule(Duration::from_millis(60), Happening::Processes);
        world.drain();
        world
    }

    fn schedule(&mut self, delay: Duration, happening: Happening) {
        self.schedule_at(self.now + delay, happening);
    }

    fn schedule_at(&mut self, at: Instant, happening: Happening) {
        self.count += 1;
        self.agenda.insert((at, self.count), happening);
    }

    fn is_out(&self) -> bool {
        self.outage.is_some_and(|(begin, end)| (begin..end).contains(&self.now))
    }

    /// Runs until nothing happens any more.
    fn run(&mut self) {
        for _step in 0..200_000 {
            let next = self.agenda.keys().next().map(|(at, _)| *at);
            let due = self.core.deadline();
            let Some(at) = next.into_iter().chain(due).min() else { return };
            self.now = self.now.max(at);
            if due.is_some_and(|due| due <= at) {
                self.input(Input::Tick);
            } else if let Some((_, happening)) = self.agenda.pop_first() {
                self.happen(happening);
            }
            let out = self.is_out();
            let open: Vec<LinkId> = self.wires.iter().filter(|(_, wire)| out && !wire.is_cut).map(|(id, _)| *id).collect();
            open.into_iter().for_each(|link| self.cut(link));
        }
        panic!("it does not come to rest");
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Dialled(link) => {
                if self.is_out() || (self.now < self.calm && self.random.one_in(4)) {
                    return self.input(Input::Unreachable { link, reason: "refused".to_owned() });
                }
                self.wires.insert(link, Wire::default());
                if self.now < self.calm {
                    let life = if self.random.one_in(3) { 60 } else { 3_000 };
                    let at = self.now + self.random.millis(life);
                    self.schedule_at(at, Happening::Cut(link));
                }
                self.input(Input::Opened { link });
            }
            Happening::ToServer(link, text) => {
                if self.passes(link, 0) {
                    for (to, text) in self.server.message(link, &text, self.now, &mut self.random) {
                        self.send(to, 1, text);
                    }
                }
            }
            Happening::ToClient(link, text) => {
                if self.passes(link, 1) {
                    let input = match binary_output(&text).filter(|_| self.server.rules.extensions) {
                        Some(message) => Input::Binary { link, message },
                        None => Input::Message { link, text },
                    };
                    self.input(input);
                }
            }
            Happening::Cut(link) => self.cut(link),
            Happening::ClientEnd(link) => self.input(Input::Ended { link, reason: "cut".to_owned() }),
            Happening::ServerEnd(link) => self.server.ended(link),
            Happening::Application => {
                self.application();
                // It works while there is chaos, and takes what comes to the very end.
                if self.now < self.calm + Duration::from_secs(25) {
                    let pause = Duration::from_millis(1) + self.random.millis(150);
                    self.schedule(pause, Happening::Application);
                }
            }
            Happening::Processes => {
                for (to, text) in self.server.go_on(self.now >= self.calm, &mut self.random) {
                    self.send(to, 1, text);
                }
                if self.now < self.calm + Duration::from_secs(20) {
                    let pause = Duration::from_millis(1) + self.random.millis(60);
                    self.schedule(pause, Happening::Processes);
                }
            }
        }
    }

    fn passes(&self, link: LinkId, direction: usize) -> bool {
        let Some(wire) = self.wires.get(&link) else { return false };
        wire.until[direction].is_none_or(|until| self.now <= until)
    }

    fn send(&mut self, link: LinkId, direction: usize, text: String) {
        let delay = self.random.millis(30);
        let Some(wire) = self.wires.get_mut(&link) else { return };
        let at = (self.now + delay).max(wire.last[direction].unwrap_or(self.now));
        wire.last[direction] = Some(at);
        self.schedule_at(at, if direction == 0 { Happening::ToServer(link, text) } else { Happening::ToClient(link, text) });
    }

    fn cut(&mut self, link: LinkId) {
        let ends = [self.now + self.random.millis(25), self.now + self.random.millis(25)];
        // The server may learn late of it, up to what its pings find out.
        let late = if self.random.one_in(3) { self.random.millis(5_000) } else { self.random.millis(50) };
        let Some(wire) = self.wires.get_mut(&link).filter(|wire| !wire.is_cut) else { return };
        wire.is_cut = true;
        wire.until = ends.map(Some);
        self.schedule_at(ends[1] + Duration::from_millis(1), Happening::ClientEnd(link));
        self.schedule_at(ends[0] + Duration::from_millis(1) + late, Happening::ServerEnd(link));
    }

    fn input(&mut self, input: Input) {
        self.core.handle(input, self.now);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(output) = self.core.poll() {
            match output {
                Output::Dial { link } => {
                    let delay = self.random.millis(40);
                    self.schedule(delay, Happening::Dialled(link));
                }
                Output::HangUp { link } => {
                    self.cut(link);
                    if let Some(wire) = self.wires.get_mut(&link) {
                        wire.until[1] = Some(self.start);
                    }
                }
                Output::Send { link, text } => self.send(link, 0, text),
                Output::Ready(outcome) => assert!(outcome.is_ok() || self.statuses.is_empty(), "ready once"),
                Output::Answer { ticket, outcome } => {
                    let outcome = outcome.map(|reply| serde_json::from_str(reply.result.get()).unwrap());
                    self.answers.entry(ticket).or_default().push(outcome);
                }
                Output::Event { route, event, .. } => {
                    let followed = self.followed.get_mut(&route).expect("a route that was asked for");
                    assert!(!followed.has_ended, "nothing follows the end");
                    followed.events.push(event);
                }
                Output::Part { .. } => panic!("nobody asked for a body"),
                Output::End { route } => {
                    let followed = self.followed.get_mut(&route).expect("a route that was asked for");
                    assert!(!followed.has_ended, "one end of {}", followed.process);
                    followed.has_ended = true;
                }
                Output::Status(status) => self.statuses.push((self.now, status)),
            }
        }
    }

    fn application(&mut self) {
        let ready = matches!(self.statuses.last(), Some((_, ClientStatus::Connected { .. } | ClientStatus::Recovering)));
        // The last cut is behind the calm: then too something must be on its way.
        if ready && self.now < self.calm + Duration::from_secs(4) {
            self.count += 1;
            let ticket = self.count;
            match self.random.below(10) {
                0 if self.followed.len() < MOST_FOLLOWED => self.start_one(ticket),
                1 => self.call(ticket, Kind::Look, "look", json!({}), Again::Fail),
                2 => {
                    let name = format!("c{ticket}");
                    self.call(ticket, Kind::Change(name.clone()), "change", json!({"name": name}), Again::Lost);
                }
                3 => {
                    let name = format!("w{ticket}");
                    self.call(ticket, Kind::Write(name.clone()), "process/write", json!({"writeId": name}), Again::Send);
                }
                4 if self.followed.len() < MOST_FOLLOWED => self.attach_one(ticket),
                _ => {}
            }
        }
        let routes: Vec<RouteId> = self.followed.keys().copied().collect();
        for route in routes {
            let patience = self.now < self.calm && !self.random.one_in(3);
            let followed = &self.followed[&route];
            let waits = followed.events.len() - followed.taken;
            let is_over = self.now >= self.calm;
            if waits > 0 && (is_over || !patience) {
                let count = 1 + usize::try_from(self.random.below(waits as u64)).unwrap();
                self.take(route, count);
            }
        }
    }

    fn take(&mut self, route: RouteId, count: usize) {
        let followed = self.followed.get_mut(&route).unwrap();
        let taken = &followed.events[followed.taken..followed.taken + count];
        let seq = taken.iter().filter_map(ProcessEvent::last_seq).max().unwrap_or_default();
        let cost = taken.iter().map(|event| event.size() + EVENT_COST).sum();
        followed.taken += count;
        self.server.may_acknowledge(&followed.process, seq);
        self.input(Input::Taken { route, seq, cost, events: count, gone: false });
    }

    fn start_one(&mut self, ticket: Ticket) {
        let (process, again) = (format!("p{ticket}"), self.server.rules.extensions);
        let operation = again.then(|| format!("o{ticket}"));
        let params = json!({"processId": process, "operationId": operation}).to_string();
        self.follow(ticket, &process, 0);
        self.asked.insert(ticket, Kind::Start { again });
        self.input(Input::Start { ticket, route: ticket, process, params, again, fail_fast: false });
    }

    /// Follows one that the server had before.
    fn attach_one(&mut self, ticket: Ticket) {
        let Some(process) = self.server.unfollowed(&mut self.random) else { return };
        let after = self.random.below(3);
        self.follow(ticket, &process, after);
        self.asked.insert(ticket, Kind::Attach);
        self.input(Input::Attach { ticket, route: ticket, process, after });
    }

    fn follow(&mut self, ticket: Ticket, process: &str, after: u64) {
        let process = process.to_owned();
        let followed = Followed { process, ticket, events: Vec::new(), taken: 0, has_ended: false, after };
        self.followed.insert(ticket, followed);
    }

    fn call(&mut self, ticket: Ticket, kind: Kind, method: &str, params: Value, again: Again) {
        self.asked.insert(ticket, kind);
        let (method, params) = (method.to_owned(), params.to_string());
        self.input(Input::Call { ticket, method, params, again, is_cleanup: false, fail_fast: false });
    }

    /// What must hold whatever happened.
    fn judge(&mut self) {
        let failed = matches!(self.statuses.last(), Some((_, ClientStatus::Failed(_))));
        assert!(
            !failed || self.outage.is_some() || self.statuses.len() <= 1,
            "failed without a long outage: {:?}",
            self.statuses
        );
        let fails = self.statuses.iter().filter(|(_, status)| matches!(status, ClientStatus::Failed(_))).count();
        assert!(fails <= 1, "failed once");
        for pair in self.statuses.windows(2) {
            if pair[0].1 == ClientStatus::Recovering {
                assert!(pair[1].0 - pair[0].0 <= DEADLINE, "never past the deadline");
            }
        }
        assert_eq!(self.answers.len(), self.asked.len(), "every call is answered");
        for (ticket, kind) in &self.asked {
            let answers = &self.answers[ticket];
            assert_eq!(answers.len(), 1, "{kind:?} {ticket} is answered once: {answers:?}");
            self.judge_answer(kind, &answers[0], failed);
        }
        for followed in self.followed.values() {
            self.judge_events(followed, failed);
        }
        assert!(self.server.starts.values().all(|count| *count == 1), "no start is doubled");
        assert!(self.core.pending.end().is_empty(), "nothing waits for ever");
        assert!(failed || self.core.routes.is_empty(), "everything is released: {:?}", self.core.routes);
    }

    fn judge_answer(&self, kind: &Kind, answer: &Result<Value, ExecServerError>, failed: bool) {
        match (kind, answer) {
            (Kind::Change(name), Ok(_)) => assert_eq!(self.server.changes[name], 1),
            (Kind::Change(name), Err(ExecServerError::Lost { .. })) => {
                assert!(self.server.changes.get(name).is_none_or(|count| *count == 1));
            }
            (Kind::Write(name), Ok(_)) => assert_eq!(self.server.writes.iter().filter(|write| *write == name).count(), 1),
            (Kind::Start { again: true }, outcome) => assert!(outcome.is_ok() || failed, "{outcome:?}"),
            (_, Ok(_)) => {}
            (Kind::Start { .. }, Err(ExecServerError::Lost { .. })) => {}
            (Kind::Look, Err(ExecServerError::Disconnected(_))) => {}
            (Kind::Attach, Err(_)) if self.server.rules.most_kept.is_some() => {}
            (_, Err(error)) => assert!(failed, "{kind:?}: {error}"),
        }
    }

    fn judge_events(&self, followed: &Followed, failed: bool) {
        let Followed { process, ticket, events, has_ended, after, .. } = followed;
        let is_ok = self.answers[ticket][0].is_ok();
        let mut last = *after;
        for event in events {
            match event {
                ProcessEvent::Gap { from, to, .. } => {
                    assert!(self.server.rules.extensions && self.server.rules.most_kept.is_some(), "a gap in {process}");
                    assert!(*from == last + 1 && to >= from, "{process}: {from} to {to} after {last}");
                }
                ProcessEvent::Failed { message } => {
                    assert!(failed || self.server.rules.most_kept.is_some(), "{process}: {message}");
                    continue;
                }
                event => {
                    assert_eq!(event.last_seq(), Some(last + 1), "{process} is dense");
                    self.server.is_as_logged(process, event);
                }
            }
            last = event.last_seq().unwrap();
        }
        assert!(*has_ended, "{process} came to its end: {events:?}");
        let is_closed = matches!(events.last(), Some(ProcessEvent::Closed { .. }));
        let is_failed = matches!(events.last(), Some(ProcessEvent::Failed { .. }));
        assert_eq!(is_ok, is_closed || is_failed, "{process}: {:?} and then {events:?}", self.answers[ticket]);
        if !is_ok && !failed && matches!(self.asked[ticket], Kind::Start { .. }) {
            assert!(self.server.is_ended(process), "the clean-up ended {process}");
        }
    }
}

/// What happened in all runs: a test of a thousand runs in which nothing happens shows nothing.
#[derive(Debug, Default)]
struct Tally {
    recoveries: usize,
    failures: usize,
    lost: usize,
    gaps: usize,
    lost_processes: usize,
    events: usize,
}

impl Tally {
    fn add(&mut self, world: &World) {
        let statuses = || world.statuses.iter().map(|(_, status)| status);
        self.recoveries += statuses().filter(|status| **status == ClientStatus::Recovering).count();
        self.failures += statuses().filter(|status| matches!(status, ClientStatus::Failed(_))).count();
        self.lost +=
            world.answers.values().flatten().filter(|answer| matches!(answer, Err(ExecServerError::Lost { .. }))).count();
        for event in world.followed.values().flat_map(|followed| &followed.events) {
            self.events += 1;
            self.gaps += usize::from(matches!(event, ProcessEvent::Gap { .. }));
            self.lost_processes += usize::from(matches!(event, ProcessEvent::Failed { .. }));
        }
    }
}

/// Runs seeds, and names the one that fails.
fn check(rules: Rules, seeds: std::ops::Range<u64>) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds.clone() {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, rules);
            world.run();
            world.judge();
            world
        });
        match run {
            Ok(world) => tally.add(&world),
            Err(_) => panic!("seed {seed} with {rules:?} failed; it alone: check(rules, {seed}..{})", seed + 1),
        }
    }
    let runs = usize::try_from(seeds.end - seeds.start).unwrap();
    assert!(runs < 100 || tally.recoveries > 2 * runs && tally.events > 20 * runs && tally.failures > 0, "{tally:?}");
    tally
}

#[test]
fn nothing_is_lost_or_doubled_over_cuts_by_a_server_without_extensions() {
    let tally = check(Rules { extensions: false, most_kept: None }, 0..700);
    assert!(tally.lost > 100 && tally.gaps == 0, "{tally:?}");
}

#[test]
fn nothing_is_lost_or_doubled_over_cuts_by_a_server_with_extensions() {
    let tally = check(Rules { extensions: true, most_kept: None }, 0..700);
    assert!(tally.lost > 10 && tally.gaps == 0, "{tally:?}");
}

#[test]
fn what_a_server_did_not_keep_is_named() {
    let tally = check(Rules { extensions: true, most_kept: Some(6) }, 0..300);
    assert!(tally.gaps > 100, "{tally:?}");
    let tally = check(Rules { extensions: false, most_kept: Some(6) }, 0..300);
    assert!(tally.lost_processes > 100 && tally.gaps == 0, "{tally:?}");
}

/// Output of an odd number as a server with extensions sends it.
fn binary_output(text: &str) -> Option<Bytes> {
    let mut message: Value = serde_json::from_str(text).unwrap();
    let is_odd = message["params"]["seq"].as_u64().is_some_and(|seq| seq % 2 == 1);
    let chunk = message["params"].as_object_mut().filter(|_| is_odd)?.remove("chunk")?;
    let chunk = portcullis_protocol::base64::decode(chunk.as_str()?).unwrap();
    Some([&portcullis_protocol::binary::before_body(&message.to_string())[..], &chunk].concat().into())
}

/// The words of a request, for the server.
fn request(text: &str) -> Option<(rpc::Id, String, Value)> {
    match rpc::parse(text.as_bytes()).expect("the client sends messages") {
        Message::Request { id, method, params } => {
            let params = params.map_or(Value::Null, |params| serde_json::from_str(params.get()).unwrap());
            Some((id, method.into_owned(), params))
        }
        Message::Notification { .. } | Message::Response { .. } => None,
    }
}

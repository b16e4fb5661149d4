use super::*;
use portcullis_relay::credentials::Bearer;
use portcullis_relay::harness::{Harness, HarnessInput, HarnessOutput};
use portcullis_relay::keys::Identity;
use portcullis_relay::noise::Binding;
use serde_json::json;

const ENVIRONMENT: &str = "box";
const REGISTRATION: &str = "registration-1";

/// A driver that reached its rendezvous, of which there is only what is put in by hand.
struct World {
    drive: Drive,
    executor: PublicKeys,
    links: mpsc::Receiver<Link>,
}

impl World {
    fn new() -> Self {
        let credentials = Arc::new(Bearer::new("token").unwrap());
        let registry = Registry::with("http://127.0.0.1:9", ENVIRONMENT, credentials, None).unwrap();
        let identity = Identity::generate().unwrap();
        let executor = identity.public_keys();
        let registration = json!({
            "environment_id": ENVIRONMENT, "security_profile": "any", "url": "ws://127.0.0.1:9/", "executor_registration_id": REGISTRATION,
        });
        let registered = Registered { registry, identity, registration: serde_json::from_value(registration).unwrap() };
        let (links, opened) = mpsc::channel(16);
        let bounds = Bounds { bytes: 0, metrics: Arc::new(Metrics::new()) };
        let mut drive = Drive::new(registered, Attach::Gateway(links), watch::channel(false).0, bounds);
        drive.handle(MuxInput::Connected);
        Self { drive, executor, links: opened }
    }

    /// A stream of a harness that was let in.
    fn open(&mut self, name: &str) -> StreamKey {
        self.let_in(name).0
    }

    fn let_in(&mut self, name: &str) -> (StreamKey, Harness) {
        let (drive, now) = (&mut self.drive, Instant::now().into_std());
        let binding = Binding { environment: ENVIRONMENT, registration: REGISTRATION, stream: name };
        let harness = Harness::start(&Identity::generate().unwrap(), &self.executor, binding, "may", now);
        let mut harness = harness.unwrap();
        while let Some(HarnessOutput::Send(frame)) = harness.poll(now) {
            drive.handle(MuxInput::Frame(frame));
        }
        let Some(MuxOutput::Validate { stream, .. }) = drive.mux.poll(now) else { panic!("nothing is asked") };
        drive.handle(MuxInput::Validated { stream, is_allowed: true });
        drive.carry_out();
        for frame in drive.unsent.drain(..) {
            harness.handle(HarnessInput::Frame(frame), now);
        }
        assert_eq!(harness.poll(now), Some(HarnessOutput::Opened));
        (stream, harness)
    }
}

#[tokio::test]
async fn a_stream_that_was_ended_for_what_it_holds_is_not_chosen_again() {
    let mut world = World::new();
    let longest = Bytes::from(vec![0; MAX_MESSAGE]);
    let streams = [("a", 3), ("b", 2), ("c", 1)].map(|(name, messages)| {
        let stream = world.open(name);
        for _ in 0..messages {
            world.drive.streams[&stream].send(longest.clone()).unwrap();
        }
        stream
    });
    // One of them is over already, and nobody took yet what it left. No pump has its turn before the end of this test.
    let drive = &mut world.drive;
    drive.handle(MuxInput::Abort(streams[0]));
    drive.carry_out();
    assert!(!drive.mux.held().any(|(stream, _)| stream == streams[0]));
    let turns = (0..10).take_while(|_| {
        let has_ended_one = drive.shed();
        drive.carry_out();
        has_ended_one
    });
    assert_eq!(turns.count(), 2, "the one that holds most and the next one, and then all hold little enough");
    assert_eq!(drive.mux.held().map(|(stream, _)| stream).collect::<Vec<_>>(), [streams[2]]);
    assert_eq!(streams.map(|stream| drive.streams[&stream].held() >= MAX_MESSAGE), [false, false, true]);
    world.drive.end().await;
}

#[tokio::test]
async fn a_thousand_small_messages_at_once_are_delivered() {
    let mut world = World::new();
    let (stream, mut harness) = world.let_in("a");
    let drive = &mut world.drive;
    let now = Instant::now().into_std();
    // No pump has its turn before all are here.
    for number in 0..1000 {
        harness.queue(number.to_string().into()).unwrap();
        while let Some(HarnessOutput::Send(frame)) = harness.poll(now) {
            drive.handle(MuxInput::Frame(frame));
        }
        drive.carry_out();
        for frame in std::mem::take(&mut drive.unsent) {
            harness.handle(HarnessInput::Frame(frame), now);
        }
    }
    assert!(drive.mux.held().any(|(open, _)| open == stream), "it was not ended");
    let mut link = world.links.recv().await.unwrap();
    for number in 0..1000 {
        assert_eq!(link.incoming.recv().await.unwrap().bytes, number.to_string());
    }
    world.drive.end().await;
}

#[tokio::test]
async fn what_is_due_waits_for_a_socket_that_takes_nothing() {
    let mut world = World::new();
    world.open("a");
    let drive = &mut world.drive;
    assert!(drive.deadline().is_some(), "the stream has a heartbeat to send");
    drive.unsent.resize(UNSENT, Bytes::from_static(b"frame"));
    assert_eq!(drive.deadline(), None);
    drive.unsent.pop_front();
    assert!(drive.deadline().is_some());
    world.drive.end().await;
}

#[tokio::test]
async fn a_dial_that_panics_ends_the_driver_with_an_error() {
    let mut drive = World::new().drive;
    drive.way = None;
    drive.dials.spawn(async { panic!("by the test") });
    let ended = timeout(Duration::from_secs(10), drive.run(CancellationToken::new())).await;
    let error = ended.expect("it does not wait for a dial that is gone").unwrap_err().to_string();
    assert!(error.contains("dial the rendezvous") && error.contains("by the test"), "{error}");
}

//! Attacks on remote mode with the real programs: whoever is a harness, the rendezvous or the registry lies. What is wrong ends its
//! stream and no other, and no log repeats a secret.

mod fake;

use fake::{Fake, Peer, REGISTRATION, Reply, SECRETS, binding, http, knock, registered};
use portcullis_relay::frame::Body;
use portcullis_relay::keys::Identity;
use portcullis_relay::mux::{MAX_FAILURES, MAX_STREAMS, PAUSE};
use portcullis_relay::noise::{Binding, Pending};
use portcullis_relay::registry::Registry;
use portcullis_tests::{PATIENCE, Place, Program, portcullis};
use serde_json::{Value, json};
use std::fs::File;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;
use tokio_tungstenite::tungstenite::Message;

/// A program that logs all there is into a file, since a pipe would fill.
struct Logged {
    program: Program,
    place: Place,
}

impl Logged {
    fn start(mut command: Command) -> Self {
        let place = Place::new();
        command.env("RUST_LOG", "trace").stderr(Stdio::from(File::create(place.path("log")).unwrap()));
        Self { program: Program::start(command), place }
    }

    fn executor(url: &str) -> Self {
        let mut command = portcullis(&["serve", "--remote", url, "--environment-id", "box"]);
        command.env("PORTCULLIS_EXECUTOR_TOKEN", SECRETS[2]);
        Self::start(command)
    }

    fn client(url: &str) -> Self {
        let workspace = std::env::temp_dir().to_str().unwrap().to_owned();
        let mut command =
            portcullis(&["exec", "--remote", url, "--environment-id", "box", "--workspace", &workspace, "--", "echo", "marker"]);
        command.env("PORTCULLIS_HARNESS_TOKEN", SECRETS[2]);
        Self::start(command)
    }

    /// Waits for its end, and answers its status and what it said; nothing of that is a secret.
    async fn end(mut self) -> (i32, String) {
        let status = self.program.wait().await;
        let log = self.place.content("log");
        for secret in SECRETS.into_iter().chain(["mark-of-a-message", "mark-of-a-token-as-well"]) {
            assert!(!log.contains(secret), "{secret} is in the log:\n{log}");
        }
        (status, log)
    }
}

/// An executor whose registry lets everybody in who has the authorization.
async fn executor() -> (Logged, Fake, Peer) {
    executor_of(|name, question, address| match name {
        "validate" => Reply::Json(json!({"valid": question["harness_key_authorization"] == SECRETS[1]})),
        _ => Reply::Json(registered(address)),
    })
    .await
}

async fn executor_of(answer: impl Fn(&str, &Value, &str) -> Reply + Send + Sync + 'static) -> (Logged, Fake, Peer) {
    let mut fake = Fake::start(answer).await;
    let mut executor = Logged::executor(&fake.url);
    let keys = serde_json::from_value(fake.question("register").await["executor_public_key"].clone()).unwrap();
    let peer = Peer::new(fake.socket().await, keys);
    executor.program.line().await;
    (executor, fake, peer)
}

async fn finish(executor: Logged) {
    executor.program.signal(rustix::process::Signal::TERM);
    let (status, log) = executor.end().await;
    assert_eq!(status, 0, "{log}");
    // The control: it does log.
    assert!(log.contains("the rendezvous was reached"), "{log}");
}

#[tokio::test]
async fn records_that_are_wrong_end_their_stream_and_no_other() {
    let (executor, _fake, mut peer) = executor().await;
    let mut control = peer.greeted("control").await;
    // What is no frame of a stream is dropped.
    for message in [
        Message::Binary(vec![0xff; 500].into()),
        Message::Binary(Vec::new().into()),
        Message::text("{\"id\":1,\"method\":\"initialize\"}"),
        Message::Ping(vec![1; 100].into()),
    ] {
        futures_util::SinkExt::send(&mut peer.socket, message).await.unwrap();
        peer.works(&mut control).await;
    }
    type Change = fn(u32, Vec<u8>) -> (u32, Vec<u8>);
    let changes: [(&str, Change); 7] = [
        ("truncated", |seq, mut bytes| (seq, bytes.split_off(1))),
        ("shortened", |seq, mut bytes| {
            bytes.pop();
            (seq, bytes)
        }),
        ("tiny", |seq, bytes| (seq, bytes[..1].to_vec())),
        ("tampered", |seq, mut bytes| {
            bytes[3] ^= 1;
            (seq, bytes)
        }),
        ("far-ahead", |seq, bytes| (seq + 65, bytes)),
        ("oversized", |seq, bytes| (seq, bytes.repeat(65_536 / bytes.len() + 1))),
        ("foreign", |seq, _bytes| (seq, vec![7; 64])),
    ];
    for (name, change) in changes {
        let mut stream = peer.greeted(name).await;
        let Body::Record { seq, payload } = stream.record(&json!({"method": "initialized"})) else { unreachable!() };
        let (seq, payload) = change(seq, payload.to_vec());
        peer.send(name, Body::Record { seq, payload: payload.into() }).await;
        peer.is_reset(name).await;
        peer.works(&mut control).await;
        // What comes afterwards is for nobody.
        peer.send(name, stream.record(&json!({"method": "initialized"}))).await;
        peer.is_reset(name).await;
    }
    // One that came already is nothing new under its own number, and wrong under another.
    let mut stream = peer.greeted("replayed").await;
    let record = stream.record(&json!({"method": "initialized"}));
    let Body::Record { seq, payload } = record.clone() else { unreachable!() };
    peer.send("replayed", record.clone()).await;
    peer.send("replayed", record).await;
    peer.works(&mut stream).await;
    peer.send("replayed", Body::Record { seq: seq + 2, payload }).await;
    peer.is_reset("replayed").await;
    peer.works(&mut control).await;
    // A length that no message has.
    let mut stream = peer.open("lengthy").await;
    let payload = stream.channel.seal(&u32::MAX.to_be_bytes()).unwrap();
    peer.send("lengthy", Body::Record { seq: 0, payload }).await;
    peer.is_reset("lengthy").await;
    peer.works(&mut control).await;
    finish(executor).await;
}

#[tokio::test]
async fn eight_wrong_handshakes_pause_admission_and_nothing_else() {
    let (executor, mut fake, mut peer) = executor().await;
    let mut control = peer.greeted("control").await;
    fake.question("validate").await;
    let others = Identity::generate().unwrap().public_keys();
    let of = |environment: &'static str, registration: &'static str, stream: &'static str| Binding {
        environment,
        registration,
        stream,
    };
    let honest = knock(&peer.keys, binding("wrong"), SECRETS[1]).1;
    let wrong = [
        knock(&peer.keys, of("another", REGISTRATION, "wrong"), SECRETS[1]).1,
        knock(&peer.keys, of("box", "registration-two", "wrong"), SECRETS[1]).1,
        knock(&peer.keys, of("box", REGISTRATION, "right"), SECRETS[1]).1,
        knock(&others, binding("wrong"), SECRETS[1]).1,
        honest[..honest.len() - 1].to_vec(),
        // The same algorithms without the post-quantum ones would be so long.
        vec![9; 32 + 48 + 16 + SECRETS[1].len()],
        vec![9; 65_536],
    ];
    for payload in wrong {
        peer.send("wrong", Body::Handshake { payload: payload.into() }).await;
        peer.is_reset("wrong").await;
        peer.works(&mut control).await;
    }
    assert!(fake.questions.is_empty(), "the registry was asked about what could not be read");
    // One that the registry does not know is asked about; it is the eighth.
    assert_eq!(MAX_FAILURES, 8);
    let payload = knock(&peer.keys, binding("unknown"), "mark-of-a-token-as-well").1;
    peer.send("unknown", Body::Handshake { payload: payload.into() }).await;
    peer.is_reset("unknown").await;
    assert_eq!(fake.question("validate").await["harness_key_authorization"], "mark-of-a-token-as-well");
    // Now nobody is let in, and the registry not asked, but who was in goes on.
    let paused = Instant::now();
    peer.send("wrong", Body::Handshake { payload: honest.clone().into() }).await;
    peer.is_reset("wrong").await;
    assert!(fake.questions.is_empty());
    peer.works(&mut control).await;
    // Nothing tells of the end of a pause, so this tries once in a while.
    let mut tries = tokio::time::interval(Duration::from_millis(200));
    let answered = loop {
        tries.tick().await;
        assert!(paused.elapsed() < PAUSE + PATIENCE, "nobody is let in any more");
        peer.send("wrong", Body::Handshake { payload: honest.clone().into() }).await;
        match peer.body_of("wrong").await {
            Body::Reset { .. } => peer.works(&mut control).await,
            answer => break answer,
        }
    };
    assert!(matches!(answered, Body::Handshake { .. }), "{answered:?}");
    peer.works(&mut control).await;
    finish(executor).await;
}

#[tokio::test]
async fn data_before_the_answer_ends_the_attempt() {
    // This registry takes its time.
    let answer = |name: &str, question: &Value, address: &str| match name {
        "validate" if question["harness_key_authorization"] == SECRETS[1] => Reply::Json(json!({"valid": true})),
        "validate" => Reply::Never,
        _ => Reply::Json(registered(address)),
    };
    let (executor, mut fake, mut peer) = executor_of(answer).await;
    let mut control = peer.greeted("control").await;
    fake.question("validate").await;
    let payload = knock(&peer.keys, binding("early"), "slow").1;
    peer.send("early", Body::Handshake { payload: payload.into() }).await;
    fake.question("validate").await;
    peer.send("early", Body::Record { seq: 0, payload: vec![0; 64].into() }).await;
    peer.is_reset("early").await;
    peer.works(&mut control).await;
    finish(executor).await;
}

#[tokio::test]
async fn streams_are_bounded_and_one_that_ends_makes_room() {
    let (executor, _fake, mut peer) = executor().await;
    let mut control = peer.greeted("control").await;
    for nth in 1..MAX_STREAMS {
        peer.open(&format!("stream-{nth}")).await;
    }
    let payload = knock(&peer.keys, binding("one-more"), SECRETS[1]).1;
    peer.send("one-more", Body::Handshake { payload: payload.clone().into() }).await;
    peer.is_reset("one-more").await;
    peer.works(&mut control).await;
    peer.send("stream-1", Body::Reset { reason: "enough".to_owned() }).await;
    peer.send("one-more", Body::Handshake { payload: payload.into() }).await;
    assert!(matches!(peer.body_of("one-more").await, Body::Handshake { .. }));
    peer.works(&mut control).await;
    finish(executor).await;
}

/// A refusal in the words of the wire.
fn refused(before: &str, token: &str) -> Reply {
    let error = json!({"error": {"code": format!("code {token}"), "message": format!("{before}{token}")}});
    Reply::Raw(http("401 Unauthorized", &error.to_string()))
}

/// What no registry may answer, by what is said of it then.
fn lies(honest: &Value) -> Vec<(&'static str, Reply)> {
    let with = |member: &str, value: Value| {
        let mut answer = honest.clone();
        answer[member] = value;
        Reply::Json(answer)
    };
    let huge = http("200 OK", &" ".repeat(10 << 20));
    vec![
        ("it is about another environment", with("environment_id", json!("another"))),
        ("its security profile is not known", with("security_profile", json!("none"))),
        ("a member of it is blank", with("url", json!(" "))),
        ("a member of it is blank", with("executor_registration_id", json!(""))),
        ("the environment registry's answer cannot be used", with("url", json!(7))),
        ("the environment registry's answer cannot be used", Reply::Raw(http("200 OK", "[mark-of-the-url"))),
        ("length limit exceeded", Reply::Raw(huge)),
        // Its words are for people, and it may not choose what their terminal does.
        ("(403): no\u{fffd}]0;title", Reply::Raw(http("403 Forbidden", "no\u{1b}]0;title"))),
        ("(401): \u{fffd}(the token)", refused("\u{1b}", SECRETS[2])),
    ]
}

#[tokio::test]
async fn an_executor_believes_no_lie_of_its_registry() {
    for nth in 0.. {
        let Some((said, _)) = lies(&registered("")).into_iter().nth(nth) else { break };
        let fake = Fake::start(move |_name, _question, address| lies(&registered(address)).swap_remove(nth).1).await;
        let (status, log) = Logged::executor(&fake.url).end().await;
        assert_eq!(status, 1, "{nth}");
        assert!(log.contains(said), "{nth}: {said}\n{log}");
        assert!(fake.sockets.is_empty());
    }
}

#[tokio::test]
async fn a_client_believes_no_lie_of_its_registry() {
    let keys = Identity::generate().unwrap().public_keys();
    let honest = move |address: &str| {
        let mut honest = registered(address);
        honest["executor_public_key"] = serde_json::to_value(&keys).unwrap();
        honest["harness_key_authorization"] = json!(SECRETS[1]);
        honest
    };
    let all = move |address: &str| {
        let honest = honest(address);
        let mut all = lies(&honest);
        let mut other = |member: &str, value: Value, said| {
            let mut answer = honest.clone();
            answer[member] = value;
            all.push((said, Reply::Json(answer)));
        };
        other("harness_key_authorization", json!(""), "a member of it is blank");
        let mut keys = honest["executor_public_key"].clone();
        keys["suite"] = json!("Noise_IK_25519_AESGCM_SHA256");
        other("executor_public_key", keys, "the environment registry's answer cannot be used");
        other("harness_key_authorization", json!("x".repeat(4097)), "authorization");
        all
    };
    for nth in 0.. {
        let Some((said, _)) = all("").into_iter().nth(nth) else { break };
        let all = all.clone();
        let fake = Fake::start(move |_name, _question, address| all(address).swap_remove(nth).1).await;
        let (status, log) = Logged::client(&fake.url).end().await;
        assert_eq!(status, 125, "{nth}");
        assert!(log.contains(said), "{nth}: {said}\n{log}");
    }
}

#[tokio::test]
async fn nobody_follows_a_redirect_of_the_registry() {
    let mut elsewhere = Fake::start(|_name, _question, address| Reply::Json(registered(address))).await;
    let to = elsewhere.url.clone();
    let answer = format!("HTTP/1.1 307 Temporary Redirect\r\nlocation: {to}/cloud/environment/box/register?{}\r\n", SECRETS[0]);
    let answer = answer + "content-length: 0\r\nconnection: close\r\n\r\n";
    let fake = Fake::start(move |_name, _question, _address| Reply::Raw(answer.clone().into_bytes())).await;
    for (program, status) in [(Logged::executor(&fake.url), 1), (Logged::client(&fake.url), 125)] {
        let (ended, log) = program.end().await;
        assert_eq!(ended, status);
        assert!(log.contains("(307)"), "{log}");
    }
    assert!(elsewhere.questions.is_empty());
    // The control: who asks there is answered.
    let mut executor = Logged::executor(&to);
    elsewhere.question("register").await;
    executor.program.line().await;
    finish(executor).await;
}

#[tokio::test]
async fn a_registry_that_never_answers_is_not_waited_for() {
    let fake = Fake::start(|_name, _question, _address| Reply::Never).await;
    let (executor, client) = (Logged::executor(&fake.url), Logged::client(&fake.url));
    for (program, status, said) in [(executor, 1, "nothing was answered within 10 s"), (client, 125, "no connection within 10 s")]
    {
        let (ended, log) = program.end().await;
        assert_eq!(ended, status);
        assert!(log.contains(said), "{log}");
    }
}

/// What answers a client's handshake: the first message, and who was meant.
type Answer = fn(&[u8], &Identity, &str) -> Body;

#[tokio::test]
async fn a_client_is_answered_by_the_executor_that_was_meant_or_by_nobody() {
    fn honest(message: &[u8], identity: &Identity, stream: &str) -> Vec<u8> {
        Pending::read(identity, binding(stream), message).unwrap().accept().unwrap().0
    }
    let answers: [(&str, Answer); 6] = [
        ("let in", |message, identity, stream| Body::Handshake { payload: honest(message, identity, stream).into() }),
        ("garbage", |_message, _identity, _stream| Body::Handshake { payload: vec![5; 3424].into() }),
        ("tampered", |message, identity, stream| {
            let mut answer = honest(message, identity, stream);
            answer[40] ^= 1;
            Body::Handshake { payload: answer.into() }
        }),
        ("early", |_message, _identity, _stream| Body::Record { seq: 0, payload: vec![5; 64].into() }),
        ("reset", |_message, _identity, _stream| Body::Reset { reason: "mark-of-the-url".to_owned() }),
        // Who has other keys cannot read the first message, and so not answer it.
        ("another", |message, _identity, stream| {
            let another = Identity::generate().unwrap();
            assert!(Pending::read(&another, binding(stream), message).is_err());
            Body::Handshake { payload: knock(&another.public_keys(), binding(stream), "").1.into() }
        }),
    ];
    for (name, answer) in answers {
        let identity = Identity::generate().unwrap();
        let keys = serde_json::to_value(identity.public_keys()).unwrap();
        let mut fake = Fake::start(move |_name, _question, address| {
            let mut bundle = registered(address);
            bundle["executor_public_key"] = keys.clone();
            bundle["harness_key_authorization"] = json!(SECRETS[1]);
            Reply::Json(bundle)
        })
        .await;
        let client = Logged::client(&fake.url);
        let mut peer = Peer::new(fake.socket().await, identity.public_keys());
        let (stream, message) = peer.first_message().await;
        peer.send(&stream, answer(&message, &identity, &stream)).await;
        if name == "let in" {
            // It greets whom it trusts.
            assert!(matches!(peer.body_of(&stream).await, Body::Record { seq: 0, .. }));
            drop(peer);
        }
        let (status, log) = client.end().await;
        assert_eq!(status, 125, "{name}: {log}");
    }
}

/// A harness goes while its executor sends: the rendezvous must tell, or a session of that stream stays taken for ever.
#[tokio::test]
async fn an_executor_hears_of_every_harness_that_goes() {
    let place = Place::new();
    place.put("executor", SECRETS[2]);
    place.put("harness", "mark-of-a-token-as-well");
    let [executors, harnesses] = ["executor", "harness"].map(|name| place.path(name).to_str().unwrap().to_owned());
    let files = ["rendezvous", "--executor-token-file", &executors, "--harness-token-file", &harnesses];
    let mut rendezvous = Logged::start(portcullis(&files));
    let url = rendezvous.program.line().await;
    let [executor, harness] =
        [SECRETS[2], "mark-of-a-token-as-well"].map(|token| Registry::new(&url, "box", token, None).unwrap());
    let keys = Identity::generate().unwrap().public_keys();
    let registration = executor.register(&keys).await.unwrap();
    let (socket, _answer) = tokio_tungstenite::connect_async(&registration.url).await.unwrap();
    let mut executor = Peer::new(socket, keys.clone());
    for nth in 0..50 {
        let name = format!("stream-{nth}");
        let bundle = loop {
            // The rendezvous has taken the executor's socket, but may not know yet that it serves.
            if let Ok(bundle) = harness.connect(&keys).await {
                break bundle;
            }
        };
        let (socket, _answer) = tokio_tungstenite::connect_async(&bundle.url).await.unwrap();
        let mut gone = Peer::new(socket, keys.clone());
        gone.send(&name, Body::Resume { next_seq: 0 }).await;
        assert_eq!(executor.body_of(&name).await, Body::Resume { next_seq: 0 });
        drop(gone);
        for seq in 0..20 {
            executor.send(&name, Body::Record { seq, payload: vec![1; 20_000].into() }).await;
        }
        executor.is_reset(&name).await;
    }
    rendezvous.program.signal(rustix::process::Signal::TERM);
    let (status, log) = rendezvous.end().await;
    assert_eq!(status, 0, "{log}");
}

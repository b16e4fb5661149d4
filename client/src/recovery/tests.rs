//! The machine, input by input.

mod binary;
mod simulation;

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

struct Bench {
    core: Core,
    now: Instant,
    /// What was to be done, in words.
    done: Vec<String>,
    sent: Vec<Value>,
    answers: Vec<(Ticket, Result<String, ExecServerError>)>,
    /// Those with bytes.
    replies: Vec<(Ticket, Result<Reply, ExecServerError>)>,
    events: Vec<ProcessEvent>,
}

fn settings() -> Settings {
    Settings {
        asks_for_binary: true,
        client_name: "test".to_owned(),
        resume: None,
        take_over: false,
        keep_handles: true,
        retention: None,
        reconnect: true,
        recovery_deadline: Duration::from_secs(45),
        connect_timeout: Duration::from_secs(10),
        initialize_timeout: Duration::from_secs(10),
    }
}

impl Bench {
    fn new(settings: Settings) -> Self {
        let now = Instant::now();
        let core = Core::new(settings, now);
        let (done, sent, answers, replies, events) = Default::default();
        let mut bench = Self { core, now, done, sent, answers, replies, events };
        bench.drain();
        bench
    }

    /// A client that is connected over link 1 to a server with these extensions.
    fn connected(extensions: &Value) -> Self {
        let mut bench = Self::new(settings());
        bench.input(Input::Opened { link: 1 });
        bench.initialized(1, extensions);
        bench.done.clear();
        bench.sent.clear();
        bench
    }

    fn initialized(&mut self, link: LinkId, extensions: &Value) {
        let info = json!({"shell": {"name": "sh", "path": "/bin/sh"}, "extensions": extensions});
        self.answer(link, "initialize", &json!({"result": {"sessionId": "s", "environmentInfo": info}}));
    }

    fn input(&mut self, input: Input) {
        self.core.handle(input, self.now);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(output) = self.core.poll() {
            match output {
                Output::Dial { link } => self.done.push(format!("dial {link}")),
                Output::HangUp { link } => self.done.push(format!("hang up {link}")),
                Output::Send { text, .. } => self.sent.push(serde_json::from_str(&text).unwrap()),
                Output::Ready(outcome) => self.done.push(format!("ready {}", outcome.is_ok())),
                Output::Answer { ticket, outcome: Ok(reply) } if reply.body.is_some() => self.replies.push((ticket, Ok(reply))),
                Output::Answer { ticket, outcome } => {
                    self.answers.push((ticket, outcome.map(|reply| reply.result.get().to_owned())));
                }
                Output::Event { event, .. } => self.events.push(event),
                Output::Part { part, .. } => self.done.push(format!("part {part:?}")),
                Output::End { route } => self.done.push(format!("end {route}")),
                Output::Status(status) => self.done.push(format!("{status:?}")),
            }
        }
    }

    /// The server answers the last call of a method.
    fn answer(&mut self, link: LinkId, method: &str, outcome: &Value) {
        let call = self.sent.iter().rev().find(|sent| sent["method"] == method);
        let mut text = call.unwrap_or_else(|| panic!("{method} in {:?}", self.sent)).clone();
        text.as_object_mut().unwrap().retain(|key, _| key == "id");
        text.as_object_mut().unwrap().extend(outcome.as_object().unwrap().clone());
        self.message(link, &text);
    }

    fn message(&mut self, link: LinkId, message: &Value) {
        self.input(Input::Message { link, text: message.to_string() });
    }

    fn ended(&mut self, link: LinkId) {
        self.input(Input::Ended { link, reason: "cut".to_owned() });
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.input(Input::Tick);
    }

    fn call(&mut self, ticket: Ticket, method: &str, again: Again, fail_fast: bool) {
        let (method, params) = (method.to_owned(), "{}".to_owned());
        self.input(Input::Call { ticket, method, params, again, is_cleanup: false, fail_fast });
    }

    fn start(&mut self, ticket: Ticket, again: bool) {
        let (process, params) = ("p".to_owned(), json!({"processId": "p"}).to_string());
        self.input(Input::Start { ticket, route: ticket, process, params, again, fail_fast: false });
    }

    fn methods(&self) -> Vec<&str> {
        self.sent.iter().map(|sent| sent["method"].as_str().unwrap()).collect()
    }

    fn output(&mut self, link: LinkId, seq: u64, chunk: &str) {
        let params = json!({"processId": "p", "seq": seq, "stream": "stdout", "chunk": chunk});
        self.message(link, &json!({"method": "process/output", "params": params}));
    }

    fn clear(&mut self) {
        self.done.clear();
        self.sent.clear();
    }
}

fn lost(method: &str) -> ExecServerError {
    ExecServerError::Lost { method: method.to_owned(), reason: "cut".to_owned() }
}

#[test]
fn a_cut_is_recovered_from_with_the_same_session_and_an_older_link_changes_nothing() {
    let mut bench = Bench::connected(&json!({}));
    bench.ended(1);
    assert_eq!(bench.done, ["hang up 1", "Recovering", "dial 2"]);
    bench.input(Input::Opened { link: 2 });
    assert_eq!(bench.sent[0]["params"]["resumeSessionId"], "s");
    bench.ended(1);
    bench.input(Input::Message { link: 1, text: "no message".to_owned() });
    bench.input(Input::Opened { link: 1 });
    assert_eq!(bench.done.pop().unwrap(), "hang up 1", "a connection that nobody wants");
    bench.clear();
    bench.message(2, &json!({"id": 2, "result": {"sessionId": "s"}}));
    assert_eq!((bench.methods(), bench.done.clone()), (vec!["initialized"], vec!["Connected { generation: 2 }".to_owned()]));
}

#[test]
fn what_may_pass_is_tried_again_after_100_ms_and_never_past_the_one_deadline() {
    let mut bench = Bench::connected(&json!({}));
    let begin = bench.now;
    bench.ended(1);
    let mut tries = 0;
    while !bench.core.has_failed() {
        let link = bench.core.links;
        match tries % 4 {
            0 => bench.input(Input::Unreachable { link, reason: "HTTP 503".to_owned() }),
            1 => {
                bench.input(Input::Opened { link });
                bench.answer(link, "initialize", &json!({"error": {"code": -32010, "message": "attached"}}));
            }
            2 => {
                bench.input(Input::Opened { link });
                bench.ended(link);
            }
            // No answer at all: after 10 s that is one more.
            _ => bench.input(Input::Opened { link }),
        }
        tries += 1;
        let until = bench.core.deadline().expect("it waits for something");
        bench.now = until;
        bench.input(Input::Tick);
        if bench.core.link() == Some(link) {
            panic!("{tries}: the deadline of the attempt is passed");
        } else if bench.core.link().is_none() && !bench.core.has_failed() {
            assert_eq!(bench.core.deadline(), Some((until + RETRY).min(begin + Duration::from_secs(45))));
            bench.now = bench.core.deadline().unwrap();
            bench.input(Input::Tick);
        }
    }
    assert_eq!(bench.now - begin, Duration::from_secs(45));
    let failed = bench.done.last().unwrap();
    assert!(failed.contains("disconnected: cut; failed to resume exec-server session: recovery timed out after 45s"), "{failed}");
    assert!(tries > 12);
}

#[test]
fn what_cannot_pass_fails_once_and_the_first_text_stays() {
    for (answer, expect) in [
        (json!({"error": {"code": -32600, "message": "unknown session id s"}}), "unknown session id s"),
        (json!({"result": {"sessionId": "other"}}), "exec-server initialized an unexpected session"),
        (json!({"result": {}}), "not understood"),
    ] {
        let mut bench = Bench::connected(&json!({}));
        bench.start(7, false);
        bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
        bench.ended(1);
        bench.call(8, "fs/writeFile", Again::Lost, false);
        bench.input(Input::Opened { link: 2 });
        bench.answer(2, "initialize", &answer);
        let ExecServerError::Failed(text) = bench.answers.last().unwrap().1.clone().unwrap_err() else { panic!() };
        assert!(text.starts_with("exec-server transport disconnected: cut; failed to resume") && text.contains(expect), "{text}");
        assert_eq!(bench.events, [ProcessEvent::Failed { message: text.clone() }]);
        bench.ended(2);
        bench.pass(Duration::from_secs(100));
        bench.call(9, "fs/readFile", Again::Fail, false);
        assert_eq!(bench.answers.last().unwrap().1, Err(ExecServerError::Failed(text)));
        assert_eq!(bench.done.iter().filter(|done| done.starts_with("Failed")).count(), 1);
    }
}

#[test]
fn without_a_way_back_a_cut_is_the_end() {
    let mut bench = Bench::new(Settings { reconnect: false, ..settings() });
    bench.input(Input::Opened { link: 1 });
    bench.initialized(1, &json!({}));
    bench.call(1, "fs/writeFile", Again::Lost, false);
    bench.call(2, "fs/readFile", Again::Fail, false);
    bench.ended(1);
    let expect = [(1, Err(lost("fs/writeFile"))), (2, Err(ExecServerError::Disconnected("cut".to_owned())))];
    assert_eq!(bench.answers, expect);
    assert!(bench.done.contains(&"Failed(\"exec-server transport disconnected: cut\")".to_owned()), "{:?}", bench.done);
}

#[test]
fn calls_wait_fail_fast_or_are_sent_again() {
    let mut bench = Bench::connected(&json!({}));
    bench.call(1, "process/write", Again::Send, false);
    bench.call(2, "fs/copy", Again::Lost, false);
    bench.ended(1);
    bench.call(3, "fs/copy", Again::Lost, false);
    bench.call(4, "fs/copy", Again::Lost, true);
    assert_eq!(bench.answers, [(2, Err(lost("fs/copy"))), (4, Err(ExecServerError::Recovering))]);
    bench.input(Input::Opened { link: 2 });
    bench.clear();
    bench.message(2, &json!({"id": 4, "result": {"sessionId": "s"}}));
    assert_eq!(bench.methods(), ["initialized", "process/write", "fs/copy"]);
}

#[test]
fn a_resume_drains_notifications_before_the_answer_to_initialize() {
    let mut bench = Bench::connected(&json!({}));
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    bench.output(1, 1, "YQ==");
    bench.ended(1);
    bench.input(Input::Opened { link: 2 });
    // A resume redirects at once: 2 was missed, 3 comes before the answer, and more than can wait does.
    for seq in 3..=600 {
        bench.output(2, seq, "eA==");
    }
    assert_eq!(bench.events.len(), 1);
    bench.message(2, &json!({"id": 3, "result": {"sessionId": "s"}}));
    assert!(!bench.done.contains(&"Connected { generation: 2 }".to_owned()), "not before it was caught up");
    let chunks = |range: std::ops::Range<u64>| -> Vec<Value> {
        range.map(|seq| json!({"seq": seq, "stream": "stdout", "chunk": "eA=="})).collect()
    };
    let read = json!({"result": {"chunks": chunks(2..500), "nextSeq": 500, "closed": false}});
    bench.answer(2, "process/read", &read);
    assert_eq!(bench.sent.last().unwrap()["params"]["afterSeq"], 499, "600 came and could not wait: on from there");
    let read = json!({"result": {"chunks": chunks(500..601), "nextSeq": 601, "closed": false}});
    bench.answer(2, "process/read", &read);
    assert_eq!(bench.done.last().unwrap(), "Connected { generation: 2 }");
    bench.output(2, 601, "eA==");
    let seqs: Vec<u64> = bench.events.iter().filter_map(ProcessEvent::last_seq).collect();
    assert_eq!(seqs, (1..=601).collect::<Vec<_>>());
}

#[test]
fn a_process_that_cannot_be_caught_up_ends_and_the_others_go_on() {
    let mut bench = Bench::connected(&json!({}));
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    bench.ended(1);
    bench.input(Input::Opened { link: 2 });
    bench.message(2, &json!({"id": 3, "result": {"sessionId": "s"}}));
    bench.answer(2, "process/read", &json!({"result": {"chunks": [], "nextSeq": 9, "closed": false}}));
    let reason = "failed to recover process p: process events are no longer retained while recovering through sequence 8";
    assert_eq!(bench.events, [ProcessEvent::Failed { message: reason.to_owned() }]);
    assert_eq!(bench.methods().last(), Some(&"process/terminate"));
    assert!(bench.done.contains(&"Connected { generation: 2 }".to_owned()));
    bench.start(5, false);
    assert_eq!(bench.answers.last().unwrap().1, Err(ExecServerError::InUse("p".to_owned())), "until it is ended");
    bench.answer(2, "process/terminate", &json!({"result": {"running": true}}));
    bench.start(6, false);
    assert_eq!(bench.methods().last(), Some(&"process/start"));
}

#[test]
fn a_start_whose_answer_is_lost_is_ended_in_the_background_also_over_another_cut() {
    let mut bench = Bench::connected(&json!({}));
    bench.start(1, false);
    bench.ended(1);
    assert_eq!(bench.answers, [(1, Err(lost("process/start")))]);
    for link in [2, 3] {
        bench.input(Input::Opened { link });
        bench.answer(link, "initialize", &json!({"result": {"sessionId": "s"}}));
        assert_eq!(bench.methods().last(), Some(&"process/terminate"));
        bench.start(4, false);
        assert!(matches!(bench.answers.last().unwrap().1, Err(ExecServerError::InUse(_))));
        if link == 2 {
            bench.ended(2);
        }
    }
    bench.answer(3, "process/terminate", &json!({"result": {"running": false}}));
    bench.start(5, false);
    // A clean-up of the old one, however late, is not one of the new one.
    bench.input(Input::Abandon { route: 1 });
    assert_eq!(bench.methods().last(), Some(&"process/start"));
}

#[test]
fn a_start_that_the_server_knows_is_sent_again_and_read_from_its_beginning() {
    let mut bench = Bench::connected(&json!({"processEvents": true, "operationId": true, "takeOver": true}));
    bench.start(1, true);
    bench.ended(1);
    bench.input(Input::Opened { link: 2 });
    assert_eq!(bench.sent.last().unwrap()["params"]["takeOver"], true);
    bench.answer(2, "initialize", &json!({"result": {"sessionId": "s"}}));
    bench.answer(2, "process/start", &json!({"result": {"processId": "p"}}));
    let read = &bench.sent.last().unwrap()["params"];
    assert_eq!((&read["afterSeq"], &read["events"]), (&json!(0), &json!(true)));
    let event = json!({"type": "output", "seq": 1, "stream": "stdout", "chunk": "YQ=="});
    bench.answer(2, "process/read", &json!({"result": {"chunks": [], "nextSeq": 2, "closed": false, "events": [event]}}));
    assert_eq!(bench.events.len(), 1);
    assert_eq!(bench.answers.len(), 1);
}

#[test]
fn what_was_taken_is_acknowledged_one_at_a_time_and_at_the_end() {
    let mut bench = Bench::connected(&json!({"processEvents": true, "processAcknowledge": true}));
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    for seq in 1..=200 {
        bench.output(1, seq, "YQ==");
    }
    bench.clear();
    let take = |bench: &mut Bench, seq, events| {
        bench.input(Input::Taken { route: 1, seq, cost: events * (EVENT_COST + 1), events, gone: false });
    };
    take(&mut bench, 63, 63);
    assert!(bench.sent.is_empty());
    take(&mut bench, 64, 1);
    take(&mut bench, 180, 116);
    assert_eq!((bench.sent.len(), &bench.sent[0]["params"]), (1, &json!({"processId": "p", "seq": 64})));
    bench.answer(1, "process/acknowledge", &json!({"result": {}}));
    assert_eq!((bench.sent.len(), &bench.sent[1]["params"]["seq"]), (2, &json!(180)));
    bench.answer(1, "process/acknowledge", &json!({"result": {}}));
    for (method, more) in [("exited", json!({"exitCode": 0})), ("closed", json!({}))] {
        let mut params = json!({"processId": "p", "seq": if method == "exited" { 201 } else { 202 }});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        bench.message(1, &json!({"method": format!("process/{method}"), "params": params}));
    }
    take(&mut bench, 202, 22);
    assert_eq!(bench.sent[2]["params"]["seq"], 202);
    bench.answer(1, "process/acknowledge", &json!({"result": {}}));
    assert!(bench.core.routes.is_empty() && bench.core.names.is_empty());
}

#[test]
fn too_much_for_a_listener_stops_the_link_until_it_listens_or_is_gone() {
    let mut bench = Bench::connected(&json!({}));
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    let chunk = portcullis_protocol::base64::encode(&vec![0; 1 << 20]);
    for seq in 1..=8 {
        assert!(bench.core.wants_messages());
        bench.output(1, seq, &chunk);
    }
    assert!(!bench.core.wants_messages());
    bench.input(Input::Taken { route: 1, seq: 1, cost: (1 << 20) + EVENT_COST, events: 1, gone: false });
    assert!(bench.core.wants_messages());
    bench.output(1, 9, &chunk);
    assert!(!bench.core.wants_messages());
    bench.input(Input::Taken { route: 1, seq: 1, cost: 0, events: 0, gone: true });
    bench.output(1, 10, &chunk);
    assert!(bench.core.wants_messages());
}

#[test]
fn bodies_come_in_order_and_fail_at_the_start_of_a_recovery() {
    let mut bench = Bench::connected(&json!({}));
    let http = |bench: &mut Bench, route| {
        let (request, params) = ("r".to_owned(), json!({"requestId": "r"}).to_string());
        bench.input(Input::Http { ticket: route, route, request, params, fail_fast: false });
    };
    let delta = |bench: &mut Bench, seq: u64, text: &str, done: bool| {
        let params = json!({"requestId": "r", "seq": seq, "deltaBase64": text, "done": done, "error": null});
        bench.message(1, &json!({"method": "http/request/bodyDelta", "params": params}));
    };
    http(&mut bench, 1);
    bench.answer(1, "http/request", &json!({"result": {"status": 200}}));
    for (seq, text, done) in [(2, "Yg==", false), (3, "", true), (1, "YQ==", false)] {
        delta(&mut bench, seq, text, done);
    }
    assert_eq!(bench.done, ["part Ok([97])", "part Ok([98])", "end 1"]);
    http(&mut bench, 2);
    bench.clear();
    delta(&mut bench, 1, "YQ==", false);
    bench.ended(1);
    let broken = r#"part Err(Body { request: "r", reason: "exec-server transport disconnected: cut" })"#;
    assert_eq!(bench.done, ["part Ok([97])", "hang up 1", broken, "end 2", "Recovering", "dial 2"]);
    assert_eq!(bench.answers.last(), Some(&(2, Err(lost("http/request")))));
}

#[test]
fn what_is_no_message_ends_the_link_and_not_the_client() {
    for wrong in ["{", r#"{"method":"process/output","params":{"processId":"p"}}"#, r#"{"id":1,"result":1,"result":2}"#] {
        let mut bench = Bench::connected(&json!({}));
        bench.input(Input::Message { link: 1, text: wrong.to_owned() });
        assert_eq!(bench.done, ["hang up 1", "Recovering", "dial 2"], "{wrong}");
    }
    let mut bench = Bench::connected(&json!({}));
    bench.message(1, &json!({"method": "process/moved", "params": {}}));
    bench.message(1, &json!({"id": 77, "result": {}}));
    bench.message(1, &json!({"id": 1, "method": "network/policyRequest", "params": {}}));
    assert!(bench.done.is_empty());
    assert_eq!(bench.sent[0]["error"]["code"], -32601);
}

/// What a server may say that is out of its mind.
fn nonsense() -> impl Strategy<Value = Value> {
    let number = || prop_oneof![0_u64..6, Just(u64::MAX), Just(u64::MAX - 1)];
    let event = (number(), number(), 0..4_u8).prop_map(|(seq, to, kind)| match kind {
        0 => json!({"type": "output", "seq": seq, "stream": "pty", "chunk": "eA=="}),
        1 => json!({"type": "exited", "seq": seq, "exitCode": 1, "sandboxDenied": true}),
        2 => json!({"type": "closed", "seq": seq}),
        _ => json!({"type": "gap", "fromSeq": seq, "toSeq": to}),
    });
    let notice = event.clone().prop_map(|mut params| {
        params["processId"] = json!("p");
        let method = format!("process/{}", params["type"].as_str().unwrap());
        json!({"method": method, "params": params})
    });
    let read = (0..20_i64, prop::collection::vec(event, 0..5), number(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(id, events, next, exited, closed, paged)| {
            let chunks: Vec<&Value> = events.iter().filter(|event| event["type"] == "output").collect();
            let mut result = json!({"chunks": chunks, "nextSeq": next, "exited": exited, "exitCode": 1, "closed": closed});
            if paged {
                result["events"] = json!(events);
            }
            result["sessionId"] = json!("s");
            result["processId"] = json!("p");
            json!({"id": id, "result": result})
        },
    );
    prop_oneof![3 => notice, 3 => read, 1 => (0..20_i64).prop_map(|id| json!({"id": id, "error": {"code": -1, "message": "no"}}))]
}

proptest! {
    #[test]
    fn whatever_a_server_says_each_call_is_answered_once(
        steps in prop::collection::vec((nonsense(), 0..8_u8), 0..60),
        events in any::<bool>(),
    ) {
        let known = json!({"processEvents": events, "processAcknowledge": events, "operationId": true});
        let mut bench = Bench::connected(&known);
        let mut asked = 0;
        for (message, kind) in steps {
            let link = bench.core.links;
            match kind {
                0 => {
                    asked += 1;
                    bench.start(asked, asked % 2 == 0);
                }
                1 => {
                    asked += 1;
                    let process = "p".to_owned();
                    bench.input(Input::Attach { ticket: asked, route: asked, process, after: 0 });
                }
                2 => {
                    bench.ended(link);
                    let link = bench.core.links;
                    bench.input(Input::Opened { link });
                }
                3 => bench.pass(Duration::from_millis(500)),
                _ => bench.message(link, &message),
            }
        }
        bench.pass(Duration::from_secs(100));
        let link = bench.core.links;
        let mut tickets: Vec<Ticket> = bench.answers.iter().map(|(ticket, _)| *ticket).collect();
        tickets.sort_unstable();
        let before = tickets.len();
        tickets.dedup();
        prop_assert_eq!(before, tickets.len(), "no more than once");
        bench.core.settings.reconnect = false;
        bench.ended(link);
        bench.pass(Duration::from_secs(100));
        bench.pass(Duration::from_secs(100));
        if bench.core.has_failed() {
            let mut tickets: Vec<Ticket> = bench.answers.iter().map(|(ticket, _)| *ticket).collect();
            tickets.sort_unstable();
            prop_assert_eq!(tickets, (1..=asked).collect::<Vec<_>>());
        }
    }
}

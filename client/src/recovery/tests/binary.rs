//! Messages with bytes: what comes of them is what comes of JSON.

use super::*;

fn joined(head: &Value, body: &[u8]) -> Bytes {
    [&binary_head(&head.to_string()), body].concat().into()
}

fn binary_head(text: &str) -> Vec<u8> {
    portcullis_protocol::binary::before_body(text).into()
}

impl Bench {
    /// A client of a server that sends bytes, or says that it does not.
    fn of_binary(given: bool) -> Self {
        let mut bench = Self::new(settings());
        bench.input(Input::Opened { link: 1 });
        bench.initialized_with(1, given);
        bench.clear();
        bench
    }

    fn initialized_with(&mut self, link: LinkId, given: bool) {
        let info = json!({"shell": {"name": "sh", "path": "/bin/sh"}, "extensions": {"processEvents": true}});
        let result = json!({"sessionId": "s", "environmentInfo": info, "binaryFrames": given});
        self.answer(link, "initialize", &json!({ "result": result }));
    }

    fn bytes(&mut self, link: LinkId, message: Bytes) {
        self.input(Input::Binary { link, message });
    }

    fn binary_output(&mut self, link: LinkId, seq: u64, chunk: &[u8]) {
        let params = json!({"processId": "p", "seq": seq, "stream": "stdout"});
        self.bytes(link, joined(&json!({"method": "process/output", "params": params}), chunk));
    }

    fn last_id(&self) -> i64 {
        self.sent.last().unwrap()["id"].as_i64().unwrap()
    }
}

fn chunks(bench: &Bench) -> Vec<u8> {
    let chunk = |event: &ProcessEvent| match event {
        ProcessEvent::Output { chunk, .. } => chunk.clone(),
        other => panic!("{other:?}"),
    };
    bench.events.iter().flat_map(chunk).collect()
}

#[test]
fn it_is_asked_for_and_both_kinds_come_in_one_order() {
    let mut bench = Bench::new(settings());
    bench.input(Input::Opened { link: 1 });
    assert_eq!(bench.sent[0]["params"]["binaryFrames"], true);
    bench.initialized_with(1, true);
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    bench.output(1, 1, "YQ==");
    bench.binary_output(1, 3, b"c\xff");
    bench.binary_output(1, 2, b"b");
    bench.output(1, 4, "ZA==");
    assert_eq!(chunks(&bench), b"abc\xffd");
    for (method, more, expect) in [
        ("fs/readBlock", json!({"eof": false}), json!({"chunk": "AP8=", "eof": false})),
        ("fs/readFile", json!({}), json!({"dataBase64": "AP8="})),
    ] {
        bench.call(5, method, Again::Fail, false);
        let head = json!({"id": bench.last_id(), "result": more});
        bench.bytes(1, joined(&head, b"\x00\xff"));
        let Some((5, Ok(Reply { result, body }))) = bench.replies.pop() else { panic!("an answer") };
        assert_eq!((serde_json::from_str::<Value>(result.get()).unwrap(), body.as_deref()), (more, Some(&b"\x00\xff"[..])));
        let whole = Reply { result, body }.into_json(method).unwrap();
        assert_eq!(serde_json::from_str::<Value>(whole.get()).unwrap(), expect);
        // Its errors, and whatever else it is answered with, come as ever.
        bench.call(6, method, Again::Fail, false);
        bench.answer(1, method, &json!({"error": {"code": -32004, "message": "no"}}));
        assert!(matches!(bench.answers.pop(), Some((6, Err(ExecServerError::Server(_))))));
    }
}

#[test]
fn output_that_comes_before_the_handshake_is_over_is_kept_and_each_link_has_its_own_word() {
    let mut bench = Bench::of_binary(true);
    bench.start(1, false);
    bench.answer(1, "process/start", &json!({"result": {"processId": "p"}}));
    bench.binary_output(1, 1, b"a");
    bench.ended(1);
    bench.input(Input::Opened { link: 2 });
    bench.binary_output(2, 3, b"c");
    bench.initialized_with(2, true);
    let events = json!([{"type": "output", "seq": 2, "stream": "stdout", "chunk": "Yg=="}]);
    let page = json!({"chunks": [], "nextSeq": 3, "exited": false, "exitCode": null, "closed": false, "events": events});
    bench.answer(2, "process/read", &json!({ "result": page }));
    assert_eq!(chunks(&bench), b"abc", "{:?}", bench.events);
    bench.ended(2);
    bench.input(Input::Opened { link: 3 });
    bench.initialized_with(3, false);
    bench.clear();
    bench.bytes(3, Bytes::from_static(b"no message"));
    assert_eq!(bench.done, [""; 0], "what nobody wants is dropped, as ever");
    bench.output(3, 4, "ZA==");
    assert_eq!(bench.core.links, 3);
}

#[test]
fn what_is_malformed_ends_the_link_as_text_does() {
    let head = |value: Value| joined(&value, b"x");
    let start = json!({"processId": "p", "seq": 1});
    for (wrong, of_call) in [
        (Bytes::from_static(b"\0\0\0"), false),
        (Bytes::from_static(b"\0\0\0\x09{}"), false),
        ([binary_head("{"), b"x".to_vec()].concat().into(), false),
        (head(json!({"id": 77, "result": {}})), false),
        (head(json!({"id": "a", "result": {}})), false),
        (head(json!({"id": 1, "method": "fs/readFile", "params": {}})), false),
        (head(json!({"method": "process/closed", "params": {"processId": "p", "seq": 1}})), false),
        (head(json!({"method": "process/output", "params": start})), false),
        (head(json!({"method": "process/output"})), false),
        (head(json!({"error": {"code": -1, "message": "no"}})), true),
        (head(json!({"result": {}})), true),
    ] {
        let mut bench = Bench::of_binary(true);
        // One that is answered without bytes.
        bench.call(5, "fs/getMetadata", Again::Fail, false);
        let mut wrong = wrong;
        if of_call {
            let (text, body) = portcullis_protocol::binary::split(wrong).unwrap();
            let mut value: Value = serde_json::from_slice(&text).unwrap();
            value["id"] = json!(bench.last_id());
            wrong = joined(&value, &body);
        }
        bench.bytes(1, wrong.clone());
        assert_eq!(bench.done, ["hang up 1", "Recovering", "dial 2"], "{wrong:?}");
        assert!(matches!(bench.answers[..], [(5, Err(ExecServerError::Disconnected(_)))]), "{:?}", bench.answers);
        let mut bench = Bench::of_binary(false);
        bench.bytes(1, wrong);
        assert!(bench.done.is_empty(), "control: it was not agreed upon");
    }
    let mut bench = Bench::of_binary(true);
    bench.call(5, "fs/readFile", Again::Fail, false);
    let right = joined(&json!({"id": bench.last_id(), "result": {}}), b"");
    bench.bytes(1, right);
    assert!(bench.done.is_empty() && bench.replies.len() == 1, "control: no bytes are bytes too");
}

proptest! {
    #[test]
    fn whatever_bytes_come_each_call_is_answered_once(
        steps in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..12), nonsense(), 0..6_u8), 0..40),
    ) {
        let mut bench = Bench::of_binary(true);
        let mut asked = 0;
        for (bytes, message, kind) in steps {
            let link = bench.core.links;
            match kind {
                0 => {
                    asked += 1;
                    bench.call(asked, "fs/readFile", Again::Send, false);
                }
                1 => bench.bytes(link, bytes.into()),
                2 => bench.bytes(link, joined(&message, &bytes)),
                3 => bench.message(link, &message),
                4 => bench.input(Input::Opened { link }),
                _ => bench.pass(Duration::from_millis(500)),
            }
        }
        bench.core.settings.reconnect = false;
        let link = bench.core.links;
        bench.ended(link);
        bench.pass(Duration::from_secs(100));
        let mut tickets: Vec<Ticket> = bench.answers.iter().map(|(ticket, _)| *ticket).collect();
        tickets.extend(bench.replies.iter().map(|(ticket, _)| *ticket));
        let before = tickets.len();
        tickets.sort_unstable();
        tickets.dedup();
        prop_assert_eq!(before, tickets.len(), "no more than once");
        prop_assert!(!bench.core.has_failed() || before as u64 == asked);
    }
}

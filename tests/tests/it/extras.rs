//! What this server understands beyond the wire that its clients know.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_tests::{Client, PATIENCE, Place, Server};
use serde_json::{Value, json};

/// Without a sandbox and with one.
fn sandboxes() -> [(&'static str, Value); 2] {
    [("none", Value::Null), ("linuxSeccomp", json!({"type": "read-only"}))]
}

fn write(id: &str, write_id: &str, bytes: &[u8]) -> Value {
    json!({"processId": id, "chunk": STANDARD.encode(bytes), "writeId": write_id})
}

fn keys(object: &Value) -> Vec<&String> {
    object.as_object().unwrap().keys().collect()
}

#[tokio::test]
async fn extensions_are_announced_to_who_asks_and_to_nobody_else() {
    let server = Server::start().await;
    let mut client = Client::dial(&server.url).await;
    let initialized = client.initialize(None).await.unwrap();
    client.send(&json!({"method": "initialized"})).await;
    let plain = client.ok("environment/info", json!({})).await;
    assert_eq!(keys(&initialized["environmentInfo"]), keys(&plain));
    assert!(plain.get("extensions").is_none());
    let asked = client.ok("environment/info", json!({"extensions": true})).await;
    let extensions = &asked["extensions"];
    for name in ["processResize", "processCloseStdin", "processList", "operationId"] {
        assert_eq!(extensions[name], true, "{name}");
    }
    let signals = extensions["processSignals"].as_array().unwrap();
    assert!(signals.contains(&json!("interrupt")) && signals.contains(&json!("SIGTERM")), "{signals:?}");
    assert!(client.refused("environment/info", json!({"extensions": 1})).await.message.contains("`extensions`"));
}

#[tokio::test]
async fn a_terminal_has_the_size_that_was_asked_for_and_is_resized() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let script = "trap 'stty size; kill $!; exit 3' WINCH; stty size; echo ready; sleep 600 & wait";
    for (kind, sandbox) in sandboxes() {
        let more = json!({"tty": true, "size": {"rows": 33, "cols": 101}, "sandbox": sandbox});
        client.start(&place, kind, &["sh", "-c", script], more).await;
        client.output(kind, "33 101\r\nready\r\n").await;
        assert_eq!(client.ok("process/resize", json!({"processId": kind, "rows": 5, "cols": 65535})).await, json!({}));
        let events = client.events(kind).await;
        assert!(events.output(None).contains("5 65535"), "{kind}: {}", events.output(None));
        assert_eq!(events.code(), 3, "{kind}");
        // Too late is no error, since nobody can know.
        assert_eq!(client.ok("process/resize", json!({"processId": kind, "rows": 5, "cols": 5})).await, json!({}));
    }
    client.run(&place, "plain", &["true"], json!({})).await;
    let refused = client.refused("process/resize", json!({"processId": "plain", "rows": 5, "cols": 5})).await;
    assert_eq!((refused.code, refused.message.contains("no terminal")), (-32600, true), "{refused:?}");
    assert_eq!(client.refused("process/resize", json!({"processId": "zz", "rows": 5, "cols": 5})).await.code, -32600);
    for wrong in
        [json!({"rows": 0, "cols": 5}), json!({"rows": 5}), json!({"rows": 5, "cols": 65536}), json!({"rows": "5", "cols": 5})]
    {
        let mut params = wrong;
        params["processId"] = json!("none");
        assert_eq!(client.refused("process/resize", params).await.code, -32602);
    }
    let mut params = Client::start_params(&place, "sized", &["true"]);
    params["size"] = json!({"rows": 5, "cols": 5});
    assert_eq!(client.refused("process/start", params).await.code, -32602, "a size without a terminal");
}

#[tokio::test]
async fn input_ends_after_what_was_written() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let chunk = vec![b'x'; 100_000];
    for (kind, sandbox) in sandboxes() {
        client.start(&place, kind, &["sh", "-c", "wc -c; exit 4"], json!({"pipeStdin": true, "sandbox": sandbox})).await;
        // All at once: the end keeps its place behind the writes, whether they are accepted already or wait.
        let mut calls = Vec::new();
        for nth in 0..200 {
            calls.push(client.begin("process/write", write(kind, &nth.to_string(), &chunk)).await);
        }
        let end = client.begin("process/closeStdin", json!({"processId": kind})).await;
        let late = client.begin("process/write", write(kind, "late", b"x")).await;
        for call in calls {
            assert_eq!(client.answer(call).await.unwrap(), json!({"status": "accepted"}));
        }
        assert_eq!(client.answer(end).await.unwrap(), json!({}));
        assert_eq!(client.answer(late).await.unwrap(), json!({"status": "stdinClosed"}));
        let events = client.events(kind).await;
        assert_eq!((events.output(None).trim(), events.code()), ("20000000", 4), "{kind}");
        assert_eq!(client.ok("process/closeStdin", json!({"processId": kind})).await, json!({}), "again, and after the exit");
    }
    client.run(&place, "empty", &["cat"], json!({})).await;
    assert_eq!(client.ok("process/closeStdin", json!({"processId": "empty"})).await, json!({}), "it had none");
    client.start(&place, "tty", &["cat"], json!({"tty": true})).await;
    let refused = client.refused("process/closeStdin", json!({"processId": "tty"})).await;
    assert_eq!((refused.code, refused.message.contains("\\x04")), (-32600, true), "{refused:?}");
    client.ok("process/write", write("tty", "1", b"\x04")).await;
    assert_eq!(client.events("tty").await.code(), 0);
    let refused = client.refused("process/closeStdin", json!({"processId": "zz"})).await;
    assert_eq!((refused.code, refused.message.as_str()), (-32600, "unknown process id zz"));
    assert_eq!(client.refused("process/closeStdin", json!({"processId": 3})).await.code, -32602);
}

/// Says which signals it got, and ends at the first SIGTERM. It writes without a buffer, because a
/// signal may come while its last line is on the way, and Python's buffered writers refuse to be
/// entered twice.
const LISTENER: &str = "
import os, signal, sys
def say(line): os.write(1, (line + '\\n').encode())
def told(number, frame):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM: sys.exit(7)
for name in 'HUP INT QUIT USR1 USR2 CONT WINCH TERM PIPE URG'.split(): signal.signal(getattr(signal, 'SIG' + name), told)
say('ready')
while True: signal.pause()
";

#[tokio::test]
async fn signals_go_by_name() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    for (kind, sandbox) in sandboxes() {
        // The directory in its arguments tells its process from all others of this machine.
        let marker = place.path(kind).to_str().unwrap().to_owned();
        client.start(&place, kind, &["python3", "-c", LISTENER, &marker], json!({"sandbox": sandbox})).await;
        client.output(kind, "ready\n").await;
        let signal = |name: &str| json!({"processId": kind, "signal": name});
        for (name, told) in [
            ("interrupt", "SIGINT"),
            ("hangup", "SIGHUP"),
            ("quit", "SIGQUIT"),
            ("user1", "SIGUSR1"),
            ("user2", "SIGUSR2"),
            ("winch", "SIGWINCH"),
            ("SIGPIPE", "SIGPIPE"),
            ("SIGURG", "SIGURG"),
            ("continue", "SIGCONT"),
        ] {
            assert_eq!(client.ok("process/signal", signal(name)).await, json!({}));
            client.output(kind, &format!("{told}\n")).await;
        }
        client.ok("process/signal", signal("stop")).await;
        stopped(&marker).await;
        client.ok("process/signal", signal("continue")).await;
        client.output(kind, "SIGCONT\n").await;
        client.ok("process/signal", signal("terminate")).await;
        let events = client.events(kind).await;
        assert_eq!((events.output(None).as_str(), events.code()), ("SIGTERM\n", 7), "{kind}");
        assert_eq!(client.ok("process/signal", signal("stop")).await, json!({}), "after the exit");

        // One that is stopped can be killed.
        let (killed, marker) = (format!("{kind} killed"), format!("{marker}-killed"));
        client.start(&place, &killed, &["python3", "-c", LISTENER, &marker], json!({"sandbox": sandbox})).await;
        client.output(&killed, "ready\n").await;
        client.ok("process/signal", json!({"processId": killed, "signal": "SIGSTOP"})).await;
        stopped(&marker).await;
        client.ok("process/signal", json!({"processId": killed, "signal": "SIGKILL"})).await;
        assert_eq!(client.events(&killed).await.code(), 137, "{kind}");
    }
    assert_eq!(client.ok("process/signal", json!({"processId": "zz", "signal": "user1"})).await, json!({}));
    for wrong in [json!("SIGFOO"), json!("TERM"), json!("sigterm"), json!(15), Value::Null] {
        let refused = client.refused("process/signal", json!({"processId": "zz", "signal": wrong})).await;
        assert_eq!(refused.code, -32602, "{refused:?}");
        assert!(!wrong.is_string() || refused.message.contains("`interrupt`, `terminate`"), "{refused:?}");
    }
}

/// Waits until the process with this argument is stopped. It may be in a sandbox, where its number is another one.
async fn stopped(argument: &str) {
    let stops = async {
        while !is_stopped(argument) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, stops).await.expect("it stops");
}

fn is_stopped(argument: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.filter(|path| path.join("stat").exists()).any(|path| {
        let arguments = std::fs::read(path.join("cmdline")).unwrap_or_default();
        let stat = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|one| one == argument.as_bytes())
            && stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"))
    })
}

#[tokio::test]
async fn processes_are_listed_with_what_became_of_them() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    assert_eq!(client.ok("process/list", json!({})).await, json!({"processes": []}));
    client.run(&place, "z", &["sh", "-c", "echo x; exit 3"], json!({})).await;
    client.start(&place, "a", &["cat"], json!({"tty": true, "sandbox": {"type": "read-only"}})).await;
    let session = client.session.clone();
    client.cut();
    let mut client = Client::resume(&server, &session).await;
    let mut listed = client.ok("process/list", json!({})).await["processes"].take();
    let mut started = Vec::new();
    for process in listed.as_array_mut().unwrap() {
        started.push(process.as_object_mut().unwrap().remove("startedAtMs").unwrap().as_u64().unwrap());
    }
    let expect = json!([
        {"processId": "z", "state": "closed", "exitCode": 3, "tty": false, "sandboxType": "none", "nextSeq": 4},
        {"processId": "a", "state": "running", "tty": true, "sandboxType": "linuxSeccomp", "nextSeq": 1},
    ]);
    assert_eq!(listed, expect);
    assert!(started.is_sorted() && started[0] > 1_600_000_000_000, "{started:?}");
    let other = Client::connect(&server).await.ok("process/list", Value::Null).await;
    assert_eq!(other, json!({"processes": []}), "of another session");
    assert_eq!(client.refused("process/list", json!({"processId": "z"})).await.code, -32602);
}

#[tokio::test]
async fn the_same_operation_over_a_cut_link_starts_one_process() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    for nth in 0..8 {
        let (id, file) = (format!("p{nth}"), format!("file{nth}"));
        let mut params = Client::start_params(&place, &id, &["sh", "-c", &format!("echo x >>{file}")]);
        params["operationId"] = json!("op");
        // Whether the server has taken it up when the link is cut, it is not known.
        client.begin("process/start", params.clone()).await;
        let session = client.session.clone();
        client.cut();
        client = Client::resume(&server, &session).await;
        let first = client.ok("process/start", params.clone()).await;
        assert_eq!(first, json!({"processId": id, "sandboxType": "none"}));
        let read = json!({"processId": id, "afterSeq": 2, "waitMs": 60_000});
        while client.ok("process/read", read.clone()).await["closed"] != true {}
        assert_eq!(client.ok("process/start", params.clone()).await, first, "also when it is over");
        assert_eq!(place.content(&file), "x\n");
        for other in [Value::Null, json!("other")] {
            params["operationId"] = other;
            let refused = client.refused("process/start", params.clone()).await;
            assert_eq!((refused.code, refused.message), (-32600, format!("process {id} already exists")));
        }
    }
    for (wrong, code) in [(json!(""), -32602), (json!("o".repeat(257)), -32602), (json!(3), -32602)] {
        let mut params = Client::start_params(&place, "wrong", &["true"]);
        params["operationId"] = wrong;
        assert_eq!(client.refused("process/start", params).await.code, code);
    }
}

#[tokio::test]
async fn a_start_that_is_sent_twice_at_once_has_one_answer() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let mut params = Client::start_params(&place, "p", &["sh", "-c", "echo x >>file"]);
    params["operationId"] = json!("op");
    let (first, second) = (client.begin("process/start", params.clone()).await, client.begin("process/start", params).await);
    let answer = client.answer(first).await.unwrap();
    assert_eq!(client.answer(second).await.unwrap(), answer);
    client.events("p").await;
    assert_eq!(place.content("file"), "x\n");
}

#[tokio::test]
async fn output_that_others_hold_open_is_waited_for_as_long_as_the_start_says() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    let read = |id: &str| json!({"processId": id});
    for (kind, sandbox) in sandboxes() {
        let script = "sleep 600 & echo done";
        // The control: without a bound it is waited for.
        let free = format!("{kind} free");
        client.start(&place, &free, &["sh", "-c", script], json!({"sandbox": sandbox})).await;
        client.wait(|message| message["method"] == "process/exited" && message["params"]["processId"] == json!(free)).await;

        let bound = format!("{kind} bound");
        client.start(&place, &bound, &["sh", "-c", script], json!({"sandbox": sandbox, "drainMs": 200})).await;
        let events = client.events(&bound).await;
        assert_eq!((events.output(None).as_str(), events.code()), ("done\n", 0), "{kind}");
        let failure = client.ok("process/read", read(&bound)).await["failure"].clone();
        assert!(failure.as_str().is_some_and(|text| text.contains("200 ms") && text.contains("drainMs")), "{failure}");

        let waiting = client.ok("process/read", read(&free)).await;
        assert_eq!((&waiting["exited"], &waiting["closed"]), (&json!(true), &json!(false)), "{kind}");
    }
}

#[tokio::test]
async fn what_runs_out_of_its_time_is_stopped_and_says_why() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    for (kind, sandbox) in sandboxes() {
        for (bound, script, code) in [
            ("stallMs", "trap 'echo tidy; exit 3' INT; echo begun; while :; do sleep 0.05; done", 3),
            ("ceilingMs", "trap 'echo tidy; exit 4' INT; while echo more; do sleep 0.05; done", 4),
        ] {
            let id = format!("{kind} {bound}");
            client.run_bounded(&place, &id, script, json!({"sandbox": sandbox, bound: 400}), code).await;
            let read = client.ok("process/read", json!({"processId": id})).await;
            let failure = read["failure"].as_str().unwrap_or_else(|| panic!("{id}: {read}"));
            assert!(failure.contains(bound) && failure.contains("400 ms"), "{failure}");
        }
        // The control: the same without a bound runs until it is ended.
        let id = format!("{kind} free");
        let script = "trap 'exit 5' TERM; echo begun; while :; do sleep 0.05; done";
        client.start(&place, &id, &["sh", "-c", script], json!({"sandbox": sandbox})).await;
        client.output(&id, "begun\n").await;
        assert_eq!(client.ok("process/terminate", json!({"processId": id, "graceMs": 60_000})).await, json!({"running": true}));
        assert_eq!(client.events(&id).await.code(), 5, "{kind}: it had its time to tidy up");
        let id = format!("{kind} leaves");
        let script = "trap 'exit 6' TERM; (trap '' TERM; echo begun; exec sleep 600) & wait";
        client.start(&place, &id, &["sh", "-c", script], json!({"sandbox": sandbox})).await;
        client.output(&id, "begun\n").await;
        client.ok("process/terminate", json!({"processId": id, "graceMs": 60_000})).await;
        assert_eq!(client.events(&id).await.code(), 6, "{kind}: and what it left behind ends with it, output and all");
        let id = format!("{kind} deaf");
        client.start(&place, &id, &["sh", "-c", "trap '' TERM; echo begun; exec sleep 600"], json!({"sandbox": sandbox})).await;
        client.output(&id, "begun\n").await;
        client.ok("process/terminate", json!({"processId": id, "graceMs": 100})).await;
        assert_eq!(client.events(&id).await.code(), 137, "{kind}: and it is over then");
    }
    for wrong in [json!({"stallMs": 0}), json!({"ceilingMs": -1}), json!({"stallMs": 1.5}), json!({"ceilingMs": "9"})] {
        let params = Client::start_params(&place, "wrong", &["true"]);
        let mut params = params.as_object().unwrap().clone();
        params.extend(wrong.as_object().unwrap().clone());
        assert_eq!(client.refused("process/start", Value::Object(params)).await.code, -32602, "{wrong}");
    }
}

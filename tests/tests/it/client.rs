//! The client library against the real program, over a cable that is cut. What the server announces decides what survives; this
//! one announces everything.

use futures_util::FutureExt as _;
use portcullis_client::{ClientStatus, ExecServerClient, ExecServerClientConnectOptions, ExecServerError, Process, ProcessEvent};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::{ProcessState, StartParams, WriteStatus};
use portcullis_tests::{PATIENCE, Place, Proxy, Server, executable};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Everything that one test needs. The client lives at the other end of the proxy.
struct Setup {
    server: Server,
    proxy: Proxy,
    place: Place,
    client: ExecServerClient,
    task: JoinHandle<()>,
}

fn options(proxy: &Proxy) -> ExecServerClientConnectOptions {
    ExecServerClientConnectOptions::new(&proxy.url, "test")
}

impl Setup {
    async fn new(change: impl FnOnce(&mut ExecServerClientConnectOptions)) -> Self {
        let (server, place) = (Server::start().await, Place::new());
        let proxy = Proxy::before(&server.url).await;
        let mut options = options(&proxy);
        change(&mut options);
        let (client, task) = ExecServerClient::connect(&options).await.unwrap();
        let can = client.extensions();
        assert!(can.operation_id && can.file_operation_id && can.process_events && can.process_acknowledge, "{can:?}");
        assert!(can.keep_handles && can.take_over, "{can:?}");
        Self { server, proxy, place, client, task }
    }

    fn path(&self, name: &str) -> WirePath {
        WirePath::Local(AbsolutePath::new(self.place.path(name)).unwrap())
    }

    fn start_params(&self, id: &str, script: &str) -> StartParams {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        StartParams::new(id, argv, self.path(""))
    }

    fn pipe(&self, name: &str) {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, self.place.path(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }

    /// Lets a script go on that reads from a named pipe, and waits until it does.
    async fn go_on(&self, name: &str) {
        let path = self.place.path(name);
        let written = tokio::task::spawn_blocking(move || std::fs::write(path, "\n"));
        timeout(PATIENCE, written).await.unwrap().unwrap().unwrap();
    }

    async fn status(&self, wanted: impl Fn(&ClientStatus) -> bool) {
        let mut status = self.client.watch_status();
        timeout(PATIENCE, status.wait_for(|status| wanted(status))).await.expect("a status in time").unwrap();
    }

    async fn recovering(&self) {
        self.status(|status| *status == ClientStatus::Recovering).await;
    }

    async fn connected_again(&self) {
        self.status(|status| matches!(status, ClientStatus::Connected { generation } if *generation > 1)).await;
    }

    async fn end(self) {
        let Self { server, proxy, place, client, task } = self;
        drop(client);
        timeout(PATIENCE, task).await.expect("an end in time").unwrap();
        proxy.end().await;
        drop(server);
        place.done();
    }
}

async fn next(process: &mut Process) -> ProcessEvent {
    timeout(PATIENCE, process.event()).await.expect("an event in time").expect("an event")
}

/// All output, with every number once.
async fn rest(process: &mut Process, mut last: u64) -> (String, i32) {
    let (mut output, mut status) = (Vec::new(), None);
    loop {
        let event = next(process).await;
        assert_eq!(event.last_seq(), Some(last + 1), "{event:?}");
        last += 1;
        match event {
            ProcessEvent::Output { chunk, .. } => output.extend(chunk),
            ProcessEvent::Exited { code, .. } => status = Some(code),
            ProcessEvent::Closed { .. } => return (String::from_utf8(output).unwrap(), status.expect("a status")),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_process_goes_on_over_a_cut_and_what_was_missed_comes_once() {
    let setup = Setup::new(|_| {}).await;
    setup.pipe("away");
    setup.pipe("back");
    setup.pipe("done");
    let script = "echo before; read x <away; seq 1 20000; echo >done; read x <back; echo after; exit 5";
    let mut process = setup.client.start(&setup.start_params("p", script)).await.unwrap();
    assert!(matches!(next(&mut process).await, ProcessEvent::Output { seq: 1, .. }));
    setup.proxy.refuse();
    setup.recovering().await;
    let refused = setup.client.fail_fast().processes().await;
    assert_eq!(refused, Err(ExecServerError::Recovering));
    // It writes while nobody is attached. Whoever reads this pipe waits for the end of that.
    let path = setup.place.path("done");
    setup.go_on("away").await;
    let wrote = tokio::task::spawn_blocking(move || std::fs::read(path));
    timeout(PATIENCE, wrote).await.unwrap().unwrap().unwrap();
    setup.proxy.heal();
    setup.connected_again().await;
    setup.go_on("back").await;
    let numbers: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(rest(&mut process, 1).await, (numbers + "after\n", 5));
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn input_and_output_are_whole_however_often_the_cable_is_cut() {
    let setup = Setup::new(|_| {}).await;
    let mut params = setup.start_params("p", "exec cat");
    params.pipe_stdin = true;
    let mut process = setup.client.start(&params).await.unwrap();
    let mut input = process.take_input().unwrap();
    // Any numbers will do, if they are the same every time.
    let mut seed = 7_u64;
    let mut expect = String::new();
    for line in 0..60 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if line % 4 == 0 {
            setup.proxy.cut_after((seed >> 33) % 1500);
        }
        let text = format!("line {line}\n");
        expect += &text;
        let written = timeout(PATIENCE, input.write(text.into_bytes())).await.expect("a write in time");
        assert_eq!(written, Ok(WriteStatus::Accepted));
    }
    setup.proxy.heal();
    timeout(PATIENCE, input.close()).await.unwrap().unwrap();
    assert_eq!(rest(&mut process, 0).await, (expect, 0));
    assert!(matches!(setup.client.status(), ClientStatus::Connected { generation } if generation > 1));
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn a_change_whose_answer_is_lost_is_known_to_be_done() {
    let setup = Setup::new(|_| {}).await;
    let file = setup.path("file");
    setup.proxy.cut_after(0);
    timeout(PATIENCE, setup.client.write_file(&file, b"content".to_vec(), None)).await.unwrap().unwrap();
    // What only looks can be done again.
    assert_eq!(timeout(PATIENCE, setup.client.read_file(&file, None)).await.unwrap().unwrap(), b"content");
    setup.proxy.cut_after(0);
    let read = timeout(PATIENCE, setup.client.read_file(&file, None)).await.unwrap();
    assert!(matches!(read, Err(ExecServerError::Disconnected(_))), "{read:?}");
    setup.end().await;
}

#[tokio::test]
async fn a_start_whose_answer_is_lost_is_one_start() {
    let setup = Setup::new(|_| {}).await;
    setup.pipe("gate");
    setup.proxy.cut_after(0);
    let params = setup.start_params("p", "echo here; read x <gate; echo again >>count");
    let mut process = timeout(PATIENCE, setup.client.start(&params)).await.unwrap().unwrap();
    setup.go_on("gate").await;
    assert_eq!(rest(&mut process, 0).await, ("here\n".to_owned(), 0));
    assert_eq!(setup.place.content("count"), "again\n");
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn a_start_that_nobody_waits_for_is_ended() {
    let setup = Setup::new(|_| {}).await;
    {
        let params = setup.start_params("p", "exec sleep 600");
        // Polled once, the start is on its way.
        assert!(setup.client.start(&params).now_or_never().is_none());
    }
    let ended = async {
        loop {
            let listed = setup.client.processes().await.unwrap();
            if listed.iter().any(|process| process.state == ProcessState::Closed) {
                break;
            }
        }
    };
    timeout(PATIENCE, ended).await.expect("it is ended");
    setup.end().await;
}

#[tokio::test]
async fn silence_is_a_cut_too() {
    let setup = Setup::new(|options| options.silence_timeout = Some(Duration::from_millis(300))).await;
    setup.pipe("gate");
    let params = setup.start_params("p", "echo one; read x <gate; echo two");
    let mut process = setup.client.start(&params).await.unwrap();
    next(&mut process).await;
    setup.proxy.freeze();
    setup.recovering().await;
    // The session is taken from the frozen connection.
    setup.connected_again().await;
    setup.go_on("gate").await;
    assert_eq!(rest(&mut process, 1).await, ("two\n".to_owned(), 0));
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn a_server_that_does_not_come_back_is_one_stable_error() {
    let mut setup = Setup::new(|options| options.recovery_deadline = Duration::from_millis(500)).await;
    let mut process = setup.client.start(&setup.start_params("p", "exec sleep 600")).await.unwrap();
    setup.server.program.child.kill().await.unwrap();
    let ProcessEvent::Failed { message } = next(&mut process).await else { panic!() };
    assert!(message.contains("failed to resume exec-server session: recovery timed out after 0.5s"), "{message}");
    assert_eq!(process.event().await, None);
    let failed = ExecServerError::Failed(message.clone());
    assert_eq!(setup.client.processes().await, Err(failed.clone()));
    assert_eq!(process.terminate().await, Err(failed));
    assert_eq!(setup.client.status(), ClientStatus::Failed(message));
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn an_open_file_goes_on_if_it_is_kept_and_else_says_that_it_is_lost() {
    for keeps in [false, true] {
        let setup = Setup::new(|options| options.keep_handles = keeps).await;
        let content = "0123456789".repeat(100_000);
        setup.place.put("file", &content);
        let mut reader = setup.client.open(&setup.path("file"), None).await.unwrap();
        let mut read = timeout(PATIENCE, reader.next()).await.unwrap().unwrap().unwrap();
        setup.proxy.cut();
        setup.connected_again().await;
        let error = loop {
            match timeout(PATIENCE, reader.next()).await.unwrap() {
                Some(Ok(block)) => read.extend(block),
                Some(Err(error)) => break Some(error),
                None => break None,
            }
        };
        if keeps {
            assert!(error.is_none() && read == content.as_bytes(), "{error:?}");
        } else {
            assert!(matches!(&error, Some(ExecServerError::HandleLost { path }) if path.ends_with("/file")), "{error:?}");
        }
        drop(reader);
        let mut writer = setup.client.create(&setup.path("made"), None).await.unwrap();
        for part in content.as_bytes().chunks(300_000) {
            writer.write(part.to_vec()).await.unwrap();
        }
        writer.finish().await.unwrap();
        assert_eq!(setup.place.content("made"), content);
        setup.end().await;
    }
}

#[tokio::test]
async fn another_client_resumes_a_session_and_follows_its_processes() {
    let setup = Setup::new(|_| {}).await;
    setup.pipe("gate");
    let params = setup.start_params("p", "echo one; read x <gate; echo two; exit 3");
    let mut process = setup.client.start(&params).await.unwrap();
    next(&mut process).await;
    let session = setup.client.session_id().to_owned();
    setup.proxy.cut();
    drop(process);
    let Setup { server, proxy, place, client, task } = setup;
    drop(client);
    timeout(PATIENCE, task).await.unwrap().unwrap();
    let resumed = async {
        loop {
            match ExecServerClient::resume(&options(&proxy), &session).await {
                Ok(resumed) => break resumed,
                Err(ExecServerError::Server(error)) if error.code == -32010 => {}
                Err(other) => panic!("{other}"),
            }
        }
    };
    let (client, task) = timeout(PATIENCE, resumed).await.unwrap();
    let setup = Setup { server, proxy, place, client, task };
    assert_eq!(setup.client.session_id(), session);
    assert_eq!(setup.client.processes().await.unwrap()[0].process_id, "p");
    assert!(matches!(setup.client.attach("q", 0).await, Err(ExecServerError::Server(_))));
    let mut process = setup.client.attach("p", 0).await.unwrap();
    assert!(matches!(setup.client.attach("p", 0).await, Err(ExecServerError::InUse(_))));
    setup.go_on("gate").await;
    let finished = timeout(PATIENCE, process.wait(5)).await.unwrap().unwrap();
    assert_eq!((finished.code, finished.stdout.as_slice(), finished.is_whole), (3, &b"one\nt"[..], false));
    drop(process);
    setup.end().await;
}

#[tokio::test]
async fn a_listener_that_does_not_listen_loses_nothing() {
    let setup = Setup::new(|_| {}).await;
    // More than waits anywhere on the way: 20 MiB.
    let mut slow = setup.client.start(&setup.start_params("slow", "yes 1234567 | head -c 20971520")).await.unwrap();
    let mut other = setup.client.start(&setup.start_params("other", "echo here")).await.unwrap();
    assert_eq!(rest(&mut other, 0).await, ("here\n".to_owned(), 0), "others go on");
    drop(other);
    let (output, code) = rest(&mut slow, 0).await;
    assert_eq!((output.len(), code), (20 << 20, 0));
    drop(slow);
    setup.end().await;
}

#[tokio::test]
async fn the_examples_do_what_they_say() {
    let server = Server::start().await;
    let place = Place::new();
    let run = |name: &str, arguments: Vec<String>| {
        tokio::process::Command::new(executable(&format!("examples/{name}"))).arg(&server.url).args(arguments).output()
    };
    let script = ["/bin/sh", "-c", "echo out; echo err >&2; exit 7"].map(str::to_owned).to_vec();
    let output = timeout(PATIENCE, run("run_command", script)).await.unwrap().unwrap();
    let said = (output.status.code(), output.stdout.as_slice(), output.stderr.as_slice());
    assert_eq!(said, (Some(7), &b"out\n"[..], &b"err\n"[..]));
    let directory = place.path("").to_str().unwrap().to_owned();
    let output = timeout(PATIENCE, run("files", vec![directory])).await.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2 files, 8890 bytes of 8890 read\n", "{output:?}");
}

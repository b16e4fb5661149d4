//! Ends of processes, connections and sessions.

use super::*;
use crate::helper::socket::{FrameReceiver, FrameSender};
use portcullis_protocol::helper::{Enforced, ExitStatus};
use portcullis_protocol::limit::TreeEnd;
use std::os::fd::OwnedFd;

fn started_event(id: u64) -> SpawnerEvent {
    SpawnerEvent::Started { id, pid: 1, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants }
}

impl Client {
    /// Starts `p` with a scripted spawner, and returns its id and descriptors there.
    async fn start_scripted(&mut self, sender: &mut FrameSender, receiver: &mut FrameReceiver) -> (u64, Vec<OwnedFd>) {
        let started = self.ask_start(shell("p", "")).await;
        let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(receiver).await else { panic!() };
        fake::say(sender, &started_event(id)).await;
        started.await.unwrap().unwrap();
        (id, descriptors)
    }
}

#[tokio::test]
async fn terminate_kills_the_group_and_no_signal_goes_to_the_dead() {
    let mut client = Client::new().await;
    client.start(shell("p", "trap '' INT TERM; echo ready; sleep 1000; true")).await.unwrap();
    client.until("stdout", b"ready\n").await;
    assert!(client.terminate("p").await);
    let story = client.story().await;
    assert_eq!((story.exit, story.output.len()), (Some(137), 0));
    assert!(!client.terminate("p").await);
    client.interrupt("p").await;
    client.interrupt("missing").await;
    client.end().await;
}

#[tokio::test]
async fn an_interrupt_is_sigint_and_may_be_repeated() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let (id, descriptors) = client.start_scripted(&mut sender, &mut receiver).await;
    for _time in 0..2 {
        client.interrupt("p").await;
        let heard = fake::hear(&mut receiver).await;
        assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 2 }, _)) if of == id), "{heard:?}");
    }
    drop((sender, receiver, descriptors));
    client.end().await;
}

#[tokio::test]
async fn denials_and_the_reason_of_an_end_reach_the_client() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let (id, _) = client.start_scripted(&mut sender, &mut receiver).await;
    let (denials, failure) = (fake::denials(&["/etc/x"]), Some("more memory than its sandbox allows".to_owned()));
    let ended = SpawnerEvent::Exited {
        id,
        status: ExitStatus::Signal(9),
        denials: denials.clone(),
        failure: failure.clone(),
        limits: Vec::new(),
    };
    fake::say(&mut sender, &ended).await;
    assert_eq!(client.story().await.exit, Some(137));
    let read = client.read("p", 0, 0).await;
    assert_eq!((read.sandbox_denied, read.denials, read.failure), (true, denials.list, failure));
    client.end().await;
}

#[tokio::test]
async fn a_session_outlives_its_connection() {
    let mut client = Client::new().await;
    let params =
        StartParams { pipe_stdin: true, ..shell("p", "echo before; read line; echo while; read line; echo after; exit 5") };
    client.start(params).await.unwrap();
    client.until("stdout", b"before\n").await;
    let other = mpsc::channel(1).0;
    assert!(matches!(client.try_attach(other).await, Err(AttachError)));
    assert_eq!(client.write("p", "1", b"\n").await, WriteStatus::Accepted);
    // A long poll does not hold the session.
    let poll = ReadParams {
        process_id: "p".to_owned(),
        after_seq: Some(99),
        max_bytes: None,
        wait_ms: Some(60_000),
        ..ReadParams::default()
    };
    let poll = client.ask_read(poll).await;
    client.detach().await;
    assert!(poll.await.unwrap().is_err());
    client.attach().await;
    // The line was written before or after the resume; in either case the page has it.
    let page = client.read("p", 1, 60_000).await;
    assert_eq!(page.chunks[0].chunk.0, b"while\n");
    assert_eq!(client.write("p", "1", b"\n").await, WriteStatus::Accepted, "the id is remembered, the line is not read");
    assert!(client.read("p", 2, 0).await.chunks.is_empty());
    client.write("p", "2", b"\n").await;
    let story = client.story().await;
    assert_eq!(story.exit, Some(5));
    assert!(story.seqs.ends_with(&[3, 4, 5]), "{story:?}");
    client.end().await;
}

#[tokio::test]
async fn output_of_a_detached_process_is_kept_to_the_byte() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "read go; head -c 30000000 /dev/zero; echo END") }).await.unwrap();
    client.write("p", "1", b"go\n").await;
    let mut bytes = 0;
    let mut last = 0;
    // Cut and resume over and over, in the middle of the stream, until it has ended.
    loop {
        client.detach().await;
        client.attach().await;
        let page = client.read("p", last, 60_000).await;
        for chunk in &page.chunks {
            assert_eq!(chunk.seq, last + 1, "no gap");
            last += 1;
            bytes += chunk.chunk.0.len();
        }
        if page.closed {
            break;
        }
        for _event in 0..50 {
            let event = client.next().await;
            let seq = event["params"]["seq"].as_u64().unwrap();
            if seq > last {
                assert_eq!(seq, last + 1, "no gap");
                last = seq;
                bytes += event["params"]["chunk"].as_str().map_or(0, |chunk| decode(chunk).unwrap().len());
            }
            if event["method"] == "process/closed" {
                break;
            }
        }
    }
    assert_eq!(bytes, 30_000_004);
    client.end().await;
}

#[tokio::test]
async fn the_end_of_a_session_kills_what_it_started() {
    let mut client = Client::new().await;
    client.start(shell("p", "trap '' TERM INT HUP; echo $$; while :; do sleep 0.01; done")).await.unwrap();
    let event = client.next().await;
    let pid = String::from_utf8(decode(event["params"]["chunk"].as_str().unwrap()).unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::test_kill_process(pid).unwrap();
    let session = client.session.clone();
    client.end().await;
    assert!(rustix::process::test_kill_process(pid).is_err(), "it is reaped before the session's task ends");
    assert!(session.send(Command::Close).await.is_err());
}

#[tokio::test]
async fn a_detached_session_expires() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    // Long enough to attach first, and short for a test.
    let mut client = Client::with_retention(spawner, tasks, Duration::from_secs(1)).await;
    let (id, _) = client.start_scripted(&mut sender, &mut receiver).await;
    client.detach().await;
    // The next thing that happens is the end of the session, which kills the process.
    let heard = fake::hear(&mut receiver).await;
    assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 9 }, _)) if of == id), "{heard:?}");
    assert!(client.session.send(Command::Close).await.is_err());
    // The helper never says that it exited: the session's task ends all the same.
    drop(client.session);
    drop(client.attachment);
    client.tasks.join_next().await.unwrap().unwrap();
}

#[tokio::test]
async fn when_the_spawner_dies_its_processes_are_lost() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let (_id, descriptors) = client.start_scripted(&mut sender, &mut receiver).await;
    let pending = client.ask_start(shell("q", "")).await;
    fake::hear(&mut receiver).await.unwrap();
    // A process still holds its output, but the session does not wait for it.
    drop((sender, receiver));
    let error = pending.await.unwrap().unwrap_err();
    assert!(error.message.starts_with("lost: "), "{error}");
    assert_eq!(client.story().await.exit, Some(137));
    drop(descriptors);
    assert!(client.read("p", 0, 0).await.failure.is_some());
    client.end().await;
}

#[tokio::test]
async fn terminating_what_starts_kills_it_once_it_runs() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let mut client = Client::with(spawner, tasks).await;
    let started = client.ask_start(shell("p", "")).await;
    let Some((SpawnerRequest::Start { id, .. }, descriptors)) = fake::hear(&mut receiver).await else { panic!() };
    assert!(client.terminate("p").await);
    fake::say(&mut sender, &started_event(id)).await;
    started.await.unwrap().unwrap();
    let heard = fake::hear(&mut receiver).await;
    assert!(matches!(heard, Some((SpawnerRequest::Signal { id: of, signal: 9 }, _)) if of == id), "{heard:?}");
    drop((sender, receiver, descriptors));
    client.end().await;
}

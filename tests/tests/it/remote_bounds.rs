//! What all harnesses of an executor together may hold.

use crate::metrics::{of, scrape, until};
use crate::remote::{EXECUTOR, HARNESS, Raw, Remote, exec, rendezvous};
use portcullis_client::{ExecServerClient, ProcessEvent};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use portcullis_relay::fault::Fault;
use portcullis_relay::keys::Identity;
use portcullis_tests::{Place, Program, portcullis};

const MIB: usize = 1 << 20;

async fn works(remote: &Remote, place: &Place) {
    let (output, stdout, stderr) = exec(&remote.url, "box", HARNESS, &place.path(""), &["echo", "works"]).await;
    assert!(output.status.success() && stdout == "works\n", "{stderr}");
}

/// The least room that an operator may give: 128 MiB for messages on streams.
#[tokio::test]
async fn the_stream_that_holds_most_ends_when_all_hold_too_much() {
    let remote = Remote::with(&["--buffer-bytes", "67108864"]).await;
    let (place, registry, keys) = (Place::new(), remote.registry(), Identity::generate().unwrap());
    let mut streams = Vec::new();
    // Memory is reserved by powers of two: these are 64, 32 and 32 MiB, and all together as much as may be.
    for (begun, length) in [(33, 60), (17, 18), (17, 18)] {
        let mut stream = Raw::open(&registry, &keys, &keys).await.unwrap();
        stream.queue(vec![b'x'; length * MIB]);
        assert_eq!(stream.send(begun * MIB).await, None);
        streams.push(stream);
    }
    let [mut greedy, mut one, mut other] = <[Raw; 3]>::try_from(streams).ok().unwrap();
    // The control: with one of them at its end all goes on.
    let answer = one.answer().await.unwrap();
    assert!(String::from_utf8(answer).unwrap().contains("error"));
    works(&remote, &place).await;
    let mut more = Raw::open(&registry, &keys, &keys).await.unwrap();
    more.queue(vec![b'x'; 18 * MIB]);
    assert_eq!(more.send(17 * MIB).await, None);
    one.queue(vec![b'x'; 2 * MIB]);
    let _reset_of_another = one.send(MIB + MIB / 2).await;
    assert_eq!(greedy.answer().await, Err(Fault::Reset));
    for stream in [&mut one, &mut other, &mut more] {
        assert!(String::from_utf8(stream.answer().await.unwrap()).unwrap().contains("error"));
    }
    works(&remote, &place).await;
    remote.end().await;
}

/// What a process says that a client does not read stays where it is bounded, and other clients of the executor go on.
#[tokio::test]
async fn a_client_that_reads_nothing_holds_up_its_process_and_loses_nothing() {
    const FLOOD: usize = 24 * MIB;
    let (rendezvous, url, place) = rendezvous().await;
    let usual = ["serve", "--remote", &url, "--environment-id", "box", "--health-listen", "127.0.0.1:0"];
    let mut command = portcullis(&usual);
    command.env("PORTCULLIS_EXECUTOR_TOKEN", EXECUTOR);
    let mut executor = Program::start(command);
    let health = executor.line().await.replace("health is at http://", "ws://");
    assert_eq!(executor.line().await, format!("environment box is registered at {url}"));
    let remote = Remote { rendezvous, executor, url, place };
    let (client, task) = ExecServerClient::connect(&remote.options()).await.unwrap();
    let folder = Place::new();
    let words = ["sh", "-c", &format!("head -c {FLOOD} /dev/zero; echo done >end")].map(str::to_owned).to_vec();
    let cwd = WirePath::Local(AbsolutePath::new(folder.path("")).unwrap());
    let mut process = client.start(&StartParams::new("flood", words, cwd)).await.unwrap();
    let mut events = process.take_events().unwrap();
    // Another client goes on meanwhile, and what is held stays far below what the process would say.
    let mut most: f64 = 0.0;
    for _ in 0..5 {
        works(&remote, &folder).await;
        most = most.max(of(&scrape(&health).await, "relay_held_bytes"));
    }
    assert!(most < 16.0 * 1024.0 * 1024.0, "{most} bytes are held");
    assert!(!folder.has("end"), "it was not held up");
    let mut heard = 0;
    while let Some(event) = events.next().await {
        match event {
            ProcessEvent::Output { chunk, .. } => heard += chunk.len(),
            ProcessEvent::Exited { code, .. } => assert_eq!(code, 0),
            ProcessEvent::Closed { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(heard, FLOOD);
    assert!(folder.has("end"));
    drop((process, events, client));
    task.await.unwrap();
    until(&health, "relay_held_bytes", 0.0).await;
    remote.end().await;
}

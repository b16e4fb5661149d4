//! A pump between real pipes, whose process is played.

use super::*;
use crate::helper::spawner::fake;
use crate::metrics::Metrics;
use portcullis_protocol::helper::Enforced;
use portcullis_protocol::limit::TreeEnd;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{fcntl_getpipe_size, pipe_with};
use std::sync::Arc;
use tokio::task::JoinSet;

/// Neither end blocks.
fn ends() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    for end in [&reader, &writer] {
        fcntl_setfl(end, OFlags::NONBLOCK).unwrap();
    }
    (reader, writer)
}

/// Writes as much as there is room for.
fn fill(writer: &OwnedFd) -> u64 {
    let room = fcntl_getpipe_size(writer).unwrap();
    rustix::io::write(writer, &vec![7; room]).unwrap() as u64
}

/// The output up to the first word that is something else, or until there is so much of it.
async fn output(feeds: &mut mpsc::Receiver<(u64, Box<Feed>)>, most: u64) -> (u64, Option<Feed>) {
    let mut length = 0;
    while length < most {
        match *feeds.recv().await.unwrap().1 {
            Feed::Output { bytes, .. } => length += bytes.len() as u64,
            other => return (length, Some(other)),
        }
    }
    (length, None)
}

#[tokio::test]
async fn what_both_pipes_hold_when_a_process_ends_comes_before_its_exit() {
    let mut tasks = JoinSet::new();
    let spawner = fake::spawner(&mut tasks);
    let ((out, stdout), (err, stderr)) = (ends(), ends());
    let ends = Ends { sources: vec![(Stream::Stdout, out), (Stream::Stderr, err)], sink: None };
    let (exits, exit) = oneshot::channel();
    let child = Child { id: 0, pid: 0, enforced: Enforced::default(), limits: Vec::new(), tree: TreeEnd::Descendants, exit };
    let (feed, mut feeds) = mpsc::channel(1);
    let running = Running::new(&Arc::new(Metrics::new()), None, "s".into(), 0, "none");
    let (pump, controls) = Pump::new(0, child, ends, spawner, feed, running, &Budget::new(4 * pipe::GROWN)).unwrap();
    tasks.spawn(async move {
        pump.run().await;
    });

    let mut granted = 0;
    let has_grown = |writer: &OwnedFd| fcntl_getpipe_size(writer).unwrap() == pipe::GROWN;
    for _round in 0..100 {
        if has_grown(&stdout) && has_grown(&stderr) {
            break;
        }
        let written = fill(&stdout) + fill(&stderr);
        granted += written;
        controls.grant(granted);
        assert_eq!(output(&mut feeds, written).await.0, written);
    }
    assert!(has_grown(&stdout) && has_grown(&stderr));

    let held = fill(&stdout) + fill(&stderr);
    assert_eq!(held, 2 * pipe::GROWN as u64);
    let ended = Ended { status: ExitStatus::Code(3), denials: Denials::default(), failure: None, limits: Vec::new() };
    exits.send(ended).unwrap();
    let (length, next) = output(&mut feeds, u64::MAX).await;
    assert!(length == held && matches!(next, Some(Feed::Exited { code: 3, .. })), "{length} bytes, then {next:?}");
    drop((stdout, stderr));
    assert!(matches!(output(&mut feeds, u64::MAX).await, (0, Some(Feed::Closed))));
    drop(controls);
    tasks.shutdown().await;
}

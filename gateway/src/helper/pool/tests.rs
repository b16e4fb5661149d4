use super::super::socket::pair_up;
use super::super::spawner::fake;
use super::*;
use portcullis_protocol::helper::{Enforced, SpawnerEvent, SpawnerRequest, WorkerAnswer, encode};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, Grant, Grants, Network};
use tokio::net::UnixStream;

#[tokio::test]
async fn a_worker_that_the_kernel_refuses_is_tried_again() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    let (played, mut lines) = mpsc::channel::<UnixStream>(1);
    tasks.spawn(async move {
        let mut refusals = 3;
        while let Some((request, descriptors)) = fake::hear(&mut receiver).await {
            let SpawnerRequest::Worker { id, .. } = request else { continue };
            if refusals > 0 {
                refusals -= 1;
                let reason = "fork a worker: Resource temporarily unavailable".to_owned();
                fake::say(&mut sender, &SpawnerEvent::WorkerFailed { id, reason }).await;
                continue;
            }
            let control = std::os::unix::net::UnixStream::from(descriptors.into_iter().nth(1).unwrap());
            control.set_nonblocking(true).unwrap();
            played.send(UnixStream::from_std(control).unwrap()).await.unwrap();
        }
    });
    let confining =
        tokio::spawn(async move { confined(None, None, false, spawner, SHORTAGE).await.map(|(worker, _task)| worker.id()) });
    let (mut answers, mut setups) = pair_up(lines.recv().await.unwrap());
    setups.recv().await.unwrap().unwrap();
    answers.send(&encode(&WorkerAnswer::Ready(Enforced::default()), &[], 0).unwrap(), &[]).await.unwrap();
    assert_eq!(confining.await.unwrap().unwrap(), 3, "the fourth that was requested");
}

#[tokio::test]
async fn sessions_take_turns_when_many_workers_are_made() {
    let mut tasks = JoinSet::new();
    let (spawner, _sender, mut receiver) = fake::scripted(&mut tasks);
    let (pool, task) = Pool::start(spawner, Arc::new(Metrics::new()));
    tasks.spawn(task);
    let (order, mut done) = mpsc::channel(64);
    let ask = |session: &'static str, nth: u32| {
        let (pool, order) = (pool.clone(), order.clone());
        async move {
            let entry = Grant::new(AbsolutePath::new(format!("/{nth}")).unwrap(), Access::Read);
            let files = Files::Restricted(Grants::new(vec![entry], Vec::new()).unwrap().into());
            let named = Named::new(Policy { files, network: Network::Restricted });
            let worker = pool.worker(&session.into(), Some(&named), None).await.unwrap();
            order.send((session, worker)).await.unwrap();
        }
    };
    for nth in 0..20 {
        tasks.spawn(ask("greedy", nth));
    }
    // In line behind all of those.
    tasks.spawn(ask("other", 0));
    // Each worker is made once it was requested, one after the other.
    tasks.spawn(async move {
        while let Some((request, descriptors)) = fake::hear(&mut receiver).await {
            let SpawnerRequest::Worker { .. } = request else { continue };
            tokio::spawn(async move {
                let mut descriptors = descriptors.into_iter();
                let (_requests, control) = (descriptors.next(), descriptors.next().unwrap());
                let control = std::os::unix::net::UnixStream::from(control);
                control.set_nonblocking(true).unwrap();
                let (mut answers, mut setups) = pair_up(UnixStream::from_std(control).unwrap());
                // A spare waits here until it is needed.
                if let Ok(Some(_setup)) = setups.recv().await {
                    answers.send(&encode(&WorkerAnswer::Ready(Enforced::default()), &[], 0).unwrap(), &[]).await.unwrap();
                }
            });
        }
    });
    let mut sessions = Vec::new();
    let mut kept = Vec::new();
    for _worker in 0..21 {
        let (session, worker) = done.recv().await.unwrap();
        sessions.push(session);
        kept.push(worker);
    }
    let at = sessions.iter().position(|session| *session == "other").unwrap();
    assert!(at <= 2 * MAKING, "{at} of {sessions:?}");
}

#[tokio::test]
async fn a_lasting_refusal_is_reported_with_its_cause() {
    let mut tasks = JoinSet::new();
    let (spawner, mut sender, mut receiver) = fake::scripted(&mut tasks);
    tasks.spawn(async move {
        while let Some((request, _descriptors)) = fake::hear(&mut receiver).await {
            if let SpawnerRequest::Worker { id, .. } = request {
                let reason = "fork a worker: Resource temporarily unavailable".to_owned();
                fake::say(&mut sender, &SpawnerEvent::WorkerFailed { id, reason }).await;
            }
        }
    });
    let Err(error) = confined(None, None, false, spawner, Duration::ZERO).await else { panic!("a worker that was refused") };
    assert_eq!(error.to_string(), "no worker could be started: fork a worker: Resource temporarily unavailable");
}

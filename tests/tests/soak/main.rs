//! Soak: clients that work through links which are cut at random bytes, all the time, and lose nothing.
//!
//! For a few seconds with every `cargo test`; for longer with `SOAK_SECONDS=3600 cargo test --workspace --test soak --
//! --nocapture`, which prints what it counted. `SOAK_CLIENTS` says how many there are, `SOAK_SEED` repeats the cuts of a run, as
//! far as chance allows, and `AWAY_SECONDS` says how long a client stays away.

#![expect(clippy::unwrap_used, reason = "what fails in a test shall end it")]

mod cutter;
mod work;

use cutter::Cutter;
use portcullis_client::{ClientStatus, ExecServerClient, ExecServerClientConnectOptions};
use portcullis_tests::{Place, Proxy, Server};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use work::{Counts, Kind, Worker};

/// After so much silence a client gives a link up. Where the machine is slow this cuts links too, which is fine.
const PATIENCE_WITH_LINKS: Duration = Duration::from_millis(500);

#[tokio::test]
async fn nothing_is_lost_or_doubled_however_links_are_cut() {
    let (seconds, seed) = (number("SOAK_SECONDS", 8), number("SOAK_SEED", 1));
    let (server, place) = (Server::start().await, Place::new());
    let cutter = Cutter::before(&server.url, seed).await;
    let counts = Arc::new(Counts::default());
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let (mut jobs, mut clients) = (JoinSet::new(), Vec::new());
    // Each with one job of every kind at a time.
    for nth in 0..number("SOAK_CLIENTS", 4) {
        let client = connect(&cutter.url).await;
        for kind in Kind::ALL {
            let worker = Worker {
                client: client.0.clone(),
                directory: place.path(""),
                name: format!("{nth}-{kind:?}"),
                counts: Arc::clone(&counts),
            };
            jobs.spawn(worker.run(kind, deadline));
        }
        clients.push(client);
    }
    timeout_at(deadline, std::future::pending::<()>()).await.unwrap_err();
    // What is under way ends undisturbed, so that the end of everything is seen.
    cutter.calm();
    while let Some(ended) = jobs.join_next().await {
        ended.unwrap();
    }
    let cuts = cutter.end().await;
    println!("seed {seed}, {seconds} s, {cuts}, {counts}");
    for (client, task) in clients {
        drop(client);
        task.await.unwrap();
    }
    assert_ne!(cuts.reset, 0, "links were cut: {cuts}");
    counts.check();
}

/// A process writes 32 MiB a second while its client is away: what memory and disk do not hold waits in the process.
#[tokio::test]
async fn nothing_of_a_flood_is_lost_while_its_client_is_away() {
    let seconds = number("AWAY_SECONDS", 3);
    let (server, place) = (Server::start().await, Place::new());
    let proxy = Proxy::before(&server.url).await;
    let mut options = ExecServerClientConnectOptions::new(&proxy.url, "away");
    options.recovery_deadline = Duration::from_secs(seconds + 45);
    let (client, task) = ExecServerClient::connect(&options).await.unwrap();
    let counts = Arc::new(Counts::default());
    let worker =
        Worker { client: client.clone(), directory: place.path(""), name: "flood".to_owned(), counts: Arc::clone(&counts) };
    let mut status = client.watch_status();
    let away = async {
        let begun = Instant::now();
        proxy.refuse();
        status.wait_for(|status| *status == ClientStatus::Recovering).await.unwrap();
        timeout_at(begun + Duration::from_secs(seconds), std::future::pending::<()>()).await.unwrap_err();
        proxy.heal();
        status.wait_for(|status| matches!(status, ClientStatus::Connected { .. })).await.unwrap();
        begun.elapsed()
    };
    let flood = worker.flood(seconds + 2, 32 << 20);
    let (bytes, away) = tokio::join!(flood, away);
    println!("{bytes} bytes written in {} s, of which its client was away for {away:.1?}: {counts}", seconds + 2);
    counts.check_whole();
    drop((worker, client));
    task.await.unwrap();
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// A client that comes back, and notices soon that a link says nothing any more.
async fn connect(url: &str) -> (ExecServerClient, tokio::task::JoinHandle<()>) {
    let mut options = ExecServerClientConnectOptions::new(url, "soak");
    options.silence_timeout = Some(PATIENCE_WITH_LINKS);
    options.connect_timeout = PATIENCE_WITH_LINKS;
    options.initialize_timeout = PATIENCE_WITH_LINKS;
    loop {
        // The first connection has no session to come back to, so a cut during its handshake is for the caller to see.
        if let Ok(connected) = ExecServerClient::connect(&options).await {
            return connected;
        }
    }
}

//! A proxy that cuts every link after a random number of bytes in one of its directions: in the handshake, in a frame, between
//! frames. Some links do not break but fall silent.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// One link in so many falls silent instead of breaking.
const SILENT: u64 = 24;
/// How long it stays so.
const SILENCE: Duration = Duration::from_secs(2);

/// The proxy.
pub(crate) struct Cutter {
    pub(crate) url: String,
    is_calm: watch::Sender<bool>,
    counts: Arc<Atomics>,
    tasks: JoinSet<()>,
}

#[derive(Default)]
struct Atomics {
    links: AtomicU64,
    reset: AtomicU64,
    silent: AtomicU64,
}

/// What was done to links.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cuts {
    pub(crate) links: u64,
    pub(crate) reset: u64,
    pub(crate) silent: u64,
}

impl fmt::Display for Cuts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} links, {} reset at a random byte, {} fell silent", self.links, self.reset, self.silent)
    }
}

impl Cutter {
    pub(crate) async fn before(url: &str, seed: u64) -> Self {
        let server: SocketAddr = url.trim_start_matches("ws://").parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("ws://{}", listener.local_addr().unwrap());
        let (is_calm, calm) = watch::channel(false);
        let (counts, mut tasks) = (Arc::<Atomics>::default(), JoinSet::new());
        tasks.spawn(accept(listener, server, seed, calm, Arc::clone(&counts)));
        Self { url, is_calm, counts, tasks }
    }

    /// From now on everything passes; what is silent breaks.
    pub(crate) fn calm(&self) {
        self.is_calm.send_replace(true);
    }

    pub(crate) async fn end(mut self) -> Cuts {
        self.tasks.shutdown().await;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Cuts { links: read(&self.counts.links), reset: read(&self.counts.reset), silent: read(&self.counts.silent) }
    }
}

/// Splitmix64: the same numbers for the same seed.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of bytes whose length in bits is as random as its bits: small ones come as often as large ones.
    fn bytes(&mut self, bits: u64) -> u64 {
        let mask = (1_u64 << (4 + self.next() % (bits - 3))) - 1;
        (self.next() & mask) + 1
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, seed: u64, calm: watch::Receiver<bool>, counts: Arc<Atomics>) {
    let (mut links, mut chance) = (JoinSet::new(), Chance(seed));
    while let Ok((client, _address)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(server).await else { continue };
        for socket in [&client, &server] {
            socket.set_zero_linger().unwrap();
            socket.set_nodelay(true).unwrap();
        }
        counts.links.fetch_add(1, Ordering::Relaxed);
        let (up, down, is_silent) = (chance.bytes(16), chance.bytes(22), chance.next() % SILENT == 0);
        let (mut calm, counts) = (calm.clone(), Arc::clone(&counts));
        links.spawn(async move {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let is_cut = tokio::select! {
                is_cut = pass(&mut from_client, &mut to_server, up, &calm) => is_cut,
                is_cut = pass(&mut from_server, &mut to_client, down, &calm) => is_cut,
            };
            if is_cut && is_silent {
                counts.silent.fetch_add(1, Ordering::Relaxed);
                // Open, and nothing passes any more: nobody is told.
                let _calm_or_enough = tokio::time::timeout(SILENCE, calm.wait_for(|calm| *calm)).await;
            } else if is_cut {
                counts.reset.fetch_add(1, Ordering::Relaxed);
            }
        });
        while links.try_join_next().is_some() {}
    }
}

/// Passes bytes on; whether it was the cut that ended it.
async fn pass(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, mut left: u64, calm: &watch::Receiver<bool>) -> bool {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return false,
            Ok(length) => length,
        };
        let passes = if *calm.borrow() { length } else { length.min(usize::try_from(left).unwrap_or(usize::MAX)) };
        if to.write_all(&buffer[..passes]).await.is_err() {
            return false;
        }
        if passes < length {
            return true;
        }
        left = left.saturating_sub(length as u64);
    }
}

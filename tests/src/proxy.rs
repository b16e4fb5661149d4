//! A cable that a test can cut: a proxy on loopback between a client and a server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// No end of what passes.
const ENDLESS: u64 = u64::MAX;

/// Forwards bytes both ways, until it is told otherwise.
#[derive(Debug)]
pub struct Proxy {
    /// Where clients find it.
    pub url: String,
    state: watch::Sender<State>,
    /// Bytes that still pass towards clients.
    left: Arc<AtomicU64>,
    tasks: JoinSet<()>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// Connections of an earlier age are cut.
    age: u64,
    /// Connections up to this number pass nothing on, and stay.
    frozen: u64,
    /// Connections so far.
    count: u64,
    refuses: bool,
}

impl Proxy {
    /// Starts one before a server.
    ///
    /// # Panics
    /// The system refuses.
    pub async fn before(url: &str) -> Self {
        let server: SocketAddr = url.trim_start_matches("ws://").parse().expect("an address");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen on loopback");
        let url = format!("ws://{}", listener.local_addr().expect("an address"));
        let (state, watched) = watch::channel(State::default());
        let (left, mut tasks) = (Arc::new(AtomicU64::new(ENDLESS)), JoinSet::new());
        tasks.spawn(accept(listener, server, state.clone(), watched, Arc::clone(&left)));
        Self { url, state, left, tasks }
    }

    /// Cuts every connection: both sides are reset.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.age += 1);
    }

    /// Cuts every connection once so many more bytes came from the server.
    pub fn cut_after(&self, bytes: u64) {
        self.left.store(bytes, Ordering::SeqCst);
    }

    /// Passes nothing more on of the connections that there are, and leaves them open: nobody is told. New ones work.
    pub fn freeze(&self) {
        self.state.send_modify(|state| state.frozen = state.count);
    }

    /// Cuts every connection and resets new ones.
    pub fn refuse(&self) {
        self.state.send_modify(|state| {
            state.age += 1;
            state.refuses = true;
        });
    }

    /// Everything passes again.
    pub fn heal(&self) {
        self.left.store(ENDLESS, Ordering::SeqCst);
        self.state.send_modify(|state| (state.frozen, state.refuses) = (0, false));
    }

    /// Ends it, with its connections.
    pub async fn end(mut self) {
        self.tasks.shutdown().await;
    }
}

async fn accept(
    listener: TcpListener,
    server: SocketAddr,
    state: watch::Sender<State>,
    watched: watch::Receiver<State>,
    left: Arc<AtomicU64>,
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _address)) = listener.accept().await {
        client.set_zero_linger().expect("a socket option");
        if watched.borrow().refuses {
            continue;
        }
        let Ok(server) = TcpStream::connect(server).await else { continue };
        server.set_zero_linger().expect("a socket option");
        client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).expect("a socket option");
        state.send_modify(|state| state.count += 1);
        let (watched, state, left) = (watched.clone(), state.clone(), Arc::clone(&left));
        let born = *watched.borrow();
        connections.spawn(carry(client, server, born, watched, state, left));
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(
    client: TcpStream,
    server: TcpStream,
    born: State,
    watched: watch::Receiver<State>,
    state: watch::Sender<State>,
    left: Arc<AtomicU64>,
) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let endless = AtomicU64::new(ENDLESS);
    // Where one direction ends the other does.
    tokio::select! {
        () = pass(from_client, to_server, born, watched.clone(), &endless, &state) => {}
        () = pass(from_server, to_client, born, watched, &left, &state) => {}
    }
}

/// Passes bytes on until the end, or a cut.
async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    born: State,
    mut watched: watch::Receiver<State>,
    left: &AtomicU64,
    state: &watch::Sender<State>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let State { age, frozen, .. } = *watched.borrow_and_update();
        if age != born.age {
            return;
        }
        let is_frozen = born.count <= frozen;
        let length = tokio::select! {
            changed = watched.changed() => match changed {
                Ok(()) => continue,
                Err(_proxy_gone) => return,
            },
            read = from.read(&mut buffer), if !is_frozen => match read {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            },
        };
        let may = left.load(Ordering::SeqCst);
        let passes = length.min(usize::try_from(may).unwrap_or(usize::MAX));
        let written = tokio::select! {
            written = to.write_all(&buffer[..passes]) => written.is_ok(),
            () = cut(&mut watched, born.age) => false,
        };
        if !written {
            return;
        }
        if may != ENDLESS {
            left.store(may - passes as u64, Ordering::SeqCst);
        }
        if passes < length || may == passes as u64 {
            left.store(ENDLESS, Ordering::SeqCst);
            state.send_modify(|state| state.age += 1);
            return;
        }
    }
}

async fn cut(watched: &mut watch::Receiver<State>, age: u64) {
    let _proxy_gone = watched.wait_for(|state| state.age != age).await;
}

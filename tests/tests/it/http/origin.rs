//! Small servers on loopback that requests go to.

use portcullis_tests::{Server, portcullis};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// A server that answers by the path, and ends with its value.
pub(super) struct Origin {
    pub(super) port: u16,
    pub(super) counts: Arc<Counts>,
    _tasks: JoinSet<()>,
}

/// What happened at a server.
#[derive(Default)]
pub(super) struct Counts {
    /// Connections that were accepted.
    pub(super) accepted: AtomicUsize,
    /// Those of them that the other side has closed while they had nothing to say.
    pub(super) left: AtomicUsize,
    /// Bytes of the endless body that went out.
    pub(super) written: AtomicU64,
}

/// Bytes of the body at `/flood`.
pub(super) const FLOOD: u64 = 128 << 20;

impl Origin {
    pub(super) async fn start() -> Self {
        Self::serve(None).await
    }

    pub(super) async fn with_tls(tls: TlsAcceptor) -> Self {
        Self::serve(Some(tls)).await
    }

    async fn serve(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, counts) = (listener.local_addr().unwrap().port(), Arc::new(Counts::default()));
        let (shared, mut tasks) = (Arc::clone(&counts), JoinSet::new());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, _peer) = listener.accept().await.unwrap();
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                let (tls, counts) = (tls.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    // Whoever leaves early is no matter of ours.
                    let _left = match tls {
                        Some(tls) => match tls.accept(socket).await {
                            Ok(socket) => answer(socket, &counts).await,
                            Err(error) => Err(error),
                        },
                        None => answer(socket, &counts).await,
                    };
                });
            }
        });
        Self { port, counts, _tasks: tasks }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(super) fn accepted(&self) -> usize {
        self.counts.accepted.load(Ordering::SeqCst)
    }
}

/// Reads one request and answers it.
async fn answer(mut socket: impl AsyncRead + AsyncWrite + Unpin, counts: &Counts) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let line = head.lines().next().unwrap_or_default();
    let (method, target) = (line.split(' ').next().unwrap_or_default(), line.split(' ').nth(1).unwrap_or_default().to_owned());
    if method == "CONNECT" {
        let mut there = TcpStream::connect(&target).await?;
        socket.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
        return tokio::io::copy_bidirectional(&mut socket, &mut there).await.map(|_bytes| ());
    }
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    socket.read_exact(&mut body).await?;
    let plain = |text: &str| format!("HTTP/1.1 200 OK\r\nX-Two: 1\r\nX-Two: 2\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    match target.as_str() {
        "/loop" => socket.write_all(b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n").await,
        "/silent" => wait_for_the_end(&mut socket, counts).await,
        "/stalls" => {
            socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc").await?;
            wait_for_the_end(&mut socket, counts).await
        }
        "/breaks" => socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc").await,
        "/garbage" => socket.write_all(b"what is this\r\n\r\n").await,
        "/announced" => socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\nabc").await,
        "/endless" => {
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            loop {
                socket.write_all(&[b'x'; 65536]).await?;
            }
        }
        "/flood" => {
            socket.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {FLOOD}\r\n\r\n").as_bytes()).await?;
            let part = part_of_the_flood();
            while counts.written.load(Ordering::SeqCst) < FLOOD {
                socket.write_all(&part).await?;
                counts.written.fetch_add(part.len() as u64, Ordering::SeqCst);
            }
            Ok(())
        }
        "/megabytes" => {
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            socket.write_all(&vec![b'm'; 3 << 20]).await
        }
        redirect if redirect.starts_with("/to?") => {
            let text = format!("HTTP/1.1 307 There\r\nLocation: {}\r\nContent-Length: 0\r\n\r\n", &redirect[4..]);
            socket.write_all(text.as_bytes()).await
        }
        _ => socket.write_all(plain(&format!("{head}{}", String::from_utf8_lossy(&body))).as_bytes()).await,
    }
}

/// One period of what `/flood` repeats: no two of its bytes beside one another are the same.
pub(super) fn part_of_the_flood() -> Vec<u8> {
    (0..65536_u32).map(|nth| u8::try_from(nth % 251).unwrap()).collect()
}

async fn wait_for_the_end(socket: &mut (impl AsyncRead + Unpin), counts: &Counts) -> std::io::Result<()> {
    let ended = socket.read_u8().await;
    counts.left.fetch_add(1, Ordering::SeqCst);
    ended.map(|_nothing_more_is_due| ())
}

/// A server of ours in an environment without proxies, but for what the test says.
pub(super) async fn server(arguments: &[&str], environment: &[(&str, &str)]) -> Server {
    let mut command = portcullis(&[&["serve", "--insecure-no-auth"], arguments].concat());
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUEST_METHOD"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command.envs(environment.iter().copied());
    Server::with(command).await
}

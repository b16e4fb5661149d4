//! What this machine takes for the same thing without a server of this wire, measured in the same run.

use crate::Failure;
use crate::ground::Ground;
use crate::rows::milliseconds;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio_tungstenite::tungstenite::{Message, WebSocket, accept, client};

/// A WebSocket that echoes, in a thread of its own.
pub(crate) struct Machine {
    url: String,
    socket: Option<WebSocket<TcpStream>>,
    echoes: Option<JoinHandle<()>>,
}

impl Machine {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("ws://{}", listener.local_addr()?);
        let echoes = std::thread::spawn(move || {
            // One at a time: the socket that the rows use comes last, and its end is the end.
            while let Ok((stream, _from)) = listener.accept() {
                let _gone = stream.set_nodelay(true);
                let Ok(mut socket) = accept(stream) else { return };
                let mut has_echoed = false;
                while let Ok(message) = socket.read() {
                    if message.is_close() || socket.send(message).is_err() {
                        break;
                    }
                    has_echoed = true;
                }
                if has_echoed {
                    return;
                }
            }
        });
        Ok(Self { url, socket: None, echoes: Some(echoes) })
    }

    fn dial(&self) -> Result<WebSocket<TcpStream>, Failure> {
        let stream = TcpStream::connect(self.url.trim_start_matches("ws://"))?;
        stream.set_nodelay(true)?;
        let (socket, _response) = client(self.url.as_str(), stream).map_err(|error| format!("upgrade: {error}"))?;
        Ok(socket)
    }

    /// A connection and its upgrade.
    pub(crate) fn upgrade(&mut self, _ground: &Ground) -> Result<f64, Failure> {
        let begun = Instant::now();
        let socket = self.dial()?;
        let taken = milliseconds(begun);
        socket.get_ref().shutdown(std::net::Shutdown::Both)?;
        Ok(taken)
    }

    /// 100 bytes there and back.
    pub(crate) fn echo(&mut self, _ground: &Ground) -> Result<f64, Failure> {
        let mut socket = match self.socket.take() {
            Some(socket) => socket,
            None => self.dial()?,
        };
        let begun = Instant::now();
        socket.send(Message::text("x".repeat(100)))?;
        socket.read()?;
        let taken = milliseconds(begun);
        self.socket = Some(socket);
        Ok(taken)
    }

    /// A file that is there, written over.
    pub(crate) fn write(ground: &Ground, bytes: usize) -> Result<f64, Failure> {
        let (path, content) = (ground.file(&format!("machine-{bytes}")), vec![b'z'; bytes]);
        let begun = Instant::now();
        std::fs::File::options().create(true).truncate(false).write(true).open(path)?.write_all(&content)?;
        Ok(milliseconds(begun))
    }

    /// A program that does nothing.
    pub(crate) fn spawn(&mut self, _ground: &Ground) -> Result<f64, Failure> {
        let begun = Instant::now();
        Command::new("/bin/true").stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        Ok(milliseconds(begun))
    }

    /// 256 MiB from thread to thread.
    pub(crate) fn copy(&mut self, _ground: &Ground) -> Result<f64, Failure> {
        const BLOCKS: usize = 256;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut sender = TcpStream::connect(listener.local_addr()?)?;
        let (mut receiver, _from) = listener.accept()?;
        let begun = Instant::now();
        let sends = std::thread::spawn(move || (0..BLOCKS).try_for_each(|_block| sender.write_all(&[0; 1 << 20])));
        let (mut buffer, mut received) = (vec![0; 1 << 20], 0_usize);
        loop {
            match receiver.read(&mut buffer)? {
                0 => break,
                read => received += read,
            }
        }
        sends.join().map_err(|_panic| "a thread panicked")??;
        Ok(received as f64 / 1e6 / begun.elapsed().as_secs_f64())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.socket.is_none() {
            self.socket = self.dial().ok();
            let said = self.socket.as_mut().map(|socket| socket.send(Message::text("end")));
            drop(said);
        }
        drop(self.socket.take());
        if let Some(echoes) = self.echoes.take() {
            let _panicked = echoes.join();
        }
    }
}

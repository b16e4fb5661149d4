//! The gateway on standard input and output: one message a line, one session, which ends with the input.

use crate::caller::Transport;
use crate::link::{Link, LinkEnd, Outgoing};
use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};

/// Bytes of one line, as of one WebSocket message.
const LINE: usize = 64 << 20;

/// A link over two byte streams, and the future that carries its messages until the input ends.
pub(crate) fn link<R, W>(input: R, output: W) -> (Link, impl Future<Output = ()>)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let (link, end) = Link::pair("JSON-RPC message from exec-server stdio", false);
    (link.over(Transport::Stdio, ""), carry(end, input, output))
}

async fn carry<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(end: LinkEnd, input: R, mut output: W) {
    let LinkEnd { incoming, mut outgoing, .. } = end;
    let read = async move {
        let mut input = BufReader::new(input);
        loop {
            match next_line(&mut input).await {
                Ok(Some(line)) if line.is_empty() => {}
                Ok(Some(line)) => {
                    if incoming.send(line).await.is_err() {
                        return;
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("standard input: {error}");
                    return;
                }
            }
        }
    };
    let write = async move {
        while let Some(message) = outgoing.recv().await {
            let (text, _room) = match message {
                Outgoing::Text(text) => (text, None),
                Outgoing::Large(text, room) => (text, Some(room)),
                Outgoing::Ping(_) | Outgoing::Binary { .. } => continue,
                Outgoing::Close { .. } => return,
            };
            let mut line = text.into_bytes();
            line.push(b'\n');
            if output.write_all(&line).await.is_err() || output.flush().await.is_err() {
                return;
            }
        }
    };
    // The input's end drops the link's sender, so the connection ends, and with it what there is to write.
    tokio::join!(read, write);
}

/// The next line without its end and the blanks around it; none at the end of the input, where a line without an end is
/// no message.
async fn next_line(input: &mut (impl AsyncBufRead + Unpin)) -> std::io::Result<Option<Bytes>> {
    let mut line = Vec::new();
    loop {
        let available = input.fill_buf().await?;
        if available.is_empty() {
            return Ok(None);
        }
        let (taken, ended) = match available.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (available.len(), false),
        };
        if line.len() + taken > LINE {
            return Err(std::io::Error::other(format!("a line is longer than {LINE} bytes; the connection ends")));
        }
        line.extend_from_slice(&available[..taken]);
        input.consume(taken);
        if ended {
            return Ok(Some(Bytes::copy_from_slice(line.trim_ascii())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_in_any_ending_and_no_last_half() {
        let mut input = BufReader::with_capacity(3, &b"{1}\r\n\n  \r\n{2}\nhalf"[..]);
        let mut seen = Vec::new();
        while let Some(line) = next_line(&mut input).await.unwrap() {
            seen.push(line);
        }
        assert_eq!(seen, ["{1}", "", "", "{2}"]);
    }
}

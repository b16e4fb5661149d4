//! Listen URLs.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenUrl {
    /// WebSocket on a literal address; port 0 lets the system choose.
    WebSocket(SocketAddr),
    /// The same within TLS.
    WebSocketTls(SocketAddr),
    /// WebSocket over a unix socket at an absolute path, in a directory that exists.
    Unix(PathBuf),
    /// Standard input and output.
    Stdio,
}

/// Why a text is no listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecServerListenUrlParseError {
    /// `ws://` or `wss://` with something that is no literal address and port.
    #[error("invalid websocket --listen URL `{0}`; expected `ws://IP:PORT`")]
    InvalidWebSocketListenUrl(String),
    /// `unix:` with something that is no absolute path.
    #[error("invalid unix --listen URL `{0}`; expected `unix:PATH` with an absolute path")]
    InvalidUnixListenUrl(String),
    /// Another scheme.
    #[error("unsupported --listen URL `{0}`; expected `ws://IP:PORT` or `stdio`, or `wss://IP:PORT` or `unix:PATH`")]
    UnsupportedListenUrl(String),
}

impl std::str::FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if matches!(url, "stdio" | "stdio://") {
            return Ok(Self::Stdio);
        }
        if let Some(path) = url.strip_prefix("unix:") {
            let path = Path::new(path.strip_prefix("//").unwrap_or(path));
            return match path.is_absolute() && path.file_name().is_some() {
                true => Ok(Self::Unix(path.to_owned())),
                false => Err(ExecServerListenUrlParseError::InvalidUnixListenUrl(url.to_owned())),
            };
        }
        let address =
            |text: &str| text.parse().map_err(|_| ExecServerListenUrlParseError::InvalidWebSocketListenUrl(url.to_owned()));
        match (url.strip_prefix("ws://"), url.strip_prefix("wss://")) {
            (Some(text), _) => address(text).map(Self::WebSocket),
            (_, Some(text)) => address(text).map(Self::WebSocketTls),
            (None, None) => Err(ExecServerListenUrlParseError::UnsupportedListenUrl(url.to_owned())),
        }
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WebSocket(address) => write!(f, "ws://{address}"),
            Self::WebSocketTls(address) => write!(f, "wss://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Stdio => f.write_str("stdio"),
        }
    }
}

impl ListenUrl {
    /// The address that others dial; none of a unix socket or a stream.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::WebSocket(address) | Self::WebSocketTls(address) => Some(*address),
            Self::Unix(_) | Self::Stdio => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::DEFAULT_LISTEN_URL;
    use super::*;

    #[test]
    fn listen_urls() {
        let parse = |url: &str| url.parse::<ListenUrl>();
        assert_eq!(parse(DEFAULT_LISTEN_URL), Ok(ListenUrl::WebSocket(SocketAddr::from(([127, 0, 0, 1], 0)))));
        assert_eq!(parse("ws://[::1]:9"), Ok(ListenUrl::WebSocket("[::1]:9".parse().unwrap())));
        assert_eq!(parse("wss://127.0.0.1:9"), Ok(ListenUrl::WebSocketTls("127.0.0.1:9".parse().unwrap())));
        for unix in ["unix:/run/x", "unix:///run/x"] {
            assert_eq!(parse(unix), Ok(ListenUrl::Unix("/run/x".into())));
        }
        assert_eq!(parse("stdio"), Ok(ListenUrl::Stdio));
        assert_eq!(parse("stdio://"), Ok(ListenUrl::Stdio));
        for (url, expect) in [
            ("ws://localhost:1", "invalid websocket --listen URL `ws://localhost:1`; expected `ws://IP:PORT`"),
            ("wss://localhost:1", "invalid websocket --listen URL `wss://localhost:1`; expected `ws://IP:PORT`"),
            ("ws://127.0.0.1:1/x", "invalid websocket --listen URL `ws://127.0.0.1:1/x`; expected `ws://IP:PORT`"),
            (
                "http://127.0.0.1:1",
                "unsupported --listen URL `http://127.0.0.1:1`; expected `ws://IP:PORT` or `stdio`, or `wss://IP:PORT` or `unix:PATH`",
            ),
            ("unix:run/x", "invalid unix --listen URL `unix:run/x`; expected `unix:PATH` with an absolute path"),
            ("unix:/", "invalid unix --listen URL `unix:/`; expected `unix:PATH` with an absolute path"),
        ] {
            assert_eq!(parse(url).unwrap_err().to_string(), expect);
        }
    }
}

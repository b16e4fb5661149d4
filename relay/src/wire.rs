//! The way to the registry and to the rendezvous: TCP, and TLS over it where the URL says so.

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use url::{Host, Url};

/// Whom to believe at `https://` and `wss://`.
pub type Tls = Arc<ClientConfig>;

/// What bytes travel over.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// Connects to the host of a URL.
pub(crate) async fn open(url: &Url, tls: Option<&Tls>) -> Result<Box<dyn Wire>, String> {
    let (Some(host), Some(port)) = (url.host(), url.port_or_known_default()) else {
        return Err("the URL has no host".to_owned());
    };
    let stream = match &host {
        Host::Domain(name) => TcpStream::connect((*name, port)).await,
        Host::Ipv4(address) => TcpStream::connect((*address, port)).await,
        Host::Ipv6(address) => TcpStream::connect((*address, port)).await,
    };
    let stream = stream.map_err(|error| format!("connect to {host}:{port}: {error}"))?;
    // Without this a record waits 40 ms for the delayed acknowledgement of the one before it.
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    if !matches!(url.scheme(), "https" | "wss") {
        return Ok(Box::new(stream));
    }
    let tls = tls.ok_or("nobody is believed yet: name the certificates that the server's own descends from")?;
    let name = match &host {
        Host::Domain(name) => ServerName::try_from((*name).to_owned()).map_err(|error| format!("{name}: {error}"))?,
        Host::Ipv4(address) => ServerName::from(IpAddr::V4(*address)),
        Host::Ipv6(address) => ServerName::from(IpAddr::V6(*address)),
    };
    let connected = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await;
    Ok(Box::new(connected.map_err(|error| format!("TLS with {host}: {error}"))?))
}

/// Whether a URL leads to this very machine, where nobody listens on the way.
pub(crate) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

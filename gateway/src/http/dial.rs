//! From a place to bytes that flow: judged by name, looked up once, judged by address, and that very address connected to.

use super::egress::Refused;
use super::proxies::Proxy;
use super::{Outbound, failed};
use portcullis_protocol::rpc::RpcError;
use rustls::pki_types::ServerName;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use url::{Host, Url};

/// How long an address may say nothing while there are others to try.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Addresses of one name that are tried; a name server may give thousands.
const ADDRESSES: usize = 16;
/// Bytes of a proxy's answer to CONNECT.
const TUNNEL_ANSWER: usize = 8192;

/// What a request is sent over.
pub(super) trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// A way to a place.
pub(super) struct Way {
    pub(super) wire: Box<dyn Wire>,
    /// The proxy at its other end that is to fetch the URL; none: the place itself is there, directly or through a tunnel.
    pub(super) proxy: Option<Proxy>,
}

impl Outbound {
    /// Finds the way to a URL.
    pub(super) async fn dial(&self, url: &Url, host: &Host, port: u16) -> Result<Way, RpcError> {
        self.check_name(host, port)?;
        let is_secure = url.scheme() == "https";
        let Some(proxy) = self.usable_proxy(url, host, port).await? else {
            let wire = self.connect(host, port).await?;
            let wire = if is_secure { self.secure(host, Box::new(wire)).await? } else { Box::new(wire) };
            return Ok(Way { wire, proxy: None });
        };
        let (proxy, wire) = proxy;
        let through = |error: RpcError| failed(format!("the proxy {}:{}: {}", proxy.host, proxy.port, error.message));
        let wire: Box<dyn Wire> =
            if proxy.is_secure { self.secure(&proxy.host, Box::new(wire)).await.map_err(through)? } else { Box::new(wire) };
        if !is_secure {
            return Ok(Way { wire, proxy: Some(proxy) });
        }
        let wire = tunnel(wire, &proxy, host, port).await.map_err(through)?;
        Ok(Way { wire: self.secure(host, wire).await?, proxy: None })
    }

    /// The proxy before a URL, connected. Under a rule only one that the rule admits like any other place; if it does not, the
    /// URL's own host is connected to, and judged.
    async fn usable_proxy(&self, url: &Url, host: &Host, port: u16) -> Result<Option<(Proxy, TcpStream)>, RpcError> {
        let Some(proxy) = self.proxies.before(url)? else { return Ok(None) };
        if self.egress.check_name(&proxy.host, proxy.port).is_err() {
            tracing::debug!(proxy = %proxy.host, "the egress rule does not admit the proxy, so it is not used");
            return Ok(None);
        }
        // The proxy will look the name up; an address can be judged here.
        if let Some(address) = literal(host)
            && !self.egress.admits(host, port, address)
        {
            return Err(refused(Refused::NotPublic, host, port));
        }
        let wire = self.connect(&proxy.host, proxy.port).await;
        let wire = wire.map_err(|error| failed(format!("the proxy of the server's environment: {}", error.message)))?;
        Ok(Some((proxy, wire)))
    }

    fn check_name(&self, host: &Host, port: u16) -> Result<(), RpcError> {
        self.egress.check_name(host, port).map_err(|reason| refused(reason, host, port))
    }

    /// Connects to the first address of a host that answers. Names are looked up here, once, and nowhere else.
    async fn connect(&self, host: &Host, port: u16) -> Result<TcpStream, RpcError> {
        let found: Vec<IpAddr> = match (host, literal(host)) {
            (_, Some(address)) => vec![address],
            (Host::Domain(name), None) => {
                let found = self.look_ups.addresses(name).await;
                found.map_err(|error| failed(format!("look up `{name}`: {error}")))?
            }
            (_, None) => Vec::new(),
        };
        if found.is_empty() {
            return Err(failed(format!("look up `{host}`: it has no address")));
        }
        let admitted = found.into_iter().filter(|address| self.egress.admits(host, port, *address));
        let mut admitted: Vec<IpAddr> = admitted.take(ADDRESSES).collect();
        let Some(last) = admitted.pop() else { return Err(refused(Refused::NotPublic, host, port)) };
        for address in admitted {
            match tokio::time::timeout(ATTEMPT, open(address, port)).await {
                Ok(Ok(wire)) => return Ok(wire),
                Ok(Err(error)) => tracing::debug!(%address, %error, "one of several addresses"),
                Err(_silent) => tracing::debug!(%address, "one of several addresses says nothing"),
            }
        }
        open(last, port).await.map_err(|error| failed(format!("connect to {host}:{port}: {error}")))
    }

    /// TLS over a wire, with the certificate that belongs to the host.
    async fn secure(&self, host: &Host, wire: Box<dyn Wire>) -> Result<Box<dyn Wire>, RpcError> {
        let name = match host {
            Host::Domain(name) => ServerName::try_from(name.trim_end_matches('.').to_owned())
                .map_err(|error| failed(format!("`{name}` is no name for a certificate: {error}")))?,
            Host::Ipv4(address) => ServerName::from(IpAddr::V4(*address)),
            Host::Ipv6(address) => ServerName::from(IpAddr::V6(*address)),
        };
        let connected = self.trust.connector().await?.connect(name, wire).await;
        Ok(Box::new(connected.map_err(|error| failed(format!("TLS with {host}: {error}")))?))
    }
}

async fn open(address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
    let wire = TcpStream::connect(SocketAddr::new(address, port)).await?;
    // A request is one write and an answer is awaited: there is nothing to gather.
    wire.set_nodelay(true)?;
    Ok(wire)
}

/// The address that a host is, if it is none to be looked up.
fn literal(host: &Host) -> Option<IpAddr> {
    match host {
        Host::Domain(_) => None,
        Host::Ipv4(address) => Some(IpAddr::V4(*address)),
        Host::Ipv6(address) => Some(IpAddr::V6(*address)),
    }
}

/// Asks a proxy for a tunnel to a place.
async fn tunnel(mut wire: Box<dyn Wire>, proxy: &Proxy, host: &Host, port: u16) -> Result<Box<dyn Wire>, RpcError> {
    let broken = |error: std::io::Error| failed(format!("CONNECT {host}:{port}: {error}"));
    let mut text = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n").into_bytes();
    if let Some(credentials) = &proxy.credentials {
        text.extend([b"Proxy-Authorization: ", credentials.as_bytes(), b"\r\n"].concat());
    }
    text.extend(b"\r\n");
    wire.write_all(&text).await.map_err(broken)?;
    wire.flush().await.map_err(broken)?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() >= TUNNEL_ANSWER {
            return Err(failed(format!("CONNECT {host}:{port}: an answer of more than {TUNNEL_ANSWER} bytes")));
        }
        // Byte for byte, since what comes behind belongs to the place.
        answer.push(wire.read_u8().await.map_err(broken)?);
    }
    let line = String::from_utf8_lossy(answer.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned();
    let status = line.strip_prefix("HTTP/1.").and_then(|line| line.split(' ').nth(1));
    match status {
        Some(status) if status.len() == 3 && status.starts_with('2') => Ok(wire),
        _ => Err(failed(format!("CONNECT {host}:{port}: it answered `{}`", line.chars().take(100).collect::<String>()))),
    }
}

/// Of a place that may not be reached, with what would admit it.
fn refused(reason: Refused, host: &Host, port: u16) -> RpcError {
    failed(match reason {
        Refused::Closed => format!(
            "the operator's policy leaves requests no network, so nothing was sent; the operator admits this place with \
             `--allow-egress {host}:{port}`"
        ),
        Refused::Unnamed => format!(
            "the operator's egress rule does not name {host}:{port}, so nothing was sent; the operator admits it with \
             `--allow-egress {host}:{port}`"
        ),
        Refused::NotPublic => format!(
            "{host}:{port} has no public address, and the operator's egress rule names neither it nor its address, so nothing was \
             sent; the operator admits it with `--allow-egress {host}:{port}`"
        ),
    })
}

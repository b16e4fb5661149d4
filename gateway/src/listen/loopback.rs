//! A TCP port of the listener, on both loopback addresses where it is on one.
//!
//! The name `localhost` stands for `127.0.0.1` and `::1`, and a client tries them in the order of its resolver. If the server listened
//! on one of them alone, a confined process with the network on could listen on the other, and receive the client's token.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use tokio::net::{TcpListener, TcpStream};

/// Tries of a port that the kernel chooses: another program may have it on the other address.
const TRIES: usize = 16;

/// A port on which clients arrive.
#[derive(Debug)]
pub(super) struct Port {
    named: TcpListener,
    /// The same on the other loopback address.
    other: Option<TcpListener>,
}

impl Port {
    /// Listens on an address, and on the other loopback address that `localhost` stands for too. If that is not possible the log
    /// says so.
    pub(super) async fn bind(address: SocketAddr) -> io::Result<Self> {
        let mut tries = 0;
        loop {
            let named = TcpListener::bind(address).await?;
            let Some(other) = other(named.local_addr()?) else { return Ok(Self { named, other: None }) };
            match TcpListener::bind(other).await {
                Ok(other) => return Ok(Self { named, other: Some(other) }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0 && tries < TRIES => tries += 1,
                Err(error) => {
                    if error.kind() == io::ErrorKind::AddrInUse {
                        tracing::warn!(
                            "listen on {other}: {error}: clients that name `localhost` may send their token to the program that listens there; end that program, or have clients use {}",
                            named.local_addr()?
                        );
                    }
                    // Without such an address no other program can listen on it either.
                    return Ok(Self { named, other: None });
                }
            }
        }
    }

    /// The address that was named, with the port that it got.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.named.local_addr()
    }

    /// The next client on either.
    pub(super) async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let Some(other) = &self.other else { return self.named.accept().await };
        tokio::select! {
            accepted = self.named.accept() => accepted,
            accepted = other.accept() => accepted,
        }
    }
}

/// The other address of `localhost` that stays free beside an address.
fn other(address: SocketAddr) -> Option<SocketAddr> {
    let other = match address.ip() {
        IpAddr::V4(ip) if ip == Ipv4Addr::LOCALHOST || ip == Ipv4Addr::UNSPECIFIED => IpAddr::V6(Ipv6Addr::LOCALHOST),
        IpAddr::V6(ip) if ip == Ipv6Addr::LOCALHOST => IpAddr::V4(Ipv4Addr::LOCALHOST),
        // `::` takes the port on every address of either kind.
        IpAddr::V4(_) | IpAddr::V6(_) => return None,
    };
    Some(SocketAddr::new(other, address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_loopback_addresses_are_one_port() {
        if TcpListener::bind("[::1]:0").await.is_err() {
            return;
        }
        for address in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
            let port = Port::bind(address.parse().unwrap()).await.unwrap();
            let number = port.local_addr().unwrap().port();
            for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
                let place = SocketAddr::new(ip, number);
                let taken = TcpListener::bind(place).await.unwrap_err();
                assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "{address} {place}");
                let (connected, accepted) = tokio::join!(TcpStream::connect(place), port.accept());
                assert_eq!(connected.unwrap().local_addr().unwrap(), accepted.unwrap().1, "{address} {place}");
            }
        }
        // The control: a listener on one of them leaves the other free.
        let one = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let other = other(one.local_addr().unwrap()).unwrap();
        assert!(TcpListener::bind(other).await.is_ok());
    }

    #[tokio::test]
    async fn a_port_whose_other_address_is_taken_is_served() {
        let Ok(taken) = TcpListener::bind("[::1]:0").await else { return };
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), taken.local_addr().unwrap().port());
        let port = Port::bind(address).await.unwrap();
        assert!(port.other.is_none());
        let (connected, accepted) = tokio::join!(TcpStream::connect(address), port.accept());
        assert_eq!(connected.unwrap().local_addr().unwrap(), accepted.unwrap().1);
    }
}

//! Where requests over HTTP may go. Decided by name before anything is looked up, and again by the address that is then
//! connected to, so that no name can turn into another place in between.

use crate::config::Config;
use portcullis_sandbox::policy::Network;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use url::Host;

/// What the operator decides about all requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Egress {
    /// Nothing was said: clients decide.
    Open,
    /// No request may use the network, so none may go out from here.
    Closed,
    /// Only what the rule admits.
    Ruled(EgressRule),
}

/// Hosts that requests over HTTP may reach; all others are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressRule {
    places: Vec<Place>,
}

/// One entry of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    name: Name,
    /// None: every port.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Name {
    /// One host, at whatever address its name leads to.
    Host(Host),
    /// Every name below this one, at public addresses.
    Below(String),
    /// Every host, at public addresses.
    Any,
}

/// An entry that names no host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "egress rule `{entry}`: {reason}; an entry is HOST[:PORT], with HOST a name, `*.NAME`, `*`, an IPv4 address or an [IPv6 address]"
)]
pub struct EgressRuleError {
    entry: String,
    reason: String,
}

/// Why a request may not go where it is to go, in words for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The network is off for every request.
    Closed,
    /// No entry names it.
    Unnamed,
    /// The name is admitted, and where it leads is not.
    NotPublic,
}

impl Egress {
    pub(crate) fn of(config: &Config) -> Self {
        match (&config.egress, &config.ceiling) {
            (Some(rule), _) => Self::Ruled(rule.clone()),
            (None, Some(ceiling)) if ceiling.network == Network::Restricted => Self::Closed,
            (None, _) => Self::Open,
        }
    }

    /// What can be said before a name is looked up.
    pub(crate) fn check_name(&self, host: &Host, port: u16) -> Result<(), Refused> {
        match self {
            Self::Open => Ok(()),
            Self::Closed => Err(Refused::Closed),
            Self::Ruled(rule) if rule.names(host, port) => Ok(()),
            Self::Ruled(_) => Err(Refused::Unnamed),
        }
    }

    /// Whether this very address may be connected to.
    pub(crate) fn admits(&self, host: &Host, port: u16, address: IpAddr) -> bool {
        match self {
            Self::Open => true,
            Self::Closed => false,
            Self::Ruled(rule) => rule.admits(host, port, address),
        }
    }
}

impl EgressRule {
    /// Reads entries as in `api.example.com`, `*.example.com:443`, `10.0.0.5:8080` and `[fd00::1]`. Without a port each is meant.
    ///
    /// # Errors
    /// An entry names no host.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Self, EgressRuleError> {
        Ok(Self { places: entries.into_iter().map(Place::parse).collect::<Result<_, _>>()? })
    }

    /// Whether a request to this host, which looks it up at this address, may be made. Addresses that are not public (loopback,
    /// private, link-local, metadata of clouds and the like) are admitted only where an entry names the host or the address
    /// itself.
    #[must_use]
    pub fn admits(&self, host: &Host, port: u16, address: IpAddr) -> bool {
        let address = plain(address);
        let names_address = || self.places.iter().any(|place| place.is(&of_address(address), port));
        self.names(host, port)
            && (is_public(address) || self.places.iter().any(|place| place.is(&tidy(host), port)) || names_address())
    }

    /// Whether an entry names this host and port; where that leads is another question.
    fn names(&self, host: &Host, port: u16) -> bool {
        let host = tidy(host);
        self.places.iter().any(|place| place.names(&host, port))
    }
}

impl Place {
    fn parse(entry: &str) -> Result<Self, EgressRuleError> {
        let wrong = |reason: String| EgressRuleError { entry: entry.to_owned(), reason };
        let (name, port) = match entry.rsplit_once(':') {
            // A colon within brackets, or in an address without them, which is refused below.
            Some((before, after)) if !after.contains(']') => {
                let port = after.parse::<u16>().ok().filter(|port| *port > 0);
                (before, Some(port.ok_or_else(|| wrong(format!("`{after}` is no port")))?))
            }
            _ => (entry, None),
        };
        let host = |name: &str| Host::parse(name).map(|host| tidy(&host)).map_err(|error| wrong(error.to_string()));
        let name = match name.strip_prefix("*.") {
            _ if name == "*" => Name::Any,
            Some(rest) => match host(rest)? {
                Host::Domain(domain) => Name::Below(format!(".{domain}")),
                _ => return Err(wrong("there are no names below an address".to_owned())),
            },
            None => Name::Host(host(name)?),
        };
        Ok(Self { name, port })
    }

    fn names(&self, host: &Host, port: u16) -> bool {
        let is_named = match (&self.name, host) {
            (Name::Any, _) => true,
            (Name::Below(suffix), Host::Domain(name)) => name.len() > suffix.len() && name.ends_with(suffix),
            (Name::Below(_), _) => false,
            (Name::Host(own), _) => own == host,
        };
        is_named && self.port.is_none_or(|own| own == port)
    }

    /// Whether it names this one host and no other.
    fn is(&self, host: &Host, port: u16) -> bool {
        matches!(self.name, Name::Host(_)) && self.names(host, port)
    }
}

/// One spelling for one host: without a dot behind it, and an address in another's clothes as itself.
fn tidy(host: &Host) -> Host {
    match host {
        Host::Domain(name) => Host::Domain(name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()),
        Host::Ipv4(address) => of_address(IpAddr::V4(*address)),
        Host::Ipv6(address) => of_address(plain(IpAddr::V6(*address))),
    }
}

fn of_address(address: IpAddr) -> Host {
    match address {
        IpAddr::V4(address) => Host::Ipv4(address),
        IpAddr::V6(address) => Host::Ipv6(address),
    }
}

/// An IPv4 address that is written as one of IPv6 leads to the same place: mapped (RFC 4291), or through a translator (RFC 6052).
fn plain(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) if matches!(six.segments(), [0x64, 0xff9b, 0, 0, 0, 0, _, _]) => {
            let [.., a, b, c, d] = six.octets();
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        }
        other => other,
    }
}

/// Whether an address is one that anybody on the internet can reach, from the special-purpose registries of IANA (RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_four(address),
        IpAddr::V6(address) => is_public_six(address),
    }
}

fn is_public_four(address: Ipv4Addr) -> bool {
    let within = |network: [u8; 4], bits: u32| {
        let mask = u32::MAX << (32 - bits);
        u32::from(address) & mask == u32::from(Ipv4Addr::from(network)) & mask
    };
    let special = [
        ([0, 0, 0, 0], 8),        // This machine; 0.0.0.0 is answered by its loopback.
        ([10, 0, 0, 0], 8),       // Private.
        ([100, 64, 0, 0], 10),    // Of a provider's network; metadata of one cloud.
        ([127, 0, 0, 0], 8),      // Loopback.
        ([168, 63, 129, 16], 32), // The host of a machine in another cloud, with its secrets, although the address is public.
        ([169, 254, 0, 0], 16),   // Link-local; metadata of most clouds.
        ([172, 16, 0, 0], 12),    // Private.
        ([192, 0, 0, 0], 24),     // Protocol assignments; metadata of a third cloud.
        ([192, 0, 2, 0], 24),     // Documentation, as are the next two.
        ([198, 51, 100, 0], 24),
        ([203, 0, 113, 0], 24),
        ([192, 88, 99, 0], 24), // Relays of 6to4.
        ([192, 168, 0, 0], 16), // Private.
        ([198, 18, 0, 0], 15),  // Benchmarks.
        ([224, 0, 0, 0], 3),    // Multicast, reserved and broadcast.
    ];
    !special.into_iter().any(|(network, bits)| within(network, bits))
}

fn is_public_six(address: Ipv6Addr) -> bool {
    // Global unicast is 2000::/3 alone; all else is loopback, private, link-local, multicast or not given out.
    let [first, second, ..] = address.segments();
    let is_global = first & 0xe000 == 0x2000;
    // Teredo and other protocol assignments (2001::/23), documentation, and 6to4, which hides an IPv4 address.
    let is_special = first == 0x2001 && (second < 0x200 || second == 0xdb8) || first == 0x2002 || first == 0x3fff;
    is_global && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;
    use url::Url;

    fn rule(entries: &[&str]) -> EgressRule {
        EgressRule::parse(entries.iter().copied()).unwrap()
    }

    /// Whether the URL may be fetched when its host is found at the address.
    #[track_caller]
    fn check(entries: &[&str], url: &str, address: &str, expect: bool) {
        let parsed = Url::parse(url).unwrap();
        let host = parsed.host().unwrap().to_owned();
        let port = parsed.port_or_known_default().unwrap();
        assert_eq!(rule(entries).admits(&host, port, address.parse().unwrap()), expect, "{entries:?} {url} at {address}");
    }

    const PUBLIC: &str = "93.184.216.34";

    #[test]
    fn a_name_is_admitted_as_it_is_written_in_whatever_spelling() {
        let own = &["api.example.com"][..];
        check(own, "http://api.example.com/", PUBLIC, true);
        check(own, "https://api.example.com:8443/", PUBLIC, true);
        check(own, "http://API.Example.COM/", PUBLIC, true);
        check(own, "http://api.example.com./", PUBLIC, true);
        check(&["API.example.com."], "http://api.example.com/", PUBLIC, true);
        check(own, "http://xapi.example.com/", PUBLIC, false);
        check(own, "http://api.example.com.evil.net/", PUBLIC, false);
        check(own, "http://api.example.com@evil.net/", PUBLIC, false);
        check(own, "http://evil.net\\@api.example.com/", PUBLIC, false);
        check(own, "http://evil.net#api.example.com", PUBLIC, false);
        check(own, "http://user:word@api.example.com/", PUBLIC, true);
        check(&["bücher.example"], "http://xn--bcher-kva.example/", PUBLIC, true);
        check(&["xn--bcher-kva.example"], "http://BÜCHER.example/", PUBLIC, true);
        check(own, "http://ａｐｉ.example.com/", PUBLIC, true);
    }

    #[test]
    fn ports_and_names_below() {
        check(&["a.example:443"], "https://a.example/", PUBLIC, true);
        check(&["a.example:443"], "http://a.example/", PUBLIC, false);
        check(&["a.example:443"], "http://a.example:443/", PUBLIC, true);
        check(&["*.example.com"], "http://a.b.example.com/", PUBLIC, true);
        check(&["*.example.com"], "http://example.com/", PUBLIC, false);
        check(&["*.example.com"], "http://badexample.com/", PUBLIC, false);
        check(&["*.example.com"], "http://.example.com/", PUBLIC, false);
        check(&["*"], "http://any.where/", PUBLIC, true);
        check(&["*:443"], "http://any.where/", PUBLIC, false);
        check(&[], "http://any.where/", PUBLIC, false);
    }

    #[test]
    fn what_is_not_public_is_named_itself_or_refused() {
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "255.255.255.255",
            "224.0.0.1",
            "::1",
            "::",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::10.0.0.1",
            "fe80::1",
            "fd00:ec2::254",
            "ff02::1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
        ] {
            check(&["*.example.com"], "http://a.example.com/", address, false);
            check(&["*"], "http://a.example.com/", address, false);
            check(&["a.example.com"], "http://a.example.com/", address, true);
            let bracketed = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
            check(&["*.example.com", &bracketed], "http://a.example.com/", address, true);
            check(&["*"], &format!("http://{bracketed}/"), address, false);
            check(&[&bracketed], &format!("http://{bracketed}/"), address, true);
        }
        for address in [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "172.32.0.1", "100.128.0.1"] {
            check(&["*.example.com"], "http://a.example.com/", address, true);
        }
    }

    #[test]
    fn an_address_is_one_in_every_spelling() {
        for spelling in ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "127.0.0.1."] {
            let url = format!("http://{spelling}/");
            check(&["127.0.0.1"], &url, "127.0.0.1", true);
            check(&["10.0.0.1"], &url, "127.0.0.1", false);
            check(&["*"], &url, "127.0.0.1", false);
        }
        check(&["127.0.0.1:80"], "http://127.0.0.1:81/", "127.0.0.1", false);
        // The address is admitted, the name that leads there is not.
        check(&["10.0.0.1"], "http://a.example.com/", "10.0.0.1", false);
        check(&["[fd00::1]:8080"], "http://[fd00:0::1]:8080/", "fd00::1", true);
    }

    #[test]
    fn entries_that_name_no_host_are_refused() {
        for entry in
            ["", "http://a.example", "a.example:", "a.example:0", "a.example:65536", "a b", "*.127.0.0.1", "::1", "a/b", "*."]
        {
            let error = EgressRule::parse([entry]).unwrap_err().to_string();
            assert!(error.contains(&format!("egress rule `{entry}`")) && error.contains("HOST[:PORT]"), "{error}");
        }
    }

    #[test]
    fn a_ceiling_without_network_closes_and_a_rule_opens() {
        let host = Host::parse("a.example").unwrap();
        assert_eq!(Egress::Open.check_name(&host, 80), Ok(()));
        assert_eq!(Egress::Closed.check_name(&host, 80), Err(Refused::Closed));
        let ruled = Egress::Ruled(rule(&["a.example"]));
        assert_eq!(ruled.check_name(&host, 80), Ok(()));
        assert_eq!(ruled.check_name(&Host::parse("b.example").unwrap(), 80), Err(Refused::Unnamed));
    }
}

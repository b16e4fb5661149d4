//! What `serve` asks of its clients, from its flags.

use crate::Failure;
use crate::args::{Auth, ClientTls, WsAuth};
use portcullis::client::Token;
use portcullis::{Credential, SignedBearer, token_path};
use std::ffi::OsStr;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a file with a token or a secret.
const LONGEST: u64 = 64 * 1024;

/// The credential that these flags mean. A file with a token or a secret is read once, here.
pub(crate) fn from_flags(flags: &Auth) -> Result<Credential, Failure> {
    if flags.insecure_no_auth {
        return Ok(Credential::Insecure);
    }
    refuse_flags_of_the_other_kind(flags)?;
    match flags.ws_auth {
        None => Ok(Credential::Generated { file: flags.token_file.clone() }),
        Some(WsAuth::CapabilityToken) => match (&flags.ws_token_file, &flags.ws_token_sha256) {
            (Some(file), None) => Ok(Credential::token(&read(file, "--ws-token-file")?)),
            (None, Some(text)) => digest(text).map(Credential::Capability),
            _ => Err("--ws-auth capability-token needs exactly one of --ws-token-file and --ws-token-sha256".into()),
        },
        Some(WsAuth::SignedBearerToken) => {
            let file = flags.ws_shared_secret_file.as_deref();
            let file = file.ok_or("--ws-auth signed-bearer-token needs --ws-shared-secret-file")?;
            let mut rules = signed_bearer(file, "--ws-shared-secret-file")?;
            rules.issuer.clone_from(&flags.ws_issuer);
            rules.audience.clone_from(&flags.ws_audience);
            if let Some(seconds) = flags.ws_max_clock_skew_seconds {
                rules.skew = Duration::from_secs(seconds);
            }
            Ok(Credential::SignedBearer(rules))
        }
    }
}

/// Rules of tokens that are signed with the secret in a file.
pub(crate) fn signed_bearer(file: &Path, flag: &str) -> Result<SignedBearer, Failure> {
    let secret = read(file, flag)?.into_bytes();
    SignedBearer::new(secret).map_err(|error| format!("{}: {error}", file.display()).into())
}

/// The files that these flags name and whose readers could get in, or pretend to be others.
pub(crate) fn files(flags: &Auth) -> Vec<PathBuf> {
    [&flags.ws_token_file, &flags.ws_shared_secret_file].into_iter().flatten().cloned().collect()
}

/// What a listener shows its clients.
pub(crate) fn tls(flags: &Auth) -> Result<Option<portcullis::Tls>, Failure> {
    let Some((certificate, key)) = flags.tls_cert.as_ref().zip(flags.tls_key.as_ref()) else { return Ok(None) };
    Ok(Some(portcullis::Tls::from_files(certificate, key, flags.tls_client_ca.as_deref())?))
}

/// Whom to believe at a URL, and what to show there.
pub(crate) fn client_tls(flags: &ClientTls, url: &str) -> Result<Option<portcullis::client::Tls>, Failure> {
    let Some(ca) = &flags.tls_ca else { return Ok(None) };
    if !url.starts_with("wss://") && !url.starts_with("https://") {
        return Err("--tls-ca is for wss:// and https:// URLs, and does nothing here".into());
    }
    let own = flags.tls_cert.as_deref().zip(flags.tls_key.as_deref());
    Ok(Some(portcullis::client::Tls::from_files(ca, own)?))
}

/// A flag that would change nothing is one that its author is mistaken about, and who is mistaken about who may connect must hear
/// of it.
fn refuse_flags_of_the_other_kind(flags: &Auth) -> Result<(), Failure> {
    let of_capability_tokens =
        [("--ws-token-file", flags.ws_token_file.is_some()), ("--ws-token-sha256", flags.ws_token_sha256.is_some())];
    let of_signed_tokens = [
        ("--ws-shared-secret-file", flags.ws_shared_secret_file.is_some()),
        ("--ws-issuer", flags.ws_issuer.is_some()),
        ("--ws-audience", flags.ws_audience.is_some()),
        ("--ws-max-clock-skew-seconds", flags.ws_max_clock_skew_seconds.is_some()),
    ];
    let (others, kind, own) = match flags.ws_auth {
        Some(WsAuth::CapabilityToken) => (&of_signed_tokens[..], "signed-bearer-token", "capability-token"),
        Some(WsAuth::SignedBearerToken) => (&of_capability_tokens[..], "capability-token", "signed-bearer-token"),
        None => return Ok(()),
    };
    match others.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(format!("{flag} is for --ws-auth {kind}, and does nothing with {own}").into()),
        None => Ok(()),
    }
}

/// Where to dial a running server, and the token for it: from the file, or where a server of this user on this machine has put
/// its own. None is no error, since a server may ask for nothing. A token that was found goes to the very address that it was
/// found for: `localhost` may lead to several, and another one may be somebody else's.
pub(crate) fn of_server(url: &str, file: Option<&Path>) -> Result<(String, Option<Token>), Failure> {
    if let Some(file) = file {
        let file = std::path::absolute(file).map_err(|error| format!("--token-file {}: {error}", file.display()))?;
        return Ok((url.to_owned(), Some(Token::new(read(&file, "--token-file")?))));
    }
    // The kernel says who asks.
    if url.starts_with("unix:") {
        return Ok((url.to_owned(), None));
    }
    let (runtime, home) = (std::env::var_os("XDG_RUNTIME_DIR"), std::env::var_os("HOME"));
    match found(url, runtime.as_deref(), home.as_deref()) {
        Some((url, path)) => Ok((url, Some(Token::new(read(&path, "token file")?)))),
        None => Ok((url.to_owned(), None)),
    }
}

/// The file with the token for a URL, and the URL with the address that the file is for.
fn found(url: &str, runtime: Option<&OsStr>, home: Option<&OsStr>) -> Option<(String, PathBuf)> {
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| matches!(*scheme, "ws" | "wss"))?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let addresses = match authority.strip_prefix("localhost:") {
        Some(port) => {
            let port = port.parse().ok()?;
            vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((Ipv6Addr::LOCALHOST, port))]
        }
        None => vec![authority.parse().ok()?],
    };
    let of_this_machine = addresses.into_iter().filter(|address| address.ip().is_loopback());
    let mut files = of_this_machine.filter_map(|address| Some((address, token_path(runtime, home, address)?)));
    let (address, file) = files.find(|(_, file)| file.exists())?;
    // Over TLS the name stays, since the certificate is for it, and proves that it is not somebody else's server.
    let dialled = if scheme == "wss" { url.to_owned() } else { format!("ws://{address}{path}") };
    Some((dialled, file))
}

/// A file's text without the blanks around it.
pub(crate) fn read(path: &Path, flag: &str) -> Result<String, Failure> {
    let failed = |reason: &dyn std::fmt::Display| Failure::from(format!("{flag} {}: {reason}", path.display()));
    if !path.is_absolute() {
        return Err(failed(&"the path must be absolute"));
    }
    let length = std::fs::metadata(path).map_err(|error| failed(&error))?.len();
    if length > LONGEST {
        return Err(failed(&format!("{length} bytes: at most {LONGEST} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
    let text = text.trim();
    if text.is_empty() { Err(failed(&"the file is empty")) } else { Ok(text.to_owned()) }
}

fn digest(text: &str) -> Result<[u8; 32], Failure> {
    let wrong = || Failure::from(format!("--ws-token-sha256 {text}: 64 hexadecimal digits are needed"));
    // The parser below takes a sign too.
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).map_err(|_| wrong())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_for_one_address_which_is_dialled() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("portcullis");
        std::fs::create_dir(&directory).unwrap();
        for name in ["127.0.0.1:7", "127.0.0.2:8", "[::1]:9", "127.0.0.1:10", "[::1]:10", "192.0.2.1:7"] {
            std::fs::write(directory.join(format!("{name}.token")), name).unwrap();
        }
        for (url, expect) in [
            ("ws://127.0.0.1:7", Some(("ws://127.0.0.1:7", "127.0.0.1:7"))),
            ("ws://127.0.0.1:7/p", Some(("ws://127.0.0.1:7/p", "127.0.0.1:7"))),
            ("ws://localhost:7/", Some(("ws://127.0.0.1:7/", "127.0.0.1:7"))),
            ("ws://localhost:9", Some(("ws://[::1]:9", "[::1]:9"))),
            ("ws://localhost:10", Some(("ws://127.0.0.1:10", "127.0.0.1:10"))),
            ("ws://[::1]:9", Some(("ws://[::1]:9", "[::1]:9"))),
            ("ws://127.0.0.2:8", Some(("ws://127.0.0.2:8", "127.0.0.2:8"))),
            // Servers at other addresses of the same port, which may be anybody's.
            ("ws://127.0.0.2:7", None),
            ("ws://[::1]:7", None),
            ("ws://localhost:8", None),
            ("ws://192.0.2.1:7", None),
            ("ws://localhost:7@evil.example", None),
            ("ws://localhost.evil.example:7", None),
            ("ws://127.0.0.1:7@evil.example", None),
            ("http://127.0.0.1:7", None),
            // A certificate is for the name that was dialled.
            ("wss://127.0.0.1:7", Some(("wss://127.0.0.1:7", "127.0.0.1:7"))),
            ("wss://localhost:9/", Some(("wss://localhost:9/", "[::1]:9"))),
        ] {
            let expect = expect.map(|(url, name)| (url.to_owned(), directory.join(format!("{name}.token"))));
            assert_eq!(found(url, Some(place.path().as_os_str()), None), expect, "{url}");
        }
    }

    #[test]
    fn digests_are_64_hexadecimal_digits() {
        assert_eq!(digest(&"0a".repeat(32)).unwrap(), [10; 32]);
        assert_eq!(digest(&"0A".repeat(32)).unwrap(), [10; 32]);
        for wrong in ["", "0a", &"0g".repeat(32), &"é".repeat(32), &"0a".repeat(33), &"+1".repeat(32)] {
            assert!(digest(wrong).is_err(), "{wrong}");
        }
    }
}

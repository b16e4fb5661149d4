//! What `serve` asks of its clients, from its flags.

use crate::Failure;
use crate::args::{Auth, WsAuth};
use portcullis::client::Token;
use portcullis::{Credential, SignedBearer, token_path};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// Bytes of a file with a token or a secret.
const LONGEST: u64 = 64 * 1024;

/// The credential that these flags mean. A file with a token or a secret is read once, here.
pub(crate) fn from_flags(flags: &Auth) -> Result<Credential, Failure> {
    if flags.insecure_no_auth {
        return Ok(Credential::Insecure);
    }
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
            let secret = read(file, "--ws-shared-secret-file")?.into_bytes();
            let mut rules = SignedBearer::new(secret).map_err(|error| format!("{}: {error}", file.display()))?;
            rules.issuer.clone_from(&flags.ws_issuer);
            rules.audience.clone_from(&flags.ws_audience);
            if let Some(seconds) = flags.ws_max_clock_skew_seconds {
                rules.skew = Duration::from_secs(seconds);
            }
            Ok(Credential::SignedBearer(rules))
        }
    }
}

/// The token for a running server: from the file, or where a server of this user on this machine has put its own. None is no
/// error, since a server may ask for nothing.
pub(crate) fn of_server(url: &str, file: Option<&Path>) -> Result<Option<Token>, Failure> {
    if let Some(file) = file {
        let file = std::path::absolute(file).map_err(|error| format!("--token-file {}: {error}", file.display()))?;
        return Ok(Some(Token::new(read(&file, "--token-file")?)));
    }
    let address = url.strip_prefix("ws://").unwrap_or_default().split('/').next().unwrap_or_default();
    let address = address.replacen("localhost:", "127.0.0.1:", 1);
    let Some(port) =
        address.parse::<SocketAddr>().ok().filter(|address| address.ip().is_loopback()).map(|address| address.port())
    else {
        return Ok(None);
    };
    let path = token_path(std::env::var_os("XDG_RUNTIME_DIR").as_deref(), std::env::var_os("HOME").as_deref(), port);
    Ok(path.filter(|path| path.exists()).map(|path| read(&path, "token file")).transpose()?.map(Token::new))
}

/// A file's text without the blanks around it.
fn read(path: &Path, flag: &str) -> Result<String, Failure> {
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
    if text.len() != 64 || !text.is_ascii() {
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
    fn digests_are_64_hexadecimal_digits() {
        assert_eq!(digest(&"0a".repeat(32)).unwrap(), [10; 32]);
        assert_eq!(digest(&"0A".repeat(32)).unwrap(), [10; 32]);
        for wrong in ["", "0a", &"0g".repeat(32), &"é".repeat(32), &"0a".repeat(33), &"+1".repeat(32)] {
            assert!(digest(wrong).is_err(), "{wrong}");
        }
    }
}

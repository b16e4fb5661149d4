//! The token that a listener makes for itself, and where clients of the same user find it.

use base64_simd::URL_SAFE_NO_PAD;
use std::ffi::OsStr;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a token before they are spelt: nobody guesses 256 bits.
const BYTES: usize = 32;

/// Where a server of this user that listens on an address of this machine puts its token, for clients of the same user: below
/// `XDG_RUNTIME_DIR`, or else below `HOME`. None if neither is an absolute path. One that listens on all addresses is found
/// under the loopback address of their family. The address is part of the name, since somebody else may serve the same port of
/// another address, and must not be sent this token.
#[must_use]
pub fn token_path(runtime: Option<&OsStr>, home: Option<&OsStr>, address: SocketAddr) -> Option<PathBuf> {
    token_directory(runtime, home).map(|directory| in_directory(&directory, address))
}

/// The file of an address in the directory of tokens.
pub(super) fn in_directory(directory: &Path, address: SocketAddr) -> PathBuf {
    let ip = match address.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    directory.join(format!("{}.token", SocketAddr::new(ip, address.port())))
}

/// The directory of such tokens. No confined process gets to see it.
pub(crate) fn token_directory(runtime: Option<&OsStr>, home: Option<&OsStr>) -> Option<PathBuf> {
    let absolute = |path: Option<&OsStr>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(runtime).or_else(|| absolute(home).map(|home| home.join(".local/state")));
    base.map(|base| base.join("portcullis"))
}

/// A token that nobody knows yet.
pub(super) fn make() -> io::Result<String> {
    let mut bytes = [0; BYTES];
    let mut filled = 0;
    while filled < BYTES {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(URL_SAFE_NO_PAD.encode_to_string(bytes))
}

/// A file that holds a token for as long as its server runs.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    token: String,
}

impl TokenFile {
    /// Writes the token beside and renames it into place, so that nobody reads half of it, with mode 0600 from the first byte
    /// on. An older file there is that of a server that is gone: the address is ours.
    pub(super) fn write(path: PathBuf, token: &str) -> io::Result<Self> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let mut file = tempfile::Builder::new()
            .prefix(".token")
            .permissions(std::fs::Permissions::from_mode(0o600))
            .tempfile_in(directory)?;
        file.write_all(token.as_bytes())?;
        file.persist(&path)?;
        Ok(Self { path, token: token.to_owned() })
    }

    /// The same in the directory of tokens, which is made if need be and is its user's alone.
    pub(super) fn write_in_directory(path: PathBuf, token: &str) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            #[expect(clippy::disallowed_types, reason = "the operator's own place, which no client names")]
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        Self::write(path, token)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TokenFile {
    /// Removes the file if it is still this server's: another one may have the address, and the file, by now.
    fn drop(&mut self) {
        let mut held = String::new();
        #[expect(clippy::disallowed_types, reason = "the operator's own place, which no client names")]
        let read = std::fs::File::open(&self.path).and_then(|file| file.take(1024).read_to_string(&mut held));
        if read.is_ok() && held == self.token {
            #[expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]
            let _gone_already = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_long_unlike_and_fit_a_header() {
        let (one, two) = (make().unwrap(), make().unwrap());
        assert_ne!(one, two);
        assert_eq!(one.len(), 43);
        assert!(one.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test looks at its own directory")]
    fn a_file_is_its_users_alone_and_goes_with_its_server_but_not_with_another() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("new/4500.token");
        let file = TokenFile::write_in_directory(path.clone(), "one").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let newer = TokenFile::write_in_directory(path.clone(), "two").unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        drop(newer);
        assert!(!path.exists());
    }

    #[test]
    fn where_tokens_are_found() {
        let path = |runtime: Option<&str>, home: Option<&str>| {
            token_path(runtime.map(OsStr::new), home.map(OsStr::new), "127.0.0.1:7".parse().unwrap())
        };
        assert_eq!(path(Some("/run/user/1"), Some("/home/x")), Some("/run/user/1/portcullis/127.0.0.1:7.token".into()));
        assert_eq!(path(None, Some("/home/x")), Some("/home/x/.local/state/portcullis/127.0.0.1:7.token".into()));
        assert_eq!(path(Some(""), Some("relative")), None);
    }

    #[test]
    fn each_address_has_a_file_and_wildcards_that_of_loopback() {
        for (address, name) in [
            ("127.0.0.1:7", "127.0.0.1:7.token"),
            ("127.0.0.2:7", "127.0.0.2:7.token"),
            ("0.0.0.0:7", "127.0.0.1:7.token"),
            ("[::1]:7", "[::1]:7.token"),
            ("[::]:7", "[::1]:7.token"),
            ("192.0.2.1:7", "192.0.2.1:7.token"),
        ] {
            assert_eq!(in_directory(Path::new("/d"), address.parse().unwrap()), Path::new("/d").join(name));
        }
    }
}

//! Credentials that somebody else keeps fresh in a file.

use super::{Credentials, Headers, bearer, may_see_keys, sign_in};
use crate::registry::RegistryError;
use hyper::HeaderMap;
use serde::Deserialize;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use tokio::sync::watch;
use url::Url;

/// Bytes of such a file: a few tokens.
const LONGEST: u64 = 64 * 1024;

/// A file that is read again for every request, and nobody but its owner may read. While it cannot be read what it held before is
/// used, since whoever writes it may take it away for a moment.
pub struct CredentialsFile {
    path: PathBuf,
    kind: Kind,
    /// What it held last: a state, which is put here by whoever asked last.
    last: watch::Sender<Option<Secret>>,
}

#[derive(Clone)]
enum Kind {
    Token,
    SignIn { allowed_hosts: Vec<String> },
}

#[derive(Clone)]
enum Secret {
    Token(String),
    SignIn { token: String, account: Option<String> },
    ApiKey(String),
}

impl CredentialsFile {
    /// A file with one token that was made for the registry. Its path is absolute.
    #[must_use]
    pub fn token(path: PathBuf) -> Self {
        Self { path, kind: Kind::Token, last: watch::Sender::new(None) }
    }

    /// The file of somebody who signed in, as `codex login` writes it: JSON with `tokens.access_token` and `tokens.account_id`, or
    /// with `OPENAI_API_KEY`, which is shown to the usual hosts and to those allowed. A sign-in goes before a key.
    #[must_use]
    pub fn sign_in(path: PathBuf, allowed_hosts: Vec<String>) -> Self {
        Self { path, kind: Kind::SignIn { allowed_hosts }, last: watch::Sender::new(None) }
    }

    async fn secret(&self) -> Result<Secret, RegistryError> {
        let (path, kind) = (self.path.clone(), self.kind.clone());
        // The disk may hang, and nobody else is to wait for it.
        let read = tokio::task::spawn_blocking(move || kind.parse(&read(&path)?)).await;
        match read.unwrap_or_else(|panicked| Err(panicked.to_string())) {
            Ok(secret) => {
                self.last.send_replace(Some(secret.clone()));
                Ok(secret)
            }
            Err(reason) => {
                let reason = format!("read the registry's credential from {}: {reason}", self.path.display());
                let last = self.last.borrow().clone();
                let last = last.ok_or_else(|| RegistryError::Unusable(reason.clone()))?;
                tracing::warn!("{reason}; what it held before is used");
                Ok(last)
            }
        }
    }

    fn shown(&self, secret: &Secret, registry: &Url) -> Result<HeaderMap, RegistryError> {
        match (secret, &self.kind) {
            (Secret::Token(token), _) => bearer(token),
            (Secret::SignIn { token, account }, _) => sign_in(token, account.as_deref()),
            (Secret::ApiKey(key), Kind::SignIn { allowed_hosts }) => {
                may_see_keys(registry, allowed_hosts).and_then(|()| bearer(key))
            }
            (Secret::ApiKey(key), Kind::Token) => may_see_keys(registry, &[]).and_then(|()| bearer(key)),
        }
    }
}

impl Credentials for CredentialsFile {
    fn headers<'a>(&'a self, registry: &'a Url) -> Headers<'a> {
        Box::pin(async move { self.shown(&self.secret().await?, registry) })
    }
}

impl Kind {
    /// No error repeats what is in the text.
    fn parse(&self, text: &str) -> Result<Secret, String> {
        #[derive(Deserialize)]
        struct SignIn {
            #[serde(rename = "OPENAI_API_KEY")]
            key: Option<String>,
            tokens: Option<Tokens>,
        }
        #[derive(Deserialize)]
        struct Tokens {
            access_token: String,
            account_id: Option<String>,
        }
        let filled = |text: &String| !text.trim().is_empty();
        let text = text.trim();
        match self {
            Self::Token if text.is_empty() => Err("it is empty".to_owned()),
            Self::Token if text.lines().count() > 1 => Err("it has more than one line; a token is one".to_owned()),
            Self::Token => Ok(Secret::Token(text.to_owned())),
            Self::SignIn { .. } => {
                let state: SignIn =
                    serde_json::from_str(text).map_err(|error| format!("{:?} error in its JSON", error.classify()))?;
                let tokens = state.tokens.filter(|tokens| filled(&tokens.access_token));
                let signed_in = tokens.map(|Tokens { access_token, account_id }| Secret::SignIn {
                    token: access_token,
                    account: account_id.filter(filled),
                });
                let none = "it holds neither tokens of a sign-in nor OPENAI_API_KEY; run `codex login`";
                signed_in.or_else(|| state.key.filter(filled).map(Secret::ApiKey)).ok_or_else(|| none.to_owned())
            }
        }
    }
}

fn read(path: &Path) -> Result<String, String> {
    // Before it is opened, since a pipe without a writer would hang there.
    let kind = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !kind.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let file = File::open(path).map_err(|error| error.to_string())?;
    let opened = file.metadata().map_err(|error| error.to_string())?;
    if opened.mode() & 0o077 != 0 {
        return Err("others than its owner may read it; run `chmod 600` on it".to_owned());
    }
    let mut text = String::new();
    let length = file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    let is_short = u64::try_from(length).is_ok_and(|length| length <= LONGEST);
    if is_short { Ok(text) } else { Err(format!("it has more than {LONGEST} bytes")) }
}

/// Never what is in it.
impl fmt::Debug for CredentialsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CredentialsFile({})", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::AUTHORIZATION;
    use std::os::unix::fs::PermissionsExt as _;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("file")
        }

        /// As those write who keep such files: beside, and then into place.
        fn put(&self, text: &str, mode: u32) {
            let new = self.0.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode)).unwrap();
            std::fs::rename(new, self.path()).unwrap();
        }
    }

    async fn shown(file: &CredentialsFile, url: &str) -> Result<(String, Option<String>), String> {
        let url = Url::parse(url).unwrap();
        let headers = file.headers(&url).await.map_err(|error| error.to_string())?;
        let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        Ok((text(AUTHORIZATION.as_str()).unwrap(), text("chatgpt-account-id")))
    }

    #[tokio::test]
    async fn a_token_is_read_again_for_every_request_and_the_last_one_is_used_while_there_is_none() {
        const URL: &str = "https://registry.example";
        let place = Place::new();
        let file = CredentialsFile::token(place.path());
        assert!(shown(&file, URL).await.unwrap_err().contains("No such file"));
        place.put("one\n", 0o640);
        assert!(shown(&file, URL).await.unwrap_err().contains("chmod 600"));
        place.put("one\n", 0o600);
        assert_eq!(shown(&file, URL).await.unwrap().0, "Bearer one");
        place.put("two", 0o400);
        assert_eq!(shown(&file, URL).await.unwrap().0, "Bearer two");
        std::fs::remove_file(place.path()).unwrap();
        assert_eq!(shown(&file, URL).await.unwrap().0, "Bearer two");
        for wrong in [" \n", "two\nlines", &"x".repeat(70_000)] {
            place.put(wrong, 0o600);
            assert_eq!(shown(&file, URL).await.unwrap().0, "Bearer two", "{wrong:.10}");
        }
        place.put("three", 0o600);
        assert_eq!(shown(&file, URL).await.unwrap().0, "Bearer three");
    }

    #[tokio::test]
    async fn a_sign_in_goes_with_its_account_and_a_key_to_the_hosts_of_keys_alone() {
        let place = Place::new();
        let file = CredentialsFile::sign_in(place.path(), vec!["allowed.example".to_owned()]);
        place.put(r#"{"OPENAI_API_KEY":"key","tokens":{"access_token":"a","account_id":"i","more":1},"more":1}"#, 0o600);
        assert_eq!(shown(&file, "https://x.example").await, Ok(("Bearer a".to_owned(), Some("i".to_owned()))));
        place.put(r#"{"tokens":{"access_token":"b","account_id":null}}"#, 0o600);
        assert_eq!(shown(&file, "https://x.example").await, Ok(("Bearer b".to_owned(), None)));
        place.put(r#"{"OPENAI_API_KEY":"key","tokens":null}"#, 0o600);
        assert_eq!(shown(&file, "https://allowed.example").await, Ok(("Bearer key".to_owned(), None)));
        assert!(shown(&file, "https://x.example").await.unwrap_err().contains("--remote-allow-host"));
        for (wrong, expect) in [
            (r#"{"OPENAI_API_KEY":null,"tokens":null}"#, "codex login"),
            (r#"{"tokens":{"access_token":"hush"}"#, "Eof error in its JSON"),
            (r#"{"tokens":"hush"}"#, "Data error in its JSON"),
        ] {
            place.put(wrong, 0o600);
            let error = shown(&CredentialsFile::sign_in(place.path(), Vec::new()), "https://x.example").await.unwrap_err();
            assert!(error.contains(expect) && !error.contains("hush"), "{error}");
        }
    }
}

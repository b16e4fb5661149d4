//! What the rendezvous signs and hands out, so that it need not keep it: URLs of WebSockets, and authorizations of harnesses.

use crate::keys::PublicKeys;
use aws_lc_rs::hmac::{self, HMAC_SHA256, Key};
use aws_lc_rs::rand;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long what was signed is valid: one attempt to connect.
pub(super) const VALID: Duration = Duration::from_secs(60);
/// By how much the clocks of nodes may differ. What is valid for longer than was ever signed comes of a clock that was set back.
const SKEW: Duration = Duration::from_secs(5);

/// 256 random bits as text.
pub(super) fn random() -> Option<String> {
    let mut bytes = [0; 32];
    rand::fill(&mut bytes).ok()?;
    Some(URL_SAFE_NO_PAD.encode(bytes))
}

/// Which end a WebSocket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// Serves an environment.
    Environment,
    /// Uses one.
    Harness,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Environment => "environment",
            Self::Harness => "harness",
        }
    }
}

/// What a URL of a WebSocket opens: the query of it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) role: Role,
    pub(super) registration: String,
    /// The first 64 bits of the digest of the token that it was given for, which its sockets are counted under.
    pub(super) token: u64,
    /// In seconds since 1970.
    pub(super) expires: u64,
    pub(super) sig: String,
}

impl Ticket {
    /// Reads a query. Whether it was signed here is another question.
    pub(super) fn of_query(query: &str) -> Option<Self> {
        let part = |name: &str| {
            let parts = query.split('&').filter_map(|part| part.split_once('='));
            parts.filter(|(key, _)| *key == name).map(|(_, value)| value).next()
        };
        let role = [Role::Environment, Role::Harness].into_iter().find(|role| Some(role.name()) == part("role"))?;
        let (registration, sig) = (part("registration")?.to_owned(), part("sig")?.to_owned());
        let token = u64::from_str_radix(part("token")?, 16).ok()?;
        Some(Self { role, registration, token, expires: part("expires")?.parse().ok()?, sig })
    }
}

/// A key; clones are the same. Nothing that was signed with another one is valid.
#[derive(Clone)]
pub(super) struct Signer(Arc<Key>);

impl Signer {
    /// Signs with a secret, which [`random`] made.
    pub(super) fn new(secret: &str) -> Self {
        Self(Arc::new(Key::new(HMAC_SHA256, secret.as_bytes())))
    }

    /// The query of a URL for this environment.
    pub(super) fn sign(&self, environment: &str, ticket: &Ticket) -> String {
        let sig = URL_SAFE_NO_PAD.encode(hmac::sign(&self.0, &of_ticket(environment, ticket)));
        let Ticket { role, registration, token, expires, .. } = ticket;
        format!("role={}&registration={registration}&token={token:016x}&expires={expires}&sig={sig}", role.name())
    }

    /// Whether a ticket was signed here for this environment, and is valid.
    pub(super) fn is_valid(&self, environment: &str, ticket: &Ticket, now: u64) -> bool {
        let Ok(sig) = URL_SAFE_NO_PAD.decode(&ticket.sig) else { return false };
        is_now(ticket.expires, now) && hmac::verify(&self.0, &of_ticket(environment, ticket), &sig).is_ok()
    }

    /// What the executor of this registration can show us of a harness.
    pub(super) fn authorize(&self, environment: &str, registration: &str, harness: &PublicKeys, expires: u64) -> Option<String> {
        let sig = hmac::sign(&self.0, &of_harness(environment, registration, harness, expires)?);
        Some(format!("{expires}.{}", URL_SAFE_NO_PAD.encode(sig)))
    }

    /// Whether that is what it shows.
    pub(super) fn is_authorized(
        &self,
        environment: &str,
        registration: &str,
        harness: &PublicKeys,
        shown: &str,
        now: u64,
    ) -> bool {
        let Some((expires, sig)) = shown.split_once('.') else { return false };
        let (Ok(expires), Ok(sig)) = (expires.parse::<u64>(), URL_SAFE_NO_PAD.decode(sig)) else { return false };
        let signed = of_harness(environment, registration, harness, expires);
        is_now(expires, now) && signed.is_some_and(|signed| hmac::verify(&self.0, &signed, &sig).is_ok())
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer(..)")
    }
}

/// Whether what expires then may be used now.
fn is_now(expires: u64, now: u64) -> bool {
    now < expires && expires <= now.saturating_add((VALID + SKEW).as_secs())
}

/// No part holds a line's end, so no two tickets are the same text; the first word keeps them from being authorizations.
fn of_ticket(environment: &str, ticket: &Ticket) -> Vec<u8> {
    let Ticket { role, registration, token, expires, .. } = ticket;
    format!("socket\n{}\n{environment}\n{registration}\n{token}\n{expires}", role.name()).into_bytes()
}

fn of_harness(environment: &str, registration: &str, harness: &PublicKeys, expires: u64) -> Option<Vec<u8>> {
    let keys = serde_json::to_string(harness).ok()?;
    Some(format!("harness\n{environment}\n{registration}\n{expires}\n{keys}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Identity;

    #[test]
    fn a_ticket_opens_what_it_was_signed_for_and_for_a_while() {
        let [signer, other] = [(); 2].map(|()| Signer::new(&random().unwrap()));
        let plain = Ticket { role: Role::Harness, registration: "one".to_owned(), token: 0, expires: 100, sig: String::new() };
        let query = signer.sign("box", &plain);
        let ticket = Ticket::of_query(&query).unwrap();
        assert!(Ticket::of_query("").is_none() && (ticket.role, ticket.expires) == (Role::Harness, 100));
        assert!(signer.is_valid("box", &ticket, 99));
        // Before it was signed, by more than clocks differ.
        assert!(signer.is_valid("box", &ticket, 35) && !signer.is_valid("box", &ticket, 34));
        assert!(!signer.is_valid("box", &ticket, 100) && !signer.is_valid("bo", &ticket, 99));
        assert!(!other.is_valid("box", &ticket, 99));
        for changed in [
            Ticket { role: Role::Environment, ..ticket.clone() },
            Ticket { registration: "two".to_owned(), ..ticket.clone() },
            Ticket { token: 1, ..ticket.clone() },
            Ticket { expires: 101, ..ticket.clone() },
            Ticket { sig: String::new(), ..ticket.clone() },
        ] {
            assert!(!signer.is_valid("box", &changed, 99));
        }
    }

    #[test]
    fn an_authorization_is_for_one_harness_at_one_executor() {
        let signer = Signer::new(&random().unwrap());
        let [known, other] = [(); 2].map(|()| Identity::generate().unwrap().public_keys());
        let shown = signer.authorize("box", "one", &known, 100).unwrap();
        assert!(signer.is_authorized("box", "one", &known, &shown, 99));
        assert!(!signer.is_authorized("box", "one", &other, &shown, 99));
        assert!(!signer.is_authorized("box", "two", &known, &shown, 99));
        assert!(!signer.is_authorized("bo", "one", &known, &shown, 99));
        assert!(!signer.is_authorized("box", "one", &known, &shown, 100));
        assert!(signer.is_authorized("box", "one", &known, &shown, 35));
        assert!(!signer.is_authorized("box", "one", &known, &shown, 34));
        let later = shown.replace("100.", "101.");
        assert!(!signer.is_authorized("box", "one", &known, &later, 99) && !signer.is_authorized("box", "one", &known, "", 99));
    }
}

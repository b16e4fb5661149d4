//! Who may connect: what a client has to show before its socket becomes a connection.

use crate::caller::Who;
use crate::scope::{self, TokenScope};
use axum::http::{HeaderMap, header};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::resolve::Machine;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use subtle::ConstantTimeEq as _;

/// Bytes of a shared secret at least: fewer can be guessed from one token.
const SHORTEST_SECRET: usize = 32;

/// Characters of a claim that are told of: it is repeated in every record of its connection.
const CLAIM: usize = 256;
/// Bytes of a token at most: a request's line and headers have twice that.
const LONGEST_TOKEN: usize = 16 << 10;

/// What a listener asks of its clients.
#[derive(Debug, Clone)]
pub enum Credential {
    /// A token that is made at the start. On a unix socket, and where clients show certificates ([`crate::Tls`]), only if `file` is
    /// given: there it is known who they are.
    Generated {
        /// Where it goes, with mode 0600; none: it is said on standard error. In either case it goes also to where
        /// [`crate::token_path`] says, so that clients of the same user on this machine find it.
        file: Option<PathBuf>,
    },
    /// A token whose SHA-256 is this.
    Capability([u8; 32]),
    /// Tokens that somebody signed who shares a secret with the server.
    SignedBearer(SignedBearer),
    /// Nothing: every program that reaches the port is served. On loopback only, and not on unix sockets.
    Insecure,
}

impl Credential {
    /// This one token.
    #[must_use]
    pub fn token(token: &str) -> Self {
        Self::Capability(digest_of(token))
    }
}

impl Default for Credential {
    fn default() -> Self {
        Self::Generated { file: None }
    }
}

/// Rules of signed tokens: JWT (RFC 7519) with HS256.
#[derive(Clone)]
pub struct SignedBearer {
    secret: Vec<u8>,
    /// What `iss` must be, if it matters.
    pub issuer: Option<String>,
    /// What `aud` must be or hold, if it matters.
    pub audience: Option<String>,
    /// How far the clocks may be apart.
    pub skew: Duration,
}

/// The secret is too short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a shared secret of {0} bytes: at least {SHORTEST_SECRET} are needed")]
pub struct SecretTooShort(usize);

impl SignedBearer {
    /// Tokens signed with this secret, from anybody, for anybody, by clocks that are 30 seconds apart at most.
    ///
    /// # Errors
    /// The secret has fewer than 32 bytes.
    pub fn new(secret: Vec<u8>) -> Result<Self, SecretTooShort> {
        if secret.len() < SHORTEST_SECRET {
            return Err(SecretTooShort(secret.len()));
        }
        Ok(Self { secret, issuer: None, audience: None, skew: Duration::from_secs(30) })
    }
}

impl fmt::Debug for SignedBearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { secret: _, issuer, audience, skew } = self;
        f.debug_struct("SignedBearer")
            .field("issuer", issuer)
            .field("audience", audience)
            .field("skew", skew)
            .finish_non_exhaustive()
    }
}

/// A credential as the running listener checks it.
#[derive(Debug, Clone)]
pub(super) enum Guard {
    Open,
    /// The socket itself shows who it is: to the kernel, or by a certificate.
    Known,
    /// The digest, and what a client is told that has no token.
    Token([u8; 32], Option<String>),
    Signed(SignedBearer, Ground),
}

/// Where the policies of tokens are to hold.
#[derive(Debug, Clone, Default)]
pub(super) struct Ground {
    pub(super) machine: Machine,
    pub(super) home: Option<AbsolutePath>,
}

/// Who was let in.
#[derive(Debug, Clone, Default)]
pub(super) struct Admitted {
    /// What it showed.
    pub(super) who: Who,
    /// What the client's token narrows its connection to.
    pub(super) scope: Option<Arc<TokenScope>>,
}

impl Admitted {
    /// Whether the credential is good for less than everything that this server offers. Such a one is for connections alone.
    pub(super) fn is_scoped(&self) -> bool {
        self.scope.is_some()
    }
}

impl Guard {
    /// Who these headers let in; otherwise what to answer with status 401.
    pub(super) fn admit(&self, headers: &HeaderMap) -> Result<Admitted, String> {
        let hint = |text: &str| match self {
            Self::Token(_, Some(hint)) => format!("{text}: {hint}"),
            Self::Open | Self::Known | Self::Token(_, None) | Self::Signed(..) => text.to_owned(),
        };
        if matches!(self, Self::Open | Self::Known) {
            return Ok(Admitted::default());
        }
        let Some(value) = headers.get(header::AUTHORIZATION) else { return Err(hint("missing websocket bearer token")) };
        let token = value.to_str().ok().and_then(bearer).ok_or_else(|| hint("invalid authorization header"))?;
        match self {
            Self::Open | Self::Known => Ok(Admitted::default()),
            Self::Token(digest, _) if bool::from(digest_of(token).ct_eq(digest)) => Ok(Admitted { who: Who::Token, scope: None }),
            Self::Token(..) => Err(hint("invalid websocket bearer token")),
            Self::Signed(rules, ground) => rules.check(token, ground),
        }
    }
}

/// What a token is compared by.
pub(super) fn digest_of(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// The token of `Bearer TOKEN`; the scheme is written as one likes.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

impl SignedBearer {
    fn check(&self, token: &str, ground: &Ground) -> Result<Admitted, String> {
        #[derive(Deserialize)]
        struct Claims {
            exp: f64,
            /// Only to be told: one that is no text says nothing.
            #[serde(default)]
            sub: Value,
            #[serde(default)]
            jti: Value,
            #[serde(default, deserialize_with = "scope::present")]
            portcullis: Option<Box<RawValue>>,
        }
        let mut rules = Validation::new(Algorithm::HS256);
        rules.set_required_spec_claims(&["exp"]);
        rules.leeway = self.skew.as_secs();
        rules.validate_nbf = true;
        // Where nothing is asked of it, an audience in the token changes nothing.
        rules.validate_aud = self.audience.is_some();
        if let Some(audience) = &self.audience {
            rules.set_audience(&[audience]);
            rules.required_spec_claims.insert("aud".to_owned());
        }
        if let Some(issuer) = &self.issuer {
            rules.set_issuer(&[issuer]);
            rules.required_spec_claims.insert("iss".to_owned());
        }
        let checked = jsonwebtoken::decode::<Claims>(token, &DecodingKey::from_secret(&self.secret), &rules);
        let claims = checked.map_err(|error| refusal(error.kind()).to_owned())?.claims;
        let text = |claim: Value| claim.as_str().map(|text| text.chars().take(CLAIM).collect());
        let who = Who::Signed { sub: text(claims.sub), jti: text(claims.jti) };
        let Some(claim) = claims.portcullis else { return Ok(Admitted { who, scope: None }) };
        // As long as the token would be let in.
        let valid = Duration::try_from_secs_f64(claims.exp).ok().and_then(|exp| exp.checked_add(self.skew));
        let expires = valid.and_then(|valid| SystemTime::UNIX_EPOCH.checked_add(valid)).ok_or("invalid websocket jwt")?;
        let scope = TokenScope::parse(claim.get(), expires, &ground.machine, ground.home.as_ref());
        let scope = scope.map_err(|error| format!("invalid websocket jwt: its claim `{}`: {error}", scope::CLAIM))?;
        Ok(Admitted { who, scope: Some(Arc::new(scope)) })
    }

    /// A token that is valid for `lifetime` from now, with the issuer and audience that these rules ask for. `scope` is the claim
    /// `portcullis` as JSON, which narrows connections that show the token; without one it opens everything.
    ///
    /// # Errors
    /// The scope is not understood, or what comes of it is longer than what servers read.
    pub fn sign(&self, lifetime: Duration, scope: Option<&str>) -> Result<String, SignError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut claims = serde_json::Map::new();
        claims.insert("exp".to_owned(), now.saturating_add(lifetime).as_secs().into());
        for (name, value) in [("iss", &self.issuer), ("aud", &self.audience)] {
            if let Some(value) = value {
                claims.insert(name.to_owned(), value.as_str().into());
            }
        }
        if let Some(scope) = scope {
            TokenScope::parse(scope, SystemTime::now(), &Machine::default(), None).map_err(SignError::Scope)?;
            claims.insert(
                scope::CLAIM.to_owned(),
                serde_json::from_str(scope).map_err(|error| SignError::Scope(error.to_string()))?,
            );
        }
        let key = EncodingKey::from_secret(&self.secret);
        let token = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &key);
        let token = token.map_err(|error| SignError::Scope(error.to_string()))?;
        if token.len() > LONGEST_TOKEN { Err(SignError::Length(token.len())) } else { Ok(token) }
    }
}

/// Why no token was signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The scope is not understood.
    #[error("sign a token: its scope: {0}")]
    Scope(String),
    /// It would not be read.
    #[error("sign a token of {0} bytes: a server reads {LONGEST_TOKEN}; name a policy instead of spelling it out")]
    Length(usize),
}

fn refusal(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ExpiredSignature => "expired websocket jwt",
        ErrorKind::ImmatureSignature => "websocket jwt is not valid yet",
        ErrorKind::InvalidIssuer => "websocket jwt issuer mismatch",
        ErrorKind::InvalidAudience => "websocket jwt audience mismatch",
        ErrorKind::MissingRequiredClaim(claim) if claim == "iss" => "websocket jwt issuer mismatch",
        ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => "websocket jwt audience mismatch",
        _ => "invalid websocket jwt",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use serde_json::json;
    use std::time::UNIX_EPOCH;

    fn headers(authorization: Option<&str>) -> HeaderMap {
        let value = authorization.map(|value| (header::AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
        value.into_iter().collect()
    }

    #[track_caller]
    fn check(guard: &Guard, authorization: Option<&str>, expect: Result<(), &str>) {
        let got = guard.admit(&headers(authorization));
        assert_eq!(got.as_ref().map(|_admitted| ()).map_err(String::as_str), expect, "{authorization:?}");
    }

    #[test]
    fn a_token_opens_and_nothing_else_does() {
        let guard = Guard::Token(digest_of("tok"), None);
        for right in ["Bearer tok", "bearer tok", "BEARER  tok "] {
            check(&guard, Some(right), Ok(()));
        }
        check(&guard, None, Err("missing websocket bearer token"));
        for other in ["Bearer bad", "Bearer toc", "Bearer tok tok", "Bearer Tok"] {
            check(&guard, Some(other), Err("invalid websocket bearer token"));
        }
        for form in ["Basic tok", "tok", "Bearer", "Bearer ", ""] {
            check(&guard, Some(form), Err("invalid authorization header"));
        }
        let told = Guard::Token(digest_of("tok"), Some("it is there".to_owned()));
        check(&told, None, Err("missing websocket bearer token: it is there"));
        check(&Guard::Open, None, Ok(()));
    }

    fn now() -> i64 {
        i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
    }

    fn signed(algorithm: Algorithm, secret: &[u8], claims: &Value) -> String {
        let token = jsonwebtoken::encode(&Header::new(algorithm), claims, &EncodingKey::from_secret(secret)).unwrap();
        format!("Bearer {token}")
    }

    #[test]
    fn signed_tokens_hold_what_the_rules_ask() {
        let secret = [b'k'; 40];
        let plain = SignedBearer::new(secret.to_vec()).unwrap();
        let strict = SignedBearer { issuer: Some("me".to_owned()), audience: Some("here".to_owned()), ..plain.clone() };
        let now = now();
        let (valid, invalid) = (Ok(()), Err("invalid websocket jwt"));
        for (claims, expect) in [
            (json!({"exp": now + 60}), valid),
            (json!({"exp": now - 20}), valid),
            (json!({"exp": now - 600}), Err("expired websocket jwt")),
            (json!({}), invalid),
            (json!({"exp": "soon"}), invalid),
            (json!({"exp": now + 600, "nbf": now + 500}), Err("websocket jwt is not valid yet")),
            (json!({"exp": now + 600, "nbf": now + 20}), valid),
            (json!({"exp": now + 60, "iss": "other", "aud": "other"}), valid),
        ] {
            check(&Guard::Signed(plain.clone(), Ground::default()), Some(&signed(Algorithm::HS256, &secret, &claims)), expect);
        }
        for (claims, expect) in [
            (json!({"exp": now + 60, "iss": "me", "aud": "here"}), valid),
            (json!({"exp": now + 60, "iss": "me", "aud": ["there", "here"]}), valid),
            (json!({"exp": now + 60, "iss": "you", "aud": "here"}), Err("websocket jwt issuer mismatch")),
            (json!({"exp": now + 60, "aud": "here"}), Err("websocket jwt issuer mismatch")),
            (json!({"exp": now + 60, "iss": "me", "aud": ["there"]}), Err("websocket jwt audience mismatch")),
            (json!({"exp": now + 60, "iss": "me"}), Err("websocket jwt audience mismatch")),
        ] {
            check(&Guard::Signed(strict.clone(), Ground::default()), Some(&signed(Algorithm::HS256, &secret, &claims)), expect);
        }
        let claims = json!({"exp": now + 60});
        let guard = Guard::Signed(plain, Ground::default());
        check(&guard, Some(&signed(Algorithm::HS256, &[b'z'; 40], &claims)), invalid);
        check(&guard, Some(&signed(Algorithm::HS384, &secret, &claims)), invalid);
        // The algorithm `none`: header and claims without a signature.
        let unsigned = format!("Bearer eyJhbGciOiJub25lIn0.{}.", "eyJleHAiOjk5OTk5OTk5OTl9");
        check(&guard, Some(&unsigned), invalid);
        check(&guard, Some("Bearer a.b.c"), invalid);
        check(&guard, None, Err("missing websocket bearer token"));
    }

    #[test]
    fn who_showed_what_is_told_without_the_token() {
        let guard = Guard::Signed(SignedBearer::new(vec![b'k'; 40]).unwrap(), Ground::default());
        let told = |claims: &Value| guard.admit(&headers(Some(&signed(Algorithm::HS256, &[b'k'; 40], claims)))).unwrap().who;
        let named = told(&json!({"exp": now() + 60, "sub": "ci", "jti": "7"}));
        assert_eq!(named, Who::Signed { sub: Some("ci".to_owned()), jti: Some("7".to_owned()) });
        assert_eq!(serde_json::to_string(&named).unwrap(), r#"{"credential":"signed","sub":"ci","jti":"7"}"#);
        let unnamed = told(&json!({"exp": now() + 60, "sub": 7, "jti": null}));
        assert_eq!(unnamed, Who::Signed { sub: None, jti: None });
        let Who::Signed { sub: Some(long), .. } = told(&json!({"exp": now() + 60, "sub": "x".repeat(5000)})) else { panic!() };
        assert_eq!(long.len(), CLAIM);
        assert_eq!(Guard::Token(digest_of("t"), None).admit(&headers(Some("Bearer t"))).unwrap().who, Who::Token);
        assert_eq!(Guard::Open.admit(&headers(None)).unwrap().who, Who::None);
    }

    #[test]
    fn a_scope_is_what_the_claim_says_and_never_ignored() {
        let secret = [b'k'; 40];
        let rules = SignedBearer::new(secret.to_vec()).unwrap();
        let guard = Guard::Signed(rules.clone(), Ground::default());
        let admit = |claims: &Value| guard.admit(&headers(Some(&signed(Algorithm::HS256, &secret, claims))));
        let exp = now() + 60;
        assert!(!admit(&json!({"exp": exp})).unwrap().is_scoped());
        for scope in [json!({}), json!({"policy": "read-only"}), json!({"methods": ["fs/*"]})] {
            assert!(admit(&json!({"exp": exp, "portcullis": scope})).unwrap().is_scoped(), "{scope}");
            let made = rules.sign(Duration::from_secs(60), Some(&scope.to_string())).unwrap();
            assert!(guard.admit(&headers(Some(&format!("Bearer {made}")))).unwrap().is_scoped());
        }
        for scope in [json!(null), json!("read-only"), json!({"polcy": "read-only"}), json!({"methods": null})] {
            let refused = admit(&json!({"exp": exp, "portcullis": scope})).unwrap_err();
            assert!(refused.starts_with("invalid websocket jwt"), "{scope}: {refused}");
            assert!(rules.sign(Duration::from_secs(60), Some(&scope.to_string())).is_err(), "{scope}");
        }
        let plain = rules.sign(Duration::from_secs(60), None).unwrap();
        assert!(!guard.admit(&headers(Some(&format!("Bearer {plain}")))).unwrap().is_scoped());
        let long: Vec<String> = (0..4000).map(|nth| format!("fs/{nth}")).collect();
        assert!(matches!(rules.sign(Duration::ZERO, Some(&json!({"methods": long}).to_string())), Err(SignError::Length(_))));
    }

    #[test]
    fn secrets_are_long_and_never_shown() {
        assert_eq!(
            SignedBearer::new(vec![b's'; 31]).unwrap_err().to_string(),
            "a shared secret of 31 bytes: at least 32 are needed"
        );
        let shown = format!("{:?}", SignedBearer::new(vec![b's'; 32]).unwrap());
        assert!(!shown.contains("ssss") && !shown.contains("115"), "{shown}");
    }
}

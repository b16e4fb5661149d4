//! Identities: the static key pair of a process, and the public half that the registry hands to others.

use crate::crypto::{ML_KEM_PUBLIC_LEN, MlKem768, X25519, X25519_LEN};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clatter::KeyPair;
use clatter::bytearray::{ByteArray, HeapArray};
use clatter::traits::{Dh, Kem};
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// The only suite: what key exchange, cipher and hash a channel is made of.
pub const SUITE: &str = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256";
/// What the registry calls that suite.
pub const SECURITY_PROFILE: &str = "noise_hybrid_ik_v1";

/// A process's static keys. The private halves never leave it: there is no way to read or to store them.
pub struct Identity {
    pub(crate) x25519: KeyPair<<X25519 as Dh>::PubKey, <X25519 as Dh>::PrivateKey>,
    pub(crate) ml_kem: KeyPair<<MlKem768 as Kem>::PubKey, <MlKem768 as Kem>::SecretKey>,
}

/// The system gave no randomness for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("make a relay identity: the system gave no random bytes")]
pub struct NoRandomness;

impl Identity {
    /// Makes new keys.
    ///
    /// # Errors
    /// The system gave no randomness.
    pub fn generate() -> Result<Self, NoRandomness> {
        let x25519 = X25519::genkey().map_err(|_| NoRandomness)?;
        let ml_kem = MlKem768::genkey().map_err(|_| NoRandomness)?;
        Ok(Self { x25519, ml_kem })
    }

    /// The half that others may know.
    #[must_use]
    pub fn public_keys(&self) -> PublicKeys {
        PublicKeys { x25519: self.x25519.public, ml_kem: self.ml_kem.public.clone() }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

/// The public half of an [`Identity`]. As JSON: the suite and the two keys in base64; nothing else is accepted.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Json", into = "Json")]
pub struct PublicKeys {
    pub(crate) x25519: [u8; X25519_LEN],
    pub(crate) ml_kem: HeapArray<ML_KEM_PUBLIC_LEN>,
}

impl Eq for PublicKeys {}

impl fmt::Debug for PublicKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PublicKeys(..)")
    }
}

/// Public keys that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Of another suite than [`SUITE`].
    #[error("the public keys are of a suite that is not {SUITE}")]
    Suite,
    /// Not base64.
    #[error("the {0} public key is not base64")]
    Base64(&'static str),
    /// Of another length.
    #[error("the {key} public key has {length} bytes")]
    Length {
        /// Which key.
        key: &'static str,
        /// Its length in bytes.
        length: usize,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    suite: String,
    x25519_public_key: String,
    mlkem768_public_key: String,
}

impl TryFrom<Json> for PublicKeys {
    type Error = KeyError;

    fn try_from(json: Json) -> Result<Self, KeyError> {
        fn decode<K: ByteArray>(key: &'static str, text: &str) -> Result<K, KeyError> {
            let bytes = STANDARD.decode(text).map_err(|_| KeyError::Base64(key))?;
            if bytes.len() == K::len() { Ok(K::from_slice(&bytes)) } else { Err(KeyError::Length { key, length: bytes.len() }) }
        }
        if json.suite != SUITE {
            return Err(KeyError::Suite);
        }
        let x25519 = decode("X25519", &json.x25519_public_key)?;
        Ok(Self { x25519, ml_kem: decode("ML-KEM-768", &json.mlkem768_public_key)? })
    }
}

impl From<PublicKeys> for Json {
    fn from(keys: PublicKeys) -> Self {
        Self {
            suite: SUITE.to_owned(),
            x25519_public_key: STANDARD.encode(keys.x25519),
            mlkem768_public_key: STANDARD.encode(keys.ml_kem.as_slice()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn public_keys_are_their_json() {
        let keys = Identity::generate().unwrap().public_keys();
        let value = serde_json::to_value(&keys).unwrap();
        assert_eq!(value.as_object().unwrap().len(), 3);
        assert_eq!(value["suite"], "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256");
        assert_eq!(STANDARD.decode(value["x25519_public_key"].as_str().unwrap()).unwrap(), keys.x25519);
        assert_eq!(STANDARD.decode(value["mlkem768_public_key"].as_str().unwrap()).unwrap().len(), 1184);
        assert_eq!(serde_json::from_value::<PublicKeys>(value).unwrap(), keys);
    }

    #[test]
    fn other_public_keys_are_refused_each_for_its_reason() {
        let good = serde_json::to_value(Identity::generate().unwrap().public_keys()).unwrap();
        assert!(serde_json::from_value::<PublicKeys>(good.clone()).is_ok());
        for (key, value, error) in [
            ("suite", json!("Noise_IK_25519_AESGCM_SHA256"), "suite"),
            ("x25519_public_key", json!("%"), "X25519 public key is not base64"),
            ("x25519_public_key", json!("AAAA"), "X25519 public key has 3 bytes"),
            ("mlkem768_public_key", json!("AAAA="), "ML-KEM-768 public key is not base64"),
            ("mlkem768_public_key", json!(""), "ML-KEM-768 public key has 0 bytes"),
            ("other", Value::Null, "unknown field"),
        ] {
            let mut changed = good.clone();
            changed[key] = value;
            let got = serde_json::from_value::<PublicKeys>(changed).unwrap_err().to_string();
            assert!(got.contains(error), "{key}: {got}");
        }
    }

    #[test]
    fn keys_are_not_printed() {
        let identity = Identity::generate().unwrap();
        assert_eq!(format!("{identity:?} {:?}", identity.public_keys()), "Identity(..) PublicKeys(..)");
    }
}

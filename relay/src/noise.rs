//! The encrypted channel of a stream: Noise hybrid IK. The harness is the initiator and knows the executor's static keys from the
//! registry; the executor learns the harness's from the first message, asks the registry about them, and only then answers.
//!
//! The protocol is `Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256` (the suite's name says X25519, the protocol's does not):
//! `-> skem, e, es, s, ss` and `<- ekem, skem, e, ee, se`, each `e` and `s` being two keys. Releases of the library before 2.2 have
//! another order in the answer and agree with nobody.
//!
//! * A channel is bound to the environment, the executor's registration and the stream: all three are in the prologue.
//! * Each direction has its own counter, which is never sent. A record is encrypted once; a second sending repeats its bytes.
//! * A record that does not decrypt ends the channel: nothing behind it can.

use crate::crypto::{AesGcm, MlKem768, Sha256, TAG_LEN, X25519};
use crate::keys::{Identity, PublicKeys};
use bytes::Bytes;
use clatter::HybridHandshake;
use clatter::HybridHandshakeParams;
use clatter::handshakepattern::noise_hybrid_ik;
use clatter::traits::Handshaker;
use clatter::transportstate::TransportState;
use std::fmt;
use thiserror::Error;

/// What the prologue begins with.
const DOMAIN: &str = "codex-exec-server-relay-noise/v1";
/// Longest message of Noise, in bytes.
pub(crate) const MAX_NOISE: usize = 65_535;
/// Longest plaintext of one record, in bytes.
pub(crate) const MAX_PLAINTEXT: usize = 60 * 1024;
/// Longest authorization of a harness, in bytes.
pub const MAX_AUTHORIZATION: usize = 4096;

type Handshake = HybridHandshake<X25519, MlKem768, MlKem768, AesGcm, Sha256>;

/// What a channel is bound to, besides the keys of its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding<'a> {
    /// The environment that the executor serves.
    pub environment: &'a str,
    /// The executor's registration in it.
    pub registration: &'a str,
    /// The stream's name.
    pub stream: &'a str,
}

impl Binding<'_> {
    fn prologue(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in [DOMAIN, self.environment, self.registration, self.stream] {
            bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes
    }
}

/// What goes wrong in a channel. Fatal for it, and for it only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoiseError {
    /// The handshake did not complete: other keys, another binding, or changed on its way.
    #[error("the relay handshake failed: the peer has other keys, or another environment, registration or stream")]
    Handshake,
    /// The authorization is not UTF-8 or above [`MAX_AUTHORIZATION`].
    #[error("the harness authorization is no text of at most {MAX_AUTHORIZATION} bytes")]
    Authorization,
    /// The executor's answer carries something.
    #[error("the executor's handshake message has a payload")]
    Payload,
    /// A record that is not the next one, or was changed on its way.
    #[error("a record of the relay channel does not decrypt")]
    Decrypt,
    /// A record of an impossible length.
    #[error("a record of the relay channel has {0} bytes")]
    Length(usize),
    /// The system could not encrypt.
    #[error("encrypt a record of the relay channel")]
    Encrypt,
}

/// What the registry gave a harness for one executor, which asks the registry whether it is true. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorization(String);

impl Authorization {
    /// The secret, for the question to the registry.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// A harness that waits for the executor's answer.
pub struct Initiator(Handshake);

impl Initiator {
    /// Begins: the first message carries the authorization that the registry gave.
    ///
    /// # Errors
    /// The authorization is too long, or the executor's keys are no keys.
    pub fn start(
        identity: &Identity,
        executor: &PublicKeys,
        binding: Binding<'_>,
        authorization: &str,
    ) -> Result<(Self, Vec<u8>), NoiseError> {
        if authorization.len() > MAX_AUTHORIZATION {
            return Err(NoiseError::Authorization);
        }
        let prologue = binding.prologue();
        let parameters = HybridHandshakeParams::new(noise_hybrid_ik(), true)
            .with_prologue(&prologue)
            .with_s(identity.x25519.clone())
            .with_s_kem(identity.ml_kem.clone())
            .with_rs(executor.x25519)
            .with_rs_kem(executor.ml_kem.clone());
        let mut handshake = Handshake::new(parameters).map_err(|_| NoiseError::Handshake)?;
        let message = write(&mut handshake, authorization.as_bytes())?;
        Ok((Self(handshake), message))
    }

    /// Reads the executor's answer.
    ///
    /// # Errors
    /// It is not the answer of the executor whose keys were given, or it carries something.
    pub fn finish(mut self, message: &[u8]) -> Result<Channel, NoiseError> {
        if !read(&mut self.0, message)?.is_empty() {
            return Err(NoiseError::Payload);
        }
        Channel::new(self.0)
    }
}

/// An executor that read a harness's first message and has not answered: the registry must be asked about the two fields.
pub struct Pending {
    /// The harness's keys.
    pub harness: PublicKeys,
    /// What the registry gave the harness for this executor. A secret.
    pub authorization: Authorization,
    handshake: Handshake,
}

impl Pending {
    /// Reads a harness's first message.
    ///
    /// # Errors
    /// It was not made for these keys and this binding, or its authorization cannot be one.
    pub fn read(identity: &Identity, binding: Binding<'_>, message: &[u8]) -> Result<Self, NoiseError> {
        let prologue = binding.prologue();
        let parameters = HybridHandshakeParams::new(noise_hybrid_ik(), false)
            .with_prologue(&prologue)
            .with_s(identity.x25519.clone())
            .with_s_kem(identity.ml_kem.clone());
        let mut handshake = Handshake::new(parameters).map_err(|_| NoiseError::Handshake)?;
        let payload = read(&mut handshake, message)?;
        if payload.len() > MAX_AUTHORIZATION {
            return Err(NoiseError::Authorization);
        }
        let authorization = String::from_utf8(payload).map(Authorization).map_err(|_| NoiseError::Authorization)?;
        let keys = handshake.get_remote_static().ok_or(NoiseError::Handshake)?;
        let harness = PublicKeys { x25519: *keys.dh(), ml_kem: keys.kem().clone() };
        Ok(Self { harness, authorization, handshake })
    }

    /// Answers: the registry said that the harness may.
    ///
    /// # Errors
    /// The harness's keys are no keys.
    pub fn accept(mut self) -> Result<(Vec<u8>, Channel), NoiseError> {
        let message = write(&mut self.handshake, &[])?;
        Ok((message, Channel::new(self.handshake)?))
    }
}

/// An open channel.
pub struct Channel(TransportState<AesGcm, Sha256>);

impl Channel {
    fn new(handshake: Handshake) -> Result<Self, NoiseError> {
        handshake.finalize().map(Self).map_err(|_| NoiseError::Handshake)
    }

    /// Encrypts the next record of at most 60 KiB.
    ///
    /// # Errors
    /// It is too long, or 2^64 records were encrypted.
    pub fn seal(&mut self, plaintext: &[u8]) -> Result<Bytes, NoiseError> {
        if plaintext.len() > MAX_PLAINTEXT {
            return Err(NoiseError::Length(plaintext.len()));
        }
        self.0.send_vec(plaintext).map(Bytes::from).map_err(|_| NoiseError::Encrypt)
    }

    /// Decrypts the next record.
    ///
    /// # Errors
    /// It is not the next one or was changed: the channel is over.
    pub fn open(&mut self, record: &[u8]) -> Result<Vec<u8>, NoiseError> {
        check_record(record)?;
        self.0.receive_vec(record).map_err(|_| NoiseError::Decrypt)
    }
}

/// Whether a ciphertext can be a record.
pub(crate) fn check_record(record: &[u8]) -> Result<(), NoiseError> {
    if (TAG_LEN..=MAX_NOISE).contains(&record.len()) { Ok(()) } else { Err(NoiseError::Length(record.len())) }
}

fn write(handshake: &mut Handshake, payload: &[u8]) -> Result<Vec<u8>, NoiseError> {
    // The library panics above this; no payload that gets here reaches it.
    let length = handshake.get_next_message_overhead().map_err(|_| NoiseError::Handshake)? + payload.len();
    if length > MAX_NOISE {
        return Err(NoiseError::Length(length));
    }
    let mut message = vec![0; length];
    let written = handshake.write_message(payload, &mut message).map_err(|_| NoiseError::Handshake)?;
    message.truncate(written);
    Ok(message)
}

fn read(handshake: &mut Handshake, message: &[u8]) -> Result<Vec<u8>, NoiseError> {
    // The library panics above this.
    if message.len() > MAX_NOISE {
        return Err(NoiseError::Length(message.len()));
    }
    let mut payload = vec![0; message.len()];
    let length = handshake.read_message(message, &mut payload).map_err(|_| NoiseError::Handshake)?;
    payload.truncate(length);
    Ok(payload)
}

macro_rules! hide {
    ($($name:ident)*) => {
        $(impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        })*
    };
}
hide!(Authorization Initiator Pending Channel);

#[cfg(test)]
mod tests;

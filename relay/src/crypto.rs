//! The algorithms of the handshake and of the records, by aws-lc: clatter brings the protocol, these bring the mathematics.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::agreement::{self, PrivateKey, UnparsedPublicKey};
use aws_lc_rs::digest::{self, Context as Digest};
use aws_lc_rs::encoding::{AsBigEndian, Curve25519SeedBin};
use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, EncapsulationKey, ML_KEM_768};
use clatter::KeyPair;
use clatter::bytearray::{ByteArray, HeapArray, SensitiveByteArray};
use clatter::error::{CipherError, CipherResult, DhError, DhResult, KemError, KemResult};
use clatter::traits::{Cipher, CryptoComponent, Dh, Hash, Kem, Rng};

/// Bytes of an X25519 key, private or public.
pub(crate) const X25519_LEN: usize = 32;
/// Bytes of a public ML-KEM-768 key.
pub(crate) const ML_KEM_PUBLIC_LEN: usize = 1184;
/// Bytes of a secret one, as FIPS 203 expands it.
const ML_KEM_SECRET_LEN: usize = 2400;
/// Bytes of a shared secret that is encapsulated.
pub(crate) const ML_KEM_CIPHERTEXT_LEN: usize = 1088;
/// Bytes that encryption adds.
pub(crate) const TAG_LEN: usize = 16;

/// X25519. An agreement whose result is all zeros (a public key of small order) is an error.
#[derive(Clone)]
pub(crate) struct X25519;

impl CryptoComponent for X25519 {
    fn name() -> &'static str {
        "25519"
    }
}

impl Dh for X25519 {
    type PrivateKey = SensitiveByteArray<[u8; X25519_LEN]>;
    type PubKey = [u8; X25519_LEN];
    type Output = SensitiveByteArray<[u8; 32]>;

    fn genkey_rng<R: Rng>(_: &mut R) -> DhResult<KeyPair<Self::PubKey, Self::PrivateKey>> {
        let key = PrivateKey::generate(&agreement::X25519).map_err(|_| DhError::KeyGeneration)?;
        let public = key.compute_public_key().map_err(|_| DhError::KeyGeneration)?;
        let seed: Curve25519SeedBin<'_> = key.as_be_bytes().map_err(|_| DhError::KeyGeneration)?;
        Ok(KeyPair { public: ByteArray::from_slice(public.as_ref()), secret: ByteArray::from_slice(seed.as_ref()) })
    }

    fn pubkey(key: &Self::PrivateKey) -> Self::PubKey {
        // Every 32 bytes are a private key; should that ever fail, nobody has the zero key and the handshake does not complete.
        PrivateKey::from_private_key(&agreement::X25519, key.as_slice())
            .ok()
            .and_then(|key| key.compute_public_key().ok())
            .map_or([0; X25519_LEN], |public| ByteArray::from_slice(public.as_ref()))
    }

    fn dh(key: &Self::PrivateKey, peer: &Self::PubKey) -> DhResult<Self::Output> {
        let key = PrivateKey::from_private_key(&agreement::X25519, key.as_slice()).map_err(|_| DhError::KeyGeneration)?;
        let peer = UnparsedPublicKey::new(&agreement::X25519, peer);
        agreement::agree(&key, peer, DhError::KeyGeneration, |secret| Ok(ByteArray::from_slice(secret)))
    }
}

/// ML-KEM-768.
#[derive(Clone)]
pub(crate) struct MlKem768;

impl CryptoComponent for MlKem768 {
    fn name() -> &'static str {
        "MLKEM768"
    }
}

impl Kem for MlKem768 {
    type SecretKey = SensitiveByteArray<HeapArray<ML_KEM_SECRET_LEN>>;
    type PubKey = HeapArray<ML_KEM_PUBLIC_LEN>;
    type Ct = HeapArray<ML_KEM_CIPHERTEXT_LEN>;
    type Ss = SensitiveByteArray<[u8; 32]>;

    fn genkey_rng<R: Rng>(_: &mut R) -> KemResult<KeyPair<Self::PubKey, Self::SecretKey>> {
        let key = DecapsulationKey::generate(&ML_KEM_768).map_err(|_| KemError::KeyGeneration)?;
        let public = key.encapsulation_key().and_then(|key| key.key_bytes()).map_err(|_| KemError::KeyGeneration)?;
        let secret = key.key_bytes().map_err(|_| KemError::KeyGeneration)?;
        Ok(KeyPair { public: ByteArray::from_slice(public.as_ref()), secret: ByteArray::from_slice(secret.as_ref()) })
    }

    fn encapsulate<R: Rng>(public: &[u8], _: &mut R) -> KemResult<(Self::Ct, Self::Ss)> {
        let key = EncapsulationKey::new(&ML_KEM_768, public).map_err(|_| KemError::Input)?;
        let (ciphertext, secret) = key.encapsulate().map_err(|_| KemError::Encapsulation)?;
        Ok((ByteArray::from_slice(ciphertext.as_ref()), ByteArray::from_slice(secret.as_ref())))
    }

    fn decapsulate(ciphertext: &[u8], secret: &[u8]) -> KemResult<Self::Ss> {
        let key = DecapsulationKey::new(&ML_KEM_768, secret).map_err(|_| KemError::Input)?;
        let secret = key.decapsulate(Ciphertext::from(ciphertext)).map_err(|_| KemError::Decapsulation)?;
        Ok(ByteArray::from_slice(secret.as_ref()))
    }
}

/// AES-256-GCM with the nonce of Noise: four zero bytes, then the counter, big endian.
#[derive(Clone)]
pub(crate) struct AesGcm;

impl AesGcm {
    fn key(bytes: &[u8]) -> Result<LessSafeKey, aws_lc_rs::error::Unspecified> {
        UnboundKey::new(&AES_256_GCM, bytes).map(LessSafeKey::new)
    }

    fn nonce(counter: u64) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&counter.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }
}

impl CryptoComponent for AesGcm {
    fn name() -> &'static str {
        "AESGCM"
    }
}

impl Cipher for AesGcm {
    type Key = SensitiveByteArray<[u8; 32]>;

    fn tag_len() -> usize {
        TAG_LEN
    }

    fn encrypt(key: &Self::Key, nonce: u64, ad: &[u8], plaintext: &[u8], out: &mut [u8]) -> CipherResult<()> {
        out.get_mut(..plaintext.len()).ok_or(CipherError::Encrypt)?.copy_from_slice(plaintext);
        Self::encrypt_in_place(key, nonce, ad, out, plaintext.len())?;
        Ok(())
    }

    fn encrypt_in_place(key: &Self::Key, nonce: u64, ad: &[u8], in_out: &mut [u8], length: usize) -> CipherResult<usize> {
        let (text, rest) = in_out.split_at_mut_checked(length).ok_or(CipherError::Encrypt)?;
        let tag_out = rest.get_mut(..TAG_LEN).ok_or(CipherError::Encrypt)?;
        let key = Self::key(key.as_slice()).map_err(|_| CipherError::Encrypt)?;
        let tag = key.seal_in_place_separate_tag(Self::nonce(nonce), Aad::from(ad), text).map_err(|_| CipherError::Encrypt)?;
        tag_out.copy_from_slice(tag.as_ref());
        Ok(length + TAG_LEN)
    }

    fn decrypt(key: &Self::Key, nonce: u64, ad: &[u8], ciphertext: &[u8], out: &mut [u8]) -> CipherResult<()> {
        let length = ciphertext.len().checked_sub(TAG_LEN).ok_or(CipherError::Decrypt)?;
        let (text, tag) = ciphertext.split_at(length);
        let out = out.get_mut(..length).ok_or(CipherError::Decrypt)?;
        let key = Self::key(key.as_slice()).map_err(|_| CipherError::Decrypt)?;
        key.open_separate_gather(Self::nonce(nonce), Aad::from(ad), text, tag, out).map_err(|_| CipherError::Decrypt)
    }

    fn decrypt_in_place(key: &Self::Key, nonce: u64, ad: &[u8], in_out: &mut [u8], length: usize) -> CipherResult<usize> {
        let in_out = in_out.get_mut(..length).ok_or(CipherError::Decrypt)?;
        let key = Self::key(key.as_slice()).map_err(|_| CipherError::Decrypt)?;
        let text = key.open_in_place(Self::nonce(nonce), Aad::from(ad), in_out).map_err(|_| CipherError::Decrypt)?;
        Ok(text.len())
    }
}

/// SHA-256.
#[derive(Clone)]
pub(crate) struct Sha256(Digest);

/// The hash of a message.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    ByteArray::from_slice(digest::digest(&digest::SHA256, bytes).as_ref())
}

impl Default for Sha256 {
    fn default() -> Self {
        Self(Digest::new(&digest::SHA256))
    }
}

impl CryptoComponent for Sha256 {
    fn name() -> &'static str {
        "SHA256"
    }
}

impl Hash for Sha256 {
    type Block = [u8; 64];
    type Output = SensitiveByteArray<[u8; 32]>;

    fn input(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn result(self) -> Self::Output {
        ByteArray::from_slice(self.0.finish().as_ref())
    }
}

use super::*;
use crate::keys::SUITE;
use clatter::bytearray::ByteArray;
use clatter::crypto::{cipher, dh, hash, kem::rust_crypto_ml_kem as kem};
use proptest::prelude::*;
use std::sync::OnceLock;

const BINDING: Binding<'static> = Binding { environment: "env-1", registration: "registration-1", stream: "stream-1" };

fn identities() -> (Identity, Identity) {
    (Identity::generate().unwrap(), Identity::generate().unwrap())
}

fn channels() -> (Channel, Channel) {
    let (harness, executor) = identities();
    let (initiator, first) = Initiator::start(&harness, &executor.public_keys(), BINDING, "may").unwrap();
    let pending = Pending::read(&executor, BINDING, &first).unwrap();
    let (second, responder) = pending.accept().unwrap();
    (initiator.finish(&second).unwrap(), responder)
}

/// The library's names and patterns, which changed between its releases, are half of the wire.
#[test]
fn the_protocol_is_the_one_of_the_wire() {
    use clatter::handshakepattern::Token;
    let pattern = noise_hybrid_ik();
    assert_eq!(&*Handshake::build_name(&pattern), "Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256");
    assert!(matches!(pattern.get_initiator_pattern(0), [Token::Skem, Token::E, Token::ES, Token::S, Token::SS]));
    assert!(matches!(pattern.get_responder_pattern(0), [Token::Ekem, Token::Skem, Token::E, Token::EE, Token::SE]));
    assert_eq!(SUITE, "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256");
}

#[test]
fn a_channel_opens_and_both_ends_know_each_other() {
    let (harness, executor) = identities();
    let (initiator, first) = Initiator::start(&harness, &executor.public_keys(), BINDING, "may").unwrap();
    assert_eq!(first.len(), 1088 + (32 + 1184) + (32 + 16) + (1184 + 16) + "may".len() + 16);
    let pending = Pending::read(&executor, BINDING, &first).unwrap();
    assert_eq!(pending.harness, harness.public_keys());
    assert_eq!(pending.authorization.reveal(), "may");
    let (second, mut there) = pending.accept().unwrap();
    assert_eq!(second.len(), (32 + 1184) + 1088 + (1088 + 16) + 16);
    let mut here = initiator.finish(&second).unwrap();
    for text in [&b""[..], b"hello", &[7; MAX_PLAINTEXT]] {
        let record = here.seal(text).unwrap();
        assert_eq!(record.len(), text.len() + 16);
        assert_eq!(there.open(&record).unwrap(), text);
        let record = there.seal(text).unwrap();
        assert_eq!(here.open(&record).unwrap(), text);
    }
    assert_eq!(here.seal(&[0; MAX_PLAINTEXT + 1]), Err(NoiseError::Length(61_441)));
}

/// The executor by the library's own algorithms instead of ours: every key, ciphertext, tag and hash must agree.
#[test]
fn a_second_implementation_agrees() {
    type Other = HybridHandshake<dh::X25519, kem::MlKem768, kem::MlKem768, cipher::AesGcm, hash::Sha256>;
    use clatter::traits::{Dh, Kem};
    let harness = Identity::generate().unwrap();
    let (s, s_kem) = (dh::X25519::genkey().unwrap(), kem::MlKem768::genkey().unwrap());
    let executor = PublicKeys { x25519: s.public, ml_kem: ByteArray::from_slice(s_kem.public.as_slice()) };
    let prologue = BINDING.prologue();
    let parameters = HybridHandshakeParams::new(noise_hybrid_ik(), false).with_prologue(&prologue).with_s(s).with_s_kem(s_kem);
    let mut other = Other::new(parameters).unwrap();
    let (initiator, first) = Initiator::start(&harness, &executor, BINDING, "may").unwrap();
    let mut buffer = vec![0; MAX_NOISE];
    let length = other.read_message(&first, &mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"may");
    let length = other.write_message(&[], &mut buffer).unwrap();
    let mut here = initiator.finish(&buffer[..length]).unwrap();
    let mut there = other.finalize().unwrap();
    for text in [&b"one"[..], b"two"] {
        assert_eq!(there.receive_vec(&here.seal(text).unwrap()).unwrap(), text);
        assert_eq!(here.open(&there.send_vec(text).unwrap()).unwrap(), text);
    }
}

#[test]
fn the_prologue_is_four_parts_with_their_lengths() {
    let mut bytes = b"\0\0\0\0\0\0\0\x20codex-exec-server-relay-noise/v1".to_vec();
    bytes.extend_from_slice(b"\0\0\0\0\0\0\0\x05env-1\0\0\0\0\0\0\0\x0eregistration-1\0\0\0\0\0\0\0\x08stream-1");
    assert_eq!(BINDING.prologue(), bytes);
    let other = Binding { environment: "env-1r", registration: "egistration-1", ..BINDING };
    assert_ne!(BINDING.prologue(), other.prologue());
}

#[test]
fn another_executor_cannot_answer() {
    let (harness, executor) = identities();
    let other = Identity::generate().unwrap();
    let (initiator, first) = Initiator::start(&harness, &other.public_keys(), BINDING, "may").unwrap();
    assert_eq!(Pending::read(&executor, BINDING, &first).unwrap_err(), NoiseError::Handshake);
    // One that answers with what it has is not believed either.
    let (_, for_executor) = Initiator::start(&harness, &executor.public_keys(), BINDING, "may").unwrap();
    let (second, _) = Pending::read(&executor, BINDING, &for_executor).unwrap().accept().unwrap();
    assert_eq!(initiator.finish(&second).unwrap_err(), NoiseError::Handshake);
}

#[test]
fn a_handshake_is_for_its_environment_registration_and_stream() {
    let (harness, executor) = identities();
    let (_, first) = Initiator::start(&harness, &executor.public_keys(), BINDING, "may").unwrap();
    for binding in [
        Binding { environment: "env-2", ..BINDING },
        Binding { registration: "registration-2", ..BINDING },
        Binding { stream: "stream-2", ..BINDING },
    ] {
        assert_eq!(Pending::read(&executor, binding, &first).unwrap_err(), NoiseError::Handshake);
    }
    assert!(Pending::read(&executor, BINDING, &first).is_ok());
}

#[test]
fn payloads_of_the_handshake_are_bounded() {
    let (harness, executor) = identities();
    let start = |text: &str| Initiator::start(&harness, &executor.public_keys(), BINDING, text);
    assert!(start(&"x".repeat(MAX_AUTHORIZATION)).is_ok());
    assert_eq!(start(&"x".repeat(MAX_AUTHORIZATION + 1)).unwrap_err(), NoiseError::Authorization);
    // A harness that is not ours sends what it likes.
    let raw = |payload: &[u8]| {
        let keys = executor.public_keys();
        let prologue = BINDING.prologue();
        let parameters = HybridHandshakeParams::new(noise_hybrid_ik(), true)
            .with_prologue(&prologue)
            .with_s(harness.x25519.clone())
            .with_s_kem(harness.ml_kem.clone())
            .with_rs(keys.x25519)
            .with_rs_kem(keys.ml_kem);
        let mut handshake = Handshake::new(parameters).unwrap();
        let first = write(&mut handshake, payload).unwrap();
        (handshake, Pending::read(&executor, BINDING, &first))
    };
    assert_eq!(raw(&[b'x'; MAX_AUTHORIZATION + 1]).1.unwrap_err(), NoiseError::Authorization);
    assert_eq!(raw(b"\xff").1.unwrap_err(), NoiseError::Authorization);
    assert!(Pending::read(&executor, BINDING, &[0; MAX_NOISE + 1]).is_err());
    // An executor that is not ours, too.
    let (initiator, first) = start("may").unwrap();
    let mut pending = Pending::read(&executor, BINDING, &first).unwrap();
    let second = write(&mut pending.handshake, b"more").unwrap();
    assert_eq!(initiator.finish(&second).unwrap_err(), NoiseError::Payload);
}

#[test]
fn a_public_key_of_small_order_is_refused() {
    let (harness, executor) = identities();
    let bad = PublicKeys { x25519: [0; 32], ..executor.public_keys() };
    assert_eq!(Initiator::start(&harness, &bad, BINDING, "may").unwrap_err(), NoiseError::Handshake);
    // ML-KEM keys whose coefficients are out of range, too.
    let bad = PublicKeys { ml_kem: ByteArray::from_slice(&[0xff; 1184]), ..executor.public_keys() };
    assert_eq!(Initiator::start(&harness, &bad, BINDING, "may").unwrap_err(), NoiseError::Handshake);
}

#[test]
fn records_that_are_changed_repeated_left_out_or_turned_back_do_not_decrypt() {
    let (mut here, mut there) = channels();
    let record = here.seal(b"hello").unwrap();
    for at in 0..record.len() {
        let mut changed = record.to_vec();
        changed[at] ^= 1;
        assert_eq!(there.open(&changed), Err(NoiseError::Decrypt));
    }
    assert_eq!(here.open(&record), Err(NoiseError::Decrypt), "its own record, sent back");
    assert_eq!(there.open(&record[..15]), Err(NoiseError::Length(15)));
    assert_eq!(there.open(&[0; MAX_NOISE + 1]), Err(NoiseError::Length(65_536)));
    assert_eq!(there.open(&record).unwrap(), b"hello");
    assert_eq!(there.open(&record), Err(NoiseError::Decrypt), "repeated");
    let _lost = here.seal(b"lost").unwrap();
    assert_eq!(there.open(&here.seal(b"next").unwrap()), Err(NoiseError::Decrypt), "one before it is missing");
}

#[test]
fn nothing_of_a_channel_is_printed() {
    let (harness, executor) = identities();
    let (initiator, first) = Initiator::start(&harness, &executor.public_keys(), BINDING, "secret").unwrap();
    let pending = Pending::read(&executor, BINDING, &first).unwrap();
    assert_eq!(format!("{initiator:?} {pending:?}"), "Initiator(..) Pending(..)");
    assert_eq!(format!("{:?}", pending.authorization), "Authorization(..)");
    assert_eq!(format!("{:?}", pending.accept().unwrap().1), "Channel(..)");
    assert!(!first.windows(6).any(|window| window == b"secret"));
}

/// Once for all cases: only the messages vary.
fn ends() -> &'static (Identity, Identity) {
    static ENDS: OnceLock<(Identity, Identity)> = OnceLock::new();
    ENDS.get_or_init(identities)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_changed_handshake_never_completes(at: proptest::sample::Index, bit in 0..8u8, is_first: bool, cut: bool) {
        let (harness, executor) = ends();
        let (initiator, mut first) = Initiator::start(harness, &executor.public_keys(), BINDING, "may").unwrap();
        let change = |message: &mut Vec<u8>| {
            let at = at.index(message.len());
            if cut { message.truncate(at) } else { message[at] ^= 1 << bit }
        };
        if is_first {
            change(&mut first);
            prop_assert!(Pending::read(executor, BINDING, &first).is_err());
        } else {
            let (mut second, _) = Pending::read(executor, BINDING, &first).unwrap().accept().unwrap();
            change(&mut second);
            prop_assert!(initiator.finish(&second).is_err());
        }
    }

    #[test]
    fn garbage_completes_no_handshake(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
        let (harness, executor) = ends();
        prop_assert!(Pending::read(executor, BINDING, &bytes).is_err());
        let (initiator, _) = Initiator::start(harness, &executor.public_keys(), BINDING, "may").unwrap();
        prop_assert!(initiator.finish(&bytes).is_err());
    }
}

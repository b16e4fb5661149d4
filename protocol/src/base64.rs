//! Bytes in JSON: base64 with the standard alphabet and padding.

use ::base64::Engine as _;
use ::base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// Encodes, at the speed of the machine's vector unit.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

/// Encodes onto the end of a text.
pub fn encode_onto(bytes: &[u8], text: &mut String) {
    base64_simd::STANDARD.encode_append(bytes, text);
}

/// Decodes.
///
/// # Errors
/// A symbol outside of the alphabet, or wrong padding, in the words that clients of this wire know.
pub fn decode(text: &str) -> Result<Vec<u8>, String> {
    // The fast decoder does not say what is wrong, so a slow one is asked after the fact.
    base64_simd::STANDARD.decode_to_vec(text).or_else(|_| STANDARD.decode(text).map_err(|error| error.to_string()))
}

/// Bytes that must decode, else the parameters do not.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Chunk(pub Vec<u8>);

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chunk({} bytes)", self.0.len())
    }
}

impl Serialize for Chunk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Chunk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Checked(decoded) = Checked::deserialize(deserializer)?;
        decoded.map(Self).map_err(de::Error::custom)
    }
}

/// Bytes whose method has an answer of its own for text that does not decode.
#[derive(Clone, PartialEq, Eq)]
pub struct Checked(pub Result<Vec<u8>, String>);

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok(bytes) => write!(f, "Checked({} bytes)", bytes.len()),
            Err(error) => write!(f, "Checked({error})"),
        }
    }
}

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Checked;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Checked, E> {
                Ok(Checked(decode(text)))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_does_not_decode_is_said_in_known_words() {
        assert_eq!(decode("!!"), Err("Invalid symbol 33, offset 0.".to_owned()));
        assert_eq!(decode("abc"), Err("Invalid padding".to_owned()));
        assert_eq!(decode("YQ=="), Ok(b"a".to_vec()));
        assert_eq!(decode(""), Ok(Vec::new()));
    }

    proptest! {
        #[test]
        fn the_fast_coder_agrees_with_the_slow_one(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = encode(&bytes);
            prop_assert_eq!(&text, &STANDARD.encode(&bytes));
            let mut onto = "x".to_owned();
            encode_onto(&bytes, &mut onto);
            prop_assert_eq!(&onto[1..], &text);
            prop_assert_eq!(decode(&text), Ok(bytes));
        }

        #[test]
        fn what_one_decoder_refuses_the_other_does_too(text in "[A-Za-z0-9+/=_-]{0,12}") {
            prop_assert_eq!(base64_simd::STANDARD.decode_to_vec(&text).is_ok(), STANDARD.decode(&text).is_ok());
        }
    }
}

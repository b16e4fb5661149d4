//! Paths on the wire: `file:` URIs and native absolute paths become one type.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// An absolute path of this machine in bytes: it starts with `/`, holds no NUL, no empty, `.` or `..` segment, and
/// ends without a slash (but for the root itself). Normalised lexically: `a/link/..` is `a`, whatever the link says.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AbsolutePath(Vec<u8>);

impl AbsolutePath {
    /// Normalises a native absolute path.
    ///
    /// # Errors
    /// The path is not absolute, or holds a NUL byte.
    pub fn new(path: impl AsRef<Path>) -> Result<Self, PathError> {
        let bytes = path.as_ref().as_os_str().as_bytes();
        if bytes.first() != Some(&b'/') {
            return Err(PathError::Relative);
        }
        if bytes.contains(&0) {
            return Err(PathError::Invalid(String::from_utf8_lossy(bytes).into_owned()));
        }
        let mut segments: Vec<&[u8]> = Vec::new();
        for segment in bytes.split(|byte| *byte == b'/') {
            match segment {
                b"" | b"." => {}
                b".." => {
                    segments.pop();
                }
                name => segments.push(name),
            }
        }
        Ok(Self::from_segments(&segments))
    }

    fn from_segments(segments: &[impl AsRef<[u8]>]) -> Self {
        let mut bytes = Vec::new();
        for segment in segments {
            bytes.push(b'/');
            bytes.extend_from_slice(segment.as_ref());
        }
        if bytes.is_empty() {
            bytes.push(b'/');
        }
        Self(bytes)
    }

    /// The path as the standard library sees it.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// Its length in bytes, at least 1.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a path is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The canonical `file:` URI: no trailing slash, escapes in upper-case hex.
    #[must_use]
    pub fn to_uri(&self) -> String {
        use fmt::Write as _;
        let mut uri = String::with_capacity(self.0.len() + 7);
        uri.push_str("file://");
        for byte in &self.0 {
            match byte {
                b' ' | b'"' | b'<' | b'>' | b'`' | b'#' | b'?' | b'{' | b'}' | b'%' | b'\\' | 0..=0x1f | 0x7f.. => {
                    let _infallible = write!(uri, "%{byte:02X}");
                }
                plain => uri.push(char::from(*plain)),
            }
        }
        uri
    }
}

impl AsRef<Path> for AbsolutePath {
    fn as_ref(&self) -> &Path {
        self.as_path()
    }
}

impl fmt::Debug for AbsolutePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_path().fmt(f)
    }
}

impl fmt::Display for AbsolutePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_path().display().fmt(f)
    }
}

/// Between gateway and helper a path is its bytes, so that names that are not UTF-8 survive.
impl Serialize for AbsolutePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for AbsolutePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Bytes(bytes) = Bytes::deserialize(deserializer)?;
        Self::new(OsStr::from_bytes(&bytes)).map_err(de::Error::custom)
    }
}

/// Plain bytes in a helper frame: a name, an argument, a variable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }
            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

/// A path as a client sent it: well formed, but maybe of another system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum WirePath {
    /// A path of this machine.
    Local(AbsolutePath),
    /// A `file:` URI with a host or a drive letter. It is well formed, so it is refused by the operation, not by the parser.
    Foreign(String),
}

impl WirePath {
    /// Parses a `file:` URI or a native absolute path.
    ///
    /// # Errors
    /// Not a URI, not a `file:` URI, a query or a fragment, a relative path, a NUL byte, an escaped slash.
    pub fn parse(text: &str) -> Result<Self, PathError> {
        if text.starts_with('/') {
            return AbsolutePath::new(text).map(Self::Local);
        }
        let uri = url::Url::parse(text).map_err(|error| match error {
            url::ParseError::RelativeUrlWithoutBase => PathError::Relative,
            other => PathError::Uri(other.to_string()),
        })?;
        if uri.scheme() != "file" {
            return Err(PathError::Scheme(uri.scheme().to_owned()));
        }
        if uri.query().is_some() {
            return Err(PathError::Query);
        }
        if uri.fragment().is_some() {
            return Err(PathError::Fragment);
        }
        if !has_absolute_path(text) {
            return Err(PathError::NotAbsolute(text.to_owned()));
        }
        if uri.host().is_some() || has_drive_letter(&uri) {
            return Ok(Self::Foreign(text.to_owned()));
        }
        let mut segments = Vec::new();
        for segment in uri.path_segments().into_iter().flatten().filter(|segment| !segment.is_empty()) {
            let bytes = percent_decode(segment);
            if bytes.contains(&0) {
                return Err(PathError::Invalid(text.to_owned()));
            }
            if bytes.contains(&b'/') {
                return Err(PathError::EscapedSlash(text.to_owned()));
            }
            segments.push(bytes);
        }
        Ok(Self::Local(AbsolutePath::from_segments(&segments)))
    }

    /// The path of this machine.
    ///
    /// # Errors
    /// The URI names another system.
    pub fn local(&self) -> Result<&AbsolutePath, PathError> {
        match self {
            Self::Local(path) => Ok(path),
            Self::Foreign(uri) => Err(PathError::Invalid(uri.clone())),
        }
    }
}

impl fmt::Display for WirePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => path.fmt(f),
            Self::Foreign(uri) => uri.fmt(f),
        }
    }
}

impl Serialize for WirePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Local(path) => serializer.serialize_str(&path.to_uri()),
            Self::Foreign(uri) => serializer.serialize_str(uri),
        }
    }
}

impl<'de> Deserialize<'de> for WirePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = WirePath;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<WirePath, E> {
                WirePath::parse(text).map_err(|error| E::custom(format!("`{text}`: {error}")))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

/// Why a text is not a path. The texts are those that clients of this wire know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Neither a URI nor an absolute path.
    #[error("invalid URI: relative URL without a base")]
    Relative,
    /// The URI parser refused it.
    #[error("invalid URI: {0}")]
    Uri(String),
    /// Not a `file:` URI.
    #[error("unsupported path URI scheme `{0}`")]
    Scheme(String),
    /// A `?` part.
    #[error("query parameters are not allowed in path URIs")]
    Query,
    /// A `#` part.
    #[error("fragments are not allowed in path URIs")]
    Fragment,
    /// `file:` with a relative path or none.
    #[error("'{0}' has no absolute path: write file:///ABSOLUTE/PATH")]
    NotAbsolute(String),
    /// `%2F` inside a segment: no file name holds a slash.
    #[error("'{0}' has an escaped slash, which no file name can hold")]
    EscapedSlash(String),
    /// A NUL byte, a host or a drive letter.
    #[error("'{0}' is invalid on 'linux'")]
    Invalid(String),
}

/// Whether the text behind `file:` is `/path` or `//authority/path`; the URI parser itself would make up the slash.
fn has_absolute_path(text: &str) -> bool {
    let Some((_scheme, rest)) = text.split_once(':') else {
        return false;
    };
    match rest.strip_prefix("//") {
        Some(behind) => behind.contains('/'),
        None => rest.starts_with('/'),
    }
}

fn has_drive_letter(uri: &url::Url) -> bool {
    let first = uri.path_segments().and_then(|mut segments| segments.next()).unwrap_or("").as_bytes();
    matches!(first, [letter, b':'] if letter.is_ascii_alphabetic())
}

fn percent_decode(segment: &str) -> Vec<u8> {
    let bytes = segment.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let escape = (*byte == b'%').then(|| Some((hex(*bytes.get(at + 1)?)?, hex(*bytes.get(at + 2)?)?))).flatten();
        if let Some((high, low)) = escape {
            decoded.push(high << 4 | low);
            at += 3;
        } else {
            decoded.push(*byte);
            at += 1;
        }
    }
    decoded
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::ffi::OsStringExt;

    #[track_caller]
    fn check(text: &str, expect: Result<&str, &str>) {
        let got = WirePath::parse(text).and_then(|path| path.local().map(AbsolutePath::to_uri));
        assert_eq!(got.as_deref().map_err(ToString::to_string), expect.map_err(str::to_owned), "{text:?}");
    }

    #[test]
    fn uri_rules() {
        check("file:///a/b", Ok("file:///a/b"));
        check("file://localhost/a", Ok("file:///a"));
        check("FILE:///a/", Ok("file:///a"));
        check("file:/a", Ok("file:///a"));
        check("file:///", Ok("file:///"));
        check("file:///a/x/../b", Ok("file:///a/b"));
        check("file:///../../a", Ok("file:///a"));
        check("file:///a%2Etxt", Ok("file:///a.txt"));
        check("file:///a b/ü", Ok("file:///a%20b/%C3%BC"));
        check("file:///bad%FF", Ok("file:///bad%FF"));
        check("file:///pl+us/quo'te", Ok("file:///pl+us/quo'te"));
        check("file:///t%09x%5Cy", Ok("file:///t%09x%5Cy"));
    }

    #[test]
    fn native_paths_are_normalised() {
        check("/a//b/./c/../d/", Ok("file:///a/b/d"));
        check("/", Ok("file:///"));
        check("/..", Ok("file:///"));
    }

    #[test]
    fn refused_texts() {
        for text in ["a.txt", "./a", "", "~/x"] {
            check(text, Err("invalid URI: relative URL without a base"));
        }
        check("http://x/y", Err("unsupported path URI scheme `http`"));
        check("file:///a?x", Err("query parameters are not allowed in path URIs"));
        check("file:///a#x", Err("fragments are not allowed in path URIs"));
        check("file://host/x", Err("'file://host/x' is invalid on 'linux'"));
        check("file:///C:/x", Err("'file:///C:/x' is invalid on 'linux'"));
        check("file:///a%00b", Err("'file:///a%00b' is invalid on 'linux'"));
        check("/a\0b", Err("'/a\0b' is invalid on 'linux'"));
        check("file:etc/x", Err("'file:etc/x' has no absolute path: write file:///ABSOLUTE/PATH"));
        check("file:", Err("'file:' has no absolute path: write file:///ABSOLUTE/PATH"));
        check("file:///a%2Fb", Err("'file:///a%2Fb' has an escaped slash, which no file name can hold"));
    }

    proptest! {
        #[test]
        fn a_uri_leads_back_to_the_same_bytes(segments in prop::collection::vec(prop::collection::vec(1_u8..=255, 1..8), 0..6)) {
            let mut bytes = vec![b'/'];
            bytes.extend(segments.join(&b'/'));
            let path = AbsolutePath::new(std::ffi::OsString::from_vec(bytes)).unwrap();
            let drive = path.as_path().iter().nth(1).is_some_and(|name| matches!(name.as_bytes(), [a, b':' | b'|'] if a.is_ascii_alphabetic()));
            prop_assume!(!drive);
            prop_assert_eq!(WirePath::parse(&path.to_uri()), Ok(WirePath::Local(path)));
        }

        #[test]
        fn no_text_panics_or_yields_a_dotted_path(text in ".*") {
            if let Ok(WirePath::Local(path)) = WirePath::parse(&text) {
                prop_assert!(path.as_path().is_absolute());
                prop_assert!(path.as_path().to_string_lossy().split('/').all(|segment| segment != ".." && segment != "."));
            }
        }
    }
}

//! Deny globs. The library matches bytes; here a letter is one letter, however many bytes it has.
//!
//! A letter beyond ASCII stands in patterns and in names as one *unit*: a mark and six digits, which are control characters that
//! stand for nothing else, since those themselves are spelled as units too. So `?` and a negated class match either one plain
//! character or one whole unit, and `*`, where it ends within a unit, leaves digits that nothing but another `*` matches.

use crate::policy::{DenyGlob, MAX_GLOB_LENGTH, PolicyError};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The globs of one base, together.
#[derive(Debug)]
pub(crate) struct Globs(GlobSet);

impl Globs {
    pub(crate) fn new(globs: &[&DenyGlob]) -> Result<Self, PolicyError> {
        let mut set = GlobSetBuilder::new();
        for glob in globs {
            set.add(compile_glob(&glob.pattern)?);
        }
        let fail = |error: globset::Error| PolicyError::Glob { glob: globs[0].pattern.clone(), problem: error.to_string() };
        set.build().map(Self).map_err(fail)
    }

    /// Whether a glob matches the path of these names or that of one of its ancestors.
    pub(crate) fn match_ancestor(&self, names: &[&OsStr]) -> bool {
        let mut relative = PathBuf::new();
        names.iter().any(|name| {
            relative.push(spell(name));
            self.0.is_match(&relative)
        })
    }
}

/// A glob whose `*`, `?` and classes stop at slashes. It matches names as [`spell`] spells them.
///
/// # Errors
/// It is no glob, or a class of it holds a letter that is not ASCII.
pub(crate) fn compile_glob(pattern: &str) -> Result<globset::Glob, PolicyError> {
    let fail = |problem: String| PolicyError::Glob { glob: pattern.to_owned(), problem };
    if pattern.len() > MAX_GLOB_LENGTH {
        return Err(PolicyError::Bound { what: "bytes in a deny glob", count: pattern.len(), bound: MAX_GLOB_LENGTH });
    }
    let translated = translate(pattern).map_err(fail)?;
    if translated.len() > MAX_TRANSLATED {
        return Err(fail(format!("is too complex: {} bytes when compiled, the bound is {MAX_TRANSLATED}", translated.len())));
    }
    GlobBuilder::new(&translated)
        .literal_separator(true)
        .backslash_escape(true)
        .build()
        .map_err(|error| fail(error.kind().to_string()))
}

/// Bound of a translated pattern in bytes: room for a thousand `?`.
const MAX_TRANSLATED: usize = 64 << 10;

/// Bound of the translated patterns of one set of grants together, in bytes. The compiled patterns take ten times as much memory
/// (25 MiB were measured to take 257 MB), and the gateway's thread takes some milliseconds to read them.
const MAX_ALL_TRANSLATED: usize = 256 << 10;

/// Checks that the globs of one set of grants are not too large together. [`compile_glob`] reports invalid globs.
///
/// # Errors
/// They are.
pub(crate) fn check_size<'a>(mut patterns: impl Iterator<Item = &'a str>) -> Result<(), PolicyError> {
    patterns.try_fold(Size::default(), Size::and).map(drop)
}

/// The size of translated patterns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Size(usize);

impl Size {
    /// With one more pattern.
    pub(crate) fn and(self, pattern: &str) -> Result<Self, PolicyError> {
        let count = self.0.saturating_add(translate(pattern).map_or(0, |translated| translated.len()));
        if count > MAX_ALL_TRANSLATED {
            let what = "bytes of deny globs when compiled, where `?` and a class take about 60";
            return Err(PolicyError::Bound { what, count, bound: MAX_ALL_TRANSLATED });
        }
        Ok(Self(count))
    }
}

const MARK: char = '\x01';

/// The digit nought; the sixteenth stands at the end of the reserved characters.
const NOUGHT: u8 = 0x02;

/// Below this control characters are reserved for units.
const PLAIN: u8 = NOUGHT + 16;

/// Digits of a unit: enough for every letter, and for the bytes that are no text, which come after all letters.
const DIGITS: u32 = 6;

/// One more than the last letter.
const BEYOND_LETTERS: u32 = 0x11_0000;

/// Matches the units, all of them.
const ANY_UNIT: &str = "\x01[\x02-\x11][\x02-\x11][\x02-\x11][\x02-\x11][\x02-\x11][\x02-\x11]";

/// A name as the patterns expect it; itself if it is plain, as nearly all are.
fn spell(name: &OsStr) -> Cow<'_, OsStr> {
    if name.as_bytes().iter().all(|byte| byte.is_ascii() && is_plain(char::from(*byte))) {
        return Cow::Borrowed(name);
    }
    let mut spelled = String::new();
    for chunk in name.as_bytes().utf8_chunks() {
        chunk.valid().chars().for_each(|letter| push(&mut spelled, letter));
        chunk.invalid().iter().for_each(|byte| push_unit(&mut spelled, BEYOND_LETTERS + u32::from(*byte)));
    }
    Cow::Owned(OsString::from_vec(spelled.into_bytes()))
}

fn is_plain(letter: char) -> bool {
    letter.is_ascii() && letter >= char::from(PLAIN)
}

fn push(text: &mut String, letter: char) {
    if is_plain(letter) {
        text.push(letter);
    } else {
        push_unit(text, u32::from(letter));
    }
}

fn push_unit(text: &mut String, number: u32) {
    text.push(MARK);
    for digit in (0..DIGITS).rev() {
        let nibble = u8::try_from(number >> (4 * digit) & 0xf).expect("Invariant: four bits");
        text.push(char::from(NOUGHT + nibble));
    }
}

/// The pattern, for names in the spelling of [`spell`]; an error in words. What is no pattern stays none, for the library to say.
fn translate(pattern: &str) -> Result<String, String> {
    let mut translated = String::with_capacity(pattern.len());
    let mut rest = pattern.chars();
    while let Some(letter) = rest.next() {
        match letter {
            '\\' => match rest.next() {
                // A control character that is escaped is that character.
                Some(escaped) if !is_plain(escaped) => push(&mut translated, escaped),
                escaped => translated.extend(['\\'].into_iter().chain(escaped)),
            },
            '?' => {
                // One character that is neither a slash nor a part of a unit; or a unit.
                translated.push_str("{[\x12-.0-\u{7f}],");
                translated.push_str(ANY_UNIT);
                translated.push('}');
            }
            '[' => {
                let Some((class, after)) = split_class(rest.as_str()) else {
                    translated.push('[');
                    translated.push_str(rest.as_str());
                    break;
                };
                rest = after.chars();
                translated.push_str(&translate_class(class)?);
            }
            other => push(&mut translated, other),
        }
    }
    Ok(translated)
}

/// What stands between the brackets, and what comes after them; none if the class is not closed.
fn split_class(text: &str) -> Option<(&str, &str)> {
    let negation = usize::from(text.starts_with(['!', '^']));
    // A bracket that comes first is one of the characters.
    let first = negation + usize::from(text.get(negation..)?.starts_with(']'));
    let end = first + text.get(first..)?.find(']')?;
    Some((&text[..end], &text[end + 1..]))
}

fn translate_class(class: &str) -> Result<String, String> {
    if let Some(odd) = class.chars().find(|letter| !is_plain(*letter)) {
        return Err(format!("class `[{class}]` holds `{}`: classes take ASCII only, use {{a,b}}", odd.escape_default()));
    }
    let Some(named) = class.strip_prefix(['!', '^']) else {
        return Ok(format!("[{class}]"));
    };
    let ranges = ranges(named)?;
    // All others, but for slashes. The two that mean something in a class stand where they mean themselves, so that no range
    // starts or ends with them; control characters come first, and they are never named, so that nothing is negated.
    let is_other = |byte: u8| byte != b'/' && !ranges.iter().any(|(from, to)| (*from..=*to).contains(&byte));
    let mut others = String::from("[");
    if is_other(b']') {
        others.push(']');
    }
    for byte in (PLAIN..0x80).filter(|byte| is_other(*byte) && !matches!(byte, b']' | b'-')) {
        others.push(char::from(byte));
    }
    if is_other(b'-') {
        others.push('-');
    }
    Ok(format!("{{{others}],{ANY_UNIT}}}"))
}

/// The ranges of a class as the library reads them: after `a-b`, a further `-c` makes that range longer.
fn ranges(class: &str) -> Result<Vec<(u8, u8)>, String> {
    let mut ranges: Vec<(u8, u8)> = Vec::new();
    let mut is_open = false;
    for byte in class.bytes() {
        match ranges.last_mut() {
            Some(range) if is_open => {
                range.1 = byte;
                is_open = false;
            }
            Some(_) if byte == b'-' => is_open = true,
            _ => ranges.push((byte, byte)),
        }
    }
    if is_open {
        ranges.push((b'-', b'-'));
    }
    match ranges.iter().find(|(from, to)| from > to) {
        Some((from, to)) => {
            Err(format!("class with a range that runs backwards, from {} to {}", char::from(*from), char::from(*to)))
        }
        None => Ok(ranges),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::path::AbsolutePath;
    use proptest::prelude::*;

    fn globs(pattern: &str) -> Result<Globs, String> {
        let base = AbsolutePath::new("/").unwrap();
        Globs::new(&[&DenyGlob { base, pattern: pattern.to_owned() }]).map_err(|error| error.to_string())
    }

    fn matches(pattern: &str, path: &[u8]) -> bool {
        let names: Vec<_> = path.split(|byte| *byte == b'/').map(OsStr::from_bytes).collect();
        globs(pattern).unwrap().match_ancestor(&names)
    }

    #[test]
    fn a_letter_is_one_letter_however_many_bytes_it_has() {
        for (pattern, yes, no) in [
            ("?.env", &["é.env", "日.env", "😀.env", "a.env", "\t.env", "\u{1}.env"][..], &["éé.env", ".env", "ab.env"][..]),
            ("[!a].env", &["é.env", "日.env", "b.env", "\n.env", "].env", "-.env"], &["a.env", "éé.env", "aa.env"]),
            ("[^a-cx]", &["é", "d", "-"], &["a", "b", "x"]),
            ("[!]-]", &["é", "a", "["], &["]", "-"]),
            ("[!a-]", &["é", "b"], &["a", "-"]),
            ("[!!^]", &["é", "a"], &["!", "^"]),
            ("é*", &["é", "éa", "éé"], &["è", "a"]),
            ("*?é", &["éé", "aé"], &["é", "ée"]),
            ("???", &["éaé", "日本語"], &["é", "日本", "éaéa"]),
            ("{é,?}x", &["éx", "ñx", "ax"], &["x", "ééx"]),
            ("\\?é", &["?é"], &["aé"]),
            ("\\é", &["é"], &["è"]),
            // The digits of a unit are nobody's letters.
            ("*\u{9}*", &["\t"], &["é", "日", "a"]),
        ] {
            yes.iter().for_each(|name| assert!(matches(pattern, name.as_bytes()), "{pattern} matches {name}"));
            no.iter().for_each(|name| assert!(!matches(pattern, name.as_bytes()), "{pattern} does not match {name}"));
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_letters_too() {
        assert!(matches("?.env", b"\xff.env"));
        assert!(matches("[!a].env", b"\xc3.env"));
        assert!(matches("?\u{e9}", b"\xff\xc3\xa9"));
        assert!(!matches("\u{ff}", b"\xff"));
    }

    #[test]
    fn nothing_but_two_stars_matches_a_slash() {
        for pattern in ["a?b", "a[!x]b", "a*b"] {
            assert!(!matches(pattern, b"a/b"), "{pattern}");
        }
        assert!(matches("**/b", "é/日/b".as_bytes()));
    }

    #[test]
    fn what_is_no_glob_is_refused() {
        for (pattern, expect) in [
            ("[", "unclosed character class; missing ']'"),
            ("[!]", "unclosed character class; missing ']'"),
            ("a\\", "dangling '\\'"),
            ("[é]x", "class `[é]` holds `\\u{e9}`: classes take ASCII only, use {a,b}"),
            ("[!z-a]", "class with a range that runs backwards, from z to a"),
            ("[\u{1}]", "class `[\u{1}]` holds `\\u{1}`: classes take ASCII only, use {a,b}"),
        ] {
            assert_eq!(globs(pattern).unwrap_err(), format!("deny glob `{pattern}`: {expect}"));
        }
    }

    #[test]
    fn globs_that_take_too_much_memory_together_are_refused() {
        let patterns = |count: usize, length: usize| vec!["?".repeat(length); count];
        let check = |patterns: &[String]| check_size(patterns.iter().map(String::as_str)).map_err(|error| error.to_string());
        assert_eq!(check(&patterns(512, 8)), Ok(()));
        assert_eq!(check(&vec!["**/some-name*.{env,key,pem}".to_owned(); 512]), Ok(()));
        let refused = check(&patterns(512, 990)).unwrap_err();
        assert!(refused.contains("bytes of deny globs when compiled") && refused.ends_with("the bound is 262144"), "{refused}");
    }

    #[test]
    fn what_would_take_too_much_memory_is_refused() {
        assert!(globs(&"?".repeat(1000)).is_ok());
        assert!(globs(&"?".repeat(4000)).unwrap_err().contains("is too complex"));
    }

    /// What a pattern is made of.
    #[derive(Debug, Clone)]
    enum Piece {
        Letter(char),
        Any,
        Many,
        Class(bool, String),
        Either(Vec<Self>, Vec<Self>),
    }

    fn write(pieces: &[Piece]) -> String {
        let write_piece = |piece: &Piece| match piece {
            Piece::Letter(letter) if "*?[]{},\\".contains(*letter) => format!("\\{letter}"),
            Piece::Letter(letter) => letter.to_string(),
            Piece::Any => "?".to_owned(),
            Piece::Many => "*".to_owned(),
            Piece::Class(negated, class) => format!("[{}{class}]", if *negated { "!" } else { "" }),
            Piece::Either(left, right) => format!("{{{},{}}}", write(left), write(right)),
        };
        pieces.iter().map(write_piece).collect()
    }

    /// The same once more, slow and obvious, letter by letter.
    fn walk(pieces: &[Piece], name: &[char]) -> bool {
        let Some((piece, rest)) = pieces.split_first() else { return name.is_empty() };
        let one = |is: &dyn Fn(char) -> bool| name.split_first().is_some_and(|(letter, after)| is(*letter) && walk(rest, after));
        match piece {
            Piece::Letter(letter) => one(&|it| it == *letter),
            Piece::Any => one(&|_| true),
            Piece::Class(negated, class) => one(&|it| in_class(class, it) != *negated),
            Piece::Many => (0..=name.len()).any(|skip| walk(rest, &name[skip..])),
            Piece::Either(left, right) => [left, right].into_iter().any(|it| walk(&[it, rest].concat(), name)),
        }
    }

    fn in_class(class: &str, letter: char) -> bool {
        let class: Vec<char> = class.chars().collect();
        match class[..] {
            [from, '-', to] => (from..=to).contains(&letter),
            _ => class.contains(&letter),
        }
    }

    fn any_letter() -> impl Strategy<Value = char> {
        prop::sample::select("ab-.]!*é日😀\t\u{1}\u{2}\u{11}".chars().collect::<Vec<_>>())
    }

    fn any_pieces() -> impl Strategy<Value = Vec<Piece>> {
        let class = prop::sample::select(vec!["a", "ab", "a-c", "-", "]", "]a", "a-", "!a", ".", "A-~"]);
        let piece = prop_oneof![
            3 => any_letter().prop_map(Piece::Letter),
            2 => Just(Piece::Any),
            1 => Just(Piece::Many),
            2 => (any::<bool>(), class)
                .prop_filter("would be negated", |(negated, class)| *negated || !class.starts_with('!'))
                .prop_map(|(negated, class)| Piece::Class(negated, class.to_owned())),
        ];
        let pieces = prop::collection::vec(piece, 1..5);
        pieces
            .prop_recursive(2, 16, 2, |inner| {
                (inner.clone(), inner.clone(), inner)
                    .prop_map(|(before, left, right)| [before, vec![Piece::Either(left, right)]].concat())
            })
            // Two stars side by side are another piece, which stands alone between slashes.
            .prop_filter("two stars", |pieces| !write(pieces).contains("**"))
    }

    proptest! {
        #[test]
        fn names_match_as_their_letters_do(pieces in any_pieces(), names in prop::collection::vec(prop::collection::vec(any_letter(), 0..6), 8)) {
            let globs = globs(&write(&pieces)).unwrap();
            for name in names {
                let text: String = name.iter().collect();
                prop_assert_eq!(globs.match_ancestor(&[OsStr::new(&text)]), walk(&pieces, &name), "{} on {:?}", write(&pieces), text);
            }
        }

        #[test]
        fn different_names_are_spelled_differently(left in any::<Vec<u8>>(), right in any::<Vec<u8>>()) {
            let (one, other) = (OsStr::from_bytes(&left), OsStr::from_bytes(&right));
            prop_assert_eq!(spell(one) == spell(other), left == right);
        }
    }
}

//! One pass over a request or a notification that is written as nearly all are.
//!
//! # How it works
//! What [`scan`] takes, the three passes of `rpc::judge` would take too, and read the same. Whatever is wrong, or only unusual
//! (fractions, escapes by number, escaped names, great depth, responses), it leaves to them: they alone refuse, and say why.

/// Objects and arrays in each other, the message included. Policies have six or so; more than serde's 128 it must not be.
const DEPTH: u32 = 32;
/// Members of one object: each is compared with those before it, so this bounds what a message full of objects costs. An object
/// with more goes to the three passes, which hash its names.
const MEMBERS: usize = 64;
/// Digits of a number: any of so many fit an `i64`.
const DIGITS: usize = 18;
/// Bytes looked at in one step: a few of the widest registers.
const STRIDE: usize = 64;
/// Bytes of text that are worth being kept apart from the rest of the parameters.
const BULK: usize = 4096;

/// A message's parts, as they stand in its text.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scanned<'a> {
    /// An integer of 64 bits, or text in quotes without escapes.
    pub(crate) id: Option<&'a str>,
    /// Without its quotes.
    pub(crate) method: &'a str,
    /// None if they are null.
    pub(crate) params: Option<&'a str>,
    pub(crate) bulk: Option<Bulk<'a>>,
}

/// The last long text without escapes that is a member of the parameters itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bulk<'a> {
    pub(crate) name: &'a str,
    /// Without its quotes.
    pub(crate) text: &'a str,
    /// The parameters before and behind it, each with its quote.
    pub(crate) around: [&'a str; 2],
}

/// Scans one message of at most `most` values.
pub(crate) fn scan(bytes: &[u8], most: u32) -> Option<Scanned<'_>> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut scan = Scan { text, at: 0, values: 1, most, names: Vec::with_capacity(16), long: None };
    let (mut found, mut method) = (Scanned::default(), None);
    scan.space();
    scan.eat(b'{')?;
    while let Some(name) = scan.name(0)? {
        if matches!(name, "result" | "error" | "trace") {
            return None;
        }
        scan.long = None;
        let from = scan.at;
        let value = scan.value(1)?;
        let text = scan.text.get(from..scan.at)?;
        match (name, value) {
            ("id", Kind::Number | Kind::Plain) => found.id = Some(text),
            ("method", Kind::Plain) => method = Some(&text[1..text.len() - 1]),
            ("id" | "method", _) => return None,
            ("params", Kind::Null) => {}
            ("params", _) => {
                found.params = Some(text);
                found.bulk = scan.long.take().and_then(|(name, start, end)| {
                    let whole = scan.text;
                    Some(Bulk { name, text: whole.get(start..end)?, around: [whole.get(from..start)?, whole.get(end..scan.at)?] })
                });
            }
            _unknown => {}
        }
    }
    scan.space();
    found.method = method?;
    (scan.at == text.len()).then_some(found)
}

/// What a value is, as far as anybody asks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Null,
    Number,
    /// Text without escapes.
    Plain,
    Other,
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    values: u32,
    most: u32,
    /// Of the members so far, of every object that is open.
    names: Vec<&'a str>,
    /// Name, start and end of the last long text that is a member of a member of the message.
    long: Option<(&'a str, usize, usize)>,
}

impl<'a> Scan<'a> {
    fn rest(&self) -> &'a [u8] {
        &self.text.as_bytes()[self.at..]
    }

    fn space(&mut self) {
        self.at += self.rest().iter().take_while(|byte| matches!(byte, b' ' | b'\n' | b'\t' | b'\r')).count();
    }

    /// This byte, and nothing else.
    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.rest().first() == Some(&byte)).then(|| self.at += 1)
    }

    /// The next value, which begins here.
    fn value(&mut self, depth: u32) -> Option<Kind> {
        self.values += 1;
        if self.values > self.most || depth >= DEPTH {
            return None;
        }
        match self.rest().first()? {
            b'"' => self.string().map(|is_plain| if is_plain { Kind::Plain } else { Kind::Other }),
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'n' => self.word("null", Kind::Null),
            b't' => self.word("true", Kind::Other),
            b'f' => self.word("false", Kind::Other),
            _ => self.number(),
        }
    }

    fn object(&mut self, depth: u32) -> Option<Kind> {
        self.eat(b'{')?;
        let first = self.names.len();
        while let Some(name) = self.name(first)? {
            let from = self.at;
            let is_long = self.value(depth + 1)? == Kind::Plain && self.at - from >= BULK;
            if is_long && depth == 1 {
                self.long = Some((name, from + 1, self.at - 1));
            }
        }
        self.names.truncate(first);
        Some(Kind::Other)
    }

    /// The next member's name, up to its value; none at the end of the object, whose names begin at `first`.
    fn name(&mut self, first: usize) -> Option<Option<&'a str>> {
        self.space();
        if self.eat(b'}').is_some() {
            return Some(None);
        }
        if self.names.len() > first {
            self.eat(b',')?;
            self.space();
        }
        let from = self.at + 1;
        if !self.string()? {
            return None;
        }
        let name = self.text.get(from..self.at - 1)?;
        let others = self.names.get(first..)?;
        if others.len() >= MEMBERS || others.contains(&name) {
            return None;
        }
        self.names.push(name);
        self.space();
        self.eat(b':')?;
        self.space();
        Some(Some(name))
    }

    fn array(&mut self, depth: u32) -> Option<Kind> {
        self.eat(b'[')?;
        self.space();
        if self.eat(b']').is_some() {
            return Some(Kind::Other);
        }
        loop {
            self.space();
            self.value(depth + 1)?;
            self.space();
            if self.eat(b']').is_some() {
                return Some(Kind::Other);
            }
            self.eat(b',')?;
        }
    }

    /// Text in quotes; whether it has no escapes.
    fn string(&mut self) -> Option<bool> {
        self.eat(b'"')?;
        let mut is_plain = true;
        loop {
            self.at += plain(self.rest());
            match self.rest() {
                [b'"', ..] => {
                    self.at += 1;
                    return Some(is_plain);
                }
                [b'\\', b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => {
                    self.at += 2;
                    is_plain = false;
                }
                _unusual => return None,
            }
        }
    }

    fn word(&mut self, word: &str, kind: Kind) -> Option<Kind> {
        self.rest().starts_with(word.as_bytes()).then(|| self.at += word.len())?;
        Some(kind)
    }

    /// An integer. What is no end of one is found by whoever looks for what follows a value.
    fn number(&mut self) -> Option<Kind> {
        let is_negative = self.eat(b'-').is_some();
        let digits = self.rest().iter().take_while(|byte| byte.is_ascii_digit()).count();
        let begins_with_zero = self.rest().first() == Some(&b'0');
        // "-0" is no integer to serde.
        if digits == 0 || digits > DIGITS || (begins_with_zero && (digits > 1 || is_negative)) {
            return None;
        }
        self.at += digits;
        Some(Kind::Number)
    }
}

/// How many bytes of text come before a quote, an escape or what no text may hold.
fn plain(bytes: &[u8]) -> usize {
    let ends = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
    // Without a way out in the middle, so that the compiler looks at many bytes at once.
    let has_end = |stride: &[u8]| stride.iter().fold(false, |any, byte| any | ends(*byte));
    let start = bytes.chunks_exact(STRIDE).take_while(|stride| !has_end(stride)).count() * STRIDE;
    start + bytes[start..].iter().take_while(|byte| !ends(**byte)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::{MAX_VALUES, Message, judge, usual};
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    /// What is to be told apart of a message.
    fn parts(message: &Message<'_>) -> String {
        match message {
            Message::Request { id, method, params } => format!("{id:?} {method:?} {:?}", params.map(|params| params.get())),
            Message::Notification { method, params } => format!("{method:?} {:?}", params.map(|params| params.get())),
            Message::Response { .. } => "a response".to_owned(),
        }
    }

    /// Answers whether the one pass takes it. If so, the judge does too, and reads the same.
    #[track_caller]
    fn agreed(bytes: &[u8]) -> bool {
        let Some(message) = usual(bytes) else { return false };
        let text = String::from_utf8_lossy(bytes);
        match judge(bytes) {
            Ok(judged) => assert_eq!(parts(&message), parts(&judged), "{text}"),
            Err(error) => panic!("{text} is taken: {error}"),
        }
        if let Some(Bulk { name, text, around: [before, behind] }) = scan(bytes, MAX_VALUES).unwrap().bulk {
            let (Message::Request { params, .. } | Message::Notification { params, .. }) = message else { panic!() };
            let params = params.unwrap().get();
            assert_eq!([before, text, behind].concat(), params);
            let whole: serde_json::Value = serde_json::from_str(params).unwrap();
            assert_eq!(whole[name], text);
            let mut rest: serde_json::Value = serde_json::from_str(&[before, behind].concat()).unwrap();
            assert_eq!(rest[name].take(), "");
            rest[name] = text.into();
            assert_eq!(rest, whole);
        }
        true
    }

    fn within(params: &str) -> String {
        format!(r#"{{"id":1,"method":"m","params":{params}}}"#)
    }

    #[test]
    fn what_clients_write_is_taken() {
        for text in [
            r#"{"id":1,"method":"initialize","params":{"clientName":"c"}}"#,
            r#"{"method":"initialized","params":{}}"#,
            r#"{"method":"initialized"}"#,
            r#"{"jsonrpc":"2.0","id":"a-1","method":"fs/readFile","params":{"path":"file:///a%20b","followSymlinks":false}}"#,
            " {\n\t\"id\" : -7 ,\r\n \"method\" : \"m\" , \"params\" : [ ] , \"new\" : { } } \n",
            r#"{"params":null,"method":"environment/status","id":0}"#,
            r#"{"id":999999999999999999,"method":"m","params":{"argv":["sh","-c","echo \"\\n\"\n"],"env":{"A":"1","B":"ä😀\u007f"}}}"#
                .replace("\\u007f", "\u{7f}")
                .as_str(),
            &within(&format!(r#"{{"dataBase64":"{}","path":"file:///x"}}"#, "A".repeat(BULK))),
            &within(&format!("{}{}", "[".repeat(30), "]".repeat(30))),
            &format!(r#"{{"x":{{"chunk":"{}"}},"method":"m","params":{{"chunk":""}}}}"#, "A".repeat(BULK)),
            &format!(r#"{{"method":"m","params":{{"a":{{"chunk":"{}"}}}},"x":{{"chunk":"{0}"}}}}"#, "A".repeat(BULK)),
        ] {
            assert!(agreed(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn values_that_are_wrong_or_unusual_are_not() {
        for value in [
            "-0",
            "01",
            "-01",
            "00",
            "-",
            "+1",
            "1.5",
            "1e3",
            "1e999",
            "1.",
            ".5",
            "1234567890123456789",
            "0x1",
            "1a",
            "NaN",
            "nul",
            "nulll",
            "True",
            "",
            "[",
            "]",
            "[,]",
            "[1,]",
            "[1 2]",
            "{",
            "}",
            "{,}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":1,}"#,
            r#"{"a":1 "b":2}"#,
            r#"{a:1}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"a":1,"\u0061":2}"#,
            r#"{"\u0061":1}"#,
            r#"{"\n":1}"#,
            r#"[{"b":{"c":1,"d":2,"c":3}}]"#,
            r#""\u0061""#,
            r#""\ud800""#,
            r#""\ude00\ud800""#,
            r#""\x""#,
            r#""\"#,
            r#"""#,
            "\"\t\"",
            "\"\n\"",
            "\"\0\"",
            "\"\u{1f}\"",
            "'a'",
            "1}",
            "1,",
            "1]",
            "/**/1",
            "\u{a0}1",
            "\u{b}1",
        ] {
            let text = within(value);
            assert!(!agreed(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn messages_that_are_wrong_or_unusual_are_not() {
        for text in [
            "",
            " ",
            "{",
            "[]",
            "1",
            "null",
            r#"{"id":1}"#,
            r#"{"id":1,"result":1}"#,
            r#"{"id":1,"method":"m","error":{}}"#,
            r#"{"id":1,"method":"m","trace":3}"#,
            r#"{"id":1,"method":"m"}{}"#,
            r#"{"id":1,"method":"m"} x"#,
            r#"{"id":1,"method":"m""#,
            r#"{"id":null,"method":"m"}"#,
            r#"{"id":true,"method":"m"}"#,
            r#"{"id":"\n","method":"m"}"#,
            r#"{"id":1,"method":"\/"}"#,
            r#"{"id":1,"method":4}"#,
            r#"{"id":1,"id":2,"method":"m"}"#,
            r#"{"id":1,"method":"m","x":1,"x":2}"#,
            "\u{feff}{\"id\":1,\"method\":\"m\"}",
        ] {
            assert!(!agreed(text.as_bytes()), "{text}");
        }
        for bytes in [&b"{\"method\":\"\xff\"}"[..], b"{\"method\":\"\xed\xa0\x80\"}", b"\xff\xfe"] {
            assert!(!agreed(bytes));
        }
    }

    #[test]
    fn bounds_are_the_judges_or_less() {
        for (count, is_taken) in [(MAX_VALUES - 5, true), (MAX_VALUES - 4, true), (MAX_VALUES - 3, false)] {
            // The message, its id and method, the list and its last element are values too.
            let many = within(&format!("[{}1]", "1,".repeat(count as usize - 1)));
            assert_eq!(agreed(many.as_bytes()), is_taken, "{count}");
            assert_eq!(judge(many.as_bytes()).is_ok(), is_taken, "{count}");
        }
        for (depth, is_taken) in [(31, true), (32, false), (126, false), (127, false), (10_000, false)] {
            for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
                let deep = within(&format!("{}1{}", open.repeat(depth - 1), close.repeat(depth - 1)));
                assert_eq!(agreed(deep.as_bytes()), is_taken, "{depth}");
            }
        }
        for (members, is_taken) in [(MEMBERS, true), (MEMBERS + 1, false)] {
            let list: Vec<_> = (0..members).map(|nth| format!(r#""a{nth}":1"#)).collect();
            assert_eq!(agreed(within(&format!("{{{}}}", list.join(","))).as_bytes()), is_taken);
        }
    }

    #[test]
    fn every_byte_of_every_stride_is_looked_at() {
        for length in 0..3 * STRIDE {
            for at in 0..=length {
                for (end, is_taken) in [(&b"\""[..], false), (b"\x01", false), (b"\\q", false), (b"\\n", true), (b"\xff", false)]
                {
                    let text = [&b"x".repeat(at)[..], end, &b"x".repeat(length - at)].concat();
                    let message = [br#"{"method":"m","params":[""#, &text[..], br#""]}"#].concat();
                    assert_eq!(agreed(&message), is_taken, "{length} {at} {end:?}");
                }
            }
        }
    }

    /// Pieces of JSON and of what nearly is.
    const PIECES: [&str; 44] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        " ",
        "\n",
        "\t",
        "\"",
        "\\",
        "\"a\"",
        "\"b\"",
        "\"\\u0061\"",
        "\"\\n\"",
        "\"id\"",
        "\"method\"",
        "\"params\"",
        "\"result\"",
        "\"trace\"",
        "0",
        "1",
        "-0",
        "-1",
        "01",
        "1.5",
        "1e999",
        "18446744073709551616",
        "null",
        "true",
        "false",
        "\u{1}",
        "é",
        "\"a\":",
        "\"b\":",
        "\"\\ud800\"",
        "\"\\ud83d\\ude00\"",
        "\u{feff}",
    ];

    fn soup() -> impl Strategy<Value = String> {
        vec(select(&PIECES[..]), 0..12).prop_map(|pieces| pieces.concat())
    }

    /// A value, with spaces and escapes, and now and then a name twice.
    fn value() -> impl Strategy<Value = String> {
        let scalar = prop_oneof![
            select(&["null", "true", "false", "0", "-1", "12", "-0", "0.5", "1e999", "99999999999999999999"][..])
                .prop_map(str::to_owned),
            "\"([a-z é\u{7f}]|\\\\[\"\\\\/bfnrtu]|\\\\u0061|\\\\ud83d\\\\ude00|\\\\ud83d){0,6}\"",
            Just(format!("\"{}\"", "x".repeat(BULK))),
        ];
        scalar.prop_recursive(5, 40, 6, |inner| {
            let name = select(&["a", "b", "c", "\\u0061", "\\n", "é", ""][..]);
            let space = select(&["", "", " ", "\n\t"][..]);
            prop_oneof![
                vec(inner.clone(), 0..5).prop_map(|items| format!("[{}]", items.join(", "))),
                vec((name, space, inner), 0..5).prop_map(|members| {
                    let members: Vec<_> =
                        members.into_iter().map(|(name, space, it)| format!("{space}\"{name}\"{space}:{it}{space}")).collect();
                    format!("{{{}}}", members.join(","))
                }),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn nothing_is_taken_that_the_judge_refuses_or_reads_otherwise(params in value(), id in value(), method in value(), soup in soup()) {
            let whole = format!(r#"{{"id":1,"method":"m","params":{params}}}"#);
            let taken = agreed(whole.as_bytes());
            // It may leave to the judge what holds one of these, and nothing else.
            let is_unusual = ["\\u", "0.5", "1e999", "-0", "99999999999999999999", "\"\\n\""].iter().any(|part| whole.contains(part));
            prop_assert!(taken || is_unusual || judge(whole.as_bytes()).is_err(), "{}", whole);
            agreed(format!(r#"{{"id":{id},"method":"m"}}"#).as_bytes());
            agreed(format!(r#"{{"params":{params},"method":{method},"id":{id}}}"#).as_bytes());
            agreed(format!(r#"{{"method":"m","params":{params},"{soup}":{id}}}"#).as_bytes());
            agreed(within(&soup).as_bytes());
            agreed(format!(r#"{{"id":1,"method":"m"{soup}"#).as_bytes());
            agreed(soup.as_bytes());
        }

        #[test]
        fn a_change_of_any_byte_is_judged_alike(params in value(), edits in vec((any::<prop::sample::Index>(), any::<u8>(), 0..4), 1..4)) {
            let mut bytes = within(&params).into_bytes();
            for (at, byte, kind) in edits {
                let at = at.index(bytes.len());
                match kind {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    2 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, br#"{}[]",:\0-"#[usize::from(byte) % 10]),
                }
            }
            agreed(&bytes);
        }
    }
}

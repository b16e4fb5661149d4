//! The environment of a child: nothing is inherited that its policy does not name.

use portcullis_protocol::path::Bytes;
use portcullis_protocol::process::{EnvPolicy, Inherit};
use portcullis_protocol::rpc::{RpcError, code};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

/// What `inherit: core` takes over; case does not count.
const CORE: [&str; 11] = ["PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "USER"];

/// Names that look like secrets, dropped unless the policy says otherwise.
const DEFAULT_EXCLUDES: [&str; 3] = ["*KEY*", "*SECRET*", "*TOKEN*"];

/// A switch of the server itself: a server that a child starts must not inherit it.
const ALWAYS_REMOVED: &str = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE";

/// Characters that one start may read to compare names with its patterns, which happens on the thread that serves all clients: some
/// milliseconds. A thousand variables and a hundred patterns take a tenth of it.
const STEPS: usize = 1 << 21;

/// The whole environment of a child, ordered by name.
///
/// `server` is what the policy may inherit from; `overlay` comes from the request, wins, and is not filtered. A child with a
/// terminal gets `terminal_shell` as SHELL if it has none.
pub(crate) fn environment(
    server: &[(OsString, OsString)],
    policy: Option<&EnvPolicy>,
    overlay: &BTreeMap<String, String>,
    terminal_shell: Option<&str>,
) -> Result<Vec<(Bytes, Bytes)>, RpcError> {
    let mut variables = policy.map(|policy| inherited(server, policy)).transpose()?.unwrap_or_default();
    for (name, value) in overlay {
        variables.insert(name.into(), value.into());
    }
    if let Some(shell) = terminal_shell {
        variables.entry("SHELL".into()).or_insert_with(|| shell.into());
    }
    variables.remove(OsStr::new(ALWAYS_REMOVED));
    Ok(variables.into_iter().map(|(name, value)| (Bytes(name.into_vec()), Bytes(value.into_vec()))).collect())
}

/// Whether a variable's name matches the default excludes.
pub(crate) fn looks_like_a_secret(name: &OsStr) -> bool {
    let (name, mut steps) = (fold(&name.to_string_lossy()), STEPS);
    // A name with which that takes too long is of no use to a child.
    DEFAULT_EXCLUDES.iter().any(|pattern| matches(&fold(pattern), &name, &mut steps).unwrap_or(true))
}

/// The steps of a policy in their order: inherit, default excludes, exclude, set, includeOnly.
fn inherited(server: &[(OsString, OsString)], policy: &EnvPolicy) -> Result<BTreeMap<OsString, OsString>, RpcError> {
    let keeps = |name: &OsStr| match policy.inherit {
        Inherit::All => true,
        Inherit::Core => CORE.iter().any(|core| name.eq_ignore_ascii_case(core)),
        Inherit::None => false,
    };
    let mut variables: BTreeMap<OsString, OsString> = server.iter().filter(|(name, _)| keeps(name)).cloned().collect();
    if !policy.ignore_default_excludes {
        variables.retain(|name, _| !looks_like_a_secret(name));
    }
    let mut steps = STEPS;
    let mut filter = |variables: &mut BTreeMap<OsString, OsString>, patterns: &[String], keep: bool| {
        let patterns = Patterns::new(patterns, &mut steps)?;
        let mut within = Some(());
        variables.retain(|name, _| match patterns.any_matches(name, &mut steps) {
            Some(does) => does == keep,
            None => {
                within = None;
                false
            }
        });
        within
    };
    let too_much = || {
        let text = format!(
            "process/start: comparing the patterns of envPolicy with the names of variables takes more than {STEPS} steps; give fewer \
             or shorter ones"
        );
        RpcError::new(code::INVALID_PARAMS, text)
    };
    if !policy.exclude.is_empty() {
        filter(&mut variables, &policy.exclude, false).ok_or_else(too_much)?;
    }
    variables.extend(policy.set.iter().map(|(name, value)| (name.into(), value.into())));
    if !policy.include_only.is_empty() {
        filter(&mut variables, &policy.include_only, true).ok_or_else(too_much)?;
    }
    Ok(variables)
}

/// Patterns of `*` and `?` for whole names; case does not count.
struct Patterns(Vec<Vec<char>>);

impl Patterns {
    /// Each pattern and each name is folded once, which takes its length in steps. None: there are too few.
    fn new(patterns: &[String], steps: &mut usize) -> Option<Self> {
        patterns.iter().map(|pattern| take(steps, pattern.len()).map(|()| fold(pattern))).collect::<Option<_>>().map(Self)
    }

    fn any_matches(&self, name: &OsStr, steps: &mut usize) -> Option<bool> {
        take(steps, name.len())?;
        let name = fold(&name.to_string_lossy());
        for pattern in &self.0 {
            if matches(pattern, &name, steps)? {
                return Some(true);
            }
        }
        Some(false)
    }
}

fn take(steps: &mut usize, count: usize) -> Option<()> {
    *steps = steps.checked_sub(count)?;
    Some(())
}

fn fold(text: &str) -> Vec<char> {
    text.chars().flat_map(char::to_lowercase).collect()
}

/// Whether a pattern matches a whole name, both folded. The worst take as many steps as both lengths multiplied; None: there are too few.
fn matches(pattern: &[char], name: &[char], steps: &mut usize) -> Option<bool> {
    // Walks both once; on a mismatch, the latest star takes one more character. Earlier stars need no second look.
    let (mut at, mut from, mut star) = (0, 0, None);
    take(steps, 1)?;
    while from < name.len() {
        take(steps, 1)?;
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, from));
                at += 1;
            }
            Some('?') => (at, from) = (at + 1, from + 1),
            Some(letter) if *letter == name[from] => (at, from) = (at + 1, from + 1),
            _mismatch => match star {
                Some((star_at, taken)) => {
                    star = Some((star_at, taken + 1));
                    (at, from) = (star_at + 1, taken + 1);
                }
                None => return Some(false),
            },
        }
    }
    Some(pattern[at..].iter().all(|rest| *rest == '*'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SERVER: [(&str, &str); 9] = [
        ("MY_KEY", "1"),
        ("MY_TOKEN", "2"),
        ("my_secret", "3"),
        ("FOO", "bar"),
        ("ABC", "x"),
        ("HOME", "/h"),
        ("PATH", "/p"),
        ("Lang", "C"),
        ("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE", "1"),
    ];

    fn policy(inherit: Inherit) -> EnvPolicy {
        EnvPolicy { inherit, ignore_default_excludes: false, exclude: Vec::new(), set: BTreeMap::new(), include_only: Vec::new() }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn list(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    #[track_caller]
    fn check(policy: Option<EnvPolicy>, overlay: &[(&str, &str)], expected: &[&str]) {
        let server: Vec<_> = SERVER.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect();
        let got: Vec<String> = environment(&server, policy.as_ref(), &map(overlay), None)
            .unwrap()
            .into_iter()
            .map(|(name, value)| format!("{}={}", String::from_utf8(name.0).unwrap(), String::from_utf8(value.0).unwrap()))
            .collect();
        assert_eq!(got, expected);
    }

    #[test]
    fn without_a_policy_it_is_exactly_the_request() {
        check(None, &[("B", "two words"), ("A", "1")], &["A=1", "B=two words"]);
        check(None, &[], &[]);
        check(None, &[("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE", "1")], &[]);
    }

    #[test]
    fn inherit_and_filter() {
        use Inherit::{All, Core, None};
        check(Some(policy(All)), &[], &["ABC=x", "FOO=bar", "HOME=/h", "Lang=C", "PATH=/p"]);
        let everything = EnvPolicy { ignore_default_excludes: true, ..policy(All) };
        check(
            Some(everything),
            &[],
            &["ABC=x", "FOO=bar", "HOME=/h", "Lang=C", "MY_KEY=1", "MY_TOKEN=2", "PATH=/p", "my_secret=3"],
        );
        check(Some(EnvPolicy { exclude: list(&["f*", "LANG"]), ..policy(All) }), &[], &["ABC=x", "HOME=/h", "PATH=/p"]);
        check(Some(policy(Core)), &[], &["HOME=/h", "Lang=C", "PATH=/p"]);
        check(Some(policy(None)), &[], &[]);
        check(Some(EnvPolicy { set: map(&[("S", "1"), ("A_KEY", "2")]), ..policy(None) }), &[], &["A_KEY=2", "S=1"]);
        let chosen = EnvPolicy { include_only: list(&["ABC", "S", "PATH"]), set: map(&[("S", "1")]), ..policy(All) };
        check(Some(chosen), &[], &["ABC=x", "PATH=/p", "S=1"]);
    }

    #[test]
    fn the_request_wins_unfiltered() {
        let nothing = EnvPolicy { set: map(&[("S", "1")]), include_only: list(&["Q"]), ..policy(Inherit::None) };
        check(Some(nothing), &[("E", "1")], &["E=1"]);
        let all = EnvPolicy { exclude: list(&["*"]), ..policy(Inherit::All) };
        check(Some(all), &[("PATH", "/mine"), ("A_TOKEN", "t")], &["A_TOKEN=t", "PATH=/mine"]);
    }

    #[test]
    fn a_terminal_brings_a_shell_unless_there_is_one() {
        let shell = |overlay: &[(&str, &str)]| environment(&[], None, &map(overlay), Some("/bin/bash")).unwrap();
        let pair = |name: &str, value: &str| (Bytes(name.into()), Bytes(value.into()));
        assert_eq!(shell(&[]), [pair("SHELL", "/bin/bash")]);
        assert_eq!(shell(&[("SHELL", "")]), [pair("SHELL", "")]);
    }

    #[test]
    fn names_that_are_not_utf8_are_inherited_as_they_are() {
        let odd = OsString::from_vec(vec![b'A', 0xff]);
        let server = [(odd.clone(), odd)];
        let got = environment(&server, Some(&policy(Inherit::All)), &BTreeMap::new(), None).unwrap();
        assert_eq!(got, [(Bytes(vec![b'A', 0xff]), Bytes(vec![b'A', 0xff]))]);
    }

    fn does(pattern: &str, name: &str) -> bool {
        matches(&fold(pattern), &fold(name), &mut { STEPS }).unwrap()
    }

    #[test]
    fn comparisons_of_one_start_have_a_bound_together() {
        let start = |names: usize, name: &str, patterns: usize, pattern: &str| {
            let set = (0..names).map(|nth| (format!("{name}{nth}"), String::new())).collect();
            let include_only = (0..patterns).map(|nth| format!("{pattern}{nth}")).collect();
            let policy = EnvPolicy { set, include_only, ..policy(Inherit::None) };
            environment(&[], Some(&policy), &BTreeMap::new(), None).map(|kept| kept.len()).map_err(|error| error.code)
        };
        assert_eq!(start(1000, "SOME_NAME_OF_A_VARIABLE_", 100, "ANOTHER_NAME_*"), Ok(0), "control: many, and usual");
        assert_eq!(start(6000, "N", 6000, "P"), Err(code::INVALID_PARAMS), "too many");
        let [long, half] = ["a".repeat(100_000), format!("*{}b", "a".repeat(50_000))];
        assert_eq!(start(1, &long, 1, &half), Err(code::INVALID_PARAMS), "every character of one with every one of the other");
        assert_eq!(start(1, &long, 1, "*"), Ok(1), "control: a long name alone");
        assert_eq!(start(1, &"a".repeat(3 << 20), 1, "b"), Err(code::INVALID_PARAMS), "it is not even folded");
    }

    #[test]
    fn wildcards() {
        for (pattern, name) in
            [("*", ""), ("*", "x"), ("", ""), ("a*c", "ABBC"), ("?x?", "axb"), ("*KEY*", "monkeys"), ("a*b*c", "axbxbc")]
        {
            assert!(does(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("", "x"), ("?", ""), ("a", "ab"), ("a*c", "abd"), ("*b", "ba"), ("[a]", "a")] {
            assert!(!does(pattern, name), "{pattern} {name}");
        }
    }

    proptest! {
        #[test]
        fn wildcards_agree_with_a_slow_matcher(pattern in "[ab*?]{0,8}", name in "[abA]{0,8}") {
            fn slow(pattern: &[u8], name: &[u8]) -> bool {
                match (pattern.split_first(), name.split_first()) {
                    (None, None) => true,
                    (Some((b'*', rest)), _) if slow(rest, name) => true,
                    (Some((b'*', _)), Some((_, tail))) => slow(pattern, tail),
                    (Some((b'?', rest)), Some((_, tail))) => slow(rest, tail),
                    (Some((letter, rest)), Some((first, tail))) => letter.eq_ignore_ascii_case(first) && slow(rest, tail),
                    _ => false,
                }
            }
            prop_assert_eq!(does(&pattern, &name), slow(pattern.as_bytes(), name.as_bytes()));
        }
    }
}

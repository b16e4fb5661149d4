//! What is fuzzed: functions of bytes that panic where something is wrong. The tests of the workspace call them with a few
//! thousand random inputs; `main.rs` beside this file lets libFuzzer search for more.

use super::reference::{Case, Reader, SetUp};
use super::relay;
use portcullis_protocol::binary;
use portcullis_protocol::helper::{
    Deframer, FsReply, FsRequest, SpawnerEvent, SpawnerRequest, WorkerAnswer, WorkerSetup, decode, encode,
};
use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::sandbox::Sandbox;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::file;
use portcullis_sandbox::policy::{Access, Grants, Policy};
use portcullis_sandbox::resolve::{Machine, resolve};
use std::path::Path;

/// A target: says whether the input came as far as being judged.
pub(crate) type Target = fn(&[u8]) -> bool;

/// All of them, by name.
pub(crate) const TARGETS: [(&str, Target); 10] = [
    ("frames", frames),
    ("sandbox", sandbox),
    ("policy-file", policy_file),
    ("policy-bytes", policy_bytes),
    ("rules", rules),
    ("binary", binary),
    ("relay-frame", relay::frame),
    ("relay-handshake", relay::handshake),
    ("relay-answer", relay::answer),
    ("relay-network", relay::network),
];

/// Text becomes a sandbox object or an error. What is written again means the same, so that nothing was lost in reading it.
pub(crate) fn sandbox(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let first = match Sandbox::parse(text) {
        Ok(first) => first,
        Err(error) => {
            assert!(error.at.starts_with("sandbox") && !error.problem.is_empty(), "{error:?}");
            return false;
        }
    };
    let again = Sandbox::parse(&first.to_json().to_string()).expect("a written body can be read");
    assert_eq!(again.permissions, first.permissions);
    assert_eq!((&again.cwd, &again.home, again.protect_nested), (&first.cwd, &first.home, first.protect_nested));
    let machine = SetUp::machine();
    let policies = [&first, &again].map(|sandbox| resolve(sandbox, None, &machine));
    // Workspace roots that default to the cwd of a process are not known here.
    if first.cwd.is_some() || !first.roots_default_to_cwd {
        assert_eq!(policies[0], policies[1]);
    }
    if let Ok(Some(policy)) = &policies[0] {
        check_bytes(policy);
        let _refused = Compiled::new(policy, portcullis_sandbox::compiled::Resolved::same);
    }
    true
}

/// Text becomes a policy file or an error that names the line; a policy means on the wire what it means in the file.
pub(crate) fn policy_file(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let parsed = match file::parse("fuzz", text) {
        Ok(parsed) => parsed,
        Err(error) => {
            let error = error.to_string();
            let line = error.strip_prefix("policy file fuzz, line ").and_then(|rest| rest.split_once(':')).map(|(line, _)| line);
            let line: usize = line.and_then(|line| line.parse().ok()).unwrap_or_else(|| panic!("{error}"));
            assert!((1..=text.matches('\n').count() + 1).contains(&line), "{error}");
            return false;
        }
    };
    let root = AbsolutePath::new("/w").expect("absolute");
    let sandbox = parsed.in_workspaces(std::slice::from_ref(&root), Some(root.clone()));
    let again = Sandbox::parse(&sandbox.to_json().to_string()).expect("what a file says can be said on the wire");
    assert_eq!((&again.permissions, again.protect_nested), (&sandbox.permissions, sandbox.protect_nested));
    let machine = Machine::default();
    assert_eq!(resolve(&again, None, &machine), resolve(&sandbox, None, &machine));
    true
}

/// Bytes from elsewhere are a policy in its one canonical form, or refused.
pub(crate) fn policy_bytes(data: &[u8]) -> bool {
    let Ok(policy) = Policy::decode(data) else { return false };
    check_bytes(&policy);
    true
}

/// Whether bytes are a body of this type, which must then mean the same once it is written again.
macro_rules! again {
    ($body:ty, $bytes:expr) => {
        decode::<$body>($bytes).is_ok_and(|first| {
            let bytes = encode(&first, &[], 0).expect("a body from a frame fits into a frame");
            let mut deframer = Deframer::default();
            deframer.push(&bytes);
            let frame = deframer.next_frame().expect("a frame").expect("a whole one");
            let second: $body = decode(&frame.body).expect("a written body can be read");
            assert_eq!(format!("{first:?}"), format!("{second:?}"));
            true
        })
    };
}

/// Bytes between gateway and helpers, in either direction: frames that are the same however the bytes are cut, and bodies that mean the
/// same once they are written again.
pub(crate) fn frames(data: &[u8]) -> bool {
    let (step, bytes) = data.split_first().map_or((1, data), |(step, rest)| (usize::from(*step).max(1), rest));
    let take = |step: usize| {
        let (mut deframer, mut frames) = (Deframer::default(), Vec::new());
        for chunk in bytes.chunks(step) {
            deframer.push(chunk);
            loop {
                match deframer.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(_refused) => return (frames, true),
                }
            }
        }
        (frames, false)
    };
    let (whole, cut) = (take(bytes.len().max(1)), take(step));
    assert_eq!(whole, cut);
    let mut judged = false;
    for frame in whole.0 {
        let body = &frame.body[..];
        let read = [
            again!(FsRequest, body),
            again!(FsReply, body),
            again!(SpawnerRequest, body),
            again!(SpawnerEvent, body),
            again!(WorkerSetup, body),
            again!(WorkerAnswer, body),
        ];
        judged |= read.contains(&true);
    }
    judged
}

/// Bytes from a server are a head and a body, of which nothing is lost, or refused.
pub(crate) fn binary(data: &[u8]) -> bool {
    let Ok((head, body)) = binary::split(data.to_vec().into()) else {
        let told = data.first_chunk().map(|length| u64::from(u32::from_be_bytes(*length)));
        assert!(told.is_none_or(|told| told + 4 > data.len() as u64), "{data:?}");
        return false;
    };
    assert_eq!([&data[..4], &head, &body].concat(), data);
    let Ok(text) = std::str::from_utf8(&head) else { return false };
    assert_eq!(binary::before_body(text), data[..4 + text.len()]);
    // Whatever the head is.
    let _whole = binary::with_member(text, "chunk", &body);
    true
}

fn check_bytes(policy: &Policy) {
    assert_eq!(Policy::decode(&policy.encode()).as_ref(), Ok(policy));
}

/// A policy and a ceiling are made from the bytes, resolved and compiled; what the tables say of paths is what the slow reference
/// says, and what both together say is the least.
pub(crate) fn rules(data: &[u8]) -> bool {
    let mut reader = Reader::new(data);
    let set_up = SetUp::read(&mut reader);
    let cases = [Case::read(&mut reader), Case::read(&mut reader)];
    let paths: Vec<_> = (0..12).map(|_| reader.path()).collect();
    let machine = SetUp::machine();
    let policies = cases.each_ref().map(|case| {
        // On the wire and back, as a client's.
        let sandbox = Sandbox::parse(&case.sandbox.to_json().to_string()).expect("a written body can be read");
        let resolved = resolve(&sandbox, None, &machine);
        assert_eq!(resolved.is_err(), case.is_refused(), "{case:?}: {resolved:?}");
        resolved.ok().map(|policy| policy.unwrap_or_else(SetUp::everything))
    });
    let [Some(own), Some(ceiling)] = policies else { return false };
    let both = own.clone().bounded_by(&ceiling).expect("two sets at most");
    check_bytes(&both);
    let compile = |policy: &Policy| Compiled::new(policy, |path| set_up.resolve(path)).expect("the paths are usable");
    let compiled = [compile(&own), compile(&ceiling)];
    let all = compile(&both);
    for path in paths.iter().map(|path| Path::new(path.as_str())) {
        let expect = [0, 1].map(|nth| cases[nth].verdict(&set_up, path));
        for nth in [0, 1] {
            assert_eq!(compiled[nth].verdict(path), expect[nth], "{}: {:?} {set_up:?}", path.display(), cases[nth]);
        }
        let verdict = all.verdict(path);
        assert_eq!(rank(verdict), rank(expect[0]).min(rank(expect[1])), "{}: {cases:?} {set_up:?}", path.display());
        if rank(verdict) >= 2 {
            assert!(all.is_visible(path), "{}: {cases:?}", path.display());
        }
        if !all.has_narrower_below(path) {
            for below in paths.iter().map(|below| path.join(below.trim_start_matches('/'))) {
                assert!(rank(all.verdict(&below)) >= rank(verdict), "{} {}: {cases:?}", path.display(), below.display());
            }
        }
        assert_eq!(all.explain(path).verdict, verdict);
        check_grant(&set_up, &own, &ceiling, path);
    }
    check_places(&set_up, &both, &paths, &compile);
    true
}

/// The entry that would allow more does, where its path exists and is no link.
fn check_grant(set_up: &SetUp, own: &Policy, ceiling: &Policy, path: &Path) {
    let compile = |own: &Policy| {
        let both = own.clone().bounded_by(ceiling).expect("two sets at most");
        Compiled::new(&both, |path| set_up.resolve(path)).expect("the paths are usable")
    };
    let Some((real, access)) = compile(own).explain(path).grant else { return };
    let named = AbsolutePath::new(&real).expect("absolute");
    let is_itself =
        matches!(set_up.resolve(&named), portcullis_sandbox::compiled::Resolved::Real { links, .. } if links.is_empty());
    let Some(grants) = own.files.sets().next().filter(|_| is_itself && own.files != ceiling.files) else { return };
    let more = [grants.entries.clone(), vec![portcullis_sandbox::policy::Grant::new(named, access)]].concat();
    let more = Grants { protect_nested: grants.protect_nested, ..Grants::new(more, grants.deny_globs.clone()).expect("few") };
    let more = Policy { files: portcullis_sandbox::policy::Files::Restricted(more.into()), network: own.network };
    let expect = if access == Access::Write { 3 } else { 2 };
    assert!(rank(compile(&more).verdict(path)) >= expect, "{}: {own:?} {ceiling:?}", path.display());
}

/// Between two places nothing changes, globs and nested names aside.
fn check_places(set_up: &SetUp, both: &Policy, paths: &[String], compile: &dyn Fn(&Policy) -> Compiled) {
    let bare = both.files.sets().map(|grants| Grants { entries: grants.entries.clone(), ..Grants::default() });
    let bare =
        bare.map(|grants| Policy { files: portcullis_sandbox::policy::Files::Restricted(grants.into()), network: both.network });
    let Some(bare) = bare.reduce(|own, ceiling| own.bounded_by(&ceiling).expect("two sets")) else { return };
    let compiled = compile(&bare);
    let places = compiled.places();
    assert!(places.is_sorted_by(|left, right| left.path < right.path));
    for path in paths.iter().map(|path| Path::new(path.as_str())) {
        let nearest = path.ancestors().find_map(|above| places.iter().find(|place| place.path == above)).expect("the root");
        assert_eq!(nearest.verdict, compiled.verdict(path), "{}: {bare:?} {set_up:?}", path.display());
    }
}

fn rank(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Write => 3,
        Verdict::Read | Verdict::Protected => 2,
        Verdict::Unlisted => 1,
        Verdict::Denied => 0,
    }
}

//! The targets of `tests/fuzz` with random inputs. `tests/fuzz/README.md` says how to let a fuzzer search for more.

#[path = "../../fuzz/reference.rs"]
mod reference;
#[path = "../../fuzz/relay.rs"]
mod relay;
#[path = "../../fuzz/search.rs"]
mod search;
#[path = "../../fuzz/targets.rs"]
mod targets;

use portcullis_sandbox::file;
use portcullis_sandbox::policy::Policy;
use proptest::prelude::*;
use proptest::sample::Index;
use reference::{Case, Reader};
use std::cell::Cell;
use targets::{TARGETS, Target};

/// Enough for what the targets know to be met many times, in a few seconds.
const CASES: u32 = 3000;

/// Runs a target and requires that a good part of the inputs was judged.
fn run(name: &str, least: u32, inputs: impl Strategy<Value = Vec<u8>>) {
    let target: Target = TARGETS.iter().find(|(known, _)| *known == name).unwrap().1;
    let judged = Cell::new(0);
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) });
    let run = runner.run(&inputs, |input| {
        judged.set(judged.get() + u32::from(target(&input)));
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(judged.get() >= least, "{name}: only {} of {CASES} inputs were judged", judged.get());
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..200)
}

/// Texts that mean something, with a few changes: something cut out, said twice, or replaced by another word.
fn nearly(texts: impl Strategy<Value = String>, words: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<Index>(), 0..12_usize, prop::sample::select(words.to_vec()), 0..4_u8);
    (texts, prop::collection::vec(change, 0..4)).prop_map(|(text, changes)| {
        let mut bytes = text.into_bytes();
        for (place, length, word, kind) in changes {
            let from = place.index(bytes.len() + 1);
            let to = bytes.len().min(from + length);
            let new = match kind {
                0 => Vec::new(),
                1 => bytes[from..to].repeat(2),
                _word => word.as_bytes().to_vec(),
            };
            bytes.splice(from..to, new);
        }
        bytes
    })
}

#[test]
fn a_sandbox_object_is_read_as_it_is_written() {
    const PLAIN: [&str; 5] = [
        r#"{"type":"workspace-write","cwd":"/w","writable_roots":["/x"],"network_access":true,"protect_nested_repositories":true}"#,
        r#"{"policy":{"type":"readOnly"},"policyContext":{"cwd":"/w","workspaceRoots":["/w"]}}"#,
        r#"{"sandboxPolicy":{"type":"external-sandbox","network_access":"enabled"}}"#,
        r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"disabled","temporaryDirectories":["/t"]}"#,
        r#"{"permissions":{"type":"external","network":"restricted"},"windowsSandboxLevel":"elevated","userHomeDir":"file:///h"}"#,
    ];
    const WORDS: [&str; 16] = [
        "null",
        "true",
        "[]",
        "{}",
        "\"\"",
        "\"/\"",
        "\"~\"",
        "\"type\":",
        "permissions",
        "protectNestedRepositories",
        "..",
        "\\u0000",
        "\"deny\"",
        "\"write\"",
        ",",
        "\"glob_pattern\"",
    ];
    let profile = any_bytes().prop_map(|bytes| Case::read(&mut Reader::new(&bytes)).sandbox.to_json().to_string());
    let plain = prop::sample::select(PLAIN.to_vec()).prop_map(str::to_owned);
    run("sandbox", CASES / 10, nearly(prop_oneof![3 => profile, 1 => plain], &WORDS));
}

#[test]
fn a_policy_file_means_the_same_on_the_wire() {
    const HEAD: &str = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\nprotect_nested = true\n";
    const ENTRIES: [&str; 6] = [
        "special = 'root'\naccess = 'read'",
        "path = '/data'\naccess = 'write'",
        "path = '~/.ssh'\naccess = 'deny'\nmissing_path_behavior = 'skip'",
        "glob = '**/*.env'\naccess = 'deny'",
        "special = 'project_roots'\nsubpath = 'a/b'\naccess = 'write'",
        "path = 'file:///x%20y'\naccess = 'read'",
    ];
    const WORDS: [&str; 12] =
        ["''", "'/'", "'~'", "[[entries]]\n", "access = ", "deny", "write", "..", "\n", "true", "unrestricted", "\"\\u0000\""];
    let text = prop::collection::vec(prop::sample::select(ENTRIES.to_vec()), 0..5).prop_map(|entries| {
        let entries = entries.iter().map(|entry| format!("[[entries]]\n{entry}\n"));
        entries.fold(HEAD.to_owned(), |text, entry| text + &entry)
    });
    run("policy-file", CASES / 10, nearly(text, &WORDS));
    assert!(file::BUILTIN.iter().all(|name| file::builtin(name).is_some()));
}

#[test]
fn bytes_are_a_policy_in_one_form_or_none() {
    let encoded = any_bytes().prop_map(|bytes| {
        let case = Case::read(&mut Reader::new(&bytes));
        let resolved = portcullis_sandbox::resolve::resolve(&case.sandbox, None, &reference::SetUp::machine());
        resolved.ok().flatten().as_ref().map_or_else(Vec::new, Policy::encode)
    });
    let changed = (encoded, prop::collection::vec((any::<Index>(), any::<u8>()), 0..3)).prop_map(|(mut bytes, changes)| {
        let count = bytes.len();
        for (place, byte) in changes.into_iter().filter(|_| count > 0) {
            bytes[place.index(count)] = byte;
        }
        bytes
    });
    run("policy-bytes", CASES / 10, changed);
}

#[test]
fn a_message_with_bytes_is_its_parts() {
    let head = r#"{"method":"process/output","params":{"processId":"p","seq":1,"chunk":""}}"#;
    let told = (prop_oneof![Just(head), Just("{}"), Just("")], any_bytes(), 0..4_u8).prop_map(|(head, body, wrong)| {
        let length = u32::try_from(head.len()).unwrap() + u32::from(wrong == 0) * 150;
        [&length.to_be_bytes()[..], head.as_bytes(), &body].concat()
    });
    run("binary", CASES / 4, prop_oneof![3 => told, 1 => any_bytes()]);
}

/// Frames of requests and replies as they are sent.
fn some_frames() -> Vec<Vec<u8>> {
    use portcullis_protocol::helper::{FsDone, FsError, FsOperation, FsReply, FsRequest, WorkerAnswer, WorkerSetup, encode};
    use portcullis_protocol::path::{AbsolutePath, Bytes};
    let path = AbsolutePath::new("/w/a").unwrap();
    let operation = FsOperation::Copy { source: path.clone(), destination: path.clone(), recursive: true };
    let walk = FsDone::Walk { entries: Vec::new(), errors: vec![(path, "x".to_owned())], truncated: true };
    let policy = Some(Bytes(Policy::read_everything().encode()));
    let setup = WorkerSetup { build: "b".to_owned(), policy, own_view: true, own_user: false, concurrency: 4 };
    let frames = [
        encode(&FsRequest { id: 1, operation }, b"payload", 1),
        encode(&FsReply { id: 2, outcome: Ok(walk) }, b"", 0),
        encode(&FsReply { id: 3, outcome: Err(FsError::InFlight(7)) }, b"", 0),
        encode(&setup, b"", 0),
        encode(&WorkerAnswer::Ready(portcullis_protocol::helper::Enforced::default()), b"", 0),
    ];
    // The first byte says how the rest is cut.
    frames.into_iter().map(|frame| [&[5][..], &frame.unwrap()].concat()).collect()
}

/// Sandbox objects as clients write them.
fn some_sandboxes() -> Vec<Vec<u8>> {
    let mut numbers = search::Numbers::new(1);
    let profiles: Vec<_> = (0..32).map(|_| [&[1][..], &numbers.bytes(200)].concat()).collect();
    let plain = [
        r#"{"type":"workspace-write","cwd":"/w","writable_roots":["/x"],"network_access":true}"#,
        r#"{"policy":{"type":"readOnly"},"policyContext":{"cwd":"/w","workspaceRoots":["/w"]}}"#,
    ];
    let texts = profiles.iter().map(|choices| text_of(choices)).collect::<Vec<_>>();
    profiles.into_iter().chain(texts).chain(plain.map(|text| text.as_bytes().to_vec())).collect()
}

/// Bytes that begin as no text does are choices, of which an object is made: changes of a text seldom leave one that can be read.
fn text_of(data: &[u8]) -> Vec<u8> {
    match data.split_first() {
        Some((0..0x20, choices)) => Case::read(&mut Reader::new(choices)).sandbox.to_json().to_string().into_bytes(),
        _text => data.to_vec(),
    }
}

fn sandbox_by_text_or_choices(data: &[u8]) -> bool {
    targets::sandbox(&text_of(data))
}

#[test]
fn frames_are_the_same_however_they_are_cut() {
    let (tried, judged) = search::search("frames", &some_frames(), 20_000, targets::frames);
    assert!(judged > tried / 20, "{judged} of {tried}");
}

#[test]
fn sandbox_objects_near_real_ones_are_read_or_refused() {
    let (tried, judged) = search::search("sandbox", &some_sandboxes(), 5_000, sandbox_by_text_or_choices);
    assert!(judged > tried / 20, "{judged} of {tried}");
}

#[test]
#[ignore = "runs one target by hand: FUZZ_TARGET=rules FUZZ_SECONDS=600"]
fn a_target_is_searched_for_a_time() {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    let target = TARGETS.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no target is called {name}")).1;
    let (seeds, target): (_, Target) = match name.as_str() {
        "frames" => (some_frames(), target),
        "sandbox" => (some_sandboxes(), sandbox_by_text_or_choices),
        _random => (Vec::new(), target),
    };
    search::search(&name, &seeds, u64::from(CASES), target);
}

#[test]
fn the_tables_say_what_the_reference_says() {
    run("rules", CASES / 4, any_bytes());
}

#[test]
fn relay_frames_are_read_as_they_are_written() {
    use portcullis_relay::frame::{Body, Frame};
    let payload = || prop::collection::vec(any::<u8>(), 1..100);
    let body = prop_oneof![
        (any::<u32>(), payload()).prop_map(|(seq, payload)| Body::Record { seq, payload: payload.into() }),
        payload().prop_map(|payload| Body::Handshake { payload: payload.into() }),
        any::<u32>().prop_map(|next_seq| Body::Resume { next_seq }),
        Just(Body::Ack),
        Just(Body::Heartbeat),
        Just(Body::Reset { reason: "x".to_owned() }),
    ];
    let written = ("[a-z ]{1,9}", any::<u32>(), any::<u32>(), body)
        .prop_map(|(stream_id, ack, ack_bits, body)| Frame { stream_id, ack, ack_bits, body }.encode().to_vec());
    let nearly = (written, prop::collection::vec((any::<Index>(), any::<u8>()), 0..3)).prop_map(|(mut bytes, changes)| {
        let count = bytes.len();
        for (place, byte) in changes {
            bytes[place.index(count)] = byte;
        }
        bytes
    });
    run("relay-frame", CASES / 4, prop_oneof![4 => nearly, 1 => any_bytes()]);
}

#[test]
fn a_relay_handshake_that_was_changed_opens_nothing() {
    run("relay-handshake", CASES / 4, any_bytes());
}

#[test]
fn an_answer_of_a_registry_shows_no_secret() {
    let keys = portcullis_relay::keys::Identity::generate().unwrap().public_keys();
    let keys = serde_json::to_value(&keys).unwrap();
    let bundle = serde_json::json!({
        "environment_id": "box", "security_profile": "noise_hybrid_ik_v1", "executor_registration_id": "one",
        "url": "ws://127.0.0.1:1/a-url-that-is-much-longer-than-forty-letters", "executor_public_key": keys,
        "harness_key_authorization": "an-authorization-that-is-much-longer-than-forty-letters",
    });
    let texts = [keys, bundle].map(|json| json.to_string()).to_vec();
    run("relay-answer", CASES / 4, nearly(prop::sample::select(texts), &["null", "\"", "{}", "=", "A", ","]));
}

#[test]
fn a_relay_delivers_in_order_and_once_whatever_the_network_does() {
    run("relay-network", CASES / 4, any_bytes());
}

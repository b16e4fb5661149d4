//! Random operations of a client under random policies and one ceiling, while somebody outside makes links: nothing changes that
//! both do not make writable, and no secret is read.

use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::sandbox::Sandbox;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::resolve::{Machine, resolve};
use portcullis_sandbox::roots::Roots;
use portcullis_tests::{Client, Place, Server};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const SEQUENCES: usize = 100;

const SECRET: &str = "c2VjcmV0";

const CEILING: &str = "description = 'd'\nfiles = 'restricted'\nnetwork = 'restricted'\nprotect_nested = true
[[entries]]\nspecial = 'project_roots'\naccess = 'write'
[[entries]]\nspecial = 'project_roots'\nsubpath = 'no'\naccess = 'deny'
[[entries]]\nspecial = 'project_roots'\nsubpath = 'a/ro'\naccess = 'read'
[[entries]]\nglob = '**/*.env'\naccess = 'deny'\n";

/// One step of a sequence; paths are relative to the place.
#[derive(Debug, Clone)]
enum Step {
    /// By somebody outside, where nothing is yet.
    Link(String, String),
    Call(&'static str, String, String, Asked),
}

/// What the client says of its own policy.
#[derive(Debug, Clone)]
enum Asked {
    Nothing,
    Everything,
    /// Entries, path and access, beside a writable workspace.
    Entries(Vec<(String, &'static str)>),
}

fn any_path() -> impl Strategy<Value = String> {
    let top = prop::sample::select(vec!["ws", "ws", "ws", "ws", "ws", "out"]);
    let name = prop::sample::select(vec!["a", "a", "b", "b", "f", "new", "l", "no", "ro", "x.env", ".git"]);
    let last = prop::sample::select(vec!["f", "f", "f", "new", "l", "l", "a", "b", "no", "x.env", ".git"]);
    (top, prop::collection::vec(name, 0..3), last)
        .prop_map(|(top, names, last)| [vec![top], names, vec![last]].concat().join("/"))
}

fn any_step() -> impl Strategy<Value = Step> {
    let access = prop::sample::select(vec!["read", "write", "write", "write", "deny"]);
    let asked = prop_oneof![
        2 => Just(Asked::Nothing),
        1 => Just(Asked::Everything),
        2 => prop::collection::vec((any_path(), access), 0..3).prop_map(Asked::Entries),
    ];
    let methods = vec!["fs/writeFile", "fs/writeFile", "fs/createDirectory", "fs/remove", "fs/copy", "fs/readFile", "fs/open"];
    let call = (prop::sample::select(methods), any_path(), any_path(), asked);
    prop_oneof![
        1 => (any_path(), any_path()).prop_map(|(link, target)| Step::Link(link, target)),
        3 => call.prop_map(|(method, path, other, asked)| Step::Call(method, path, other, asked)),
    ]
}

fn set_up(place: &Place) {
    for top in ["ws", "out"] {
        if place.has(top) {
            fs::remove_dir_all(place.path(top)).unwrap();
        }
    }
    for name in ["ws/a/f", "ws/b/f", "ws/a/ro/f", "ws/.git/f", "ws/b/.git/f"] {
        place.put(name, "plain");
    }
    for name in ["ws/no/f", "ws/a/x.env", "ws/x.env/f", "out/f", "out/a/f", "out/.git/f"] {
        place.put(name, "secret");
    }
}

/// Everything below a directory, no link followed: what it is, or what it holds.
fn snapshot(top: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![top.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let holds = if metadata.is_dir() {
                open.push(path.clone());
                b"a directory".to_vec()
            } else if metadata.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            found.insert(path, holds);
        }
    }
    found
}

fn sandbox(place: &Place, asked: &Asked) -> Value {
    match asked {
        Asked::Nothing => Value::Null,
        Asked::Everything => json!({"type": "danger-full-access"}),
        Asked::Entries(entries) => {
            let workspace = [("ws".to_owned(), "write")];
            let entries: Vec<_> = workspace
                .iter()
                .chain(entries)
                .map(|(path, access)| json!({"path": {"type": "path", "path": place.uri(path)}, "access": access}))
                .collect();
            json!({
                "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": entries}},
                "windowsSandboxLevel": "disabled",
            })
        }
    }
}

/// The tables as they would be made now; none where the policy cannot be opened, so that nothing may be done.
fn compiled(policy: &Policy) -> Option<Compiled> {
    let roots = Roots::open(policy).ok()?;
    Compiled::new(policy, |path| roots.resolve(path)).ok()
}

#[tokio::test]
async fn whatever_is_asked_only_what_both_allow_changes() {
    let place = Place::new();
    set_up(&place);
    place.put("ceiling.toml", CEILING);
    let (file, workspace) = (place.path("ceiling.toml"), place.path("ws"));
    let arguments = ["--policy", file.to_str().unwrap(), "--workspace", workspace.to_str().unwrap()];
    let server = Server::with_arguments(&arguments).await;
    let mut client = Client::connect(&server).await;
    let root = AbsolutePath::new(&workspace).unwrap();
    let ceiling = portcullis_sandbox::file::parse("ceiling", CEILING).unwrap().in_workspaces(&[root], None);
    let ceiling = resolve(&ceiling, None, &Machine::default()).unwrap().unwrap();

    let mut runner = TestRunner::deterministic();
    let sequences = prop::collection::vec(any_step(), 1..16);
    let (mut changed, mut refused) = (0, 0);
    for _ in 0..SEQUENCES {
        let steps = sequences.new_tree(&mut runner).unwrap().current();
        set_up(&place);
        for (nth, step) in steps.iter().enumerate() {
            let (method, path, other, asked) = match step {
                Step::Link(link, target) => {
                    // Where the parent is missing or something stands already, there is no link.
                    drop(std::os::unix::fs::symlink(place.path(target), place.path(link)));
                    continue;
                }
                Step::Call(method, path, other, asked) => (*method, path, other, asked),
            };
            let said = sandbox(&place, asked);
            let mut params = match method {
                "fs/writeFile" => json!({"path": place.uri(path), "dataBase64": "bmV3"}),
                "fs/copy" => json!({"sourcePath": place.uri(other), "destinationPath": place.uri(path), "recursive": true}),
                "fs/open" => json!({"path": place.uri(path), "handleId": "h", "mode": "replace"}),
                _path_alone => json!({"path": place.uri(path)}),
            };
            params["sandbox"] = said.clone();
            let own = match asked {
                Asked::Entries(_) => resolve(&Sandbox::parse(&said.to_string()).unwrap(), None, &Machine::default()).unwrap(),
                Asked::Nothing | Asked::Everything => None,
            };
            let both = own.map_or_else(|| ceiling.clone(), |own| own.bounded_by(&ceiling).unwrap());
            let rules = compiled(&both);
            let before = snapshot(&place.path(""));
            let answer = client.call(method, params).await;
            if method == "fs/open" {
                client.ok("fs/close", json!({"handleId": "h"})).await;
            }
            let after = snapshot(&place.path(""));
            let differs = before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path));
            for path in differs {
                let verdict = rules.as_ref().map(|rules| rules.verdict(path));
                assert_eq!(verdict, Some(Verdict::Write), "{}: {answer:?} at {nth} of {steps:#?}", path.display());
                changed += 1;
            }
            match answer {
                Ok(answer) => assert_ne!(answer["dataBase64"], SECRET, "{nth} of {steps:#?}"),
                Err(_) => refused += 1,
            }
        }
    }
    // Both happened often enough to mean something.
    assert!(changed > SEQUENCES / 2 && refused > SEQUENCES, "{changed} changed, {refused} refused");
}

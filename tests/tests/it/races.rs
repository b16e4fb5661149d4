//! Links that are swapped with directories while requests run: a hundred thousand tries to be led out of the workspace.

use portcullis_tests::{Client, Place, Refusal, Server};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Connections that try at once, each with a session and a worker of its own.
const CONNECTIONS: usize = 4;

/// Rounds of each connection. With the tries of a round and the connections this is more than 100,000.
const ROUNDS: usize = 1_400;

/// Fewer answers of either kind would mean that nothing was raced against.
const ENOUGH: u64 = 1_000;

const INSIDE: &str = "inside";
const OUTSIDE: &str = "outside, which nobody may read";

/// Swaps directories with links to the outside, again and again while there are calls to race with, after pauses of all lengths.
struct Swapper {
    ends: Arc<AtomicBool>,
    swaps: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Swapper {
    fn start(pairs: Vec<(PathBuf, PathBuf)>) -> Self {
        let (ends, swaps) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let thread = std::thread::spawn({
            let (ends, swaps) = (Arc::clone(&ends), Arc::clone(&swaps));
            move || {
                // A plain generator: which pauses come is of no matter, only that many different ones do.
                let mut state = 1_u32;
                while !ends.load(Ordering::Relaxed) {
                    for (one, other) in &pairs {
                        renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
                        swaps.fetch_add(1, Ordering::Relaxed);
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        for _turn in 0..(state >> 20) {
                            std::hint::spin_loop();
                        }
                    }
                    // Until there is a call more: swaps without calls would only take the processor from them.
                    std::thread::park();
                }
            }
        });
        Self { ends, swaps, thread: Some(thread) }
    }

    /// There is a call more.
    fn go_on(&self) {
        self.thread.as_ref().expect("it runs until it is dropped").thread().unpark();
    }

    fn count(&self) -> u64 {
        self.swaps.load(Ordering::Relaxed)
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.go_on();
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

/// `ws/d` and `ws/p` are directories of the workspace that are swapped with links to their namesakes in `out`. The second has
/// what is asked for one level deeper, so there it is a parent that is swapped.
fn place() -> (Place, Vec<(PathBuf, PathBuf)>) {
    let place = Place::new();
    for (side, content) in [("ws", INSIDE), ("out", OUTSIDE)] {
        for directory in ["d", "p/d"] {
            for file in ["read", "tree/file", "replaced", content] {
                place.put(&format!("{side}/{directory}/{file}"), content);
            }
        }
    }
    place.put("ws/source", "new");
    place.link("ws/link-d", place.path("out/d"));
    place.link("ws/link-p", place.path("out/p"));
    let pair = |name: &str| (place.path(&format!("ws/{name}")), place.path(&format!("ws/link-{name}")));
    let pairs = vec![pair("d"), pair("p")];
    (place, pairs)
}

/// Every path below a directory with its content; links as what they say.
fn snapshot(directory: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.insert(path.clone(), "directory".to_owned());
            found.extend(snapshot(&path));
        } else {
            found.insert(path.clone(), fs::read_to_string(&path).unwrap());
        }
    }
    found
}

/// One round: every kind of call through every swapped directory. `who` keeps the connections' own names apart.
fn tries(place: &Place, who: usize) -> Vec<(&'static str, Value)> {
    let mut tries = Vec::new();
    for directory in ["ws/d", "ws/p/d"] {
        let at = |name: &str| place.uri(&format!("{directory}/{name}"));
        let own = |name: &str| place.uri(&format!("ws/{name}-{who}"));
        let copy = |from: String, to: String| json!({"sourcePath": from, "destinationPath": to, "recursive": true});
        tries.extend([
            ("fs/readFile", json!({"path": at("read")})),
            ("fs/readDirectory", json!({"path": at("")})),
            ("fs/writeFile", json!({"path": at("replaced"), "dataBase64": "bmV3"})),
            ("fs/writeFile", json!({"path": at(&format!("made-{who}")), "dataBase64": "bmV3"})),
            ("fs/createDirectory", json!({"path": at(&format!("directory-{who}/below"))})),
            ("fs/copy", copy(at("read"), own("copied"))),
            ("fs/copy", copy(place.uri("ws/source"), at(&format!("copied-{who}")))),
            ("fs/remove", json!({"path": at(&format!("directory-{who}")), "recursive": true, "force": true})),
            ("fs/remove", json!({"path": at("tree"), "recursive": true, "force": true})),
        ]);
    }
    tries
}

/// Sends a round and hands every answer to `look`, with the call it belongs to.
async fn round(
    client: &mut Client,
    place: &Place,
    swapper: &Swapper,
    who: usize,
    sandbox: &Value,
    mut look: impl FnMut(&str, Result<Value, Refusal>),
) {
    let mut sent = Vec::new();
    for (method, mut params) in tries(place, who) {
        params["sandbox"] = sandbox.clone();
        sent.push((client.begin(method, params).await, method));
        swapper.go_on();
    }
    for (id, method) in sent {
        look(method, client.answer(id).await);
        swapper.go_on();
    }
}

fn base64(text: &str) -> String {
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, text)
}

#[tokio::test]
async fn a_hundred_thousand_swaps_lead_nobody_out() {
    let (place, pairs) = place();
    let server = Server::start().await;
    // Nothing but the workspace is granted, so that reading outside is denied too.
    let sandbox = json!({"cwd": place.uri("ws"), "windowsSandboxLevel": "disabled",
        "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": [
            {"path": {"type": "path", "path": place.uri("ws")}, "access": "write"}]}}});
    let before = snapshot(&place.path("out"));
    let swapper = Swapper::start(pairs);
    let (place, server, sandbox, racing) = (&place, &server, &sandbox, &swapper);
    let connection = async |who: usize| {
        let mut client = Client::connect(server).await;
        let mut counts: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for _round in 0..ROUNDS {
            round(&mut client, place, racing, who, sandbox, |method, answer| {
                let count = counts.entry(method.to_owned()).or_default();
                count[usize::from(answer.is_err())] += 1;
                let answer = answer.map_or_else(|refusal| refusal.message, |result| result.to_string());
                assert!(!answer.contains(OUTSIDE) && !answer.contains(&base64(OUTSIDE)), "{method} read outside: {answer}");
            })
            .await;
            let copied = fs::read_to_string(place.path(&format!("ws/copied-{who}"))).unwrap_or_default();
            assert_ne!(copied, OUTSIDE, "fs/copy read outside");
        }
        counts
    };
    let counts = futures_util::future::join_all((0..CONNECTIONS).map(connection)).await;
    let swaps = swapper.count();
    drop(swapper);
    assert_eq!(snapshot(&place.path("out")), before, "something outside was changed");
    let mut sums: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    for (method, count) in counts.into_iter().flatten() {
        let sum = sums.entry(method).or_default();
        *sum = [sum[0] + count[0], sum[1] + count[1]];
    }
    let tries: u64 = sums.values().flatten().sum();
    println!("{tries} tries during {swaps} swaps; served inside, refused for a link: {sums:?}");
    assert!(tries >= 100_000, "{tries} tries");
    assert!(swaps >= ENOUGH, "{swaps} swaps");
    assert!(sums.values().all(|[served, refused]| *served >= ENOUGH && *refused >= ENOUGH), "{sums:?}");
}

#[tokio::test]
async fn without_a_sandbox_the_same_calls_are_led_out() {
    let (place, pairs) = place();
    let server = Server::start().await;
    let mut client = Client::connect(&server).await;
    let before = snapshot(&place.path("out"));
    let swapper = Swapper::start(pairs);
    // Both directories, and each kind of call; removed is what was there, and so is what was replaced.
    let mut led_out = BTreeMap::new();
    let mut wanted: Vec<String> = vec!["read".into(), "listed".into(), "copied in".into()];
    for directory in ["d", "p/d"] {
        wanted.extend(["replaced", "made-0", "copied-0", "tree"].map(|name| format!("{directory}/{name}")));
    }
    for number in 0.. {
        round(&mut client, &place, &swapper, 0, &Value::Null, |_method, answer| {
            let answer = answer.map_or_else(|refusal| refusal.message, |result| result.to_string());
            if answer.contains(&base64(OUTSIDE)) {
                led_out.entry("read".to_owned()).or_insert(number);
            }
            if answer.contains(OUTSIDE) {
                led_out.entry("listed".to_owned()).or_insert(number);
            }
        })
        .await;
        if fs::read_to_string(place.path("ws/copied-0")).is_ok_and(|content| content == OUTSIDE) {
            led_out.entry("copied in".to_owned()).or_insert(number);
        }
        for name in &wanted[3..] {
            let path = place.path(&format!("out/{name}"));
            let was = before.get(&path).cloned();
            let is = if path.is_dir() { Some("directory".to_owned()) } else { fs::read_to_string(&path).ok() };
            if was != is {
                led_out.entry(name.clone()).or_insert(number);
            }
        }
        if wanted.iter().all(|kind| led_out.contains_key(kind)) {
            break;
        }
        assert!(number < ROUNDS, "led out only for {led_out:?} in {number} rounds");
    }
    println!("led out after so many rounds: {led_out:?}, {} swaps", swapper.count());
}

//! Workers in a view of their own: the protection of its mounts without the worker's judgement, and its replacement.

use super::gateway::{Channel, Spawner, Worker, policy};
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, FsDone, FsError, FsOperation, HIDDEN_FLAG, Role, SpawnerEvent, SpawnerRequest};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::mounts::Ground;
use portcullis_sandbox::policy::{Access, Policy};
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::{enforce, namespaces};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, chmodat, mkdirat, openat, renameat};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) const TESTS: &[Test] = &[
    ("views::a_worker_has_namespaces_of_its_own", a_worker_has_namespaces_of_its_own),
    ("views::covers_hold_without_the_judgement", covers_hold_without_the_judgement),
    ("views::a_lost_cover_retires_the_view", a_lost_cover_retires_the_view),
    ("views::a_name_that_comes_to_be_retires_the_view", a_name_that_comes_to_be_retires_the_view),
    ("views::an_empty_directory_retires_no_view", an_empty_directory_retires_no_view),
    ("views::a_root_denied_by_the_ceiling_is_covered", a_root_denied_by_the_ceiling_is_covered),
    ("views::a_policy_of_a_thousand_entries_has_a_view", a_policy_of_a_thousand_entries_has_a_view),
    ("views::a_view_of_a_writable_root_directory_holds_what_is_less", a_view_of_a_writable_root_directory_holds_what_is_less),
    ("views::a_worker_in_a_view_ends_by_order_and_with_its_spawner", a_worker_in_a_view_ends_by_order_and_with_its_spawner),
];

/// The name of a spawner whose workers do not check the policy.
const WITHOUT_JUDGEMENT: &str = "portcullis-without-judgement";

/// Access denied, read-only file system, device or resource busy.
const DENIED: i32 = 13;
const READ_ONLY: i32 = 30;
const BUSY: i32 = 16;

/// A tree with things that a policy denies or protects.
struct Places {
    _folder: tempfile::TempDir,
    root: PathBuf,
}

impl Places {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let places = Self { _folder: folder, root };
        for file in [
            "ws/plain",
            "ws/denied.txt",
            "ws/vault/key",
            "ws/.git/config",
            "ws/.codex",
            "ws/sub/deep/hidden",
            "out/o",
            "out/way/secret",
        ] {
            places.put(file, "old");
        }
        places
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn put(&self, name: &str, content: &str) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn policy(&self) -> Policy {
        policy_of(&self.root)
    }
}

fn policy_of(root: &Path) -> Policy {
    policy(&[
        (Path::new("/"), Access::Read),
        (&root.join("ws"), Access::Write),
        (&root.join("ws/denied.txt"), Access::Deny),
        (&root.join("ws/vault"), Access::Deny),
        (&root.join("ws/sub/deep/hidden"), Access::Deny),
        (&root.join("ws/later"), Access::Deny),
        (&root.join("out/way/secret"), Access::Deny),
    ])
}

/// Whether the worker has a view; without one there is nothing to test.
fn has_view(worker: &Worker) -> bool {
    let has = !worker.enforced.namespaces.is_empty();
    if !has {
        println!("skipped: this machine gives no namespaces");
    }
    has
}

/// The processes whose parent is this one.
fn children(parent: u32) -> Vec<u32> {
    let status = |pid: u32| fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    numbers.filter(|pid| status(*pid).contains(&format!("PPid:\t{parent}\n"))).collect()
}

fn a_worker_has_namespaces_of_its_own() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&places.policy()));
    if !has_view(&worker) {
        return;
    }
    for expect in ["mount", "pid", "ipc"] {
        assert!(worker.enforced.namespaces.iter().any(|name| name == expect), "{:?}", worker.enforced);
    }
    let spawner = worker.spawner.pid().unsigned_abs();
    let is_worker = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split('\0').any(|word| word == Role::Worker.name())
    };
    let [pid] = children(spawner).into_iter().filter(is_worker).collect::<Vec<_>>()[..] else { panic!("one worker") };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains(&format!("NSpid:\t{pid}\t1\n")), "{status}");
    // A hidden process is for root to look at.
    for kind in ["mnt", "pid", "ipc"] {
        let [own, other] = [pid, spawner].map(|pid| fs::read_link(format!("/proc/{pid}/ns/{kind}")));
        match (own, other) {
            (Ok(own), Ok(other)) => assert_ne!(own, other, "{kind}"),
            (error, _) => println!("not looked at: {kind}: {error:?}"),
        }
    }
    let listed = worker.ask(FsOperation::ReadDirectory { path: AbsolutePath::new("/proc").unwrap() }, b"").0;
    let Ok(FsDone::Directory(entries)) = listed else { panic!("{listed:?}") };
    let is_other = |name: &[u8]| name.iter().all(u8::is_ascii_digit) && name != b"1";
    let others: Vec<_> = entries.iter().filter(|entry| is_other(&entry.name.0)).collect();
    assert!(!worker.enforced.own_proc || others.is_empty(), "{others:?}");
    // The control: a worker without a policy sees them.
    let mut free = Worker::start(None);
    let listed = free.ask(FsOperation::ReadDirectory { path: AbsolutePath::new("/proc").unwrap() }, b"").0;
    let Ok(FsDone::Directory(entries)) = listed else { panic!("{listed:?}") };
    assert!(entries.iter().any(|entry| is_other(&entry.name.0)));
}

/// Plays the worker that has a defect: it makes its view and confines itself as the real one, and acts without asking the policy.
/// Its orders are lines on its standard input: whether it is in namespaces of its own, and where the places are.
pub(crate) fn without_judgement() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    let [name, flag, role, _build] = &arguments[..] else { return None };
    if name != WITHOUT_JUDGEMENT || flag != HIDDEN_FLAG || role != Role::Worker.name() {
        return None;
    }
    let line = || std::io::stdin().lines().next().unwrap().unwrap();
    let (own_view, root) = (line() == "view", PathBuf::from(line()));
    let policy = policy_of(&root);
    let roots = if own_view {
        namespaces::own_mounts().unwrap();
        enforce::keep_mounting().unwrap();
        let ground = Ground::lay().unwrap();
        let mut roots = Roots::open(&policy).unwrap();
        let tables = Compiled::new(&policy, |path| roots.resolve(path)).unwrap();
        let view = ground.cover(&tables, &roots).unwrap();
        roots.open_anew(|path| tables.verdict(path) == Verdict::Denied).unwrap();
        enforce::worker_in_view(&policy, &roots, &view, false).unwrap();
        roots
    } else {
        let roots = Roots::open(&policy).unwrap();
        enforce::worker(&policy, &roots).unwrap();
        roots
    };
    let at = |name: &str| root.join(name);
    let errno = |result: std::io::Result<()>| result.map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0);
    let call = |result: rustix::io::Result<()>| errno(result.map_err(Into::into));
    let mode = Mode::from_raw_mode(0o600);
    // Through a descriptor that the worker holds open.
    let below = |real: PathBuf, name: &str| {
        let held = roots.all().iter().find(|root| root.real == real).unwrap();
        call(openat(&held.descriptor.as_ref().unwrap().0, name, OFlags::RDONLY, Mode::empty()).map(drop))
    };
    let from_root = at("out/way/secret").strip_prefix("/").unwrap().to_str().unwrap().to_owned();
    let outcomes = [
        errno(fs::read(at("ws/plain")).map(drop)),
        errno(fs::write(at("ws/plain"), "new")),
        errno(fs::read(at("ws/denied.txt")).map(drop)),
        errno(fs::read(at("ws/vault/key")).map(drop)),
        errno(fs::read(at("out/way/secret")).map(drop)),
        below(at("ws"), "denied.txt"),
        below(PathBuf::from("/"), &from_root),
        call(mkdirat(CWD, at("ws/vault/new"), Mode::from_raw_mode(0o700))),
        errno(fs::write(at("ws/.git/config"), "new")),
        errno(fs::write(at("ws/.codex"), "new")),
        call(chmodat(CWD, at("ws/.git/config"), mode, AtFlags::empty())),
        call(chmodat(CWD, at("out/o"), mode, AtFlags::empty())),
        call(renameat(CWD, at("ws/sub"), CWD, at("ws/moved"))),
    ];
    println!("{outcomes:?}");
    Some(ExitCode::SUCCESS)
}

/// The results of a worker without judgement.
fn act(own_view: bool, places: &Places) -> String {
    let spawner = Spawner::start_called(WITHOUT_JUDGEMENT);
    let (channel, theirs) = Channel::pair();
    let (_control, their_control) = Channel::pair();
    spawner.send(&SpawnerRequest::Worker { id: 7, own_view }, &[theirs, their_control]);
    let mut socket = fs::File::from(channel.into_socket());
    writeln!(socket, "{}\n{}", if own_view { "view" } else { "plain" }, places.root.display()).unwrap();
    let outcomes = std::io::read_to_string(socket).unwrap();
    spawner.close();
    outcomes.trim().to_owned()
}

fn covers_hold_without_the_judgement() {
    if !has_view(&Worker::start(Some(&Places::new().policy()))) {
        return;
    }
    let places = Places::new();
    let kept = [DENIED, DENIED, DENIED, DENIED, DENIED, DENIED, READ_ONLY, READ_ONLY, READ_ONLY, READ_ONLY, BUSY];
    assert_eq!(act(true, &places), format!("{:?}", [[0; 2].as_slice(), &kept].concat()));
    assert_eq!(fs::read(places.at("ws/.git/config")).unwrap(), b"old");
    assert!(places.at("ws/sub/deep/hidden").exists() && !places.at("ws/vault/new").exists());
    // The control: without the view nothing but the judgement holds them.
    assert_eq!(act(false, &places), format!("{:?}", [0; 13]));
    assert_eq!(fs::read(places.at("ws/.git/config")).unwrap(), b"new");
}

/// Checks that the worker's view is replaced after `change`, and that the next one refuses a write to `place`, as the policy
/// does.
#[track_caller]
fn is_replaced(places: &Places, place: &str, errno: i32, change: impl FnOnce()) {
    let mut worker = Worker::start(Some(&places.policy()));
    if !has_view(&worker) {
        return;
    }
    assert_eq!(worker.read(places.at("ws/plain")).unwrap(), b"old");
    change();
    for _ in 0..2 {
        assert_eq!(worker.read(places.at("ws/plain")), Err(FsError::Stale), "{place}");
    }
    let mut next = Worker::start(Some(&places.policy()));
    assert_eq!(next.read(places.at("ws/plain")).unwrap(), b"old");
    assert!(matches!(next.write(places.at(place), b"x"), Err(FsError::Denied(got, _)) if got == errno), "{place}");
    assert_eq!(next.read(places.at("ws/plain")).unwrap(), b"old");
}

fn a_lost_cover_retires_the_view() {
    let places = Places::new();
    let (git, ws, way) = (places.at("ws/.git"), places.at("ws"), places.at("out/way"));
    is_replaced(&places, "ws/.git/config", READ_ONLY, || {
        fs::remove_dir_all(&git).unwrap();
        places.put("ws/.git/config", "new");
    });
    is_replaced(&places, "ws/.git/config", READ_ONLY, || {
        fs::rename(&git, ws.join("git")).unwrap();
        places.put("ws/.git/config", "newer");
    });
    is_replaced(&places, "ws/denied.txt", DENIED, || {
        fs::write(ws.join("next"), "secret").unwrap();
        fs::rename(ws.join("next"), ws.join("denied.txt")).unwrap();
    });
    // A directory further up is moved, so that nothing happens in the directory of the cover.
    is_replaced(&places, "out/way/secret", DENIED, || {
        fs::rename(&way, places.at("out/old")).unwrap();
        places.put("out/way/secret", "new");
    });
    is_replaced(&places, "ws/sub/deep/hidden", DENIED, || {
        fs::rename(ws.join("sub"), ws.join("old")).unwrap();
        places.put("ws/sub/deep/hidden", "new");
    });
}

fn a_name_that_comes_to_be_retires_the_view() {
    let places = Places::new();
    is_replaced(&places, "ws/.agents/x", READ_ONLY, || places.put("ws/.agents/x", "new"));
    is_replaced(&places, "ws/later/x", DENIED, || places.put("ws/later/x", "new"));
    is_replaced(&places, "ws/.aws", READ_ONLY, || places.put("ws/.aws", "new"));
}

fn an_empty_directory_retires_no_view() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&places.policy()));
    if !has_view(&worker) {
        return;
    }
    // As a sandbox makes and removes it.
    for _ in 0..3 {
        fs::create_dir(places.at("ws/.agents")).unwrap();
        assert_eq!(worker.read(places.at("ws/plain")).unwrap(), b"old");
        fs::remove_dir(places.at("ws/.agents")).unwrap();
        assert_eq!(worker.read(places.at("ws/plain")).unwrap(), b"old");
    }
    fs::create_dir(places.at("ws/.agents")).unwrap();
    assert!(worker.write(places.at("ws/.agents/x"), b"x").is_err());
    places.put("ws/.agents/x", "new");
    assert_eq!(worker.read(places.at("ws/plain")), Err(FsError::Stale));
    // So it is for a view that was made while it was there, and empty.
    fs::remove_file(places.at("ws/.agents/x")).unwrap();
    let mut next = Worker::start(Some(&places.policy()));
    assert_eq!(next.read(places.at("ws/plain")).unwrap(), b"old");
    places.put("ws/.agents/x", "new");
    assert_eq!(next.read(places.at("ws/plain")), Err(FsError::Stale));
}

fn a_root_denied_by_the_ceiling_is_covered() {
    let places = Places::new();
    let wide =
        policy(&[(Path::new("/"), Access::Read), (&places.at("ws"), Access::Write), (&places.at("ws/vault"), Access::Read)]);
    let ceiling =
        policy(&[(Path::new("/"), Access::Read), (&places.at("ws"), Access::Write), (&places.at("ws/vault"), Access::Deny)]);
    let mut worker = Worker::start(Some(&wide.clone().bounded_by(&ceiling).unwrap()));
    assert!(matches!(worker.read(places.at("ws/vault/key")), Err(FsError::Denied(DENIED, _))));
    assert_eq!(worker.read(places.at("ws/plain")).unwrap(), b"old");
    let mut control = Worker::start(Some(&wide));
    assert_eq!(control.read(places.at("ws/vault/key")).unwrap(), b"old");
}

fn a_policy_of_a_thousand_entries_has_a_view() {
    let places = Places::new();
    let of = |nth: usize| [Access::Write, Access::Deny, Access::Read][nth % 3];
    let mut entries = vec![(PathBuf::from("/"), Access::Read), (places.at("ws"), Access::Write)];
    for nth in 0..1000 {
        let (parent, access) = (if nth % 2 == 0 { "ws" } else { "out" }, of(nth));
        places.put(&format!("{parent}/d{nth}/f"), "old");
        entries.push((places.at(&format!("{parent}/d{nth}")), access));
    }
    let entries: Vec<(&Path, Access)> = entries.iter().map(|(path, access)| (path.as_path(), *access)).collect();
    let mut worker = Worker::start(Some(&policy(&entries)));
    for nth in [0, 1, 2, 3, 4, 5, 994, 995, 996, 997, 998, 999] {
        let parent = if nth % 2 == 0 { "ws" } else { "out" };
        let file = places.at(&format!("{parent}/d{nth}/f"));
        let (read, written) = (worker.read(&file), worker.write(&file, b"new"));
        match of(nth) {
            Access::Write => assert_eq!((read.unwrap(), written), (b"old".to_vec(), Ok(FsDone::Changed))),
            Access::Read => assert!(read.is_ok() && matches!(written, Err(FsError::Denied(READ_ONLY, _))), "{nth}"),
            Access::Deny => assert!(matches!((read, written), (Err(FsError::Denied(DENIED, _)), Err(_))), "{nth}"),
        }
    }
}

fn a_view_of_a_writable_root_directory_holds_what_is_less() {
    let places = Places::new();
    let all =
        policy(&[(Path::new("/"), Access::Write), (&places.at("ws/vault"), Access::Deny), (&places.at("out"), Access::Read)]);
    let mut worker = Worker::start(Some(&all));
    assert_eq!(worker.write(places.at("ws/plain"), b"new"), Ok(FsDone::Changed));
    assert!(matches!(worker.read(places.at("ws/vault/key")), Err(FsError::Denied(DENIED, _))));
    assert!(matches!(worker.write(places.at("out/o"), b"new"), Err(FsError::Denied(READ_ONLY, _))));
    assert_eq!(worker.read(places.at("out/o")).unwrap(), b"old");
    let removal = FsOperation::Remove {
        path: AbsolutePath::new(places.at("ws/sub")).unwrap(),
        recursive: true,
        force: false,
        follow: true,
    };
    assert_eq!(worker.ask(removal, b"").0, Ok(FsDone::Changed));
}

fn a_worker_in_a_view_ends_by_order_and_with_its_spawner() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&places.policy()));
    worker.spawner.send(&SpawnerRequest::KillWorker { id: 7 }, &[]);
    assert_eq!(worker.spawner.event(), SpawnerEvent::WorkerEnded { id: 7, status: ExitStatus::Signal(9) });
    assert!(worker.channel.receive().is_none());
    let Worker { channel, mut spawner, .. } = Worker::start(Some(&places.policy()));
    drop(channel);
    assert_eq!(spawner.event(), SpawnerEvent::WorkerEnded { id: 7, status: ExitStatus::Code(0) });
    // The spawner has no time to end it.
    let Worker { mut channel, spawner, .. } = Worker::start(Some(&places.policy()));
    kill_process(Pid::from_raw(spawner.pid()).unwrap(), Signal::KILL).unwrap();
    assert!(channel.receive().is_none());
    // Nothing is left on the machine: no name was made, and no mount is in the way.
    fs::remove_dir_all(places.at("ws")).unwrap();
}

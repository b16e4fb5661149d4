//! Workers under real confinement.

use super::gateway::{Worker, policy};
use crate::Test;
use portcullis_protocol::helper::{
    ExitStatus, FsDone, FsError, FsOperation, FsRequest, SpawnerEvent, SpawnerRequest, Step, WalkBounds,
};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::Access;
use portcullis_sandbox::roots::Roots;
use rustix::fs::{AtFlags, CWD, Mode, mkdirat, unlinkat};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

pub(crate) const TESTS: &[Test] = &[
    ("worker::unconfined_serves_everything", unconfined_serves_everything),
    ("worker::confined_serves_what_is_granted", confined_serves_what_is_granted),
    ("worker::every_operation_works_under_confinement", every_operation_works_under_confinement),
    ("worker::the_kernel_refuses_what_the_policy_would_have", the_kernel_refuses_what_the_policy_would_have),
    ("worker::secrets_of_other_processes_stay_theirs", secrets_of_other_processes_stay_theirs),
    ("worker::a_directory_above_a_grant_lists_the_way_to_it", a_directory_above_a_grant_lists_the_way_to_it),
    ("worker::a_linked_writable_root_is_refused", a_linked_writable_root_is_refused),
    ("worker::nothing_is_carried_out_before_the_policy_is_enforced", nothing_is_carried_out_before_the_policy_is_enforced),
    ("worker::a_denial_through_a_link_is_resolved_anew", a_denial_through_a_link_is_resolved_anew),
    ("worker::the_way_to_a_repository_stays", the_way_to_a_repository_stays),
    ("worker::a_removed_root_keeps_its_protected_names", a_removed_root_keeps_its_protected_names),
    ("worker::ends_with_its_socket_and_by_order", ends_with_its_socket_and_by_order),
];

/// Argument with which this program confines itself as a worker and then acts without asking the policy.
const BACKSTOP: &str = "--act-confined-without-asking";

fn path(path: impl AsRef<Path>) -> AbsolutePath {
    AbsolutePath::new(path).unwrap()
}

/// A tree with a place inside a grant and one outside.
struct Places {
    _folder: tempfile::TempDir,
    inside: PathBuf,
    outside: PathBuf,
}

impl Places {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let (inside, outside) = (root.join("inside"), root.join("outside"));
        for place in [&inside, &outside] {
            fs::create_dir(place).unwrap();
            fs::write(place.join("f"), "old").unwrap();
        }
        Self { _folder: folder, inside, outside }
    }
}

fn unconfined_serves_everything() {
    let places = Places::new();
    let mut worker = Worker::start(None);
    assert_eq!(worker.enforced.landlock_abi, 0);
    assert_eq!(worker.write(places.outside.join("f"), b"new"), Ok(FsDone::Changed));
    assert_eq!(worker.read(places.outside.join("f")).unwrap(), b"new");
}

fn confined_serves_what_is_granted() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&policy(&[(Path::new("/"), Access::Read), (&places.inside, Access::Write)])));
    assert!(worker.enforced.landlock_abi >= 3 && !worker.enforced.seccomp.is_empty(), "{:?}", worker.enforced);
    assert_eq!(worker.write(places.inside.join("f"), b"new"), Ok(FsDone::Changed));
    assert_eq!(worker.read(places.inside.join("f")).unwrap(), b"new");
    assert_eq!(worker.read(places.outside.join("f")).unwrap(), b"old");
    assert_eq!(refusal(worker.write(places.outside.join("f"), b"new")), 30);
    assert_eq!(refusal(worker.write(places.inside.join(".git/config"), b"new")), 30);
    assert_eq!(fs::read(places.outside.join("f")).unwrap(), b"old");

    let mut narrow = Worker::start(Some(&policy(&[(&places.inside, Access::Write)])));
    assert_eq!(narrow.read(places.inside.join("f")).unwrap(), b"new");
    assert_eq!(refusal(narrow.read(places.outside.join("f"))), 2);
    assert_eq!(refusal(narrow.read("/etc/passwd")), 2);
}

fn every_operation_works_under_confinement() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&policy(&[(&places.inside, Access::Write)])));
    let at = |name: &str| path(places.inside.join(name));
    let large = vec![7; 60_000];
    assert_eq!(worker.write(at("large"), &large), Ok(FsDone::Changed));
    let bounds = WalkBounds { depth: 9, directories: 99, entries: 99, follow_directory_links: true, prune_hidden: false };
    std::os::unix::fs::symlink("a", places.inside.join("ln")).unwrap();
    let operations = [
        FsOperation::CreateDirectory { path: at("a/b"), recursive: true, follow: true },
        FsOperation::CreateDirectory { path: at("a/c"), recursive: false, follow: false },
        FsOperation::Copy { source: at("f"), destination: at("a/b/g"), recursive: false },
        FsOperation::Copy { source: at("ln"), destination: at("a/ln"), recursive: false },
        FsOperation::Copy { source: at("a"), destination: at("z/y"), recursive: true },
        FsOperation::GetMetadata { path: at("ln"), follow: true },
        FsOperation::GetMetadata { path: at("a"), follow: false },
        FsOperation::Canonicalize { path: at("ln/b/g") },
        FsOperation::ReadDirectory { path: at("ln") },
        FsOperation::Walk { path: at(""), options: bounds },
        FsOperation::Open { path: at("f"), mode: portcullis_protocol::helper::OpenMode::Read },
        FsOperation::Open { path: at("new"), mode: portcullis_protocol::helper::OpenMode::Replace },
        FsOperation::ReadFile { path: at("ln/b/g"), follow: true, limit: 10 },
        FsOperation::Remove { path: at("a"), recursive: true, force: false, follow: true },
        FsOperation::Remove { path: at("ln"), recursive: false, force: false, follow: true },
    ];
    for operation in operations {
        let outcome = worker.ask(operation.clone(), b"").0;
        assert!(outcome.is_ok(), "{operation:?}: {outcome:?}");
    }
    // Larger than a payload: the descriptor itself, or a copy in memory.
    fs::write(places.inside.join("large"), vec![7; 1 << 20]).unwrap();
    let (outcome, _payload, descriptors) =
        worker.ask(FsOperation::ReadFile { path: at("large"), follow: true, limit: 1 << 30 }, b"");
    assert_eq!(outcome, Ok(FsDone::Descriptor { size: 1 << 20 }));
    let mut content = vec![0; 1 << 20];
    assert_eq!(rustix::io::pread(&descriptors[0], &mut content[..], 0).unwrap(), 1 << 20);
    assert!(content.iter().all(|byte| *byte == 7));
}

/// Plays the worker that has a defect: it is confined, and acts without asking the policy.
pub(crate) fn backstop(arguments: &[String]) -> Option<ExitCode> {
    let [flag, inside, outside] = arguments else {
        return None;
    };
    if flag != BACKSTOP {
        return None;
    }
    let (inside, outside) = (Path::new(inside), Path::new(outside));
    // The calls that the worker itself makes: the C library's older spellings are not in its seccomp table.
    let policy = policy(&[(inside, Access::Write)]);
    let roots = Roots::open(&policy).unwrap();
    portcullis_sandbox::enforce::worker(&policy, &roots).unwrap();
    for place in [inside, outside] {
        let errno = |result: std::io::Result<()>| result.map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0);
        let results = [
            errno(fs::read(place.join("f")).map(drop)),
            errno(fs::write(place.join("f"), "new")),
            errno(fs::write(place.join("g"), "new")),
            errno(mkdirat(CWD, place.join("d"), Mode::from_raw_mode(0o700)).map_err(Into::into)),
            errno(fs::read_dir(place).map(drop)),
            errno(unlinkat(CWD, place.join("f"), AtFlags::empty()).map_err(Into::into)),
            errno(Command::new("/bin/true").status().map(drop)),
            errno(std::net::TcpListener::bind("127.0.0.1:0").map(drop)),
        ];
        println!("{results:?}");
    }
    Some(ExitCode::SUCCESS)
}

fn the_kernel_refuses_what_the_policy_would_have() {
    let places = Places::new();
    let output = Command::new("/proc/self/exe").arg(BACKSTOP).args([&places.inside, &places.outside]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    // Inside, files may be used as granted, which is the control; programs and the network are refused everywhere.
    assert!(lines[0].starts_with("[0, 0, 0, 0, 0, 0, ") && !lines[0].contains(" 0]"), "{text}");
    assert!(lines[1].starts_with("[13, 13, 13, 13, 13, 13, "), "{text}");
    for line in lines {
        let results: Vec<&str> = line.trim_matches(['[', ']']).split(", ").collect();
        assert!(results[6] != "0" && results[7] != "0", "{line}");
    }
    assert_eq!(fs::read(places.outside.join("f")).unwrap(), b"old");
    assert!(!places.outside.join("g").exists() && places.inside.join("d").is_dir());
}

fn secrets_of_other_processes_stay_theirs() {
    let mut worker = Worker::start(Some(&policy(&[(Path::new("/"), Access::Read)])));
    let others = [std::process::id(), worker.spawner.process.id()];
    for other in others {
        for secret in ["environ", "maps", "fd/0", "cwd/etc/passwd", "root/etc/passwd"] {
            let got = worker.read(format!("/proc/{other}/{secret}"));
            assert_eq!(refusal(got), 2, "{secret}");
        }
    }
    for own in ["/proc/self/environ", "/proc/thread-self/maps", "/dev/stdin", "/dev/fd/0", "/proc/self/root/etc/passwd"] {
        assert_eq!(refusal(worker.read(own)), 2, "{own}");
    }
    // The controls: what is no secret is readable, and an unconfined process of this user may read the rest.
    assert!(worker.read("/proc/filesystems").is_ok());
    assert!(fs::read(format!("/proc/{}/environ", std::process::id())).is_ok());
}

fn a_directory_above_a_grant_lists_the_way_to_it() {
    let places = Places::new();
    let mut worker = Worker::start(Some(&policy(&[(&places.inside, Access::Read)])));
    let above = places.inside.parent().unwrap();
    let FsDone::Directory(entries) = worker.ask(FsOperation::ReadDirectory { path: path(above) }, b"").0.unwrap() else {
        panic!()
    };
    assert_eq!(entries.iter().map(|entry| entry.name.0.as_slice()).collect::<Vec<_>>(), [b"inside"]);
    let root = worker.ask(FsOperation::ReadDirectory { path: path("/") }, b"").0.unwrap();
    let FsDone::Directory(entries) = root else { panic!() };
    assert_eq!(entries.len(), 1);
}

fn a_linked_writable_root_is_refused() {
    let places = Places::new();
    let link = places.inside.join("link");
    std::os::unix::fs::symlink(&places.outside, &link).unwrap();
    let refused = Worker::try_start(Some(&policy(&[(&link, Access::Write)]))).err().unwrap();
    assert_eq!(refused.step, Step::Enforce);
    assert!(refused.attempt.contains("symbolic link"), "{refused}");
}

fn nothing_is_carried_out_before_the_policy_is_enforced() {
    let places = Places::new();
    let (link, made) = (places.inside.join("link"), places.outside.join("made"));
    std::os::unix::fs::symlink(&places.outside, &link).unwrap();
    let early = || FsRequest { id: 5, operation: FsOperation::WriteFile { path: path(&made), follow: true } };
    // A policy that cannot be enforced: the request is there, and nobody reads it.
    assert!(Worker::try_start_with(Some(&policy(&[(&link, Access::Write)])), Some(&early())).is_err());
    assert!(!made.exists());
    // One that forbids it: it is read after that.
    let mut held = Worker::try_start_with(Some(&policy(&[(&places.inside, Access::Write)])), Some(&early())).unwrap();
    assert_eq!(refusal(held.answer().0), 2);
    assert!(!made.exists());
    // The control: one that grants it.
    let mut free = Worker::try_start_with(Some(&policy(&[(&places.outside, Access::Write)])), Some(&early())).unwrap();
    assert_eq!(free.answer().0, Ok(FsDone::Changed));
    assert_eq!(fs::read(&made).unwrap(), b"early");
}

fn a_denial_through_a_link_is_resolved_anew() {
    let places = Places::new();
    let (inside, outside) = (&places.inside, &places.outside);
    let current = inside.join("current");
    std::os::unix::fs::symlink(inside, &current).unwrap();
    let denied = policy(&[(Path::new("/"), Access::Read), (&current.join("f"), Access::Deny)]);
    let mut worker = Worker::start(Some(&denied));
    assert_eq!(refusal(worker.read(current.join("f"))), 13);
    assert_eq!(refusal(worker.read(inside.join("f"))), 13);
    assert_eq!(worker.read(outside.join("f")).unwrap(), b"old");
    fs::remove_file(&current).unwrap();
    std::os::unix::fs::symlink(outside, &current).unwrap();
    assert_eq!(worker.read(outside.join("f")), Err(FsError::Stale));
    assert_eq!(worker.read(current.join("f")), Err(FsError::Stale));
    let mut next = Worker::start(Some(&denied));
    assert_eq!(refusal(next.read(outside.join("f"))), 13);
    assert_eq!(refusal(next.read(current.join("f"))), 13);
    assert_eq!(next.read(inside.join("f")).unwrap(), b"old");
}

fn the_way_to_a_repository_stays() {
    let places = Places::new();
    let inside = &places.inside;
    fs::create_dir_all(inside.join("d/repo")).unwrap();
    std::os::unix::fs::symlink("d", inside.join("l")).unwrap();
    let policy = policy(&[(inside, Access::Write)]);
    let mut worker = Worker::start(Some(&policy));
    let make = |name: &str| FsOperation::CreateDirectory { path: path(inside.join(name)), recursive: true, follow: true };
    let remove = |name: &str| FsOperation::Remove { path: path(inside.join(name)), recursive: true, force: true, follow: true };
    assert_eq!(worker.ask(make("d/repo/before"), b"").0, Ok(FsDone::Changed));
    // Made after the start.
    fs::write(inside.join(".git"), "gitdir: l/repo\n").unwrap();
    if !worker.enforced.namespaces.is_empty() {
        // It has no cover for it, and the next one has.
        assert_eq!(worker.ask(make("d/beside"), b"").0, Err(FsError::Stale));
        worker = Worker::start(Some(&policy));
    }
    for operation in [remove("l"), remove("d"), remove("d/repo"), remove("d/repo/before"), make("d/repo/after")] {
        assert_eq!(refusal(worker.ask(operation.clone(), b"").0), 30, "{operation:?}");
    }
    assert!(inside.join("l/repo/before").is_dir());
    assert_eq!(worker.ask(make("d/beside"), b"").0, Ok(FsDone::Changed));
}

fn a_removed_root_keeps_its_protected_names() {
    let places = Places::new();
    let ws = places.inside.join("ws");
    fs::create_dir(&ws).unwrap();
    let policy = policy(&[(Path::new("/"), Access::Read), (&places.inside, Access::Write), (&ws, Access::Write)]);
    let mut worker = Worker::start(Some(&policy));
    let make = |name: &str| FsOperation::CreateDirectory { path: path(ws.join(name)), recursive: true, follow: true };
    assert_eq!(refusal(worker.ask(make(".git/hooks"), b"").0), 30);
    let removal = FsOperation::Remove { path: path(&ws), recursive: true, force: false, follow: true };
    assert_eq!(worker.ask(removal, b"").0, Ok(FsDone::Changed));
    // The root is not the one that the worker knew; whoever comes next saw it as missing from the start.
    assert_eq!(worker.ask(make(".git/hooks"), b"").0, Err(FsError::Stale));
    let mut next = Worker::start(Some(&policy));
    for worker in [&mut worker, &mut next] {
        assert_eq!(refusal(worker.write(ws.join(".git"), b"gitdir: x")), 30);
    }
    assert_eq!(refusal(next.ask(make(".git/hooks"), b"").0), 30);
    assert!(!ws.exists());
    // The control; and then it is a root again.
    assert_eq!(next.ask(make(""), b"").0, Ok(FsDone::Changed));
    assert_eq!(next.ask(make(".git"), b"").0, Err(FsError::Stale));
    let mut last = Worker::start(Some(&policy));
    assert_eq!(refusal(last.ask(make(".git"), b"").0), 30);
    assert_eq!(last.ask(make("sub"), b"").0, Ok(FsDone::Changed));
}

fn ends_with_its_socket_and_by_order() {
    let Worker { channel, mut spawner, .. } = Worker::start(None);
    drop(channel);
    assert_eq!(spawner.event(), SpawnerEvent::WorkerEnded { id: 7, status: ExitStatus::Code(0) });
    let mut worker = Worker::start(None);
    worker.spawner.send(&SpawnerRequest::KillWorker { id: 7 }, &[]);
    assert_eq!(worker.spawner.event(), SpawnerEvent::WorkerEnded { id: 7, status: ExitStatus::Signal(9) });
    assert!(worker.channel.receive().is_none());
}

/// The error number with which the policy said no.
#[track_caller]
fn refusal<T: std::fmt::Debug>(result: Result<T, FsError>) -> i32 {
    match result {
        Err(FsError::Denied(errno, Some(_explained))) => errno,
        other => panic!("{other:?} is no refusal by the policy with its reason"),
    }
}

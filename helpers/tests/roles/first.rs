//! A sandbox's init is confined while it serves, and does all of its work.

use super::gateway::{Spawner, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent, SpawnerRequest};
use portcullis_sandbox::policy::{Access, Policy};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("first::init_has_no_rights_once_it_serves", init_has_no_rights_once_it_serves),
    ("first::a_confined_init_notes_denials", a_confined_init_notes_denials),
    ("first::a_confined_init_passes_signals_and_ends_all", a_confined_init_passes_signals_and_ends_all),
    ("first::a_confined_init_watches_covers", a_confined_init_watches_covers),
];

fn reading() -> Policy {
    policy(&[(Path::new("/"), Access::Read)])
}

/// Starts a script that has said `ready`: its init, and what it writes.
fn start(spawner: &mut Spawner, script: &str, policy: &Policy) -> (i32, BufReader<File>) {
    let (stdout, _stderr) = spawner.start_process(1, &shell(script), Some(policy));
    let init = match spawner.event() {
        SpawnerEvent::Started { pid, .. } => pid,
        other => panic!("{other:?}"),
    };
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (init, stdout)
}

fn field(process: i32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

fn is_all_zero(text: &str) -> bool {
    text.bytes().all(|byte| byte == b'0')
}

/// The filter is its last step, and comes while the program begins.
fn wait_for_filter(init: i32) {
    while field(init, "Seccomp") != "2" {
        std::thread::yield_now();
    }
}

fn assert_no_rights(init: i32) {
    wait_for_filter(init);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let held = field(init, set);
        assert!(is_all_zero(&held), "{set} {held}");
    }
    assert_eq!(field(init, "NoNewPrivs"), "1");
}

fn init_has_no_rights_once_it_serves() {
    // One view has mount points for names that do not exist, the other has none.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let workspace = directory.path().canonicalize().unwrap();
    let writing = policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write)]);
    let mut spawner = Spawner::start();
    let (init, _stdout) = start(&mut spawner, "echo ready; exec sleep 1000", &writing);
    assert!(workspace.join(".git").is_dir(), "the name is held");
    assert_no_rights(init);
    spawner.close();
    let mut spawner = Spawner::start();
    let (init, _stdout) = start(&mut spawner, "echo ready; exec sleep 1000", &reading());
    assert_no_rights(init);
    // The control: the spawner has neither.
    let parent = spawner.pid();
    assert_eq!((field(parent, "Seccomp"), field(parent, "NoNewPrivs")), ("0".to_owned(), "0".to_owned()));
    if geteuid().is_root() {
        assert!(!is_all_zero(&field(parent, "CapEff")));
        let mount = |name: &str| {
            let path = format!("/proc/{init}/{name}");
            (fs::read_link(&path).unwrap(), statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).unwrap().stx_mnt_id)
        };
        assert_eq!(mount("cwd"), mount("root"), "its directory is the root of the view, and no root beneath it");
        assert_eq!(mount("cwd").0, Path::new("/"));
        assert_ne!(fs::read_link(format!("/proc/{parent}/cwd")).unwrap(), Path::new("/"), "the control: it began elsewhere");
    } else {
        println!("skipped: the directory of init: only root may look at it");
    }
    spawner.close();
}

fn a_confined_init_notes_denials() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::write(top.join("file"), "").unwrap();
    let script = format!("cd {} && touch file; mkdir {}/d; ln -s a b; :", top.display(), top.display());
    let mut spawner = Spawner::start();
    let (_, enforced, denials) = spawner.run_and_see(&shell(&script), Some(&reading()));
    assert!(enforced.observed);
    let seen: Vec<String> = denials.list.iter().map(|denial| denial.path.clone()).collect();
    let expect = ["file", "d", "b"].map(|name| top.join(name).to_str().unwrap().to_owned());
    assert_eq!(seen, expect, "relative to the working directory and from the root");
    spawner.close();
}

fn a_confined_init_passes_signals_and_ends_all() {
    let mut spawner = Spawner::start();
    // A shell says on its error stream, which is closed here, how its children ended.
    let script = "exec 2>/dev/null; trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.01; done";
    let (init, mut stdout) = start(&mut spawner, script, &reading());
    wait_for_filter(init);
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 10 }, &[]);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "caught\n");
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { status: ExitStatus::Code(7), .. }));
    // Others live on after the program, and end with one order.
    let (init, mut stdout) =
        start(&mut spawner, "(trap '' HUP; sleep 1000) & (trap '' HUP; sleep 1000) & echo ready", &reading());
    wait_for_filter(init);
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { status: ExitStatus::Code(0), .. }));
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    stdout.read_to_string(&mut rest).unwrap();
    spawner.close();
}

fn a_confined_init_watches_covers() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let top = directory.path().canonicalize().unwrap();
    let at = |name: &str| -> PathBuf { top.join(name) };
    let denying = policy(&[(Path::new("/"), Access::Read), (&at("denied"), Access::Deny), (&at("later"), Access::Deny)]);
    for (act, name) in [("move", "denied"), ("make", "later")] {
        fs::create_dir_all(at("denied")).unwrap();
        let mut spawner = Spawner::start();
        let (init, _stdout) = start(&mut spawner, "echo ready; exec sleep 1000", &denying);
        wait_for_filter(init);
        if act == "move" {
            fs::rename(at("denied"), at("moved")).unwrap();
        } else {
            fs::create_dir(at("later")).unwrap();
        }
        match spawner.event() {
            SpawnerEvent::Exited { status: ExitStatus::Signal(9), failure, .. } => {
                let path = at(name).to_str().unwrap().to_owned();
                assert!(failure.as_ref().is_some_and(|text| text.contains(&path)), "{act}: {failure:?}");
            }
            other => panic!("{act}: {other:?}"),
        }
        spawner.close();
    }
}

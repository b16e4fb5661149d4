//! A sandbox's init is confined while it serves, and does all of its work.

use super::gateway::{Spawner, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, SpawnerEvent, SpawnerRequest};
use portcullis_sandbox::policy::{Access, Policy};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("first::init_has_no_rights_once_it_serves", init_has_no_rights_once_it_serves),
    ("first::a_confined_init_notes_denials", a_confined_init_notes_denials),
    ("first::a_confined_init_passes_signals_and_ends_all", a_confined_init_passes_signals_and_ends_all),
    ("first::a_confined_init_watches_covers", a_confined_init_watches_covers),
    ("first::a_sandbox_of_root_has_users_of_its_own", a_sandbox_of_root_has_users_of_its_own),
    ("first::root_in_a_sandbox_has_no_power_over_others", root_in_a_sandbox_has_no_power_over_others),
];

fn reading() -> Policy {
    policy(&[(Path::new("/"), Access::Read)])
}

fn start(spawner: &mut Spawner, script: &str, policy: &Policy) -> (i32, BufReader<File>) {
    super::uids::start(spawner, 1, &shell(script), policy)
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

/// Whether this is a root server, which may make all namespaces itself; says why not.
fn is_root() -> bool {
    if !geteuid().is_root() {
        println!("skipped: the sandboxes of other users begin in a user namespace");
    }
    geteuid().is_root()
}

fn a_sandbox_of_root_has_users_of_its_own() {
    if !is_root() {
        return;
    }
    let mut spawner = Spawner::start();
    let machine = fs::read_link("/proc/self/ns/user").unwrap();
    let mut seen = vec![machine];
    // The first is forked for its start; the others were made ahead, and wait in the server's user namespace.
    for id in 1..=4 {
        let script = "echo ready; cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups; id -u; id -g; exec sleep 1000";
        let (stdout, _stderr) = spawner.start_process(id, &shell(script), Some(&reading()));
        let (init, enforced) = match spawner.event() {
            SpawnerEvent::Started { pid, enforced, .. } => (pid, enforced),
            other => panic!("{other:?}"),
        };
        assert_eq!(enforced.namespaces.first().map(String::as_str), Some("user"), "{enforced:?}");
        let lines: Vec<String> = BufReader::new(stdout).lines().take(6).map(Result::unwrap).collect();
        let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split_whitespace().collect()).collect();
        // Outside it is the user of its own.
        let outside = field(init, "Uid");
        let outside = outside.split_whitespace().next().unwrap();
        assert_eq!(enforced.own_uid, outside != "0", "{enforced:?}");
        let only: &[&str] = &["0", outside, "1"];
        assert_eq!(words, [&["ready"], only, only, &["deny"], &["0"], &["0"]]);
        // Init is in it as well, or it could neither read nor end its processes.
        wait_for_filter(init);
        assert_no_rights(init);
        let own = fs::read_link(format!("/proc/{init}/ns/user")).unwrap();
        assert!(!seen.contains(&own), "{own:?} is another's");
        seen.push(own);
    }
    // The control: the spawner stays where the server is.
    assert_eq!(fs::read_link(format!("/proc/{}/ns/user", spawner.pid())).unwrap(), seen[0]);
    spawner.close();
}

fn root_in_a_sandbox_has_no_power_over_others() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let workspace = directory.path().canonicalize().unwrap();
    for name in ["own", "foreign"] {
        fs::write(workspace.join(name), name).unwrap();
    }
    std::os::unix::fs::chown(workspace.join("foreign"), Some(12_345), Some(12_345)).unwrap();
    let set_id = workspace.join("set-id");
    fs::copy("/usr/bin/id", &set_id).unwrap();
    fs::set_permissions(&set_id, fs::Permissions::from_mode(0o6755)).unwrap();
    let writing = policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write)]);
    let enter = format!("cd {} && ", workspace.display());
    let mut spawner = Spawner::start();
    for act in [
        "chown 12345 own",
        "chgrp 12345 own",
        "chmod 600 foreign",
        "python3 -c 'import os; os.setuid(12345)'",
        "python3 -c 'import os; os.setgid(12345)'",
        "python3 -c 'import os; os.setgroups([12345])'",
        "mknod device c 1 3",
        "mount -t tmpfs tmpfs .",
        "nice -n -5 sh -c 'test $(nice) -lt 0'",
    ] {
        let (inside, _) = spawner.run(&shell(&format!("{enter}{act}")), Some(&writing));
        assert_ne!(inside.status, ExitStatus::Code(0), "{act}: {}", inside.stdout);
    }
    for act in ["chown 12345 own && chown 0 own", "chmod 644 foreign", "mknod device c 1 3 && rm device"] {
        let (outside, _) = spawner.run(&shell(&format!("{enter}{act}")), None);
        assert_eq!(outside.status, ExitStatus::Code(0), "the control: {act}: {}", outside.stderr);
    }
    // Tools on files of its own, and the owners of other files.
    let all = "chown 0:0 own && chmod 600 own && cp -p own copy && tar cf t own && tar xf t && rm own && mv copy own && stat -c %u own foreign && \
               ./set-id -u && grep -c 'CapEff:.*[1-9a-f]' /proc/self/status";
    let (inside, _) = spawner.run(&shell(&format!("{enter}{all}")), Some(&writing));
    assert_eq!(inside.stdout, "0\n65534\n0\n0\n", "{}", inside.stderr);
    spawner.close();
}

//! Sandboxes of a root server have user ids of their own on the machine, and root's files all the same.

use super::gateway::{Spawner, pipe, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{Command, ExitStatus, NamespaceLayer, SpawnerEvent, SpawnerRequest, Uids};
use portcullis_protocol::path::Bytes;
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::policy::{Access, Policy};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::geteuid;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("uids::each_sandbox_of_root_has_a_user_id_of_its_own", each_sandbox_of_root_has_a_user_id_of_its_own),
    ("uids::files_of_root_are_the_sandboxes_own", files_of_root_are_the_sandboxes_own),
    ("uids::a_sandbox_reaches_no_process_of_another", a_sandbox_reaches_no_process_of_another),
    ("uids::what_a_sandbox_takes_is_counted_as_its_own", what_a_sandbox_takes_is_counted_as_its_own),
    ("uids::streams_are_opened_by_their_names", streams_are_opened_by_their_names),
    ("uids::a_file_system_without_maps_is_named", a_file_system_without_maps_is_named),
    ("uids::a_users_fuse_keeps_no_sandbox_from_its_own_user", a_users_fuse_keeps_no_sandbox_from_its_own_user),
    ("uids::a_root_without_maps_is_named", a_root_without_maps_is_named),
    ("uids::a_named_device_keeps_the_servers_user_id", a_named_device_keeps_the_servers_user_id),
    ("uids::a_range_that_is_used_up_refuses_a_start", a_range_that_is_used_up_refuses_a_start),
    ("uids::two_servers_share_no_user_id", two_servers_share_no_user_id),
];

/// Whether sandboxes can have user ids of their own here; says why not.
fn may_have(test: &str) -> bool {
    let may = geteuid().is_root() && uids(&Spawner::start()) == Uids::Own;
    if !may {
        println!("skipped: {test}: only root gives user ids, over a root that takes id-mapped mounts");
    }
    may
}

/// What a spawner said of them.
fn uids(spawner: &Spawner) -> Uids {
    match &spawner.namespaces {
        NamespaceLayer::Available { uids, .. } => uids.clone(),
        NamespaceLayer::Unavailable { reason, .. } => panic!("{reason}"),
    }
}

/// A workspace, and its policy.
struct Place {
    _directory: tempfile::TempDir,
    workspace: PathBuf,
    policy: Policy,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let workspace = directory.path().canonicalize().unwrap();
        let policy = policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write)]);
        Self { _directory: directory, workspace, policy }
    }

    fn inside(&self, script: &str) -> Command {
        shell(&format!("cd {} && {script}", self.workspace.display()))
    }
}

/// Starts a script and waits until it writes `ready`. Returns its init and its output.
pub(super) fn start(spawner: &mut Spawner, id: u64, command: &Command, policy: &Policy) -> (i32, BufReader<File>) {
    let (stdout, _stderr) = spawner.start_process(id, command, Some(policy));
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

/// All user and group ids that a process has, seen from the machine, supplementary groups included.
fn ids(process: i32) -> BTreeSet<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let lines = ["Uid:", "Gid:", "Groups:"].map(|name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap());
    lines.into_iter().flat_map(str::split_whitespace).map(|id| id.parse().unwrap()).collect()
}

fn only_id(process: i32) -> u32 {
    let ids = ids(process);
    assert_eq!(ids.len(), 1, "{ids:?}");
    ids.into_iter().next().unwrap()
}

fn program(init: i32) -> i32 {
    let children = fs::read_to_string(format!("/proc/{init}/task/{init}/children")).unwrap();
    children.split_whitespace().next().unwrap().parse().unwrap()
}

const WAIT: &str = "echo ready; exec sleep 1000";

fn each_sandbox_of_root_has_a_user_id_of_its_own() {
    if !may_have("each_sandbox_of_root_has_a_user_id_of_its_own") {
        return;
    }
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let mut seen = BTreeSet::new();
    // The first is forked for its start; the others were made ahead.
    for id in 1..=4 {
        let (init, _stdout) = start(&mut spawner, id, &shell(WAIT), &place.policy);
        let own = only_id(init);
        assert!(UidRange::DEFAULT.contains(own) && seen.insert(own), "{own} is another's: {seen:?}");
        assert_eq!(only_id(program(init)), own);
    }
    spawner.close();
    // The control: where the operator wants none.
    let mut spawner = Spawner::start_of(None);
    assert_eq!(uids(&spawner), Uids::Servers);
    let (init, _stdout) = start(&mut spawner, 1, &shell(WAIT), &place.policy);
    assert!(ids(init).contains(&0) && ids(program(init)).contains(&0));
    spawner.close();
}

fn files_of_root_are_the_sandboxes_own() {
    if !may_have("files_of_root_are_the_sandboxes_own") {
        return;
    }
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let secret = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| place.workspace.join(name);
    for (path, mode) in [(at("own"), 0o600), (at("program"), 0o700), (secret.path().join("file"), 0o400)] {
        fs::write(&path, "#!/bin/sh\necho run\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(secret.path(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::create_dir(at("group")).unwrap();
    fs::set_permissions(at("group"), fs::Permissions::from_mode(0o070)).unwrap();
    let script = format!(
        "id -u; id -g; ./program && cat own >/dev/null && echo more >>own && cat {0}/file >/dev/null && touch made && mkdir directory && \
         ln -s own link && ln own hard && mkfifo fifo && mknod node p && cp -p own copy && chown 0:0 made && chmod 2755 directory && \
         mv made moved && chmod 700 group && touch group/file && stat -c %u:%g own moved / /tmp",
        secret.path().display()
    );
    let (outcome, enforced) = spawner.run(&place.inside(&script), Some(&place.policy));
    assert!(enforced.own_uid, "{enforced:?}");
    assert_eq!(outcome.stdout, "0\n0\nrun\n0:0\n0:0\n0:0\n0:0\n", "{}", outcome.stderr);
    for name in ["own", "moved", "directory", "link", "fifo", "node", "copy", "group/file"] {
        let stat = fs::symlink_metadata(at(name)).unwrap();
        assert_eq!((stat.uid(), stat.gid()), (0, 0), "{name}");
    }
    assert_eq!(at("directory").metadata().unwrap().mode() & 0o7777, 0o2755);
    assert!(fs::read_to_string(at("own")).unwrap().ends_with("more\n"));
    // What is another user's stays that: no right comes with the map.
    std::os::unix::fs::chown(at("copy"), Some(12_345), Some(12_345)).unwrap();
    let (outcome, _) =
        spawner.run(&place.inside("stat -c %u copy; chmod 644 copy || cat copy || echo x >>copy"), Some(&place.policy));
    assert_eq!((outcome.stdout.as_str(), outcome.status), ("65534\n", ExitStatus::Code(2)), "{}", outcome.stderr);
    // The control: outside a user of the range has no right on root's files.
    let own = UidRange::DEFAULT.at(0).to_string();
    let as_user = |act: &str| {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", &own, "--regid", &own, "--clear-groups", "sh", "-c", act]).current_dir(&place.workspace);
        command.output().unwrap().status.success()
    };
    assert!(!as_user("cat own") && !as_user("touch made") && as_user("test -e /"));
    spawner.close();
}

fn a_sandbox_reaches_no_process_of_another() {
    if !may_have("a_sandbox_reaches_no_process_of_another") {
        return;
    }
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let (one, _one) = start(&mut spawner, 1, &shell(WAIT), &place.policy);
    let (other, _other) = start(&mut spawner, 2, &shell(WAIT), &place.policy);
    // As the user of each, without a sandbox: what is left is the kernel's judgement by user.
    let reaches = |user: u32, act: &str| {
        let user = user.to_string();
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "sh", "-c", act]);
        command.output().unwrap().status.success()
    };
    let (own, program) = (only_id(one), program(one));
    let signal = format!("kill -0 {program}");
    let look = format!("readlink /proc/{program}/cwd");
    assert!(reaches(own, &signal) && reaches(0, &look), "the control: its own user, and root");
    for act in [&signal, &look] {
        assert!(!reaches(only_id(other), act), "{act}");
    }
    spawner.close();
}

/// Signals that wait for processes of this user.
fn waiting() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let queue = status.lines().find_map(|line| line.strip_prefix("SigQ:")).unwrap();
    queue.trim().split('/').next().unwrap().parse().unwrap()
}

fn what_a_sandbox_takes_is_counted_as_its_own() {
    if !may_have("what_a_sandbox_takes_is_counted_as_its_own") {
        return;
    }
    /// More than all others of this user have.
    const MANY: u64 = 2000;
    let place = Place::new();
    let queue = format!(
        "import ctypes, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
libc = ctypes.CDLL(None, use_errno=True)
for _ in range({MANY}): assert libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0
print('ready', flush=True)
signal.pause()"
    );
    let script = super::gateway::command(&["/usr/bin/python3", "-c", &queue], &[("PATH", "/usr/bin:/bin")]);
    for (range, is_roots) in [(Some("2140000000-2140065535"), false), (None, true)] {
        let mut spawner = Spawner::start_of(range);
        let (_init, _stdout) = start(&mut spawner, 1, &script, &place.policy);
        assert_eq!(waiting() >= MANY, is_roots, "{range:?}: {}", waiting());
        spawner.close();
    }
}

fn streams_are_opened_by_their_names() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let (mut spawner, place) = (Spawner::start(), Place::new());
    let echo = "echo out >/dev/stdout; echo error >/dev/stderr; echo again >>/proc/self/fd/1";
    let (outcome, _) = spawner.run(&shell(echo), Some(&place.policy));
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("out\nagain\n", "error\n"));
    spawner.close();

    let mut spawner = Spawner::start();
    let request = |id, tty, script: &str| SpawnerRequest::Start {
        id,
        session: "s".to_owned(),
        tty,
        policy: Some(Bytes(place.policy.encode())),
        own_view: true,
        own_network: true,
        own_uid: true,
        allow_unprotected: true,
        limits: Default::default(),
        command: Bytes(super::gateway::encoded(&shell(script))),
    };
    // Memory without a name, and input by a pipe.
    let mut memory = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    let (input, pen) = pipe();
    rustix::io::write(&pen, b"given\n").unwrap();
    drop(pen);
    let output = || OwnedFd::from(memory.try_clone().unwrap());
    spawner.send(&request(1, false, "cat /dev/stdin; echo out >>/dev/stdout"), &[input, output(), output()]);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { status: ExitStatus::Code(0), .. }));
    memory.rewind().unwrap();
    let mut said = String::new();
    memory.read_to_string(&mut said).unwrap();
    assert_eq!(said, "given\nout\n");
    // A terminal.
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OwnedFd::from(File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap());
    let script = "tty; echo one >/dev/stdout; echo two >/dev/tty; echo three >$(tty); stat -c %u $(tty)";
    spawner.send(&request(2, true, script), &[terminal]);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { status: ExitStatus::Code(0), .. }));
    let mut lines = BufReader::new(File::from(master)).lines();
    let said: Vec<String> = (0..5).map(|_| lines.next().unwrap().unwrap()).collect();
    let owner = geteuid().as_raw().to_string();
    assert_eq!(said, ["/dev/console", "one", "two", "three", &owner]);
    spawner.close();
}

/// A script that mounts an overlay on a directory, with its layers in memory there.
fn overlay(lower: &str, on: &Path) -> String {
    let on = on.display();
    format!(
        "mount -t tmpfs tmpfs {on} && mkdir {on}/upper {on}/work {on}/all\n\
         mount -t overlay overlay -o lowerdir={lower},upperdir={on}/upper,workdir={on}/work {on}/all"
    )
}

/// Runs something in a sandbox that is root's, and what else the spawner said.
#[track_caller]
fn assert_roots(spawner: &mut Spawner, place: &Place, file_system: &str) {
    match uids(spawner) {
        Uids::Refused { reason } => {
            assert!(reason.contains(file_system) && reason.contains("takes no map of ids"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let (init, _stdout) = start(spawner, 1, &place.inside("echo content >made && echo ready && exec sleep 1000"), &place.policy);
    assert!(ids(init).contains(&0), "{:?}", ids(init));
    // It is confined as ever.
    assert_ne!(fs::read_link(format!("/proc/{init}/ns/user")).unwrap(), fs::read_link("/proc/self/ns/user").unwrap());
}

fn a_file_system_without_maps_is_named() {
    if !may_have("a_file_system_without_maps_is_named") {
        return;
    }
    let place = Place::new();
    let below = place.workspace.join("below");
    fs::create_dir(&below).unwrap();
    let mut spawner = Spawner::start_in(&overlay("/usr/share", &below));
    assert_roots(&mut spawner, &place, &format!("`{}/all` (overlay)", below.display()));
    assert_eq!(fs::metadata(place.workspace.join("made")).unwrap().uid(), 0);
    spawner.close();
    // The control: memory in the same place takes them, and so does a file system of the kernel below it.
    let mounts = format!("mount -t tmpfs tmpfs {0} && mkdir {0}/proc && mount -t proc proc {0}/proc", below.display());
    let mut spawner = Spawner::start_in(&mounts);
    assert_eq!(uids(&spawner), Uids::Own);
    let (outcome, enforced) =
        spawner.run(&place.inside("touch below/f && stat -c %u below below/f; ls below/proc"), Some(&place.policy));
    assert!(enforced.own_uid);
    assert_eq!(outcome.stdout, "0\n0\n", "{}", outcome.stderr);
    spawner.close();
}

fn a_users_fuse_keeps_no_sandbox_from_its_own_user() {
    if !may_have("a_users_fuse_keeps_no_sandbox_from_its_own_user") {
        return;
    }
    for (user, is_own) in [(1234, true), (0, false)] {
        let place = Place::new();
        let on = place.workspace.join("escape\x1b[2J\nline");
        fs::create_dir(&on).unwrap();
        // Whose process never answers.
        let settings = format!("fd=9,rootmode=40000,user_id={user},group_id={user}");
        let mounts = format!("exec 9<>/dev/fuse\nmount -i -t fuse -o {settings} fuse '{}'", on.display());
        let mut spawner = Spawner::start_in(&mounts);
        assert_eq!(uids(&spawner) == Uids::Own, is_own);
        let (outcome, enforced) = spawner.run(&place.inside("echo on"), Some(&place.policy));
        assert_eq!((outcome.stdout.as_str(), enforced.own_uid), ("on\n", is_own), "{}", outcome.stderr);
        spawner.close();
    }
}

fn a_root_without_maps_is_named() {
    if !may_have("a_root_without_maps_is_named") {
        return;
    }
    let (place, directory) = (Place::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let on = directory.path().canonicalize().unwrap();
    let all = on.join("all");
    let mounts = format!(
        "{}\nfor each in proc dev sys; do mount --rbind /$each {1}/$each; done\ncd {1} && pivot_root . . && umount -l . && cd /",
        overlay("/", &on),
        all.display()
    );
    let mut spawner = Spawner::start_in(&mounts);
    assert_roots(&mut spawner, &place, "`/` (overlay)");
    // Above the layer, and nothing on the machine's own disk.
    assert!(!place.workspace.join("made").exists());
    spawner.close();
}

fn a_named_device_keeps_the_servers_user_id() {
    if !may_have("a_named_device_keeps_the_servers_user_id") {
        return;
    }
    let mut spawner = Spawner::start();
    let with = |device: &str| policy(&[(Path::new("/"), Access::Read), (Path::new(device), Access::Write)]);
    for (device, is_own) in [("/dev/kmsg", false), ("/dev/null", true), ("/dev/shm", true)] {
        let (outcome, enforced) = spawner.run(&shell(&format!("id -u; test -w {device}")), Some(&with(device)));
        assert_eq!((outcome.stdout.as_str(), outcome.status), ("0\n", ExitStatus::Code(0)), "{device}: {}", outcome.stderr);
        assert_eq!(enforced.own_uid, is_own, "{device}");
    }
    spawner.close();
}

fn a_range_that_is_used_up_refuses_a_start() {
    if !may_have("a_range_that_is_used_up_refuses_a_start") {
        return;
    }
    let (mut spawner, place) = (Spawner::start_of(Some("70001-70002")), Place::new());
    let (one, _one) = start(&mut spawner, 1, &shell(WAIT), &place.policy);
    // The spare that waits gives way, also where it cannot serve.
    let mut networked = place.policy.clone();
    networked.network = portcullis_sandbox::policy::Network::Enabled;
    let (other, _other) = start(&mut spawner, 2, &shell(WAIT), &networked);
    assert_eq!(BTreeSet::from([only_id(one), only_id(other)]), BTreeSet::from([70_001, 70_002]));
    let failure = spawner.fail(&shell(WAIT), Some(&place.policy));
    assert!(failure.attempt.contains("--sandbox-uids") && failure.errno == libc_users(), "{failure:?}");
    // The control: one that ends gives its id back, to the next.
    let id = only_id(other);
    spawner.send(&SpawnerRequest::Signal { id: 2, signal: 9 }, &[]);
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { id: 2, .. }));
    let (next, _next) = start(&mut spawner, 3, &shell(WAIT), &place.policy);
    assert_eq!(only_id(next), id);
    spawner.close();
}

/// EUSERS.
fn libc_users() -> i32 {
    rustix::io::Errno::USERS.raw_os_error()
}

fn two_servers_share_no_user_id() {
    if !may_have("two_servers_share_no_user_id") {
        return;
    }
    const RANGE: Option<&str> = Some("70011-70011");
    let place = Place::new();
    let mut first = Spawner::start_of(RANGE);
    assert_eq!(uids(&first), Uids::Own);
    let mut second = Spawner::start_of(RANGE);
    assert!(matches!(uids(&second), Uids::Refused { reason } if reason.contains("70011-70011")), "{:?}", second.namespaces);
    let (_, enforced) = second.run(&shell("true"), Some(&place.policy));
    assert!(!enforced.own_uid, "the start reports it, and its sandboxes have root's id");
    second.close();
    // The lock goes with a spawner that is killed; its id is free when all that had it are dead.
    let (init, _stdout) = start(&mut first, 1, &shell(WAIT), &place.policy);
    assert_eq!(only_id(init), 70_011);
    rustix::process::kill_process(rustix::process::Pid::from_raw(first.pid()).unwrap(), rustix::process::Signal::KILL).unwrap();
    first.process.wait().unwrap();
    let mut third = Spawner::start_of(RANGE);
    assert_eq!(uids(&third), Uids::Own);
    let (init, _stdout) = start(&mut third, 1, &shell(WAIT), &place.policy);
    assert_eq!(only_id(init), 70_011);
    third.close();
    // The control: a process of another origin that has the id.
    let mut stranger = std::process::Command::new("setpriv").args(["--reuid", "70011", "sleep", "1000"]).spawn().unwrap();
    while !ids(i32::try_from(stranger.id()).unwrap()).contains(&70_011) {
        std::thread::yield_now();
    }
    let taken = Spawner::start_of(RANGE);
    assert!(matches!(uids(&taken), Uids::Refused { .. }), "{:?}", taken.namespaces);
    taken.close();
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

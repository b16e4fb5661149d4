//! The open descriptors of each role when it uses data of a client, and that no magic link leads a start past its policy.

use super::gateway::{Channel, Spawner, command, policy, shell};
use super::place::Place;
use crate::Test;
use portcullis_protocol::helper::{Command, ExitStatus, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, Policy};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

pub(crate) const TESTS: &[Test] = &[
    ("open::planted_descriptors_reach_no_role", planted_descriptors_reach_no_role),
    ("open::a_launcher_has_only_its_own_at_execve", a_launcher_has_only_its_own_at_execve),
    ("open::a_start_fails_if_anything_stays_open", a_start_fails_if_anything_stays_open),
    ("open::no_directory_behind_a_magic_link_is_entered", no_directory_behind_a_magic_link_is_entered),
    ("open::no_program_behind_a_magic_link_is_executed", no_program_behind_a_magic_link_is_executed),
    ("open::plain_links_of_procfs_and_dev_go_on_working", plain_links_of_procfs_and_dev_go_on_working),
];

/// A file that the spawner inherits under a low and a high number.
struct Planted {
    path: PathBuf,
    low: OwnedFd,
    _high: OwnedFd,
    _directory: tempfile::TempDir,
}

impl Planted {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().canonicalize().unwrap().join("planted");
        fs::write(&path, "").unwrap();
        let file = File::open(&path).unwrap();
        let at = |least| {
            let copy = rustix::io::fcntl_dupfd_cloexec(&file, least).unwrap();
            rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
            copy
        };
        Self { path, low: at(5), _high: at(900), _directory: directory }
    }

    fn is_in(&self, process: i32) -> bool {
        open(process).values().any(|target| *target == self.path)
    }
}

/// The descriptors of a process and their targets; none of a process that has ended.
fn open(process: i32) -> BTreeMap<i32, PathBuf> {
    let entries = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let number = |entry: &fs::DirEntry| entry.file_name().to_str().unwrap().parse().unwrap();
    entries.filter_map(|entry| Some((number(&entry), fs::read_link(entry.path()).ok()?))).collect()
}

/// All but the remover, which a spawner always has.
fn children(process: u32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    let is_remover = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "remover\n");
    text.split_whitespace().map(|pid| pid.parse().unwrap()).filter(|pid| !is_remover(pid)).collect()
}

/// Only root may look at processes that hide their memory.
fn may_look(test: &str) -> bool {
    let may = geteuid().is_root();
    if !may {
        println!("skipped: {test}: only root may list the descriptors of the helpers");
    }
    may
}

fn started(spawner: &mut Spawner) -> i32 {
    match spawner.event() {
        SpawnerEvent::Started { pid, .. } => pid,
        other => panic!("{other:?}"),
    }
}

fn reading() -> Policy {
    policy(&[(Path::new("/"), Access::Read)])
}

/// Everything beyond the standard descriptors must be of a kind without a path: a socket, a pipe, an event; of a spare also the `/proc`
/// by which it will map its ids, and what it has made for the view and not attached yet.
#[track_caller]
fn assert_only_own(role: &str, process: i32) {
    let open = open(process);
    println!("{role}: {open:?}");
    let kinds = ["socket:[", "pipe:[", "anon_inode:"];
    let is_kind = |target: &PathBuf| kinds.iter().any(|kind| target.to_string_lossy().starts_with(kind));
    let is_spares = |number: &i32, target: &PathBuf| {
        role == "spare" && (target == Path::new("/proc") || target == Path::new("/") && is_detached(process, *number))
    };
    let is_own = |number: &i32, target: &PathBuf| is_kind(target) || is_spares(number, target);
    assert!(open.iter().all(|(number, target)| *number < 3 || is_own(number, target)), "{role}: {open:?}");
    assert!(open.len() > 3, "{role}: {open:?}");
}

/// Whether a descriptor stands for a mount that is attached nowhere, so that no name leads from it to the machine.
fn is_detached(process: i32, number: i32) -> bool {
    let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).unwrap();
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).unwrap().trim();
    let mounts = fs::read_to_string(format!("/proc/{process}/mountinfo")).unwrap();
    mounts.lines().all(|line| line.split(' ').next() != Some(mount))
}

fn planted_descriptors_reach_no_role() {
    if !may_look("planted_descriptors_reach_no_role") {
        return;
    }
    let planted = Planted::new();
    let mut spawner = Spawner::start();
    assert!(planted.is_in(spawner.pid()), "the control: the spawner has it");
    let waits = shell("echo ready; exec sleep 1000");
    let mut outputs = Vec::new();
    for (id, policy, role) in [(1, Some(reading()), "init"), (2, None, "keeper"), (3, Some(reading()), "init that was a spare")] {
        let (stdout, stderr) = spawner.start_process(id, &waits, policy.as_ref());
        let keeper = started(&mut spawner);
        let mut stdout = BufReader::new(stdout);
        stdout.read_line(&mut String::new()).unwrap();
        assert_only_own(role, keeper);
        let [program] = children(keeper.unsigned_abs())[..] else { panic!("one program") };
        assert!(!planted.is_in(program), "{role}'s program");
        outputs.push((stdout, stderr, keeper));
        // Until two spares wait, which comes after the first.
        while role == "init"
            && children(spawner.pid().unsigned_abs()).iter().filter(|pid| **pid != keeper && !planted.is_in(**pid)).count() < 2
        {
            std::thread::yield_now();
        }
    }
    let remover = super::races::remover(&spawner);
    assert!(!planted.is_in(remover));
    assert_only_own("remover", remover);
    // Until all is made and one waits for its order. Spares are made anew when mounts of the machine change, which other programs do.
    let spares = || {
        let children = children(spawner.pid().unsigned_abs()).into_iter();
        children.filter(|pid| outputs.iter().all(|(_, _, keeper)| keeper != pid)).collect::<Vec<_>>()
    };
    let waits = |spare: &i32| fs::read_to_string(format!("/proc/{spare}/syscall")).unwrap_or_default().starts_with(RECVMSG);
    let mut looked = BTreeSet::new();
    while looked.len() < 2 {
        match spares().into_iter().find(|spare| !looked.contains(spare) && waits(spare)) {
            Some(spare) => {
                assert!(!planted.is_in(spare));
                assert_only_own("spare", spare);
                looked.insert(spare);
            }
            None => std::thread::yield_now(),
        }
    }
    spawner.close();

    // Workers that have not been told their policies, in namespaces of their own and not.
    for own_view in [false, true] {
        let spawner = Spawner::start();
        if own_view && !matches!(spawner.namespaces, NamespaceLayer::Available { .. }) {
            println!("skipped: this machine gives no namespaces");
            continue;
        }
        let ((_requests, theirs), (_control, their_control)) = (Channel::pair(), Channel::pair());
        spawner.send(&SpawnerRequest::Worker { id: 7, own_view }, &[theirs, their_control]);
        let worker = loop {
            if let [worker] = children(spawner.pid().unsigned_abs())[..]
                && fs::read(format!("/proc/{worker}/cmdline")).is_ok_and(|line| line.windows(6).any(|part| part == b"worker"))
            {
                break worker;
            }
            std::thread::yield_now();
        };
        // It sleeps until it is told its policy, and has closed the list that it looked at by then.
        let sleeps = || {
            let stat = fs::read_to_string(format!("/proc/{worker}/stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
        };
        let is_settled = || {
            let open = open(worker);
            let is_null = open.get(&0).is_some_and(|target| target == Path::new("/dev/null"));
            is_null && !planted.is_in(worker) && !open.values().any(|target| target.ends_with("fd"))
        };
        while !(sleeps() && is_settled() && sleeps()) {
            std::thread::yield_now();
        }
        assert_only_own("worker", worker);
        assert!(planted.low.as_raw_fd() < 900);
        spawner.close();
    }
}

/// Traces a spawner and its forks, and changes the results of system calls. None where tracing is not available.
fn strace(spawner: &Spawner, inject: &str, test: &str) -> Option<Child> {
    let (pid, log) = (spawner.pid().to_string(), "/dev/null");
    let arguments = ["-f", "-o", log, "-e", "trace=execve,close_range", "-e", &format!("inject={inject}"), "-p", &pid];
    let Ok(mut strace) = std::process::Command::new("strace").args(arguments).stderr(Stdio::piped()).spawn() else {
        println!("skipped: {test}: strace is not installed");
        return None;
    };
    let mut words = BufReader::new(strace.stderr.take().unwrap());
    let mut line = String::new();
    words.read_line(&mut line).unwrap();
    // It goes on writing there.
    strace.stderr = Some(words.into_inner());
    if !line.contains("attached") {
        println!("skipped: {test}: {line}");
        strace.wait().unwrap();
        return None;
    }
    Some(strace)
}

fn detach(mut strace: Child) {
    kill_process(Pid::from_child(&strace), Signal::INT).unwrap();
    strace.wait().unwrap();
}

fn a_launcher_has_only_its_own_at_execve() {
    if !may_look("a_launcher_has_only_its_own_at_execve") {
        return;
    }
    for policy in [Some(reading()), None] {
        let _planted = Planted::new();
        let mut spawner = Spawner::start();
        let Some(strace) = strace(&spawner, "execve:error=EACCES:signal=SIGSTOP", "a_launcher_has_only_its_own_at_execve") else {
            return;
        };
        let _outputs = spawner.start_process(1, &command(&["/bin/true"], &[]), policy.as_ref());
        // Spawner, keeper, launcher.
        let launcher = loop {
            let below: Vec<i32> =
                children(spawner.pid().unsigned_abs()).into_iter().flat_map(|pid| children(pid.unsigned_abs())).collect();
            let is_stopped = |pid: &&i32| {
                let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
                // At execve, or by the signal that comes when it has failed: then no call is named.
                let (status, call) = (read("status"), read("syscall"));
                status.contains("(tracing stop)") && [EXECVE, "-1 "].iter().any(|number| call.starts_with(number))
            };
            if let Some(launcher) = below.iter().find(is_stopped) {
                break *launcher;
            }
            std::thread::yield_now();
        };
        let open = open(launcher);
        println!("launcher: {open:?}");
        let beyond: Vec<_> = open.iter().filter(|(number, _)| **number > 2).collect();
        let [(_, pipe)] = beyond[..] else { panic!("only the result pipe: {open:?}") };
        assert!(pipe.to_string_lossy().starts_with("pipe:["), "{open:?}");
        detach(strace);
        // It may have gone on with the end of the tracer.
        let _ended = kill_process(Pid::from_raw(launcher).unwrap(), Signal::CONT);
        match spawner.event() {
            // The error comes from the tracer: the injected one, or ENOSYS if it detaches before.
            SpawnerEvent::StartFailed { failure, .. } => assert_eq!(failure.step, Step::Execute),
            other => panic!("{other:?}"),
        }
        spawner.close();
    }
}

/// The number of execve(2), as `/proc/PID/syscall` begins with it.
const EXECVE: &str = if cfg!(target_arch = "x86_64") { "59 " } else { "221 " };

/// The number of recvmsg(2), likewise.
const RECVMSG: &str = if cfg!(target_arch = "x86_64") { "47 " } else { "212 " };

/// Inits that a spawner makes ahead (`MOST` in helpers/src/spare.rs).
const MOST_SPARES: usize = 2;

fn a_start_fails_if_anything_stays_open() {
    if !may_look("a_start_fails_if_anything_stays_open") {
        return;
    }
    for policy in [Some(reading()), None] {
        let planted = Planted::new();
        let mut spawner = Spawner::start();
        // close_range(2) succeeds and closes nothing.
        let Some(strace) = strace(&spawner, "close_range:retval=0", "a_start_fails_if_anything_stays_open") else { return };
        let failure = spawner.fail(&command(&["/bin/true"], &[]), policy.as_ref());
        assert_eq!((failure.step, failure.errno), (Step::Machine, 0), "{failure}");
        assert!(
            failure.attempt.starts_with("start: descriptor ")
                && failure.attempt.contains("is open before the client's command is decoded"),
            "{failure}"
        );
        detach(strace);
        // The control: it is the closing that makes the difference. Spares that were made under the tracer serve first and fail too;
        // each is used once.
        let true_program = command(&["/bin/true"], &[]);
        let failures = (0..=MOST_SPARES).map_while(|_| spawner.try_to_run(&true_program, policy.as_ref()).err());
        let failures: Vec<_> = failures.collect();
        assert!(failures.iter().all(|failure| failure.attempt.starts_with("start: descriptor ")), "{failures:?}");
        assert!(failures.len() <= if policy.is_some() { MOST_SPARES } else { 0 }, "{failures:?}");
        spawner.close();
        drop(planted);
    }
}

/// A workspace with a protected file, and a denied file beside it.
fn workspace() -> Place {
    let place = Place::with(&["ws/.git", "denied"]);
    fs::write(place.at("ws/.git/config"), "old").unwrap();
    fs::write(place.at("denied/file"), "SECRET").unwrap();
    place
}

impl Place {
    fn policy(&self) -> Policy {
        let (workspace, denied) = (self.at("ws"), self.at("denied"));
        policy(&[(Path::new("/"), Access::Read), (&workspace, Access::Write), (&denied, Access::Deny)])
    }

    /// Reads a denied file and writes a protected one, from its own location.
    fn script(&self) -> String {
        let top = self.top().display();
        format!("cat .{top}/denied/file denied/file ../denied/file; echo new > .{top}/ws/.git/config; echo new > .git/config; :")
    }
}

fn in_directory(cwd: &str, script: &str) -> Command {
    Command { cwd: AbsolutePath::new(cwd).unwrap(), ..shell(script) }
}

fn no_directory_behind_a_magic_link_is_entered() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let numbered = (0..64).flat_map(|number| {
        ["/proc/self/fd", "/dev/fd", "/proc/thread-self/fd", "/proc/self/task/2/fd"].map(|place| format!("{place}/{number}"))
    });
    let named =
        ["/proc/self/root", "/proc/self/cwd", "/proc/1/root", "/proc/1/cwd", "/proc/thread-self/cwd", "/proc/self/root/tmp"];
    let link = place.at("ws/link");
    symlink("/proc/self/cwd", &link).unwrap();
    let all = numbered.chain(named.map(str::to_owned)).chain([link.to_str().unwrap().to_owned()]);
    let mut is_named = 0;
    for (nth, cwd) in all.enumerate() {
        // Each of the four ways to number a descriptor at some numbers, and one of them at all.
        if nth < 256 && nth % 4 != 0 && nth > 32 {
            continue;
        }
        let failure = spawner.fail(&in_directory(&cwd, &place.script()), Some(&place.policy()));
        // Nothing is open under most numbers, and the thread that is named above may be none of its own.
        let is_absent = failure.errno == 2 && cwd.contains("/fd/");
        is_named += usize::from(!is_absent);
        let is_refused = failure.attempt.contains("a magic link of procfs; name the directory by its real path");
        assert!(is_absent || is_refused, "{cwd}: {failure}");
    }
    assert!(is_named >= 7 + 3, "those by name, and the standard descriptors: {is_named}");
    assert_eq!(fs::read_to_string(place.at("ws/.git/config")).unwrap(), "old");
    // The control: without a sandbox they lead there, and the script reads and writes.
    let (outcome, _) = spawner.run(&in_directory("/proc/self/root", &place.script()), None);
    assert!(outcome.stdout.contains("SECRET"), "{}", outcome.stderr);
    assert_eq!(fs::read_to_string(place.at("ws/.git/config")).unwrap(), "new\n");
    spawner.close();
}

fn no_program_behind_a_magic_link_is_executed() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let script = |name: &str, line: &str| {
        let path = place.at("ws").join(name);
        fs::write(&path, line).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let by_root = script("by_root", "#!/proc/self/root/bin/sh\necho ran\n");
    let nested = script("nested", &format!("#!{by_root}\n"));
    // A program whose interpreter of ELF is behind such a link: same length, or the file would change its shape.
    let mut elf = fs::read("/bin/true").unwrap();
    let at = elf.windows(4).position(|part| part == b"/lib").unwrap();
    let length = elf[at..].iter().position(|byte| *byte == 0).unwrap();
    let short = b"/proc/self/root/x";
    assert!(short.len() < length, "the interpreter's path is long enough to be replaced");
    elf[at..at + length].fill(0);
    elf[at..at + short.len()].copy_from_slice(short);
    let patched = place.at("ws/elf");
    fs::write(&patched, elf).unwrap();
    fs::set_permissions(&patched, fs::Permissions::from_mode(0o755)).unwrap();
    let programs = [
        "/proc/self/root/bin/true",
        "/proc/self/fd/0",
        "/dev/fd/1",
        "/proc/self/exe",
        "/proc/1/root/bin/true",
        &by_root,
        &nested,
    ]
    .map(str::to_owned)
    .into_iter()
    .chain([patched.to_str().unwrap().to_owned()]);
    for program in programs {
        let failure = spawner.fail(&command(&[&program], &[]), Some(&place.policy()));
        let text = failure.to_string();
        assert!(text.contains("is reached through `/proc/") && text.contains("a magic link of procfs"), "{program}: {text}");
    }
    // A folder of PATH, too.
    let failure = spawner.fail(&command(&["true"], &[("PATH", "/nowhere:/proc/self/root/bin")]), Some(&place.policy()));
    assert!(failure.attempt.starts_with("start `true`: it is reached through `/proc/"), "{failure}");
    // The control: without a sandbox they run.
    for program in ["/proc/self/root/bin/true", &by_root] {
        assert_eq!(spawner.run(&command(&[program], &[]), None).0.status, ExitStatus::Code(0), "{program}");
    }
    spawner.close();
}

fn plain_links_of_procfs_and_dev_go_on_working() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let run = |spawner: &mut Spawner, command: &Command| spawner.run(command, Some(&place.policy())).0;
    let env = place.at("ws/env");
    fs::write(&env, "#!/usr/bin/env sh\necho by env\n").unwrap();
    fs::set_permissions(&env, fs::Permissions::from_mode(0o755)).unwrap();
    let outcome = run(&mut spawner, &command(&[env.to_str().unwrap()], &[("PATH", "/usr/bin:/bin")]));
    assert_eq!(outcome.stdout, "by env\n", "{}", outcome.stderr);
    for (cwd, script) in
        [("/proc/self", "test -e status"), ("/", "cat /dev/stdin < /etc/passwd"), ("/", "cat /dev/fd/0 < /etc/passwd")]
    {
        let outcome = run(&mut spawner, &in_directory(cwd, script));
        assert_eq!(outcome.status, ExitStatus::Code(0), "{script}: {}", outcome.stderr);
    }
    spawner.close();
}

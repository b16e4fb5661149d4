//! Processes and their end.

use super::gateway::{Channel, Outcome, Spawner, by_hand, command, pipe, policy, shell, start_role};
use crate::Test;
use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{
    BUILD, Command, Enforced, ExitStatus, HEADER, HIDDEN_FLAG, Role, SpawnerEvent, SpawnerRequest, Step, StepFailed, encode,
};
use portcullis_protocol::limit::{ProcessLimits, SessionLimits};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use portcullis_sandbox::policy::Access;
use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

pub(crate) const TESTS: &[Test] = &[
    ("spawner::a_start_by_hand_is_refused", a_start_by_hand_is_refused),
    ("spawner::another_build_is_refused", another_build_is_refused),
    ("spawner::exit_codes_and_output", exit_codes_and_output),
    ("spawner::signals", signals),
    ("spawner::the_environment_is_exact_and_arg0_is_only_a_name", the_environment_is_exact_and_arg0_is_only_a_name),
    ("spawner::programs_are_searched_as_execvp_does", programs_are_searched_as_execvp_does),
    ("spawner::starts_that_fail_say_why", starts_that_fail_say_why),
    ("spawner::only_the_standard_descriptors_are_open", only_the_standard_descriptors_are_open),
    ("spawner::signal_state_is_that_of_a_shell", signal_state_is_that_of_a_shell),
    ("spawner::a_terminal_controls_its_session", a_terminal_controls_its_session),
    ("spawner::a_process_without_a_terminal_gets_none_to_write_to", a_process_without_a_terminal_gets_none_to_write_to),
    ("spawner::a_thousand_quick_programs_in_order", a_thousand_quick_programs_in_order),
    ("spawner::a_policy_confines_a_process", a_policy_confines_a_process),
    ("spawner::a_writable_policy_is_refused_unless_waived", a_writable_policy_is_refused_unless_waived),
];

pub(crate) fn done(stdout: &str) -> Outcome {
    Outcome { stdout: stdout.to_owned(), stderr: String::new(), status: ExitStatus::Code(0) }
}

fn a_start_by_hand_is_refused() {
    for arguments in [[HIDDEN_FLAG, "spawner", BUILD], [HIDDEN_FLAG, "worker", BUILD], [HIDDEN_FLAG, "nonsense", BUILD]] {
        let (status, text) = by_hand(&arguments);
        assert_eq!(status, Some(122), "{arguments:?}");
        assert!(text.contains("never by people") && text.lines().count() == 1, "{text}");
    }
    assert_eq!(by_hand(&[HIDDEN_FLAG]).0, Some(122));
}

fn another_build_is_refused() {
    let (_channel, theirs) = Channel::pair();
    let mut by_argument = start_role(Role::Spawner, "other", theirs);
    assert_eq!(by_argument.wait().unwrap().code(), Some(122));
    let (mut channel, theirs) = Channel::pair();
    let mut by_hello = start_role(Role::Spawner, BUILD, theirs);
    channel.send(
        &SpawnerRequest::Hello {
            build: "other".to_owned(),
            session_limits: SessionLimits::default(),
            bounds: Default::default(),
            records: None,
            uids: None,
        },
        b"",
        &[],
    );
    assert_eq!(channel.expect::<SpawnerEvent>(), SpawnerEvent::WrongBuild { build: BUILD.to_owned() });
    assert!(channel.receive().is_none());
    by_hello.wait().unwrap();
}

fn exit_codes_and_output() {
    let mut spawner = Spawner::start();
    assert_eq!(spawner.run(&command(&["/bin/true"], &[]), None), (done(""), Enforced::default()));
    assert_eq!(spawner.run(&command(&["/bin/false"], &[]), None).0.status, ExitStatus::Code(1));
    let (outcome, _none) = spawner.run(&shell("echo out; echo err >&2; exit 7"), None);
    let expect = Outcome { stdout: "out\n".to_owned(), stderr: "err\n".to_owned(), status: ExitStatus::Code(7) };
    assert_eq!(outcome, expect);
    spawner.close();
}

fn signals() {
    let mut spawner = Spawner::start();
    // By its own hand, by ours, and with a child that would outlive its parent.
    assert_eq!(spawner.run(&shell("kill -TERM $$"), None).0.status.code(), 143);
    for (signal, script) in [(9, "echo on; exec sleep 1000"), (2, "echo on; exec sleep 1000"), (9, "sleep 1000 & echo on; wait")]
    {
        let (stdout, _stderr) = spawner.start_process(1, &shell(script), None);
        assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 1, .. }));
        let mut stdout = BufReader::new(stdout);
        stdout.read_line(&mut String::new()).unwrap();
        spawner.send(&SpawnerRequest::Signal { id: 1, signal }, &[]);
        assert_eq!(spawner.event(), ended(1, ExitStatus::Signal(signal)));
        // The end of the output: nobody of the group is left.
        assert_eq!(stdout.read_line(&mut String::new()).unwrap(), 0);
    }
    // Of ended and unknown processes nothing is said.
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    spawner.send(&SpawnerRequest::Signal { id: 99, signal: 9 }, &[]);
    assert_eq!(spawner.run(&command(&["/bin/true"], &[]), None).0, done(""));
    spawner.close();
}

fn the_environment_is_exact_and_arg0_is_only_a_name() {
    let mut spawner = Spawner::start();
    let run = command(&["env"], &[("PATH", "/nowhere:/usr/bin:/bin"), ("B", "2"), ("A", "x=y")]);
    assert_eq!(spawner.run(&run, None).0, done("PATH=/nowhere:/usr/bin:/bin\nB=2\nA=x=y\n"));
    let mut named = shell("echo $0; cat /proc/$$/comm; pwd");
    named.argv[2] = Bytes(b"tr '\\0' '\\n' < /proc/$$/cmdline | head -1; pwd".to_vec());
    named.arg0 = Some(Bytes(b"another name".to_vec()));
    named.cwd = AbsolutePath::new("/usr/bin/..").unwrap();
    assert_eq!(spawner.run(&named, None).0, done("another name\n/usr\n"));
    spawner.close();
}

fn programs_are_searched_as_execvp_does() {
    let mut spawner = Spawner::start();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, mode, text) in [("denied/prog", 0o644, "#!/bin/sh\n"), ("found/prog", 0o755, "echo no interpreter line $1\n")] {
        std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        std::fs::write(at(name), text).unwrap();
        std::fs::set_permissions(at(name), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let [denied, found] = ["denied", "found"].map(|name| at(name).display().to_string());
    let search = |path: &str| command(&["prog", "x"], &[("PATH", path)]);
    assert_eq!(spawner.run(&search(&format!("/nowhere:{denied}:{found}")), None).0, done("no interpreter line x\n"));
    assert_eq!(spawner.fail(&search(&format!("{denied}:/nowhere")), None).errno, 13);
    assert_eq!(spawner.fail(&search("/nowhere:/dev/null"), None).errno, 2);
    // An empty folder in PATH is the working directory, and a name with a slash starts there too.
    for (program, path) in [("prog", ":/nowhere"), ("./prog", "/nowhere"), ("../found/prog", "/nowhere")] {
        let mut here = command(&[program, "x"], &[("PATH", path)]);
        here.cwd = AbsolutePath::new(at("found")).unwrap();
        assert_eq!(spawner.run(&here, None).0, done("no interpreter line x\n"), "{program}");
    }
    // Without a PATH, where the C library looks.
    assert_eq!(spawner.run(&command(&["true"], &[]), None).0, done(""));
    spawner.close();
}

fn starts_that_fail_say_why() {
    let mut spawner = Spawner::start();
    let missing = spawner.fail(&command(&["/nonexistent"], &[]), None);
    let expect = StepFailed { step: Step::Execute, attempt: "start `/nonexistent`".to_owned(), errno: 2, denial: None };
    assert_eq!(missing, expect);
    assert_eq!(missing.to_string(), "start `/nonexistent`: No such file or directory (os error 2)");
    assert_eq!(spawner.fail(&command(&["/etc"], &[]), None).errno, 13);
    assert_eq!(spawner.fail(&command(&[""], &[]), None).attempt, "missing program");
    assert_eq!(spawner.fail(&command(&["/bin/echo", "a\0b"], &[]), None).step, Step::Execute);
    for (cwd, errno) in [("/no/where", 2), ("/etc/passwd", 20)] {
        let mut elsewhere = command(&["/bin/true"], &[]);
        elsewhere.cwd = AbsolutePath::new(cwd).unwrap();
        let failure = spawner.fail(&elsewhere, None);
        assert_eq!((failure.attempt.as_str(), failure.errno), (format!("change to directory `{cwd}`").as_str(), errno));
    }
    // A failed start leaves no trace: the id is free, and no exit is reported.
    assert_eq!(spawner.run(&command(&["/bin/true"], &[]), None).0, done(""));
    spawner.close();
}

fn only_the_standard_descriptors_are_open() {
    let mut spawner = Spawner::start();
    let (outcome, _none) = spawner.run(&shell("echo /proc/$$/fd/*"), None);
    let names: Vec<&str> = outcome.stdout.split_whitespace().filter_map(|path| path.rsplit('/').next()).collect();
    // The shell itself holds a directory open while it lists, if it lists by itself; that one is not inherited.
    assert!(names.starts_with(&["0", "1", "2"]) && names.len() <= 4, "{names:?}");
    let (outcome, _none) =
        spawner.run(&shell("for n in 3 4 5 6 7 8 9; do test -e /proc/$$/fd/$n && readlink /proc/$$/fd/$n; done; :"), None);
    assert_eq!(outcome, done(""));
    spawner.close();
}

fn signal_state_is_that_of_a_shell() {
    let mut spawner = Spawner::start();
    let (outcome, _none) = spawner.run(&command(&["/bin/grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"], &[]), None);
    for line in outcome.stdout.lines() {
        assert!(line.ends_with("\t0000000000000000"), "{line}");
    }
    assert_eq!(outcome.stdout.lines().count(), 2);
    spawner.close();
}

/// A terminal: its other end, its path, and itself.
fn terminal() -> (File, CString, OwnedFd) {
    let master = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
    let terminal = rustix::fs::open(name.as_c_str(), flags, rustix::fs::Mode::empty()).unwrap();
    (master.into(), name, terminal)
}

fn a_terminal_controls_its_session() {
    for policy in [None, Some(policy(&[(Path::new("/"), Access::Read)]))] {
        controlled_by_its_terminal(policy.map(|policy| Bytes(policy.encode())));
    }
}

fn controlled_by_its_terminal(policy: Option<Bytes>) {
    let mut spawner = Spawner::start();
    let (mut master, _name, terminal) = terminal();
    let script = "test -t 0 && test -t 1 && test -t 2 && echo > /dev/tty && exec cat";
    let command = encode(&shell(script), b"", 0).unwrap()[HEADER..].to_vec();
    let request = SpawnerRequest::Start {
        id: 3,
        session: "s".to_owned(),
        tty: true,
        policy,
        own_view: false,
        own_network: false,
        own_uid: true,
        allow_unprotected: false,
        limits: ProcessLimits::default(),
        command: Bytes(command),
    };
    spawner.send(&request, &[terminal]);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { id: 3, .. }));
    let mut line = [0; 2];
    master.read_exact(&mut line).unwrap();
    // The terminal's echo, and what cat says: then it runs, and every check before it has passed.
    master.write_all(b"on\n").unwrap();
    let mut lines = [0; 8];
    master.read_exact(&mut lines).unwrap();
    assert_eq!(&lines, b"on\r\non\r\n");
    // The terminal's interrupt character reaches the group, because the terminal controls it.
    master.write_all(&[3]).unwrap();
    assert_eq!(spawner.event(), ended(3, ExitStatus::Signal(2)));
    spawner.close();
}

fn a_process_without_a_terminal_gets_none_to_write_to() {
    let read_only = policy(&[(Path::new("/"), Access::Read)]);
    for policy in [None, Some(&read_only)] {
        let mut spawner = Spawner::start();
        let (mut master, name, _terminal) = terminal();
        // Opening a terminal for reading makes it that of a session that has none; then /dev/tty is the same terminal.
        let script = format!("exec 3< {} && echo through > /dev/tty", name.to_str().unwrap());
        let (outcome, _enforced) = spawner.run(&shell(&script), policy);
        assert_eq!(outcome.status == ExitStatus::Code(0), policy.is_none(), "{outcome:?}");
        let waiting = rustix::io::ioctl_fionread(&master).unwrap();
        if policy.is_none() {
            let mut line = [0; 9];
            master.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"through\r\n");
        } else {
            assert_eq!(waiting, 0);
        }
        spawner.close();
    }
}

fn a_thousand_quick_programs_in_order() {
    const PROGRAMS: u64 = 1000;
    let mut spawner = Spawner::start();
    let mut waiting = std::collections::HashSet::new();
    let mut ended = 0;
    let mut next = 0;
    while ended < PROGRAMS {
        // Sixteen at once, so that the sockets never fill.
        while next < PROGRAMS && next - ended < 16 {
            let outputs = spawner.start_process(next, &command(&["/bin/true"], &[]), None);
            drop(outputs);
            next += 1;
        }
        match spawner.event() {
            SpawnerEvent::Started { id, .. } => assert!(waiting.insert(id)),
            SpawnerEvent::Exited { id, status, .. } => {
                assert!(waiting.remove(&id), "{id} ended before it was started");
                assert_eq!(status, ExitStatus::Code(0));
                ended += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    let left = super::races::children(spawner.pid());
    assert!(left.into_iter().all(|pid| pid == super::races::remover(&spawner)));
    spawner.close();
}

fn a_policy_confines_a_process() {
    let mut spawner = Spawner::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f");
    std::fs::write(&file, "old").unwrap();
    let read_only = policy(&[(Path::new("/"), Access::Read)]);
    let script = |act: &str| shell(&format!("{act} {} && cat {}", file.display(), file.display()));
    let (outcome, enforced) = spawner.run(&script("test -r"), Some(&read_only));
    assert_eq!(outcome, done("old"));
    assert!(enforced.landlock_abi >= 3 && !enforced.seccomp.is_empty() && enforced.missing.is_empty(), "{enforced:?}");
    assert_ne!(spawner.run(&script("echo new >"), Some(&read_only)).0.status, ExitStatus::Code(0));
    assert_ne!(spawner.run(&script("chmod 600"), Some(&read_only)).0.status, ExitStatus::Code(0));
    assert_eq!(std::fs::read(&file).unwrap(), b"old");
    // The control.
    assert_eq!(spawner.run(&script("echo new >"), None).0, done("new\n"));
    // What fails inside still says what failed.
    assert_eq!(spawner.fail(&command(&["/nonexistent"], &[]), Some(&read_only)).errno, 2);
    spawner.close();
}

fn a_writable_policy_is_refused_unless_waived() {
    let mut spawner = Spawner::start();
    let folder = tempfile::tempdir().unwrap();
    let writable = policy(&[(Path::new("/"), Access::Read), (folder.path(), Access::Write)]);
    let (outcome, enforced) = spawner.run(&shell(&format!("echo x > {}/f", folder.path().display())), Some(&writable));
    assert_eq!(outcome, done(""));
    assert!(enforced.missing.is_empty() && enforced.namespaces.contains(&"mount".to_owned()), "{enforced:?}");
    let (_read, write) = pipe();
    let descriptors: Vec<OwnedFd> = (0..3).map(|_| write.try_clone().unwrap()).collect();
    let command: &Command = &shell("true");
    let command = Bytes(encode(command, b"", 0).unwrap()[HEADER..].to_vec());
    let policy = Some(Bytes(writable.encode()));
    spawner.send(
        &SpawnerRequest::Start {
            id: 2,
            session: "s".to_owned(),
            tty: false,
            policy,
            own_view: false,
            own_network: false,
            own_uid: true,
            allow_unprotected: false,
            limits: ProcessLimits::default(),
            command,
        },
        &descriptors,
    );
    match spawner.event() {
        SpawnerEvent::StartFailed { id: 2, failure } => assert_eq!(failure.step, Step::Enforce),
        other => panic!("{other:?}"),
    }
    spawner.close();
}

pub(crate) fn ended(id: u64, status: ExitStatus) -> SpawnerEvent {
    SpawnerEvent::Exited { id, status, denials: Denials::default(), failure: None, limits: Vec::new() }
}

//! The parts of the machine that a view shows: its devices, processes and kernel, and no file that the process could not see
//! anyway.

use super::gateway::{Spawner, Worker, command, policy, shell};
use crate::Test;
use portcullis_protocol::helper::ExitStatus;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::policy::{Access, DenyGlob, Files, Grants, Network, Policy};
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::survey;
use rustix::mount::{MountFlags, mount};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const TESTS: &[Test] = &[
    ("view::a_renamed_directory_bares_no_kernel_mount", a_renamed_directory_bares_no_kernel_mount),
    ("view::kernel_mounts_below_a_grant_show_and_change_nothing", kernel_mounts_below_a_grant_show_and_change_nothing),
    ("view::a_device_needs_an_entry_in_every_set", a_device_needs_an_entry_in_every_set),
    ("view::denials_in_dev_and_proc_hold_or_are_refused", denials_in_dev_and_proc_hold_or_are_refused),
    ("view::proc_shows_programs_what_they_need_and_no_more", proc_shows_programs_what_they_need_and_no_more),
    ("view::a_denial_out_of_reach_tells_nothing", a_denial_out_of_reach_tells_nothing),
    ("view::restricted_reading_works_under_any_ceiling", restricted_reading_works_under_any_ceiling),
    ("view::a_linked_work_tree_commits_with_what_its_denials_name", a_linked_work_tree_commits_with_what_its_denials_name),
];

const ROOT: (&str, Access) = ("/", Access::Read);

struct Place {
    /// None if another process removes it.
    _directory: Option<tempfile::TempDir>,
    top: PathBuf,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::set_permissions(&top, fs::Permissions::from_mode(0o755)).unwrap();
        Self { top, _directory: Some(directory) }
    }

    fn at(&self, name: &str) -> String {
        self.top.join(name).to_str().unwrap().to_owned()
    }

    fn directory(&self, name: &str) -> String {
        fs::create_dir_all(self.top.join(name)).unwrap();
        self.at(name)
    }
}

fn of(entries: &[(&str, Access)]) -> Policy {
    policy(&entries.iter().map(|(path, access)| (Path::new(*path), *access)).collect::<Vec<_>>())
}

/// Whether a script succeeds, and its output.
fn tried(spawner: &mut Spawner, script: &str, policy: Option<&Policy>) -> (bool, String) {
    let (outcome, _) = spawner.run(&shell(script), policy);
    (outcome.status == ExitStatus::Code(0), outcome.stdout + &outcome.stderr)
}

/// Any process that may write there renames it, and no mount changes by that.
fn a_renamed_directory_bares_no_kernel_mount() {
    if !geteuid().is_root() {
        println!("skipped: only root can mount file systems of the kernel");
        return;
    }
    let place = Place::new();
    let (ws, names) = (place.directory("ws"), ["one", "other"]);
    place.directory("ws/one/proc");
    for uids in [true, false] {
        let mounts = format!("mount -t proc proc {ws}/one/proc || mount -t proc proc {ws}/other/proc");
        let mut spawner = Spawner::start_in_with(&mounts, uids);
        let policy = of(&[ROOT, (&ws, Access::Write)]);
        // Each start finds inits that were made ahead, before the directory was renamed the last time.
        for round in 0..6 {
            let (now, next) = (names[round % 2], names[(round + 1) % 2]);
            let script =
                format!("cd {ws} && ! cat {now}/proc/version {now}/proc/1/cmdline && ! touch {now}/proc/x && mv {now} {next}");
            let (succeeds, said) = tried(&mut spawner, &script, Some(&policy));
            assert!(succeeds, "round {round}: {said}");
        }
        // The control: without a sandbox it is shown.
        assert!(tried(&mut spawner, &format!("cat {ws}/one/proc/version"), None).0);
        spawner.close();
    }
}

fn kernel_mounts_below_a_grant_show_and_change_nothing() {
    if !geteuid().is_root() {
        println!("skipped: only root can mount file systems of the kernel");
        return;
    }
    // Mounts of a process of its own, which go with it: this program again.
    const INSIDE: &str = "PORTCULLIS_TEST_OWN_MOUNTS";
    let Some(top) = std::env::var_os(INSIDE) else {
        // Removed out here, where nothing is mounted below it: a recursive removal would continue into the machine's devices.
        let place = Place::new();
        let test = "view::kernel_mounts_below_a_grant_show_and_change_nothing";
        let program = std::env::current_exe().unwrap();
        let mut again = Command::new("unshare");
        again.args(["-m", "--propagation", "private"]).arg(program).args(["--exact", test]).env(INSIDE, &place.top);
        assert!(again.status().unwrap().success());
        return;
    };
    let place = Place { _directory: None, top: PathBuf::from(top) };
    let ws = place.directory("ws");
    for (kind, name) in [("proc", "a b/proc"), ("sysfs", "sys"), ("devtmpfs", "dev"), ("proc", "under"), ("tmpfs", "under")] {
        let target = place.directory(&format!("ws/{name}"));
        mount(kind, target.as_str(), kind, MountFlags::empty(), None).unwrap();
    }
    fs::write(place.at("ws/under/plain"), "plain").unwrap();
    let mut spawner = Spawner::start();
    let acts = [
        ("cat 'a b/proc/1/status' >/dev/null", false),
        ("cat 'a b/proc/version'", false),
        ("ls 'a b/proc/1'", false),
        ("cd 'a b/proc/sys/kernel' && cat hostname > hostname", false),
        (
            "cat sys/kernel/mm/transparent_hugepage/enabled | : ; echo 0 > sys/kernel/profiling || echo always > sys/kernel/mm/transparent_hugepage/enabled",
            false,
        ),
        ("mkdir dev/made && rmdir dev/made", false),
        (": < dev/zero", false),
        // The controls: other file systems than the kernel's.
        ("cat under/plain && echo x > under/made && rm under/made", true),
        ("ls sys/kernel && ls dev", true),
    ];
    let minimal = ["/usr", "/bin", "/lib", "/lib64"].into_iter().filter(|path| Path::new(path).exists());
    let narrow: Vec<_> = minimal.map(|path| (path, Access::Read)).chain([(ws.as_str(), Access::Write)]).collect();
    let policies =
        [of(&[ROOT, (&ws, Access::Write)]), of(&[("/", Access::Write), (&place.directory("no"), Access::Deny)]), of(&narrow)];
    for (act, is_free) in acts {
        let script = format!("cd '{ws}' && {{ {act}; }}");
        for policy in &policies {
            let (succeeds, said) = tried(&mut spawner, &script, Some(policy));
            assert_eq!(succeeds, is_free, "{act}: {said}");
        }
        // The unconfined control changes no setting of the machine: it only reads.
        if !act.contains("> sys/") {
            assert!(tried(&mut spawner, &script, None).0, "the control: {act}");
        }
    }
    // With an entry of its own it is shown.
    let proc = place.at("ws/a b/proc");
    let (succeeds, said) = tried(&mut spawner, &format!("cat '{proc}/version'"), Some(&of(&[ROOT, (&proc, Access::Write)])));
    assert!(!succeeds, "{said}");
    spawner.close();
}

fn a_device_needs_an_entry_in_every_set() {
    let place = Place::new();
    let candidates = ["/dev/loop0", "/dev/fuse", "/dev/kvm", "/dev/net/tun"];
    let is_plain = |path: &&str| fs::symlink_metadata(path).is_ok_and(|found| !found.is_symlink()) && File::open(path).is_ok();
    let Some(device) = candidates.into_iter().find(is_plain) else {
        println!("skipped: no device that this user may open");
        return;
    };
    let mut spawner = Spawner::start();
    let no = place.directory("no");
    let system = ["/bin", "/usr", "/lib", "/lib64"].into_iter().filter(|path| Path::new(path).exists());
    let names = of(&system.map(|path| (path, Access::Read)).chain([(device, Access::Read)]).collect::<Vec<_>>());
    let reads = of(&[ROOT, (&no, Access::Deny)]);
    let writes = of(&[ROOT, (device, Access::Write), (&no, Access::Deny)]);
    let open = format!(": < {device}");
    for (own, ceiling, expect) in
        [(&names, Some(&reads), false), (&reads, Some(&names), false), (&names, Some(&writes), true), (&names, None, true)]
    {
        let policy = match ceiling {
            Some(ceiling) => own.clone().bounded_by(ceiling).unwrap(),
            None => own.clone(),
        };
        let (succeeds, said) = tried(&mut spawner, &open, Some(&policy));
        assert_eq!(succeeds, expect, "{own:?} {ceiling:?}: {said}");
    }
    assert!(tried(&mut spawner, &open, Some(&writes)).0);
    // Nor do a name above it, and a node elsewhere.
    assert!(!tried(&mut spawner, &open, Some(&of(&[ROOT, ("/dev", Access::Write)]))).0);
    if geteuid().is_root() {
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        for ws in [place.directory("ws"), memory.path().to_str().unwrap().to_owned()] {
            let node = format!("{ws}/zero");
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &node,
                rustix::fs::FileType::CharacterDevice,
                rustix::fs::Mode::from_raw_mode(0o666),
                rustix::fs::makedev(1, 5),
            )
            .unwrap();
            // Below `/dev` an entry for the node itself names it as a device.
            for entry in [&ws, &node].into_iter().filter(|entry| *entry == &ws || !ws.starts_with("/dev")) {
                let policy = of(&[ROOT, (entry, Access::Write)]);
                assert!(!tried(&mut spawner, &format!(": < {node}"), Some(&policy)).0, "{entry}");
            }
            assert!(tried(&mut spawner, &format!(": < {node}"), None).0, "the control");
            // Files other than devices belong to the workspace as usual.
            let policy = of(&[ROOT, (&ws, Access::Write)]);
            assert!(tried(&mut spawner, &format!("echo x > {ws}/file"), Some(&policy)).0, "{ws}");
        }
    }
    spawner.close();
}

fn denials_in_dev_and_proc_hold_or_are_refused() {
    let mut spawner = Spawner::start();
    let root = of(&[ROOT]);
    for (denied, acts) in [
        ("/proc/version", &["cat /proc/version", "cat /proc/self/root/proc/version"][..]),
        ("/proc/sys", &["cat /proc/sys/kernel/ostype", "ls /proc/sys"]),
        ("/proc", &["cat /proc/version", "ls /proc", "cat /proc/self/stat"]),
        ("/dev/null", &[": > /dev/null", ": < /dev/null"]),
        ("/dev/shm", &["ls /dev/shm", "echo x > /dev/shm/x && rm /dev/shm/x"]),
        ("/dev/shm/a/b", &["mkdir -p /dev/shm/a/b && rmdir /dev/shm/a/b /dev/shm/a"]),
        ("/dev/pts", &["ls /dev/pts"]),
        ("/dev", &[": > /dev/null", "ls /dev", "ls /dev/shm", "echo x > /dev/shm/x && rm /dev/shm/x"]),
    ] {
        let denying = of(&[ROOT, (denied, Access::Deny)]);
        for act in acts {
            let (succeeds, said) = tried(&mut spawner, act, Some(&denying));
            assert!(!succeeds, "{denied}: {act}: {said}");
            let is_refused = said.contains("ermission denied") || act.contains("> ") && said.contains("Read-only");
            assert!(is_refused, "{denied}: {act}: {said}");
            let (succeeds, said) = tried(&mut spawner, act, Some(&root));
            assert!(succeeds, "the control: {act}: {said}");
        }
        let (succeeds, said) = tried(&mut spawner, "true", Some(&denying));
        assert!(succeeds, "others run: {denied}: {said}");
    }
    // A path granted by an entry below is there.
    let leads = of(&[ROOT, ("/dev", Access::Deny), ("/dev/null", Access::Read)]);
    let (succeeds, said) = tried(&mut spawner, ": < /dev/null && ! ls /dev && ! head -c1 /dev/zero", Some(&leads));
    assert!(succeeds, "{said}");
    // Denied by a glob.
    for (pattern, act) in [("**/version", "cat /proc/version"), ("*/z[e]ro", ": < /dev/zero"), ("pr[o]c", "cat /proc/uptime")] {
        let glob = DenyGlob { base: AbsolutePath::new("/").unwrap(), pattern: pattern.to_owned() };
        if pattern.starts_with("**") {
            // A look at the whole machine takes too long here.
            continue;
        }
        let entries = root.files.sets().next().unwrap().entries.clone();
        let grants = Grants::new(entries, vec![glob]).unwrap();
        let denying = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
        let (succeeds, said) = tried(&mut spawner, act, Some(&denying));
        assert!(!succeeds, "{pattern}: {said}");
    }
    for (denied, remedy) in [
        ("/proc/1", "deny `/proc`"),
        ("/proc/self", "deny `/proc`"),
        ("/dev/pts/0", "deny `/dev/pts`"),
        ("/proc/net", "deny `/proc`"),
    ] {
        let failure = spawner.fail(&shell("true"), Some(&of(&[ROOT, (denied, Access::Deny)])));
        assert!(failure.attempt.contains(remedy), "{denied}: {failure:?}");
    }
    spawner.close();
}

fn proc_shows_programs_what_they_need_and_no_more() {
    let mut spawner = Spawner::start();
    let policies =
        [of(&[ROOT]), of(&[("/usr", Access::Read), ("/bin", Access::Read), ("/lib", Access::Read), ("/lib64", Access::Read)])];
    for policy in &policies {
        for file in
            ["cpuinfo", "meminfo", "stat", "loadavg", "uptime", "mounts", "version", "self/status", "self/maps", "filesystems"]
        {
            let (succeeds, said) = tried(&mut spawner, &format!("test -n \"$(cat /proc/{file})\""), Some(policy));
            assert!(succeeds, "{file}: {said}");
        }
        for file in
            ["sys/kernel/ostype", "sys/vm/overcommit_memory", "sys/kernel/random/boot_id", "self/mountinfo", "self/cgroup"]
        {
            assert!(tried(&mut spawner, &format!("cat /proc/{file}"), Some(policy)).0, "{file}");
        }
        for file in ["interrupts", "kallsyms", "kcore", "keys", "kmsg", "kpageflags", "slabinfo", "timer_list", "vmallocinfo"] {
            let path = format!("/proc/{file}");
            if File::open(&path).is_err() {
                continue;
            }
            assert!(tried(&mut spawner, &format!(": < {path}"), None).0, "the control: {file}");
            let (succeeds, said) = tried(&mut spawner, &format!(": < {path}"), Some(policy));
            assert!(!succeeds, "{file}: {said}");
        }
    }
    spawner.close();
}

fn a_denial_out_of_reach_tells_nothing() {
    if !geteuid().is_root() {
        println!("skipped: only root can make a directory of another user");
        return;
    }
    let place = Place::new();
    let (home, ws) = (place.directory("home"), place.directory("ws"));
    fs::write(place.at("home/there"), "content").unwrap();
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&home, Some(65534), Some(65534)).unwrap();
    let mut spawner = Spawner::start();
    // The control: the process itself cannot reach it either.
    let plain = of(&[ROOT, (&ws, Access::Write)]);
    assert!(!tried(&mut spawner, &format!("cat {home}/there"), Some(&plain)).0);
    let mut answers = Vec::new();
    for name in ["there", "gone"] {
        let file = format!("{home}/{name}");
        for entries in [&[ROOT, (ws.as_str(), Access::Write)][..], &[("/", Access::Write), (&ws, Access::Write)]] {
            let denying = of(&[entries, &[(&file, Access::Deny)]].concat());
            let script = format!("ls -ld {home} | cut -c1-10; cat {file}; ls {home}; cat {home}/other; echo x > {file}");
            let (outcome, enforced, denials) = spawner.run_and_see(&shell(&script), Some(&denying));
            answers.push(format!("{outcome:?} {enforced:?} {denials:?}").replace(name, "NAME"));
        }
    }
    assert_eq!(answers[0..2], answers[2..4]);
    // It holds when the owner of the directory opens it while the sandbox lives.
    let denying = of(&[ROOT, (&ws, Access::Write), (&place.at("home/there"), Access::Deny)]);
    let wait = format!("touch {ws}/ready; read go < {ws}/fifo; cat {home}/there");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.at("ws/fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    for (nth, (policy, expect)) in [(&denying, false), (&plain, true)].into_iter().enumerate() {
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
        let id = 50 + u64::try_from(nth).unwrap();
        let (mut stdout, _stderr) = spawner.start_process(id, &shell(&wait), Some(policy));
        spawner.event();
        // It opens once the program reads.
        let fifo = File::create(place.at("ws/fifo")).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o755)).unwrap();
        drop(fifo);
        let mut said = String::new();
        std::io::Read::read_to_string(&mut stdout, &mut said).unwrap();
        assert_eq!(said == "content", expect, "{said}");
        spawner.event();
    }
    spawner.close();
}

fn restricted_reading_works_under_any_ceiling() {
    let place = Place::new();
    let (ws, out) = (place.directory("ws"), place.directory("out"));
    fs::write(place.at("ws/file"), "content").unwrap();
    fs::write(place.at("out/file"), "outside").unwrap();
    let system = ["/bin", "/sbin", "/usr", "/etc", "/lib", "/lib64"].into_iter().filter(|path| Path::new(path).exists());
    let minimal: Vec<_> = system.map(|path| (path, Access::Read)).collect();
    let with = |more: &[(&str, Access)]| of(&[&minimal, more].concat());
    let (reading, writing) = (with(&[(&ws, Access::Read)]), with(&[(&ws, Access::Write)]));
    let read_only = of(&[ROOT]);
    let workspace = of(&[ROOT, (&ws, Access::Write)]);
    let other = of(&[ROOT, (&out, Access::Write), ("/usr/share", Access::Deny)]);
    let mut spawner = Spawner::start();
    for (own, ceiling, may_write) in [
        (&reading, &read_only, false),
        (&writing, &read_only, false),
        (&writing, &workspace, true),
        (&reading, &workspace, false),
        (&writing, &other, false),
    ] {
        let both = own.clone().bounded_by(ceiling).unwrap();
        let both = both.bounded_by(&of(&[("/", Access::Write), (&place.directory("no"), Access::Deny)])).unwrap();
        let (succeeds, said) = tried(&mut spawner, &format!("cat {ws}/file && head -1 /etc/passwd >/dev/null"), Some(&both));
        assert!(succeeds && said == "content", "{own:?} {ceiling:?}: {said}");
        let (succeeds, said) = tried(&mut spawner, &format!("echo x > {ws}/made && rm {ws}/made"), Some(&both));
        assert_eq!(succeeds, may_write, "{own:?} {ceiling:?}: {said}");
        let (succeeds, said) =
            tried(&mut spawner, &format!("cat {out}/file || ls {}", place.top.join("no").display()), Some(&both));
        assert!(!succeeds, "{said}");
    }
    let both = writing.clone().bounded_by(&other).unwrap();
    assert!(!tried(&mut spawner, "ls /usr/share", Some(&both)).0, "the ceiling's denial");
    assert!(tried(&mut spawner, "ls /usr/share", Some(&writing)).0, "the control");
    spawner.close();
}

const GIT: &[(&str, &str)] = &[
    ("PATH", "/usr/bin:/bin"),
    ("HOME", "/nonexistent"),
    ("GIT_AUTHOR_NAME", "a"),
    ("GIT_AUTHOR_EMAIL", "a@a"),
    ("GIT_COMMITTER_NAME", "a"),
    ("GIT_COMMITTER_EMAIL", "a@a"),
];

/// That a process, a file call and the explanation of a policy say the same of changing these files.
fn agree(spawner: &mut Spawner, policy: &Policy, files: &[String]) -> Vec<bool> {
    let roots = Roots::open(policy).unwrap();
    let mut tables = Compiled::new(policy, |path| roots.resolve(path)).unwrap();
    let found = survey::pointers(&tables, &roots).unwrap();
    tables.protect(&found);
    let mut worker = Worker::start(Some(policy));
    let mut said = Vec::new();
    for file in files {
        let explained = tables.explain(Path::new(file)).verdict == Verdict::Write;
        let (by_process, text) = tried(spawner, &format!(": >> '{file}'"), Some(policy));
        assert_eq!(by_process, explained, "{file}: {text} {policy:?}");
        let content = fs::read(file).unwrap_or_default();
        let written = worker.write(file, &content);
        assert_eq!(written.is_ok(), explained, "{file}: {written:?} {policy:?}");
        said.push(explained);
    }
    said
}

fn a_linked_work_tree_commits_with_what_its_denials_name() {
    if Command::new("git").arg("version").output().is_err() {
        println!("skipped: git is not installed");
        return;
    }
    let mut spawner = Spawner::start();
    // The repository beside the writable place, and in it.
    for is_inside in [false, true] {
        let place = Place::new();
        let (main, tree) = (place.directory("main"), place.at("tree"));
        let make = format!(
            "cd {main} && git init -q && echo a > f && git add f && git commit -qm one && git worktree add -q {tree} && mkdir -p {main}/.git/hooks"
        );
        let made = Command::new("sh").args(["-c", &make]).env_clear().envs(GIT.iter().copied()).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let above: &[(&str, Access)] = if is_inside { &[(place.top.to_str().unwrap(), Access::Write)] } else { &[] };
        let base = [&[ROOT, (tree.as_str(), Access::Write)], above].concat();
        let commit = command(&["sh", "-c", &format!("cd {tree} && echo b >> f && git commit -qam two")], GIT);
        let common = format!("{main}/.git");
        let git_directory = format!("{common}/worktrees/tree");
        let files = ["probe", "commondir", "gitdir"].map(|name| format!("{git_directory}/{name}")).into_iter();
        let files = files.chain(
            ["objects/probe", "refs/probe", "logs/probe", "config", "hooks/probe", "probe"]
                .map(|name| format!("{common}/{name}")),
        );
        let files: Vec<String> = files.collect();
        assert_eq!(agree(&mut spawner, &of(&base), &files), [false; 9], "{is_inside}");

        let mut granted: Vec<String> = Vec::new();
        for round in 0.. {
            let entries: Vec<_> = base.iter().copied().chain(granted.iter().map(|path| (path.as_str(), Access::Write))).collect();
            let (outcome, _, denials) = spawner.run_and_see(&commit, Some(&of(&entries)));
            if outcome.status == ExitStatus::Code(0) {
                assert!(round > 0, "it was denied first");
                break;
            }
            assert!(round < 8, "{granted:?} {outcome:?} {denials:?}");
            let before = granted.len();
            for denial in &denials.list {
                if let Some(grant) = &denial.grant {
                    granted.push(grant.path.path.strip_prefix("file://").unwrap().to_owned());
                }
            }
            granted.sort();
            granted.dedup();
            assert!(granted.len() > before, "{outcome:?} {denials:?}");
            if round == 0 {
                let rule = &denials.list[0].rule;
                assert!(rule.contains("a commit also changes `objects`, `refs` and `logs`"), "{rule}");
            }
        }
        let expect = ["logs", "objects", "refs", "worktrees/tree"].map(|name| format!("{common}/{name}"));
        assert_eq!(granted, expect);
        let entries: Vec<_> = base.iter().copied().chain(granted.iter().map(|path| (path.as_str(), Access::Write))).collect();
        let may = agree(&mut spawner, &of(&entries), &files);
        assert_eq!(may, [true, false, false, true, true, true, false, false, false], "hooks and settings stay");
        // The directory itself, by name, is given with all that it holds, but for where git looks for it next time.
        let whole = of(&[&base[..], &[(&common, Access::Write)]].concat());
        assert_eq!(agree(&mut spawner, &whole, &files), [true, false, false, true, true, true, true, true, true]);
        let (outcome, _) = spawner.run(&commit, Some(&whole));
        assert_eq!(outcome.status, ExitStatus::Code(0), "{outcome:?}");
        // In one set only it lifts nothing where the other does not name it.
        let ceiling = of(&[ROOT, (place.top.to_str().unwrap(), Access::Write)]);
        let bounded = whole.bounded_by(&ceiling).unwrap();
        assert_eq!(agree(&mut spawner, &bounded, &files), [false; 9]);
    }
    spawner.close();
}

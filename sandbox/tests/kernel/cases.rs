//! The test: tables of acts and outcomes, each with its control.

mod expectations;
mod interfaces;
mod programs;

use portcullis_protocol::helper::NamespaceLayer;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, DenyGlob, Files, Grant, Grants, Network, Policy};
use portcullis_sandbox::report;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const CASES: &[(&str, fn())] = &[
    ("this_machine_offers_what_these_tests_need", this_machine_offers_what_these_tests_need),
    ("read_only_changes_nothing", read_only_changes_nothing),
    ("write_stays_in_the_workspace", write_stays_in_the_workspace),
    ("no_network_and_no_host_sockets", interfaces::no_network_and_no_host_sockets),
    ("network_without_host_sockets", interfaces::network_without_host_sockets),
    ("kernel_interfaces_that_no_program_needs", interfaces::kernel_interfaces_that_no_program_needs),
    ("others_are_out_of_reach", interfaces::others_are_out_of_reach),
    ("a_worker_does_nothing_but_files", a_worker_does_nothing_but_files),
    ("only_what_is_granted_can_be_read", only_what_is_granted_can_be_read),
    ("two_sets_of_grants_are_intersected", two_sets_of_grants_are_intersected),
    ("gaps_are_refused_unless_waived", gaps_are_refused_unless_waived),
    ("a_linked_writable_root_is_refused", a_linked_writable_root_is_refused),
    ("a_missing_root_grants_nothing", a_missing_root_grants_nothing),
    ("a_thousand_roots", a_thousand_roots),
    ("two_threads_are_refused", two_threads_are_refused),
    ("unrestricted_files_keep_their_rights", unrestricted_files_keep_their_rights),
    ("a_terminal_that_can_be_read_cannot_be_written", programs::a_terminal_that_can_be_read_cannot_be_written),
    ("expectations_hold_for_processes", expectations::expectations_hold_for_processes),
    ("programs_that_must_work", programs::programs_that_must_work),
    ("programs_in_a_terminal_that_must_work", programs::programs_in_a_terminal_that_must_work),
    ("git_reads_a_repository", programs::git_reads_a_repository),
];

/// Plays the harness for `cargo test` (filters) and `cargo nextest` (`--list --format terse`, `NAME --exact`).
pub(crate) fn run(args: &[&str]) -> ExitCode {
    let ignored = args.contains(&"--ignored");
    if args.contains(&"--list") {
        CASES.iter().filter(|_| !ignored).for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filters: Vec<_> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let exact = args.contains(&"--exact");
    let wanted =
        |name: &str| filters.is_empty() || filters.iter().any(|it| if exact { name == **it } else { name.contains(**it) });
    let failed: Vec<_> = CASES
        .iter()
        .filter(|(name, _)| !ignored && wanted(name))
        .filter(|(name, case)| {
            let passed = catch_unwind(case).is_ok();
            println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
            !passed
        })
        .collect();
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A workspace and a place outside it, alike, under one directory that anybody may enter.
struct Places {
    directory: tempfile::TempDir,
    workspace: PathBuf,
    outside: PathBuf,
}

impl Places {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").expect("/var/tmp is writable");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("own directory");
        let real = directory.path().canonicalize().expect("exists");
        let places = Self { workspace: real.join("ws"), outside: real.join("out"), directory };
        for place in [&places.workspace, &places.outside] {
            fs::create_dir(place).expect("fresh");
            fs::write(place.join("file"), "content").expect("fresh");
        }
        places
    }

    fn confined(&self, who: &str, policy: &Policy, act: &str, place: impl AsRef<Path>) -> String {
        let encoded = self.directory.path().join("policy");
        fs::write(&encoded, policy.encode()).expect("own directory");
        let encoded = encoded.to_str().expect("UTF-8");
        start(&["--confine", who, encoded, act, place.as_ref().to_str().expect("UTF-8")])
    }

    #[track_caller]
    fn check(&self, who: &str, policy: &Policy, act: &str, place: impl AsRef<Path>, expect: &str) {
        let place = place.as_ref();
        assert_eq!(self.confined(who, policy, act, place), expect, "{who}: {act} {}", place.display());
    }
}

/// The same act without confinement.
#[track_caller]
fn control(act: &str, place: impl AsRef<Path>) {
    assert_eq!(free(act, place), "ok", "{act}: without confinement");
}

fn free(act: &str, place: impl AsRef<Path>) -> String {
    start(&["--act", act, place.as_ref().to_str().expect("UTF-8")])
}

/// Runs this program in another part; its standard output, trimmed. It is waited for.
fn start(args: &[&str]) -> String {
    let exe = std::env::current_exe().expect("known");
    let output = Command::new(exe).args(args).stdin(Stdio::null()).output().expect("starts");
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if text.is_empty() { format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()) } else { text }
}

fn policy(entries: &[(&Path, Access)], network: Network) -> Policy {
    let grant = |(path, access): &(&Path, Access)| Grant::new(AbsolutePath::new(path).unwrap(), *access);
    Policy { files: Files::Restricted(Grants::new(entries.iter().map(grant).collect(), Vec::new()).unwrap().into()), network }
}

fn read_only(network: Network) -> Policy {
    policy(&[(Path::new("/"), Access::Read)], network)
}

fn workspace_write(places: &Places) -> Policy {
    policy(&[(Path::new("/"), Access::Read), (&places.workspace, Access::Write)], Network::Restricted)
}

fn this_machine_offers_what_these_tests_need() {
    let report = report::machine();
    assert!(report.landlock_abi >= 6, "these tests need Landlock ABI 6 (Linux 6.12): {report:?}");
    assert!(report.layers.iter().any(|layer| layer.name == "seccomp" && layer.available), "{report:?}");
    assert!(report.layers.iter().all(|layer| !layer.reason.is_empty() && (layer.available || !layer.remedy.is_empty())));
}

const CHANGES: [&str; 6] = ["truncate", "write", "create", "mkdir", "symlink", "rename"];
const METADATA: [&str; 4] = ["chmod", "chown", "utime", "xattr"];

fn target(act: &str, directory: &Path) -> PathBuf {
    if matches!(act, "create" | "mkdir" | "symlink") { directory.to_owned() } else { directory.join("file") }
}

fn read_only_changes_nothing() {
    let places = Places::new();
    let policy = read_only(Network::Restricted);
    places.check(
        "process",
        &policy,
        "report",
        "",
        &format!("{} process,read-only,shared-ipc,no-network []", report::machine().landlock_abi),
    );
    for act in CHANGES {
        places.check("process", &policy, act, target(act, &places.workspace), "EACCES");
        control(act, target(act, &Places::new().workspace));
    }
    for act in METADATA {
        places.check("process", &policy, act, places.workspace.join("file"), "EROFS");
        control(act, Places::new().workspace.join("file"));
    }
    let requests = ["setflags", "setversion", "ext4-setversion", "ext4-allocate", "ext4-clear-cache"];
    for act in ["setxattrat", "removexattrat", "fchmodat2", "file-setattr", "lease", "hint"].into_iter().chain(requests) {
        places.check("process", &policy, act, places.workspace.join("file"), "EROFS");
        assert_ne!(free(act, places.workspace.join("file")), "EROFS", "{act}");
    }
    // Questions are free, and their answers those of the file system.
    let asked = places.confined("process", &policy, "getflags", places.workspace.join("file"));
    assert_eq!(asked, free("getflags", places.workspace.join("file")));
    places.check("process", &policy, "read", places.workspace.join("file"), "ok");
    places.check("process", &policy, "write", "/dev/null", "ok");
    places.check("process", &policy, "execute", "/bin/true", "ok");
    assert_eq!(fs::read(places.workspace.join("file")).unwrap(), b"content");
}

fn write_stays_in_the_workspace() {
    let places = Places::new();
    let policy = workspace_write(&places);
    for act in CHANGES {
        places.check("waived", &policy, act, target(act, &places.outside), "EACCES");
        places.check("waived", &policy, act, target(act, &Places::new().workspace), "EACCES");
        let fresh = Places::new();
        fresh.check("waived", &workspace_write(&fresh), act, target(act, &fresh.workspace), "ok");
        control(act, target(act, &Places::new().outside));
    }
    // What the report calls metadata-outside, shown to be so: the day it is enforced this line has to change.
    places.check("waived", &policy, "chmod", places.outside.join("file"), "ok");
}

fn a_worker_does_nothing_but_files() {
    let places = Places::new();
    let policy = workspace_write(&places);
    for act in ["truncate", "write", "create", "mkdir", "symlink", "rename", "chmod", "utime"] {
        let fresh = Places::new();
        let old_call = matches!(act, "mkdir" | "symlink" | "rename" | "chmod") && cfg!(target_arch = "x86_64");
        // The standard library's old spellings are not in the table; what the worker uses is.
        fresh.check(
            "worker",
            &workspace_write(&fresh),
            act,
            target(act, &fresh.workspace),
            if old_call { "EPERM" } else { "ok" },
        );
    }
    for act in ["truncate", "write", "create"] {
        places.check("worker", &policy, act, target(act, &places.outside), "EACCES");
    }
    places.check("worker", &policy, "read", places.outside.join("file"), "ok");
    places.check("worker", &policy, "list", &places.outside, "ok");
    places.check("worker", &policy, "thread", "", "ok");
    places.check("worker", &policy, "caps", "", "held: 0");
    for act in ["fork", "socketpair", "mount", "keyctl", "ptrace", "signal"] {
        let outcome = places.confined("worker", &policy, act, "1");
        assert_eq!(outcome, "EPERM", "{act}");
    }
    places.check("worker", &policy, "socket", "2,1,0", "EPERM");
}

fn only_what_is_granted_can_be_read() {
    let places = Places::new();
    let system: Vec<_> = ["/usr", "/bin", "/lib", "/lib64", "/etc"].map(Path::new).to_vec();
    let exe = std::env::current_exe().unwrap();
    let mut entries: Vec<_> = system.iter().map(|path| (*path, Access::Read)).collect();
    entries.push((&places.workspace, Access::Read));
    entries.push((exe.parent().unwrap(), Access::Read));
    // The launcher executes itself by this name.
    entries.push((Path::new("/proc"), Access::Read));
    let policy = policy(&entries, Network::Restricted);
    for who in ["process", "worker"] {
        places.check(who, &policy, "read", places.workspace.join("file"), "ok");
        places.check(who, &policy, "read", places.outside.join("file"), "EACCES");
        places.check(who, &policy, "list", &places.outside, "EACCES");
    }
    control("read", places.outside.join("file"));
    places.check("process", &policy, "write", "/dev/null", "ok");
}

fn two_sets_of_grants_are_intersected() {
    let places = Places::new();
    let root = Path::new("/");
    let own =
        policy(&[(root, Access::Read), (&places.workspace, Access::Write), (&places.outside, Access::Write)], Network::Enabled);
    let ceiling = workspace_write(&places);
    let both = own.clone().bounded_by(&ceiling).unwrap();
    let abi = report::machine().landlock_abi;
    let report = format!("{abi} process,set-id,set-group-id,shared-ipc,no-network [metadata-outside,carve-outs]");
    places.check("waived", &both, "report", "", &report);
    for (who, policy, expect) in
        [("waived", &both, "EACCES"), ("worker", &both, "EACCES"), ("waived", &own, "ok"), ("worker", &own, "ok")]
    {
        for act in ["write", "truncate"] {
            places.check(who, policy, act, target(act, &places.outside), expect);
        }
        places.check(who, policy, "write", places.workspace.join("file"), "ok");
    }
    // Where one set grants no writing nothing can be changed, and nothing needs to be waived.
    let read_only = own.bounded_by(&read_only(Network::Restricted)).unwrap();
    places.check("process", &read_only, "report", "", &format!("{abi} process,read-only,shared-ipc,no-network []"));
    places.check("process", &read_only, "write", places.workspace.join("file"), "EACCES");
    places.check("process", &read_only, "chmod", places.workspace.join("file"), "EROFS");
}

fn gaps_are_refused_unless_waived() {
    let places = Places::new();
    let write = workspace_write(&places);
    let refused = places.confined("process", &write, "report", "");
    assert!(refused.starts_with("refused: ") && refused.contains("--allow-unprotected-metadata"), "{refused}");
    let waived = places.confined("waived", &write, "report", "");
    assert!(waived.ends_with("process,set-id,set-group-id,shared-ipc,no-network [metadata-outside,carve-outs]"), "{waived}");

    let deny = policy(&[(Path::new("/"), Access::Read), (&places.outside, Access::Deny)], Network::Restricted);
    let grants = read_only(Network::Restricted).files.sets().next().unwrap().clone();
    let glob = DenyGlob { base: AbsolutePath::new(&places.workspace).unwrap(), pattern: "*.env".to_owned() };
    let glob =
        Policy { files: Files::Restricted(Grants { deny_globs: vec![glob], ..grants }.into()), network: Network::Restricted };
    // The deny entry lies below a grant only when links are followed.
    let link = places.directory.path().canonicalize().unwrap().join("link");
    std::os::unix::fs::symlink(&places.workspace, &link).unwrap();
    let inside = link.join("file");
    let linked = policy(&[(&places.workspace, Access::Read), (&inside, Access::Deny)], Network::Restricted);
    let namespaces = NamespaceLayer::Unavailable { reason: "untried".to_owned(), remedy: String::new() };
    assert!(report::process_gaps(&linked, &namespaces).is_empty());
    for policy in [deny, glob, linked] {
        let refused = places.confined("waived", &policy, "report", "");
        assert!(refused.contains("denying places below a granted one"), "{refused}");
        // The worker holds them itself.
        assert!(places.confined("worker", &policy, "report", "").ends_with("worker []"));
    }
}

fn a_linked_writable_root_is_refused() {
    let places = Places::new();
    let parent = places.directory.path().canonicalize().unwrap();
    let link = parent.join("link");
    std::os::unix::fs::symlink(&places.workspace, &link).unwrap();
    let refused = places.confined("worker", &policy(&[(&link, Access::Write)], Network::Restricted), "report", "");
    assert_eq!(
        refused,
        format!(
            "refused: open writable root `{}`: it is a symbolic link; name the real path `{}` instead",
            link.display(),
            places.workspace.display()
        )
    );
    // A link before the last name is followed.
    std::os::unix::fs::symlink(&parent, places.outside.join("up")).unwrap();
    let through = places.outside.join("up/ws");
    let policy = policy(&[(Path::new("/"), Access::Read), (&through, Access::Write)], Network::Restricted);
    places.check("worker", &policy, "create", &places.workspace, "ok");
    places.check("worker", &policy, "create", &places.outside, "EACCES");
}

fn a_missing_root_grants_nothing() {
    let places = Places::new();
    let missing = places.outside.join("later");
    let policy = policy(&[(Path::new("/"), Access::Read), (&missing, Access::Write)], Network::Restricted);
    places.check("worker", &policy, "create", &places.outside, "EACCES");
    assert!(places.confined("worker", &policy, "report", "").ends_with("worker []"));
}

fn a_thousand_roots() {
    let places = Places::new();
    let files: Vec<_> = (0..1500).map(|nth| places.workspace.join(nth.to_string())).collect();
    files.iter().for_each(|file| fs::write(file, "x").unwrap());
    let mut entries: Vec<_> = files.iter().map(|file| (file.as_path(), Access::Read)).collect();
    entries.push((&places.outside, Access::Write));
    let policy = policy(&entries, Network::Restricted);
    places.check("worker", &policy, "read", &files[1400], "ok");
    places.check("worker", &policy, "create", &places.outside, "ok");
    places.check("worker", &policy, "read", places.workspace.join("file"), "EACCES");
}

fn two_threads_are_refused() {
    let places = Places::new();
    let refused = places.confined("threaded", &read_only(Network::Restricted), "report", "");
    assert_eq!(refused, "refused: confine a process with 2 threads: only the calling one would be confined");
}

fn unrestricted_files_keep_their_rights() {
    let places = Places::new();
    let policy = Policy { files: Files::Unrestricted, network: Network::Restricted };
    for act in ["create", "chmod"] {
        places.check("process", &policy, act, target(act, &places.outside), "ok");
    }
    places.check("process", &policy, "socket", "2,1,0", "EPERM");
    if cfg!(target_arch = "x86_64") {
        places.check("process", &policy, "x32", "", "ENOSYS");
    }
    assert!(places.confined("process", &policy, "report", "").ends_with(" no-network []"));
}

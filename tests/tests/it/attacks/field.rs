//! The files of an attempt: a workspace and a place outside, changed by the set-up steps of a row.

use super::row::Row;
use portcullis_tests::{Place, executable};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, flock, makedev, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The content of `{out}/secret`. If an output contains it, the attack succeeded.
pub(super) const CANARY: &str = "the-canary-of-the-corpus";

/// `ws` is the workspace with `file` and `.git/config`; `out` lies outside and holds `file` and `secret`.
pub(super) struct Field {
    pub(super) place: Place,
    names: Vec<(&'static str, String)>,
    mounts: Vec<PathBuf>,
    locks: Vec<fs::File>,
    /// A process of the same user outside, which ends with its input.
    other: Child,
}

impl Field {
    /// Lays it out and takes the steps of the row.
    pub(super) fn new(row: &Row, gateway: u32) -> Self {
        let place = Place::new();
        for (file, content) in
            [("ws/file", "content"), ("ws/.git/config", "config"), ("out/file", "content"), ("out/secret", CANARY)]
        {
            place.put(file, content);
        }
        place.mode("out/secret", 0o600);
        let probe = place.path("probe");
        // A second name where that goes, for the attacker is large.
        let built = executable("portcullis-probe");
        fs::hard_link(&built, &probe).or_else(|_| fs::copy(&built, &probe).map(drop)).expect("bring the attacker");
        // Its command line holds the secret, too.
        let mut other = Command::new("/bin/cat");
        other.args(["-", CANARY]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let other = other.spawn().expect("start a process outside");
        let shown = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
        let names = vec![
            ("{place}", shown(place.path(""))),
            ("{ws}", shown(place.path("ws"))),
            ("{out}", shown(place.path("out"))),
            ("{secret}", shown(place.path("out/secret"))),
            ("{probe}", shown(probe)),
            ("{pid}", other.id().to_string()),
            ("{gateway}", gateway.to_string()),
            ("{below_nofile}", below_own_limit().to_string()),
        ];
        let mut field = Self { place, names, mounts: Vec::new(), locks: Vec::new(), other };
        for step in &row.setup {
            field.take(&field.text(step, ""));
        }
        field
    }

    /// A text with the names of this field in it.
    pub(super) fn text(&self, text: &str, each: &str) -> String {
        self.names.iter().fold(text.replace("{n}", each), |text, (name, value)| text.replace(name, value))
    }

    fn take(&mut self, step: &str) {
        if let Some(script) = step.strip_prefix("run ") {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-ec", script]).current_dir(self.place.path("")).env("HOME", self.place.path("")).stdin(Stdio::null());
            let output = shell.output().expect("start a shell");
            assert!(output.status.success(), "{step}: {}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        let words: Vec<&str> = step.split_whitespace().collect();
        let mode = |digits: &str| Mode::from_raw_mode(u32::from_str_radix(digits, 8).expect("an octal mode"));
        let done = match words[..] {
            ["file", path, ..] => {
                // The rest of the line, with `\n` for ends of lines.
                let content = step.splitn(3, ' ').nth(2).unwrap_or("").replace("\\n", "\n");
                parents(path).and_then(|()| fs::write(path, content))
            }
            ["dir", path] => fs::create_dir_all(path),
            ["link", path, target] => parents(path).and_then(|()| std::os::unix::fs::symlink(target, path)),
            ["hardlink", path, existing] => fs::hard_link(existing, path),
            ["copy", from, to] => parents(to).and_then(|()| fs::copy(from, to).map(drop)),
            ["rename", from, to] => fs::rename(from, to),
            ["remove", path] => fs::remove_dir_all(path).or_else(|_| fs::remove_file(path)),
            ["mode", digits, path] => fs::set_permissions(path, fs::Permissions::from_mode(mode(digits).bits())),
            ["fifo", path] => mknodat(CWD, path, FileType::Fifo, mode("666"), 0).map_err(Into::into),
            ["node", kind, major, minor, path] => {
                let kind = if kind == "b" { FileType::BlockDevice } else { FileType::CharacterDevice };
                let number = makedev(major.parse().expect("a number"), minor.parse().expect("a number"));
                mknodat(CWD, path, kind, mode("666"), number).map_err(Into::into)
            }
            ["mount", kind, path] => {
                fs::create_dir_all(path).expect("make the mount point");
                let mounted = mount(kind, path, kind, MountFlags::empty(), None);
                self.mounts.extend(mounted.is_ok().then(|| PathBuf::from(path)));
                mounted.map_err(Into::into)
            }
            ["lock", path] => fs::File::open(path).and_then(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                self.locks.push(file);
                Ok(())
            }),
            _ => panic!("no step `{step}`"),
        };
        done.unwrap_or_else(|error| panic!("{step}: {error}"));
    }

    /// Makes a check of a row's `after`; an error names the check that failed.
    pub(super) fn check(&self, check: &str) -> Result<(), String> {
        let check = self.text(check, "");
        let words: Vec<&str> = check.split_whitespace().collect();
        let found = |path: &str| fs::symlink_metadata(path);
        let is_so = match words[..] {
            ["present", path] => found(path).is_ok(),
            ["absent", path] => found(path).is_err(),
            // Neither set-ID bit, and no capabilities.
            ["plain", path] => {
                let capabilities = rustix::fs::lgetxattr(path, c"security.capability", &mut [0_u8; 64][..]);
                found(path).is_ok_and(|it| it.mode() & 0o6000 == 0) && capabilities.is_err()
            }
            ["holds", path, content] => fs::read_to_string(path).is_ok_and(|it| it.trim_end() == content),
            _ => panic!("no check `{check}`"),
        };
        if is_so { Ok(()) } else { Err(format!("afterwards not so: {check}")) }
    }

    /// All files outside and in `.git`: names, kinds, modes and contents.
    pub(super) fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut seen = BTreeMap::new();
        let mut open = vec![self.place.path("ws/.git"), self.place.path("out")];
        while let Some(path) = open.pop() {
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            let is_mount = self.mounts.contains(&path);
            if metadata.is_dir() && !is_mount {
                open.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
            }
            let content = if metadata.is_file() { fs::read(&path).unwrap_or_default() } else { Vec::new() };
            seen.insert(path, (metadata.mode(), content));
        }
        seen
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        drop(self.other.stdin.take());
        let _ended = self.other.wait();
        for mounted in self.mounts.iter().rev() {
            // Detached even if a process still uses it: the directory is removed next, and the content of the mount must not be
            // removed with it.
            unmount(mounted, UnmountFlags::DETACH).expect("take the mount away");
        }
    }
}

fn parents(path: &str) -> std::io::Result<()> {
    fs::create_dir_all(Path::new(path).parent().expect("a file has a parent"))
}

/// One less than the descriptors that the server may have: it is started with the limit of the test.
fn below_own_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX) - 1
}

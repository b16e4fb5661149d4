//! Random requests in random trees, in and without company. `tests/fuzz/README.md` says how to run them for longer.

#[path = "../../../../tests/fuzz/search.rs"]
mod search;

use super::super::{Answer, View, carry_out};
use super::{Tree, confined};
use portcullis_protocol::helper::{FsDone, FsOperation, OpenMode, WalkBounds};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use search::{Numbers, search};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Text that no request may show, in contents or in names.
const SECRET: &[u8] = b"only-outside";

/// Parts of the paths that are asked for.
const PARTS: [&str; 13] = ["a", "b", "c", "d", "f", "..", ".git", ".GIT", ".codex", "ro", "no", "out", "."];

/// Bytes as choices; nought when they are used up.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn next(&mut self) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first)
    }

    fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// A path below the workspace, or out of it by its own words.
    fn path(&mut self, workspace: &Path) -> Option<AbsolutePath> {
        let mut path = workspace.to_owned();
        for _ in 0..=self.next() % 4 {
            path.push(PARTS[self.next() % PARTS.len()]);
        }
        AbsolutePath::new(path).ok()
    }

    fn operation(&mut self, workspace: &Path) -> Option<FsOperation> {
        let path = self.path(workspace)?;
        let choice = self.next();
        let follow = choice & 0x80 == 0;
        let recursive = choice & 0x40 == 0;
        Some(match choice % 16 {
            0 | 1 => FsOperation::ReadFile { path, follow, limit: 1 << 20 },
            2..=4 => FsOperation::WriteFile { path, follow },
            5 => FsOperation::CreateDirectory { path, recursive, follow },
            6 => FsOperation::GetMetadata { path, follow },
            7 => FsOperation::Canonicalize { path },
            8 => FsOperation::ReadDirectory { path },
            9 => {
                let options =
                    WalkBounds { depth: 8, directories: 64, entries: 256, follow_directory_links: follow, prune_hidden: false };
                FsOperation::Walk { path, options }
            }
            10 | 11 => FsOperation::Remove { path, recursive, force: follow, follow },
            12 => FsOperation::Open { path, mode: if follow { OpenMode::Read } else { OpenMode::Replace } },
            13 => FsOperation::WatchMissing { path, others: Vec::new(), present: None },
            _copy => FsOperation::Copy { source: path, destination: self.path(workspace)?, recursive },
        })
    }
}

/// A workspace with something protected, something to be read only, something denied and links out of it, beside `out`.
fn plant(tree: &Tree) {
    for name in ["out/f", "out/a/only-outside", "ws/no/f"] {
        tree.put(name, SECRET);
    }
    for name in ["ws/.git/config", "ws/ro/f", "ws/a/f", "ws/b/c/d", "ws/f"] {
        tree.put(name, name.as_bytes());
    }
    for (name, to) in [("ws/c", "../out"), ("ws/d", "a"), ("ws/a/c", "../../out/f"), ("ws/b/a", "../.git"), ("ws/b/f", "../no/f")]
    {
        tree.link(name, to);
    }
}

fn policy(tree: &Tree) -> View {
    let [ws, ro, no] = ["ws", "ws/ro", "ws/no"].map(|name| tree.at(name));
    confined(&[(&ws, "write"), (&ro, "read"), (&no, "deny")])
}

/// Paths, modes and contents of the files that must not change.
fn kept(tree: &Tree) -> Vec<(PathBuf, u32, Option<Vec<u8>>)> {
    let mut todo: Vec<PathBuf> = ["out", "ws/.git", "ws/ro", "ws/no"].map(|name| tree.at(name)).into();
    let mut found = Vec::new();
    while let Some(path) = todo.pop() {
        let stat = path.symlink_metadata().unwrap();
        if stat.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        found.push((path.clone(), stat.mode(), std::fs::read(&path).ok()));
    }
    found.sort();
    found
}

/// Checks that a reply shows no file that lies outside or is denied.
fn check_answer(tree: &Tree, operation: &FsOperation, answer: &Answer) {
    let shows = |bytes: &[u8]| bytes.windows(SECRET.len()).any(|window| window == SECRET);
    assert!(!shows(&answer.payload), "{operation:?} shows a file outside");
    if let (Some(file), FsOperation::Open { .. } | FsOperation::ReadFile { .. }) = (&answer.descriptor, operation) {
        let mut content = [0; 64];
        // One that was opened for writing cannot be read.
        let got = rustix::io::pread(file, &mut content[..], 0).unwrap_or(0);
        assert!(!shows(&content[..got]), "{operation:?} passes on a file outside");
    }
    let outside = tree.at("out");
    match &answer.outcome {
        Ok(FsDone::Directory(entries)) => {
            let asked = operation.paths().0.as_path().as_os_str().as_bytes();
            assert!(shows(asked) || !entries.iter().any(|entry| shows(&entry.name.0)), "{operation:?} lists a file outside");
        }
        Ok(FsDone::Path(path)) => assert!(path.as_path().starts_with(tree.at("ws")) || tree.at("ws").starts_with(path.as_path())),
        Ok(FsDone::Walk { entries, .. }) => {
            assert!(entries.iter().all(|entry| !entry.path.as_path().starts_with(&outside)), "{operation:?} walks outside");
        }
        _other => {}
    }
}

#[test]
fn random_requests_show_and_change_nothing_else() {
    let seeds: Vec<Vec<u8>> = (0..32).map(|seed| Numbers::new(seed).bytes(200)).collect();
    let (tried, judged) = search("operations", &seeds, 400, |data| {
        let tree = Tree::new();
        plant(&tree);
        let before = kept(&tree);
        let view = policy(&tree);
        let ws = tree.at("ws");
        let (mut choices, mut done) = (Choices(data), false);
        while !choices.is_over() {
            let Some(operation) = choices.operation(&ws) else { continue };
            let answer = carry_out(&view, operation.clone(), b"written", Vec::new());
            check_answer(&tree, &operation, &answer);
            if let (FsOperation::WriteFile { path, .. }, Ok(_)) = (&operation, &answer.outcome) {
                assert_eq!(std::fs::read(path.as_path()).unwrap(), b"written", "{operation:?}");
                done = true;
            }
        }
        assert_eq!(kept(&tree), before);
        for name in [".codex", ".GIT", ".agents"] {
            assert!(tree.at("ws").join(name).symlink_metadata().is_err(), "{name} was made");
        }
        done
    });
    assert!(judged > tried / 20, "{judged} of {tried}");
}

#[test]
fn changing_links_lead_no_request_out() {
    let seeds: Vec<Vec<u8>> = (0..32).map(|seed| Numbers::new(seed).bytes(200)).collect();
    let (tried, judged) = search("resolution", &seeds, 200, |data| {
        let tree = Tree::new();
        plant(&tree);
        // Links may lead anywhere; a denied file could be moved by another process, which may do so.
        let outside = kept(&tree).into_iter().filter(|(path, ..)| path.starts_with(tree.at("out"))).collect::<Vec<_>>();
        let view = confined(&[(&tree.at("ws"), "write")]);
        std::fs::remove_dir_all(tree.at("ws/no")).unwrap();
        let (ws, over, mut done) = (tree.at("ws"), AtomicBool::new(false), false);
        std::thread::scope(|scope| {
            let seed = data.iter().fold(7_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(*byte)));
            let (tree, over) = (&tree, &over);
            scope.spawn(move || {
                let mut numbers = Numbers::new(seed);
                while !over.load(Ordering::Relaxed) {
                    turn(tree, &mut numbers);
                }
            });
            // However this ends, the other thread has to.
            let _end = End(over);
            let mut choices = Choices(data);
            while !choices.is_over() {
                let Some(operation) = choices.operation(&ws) else { continue };
                let answer = carry_out(&view, operation.clone(), b"written", Vec::new());
                check_answer(tree, &operation, &answer);
                done |= answer.outcome.is_ok();
            }
        });
        let after = kept_outside(&tree);
        assert_eq!(after, outside);
        done
    });
    assert!(judged > tried / 20, "{judged} of {tried}");
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn kept_outside(tree: &Tree) -> Vec<(PathBuf, u32, Option<Vec<u8>>)> {
    let mut found: Vec<_> = ["out", "out/f", "out/a", "out/a/only-outside"]
        .map(|name| tree.at(name))
        .into_iter()
        .map(|path| (path.clone(), path.symlink_metadata().unwrap().mode(), std::fs::read(&path).ok()))
        .collect();
    assert_eq!((tree.names("out"), tree.names("out/a")), (vec!["a".to_owned(), "f".to_owned()], vec!["only-outside".to_owned()]));
    found.sort();
    found
}

/// One change by an unconfined process: names change places, and become links out, directories or nothing.
fn turn(tree: &Tree, numbers: &mut Numbers) {
    // At the top, for a longer path could lead this thread itself out.
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "f"];
    let mut name = || tree.at("ws").join(NAMES[numbers.below(NAMES.len())]);
    let (one, other) = (name(), name());
    // A change that does not fit fails, which is fine.
    match numbers.below(5) {
        0 | 1 => drop(renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE)),
        2 => {
            let _taken = std::fs::remove_file(&one);
            let to = ["out", "out/a", "out/f", "out/a/only-outside", "ws", "ws/a"][numbers.below(6)];
            drop(symlink(tree.at(to), &one));
        }
        3 => drop(std::fs::create_dir(&one)),
        _plain => drop(std::fs::OpenOptions::new().write(true).create_new(true).open(&one)),
    }
}

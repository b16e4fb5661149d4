//! What the tests of the operations share: a tree of files, and policies without a kernel behind them.

mod fuzz;

use super::View;
use portcullis_protocol::helper::FsError;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, DenyGlob, Files, Grant, Grants, Network, Policy};
use portcullis_sandbox::roots::Roots;
use std::fs;
use std::path::{Path, PathBuf};

/// A directory that goes away with the test.
pub(super) struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    pub(super) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(super) fn root(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root().join(name)
    }

    pub(super) fn path(&self, name: impl AsRef<Path>) -> AbsolutePath {
        AbsolutePath::new(self.at(name)).unwrap()
    }

    pub(super) fn put(&self, name: &str, content: &[u8]) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(super) fn get(&self, name: &str) -> Vec<u8> {
        fs::read(self.at(name)).unwrap()
    }

    pub(super) fn mkdir(&self, name: &str) {
        fs::create_dir_all(self.at(name)).unwrap();
    }

    pub(super) fn link(&self, name: &str, text: impl AsRef<Path>) {
        std::os::unix::fs::symlink(text, self.at(name)).unwrap();
    }

    pub(super) fn fifo(&self, name: &str) {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, self.at(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }

    pub(super) fn names(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(self.at(name)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A policy under which the whole tree is writable.
    pub(super) fn writable(&self) -> View {
        confined(&[(self.root(), "write")])
    }
}

/// The error number with which the policy said no.
#[track_caller]
pub(super) fn refusal<T: std::fmt::Debug>(result: Result<T, FsError>) -> i32 {
    match result {
        Err(FsError::Denied(errno, Some(_explained))) => errno,
        other => panic!("{other:?} is no refusal by the policy with its reason"),
    }
}

/// A view under a policy of these entries; the kernel is not told.
pub(super) fn confined(entries: &[(&Path, &str)]) -> View {
    confined_with(entries, &[])
}

pub(super) fn confined_with(entries: &[(&Path, &str)], deny_globs: &[DenyGlob]) -> View {
    let policy = policy(entries, deny_globs);
    let roots = Roots::open(&policy).unwrap();
    View::confined(&policy, roots, &[]).unwrap()
}

pub(super) fn policy(entries: &[(&Path, &str)], deny_globs: &[DenyGlob]) -> Policy {
    let entries: Vec<Grant> = entries
        .iter()
        .map(|(path, access)| {
            let access = match *access {
                "read" => Access::Read,
                "write" => Access::Write,
                _deny => Access::Deny,
            };
            Grant::new(AbsolutePath::new(path).unwrap(), access)
        })
        .collect();
    let grants = Grants::new(entries, deny_globs.to_vec()).unwrap();
    Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
}

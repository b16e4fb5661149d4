//! A directory of a test's own, outside of every directory that policies name.

use portcullis_protocol::path::AbsolutePath;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// A temporary directory that is removed with its value.
#[derive(Debug)]
pub struct Place {
    directory: tempfile::TempDir,
    path: PathBuf,
}

impl Place {
    /// Makes one below `/var/tmp`: policies with `slash_tmp` must not reach it by accident.
    ///
    /// # Panics
    /// The system refuses, which no test can do without.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "a test says that it makes a directory")]
    pub fn new() -> Self {
        let directory =
            tempfile::Builder::new().prefix("portcullis-test-").tempdir_in("/var/tmp").expect("make a directory in /var/tmp");
        let path = directory.path().canonicalize().expect("resolve the directory");
        Self { directory, path }
    }

    /// A path in it; the empty name is the directory itself.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    /// The same as a URI.
    ///
    /// # Panics
    /// Never: the path is absolute.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        AbsolutePath::new(self.path(name)).expect("the path is absolute").to_uri()
    }

    /// Writes a file, its parents first, and answers its URI.
    ///
    /// # Panics
    /// The system refuses.
    pub fn put(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a file has a parent")).expect("make the parents");
        fs::write(&path, content).expect("write the file");
        self.uri(name)
    }

    /// Makes a directory and answers its URI.
    ///
    /// # Panics
    /// The system refuses.
    pub fn directory(&self, name: &str) -> String {
        fs::create_dir_all(self.path(name)).expect("make the directory");
        self.uri(name)
    }

    /// Makes a link and answers its URI.
    ///
    /// # Panics
    /// The system refuses.
    pub fn link(&self, name: &str, target: impl AsRef<Path>) -> String {
        std::os::unix::fs::symlink(target, self.path(name)).expect("make the link");
        self.uri(name)
    }

    /// Sets a mode.
    ///
    /// # Panics
    /// The system refuses.
    pub fn mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).expect("set the mode");
    }

    /// A file's content.
    ///
    /// # Panics
    /// It cannot be read.
    #[must_use]
    pub fn content(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("read the file")
    }

    /// Whether something is there, a dangling link included.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.path(name).symlink_metadata().is_ok()
    }

    /// Keeps the directory alive until here; for tests whose last use of it is a path.
    pub fn done(self) {
        drop(self.directory);
    }
}

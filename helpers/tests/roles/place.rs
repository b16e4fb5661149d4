//! Temporary directories of tests.

use std::fs;
use std::path::{Path, PathBuf};

/// A temporary directory on a disk, by its path without links. It is removed when this is dropped.
pub(crate) struct Place {
    _directory: tempfile::TempDir,
    top: PathBuf,
}

impl Place {
    /// A directory with directories in it, each with those above it.
    pub(crate) fn with(names: &[&str]) -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let place = Self { top: directory.path().canonicalize().unwrap(), _directory: directory };
        for name in names {
            fs::create_dir_all(place.at(name)).unwrap();
        }
        place
    }

    pub(crate) fn top(&self) -> &Path {
        &self.top
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }
}

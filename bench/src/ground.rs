//! What rows work on: a directory with files, and what they say of it.

use crate::Failure;
use portcullis_protocol::path::AbsolutePath;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// Directories for policies of their own.
pub(crate) const PLACES: usize = 1000;

/// The directory. It is gone with this.
pub(crate) struct Ground {
    place: TempDir,
}

impl Ground {
    /// Makes the files: `read-BYTES`, 1,000 names in `flat`, 10,000 files in `deep`, and directories in `places`.
    pub(crate) fn new() -> Result<Self, Failure> {
        // Outside of /tmp, which policies may grant as such.
        let place = tempfile::Builder::new().prefix("portcullis-bench-").tempdir_in("/var/tmp")?;
        for bytes in [1_usize << 10, 64 << 10, 1 << 20, 8 << 20] {
            fs::write(place.path().join(format!("read-{bytes}")), vec![b'x'; bytes])?;
        }
        for (directory, many) in [("flat", 1), ("deep", 100)] {
            for outer in 0..many {
                let inner = place.path().join(directory).join(if many == 1 { String::new() } else { format!("{outer:03}") });
                fs::create_dir_all(&inner)?;
                for nth in 0..if many == 1 { 1000 } else { 99 } {
                    fs::write(inner.join(format!("file-{nth:04}")), "")?;
                }
            }
        }
        for nth in 0..PLACES {
            fs::create_dir_all(place.path().join(format!("places/{nth}")))?;
        }
        Ok(Self { place })
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// As every server of this wire takes it.
    pub(crate) fn uri(&self, name: &str) -> String {
        let path = if name.is_empty() { self.place.path().to_owned() } else { self.file(name) };
        AbsolutePath::new(path).map(|path| path.to_uri()).unwrap_or_default()
    }

    /// A sandbox of these entries, in the spelling that every server of this wire knows.
    pub(crate) fn sandbox(&self, entries: &[Value]) -> Value {
        json!({
            "permissions": {"type": "managed", "network": "restricted",
                "file_system": {"type": "restricted", "entries": entries}},
            "cwd": self.uri(""), "workspaceRoots": [self.uri("")], "windowsSandboxLevel": "disabled",
        })
    }

    /// Everything may be read, nothing changed.
    pub(crate) fn read_only(&self) -> Value {
        self.sandbox(&[special("root", "read")])
    }

    /// Everything may be read, the workspace changed.
    pub(crate) fn workspace_write(&self) -> Value {
        self.sandbox(&[special("root", "read"), special("project_roots", "write")])
    }

    /// What programs need and the workspace may be read, and so many of its places by an entry of their own.
    pub(crate) fn reads_restricted(&self, places: std::ops::Range<usize>) -> Value {
        let mut entries = vec![special("minimal", "read"), special("project_roots", "read")];
        entries.extend(
            places.map(|nth| json!({"path": {"type": "path", "path": self.uri(&format!("places/{nth}"))}, "access": "read"})),
        );
        self.sandbox(&entries)
    }
}

fn special(kind: &str, access: &str) -> Value {
    json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access})
}

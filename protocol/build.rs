//! Stamps the build: gateway and helper must be one build, and are when this hash is equal.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut files = Vec::new();
    for folder in ["src", "../sandbox/src", "../helpers/src", "../policies"] {
        collect(&here.join(folder), &mut files);
        println!("cargo::rerun-if-changed={}", here.join(folder).display());
    }
    files.sort();
    // FNV-1a: the hash tells builds apart by accident, not by malice; who can replace the executable has won anyway.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for file in &files {
        for byte in fs::read(file).unwrap_or_default() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=PORTCULLIS_BUILD={}-{hash:016x}", env::var("CARGO_PKG_VERSION").unwrap_or_default());
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    // A crate that was published alone lies beside none of the others: then its own sources must do.
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}

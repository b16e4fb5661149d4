//! The machine's core handler, where `core_pattern` names a socket.
//!
//! A limit of 1 for core files keeps the kernel from starting a handler behind a pipe. It does not keep it from connecting to a
//! socket (`@` at the beginning, Linux 6.16): the crash of a confined process reaches that handler with an image of its memory.

use portcullis_protocol::environment::LayerState;
use std::fs;

const PATTERN: &str = "/proc/sys/kernel/core_pattern";

/// Says which kinds of memory an image contains, for a process and what it executes and forks (core(5)).
const FILTER: &str = "/proc/self/coredump_filter";

/// If this machine's crashes reach a handler by its socket: that, with a remedy.
#[must_use]
pub fn reached() -> Option<LayerState> {
    by_socket(&fs::read(PATTERN).ok()?).then(|| LayerState {
        name: "core-dumps".to_owned(),
        available: false,
        reason: format!(
            "{PATTERN} names a socket: each crash in a sandbox connects to its handler, without the content of memory"
        ),
        remedy: format!("write a file name, or a handler behind `|`, into {PATTERN}"),
    })
}

/// Leaves memory out of what a handler behind a socket gets of this process and all that it executes. Elsewhere debuggers inside
/// that write images of their own keep the default. Called while the process is dumpable: then its files in /proc are its own.
pub fn tell_little() {
    if fs::read(PATTERN).is_ok_and(|pattern| by_socket(&pattern)) {
        // A /proc that cannot be written leaves the image as it is; the report says that the handler is reached.
        let _as_it_is = fs::write(FILTER, "0");
    }
}

fn by_socket(pattern: &[u8]) -> bool {
    pattern.starts_with(b"@")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_behind_a_socket_is_known_by_its_pattern() {
        for pattern in ["@/run/handler.sock\n", "@@/run/handler.sock\n"] {
            assert!(by_socket(pattern.as_bytes()), "{pattern}");
        }
        for pattern in ["core\n", "|/usr/lib/systemd/systemd-coredump %P\n", "/var/crash/@core\n", ""] {
            assert!(!by_socket(pattern.as_bytes()), "{pattern}");
        }
        // Writing the filter changes what an image of this process contains, and what its children inherit.
        let before = fs::read_to_string(FILTER);
        assert!(before.is_err() || fs::write(FILTER, "0").is_ok());
        if let Ok(before) = before {
            assert_eq!(fs::read_to_string(FILTER).unwrap().trim(), "00000000");
            fs::write(FILTER, format!("0x{}", before.trim())).unwrap();
        }
    }
}

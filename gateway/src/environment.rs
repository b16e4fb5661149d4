//! What `environment/info` answers.

use crate::config::Config;
use crate::limits::LIMITS;
use portcullis_protocol::environment::{Capabilities, EnvironmentInfo, Extensions, Shell};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::signal::Signal;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The machine as clients see it; built once at the start.
pub(crate) fn describe(config: &Config) -> EnvironmentInfo {
    let user = passwd_line();
    let shell = config
        .variable("SHELL")
        .map(PathBuf::from)
        .filter(|shell| shell.is_absolute())
        .or_else(|| user.as_ref().and_then(|line| line.split(':').nth(6)).map(PathBuf::from))
        .filter(|shell| shell.is_absolute())
        .unwrap_or_else(|| PathBuf::from("/bin/sh"));
    let home = config
        .variable("HOME")
        .map(PathBuf::from)
        .or_else(|| user.as_ref().and_then(|line| line.split(':').nth(5)).map(PathBuf::from));
    let temp = config.variable("TMPDIR").map(PathBuf::from).filter(|dir| dir.is_absolute()).unwrap_or_else(|| "/tmp".into());
    EnvironmentInfo {
        shell: Shell {
            name: shell.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            path: shell.to_string_lossy().into_owned(),
        },
        executor_version: env!("CARGO_PKG_VERSION").to_owned(),
        provider_id: provider_id(&config.paths.executable),
        cwd: wire(&config.cwd),
        user_home_dir: wire(&home.unwrap_or_else(|| PathBuf::from("/"))),
        platform_os: "linux".to_owned(),
        prepend_path_dirs: Vec::new(),
        temporary_directories: Vec::new(),
        temp_dir: wire(&temp),
        capabilities: Capabilities {
            sandboxed_file_streaming: true,
            file_write_streaming: true,
            fs_watch_missing: true,
            http_header_env_vars: true,
            ..Capabilities::default()
        },
        enforcement: None,
        extensions: None,
        limits: None,
    }
}

/// The operator's limits by their names.
pub(crate) fn limits(config: &Config) -> BTreeMap<String, u64> {
    LIMITS.iter().map(|limit| (limit.name.to_owned(), limit.value(config))).collect()
}

/// What this server understands beyond the wire that its clients know.
pub(crate) fn extensions(config: &Config) -> Extensions {
    Extensions {
        process_resize: true,
        process_close_stdin: true,
        process_signals: Signal::names().map(str::to_owned).collect(),
        process_list: true,
        operation_id: true,
        file_operation_id: true,
        keep_handles: true,
        binary_frames: true,
        take_over: true,
        process_bounds: true,
        process_limits: true,
        max_retention_ms: u64::try_from(config.max_retention.as_millis()).unwrap_or(u64::MAX),
        process_events: true,
        process_acknowledge: true,
    }
}

fn wire(path: &Path) -> Option<WirePath> {
    AbsolutePath::new(path).ok().map(WirePath::Local)
}

/// Names this installation: the machine and the executable, hashed, so that it tells nothing.
fn provider_id(executable: &Path) -> String {
    let mut hash = Sha256::new();
    hash.update(system_file("/etc/machine-id").unwrap_or_default());
    hash.update(executable.as_os_str().as_encoded_bytes());
    let mut id = "sha256:".to_owned();
    for byte in hash.finalize() {
        let _infallible = write!(id, "{byte:02x}");
    }
    id
}

/// The home directory of this user in the user database.
pub(crate) fn account_home() -> Option<PathBuf> {
    passwd_line()?.split(':').nth(5).map(PathBuf::from).filter(|home| home.is_absolute())
}

/// The line of this user in the user database.
fn passwd_line() -> Option<String> {
    let user = rustix::process::geteuid().as_raw().to_string();
    let users = String::from_utf8_lossy(&system_file("/etc/passwd")?).into_owned();
    users.lines().find(|line| line.split(':').nth(2) == Some(&user)).map(str::to_owned)
}

/// A file that the gateway itself names, never a client.
fn system_file(path: &'static str) -> Option<Vec<u8>> {
    #[expect(clippy::disallowed_methods, reason = "a constant path of the system, read once at the start")]
    std::fs::read(path).ok()
}

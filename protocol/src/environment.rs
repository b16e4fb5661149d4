//! The machine as a client sees it.

use crate::helper::NamespaceLayer;
use crate::path::WirePath;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Result of `environment/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentStatus {
    /// `ready`.
    pub status: String,
}

/// Result of `environment/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentInfo {
    /// The user's shell.
    pub shell: Shell,
    /// Version of the server.
    #[serde(default)]
    pub executor_version: String,
    /// The same in every run of one installation.
    #[serde(default)]
    pub provider_id: String,
    /// Where the server was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<WirePath>,
    /// The user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_home_dir: Option<WirePath>,
    /// `linux`.
    #[serde(default)]
    pub platform_os: String,
    /// Directories that belong before PATH.
    #[serde(default)]
    pub prepend_path_dirs: Vec<WirePath>,
    /// Directories that `tmpdir` entries mean.
    #[serde(default)]
    pub temporary_directories: Vec<WirePath>,
    /// Where temporary files go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temp_dir: Option<WirePath>,
    /// What this server can do beyond the base.
    #[serde(default)]
    pub capabilities: Capabilities,
    /// What can be enforced here, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Box<Enforcement>>,
    /// What it understands beyond the wire that its clients know, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Box<Extensions>>,
    /// The operator's limits by their names, if that was asked for. 0 means that there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<BTreeMap<String, u64>>,
}

/// Parameters of `environment/info`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InfoParams {
    /// Answer also what can be enforced here.
    pub enforcement: bool,
    /// Answer also what is understood beyond the wire that clients know.
    pub extensions: bool,
    /// Answer also the operator's limits.
    pub limits: bool,
}

/// What a server understands beyond the wire that its clients know. Not among the [`Capabilities`], whose keys clients compare.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Extensions {
    /// `process/resize`, and `size` of `process/start`.
    pub process_resize: bool,
    /// `process/closeStdin`
    pub process_close_stdin: bool,
    /// The names that `process/signal` takes.
    pub process_signals: Vec<String>,
    /// `process/list`
    pub process_list: bool,
    /// `operationId` of `process/start`.
    pub operation_id: bool,
    /// `operationId` of the file calls that change something.
    pub file_operation_id: bool,
    /// `events` of `process/read`, and `whenFull` of `process/start`.
    pub process_events: bool,
    /// `process/acknowledge`, and `acknowledge` of `initialize`.
    pub process_acknowledge: bool,
    /// `keepHandles` of `initialize`.
    pub keep_handles: bool,
    /// `takeOver` of `initialize`.
    pub take_over: bool,
    /// `stallMs`, `ceilingMs` and `drainMs` of `process/start`, and `graceMs` of `process/terminate`.
    pub process_bounds: bool,
    /// `limits` of `process/start`, and `report` of `process/terminate`.
    pub process_limits: bool,
    /// `binaryFrames` of `initialize`, over links that carry such messages.
    pub binary_frames: bool,
    /// What `retentionMs` of `initialize` may ask for at most; 0 if it is not understood.
    pub max_retention_ms: u64,
}

/// What can be enforced on requests and processes here, and what not and why, as found when the server started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Enforcement {
    /// Release of the kernel.
    pub kernel: String,
    /// Of the kernel's Landlock; 0 for none.
    pub landlock_abi: u32,
    /// Each layer.
    pub layers: Vec<LayerState>,
    /// The namespaces of processes, as they were tried.
    pub namespaces: NamespaceLayer,
    /// The tables of system calls that this version has.
    pub seccomp: SeccompTables,
}

/// One layer on a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerState {
    /// `landlock`, `seccomp`, `cgroups`, `namespaces`, `own proc` or `own users`.
    pub name: String,
    /// Whether it can be used.
    pub available: bool,
    /// What was found.
    pub reason: String,
    /// What to do about it, maybe in several lines; empty if nothing need be done.
    pub remedy: String,
}

/// Tables of system calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeccompTables {
    /// Each once.
    pub tables: Vec<SeccompTable>,
}

/// A table of system calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeccompTable {
    /// As in the name of its file.
    pub name: String,
    /// Of the program that the kernel gets, in hexadecimal: two servers with the same enforce the same.
    pub sha256: String,
}

/// A shell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shell {
    /// As in `bash`.
    pub name: String,
    /// As in `/bin/bash`.
    pub path: String,
}

/// What a server can do; true only for what is built. A client does not ask for what is false.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Capabilities {
    /// `networkProxy` of `process/start`.
    pub network_proxy_launch: bool,
    /// `network/policyRequest`.
    pub network_proxy_review_domains: bool,
    /// Credentials masked by a proxy.
    pub credential_masking: bool,
    /// The same for providers of the client.
    pub credential_masking_custom_providers: bool,
    /// A sandbox on `capabilityRoots/discoverV1`.
    pub capability_discovery_sandbox: bool,
    /// `fs/watchMissing`.
    pub fs_watch_missing: bool,
    /// `capabilities/discoverV2`.
    pub capability_discovery_v2: bool,
    /// `environmentConfig/read`.
    pub environment_config_read: bool,
    /// `valueEnvVar` of `http/request`.
    pub http_header_env_vars: bool,
    /// `fs/open` with a sandbox.
    pub sandboxed_file_streaming: bool,
    /// `fs/writeBlock`.
    pub file_write_streaming: bool,
    /// `shellSnapshot` of `process/start`.
    pub shell_snapshot_v2: bool,
    /// A Windows sandbox.
    pub windows_mxc: bool,
    /// Root-write policies keep device files usable.
    pub linux_root_write_preserves_devices: bool,
    /// Approved root-write policies keep their restrictions.
    pub linux_approved_root_write_preserves_restrictions: bool,
}

/// Parameters of `environmentConfig/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadParams {
    /// Whose configuration.
    pub cwd: WirePath,
    /// Keys of the configuration, each as its segments.
    pub config_paths: Vec<Vec<String>>,
    /// Keys of the requirements, each as its segments.
    pub requirements_paths: Vec<Vec<String>>,
}

/// Result of `environmentConfig/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadResult {
    /// The user's home.
    pub user_home_dir: WirePath,
    /// The server's own home.
    pub codex_home_dir: WirePath,
    /// The machine's name.
    pub hostname: String,
    /// The configuration.
    pub config: ConfigLayers,
    /// The requirements.
    pub requirements: ConfigLayers,
}

/// Layers of a configuration, the weakest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayers {
    /// Each file.
    pub layers: Vec<ConfigLayer>,
    /// Where a layer of the client's own belongs.
    pub cloud_insertion_index: u64,
}

/// One file of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayer {
    /// Which.
    pub source: String,
    /// What its relative paths start from.
    pub base_dir: WirePath,
    /// Its text, reduced to the keys that were asked for.
    pub toml: String,
}

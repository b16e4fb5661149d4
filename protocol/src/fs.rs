//! `fs/*`: parameters and results.

use crate::base64::{Checked, Chunk};
use crate::helper::OpenMode;
use crate::path::WirePath;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Parameters with a path, a sandbox and a choice to follow links: `fs/readFile`, `fs/getMetadata`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathParams {
    /// The path.
    pub path: WirePath,
    /// False refuses a link in any component.
    #[serde(default)]
    pub follow_symlinks: Option<bool>,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Parameters with a path and a sandbox: `fs/canonicalize`, `fs/readDirectory`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlainPathParams {
    /// The path.
    pub path: WirePath,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Result of `fs/readFile`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadFileResult {
    /// The content.
    pub data_base64: Chunk,
}

/// Parameters of `fs/writeFile`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteFileParams {
    /// The path.
    pub path: WirePath,
    /// The content.
    pub data_base64: Checked,
    /// False refuses a link in any component.
    #[serde(default)]
    pub follow_symlinks: Option<bool>,
    /// Names this change, so that it can be sent again: 1 to 256 bytes. The same call with the same operation id is answered as
    /// the first was; nothing is done twice.
    #[serde(default)]
    pub operation_id: Option<String>,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Parameters of `fs/createDirectory`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateDirectoryParams {
    /// The path.
    pub path: WirePath,
    /// Make the parents too; true if absent.
    #[serde(default)]
    pub recursive: Option<bool>,
    /// False refuses a link in any component.
    #[serde(default)]
    pub follow_symlinks: Option<bool>,
    /// Names this change, so that it can be sent again: 1 to 256 bytes. The same call with the same operation id is answered as
    /// the first was; nothing is done twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<String>,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Parameters of `fs/remove`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoveParams {
    /// The path.
    pub path: WirePath,
    /// Remove what is below too; true if absent.
    #[serde(default)]
    pub recursive: Option<bool>,
    /// What is missing is no error; true if absent.
    #[serde(default)]
    pub force: Option<bool>,
    /// False refuses a link in any component.
    #[serde(default)]
    pub follow_symlinks: Option<bool>,
    /// Names this change, so that it can be sent again: 1 to 256 bytes. The same call with the same operation id is answered as
    /// the first was; nothing is done twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<String>,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Parameters of `fs/copy`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopyParams {
    /// What to copy.
    pub source_path: WirePath,
    /// Where to.
    pub destination_path: WirePath,
    /// Copy what is below too.
    pub recursive: bool,
    /// Names this change, so that it can be sent again: 1 to 256 bytes. The same call with the same operation id is answered as
    /// the first was; nothing is done twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<String>,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Result of `fs/getMetadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetadataResult {
    /// The target is a directory.
    pub is_directory: bool,
    /// The target is a regular file.
    pub is_file: bool,
    /// The path itself is a link.
    pub is_symlink: bool,
    /// Bytes of the target.
    pub size: u64,
    /// Birth, in milliseconds since 1970; 0 if unknown.
    pub created_at_ms: i64,
    /// Last change of content, in milliseconds since 1970; 0 if unknown.
    pub modified_at_ms: i64,
}

/// Result of `fs/canonicalize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalizeResult {
    /// Without links.
    pub path: WirePath,
}

/// Result of `fs/readDirectory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDirectoryResult {
    /// In directory order.
    pub entries: Vec<DirectoryEntryResult>,
}

/// A name in a [`ReadDirectoryResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryEntryResult {
    /// Bytes that are not UTF-8 read U+FFFD.
    pub file_name: String,
    /// A directory, or a link to one.
    pub is_directory: bool,
    /// A regular file, or a link to one.
    pub is_file: bool,
}

/// Parameters of `fs/walk`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WalkParams {
    /// The root; not listed itself.
    pub path: WirePath,
    /// Its bounds.
    pub options: WalkOptions,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

/// Bounds of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WalkOptions {
    /// 0 lists the children of the root; at most 64.
    pub max_depth: u64,
    /// Directories to read, 1 to 10,000.
    pub max_directories: u64,
    /// Entries to list, 1 to 50,000.
    pub max_entries: u64,
    /// Enter directories behind links.
    pub follow_directory_symlinks: bool,
    /// Do not enter directories whose name begins with a dot.
    #[serde(default)]
    pub prune_hidden_directories: bool,
}

/// Result of `fs/walk`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkResult {
    /// Breadth first, sorted by bytes within a directory.
    pub entries: Vec<WalkEntryResult>,
    /// What could not be listed.
    pub errors: Vec<WalkErrorResult>,
    /// Whether a bound cut the list.
    pub truncated: bool,
}

/// An entry of a [`WalkResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkEntryResult {
    /// Where.
    pub path: WirePath,
    /// What.
    pub kind: WalkKind,
}

/// What a walk found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WalkKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
}

/// An error of a [`WalkResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkErrorResult {
    /// Where.
    pub path: WirePath,
    /// Why.
    pub message: String,
}

/// Parameters of `fs/open`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenParams {
    /// The client's name for the handle, at most 32 bytes.
    pub handle_id: String,
    /// The path.
    pub path: WirePath,
    /// `read` if absent.
    #[serde(default = "read")]
    pub mode: OpenMode,
    /// What the request may touch; none: everything.
    #[serde(default, alias = "sandboxPolicy", alias = "policy", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<RawValue>>,
}

fn read() -> OpenMode {
    OpenMode::Read
}

/// Parameters of `fs/close`, and result of `fs/open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HandleParams {
    /// The handle.
    pub handle_id: String,
}

/// Parameters of `fs/readBlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadBlockParams {
    /// The handle.
    pub handle_id: String,
    /// Where to begin, in bytes.
    pub offset: u64,
    /// How many bytes, 1 to 1,048,576.
    pub len: u64,
}

/// Result of `fs/readBlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadBlockResult {
    /// The bytes.
    pub chunk: Chunk,
    /// Whether fewer came than were asked for.
    pub eof: bool,
}

/// Parameters of `fs/writeBlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteBlockParams {
    /// The handle.
    pub handle_id: String,
    /// Where to begin, in bytes.
    pub offset: u64,
    /// The bytes, 1 to 1,048,576.
    pub chunk: Chunk,
}

/// The empty result `{}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// Parameters of `fs/watchMissing`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchMissingParams {
    /// The client's name for the watch.
    pub watch_id: u64,
    /// Paths that do not exist; news of one of them is what is wanted.
    pub missing: Vec<WirePath>,
    /// The deepest directory on the way that exists.
    #[serde(default)]
    pub present: Option<WirePath>,
}

/// Result of `fs/watchMissing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchMissingResult {
    /// False: the client must look for itself.
    pub watching: bool,
}

/// Parameters of the notification `fs/missingChanged`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingChangedNotice {
    /// The watch, which has ended with this.
    pub watch_id: u64,
}

//! Files: what a worker is asked and what it answers.

use super::errno_text;
use crate::denial::Denial;
use crate::path::{AbsolutePath, Bytes};
use serde::{Deserialize, Serialize};

/// One request to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FsRequest {
    /// Echoed in the reply.
    pub id: u64,
    /// What to do.
    pub operation: FsOperation,
}

/// What a worker can do. `follow: false` refuses a link in any component.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsOperation {
    /// Read a whole regular file of at most `limit` bytes.
    ReadFile {
        /// On what.
        path: AbsolutePath,
        /// False refuses a link in any component.
        follow: bool,
        /// In bytes.
        limit: u64,
    },
    /// Open a regular file and hand its descriptor back.
    Open {
        /// On what.
        path: AbsolutePath,
        /// How.
        mode: OpenMode,
    },
    /// Replace a regular file's content by the frame's payload, or by the content of its one descriptor.
    WriteFile {
        /// On what.
        path: AbsolutePath,
        /// False refuses a link in any component.
        follow: bool,
    },
    /// Make a directory, and its parents if `recursive`.
    CreateDirectory {
        /// On what.
        path: AbsolutePath,
        /// What is below, or the parents, too.
        recursive: bool,
        /// False refuses a link in any component.
        follow: bool,
    },
    /// Type, size and times.
    GetMetadata {
        /// On what.
        path: AbsolutePath,
        /// False refuses a link in any component.
        follow: bool,
    },
    /// Resolve all links.
    Canonicalize {
        /// On what.
        path: AbsolutePath,
    },
    /// List one directory.
    ReadDirectory {
        /// On what.
        path: AbsolutePath,
    },
    /// List a tree, breadth first.
    Walk {
        /// On what.
        path: AbsolutePath,
        /// Its bounds.
        options: WalkBounds,
    },
    /// Remove a file, a link or a tree.
    Remove {
        /// On what.
        path: AbsolutePath,
        /// What is below, or the parents, too.
        recursive: bool,
        /// What is missing is no error.
        force: bool,
        /// False refuses a link in any component.
        follow: bool,
    },
    /// Copy a file, a link or a tree.
    Copy {
        /// What.
        source: AbsolutePath,
        /// Where to.
        destination: AbsolutePath,
        /// What is below, or the parents, too.
        recursive: bool,
    },
    /// Watch for what is not there: the answer's descriptor tells of names in directories (inotify(7)).
    WatchMissing {
        /// One of the paths.
        path: AbsolutePath,
        /// All others.
        others: Vec<AbsolutePath>,
        /// What must be there.
        present: Option<AbsolutePath>,
    },
}

impl FsOperation {
    /// The path that it works on, and where it copies that to.
    #[must_use]
    pub fn paths(&self) -> (&AbsolutePath, Option<&AbsolutePath>) {
        match self {
            Self::Copy { source, destination, .. } => (source, Some(destination)),
            Self::ReadFile { path, .. }
            | Self::Open { path, .. }
            | Self::WriteFile { path, .. }
            | Self::CreateDirectory { path, .. }
            | Self::GetMetadata { path, .. }
            | Self::Canonicalize { path }
            | Self::ReadDirectory { path }
            | Self::Walk { path, .. }
            | Self::WatchMissing { path, .. }
            | Self::Remove { path, .. } => (path, None),
        }
    }

    /// Whether it changes the file system; such operations keep their order within a session.
    #[must_use]
    pub fn is_mutation(&self) -> bool {
        match self {
            Self::ReadFile { .. }
            | Self::GetMetadata { .. }
            | Self::Canonicalize { .. }
            | Self::ReadDirectory { .. }
            | Self::Walk { .. }
            | Self::WatchMissing { .. } => false,
            Self::Open { mode, .. } => *mode == OpenMode::Replace,
            Self::WriteFile { .. } | Self::CreateDirectory { .. } | Self::Remove { .. } | Self::Copy { .. } => true,
        }
    }
}

/// How `fs/open` opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OpenMode {
    /// For reading.
    Read,
    /// For writing: created or truncated in place at once.
    Replace,
}

/// Bounds of a walk, checked by the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkBounds {
    /// Levels below the root whose children are listed; 0 lists the children of the root.
    pub depth: u32,
    /// Directories to read, the root included.
    pub directories: u32,
    /// Entries to list.
    pub entries: u32,
    /// Enter directories behind links, each once.
    pub follow_directory_links: bool,
    /// List directories whose name begins with a dot, but do not enter them.
    pub prune_hidden: bool,
}

/// A worker's reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsReply {
    /// Of the request.
    pub id: u64,
    /// What came of it.
    pub outcome: Result<FsDone, FsError>,
}

/// What a successful operation answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsDone {
    /// A change was made.
    Changed,
    /// The frame's payload is the content.
    Content,
    /// The frame's one descriptor is an open file, or holds the content from its start.
    Descriptor {
        /// Bytes when it was opened.
        size: u64,
    },
    /// Of a getMetadata.
    Metadata(FileMetadata),
    /// Of a canonicalize.
    Path(AbsolutePath),
    /// Of a readDirectory, in directory order.
    Directory(Vec<DirectoryEntry>),
    /// Of a walk.
    Walk {
        /// In the order of the walk.
        entries: Vec<WalkEntry>,
        /// What could not be listed: path and text.
        errors: Vec<(AbsolutePath, String)>,
        /// A bound cut the list.
        truncated: bool,
    },
    /// Of a watch: the number of a directory's watch, and the name that is waited for there. None: something is there already, or
    /// cannot be watched, and there is no descriptor.
    Watching(Vec<(i32, Bytes)>),
}

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMetadata {
    /// The target is a directory.
    pub is_directory: bool,
    /// The target is a regular file.
    pub is_file: bool,
    /// The path itself is a link.
    pub is_symlink: bool,
    /// Bytes of the target.
    pub size: u64,
    /// Birth in milliseconds since 1970; 0 if unknown.
    pub created_ms: i64,
    /// Change of content in milliseconds since 1970; 0 if unknown.
    pub modified_ms: i64,
}

/// A name in a directory; the flags follow links.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// The name's bytes.
    pub name: Bytes,
    /// A directory, or a link to one.
    pub is_directory: bool,
    /// A regular file, or a link to one.
    pub is_file: bool,
}

/// A path of a walk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkEntry {
    /// Below the walk's root as the client named it.
    pub path: AbsolutePath,
    /// A directory; otherwise a regular file.
    pub is_directory: bool,
}

/// Why an operation failed. Nothing was changed, unless the text says how far it came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FsError {
    /// The system said no.
    #[error("{}", errno_text(*.0))]
    Os(i32),
    /// The policy said no, with the error number that a system under that policy would give: EROFS for a write where only
    /// reading is allowed, ENOENT for what no entry covers, EACCES under a deny entry.
    #[error("the request's policy refuses it: {}", errno_text(*.0))]
    Denied(i32, Option<Box<Denial>>),
    /// A directory, FIFO, device or socket where only a regular file will do.
    #[error("path `{0}` is not a file")]
    NotAFile(AbsolutePath),
    /// Above the bound of a readFile.
    #[error("file is too large to read: limit is {0} bytes")]
    TooLarge(u64),
    /// `follow: false` on a link.
    /// A descriptor could not be sent, since the kernel bounds those of a user that are on their way; with the bytes that travel
    /// without one.
    #[error(
        "pass a descriptor: the user's bound of descriptors in flight is used up (ETOOMANYREFS); end the process that holds them, or move at most {0} bytes at once and without a handle"
    )]
    InFlight(usize),
    /// A link where none is allowed.
    #[error("path contains a symbolic link")]
    Link,
    /// A tree is removed only with links followed, as clients of this wire know it.
    #[error("recursive no-follow removal is unsupported")]
    RecursiveNoFollow,
    /// What this operation does not do, in words.
    #[error("{0}")]
    Unsupported(String),
    /// A tree operation that stopped on the way: what failed, and the system's number.
    #[error("stopped at `{path}`, what came before is done: {}", errno_text(*errno))]
    Partial {
        /// Where.
        path: AbsolutePath,
        /// Why.
        errno: i32,
    },
    /// A root of the worker's policy is not the directory any more that it was when the worker was confined. Nothing was
    /// tried; a new worker will see the new one.
    #[error("a root of the policy was replaced")]
    Stale,
}

//! Frames between the gateway and its helpers. Both ends are one executable, so the format has no versions: the first
//! frame carries [`BUILD`], and a helper of another build refuses.
//!
//! A frame is a 12-byte header (body length, payload length, number of descriptors, each as little-endian `u32`), a
//! body in postcard, and a raw payload. Descriptors travel as `SCM_RIGHTS` with the first byte of their frame, so a
//! receiver that queues them in arrival order can take as many as the header says.

use crate::path::{AbsolutePath, Bytes};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Identity of this build: package version and a hash of the sources of the crates on both ends of the frames.
pub const BUILD: &str = env!("PORTCULLIS_BUILD");

/// First argument of a hidden start; the second names the role, the third carries [`BUILD`].
pub const HIDDEN_FLAG: &str = "--portcullis-helper";

/// Status with which a role ends when a person starts it by hand (its control descriptor is missing).
pub const EXIT_BY_HAND: i32 = 122;

/// Where a worker finds its control socket. The spawner's control socket is its standard input.
pub const CONTROL_DESCRIPTOR: i32 = 3;

/// Payloads above this many bytes travel as a descriptor.
pub const INLINE_PAYLOAD: usize = 64 * 1024;

/// Bound of one body: a directory listing of 50,000 names of 255 bytes fits.
pub const MAX_BODY: usize = 16 * 1024 * 1024;

/// Bound of the descriptors of one frame: standard input, output and error.
pub const MAX_DESCRIPTORS: usize = 3;

/// Bytes of a frame's header.
pub const HEADER: usize = 12;

/// The roles that the one executable plays besides `portcullis` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Parent and subreaper of everything that is started; single-threaded.
    Spawner,
    /// Carries out `fs/*` requests, confined before it reads the first.
    Worker,
}

impl Role {
    /// The word on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Spawner => "spawner",
            Self::Worker => "worker",
        }
    }

    /// The role of a word on the command line.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Spawner, Self::Worker].into_iter().find(|role| role.name() == name)
    }
}

/// What the gateway asks of the spawner. Every request carries an id of the gateway's choice.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum SpawnerRequest {
    /// First frame: both ends must be one build.
    Hello {
        /// [`BUILD`] of the gateway.
        build: String,
    },
    /// Start a worker. Descriptors: its standard input and output (one socket), its control socket.
    Worker {
        /// Names the worker in [`SpawnerEvent::WorkerEnded`].
        id: u64,
    },
    /// Start a process. Descriptors: standard input, output, error; with a tty the one terminal.
    Start {
        /// Names the process in later requests and events.
        id: u64,
        /// Whether the one descriptor is a terminal that shall control the process.
        tty: bool,
        /// A compiled policy of the sandbox crate; none starts the process unconfined.
        policy: Option<Bytes>,
        /// The operator accepts what the policy asks and the layers that are built cannot enforce on a process.
        allow_unprotected: bool,
        /// A [`Command`] in postcard, decoded only after the launcher is confined.
        command: Bytes,
    },
    /// Send a signal to the process group of a process. Unknown and ended processes are ignored.
    Signal {
        /// The process.
        id: u64,
        /// A signal number of this machine.
        signal: i32,
    },
    /// End a worker with SIGKILL. Unknown ones are ignored.
    KillWorker {
        /// The worker.
        id: u64,
    },
}

/// A command line as the launcher executes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// The program, then its arguments; never empty. A program without a slash is searched in the PATH of `env`.
    pub argv: Vec<Bytes>,
    /// What the program sees as `argv[0]`, if it is not the program.
    pub arg0: Option<Bytes>,
    /// The whole environment, in this order.
    pub env: Vec<(Bytes, Bytes)>,
    /// The working directory.
    pub cwd: AbsolutePath,
}

/// What the spawner tells the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpawnerEvent {
    /// Answer to [`SpawnerRequest::Hello`].
    Ready,
    /// The build differs; the spawner ends.
    WrongBuild {
        /// [`BUILD`] of the spawner.
        build: String,
    },
    /// The program runs: its `execve` succeeded.
    Started {
        /// The process.
        id: u64,
        /// Its process id on this machine.
        pid: i32,
        /// What the kernel enforces on it.
        enforced: Enforced,
    },
    /// Nothing runs.
    StartFailed {
        /// The process.
        id: u64,
        /// Where it ended.
        failure: StepFailed,
    },
    /// A started process ended.
    Exited {
        /// The process.
        id: u64,
        /// How.
        status: ExitStatus,
    },
    /// A worker ended, or could not be started.
    WorkerEnded {
        /// The worker.
        id: u64,
        /// How, if it ran.
        status: Option<ExitStatus>,
    },
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It called exit.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl ExitStatus {
    /// The number that shells and this wire use: the status itself, or 128 + signal.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// A step of a helper's way into confinement or to `execve` that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{attempt}{}", if *errno == 0 { String::new() } else { format!(": {}", errno_text(*errno)) })]
pub struct StepFailed {
    /// Which part failed: decides the error code on the wire.
    pub step: Step,
    /// What was attempted, on what, in words.
    pub attempt: String,
    /// The system's error number, or 0 if the system did not say.
    pub errno: i32,
}

/// The parts of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// A frame between gateway and helper was wrong: a defect of ours.
    Frame,
    /// The confinement could not be had as asked.
    Enforce,
    /// `chdir`, `execve`, the terminal: the request's own fault.
    Execute,
    /// `fork` and the like: the machine's fault.
    Machine,
}

/// What the kernel enforces on a helper or a process, as it said when it was asked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforced {
    /// The Landlock ABI whose rights are handled; 0 for none.
    pub landlock_abi: u32,
    /// The names of the seccomp tables that are installed.
    pub seccomp: Vec<String>,
    /// What the policy asks and these layers do not enforce; empty unless the operator allowed it.
    pub missing: Vec<String>,
}

/// First frame on a worker's control socket: who it shall be.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerSetup {
    /// [`BUILD`] of the gateway.
    pub build: String,
    /// A compiled policy of the sandbox crate; none makes an unconfined worker.
    pub policy: Option<Bytes>,
    /// Bound of requests carried out side by side.
    pub concurrency: u16,
}

/// The worker's answer on its control socket; nothing else travels there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerAnswer {
    /// Confined, and reading requests.
    Ready(Enforced),
    /// It ends.
    Failed(StepFailed),
}

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
}

impl FsOperation {
    /// Whether it changes the file system; such operations keep their order within a session.
    #[must_use]
    pub fn is_mutation(&self) -> bool {
        match self {
            Self::ReadFile { .. }
            | Self::GetMetadata { .. }
            | Self::Canonicalize { .. }
            | Self::ReadDirectory { .. }
            | Self::Walk { .. } => false,
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
    #[error("{}", errno_text(*.0))]
    Denied(i32),
    /// A directory, FIFO, device or socket where only a regular file will do.
    #[error("path `{0}` is not a file")]
    NotAFile(AbsolutePath),
    /// Above the bound of a readFile.
    #[error("file is too large to read: limit is {0} bytes")]
    TooLarge(u64),
    /// `follow: false` on a link.
    #[error("path contains a symbolic link")]
    Link,
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

/// The system's own text, in the form that clients of this wire know.
#[must_use]
pub fn errno_text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// A frame that was taken apart.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    /// In postcard; see [`decode`].
    pub body: Vec<u8>,
    /// Raw bytes.
    pub payload: Vec<u8>,
    /// How many descriptors of those that arrived belong to it.
    pub descriptors: usize,
}

/// Why bytes are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length above its bound.
    #[error(
        "frame with {body} bytes of body, {payload} of payload and {descriptors} descriptors: bounds are {MAX_BODY}, {INLINE_PAYLOAD} and {MAX_DESCRIPTORS}"
    )]
    TooLarge {
        /// As the header says.
        body: usize,
        /// As the header says.
        payload: usize,
        /// As the header says.
        descriptors: usize,
    },
    /// The body does not hold what it should.
    #[error("frame body does not decode: {0}")]
    Body(String),
}

/// Builds a frame: header, body, payload.
///
/// # Errors
/// A part is above its bound.
pub fn encode(body: &impl Serialize, payload: &[u8], descriptors: usize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; HEADER];
    bytes = postcard::to_extend(body, bytes).map_err(|error| FrameError::Body(error.to_string()))?;
    let body = bytes.len() - HEADER;
    let too_large = || FrameError::TooLarge { body, payload: payload.len(), descriptors };
    if body > MAX_BODY || payload.len() > INLINE_PAYLOAD || descriptors > MAX_DESCRIPTORS {
        return Err(too_large());
    }
    for (at, length) in [body, payload.len(), descriptors].into_iter().enumerate() {
        let length = u32::try_from(length).map_err(|_| too_large())?;
        bytes[at * 4..at * 4 + 4].copy_from_slice(&length.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Decodes the body of a frame.
///
/// # Errors
/// The bytes are not a `T`, or more than a `T`.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (value, rest) = postcard::take_from_bytes(body).map_err(|error| FrameError::Body(error.to_string()))?;
    if rest.is_empty() { Ok(value) } else { Err(FrameError::Body(format!("{} bytes too many", rest.len()))) }
}

/// Finds frames in a stream of bytes. Sans-IO: push what was read, then take frames until there is none.
#[derive(Debug, Default)]
pub struct Deframer {
    bytes: Vec<u8>,
    taken: usize,
}

impl Deframer {
    /// Adds bytes that were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        } else if self.taken > INLINE_PAYLOAD {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// The header says more than the bounds allow; the stream is of no use after that.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = &self.bytes[self.taken..];
        let Some(header) = rest.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let field = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&header[at..at + 4]);
            usize::try_from(u32::from_le_bytes(word)).unwrap_or(usize::MAX)
        };
        let (body, payload, descriptors) = (field(0), field(4), field(8));
        if body > MAX_BODY || payload > INLINE_PAYLOAD || descriptors > MAX_DESCRIPTORS {
            return Err(FrameError::TooLarge { body, payload, descriptors });
        }
        let end = HEADER + body + payload;
        if rest.len() < end {
            return Ok(None);
        }
        let frame = Frame { body: rest[HEADER..HEADER + body].to_vec(), payload: rest[HEADER + body..end].to_vec(), descriptors };
        self.taken += end;
        Ok(Some(frame))
    }

    /// Whether bytes of an unfinished frame are held: the peer ended in the middle.
    #[must_use]
    pub fn is_mid_frame(&self) -> bool {
        self.taken < self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(id: u64, name: &str) -> FsRequest {
        let path = AbsolutePath::new(format!("/{name}")).unwrap();
        FsRequest { id, operation: FsOperation::WriteFile { path, follow: true } }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(names in prop::collection::vec("[a-z]{1,20}", 1..8), payload in prop::collection::vec(any::<u8>(), 0..300), step in 1_usize..64) {
            let mut stream = Vec::new();
            for (id, name) in names.iter().enumerate() {
                stream.extend(encode(&request(id as u64, name), &payload, id % 3).unwrap());
            }
            let (mut deframer, mut seen) = (Deframer::default(), 0);
            for chunk in stream.chunks(step) {
                deframer.push(chunk);
                while let Some(frame) = deframer.next_frame().unwrap() {
                    let got: FsRequest = decode(&frame.body).unwrap();
                    prop_assert_eq!(got.id, seen as u64);
                    prop_assert_eq!(got.operation, request(0, &names[seen]).operation);
                    prop_assert_eq!(&frame.payload, &payload);
                    prop_assert_eq!(frame.descriptors, seen % 3);
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, names.len());
            prop_assert!(!deframer.is_mid_frame());
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut deframer = Deframer::default();
            deframer.push(&bytes);
            while let Ok(Some(frame)) = deframer.next_frame() {
                let _any: Result<SpawnerRequest, _> = decode(&frame.body);
                let _any: Result<FsReply, _> = decode(&frame.body);
            }
        }
    }

    #[test]
    fn bounds_are_refused_on_both_sides() {
        assert!(matches!(encode(&0_u8, &vec![0; INLINE_PAYLOAD + 1], 0), Err(FrameError::TooLarge { .. })));
        let mut deframer = Deframer::default();
        deframer.push(&[255; HEADER]);
        assert!(matches!(deframer.next_frame(), Err(FrameError::TooLarge { .. })));
    }

    #[test]
    fn a_body_with_a_tail_is_refused() {
        let bytes = encode(&7_u8, b"", 0).unwrap();
        let mut body = bytes[HEADER..].to_vec();
        assert_eq!(decode::<u8>(&body), Ok(7));
        body.push(0);
        assert!(decode::<u8>(&body).is_err());
    }
}

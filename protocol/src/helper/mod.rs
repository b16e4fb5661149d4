//! Frames between the gateway and its helpers. Both ends are one executable, so the format has no versions: the first
//! frame carries [`BUILD`], and a helper of another build refuses.
//!
//! A frame is a 12-byte header (body length, payload length, number of descriptors, each as little-endian `u32`), a
//! body in postcard, and a raw payload. Descriptors travel as `SCM_RIGHTS` with the first byte of their frame, so a
//! receiver that queues them in arrival order can take as many as the header says.

mod frame;
mod fs;
mod spawn;

pub use frame::{Deframer, Frame, FrameError, decode, encode, encode_head};
pub use fs::{DirectoryEntry, FileMetadata, FsDone, FsError, FsOperation, FsReply, FsRequest, OpenMode, WalkBounds, WalkEntry};
pub use spawn::{
    CgroupLayer, Command, Enforced, ExitStatus, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step, StepFailed, Uids,
    WorkerAnswer, WorkerSetup,
};

/// Identity of this build: package version and a hash of the sources of the crates on both ends of the frames.
pub const BUILD: &str = env!("PORTCULLIS_BUILD");

/// First argument of a hidden start; the second names the role, the third carries [`BUILD`].
pub const HIDDEN_FLAG: &str = "--portcullis-helper";

/// Status with which a role ends when a person starts it by hand (its control descriptor is missing).
pub const EXIT_BY_HAND: i32 = 122;

/// Where a worker finds its control socket. The spawner's control socket is its standard input.
pub const CONTROL_DESCRIPTOR: i32 = 3;

/// Bound of a payload in bytes; more travels as a descriptor. A worker has at most 16 of them at a time; to make a file in memory for
/// so few bytes, fill it and empty it again takes five times as long as a socket.
pub const INLINE_PAYLOAD: usize = 1024 * 1024;

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

/// The system's own text, in the form that clients of this wire know.
#[must_use]
pub fn errno_text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

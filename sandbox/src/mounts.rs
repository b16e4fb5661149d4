//! The view of the file system that a confined process gets: read-only everywhere, the writable roots over it, the narrower entries
//! below them over that, and its own `/dev` and `/proc`.
//!
//! # How it works
//! [`build`] runs in the first process of a new mount namespace, on the mounts of the machine as [`Machine`] took them. Where the
//! policy allows reading everything, the machine's own tree is made read-only in place. Otherwise the view begins empty, in memory,
//! and contains only granted paths. In both cases, each path at which the policy's verdict changes becomes one mount: it is cloned
//! before anything is locked, and attached where it was cloned from. A denied path is covered by an empty file or directory that no
//! process may open. A protected name that does not exist gets a mount point ([`Point`]) for as long as the sandbox lives. Landlock
//! and seccomp are applied in addition.

mod device;
mod files;
mod furniture;
mod kernel;
mod machine;
mod mapped;
mod mask;
mod mountinfo;
mod narrow;
mod own;
mod place;
mod point;
mod record;
mod tree;

use crate::compiled::Compiled;
use crate::roots::Roots;
use device::Devices;
use furniture::{Furniture, Placed};
use place::{Base, Builder};
use portcullis_protocol::path::AbsolutePath;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

pub use files::{FileView, Ground, has_come};
pub(crate) use kernel::{masked, mount_above};
pub use machine::{Machine, MountChanges, Unmapped};
pub(crate) use own::is_made;
pub use own::named_device;
pub use point::{Point, Removed, remove_left, take};
pub use record::{Records, RecordsAt};

/// A finished view.
#[derive(Debug)]
pub struct View {
    /// Whether `/proc` shows only the sandbox's own processes. If not, it is the machine's, read-only.
    pub own_proc: bool,
    /// Whether the view began empty.
    pub(crate) began_empty: bool,
    /// Covers that are mounted on the machine's tree. A cover is lost if a process outside moves or replaces the file below it.
    pub covered: Vec<Cover>,
    /// Denied paths that do not exist, in directories where only a process outside can make them.
    pub awaited: Vec<PathBuf>,
    /// Mount points on the machine that the view uses. They must be held while the sandbox lives, and removed afterwards.
    pub points: Vec<Point>,
    /// The records, in a detached mount. When its last descriptor is closed, the kernel waits for all processors.
    pub records: Option<OwnedFd>,
}

/// A mount on the machine's tree that must stay at its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cover {
    /// The covered path.
    pub path: PathBuf,
    /// The mount id, `stx_mnt_id` of statx(2).
    pub mount: u64,
}

/// A path that the policy's tables do not contain, because only the files themselves show it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Found {
    /// The real path.
    pub path: AbsolutePath,
    /// The reason why it was found.
    pub kind: FoundKind,
}

/// The reason why a path was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FoundKind {
    /// A deny glob matches it; or it is a directory that could not be read, so that matches in it are unknown.
    Denied,
    /// A protected name leads to it.
    Protected,
    /// An entry names it, and it is below a path to which a protected name leads.
    Named,
    /// A protected name leads through it: it must not be moved.
    Way,
    /// It is a protected name at some depth, and the policy protects those.
    Nested,
}

/// The inputs for a view.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// The policy's tables, made with `roots`. They contain the paths in `found`.
    pub tables: &'a Compiled,
    /// The roots, opened in this mount namespace.
    pub roots: &'a Roots,
    /// Sorted by path.
    pub found: &'a [Found],
    /// The terminal that the process is given.
    pub terminal: Option<BorrowedFd<'a>>,
    /// Where mount points made on the machine are recorded. Without records no mount points are made, and a policy that needs one
    /// is refused.
    pub records: Option<&'a Records>,
}

/// Builds the view on the copy of the machine's mounts that this process took. `announce` is called for each mount point that may
/// have to be removed from the machine, before it is made.
///
/// # Errors
/// A step failed: the process must end. The announced mount points must be removed all the same.
pub fn build(plan: Plan<'_>, mut machine: Machine, announce: &mut dyn FnMut(&Path)) -> Result<View, MountError> {
    if machine.furniture.is_none() {
        machine.furnish()?;
    }
    let Machine { kernel, furniture, locked } = machine;
    let furniture = furniture.map_or_else(Furniture::make, Ok)?;

    // The granted paths, as the machine has them, and the records, before anything is locked.
    let records = plan.records.map(Records::detached).transpose()?;
    let plan = Plan { records: records.as_ref(), ..plan };
    let console = plan.terminal.and_then(Devices::console);
    let mut builder = Builder::take(plan, kernel, locked)?;

    // The ground: the machine's tree, read-only, or an empty one.
    let base = builder.lay_ground()?;

    // `/dev`, and `/proc` of this pid namespace.
    let directory = |path: &str| match base {
        Base::Machine => tree::open(Path::new(path)),
        Base::Empty => place::make_directories(Path::new(path)),
    };
    let Placed { masks, devices, own_proc } = furniture.place(directory, console)?;
    builder.cover_with(masks);
    builder.lock_later(devices, Path::new("/dev"));

    // Every path where the verdict changes, parents first.
    let points = builder.place_all(announce)?;
    let (covered, awaited) = builder.finish()?;
    let records = records.map(Records::into_descriptor);
    Ok(View { own_proc, began_empty: base == Base::Empty, covered, awaited, points, records })
}

/// The reason why a view could not be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{attempt}")]
pub struct MountError {
    /// The attempted step and its object; for a refusal also the remedy.
    pub attempt: String,
    /// The system's error number, or 0 if there is none.
    pub errno: i32,
}

impl MountError {
    fn at(attempt: &str, path: &Path) -> impl Fn(Errno) -> Self + use<> {
        let attempt = format!("{attempt} `{}`", path.display());
        move |errno| Self { attempt: attempt.clone(), errno: errno.raw_os_error() }
    }

    fn system(attempt: &str, path: &Path, error: &std::io::Error) -> Self {
        Self { attempt: format!("{attempt} `{}`", path.display()), errno: error.raw_os_error().unwrap_or(0) }
    }

    fn refused(attempt: String) -> Self {
        Self { attempt, errno: 0 }
    }
}

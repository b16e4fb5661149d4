//! The view of the file system that a confined process gets: read-only everywhere, the writable roots over it, what lies below
//! them and is less than they are over that, and `/dev` and `/proc` of its own.
//!
//! # How it works
//! [`build`] runs in the first process of a new mount namespace. Where the policy lets everything be read the machine's own
//! tree is made read-only in place; where it does not, the view begins empty, in memory, and only what is granted is in it. In
//! either, each place at which the policy's verdict changes becomes one mount: cloned before anything is locked, attached
//! where it was cloned from. What is denied is covered by something empty that nobody may open; a protected name that does
//! not exist gets a mount point ([`Point`]) for as long as the sandbox lives. Landlock and seccomp come on top of all that.

mod device;
mod files;
mod kernel;
mod mask;
mod narrow;
mod own;
mod place;
mod point;
mod record;
mod tree;

use crate::compiled::Compiled;
use crate::roots::Roots;
use device::{Devices, Processes};
use kernel::KernelMounts;
use mask::Masks;
use place::{Base, Builder};
use portcullis_protocol::path::AbsolutePath;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

pub use files::{FileView, Ground, has_come};
pub use point::{Point, Removed, remove_left, take};
pub use record::{Records, RecordsAt};

/// What was built.
#[derive(Debug)]
pub struct View {
    /// Whether `/proc` shows the sandbox's own processes only. If not, it is the machine's, read-only.
    pub own_proc: bool,
    /// Whether the view began empty.
    pub(crate) began_empty: bool,
    /// What is mounted on the machine's tree. It is lost if somebody outside moves or replaces what it covers.
    pub covered: Vec<Cover>,
    /// What is denied and does not exist, in places where only somebody outside can make it.
    pub awaited: Vec<PathBuf>,
    /// Mount points on the machine that it uses. They must be held while it lives, and removed afterwards.
    pub points: Vec<Point>,
}

/// A mount on the machine's tree that has to stay where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cover {
    /// Where.
    pub path: PathBuf,
    /// The kernel's number of it, `stx_mnt_id` of statx(2).
    pub mount: u64,
}

/// A place that the policy's tables do not know, since only a look at the files tells.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Found {
    /// Real.
    pub path: AbsolutePath,
    /// What becomes of it.
    pub kind: FoundKind,
}

/// Why a place was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FoundKind {
    /// A deny glob matches it; or it could not be looked into, so that nobody knows what would.
    Denied,
    /// A protected name leads there.
    Protected,
    /// An entry names it, and it lies below a place that a protected name leads to.
    Named,
    /// A protected name leads through it: it must not be moved.
    Way,
    /// It is a protected name at some depth, and the policy protects those.
    Nested,
}

/// What a view is made of.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// The policy's tables, made with `roots`.
    pub tables: &'a Compiled,
    /// Opened in this mount namespace.
    pub roots: &'a Roots,
    /// In the order of their paths.
    pub found: &'a [Found],
    /// The terminal that the process is given.
    pub terminal: Option<BorrowedFd<'a>>,
    /// Where is noted what is made on the machine; without them nothing is made there, and what needs it is refused.
    pub records: Option<&'a Records>,
}

/// Builds the view in this mount namespace, which must be new and this process's own. `announce` hears of each mount point
/// that may have to be removed from the machine, before it is made.
///
/// # Errors
/// A step failed: the process must end. What was announced has to be removed all the same.
pub fn build(plan: Plan<'_>, announce: &mut dyn FnMut(&Path)) -> Result<View, MountError> {
    // Nothing of what follows is seen outside, nor the other way round.
    tree::part_from_the_machine()?;

    // What is granted, as the machine has it, before anything is locked, and where is noted what is made on it.
    let records = plan.records.map(Records::detached).transpose()?;
    let plan = Plan { records: records.as_ref(), ..plan };
    let devices = Devices::take(plan.terminal)?;
    let proc = Processes::take()?;
    let mut builder = Builder::take(plan, KernelMounts::read()?)?;

    // The ground: the machine's tree, read-only, or an empty one.
    let base = builder.lay_ground()?;

    // Devices, and the processes of this namespace.
    let directory = |path: &str| match base {
        Base::Machine => tree::open(Path::new(path)),
        Base::Empty => place::make_directories(Path::new(path)),
    };
    builder.cover_with(Masks::new(directory("/dev")?.as_fd())?);
    let own_devices = devices.mount(directory("/dev")?.as_fd())?;
    builder.lock_later(own_devices, Path::new("/dev"));
    let own_proc = proc.mount(directory("/proc")?.as_fd())?;
    builder.mask_processes()?;

    // Every place where the verdict changes, those above first.
    let points = builder.place_all(announce)?;
    let (covered, awaited) = builder.finish()?;
    Ok(View { own_proc, began_empty: base == Base::Empty, covered, awaited, points })
}

/// Why there is no view.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{attempt}")]
pub struct MountError {
    /// What was attempted, on what; for a refusal also what to do.
    pub attempt: String,
    /// The system's number, or 0 if the system did not say.
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

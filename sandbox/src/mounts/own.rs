//! Denials below the sandbox's own `/dev` and `/proc`, which apply to the files that the sandbox finds there.

use super::MountError;
use super::device::LINKS;
use super::kernel::is_own;
use super::mask::Mask;
use super::narrow::{Look, look};
use super::place::{Builder, Spot};
use crate::compiled::{Compiled, Verdict};
use crate::policy::{Access, Grant, Grants, Policy};
use crate::roots::{Root, Roots};
use rustix::fs::{FileType, fstat};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The paths that every view makes, parents first.
const NAMES: [&str; 11] = [
    "/dev",
    "/dev/console",
    "/dev/full",
    "/dev/null",
    "/dev/pts",
    "/dev/random",
    "/dev/shm",
    "/dev/tty",
    "/dev/urandom",
    "/dev/zero",
    "/proc",
];

/// Devices without state, and the controlling terminal of the process that opens it. They count as granted without an entry that
/// names them.
const HARMLESS: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// The first device beside the harmless ones that a policy grants by name, if there is one. It belongs to root, and its file system
/// does not support an id map.
#[must_use]
pub fn named_device(policy: &Policy) -> Option<&Path> {
    let gives = |set: &Grants, path: &Path| set.entries.iter().any(|grant| grant.path.as_path() == path && is_granted(grant));
    let first = policy.files.sets().next()?;
    let named = first.entries.iter().filter(|grant| is_granted(grant)).map(|grant| grant.path.as_path());
    // As in `is_given_device`, every set must name it.
    named
        .filter(|path| path.starts_with("/dev") && !SHARED.into_iter().any(|shared| path.starts_with(shared)))
        .filter(|path| *path != Path::new("/dev") && !HARMLESS.into_iter().any(|device| *path == Path::new(device)))
        .find(|path| policy.files.sets().all(|set| gives(set, path)))
}

/// Whether a path below `/dev` is one that every view makes, or is in such a directory.
pub(crate) fn is_made(path: &Path) -> bool {
    let is_link = |(_, name): (&str, &str)| path.strip_prefix("/dev").is_ok_and(|below| below == Path::new(name));
    let is_in_directory = ["/dev/pts", "/dev/shm"].into_iter().any(|directory| path.starts_with(directory));
    is_in_directory || NAMES.into_iter().any(|name| path == Path::new(name)) || LINKS.into_iter().any(is_link)
}

/// Directories below `/dev` that hold no device.
const SHARED: [&str; 2] = ["/dev/shm", "/dev/mqueue"];

fn is_granted(grant: &Grant) -> bool {
    grant.access != Access::Deny
}

/// Adds the paths of [`NAMES`] that the policy denies, also by an entry above or by a glob.
pub(super) fn add_denied(places: &mut BTreeMap<PathBuf, Verdict>, tables: &Compiled) {
    for path in NAMES.map(Path::new) {
        let is_denied_above = path.parent().is_some_and(|above| is_own(above) && tables.verdict(above) == Verdict::Denied);
        if tables.verdict(path) == Verdict::Denied && !is_denied_above {
            places.insert(path.to_owned(), Verdict::Denied);
        }
    }
}

/// Whether an entry grants the device at a path. An entry above it does not, or reading `/` would grant the disks.
pub(super) fn is_given_device(path: &Path, roots: &Roots) -> bool {
    let names_it = |root: &Root| root.real == path && root.access != Access::Deny && !root.is_hidden;
    let names = |set: usize| roots.all().iter().any(|root| root.set == set && names_it(root));
    let sets = roots.all().iter().map(|root| root.set + 1).max().unwrap_or(0);
    HARMLESS.into_iter().any(|device| path == Path::new(device)) || (0..sets).all(names)
}

impl Builder<'_> {
    /// Covers a denied path, or refuses the policy with the reason.
    pub(super) fn narrow_own(&mut self, path: &Path, spot: &Spot) -> Result<(), MountError> {
        let refuse = |why: &str, remedy: &str| {
            let text = format!("cover the denied `{}`: {why}; {remedy}", path.display());
            Err(MountError::refused(text))
        };
        if is_of_process(path) {
            let why = "each process of the sandbox has its own directory there";
            return refuse(why, "deny `/proc`, or remove the entry");
        }
        if spot.leads_on && path.starts_with("/proc") {
            return refuse("an entry below it grants a part of it", "remove one of the two entries");
        }
        let target = match look(path, false, None) {
            Look::There(target) => target,
            // This is the sandbox's own memory: nothing has to be removed from the machine.
            Look::Missing(first) if first.starts_with("/dev/shm") => {
                let (first, target) = (first.to_owned(), super::place::make_directories(first)?);
                return self.mask(Mask::Denied)?.attach(target.as_fd(), &first);
            }
            Look::Missing(_) if path.starts_with("/dev/pts") => {
                return refuse("terminals are created while the sandbox runs", "deny `/dev/pts`, or remove the entry");
            }
            // No file can be made there.
            Look::Missing(_) | Look::Blocked(_) | Look::Locked => return Ok(()),
            Look::Failed(errno) => return Err(MountError::at("open", path)(errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        match FileType::from_raw_mode(stat.st_mode) {
            // A name that the view makes; its target would stay accessible.
            FileType::Symlink if path.starts_with("/proc") => {
                refuse("it leads into the directory of one process", "deny `/proc`, or remove the entry")
            }
            FileType::Symlink => refuse("it is a symbolic link in every sandbox", "deny its target, or remove the entry"),
            FileType::Directory if spot.leads_on => self.lead_through(target.as_fd(), path).map(drop),
            FileType::Directory => self.mask(Mask::Denied)?.attach(target.as_fd(), path),
            _file => self.mask(Mask::File)?.attach(target.as_fd(), path),
        }
    }
}

/// Whether a path leads into the directory of one process.
fn is_of_process(path: &Path) -> bool {
    let is_process =
        |name: &OsStr| name == "self" || name == "thread-self" || name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    path.strip_prefix("/proc").ok().and_then(|below| below.iter().next()).is_some_and(is_process)
}

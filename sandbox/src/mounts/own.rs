//! Denials below `/dev` and `/proc`, which are the sandbox's own and hold for what it finds there.

use super::MountError;
use super::kernel::is_own;
use super::mask::Mask;
use super::narrow::{Look, look};
use super::place::{Builder, Spot};
use crate::compiled::{Compiled, Verdict};
use crate::policy::Access;
use crate::roots::Roots;
use rustix::fs::{FileType, fstat};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// What a view makes by itself, those above first.
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

/// Devices without a state of their own, and the terminal that controls whoever opens it: an entry gives them as they are.
const HARMLESS: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// Notes what of it is denied, by an entry above or by a glob too.
pub(super) fn add_denied(places: &mut BTreeMap<PathBuf, Verdict>, tables: &Compiled) {
    for path in NAMES.map(Path::new) {
        let is_denied_above = path.parent().is_some_and(|above| is_own(above) && tables.verdict(above) == Verdict::Denied);
        if tables.verdict(path) == Verdict::Denied && !is_denied_above {
            places.insert(path.to_owned(), Verdict::Denied);
        }
    }
}

/// Whether an entry gives the device at a path. What lies above it names no device, or reading `/` would give the disks.
pub(super) fn is_given_device(path: &Path, roots: &Roots) -> bool {
    let names = |set: usize| roots.all().iter().any(|root| root.set == set && root.real == path && root.access != Access::Deny);
    let sets = roots.all().iter().map(|root| root.set + 1).max().unwrap_or(0);
    HARMLESS.into_iter().any(|device| path == Path::new(device)) || (0..sets).all(names)
}

impl Builder<'_> {
    /// Covers what is denied, or refuses it by name.
    pub(super) fn narrow_own(&mut self, path: &Path, spot: &Spot) -> Result<(), MountError> {
        let refuse = |why: &str, remedy: &str| {
            let text = format!("cover the denied `{}`: {why}; {remedy}", path.display());
            Err(MountError::refused(text))
        };
        if is_of_process(path) {
            let why = "processes of a sandbox come and go, each with a directory of its own";
            return refuse(why, "deny `/proc`, or take out the entry");
        }
        if spot.leads_on && path.starts_with("/proc") {
            return refuse("an entry below it grants a part of it", "take out one of the two entries");
        }
        let target = match look(path, false, None) {
            Look::There(target) => target,
            // In memory that is the sandbox's own: nothing has to be removed from the machine.
            Look::Missing(first) if first.starts_with("/dev/shm") => {
                let (first, target) = (first.to_owned(), super::place::make_directories(first)?);
                return self.mask(Mask::Denied)?.attach(target.as_fd(), &first);
            }
            Look::Missing(_) if path.starts_with("/dev/pts") => {
                return refuse("terminals come to be while a sandbox lives", "deny `/dev/pts`, or take out the entry");
            }
            // Nothing can be made there.
            Look::Missing(_) | Look::Blocked(_) | Look::Locked => return Ok(()),
            Look::Failed(errno) => return Err(MountError::at("open", path)(errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        match FileType::from_raw_mode(stat.st_mode) {
            // One of the view's own names; what it leads to would stay.
            FileType::Symlink if path.starts_with("/proc") => {
                refuse("it leads into the directory of one process", "deny `/proc`, or take out the entry")
            }
            FileType::Symlink => refuse("it is a link in every sandbox", "deny what it leads to, or take out the entry"),
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

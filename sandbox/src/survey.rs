//! What only a look at the files tells before a view is built: what deny globs match, where `.git` files lead, and which nested
//! repositories there are.
//!
//! It reads names and `.git` files that the attacker may have written, so it runs in a process that can do nothing but read
//! ([`crate::enforce::reader`]), and whoever takes its answer believes none of it but as a reason to take something away.

mod pointers;

use crate::compiled::{Compiled, Verdict};
use crate::gitfile::{is_open_below_shared, is_shared};
use crate::mounts::{Found, FoundKind};
use crate::policy::{Access, DenyGlob, Policy, is_protected_name};
use crate::roots::Roots;
use pointers::{Noted, pointer};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub use pointers::{LEADING, are_there, hidden_pointers, pointers};

/// Bound of what is found: each place costs a mount.
pub const MOST_FOUND: usize = 8192;

/// Bound of what is found with the directories above it, and of where pointers lead: together less than the mounts of a namespace.
const MOST_HELD: usize = 32_768;

/// Bound of the bytes of what is found, which is told in one frame.
const MOST_BYTES: usize = 8 << 20;

/// Bound of the names that are looked at: some seconds of work.
const MOST_NAMES: usize = 2_000_000;

/// Longest path that the kernel takes, its NUL included.
const LONGEST_PATH: usize = 4096;

/// File systems of the kernel: a view has its own, or shows them read-only. They are not walked from above.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Why the answer is incomplete: the view must not be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SurveyError {
    /// Too much to look at.
    #[error("look below `{}` for what deny globs match and for nested repositories: more than {MOST_NAMES} names; name narrower places", .0.display())]
    Names(PathBuf),
    /// Too much was found.
    #[error(
        "look below `{}` for what deny globs match and for nested repositories: more than {MOST_FOUND} places; name the directories that hold them",
        .0.display()
    )]
    Matches(PathBuf),
    /// Too much is to be held.
    #[error(
        "hold what deny globs match, and nested repositories: more than {MOST_HELD} places with the directories above them, or \
         {MOST_BYTES} bytes of their names; remove some, or name directories that hold them"
    )]
    Held,
    /// A process has its own there, which the survey does not examine.
    #[error("enforce a deny glob below `{}`: processes have kernel file systems of their own there; deny a path instead", .0.display())]
    Kernel(PathBuf),
    /// What protects a repository cannot be told.
    #[error("look where `{}` leads: {problem}", path.display())]
    Pointer {
        /// The `.git` file.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
}

/// Whether there is anything to look for.
#[must_use]
pub fn is_needed(policy: &Policy, tables: &Compiled, roots: &Roots) -> bool {
    policy.files.sets().any(|grants| !grants.deny_globs.is_empty()) || policy.protects_nested() || are_there(tables, roots)
}

/// Looks. What it cannot look into, and its owner could open again, is found as denied.
///
/// # Errors
/// A bound, or a pointer that cannot be followed.
pub fn survey(policy: &Policy, tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, SurveyError> {
    let mut found = Vec::new();
    let globs = policy.files.sets().flat_map(|grants| &grants.deny_globs);
    if let Some(glob) = globs.clone().find(|glob| KERNEL.iter().any(|kernel| literal(glob).starts_with(kernel))) {
        return Err(SurveyError::Kernel(literal(glob)));
    }
    let mut names = 0;
    for base in walks(globs.filter_map(|glob| roots.real(&glob.base)).collect(), roots) {
        let mut look = |path: &Path| tables.glob_denies(path).then_some(FoundKind::Denied);
        walk(&base, tables, &mut names, Strangers::Count, &mut look, &mut found)?;
    }
    if policy.protects_nested() {
        found.extend(nested(tables, roots, &mut names)?);
    }
    found.extend(pointers(tables, roots)?);
    found.sort();
    found.dedup();
    bound(&found)?;
    Ok(found)
}

/// Where walks for all globs begin: what lies below another base is met there. Below `/dev` a view has only what entries take from the
/// machine, which is walked by itself.
fn walks(mut bases: Vec<PathBuf>, roots: &Roots) -> Vec<PathBuf> {
    bases.sort();
    bases.dedup_by(|later, kept| later.starts_with(&*kept));
    let opened = roots.all().iter().filter(|root| root.access != Access::Deny && root.descriptor.is_some());
    let is_covered = |path: &&PathBuf| path.starts_with("/dev") && bases.iter().any(|base| path.starts_with(base));
    let mut taken: Vec<PathBuf> = opened.map(|root| &root.real).filter(is_covered).cloned().collect();
    taken.sort();
    taken.dedup_by(|later, kept| later.starts_with(&*kept));
    bases.extend(taken);
    bases
}

/// Protected names at any depth, and where they lead.
fn nested(tables: &Compiled, roots: &Roots, names: &mut usize) -> Result<Vec<Found>, SurveyError> {
    let tops: Vec<PathBuf> = pointers::tops(roots).collect();
    let (mut found, mut pointers, mut links) = (Vec::new(), Vec::new(), BTreeSet::new());
    for root in writable(roots) {
        let mut look = |path: &Path| {
            if !path.file_name().is_some_and(is_protected_name) {
                return None;
            }
            // Those at the top are followed too, more strictly.
            pointers.extend(pointer(tables, path).filter(|_| !tops.iter().any(|top| top == path)));
            if tables.verdict(path) != Verdict::Protected {
                return None;
            }
            let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
            if stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink) {
                links.extend(path.parent().map(Path::to_owned));
                return None;
            }
            Some(FoundKind::Nested)
        };
        walk(root, tables, names, Strangers::Skip, &mut look, &mut found)?;
    }
    let mut noted = Noted::new(tables, roots);
    noted.found.extend(found);
    for pointer in &pointers {
        noted.follow_nested(pointer);
        noted.bound()?;
    }
    // A link cannot be covered; the directory that it lies in can be kept as it is. That of the work itself is not: at its top the
    // names are held from the start, and another spelling of one is a name like others where spellings differ.
    for directory in links.iter().filter(|directory| !writable(roots).any(|root| root == *directory)) {
        noted.keep(directory);
        noted.bound()?;
    }
    Ok(noted.found.into_iter().collect())
}

/// That what is found can be told, and held: each place and each directory above one costs a mount.
fn bound(found: &[Found]) -> Result<(), SurveyError> {
    let bytes: usize = found.iter().map(|found| found.path.as_path().as_os_str().len()).sum();
    let mut held = HashSet::new();
    for place in found {
        // What lies above a known place is known.
        place.path.as_path().ancestors().take_while(|above| held.insert(*above)).for_each(drop);
    }
    if bytes > MOST_BYTES || held.len() > MOST_HELD { Err(SurveyError::Held) } else { Ok(()) }
}

/// The part of a glob that names places without wildcards.
fn literal(glob: &DenyGlob) -> PathBuf {
    let is_plain = |name: &&str| !name.contains(['*', '?', '[', ']', '{', '}', '\\']);
    glob.base.as_path().join(glob.pattern.split('/').take_while(is_plain).collect::<PathBuf>())
}

fn writable(roots: &Roots) -> impl Iterator<Item = &Path> {
    let opened = roots.all().iter().filter(|root| root.access == Access::Write && root.descriptor.is_some());
    opened.map(|root| root.real.as_path())
}

/// Whether a walk goes into what other users made in directories that all users share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strangers {
    /// A deny glob speaks of their files too.
    Count,
    /// Git does not follow their repositories for this user, and they must not decide what is protected here, nor how much there is.
    Skip,
}

/// Looks at every name below a directory. What `look` finds is not looked into.
fn walk(
    base: &Path,
    tables: &Compiled,
    names: &mut usize,
    strangers: Strangers,
    look: &mut dyn FnMut(&Path) -> Option<FoundKind>,
    found: &mut Vec<Found>,
) -> Result<(), SurveyError> {
    // A list and no recursion: paths may be as deep as a path is long.
    let mut waiting = vec![base.to_owned()];
    while let Some(directory) = waiting.pop() {
        if KERNEL.iter().any(|kernel| directory == Path::new(kernel)) {
            continue;
        }
        let entries = match entries(&directory) {
            Ok(entries) => entries,
            Err(errno) => {
                found.extend(unknown(&directory, errno));
                continue;
            }
        };
        // A confined process may open the top of its workspace, where others' repositories may lie that it works on.
        let is_open = || is_shared(&directory) || directory != base && is_open_below_shared(&directory);
        let skips = strangers == Strangers::Skip && is_open();
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(errno) => {
                    found.extend(unknown(&directory, errno));
                    break;
                }
            };
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            *names += 1;
            if *names > MOST_NAMES {
                return Err(SurveyError::Names(base.to_owned()));
            }
            let path = directory.join(name);
            if path.as_os_str().len() >= LONGEST_PATH {
                // No call takes such a path, though a program can walk there.
                found.extend(unknown(&directory, Errno::NAMETOOLONG));
                break;
            }
            if found.len() >= MOST_FOUND {
                return Err(SurveyError::Matches(base.to_owned()));
            }
            if skips && is_anothers(&path) {
                continue;
            }
            if let Some(kind) = look(&path) {
                found.extend(place(&path, kind));
                continue;
            }
            let kind = match entry.file_type() {
                // Some file systems do not say.
                FileType::Unknown => statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode)),
                known => known,
            };
            if kind == FileType::Directory && (tables.is_visible(&path) || tables.verdict(&path) != Verdict::Denied) {
                waiting.push(path);
            }
        }
    }
    Ok(())
}

/// Whether another user owns a name. One that is gone is nobody's.
fn is_anothers(path: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| stat.st_uid != user)
}

/// The names in a directory, if what they name can be reached too.
fn entries(directory: &Path) -> Result<Dir, Errno> {
    let entries = open(directory, OFlags::DIRECTORY).and_then(Dir::new)?;
    is_searchable(directory).map(|()| entries)
}

fn is_searchable(directory: &Path) -> Result<(), Errno> {
    statat(CWD, directory.join("."), AtFlags::SYMLINK_NOFOLLOW).map(drop)
}

/// What becomes of a directory that cannot be looked into: it is covered, or the lowest one above it that can be told. Only one
/// that nobody of this user can enter, nor open to enter, holds nothing for whom the view confines.
fn unknown(directory: &Path, errno: Errno) -> Option<Found> {
    if matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP) {
        // Gone, or something else by now.
        return None;
    }
    let known = |place: &&Path| statat(CWD, *place, AtFlags::SYMLINK_NOFOLLOW).is_ok();
    let lowest = directory.ancestors().find(known)?;
    let stat = statat(CWD, lowest, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
    let is_shut = matches!(errno, Errno::ACCESS | Errno::PERM) && is_searchable(lowest).is_err();
    if is_shut && !is_own { None } else { place(lowest, FoundKind::Denied) }
}

/// None for what is no absolute path, which a real one always is.
fn place(path: &Path, kind: FoundKind) -> Option<Found> {
    AbsolutePath::new(path).ok().map(|path| Found { path, kind })
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Files, Grant, Grants, Network};

    #[test]
    fn globs_from_above_reach_what_is_taken_below_dev() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let place = directory.path().canonicalize().unwrap();
        std::fs::create_dir(place.join("below")).unwrap();
        let grant = |path: &Path| Grant::new(AbsolutePath::new(path).unwrap(), Access::Write);
        let entries = vec![grant(Path::new("/usr")), grant(&place), grant(&place.join("below"))];
        let files = Files::Restricted(Grants::new(entries, Vec::new()).unwrap().into());
        let roots = Roots::open(&Policy { files, network: Network::Restricted }).unwrap();
        let walks = |bases: &[&str]| walks(bases.iter().map(PathBuf::from).collect(), &roots);
        assert_eq!(walks(&["/usr/lib", "/", "/usr"]), [Path::new("/"), &place]);
        assert_eq!(walks(&["/usr/lib", "/usr"]), [Path::new("/usr")]);
    }
}

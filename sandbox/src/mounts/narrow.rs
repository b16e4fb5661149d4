//! Narrowing grants: one cover for each path that has fewer rights than its parent.

use super::mask::Mask;
use super::place::{Builder, Spot};
use super::tree::{self, Lock, Tree};
use super::{Cover, MountError, Point, Records, point};
use crate::compiled::Verdict;
use crate::gitfile::is_a_strangers;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

impl Builder<'_> {
    /// Covers a path that has fewer rights than the grant above it.
    pub(super) fn narrow(
        &mut self,
        path: &Path,
        spot: &Spot,
        above: Verdict,
        announce: &mut dyn FnMut(&Path),
    ) -> Result<Option<Point>, MountError> {
        let target = match look(path, above == Verdict::Write, self.records) {
            Look::There(target) => {
                self.refuse_loose(path)?;
                target
            }
            Look::Missing(first) => {
                self.refuse_loose(first)?;
                return self.narrow_missing(path, first, spot, above, announce);
            }
            // The blocking file is held or denied by its own entry, or the policy allows changing it.
            Look::Blocked(place) => {
                self.refuse_loose(place)?;
                return Ok(None);
            }
            Look::Locked => return self.cover_locked(path).map(|()| None),
            Look::Failed(Errno::LOOP) if path.ancestors().skip(1).any(|above| self.known_links.contains(above)) => {
                return Ok(None);
            }
            Look::Failed(errno) => return Err(MountError::at("open", path)(errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        // Another sandbox may use this mount point, too. With a second lock, its maker does not remove it.
        if self.records.is_some() && (point::may_be_one(&target, path) || point::is_ours(&target, path, self.records)) {
            return self.hold(path, spot, announce);
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        if spot.verdict.is_granted() {
            if kind == FileType::Symlink {
                return if is_a_strangers(path, &stat) { Ok(None) } else { Err(cannot_hold_link(path)) };
            }
            let tree = Tree::clone_of(target.as_fd(), path)?;
            tree.lock(Lock::ReadOnly, path)?;
            tree.attach(target.as_fd(), path)?;
            self.cover(path, &tree, is_a_strangers(path, &stat))?;
        } else {
            let mount = match kind {
                // The target of the link is judged at its own path; the link itself has no content to deny.
                FileType::Symlink => return Ok(None),
                FileType::Directory if spot.leads_on => self.lead_through(target.as_fd(), path)?.mount(path)?,
                kind => {
                    let tree = self.mask(if kind == FileType::Directory { Mask::Denied } else { Mask::File })?;
                    tree.attach(target.as_fd(), path)?;
                    tree.mount(path)?
                }
            };
            if !is_a_strangers(path, &stat) {
                self.covered.push(Cover { path: path.to_owned(), mount });
            }
        }
        Ok(None)
    }

    /// Covers the directory above a path that may not be searched. Neither this process nor the confined one can see its content.
    /// But its owner, possibly the confined process, could make it searchable at any time, and denied files in it would be exposed.
    pub(super) fn cover_locked(&mut self, path: &Path) -> Result<(), MountError> {
        let there = |place: &Path| tree::try_open(place).ok().map(|target| (place.to_owned(), target));
        let Some((place, target)) = path.ancestors().skip(1).find_map(there) else { return Ok(()) };
        if self.locked.contains(&place) || place == Path::new("/") {
            return Ok(());
        }
        let stat = fstat(&target).map_err(MountError::at("look at", &place))?;
        let tree = self.mask(Mask::Denied)?;
        tree.attach(target.as_fd(), &place)?;
        self.cover(&place, &tree, is_a_strangers(&place, &stat))?;
        self.locked.insert(place);
        Ok(())
    }

    /// Notes a cover that must stay in place. A file of another user in a shared directory is left out: that user may remove it at
    /// any time, and could so end the sandbox.
    pub(super) fn cover(&mut self, path: &Path, tree: &Tree, is_a_strangers: bool) -> Result<(), MountError> {
        if !is_a_strangers {
            self.covered.push(Cover { path: path.to_owned(), mount: tree.mount(path)? });
        }
        Ok(())
    }

    /// Narrows a path that does not exist. Its first missing component stands for everything below it.
    fn narrow_missing(
        &mut self,
        path: &Path,
        missing: &Path,
        spot: &Spot,
        above: Verdict,
        announce: &mut dyn FnMut(&Path),
    ) -> Result<Option<Point>, MountError> {
        match (above, spot.verdict.is_granted()) {
            (Verdict::Write, _) => self.hold(missing, spot, announce),
            // No process inside can make it, and it has no content to change.
            (_, true) => Ok(None),
            // A process outside can make it.
            (_, false) => {
                self.awaited.push(path.to_owned());
                Ok(None)
            }
        }
    }

    /// Refuses a path below a directory that was missing when it was to be held, and exists now: the directory could be moved away
    /// with everything below it.
    fn refuse_loose(&self, path: &Path) -> Result<(), MountError> {
        match path.ancestors().skip(1).find(|above| self.loose.contains(*above)) {
            Some(above) => Err(MountError::refused(format!(
                "hold `{}`: it was made while the sandbox was made; start again",
                above.display()
            ))),
            None => Ok(()),
        }
    }

    /// Holds a name for as long as the sandbox lives, by a mount point that is made or shared. If the mount point is removed while
    /// this process waits for another user's lock, it is made again.
    fn hold(&mut self, path: &Path, spot: &Spot, announce: &mut dyn FnMut(&Path)) -> Result<Option<Point>, MountError> {
        // A covered name cannot be moved.
        self.loose.remove(path);
        let records = self.records.ok_or_else(|| no_records(path))?;
        announce(path);
        let mut attempts = 0;
        loop {
            let point = match Point::make(path, records) {
                Err(error) if is_refused(&error) => return Self::hold_by_directory(path, error).map(|()| None),
                made => made?,
            };
            let Some(point) = point else { return Ok(None) };
            match self.cover_point(path, spot, &point) {
                Err(error) if error.errno == Errno::NOENT.raw_os_error() && attempts < MAX_HOLDS => attempts += 1,
                covered => return covered.map(|()| Some(point)),
            }
        }
    }

    /// Holds a name by its directory, in which this user cannot make files now. A process could make it writable again, or may have
    /// made it read-only so that no name could be held there. So the directory is made read-only by its mount.
    fn hold_by_directory(path: &Path, error: MountError) -> Result<(), MountError> {
        let Some(directory) = path.parent().filter(|directory| *directory != Path::new("/")) else { return Err(error) };
        // The directory is a mount already: a writable root, or a directory above one, which cannot be moved. Mounts below it keep
        // their own rights.
        tree::lock_path(directory, false, Lock::ReadOnly).map_err(|_no_mount| error)
    }

    fn cover_point(&mut self, path: &Path, spot: &Spot, point: &Point) -> Result<(), MountError> {
        // Opened again without access to its content. The identity shows whether it is still the held directory.
        let target = tree::open(path)?;
        if !is_same(&target, point.directory()) {
            let text = format!("mount on `{}`: it was replaced while the sandbox was made; start again", path.display());
            return Err(MountError::refused(text));
        }
        let mask = if spot.verdict.is_granted() { Mask::Empty } else { Mask::Denied };
        let tree = self.mask(mask)?;
        tree.attach(target.as_fd(), path)?;
        // This cover must stay in place even if the mount point is another user's in a shared directory: it may be removed when the
        // last sandbox of its owner ends.
        self.cover(path, &tree, false)
    }
}

/// The maximum number of attempts to cover a mount point that is removed meanwhile.
const MAX_HOLDS: u32 = 16;

/// The state of a path.
#[derive(Debug)]
pub(super) enum Look<'a> {
    There(OwnedFd),
    /// It does not exist. The field is its first missing component, or the first that exists only while another sandbox holds it.
    Missing(&'a Path),
    /// A component of the path is not a directory.
    Blocked(&'a Path),
    /// A directory above it may not be searched.
    Locked,
    Failed(Errno),
}

/// Checks each component once, from the top, so that a file that others make and remove meanwhile either exists or is missing: if
/// it were first taken as missing and then as existing, it would be covered as neither. `shares` says that names that other
/// sandboxes hold can be held here, too.
pub(super) fn look<'a>(path: &'a Path, shares: bool, records: Option<&Records>) -> Look<'a> {
    look_at_end(path, shares, records).unwrap_or_else(|| look_from_top(path, shares, records))
}

/// Finds, with few system calls, an existing path, or one of which only the last component is missing. A directory with content is
/// not a mount point that another sandbox holds. `None` in all other cases.
fn look_at_end<'a>(path: &'a Path, shares: bool, records: Option<&Records>) -> Option<Look<'a>> {
    match tree::try_open(path) {
        Ok(there) => return Some(Look::There(there)),
        Err(Errno::NOENT) => {}
        Err(_other) => return None,
    }
    let (directory, name) = (tree::try_open(path.parent()?).ok()?, path.file_name()?);
    if shares && point::is_ours(&directory, path.parent()?, records) {
        return None;
    }
    // The deciding check.
    match tree::try_open_below(directory.as_fd(), name) {
        Ok(there) => Some(Look::There(there)),
        Err(Errno::NOENT) => Some(Look::Missing(path)),
        Err(_other) => None,
    }
}

fn look_from_top<'a>(path: &'a Path, shares: bool, records: Option<&Records>) -> Look<'a> {
    let mut places: Vec<&Path> = path.ancestors().collect();
    places.reverse();
    let mut found = Look::Missing(path);
    for place in places {
        found = match tree::try_open(place) {
            Ok(there) if shares && place != path && point::is_ours(&there, place, records) => return Look::Missing(place),
            Ok(there) => Look::There(there),
            Err(Errno::NOENT) => return Look::Missing(place),
            Err(Errno::NOTDIR) => return Look::Blocked(place),
            Err(Errno::ACCESS) => return Look::Locked,
            Err(errno) => return Look::Failed(errno),
        };
    }
    found
}

/// Whether the mode of a directory prevents making a file.
fn is_refused(error: &MountError) -> bool {
    [Errno::ACCESS, Errno::PERM].map(Errno::raw_os_error).contains(&error.errno)
}

fn is_same(left: &OwnedFd, right: &OwnedFd) -> bool {
    let identity = |descriptor: &OwnedFd| fstat(descriptor).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(left), identity(right)), (Ok(left), Ok(right)) if left == right)
}

/// A mount point on the machine must be recorded as ours, or it could never be removed.
fn no_records(path: &Path) -> MountError {
    MountError::refused(format!(
        "hold `{}`: the server has no private directory for records of its mount points; set HOME or XDG_RUNTIME_DIR to a \
         directory that only the server's user can change, and restart the server",
        path.display()
    ))
}

fn cannot_hold_link(path: &Path) -> MountError {
    MountError::refused(format!(
        "keep `{0}` from being changed: it is a symbolic link, which no mount can hold; make it a directory or a file, or let an \
         entry of its own make `{0}` writable",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::RecordsAt;
    use super::*;
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};

    #[test]
    fn names_held_by_other_sandboxes_count_as_missing_if_shared() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let at = |name: &str| top.join(name);
        fs::create_dir_all(at("there/below")).unwrap();
        fs::write(at("file"), "").unwrap();
        symlink("there", at("link")).unwrap();
        fs::DirBuilder::new().mode(0o700).create(at("records")).unwrap();
        let opened = RecordsAt::new(&at("records")).open().unwrap();
        let records = Some(&opened);
        let missing = |path: &Path, shares| match look(path, shares, records) {
            Look::Missing(first) => Some(first.to_owned()),
            _ => None,
        };
        assert!(matches!(look(&at("there/below"), true, records), Look::There(_)));
        assert!(matches!(look(&at("link"), true, records), Look::There(_)), "the link itself");
        assert!(matches!(look(&at("link/below"), true, records), Look::Failed(Errno::LOOP)));
        assert!(matches!(look(&at("file/x"), true, records), Look::Blocked(place) if place == at("file/x")));
        assert_eq!(missing(&at("there/a/b/c"), true), Some(at("there/a")));

        let held = Point::make(&at("there/a"), &opened).unwrap().unwrap();
        assert_eq!(missing(&at("there/a/b"), true), Some(at("there/a")), "another sandbox can hold it, too");
        assert_eq!(missing(&at("there/a/b"), false), Some(at("there/a/b")), "it need not be held");
        assert!(matches!(look(&at("there/a"), true, records), Look::There(_)));
        assert!(point::is_ours(held.directory(), &at("there/a"), records));
        // Without a record it is an ordinary directory, independent of its mode.
        fs::create_dir(at("there/c")).unwrap();
        fs::set_permissions(at("there/c"), fs::Permissions::from_mode(0o1755)).unwrap();
        assert_eq!(missing(&at("there/c/d"), true), Some(at("there/c/d")));
        // A directory of a user.
        fs::create_dir_all(at("there/a/b")).unwrap();
        fs::set_permissions(at("there/a/b"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!point::is_ours(held.directory(), &at("there/a"), records));
        assert!(matches!(look(&at("there/a/b"), true, records), Look::There(_)));
    }
}

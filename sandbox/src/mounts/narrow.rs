//! Taking away from what is granted above: one cover for each place that is less.

use super::mask::Mask;
use super::place::{Builder, Spot};
use super::tree::{self, Lock, Tree};
use super::{Cover, MountError, Point, is_mount_point, point};
use crate::compiled::Verdict;
use crate::gitfile::is_a_strangers;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Bound of the names that lead on from a denied directory.
const LEADING: &str = "1m";

impl Builder {
    /// Covers what is less than what is granted above.
    pub(super) fn narrow(
        &mut self,
        path: &Path,
        spot: &Spot,
        above: Verdict,
        announce: &mut dyn FnMut(&Path),
    ) -> Result<Option<Point>, MountError> {
        let target = match look(path, above == Verdict::Write) {
            Look::There(target) => {
                self.refuse_loose(path)?;
                target
            }
            Look::Missing(first) => {
                self.refuse_loose(first)?;
                return self.narrow_missing(path, first, spot, above, announce);
            }
            // Whoever may change that finds it held or denied by a place of its own, or may.
            Look::Blocked(place) => {
                self.refuse_loose(place)?;
                return Ok(None);
            }
            Look::Locked => return refuse_locked(path, above).map(|()| None),
            Look::Failed(errno) => return Err(MountError::at("open", path)(errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        // It is shared, so that it stays.
        if is_shared(&target, path) {
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
            let tree = match kind {
                // What the link leads to is judged where it is; the link itself holds nothing.
                FileType::Symlink => return Ok(None),
                FileType::Directory if spot.leads_on => tree::memory("111", LEADING)?,
                FileType::Directory => self.mask(Mask::Denied)?,
                _file => self.mask(Mask::File)?,
            };
            tree.attach(target.as_fd(), path)?;
            self.cover(path, &tree, is_a_strangers(path, &stat))?;
            if spot.leads_on {
                self.lock_later(tree, path);
            }
        }
        Ok(None)
    }

    /// Notes a cover that has to stay. What a stranger may remove any time, in a directory that all share, is not worth a sandbox's
    /// life, or strangers could end it.
    pub(super) fn cover(&mut self, path: &Path, tree: &Tree, is_a_strangers: bool) -> Result<(), MountError> {
        if !is_a_strangers {
            self.covered.push(Cover { path: path.to_owned(), mount: tree.mount(path)? });
        }
        Ok(())
    }

    /// The first name on the way that is missing stands for what is below it.
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
            // Nobody inside can make it, and there is nothing that one could change in it.
            (_, true) => Ok(None),
            // Somebody outside can.
            (_, false) => {
                self.awaited.push(path.to_owned());
                Ok(None)
            }
        }
    }

    /// What was missing when the way to a place was to be held, and leads there now, could be moved away with its place.
    fn refuse_loose(&self, path: &Path) -> Result<(), MountError> {
        match path.ancestors().skip(1).find(|above| self.loose.contains(*above)) {
            Some(above) => Err(MountError::refused(format!(
                "hold `{}`: it was made while the sandbox was made; start again",
                above.display()
            ))),
            None => Ok(()),
        }
    }

    /// Holds a name for as long as the sandbox lives, by a mount point that is made or shared.
    fn hold(&mut self, path: &Path, spot: &Spot, announce: &mut dyn FnMut(&Path)) -> Result<Option<Point>, MountError> {
        // Covered, it cannot be moved.
        self.loose.remove(path);
        announce(path);
        let Some(point) = Point::make(path)? else { return Ok(None) };
        // Opened anew without a right to its content: what stands there now is what is held, by its identity.
        let target = tree::open(path)?;
        if !is_same(&target, point.directory()) {
            let text = format!("mount on `{}`: it was replaced while the sandbox was made; start again", path.display());
            return Err(MountError::refused(text));
        }
        let mask = if spot.verdict.is_granted() { Mask::Empty } else { Mask::Denied };
        let tree = self.mask(mask)?;
        tree.attach(target.as_fd(), path)?;
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        self.cover(path, &tree, is_a_strangers(path, &stat))?;
        Ok(Some(point))
    }
}

/// What stands at a path.
#[derive(Debug)]
pub(super) enum Look<'a> {
    There(OwnedFd),
    /// Nothing; this is the first name on the way that is missing, or is there only as long as another sandbox holds it.
    Missing(&'a Path),
    /// Something that is no directory stands in its way.
    Blocked(&'a Path),
    /// The way to it may not be walked.
    Locked,
    Failed(Errno),
}

/// Looks from the top, once at each name, so that what others make and remove meanwhile is one or the other: taken first for missing
/// and then for there, it would be covered as neither. `shares` says that what other sandboxes hold can be held too.
pub(super) fn look(path: &Path, shares: bool) -> Look<'_> {
    let mut places: Vec<&Path> = path.ancestors().collect();
    places.reverse();
    let mut found = Look::Missing(path);
    for place in places {
        found = match tree::try_open(place) {
            Ok(there) if shares && place != path && is_shared(&there, place) => return Look::Missing(place),
            Ok(there) => Look::There(there),
            Err(Errno::NOENT) => return Look::Missing(place),
            Err(Errno::NOTDIR) => return Look::Blocked(place),
            Err(Errno::ACCESS) => return Look::Locked,
            Err(errno) => return Look::Failed(errno),
        };
    }
    found
}

/// Whether a sandbox made it for the time being.
pub(super) fn is_shared(place: &OwnedFd, path: &Path) -> bool {
    fstat(place).is_ok_and(|stat| is_mount_point(&stat)) && point::is_empty(path)
}

fn is_same(left: &OwnedFd, right: &OwnedFd) -> bool {
    let identity = |descriptor: &OwnedFd| fstat(descriptor).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(left), identity(right)), (Ok(left), Ok(right)) if left == right)
}

fn cannot_hold_link(path: &Path) -> MountError {
    MountError::refused(format!(
        "keep `{0}` from being changed: it is a symbolic link, which no mount can hold; make it a directory or a file, or let an \
         entry of its own make `{0}` writable",
        path.display()
    ))
}

/// A place that cannot be reached now. Where the user may write, the owner of a directory can open it any time, so that the place
/// would lie bare.
fn refuse_locked(path: &Path, above: Verdict) -> Result<(), MountError> {
    let own = geteuid().as_raw();
    let stat = |place: &Path| tree::try_open(place).ok().and_then(|place| fstat(&place).ok());
    let locked = path.ancestors().skip(1).find_map(|place| Some((place, stat(place)?)));
    match locked {
        Some((place, stat)) if above == Verdict::Write && stat.st_uid == own => Err(MountError::refused(format!(
            "cover `{}`: `{}` is locked, and its owner could open it again inside; open it (chmod u+rwx)",
            path.display(),
            place.display()
        ))),
        _out_of_reach => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn each_name_is_there_or_missing_and_what_others_hold_is_missing_for_whoever_shares_it() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let at = |name: &str| top.join(name);
        fs::create_dir_all(at("there/below")).unwrap();
        fs::write(at("file"), "").unwrap();
        symlink("there", at("link")).unwrap();
        let missing = |path: &Path, shares| match look(path, shares) {
            Look::Missing(first) => Some(first.to_owned()),
            _ => None,
        };
        assert!(matches!(look(&at("there/below"), true), Look::There(_)));
        assert!(matches!(look(&at("link"), true), Look::There(_)), "the link itself");
        assert!(matches!(look(&at("link/below"), true), Look::Failed(Errno::LOOP)));
        assert!(matches!(look(&at("file/x"), true), Look::Blocked(place) if place == at("file/x")));
        assert_eq!(missing(&at("there/a/b/c"), true), Some(at("there/a")));

        let point = Point::make(&at("there/a")).unwrap().unwrap();
        assert_eq!(missing(&at("there/a/b"), true), Some(at("there/a")), "to be held by this one too");
        assert_eq!(missing(&at("there/a/b"), false), Some(at("there/a/b")), "out of reach, it need not be held");
        assert!(matches!(look(&at("there/a"), true), Look::There(_)));
        assert!(is_shared(point.directory(), point.path()));
        // Somebody's own.
        fs::create_dir_all(at("there/a/b")).unwrap();
        fs::set_permissions(at("there/a/b"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!is_shared(point.directory(), point.path()));
        assert!(matches!(look(&at("there/a/b"), true), Look::There(_)));
    }
}

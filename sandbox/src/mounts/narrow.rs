//! Taking away from what is granted above: one cover for each place that is less.

use super::mask::Mask;
use super::place::{Builder, Spot};
use super::tree::{self, Lock, Tree};
use super::{Cover, MountError, Point, Records, point};
use crate::compiled::Verdict;
use crate::gitfile::is_a_strangers;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

impl Builder<'_> {
    /// Covers what is less than what is granted above.
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
            // Whoever may change that finds it held or denied by a place of its own, or may.
            Look::Blocked(place) => {
                self.refuse_loose(place)?;
                return Ok(None);
            }
            Look::Locked => return self.cover_locked(path, above).map(|()| None),
            Look::Failed(errno) => return Err(MountError::at("open", path)(errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        // Another sandbox may use it too: with a lock its maker leaves it there.
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
                // What the link leads to is judged where it is; the link itself holds nothing.
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

    /// Covers the directory that may not be searched on the way to a place. Nothing in it is known here, nor to the process; but its
    /// owner could open it any time, and what is denied in it would lie bare.
    pub(super) fn cover_locked(&mut self, path: &Path, above: Verdict) -> Result<(), MountError> {
        let there = |place: &Path| tree::try_open(place).ok().map(|target| (place.to_owned(), target));
        let Some((place, target)) = path.ancestors().skip(1).find_map(there) else { return Ok(()) };
        if self.locked.contains(&place) || place == Path::new("/") {
            return Ok(());
        }
        refuse_locked(path, above)?;
        let stat = fstat(&target).map_err(MountError::at("look at", &place))?;
        let tree = self.mask(Mask::Denied)?;
        tree.attach(target.as_fd(), &place)?;
        self.cover(&place, &tree, is_a_strangers(&place, &stat))?;
        self.locked.insert(place);
        Ok(())
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
        let records = self.records.ok_or_else(|| no_records(path))?;
        announce(path);
        let Some(point) = Point::make(path, records)? else { return Ok(None) };
        // Opened anew without a right to its content: what stands there now is what is held, by its identity.
        let target = tree::open(path)?;
        if !is_same(&target, point.directory()) {
            let text = format!("mount on `{}`: it was replaced while the sandbox was made; start again", path.display());
            return Err(MountError::refused(text));
        }
        let mask = if spot.verdict.is_granted() { Mask::Empty } else { Mask::Denied };
        let tree = self.mask(mask)?;
        tree.attach(target.as_fd(), path)?;
        // Even if it is another user's, in a directory that all share: once its owner's last sandbox ends it may be removed.
        self.cover(path, &tree, false)?;
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
pub(super) fn look<'a>(path: &'a Path, shares: bool, records: Option<&Records>) -> Look<'a> {
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

fn is_same(left: &OwnedFd, right: &OwnedFd) -> bool {
    let identity = |descriptor: &OwnedFd| fstat(descriptor).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(left), identity(right)), (Ok(left), Ok(right)) if left == right)
}

/// What is made on the machine must be known to be ours, or it could never be removed.
fn no_records(path: &Path) -> MountError {
    MountError::refused(format!(
        "hold `{}`: the server has no private directory to note what it makes on the machine; set HOME or XDG_RUNTIME_DIR to a \
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
    use super::super::RecordsAt;
    use super::*;
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};

    #[test]
    fn each_name_is_there_or_missing_and_what_others_hold_is_missing_for_whoever_shares_it() {
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
        assert_eq!(missing(&at("there/a/b"), true), Some(at("there/a")), "to be held by this one too");
        assert_eq!(missing(&at("there/a/b"), false), Some(at("there/a/b")), "out of reach, it need not be held");
        assert!(matches!(look(&at("there/a"), true, records), Look::There(_)));
        assert!(point::is_ours(held.directory(), &at("there/a"), records));
        // Without a record it is what it is, whatever its mode.
        fs::create_dir(at("there/c")).unwrap();
        fs::set_permissions(at("there/c"), fs::Permissions::from_mode(0o1755)).unwrap();
        assert_eq!(missing(&at("there/c/d"), true), Some(at("there/c/d")));
        // Somebody's own.
        fs::create_dir_all(at("there/a/b")).unwrap();
        fs::set_permissions(at("there/a/b"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!point::is_ours(held.directory(), &at("there/a"), records));
        assert!(matches!(look(&at("there/a/b"), true, records), Look::There(_)));
    }
}

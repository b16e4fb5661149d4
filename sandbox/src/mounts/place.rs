//! The places of a policy, one mount each.

use super::kernel::{self, KernelMounts, Treatment, is_own};
use super::mask::{Mask, Masks};
use super::own;
use super::point::is_ours;
use super::tree::{self, Lock, Tree};
use super::{Cover, FoundKind, MountError, Plan, Point, Records};
use crate::compiled::{Compiled, Resolved, Verdict};
use crate::roots::{Identity, Root};
use rustix::fs::{CWD, FileType, fstat, readlinkat, symlinkat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Bound of what the names of an empty ground take.
const GROUND: &str = "16m";

/// Bound of the names that lead on from a denied directory.
const LEADING: &str = "1m";

/// What the view is laid on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Base {
    /// The machine's tree.
    Machine,
    /// Nothing.
    Empty,
}

/// A place in the making.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) verdict: Verdict,
    /// What was granted there, cloned before anything was locked; none for what is taken from the view itself.
    tree: Option<(Tree, Identity)>,
    /// Something granted lies below what is not.
    pub(super) leads_on: bool,
    /// A writable directory between a writable place and one below it that is less. As a mount of its own it cannot be moved
    /// out of the way.
    is_pin: bool,
}

/// Builds a view out of places.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    /// Where is noted what is made on the machine.
    pub(super) records: Option<&'a Records>,
    spots: BTreeMap<PathBuf, Spot>,
    base: Base,
    /// Links of the policy's own paths, and where they lead.
    links: Vec<(PathBuf, PathBuf)>,
    /// All links that paths of the policy lead through. Below one of them a path has no place: its real path has one.
    pub(super) known_links: BTreeSet<PathBuf>,
    /// Empty things to cover others with.
    masks: Option<Masks>,
    /// What was taken away below a granted place.
    pub(super) covered: Vec<Cover>,
    /// What is denied and does not exist: it must not come to be.
    pub(super) awaited: Vec<PathBuf>,
    /// Directories on the way to a place that could not be held in their turn: missing, no directory, locked, or another sandbox's
    /// mount point.
    pub(super) loose: BTreeSet<PathBuf>,
    /// Directories that may not be searched, covered with all that they hold.
    pub(super) locked: BTreeSet<PathBuf>,
    /// File systems of the kernel.
    pub(super) kernel: KernelMounts,
    /// As in [`super::Machine`].
    locked_kernel: Option<Vec<PathBuf>>,
    /// Trees to be locked when everything in them is made.
    open_trees: Vec<(Tree, PathBuf)>,
    /// Those among them that are not to be listed then.
    leading: BTreeSet<PathBuf>,
}

impl<'a> Builder<'a> {
    /// Clones what is granted.
    pub(super) fn take(plan: Plan<'a>, kernel: KernelMounts, locked_kernel: Option<Vec<PathBuf>>) -> Result<Self, MountError> {
        let mut spots = BTreeMap::new();
        for (path, verdict) in places(&plan, &kernel) {
            let above = nearest(&spots, &path).map_or(Verdict::Unlisted, |spot| spot.verdict);
            // What is merely narrowed is cloned later, out of the view.
            let tree = match verdict {
                Verdict::Write => Some(Lock::Writable),
                Verdict::Read | Verdict::Protected if !above.is_granted() => Some(Lock::ReadOnly),
                _ => None,
            };
            let is_ground = path == Path::new("/");
            let tree = match (tree, opened(&plan, &path)) {
                (Some(lock), Some((descriptor, identity))) if !is_ground => {
                    let tree = Tree::clone_of(descriptor.as_fd(), &path)?;
                    // A directory below `/dev` is a directory: nodes in it are devices that nothing names.
                    let lock = match is_node(descriptor) && is_device(&path) {
                        true if own::is_given_device(&path, plan.roots) => Lock::Device,
                        true => Lock::ReadOnly,
                        false => lock,
                    };
                    tree.lock(lock, &path)?;
                    Some((tree, identity))
                }
                _ => None,
            };
            spots.insert(path, Spot { verdict, tree, leads_on: false, is_pin: false });
        }
        mark_leads(&mut spots);
        let ways = plan.found.iter().filter(|found| found.kind == FoundKind::Way).map(|found| found.path.as_path());
        pin(&mut spots, ways);
        let base = match spots.get(Path::new("/")) {
            Some(spot) if spot.verdict.is_granted() => Base::Machine,
            _ => Base::Empty,
        };
        let links = if base == Base::Empty { links(&plan)? } else { Vec::new() };
        Ok(Self {
            records: plan.records,
            spots,
            base,
            links,
            known_links: plan.roots.links().cloned().collect(),
            masks: None,
            covered: Vec::new(),
            awaited: Vec::new(),
            loose: BTreeSet::new(),
            locked: BTreeSet::new(),
            kernel,
            locked_kernel,
            open_trees: Vec::new(),
            leading: BTreeSet::new(),
        })
    }

    /// Locks the machine's tree, or leaves it for an empty one.
    pub(super) fn lay_ground(&mut self) -> Result<Base, MountError> {
        let root = Path::new("/");
        if self.base == Base::Machine {
            let is_writable = self.spots.get(root).is_some_and(|spot| spot.verdict == Verdict::Write);
            tree::lock_path(root, true, if is_writable { Lock::Writable } else { Lock::ReadOnly })?;
            // The kernel's own files change the machine, not the workspace.
            if is_writable && tree::try_open(Path::new("/sys")).is_ok() {
                tree::lock_path(Path::new("/sys"), true, Lock::ReadOnly)?;
            }
            return Ok(self.base);
        }
        let ground = tree::memory("755", GROUND)?;
        ground.become_root()?;
        self.lock_later(ground, root);
        Ok(self.base)
    }

    /// Takes the empty things to cover others with.
    pub(super) fn cover_with(&mut self, masks: Masks) {
        self.masks = Some(masks);
    }

    /// Mounts every place, those above first.
    pub(super) fn place_all(&mut self, announce: &mut dyn FnMut(&Path)) -> Result<Vec<Point>, MountError> {
        let mut points = Vec::new();
        let spots = std::mem::take(&mut self.spots);
        for (path, spot) in &spots {
            // These two are the sandbox's own: what is denied there is denied of them.
            if is_own(path) && spot.verdict == Verdict::Denied && !is_of_machine(&spots, path) {
                self.narrow_own(path, spot)?;
                continue;
            }
            // The ground is laid, and whatever else the policy says of the machine's processes and devices, it has others.
            if path == Path::new("/") || path == Path::new("/dev") || path.starts_with("/proc") {
                continue;
            }
            let above = nearest(&spots, path).map_or(Verdict::Unlisted, |spot| spot.verdict);
            if spot.is_pin {
                self.hold_directory(path)?;
            } else if let Some((tree, identity)) = &spot.tree {
                self.attach(tree, *identity, path, above)?;
            } else if above.is_granted() {
                points.extend(self.narrow(path, spot, above, announce)?);
            }
        }
        let locked = match (self.locked_kernel.take(), &self.masks) {
            (None, Some(masks)) => kernel::cover_all(masks, |path| is_own(path) && !is_of_machine(&spots, path))?,
            (known, _) => known.unwrap_or_default(),
        };
        for path in locked.iter().filter(|path| nearest(&spots, path).is_some_and(|spot| spot.verdict.is_granted())) {
            self.cover_locked(path)?;
        }
        self.narrow_kernel_mounts(&spots)?;
        self.place_links(&spots)?;
        Ok(points)
    }

    /// Locks what was open for making names in it. What is covered, and what must not come to be.
    pub(super) fn finish(self) -> Result<(Vec<Cover>, Vec<PathBuf>), MountError> {
        for (tree, path) in &self.open_trees {
            if self.leading.contains(path) {
                tree.shut(path)?;
            }
            tree.lock_top(Lock::ReadOnly, path)?;
        }
        Ok((self.covered, self.awaited))
    }

    /// Has a tree locked at the end.
    pub(super) fn lock_later(&mut self, tree: Tree, path: &Path) {
        self.open_trees.push((tree, path.to_owned()));
    }

    /// Covers a denied directory by one that can be walked through and not listed. It is made open, since the names in it are still
    /// to be made, by a process that no mode is open to that is not open to others.
    pub(super) fn lead_through(&mut self, target: BorrowedFd<'_>, path: &Path) -> Result<&Tree, MountError> {
        let tree = tree::memory("755", LEADING)?;
        tree.attach(target, path)?;
        self.leading.insert(path.to_owned());
        self.lock_later(tree, path);
        self.open_trees.last().map(|(tree, _)| tree).ok_or_else(|| MountError::at("cover", path)(Errno::NOENT))
    }

    /// Mounts a directory over itself, so that it cannot be renamed.
    fn hold_directory(&mut self, path: &Path) -> Result<(), MountError> {
        match tree::try_open(path) {
            Ok(target) if !is_ours(&target, path, self.records) => {
                let tree = Tree::clone_of(target.as_fd(), path)?;
                tree.attach(target.as_fd(), path)?;
                self.cover(path, &tree, false)
            }
            // What is missing is held by its first missing name, with the place below; what is locked is met there too.
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => {
                self.loose.insert(path.to_owned());
                Ok(())
            }
            Err(errno) => Err(MountError::at("open", path)(errno)),
        }
    }

    /// Attaches what was granted.
    fn attach(&mut self, tree: &Tree, identity: Identity, path: &Path, above: Verdict) -> Result<(), MountError> {
        if !above.is_granted() || is_device(path) {
            return tree.attach(make(path, tree.top())?.as_fd(), path);
        }
        let target = tree::open(path)?;
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        if (Identity { device: stat.st_dev, inode: stat.st_ino }) != identity {
            let text = format!("mount `{}`: it was replaced while the sandbox was made; start the process again", path.display());
            return Err(MountError::refused(text));
        }
        tree.attach(target.as_fd(), path)?;
        // Moved away by somebody outside, it would leave its name to something else, of which nothing is covered.
        self.cover(path, tree, false)
    }

    pub(super) fn mask(&self, mask: Mask) -> Result<Tree, MountError> {
        let path = Path::new(mask.name());
        self.masks.as_ref().ok_or_else(|| MountError::at("cover", path)(Errno::NOENT))?.tree(mask)
    }

    /// In an empty ground the links of the policy's own paths are missing.
    fn place_links(&self, spots: &BTreeMap<PathBuf, Spot>) -> Result<(), MountError> {
        for (place, target) in &self.links {
            let above = nearest(spots, place).map_or(Verdict::Unlisted, |spot| spot.verdict);
            if above != Verdict::Unlisted || spots.get(place).is_some_and(|spot| spot.verdict.is_granted()) {
                continue;
            }
            let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { continue };
            let parent = make_directories(parent)?;
            match symlinkat(target, &parent, name) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(MountError::at("link", place)(errno)),
            }
        }
        Ok(())
    }
}

/// The policy's places and those that were found, without what changes nothing.
fn places(plan: &Plan<'_>, kernel: &KernelMounts) -> BTreeMap<PathBuf, Verdict> {
    let mut all: BTreeMap<PathBuf, Verdict> =
        plan.tables.places().into_iter().map(|place| (place.path.to_owned(), place.verdict)).collect();
    for found in plan.found {
        let path = found.path.as_path();
        match found.kind {
            FoundKind::Denied => {
                // A glob wins over every entry, and covers everything below.
                all.retain(|known, _| !known.starts_with(path));
                all.insert(path.to_owned(), Verdict::Denied);
            }
            FoundKind::Protected if plan.tables.is_writable_but_pointed_at(path) => {
                all.insert(path.to_owned(), Verdict::Protected);
            }
            // Those above come first, so that this is heard.
            FoundKind::Named if plan.tables.verdict(path) == Verdict::Write => {
                all.insert(path.to_owned(), Verdict::Write);
            }
            // By its name alone, so that the tables say so themselves.
            FoundKind::Nested if plan.tables.verdict(path) == Verdict::Protected => {
                all.insert(path.to_owned(), Verdict::Protected);
            }
            FoundKind::Protected | FoundKind::Named | FoundKind::Nested | FoundKind::Way => {}
        }
    }
    take_back(&mut all, plan.tables);
    for (path, verdict) in all.iter_mut().filter(|(path, verdict)| verdict.is_granted() && !is_own(path)) {
        let device = opened(plan, path).map(|(_, identity)| identity.device);
        *verdict = match device.and_then(|device| kernel.of_device(device)) {
            Some(Treatment::Denied) => Verdict::Denied,
            Some(Treatment::ReadOnly) if *verdict == Verdict::Write => Verdict::Read,
            _files => *verdict,
        };
    }
    own::add_denied(&mut all, plan.tables);
    all
}

/// Whether a path below `/dev` lies in what an entry took from the machine.
fn is_of_machine(spots: &BTreeMap<PathBuf, Spot>, path: &Path) -> bool {
    path.starts_with("/dev") && path.ancestors().skip(1).any(|above| spots.get(above).is_some_and(|spot| spot.tree.is_some()))
}

/// Makes what an entry gives below a place that a protected name leads to no more than that place, which another set of grants may
/// keep as it is.
fn take_back(all: &mut BTreeMap<PathBuf, Verdict>, tables: &Compiled) {
    let pointed: Vec<PathBuf> = all
        .iter()
        .filter(|(path, verdict)| **verdict == Verdict::Write && tables.is_pointed_at(path))
        .map(|(path, _)| path.clone())
        .collect();
    for path in pointed {
        match path.ancestors().skip(1).find_map(|above| all.get(above)) {
            // It is held with what lies above.
            Some(Verdict::Read | Verdict::Protected) => drop(all.remove(&path)),
            _less_or_writable => drop(all.insert(path, Verdict::Protected)),
        }
    }
}

/// The spot that covers a path from above.
pub(super) fn nearest<'s>(spots: &'s BTreeMap<PathBuf, Spot>, path: &Path) -> Option<&'s Spot> {
    path.ancestors().skip(1).find_map(|above| spots.get(above))
}

fn mark_leads(spots: &mut BTreeMap<PathBuf, Spot>) {
    let granted: Vec<PathBuf> =
        spots.iter().filter(|(_, spot)| spot.verdict.is_granted()).map(|(path, _)| path.clone()).collect();
    for path in granted {
        for above in path.ancestors().skip(1) {
            if let Some(spot) = spots.get_mut(above) {
                spot.leads_on = true;
            }
        }
    }
}

/// Adds the directories that lead from a writable place to one below it: whoever moved them would take the place out of the
/// policy's reach, this time or the next.
fn pin<'a>(spots: &mut BTreeMap<PathBuf, Spot>, ways: impl Iterator<Item = &'a Path>) {
    let mut pins: Vec<PathBuf> = ways
        .filter(|way| !spots.contains_key(*way) && nearest(spots, way).is_some_and(|spot| spot.verdict == Verdict::Write))
        .map(Path::to_owned)
        .collect();
    let ways = pins.clone();
    for path in spots.keys().chain(&ways) {
        let above: Vec<&Path> = path.ancestors().skip(1).take_while(|above| !spots.contains_key(*above)).collect();
        if nearest(spots, path).is_some_and(|spot| spot.verdict == Verdict::Write) {
            pins.extend(above.into_iter().map(Path::to_owned));
        }
    }
    for path in pins {
        spots.insert(path, Spot { verdict: Verdict::Write, tree: None, leads_on: false, is_pin: true });
    }
}

/// What the policy's entries opened at a real path.
fn opened<'a>(plan: &Plan<'a>, path: &Path) -> Option<(&'a OwnedFd, Identity)> {
    let at_path = |root: &&Root| root.real == path;
    let opened = plan.roots.all().iter().filter(at_path).find_map(|root| root.descriptor.as_ref())?;
    Some((&opened.0, opened.1))
}

/// Links that the paths of granted entries lead through.
fn links(plan: &Plan<'_>) -> Result<Vec<(PathBuf, PathBuf)>, MountError> {
    let mut found = Vec::new();
    for resolved in plan.roots.resolutions() {
        let Resolved::Real { links, .. } = resolved else { continue };
        for link in links {
            match readlinkat(CWD, link, Vec::new()) {
                Ok(target) => found.push((link.clone(), PathBuf::from(OsString::from_vec(target.into_bytes())))),
                // Gone meanwhile: then its name leads nowhere inside either.
                Err(Errno::NOENT | Errno::INVAL) => {}
                Err(errno) => return Err(MountError::at("read the link", link)(errno)),
            }
        }
    }
    Ok(found)
}

/// An entry that names a device, which is then one of the sandbox's own `/dev`.
fn is_device(path: &Path) -> bool {
    path.starts_with("/dev") && path != Path::new("/dev")
}

/// Whether it is a device itself. What cannot be looked at is none.
fn is_node(descriptor: &OwnedFd) -> bool {
    fstat(descriptor)
        .is_ok_and(|stat| matches!(FileType::from_raw_mode(stat.st_mode), FileType::CharacterDevice | FileType::BlockDevice))
}

/// Makes something to mount `tree` over, in a ground that has nothing there.
fn make(path: &Path, tree: BorrowedFd<'_>) -> Result<OwnedFd, MountError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return tree::open(path);
    };
    let parent = make_directories(parent)?;
    let stat = fstat(tree).map_err(MountError::at("look at", path))?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        tree::make_directory(parent.as_fd(), name, path)
    } else {
        tree::make_file(parent.as_fd(), name, path)
    }
}

/// Makes the directories of a path, and opens the last.
pub(super) fn make_directories(path: &Path) -> Result<OwnedFd, MountError> {
    let mut at = tree::open(Path::new("/"))?;
    let mut so_far = PathBuf::from("/");
    for name in path.iter().skip(1) {
        so_far.push(name);
        at = tree::make_directory(at.as_fd(), name, &so_far)?;
    }
    Ok(at)
}

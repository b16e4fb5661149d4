//! The view of an fs worker: the machine's tree, read-only, the writable places over it, and covers on what is denied or protected
//! there.
//!
//! A file call has to see the machine as it is, so this view differs from that of a process ([`super::build`]). It never begins
//! empty: every path leads where it leads on the machine, and a root that was replaced shows. It makes no mount points: names that
//! do not exist are held by the worker's judgement alone, and awaited. What no entry grants is hidden by that judgement, and by
//! Landlock as far as content goes.

use super::device::Processes;
use super::kernel;
use super::mask::{Mask, Masks};
use super::narrow::{Look, look};
use super::tree::{self, Lock, Tree};
use super::{Cover, MountError};
use crate::compiled::{Compiled, Verdict};
use crate::gitfile::is_a_strangers;
use crate::roots::{Identity, Roots};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat2, statat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What a view of files is laid on: mounts that are this process's own, and its own `/proc`. The policy's roots are opened next.
#[derive(Debug)]
pub struct Ground {
    masks: Masks,
    own_proc: bool,
}

/// What was built.
#[derive(Debug)]
pub struct FileView {
    /// Whether `/proc` shows the worker only. If not, it is the machine's, read-only.
    pub own_proc: bool,
    /// What has to stay mounted where it is.
    pub covered: Vec<Cover>,
    /// What is denied or protected, and is missing or empty. Once it is not, a view has to be built anew.
    pub awaited: Vec<PathBuf>,
}

/// A mount of the view.
#[derive(Debug)]
enum Layer {
    /// A writable place, cloned before anything was locked.
    Writable(Tree, Identity),
    /// What may be read and not changed, below a writable place.
    ReadOnly,
    Denied,
    /// A directory on the way from a writable place to a cover: as a mount of its own it cannot be renamed.
    Pin,
}

impl Ground {
    /// Lays it, in a mount namespace that is this process's own.
    ///
    /// # Errors
    /// A step failed: the process must end.
    pub fn lay() -> Result<Self, MountError> {
        tree::part_from_the_machine()?;
        let path = Path::new("/proc");
        let processes = Processes::take()?;
        // What is mounted next covers them.
        let masks = Masks::new()?;
        masks.attach(tree::open(path)?.as_fd())?;
        let own_proc = processes.attach(|| tree::open(path))?;
        Ok(Self { masks, own_proc })
    }

    /// Builds the view of a policy. `tables` were made with `roots`, which were opened on this ground. What was opened before lies
    /// beneath the covers: [`Roots::open_anew`] comes next.
    ///
    /// # Errors
    /// A step failed, or a root was replaced meanwhile: the process must end.
    pub fn cover(self, tables: &Compiled, roots: &Roots) -> Result<FileView, MountError> {
        let places: BTreeMap<&Path, Verdict> = tables.places().into_iter().map(|place| (place.path, place.verdict)).collect();
        let mut view = FileView { own_proc: self.own_proc, covered: Vec::new(), awaited: Vec::new() };
        let layers = view.plan(&places, roots)?;
        lay_machine(places.get(Path::new("/")) == Some(&Verdict::Write))?;
        for (path, layer) in &layers {
            view.attach(path, layer, &self.masks)?;
        }
        let places = places.into_iter().map(|(path, verdict)| (path.to_owned(), verdict)).collect();
        kernel::mask_automounters(&places, &self.masks)?;
        Ok(view)
    }
}

impl FileView {
    /// What to mount, those above first. What is merely narrowed is cloned later, out of the view.
    fn plan(&mut self, places: &BTreeMap<&Path, Verdict>, roots: &Roots) -> Result<BTreeMap<PathBuf, Layer>, MountError> {
        let mut layers = BTreeMap::new();
        let mut pins = Vec::new();
        for (path, verdict) in places.iter().filter(|(path, _)| **path != Path::new("/")) {
            let above = path.ancestors().skip(1).find_map(|above| Some((above, *places.get(above)?)));
            let layer = match (verdict, above) {
                (Verdict::Write, _) => writable(roots, path)?,
                (Verdict::Read | Verdict::Protected, Some((_, Verdict::Write))) => Some(Layer::ReadOnly),
                // Its cover would hide the changes of what is granted below: that is for the judgement alone.
                (Verdict::Denied, _) if leads_on(places, path) => None,
                (Verdict::Denied, Some((_, above))) if above.is_granted() => Some(Layer::Denied),
                _nothing_to_take_away => None,
            };
            let Some(layer) = layer else { continue };
            let is_cover = matches!(layer, Layer::ReadOnly | Layer::Denied);
            if is_cover && !self.is_there(path)? {
                continue;
            }
            if let (true, Some((root, Verdict::Write))) = (is_cover, above) {
                pins.extend(path.ancestors().skip(1).take_while(|way| *way != root).map(Path::to_owned));
            }
            layers.insert(path.to_path_buf(), layer);
        }
        for pin in pins {
            layers.entry(pin).or_insert(Layer::Pin);
        }
        Ok(layers)
    }

    /// Whether something stands at a path that can be covered. What does not yet is awaited.
    fn is_there(&mut self, path: &Path) -> Result<bool, MountError> {
        match look(path, false, None) {
            // What a link leads to is judged where it is, and no mount holds the link itself.
            Look::There(target) if kind(&target, path)? == FileType::Symlink => Ok(false),
            Look::There(_) if has_come(path) => Ok(true),
            Look::There(_) | Look::Missing(_) | Look::Blocked(_) => {
                // There threads of the worker come and go.
                if !path.starts_with("/proc") {
                    self.awaited.push(path.to_owned());
                }
                Ok(false)
            }
            // Out of the worker's own reach, too; or the way leads through a link, and where that leads is a place of its own.
            Look::Locked | Look::Failed(_) => Ok(false),
        }
    }

    fn attach(&mut self, path: &Path, layer: &Layer, masks: &Masks) -> Result<(), MountError> {
        let target = match tree::try_open(path) {
            Ok(target) => target,
            // Gone since it was looked at: the first look at what is awaited finds what became of it.
            Err(Errno::NOENT | Errno::NOTDIR) if !matches!(layer, Layer::Writable(..)) => {
                self.awaited.push(path.to_owned());
                return Ok(());
            }
            Err(errno) => return Err(replaced(path, errno)),
        };
        let stat = fstat(&target).map_err(MountError::at("look at", path))?;
        let clone = |lock: Option<Lock>| {
            let tree = Tree::clone_of(target.as_fd(), path)?;
            lock.map_or(Ok(()), |lock| tree.lock(lock, path)).map(|()| tree)
        };
        let made;
        let tree = match layer {
            Layer::Writable(tree, identity) => {
                if (Identity { device: stat.st_dev, inode: stat.st_ino }) != *identity {
                    return Err(replaced(path, Errno::STALE));
                }
                // That it stays is asked with each request.
                return tree.attach(target.as_fd(), path);
            }
            Layer::ReadOnly => {
                made = clone(Some(Lock::ReadOnly))?;
                &made
            }
            Layer::Pin => {
                made = clone(None)?;
                &made
            }
            Layer::Denied => {
                let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
                made = masks.tree(if is_directory { Mask::Denied } else { Mask::File })?;
                &made
            }
        };
        tree.attach(target.as_fd(), path)?;
        if !is_a_strangers(path, &stat) {
            self.covered.push(Cover { path: path.to_owned(), mount: tree.mount(path)? });
        }
        Ok(())
    }
}

/// Whether something stands at a path that a cover would hold: not an empty directory, which says nothing, and which sandboxes make
/// and remove to hold a name.
#[must_use]
pub fn has_come(path: &Path) -> bool {
    match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT | Errno::NOTDIR) => false,
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => !is_empty(path),
        Ok(_) | Err(_) => true,
    }
}

/// What cannot be looked into may hold something.
fn is_empty(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).and_then(rustix::fs::Dir::new);
    opened.is_ok_and(|mut entries| {
        entries.all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b"..")))
    })
}

/// Takes rights away from the machine's own mounts, in place.
fn lay_machine(is_writable: bool) -> Result<(), MountError> {
    tree::lock_path(Path::new("/"), true, if is_writable { Lock::Writable } else { Lock::ReadOnly })?;
    // The kernel's own files change the machine.
    let kernel = Path::new("/sys");
    if is_writable && tree::try_open(kernel).is_ok() { tree::lock_path(kernel, true, Lock::ReadOnly) } else { Ok(()) }
}

fn writable(roots: &Roots, path: &Path) -> Result<Option<Layer>, MountError> {
    let at_path = roots.all().iter().filter(|root| root.real == path);
    let Some((descriptor, identity)) = at_path.filter_map(|root| root.descriptor.as_ref()).next() else { return Ok(None) };
    let tree = Tree::clone_of(descriptor.as_fd(), path)?;
    tree.lock(Lock::Writable, path)?;
    Ok(Some(Layer::Writable(tree, *identity)))
}

/// What was moved while the view was made is seen by the next one that is made (`ESTALE`).
fn replaced(path: &Path, errno: Errno) -> MountError {
    let errno = if matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP) { Errno::STALE } else { errno };
    MountError::at("mount the writable root", path)(errno)
}

/// Whether something is granted below.
fn leads_on(places: &BTreeMap<&Path, Verdict>, path: &Path) -> bool {
    let below = places.range(path..).take_while(|(place, _)| place.starts_with(path));
    below.into_iter().any(|(_, verdict)| verdict.is_granted())
}

fn kind(target: &OwnedFd, path: &Path) -> Result<FileType, MountError> {
    let stat = fstat(target).map_err(MountError::at("look at", path))?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

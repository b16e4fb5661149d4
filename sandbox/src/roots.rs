//! The paths of a policy on this machine, opened before enforcement: afterwards only what was opened can be granted.

mod hidden;

use crate::compiled::{Compiled, Resolved, Verdict};
use crate::enforce::EnforceError;
use crate::kernel_files::{self, FileSystem, Hidden};
use crate::policy::{Access, Grant, Grants, Policy};
use hidden::HiddenByOthers;
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bound of the links that are followed in one path, the kernel's own.
const MAX_LINKS: usize = 40;

/// Bound of the names that are looked at for one path: more than the longest path has. Links that multiply them are refused.
const MAX_NAMES: usize = 8192;

/// Bound of the tries to open a path whose links change under us. Whoever can change them that fast can deny the service in
/// simpler ways, so that the failure costs nobody anything.
const MAX_TRIES: usize = 16;

/// Descriptors that a confined process is left for itself beside those of its roots.
const SPARE_DESCRIPTORS: u64 = 128;

/// Device and inode: which file or directory it is, whatever it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
}

/// One entry of a policy.
#[derive(Debug)]
pub struct Root {
    /// Absolute, without links.
    pub real: PathBuf,
    /// What the entry gives.
    pub access: Access,
    /// Whether the entry says nothing because it is missing.
    pub is_skipped: bool,
    /// The set of grants that it belongs to: its place in [`crate::policy::Files::sets`].
    pub set: usize,
    /// Another set hides the entry: at this path the entry grants nothing and only takes away.
    pub is_hidden: bool,
    /// Opened with `O_PATH`, and what it was then; none if it is missing, denied or hidden.
    pub descriptor: Option<(OwnedFd, Identity)>,
}

/// Every path of a policy, opened before enforcement. What is missing is recorded as missing, and grants nothing.
#[derive(Debug)]
pub struct Roots {
    all: Vec<Root>,
    resolved: HashMap<AbsolutePath, Resolved>,
    /// The limit of descriptors that was raised to open them all, to be restored for a program.
    pub(crate) raised_limit: Option<Rlimit>,
}

impl Roots {
    /// Opens every granted path of the policy with `O_PATH`, and resolves the denied ones.
    ///
    /// # Errors
    /// A writable root is a link; the system refuses for another reason than that a path is missing or out of reach.
    pub fn open(policy: &Policy) -> Result<Self, EnforceError> {
        let mut roots = Self { all: Vec::new(), resolved: HashMap::new(), raised_limit: None };
        let sets = policy.files.sets();
        let count = sets.clone().map(|grants| grants.entries.len()).sum();
        if count > 0 {
            roots.raised_limit = raise_descriptor_limit(count)?;
        }
        FileSystem::learn();
        let by_others = HiddenByOthers::new(policy);
        for (set, grants) in sets.enumerate() {
            for grant in &grants.entries {
                let (root, resolved) = open_root(grant, set, |path| by_others.covers(set, path))?;
                if let Resolved::Hidden { path, .. } = &resolved {
                    let (real, access) = (path.clone(), grant.access);
                    roots.all.push(Root { real, access, is_skipped: false, set, is_hidden: true, descriptor: None });
                }
                roots.all.push(root);
                roots.remember(&grant.path, resolved)?;
            }
            roots.refuse_steered(grants, set)?;
            roots.refuse_own_places(grants)?;
            for glob in &grants.deny_globs {
                if !roots.resolved.contains_key(&glob.base) {
                    let (_, resolved) = open_root(&Grant::new(glob.base.clone(), Access::Deny), set, |_| false)?;
                    roots.remember(&glob.base, resolved)?;
                }
            }
        }
        Ok(roots)
    }

    /// Opens every root anew, in a view that was built meanwhile: descriptors opened before lie beneath its covers. `is_denied`
    /// tells whether the view hides a link-free path; such a root grants nothing from here on.
    ///
    /// # Errors
    /// Another file or directory stands at a root's path (`ESTALE`), or it cannot be opened.
    pub fn open_anew(&mut self, is_denied: impl Fn(&Path) -> bool) -> Result<(), EnforceError> {
        for root in &mut self.all {
            let Some((descriptor, identity)) = &mut root.descriptor else { continue };
            if is_denied(&root.real) {
                root.descriptor = None;
                continue;
            }
            let again = open_as_it_is(&root.real).and_then(|again| Ok((rustix::fs::fstat(&again)?, again)));
            match again {
                Ok((stat, again)) if (Identity { device: stat.st_dev, inode: stat.st_ino }) == *identity => *descriptor = again,
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    return Err(EnforceError::ReplacedRoot { path: root.real.clone(), errno: Errno::STALE.raw_os_error() });
                }
                Err(errno) => return Err(EnforceError::ReplacedRoot { path: root.real.clone(), errno: errno.raw_os_error() }),
            }
        }
        Ok(())
    }

    /// A path that two sets name must be one place in both: else what was moved meanwhile would be judged as one thing and
    /// granted as another. A path that is hidden from one set may also be named by the set that hides it, which decides then.
    fn remember(&mut self, named: &AbsolutePath, resolved: Resolved) -> Result<(), EnforceError> {
        match (self.resolved.get(named), &resolved) {
            (Some(_known), Resolved::Hidden { .. }) => return Ok(()),
            (None | Some(Resolved::Hidden { .. }), _) => {}
            (Some(before), _) if *before == resolved => {}
            (Some(_moved), _) => return Err(EnforceError::Root { path: named.clone(), errno: Errno::STALE.raw_os_error() }),
        }
        self.resolved.insert(named.clone(), resolved);
        Ok(())
    }

    /// Refuses a writable root whose path leads through a link that lies in another writable root: whoever may write there
    /// could turn the link, and so decide what is writable next time.
    fn refuse_steered(&self, grants: &Grants, set: usize) -> Result<(), EnforceError> {
        let is_writable = |root: &&Root| root.set == set && root.access == Access::Write && !root.is_hidden;
        let writable: Vec<&Root> = self.all.iter().filter(is_writable).collect();
        for grant in grants.entries.iter().filter(|grant| grant.access == Access::Write) {
            let Some(Resolved::Real { path, links } | Resolved::Missing { path, links }) = self.resolved.get(&grant.path) else {
                continue;
            };
            let is_steered = |link: &PathBuf| writable.iter().any(|root| link.starts_with(&root.real));
            if links.iter().any(is_steered) {
                return Err(EnforceError::SteeredRoot { path: grant.path.clone(), real: path.clone() });
            }
        }
        Ok(())
    }

    /// Refuses an entry that leads through a link to more than may be given of a place of the server: the longest path decides, so
    /// that an entry below the place would lift what is taken away there.
    fn refuse_own_places(&self, grants: &Grants) -> Result<(), EnforceError> {
        for (place, most) in &grants.own_places {
            let fail = |errno: Errno| EnforceError::Root { path: place.clone(), errno: errno.raw_os_error() };
            // A hidden place has an entry of its own, a kept one only where it would be writable.
            let real = match self.resolved.get(place).and_then(Resolved::path) {
                Some(real) => real.to_owned(),
                None => follow(place.as_path()).map_err(fail)?.path,
            };
            // The entry for the place itself holds where a longer path does not decide.
            let is_kept = grants.entries.iter().any(|grant| grant.path == *place);
            let gives_more = |grant: &&Grant| match (most, grant.access) {
                (Access::Deny, access) => access != Access::Deny,
                (Access::Read, access) => access == Access::Write,
                (Access::Write, _) => false,
            };
            for grant in grants.entries.iter().filter(gives_more) {
                let Some(path) = self.resolved.get(&grant.path).and_then(Resolved::path) else { continue };
                if path.starts_with(&real)
                    || !is_kept && real.starts_with(path) && !place.as_path().starts_with(grant.path.as_path())
                {
                    return Err(EnforceError::OwnPlace { path: grant.path.clone() });
                }
            }
        }
        Ok(())
    }

    /// Refuses a policy of a process of which a path leads through a link that the process could turn: it would decide what is
    /// granted or denied the next time. Workers keep such links from being turned.
    pub(crate) fn refuse_turnable(&self, tables: &Compiled) -> Result<(), EnforceError> {
        for (named, resolved) in &self.resolved {
            let (Some(path), links) = (resolved.path(), resolved.links()) else { continue };
            // A link is turned in its directory, whatever its own name is to be.
            let is_turnable = |link: &PathBuf| link.parent().is_some_and(|parent| tables.verdict(parent) == Verdict::Write);
            if links.iter().any(is_turnable) {
                // Where a link in a denied directory leads is not told.
                let is_denied = |link: &PathBuf| link.parent().is_some_and(|parent| tables.verdict(parent) == Verdict::Denied);
                let real = (!links.iter().any(is_denied)).then(|| path.to_owned());
                return Err(EnforceError::TurnableLink { path: named.clone(), real });
            }
        }
        Ok(())
    }

    /// Follows the links of any path as they are now: its real path, existing or not, and the links on the way.
    ///
    /// # Errors
    /// The system refuses for another reason than that something is missing or out of reach.
    pub fn trace(path: &AbsolutePath) -> std::io::Result<Resolved> {
        let Followed { path, links, exists, .. } = follow(path.as_path())?;
        Ok(if exists { Resolved::Real { path, links } } else { Resolved::Missing { path, links } })
    }

    /// What a path of the policy was when the roots were opened: the answer that [`crate::compiled::Compiled::new`] needs.
    #[must_use]
    pub fn resolve(&self, path: &AbsolutePath) -> Resolved {
        self.resolved.get(path).cloned().unwrap_or_else(|| Resolved::Refused("is not a path of these roots".to_owned()))
    }

    /// The real path of a path of the policy, existing or not.
    pub(crate) fn real(&self, path: &AbsolutePath) -> Option<PathBuf> {
        self.resolved.get(path)?.path().map(Path::to_owned)
    }

    /// What every path of the policy turned out to be.
    pub(crate) fn resolutions(&self) -> impl Iterator<Item = &Resolved> {
        self.resolved.values()
    }

    /// The links that paths of the policy lead through.
    pub(crate) fn links(&self) -> impl Iterator<Item = &PathBuf> {
        self.resolved.values().flat_map(Resolved::links)
    }

    /// All entries of all sets of grants in their order, granted or denied.
    #[must_use]
    pub fn all(&self) -> &[Root] {
        &self.all
    }

    /// What stood at the real path of an entry, as [`crate::compiled::Compiled::roots_of`] names it; none if nothing did.
    #[must_use]
    pub fn identity(&self, real: &Path) -> Option<Identity> {
        let at_path = self.all.iter().filter(|root| root.real == real);
        at_path.filter_map(|root| root.descriptor.as_ref()).map(|(_, identity)| *identity).next()
    }
}

/// Opens the path of an entry. Of a hidden one it tells nothing but its name; its resolution says where it takes away.
fn open_root(grant: &Grant, set: usize, is_hidden: impl Fn(&Path) -> bool) -> Result<(Root, Resolved), EnforceError> {
    let (named, access) = (&grant.path, grant.access);
    let fail = |errno: Errno| EnforceError::Root { path: named.clone(), errno: errno.raw_os_error() };
    for _ in 0..MAX_TRIES {
        let followed = follow(named.as_path()).map_err(fail)?;
        let Followed { path, links, exists, is_link, is_hidden: _ } = followed;
        // A denial grants nothing, hidden or not.
        let is_hidden = access != Access::Deny && (is_hidden(named.as_path()) || links.iter().any(|link| is_hidden(link)));
        if is_hidden {
            let exists = match exists.then(|| open_as_it_is(&path)) {
                // As below.
                Some(Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR)) => continue,
                None | Some(Err(Errno::ACCESS)) => false,
                Some(Err(errno)) => return Err(fail(errno)),
                Some(Ok(_there)) => true,
            };
            let real = named.as_path().to_owned();
            let root = Root { real, access, is_skipped: grant.skip_missing, set, is_hidden: false, descriptor: None };
            let says_nothing = grant.skip_missing && !exists;
            let resolved = if says_nothing { Resolved::Missing { path, links } } else { Resolved::Hidden { path, links } };
            return Ok((root, resolved));
        }
        if is_link && access == Access::Write {
            return Err(EnforceError::LinkedRoot { path: named.clone(), real: path });
        }
        let root = |real: &PathBuf, descriptor| Root {
            real: real.clone(),
            access,
            is_skipped: false,
            set,
            is_hidden: false,
            descriptor,
        };
        let missing = |path: PathBuf, links| {
            (Root { is_skipped: grant.skip_missing, ..root(&path, None) }, Resolved::Missing { path, links })
        };
        if !exists {
            return Ok(missing(path, links));
        }
        match open_as_it_is(&path) {
            // Something was moved or replaced since it was looked at: look again.
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => {}
            Err(Errno::ACCESS) => return Ok(missing(path, links)),
            Err(errno) => return Err(fail(errno)),
            Ok(descriptor) => {
                let stat = rustix::fs::fstat(&descriptor).map_err(fail)?;
                let identity = Identity { device: stat.st_dev, inode: stat.st_ino };
                let descriptor = (access != Access::Deny).then_some((descriptor, identity));
                return Ok((root(&path, descriptor), Resolved::Real { path, links }));
            }
        }
    }
    Err(fail(Errno::LOOP))
}

/// Opens a link-free path without a right to its content.
fn open_as_it_is(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// A path with its links followed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Followed {
    pub(crate) path: PathBuf,
    pub(crate) links: Vec<PathBuf>,
    pub(crate) exists: bool,
    /// Whether the last name itself is a link.
    is_link: bool,
    /// Whether it leads through a place that is not shown; what comes after that place was not looked at.
    pub(crate) is_hidden: bool,
}

/// Follows links by name, so that every link on the way is known. What is missing or out of reach keeps its name.
pub(crate) fn follow(named: &Path) -> Result<Followed, Errno> {
    follow_shown(named, |_| true)
}

/// The same as far as the way is shown: `is_shown` is asked of each name before it is looked at, also of one below a missing name.
pub(crate) fn follow_shown(named: &Path, mut is_shown: impl FnMut(&Path) -> bool) -> Result<Followed, Errno> {
    let names = |path: &Path| path.iter().filter(|name| name.as_bytes() != b"/").map(OsString::from).collect::<Vec<_>>();
    let mut rest: VecDeque<OsString> = names(named).into();
    let mut followed = Followed { path: PathBuf::from("/"), links: Vec::new(), exists: true, is_link: false, is_hidden: false };
    // Names that came out of links stand before those that the path itself still has.
    let mut own_names = rest.len();
    let mut looks = 0;
    while let Some(name) = rest.pop_front() {
        let is_own_last = rest.is_empty() && own_names == 1;
        own_names = own_names.min(rest.len());
        if name.as_bytes() == b".." {
            followed.path.pop();
            continue;
        }
        if name.as_bytes() == b"." {
            continue;
        }
        followed.path.push(&name);
        if !is_shown(&followed.path) {
            followed.is_hidden = true;
            followed.exists = false;
            break;
        }
        if !followed.exists {
            continue;
        }
        // A policy cannot name a process: its links reveal its open files, and it may end at any moment.
        if matches!(kernel_files::hidden(&followed.path), Some(Hidden::Process(_))) {
            followed.exists = false;
            continue;
        }
        looks += 1;
        if looks > MAX_NAMES {
            return Err(Errno::LOOP);
        }
        match rustix::fs::readlinkat(CWD, &followed.path, Vec::new()) {
            // It exists and is no link.
            Err(Errno::INVAL) => {}
            // Out of the user's reach, of no use to anybody whom the policy confines; a denial of it holds by its name.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::NAMETOOLONG) => followed.exists = false,
            Err(errno) => return Err(errno),
            Ok(target) => {
                followed.links.push(followed.path.clone());
                followed.is_link |= is_own_last;
                followed.path.pop();
                if followed.links.len() > MAX_LINKS {
                    // A loop of links leads nowhere, as the kernel says too.
                    followed.path.push(&name);
                    followed.exists = false;
                    continue;
                }
                let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
                if target.is_absolute() {
                    followed.path = PathBuf::from("/");
                }
                for name in names(target).into_iter().rev() {
                    rest.push_front(name);
                }
            }
        }
    }
    Ok(followed)
}

/// Makes room for the descriptors of many roots, and says what the limit was.
fn raise_descriptor_limit(roots: usize) -> Result<Option<Rlimit>, EnforceError> {
    let needed = u64::try_from(roots).unwrap_or(u64::MAX).saturating_add(SPARE_DESCRIPTORS);
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(None);
    }
    if limit.maximum.is_some_and(|maximum| maximum < needed) {
        return Err(EnforceError::Descriptors { needed, maximum: limit.maximum.unwrap_or(u64::MAX) });
    }
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum: limit.maximum })
        .map_err(|errno| EnforceError::Limits { attempt: "raise the limit of open files", errno: errno.raw_os_error() })?;
    Ok(Some(limit))
}

#[cfg(test)]
mod tests;

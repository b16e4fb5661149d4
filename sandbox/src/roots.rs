//! The paths of a policy on this machine, opened before enforcement: afterwards only what was opened can be granted.

use crate::compiled::{Compiled, Resolved, Verdict};
use crate::enforce::EnforceError;
use crate::kernel_files::{Hidden, hidden};
use crate::policy::{Access, Grant, Grants, Policy};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bound of the links that are followed in one path, the kernel's own.
const MAX_LINKS: usize = 40;

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
    /// Opened with `O_PATH`, and what it was then; none if it is missing or denied.
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
        let by_others = HiddenByOthers::new(policy);
        // What one set is not told of may be named by the set that hides it, too.
        let mut untold = HashSet::new();
        for (set, grants) in sets.enumerate() {
            for grant in &grants.entries {
                let (root, resolved) = open_root(grant, set, |path| by_others.covers(set, path))?;
                roots.all.push(root);
                match resolved {
                    Some(resolved) => {
                        if untold.remove(&grant.path) {
                            roots.resolved.remove(&grant.path);
                        }
                        roots.remember(&grant.path, resolved)?;
                    }
                    None if !roots.resolved.contains_key(&grant.path) => {
                        let path = grant.path.as_path().to_owned();
                        roots.resolved.insert(grant.path.clone(), Resolved::Missing { path, links: Vec::new() });
                        untold.insert(grant.path.clone());
                    }
                    None => {}
                }
            }
            roots.refuse_steered(grants, set)?;
            for glob in &grants.deny_globs {
                if !roots.resolved.contains_key(&glob.base) {
                    let (_, resolved) = open_root(&Grant::new(glob.base.clone(), Access::Deny), set, |_| false)?;
                    resolved.map_or(Ok(()), |resolved| roots.remember(&glob.base, resolved))?;
                }
            }
        }
        Ok(roots)
    }

    /// Opens every root anew, in a view that was built meanwhile: what was opened before lies beneath its covers. `is_denied` says of a
    /// link-free path that the view hides it; it grants nothing from here on.
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
    /// granted as another.
    fn remember(&mut self, named: &AbsolutePath, resolved: Resolved) -> Result<(), EnforceError> {
        match self.resolved.insert(named.clone(), resolved) {
            Some(before) if before != self.resolved[named] => {
                Err(EnforceError::Root { path: named.clone(), errno: Errno::STALE.raw_os_error() })
            }
            _same_or_new => Ok(()),
        }
    }

    /// Refuses a writable root whose path leads through a link that lies in another writable root: whoever may write there
    /// could turn the link, and so decide what is writable next time.
    fn refuse_steered(&self, grants: &Grants, set: usize) -> Result<(), EnforceError> {
        let is_writable = |root: &&Root| root.set == set && root.access == Access::Write;
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

    /// Refuses a policy of a process of which a path leads through a link that the process could turn: it would decide what is
    /// granted or denied the next time. Workers keep such links from being turned.
    pub(crate) fn refuse_turnable(&self, tables: &Compiled) -> Result<(), EnforceError> {
        for (named, resolved) in &self.resolved {
            let (Resolved::Real { path, links } | Resolved::Missing { path, links }) = resolved else { continue };
            // A link is turned in its directory, whatever its own name is to be.
            let is_turnable = |link: &PathBuf| link.parent().is_some_and(|parent| tables.verdict(parent) == Verdict::Write);
            if links.iter().any(is_turnable) {
                return Err(EnforceError::TurnableLink { path: named.clone(), real: path.clone() });
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
        match self.resolved.get(path)? {
            Resolved::Real { path, .. } | Resolved::Missing { path, .. } => Some(path.clone()),
            Resolved::Refused(_) => None,
        }
    }

    /// What every path of the policy turned out to be.
    pub(crate) fn resolutions(&self) -> impl Iterator<Item = &Resolved> {
        self.resolved.values()
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

/// What the other sets of grants deny: a set that names something below it is told nothing of it, neither that it exists nor where a
/// link leads.
struct HiddenByOthers<'a> {
    sets: Vec<&'a Grants>,
    /// Denied places by their sets, as they are named and as they are.
    denied: Vec<(usize, PathBuf)>,
}

impl<'a> HiddenByOthers<'a> {
    fn new(policy: &'a Policy) -> Self {
        let sets: Vec<&Grants> = policy.files.sets().collect();
        let denies = |set: usize| sets[set].entries.iter().filter(|grant| grant.access == Access::Deny);
        // One set alone hides nothing from itself.
        let with_others = if sets.len() > 1 { 0..sets.len() } else { 0..0 };
        let denied = with_others.flat_map(|set| denies(set).map(move |grant| (set, grant.path.as_path())));
        let places = |(set, named): (usize, &Path)| {
            let real = follow(named).ok().map(|followed| (set, followed.path));
            [(set, named.to_owned())].into_iter().chain(real)
        };
        let denied = denied.flat_map(places).collect();
        Self { sets, denied }
    }

    /// Whether a path lies below what another set than `own` denies, and in nothing that this one grants there again.
    fn covers(&self, own: usize, path: &Path) -> bool {
        self.denied.iter().filter(|(set, place)| *set != own && path != place && path.starts_with(place)).any(|(set, place)| {
            let is_granted = |grant: &Grant| grant.access != Access::Deny && path.starts_with(grant.path.as_path());
            let deeper = |grant: &&Grant| is_granted(grant) && grant.path.as_path().starts_with(place);
            !self.sets[*set].entries.iter().any(|grant| deeper(&grant))
        })
    }
}

/// Opens what an entry names. Without a resolution the entry is treated as one of something missing, whatever is there.
fn open_root(grant: &Grant, set: usize, is_hidden: impl Fn(&Path) -> bool) -> Result<(Root, Option<Resolved>), EnforceError> {
    let (named, access) = (&grant.path, grant.access);
    let nothing = || {
        let root = Root { real: named.as_path().to_owned(), access, is_skipped: grant.skip_missing, set, descriptor: None };
        (root, None)
    };
    // A denial is for nobody to be told of, so that it is resolved in any case.
    if access != Access::Deny && is_hidden(named.as_path()) {
        return Ok(nothing());
    }
    let fail = |errno: Errno| EnforceError::Root { path: named.clone(), errno: errno.raw_os_error() };
    for _ in 0..MAX_TRIES {
        let followed = follow(named.as_path()).map_err(fail)?;
        let Followed { path, links, exists, is_link } = followed;
        if access != Access::Deny && links.iter().any(|link| is_hidden(link)) {
            return Ok(nothing());
        }
        if is_link && access == Access::Write {
            return Err(EnforceError::LinkedRoot { path: named.clone(), real: path });
        }
        let root = |real: &PathBuf, descriptor| Root { real: real.clone(), access, is_skipped: false, set, descriptor };
        let missing = |path: PathBuf, links| {
            (Root { is_skipped: grant.skip_missing, ..root(&path, None) }, Some(Resolved::Missing { path, links }))
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
                return Ok((root(&path, descriptor), Some(Resolved::Real { path, links })));
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
}

/// Follows links by name, so that every link on the way is known. What is missing or out of reach keeps its name.
pub(crate) fn follow(named: &Path) -> Result<Followed, Errno> {
    let names = |path: &Path| path.iter().filter(|name| name.as_bytes() != b"/").map(OsString::from).collect::<Vec<_>>();
    let mut rest: VecDeque<OsString> = names(named).into();
    let mut followed = Followed { path: PathBuf::from("/"), links: Vec::new(), exists: true, is_link: false };
    // Names that came out of links stand before those that the path itself still has.
    let mut own_names = rest.len();
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
        if !followed.exists {
            continue;
        }
        // A process is nothing that a policy can name: its links tell what it has open, and it is gone the next moment.
        if matches!(hidden(&followed.path), Some(Hidden::Process(_))) {
            followed.exists = false;
            continue;
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
mod tests {
    use super::*;
    use crate::compiled::{Compiled, Verdict};
    use crate::policy::{DenyGlob, Files, Network};
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn open(entries: &[(&Path, Access)]) -> Result<Roots, EnforceError> {
        Roots::open(&policy(entries, &[]))
    }

    fn policy(entries: &[(&Path, Access)], globs: &[(&Path, &str)]) -> Policy {
        let grant = |(path, access): &(&Path, Access)| Grant::new(AbsolutePath::new(path).unwrap(), *access);
        let glob =
            |(base, pattern): &(&Path, &str)| DenyGlob { base: AbsolutePath::new(base).unwrap(), pattern: (*pattern).to_owned() };
        let grants = Grants::new(entries.iter().map(grant).collect(), globs.iter().map(glob).collect()).unwrap();
        Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
    }

    #[test]
    fn links_are_followed_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("real/sub")).unwrap();
        symlink("real", top.join("one")).unwrap();
        symlink("./one/../one", top.join("two")).unwrap();
        symlink(top.join("loop"), top.join("loop")).unwrap();
        symlink("nowhere/../x", top.join("dangling")).unwrap();

        let followed = follow(&top.join("two/sub")).unwrap();
        assert_eq!(followed.path, top.join("real/sub"));
        assert_eq!(followed.links, [top.join("two"), top.join("one"), top.join("one")]);
        assert!(followed.exists && !followed.is_link);
        assert!(follow(&top.join("two")).unwrap().is_link);
        let followed = follow(&top.join("one/later/on")).unwrap();
        assert_eq!((followed.path, followed.exists), (top.join("real/later/on"), false));
        assert!(!follow(&top.join("loop/x")).unwrap().exists);
        assert!(!follow(&top.join("dangling")).unwrap().exists);
    }

    #[test]
    fn no_path_of_a_policy_leads_through_a_process() {
        let own = format!("/proc/{}/cwd", std::process::id());
        for name in ["/proc/self/cwd", "/proc/thread-self/root/etc", "/proc/self", own.as_str(), "/proc/1/exe"] {
            let roots = open(&[(Path::new(name), Access::Write)]).unwrap();
            assert_eq!(roots.all()[0].real, Path::new(name), "where its links lead is not told");
            assert!(roots.all()[0].descriptor.is_none(), "{name}");
        }
        // The control.
        assert!(open(&[(Path::new("/proc/sys"), Access::Read)]).unwrap().all()[0].descriptor.is_some());
    }

    #[test]
    fn a_root_that_another_set_hides_tells_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("hidden/directory")).unwrap();
        symlink(top.join("target"), top.join("hidden/link")).unwrap();
        symlink(top.join("nowhere"), top.join("hidden/dangling")).unwrap();
        symlink(top.join("hidden/link"), top.join("outside")).unwrap();
        let ceiling = policy(&[(&top, Access::Write), (&top.join("hidden"), Access::Deny)], &[]);
        for name in ["hidden/absent", "hidden/directory", "hidden/link", "hidden/dangling", "outside"] {
            let own = policy(&[(&top.join(name), Access::Write)], &[]);
            let roots = Roots::open(&own.clone().bounded_by(&ceiling).unwrap()).unwrap();
            let root = roots.all().iter().find(|root| root.real == top.join(name)).unwrap();
            assert!(root.descriptor.is_none(), "{name}");
            // The control: without the other set the link is named.
            let is_link = name.ends_with("link") || name.ends_with("dangling") || name == "outside";
            assert_eq!(matches!(Roots::open(&own), Err(EnforceError::LinkedRoot { .. })), is_link, "{name}");
        }
    }

    #[test]
    fn a_writable_root_behind_a_link_in_another_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        for name in ["w", "build/out", "w/own/out"] {
            fs::create_dir_all(top.join(name)).unwrap();
        }
        symlink(top.join("build"), top.join("w/l")).unwrap();
        symlink("own", top.join("w/inner")).unwrap();
        symlink("w", top.join("alias")).unwrap();
        let (w, steered, inner) = (top.join("w"), top.join("w/l/out"), top.join("w/inner/out"));
        for entry in [&steered, &inner] {
            let refused = open(&[(&w, Access::Write), (entry, Access::Write)]);
            assert!(matches!(refused, Err(EnforceError::SteeredRoot { .. })), "{refused:?}");
        }
        // The controls: nobody who is confined may turn these links.
        assert!(open(&[(&w, Access::Read), (&steered, Access::Write)]).is_ok());
        assert!(open(&[(&w, Access::Write), (&steered, Access::Read)]).is_ok());
        assert!(open(&[(&w, Access::Write), (&top.join("alias/own"), Access::Write)]).is_ok());
    }

    #[test]
    fn roots_know_what_they_opened() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        fs::create_dir(top.join("real")).unwrap();
        symlink("real", top.join("link")).unwrap();
        let (link, missing) = (top.join("link"), top.join("missing"));
        let roots = open(&[(&link, Access::Read), (&missing, Access::Write)]).unwrap();
        let metadata = fs::metadata(&link).unwrap();
        let identity = Identity { device: metadata.dev(), inode: metadata.ino() };
        assert_eq!(roots.identity(&top.join("real")), Some(identity));
        assert_eq!(roots.identity(&missing), None);
        let named = |path: &Path| roots.resolve(&AbsolutePath::new(path).unwrap());
        assert_eq!(named(&missing), Resolved::Missing { path: missing.clone(), links: Vec::new() });
        assert_eq!(named(&link), Resolved::Real { path: top.join("real"), links: vec![link.clone()] });
        assert!(matches!(named(&top), Resolved::Refused(_)));
        assert!(matches!(open(&[(&link, Access::Write)]), Err(EnforceError::LinkedRoot { .. })));
    }

    fn compile(policy: &Policy) -> Compiled {
        let roots = Roots::open(policy).unwrap();
        Compiled::new(policy, |path| roots.resolve(path)).unwrap()
    }

    #[test]
    fn a_link_in_one_set_leads_to_nothing_that_the_other_denies() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let (secret, open, link) = (top.join("secret"), top.join("open"), top.join("open/link"));
        fs::create_dir_all(secret.join("sub")).unwrap();
        fs::create_dir(&open).unwrap();
        symlink("../secret", &link).unwrap();
        let own = policy(&[(&link, Access::Read), (&open, Access::Read)], &[]);
        let denying = policy(&[(&top, Access::Write), (&secret, Access::Deny)], &[]);
        let matching = policy(&[(&top, Access::Write)], &[(&top, "s*t")]);
        let unlisted = policy(&[(&open, Access::Write)], &[]);
        // The control: the link leads there, and by itself grants it.
        assert_eq!(compile(&own).verdict(&secret.join("sub")), Verdict::Read);
        for (ceiling, expect) in [(denying, Verdict::Denied), (matching, Verdict::Denied), (unlisted, Verdict::Unlisted)] {
            let both = compile(&own.clone().bounded_by(&ceiling).unwrap());
            assert_eq!(both.verdict(&secret.join("sub")), expect);
            assert_eq!(both.verdict(&open.join("other")), Verdict::Read);
        }
    }

    #[test]
    fn a_path_in_both_sets_must_be_one_place() {
        let mut roots = Roots { all: Vec::new(), resolved: HashMap::new(), raised_limit: None };
        let named = AbsolutePath::new("/a").unwrap();
        roots.remember(&named, Resolved::same(&named)).unwrap();
        roots.remember(&named, Resolved::same(&named)).unwrap();
        let elsewhere = Resolved::Real { path: "/b".into(), links: vec!["/a".into()] };
        assert!(matches!(roots.remember(&named, elsewhere), Err(EnforceError::Root { .. })));
    }

    const NAMES: [&str; 5] = ["a", "b", "c", ".git", "x.env"];

    fn any_path() -> impl Strategy<Value = PathBuf> {
        prop::collection::vec(prop::sample::select(NAMES.to_vec()), 0..4).prop_map(|names| names.iter().collect())
    }

    /// Entries and globs.
    type Said = (Vec<(PathBuf, Access)>, Vec<(PathBuf, &'static str)>);

    fn anything_said() -> impl Strategy<Value = Said> {
        let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Deny]);
        let pattern = prop::sample::select(vec!["*.env", "**/b", "a/*"]);
        (prop::collection::vec((any_path(), access), 0..6), prop::collection::vec((any_path(), pattern), 0..2))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        /// Directories, files and links made at random, and two policies whose paths lead through them.
        #[test]
        fn whatever_the_links_the_ceiling_holds(
            directories in prop::collection::vec(any_path(), 0..5), links in prop::collection::vec((any_path(), any_path()), 0..4),
            own in anything_said(), ceiling in anything_said(), paths in prop::collection::vec(any_path(), 1..20),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let top = directory.path().canonicalize().unwrap();
            // What is in the way of another is left out.
            directories.iter().for_each(|path| drop(fs::create_dir_all(top.join(path))));
            links.iter().for_each(|(link, target)| drop(symlink(top.join(target), top.join(link))));
            let at_top = |said: &Said| {
                let entries: Vec<_> = said.0.iter().map(|(path, access)| (top.join(path), *access)).collect();
                let globs: Vec<_> = said.1.iter().map(|(base, pattern)| (top.join(base), *pattern)).collect();
                policy(
                    &entries.iter().map(|(path, access)| (path.as_path(), *access)).collect::<Vec<_>>(),
                    &globs.iter().map(|(base, pattern)| (base.as_path(), *pattern)).collect::<Vec<_>>(),
                )
            };
            let (own, ceiling) = (at_top(&own), at_top(&ceiling));
            let both = own.clone().bounded_by(&ceiling).unwrap();
            // What one set denies tells the other nothing, not even that it would be refused.
            let denies = |policy: &Policy| policy.files.sets().any(|set| set.entries.iter().any(|it| it.access == Access::Deny));
            let hides = denies(&own) || denies(&ceiling);
            if Roots::open(&own).is_err() || Roots::open(&ceiling).is_err() {
                prop_assert!(hides || Roots::open(&both).is_err());
                return Ok(());
            }
            let (both, own, ceiling) = (compile(&both), compile(&own), compile(&ceiling));
            for path in &paths {
                let real = follow(&top.join(path)).unwrap().path;
                let rank = |compiled: &Compiled| compiled.verdict(&real).rank();
                let least = rank(&own).min(rank(&ceiling));
                prop_assert!(rank(&both) == least || hides && rank(&both) < least, "{}", real.display());
            }
        }
    }
}

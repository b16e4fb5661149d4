//! The policy as a worker asks it: may this link-free path be seen, read, listed, changed?

use super::links::Links;
use super::os;
use super::pointers::Pointers;
use super::refusal::refused;
use super::trace::open_exact;
use portcullis_protocol::denial::Wanted;
use portcullis_protocol::helper::FsError;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::explain::POINTED;
use portcullis_sandbox::kernel_files::{FileSystem, Hidden, hidden};
use portcullis_sandbox::mounts::{Found, FoundKind};
use portcullis_sandbox::policy::{Access, Files, Policy, PolicyError};
use portcullis_sandbox::roots::{Identity, Roots};
use rustix::fs::{AtFlags, CWD, OFlags, statat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What an operation wants of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// That it exists, its type, size and times, where it leads.
    Stat,
    /// Its names, if it is a directory.
    List,
    /// Its content.
    Read,
    /// To change it, make it or remove it.
    Write,
}

impl Want {
    /// The word for it on the wire.
    fn wanted(self) -> Wanted {
        if self == Self::Write { Wanted::Write } else { Wanted::Read }
    }
}

/// Whether a path is in a file system by which the machine itself is changed.
fn is_kernels(real: &Path) -> bool {
    ["/proc", "/sys"].into_iter().any(|kernel| real.starts_with(kernel))
}

/// The rule over file systems that the kernel makes up.
const KERNELS_OWN: &str = "the kernel's own files are never changed under a policy";

/// The rule for names that are hidden from file calls without an entry of the policy: the component, the reason, and the remedy.
fn hidden_rule(hidden: Hidden<'_>) -> String {
    match hidden {
        Hidden::Process(at) => format!(
            "`{}` stands for a process, and file calls under a policy see no processes; name the file itself, or start a process that reads it",
            at.display()
        ),
        Hidden::Masked(at) => format!("`{}` shows the machine's kernel, which no policy grants", at.display()),
    }
}

/// A restricted policy on this machine.
#[derive(Debug)]
pub(super) struct Rules {
    compiled: Compiled,
    /// What the kernel was told of, or none where nothing was. The open roots keep their inode numbers from being used again.
    identities: HashMap<PathBuf, Option<Identity>>,
    roots: Roots,
    /// For directories above a grant: the names that lead there. The kernel may not let such a directory be listed, and all
    /// that may be seen in it is known from the policy.
    leads: BTreeMap<PathBuf, BTreeSet<OsString>>,
    /// Those on the way of the policy's paths.
    links: Links,
    /// Through which a protected name leads by a hidden place.
    led: HashSet<PathBuf>,
}

impl Rules {
    /// None if the policy restricts no files.
    pub(super) fn new(policy: &Policy, roots: Roots, found: &[Found]) -> Result<Option<Self>, PolicyError> {
        if policy.files == Files::Unrestricted {
            return Ok(None);
        }
        let mut compiled = Compiled::new(policy, |path| roots.resolve(path))?;
        compiled.protect(found);
        let led =
            found.iter().filter(|found| found.kind == FoundKind::Way).map(|found| found.path.as_path().to_owned()).collect();
        let leads = leads(policy, &roots);
        let mut identities: HashMap<PathBuf, Option<Identity>> = HashMap::new();
        for root in roots.all() {
            let opened = root.descriptor.as_ref().map(|(_, identity)| *identity);
            let known = identities.entry(root.real.clone()).or_default();
            *known = known.or(opened);
        }
        let links = Links::new(policy, &roots, |place| hidden(place).is_some())?;
        Ok(Some(Self { compiled, identities, roots, leads, links, led }))
    }

    /// That what the policy's paths resolved to is what they resolve to now.
    pub(super) fn check_links(&self) -> Result<(), FsError> {
        self.links.check()
    }

    /// Whether a link-free path may be used so.
    pub(super) fn permit(&self, real: &Path, want: Want) -> Result<(), FsError> {
        self.judge(real, want).map_err(|errno| self.refuse(errno, real, want))?;
        if want == Want::Write { self.keep(real, &self.pointers()?) } else { Ok(()) }
    }

    /// That no deny entry names a path as it is written, links or not: such a denial is final, wherever the links lead.
    pub(super) fn permit_spelling(&self, path: &Path) -> Result<(), FsError> {
        let is_denied = self.compiled.verdict(path) == Verdict::Denied;
        if is_denied { Err(self.refuse(Errno::ACCESS, path, Want::Stat)) } else { Ok(()) }
    }

    /// Whether names may be made and removed in the directory of `real`, and `real` itself be changed.
    pub(super) fn permit_name(&self, real: &Path) -> Result<(), FsError> {
        self.judge_name(real)?;
        self.keep(real, &self.pointers()?)
    }

    /// Where a pointer covers the directory and what lies in it, it covers `real`.
    fn judge_name(&self, real: &Path) -> Result<(), FsError> {
        let directory = real.parent().unwrap_or(real);
        match (self.judge(real, Want::Write), self.judge(directory, Want::Write)) {
            (Ok(()), Ok(())) => Ok(()),
            // The entry that would allow both is one for the directory.
            (Ok(()), Err(errno)) | (Err(errno @ Errno::ROFS), Err(Errno::ROFS)) => {
                Err(self.refuse(errno, directory, Want::Write))
            }
            (Err(errno), _) => Err(self.refuse(errno, real, Want::Write)),
        }
    }

    /// Refuses to change what has to stay because something protected or denied is reached through it.
    fn keep(&self, real: &Path, pointers: &Pointers) -> Result<(), FsError> {
        let (rule, grant) = if self.links.cover(real) {
            ("a link that the policy's own paths lead through".to_owned(), None)
        } else {
            let over: Vec<&Path> = pointers.over(real, &self.compiled).collect();
            match (over.is_empty(), pointers.lead_through(real) || self.led.contains(real)) {
                (true, false) => return Ok(()),
                (true, true) => (POINTED.to_owned(), None),
                (false, _) => self.compiled.why_pointed(real, &over, |place| open_exact(place, OFlags::PATH).is_ok()),
            }
        };
        Err(refused(Errno::ROFS, real, Wanted::Write, rule, grant))
    }

    /// Read anew each time, and for every writable root: something outside may have made one after the start.
    fn pointers(&self) -> Result<Pointers, FsError> {
        let writable = self.roots.all().iter().filter(|root| root.access == Access::Write);
        Pointers::read(writable.map(|root| root.real.as_path()), &self.compiled)
    }

    fn judge(&self, real: &Path, want: Want) -> Result<(), Errno> {
        match (self.compiled.verdict(real), want) {
            (Verdict::Denied, _) => Err(Errno::ACCESS),
            // The worker's own among them: its sockets, its memory with the content of other requests.
            _any if hidden(real).is_some() => Err(Errno::NOENT),
            (Verdict::Unlisted, _) if !self.is_visible(real) => Err(Errno::NOENT),
            (Verdict::Unlisted, Want::Read) => Err(Errno::NOENT),
            (Verdict::Unlisted | Verdict::Read | Verdict::Protected, Want::Write) => Err(Errno::ROFS),
            // What the kernel makes of a write there is no change of a file; a process with a view cannot either.
            (Verdict::Write, Want::Write) if is_kernels(real) => Err(Errno::ROFS),
            _allowed => Ok(()),
        }
    }

    fn refuse(&self, errno: Errno, real: &Path, want: Want) -> FsError {
        let (rule, grant) = self.why(real, want);
        refused(errno, real, want.wanted(), rule, grant)
    }

    /// The rule that decides over a link-free path, in words, and the entry that would allow what was wanted of it; none where
    /// no entry would.
    fn why(&self, real: &Path, want: Want) -> (String, Option<(PathBuf, Access)>) {
        if let Some(hidden) = hidden(real).filter(|_| self.compiled.verdict(real) != Verdict::Denied) {
            return (hidden_rule(hidden), None);
        }
        if want == Want::Write && is_kernels(real) && self.compiled.verdict(real) == Verdict::Write {
            return (KERNELS_OWN.to_owned(), None);
        }
        let access = if want == Want::Write { Access::Write } else { Access::Read };
        // What is hidden is not looked at, and the client is told what it named itself.
        let is_hidden = self.compiled.verdict(real) == Verdict::Unlisted && !self.is_visible(real);
        self.compiled.why(real, access, |place| is_hidden || open_exact(place, OFlags::PATH).is_ok())
    }

    /// Whether a path exists for the client.
    pub(super) fn is_visible(&self, real: &Path) -> bool {
        hidden(real).is_none() && self.compiled.verdict(real) != Verdict::Denied && self.compiled.is_visible(real)
    }

    /// For a tree in which something may be less than writable: what to ask of the names in it.
    pub(super) fn narrower_below(&self, tree: &Path) -> Result<Option<Narrower<'_>>, FsError> {
        let pointers = self.pointers()?;
        let narrower = self.compiled.has_narrower_below(tree) || self.links.lie_below(tree) || pointers.lie_below(tree);
        Ok(narrower.then_some(Narrower { rules: self, pointers }))
    }

    /// The names that the policy knows in a directory that no entry covers, of which the visible ones may be seen; none if one does, and it is to be read.
    pub(super) fn known_names<'a>(&'a self, real: &Path) -> Option<impl Iterator<Item = &'a OsStr> + use<'a>> {
        if self.compiled.verdict(real) != Verdict::Unlisted {
            return None;
        }
        Some(self.leads.get(real).into_iter().flatten().map(OsString::as_os_str))
    }

    /// That the roots which decide over `real` are those that the kernel was told of.
    pub(super) fn check_root(&self, real: &Path) -> Result<(), FsError> {
        self.compiled.roots_of(real).filter(|root| *root != Path::new("/")).try_for_each(|root| self.check_identity(root))
    }

    fn check_identity(&self, root: &Path) -> Result<(), FsError> {
        let now = match statat(CWD, root, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(Identity { device: stat.st_dev, inode: stat.st_ino }),
            // Out of reach is as good as missing, as it was when the roots were opened.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => None,
            Err(errno) => return Err(os(errno)),
        };
        if now == self.identities.get(root).copied().flatten() { Ok(()) } else { Err(FsError::Stale) }
    }

    /// Checks that an opened file lies on a file system that allows this use. The path does not tell: every file system may be
    /// mounted anywhere.
    pub(super) fn check_opened(&self, real: &Path, opened: &OwnedFd, want: Want) -> Result<(), FsError> {
        let (errno, rule) = match FileSystem::of(opened).map_err(os)? {
            FileSystem::Processes if !real.starts_with("/proc") => {
                (Errno::ACCESS, "a procfs that is mounted elsewhere than /proc, which is hidden from file calls under a policy")
            }
            FileSystem::Tracing => (Errno::ACCESS, "a file system that shows the activity of processes, which no policy grants"),
            system if want == Want::Write && !system.can_be_changed() => (Errno::ROFS, KERNELS_OWN),
            _usable => return Ok(()),
        };
        Err(refused(errno, real, want.wanted(), rule.to_owned(), None))
    }
}

/// The rules for a whole tree, with what is read once for it.
#[derive(Debug)]
pub(super) struct Narrower<'a> {
    rules: &'a Rules,
    pointers: Pointers,
}

impl Narrower<'_> {
    /// As [`Rules::permit_name`].
    pub(super) fn permit_name(&self, real: &Path) -> Result<(), FsError> {
        self.rules.judge_name(real)?;
        self.rules.keep(real, &self.pointers)
    }
}

/// For each directory above a grant, the names in it that lead there, both by the path of the entry and by its real path.
fn leads(policy: &Policy, roots: &Roots) -> BTreeMap<PathBuf, BTreeSet<OsString>> {
    let entries = policy.files.sets().flat_map(|grants| &grants.entries);
    let granted = entries.filter(|grant| grant.access != Access::Deny).map(|grant| &grant.path);
    let mut leads: BTreeMap<PathBuf, BTreeSet<OsString>> = BTreeMap::new();
    let mut add = |path: &Path| {
        for step in path.ancestors() {
            if let (Some(parent), Some(name)) = (step.parent(), step.file_name()) {
                leads.entry(parent.to_owned()).or_default().insert(name.to_owned());
            }
        }
    };
    granted.clone().map(AbsolutePath::as_path).for_each(&mut add);
    let told = roots.all().iter().filter(|root| root.access != Access::Deny && !root.is_hidden);
    told.for_each(|root| add(&root.real));
    leads
}

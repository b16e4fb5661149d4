//! Where protected names lead: `.git` files and their like, and links.
//!
//! The `.git` at the top of a writable root cannot be written by the process that is confined, so that one that cannot be followed
//! fails the start. A nested one may be that process's own work, as may be all that it names: what git could not follow either leads
//! nowhere, and fails nothing.
//!
//! A pointer that a request may have written is not followed through a place that the policy does not show, or what is protected in
//! the workspace would tell what is there. One that no request can have written is the operator's: it is followed everywhere, since
//! git of the operator follows it too, and it may lead back into the workspace.

use super::{KERNEL, MOST_HELD, SurveyError, open, place, writable};
use crate::compiled::{Compiled, Verdict};
use crate::gitfile::{self, is_a_strangers};
use crate::kernel_files::FileSystem;
use crate::mounts::{Found, FoundKind};
use crate::policy::{Access, PROTECTED_NAMES};
use crate::roots::{Followed, Roots, follow_shown};
use rustix::fs::{AtFlags, CWD, FileType, OFlags, readlinkat, statat};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Files of a work tree's own directory by which git finds its repository and more settings: a change to them decides which hooks
/// run next time. A commit does not change them.
pub const LEADING: [&str; 3] = [SHARED, "gitdir", "config.worktree"];

/// Where a repository names the one that it shares things with.
const SHARED: &str = "commondir";

/// Bound of the names that a nested pointer is followed through. There may be thousands of pointers, each as long as a path.
const MOST_STEPS: usize = 256;

/// Where the `.git` of each writable root leads.
///
/// # Errors
/// A pointer that cannot be followed.
pub fn pointers(tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, SurveyError> {
    look(tables, roots, |name| tables.is_operators(name))
}

/// Those among [`pointers`] that are known only by a look at places that the policy does not show.
///
/// # Errors
/// A pointer that can be followed as far as the policy shows it, and not beyond.
pub fn hidden_pointers(tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, SurveyError> {
    let shown = look(tables, roots, |_| false);
    match (pointers(tables, roots), shown) {
        (Ok(all), Ok(shown)) => Ok(all.into_iter().filter(|found| !shown.contains(found)).collect()),
        (Err(error), Ok(_)) => Err(error),
        // Each call finds that by itself.
        (_, Err(_)) => Ok(Vec::new()),
    }
}

fn look(tables: &Compiled, roots: &Roots, is_operators: impl Fn(&Path) -> bool) -> Result<Vec<Found>, SurveyError> {
    let mut noted = Noted::new(tables, roots);
    for top in tops(roots) {
        if let Some(pointer) = pointer(tables, &top) {
            noted.follow(&pointer, is_operators(&top))?;
        }
    }
    for link in links(tables, roots) {
        let fail = |problem: String| SurveyError::Pointer { path: link.clone(), problem };
        let target = readlinkat(CWD, &link, Vec::new()).map_err(|errno| fail(errno.to_string()))?;
        let directory = link.parent().unwrap_or(&link);
        if let Some(target) = noted.lead(directory, target.as_bytes(), is_operators(&link)).map_err(fail)? {
            noted.found.extend(place(&target.path, FoundKind::Protected));
        }
    }
    Ok(noted.found.into_iter().collect())
}

/// Whether there is something for [`pointers`] to follow.
#[must_use]
pub fn are_there(tables: &Compiled, roots: &Roots) -> bool {
    tops(roots).any(|top| pointer(tables, &top).is_some()) || !links(tables, roots).is_empty()
}

/// The `.git` of each writable root.
pub(super) fn tops(roots: &Roots) -> impl Iterator<Item = PathBuf> {
    protecting(roots).map(|root| root.join(".git"))
}

/// The writable roots, and those that another set hides: they grant nothing, and their names are protected all the same.
fn protecting(roots: &Roots) -> impl Iterator<Item = &Path> {
    let hidden = roots.all().iter().filter(|root| root.access == Access::Write && root.is_hidden);
    writable(roots).chain(hidden.map(|root| root.real.as_path()))
}

/// What of a protected `.git` may lead elsewhere: the file itself, or the note in it of a directory that it shares with others.
pub(super) fn pointer(tables: &Compiled, place: &Path) -> Option<PathBuf> {
    let stat = statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if !tables.protects_name(place) || is_a_strangers(place, &stat) {
        return None;
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Some(place.to_owned()),
        FileType::Directory => {
            let shared = place.join(SHARED);
            statat(CWD, &shared, AtFlags::SYMLINK_NOFOLLOW).is_ok().then_some(shared)
        }
        _leads_nowhere => None,
    }
}

/// Protected names that are links: if another set of grants makes the link itself read-only, its target is protected all the
/// same.
fn links(tables: &Compiled, roots: &Roots) -> Vec<PathBuf> {
    let names = protecting(roots).flat_map(|root| PROTECTED_NAMES.map(|name| root.join(name)));
    let is_link = |place: &PathBuf| {
        statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink && !is_a_strangers(place, &stat))
    };
    names.filter(|place| tables.protects_name(place)).filter(is_link).collect()
}

/// What is found of where pointers lead.
pub(super) struct Noted<'a> {
    tables: &'a Compiled,
    roots: &'a Roots,
    pub(super) found: BTreeSet<Found>,
}

impl<'a> Noted<'a> {
    pub(super) fn new(tables: &'a Compiled, roots: &'a Roots) -> Self {
        Self { tables, roots, found: BTreeSet::new() }
    }

    /// That it grows no further than what can be held.
    pub(super) fn bound(&self) -> Result<(), SurveyError> {
        if self.found.len() > MOST_HELD { Err(SurveyError::Held) } else { Ok(()) }
    }

    /// The directory that the `.git` at the top of a root names, and the one that it shares with others. One of the operator's is
    /// followed through hidden places too.
    fn follow(&mut self, pointer: &Path, is_operators: bool) -> Result<(), SurveyError> {
        let fail = |problem: String| SurveyError::Pointer { path: pointer.to_owned(), problem };
        let Some(directory) = pointer.parent() else { return Ok(()) };
        let line = match gitfile::line(pointer) {
            Ok(line) => line,
            // Git cannot read it either, and no process inside can make it readable.
            Err(Errno::ACCESS | Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(fail(errno.to_string())),
        };
        let (mut own, mut shared) = (None, None);
        if pointer.file_name() == Some(OsStr::new(SHARED)) {
            shared = self.lead(directory, &line, is_operators).map_err(fail)?;
        } else if let Some(target) = line.strip_prefix(b"gitdir: ".as_slice()) {
            own = self.lead(directory, target, is_operators).map_err(fail)?;
            if let Some(line) = own.as_ref().filter(|own| own.exists).and_then(|own| self.shared(&own.path, is_operators)) {
                shared = own.as_ref().map_or(Ok(None), |own| self.lead(&own.path, &line, is_operators)).map_err(fail)?;
            }
        }
        let [own, shared] = [own, shared].map(|followed| followed.map(|followed| followed.path));
        if let Some(settings) = self.bare_settings(own.as_deref(), shared.as_deref(), pointer) {
            let text =
                "its repository sets extensions.worktreeConfig, and `{}` is missing, which a process could make; create it empty";
            return Err(fail(text.replace("{}", &settings.to_string_lossy())));
        }
        self.protect_all(own.as_deref(), shared.as_deref(), pointer);
        Ok(())
    }

    /// The same of a nested `.git`, which the confined process may have written. It fails nothing: what git could not follow, and what
    /// is not a repository of the workspace, protects no more than the `.git` itself.
    pub(super) fn follow_nested(&mut self, pointer: &Path) {
        let Some(directory) = pointer.parent().filter(|_| self.tables.verdict(pointer).is_granted()) else { return };
        let Ok(line) = gitfile::line(pointer) else { return };
        let (mut own, mut shared) = (None, None);
        if pointer.file_name() == Some(OsStr::new(SHARED)) {
            shared = self.lead_nested(directory, &line, pointer);
        } else if let Some(target) = line.strip_prefix(b"gitdir: ".as_slice()) {
            own = self.lead_nested(directory, target, pointer);
            if let Some((own, line)) = own.as_ref().and_then(|own| Some((own, self.shared(own, false)?))) {
                shared = self.lead_nested(own, &line, pointer);
            }
        }
        // Settings that are missing are held by a mount point here, on which git fails: better than no start.
        self.protect_all(own.as_deref(), shared.as_deref(), pointer);
    }

    /// Settings of a work tree that a process could make: an entry makes their directory writable, they are missing, and git reads them.
    fn bare_settings(&self, own: Option<&Path>, shared: Option<&Path>, pointer: &Path) -> Option<PathBuf> {
        let (own, whole) = (own?, shared?);
        let settings = own.join("config.worktree");
        // What the policy hides of them must not decide over a start.
        let is_shown = self.tables.verdict(&settings).is_granted();
        let is_lifted = is_shown && self.tables.is_named(own, whole, pointer);
        (is_lifted && is_missing(&settings) && self.reads_settings_of_work_trees(whole)).then_some(settings)
    }

    /// Whether git reads `config.worktree` of the work trees of a repository (git-worktree(1)). A mount point could not hold that name:
    /// git fails on a directory there.
    fn reads_settings_of_work_trees(&self, repository: &Path) -> bool {
        /// Longer than a file of settings. The rest is not read, so it counts as set.
        const MOST: usize = 1 << 20;
        let config = repository.join("config");
        if !self.tables.verdict(&config).is_granted() {
            return false;
        }
        let mut text = Vec::new();
        let read = open(&config, OFlags::NONBLOCK)
            .map_err(std::io::Error::from)
            .and_then(|file| std::fs::File::from(file).take(MOST as u64).read_to_end(&mut text));
        text.make_ascii_lowercase();
        read.is_ok_and(|length| length == MOST) || text.windows(NAME.len()).any(|part| part == NAME)
    }

    /// What a repository says of the one that it shares things with, if the policy lets that be read, or the operator's `.git` led there.
    fn shared(&self, repository: &Path, is_operators: bool) -> Option<Vec<u8>> {
        let file = repository.join(SHARED);
        if is_operators || self.tables.verdict(&file).is_granted() { gitfile::line(&file).ok() } else { None }
    }

    /// Notes the directory of a work tree, and the one that it shares with others.
    fn protect_all(&mut self, own: Option<&Path>, shared: Option<&Path>, pointer: &Path) {
        // These by an entry of their own only; a missing file could be made.
        for file in own.into_iter().flat_map(|own| LEADING.map(|name| own.join(name))) {
            self.protect(&file, &file, pointer);
        }
        for repository in shared.into_iter().chain(own) {
            let whole = shared.filter(|whole| repository.starts_with(whole)).unwrap_or(repository);
            self.protect(repository, whole, pointer);
        }
    }

    /// Notes a place that a protected name leads to, unless an entry names the repository or the part of it that lies there.
    fn protect(&mut self, path: &Path, repository: &Path, pointer: &Path) {
        let tables = self.tables;
        if tables.is_named(path, repository, pointer) {
            return;
        }
        self.found.extend(place(path, FoundKind::Protected));
        let named = writable(self.roots).filter(|root| root.starts_with(path) && tables.is_named(root, repository, pointer));
        self.found.extend(named.filter_map(|root| place(root, FoundKind::Named)));
    }

    /// Notes where a path leads from a directory, and what it goes through: every link, so that one that could be turned is met as a
    /// place of its own, and every directory, also those that a `..` leaves again. None if it leads to what the policy does not show, unless
    /// the operator wrote it.
    fn lead(&mut self, from: &Path, text: &[u8], is_operators: bool) -> Result<Option<Followed>, String> {
        let (followed, way) = self.way(from, text, usize::MAX, is_operators).map_err(|errno| errno.to_string())?;
        self.found.extend(way.iter().filter_map(|way| place(way, FoundKind::Way)));
        self.found.extend(followed.links.iter().filter_map(|link| place(link, FoundKind::Protected)));
        Ok((!followed.is_hidden).then_some(followed))
    }

    /// Where a path leads from a directory, if that is an existing directory and may be a repository of the workspace: what it goes
    /// through is noted then. None if not.
    fn lead_nested(&mut self, from: &Path, text: &[u8], pointer: &Path) -> Option<PathBuf> {
        let (followed, way) = self.way(from, text, MOST_STEPS, false).ok()?;
        let is_directory = |path: &Path| {
            let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
            stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
        };
        let leads_nowhere = followed.is_hidden || !followed.exists || !is_directory(&followed.path);
        if leads_nowhere || !may_point(pointer, &followed.path) || self.is_work_place(&followed.path, pointer) {
            return None;
        }
        self.found.extend(way.iter().filter_map(|way| place(way, FoundKind::Way)));
        for link in &followed.links {
            // A mount cannot hold a link, but the directory that it lies in; not that of the work itself.
            let turnable = link.parent().filter(|directory| self.tables.verdict(directory) == Verdict::Write);
            if let Some(directory) = turnable.filter(|directory| !self.is_work_place(directory, pointer)) {
                self.keep(directory);
            }
        }
        Some(followed.path)
    }

    /// Notes a directory that is kept as it is, up to the writable roots below it.
    pub(super) fn keep(&mut self, directory: &Path) {
        self.found.extend(place(directory, FoundKind::Protected));
        let roots = writable(self.roots).filter(|root| root.starts_with(directory) && *root != directory);
        self.found.extend(roots.filter_map(|root| place(root, FoundKind::Named)));
    }

    /// Follows a path from a directory as far as the policy shows it, or everywhere, through so many names at most. With it every
    /// name on the way.
    fn way(&self, from: &Path, text: &[u8], most: usize, is_operators: bool) -> Result<(Followed, Vec<PathBuf>), Errno> {
        let mut way = Vec::new();
        let followed = follow_shown(&from.join(OsStr::from_bytes(text)), |name| {
            way.push(name.to_owned());
            way.len() <= most && (is_operators || self.shows(name))
        })?;
        way.retain(|name| !followed.links.contains(name) && *name != followed.path);
        Ok((followed, way))
    }

    /// Whether the policy lets a name be known. File systems of the kernel are the view's own, wherever they are mounted: what is in
    /// those of the machine is for no process to know.
    fn shows(&self, name: &Path) -> bool {
        let is_kernels = || {
            let directory = name.parent().and_then(|parent| open(parent, OFlags::PATH).ok());
            KERNEL.iter().any(|kernel| name.starts_with(kernel))
                || directory.is_some_and(|it| matches!(FileSystem::of(it), Ok(FileSystem::Processes | FileSystem::Tracing)))
        };
        self.tables.is_visible(name) && (self.tables.verdict(name) == Verdict::Write || !is_kernels())
    }

    /// Whether a directory is a place of work and not a repository beside it: it is above the directory of a nested `.git`, or a writable
    /// root or above one. Protected, it would take the work with it.
    fn is_work_place(&self, directory: &Path, pointer: &Path) -> bool {
        let is_shared = pointer.file_name() == Some(OsStr::new(SHARED));
        let git = if is_shared { pointer.parent().unwrap_or(pointer) } else { pointer };
        let is_above = git.parent().is_some_and(|own| own != directory && own.starts_with(directory));
        // A root that an entry gives within a repository is a part of that, as `objects` for commits.
        let is_a_repositorys = |root: &Path| root.iter().any(|name| name.as_bytes().ends_with(b".git"));
        is_above
            || writable(self.roots)
                .filter(|root| root.starts_with(directory) && !is_a_repositorys(root))
                .any(|root| root == directory || !self.tables.is_named(root, directory, pointer))
    }
}

/// Whether a nested `.git` of its owner may lead to a directory of that directory's owner: as git has it, another user's leads nowhere
/// for this user, nor to what is not its own.
fn may_point(pointer: &Path, directory: &Path) -> bool {
    let owner = |path: &Path| statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).ok().map(|stat| stat.st_uid);
    let by = owner(pointer);
    by.is_some_and(|by| by == 0 || by == rustix::process::geteuid().as_raw()) || by.is_some() && by == owner(directory)
}

fn is_missing(path: &Path) -> bool {
    matches!(statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT))
}

/// `extensions.worktreeConfig` without its section, in any case (git-config(1)).
const NAME: &[u8] = b"worktreeconfig";

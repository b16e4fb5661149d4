//! What only a look at the files tells before a view is built: what deny globs match, where `.git` files lead, and which nested
//! repositories there are.
//!
//! It reads names and `.git` files that the attacker may have written, so it runs in a process that can do nothing but read
//! ([`crate::enforce::reader`]), and whoever takes its answer believes none of it but as a reason to take something away.

use crate::compiled::{Compiled, Verdict};
use crate::gitfile::{self, is_a_strangers};
use crate::mounts::{Found, FoundKind};
use crate::policy::{Access, DenyGlob, PROTECTED_NAMES, Policy, is_protected_name};
use crate::roots::{Followed, Roots};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, readlinkat, statat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bound of what is found: each place costs a mount.
pub const MOST_FOUND: usize = 8192;

/// Bound of the names that are looked at: some seconds of work.
const MOST_NAMES: usize = 2_000_000;

/// Longest path that the kernel takes, its NUL included.
const LONGEST_PATH: usize = 4096;

/// File systems of the kernel: a view has its own, or shows them read-only.
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
    /// A process has its own there, which nobody has looked at.
    #[error("hold a process to a deny glob below `{}`: processes have file systems of the kernel of their own; deny a path there instead", .0.display())]
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
    policy.files.sets().any(|grants| !grants.deny_globs.is_empty())
        || policy.protects_nested()
        || writable(roots).any(|root| pointer(tables, &root.join(".git")).is_some())
        || !links(tables, roots).is_empty()
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
    let mut bases: Vec<PathBuf> = globs.filter_map(|glob| roots.real(&glob.base)).collect();
    bases.sort();
    // One walk for all globs: what lies below another base is met there.
    bases.dedup_by(|later, kept| later.starts_with(&*kept));
    let mut names = 0;
    for base in bases {
        walk(&base, tables, &mut names, &mut |path| tables.glob_denies(path).then_some(FoundKind::Denied), &mut found)?;
    }
    if policy.protects_nested() {
        let (mut pointers, mut links) = (Vec::new(), Vec::new());
        for root in writable(roots) {
            walk(
                root,
                tables,
                &mut names,
                &mut |path| {
                    let is_name = path.file_name().is_some_and(is_protected_name);
                    if !is_name {
                        return None;
                    }
                    pointers.extend(pointer(tables, path));
                    if tables.verdict(path) != Verdict::Protected {
                        return None;
                    }
                    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
                    if stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink) {
                        links.extend(path.parent().map(Path::to_owned));
                    }
                    Some(FoundKind::Nested)
                },
                &mut found,
            )?;
        }
        for pointer in pointers {
            follow(&pointer, tables, roots, &mut found)?;
        }
        // A link cannot be covered; the directory that it lies in can be kept as it is.
        for directory in links {
            found.retain(|known| known.kind != FoundKind::Nested || known.path.as_path().parent() != Some(&directory));
            found.extend(place(&directory, FoundKind::Protected));
        }
    }
    found.extend(pointers(tables, roots)?);
    found.sort();
    found.dedup();
    Ok(found)
}

/// Where the `.git` of each writable root leads.
///
/// # Errors
/// A pointer that cannot be followed.
pub fn pointers(tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, SurveyError> {
    let mut found = Vec::new();
    for pointer in writable(roots).filter_map(|root| pointer(tables, &root.join(".git"))) {
        follow(&pointer, tables, roots, &mut found)?;
    }
    for link in links(tables, roots) {
        let fail = |problem: String| SurveyError::Pointer { path: link.clone(), problem };
        let target = readlinkat(CWD, &link, Vec::new()).map_err(|errno| fail(errno.to_string()))?;
        let directory = link.parent().unwrap_or(&link);
        let target = lead(directory, target.as_bytes(), &mut found).map_err(fail)?;
        found.extend(place(&target.path, FoundKind::Protected));
    }
    Ok(found)
}

/// Protected names that are links: where the link itself is not writable, for another set of grants gives less there, what it leads to is
/// protected all the same.
fn links(tables: &Compiled, roots: &Roots) -> Vec<PathBuf> {
    let names = writable(roots).flat_map(|root| PROTECTED_NAMES.map(|name| root.join(name)));
    let is_link = |place: &PathBuf| {
        statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink && !is_a_strangers(place, &stat))
    };
    names.filter(|place| tables.protects_name(place)).filter(is_link).collect()
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

/// Looks at every name below a directory. What `look` finds is not looked into.
fn walk(
    base: &Path,
    tables: &Compiled,
    names: &mut usize,
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

/// What of a protected `.git` may lead elsewhere: the file itself, or the note in it of a directory that it shares with others.
fn pointer(tables: &Compiled, place: &Path) -> Option<PathBuf> {
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

/// Where a repository names the one that it shares things with.
const SHARED: &str = "commondir";

/// Files of a work tree's own directory by which git finds its repository and more settings: whoever changes them decides which hooks
/// run next time. No commit does.
pub const LEADING: [&str; 3] = [SHARED, "gitdir", "config.worktree"];

/// The directory that a `.git` file names, and the one that it shares with others.
fn follow(pointer: &Path, tables: &Compiled, roots: &Roots, found: &mut Vec<Found>) -> Result<(), SurveyError> {
    let fail = |problem: String| SurveyError::Pointer { path: pointer.to_owned(), problem };
    let Some(directory) = pointer.parent() else { return Ok(()) };
    let line = match gitfile::line(pointer) {
        Ok(line) => line,
        // Git cannot read it either, and nobody inside can make it readable.
        Err(Errno::ACCESS | Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(fail(errno.to_string())),
    };
    let mut repositories = Vec::new();
    if pointer.file_name() == Some(OsStr::new(SHARED)) {
        repositories.push(lead(directory, &line, found).map_err(fail)?.path);
    } else if let Some(target) = line.strip_prefix(b"gitdir: ".as_slice()) {
        let repository = lead(directory, target, found).map_err(fail)?;
        if let (true, Ok(line)) = (repository.exists, gitfile::line(&repository.path.join(SHARED))) {
            repositories.push(lead(&repository.path, &line, found).map_err(fail)?.path);
        }
        let files = LEADING.map(|name| repository.path.join(name));
        let [.., settings] = &files;
        let is_lifted = repositories.iter().any(|whole| tables.is_named(settings.parent().unwrap_or(settings), whole, pointer));
        if is_lifted && is_missing(settings) && repositories.iter().any(|whole| reads_settings_of_work_trees(whole)) {
            let text =
                "its repository sets extensions.worktreeConfig, and `{}` is missing, which a process could make; create it empty";
            return Err(fail(text.replace("{}", &settings.to_string_lossy())));
        }
        repositories.push(repository.path);
        // These by an entry of their own only; what is missing could be made.
        files.iter().for_each(|file| protect(file, file, pointer, (tables, roots), found));
    }
    for repository in &repositories {
        let whole = repositories.iter().find(|whole| repository.starts_with(whole)).unwrap_or(repository);
        protect(repository, whole, pointer, (tables, roots), found);
    }
    Ok(())
}

fn is_missing(path: &Path) -> bool {
    matches!(statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT))
}

/// Whether git reads `config.worktree` of the work trees of a repository (git-worktree(1)). A mount point could not hold that name: git
/// fails on a directory there.
fn reads_settings_of_work_trees(repository: &Path) -> bool {
    /// Longer than a file of settings; what lies behind it is not looked at, so that it counts as set.
    const MOST: usize = 1 << 20;
    let mut text = Vec::new();
    let read = open(&repository.join("config"), OFlags::NONBLOCK)
        .map_err(std::io::Error::from)
        .and_then(|file| std::fs::File::from(file).take(MOST as u64).read_to_end(&mut text));
    text.make_ascii_lowercase();
    read.is_ok_and(|length| length == MOST) || text.windows(NAME.len()).any(|part| part == NAME)
}

/// `extensions.worktreeConfig` without its section, in any case (git-config(1)).
const NAME: &[u8] = b"worktreeconfig";

/// Notes a place that a protected name leads to, unless an entry names the repository or what of it lies there.
fn protect(path: &Path, repository: &Path, pointer: &Path, (tables, roots): (&Compiled, &Roots), found: &mut Vec<Found>) {
    if tables.is_named(path, repository, pointer) {
        return;
    }
    found.extend(place(path, FoundKind::Protected));
    let named = writable(roots).filter(|root| root.starts_with(path) && tables.is_named(root, repository, pointer));
    found.extend(named.filter_map(|root| place(root, FoundKind::Named)));
}

/// Notes where a path leads from a directory, and what it goes through: every link, so that one that could be turned is met as a
/// place of its own, and every directory, also those that a `..` leaves again.
fn lead(from: &Path, text: &[u8], found: &mut Vec<Found>) -> Result<Followed, String> {
    let path = from.join(OsStr::from_bytes(text));
    let follow = |path: &Path| crate::roots::follow(path).map_err(|errno| errno.to_string());
    for way in path.ancestors().skip(1) {
        let followed = follow(way)?;
        found.extend(place(&followed.path, FoundKind::Way));
    }
    let followed = follow(&path)?;
    for link in &followed.links {
        found.extend(place(link, FoundKind::Protected));
    }
    Ok(followed)
}

fn open(path: &Path, flags: OFlags) -> Result<std::os::fd::OwnedFd, Errno> {
    openat2(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

//! How paths become descriptors.
//!
//! Unconfined, the kernel resolves a path as for any program. Under a policy no path is trusted that has links in it: the
//! string that is judged is the string that the kernel opens, with `RESOLVE_NO_SYMLINKS`. Mostly that is the path itself,
//! and costs one call. If there are links, they are resolved step by step ([`trace`]), the result is judged, and opened; if
//! something on the way was swapped for a link meanwhile, the kernel says so and everything begins again.

use super::refusal::{is_refused, of_change};
use super::rules::{Rules, Want};
use super::trace::{Last, MOST_TRIES, Step, Trace, open_exact, trace};
use super::{is, os};
use crate::cover::Covers;
use portcullis_protocol::helper::FsError;
use portcullis_sandbox::mounts::Found;
use portcullis_sandbox::policy::{Policy, PolicyError};
use portcullis_sandbox::roots::Roots;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;
use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What of the file system a worker's requests can reach.
#[derive(Debug)]
pub(crate) struct View {
    rules: Option<Rules>,
    /// The covers of this process's mounts.
    covers: Mutex<Covers>,
}

/// Which links of a path are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    All,
    /// All but the last component.
    Parents,
    /// A link anywhere is an error: ELOOP for the last component, ENOTDIR before.
    None,
}

impl Follow {
    pub(super) fn all_or_none(follow: bool) -> Self {
        if follow { Self::All } else { Self::None }
    }

    fn last(self) -> Last {
        if self == Self::All { Last::Follow } else { Last::Keep }
    }
}

/// An opened file or directory.
#[derive(Debug)]
pub(super) struct Opened<'a> {
    pub(super) descriptor: OwnedFd,
    /// Under a policy without links; otherwise the path as it was named.
    pub(super) path: Cow<'a, Path>,
}

/// A name in an opened directory, which exists or may be made.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) directory: OwnedFd,
    pub(super) name: OsString,
    /// Under a policy without links; otherwise the path as it was named.
    pub(super) path: PathBuf,
}

impl View {
    /// Everything that the user may touch.
    pub(crate) fn unconfined() -> Self {
        Self { rules: None, covers: Mutex::default() }
    }

    /// What the policy grants, and where protected names lead as far as only a look at hidden places tells. The kernel must be told
    /// separately.
    pub(crate) fn confined(policy: &Policy, roots: Roots, found: &[Found]) -> Result<Self, PolicyError> {
        Ok(Self { rules: Rules::new(policy, roots, found)?, covers: Mutex::default() })
    }

    /// The same, held by these mounts too.
    pub(crate) fn held_by(self, covers: Covers) -> Self {
        Self { covers: Mutex::new(covers), ..self }
    }

    pub(super) fn rules(&self) -> Option<&Rules> {
        self.rules.as_ref()
    }

    /// Checks that the policy's paths still lead where they led when it was compiled, and that the mounts still cover every path
    /// that has to be covered. Called before each request.
    pub(super) fn check_fresh(&self) -> Result<(), FsError> {
        // A panic elsewhere does not invalidate the covers: they are checked anew.
        if self.covers.lock().unwrap_or_else(PoisonError::into_inner).lost().is_some() {
            return Err(FsError::Stale);
        }
        self.rules.as_ref().map_or(Ok(()), Rules::check_links)
    }

    /// Opens what is at a path.
    pub(super) fn open<'a>(&self, path: &'a Path, follow: Follow, want: Want, flags: OFlags) -> Result<Opened<'a>, FsError> {
        let flags = if follow == Follow::Parents { flags | OFlags::NOFOLLOW } else { flags };
        let Some(rules) = &self.rules else {
            let descriptor = match follow {
                Follow::None => open_exact(path, flags).map_err(|errno| which_link(path, errno))?,
                _links => openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(os)?,
            };
            return Ok(Opened { descriptor, path: Cow::Borrowed(path) });
        };
        let lexical = rules.permit(path, want);
        if lexical.is_ok() {
            rules.check_root(path)?;
            match open_exact(path, flags) {
                Ok(descriptor) => return checked(rules, descriptor, Cow::Borrowed(path), want),
                // A link, so the path is not the real one.
                Err(Errno::LOOP) if follow != Follow::None => {}
                Err(errno) => return Err(which_link(path, errno)),
            }
        }
        if follow == Follow::None || lexical.as_ref().is_err_and(|error| is_refused(error, Errno::ACCESS)) {
            // Without links the path is the real one, and with a link the answer is no in any case. What a deny entry names is
            // denied whatever links say.
            return Err(lexical.err().unwrap_or_else(|| os(Errno::LOOP)));
        }
        for _ in 0..MOST_TRIES {
            let trace = self.trace(path, follow.last());
            let trace = if want == Want::Write { trace.map_err(of_change) } else { trace }?;
            rules.permit(&trace.real, want)?;
            rules.check_root(&trace.real)?;
            trace.exists()?;
            match open_exact(&trace.real, flags) {
                Ok(descriptor) => return checked(rules, descriptor, Cow::Owned(trace.real), want),
                Err(Errno::LOOP) => {}
                Err(errno) => return Err(os(errno)),
            }
        }
        Err(os(Errno::LOOP))
    }

    /// Type, size and times. `Follow::Parents` is `lstat`.
    pub(super) fn stat(&self, path: &Path, follow: Follow) -> Result<Stat, FsError> {
        match (&self.rules, follow) {
            (None, Follow::All) => statat(CWD, path, AtFlags::empty()).map_err(os),
            (None, Follow::Parents) => statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map_err(os),
            _judged => fstat(self.open(path, follow, Want::Stat, OFlags::PATH)?.descriptor).map_err(os),
        }
    }

    /// Where a path leads; under a policy only through what may be seen.
    pub(super) fn trace(&self, path: &Path, last: Last) -> Result<Trace, FsError> {
        match &self.rules {
            None => trace(path, last, |_| Ok(())),
            Some(rules) => {
                rules.permit_spelling(path)?;
                trace(path, last, |step| match step {
                    Step::Name(real) => rules.permit(real, Want::Stat),
                    Step::Found(real, found) => rules.check_opened(real, found, Want::Stat),
                    Step::Spelling(path) => rules.permit_spelling(path),
                })
            }
        }
    }

    /// The directory and the name of a path that is to be made, replaced or removed. With `Follow::All`, a last component
    /// that is a link stands for the name it leads to, which may not exist.
    pub(super) fn place(&self, path: &Path, follow: Follow) -> Result<Place, FsError> {
        for _ in 0..MOST_TRIES {
            match self.try_place(path, follow) {
                Err(error) if is(&error, Errno::LOOP) && follow != Follow::None => {}
                other => return other,
            }
        }
        Err(os(Errno::LOOP))
    }

    fn try_place(&self, path: &Path, follow: Follow) -> Result<Place, FsError> {
        // Judged as it stands, or else where its links lead.
        let lexical = self.rules.as_ref().map_or(Ok(()), |rules| rules.permit_name(path));
        let direct = match lexical {
            Ok(()) => self.place_at(path, self.rules.is_none() && follow != Follow::None),
            // What a deny entry names is denied whatever links say.
            Err(error) if follow == Follow::None || is_refused(&error, Errno::ACCESS) => return Err(error),
            Err(_maybe_elsewhere) => Err(os(Errno::LOOP)),
        };
        match direct {
            Ok(place) if follow != Follow::All || !is_link(&place.directory, &place.name) => return Ok(place),
            Err(error) if !is(&error, Errno::LOOP) => return Err(error),
            Err(_link_among_directories) if follow == Follow::None => return Err(os(Errno::NOTDIR)),
            _links => {}
        }
        let trace = self.trace(path, follow.last()).map_err(of_change)?;
        if let Some(rules) = &self.rules {
            rules.permit_name(&trace.real)?;
        }
        trace.has_parent()?;
        let place = self.place_at(&trace.real, false)?;
        let swapped = follow == Follow::All && is_link(&place.directory, &place.name);
        if swapped { Err(os(Errno::LOOP)) } else { Ok(place) }
    }

    fn place_at(&self, path: &Path, links: bool) -> Result<Place, FsError> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            // The root itself: nothing can be made, replaced or removed there.
            return Err(os(Errno::BUSY));
        };
        if let Some(rules) = &self.rules {
            rules.check_root(path)?;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = if links { openat(CWD, parent, flags, Mode::empty()) } else { open_exact(parent, flags) };
        let directory = opened.map_err(os)?;
        self.check_directory(parent, &directory)?;
        Ok(Place { directory, name: name.to_owned(), path: path.to_owned() })
    }

    /// That names may be made and removed in an opened directory, as far as its file system decides.
    pub(super) fn check_directory(&self, path: &Path, directory: &OwnedFd) -> Result<(), FsError> {
        self.rules.as_ref().map_or(Ok(()), |rules| rules.check_opened(path, directory, Want::Write))
    }
}

fn checked<'a>(rules: &Rules, descriptor: OwnedFd, path: Cow<'a, Path>, want: Want) -> Result<Opened<'a>, FsError> {
    rules.check_opened(&path, &descriptor, want)?;
    Ok(Opened { descriptor, path })
}

fn is_link(directory: &OwnedFd, name: &OsStr) -> bool {
    statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

/// With no link allowed the kernel says ELOOP for any; clients of this wire know ENOTDIR for one among the directories.
fn which_link(path: &Path, errno: Errno) -> FsError {
    let among_directories =
        || path.parent().is_some_and(|parent| open_exact(parent, OFlags::PATH).is_err_and(|errno| errno == Errno::LOOP));
    os(if errno == Errno::LOOP && among_directories() { Errno::NOTDIR } else { errno })
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined};
    use super::*;
    use portcullis_protocol::helper::{FsDone, FsOperation};
    use portcullis_protocol::path::AbsolutePath;
    use proptest::prelude::*;
    use rustix::fs::{RenameFlags, renameat_with};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Names of the random trees: few, so that links meet files, directories, each other and nothing.
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    #[derive(Debug, Clone)]
    enum Thing {
        Directory,
        File,
        Link(String),
    }

    fn some_path(parts: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        let part = prop_oneof![4 => prop::sample::select(&NAMES[..]), 1 => Just(".."), 1 => Just(".")];
        (prop::collection::vec(part, parts), prop::bool::weighted(0.2))
            .prop_map(|(parts, slash)| parts.join("/") + if slash { "/" } else { "" })
    }

    fn some_tree() -> impl Strategy<Value = Vec<(String, Thing)>> {
        let name = prop::collection::vec(prop::sample::select(&NAMES[..]), 1..4).prop_map(|parts| parts.join("/"));
        let link =
            (any::<bool>(), some_path(1..4)).prop_map(|(absolute, to)| if absolute { format!("{{root}}/{to}") } else { to });
        let thing = prop_oneof![3 => Just(Thing::Directory), 2 => Just(Thing::File), 3 => link.prop_map(Thing::Link)];
        prop::collection::vec((name, thing), 1..12)
    }

    /// Puts files where they fit, and leaves out those that do not fit or would land outside of the tree.
    fn plant(tree: &Tree, things: &[(String, Thing)]) {
        plant_below(tree.root(), things);
    }

    fn plant_below(root: &Path, things: &[(String, Thing)]) {
        let real = root.canonicalize().unwrap();
        let stays = |path: &Path| landing(path).is_some_and(|at| at.starts_with(&real));
        for (name, thing) in things {
            let path = root.join(name);
            let mut parents: Vec<&Path> = path.ancestors().skip(1).take_while(|parent| *parent != root).collect();
            parents.reverse();
            for parent in parents.into_iter().filter(|parent| stays(parent)) {
                let _exists = std::fs::create_dir(parent);
            }
            if !stays(&path) {
                continue;
            }
            let _planted = match thing {
                Thing::Directory => std::fs::create_dir(path),
                Thing::File => std::fs::write(path, name),
                Thing::Link(to) => {
                    let to = to.replace("{root}", root.to_str().unwrap());
                    std::os::unix::fs::symlink(to, path)
                }
            };
        }
    }

    /// Where something of this name is made or written, all links followed. The last name need not exist.
    fn landing(path: &Path) -> Option<PathBuf> {
        let mut path = path.to_owned();
        for _ in 0..40 {
            // A path that ends in `..` or `/` is a directory, which exists or cannot be made.
            let Some(name) = path.file_name() else { return path.canonicalize().ok() };
            let at = path.parent()?.canonicalize().ok()?.join(name);
            let Ok(target) = at.read_link() else { return Some(at) };
            path = at.parent()?.join(target);
        }
        None
    }

    #[test]
    fn what_is_planted_stays_in_its_tree() {
        let outer = Tree::new();
        outer.mkdir("inner");
        let inner = outer.at("inner");
        let link = |name: &str, to: &str| (name.to_owned(), Thing::Link(to.to_owned()));
        let file = |name: &str| (name.to_owned(), Thing::File);
        let things = [
            link("up", ".."),
            link("dangling", "../made"),
            link("chain", "dangling"),
            link("absolute", outer.at("made").to_str().unwrap()),
            link("own", "later"),
            file("up/made"),
            file("up/d/made"),
            ("up/directory".to_owned(), Thing::Directory),
            file("dangling"),
            file("chain"),
            file("absolute"),
            file("own"),
        ];
        plant_below(&inner, &things);
        assert_eq!(outer.names(""), ["inner"]);
        // The control: links within the tree are written through.
        assert_eq!(std::fs::read(inner.join("later")).unwrap(), b"own");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// The slow and obvious checker: the C library's realpath, and the kernel's own resolution.
        #[test]
        fn resolves_as_the_system_does(things in some_tree(), asked in prop::collection::vec(some_path(1..5), 1..6)) {
            let tree = Tree::new();
            plant(&tree, &things);
            let views = [View::unconfined(), tree.writable()];
            for name in asked {
                let path = tree.path(&name);
                // Above the tree it is no longer the tree's policy that decides.
                if !path.as_path().starts_with(tree.root()) {
                    continue;
                }
                let expect = std::fs::canonicalize(path.as_path());
                // A link may lead above the tree, where the policy sees nothing.
                let inside = expect.as_ref().map_or(true, |real| real.starts_with(tree.root()));
                let traced = trace(path.as_path(), Last::Follow, |_| Ok(())).and_then(|trace| trace.exists().map(|()| trace.real));
                let code = |error: std::io::Error| FsError::Os(error.raw_os_error().unwrap());
                prop_assert_eq!(&traced, &expect.map_err(code));
                let content = std::fs::read(path.as_path()).ok();
                for view in &views {
                    let read = FsOperation::ReadFile { path: path.clone(), follow: true, limit: 1000 };
                    let answer = carry_out(view, read, b"", Vec::new());
                    let got = matches!(answer.outcome, Ok(FsDone::Content)).then_some(answer.payload);
                    if inside {
                        prop_assert_eq!(&got, &content);
                    } else {
                        prop_assert!(got.is_none() || got == content);
                    }
                    let stat = carry_out(view, FsOperation::GetMetadata { path: path.clone(), follow: false }, b"", Vec::new());
                    // No link is followed: what was found is where the path says.
                    if let Ok(FsDone::Metadata(_)) = stat.outcome {
                        prop_assert_eq!(traced.as_deref(), Ok(path.as_path()));
                    }
                }
            }
        }

        /// Whatever links there are, nothing outside a writable root is ever changed or read.
        #[test]
        fn never_reaches_outside(things in some_tree(), asked in prop::collection::vec(some_path(1..5), 1..6)) {
            let tree = Tree::new();
            tree.put("outside/a", b"outside");
            tree.put("outside/b/c", b"outside");
            tree.mkdir("ws");
            let inside: Vec<_> = things.into_iter().map(|(name, thing)| (format!("ws/{name}"), match thing {
                Thing::Link(to) => Thing::Link(format!("{{root}}/outside/{to}")),
                other => other,
            })).collect();
            plant(&tree, &inside);
            let before = snapshot(&tree.at("outside"));
            let ws = tree.at("ws");
            let view = confined(&[(&ws, "write")]);
            for name in asked {
                let path = tree.path(format!("ws/{name}"));
                for operation in operations(&path) {
                    let answer = carry_out(&view, operation, b"", Vec::new());
                    prop_assert_ne!(answer.payload, b"outside");
                }
            }
            prop_assert_eq!(snapshot(&tree.at("outside")), before);
        }
    }

    /// Paths and contents below a directory.
    fn snapshot(directory: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
        let mut found = Vec::new();
        let mut todo = vec![directory.to_owned()];
        while let Some(path) = todo.pop() {
            if path.is_dir() && !path.is_symlink() {
                todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            found.push((path.clone(), std::fs::read(&path).ok()));
        }
        found.sort();
        found
    }

    fn operations(path: &AbsolutePath) -> Vec<FsOperation> {
        let path = path.clone();
        let other = AbsolutePath::new(path.as_path().join("../copied")).unwrap();
        vec![
            FsOperation::ReadFile { path: path.clone(), follow: true, limit: 1000 },
            FsOperation::WriteFile { path: path.clone(), follow: true },
            FsOperation::Copy { source: path.clone(), destination: other.clone(), recursive: true },
            FsOperation::Copy { source: other.clone(), destination: path.clone(), recursive: true },
            FsOperation::ReadFile { path: other, follow: true, limit: 1000 },
            FsOperation::CreateDirectory { path: path.clone(), recursive: true, follow: true },
            FsOperation::Remove { path, recursive: true, force: true, follow: true },
        ]
    }

    #[test]
    fn a_directory_swapped_with_a_link_leads_nobody_out() {
        const REQUESTS: usize = 10_000;
        let tree = Tree::new();
        tree.put("outside/f", b"outside");
        tree.put("ws/d/f", b"inside");
        tree.link("ws/l", tree.at("outside"));
        let ws = tree.at("ws");
        let view = confined(&[(&ws, "write")]);
        let (done, swaps, reads, refusals) =
            (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    renameat_with(CWD, tree.at("ws/d"), CWD, tree.at("ws/l"), RenameFlags::EXCHANGE).unwrap();
                    swaps.fetch_add(1, Ordering::Relaxed);
                }
            });
            let (file, new) = (tree.path("ws/d/f"), tree.path("ws/d/n"));
            for _ in 0..REQUESTS / 5 {
                let operations = [
                    FsOperation::ReadFile { path: file.clone(), follow: true, limit: 1000 },
                    FsOperation::WriteFile { path: new.clone(), follow: true },
                    FsOperation::Remove { path: new.clone(), recursive: true, force: true, follow: true },
                    FsOperation::CreateDirectory { path: new.clone(), recursive: true, follow: true },
                    FsOperation::Remove { path: new.clone(), recursive: true, force: true, follow: true },
                ];
                for operation in operations {
                    let answer = carry_out(&view, operation, b"", Vec::new());
                    match answer.outcome {
                        Ok(FsDone::Content) => {
                            assert_eq!(answer.payload, b"inside");
                            reads.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(_changed) => {}
                        Err(_refused) => drop(refusals.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!((tree.names("outside"), tree.get("outside/f")), (vec!["f".to_owned()], b"outside".to_vec()));
        // The race was run: things were swapped, and both sides of it were met.
        let counts = [&swaps, &reads, &refusals].map(|count| count.load(Ordering::Relaxed));
        assert!(counts.iter().all(|count| *count > 0), "swaps, reads, refusals: {counts:?}");
        eprintln!("swaps, reads, refusals of {REQUESTS} requests: {counts:?}");
    }
}

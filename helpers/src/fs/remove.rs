//! Removing files, links and trees.
//!
//! A tree is removed by descriptor, one directory at a time, and without recursion: however deep it is, one descriptor is
//! open. The way back up is `..`, which is taken only if it is still the directory that was left, so a tree that is moved
//! away meanwhile ends the removal instead of misleading it.

use super::directory::{Listing, MOST_NAMES};
use super::metadata::link_in_the_way;
use super::refusal::{is_refused, refused};
use super::rules::Narrower;
use super::view::{Follow, Place, View};
use super::{is, os};
use portcullis_protocol::denial::Wanted;
use portcullis_protocol::helper::{FsDone, FsError};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat, unlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Directories that a removal under a policy looks through beforehand; above, it is refused rather than taking for ever.
const MOST_SCANNED: usize = 1_000_000;

/// How often a directory is emptied again because something was put in meanwhile.
const MOST_REFILLS: usize = 1000;

/// The flags of the request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner {
    pub(super) recursive: bool,
    /// What is missing is as good as removed.
    pub(super) force: bool,
    pub(super) follow: bool,
}

/// Removes what is at a path; a link itself, never its target.
pub(super) fn remove(view: &View, path: &AbsolutePath, manner: Manner) -> Result<FsDone, FsError> {
    if manner.recursive && !manner.follow {
        return Err(FsError::RecursiveNoFollow);
    }
    match remove_name(view, path, manner) {
        Err(error) if manner.force && is(&error, Errno::NOENT) => Ok(FsDone::Changed),
        other => other.map(|()| FsDone::Changed),
    }
}

fn remove_name(view: &View, path: &AbsolutePath, manner: Manner) -> Result<(), FsError> {
    let follow = if manner.follow { Follow::Parents } else { Follow::None };
    let place = view.place(path.as_path(), follow)?;
    let stat = statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW).map_err(os)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink if !manner.follow => Err(link_in_the_way(os(Errno::LOOP))),
        FileType::Directory if manner.recursive => remove_tree(view, &place),
        FileType::Directory => {
            if let Some(narrower) = narrower_below(view, &place.path)? {
                // A directory that can be removed is empty, but a name in it may be protected although it is missing.
                scan(view, &narrower, &place.path)?;
            }
            unlinkat(&place.directory, &place.name, AtFlags::REMOVEDIR).map_err(os)
        }
        _file => unlinkat(&place.directory, &place.name, AtFlags::empty()).map_err(os),
    }
}

fn remove_tree(view: &View, place: &Place) -> Result<(), FsError> {
    // If something below may not be removed, nothing is.
    let narrower = narrower_below(view, &place.path)?;
    if let Some(narrower) = &narrower {
        scan(view, narrower, &place.path)?;
    }
    let mut removal = Removal { view, rules: narrower.as_ref(), way: Vec::new(), path: place.path.clone(), changed: false };
    removal.run(place).map_err(|stop| match stop {
        // Nothing is gone yet, so the plain answer is the whole truth.
        error if !removal.changed => error,
        FsError::Os(errno) | FsError::Denied(errno, _) => {
            AbsolutePath::new(&removal.path).map_or(FsError::Os(errno), |path| FsError::Partial { path, errno })
        }
        other => other,
    })
}

fn narrower_below<'a>(view: &'a View, tree: &Path) -> Result<Option<Narrower<'a>>, FsError> {
    view.rules().map_or(Ok(None), |rules| rules.narrower_below(tree))
}

/// Looks through a tree for what may not be removed.
fn scan(view: &View, rules: &Narrower<'_>, tree: &Path) -> Result<(), FsError> {
    let mut todo = vec![tree.to_owned()];
    let mut seen = 0;
    while let Some(directory) = todo.pop() {
        seen += 1;
        if seen > MOST_SCANNED {
            return Err(os(Errno::OVERFLOW));
        }
        // What is hidden may be denied, so the names come from the directory and not from what may be seen of it.
        for (name, kind) in all_names(view, &directory)? {
            let path = directory.join(name);
            rules.permit_name(&path).map_err(|less| kept(less, tree))?;
            if kind == FileType::Directory {
                todo.push(path);
            }
        }
    }
    Ok(())
}

/// The answer is the same whatever is in the way: that it is hidden or denied there is not told.
fn kept(error: FsError, tree: &Path) -> FsError {
    if is_refused(&error, Errno::ROFS) {
        return error;
    }
    let rule = "something below it that the policy keeps".to_owned();
    refused(Errno::ROFS, tree, Wanted::Write, rule, None)
}

fn all_names(view: &View, directory: &Path) -> Result<Vec<(OsString, FileType)>, FsError> {
    let listing = Listing::of(view, directory, Follow::Parents, MOST_NAMES)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(&listing.directory).map_err(os)? {
        let entry = entry.map_err(os)?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name != "." && name != ".." {
            if names.len() >= MOST_NAMES {
                return Err(os(Errno::OVERFLOW));
            }
            let kind = kind_of(&listing.directory, &name, entry.file_type())?;
            names.push((name, kind));
        }
    }
    Ok(names)
}

fn kind_of(directory: &OwnedFd, name: &OsStr, told: FileType) -> Result<FileType, FsError> {
    if told != FileType::Unknown {
        return Ok(told);
    }
    let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map_err(os)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// Device and inode.
type Identity = (u64, u64);

fn identity(directory: &OwnedFd) -> Result<Identity, FsError> {
    fstat(directory).map(|stat| (stat.st_dev, stat.st_ino)).map_err(os)
}

/// A tree on its way out.
struct Removal<'a> {
    view: &'a View,
    /// Asked again for each name, if it may make a difference.
    rules: Option<&'a Narrower<'a>>,
    /// The directories from the tree's own parent down to the parent of the current one.
    way: Vec<Identity>,
    /// Of the current directory.
    path: PathBuf,
    changed: bool,
}

impl Removal<'_> {
    fn run(&mut self, place: &Place) -> Result<(), FsError> {
        let mut here = self.enter(&place.directory, &place.name)?;
        let mut refills = 0;
        loop {
            if let Some(name) = self.clear(&here)? {
                self.path.push(&name);
                here = self.enter(&here, &name)?;
                continue;
            }
            let name = self.path.file_name().map(OsStr::to_owned).unwrap_or_default();
            let above = if self.way.len() == 1 { None } else { Some(self.leave(&here)?) };
            let parent = above.as_ref().unwrap_or(&place.directory);
            match unlinkat(parent, &name, AtFlags::REMOVEDIR) {
                Ok(()) => self.changed = true,
                Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY | Errno::EXIST) if refills < MOST_REFILLS => {
                    refills += 1;
                    here = self.open(parent, &name)?;
                    continue;
                }
                Err(errno) => return Err(os(errno)),
            }
            self.way.pop();
            self.path.pop();
            match above {
                None => return Ok(()),
                // Opened to be listed again, from its start: the names seen before are gone.
                Some(above) => here = openat(&above, ".", flags(), Mode::empty()).map_err(os)?,
            }
        }
    }

    /// Removes everything but directories, and returns the first directory met, if there is one.
    fn clear(&mut self, here: &OwnedFd) -> Result<Option<OsString>, FsError> {
        for entry in Dir::read_from(here).map_err(os)? {
            let entry = entry.map_err(os)?;
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            if name == "." || name == ".." {
                continue;
            }
            if let Some(rules) = self.rules {
                rules.permit_name(&self.path.join(&name))?;
            }
            if kind_of(here, &name, entry.file_type())? == FileType::Directory {
                return Ok(Some(name));
            }
            match unlinkat(here, &name, AtFlags::empty()) {
                Ok(()) => self.changed = true,
                // Gone already, or a directory by now, which the next look will find.
                Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(errno) => return Err(os(errno)),
            }
        }
        Ok(None)
    }

    /// Opens a directory that is about to be emptied, and remembers the one that it lies in.
    fn enter(&mut self, parent: &OwnedFd, name: &OsStr) -> Result<OwnedFd, FsError> {
        let entered = self.open(parent, name)?;
        self.way.push(identity(parent)?);
        Ok(entered)
    }

    /// Opens the current directory, which may be a mount point.
    fn open(&self, parent: &OwnedFd, name: &OsStr) -> Result<OwnedFd, FsError> {
        let directory = openat(parent, name, flags(), Mode::empty()).map_err(os)?;
        self.view.check_directory(&self.path, &directory)?;
        Ok(directory)
    }

    /// The directory above the current one, if it is the one that was left.
    fn leave(&self, here: &OwnedFd) -> Result<OwnedFd, FsError> {
        let above = openat(here, "..", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(os)?;
        if self.way.last() == Some(&identity(&above)?) { Ok(above) } else { Err(os(Errno::STALE)) }
    }
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, confined_with, refusal};
    use super::*;
    use portcullis_protocol::helper::FsOperation;
    use portcullis_sandbox::policy::DenyGlob;
    use rustix::fs::mkdirat;

    fn run(view: &View, path: AbsolutePath, recursive: bool, force: bool, follow: bool) -> Result<FsDone, FsError> {
        carry_out(view, FsOperation::Remove { path, recursive, force, follow }, b"", Vec::new()).outcome
    }

    fn tree_of(view: &View, path: AbsolutePath) -> Result<FsDone, FsError> {
        run(view, path, true, true, true)
    }

    #[test]
    fn files_trees_and_links_but_never_their_targets() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            for name in ["d/e/x", "d/e/f/g/h", "f", "keep/x"] {
                tree.put(name, b"");
            }
            tree.link("ln", "keep");
            tree.link("d/e/inner", tree.at("keep"));
            tree.fifo("d/ff");
            for name in ["d", "f", "nope", "ln"] {
                assert_eq!(tree_of(&view, tree.path(name)), Ok(FsDone::Changed), "{name}");
            }
            assert_eq!((tree.names(""), tree.names("keep")), (vec!["keep".to_owned()], vec!["x".to_owned()]));
        }
    }

    #[test]
    fn flags_of_the_request() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            tree.put("d/x", b"");
            tree.mkdir("e/empty");
            tree.put("f", b"");
            tree.link("ln", "d");
            for force in [true, false] {
                assert_eq!(run(&view, tree.path("d"), false, force, true), Err(os(Errno::NOTEMPTY)));
            }
            assert_eq!(run(&view, tree.path("nope"), true, false, true), Err(os(Errno::NOENT)));
            assert_eq!(run(&view, tree.path("nope"), false, true, true), Ok(FsDone::Changed));
            assert_eq!(run(&view, tree.path("e/empty"), false, true, true), Ok(FsDone::Changed));
            assert_eq!(run(&view, tree.path("f"), false, true, true), Ok(FsDone::Changed));
            let unsupported = FsError::RecursiveNoFollow;
            assert_eq!(run(&view, tree.path("d"), true, true, false), Err(unsupported));
            assert_eq!(run(&view, tree.path("e"), false, true, false), Ok(FsDone::Changed));
            assert_eq!(run(&view, tree.path("ln"), false, true, false), Err(FsError::Link));
            assert_eq!(run(&view, tree.path("ln/x"), false, true, false), Err(os(Errno::NOTDIR)));
            assert_eq!(tree.names(""), ["d", "ln"]);
        }
    }

    #[test]
    fn the_root_of_the_file_system_is_never_tried() {
        let root = AbsolutePath::new("/").unwrap();
        assert_eq!(tree_of(&View::unconfined(), root.clone()), Err(os(Errno::BUSY)));
        let read_only = confined(&[(Path::new("/"), "read")]);
        assert_eq!(refusal(tree_of(&read_only, root)), 30);
    }

    #[test]
    fn a_tree_deeper_than_any_path_or_descriptor_limit() {
        let tree = Tree::new();
        let mut here = rustix::fs::open(tree.root(), flags(), Mode::empty()).unwrap();
        for name in std::iter::once("deep").chain(std::iter::repeat_n("d", 5000)) {
            mkdirat(&here, name, Mode::from_raw_mode(0o700)).unwrap();
            here = openat(&here, name, flags(), Mode::empty()).unwrap();
        }
        assert_eq!(tree_of(&tree.writable(), tree.path("deep")), Ok(FsDone::Changed));
        assert!(tree.names("").is_empty());
    }

    #[test]
    fn nothing_goes_if_something_below_may_not() {
        let tree = Tree::new();
        for name in ["ws/d/a", "ws/d/lib/x", "ws/e/b.env", "ws/e/c", "ws/.git/config", "ro/f"] {
            tree.put(name, b"");
        }
        let (ws, lib) = (tree.at("ws"), tree.at("ws/d/lib"));
        let glob = DenyGlob { base: tree.path("ws"), pattern: "**/*.env".to_owned() };
        let view = confined_with(&[(tree.root(), "read"), (&ws, "write"), (&lib, "read")], &[glob]);
        for name in ["ws/d", "ws/e", "ws/.git", "ws/.git/config", "ws", "ro/f", "ro"] {
            assert_eq!(refusal(tree_of(&view, tree.path(name))), 30, "{name}");
        }
        for name in ["ws/d/a", "ws/d/lib/x", "ws/e/b.env", "ws/e/c", "ws/.git/config", "ro/f"] {
            assert!(tree.at(name).exists(), "{name}");
        }
        assert_eq!(refusal(run(&view, tree.path("ws/e/b.env"), false, true, true)), 13);
        // The control: the same tree goes without a policy.
        assert_eq!(tree_of(&View::unconfined(), tree.path("ws/d")), Ok(FsDone::Changed));
    }

    #[test]
    fn nothing_goes_that_a_git_file_made_later_points_into() {
        let tree = Tree::new();
        tree.put("ws/sub/a", b"a");
        tree.put("ws/sub/real/config", b"c");
        let view = confined(&[(&tree.at("ws"), "write")]);
        tree.put("ws/.git", b"gitdir: sub/real\n");
        for name in ["ws/sub", "ws/sub/real", "ws/sub/real/config"] {
            assert_eq!(refusal(tree_of(&view, tree.path(name))), 30, "{name}");
        }
        assert_eq!((tree.names("ws/sub"), tree.get("ws/sub/real/config")), (vec!["a".into(), "real".into()], b"c".into()));
        // The control: once it points elsewhere, the tree goes.
        tree.put("ws/.git", b"gitdir: elsewhere\n");
        assert_eq!(tree_of(&view, tree.path("ws/sub")), Ok(FsDone::Changed));
    }

    #[test]
    fn a_directory_that_moves_meanwhile_does_not_mislead_the_way_up() {
        let tree = Tree::new();
        tree.put("d/a", b"");
        tree.mkdir("d/z");
        // Something that even root cannot unlink is hard to come by; the walk up is what fails here.
        let place = View::unconfined().place(&tree.at("d"), Follow::Parents).unwrap();
        let view = View::unconfined();
        let mut removal = Removal { view: &view, rules: None, way: Vec::new(), path: tree.at("d"), changed: false };
        let here = removal.enter(&place.directory, &place.name).unwrap();
        std::fs::rename(tree.at("d"), tree.at("moved")).unwrap();
        tree.mkdir("elsewhere");
        std::fs::rename(tree.at("moved"), tree.at("elsewhere/moved")).unwrap();
        assert_eq!(removal.leave(&here).err(), Some(os(Errno::STALE)));
    }
}

//! Making and listing directories.

use super::refusal::of_change;
use super::rules::Want;
use super::trace::{Ending, Last, MOST_TRIES, open_exact};
use super::view::{Follow, Opened, View};
use super::{is, os};
use portcullis_protocol::helper::{DirectoryEntry, FsDone, FsError};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, mkdirat, openat, statat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Entries that one answer may list.
const MOST_ENTRIES: usize = 50_000;

/// Names of one directory that a walk, a copy or a scan takes into memory at once.
pub(super) const MOST_NAMES: usize = 1_000_000;

/// How directories are opened to be listed.
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NONBLOCK);

/// Makes a directory, and its parents if `recursive`.
pub(super) fn create(view: &View, path: &AbsolutePath, recursive: bool, follow: bool) -> Result<FsDone, FsError> {
    if recursive {
        make_all(view, path.as_path(), follow).map(|_made| FsDone::Changed)
    } else {
        let place = view.place(path.as_path(), if follow { Follow::Parents } else { Follow::None }).map_err(|error| {
            // The root directory exists.
            if is(&error, Errno::BUSY) { os(Errno::EXIST) } else { error }
        })?;
        mkdirat(&place.directory, &place.name, Mode::from_raw_mode(0o777)).map_err(os)?;
        Ok(FsDone::Changed)
    }
}

/// Makes a directory and what is missing above it; says whether the directory was not there before.
pub(super) fn make_all(view: &View, path: &Path, follow: bool) -> Result<bool, FsError> {
    let found = view.stat(path, Follow::all_or_none(follow));
    match found {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => return Ok(false),
        Ok(_in_the_way) => return Err(os(Errno::EXIST)),
        Err(error) if is(&error, Errno::NOENT) || matches!(error, FsError::Denied(..)) => {}
        // A link as the last component, where none may be.
        Err(error) if is(&error, Errno::LOOP) && !follow => return Err(os(Errno::EXIST)),
        Err(error) => return Err(error),
    }
    for _ in 0..MOST_TRIES {
        match make_missing(view, path, follow) {
            Err(error) if is(&error, Errno::LOOP) => {}
            other => return other.map(|()| true),
        }
    }
    Err(os(Errno::LOOP))
}

fn make_missing(view: &View, path: &Path, follow: bool) -> Result<(), FsError> {
    let trace = view.trace(path, Last::Follow).map_err(of_change)?;
    if !follow && trace.real != path {
        return Err(os(Errno::NOTDIR));
    }
    // Everything that would be made is judged before anything is.
    let mut present = trace.real.as_path();
    let mut missing: Vec<&OsStr> = Vec::new();
    loop {
        if let Some(rules) = view.rules() {
            rules.permit_name(present)?;
            rules.check_root(present)?;
        }
        let (Some(parent), Some(name)) = (present.parent(), present.file_name()) else {
            break;
        };
        missing.push(name);
        present = parent;
        match view.stat(present, Follow::None) {
            Err(error) if is(&error, Errno::NOENT) => {}
            Err(error) => return Err(error),
            Ok(_stat) => break,
        }
    }
    match trace.ending {
        Ending::NotDirectory => return Err(os(Errno::NOTDIR)),
        // A dangling link is a name that is taken.
        _missing if trace.dangling => return Err(os(Errno::EXIST)),
        _missing => {}
    }
    let mut here = open_exact(present, OFlags::PATH | OFlags::DIRECTORY).map_err(os)?;
    let mut path = present.to_owned();
    for name in missing.into_iter().rev() {
        view.check_directory(&path, &here)?;
        path.push(name);
        match mkdirat(&here, name, Mode::from_raw_mode(0o777)) {
            // Made by somebody else meanwhile, or by a former try.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(os(errno)),
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        here = match openat(&here, name, flags, Mode::empty()) {
            // What stands there is no directory: a link, to be looked at anew, or a file in the way.
            Err(Errno::NOTDIR) => return Err(os(Errno::LOOP)),
            other => other.map_err(os)?,
        };
    }
    Ok(())
}

/// The names in a directory, in its order; the flags follow links, and links that lead nowhere are left out.
pub(super) fn read(view: &View, path: &AbsolutePath) -> Result<FsDone, FsError> {
    let listing = Listing::of(view, path.as_path(), Follow::All, MOST_ENTRIES)?;
    let entries = listing.names.iter().filter_map(|(name, kind)| {
        let kind = match kind {
            FileType::Symlink => listing.target_kind(view, name)?,
            kind => *kind,
        };
        Some(DirectoryEntry {
            name: Bytes(name.as_bytes().to_vec()),
            is_directory: kind == FileType::Directory,
            is_file: kind == FileType::RegularFile,
        })
    });
    Ok(FsDone::Directory(entries.collect()))
}

/// What may be seen in a directory.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) directory: OwnedFd,
    /// Under a policy without links; otherwise the path as it was named.
    pub(super) path: PathBuf,
    /// Names and their own types, never unknown.
    pub(super) names: Vec<(OsString, FileType)>,
    /// A name that is there and that the policy hides, if there is one.
    pub(super) hidden: Option<OsString>,
}

impl Listing {
    /// Reads a directory. More than `most` names are an error.
    pub(super) fn of(view: &View, path: &Path, follow: Follow, most: usize) -> Result<Self, FsError> {
        let (directory, path) = match view.rules() {
            None => {
                let Opened { descriptor, path } = view.open(path, follow, Want::List, FLAGS)?;
                (descriptor, path.into_owned())
            }
            Some(rules) => {
                let opened = view.open(path, follow, Want::List, OFlags::PATH | OFlags::DIRECTORY)?;
                let (directory, path) = (opened.descriptor, opened.path.into_owned());
                if let Some(names) = rules.known_names(&path) {
                    // A directory above a grant, which itself no entry covers: its names are those of the policy.
                    let seen = names.filter(|name| rules.is_visible(&path.join(name)));
                    let names = seen.filter_map(|name| Some((name.to_owned(), own_kind(&directory, name)?))).collect();
                    return Ok(Self { directory, path, names, hidden: None });
                }
                (openat(&directory, ".", FLAGS | OFlags::CLOEXEC, Mode::empty()).map_err(os)?, path)
            }
        };
        let (mut names, mut hidden) = (Vec::new(), None);
        for entry in Dir::read_from(&directory).map_err(os)? {
            let entry = entry.map_err(os)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let name = OsString::from_vec(name.to_vec());
            if view.rules().is_some_and(|rules| !rules.is_visible(&path.join(&name))) {
                hidden = Some(name);
                continue;
            }
            if names.len() >= most {
                return Err(os(Errno::OVERFLOW));
            }
            match entry.file_type() {
                // Not every file system tells; gone again is as good as never seen.
                FileType::Unknown => names.extend(own_kind(&directory, &name).map(|kind| (name, kind))),
                kind => names.push((name, kind)),
            }
        }
        Ok(Self { directory, path, names, hidden })
    }

    /// The type of what a link in this directory leads to, if it leads to something that may be seen.
    pub(super) fn target_kind(&self, view: &View, name: &OsStr) -> Option<FileType> {
        let stat = if view.rules().is_some() {
            view.stat(&self.path.join(name), Follow::All).ok()?
        } else {
            statat(&self.directory, name, AtFlags::empty()).ok()?
        };
        Some(FileType::from_raw_mode(stat.st_mode))
    }
}

fn own_kind(directory: &OwnedFd, name: &OsStr) -> Option<FileType> {
    let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(FileType::from_raw_mode(stat.st_mode))
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, confined_with, refusal};
    use super::*;
    use portcullis_protocol::helper::FsOperation;
    use portcullis_sandbox::policy::DenyGlob;

    fn make(view: &View, path: AbsolutePath, recursive: bool, follow: bool) -> Result<FsDone, FsError> {
        carry_out(view, FsOperation::CreateDirectory { path, recursive, follow }, b"", Vec::new()).outcome
    }

    fn list(view: &View, path: AbsolutePath) -> Result<Vec<(String, bool, bool)>, FsError> {
        let answer = carry_out(view, FsOperation::ReadDirectory { path }, b"", Vec::new());
        answer.outcome.map(|done| {
            let FsDone::Directory(entries) = done else { panic!("{done:?}") };
            let name = |entry: &DirectoryEntry| String::from_utf8_lossy(&entry.name.0).into_owned();
            let mut list: Vec<_> = entries.iter().map(|entry| (name(entry), entry.is_directory, entry.is_file)).collect();
            list.sort();
            list
        })
    }

    #[test]
    fn directories_are_made() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            for (path, recursive, follow) in
                [("a/b/c", true, true), ("a/b", true, true), ("n", false, false), ("x/y", true, false)]
            {
                assert_eq!(make(&view, tree.path(path), recursive, follow), Ok(FsDone::Changed), "{path}");
                assert!(tree.at(path).is_dir());
            }
            tree.put("f", b"");
            tree.link("lnd", "a");
            tree.link("dang", "nope");
            assert_eq!(make(&view, tree.path("a"), false, true), Err(os(Errno::EXIST)));
            assert_eq!(make(&view, tree.path("f"), true, true), Err(os(Errno::EXIST)));
            assert_eq!(make(&view, tree.path("no/y"), false, true), Err(os(Errno::NOENT)));
            assert_eq!(make(&view, tree.path("lnd/z"), true, false), Err(os(Errno::NOTDIR)));
            assert_eq!(make(&view, tree.path("lnd/z"), true, true), Ok(FsDone::Changed));
            assert_eq!(make(&view, tree.path("dang"), true, true), Err(os(Errno::EXIST)));
            assert_eq!(make(&view, tree.path("dang"), false, true), Err(os(Errno::EXIST)));
            assert_eq!(make(&view, tree.path("dang/z"), true, true), Err(os(Errno::EXIST)));
            assert_eq!(make(&view, tree.path("f/z"), true, true), Err(os(Errno::NOTDIR)));
            assert!(tree.at("a/z").is_dir() && !tree.at("nope").exists());
        }
    }

    #[test]
    fn directories_are_made_only_where_writing_is_granted() {
        let tree = Tree::new();
        tree.mkdir("ws/lib");
        tree.mkdir("ro");
        tree.link("ws/out", "../ro");
        let (ws, lib) = (tree.at("ws"), tree.at("ws/lib"));
        let view = confined(&[(tree.root(), "read"), (&ws, "write"), (&lib, "read")]);
        for path in ["ro/x", "ro/x/y", "ws/.git", "ws/.codex/a/b", "ws/lib/x", "ws/out/x", "ws/out/x/y"] {
            for recursive in [true, false] {
                assert_eq!(refusal(make(&view, tree.path(path), recursive, true)), 30, "{path}");
            }
        }
        assert!(tree.names("ro").is_empty() && tree.names("ws") == ["lib", "out"]);
        // What is there already needs no writing.
        assert_eq!(make(&view, tree.path("ro"), true, true), Ok(FsDone::Changed));
        assert_eq!(make(&view, tree.path("ws/x/y"), true, true), Ok(FsDone::Changed));
    }

    #[test]
    fn protected_names_of_a_missing_root_in_another_cannot_be_made() {
        let tree = Tree::new();
        tree.mkdir("par");
        let view = confined(&[(tree.root(), "read"), (&tree.at("par"), "write"), (&tree.at("par/ws"), "write")]);
        for path in ["par/ws/.git", "par/ws/.git/hooks", "par/ws/.codex/x"] {
            assert_eq!(refusal(make(&view, tree.path(path), true, true)), 30, "{path}");
        }
        assert!(tree.names("par").is_empty());
        // The control: the root itself, and what else lies in it.
        assert_eq!(make(&view, tree.path("par/ws/sub"), true, true), Ok(FsDone::Changed));
    }

    #[test]
    fn flags_follow_links_and_dangling_ones_are_left_out() {
        let tree = Tree::new();
        tree.put("d/f", b"");
        tree.put("d/.hidden", b"");
        tree.mkdir("d/sub");
        tree.fifo("d/ff");
        tree.link("d/ln", "f");
        tree.link("d/lnd", "sub");
        tree.link("d/dang", "nope");
        tree.link("d/loop", "loop");
        tree.link("to_d", "d");
        let expect = [
            (".hidden", false, true),
            ("f", false, true),
            ("ff", false, false),
            ("ln", false, true),
            ("lnd", true, false),
            ("sub", true, false),
        ];
        for view in [View::unconfined(), tree.writable()] {
            for name in ["d", "to_d"] {
                let got = list(&view, tree.path(name)).unwrap();
                assert_eq!(got.iter().map(|(name, d, f)| (name.as_str(), *d, *f)).collect::<Vec<_>>(), expect);
            }
            assert_eq!(list(&view, tree.path("d/f")), Err(os(Errno::NOTDIR)));
            assert_eq!(list(&view, tree.path("no")), Err(os(Errno::NOENT)));
        }
    }

    #[test]
    fn only_what_may_be_seen_is_listed() {
        let (tree, other) = (Tree::new(), Tree::new());
        for name in ["a/in", "a/x.env", "a/secret/s", "b/out"] {
            tree.put(name, b"");
        }
        other.put("f", b"");
        tree.link("a/to_b", "../b/out");
        tree.link("a/to_other", other.at("f"));
        let (a, secret) = (tree.at("a"), tree.at("a/secret"));
        let glob = DenyGlob { base: tree.path(""), pattern: "**/*.env".to_owned() };
        let view = confined_with(&[(&a, "read"), (&secret, "deny")], &[glob]);
        assert_eq!(list(&view, tree.path("a")).unwrap(), [("in".to_owned(), false, true)]);
        // Above a grant, only the way to it.
        assert_eq!(list(&view, tree.path("")).unwrap(), [("a".to_owned(), true, false)]);
        assert_eq!(refusal(list(&view, tree.path("b"))), 2);
        assert_eq!(refusal(list(&view, tree.path("a/secret"))), 13);
    }

    #[test]
    fn too_many_names_are_an_error() {
        let tree = Tree::new();
        for at in 0..=MOST_ENTRIES {
            rustix::fs::mknodat(rustix::fs::CWD, tree.at(at.to_string()), FileType::RegularFile, Mode::from_raw_mode(0o600), 0)
                .unwrap();
        }
        assert_eq!(list(&View::unconfined(), tree.path("")), Err(os(Errno::OVERFLOW)));
        std::fs::remove_file(tree.at("0")).unwrap();
        assert_eq!(list(&View::unconfined(), tree.path("")).unwrap().len(), MOST_ENTRIES);
    }
}

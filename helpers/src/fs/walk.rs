//! Listing a tree, breadth first.

use super::directory::{Listing, MOST_NAMES};
use super::view::{Follow, View};
use portcullis_protocol::helper::{FsDone, FsError, WalkBounds, WalkEntry};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::FileType;
use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Bound of an answer as it will stand on the wire, in bytes.
const MOST_BYTES: usize = 4 << 20;

/// What an entry costs on the wire besides its path.
const ENTRY_BYTES: usize = 44;

/// Lists the tree below a directory. A root that is no directory has nothing below it.
pub(super) fn walk(view: &View, root: &AbsolutePath, bounds: WalkBounds) -> Result<FsDone, FsError> {
    let stat = view.stat(root.as_path(), Follow::Parents)?;
    let mut walk = Walk { view, bounds, todo: VecDeque::new(), visited: HashSet::new(), found: Found::default(), read: 0 };
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        walk.visited.insert((stat.st_dev, stat.st_ino));
        walk.todo.push_back(Pending { shown: root.as_path().to_owned(), path: root.as_path().to_owned(), depth: 0 });
    }
    while let Some(next) = walk.todo.pop_front() {
        if walk.read >= bounds.directories {
            walk.found.truncated = true;
            break;
        }
        walk.read += 1;
        if !walk.directory(&next) {
            walk.found.truncated = true;
            break;
        }
    }
    let Found { entries, errors, truncated, .. } = walk.found;
    Ok(FsDone::Walk { entries, errors, truncated })
}

struct Walk<'a> {
    view: &'a View,
    bounds: WalkBounds,
    todo: VecDeque<Pending>,
    /// Directories that are read or will be, by device and inode; kept only if links are followed.
    visited: HashSet<(u64, u64)>,
    found: Found,
    read: u32,
}

/// A directory to be read.
struct Pending {
    /// As the client will see it: below the root as it named that.
    shown: PathBuf,
    /// As it is opened.
    path: PathBuf,
    depth: u32,
}

#[derive(Default)]
struct Found {
    entries: Vec<WalkEntry>,
    errors: Vec<(AbsolutePath, String)>,
    truncated: bool,
    bytes: usize,
}

impl Walk<'_> {
    /// Lists one directory; says whether everything fitted.
    fn directory(&mut self, at: &Pending) -> bool {
        // Found as a directory and not a link, unless links are followed; if it became one, that is an error of its own.
        let follow = if self.bounds.follow_directory_links { Follow::All } else { Follow::Parents };
        let mut listing = match Listing::of(self.view, &at.path, follow, MOST_NAMES) {
            Ok(listing) => listing,
            Err(error) => return self.error(at, &error),
        };
        listing.names.sort_unstable_by(|(left, _), (right, _)| left.as_bytes().cmp(right.as_bytes()));
        for (name, kind) in &listing.names {
            let is_directory = match kind {
                FileType::Directory => true,
                FileType::RegularFile => false,
                FileType::Symlink if self.bounds.follow_directory_links => {
                    if listing.target_kind(self.view, name) != Some(FileType::Directory) {
                        continue;
                    }
                    true
                }
                _neither => continue,
            };
            let shown = at.shown.join(name);
            let Ok(path) = AbsolutePath::new(&shown) else {
                continue;
            };
            if !self.entry(path, is_directory) {
                return false;
            }
            if is_directory && self.enters(name, at.depth) && self.is_new(&listing, name) {
                self.todo.push_back(Pending { shown, path: listing.path.join(name), depth: at.depth + 1 });
            }
        }
        true
    }

    fn entry(&mut self, path: AbsolutePath, is_directory: bool) -> bool {
        self.found.bytes += wire_length(&path) + ENTRY_BYTES;
        let fits = self.found.bytes <= MOST_BYTES
            && u32::try_from(self.found.entries.len()).is_ok_and(|length| length < self.bounds.entries);
        if fits {
            self.found.entries.push(WalkEntry { path, is_directory });
        }
        fits
    }

    fn error(&mut self, at: &Pending, error: &FsError) -> bool {
        let Ok(path) = AbsolutePath::new(&at.shown) else {
            return true;
        };
        let text = error.to_string();
        self.found.bytes += wire_length(&path) + text.len() + ENTRY_BYTES;
        let fits = self.found.bytes <= MOST_BYTES;
        if fits {
            self.found.errors.push((path, text));
        }
        fits
    }

    fn enters(&self, name: &OsStr, depth: u32) -> bool {
        depth < self.bounds.depth && !(self.bounds.prune_hidden && name.as_bytes().first() == Some(&b'.'))
    }

    /// Whether a directory was not met by another path before.
    fn is_new(&mut self, listing: &Listing, name: &OsStr) -> bool {
        if !self.bounds.follow_directory_links {
            return true;
        }
        // What cannot be looked at cannot be read either; that it is tried yields the error to report.
        self.view.stat(&listing.path.join(name), Follow::All).map_or(true, |stat| self.visited.insert((stat.st_dev, stat.st_ino)))
    }
}

/// Bytes of a path as a URI.
fn wire_length(path: &AbsolutePath) -> usize {
    let bytes = path.as_path().as_os_str().as_bytes();
    // Escapes are three bytes; a plain ASCII letter, the common case, is one.
    bytes.iter().map(|byte| if byte.is_ascii_graphic() { 1 } else { 3 }).sum::<usize>() + "file://".len()
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined};
    use super::*;
    use portcullis_protocol::helper::FsOperation;
    use std::path::Path;

    const BOUNDS: WalkBounds =
        WalkBounds { depth: 5, directories: 100, entries: 100, follow_directory_links: false, prune_hidden: false };

    struct Outcome {
        entries: Vec<String>,
        errors: usize,
        truncated: bool,
    }

    fn listed(view: &View, root: &Path, bounds: WalkBounds) -> Result<Outcome, FsError> {
        let path = AbsolutePath::new(root).unwrap();
        let answer = carry_out(view, FsOperation::Walk { path, options: bounds }, b"", Vec::new());
        answer.outcome.map(|done| {
            let FsDone::Walk { entries, errors, truncated } = done else { panic!("{done:?}") };
            let show = |entry: &WalkEntry| {
                let name = entry.path.as_path().strip_prefix(root).unwrap().display().to_string();
                if entry.is_directory { name + "/" } else { name }
            };
            Outcome { entries: entries.iter().map(show).collect(), errors: errors.len(), truncated }
        })
    }

    fn example() -> Tree {
        let tree = Tree::new();
        for file in ["w/a", "w/d/x", "w/d/sub/y", "w/.hid/h"] {
            tree.put(file, b"");
        }
        tree.link("w/ln", "a");
        tree.link("w/lnd", "d");
        tree.link("w/dang", "nope");
        tree.fifo("w/ff");
        tree
    }

    #[test]
    fn breadth_first_and_sorted() {
        let tree = example();
        for view in [View::unconfined(), tree.writable()] {
            let outcome = listed(&view, &tree.at("w"), BOUNDS).unwrap();
            assert_eq!(outcome.entries, [".hid/", "a", "d/", ".hid/h", "d/sub/", "d/x", "d/sub/y"]);
            assert_eq!((outcome.errors, outcome.truncated), (0, false));
        }
    }

    #[test]
    fn bounds_cut_and_say_so() {
        let tree = example();
        let view = View::unconfined();
        let run = |bounds| listed(&view, &tree.at("w"), bounds).map(|found| (found.entries.len(), found.truncated)).unwrap();
        assert_eq!(run(WalkBounds { depth: 0, ..BOUNDS }), (3, false));
        assert_eq!(run(WalkBounds { depth: 1, ..BOUNDS }), (6, false));
        assert_eq!(run(WalkBounds { entries: 2, ..BOUNDS }), (2, true));
        assert_eq!(run(WalkBounds { entries: 7, ..BOUNDS }), (7, false));
        assert_eq!(run(WalkBounds { directories: 1, ..BOUNDS }), (3, true));
        assert_eq!(run(WalkBounds { directories: 4, ..BOUNDS }), (7, false));
    }

    #[test]
    fn links_to_directories_are_entered_once_if_asked() {
        let tree = example();
        tree.put("elsewhere/z", b"");
        tree.link("w/e", "../elsewhere");
        tree.link("w/elsewhere_again", "../elsewhere");
        let outcome = listed(&View::unconfined(), &tree.at("w"), WalkBounds { follow_directory_links: true, ..BOUNDS }).unwrap();
        assert!(outcome.entries.contains(&"lnd/".to_owned()) && !outcome.entries.contains(&"lnd/x".to_owned()));
        assert!(outcome.entries.contains(&"e/z".to_owned()));
        assert!(outcome.entries.contains(&"elsewhere_again/".to_owned()));
        assert!(!outcome.entries.contains(&"elsewhere_again/z".to_owned()));
    }

    #[test]
    fn hidden_directories_are_listed_but_an_alias_may_enter_them() {
        let tree = example();
        tree.link("w/z_alias", ".hid");
        let bounds = WalkBounds { prune_hidden: true, follow_directory_links: true, ..BOUNDS };
        let outcome = listed(&View::unconfined(), &tree.at("w"), bounds).unwrap();
        assert!(outcome.entries.contains(&".hid/".to_owned()) && !outcome.entries.contains(&".hid/h".to_owned()));
        assert!(outcome.entries.contains(&"z_alias/h".to_owned()));
    }

    #[test]
    fn roots_that_are_no_directory() {
        let tree = example();
        for name in ["w/a", "w/lnd", "w/ln"] {
            assert!(listed(&View::unconfined(), &tree.at(name), BOUNDS).unwrap().entries.is_empty(), "{name}");
        }
        assert_eq!(listed(&View::unconfined(), &tree.at("nope"), BOUNDS).err(), Some(FsError::Os(2)));
    }

    #[test]
    fn only_what_the_policy_shows() {
        let tree = example();
        tree.put("w/secret/s", b"");
        let all = confined(&[(tree.root(), "read"), (&tree.at("w/secret"), "deny")]);
        assert!(!listed(&all, &tree.at("w"), BOUNDS).unwrap().entries.iter().any(|name| name.starts_with("secret")));
        let narrow = confined(&[(&tree.at("w/d/sub"), "read")]);
        assert_eq!(listed(&narrow, &tree.at("w"), BOUNDS).unwrap().entries, ["d/", "d/sub/", "d/sub/y"]);
    }

    #[test]
    fn a_large_answer_is_cut() {
        let tree = Tree::new();
        let name = "n".repeat(200);
        for at in 0..20_000 {
            tree.put(&format!("{name}{at}"), b"");
        }
        let outcome = listed(&View::unconfined(), tree.root(), WalkBounds { entries: 50_000, ..BOUNDS }).unwrap();
        assert!(outcome.truncated && outcome.entries.len() > 10_000 && outcome.entries.len() < 20_000);
    }
}

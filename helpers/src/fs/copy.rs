//! Copying files, links and trees.

use super::directory::{Listing, MOST_NAMES, make_all};
use super::os;
use super::read::{BLOCK, open_regular, read_some, size_of};
use super::refusal::{of_change, refused};
use super::rules::Want;
use super::trace::Last;
use super::view::{Follow, View};
use super::write::{Target, reserve};
use portcullis_protocol::denial::Wanted;
use portcullis_protocol::helper::{FsDone, FsError};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{FileType, Mode, OFlags, RawMode, Stat, copy_file_range, fchmod, fstat, ftruncate, readlinkat, symlinkat};
use rustix::io::{Errno, write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Bytes that the kernel copies in one call; between calls a worker can be ended.
const CHUNK: usize = 64 << 20;

/// Directories of one copy that are remembered, to be copied or to get their modes.
const MOST_DIRECTORIES: usize = 1_000_000;

/// Copies a file, a link (as a link), or with `recursive` a tree.
pub(super) fn copy(view: &View, source: &AbsolutePath, destination: &AbsolutePath, recursive: bool) -> Result<FsDone, FsError> {
    let stat = view.stat(source.as_path(), Follow::Parents)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory if !recursive => Err(unsupported("fs/copy requires recursive: true when sourcePath is a directory")),
        FileType::Directory => tree(view, source, destination, &stat),
        _other if one(view, source, destination, &stat)? => Ok(FsDone::Changed),
        _special => Err(unsupported("fs/copy only supports regular files, directories, and symlinks")),
    }
}

fn unsupported(text: &str) -> FsError {
    FsError::Unsupported(text.to_owned())
}

/// Copies a file or a link; says whether it was one.
fn one(view: &View, source: &AbsolutePath, destination: &AbsolutePath, stat: &Stat) -> Result<bool, FsError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => file(view, source, destination)?,
        FileType::Symlink => link(view, source, destination)?,
        _special => return Ok(false),
    }
    Ok(true)
}

fn file(view: &View, source: &AbsolutePath, destination: &AbsolutePath) -> Result<(), FsError> {
    let (from, stat) = open_regular(view, source, Follow::Parents)?;
    let target = Target::open(view, destination, Follow::All)?;
    let there = fstat(&target.file).map_err(os)?;
    if (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino) {
        // Onto itself: what the client wants is there already, and must not be lost on the way.
        return Ok(());
    }
    target.finish(|to| {
        reserve(to, size_of(&stat))?;
        let length = content(&from, to)?;
        ftruncate(to, length).map_err(os)?;
        fchmod(to, permissions(stat.st_mode)).map_err(os)
    })?;
    Ok(())
}

/// Copies to the end of the source; returns its length.
fn content(from: &OwnedFd, to: &OwnedFd) -> Result<u64, FsError> {
    let mut length = 0;
    loop {
        match rustix::io::retry_on_intr(|| copy_file_range(from, None, to, None, CHUNK)) {
            // At the start this may also be a file of /proc, which says that it is empty.
            Ok(0) if length > 0 => return Ok(length),
            Ok(0) | Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM | Errno::BADF) => break,
            Ok(copied) => length += copied as u64,
            Err(errno) => return Err(os(errno)),
        }
    }
    // The kernel cannot, or not between these two: by hand, from where both files stand now.
    let mut buffer = vec![0; BLOCK];
    loop {
        let got = read_some(from, &mut buffer)?;
        if got == 0 {
            return Ok(length);
        }
        let mut bytes = &buffer[..got];
        while !bytes.is_empty() {
            let written = rustix::io::retry_on_intr(|| write(to, bytes)).map_err(os)?;
            bytes = &bytes[written..];
        }
        length += got as u64;
    }
}

fn link(view: &View, source: &AbsolutePath, destination: &AbsolutePath) -> Result<(), FsError> {
    let opened = view.open(source.as_path(), Follow::Parents, Want::Stat, OFlags::PATH)?;
    let text = readlinkat(&opened.descriptor, "", Vec::new()).map_err(os)?;
    let place = view.place(destination.as_path(), Follow::Parents)?;
    symlinkat(&text, &place.directory, &place.name).map_err(os)
}

/// Read, write and execute bits. Set-user-id and its kin are not for a copy to carry on.
fn permissions(mode: RawMode) -> Mode {
    Mode::from_raw_mode(mode & 0o777)
}

fn tree(view: &View, source: &AbsolutePath, destination: &AbsolutePath, stat: &Stat) -> Result<FsDone, FsError> {
    refuse_inside(view, source, destination, stat)?;
    let mut copying = Tree { view, todo: vec![(source.clone(), destination.clone())], made: Vec::new(), changed: false };
    while let Some((from, to)) = copying.todo.pop() {
        if let Err(error) = copying.directory(&from, &to) {
            return Err(copying.stopped(error, from));
        }
    }
    // Only now, or a directory without the write bit could not have been filled.
    for (path, mode) in copying.made.iter().rev() {
        let set = view.open(path.as_path(), Follow::All, Want::Write, OFlags::RDONLY | OFlags::DIRECTORY);
        if let Err(error) = set.and_then(|opened| fchmod(&opened.descriptor, permissions(*mode)).map_err(os)) {
            return Err(copying.stopped(error, path.clone()));
        }
    }
    Ok(FsDone::Changed)
}

/// A tree on its way. Depth first, so that what is still to do is bounded by depth and width, not by the whole.
struct Tree<'a> {
    view: &'a View,
    todo: Vec<(AbsolutePath, AbsolutePath)>,
    /// Directories that were not there before, and the modes they shall have.
    made: Vec<(AbsolutePath, RawMode)>,
    changed: bool,
}

impl Tree<'_> {
    fn directory(&mut self, from: &AbsolutePath, to: &AbsolutePath) -> Result<(), FsError> {
        let listing = Listing::of(self.view, from.as_path(), Follow::Parents, MOST_NAMES)?;
        if listing.hidden.is_some() {
            // A copy without it would be incomplete without a word; its name is not told.
            let rule = "something below it that the policy hides".to_owned();
            let error = refused(Errno::ACCESS, from.as_path(), Wanted::Read, rule, None);
            return Err(self.stopped(error, from.clone()));
        }
        let stat = fstat(&listing.directory).map_err(os)?;
        if make_all(self.view, to.as_path(), true)? {
            self.made.push((to.clone(), stat.st_mode));
            self.changed = true;
        }
        if self.made.len().max(self.todo.len()) > MOST_DIRECTORIES {
            return Err(os(Errno::OVERFLOW));
        }
        for (name, kind) in &listing.names {
            let (from, to) = (join(from, name.as_ref())?, join(to, name.as_ref())?);
            if *kind == FileType::Directory {
                self.todo.push((from, to));
                continue;
            }
            let copied = self.view.stat(from.as_path(), Follow::Parents).and_then(|stat| one(self.view, &from, &to, &stat));
            match copied {
                // FIFOs, devices and sockets have no content to copy.
                Ok(copied) => self.changed |= copied,
                Err(error) => return Err(self.stopped(error, from)),
            }
        }
        Ok(())
    }

    fn stopped(&self, error: FsError, path: AbsolutePath) -> FsError {
        match error {
            FsError::Os(errno) | FsError::Denied(errno, _) if self.changed => FsError::Partial { path, errno },
            // A root that the copy itself made, or that was replaced meanwhile. It must not be taken for nothing tried.
            FsError::Stale if self.changed => FsError::Partial { path, errno: Errno::STALE.raw_os_error() },
            other => other,
        }
    }
}

fn join(directory: &AbsolutePath, name: &Path) -> Result<AbsolutePath, FsError> {
    AbsolutePath::new(directory.as_path().join(name)).map_err(|_invalid| os(Errno::INVAL))
}

/// That the destination is not the source or in it, whatever its path is called.
fn refuse_inside(view: &View, source: &AbsolutePath, destination: &AbsolutePath, stat: &Stat) -> Result<(), FsError> {
    let inside = || unsupported("fs/copy cannot copy a directory to itself or one of its descendants");
    let from = view.trace(source.as_path(), Last::Keep)?.real;
    let to = view.trace(destination.as_path(), Last::Follow).map_err(of_change)?.real;
    if to.starts_with(&from) {
        return Err(inside());
    }
    let is_source = |path: &PathBuf| {
        let there = view.stat(path, Follow::All);
        there.is_ok_and(|there| (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino))
    };
    if to.ancestors().map(Path::to_owned).any(|path| is_source(&path)) { Err(inside()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, refusal};
    use super::*;
    use portcullis_protocol::helper::FsOperation;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn run(view: &View, source: AbsolutePath, destination: AbsolutePath, recursive: bool) -> Result<FsDone, FsError> {
        carry_out(view, FsOperation::Copy { source, destination, recursive }, b"", Vec::new()).outcome
    }

    fn chmod(tree: &Tree, name: &str, mode: u32) {
        fs::set_permissions(tree.at(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn mode(tree: &Tree, name: &str) -> u32 {
        fs::metadata(tree.at(name)).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn files_and_links() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            let large = vec![3; 3 << 20];
            tree.put("f", &large);
            tree.put("old", &vec![9; 4 << 20]);
            tree.put("small", b"");
            tree.link("dang", "nope");
            tree.link("lnd", "no/dir");
            chmod(&tree, "f", 0o4755);
            for to in ["g", "old", "f"] {
                assert_eq!(run(&view, tree.path("f"), tree.path(to), false), Ok(FsDone::Changed), "{to}");
                assert_eq!(tree.get(to), large);
            }
            assert_eq!((mode(&tree, "g"), mode(&tree, "f")), (0o755, 0o4755));
            run(&view, tree.path("small"), tree.path("old"), true).unwrap();
            assert_eq!(tree.get("old"), b"");
            for (from, to) in [("dang", "dang2"), ("lnd", "lnd2")] {
                run(&view, tree.path(from), tree.path(to), false).unwrap();
                assert_eq!(fs::read_link(tree.at(to)).unwrap(), fs::read_link(tree.at(from)).unwrap());
            }
        }
    }

    #[test]
    fn a_file_that_says_it_is_empty_is_copied_all_the_same() {
        let tree = Tree::new();
        let source = AbsolutePath::new("/proc/filesystems").unwrap();
        run(&View::unconfined(), source, tree.path("copy"), false).unwrap();
        assert_eq!(tree.get("copy"), fs::read("/proc/filesystems").unwrap());
    }

    #[test]
    fn trees_keep_links_and_modes_and_merge() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            tree.put("s/a/f", b"f");
            tree.put("s/a/b/g", b"g");
            tree.link("s/ln", "a/f");
            tree.fifo("s/ff");
            chmod(&tree, "s/a/f", 0o640);
            chmod(&tree, "s/a/b", 0o555);
            tree.put("t/kept", b"kept");
            tree.put("t/a/f", b"overwritten");
            run(&view, tree.path("s"), tree.path("t"), true).unwrap();
            run(&view, tree.path("s"), tree.path("new/deep/er"), true).unwrap();
            for to in ["t", "new/deep/er"] {
                assert_eq!((tree.get(&format!("{to}/a/f")), tree.get(&format!("{to}/a/b/g"))), (b"f".into(), b"g".into()));
                assert_eq!((mode(&tree, &format!("{to}/a/f")), mode(&tree, &format!("{to}/a/b"))), (0o640, 0o555));
                assert_eq!(fs::read_link(tree.at(format!("{to}/ln"))).unwrap(), Path::new("a/f"));
                assert!(!tree.at(format!("{to}/ff")).exists());
            }
            assert_eq!(tree.get("t/kept"), b"kept");
            for name in ["s/a/b", "t/a/b", "new/deep/er/a/b"] {
                chmod(&tree, name, 0o755);
            }
        }
    }

    #[test]
    fn errors() {
        let tree = Tree::new();
        tree.put("f", b"f");
        tree.put("d/x", b"x");
        tree.fifo("ff");
        tree.link("alias", "d");
        let text = |text: &str| Err(FsError::Unsupported(text.to_owned()));
        let inside = "fs/copy cannot copy a directory to itself or one of its descendants";
        for view in [View::unconfined(), tree.writable()] {
            let run = |from: &str, to: &str, recursive| run(&view, tree.path(from), tree.path(to), recursive);
            for to in ["d/in", "d", "d/no/where", "alias", "alias/in"] {
                assert_eq!(run("d", to, true), text(inside), "{to}");
            }
            assert_eq!(run("d", "z", false), text("fs/copy requires recursive: true when sourcePath is a directory"));
            assert_eq!(run("ff", "z", false), text("fs/copy only supports regular files, directories, and symlinks"));
            assert_eq!(run("nope", "z", false), Err(os(Errno::NOENT)));
            assert_eq!(run("f", "no/z", false), Err(os(Errno::NOENT)));
            assert_eq!(run("f", "d", false), Err(os(Errno::ISDIR)));
            assert_eq!(run("d", "f", true), Err(os(Errno::EXIST)));
            assert_eq!(run("alias", "f", false), Err(os(Errno::EXIST)));
        }
        assert_eq!(tree.names(""), ["alias", "d", "f", "ff"]);
    }

    #[test]
    fn a_tree_that_stops_on_the_way_says_where() {
        let tree = Tree::new();
        tree.put("s/a", b"a");
        tree.link("s/ln", "a");
        tree.put("t/ln", b"in the way");
        let stopped = run(&View::unconfined(), tree.path("s"), tree.path("t"), true);
        let expect = FsError::Partial { path: tree.path("s/ln"), errno: Errno::EXIST.raw_os_error() };
        // Which of the two comes first is the directory's choice.
        assert!(stopped == Err(expect) || stopped == Err(os(Errno::EXIST)), "{stopped:?}");
    }

    #[test]
    fn a_copy_that_makes_a_missing_root_stops_there_and_says_so() {
        let tree = Tree::new();
        tree.put("par/src/sub/f", b"f");
        let view = confined(&[(&tree.at("par"), "write"), (&tree.at("par/ws"), "write")]);
        let stopped = run(&view, tree.path("par/src"), tree.path("par/ws"), true);
        // Not `Stale`, which would say that nothing was tried.
        let expect = FsError::Partial { path: tree.path("par/src/sub"), errno: Errno::STALE.raw_os_error() };
        assert_eq!((stopped, tree.names("par/ws").len()), (Err(expect), 0));
        // The control: a new worker knows the root.
        let view = confined(&[(&tree.at("par"), "write"), (&tree.at("par/ws"), "write")]);
        assert_eq!(run(&view, tree.path("par/src"), tree.path("par/ws"), true), Ok(FsDone::Changed));
        assert_eq!(tree.get("par/ws/sub/f"), b"f");
    }

    #[test]
    fn the_boundary_holds_in_both_directions() {
        let (tree, other) = (Tree::new(), Tree::new());
        tree.put("ws/in", b"in");
        tree.put("ro/f", b"f");
        other.put("out", b"out");
        tree.link("ws/leads_out", other.at("out"));
        tree.link("ws/to_ro", "../ro/f");
        let ws = tree.at("ws");
        let view = confined(&[(tree.root(), "read"), (&ws, "write")]);
        assert_eq!(refusal(run(&view, other.path("out"), tree.path("ws/x"), false)), 2);
        assert_eq!(refusal(run(&view, tree.path("ws/in"), other.path("new"), false)), 2);
        assert_eq!(refusal(run(&view, tree.path("ws/in"), tree.path("ro/new"), false)), 30);
        assert_eq!(refusal(run(&view, tree.path("ws/in"), tree.path("ws/to_ro"), false)), 30);
        assert_eq!(refusal(run(&view, tree.path("ro"), tree.path("ws/.git"), true)), 30);
        assert_eq!(refusal(run(&view, tree.path("ws/leads_out"), tree.path("ro/ln"), false)), 30);
        // What is denied within a tree is not left out in silence.
        tree.put("secretive/deny", b"secret");
        let hiding = confined(&[(tree.root(), "read"), (&ws, "write"), (&tree.at("secretive/deny"), "deny")]);
        let denied = run(&hiding, tree.path("secretive"), tree.path("ws/copy"), true);
        assert_eq!((refusal(denied), tree.at("ws/copy").exists()), (13, false));
        // A link that leads out is copied as what it is, and leads nowhere inside.
        run(&view, tree.path("ws/leads_out"), tree.path("ws/again"), false).unwrap();
        run(&view, tree.path("ro"), tree.path("ws/ro"), true).unwrap();
        assert_eq!((other.names(""), tree.names("ro")), (vec!["out".to_owned()], vec!["f".to_owned()]));
    }
}

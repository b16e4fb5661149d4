//! Where protected names lead outside themselves.
//!
//! `.git` may be a link, or a file that names the repository's directory by `gitdir:`; the other protected names may be links
//! too. What they lead to is protected like themselves: whoever could change it, or replace a link or a directory on the way
//! to it, would change what is protected.

use super::os;
use super::trace::{Last, Step, trace};
use portcullis_protocol::helper::FsError;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::gitfile::{is_a_strangers, line};
use portcullis_sandbox::kernel_files::hidden;
use portcullis_sandbox::policy::PROTECTED_NAMES;
use portcullis_sandbox::survey::LEADING;
use rustix::fs::{AtFlags, CWD, FileType, statat};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What must stay as it is because a protected name leads there. Bounded by the policy: for each writable root four names, each
/// of a path's depth and at most 40 links.
#[derive(Debug, Default)]
pub(super) struct Pointers {
    /// Protected with everything below.
    trees: Vec<Pointed>,
    /// Links and directories on the way: protected themselves, but not what else lies in them.
    way: HashSet<PathBuf>,
}

/// A place that a protected name leads to.
#[derive(Debug)]
struct Pointed {
    place: PathBuf,
    /// The repository that it is a part of, or itself: an entry that names it, or something in it, takes the protection away.
    repository: Option<PathBuf>,
    /// The file that led there.
    pointer: PathBuf,
}

impl Pointers {
    /// Reads them as they are now. Of places that are writable by an entry of their own it takes the protection away.
    ///
    /// # Errors
    /// What cannot be read may point anywhere, so that nothing may be changed.
    pub(super) fn read<'a>(roots: impl Iterator<Item = &'a Path>, tables: &Compiled) -> Result<Self, FsError> {
        let mut pointers = Self::default();
        for root in roots {
            for name in PROTECTED_NAMES {
                let place = root.join(name);
                if tables.verdict(&place) != Verdict::Write {
                    let mut reading = Reading { pointers: &mut pointers, tables, pointer: &place };
                    reading.add(root, name == ".git")?;
                }
            }
        }
        Ok(pointers)
    }

    /// Whether a link-free path leads to a protected place, and must not be moved.
    pub(super) fn lead_through(&self, real: &Path) -> bool {
        self.way.contains(real)
    }

    /// The protected places that cover a link-free path.
    pub(super) fn over<'a>(&'a self, real: &'a Path, tables: &'a Compiled) -> impl Iterator<Item = &'a Path> {
        let covers = move |tree: &&Pointed| {
            let is_named = |repository: &PathBuf| tables.is_named(real, repository, &tree.pointer);
            real.starts_with(&tree.place) && !tree.repository.as_ref().is_some_and(is_named)
        };
        self.trees.iter().filter(covers).map(|tree| tree.place.as_path())
    }

    /// Whether something in a tree is protected.
    pub(super) fn lie_below(&self, tree: &Path) -> bool {
        // The way leads to every tree.
        self.way.iter().any(|place| place.starts_with(tree))
    }
}

/// The reading of one of them.
struct Reading<'a> {
    pointers: &'a mut Pointers,
    tables: &'a Compiled,
    /// The protected name.
    pointer: &'a Path,
}

impl Reading<'_> {
    fn add(&mut self, root: &Path, may_be_file: bool) -> Result<(), FsError> {
        let place = self.pointer;
        let kind = match statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if is_a_strangers(place, &stat) => return Ok(()),
            Ok(stat) => FileType::from_raw_mode(stat.st_mode),
            // In a root out of reach nothing can be changed, and what it points to is not known to anybody here.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => return Ok(()),
            Err(errno) => return Err(os(errno)),
        };
        match kind {
            FileType::Symlink => {
                if let Some(real) = self.follow(place)? {
                    self.pointers.trees.push(Pointed { place: real, repository: None, pointer: place.to_owned() });
                }
            }
            FileType::RegularFile if may_be_file => {
                let line = match line(place) {
                    Err(Errno::NOENT) => return Ok(()),
                    other => other.map_err(os)?,
                };
                if let Some(target) = line.strip_prefix(b"gitdir: ") {
                    self.repository(&root.join(OsStr::from_bytes(target)))?;
                }
            }
            // A repository that shares hooks and settings with another one says so in a file.
            FileType::Directory if may_be_file && line(&place.join("commondir")).is_ok() => self.repository(place)?,
            _in_place => {}
        }
        Ok(())
    }

    /// The directory of a work tree, and the one that it shares with others: hooks and settings lie there.
    fn repository(&mut self, path: &Path) -> Result<(), FsError> {
        let Some(real) = self.follow(path)? else {
            return Ok(());
        };
        let mut whole = real.clone();
        if let Some(shared) = self.follow(&real.join("commondir"))? {
            // Mostly there is none. One that lies outside the policy is not for this worker to read.
            if let Ok(line) = line(&shared)
                && let Some(common) = self.follow(&real.join(OsStr::from_bytes(&line)))?
            {
                self.protect(&common, &common);
                whole = common;
            }
        }
        // These by an entry of their own only.
        for place in LEADING.map(|name| real.join(name)) {
            self.protect(&place, &place);
        }
        let repository = if real.starts_with(&whole) { whole } else { real.clone() };
        self.protect(&real, &repository);
        Ok(())
    }

    fn protect(&mut self, place: &Path, repository: &Path) {
        let [place, repository, pointer] = [place, repository, self.pointer].map(Path::to_owned);
        self.pointers.trees.push(Pointed { place, repository: Some(repository), pointer });
    }

    /// Protects the way to where a path leads; none if it leads nowhere, or to what the policy does not show: what is there must
    /// decide over no call, or its answer would tell of it.
    fn follow(&mut self, path: &Path) -> Result<Option<PathBuf>, FsError> {
        let (way, tables, pointer) = (&mut self.pointers.way, self.tables, self.pointer);
        let shared = pointer.join("commondir");
        // The pointer itself is heeded also where another set of grants denies it.
        let is_shown = |place: &Path| place == pointer || place == shared || tables.is_visible(place) && hidden(place).is_none();
        let mut is_hidden = false;
        let traced = trace(path, Last::Follow, |step| {
            let Step::Name(place) = step else { return Ok(()) };
            if !is_shown(place) {
                is_hidden = true;
                return Err(os(Errno::ACCESS));
            }
            way.insert(place.to_owned());
            Ok(())
        });
        match traced {
            _ if is_hidden => Ok(None),
            Ok(trace) => {
                // Also what is missing: it could be made as a link to anywhere.
                way.extend(trace.real.ancestors().map(Path::to_owned));
                Ok(Some(trace.real))
            }
            // A loop, or more than this worker may look at: as far as it goes, the way is protected.
            Err(FsError::Os(errno))
                if [Errno::LOOP, Errno::ACCESS, Errno::NAMETOOLONG].map(Errno::raw_os_error).contains(&errno) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Tree, confined, refusal};
    use super::super::{View, carry_out};
    use super::*;
    use portcullis_protocol::helper::{FsDone, FsOperation};
    use portcullis_protocol::path::AbsolutePath;

    const REFUSED: i32 = 30;

    fn run(view: &View, operation: FsOperation) -> Result<FsDone, FsError> {
        carry_out(view, operation, b"x", Vec::new()).outcome
    }

    fn write(path: AbsolutePath) -> FsOperation {
        FsOperation::WriteFile { path, follow: true }
    }

    fn copy(source: AbsolutePath, destination: AbsolutePath) -> FsOperation {
        FsOperation::Copy { source, destination, recursive: true }
    }

    fn remove(path: AbsolutePath, recursive: bool) -> FsOperation {
        FsOperation::Remove { path, recursive, force: true, follow: true }
    }

    fn make(path: AbsolutePath, recursive: bool) -> FsOperation {
        FsOperation::CreateDirectory { path, recursive, follow: true }
    }

    /// A workspace whose repository is reached through a link and a directory.
    fn repository() -> Tree {
        let tree = Tree::new();
        tree.put("ws/d/repo/config", b"good");
        tree.put("ws/d/beside", b"");
        tree.put("ws/evil/repo/config", b"evil");
        tree.link("ws/l", "d");
        tree.link("ws/other", "evil");
        tree
    }

    /// That nothing on the way to the repository can be taken out or replaced, and what is beside the way can.
    fn check(tree: &Tree, way: &[&str]) {
        let ws = tree.at("ws");
        let view = confined(&[(tree.root(), "read"), (&ws, "write")]);
        let at = |name: &str| tree.path(format!("ws/{name}"));
        for name in way {
            for recursive in [false, true] {
                assert_eq!(refusal(run(&view, remove(at(name), recursive))), REFUSED, "{name}");
            }
            assert_eq!(refusal(run(&view, copy(at("other"), at(name)))), REFUSED, "{name}");
            assert_eq!(refusal(run(&view, copy(at("evil/repo/config"), at(name)))), REFUSED, "{name}");
            assert_eq!(refusal(run(&view, write(at(name)))), REFUSED, "{name}");
            assert_eq!(refusal(run(&view, make(at(name), false))), REFUSED, "{name}");
        }
        assert_eq!(refusal(run(&view, write(at("l/repo/config")))), REFUSED);
        assert_eq!(refusal(run(&view, make(at("d/repo/hooks"), true))), REFUSED);
        assert_eq!(refusal(run(&view, remove(tree.path("ws"), true))), REFUSED);
        assert_eq!(tree.get("ws/l/repo/config"), b"good");
        assert_eq!(run(&view, write(at("d/new"))), Ok(FsDone::Changed));
        assert_eq!(run(&view, remove(at("d/beside"), false)), Ok(FsDone::Changed));
        assert_eq!(run(&view, remove(at("other"), false)), Ok(FsDone::Changed));
        assert_eq!(run(&view, remove(at("evil"), true)), Ok(FsDone::Changed));
    }

    #[test]
    fn what_a_repository_shares_with_another_stays() {
        let tree = Tree::new();
        tree.put("ws/.git/commondir", b"../shared\n");
        tree.put("ws/shared/config", b"good");
        let ws = tree.at("ws");
        let view = confined(&[(tree.root(), "read"), (&ws, "write")]);
        for name in ["ws/shared/config", "ws/shared/hooks", "ws/.git/commondir"] {
            assert_eq!(refusal(run(&view, write(tree.path(name)))), REFUSED, "{name}");
        }
        // The control: the same name beside it.
        assert_eq!(run(&view, write(tree.path("ws/config"))), Ok(FsDone::Changed));
        assert_eq!(tree.get("ws/shared/config"), b"good");
    }

    #[test]
    fn links_and_directories_on_the_way_of_a_git_file_stay() {
        let tree = repository();
        tree.put("ws/.git", b"gitdir: l/repo\n");
        check(&tree, &["l", "d", "d/repo", "l/repo", ".git"]);
    }

    #[test]
    fn links_and_directories_on_the_way_of_a_protected_link_stay() {
        let tree = repository();
        tree.link("ws/.agents", "./l/repo");
        check(&tree, &["l", "d", "d/repo", "l/repo", ".agents"]);
    }

    #[test]
    fn the_directory_that_repositories_share_is_read_only_too() {
        let tree = repository();
        tree.put("ws/trees/one/commondir", b"../../l/repo\n");
        tree.put("ws/.git", b"gitdir: trees/one\r\n");
        check(&tree, &["trees", "trees/one", "trees/one/commondir", "l", "d", "d/repo"]);
    }

    #[test]
    fn without_a_pointer_the_same_names_are_free() {
        let tree = repository();
        let view = confined(&[(&tree.at("ws"), "write")]);
        assert_eq!(run(&view, remove(tree.path("ws/l"), false)), Ok(FsDone::Changed));
        assert_eq!(run(&view, copy(tree.path("ws/other"), tree.path("ws/l"))), Ok(FsDone::Changed));
        assert_eq!(run(&view, write(tree.path("ws/d/repo/config"))), Ok(FsDone::Changed));
        assert_eq!(run(&view, remove(tree.path("ws/d"), true)), Ok(FsDone::Changed));
    }

    #[test]
    fn what_is_missing_on_the_way_cannot_be_made() {
        let tree = repository();
        tree.put("ws/.git", b"gitdir: no/such/repo");
        tree.link("ws/.aws", "dangling/x");
        let view = confined(&[(&tree.at("ws"), "write")]);
        for name in ["ws/no", "ws/no/such", "ws/no/such/repo", "ws/no/such/repo/hooks", "ws/dangling", "ws/dangling/x"] {
            assert_eq!(refusal(run(&view, make(tree.path(name), true))), REFUSED, "{name}");
            assert_eq!(refusal(run(&view, copy(tree.path("ws/other"), tree.path(name)))), REFUSED, "{name}");
        }
        assert_eq!(run(&view, make(tree.path("ws/not"), true)), Ok(FsDone::Changed));
    }

    #[test]
    fn a_pointer_that_cannot_be_read_leaves_nothing_to_change() {
        let tree = repository();
        let view = confined(&[(&tree.at("ws"), "write")]);
        // It opens, and cannot be read: memory that is not mapped.
        let memory = format!("/proc/{}/mem", std::process::id());
        assert_eq!(line(Path::new(&memory)), Err(Errno::IO));
        tree.put("ws/.git", b"gitdir: d/repo\0/elsewhere\n");
        assert_eq!(refusal(run(&view, write(tree.path("ws/d/repo/config")))), REFUSED);
        // Another word than git's is no pointer.
        tree.put("ws/.git", b"gitdir d/repo");
        assert_eq!(run(&view, write(tree.path("ws/d/repo/config"))), Ok(FsDone::Changed));
        tree.put("ws/.git", b"gitdir: d/repo");
        std::fs::set_permissions(tree.at("ws/.git"), std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
        // Root may read everything; everybody else is told why.
        let expect = if rustix::process::geteuid().is_root() { Ok(FsDone::Changed) } else { Err(os(Errno::ACCESS)) };
        assert_eq!(run(&view, write(tree.path("ws/f"))), expect);
        assert!(run(&view, write(tree.path("ws/d/repo/config"))).is_err());
    }

    #[test]
    fn the_pointer_of_one_root_is_heeded_in_another() {
        let tree = Tree::new();
        tree.put("one/f", b"");
        tree.put("two/repo/config", b"good");
        let view = confined(&[(&tree.at("one"), "write"), (&tree.at("two"), "write")]);
        assert_eq!(run(&view, write(tree.path("two/repo/config"))), Ok(FsDone::Changed));
        // Made after the start.
        tree.put("one/.git", b"gitdir: ../two/repo");
        for operation in [write(tree.path("two/repo/config")), remove(tree.path("two/repo"), true)] {
            assert_eq!(refusal(run(&view, operation)), REFUSED);
        }
        assert_eq!(run(&view, write(tree.path("two/f"))), Ok(FsDone::Changed));
    }

    #[test]
    fn protected_names_are_protected_through_links_too() {
        let tree = repository();
        tree.put("ws/.git/config", b"good");
        tree.link("ws/here", ".");
        tree.link("ws/g", ".git");
        tree.link("ws/new", ".codex");
        let view = confined(&[(&tree.at("ws"), "write")]);
        for name in ["ws/here/.git/config", "ws/g/config", "ws/here/g/hooks", "ws/new", "ws/here/.codex"] {
            assert_eq!(refusal(run(&view, write(tree.path(name)))), REFUSED, "{name}");
            assert_eq!(refusal(run(&view, copy(tree.path("ws/evil/repo/config"), tree.path(name)))), REFUSED, "{name}");
        }
        assert_eq!(refusal(run(&view, make(tree.path("ws/g/hooks"), true))), REFUSED);
        assert_eq!(refusal(run(&view, remove(tree.path("ws/g/config"), false))), REFUSED);
        assert_eq!(run(&view, write(tree.path("ws/here/free"))), Ok(FsDone::Changed));
    }
}

//! Writing a file whole, and opening one to be replaced.
//!
//! Content is replaced in place: inode, hard links, owner and mode stay. It is not truncated first. Room for the new content
//! is reserved, then it is written over the old, and the rest is cut off, so that a full disk leaves the old content.

use super::read::{BLOCK, size_of};
use super::rules::Want;
use super::trace::MOST_TRIES;
use super::view::{Follow, Place, View};
use super::{Answer, is, os};
use portcullis_protocol::helper::{FsDone, FsError};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::kernel_files::check_local;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, fallocate, fstat, ftruncate, openat, statat, unlinkat};
use rustix::io::{Errno, pread, pwrite};
use std::os::fd::OwnedFd;

/// How files are opened to be written: neither truncated nor waited for.
const FLAGS: OFlags = OFlags::WRONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// What is written.
#[derive(Debug)]
pub(super) enum Content<'a> {
    Payload(&'a [u8]),
    /// A file that holds it from its start.
    Descriptor(OwnedFd),
}

impl<'a> Content<'a> {
    /// As it came with the request.
    pub(super) fn of(payload: &'a [u8], mut descriptors: Vec<OwnedFd>) -> Result<Self, FsError> {
        match (descriptors.pop(), descriptors.is_empty(), payload.is_empty()) {
            (None, _, _) => Ok(Self::Payload(payload)),
            (Some(descriptor), true, true) => Ok(Self::Descriptor(descriptor)),
            _ambiguous => Err(FsError::Unsupported("internal error: a write with two contents".to_owned())),
        }
    }
}

/// Replaces the content of a regular file, or makes one.
pub(super) fn file(view: &View, path: &AbsolutePath, follow: bool, content: &Content<'_>) -> Result<FsDone, FsError> {
    let target = Target::open(view, path, Follow::all_or_none(follow)).map_err(|error| {
        // A FIFO that nobody reads, or a socket.
        if is(&error, Errno::NXIO) { FsError::NotAFile(path.clone()) } else { error }
    })?;
    target.finish(|file| {
        let length = match content {
            Content::Payload(bytes) => bytes.len() as u64,
            Content::Descriptor(source) => size_of(&fstat(source).map_err(os)?),
        };
        reserve(file, length)?;
        match content {
            Content::Payload(bytes) => write_at(file, bytes, 0)?,
            Content::Descriptor(source) => copy_bytes(source, file, length)?,
        }
        ftruncate(file, length).map_err(os)
    })?;
    Ok(FsDone::Changed)
}

/// Opens a regular file for writing, made or emptied at once.
pub(super) fn open(view: &View, path: &AbsolutePath) -> Result<Answer, FsError> {
    let target = Target::open(view, path, Follow::All).map_err(|error| match error {
        // A FIFO that somebody reads is the same to a client as one that nobody reads.
        FsError::NotAFile(_) if view.stat(path.as_path(), Follow::All).is_ok_and(|stat| is_fifo(stat.st_mode)) => os(Errno::NXIO),
        other => other,
    })?;
    let file = target.finish(|file| {
        if view.rules().is_some() {
            check_local(file).map_err(|problem| {
                FsError::Unsupported(format!(
                    "a handle for writing is not available under a policy: {problem}; write the whole file with fs/writeFile"
                ))
            })?;
        }
        ftruncate(file, 0).map_err(os)
    })?;
    Ok(Answer { outcome: Ok(FsDone::Descriptor { size: 0 }), payload: Vec::new(), descriptor: Some(file) })
}

/// A regular file, open for writing and untouched.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) file: OwnedFd,
    /// Where it was made, if it was not there before.
    made: Option<Place>,
}

impl Target {
    /// Opens what is there, or makes a file of mode 0666 less umask.
    pub(super) fn open(view: &View, path: &AbsolutePath, follow: Follow) -> Result<Self, FsError> {
        for _ in 0..MOST_TRIES {
            match view.open(path.as_path(), follow, Want::Write, FLAGS) {
                Ok(opened) => return regular(opened.descriptor, path),
                Err(error) if is(&error, Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
            let place = view.place(path.as_path(), follow)?;
            let flags = FLAGS | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match openat(&place.directory, &place.name, flags, Mode::from_raw_mode(0o666)) {
                Ok(file) => return Ok(Self { file, made: Some(place) }),
                // Somebody was faster; open that.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(os(errno)),
            }
        }
        Err(os(Errno::LOOP))
    }

    /// Does something to the file. If that fails, a file that was made for it is removed again.
    pub(super) fn finish(self, act: impl FnOnce(&OwnedFd) -> Result<(), FsError>) -> Result<OwnedFd, FsError> {
        match act(&self.file) {
            Ok(()) => Ok(self.file),
            Err(error) => {
                self.unmake();
                Err(error)
            }
        }
    }

    fn unmake(self) {
        let Some(place) = self.made else {
            return;
        };
        let now = statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW);
        let same = |own: rustix::fs::Stat| now.is_ok_and(|now| (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino));
        if fstat(&self.file).is_ok_and(same) {
            // The first failure is the one to tell.
            let _left_over = unlinkat(&place.directory, &place.name, AtFlags::empty());
        }
    }
}

fn regular(file: OwnedFd, path: &AbsolutePath) -> Result<Target, FsError> {
    let stat = fstat(&file).map_err(os)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        Ok(Target { file, made: None })
    } else {
        Err(FsError::NotAFile(path.clone()))
    }
}

fn is_fifo(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::Fifo
}

/// Makes sure that there is room for so many bytes, without touching the content.
pub(super) fn reserve(file: &OwnedFd, length: u64) -> Result<(), FsError> {
    if length == 0 {
        return Ok(());
    }
    match rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, 0, length)) {
        // Not every file system can; there the write itself finds out.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(errno) => {
            // Gives back what was reserved before the room ran out; the size stays.
            if let Ok(stat) = fstat(file) {
                let _kept = ftruncate(file, size_of(&stat));
            }
            Err(os(errno))
        }
    }
}

fn write_at(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), FsError> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| pwrite(file, bytes, at)).map_err(os)?;
        bytes = &bytes[written..];
        at += written as u64;
    }
    Ok(())
}

/// Copies so many bytes, or to the end of the source if that comes first.
fn copy_bytes(source: &OwnedFd, file: &OwnedFd, length: u64) -> Result<(), FsError> {
    let mut buffer = vec![0; usize::try_from(length).unwrap_or(BLOCK).min(BLOCK)];
    let mut at = 0;
    while at < length {
        let got = rustix::io::retry_on_intr(|| pread(source, &mut buffer[..], at)).map_err(os)?;
        if got == 0 {
            break;
        }
        write_at(file, &buffer[..got], at)?;
        at += got as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, refusal};
    use super::*;
    use portcullis_protocol::helper::{FsOperation, OpenMode};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;

    #[track_caller]
    fn write_file(view: &View, path: AbsolutePath, follow: bool, content: &[u8]) -> Result<FsDone, FsError> {
        carry_out(view, FsOperation::WriteFile { path, follow }, content, Vec::new()).outcome
    }

    fn replace(view: &View, path: AbsolutePath) -> Result<OwnedFd, FsError> {
        let answer = carry_out(view, FsOperation::Open { path, mode: OpenMode::Replace }, b"", Vec::new());
        answer.outcome.map(|done| {
            assert_eq!(done, FsDone::Descriptor { size: 0 });
            answer.descriptor.unwrap()
        })
    }

    #[test]
    fn a_file_is_made_and_replaced_in_place() {
        for confine in [false, true] {
            let tree = Tree::new();
            let view = if confine { tree.writable() } else { View::unconfined() };
            assert_eq!(write_file(&view, tree.path("f"), true, b"first content"), Ok(FsDone::Changed));
            let umask = rustix::process::umask(Mode::from_raw_mode(0o022));
            rustix::process::umask(umask);
            let before = std::fs::metadata(tree.at("f")).unwrap();
            assert_eq!(before.permissions().mode() & 0o777, 0o666 & !umask.as_raw_mode());
            std::fs::hard_link(tree.at("f"), tree.at("same")).unwrap();
            for content in [&b"second"[..], b"", b"third and longer than the first"] {
                write_file(&view, tree.path("f"), false, content).unwrap();
                assert_eq!(tree.get("same"), content);
            }
            assert_eq!(std::fs::metadata(tree.at("f")).unwrap().ino(), before.ino());
        }
    }

    #[test]
    fn content_comes_from_a_descriptor_too() {
        let tree = Tree::new();
        let content = vec![7; 3 * BLOCK + 1];
        let memory = memfd_create("content", MemfdFlags::CLOEXEC).unwrap();
        write_at(&memory, &content, 0).unwrap();
        let operation = FsOperation::WriteFile { path: tree.path("f"), follow: true };
        assert_eq!(carry_out(&tree.writable(), operation, b"", vec![memory]).outcome, Ok(FsDone::Changed));
        assert_eq!(tree.get("f"), content);
    }

    #[test]
    fn links_are_written_through_unless_asked_otherwise() {
        let tree = Tree::new();
        tree.put("d/target", b"");
        tree.link("ln", "d/target");
        tree.link("dang", "d/made");
        tree.link("lnd", "d");
        for view in [View::unconfined(), tree.writable()] {
            assert_eq!(write_file(&view, tree.path("ln"), false, b"x"), Err(os(Errno::LOOP)));
            assert_eq!(write_file(&view, tree.path("dang"), false, b"x"), Err(os(Errno::LOOP)));
            assert_eq!(write_file(&view, tree.path("lnd/new"), false, b"x"), Err(os(Errno::NOTDIR)));
            write_file(&view, tree.path("ln"), true, b"via").unwrap();
            write_file(&view, tree.path("dang"), true, b"new").unwrap();
            write_file(&view, tree.path("lnd/third"), true, b"3").unwrap();
            assert_eq!(
                (tree.get("d/target"), tree.get("d/made"), tree.get("d/third")),
                (b"via".into(), b"new".into(), b"3".into())
            );
            std::fs::remove_file(tree.at("d/made")).unwrap();
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let tree = Tree::new();
        tree.mkdir("d");
        tree.fifo("ff");
        let _socket = std::os::unix::net::UnixListener::bind(tree.at("so")).unwrap();
        let rdwr = OFlags::RDWR | OFlags::NONBLOCK;
        for view in [View::unconfined(), tree.writable()] {
            assert_eq!(write_file(&view, tree.path("ff"), true, b"x"), Err(FsError::NotAFile(tree.path("ff"))));
            assert_eq!(write_file(&view, tree.path("so"), true, b"x"), Err(FsError::NotAFile(tree.path("so"))));
            assert_eq!(write_file(&view, tree.path("d"), true, b"x"), Err(os(Errno::ISDIR)));
            assert_eq!(write_file(&view, tree.path("no/x"), true, b"x"), Err(os(Errno::NOENT)));
            assert_eq!(replace(&view, tree.path("ff")).err(), Some(os(Errno::NXIO)));
            assert_eq!(replace(&view, tree.path("d")).err(), Some(os(Errno::ISDIR)));
            assert_eq!(replace(&view, tree.path("no/x")).err(), Some(os(Errno::NOENT)));
            let _reader = rustix::fs::open(tree.at("ff"), rdwr, Mode::empty()).unwrap();
            assert_eq!(write_file(&view, tree.path("ff"), true, b"x"), Err(FsError::NotAFile(tree.path("ff"))));
            assert_eq!(replace(&view, tree.path("ff")).err(), Some(os(Errno::NXIO)));
        }
        let null = AbsolutePath::new("/dev/null").unwrap();
        assert_eq!(write_file(&View::unconfined(), null.clone(), true, b"x"), Err(FsError::NotAFile(null)));
    }

    #[test]
    fn a_replaced_file_is_empty_at_once_and_writable() {
        let tree = Tree::new();
        tree.put("f", b"old");
        tree.link("ln", "f");
        let file = replace(&tree.writable(), tree.path("ln")).unwrap();
        assert_eq!(tree.get("f"), b"");
        write_at(&file, b"new", 2).unwrap();
        assert_eq!(tree.get("f"), b"\0\0new");
        assert_eq!(rustix::io::read(&file, &mut [0_u8; 4][..]), Err(Errno::BADF));
    }

    #[test]
    fn a_write_that_cannot_have_its_room_keeps_the_old_content() {
        let tree = Tree::new();
        tree.put("f", b"old");
        let view = tree.writable();
        // A file in memory may be sparse: it claims more than any disk has.
        let huge = memfd_create("huge", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&huge, 1 << 60).unwrap();
        let operation = |name| FsOperation::WriteFile { path: tree.path(name), follow: true };
        let copy = |name| carry_out(&view, operation(name), b"", vec![rustix::io::dup(&huge).unwrap()]).outcome;
        let failed = copy("f").unwrap_err();
        assert!(is(&failed, Errno::NOSPC) || is(&failed, Errno::FBIG), "{failed:?}");
        assert_eq!(tree.get("f"), b"old");
        // And what was made for it is not left behind.
        assert!(copy("new").is_err());
        assert_eq!(tree.names(""), ["f"]);
    }

    #[test]
    fn where_only_reading_is_granted_the_file_system_is_read_only() {
        let (tree, other) = (Tree::new(), Tree::new());
        tree.put("ro/f", b"f");
        tree.put("ws/.git/config", b"orig");
        other.put("f", b"f");
        tree.link("ws/leads_out", "../ro/f");
        tree.link("ws/dangles_out", "../ro/new");
        let ws = tree.at("ws");
        let view = confined(&[(tree.root(), "read"), (&ws, "write")]);
        for name in ["ro/f", "ro/new", "ro/no/new", "ws/.git/config", "ws/.codex/x", "ws/.git", "ws/leads_out", "ws/dangles_out"]
        {
            assert_eq!(refusal(write_file(&view, tree.path(name), true, b"x")), 30, "{name}");
            assert_eq!(refusal(replace(&view, tree.path(name))), 30, "{name}");
        }
        assert_eq!(refusal(write_file(&view, other.path("f"), true, b"x")), 2);
        assert_eq!((tree.get("ro/f"), tree.get("ws/.git/config")), (b"f".into(), b"orig".into()));
        assert_eq!(tree.names("ro"), ["f"]);
        // The controls.
        write_file(&view, tree.path("ws/f"), true, b"x").unwrap();
        write_file(&View::unconfined(), tree.path("ws/leads_out"), true, b"x").unwrap();
    }

    #[test]
    fn where_a_git_file_or_link_points_is_read_only_too() {
        let tree = Tree::new();
        tree.put("ws/real/config", b"c");
        tree.put("ws/.git", b"gitdir: real\n");
        tree.put("ws/tools/x", b"x");
        tree.link("ws/.codex", "tools");
        let ws = tree.at("ws");
        let view = confined(&[(Path::new(&ws), "write")]);
        for name in ["ws/real/config", "ws/real/hooks", "ws/tools/x", "ws/.codex/x", "ws/.git"] {
            assert_eq!(refusal(write_file(&view, tree.path(name), true, b"x")), 30, "{name}");
        }
        // Made after the worker began.
        std::fs::remove_file(tree.at("ws/.git")).unwrap();
        tree.put("ws/later/config", b"c");
        write_file(&view, tree.path("ws/later/config"), true, b"x").unwrap();
        tree.put("ws/.git", b"gitdir: later");
        assert_eq!(refusal(write_file(&view, tree.path("ws/later/config"), true, b"x")), 30);
    }

    #[test]
    fn a_root_that_was_replaced_makes_the_worker_stale() {
        let tree = Tree::new();
        tree.put("ws/f", b"f");
        let (ws, missing) = (tree.at("ws"), tree.at("missing"));
        let view = confined(&[(&ws, "write"), (&missing, "write")]);
        write_file(&view, tree.path("ws/f"), true, b"1").unwrap();
        std::fs::rename(&ws, tree.at("aside")).unwrap();
        tree.put("ws/f", b"other");
        assert_eq!(write_file(&view, tree.path("ws/f"), true, b"2"), Err(FsError::Stale));
        assert_eq!(write_file(&view, tree.path("ws/new"), true, b"2"), Err(FsError::Stale));
        assert_eq!(tree.get("ws/f"), b"other");
        // What was missing grants nothing once it is there: a new worker must see it.
        assert!(write_file(&view, tree.path("missing/f"), true, b"x").is_err());
        tree.mkdir("missing");
        assert!(write_file(&view, tree.path("missing/f"), true, b"x").is_err());
    }
}

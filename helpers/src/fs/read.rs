//! Reading a file whole, and opening one for reading.

use super::rules::Want;
use super::view::{Follow, View};
use super::{Answer, is, os};
use portcullis_protocol::helper::{FsDone, FsError};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::kernel_files::check_handed_over;
use rustix::fs::{FileType, MemfdFlags, OFlags, SealFlags, Stat, fcntl_add_seals, fstat, memfd_create};
use rustix::io::{Errno, read, write};
use std::os::fd::OwnedFd;

/// How files are opened to be read: a FIFO or a device neither hangs nor becomes a terminal of ours.
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Content above this many bytes goes as a descriptor: the gateway reads it from the file itself, which copies it once less.
const INLINE: usize = 64 * 1024;

/// Bytes moved at once where the kernel cannot do it alone.
pub(super) const BLOCK: usize = 256 * 1024;

/// Bytes of a file behind a handle, where the worker reads it into memory because it may not hand it over. A connection holds many.
const HANDLE: u64 = 16 << 20;

/// The content of a regular file of at most `limit` bytes.
pub(super) fn file(view: &View, path: &AbsolutePath, follow: bool, limit: u64) -> Result<Answer, FsError> {
    let (file, stat) = open_regular(view, path, Follow::all_or_none(follow))?;
    let size = size_of(&stat);
    if size > limit {
        return Err(FsError::TooLarge(limit));
    }
    if size > INLINE as u64 && check_handed_over(&file).is_ok() {
        return Ok(Answer { outcome: Ok(FsDone::Descriptor { size }), payload: Vec::new(), descriptor: Some(file) });
    }
    // One byte more than it has shows with one call that this is the end. Files in /proc say that they are empty.
    let room = if size == 0 { INLINE } else { usize::try_from(size).unwrap_or(BLOCK).min(BLOCK) } + 1;
    let mut content = vec![0; room];
    let mut length = 0;
    while length < room {
        let got = read_some(&file, &mut content[length..])?;
        length += got;
        if got == 0 || (size > 0 && length as u64 == size) {
            content.truncate(length);
            break;
        }
    }
    if content.len() as u64 > limit {
        return Err(FsError::TooLarge(limit));
    }
    if content.len() <= INLINE {
        return Ok(Answer { outcome: Ok(FsDone::Content), payload: content, descriptor: None });
    }
    into_memory(&file, content, limit)
}

/// An open regular file, for a handle. The reader, the gateway, has more rights than a confined worker. So a file whose reads the
/// kernel checks again each time is read here, as it is now.
pub(super) fn open(view: &View, path: &AbsolutePath) -> Result<Answer, FsError> {
    let (file, stat) = open_regular(view, path, Follow::All)?;
    if view.rules().is_some() && check_handed_over(&file).is_err() {
        let mut start = vec![0; BLOCK];
        let got = read_some(&file, &mut start)?;
        start.truncate(got);
        return into_memory(&file, start, HANDLE);
    }
    Ok(Answer { outcome: Ok(FsDone::Descriptor { size: size_of(&stat) }), payload: Vec::new(), descriptor: Some(file) })
}

/// Opens a regular file for reading; anything else is refused.
pub(super) fn open_regular(view: &View, path: &AbsolutePath, follow: Follow) -> Result<(OwnedFd, Stat), FsError> {
    let opened = view.open(path.as_path(), follow, Want::Read, FLAGS).map_err(|error| {
        // A socket, or a device without its driver.
        if is(&error, Errno::NXIO) || is(&error, Errno::NODEV) { FsError::NotAFile(path.clone()) } else { error }
    })?;
    let stat = fstat(&opened.descriptor).map_err(os)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FsError::NotAFile(path.clone()));
    }
    Ok((opened.descriptor, stat))
}

pub(super) fn size_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// One read, again if a signal came in between.
pub(super) fn read_some(file: &OwnedFd, buffer: &mut [u8]) -> Result<usize, FsError> {
    rustix::io::retry_on_intr(|| read(file, &mut *buffer)).map_err(os)
}

/// Moves what was read and the rest into a file in memory: the gateway shall not wait for a file system that may hang, and
/// gets bytes that do not change any more.
fn into_memory(file: &OwnedFd, start: Vec<u8>, limit: u64) -> Result<Answer, FsError> {
    let memory = memfd_create("content", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(os)?;
    let (mut chunk, mut size) = (start, 0_u64);
    while !chunk.is_empty() {
        size += chunk.len() as u64;
        if size > limit {
            return Err(FsError::TooLarge(limit));
        }
        write_all(&memory, &chunk)?;
        chunk.resize(BLOCK, 0);
        let got = read_some(file, &mut chunk)?;
        chunk.truncate(got);
    }
    fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(os)?;
    rustix::fs::seek(&memory, rustix::fs::SeekFrom::Start(0)).map_err(os)?;
    Ok(Answer { outcome: Ok(FsDone::Descriptor { size }), payload: Vec::new(), descriptor: Some(memory) })
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), FsError> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| write(file, bytes)).map_err(os)?;
        bytes = &bytes[written..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, refusal};
    use super::*;
    use portcullis_protocol::helper::{FsOperation, OpenMode};

    const LIMIT: u64 = 1 << 20;

    #[track_caller]
    fn read_file(view: &View, path: AbsolutePath, follow: bool) -> Result<Vec<u8>, FsError> {
        let answer = carry_out(view, FsOperation::ReadFile { path, follow, limit: LIMIT }, b"", Vec::new());
        answer.outcome.map(|done| match (done, answer.descriptor) {
            (FsDone::Content, None) => answer.payload,
            (FsDone::Descriptor { size }, Some(file)) => {
                let mut bytes = vec![0; usize::try_from(size).unwrap()];
                let got = rustix::io::pread(&file, &mut bytes[..], 0).unwrap();
                assert_eq!(got as u64, size);
                bytes
            }
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn small_empty_and_large_files_come_whole() {
        let tree = Tree::new();
        let large: Vec<u8> = (0..300_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        for content in [&b""[..], b"x", &large[..INLINE], &large[..=INLINE], &large] {
            tree.put("f", content);
            for view in [View::unconfined(), tree.writable()] {
                assert_eq!(read_file(&view, tree.path("f"), true).unwrap(), content);
                assert_eq!(read_file(&view, tree.path("f"), false).unwrap(), content);
            }
        }
    }

    #[test]
    fn a_file_that_says_it_is_empty_is_read_all_the_same() {
        let path = AbsolutePath::new("/proc/filesystems").unwrap();
        let expect = std::fs::read("/proc/filesystems").unwrap();
        assert_eq!(read_file(&View::unconfined(), path, true).unwrap(), expect);
        let maps = AbsolutePath::new("/proc/kallsyms").unwrap();
        let all = read_file(&View::unconfined(), maps, true);
        assert!(all == Err(FsError::TooLarge(LIMIT)) || all.is_ok_and(|bytes| bytes.len() as u64 <= LIMIT));
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let tree = Tree::new();
        tree.mkdir("d");
        tree.fifo("ff");
        let _socket = std::os::unix::net::UnixListener::bind(tree.at("so")).unwrap();
        for view in [View::unconfined(), tree.writable()] {
            for name in ["d", "ff", "so"] {
                assert_eq!(read_file(&view, tree.path(name), true), Err(FsError::NotAFile(tree.path(name))), "{name}");
            }
        }
        let null = AbsolutePath::new("/dev/null").unwrap();
        assert_eq!(read_file(&View::unconfined(), null.clone(), true), Err(FsError::NotAFile(null)));
    }

    #[test]
    fn links_are_followed_unless_asked_otherwise() {
        let tree = Tree::new();
        tree.put("d/x", b"x");
        tree.link("ln", "d/x");
        tree.link("lnd", "d");
        tree.link("loop", "loop");
        for view in [View::unconfined(), tree.writable()] {
            assert_eq!(read_file(&view, tree.path("ln"), true).unwrap(), b"x");
            assert_eq!(read_file(&view, tree.path("lnd/x"), true).unwrap(), b"x");
            assert_eq!(read_file(&view, tree.path("ln"), false), Err(os(Errno::LOOP)));
            assert_eq!(read_file(&view, tree.path("lnd/x"), false), Err(os(Errno::NOTDIR)));
            assert_eq!(read_file(&view, tree.path("loop"), true), Err(os(Errno::LOOP)));
            assert_eq!(read_file(&view, tree.path("d/x/y"), true), Err(os(Errno::NOTDIR)));
            assert_eq!(read_file(&view, tree.path("no"), true), Err(os(Errno::NOENT)));
        }
    }

    #[test]
    fn a_file_above_the_limit_is_refused() {
        let tree = Tree::new();
        tree.put("f", &vec![0; usize::try_from(LIMIT).unwrap() + 1]);
        assert_eq!(read_file(&View::unconfined(), tree.path("f"), true), Err(FsError::TooLarge(LIMIT)));
    }

    #[test]
    fn what_the_policy_does_not_grant_does_not_exist() {
        let (tree, other) = (Tree::new(), Tree::new());
        tree.put("in", b"in");
        tree.put("secret/key", b"key");
        other.put("out", b"out");
        tree.link("leads_out", other.at("out"));
        let view = confined(&[(tree.root(), "read"), (&tree.at("secret"), "deny")]);
        assert_eq!(read_file(&view, tree.path("in"), true).unwrap(), b"in");
        assert_eq!(refusal(read_file(&view, other.path("out"), true)), 2);
        assert_eq!(refusal(read_file(&view, tree.path("leads_out"), true)), 2);
        assert_eq!(refusal(read_file(&view, tree.path("secret/key"), true)), 13);
        assert_eq!(refusal(read_file(&view, tree.path("secret/absent"), true)), 13);
    }

    #[test]
    fn no_process_is_seen_under_a_policy() {
        let view = confined(&[("/".as_ref(), "read")]);
        let own = std::process::id();
        let own_files = ["/proc/self/environ", "/proc/thread-self/maps", "/dev/fd/0", "/proc/mounts"].map(str::to_owned);
        for path in own_files.into_iter().chain([format!("/proc/{own}/mem"), "/proc/1/cmdline".to_owned()]) {
            let path = AbsolutePath::new(path).unwrap();
            let error = read_file(&view, path.clone(), true).unwrap_err();
            let FsError::Denied(2, Some(denial)) = &error else { panic!("{path}: {error:?}") };
            assert!(denial.rule.contains("stands for a process") && denial.path == path.to_string(), "{denial:?}");
        }
        assert_eq!(refusal(read_file(&view, AbsolutePath::new("/proc/keys").unwrap(), true)), 2);
        let version = AbsolutePath::new("/proc/version").unwrap();
        assert_eq!(read_file(&view, version, true).unwrap(), std::fs::read("/proc/version").unwrap());
        // The control: without a policy the same files are readable.
        for path in ["/proc/self/environ", "/proc/1/cmdline", "/proc/mounts"] {
            assert!(read_file(&View::unconfined(), AbsolutePath::new(path).unwrap(), true).is_ok(), "{path}");
        }
    }

    #[test]
    fn a_handle_on_no_local_file_system_is_a_copy() {
        let view = confined(&[("/".as_ref(), "read")]);
        let path = AbsolutePath::new("/proc/version").unwrap();
        let expect = std::fs::read("/proc/version").unwrap();
        let open = |view| carry_out(view, FsOperation::Open { path: path.clone(), mode: OpenMode::Read }, b"", Vec::new());
        let answer = open(&view);
        assert_eq!(answer.outcome, Ok(FsDone::Descriptor { size: expect.len() as u64 }));
        let copy = answer.descriptor.unwrap();
        check_handed_over(&copy).unwrap();
        let mut content = vec![0; expect.len() + 1];
        assert_eq!(rustix::io::pread(&copy, &mut content[..], 0).unwrap(), expect.len());
        assert_eq!(content[..expect.len()], expect);
        // The control: without a policy it is the file itself, which the gateway must not read for a confined worker.
        assert!(check_handed_over(open(&View::unconfined()).descriptor.unwrap()).is_err());
    }

    #[test]
    fn an_opened_file_is_handed_over_with_its_size() {
        let tree = Tree::new();
        tree.put("f", b"12345");
        let answer =
            carry_out(&tree.writable(), FsOperation::Open { path: tree.path("f"), mode: OpenMode::Read }, b"", Vec::new());
        assert_eq!((answer.outcome, answer.descriptor.is_some()), (Ok(FsDone::Descriptor { size: 5 }), true));
    }
}

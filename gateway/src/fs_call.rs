//! File calls: wire parameters become one operation of a worker, and its answer becomes the reply's text.

use crate::answer::Form;
use crate::blocking::{self, Blocking};
use crate::core::Core;
use crate::helper::worker::{Answer, Content, Done, Request, WorkerError};
use crate::policies::Named;
use crate::reply;
use crate::session::Turn;
use portcullis_protocol::binary::Message;
use portcullis_protocol::fs::{
    CanonicalizeResult, DirectoryEntryResult, Empty, MetadataResult, ReadDirectoryResult, WalkEntryResult, WalkErrorResult,
    WalkKind, WalkOptions, WalkResult,
};
use portcullis_protocol::helper::{FsDone, FsError, FsOperation, INLINE_PAYLOAD, OpenMode, WalkBounds};
use portcullis_protocol::method::Call;
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::rpc::{self, Id, RpcError, code};
use portcullis_sandbox::kernel_files::{check_handed_over, check_local};
use portcullis_sandbox::policy::{Files, MAX_PATH_LENGTH};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use serde::Serialize;
use serde_json::value::RawValue;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bytes that a readFile answers at most.
const READ_LIMIT: u64 = 512 << 20;
/// The member of its answer that holds them.
const CONTENT: &str = "dataBase64";
/// Workers that one call tries: one may have ended a moment before, and a root of the policy may just have been replaced.
const ATTEMPTS: usize = 4;
/// Bytes of an operation id: it is kept beyond its call.
const LONGEST_OPERATION: usize = 256;

/// A file call, ready for a worker.
#[derive(Debug)]
pub(crate) struct FsCall {
    /// As in `fs/readFile /etc/hosts`.
    pub(crate) attempt: String,
    pub(crate) operation: FsOperation,
    content: Vec<u8>,
    /// The request's sandbox object.
    pub(crate) sandbox: Option<Box<RawValue>>,
    /// The client's name for this change, if it may send it again.
    pub(crate) operation_id: Option<String>,
}

impl FsCall {
    /// Takes a call apart. Calls that are no file calls come back as they are.
    pub(crate) fn prepare(call: Call) -> Result<Result<Self, RpcError>, Call> {
        let follow = |choice: Option<bool>| choice.unwrap_or(true);
        let mut operation_id = None;
        let (method, sandbox, content, operation) = match call {
            Call::FsReadFile(p) => (
                "readFile",
                p.sandbox,
                Vec::new(),
                local(&p.path).map(|path| FsOperation::ReadFile { path, follow: follow(p.follow_symlinks), limit: READ_LIMIT }),
            ),
            Call::FsWriteFile(p) => match p.data_base64.0 {
                Ok(bytes) => {
                    operation_id = p.operation_id;
                    let path = local(&p.path);
                    let operation = path.map(|path| FsOperation::WriteFile { path, follow: follow(p.follow_symlinks) });
                    ("writeFile", p.sandbox, bytes, operation)
                }
                Err(error) => return Ok(Err(reply::invalid(format!("fs/writeFile requires valid base64 dataBase64: {error}")))),
            },
            Call::FsCreateDirectory(p) => {
                operation_id = p.operation_id;
                let (recursive, follow) = (p.recursive.unwrap_or(true), follow(p.follow_symlinks));
                let operation = local(&p.path).map(|path| FsOperation::CreateDirectory { path, recursive, follow });
                ("createDirectory", p.sandbox, Vec::new(), operation)
            }
            Call::FsGetMetadata(p) => (
                "getMetadata",
                p.sandbox,
                Vec::new(),
                local(&p.path).map(|path| FsOperation::GetMetadata { path, follow: follow(p.follow_symlinks) }),
            ),
            Call::FsCanonicalize(p) => {
                ("canonicalize", p.sandbox, Vec::new(), local(&p.path).map(|path| FsOperation::Canonicalize { path }))
            }
            Call::FsReadDirectory(p) => {
                ("readDirectory", p.sandbox, Vec::new(), local(&p.path).map(|path| FsOperation::ReadDirectory { path }))
            }
            Call::FsWalk(p) => (
                "walk",
                p.sandbox,
                Vec::new(),
                local(&p.path).and_then(|path| Ok(FsOperation::Walk { path, options: bounds(&p.options)? })),
            ),
            Call::FsRemove(p) => {
                operation_id = p.operation_id;
                let (recursive, force, follow) =
                    (p.recursive.unwrap_or(true), p.force.unwrap_or(true), follow(p.follow_symlinks));
                let operation = local(&p.path).map(|path| FsOperation::Remove { path, recursive, force, follow });
                ("remove", p.sandbox, Vec::new(), operation)
            }
            Call::FsCopy(p) => {
                operation_id = p.operation_id;
                let operation = local(&p.source_path).and_then(|source| {
                    Ok(FsOperation::Copy { source, destination: local(&p.destination_path)?, recursive: p.recursive })
                });
                ("copy", p.sandbox, Vec::new(), operation)
            }
            Call::FsWatchMissing(p) => {
                let others = p.missing.iter().map(local).collect::<Result<Vec<_>, _>>();
                let present = p.present.as_ref().map(local).transpose();
                let operation = others.and_then(|mut others| {
                    let path = others.pop().ok_or_else(|| reply::invalid("fs/watchMissing: no path is named"))?;
                    Ok(FsOperation::WatchMissing { path, others, present: present? })
                });
                ("watchMissing", None, Vec::new(), operation)
            }
            Call::FsOpen(p) => {
                ("open", p.sandbox, Vec::new(), local(&p.path).map(|path| FsOperation::Open { path, mode: p.mode }))
            }
            other => return Err(other),
        };
        Ok(operation.and_then(|operation| {
            let attempt = attempt(method, &operation);
            check_operation(&attempt, operation_id.as_deref())?;
            Ok(Self { attempt, operation, content, sandbox, operation_id })
        }))
    }

    /// Of everything that the call asks for: two calls of a client with the same one ask for the same, but for an accident in
    /// 2^64. It is made at once and not beside, since a call must not lose its place to a later one while it is made; against a
    /// client that deceives itself it need not hold.
    pub(crate) fn digest(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        format!("{:?}", self.operation).hash(&mut hash);
        self.sandbox.as_deref().map(RawValue::get).hash(&mut hash);
        self.content.hash(&mut hash);
        hash.finish()
    }

    /// Carries the call out through the session's worker for this policy. The turn ends when the worker answers.
    pub(crate) async fn carry_out(
        self,
        core: &Core,
        blocking: &Blocking,
        session: &Arc<str>,
        policy: Option<&Named>,
        turn: Turn,
    ) -> Result<Done, RpcError> {
        let Self { attempt, operation, content, .. } = self;
        let content = pack(content, blocking).await.map_err(|error| reply::internal(format!("{attempt}: {error}")))?;
        turn.wait().await;
        let (mut turn, mut unlike) = (turn, None);
        for _attempt in 0..ATTEMPTS {
            let worker =
                core.pool.worker(session, policy, unlike).await.map_err(|error| reply::worker_error(&attempt, &error))?;
            unlike = Some(worker.id());
            let request = Request { operation: operation.clone(), content: content.clone() };
            turn = match worker.call(request, turn, core.config.fs_deadline).await {
                Ok(Answer { outcome: Err(FsError::Stale), turn }) => turn,
                Ok(Answer { outcome: Ok(done), .. }) => return received(&attempt, &operation, policy, done),
                Ok(Answer { outcome: Err(error), .. }) => return Err(reply::fs_error(&attempt, &error)),
                Err((WorkerError::Gone, Some(turn))) => turn,
                Err((error, _turn)) => return Err(reply::worker_error(&attempt, &error)),
            };
        }
        Err(reply::internal(format!("{attempt}: a root of the policy is replaced again and again; nothing was done")))
    }
}

/// The content that a worker sent. From a confined worker the gateway does not read a descriptor whose reads the kernel would
/// check against the gateway's rights.
fn received(attempt: &str, operation: &FsOperation, policy: Option<&Named>, done: Done) -> Result<Done, RpcError> {
    let is_confined = policy.is_some_and(|named| named.policy.files != Files::Unrestricted);
    let (FsDone::Descriptor { .. }, Some(file), true) = (&done.done, &done.descriptor, is_confined) else { return Ok(done) };
    let checked = match operation {
        FsOperation::Open { mode: OpenMode::Replace, .. } => check_local(file),
        _read => check_handed_over(file),
    };
    let refused = |problem| reply::internal(format!("{attempt}: the worker handed over an invalid descriptor: {problem}"));
    checked.map_err(refused).map(|()| done)
}

/// Whether an operation id is one.
pub(crate) fn check_operation(attempt: &str, id: Option<&str>) -> Result<(), RpcError> {
    match id.map(str::len) {
        Some(length) if !(1..=LONGEST_OPERATION).contains(&length) => Err(RpcError::new(
            code::INVALID_PARAMS,
            format!("{attempt}: operationId of {length} bytes: 1 to {LONGEST_OPERATION} are allowed"),
        )),
        _ => Ok(()),
    }
}

/// The path of a call. One that the kernel would refuse for its length is refused here in the same words, but without the path: it
/// may be as long as a message, and calls and their errors are kept.
fn local(path: &WirePath) -> Result<AbsolutePath, RpcError> {
    let path = path.local().map_err(|error| reply::foreign_path(&error))?;
    if path.len() > MAX_PATH_LENGTH {
        let attempt = format!("a path of {} bytes, where the system takes up to {MAX_PATH_LENGTH}", path.len());
        return Err(reply::os_error(&attempt, Errno::NAMETOOLONG));
    }
    Ok(path.clone())
}

fn attempt(method: &str, operation: &FsOperation) -> String {
    match operation.paths() {
        (source, Some(destination)) => format!("fs/{method} {source} to {destination}"),
        (path, None) => format!("fs/{method} {path}"),
    }
}

fn bounds(options: &WalkOptions) -> Result<WalkBounds, RpcError> {
    const DEPTH: u32 = 64;
    const DIRECTORIES: u32 = 10_000;
    const ENTRIES: u32 = 50_000;
    if options.max_directories == 0 || options.max_entries == 0 {
        return Err(reply::invalid("filesystem walk limits must be greater than zero"));
    }
    let within = |value: u64, bound: u32| u32::try_from(value).ok().filter(|value| *value <= bound);
    match (within(options.max_depth, DEPTH), within(options.max_directories, DIRECTORIES), within(options.max_entries, ENTRIES)) {
        (Some(depth), Some(directories), Some(entries)) => Ok(WalkBounds {
            depth,
            directories,
            entries,
            follow_directory_links: options.follow_directory_symlinks,
            prune_hidden: options.prune_hidden_directories,
        }),
        _ => Err(reply::invalid(format!(
            "filesystem walk limits exceed maximums: depth={DEPTH}, directories={DIRECTORIES}, entries={ENTRIES}"
        ))),
    }
}

/// Small content travels in the frame, large content as memory behind a descriptor.
async fn pack(content: Vec<u8>, blocking: &Blocking) -> Result<Content, String> {
    if content.is_empty() {
        return Ok(Content::None);
    }
    if content.len() <= INLINE_PAYLOAD {
        return Ok(Content::Inline(Arc::new(content)));
    }
    let packed = blocking.run(move || {
        let memory = memfd_create("portcullis-content", MemfdFlags::CLOEXEC)?;
        blocking::write_at(&memory, 0, &content)?;
        Ok::<OwnedFd, Errno>(memory)
    });
    let memory = packed.await.map_err(|lost| lost.to_string())?.map_err(|errno| errno.to_string())?;
    Ok(Content::Descriptor(Arc::new(memory)))
}

/// The reply to a call.
pub(crate) async fn reply(id: &Id, attempt: &str, done: Done, form: Form, blocking: &Blocking) -> Result<Message, RpcError> {
    match done.done {
        FsDone::Content => Ok(form.bytes_result(id, CONTENT, done.payload, "")),
        FsDone::Descriptor { .. } => content(id, attempt, done.descriptor, form, blocking).await,
        found => reply_text(id, attempt, found).map(Message::from),
    }
}

fn reply_text(id: &Id, attempt: &str, done: FsDone) -> Result<String, RpcError> {
    match done {
        FsDone::Changed => text(id, attempt, &Empty {}),
        FsDone::Content | FsDone::Descriptor { .. } => Err(reply::internal(format!("{attempt}: content is no text"))),
        FsDone::Metadata(found) => text(
            id,
            attempt,
            &MetadataResult {
                is_directory: found.is_directory,
                is_file: found.is_file,
                is_symlink: found.is_symlink,
                size: found.size,
                created_at_ms: found.created_ms,
                modified_at_ms: found.modified_ms,
            },
        ),
        FsDone::Watching(_) => Err(reply::internal(format!("{attempt}: the worker watches, which nobody asked for"))),
        FsDone::Path(path) => text(id, attempt, &CanonicalizeResult { path: WirePath::Local(path) }),
        FsDone::Directory(entries) => {
            let entries = entries.into_iter().map(|entry| DirectoryEntryResult {
                file_name: String::from_utf8_lossy(&entry.name.0).into_owned(),
                is_directory: entry.is_directory,
                is_file: entry.is_file,
            });
            text(id, attempt, &ReadDirectoryResult { entries: entries.collect() })
        }
        FsDone::Walk { entries, errors, truncated } => {
            let kind = |is_directory| if is_directory { WalkKind::Directory } else { WalkKind::File };
            let entries = entries
                .into_iter()
                .map(|entry| WalkEntryResult { path: WirePath::Local(entry.path), kind: kind(entry.is_directory) });
            let errors = errors.into_iter().map(|(path, message)| WalkErrorResult { path: WirePath::Local(path), message });
            text(id, attempt, &WalkResult { entries: entries.collect(), errors: errors.collect(), truncated })
        }
    }
}

/// A large file: the worker decided and opened, the bytes go from the file into the message here.
async fn content(id: &Id, attempt: &str, file: Option<OwnedFd>, form: Form, blocking: &Blocking) -> Result<Message, RpcError> {
    let file = file.ok_or_else(|| reply::internal(format!("{attempt}: the worker sent no descriptor")))?;
    let id = id.clone();
    let read = blocking.run(move || {
        let limit = usize::try_from(READ_LIMIT).unwrap_or(usize::MAX);
        let bytes = read_whole(&file, limit)?;
        Ok::<_, Errno>((bytes.len() <= limit).then(|| form.bytes_result(&id, CONTENT, bytes, "")))
    });
    match read.await {
        Ok(Ok(Some(message))) => Ok(message),
        Ok(Ok(None)) => Err(reply::fs_error(attempt, &FsError::TooLarge(READ_LIMIT))),
        Ok(Err(errno)) => Err(reply::os_error(attempt, errno)),
        Err(lost) => Err(reply::internal(format!("{attempt}: {lost}"))),
    }
}

/// Reads by the size that the file has now, and on if it grows, to one byte above the limit.
fn read_whole(file: &OwnedFd, limit: usize) -> Result<Vec<u8>, Errno> {
    let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0).min(limit);
    let mut bytes = blocking::read_at(file, 0, size + 1)?;
    while bytes.len() > size && bytes.len() <= limit {
        let more = blocking::read_at(file, bytes.len() as u64, (limit + 1 - bytes.len()).min(1 << 20))?;
        if more.is_empty() {
            break;
        }
        bytes.extend_from_slice(&more);
    }
    Ok(bytes)
}

fn text(id: &Id, attempt: &str, result: &impl Serialize) -> Result<String, RpcError> {
    rpc::result_text(id, result).map_err(|error| reply::internal(format!("{attempt}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_too_long_is_refused_and_not_repeated() {
        let path = |length: usize| WirePath::parse(&format!("/{}", "p".repeat(length - 1))).unwrap();
        assert_eq!(local(&path(MAX_PATH_LENGTH)).unwrap().len(), MAX_PATH_LENGTH, "control: the longest that it takes");
        let refused = local(&path(14 << 20)).unwrap_err();
        assert_eq!(refused.code, code::INTERNAL);
        assert_eq!(
            refused.message,
            "a path of 14680064 bytes, where the system takes up to 4095: File name too long (os error 36)"
        );
    }

    fn options(depth: u64, directories: u64, entries: u64) -> WalkOptions {
        WalkOptions {
            max_depth: depth,
            max_directories: directories,
            max_entries: entries,
            follow_directory_symlinks: false,
            prune_hidden_directories: false,
        }
    }

    #[test]
    fn bounds_of_a_walk() {
        assert!(bounds(&options(64, 10_000, 50_000)).is_ok());
        for zero in [options(1, 0, 1), options(1, 1, 0)] {
            assert_eq!(bounds(&zero).unwrap_err().message, "filesystem walk limits must be greater than zero");
        }
        for above in [options(65, 1, 1), options(1, 10_001, 1), options(1, 1, u64::MAX)] {
            assert!(bounds(&above).unwrap_err().message.ends_with("depth=64, directories=10000, entries=50000"));
        }
    }

    #[test]
    fn a_file_is_read_to_its_end_or_one_byte_above_the_limit() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        blocking::write_at(&file, 0, &[7; 5000]).unwrap();
        assert_eq!(read_whole(&file, 10_000).unwrap().len(), 5000);
        assert_eq!(read_whole(&file, 5000).unwrap().len(), 5000);
        assert_eq!(read_whole(&file, 4999).unwrap().len(), 5000);
        assert_eq!(read_whole(&file, 10).unwrap().len(), 11);
    }
}

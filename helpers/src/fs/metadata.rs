//! What a path is, and where it leads.

use super::rules::Want;
use super::trace::Last;
use super::view::{Follow, View};
use super::{is, os};
use portcullis_protocol::helper::{FileMetadata, FsDone, FsError};
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{AtFlags, CWD, FileType, OFlags, Statx, StatxFlags, StatxTimestamp, statx};
use rustix::io::Errno;
use std::path::Path;

/// Type, size and times.
pub(super) fn get(view: &View, path: &AbsolutePath, follow: bool) -> Result<FsDone, FsError> {
    let path = path.as_path();
    if !follow {
        let stat = look(view, path, Follow::None).map_err(link_in_the_way)?;
        return Ok(FsDone::Metadata(metadata(&stat, false, birth(&stat))));
    }
    let own = look(view, path, Follow::Parents)?;
    let is_symlink = kind(&own) == FileType::Symlink;
    let target = if is_symlink { look(view, path, Follow::All)? } else { own };
    // Clients of this wire get a birth time only where they ask for no links.
    Ok(FsDone::Metadata(metadata(&target, is_symlink, 0)))
}

/// The path without links; it must exist.
pub(super) fn canonicalize(view: &View, path: &AbsolutePath) -> Result<FsDone, FsError> {
    let trace = view.trace(path.as_path(), Last::Follow)?;
    if let Some(rules) = view.rules() {
        rules.permit(&trace.real, Want::Stat)?;
        rules.check_root(&trace.real)?;
    }
    trace.exists()?;
    AbsolutePath::new(&trace.real).map(FsDone::Path).map_err(|_relative| os(Errno::INVAL))
}

/// A link where none is allowed has its own answer in operations on names.
pub(super) fn link_in_the_way(error: FsError) -> FsError {
    if is(&error, Errno::LOOP) { FsError::Link } else { error }
}

fn look(view: &View, path: &Path, follow: Follow) -> Result<Statx, FsError> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    match (view.rules(), follow) {
        (None, Follow::All) => statx(CWD, path, AtFlags::empty(), wanted).map_err(os),
        (None, Follow::Parents) => statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted).map_err(os),
        _judged => {
            let opened = view.open(path, follow, Want::Stat, OFlags::PATH)?;
            statx(&opened.descriptor, "", AtFlags::EMPTY_PATH, wanted).map_err(os)
        }
    }
}

fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn metadata(stat: &Statx, is_symlink: bool, created_ms: i64) -> FileMetadata {
    FileMetadata {
        is_directory: kind(stat) == FileType::Directory,
        is_file: kind(stat) == FileType::RegularFile,
        is_symlink,
        size: stat.stx_size,
        created_ms,
        modified_ms: milliseconds(stat.stx_mtime),
    }
}

fn birth(stat: &Statx) -> i64 {
    let known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    if known { milliseconds(stat.stx_btime) } else { 0 }
}

fn milliseconds(time: StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1000).saturating_add(i64::from(time.tv_nsec / 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::super::carry_out;
    use super::super::tests::{Tree, confined, refusal};
    use super::*;
    use portcullis_protocol::helper::FsOperation;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;

    fn metadata_of(view: &View, path: AbsolutePath, follow: bool) -> Result<FileMetadata, FsError> {
        let answer = carry_out(view, FsOperation::GetMetadata { path, follow }, b"", Vec::new());
        answer.outcome.map(|done| match done {
            FsDone::Metadata(metadata) => metadata,
            other => panic!("{other:?}"),
        })
    }

    fn canonical(view: &View, path: AbsolutePath) -> Result<AbsolutePath, FsError> {
        let answer = carry_out(view, FsOperation::Canonicalize { path }, b"", Vec::new());
        answer.outcome.map(|done| match done {
            FsDone::Path(path) => path,
            other => panic!("{other:?}"),
        })
    }

    fn example() -> Tree {
        let tree = Tree::new();
        tree.put("f", b"12345");
        tree.put("d/x", b"");
        tree.link("ln", "f");
        tree.link("lnd", "d");
        tree.link("dang", "nope");
        tree.link("loop", "loop");
        tree.fifo("ff");
        tree
    }

    #[test]
    fn kinds() {
        let tree = example();
        for view in [View::unconfined(), tree.writable()] {
            let kind = |name: &str| {
                let of = metadata_of(&view, tree.path(name), true).unwrap();
                (of.is_directory, of.is_file, of.is_symlink)
            };
            assert_eq!(kind("f"), (false, true, false));
            assert_eq!(kind("ln"), (false, true, true));
            assert_eq!(kind("lnd"), (true, false, true));
            assert_eq!(kind("lnd/x"), (false, true, false));
            assert_eq!(kind("ff"), (false, false, false));
            assert_eq!(metadata_of(&view, tree.path("ln"), true).unwrap().size, 5);
        }
    }

    #[test]
    fn times() {
        let tree = example();
        let expect = std::fs::metadata(tree.at("f")).unwrap();
        let modified = expect.mtime() * 1000 + expect.mtime_nsec() / 1_000_000;
        let followed = metadata_of(&View::unconfined(), tree.path("f"), true).unwrap();
        assert_eq!((followed.modified_ms, followed.created_ms), (modified, 0));
        let created = metadata_of(&View::unconfined(), tree.path("f"), false).unwrap().created_ms;
        let birth = expect.created().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        assert_eq!(u128::try_from(created).unwrap(), birth.map_or(0, |birth| birth.as_millis()));
    }

    #[test]
    fn errors() {
        let tree = example();
        for view in [View::unconfined(), tree.writable()] {
            let error = |name: &str, follow| metadata_of(&view, tree.path(name), follow).unwrap_err();
            assert_eq!(error("nope", true), os(Errno::NOENT));
            assert_eq!(error("dang", true), os(Errno::NOENT));
            assert_eq!(error("loop", true), os(Errno::LOOP));
            assert_eq!(error("f/x", true), os(Errno::NOTDIR));
            assert_eq!(error("ln", false), FsError::Link);
            assert_eq!(error("dang", false), FsError::Link);
            assert_eq!(error("lnd/x", false), os(Errno::NOTDIR));
        }
    }

    #[test]
    fn links_are_resolved_and_bytes_survive() {
        let tree = example();
        let odd = std::ffi::OsStr::from_bytes(b"bad\xff");
        std::fs::write(tree.at(odd), b"").unwrap();
        let root = AbsolutePath::new(std::fs::canonicalize(tree.root()).unwrap()).unwrap();
        for view in [View::unconfined(), tree.writable()] {
            let expect = |name: &str| AbsolutePath::new(root.as_path().join(name)).unwrap();
            assert_eq!(canonical(&view, tree.path("lnd/x")), Ok(expect("d/x")));
            assert_eq!(canonical(&view, tree.path(odd)).unwrap().as_path(), root.as_path().join(odd));
            assert_eq!(canonical(&view, tree.path("dang")), Err(os(Errno::NOENT)));
            assert_eq!(canonical(&view, tree.path("loop")), Err(os(Errno::LOOP)));
        }
    }

    #[test]
    fn what_may_not_be_seen_cannot_be_probed() {
        let (tree, other) = (example(), Tree::new());
        other.put("there", b"");
        tree.link("d/out", other.at("there"));
        tree.link("d/out_missing", other.at("missing"));
        let only = tree.at("d");
        let view = confined(&[(&only, "read")]);
        for path in [other.path("there"), other.path("missing"), tree.path("f"), tree.path("d/out"), tree.path("d/out_missing")] {
            assert_eq!(refusal(metadata_of(&view, path.clone(), true)), 2, "{path}");
            assert_eq!(refusal(canonical(&view, path)), 2);
        }
        // A directory above a grant is there, and so is the grant.
        assert!(metadata_of(&view, tree.path(""), true).unwrap().is_directory);
        assert!(metadata_of(&view, tree.path("d/x"), true).unwrap().is_file);
    }
}

//! Waiting for what is not there. The worker judges and arms; who holds the descriptor waits, and needs to open nothing for it.

use super::rules::Want;
use super::view::{Follow, View};
use super::{Answer, is, os};
use portcullis_protocol::helper::{FsDone, FsError};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use rustix::fs::OFlags;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Watches for each of the paths in the deepest directory on its way that is there. What cannot be watched, or is there already,
/// makes that none: the client has to look for itself.
pub(super) fn missing(view: &View, path: &AbsolutePath, others: &[AbsolutePath], present: Option<&AbsolutePath>) -> Answer {
    let missing: Vec<&AbsolutePath> = others.iter().chain([path]).collect();
    match arm(view, &missing, present) {
        Ok((events, names)) => Answer { outcome: Ok(FsDone::Watching(names)), payload: Vec::new(), descriptor: Some(events) },
        Err(FsError::Stale) => FsError::Stale.into(),
        Err(_cannot_be_watched) => Ok(FsDone::Watching(Vec::new())).into(),
    }
}

fn arm(view: &View, missing: &[&AbsolutePath], present: Option<&AbsolutePath>) -> Result<(OwnedFd, Vec<(i32, Bytes)>), FsError> {
    if let Some(present) = present {
        view.stat(present.as_path(), Follow::None)?;
    }
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(os)?;
    let mut names = Vec::with_capacity(missing.len());
    for path in missing {
        let (directory, name) = edge(view, path.as_path())?;
        let opened = view.open(directory, Follow::None, Want::List, OFlags::PATH | OFlags::DIRECTORY)?;
        // The directory that was judged, whatever its name leads to by now.
        let place = format!("/proc/self/fd/{}", opened.descriptor.as_raw_fd());
        let flags = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        let watch = inotify::add_watch(&events, place, flags | WatchFlags::ONLYDIR).map_err(os)?;
        names.push((watch, Bytes(name.as_bytes().to_vec())));
    }
    // What came between the look and the watch was told to nobody.
    for (path, (_, name)) in missing.iter().zip(&names) {
        if edge(view, path.as_path())?.1.as_bytes() != name.0 {
            return Err(os(Errno::EXIST));
        }
    }
    Ok((events, names))
}

/// The deepest directory on the way to a path that is there, and the name that is missing in it.
fn edge<'a>(view: &View, path: &'a Path) -> Result<(&'a Path, &'a OsStr), FsError> {
    let mut missing = path;
    loop {
        // What the policy hides is missing for ever.
        if view.rules().is_some_and(|rules| !rules.is_visible(missing)) {
            return Err(os(Errno::ACCESS));
        }
        match view.stat(missing, Follow::None) {
            Err(error) if is(&error, Errno::NOENT) => {}
            Err(error) => return Err(error),
            Ok(_there) => return Err(os(Errno::EXIST)),
        }
        let (Some(parent), Some(name)) = (missing.parent(), missing.file_name()) else { return Err(os(Errno::EXIST)) };
        match view.stat(parent, Follow::None) {
            Err(error) if is(&error, Errno::NOENT) => missing = parent,
            Err(error) => return Err(error),
            Ok(_there) => return Ok((parent, name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Tree, confined};
    use super::*;

    #[track_caller]
    fn check(view: &View, tree: &Tree, path: &str, expect: Option<&str>) {
        let answer = missing(view, &tree.path(path), &[], None);
        let Ok(FsDone::Watching(names)) = answer.outcome else { panic!("{path}") };
        let name = names.first().map(|(_, name)| String::from_utf8_lossy(&name.0).into_owned());
        assert_eq!((name.as_deref(), answer.descriptor.is_some()), (expect, expect.is_some()), "{path}");
    }

    #[test]
    fn the_next_name_on_the_way_is_waited_for() {
        let tree = Tree::new();
        tree.put("d/f", b"");
        tree.link("l", "d");
        tree.link("dangling", "nowhere");
        let root = tree.root().to_owned();
        for view in [View::unconfined(), confined(&[(&root, "read")])] {
            check(&view, &tree, "x", Some("x"));
            check(&view, &tree, "d/x/y", Some("x"));
            for path in ["d/f", "d", "", "d/f/x", "l/x", "dangling"] {
                check(&view, &tree, path, None);
            }
        }
    }

    #[test]
    fn what_a_policy_hides_is_not_waited_for() {
        let tree = Tree::new();
        tree.mkdir("open/denied");
        tree.mkdir("closed");
        let (open, denied) = (tree.at("open"), tree.at("open/denied"));
        let view = confined(&[(&open, "read"), (&denied, "deny")]);
        check(&view, &tree, "open/x", Some("x"));
        for path in ["closed/x", "open/denied/x", "x"] {
            check(&view, &tree, path, None);
            assert!(tree.at(path).symlink_metadata().is_err());
            let control = View::unconfined();
            check(&control, &tree, path, Some("x"));
        }
    }
}

//! Whether what a view holds is still held.
//!
//! A mount covers a directory entry, not a name. Whoever moves or replaces the entry from outside, which no sandbox can forbid,
//! takes the cover along, and what stands under the name next is bare. Then the sandbox has to end. The same goes for what is
//! denied and did not exist, once it does.
//!
//! The kernel tells of such changes (inotify(7)). Where it does not, since the user's watches are used up or a directory cannot be
//! listed, they are looked for every now and then.

use portcullis_sandbox::mounts::Cover;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, CWD, StatxFlags, statat, statx};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Room for some events with long names at once.
const BUFFER: usize = 16 * 1024;

/// How often to look where nobody tells: rarely enough to cost nothing.
const EVERY: Duration = Duration::from_millis(200);

/// What must stay as it is.
#[derive(Debug, Default)]
pub(crate) struct Covers {
    events: Option<OwnedFd>,
    all: Vec<Held>,
    /// What a watched directory has to do with, by its watch.
    watched: HashMap<i32, BTreeSet<usize>>,
    /// Some are not told of.
    must_look: bool,
}

#[derive(Debug)]
struct Held {
    path: PathBuf,
    /// The cover; none of what must not come to be.
    mount: Option<u64>,
}

impl Covers {
    /// Begins to watch, and takes none for granted: ask [`Covers::lost`] next.
    pub(crate) fn watch(covered: &[Cover], awaited: &[PathBuf]) -> Self {
        let covered = covered.iter().map(|cover| Held { path: cover.path.clone(), mount: Some(cover.mount) });
        let awaited = awaited.iter().map(|path| Held { path: path.clone(), mount: None });
        let mut covers = Self { all: covered.chain(awaited).collect(), ..Self::default() };
        if !covers.all.is_empty() {
            covers.events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
            (0..covers.all.len()).for_each(|nth| covers.arm(nth));
        }
        covers
    }

    /// Watches the directory in which something would happen to one of them.
    fn arm(&mut self, nth: usize) {
        let Some(held) = self.all.get(nth) else { return };
        let (place, flags) = match held.mount {
            Some(_) => (Some(held.path.as_path()), WatchFlags::MOVE | WatchFlags::DELETE),
            None => (held.path.ancestors().take_while(|place| !exists(place)).last(), WatchFlags::CREATE | WatchFlags::MOVE),
        };
        let Some(directory) = place.and_then(Path::parent) else { return };
        let flags = flags | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR | WatchFlags::MASK_ADD;
        match self.events.as_ref().map(|events| inotify::add_watch(events, directory, flags)) {
            Some(Ok(watch)) => drop(self.watched.entry(watch).or_default().insert(nth)),
            Some(Err(_)) | None => self.must_look = true,
        }
    }

    /// What to wait for, if anything is told.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// How long to wait at most.
    pub(crate) fn patience(&self) -> Option<Duration> {
        self.must_look.then_some(EVERY)
    }

    /// Takes up what happened: a path of which the rule is not held any more, if there is one.
    pub(crate) fn lost(&mut self) -> Option<PathBuf> {
        let mut suspects = if self.must_look { (0..self.all.len()).collect() } else { self.told_of() };
        suspects.retain(|nth| self.all.get(*nth).is_some());
        for nth in suspects {
            let held = &self.all[nth];
            match held.mount {
                Some(mount) if mount_of(&held.path) != Ok(mount) => return Some(held.path.clone()),
                Some(_) => {}
                None if exists(&held.path) => return Some(held.path.clone()),
                // It may have come closer.
                None => self.arm(nth),
            }
        }
        // Between a look and a watch it may have come to be.
        self.all.iter().find(|held| held.mount.is_none() && exists(&held.path)).map(|held| held.path.clone())
    }

    fn told_of(&self) -> BTreeSet<usize> {
        let mut suspects = BTreeSet::new();
        let Some(events) = &self.events else { return suspects };
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(events, &mut buffer);
        // Ends when nothing is left to read.
        while let Ok(event) = reader.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                suspects.extend(0..self.all.len());
                continue;
            }
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            let concerned = self.watched.get(&event.wd()).into_iter().flatten();
            // Without a name it is the directory itself. What is awaited may lie further down.
            let fits = |nth: &&usize| {
                name.is_none_or(|name| self.all.get(**nth).is_some_and(|held| held.path.iter().any(|part| part == name)))
            };
            suspects.extend(concerned.filter(fits));
        }
        suspects
    }
}

fn exists(path: &Path) -> bool {
    !matches!(statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT | Errno::NOTDIR))
}

fn mount_of(path: &Path) -> Result<u64, Errno> {
    statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, StatxFlags::MNT_ID).map(|stat| stat.stx_mnt_id)
}

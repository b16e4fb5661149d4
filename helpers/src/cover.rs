//! Whether what a view holds is still held.
//!
//! A mount covers a directory entry, not a name. Whoever moves or replaces the entry from outside, which no sandbox can forbid,
//! takes the cover along, and what stands under the name next is bare. Then the sandbox has to end. The same goes for what is
//! denied and did not exist, once it does.
//!
//! In the view of an fs worker the same is held for as long as the view is used: with the first loss it is replaced, before the next
//! call.
//!
//! The kernel tells of such changes (inotify(7)). Where it does not, since the user's watches are used up or a directory cannot be
//! listed, they are looked for every now and then.

use portcullis_sandbox::mounts::{Cover, has_come};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, CWD, StatxFlags, statat, statx};
use rustix::io::Errno;
use std::collections::hash_map::Entry;
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
    /// What a watched directory has to do with, by its watch, and whether it is that itself, so that every name in it counts.
    watched: HashMap<i32, BTreeSet<(usize, bool)>>,
    /// Those that are not told of.
    untold: BTreeSet<usize>,
    whose: Whose,
    /// They are still to be looked at for the first time since they are watched.
    is_new: bool,
    /// The first that was lost; what follows changes nothing.
    lost: Option<PathBuf>,
}

/// In whose view they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Whose {
    #[default]
    Process,
    /// An fs worker's, which is replaced at no loss: every directory on the way is watched too, and an empty directory is as good as a
    /// missing one ([`has_come`]).
    Files,
}

#[derive(Debug)]
struct Held {
    path: PathBuf,
    /// The cover; none of what must not come to be.
    mount: Option<u64>,
}

/// Watches of one round, by their directories and what they tell.
type Known = HashMap<(PathBuf, u32), Option<i32>>;

impl Covers {
    /// Begins to watch, and takes none for granted: ask [`Covers::lost`] next.
    pub(crate) fn watch(covered: &[Cover], awaited: &[PathBuf]) -> Self {
        Self::begin(covered, awaited, Whose::Process)
    }

    /// The same in the view of an fs worker.
    pub(crate) fn watch_ways(covered: &[Cover], awaited: &[PathBuf]) -> Self {
        Self::begin(covered, awaited, Whose::Files)
    }

    fn begin(covered: &[Cover], awaited: &[PathBuf], whose: Whose) -> Self {
        let covered = covered.iter().map(|cover| Held { path: cover.path.clone(), mount: Some(cover.mount) });
        let awaited = awaited.iter().map(|path| Held { path: path.clone(), mount: None });
        let mut covers = Self { all: covered.chain(awaited).collect(), whose, is_new: true, ..Self::default() };
        if !covers.all.is_empty() {
            covers.events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
            let mut known = Known::new();
            (0..covers.all.len()).for_each(|nth| covers.arm(nth, &mut known));
        }
        covers
    }

    /// Watches the directories in which something would happen to one of them.
    fn arm(&mut self, nth: usize, known: &mut Known) {
        let Some(held) = self.all.get(nth) else { return };
        let leaves = WatchFlags::MOVE | WatchFlags::DELETE;
        let comes = WatchFlags::CREATE | WatchFlags::MOVE;
        let mut places = Vec::new();
        let way = match held.mount {
            Some(_) => held.path.parent().map(|directory| (directory, leaves)),
            None => match held.path.ancestors().take_while(|place| !exists(place)).last() {
                Some(missing) => missing.parent().map(|directory| (directory, comes)),
                // It is there, and empty.
                None => {
                    places.push((held.path.clone(), comes));
                    held.path.parent().map(|directory| (directory, leaves))
                }
            },
        };
        if let Some((directory, flags)) = way {
            places.push((directory.to_owned(), flags));
            let above = directory.ancestors().skip(1).filter(|_| self.whose == Whose::Files);
            places.extend(above.map(|above| (above.to_owned(), leaves)));
        }
        for (directory, flags) in places {
            let is_itself = self.all.get(nth).is_some_and(|held| held.path == directory);
            let flags = flags | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR | WatchFlags::MASK_ADD;
            let add = |directory: &Path| inotify::add_watch(self.events.as_ref()?, directory, flags).ok();
            let watch = match known.entry((directory, flags.bits())) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let watch = add(&new.key().0);
                    *new.insert(watch)
                }
            };
            match watch {
                Some(watch) => drop(self.watched.entry(watch).or_default().insert((nth, is_itself))),
                None => drop(self.untold.insert(nth)),
            }
        }
    }

    /// What to wait for, if anything is told.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// How long to wait at most.
    pub(crate) fn patience(&self) -> Option<Duration> {
        (!self.untold.is_empty()).then_some(EVERY)
    }

    /// Takes up what happened: a path of which the rule is not held any more, if there is one.
    pub(crate) fn lost(&mut self) -> Option<PathBuf> {
        if self.lost.is_none() && !self.all.is_empty() {
            self.lost = self.look();
        }
        self.lost.clone()
    }

    fn look(&mut self) -> Option<PathBuf> {
        let told = self.told_of();
        if std::mem::take(&mut self.is_new) {
            // They were watched before. A process's are told of; two of them may cover one path, of which the upper one is seen.
            let is_due = |held: &&Held| self.whose == Whose::Files || held.mount.is_none();
            return self.all.iter().filter(is_due).find(|held| self.is_lost(held)).map(|held| held.path.clone());
        }
        let mut known = Known::new();
        for nth in told.into_iter().chain(self.untold.clone()) {
            if self.all.get(nth).is_none_or(|held| self.is_lost(held)) {
                return self.all.get(nth).map(|held| held.path.clone());
            }
            if self.whose == Whose::Files || self.all[nth].mount.is_none() {
                // It may have come closer, or the way to it may be another one. Between a look and a watch it may have come to be.
                self.arm(nth, &mut known);
                if self.is_lost(&self.all[nth]) {
                    return Some(self.all[nth].path.clone());
                }
            }
        }
        None
    }

    fn is_lost(&self, held: &Held) -> bool {
        match (held.mount, self.whose) {
            (Some(mount), _) => mount_of(&held.path) != Ok(mount),
            (None, Whose::Process) => exists(&held.path),
            (None, Whose::Files) => has_come(&held.path),
        }
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
            let fits = |(nth, is_itself): &&(usize, bool)| {
                let is_on_way = |name| self.all.get(*nth).is_some_and(|held| held.path.iter().any(|part| part == name));
                *is_itself || name.is_none_or(is_on_way)
            };
            suspects.extend(concerned.filter(fits).map(|(nth, _)| nth));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Awaits a path in a view of files, told by the kernel or not.
    fn awaiting(path: &Path, is_told: bool) -> Covers {
        let mut covers = Covers::watch_ways(&[], &[path.to_owned()]);
        if !is_told {
            covers = Covers { events: None, untold: BTreeSet::from([0]), ..covers };
        }
        assert_eq!(covers.lost(), None);
        covers
    }

    #[test]
    fn what_is_awaited_is_seen_whether_the_kernel_tells_or_not() {
        for is_told in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let top = directory.path().canonicalize().unwrap();
            let (path, beside) = (top.join("way/later/x"), top.join("way/beside"));
            let mut covers = awaiting(&path, is_told);
            assert_eq!(covers.patience().is_some(), !is_told);
            fs::create_dir_all(&beside).unwrap();
            assert_eq!(covers.lost(), None, "another name");
            // An empty directory says nothing, and what comes in it is seen.
            fs::create_dir_all(&path).unwrap();
            assert_eq!(covers.lost(), None);
            fs::remove_dir(&path).unwrap();
            assert_eq!(covers.lost(), None);
            fs::create_dir(&path).unwrap();
            assert_eq!(covers.lost(), None);
            fs::write(path.join("f"), "").unwrap();
            assert_eq!(covers.lost(), Some(path.clone()));
            // Once and for all.
            fs::remove_dir_all(&path).unwrap();
            assert_eq!(covers.lost(), Some(path));
        }
    }

    #[test]
    fn what_comes_with_a_directory_further_up_is_seen() {
        for is_told in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let top = directory.path().canonicalize().unwrap();
            fs::create_dir_all(top.join("a/b/c")).unwrap();
            fs::create_dir_all(top.join("other/b/c")).unwrap();
            fs::write(top.join("other/b/c/x"), "").unwrap();
            let mut covers = awaiting(&top.join("a/b/c/x"), is_told);
            fs::rename(top.join("a"), top.join("old")).unwrap();
            assert_eq!(covers.lost(), None);
            fs::rename(top.join("other"), top.join("a")).unwrap();
            assert_eq!(covers.lost(), Some(top.join("a/b/c/x")));
        }
    }

    #[test]
    fn another_mount_than_the_cover_is_a_loss() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let mount = mount_of(&path).unwrap();
        for (mount, expect) in [(mount, None), (mount + 1_000_000, Some(path.clone()))] {
            let cover = Cover { path: path.clone(), mount };
            assert_eq!(Covers::watch_ways(&[cover], &[]).lost(), expect);
        }
    }
}

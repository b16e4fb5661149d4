//! Whether the covers of a view are still in place.
//!
//! A mount covers a directory entry, not a name. A process outside that moves or replaces the entry takes the cover along, and
//! the next file of that name is not covered. The sandbox cannot prevent this, so it has to end. It also has to end when a denied
//! path that was missing comes to exist.
//!
//! The view of an fs worker is watched likewise: after the first loss the view is replaced, before the next call.
//!
//! The kernel reports such changes (inotify(7)). Where it does not, because the user's watches are used up or a directory cannot
//! be listed, the covers are checked at intervals. A process can cause other work for its init at any rate, and a client can change
//! files at any rate. So the time of the next check is fixed, and one check reads a bounded number of events: if there are more,
//! it checks every cover instead.

use portcullis_sandbox::mounts::{Cover, Found, FoundKind, has_come};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, CWD, StatxFlags, statat, statx};
use rustix::io::Errno;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Room for some events with long names at once.
const BUFFER: usize = 16 * 1024;

/// The interval of checks where the kernel reports nothing: long enough to cost nothing.
const EVERY: Duration = Duration::from_millis(200);

/// Bound of the events that one check reads: a quarter of what the kernel queues by default, and some milliseconds of work.
const MOST_EVENTS: usize = 4096;

/// Bound of the first looks at all covers, while their directories change.
const MOST_LOOKS: usize = 8;

/// What must stay as it is.
#[derive(Debug, Default)]
pub(crate) struct Covers {
    events: Option<OwnedFd>,
    all: Vec<Held>,
    /// The covers that each watched directory concerns, by its watch.
    watched: HashMap<i32, Watched>,
    /// Those that are not told of.
    untold: BTreeSet<usize>,
    /// When those are checked next; none before the first check.
    next: Option<Instant>,
    whose: Whose,
    /// They are still to be looked at for the first time since they are watched.
    is_new: bool,
    /// The first lost cover; later losses change nothing.
    lost: Option<PathBuf>,
}

/// The covers that a directory concerns: an event costs no search through all of them.
#[derive(Debug, Default)]
struct Watched {
    /// By the name in the directory at which the path of the cover goes on.
    by_name: HashMap<OsString, BTreeSet<usize>>,
    /// Those of which the directory is the covered path itself, so that every name in it counts.
    whole: BTreeSet<usize>,
}

impl Watched {
    /// Those that an event may have changed; without a name it is one of the directory itself.
    fn concerned(&self, name: Option<&OsStr>) -> impl Iterator<Item = usize> {
        let named = name.and_then(|name| self.by_name.get(name)).into_iter().flatten();
        let all = self.by_name.values().filter(move |_| name.is_none()).flatten();
        self.whole.iter().chain(named).chain(all).copied()
    }
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
    /// A deny glob matched it. Once it is gone nothing lies bare: its name must not come to be again.
    may_go: bool,
}

/// Watches of one round, by their directories and flags.
type Known = HashMap<(PathBuf, u32), Option<i32>>;

impl Covers {
    /// Begins to watch, and takes none for granted: ask [`Covers::lost`] next.
    /// What was `found` by a look at the files alone may go: another process that makes and removes such things ends nothing.
    pub(crate) fn watch(covered: &[Cover], awaited: &[PathBuf], found: &[Found]) -> Self {
        let of = |kind: FoundKind| found.iter().filter(move |found| found.kind == kind).map(|found| found.path.as_path());
        let (denied, nested): (HashSet<_>, HashSet<_>) = (of(FoundKind::Denied).collect(), of(FoundKind::Nested).collect());
        let leading: HashSet<_> = denied.iter().chain(&nested).flat_map(|path| path.ancestors().skip(1)).collect();
        let is_found = |path: &Path| denied.contains(path) || nested.contains(path) || leading.contains(path);
        // A directory that leads to what the policy names is held for that.
        let all = covered.iter().map(|cover| &cover.path).chain(awaited).map(PathBuf::as_path);
        let strict: HashSet<_> = all.filter(|path| !is_found(path)).flat_map(Path::ancestors).collect();
        // A nested repository that is made later is not held, so that one that is replaced ends nothing either.
        let is_held = |path: &Path| strict.contains(path) || denied.contains(path) || !is_found(path);
        let covered: Vec<Cover> = covered.iter().filter(|cover| is_held(&cover.path)).cloned().collect();
        let mut covers = Self::begin(&covered, awaited, Whose::Process);
        for held in &mut covers.all {
            held.may_go = denied.contains(held.path.as_path()) && !strict.contains(held.path.as_path());
        }
        covers
    }

    /// The same in the view of an fs worker.
    pub(crate) fn watch_ways(covered: &[Cover], awaited: &[PathBuf]) -> Self {
        Self::begin(covered, awaited, Whose::Files)
    }

    fn begin(covered: &[Cover], awaited: &[PathBuf], whose: Whose) -> Self {
        // Of two covers of one path, the later one lies on the other.
        let seen: HashMap<&Path, u64> = covered.iter().map(|cover| (cover.path.as_path(), cover.mount)).collect();
        let covered = covered.iter().filter(|cover| seen.get(cover.path.as_path()) == Some(&cover.mount));
        let covered = covered.map(|cover| Held { path: cover.path.clone(), mount: Some(cover.mount), may_go: false });
        let awaited = awaited.iter().map(|path| Held { path: path.clone(), mount: None, may_go: false });
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
            let below =
                self.all.get(nth).and_then(|held| held.path.strip_prefix(&directory).ok()?.iter().next().map(OsString::from));
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
                Some(watch) => {
                    let Watched { by_name, whole } = self.watched.entry(watch).or_default();
                    below.map_or(whole, |name| by_name.entry(name).or_default()).insert(nth);
                }
                None => drop(self.untold.insert(nth)),
            }
        }
    }

    /// What to wait for, if anything is told.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// How long to wait at most before [`Covers::lost`] is called. Other events do not extend it.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let left = || self.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(Instant::now()));
        (!self.untold.is_empty()).then(left)
    }

    /// Whether [`Covers::lost`] is to be called although nothing was reported.
    pub(crate) fn is_due(&self) -> bool {
        self.patience().is_some_and(|left| left.is_zero())
    }

    /// Takes up what happened: a path of which the rule is not held any more, if there is one. It ends after a bounded time, at
    /// any rate at which files are changed meanwhile.
    pub(crate) fn lost(&mut self) -> Option<PathBuf> {
        if self.lost.is_none() && !self.all.is_empty() {
            self.lost = self.look();
        }
        self.lost.clone()
    }

    fn look(&mut self) -> Option<PathBuf> {
        let mut suspects = self.told_of();
        // An fs worker is asked before each call, and must not serve one in an outdated view.
        if self.whose == Whose::Files || self.next.is_none() || self.is_due() {
            suspects.extend(&self.untold);
            self.next = Some(Instant::now() + EVERY);
        }
        if std::mem::take(&mut self.is_new) {
            return self.look_first();
        }
        let mut known = Known::new();
        for nth in suspects {
            self.let_go(nth);
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

    /// Looks at all of them. They were mounted before they were watched, and a move between the two is reported by nothing. A directory
    /// may have been another one while it was watched: if anything is reported meanwhile, all are watched and looked at again.
    fn look_first(&mut self) -> Option<PathBuf> {
        for _look in 0..MOST_LOOKS {
            let gone = (0..self.all.len()).filter(|nth| self.let_go(*nth)).count();
            if let Some(lost) = self.all.iter().find(|held| self.is_lost(held)) {
                return Some(lost.path.clone());
            }
            if self.told_of().is_empty() && gone == 0 {
                return None;
            }
            let mut known = Known::new();
            (0..self.all.len()).for_each(|nth| self.arm(nth, &mut known));
        }
        // It goes on: they are looked at by the clock too.
        self.untold = (0..self.all.len()).collect();
        None
    }

    /// Awaits a denied name from here on, if it is gone.
    fn let_go(&mut self, nth: usize) -> bool {
        if let Some(held) = self.all.get_mut(nth).filter(|held| held.may_go && held.mount.is_some())
            && matches!(mount_of(&held.path), Err(Errno::NOENT | Errno::NOTDIR))
        {
            held.mount = None;
            return true;
        }
        false
    }

    fn is_lost(&self, held: &Held) -> bool {
        match (held.mount, self.whose) {
            (Some(mount), _) => mount_of(&held.path) != Ok(mount),
            (None, Whose::Process) => exists(&held.path),
            (None, Whose::Files) => has_come(&held.path),
        }
    }

    /// What reported events concern. If there are more events than one check reads, or the kernel dropped some, that is everything.
    fn told_of(&self) -> BTreeSet<usize> {
        let (mut suspects, mut moved) = (BTreeSet::new(), BTreeSet::new());
        let Some(events) = &self.events else { return suspects };
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(events, &mut buffer);
        for nth in 0.. {
            // Fails when nothing is left to read.
            let Ok(event) = reader.next() else { break };
            if nth == MOST_EVENTS || event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                return (0..self.all.len()).collect();
            }
            let Some(watched) = self.watched.get(&event.wd()) else { continue };
            match event.file_name() {
                Some(name) => suspects.extend(watched.concerned(Some(OsStr::from_bytes(name.to_bytes())))),
                // Once for each directory, since it concerns all that the directory does.
                None => drop(moved.insert(event.wd())),
            }
        }
        suspects.extend(moved.iter().filter_map(|watch| self.watched.get(watch)).flat_map(|watched| watched.concerned(None)));
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
    use portcullis_protocol::path::AbsolutePath;
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
            // An empty directory is not a loss, and a file made in it is seen.
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

    #[test]
    fn the_first_look_of_a_process_compares_every_cover() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let mount = mount_of(&path).unwrap();
        let cover = |mount| Cover { path: path.clone(), mount };
        // What was moved before it was watched is reported by nothing; of two covers of a path the later one is seen.
        let lost = |covered: &[Cover]| Covers::watch(covered, &[], &[]).lost();
        assert_eq!(lost(&[cover(mount)]), None, "the control");
        assert_eq!(lost(&[cover(mount + 1_000_000)]), Some(path.clone()));
        assert_eq!(lost(&[cover(mount + 1_000_000), cover(mount)]), None);
        assert_eq!(lost(&[cover(mount), cover(mount + 1_000_000)]), Some(path.clone()));
    }

    #[test]
    fn a_check_reads_a_bounded_number_of_events() {
        for is_flooded in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let top = directory.path().canonicalize().unwrap();
            let path = top.join("x");
            let mut covers = Covers::watch(&[], std::slice::from_ref(&path), &[]);
            assert_eq!(covers.lost(), None);
            // As if its own event were never reached: only a check of everything finds it then.
            covers.watched.clear();
            fs::write(&path, "").unwrap();
            let rounds = if is_flooded { MOST_EVENTS } else { 1 };
            for _ in 0..rounds {
                ["a", "b"].iter().for_each(|name| fs::write(top.join(name), "").unwrap());
                ["a", "b"].iter().for_each(|name| fs::remove_file(top.join(name)).unwrap());
            }
            assert_eq!(covers.lost(), is_flooded.then_some(path));
            let left = rustix::io::read(covers.descriptor().unwrap(), &mut [0_u8; BUFFER][..]);
            assert_eq!(left.is_ok(), is_flooded, "events are left for the next check");
        }
    }

    #[test]
    fn what_was_found_may_go_and_a_denied_name_may_not_return() {
        let kinds = [
            (Some(FoundKind::Denied), false),
            (Some(FoundKind::Nested), false),
            (Some(FoundKind::Protected), true),
            (None, true),
        ];
        for (kind, is_lost_when_gone) in kinds {
            let directory = tempfile::tempdir().unwrap();
            let top = directory.path().canonicalize().unwrap();
            let (path, beside) = (top.join("d/x"), top.join("beside"));
            fs::create_dir(top.join("d")).unwrap();
            fs::write(&path, "").unwrap();
            fs::write(&beside, "").unwrap();
            let cover = |path: &Path| Cover { path: path.to_owned(), mount: mount_of(path).unwrap() };
            let covered = [cover(&path), cover(&top.join("d")), cover(&beside)];
            let found = kind.map(|kind| Found { path: AbsolutePath::new(&path).unwrap(), kind });
            let mut covers = Covers::watch(&covered, &[], found.as_slice());
            assert_eq!(covers.lost(), None);
            fs::remove_dir_all(top.join("d")).unwrap();
            assert_eq!(covers.lost().is_some(), is_lost_when_gone, "{kind:?}");
            fs::create_dir(top.join("d")).unwrap();
            assert_eq!(covers.lost().is_some(), is_lost_when_gone, "{kind:?}: the directory alone");
            fs::write(&path, "").unwrap();
            assert_eq!(covers.lost().is_some(), kind != Some(FoundKind::Nested), "{kind:?}: made again");
            // What the policy names stays held.
            fs::remove_file(&beside).unwrap();
            assert!(covers.lost().is_some());
        }
    }

    #[test]
    fn an_event_concerns_the_covers_of_its_name_alone() {
        let watched = Watched {
            by_name: HashMap::from([("a".into(), BTreeSet::from([1, 2])), ("b".into(), BTreeSet::from([3]))]),
            whole: BTreeSet::from([4]),
        };
        for (name, expect) in [(Some("a"), vec![1, 2, 4]), (Some("c"), vec![4]), (None, vec![1, 2, 3, 4])] {
            let concerned: BTreeSet<usize> = watched.concerned(name.map(OsStr::new)).collect();
            assert_eq!(concerned.into_iter().collect::<Vec<_>>(), expect, "{name:?}");
        }
    }
}

//! Where groups can be made: below the own group of this process, in a hierarchy that is mounted and may be written to.

use super::{Base, Controller};
use crate::tree;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::{Path, PathBuf};

/// What the names of our directories begin with; then come the spawner's process id and a random number.
const PREFIX: &str = "portcullis-";

/// The group that the gateway moves into, below such a directory.
const BESIDE: &str = "gateway";

/// A place for each controller, or why there is none.
pub(super) fn find() -> [Result<Base, String>; 2] {
    let read = |file: &str| fs::read_to_string(file).map_err(|error| format!("read {file}: {error}"));
    let (own, mounts) = match (read("/proc/self/cgroup"), read("/proc/self/mountinfo")) {
        (Ok(own), Ok(mounts)) => (own, mounts),
        (Err(error), _) | (_, Err(error)) => return [Err(error.clone()), Err(error)],
    };
    let name = format!("{PREFIX}{}-{:x}", std::process::id(), RandomState::new().build_hasher().finish());
    let unified = unified(&own, &mounts, &name);
    [Controller::Pids, Controller::Memory].map(|controller| match &unified {
        Ok(path) => Ok(Base { path: path.clone(), is_unified: true }),
        Err(reason) => alone(&own, &mounts, controller, &name).map_err(|alone| format!("{reason}, and {alone}")),
    })
}

/// Version 2, if both controllers can be had in it.
fn unified(own: &str, mounts: &str, name: &str) -> Result<PathBuf, String> {
    let directory = above_our_own(own_directory(own, mounts, None).ok_or("no cgroup v2 is mounted")?);
    let offered = fs::read_to_string(directory.join("cgroup.controllers")).unwrap_or_default();
    let lacks: Vec<_> = ["pids", "memory"].into_iter().filter(|name| !offered.split_whitespace().any(|it| it == *name)).collect();
    if !lacks.is_empty() {
        return Err(format!("cgroup v2 at {} has no controller for {}", directory.display(), lacks.join(" and ")));
    }
    remove_leftovers(&directory);
    let path = directory.join(name);
    let attempt = |what: &str, error: &std::io::Error| format!("{what} in {}: {error}", directory.display());
    fs::create_dir(&path).map_err(|error| attempt("make a cgroup", &error))?;
    let passed_on = pass_on(&directory, &path);
    if let Err(error) = passed_on {
        remove(&path);
        return Err(attempt("pass the controllers on", &error));
    }
    Ok(path)
}

/// An earlier spawner of this gateway may have moved it into a group: the next one's place is beside that, not in it, where each more
/// spawner would lie deeper.
fn above_our_own(own: PathBuf) -> PathBuf {
    let base = own.parent().filter(|_| own.ends_with(BESIDE));
    let is_ours = |base: &&Path| base.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX));
    base.filter(is_ours).and_then(Path::parent).map_or_else(|| own.clone(), Path::to_owned)
}

/// Has the controllers in the groups below a directory. No group may have processes of its own then, so if nobody but the gateway
/// and this process is in it, they move into one beside.
fn pass_on(directory: &Path, base: &Path) -> std::io::Result<()> {
    let enable = || fs::write(directory.join("cgroup.subtree_control"), "+pids +memory");
    if enable().is_err() {
        // This process, its warden and the gateway.
        let warden = rustix::process::getppid();
        let ours = [Some(rustix::process::getpid()), warden, warden.and_then(tree::parent_of)];
        let ours = ours.map(|pid| pid.map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs()));
        let inside = fs::read_to_string(directory.join("cgroup.procs"))?;
        let inside: Vec<u32> = inside.lines().filter_map(|line| line.parse().ok()).collect();
        if inside.iter().any(|pid| !ours.contains(pid)) {
            return enable();
        }
        let beside = base.join(BESIDE);
        fs::create_dir(&beside)?;
        for pid in inside {
            fs::write(beside.join("cgroup.procs"), pid.to_string())?;
        }
        enable()?;
    }
    fs::write(base.join("cgroup.subtree_control"), "+pids +memory")
}

/// A controller of version 1.
fn alone(own: &str, mounts: &str, controller: Controller, name: &str) -> Result<Base, String> {
    let word = controller.name();
    let directory = own_directory(own, mounts, Some(word)).ok_or_else(|| format!("no cgroup v1 for {word} is mounted"))?;
    remove_leftovers(&directory);
    let path = directory.join(name);
    fs::create_dir(&path).map_err(|error| format!("making a cgroup in {} says {error}", directory.display()))?;
    Ok(Base { path, is_unified: false })
}

/// The directory of this process's own group, in the hierarchy of a controller or, without one, in version 2.
fn own_directory(own: &str, mounts: &str, controller: Option<&str>) -> Option<PathBuf> {
    let mut groups = own.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        Some((parts.nth(1)?, parts.next()?))
    });
    let has = |list: &str| controller.map_or(list.is_empty(), |word| list.split(',').any(|it| it == word));
    let (_, group) = groups.find(|(list, _)| has(list))?;
    let mut places = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let fits = controller.map_or(name == "cgroup2", |word| name == "cgroup" && options.split(',').any(|it| it == word));
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        // What is mounted may be a part of the hierarchy only; then the own group has to be in that part.
        fits.then(|| Some(Path::new(point).join(Path::new(group).strip_prefix(root).ok()?))).flatten()
    });
    places.next()
}

/// Removes the groups of a spawner that has ended, once they hold no process. The spawner was a member itself, so it could not do
/// this.
pub(crate) fn remove_of(spawner: u32) {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let (own, mounts) = (read("/proc/self/cgroup"), read("/proc/self/mountinfo"));
    let name = format!("{PREFIX}{spawner}-");
    for hierarchy in [None, Some(Controller::Pids.name()), Some(Controller::Memory.name())] {
        let Some(directory) = own_directory(&own, &mounts, hierarchy).map(above_our_own) else { continue };
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|found| found.starts_with(&name)) {
                remove(&entry.path());
            }
        }
    }
}

/// Removes what spawners left that were killed: directories of ours whose process is gone, and in which nobody is.
fn remove_leftovers(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-')?.0.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(&entry.path());
        }
    }
}

/// Removes a directory with the groups below it. One with processes in it stays.
pub(super) fn remove(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _occupied = fs::remove_dir(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_in_the_hierarchy_that_has_it() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      39 31 0:36 /job /mnt/pids rw,relatime - cgroup cgroup rw,pids,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        let own = "8:pids,cpu:/job/mine\n4:memory:/a:b\n0::/x.scope\n";
        let found = |controller| own_directory(own, mounts, controller).map(|path| path.display().to_string());
        assert_eq!(found(Some("pids")).as_deref(), Some("/mnt/pids/mine"));
        assert_eq!(found(Some("memory")).as_deref(), Some("/sys/fs/cgroup/memory/a:b"));
        assert_eq!(found(None).as_deref(), Some("/sys/fs/cgroup/unified/x.scope"));
        assert_eq!(found(Some("devices")), None);
        for (place, expect) in
            [("/a/portcullis-7-f/gateway", "/a"), ("/a/gateway", "/a/gateway"), ("/a/portcullis-7-f", "/a/portcullis-7-f")]
        {
            assert_eq!(above_our_own(PathBuf::from(place)), Path::new(expect));
        }
        let elsewhere = own.replace("/job/mine", "/other");
        assert_eq!(own_directory(&elsewhere, mounts, Some("pids")), None, "what is mounted does not show it");
    }
}

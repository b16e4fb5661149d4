//! Groups of processes that the kernel counts together (cgroups(7)): one for each session and one for each process that has a
//! limit which needs it. A start without such a limit has none and pays nothing.
//!
//! They lie below the group that the spawner is in itself, under a name of its own: version 2 where that group was delegated, else
//! version 1, each controller by itself. What a killed spawner left behind goes with the next one's start.

mod base;
mod bound;

pub(crate) use self::base::remove_of;

use portcullis_protocol::helper::{CgroupLayer, errno_text};
use portcullis_protocol::limit::{DefaultBounds, LimitReached, ProcessLimits, Scope, SessionLimits};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What a group can be held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Controller {
    Pids,
    Memory,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Pids => "pids",
            Self::Memory => "memory",
        }
    }
}

impl Controller {
    /// The file of its limit, in version 2 and in version 1.
    fn files(self) -> [&'static str; 2] {
        match self {
            Self::Pids => ["pids.max"; 2],
            Self::Memory => ["memory.max", "memory.limit_in_bytes"],
        }
    }
}

/// A directory below which the groups of one controller are made.
#[derive(Debug, Clone)]
struct Base {
    path: PathBuf,
    /// Of version 2, where one directory serves all controllers.
    is_unified: bool,
}

/// All groups of a spawner.
#[derive(Debug)]
pub(crate) struct Groups {
    /// Or why there are none.
    pids: Result<Base, String>,
    memory: Result<Base, String>,
    of_sessions: SessionLimits,
    /// The default bounds.
    pub(crate) bounds: DefaultBounds,
    /// The sessions that have groups, by number.
    sessions: HashMap<String, u64>,
    next_session: u64,
    /// Directories that are to go as soon as they are empty, the deepest first.
    retired: Vec<PathBuf>,
}

/// The group of one process.
#[derive(Debug)]
pub(crate) struct Group {
    pids: Option<PathBuf>,
    memory: Option<PathBuf>,
    limits: ProcessLimits,
    of_session: SessionLimits,
}

/// Why a group is not there: what was attempted, and the system's answer.
#[derive(Debug)]
pub(crate) struct GroupError {
    pub(crate) attempt: String,
    pub(crate) errno: i32,
}

impl Groups {
    /// Looks for places, and makes them.
    pub(crate) fn find(of_sessions: SessionLimits, bounds: DefaultBounds) -> Self {
        let [pids, memory] = base::find();
        bound::enter([&pids, &memory].map(|base| base.as_ref().ok()), &bounds);
        Self { pids, memory, of_sessions, bounds, sessions: HashMap::new(), next_session: 0, retired: Vec::new() }
    }

    /// What can be had here.
    pub(crate) fn layer(&self) -> CgroupLayer {
        let reasons: BTreeSet<&str> =
            [&self.pids, &self.memory].into_iter().filter_map(|base| base.as_ref().err()).map(String::as_str).collect();
        CgroupLayer { processes: self.pids.is_ok(), memory: self.memory.is_ok(), reason: Vec::from_iter(reasons).join("; ") }
    }

    /// Whether a controller can be had.
    pub(crate) fn has(&self, controller: Controller) -> bool {
        self.base(controller).is_ok()
    }

    /// Makes the group of a process with what can be had of its limits; none if there is nothing to hold.
    pub(crate) fn make(&mut self, session: &str, id: u64, limits: &ProcessLimits) -> Result<Option<Group>, GroupError> {
        let of_session = self.of_sessions;
        let needs_pids = self.has(Controller::Pids) && (limits.processes.is_some() || of_session.processes.is_some());
        let needs_memory = self.has(Controller::Memory) && (limits.memory_bytes.is_some() || of_session.memory_bytes.is_some());
        if !needs_pids && !needs_memory {
            return Ok(None);
        }
        let number = *self.sessions.entry(session.to_owned()).or_insert_with(|| {
            self.next_session += 1;
            self.next_session
        });
        let mut group = Group { pids: None, memory: None, limits: *limits, of_session };
        let (session, process) = (format!("s{number}"), format!("p{id}"));
        for (controller, is_needed) in [(Controller::Pids, needs_pids), (Controller::Memory, needs_memory)] {
            let (true, Ok(base)) = (is_needed, self.base(controller)) else { continue };
            let above = base.path.join(&session);
            let path = above.join(&process);
            let made = base
                .make(&above)
                .and_then(|()| base.limit(controller, &above, of_session.processes, of_session.memory_bytes))
                .and_then(|()| base.make(&path))
                .and_then(|()| base.limit(controller, &path, limits.processes, limits.memory_bytes));
            match controller {
                Controller::Pids => group.pids = Some(path),
                Controller::Memory => group.memory = Some(path),
            }
            if let Err(error) = made {
                self.retire(group);
                return Err(error);
            }
        }
        Ok(Some(group))
    }

    /// Ends whom it still holds, where the kernel does that by itself, and removes it once it is empty.
    pub(crate) fn retire(&mut self, group: Group) {
        group.kill();
        self.retired.extend(group.paths().cloned());
        self.sweep();
    }

    /// The session starts nothing more.
    pub(crate) fn end_session(&mut self, session: &str) {
        let Some(number) = self.sessions.remove(session) else { return };
        for base in [&self.pids, &self.memory].into_iter().flatten() {
            self.retired.push(base.path.join(format!("s{number}")));
        }
        self.sweep();
    }

    /// Removes what is empty of what is to go. The rest is tried again with the next.
    pub(crate) fn sweep(&mut self) {
        // What lies in another goes before it.
        self.retired.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        self.retired.retain(|path| fs::remove_dir(path).is_err_and(|error| error.kind() != io::ErrorKind::NotFound));
    }

    /// Removes everything: nobody is left.
    pub(crate) fn remove(&mut self) {
        for base in [&self.pids, &self.memory].into_iter().flatten() {
            base::remove(&base.path);
        }
    }

    fn base(&self, controller: Controller) -> &Result<Base, String> {
        match controller {
            Controller::Pids => &self.pids,
            Controller::Memory => &self.memory,
        }
    }
}

impl Base {
    /// Makes a directory, with everything above it that somebody may have removed.
    fn make(&self, path: &Path) -> Result<(), GroupError> {
        fs::create_dir_all(path).map_err(|error| GroupError::new("make the cgroup", path, &error))?;
        if self.is_unified
            && let Some(above) = path.parent()
        {
            let switch = above.join("cgroup.subtree_control");
            fs::write(&switch, "+pids +memory").map_err(|error| GroupError::new("pass controllers on in", &switch, &error))?;
        }
        Ok(())
    }

    fn limit(
        &self,
        controller: Controller,
        path: &Path,
        processes: Option<NonZeroU64>,
        bytes: Option<NonZeroU64>,
    ) -> Result<(), GroupError> {
        let write = |name: &str, value: u64| {
            let file = path.join(name);
            fs::write(&file, value.to_string()).map_err(|error| GroupError::new("write", &file, &error))
        };
        match (controller, processes, bytes) {
            (Controller::Pids, Some(most), _) => write("pids.max", most.get()),
            (Controller::Memory, _, Some(most)) if self.is_unified => {
                write("memory.max", most.get())?;
                // Without swap there is no such file, and nothing to hold.
                if path.join("memory.swap.max").exists() { write("memory.swap.max", 0) } else { Ok(()) }
            }
            (Controller::Memory, _, Some(most)) => {
                // Of a group that is there already the sum has to be lowered last and raised first; it is made with both only once.
                write("memory.limit_in_bytes", most.get())?;
                if path.join("memory.memsw.limit_in_bytes").exists() {
                    write("memory.memsw.limit_in_bytes", most.get())
                } else {
                    Ok(())
                }
            }
            (Controller::Pids | Controller::Memory, ..) => Ok(()),
        }
    }
}

impl Group {
    /// Where a process puts itself in, by writing `0`.
    pub(crate) fn doors(&self) -> Result<Vec<OwnedFd>, GroupError> {
        let open = |path: &PathBuf| {
            let file = path.join("cgroup.procs");
            OpenOptions::new().write(true).open(&file).map(OwnedFd::from).map_err(|error| GroupError::new("open", &file, &error))
        };
        self.paths().map(open).collect()
    }

    /// The limits that its processes ran into.
    pub(crate) fn reached(&self) -> Vec<LimitReached> {
        let mut reached = Vec::new();
        let mut add = |limit: &str, of_process: Option<NonZeroU64>, of_session: Option<NonZeroU64>, used: Option<u64>| {
            // The kernel counts with who was refused, whosever limit it was: the smaller one comes first.
            let (scope, value) = match (of_process, of_session) {
                (Some(mine), Some(all)) if mine > all => (Scope::Session, all),
                (Some(mine), _) => (Scope::Process, mine),
                (None, Some(all)) => (Scope::Session, all),
                (None, None) => return,
            };
            let value = value.get();
            reached.push(LimitReached { limit: limit.to_owned(), value, used: used.unwrap_or(value), scope });
        };
        if let Some(path) = &self.pids
            && number_of(path, &["pids.events"], "max") > 0
        {
            add("processes", self.limits.processes, self.of_session.processes, None);
        }
        if let Some(path) = &self.memory
            && number_of(path, &["memory.events", "memory.oom_control"], "oom_kill") > 0
        {
            let most =
                ["memory.peak", "memory.max_usage_in_bytes"].iter().find_map(|name| fs::read_to_string(path.join(name)).ok());
            let used = most.and_then(|text| text.trim().parse().ok());
            add("memoryBytes", self.limits.memory_bytes, self.of_session.memory_bytes, used);
        }
        reached
    }

    /// Ends whoever is in it, where the kernel does that.
    pub(crate) fn kill(&self) {
        for path in self.paths() {
            // Version 1 has no such file; there whoever lost its keeper comes to the spawner.
            let file = OpenOptions::new().write(true).open(path.join("cgroup.kill"));
            let _none = file.and_then(|mut file| io::Write::write_all(&mut file, b"1"));
        }
    }

    /// Whether the kernel ends everybody in it at one word.
    pub(crate) fn can_kill(&self) -> bool {
        self.paths().all(|path| path.join("cgroup.kill").exists())
    }

    /// Each once.
    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let memory = self.memory.as_ref().filter(|memory| self.pids.as_ref() != Some(memory));
        self.pids.iter().chain(memory)
    }
}

/// The number behind a word in the first of the files that is there.
fn number_of(group: &Path, files: &[&str], word: &str) -> u64 {
    let text = files.iter().find_map(|file| fs::read_to_string(group.join(file)).ok()).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(word)?.trim().parse().ok());
    value.unwrap_or(0)
}

impl GroupError {
    fn new(what: &str, path: &Path, error: &io::Error) -> Self {
        Self { attempt: format!("{what} `{}`", path.display()), errno: error.raw_os_error().unwrap_or(0) }
    }
}

impl std::fmt::Display for GroupError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.attempt, errno_text(self.errno))
    }
}

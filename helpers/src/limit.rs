//! Limits of a process: the choices before it is forked, and the calls by which it limits itself before it executes the program.
//!
//! Each limit has one mechanism, the strongest that is available here. If none is available, the start is refused.

use crate::cgroup::{Controller, Group, GroupError, Groups};
use crate::launch::{failed, machine};
use portcullis_protocol::helper::{Step, StepFailed};
use portcullis_protocol::limit::{LimitBy, LimitInForce, ProcessLimits};
use portcullis_sandbox::report;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use std::fs;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

/// The kernel gives each pid below this number only once in the life of a pid namespace (`RESERVED_PIDS`).
const RESERVED_PIDS: u64 = 300;

/// The largest `pid_max` that the kernel accepts (`PID_MAX_LIMIT`).
const MOST_PIDS: u64 = 4 << 20;

/// The bounds of the descriptor limit of a program.
const LEAST_DESCRIPTORS: u64 = 1024;
const MOST_DESCRIPTORS: u64 = 65_536;

/// The limits that a process sets on itself.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Limits {
    /// A descriptor for each cgroup that the process must enter.
    #[serde(skip)]
    pub(crate) doors: Vec<OwnedFd>,
    /// The maximum number of tasks in its pid namespace beside the init.
    tasks: Option<u64>,
    /// `tasks` is the default, not a requested limit.
    is_default: bool,
    /// Each resource with its soft and its hard limit.
    rlimits: Vec<(Bounded, u64, u64)>,
}

/// A resource. The type of rustix cannot be serialized for a spare.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Bounded {
    Tasks,
    Memory,
    Cpu,
    OpenFiles,
}

impl Bounded {
    fn resource(self) -> Resource {
        match self {
            Self::Tasks => Resource::Nproc,
            Self::Memory => Resource::Data,
            Self::Cpu => Resource::Cpu,
            Self::OpenFiles => Resource::Nofile,
        }
    }
}

/// The limits of a start, and how they are enforced.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) limits: Limits,
    pub(crate) in_force: Vec<LimitInForce>,
    pub(crate) group: Option<Group>,
}

/// Chooses the mechanism of each limit. `is_init` says that the process gets its own pid namespace.
pub(crate) fn decide(
    asked: &ProcessLimits,
    groups: &mut Groups,
    session: &str,
    id: u64,
    is_init: bool,
) -> Result<Decided, StepFailed> {
    let mut decided = Decided { limits: Limits::default(), in_force: Vec::new(), group: None };
    // This is a default, so a start is not refused if the machine cannot enforce it.
    if asked.processes.is_none()
        && is_init
        && let Some(most) = groups.bounds.start_tasks.map(NonZeroU64::get).filter(|most| can_bound_namespaces(*most))
    {
        decided.limits.tasks = Some(most);
        decided.limits.is_default = true;
    }
    let mut force =
        |limit: &str, value: u64, by: LimitBy| decided.in_force.push(LimitInForce { limit: limit.to_owned(), value, by });
    if let Some(most) = asked.processes.map(NonZeroU64::get) {
        if groups.has(Controller::Pids) {
            force("processes", most, LimitBy::Cgroup);
        } else if is_init && can_bound_namespaces(most) {
            force("processes", most, LimitBy::PidNamespace);
            decided.limits.tasks = Some(most);
        } else if is_bound_by_nproc() {
            force("processes", most, LimitBy::Rlimit);
            let all = tasks_of_user().saturating_add(most);
            decided.limits.rlimits.push((Bounded::Tasks, all, all));
        } else {
            return Err(refused(groups));
        }
    }
    if let Some(most) = asked.memory_bytes.map(NonZeroU64::get) {
        if groups.has(Controller::Memory) {
            force("memoryBytes", most, LimitBy::Cgroup);
        } else {
            force("memoryBytes", most, LimitBy::Rlimit);
            decided.limits.rlimits.push((Bounded::Memory, most, most));
        }
    }
    if let Some(most) = asked.cpu_ms.map(NonZeroU64::get) {
        force("cpuMs", most, LimitBy::Rlimit);
        // SIGXCPU lets the program clean up; if it continues, it is killed a second later.
        let seconds = most.div_ceil(1000);
        decided.limits.rlimits.push((Bounded::Cpu, seconds, seconds.saturating_add(1)));
    }
    let most = most_descriptors(getrlimit(Resource::Nofile).maximum);
    match asked.open_files.map(NonZeroU64::get) {
        Some(asked) => {
            let most = asked.min(most);
            force("openFiles", most, LimitBy::Rlimit);
            decided.limits.rlimits.push((Bounded::OpenFiles, most, most));
        }
        None => {
            // Programs that use select(2) rely on the soft limit that the server was started with.
            let soft = groups.bounds.open_files.map_or(most, NonZeroU64::get).min(most);
            decided.limits.rlimits.push((Bounded::OpenFiles, soft, most));
        }
    }
    let not_there = |error: GroupError| StepFailed {
        errno: error.errno,
        ..failed(Step::Machine, &format!("start: {}", error.attempt), None)
    };
    if let Some(group) = groups.make(session, id, asked).map_err(not_there)? {
        match group.doors() {
            Ok(doors) => (decided.limits.doors, decided.group) = (doors, Some(group)),
            Err(error) => {
                groups.retire(group);
                return Err(not_there(error));
            }
        }
    }
    Ok(decided)
}

/// The descriptors that a program may have: half of the helpers' limit, so that helpers can always pass descriptors on, however
/// many programs of the same user have in flight (unix(7), ETOOMANYREFS).
fn most_descriptors(of_helpers: Option<u64>) -> u64 {
    let all = of_helpers.unwrap_or(u64::MAX);
    (all / 2).clamp(LEAST_DESCRIPTORS, MOST_DESCRIPTORS).min(all)
}

fn refused(groups: &Groups) -> StepFailed {
    let text = format!(
        "start: `limits.processes` cannot be enforced here, nothing was started: the cgroup layer is not available ({}), the process has \
         no pid namespace of its own whose kernel.pid_max can be set (Linux 6.14), and RLIMIT_NPROC does not bind this user: {}",
        groups.layer().reason,
        report::cgroup_remedy()
    );
    failed(Step::Enforce, &text, None)
}

impl Limits {
    /// The descriptors that must stay open until the process is in its cgroups.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.doors.iter().map(AsRawFd::as_raw_fd)
    }

    /// Moves this process into its cgroups, before it loses the permission and before it has children.
    pub(crate) fn enter_groups(&self) -> Result<(), StepFailed> {
        let enter = |door| rustix::io::write(door, b"0").map(drop);
        self.doors.iter().try_for_each(enter).map_err(machine("enter the cgroup of the process"))
    }

    /// Limits the tasks of the pid namespace of which this process is the first, while `/proc` is still the machine's.
    pub(crate) fn bound_namespace(&self) -> Result<(), StepFailed> {
        let Some(tasks) = self.tasks else { return Ok(()) };
        // Skips the reserved pids, which are given once and would add to the limit.
        let begun = fs::write("/proc/sys/kernel/ns_last_pid", RESERVED_PIDS.to_string());
        let most = RESERVED_PIDS.saturating_add(tasks).min(MOST_PIDS);
        let bounded = begun.and_then(|()| fs::write("/proc/sys/kernel/pid_max", most.to_string()));
        if self.is_default {
            return Ok(());
        }
        bounded.map_err(|error| {
            let errno = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
            let attempt = "enforce `limits.processes`: write /proc/sys/kernel/pid_max of the pid namespace; mount /proc/sys \
                           writable, or give the server a cgroup";
            failed(Step::Enforce, attempt, errno)
        })
    }

    /// Sets the resource limits of this process, just before it executes the program.
    pub(crate) fn bound_process(&self) -> Result<(), StepFailed> {
        for (bounded, soft, hard) in &self.rlimits {
            let resource = bounded.resource();
            // No limit may exceed that of the server.
            let most = getrlimit(resource).maximum.unwrap_or(u64::MAX);
            let limit = Rlimit { current: Some(*soft.min(&most)), maximum: Some(*hard.min(&most)) };
            setrlimit(resource, limit)
                .map_err(|errno| failed(Step::Enforce, &format!("limit {resource:?} to {soft}"), Some(errno)))?;
        }
        Ok(())
    }
}

/// Whether a pid namespace can be limited to this number of tasks. On kernels before 6.14 its `kernel.pid_max` is the machine's.
/// Without CONFIG_CHECKPOINT_RESTORE its first pid cannot be set. And `pid_max` cannot be less than eight for each processor
/// (`PIDS_PER_CPU_MIN`).
fn can_bound_namespaces(tasks: u64) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let least = possible_processors().map(|count| count.saturating_mul(8));
    is_at_least(&release, (6, 14))
        && Path::new("/proc/sys/kernel/ns_last_pid").exists()
        && least.is_some_and(|least| RESERVED_PIDS.saturating_add(tasks) >= least)
}

/// The number of processors that the machine may have, from a text like `0-3,8-11`.
fn possible_processors() -> Option<u64> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
    let last = text.trim().rsplit([',', '-']).next()?.parse::<u64>().ok()?;
    Some(last + 1)
}

fn is_at_least(release: &str, least: (u32, u32)) -> bool {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    numbers.next().zip(numbers.next()).is_some_and(|version| version >= least)
}

/// Whether `RLIMIT_NPROC` binds this process. It does not bind root, nor a process with CAP_SYS_RESOURCE or CAP_SYS_ADMIN.
fn is_bound_by_nproc() -> bool {
    let beyond = CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN;
    !geteuid().is_root() && rustix::thread::capabilities(None).is_ok_and(|held| !held.effective.intersects(beyond))
}

/// The number of visible tasks of this user on the machine: `RLIMIT_NPROC` counts all of them.
fn tasks_of_user() -> u64 {
    let me = geteuid().as_raw();
    let mine = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        // The name in it may hold any bytes.
        let status = fs::read(entry.path().join("status")).ok()?;
        let status = String::from_utf8_lossy(&status);
        let word =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
        (word("Uid:")? == u64::from(me)).then(|| word("Threads:").unwrap_or(1))
    });
    mine.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        for (release, expect) in [
            ("6.18.44-fc", true),
            ("6.14", true),
            ("6.14-rc1", true),
            ("6.9.1", false),
            ("5.15", false),
            ("7.0", true),
            ("x", false),
        ] {
            assert_eq!(is_at_least(release, (6, 14)), expect, "{release}");
        }
    }

    #[test]
    fn a_program_has_half_of_the_descriptors_within_bounds() {
        for (of_helpers, expect) in
            [(None, 65_536), (Some(1 << 20), 65_536), (Some(20_000), 10_000), (Some(1500), 1024), (Some(512), 512)]
        {
            assert_eq!(most_descriptors(of_helpers), expect, "{of_helpers:?}");
        }
    }

    #[test]
    fn small_machines_can_bound_a_namespace_to_few_tasks_and_the_number_of_processors_is_known() {
        let count = possible_processors().unwrap();
        assert!(count >= u64::try_from(std::thread::available_parallelism().unwrap().get()).unwrap());
    }

    #[test]
    fn this_process_is_among_the_tasks_of_its_user() {
        let before = tasks_of_user();
        assert!(before >= 1, "{before}");
    }
}

//! Bounds of all started processes together: the limits of the directory that contains all groups. The spawner itself is in a
//! group below it, so each process that it forks begins there and no start pays for it. To enter a group usually takes 30
//! microseconds, and now and then 15 milliseconds (`cgroup_threadgroup_rwsem`).

use super::{Base, Controller};
use crate::dispatch::complain;
use portcullis_protocol::limit::DefaultBounds;
use std::fs;
use std::path::Path;

/// The group of the spawner, the workers, and all processes without a group of their own.
const INSIDE: &str = "all";

/// Sets the bounds and goes below them, as far as there are groups. A bound that cannot be had refuses nothing.
pub(super) fn enter([pids, memory]: [Option<&Base>; 2], bounds: &DefaultBounds) {
    let enter = |base: &Base, file: &str, value: u64| -> std::io::Result<()> {
        fs::write(base.path.join(file), value.to_string())?;
        let inside = base.path.join(INSIDE);
        fs::create_dir_all(&inside)?;
        fs::write(inside.join("cgroup.procs"), "0")
    };
    let share = |base: &Base| if bounds.leaves_tasks { tasks_of(&base.path, &TASKS) / 2 } else { u64::MAX };
    let tasks = pids.zip(bounds.all_tasks).map(|(base, most)| (base, Controller::Pids, most.get().min(share(base)).max(1)));
    let bytes = memory
        .zip(bounds.memory_percent)
        .map(|(base, percent)| (base, Controller::Memory, memory_of(&base.path) / 100 * percent.get()));
    for (base, controller, value) in tasks.into_iter().chain(bytes).filter(|(.., value)| *value > 0) {
        let file = controller.files()[usize::from(!base.is_unified)];
        if let Err(error) = enter(base, file, value) {
            complain(format_args!(
                "set the default bound {file} of {}: {error}; started processes run without it",
                base.path.display()
            ));
        }
    }
}

/// Files with the tasks that the machine, or this pid namespace, can have: process ids, and threads.
const TASKS: [&str; 2] = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];

/// The tasks that there can be in a group: as `machine` says, or less by its group's limit or that of one above it. The rest of the
/// machine needs some of them, and so does an operator who ends the processes that took the others.
fn tasks_of(group: &Path, machine: &[impl AsRef<Path>]) -> u64 {
    let number = |file: &Path| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let limits = group.ancestors().filter_map(|group| number(&group.join(Controller::Pids.files()[0])));
    machine.iter().filter_map(|file| number(file.as_ref())).chain(limits).min().unwrap_or(u64::MAX)
}

/// The memory that processes in a group can have: the machine's, or less by its group's limit or that of one above it.
fn memory_of(group: &Path) -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    });
    let limit = |group: &Path| {
        let read = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        read(Controller::Memory.files()[0]).or_else(|| read(Controller::Memory.files()[1]))
    };
    machine.into_iter().chain(group.ancestors().filter_map(limit)).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tasks_are_the_least_of_machine_and_groups_above() {
        let directory = tempfile::tempdir().unwrap();
        let (root, group) = (directory.path(), directory.path().join("above/own"));
        fs::create_dir_all(&group).unwrap();
        let machine = [root.join("pid_max"), root.join("threads-max")];
        let write = |file: &str, value: &str| fs::write(root.join(file), value).unwrap();
        assert_eq!(tasks_of(&group, &machine), u64::MAX);
        for (file, value, expect) in [
            ("threads-max", "192729\n", 192_729),
            ("pid_max", "32768\n", 32_768),
            ("above/own/pids.max", "max\n", 32_768),
            ("above/pids.max", "1000\n", 1000),
            ("above/own/pids.max", "2000\n", 1000),
        ] {
            write(file, value);
            assert_eq!(tasks_of(&group, &machine), expect, "{file} {value}");
        }
    }

    #[test]
    fn the_memory_is_the_least_of_machine_and_groups_above() {
        let root = std::env::temp_dir().join(format!("portcullis-memory-{}", std::process::id()));
        let group = root.join("above/own");
        fs::create_dir_all(&group).unwrap();
        let machine = memory_of(&group);
        assert!(machine > 1 << 20, "{machine}");
        fs::write(group.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        assert_eq!(memory_of(&group), machine, "no limit in version 1");
        fs::write(group.join("memory.max"), "max\n").unwrap();
        fs::write(root.join("above/memory.max"), "4096\n").unwrap();
        assert_eq!(memory_of(&group), 4096);
        fs::remove_dir_all(&root).unwrap();
    }
}

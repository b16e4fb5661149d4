//! What holds everything that is started together: the limits of the directory below which all groups are. The spawner itself is
//! below it, so that whatever it forks begins there and no start pays for it: to enter a group takes 30 microseconds mostly, and now and
//! then 15 milliseconds (`cgroup_threadgroup_rwsem`).

use super::{Base, Controller};
use crate::dispatch::complain;
use portcullis_protocol::limit::DefaultBounds;
use std::fs;
use std::num::NonZeroU64;
use std::path::Path;

/// Where the spawner, the workers and what has no group of its own are.
const INSIDE: &str = "all";

/// Sets the bounds and goes below them, as far as there are groups. A bound that cannot be had refuses nothing.
pub(super) fn enter([pids, memory]: [Option<&Base>; 2], bounds: &DefaultBounds) {
    let enter = |base: &Base, file: &str, value: u64| -> std::io::Result<()> {
        fs::write(base.path.join(file), value.to_string())?;
        let inside = base.path.join(INSIDE);
        fs::create_dir_all(&inside)?;
        fs::write(inside.join("cgroup.procs"), "0")
    };
    let tasks = pids.zip(bounds.all_tasks.map(NonZeroU64::get)).map(|(base, most)| (base, Controller::Pids, most));
    let bytes = memory
        .zip(bounds.memory_percent)
        .map(|(base, percent)| (base, Controller::Memory, memory_of(&base.path) / 100 * percent.get()));
    for (base, controller, value) in tasks.into_iter().chain(bytes).filter(|(.., value)| *value > 0) {
        let file = controller.files()[usize::from(!base.is_unified)];
        if let Err(error) = enter(base, file, value) {
            complain(format_args!(
                "bound everything that is started by {file} of {}: {error}; it is not bounded",
                base.path.display()
            ));
        }
    }
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

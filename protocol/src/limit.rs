//! Limits of processes: what a start may ask for, what holds it, and what was reached.

use serde::{Deserialize, Deserializer, Serialize};
use std::num::NonZeroU64;

/// What a process and everything that it starts may use. Each is at least 1; what is absent has no limit. It travels to the
/// helpers in postcard too, so that no member may be left out when it is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProcessLimits {
    /// Tasks, which are processes and threads, of the whole tree at a time.
    pub processes: Option<NonZeroU64>,
    /// Bytes of memory, of the whole tree where [`LimitBy::Cgroup`] holds it, else of the data of each process.
    pub memory_bytes: Option<NonZeroU64>,
    /// Milliseconds of processor time of each process. The kernel counts in seconds: rounded up.
    pub cpu_ms: Option<NonZeroU64>,
    /// One more than the highest descriptor that each process may have.
    pub open_files: Option<NonZeroU64>,
    /// Bytes of output altogether.
    pub output_bytes: Option<NonZeroU64>,
}

impl ProcessLimits {
    /// The smaller of the two of each.
    #[must_use]
    pub fn narrowed_by(&self, most: &Self) -> Self {
        Self {
            processes: smaller(self.processes, most.processes),
            memory_bytes: smaller(self.memory_bytes, most.memory_bytes),
            cpu_ms: smaller(self.cpu_ms, most.cpu_ms),
            open_files: smaller(self.open_files, most.open_files),
            output_bytes: smaller(self.output_bytes, most.output_bytes),
        }
    }
}

fn smaller(one: Option<NonZeroU64>, other: Option<NonZeroU64>) -> Option<NonZeroU64> {
    one.into_iter().chain(other).min()
}

/// What all processes of a session together may use, by the operator's word. What is absent has no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SessionLimits {
    /// Tasks, which are processes and threads, at a time.
    pub processes: Option<NonZeroU64>,
    /// Bytes of memory.
    pub memory_bytes: Option<NonZeroU64>,
}

/// Bounds of everything that a server starts, unless the operator sets others. They are enforced where the machine supports it.
/// Unlike a requested limit, a bound that cannot be enforced refuses no start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultBounds {
    /// Tasks of each start that has a pid namespace.
    pub start_tasks: Option<NonZeroU64>,
    /// Tasks of everything together.
    pub all_tasks: Option<NonZeroU64>,
    /// Whether `all_tasks` is lowered to half of the tasks that the machine, or the server's own cgroup, can have.
    pub leaves_tasks: bool,
    /// Memory of everything together, in percent of the memory available to the server itself.
    pub memory_percent: Option<NonZeroU64>,
    /// The soft limit of descriptors with which the server was started, which programs begin with.
    pub open_files: Option<NonZeroU64>,
}

/// A limit that holds a process, and who sees to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitInForce {
    /// As in [`ProcessLimits`]: `processes` and so on.
    pub limit: String,
    /// How much.
    pub value: u64,
    /// Who sees to it.
    pub by: LimitBy,
}

/// Who sees to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LimitBy {
    /// A cgroup: of the whole tree.
    Cgroup,
    /// A pid namespace of its own: of the whole tree.
    PidNamespace,
    /// `setrlimit(2)`: of each process, and `processes` of all processes of the user.
    Rlimit,
    /// The gateway, which counts what passes through it.
    Gateway,
}

/// A limit that was reached. The `data` of an error that refuses for that reason, and among what is told of an end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitReached {
    /// Its name: that of [`ProcessLimits`], or what the server bounds itself.
    pub limit: String,
    /// How much it allows.
    pub value: u64,
    /// How much is used, or would have been.
    pub used: u64,
    /// Of whom.
    pub scope: Scope,
}

impl LimitReached {
    /// The bytes that count against bounds of memory.
    #[must_use]
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.limit.len()
    }
}

/// Of whom a limit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scope {
    /// One process and what it starts.
    Process,
    /// A session.
    Session,
    /// A connection.
    Connection,
    /// The server.
    Server,
}

/// How a whole tree of processes is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TreeEnd {
    /// With the first process of its pid namespace, by the kernel.
    PidNamespace,
    /// By its cgroup, in which each of its processes is.
    Cgroup,
    /// By its keeper, to which whoever loses its parent comes.
    Descendants,
}

/// Those of a JSON list that this version understands: a scope of a newer server costs its own member, not the whole answer.
///
/// # Errors
/// It is no list.
pub fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<LimitReached>, D::Error> {
    let list = Vec::<serde_json::Value>::deserialize(deserializer)?;
    Ok(list.into_iter().filter_map(|reached| serde_json::from_value(reached).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn limits(text: serde_json::Value) -> ProcessLimits {
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn the_smaller_of_two_counts_and_what_one_of_them_says_alone() {
        let asked = limits(json!({"processes": 10, "memoryBytes": 4096, "cpuMs": null}));
        let most = limits(json!({"processes": 20, "memoryBytes": 1024, "openFiles": 7}));
        let both = limits(json!({"processes": 10, "memoryBytes": 1024, "openFiles": 7}));
        assert_eq!((asked.narrowed_by(&most), most.narrowed_by(&asked)), (both, both));
    }

    #[test]
    fn nothing_and_what_is_not_known_are_no_limits() {
        for wrong in [json!({"processes": 0}), json!({"memoryBytes": -1}), json!({"procesess": 1})] {
            assert!(serde_json::from_value::<ProcessLimits>(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_scope_that_is_not_known_costs_its_own_member_only() {
        let reached = json!({"limit": "processes", "value": 3, "used": 3, "scope": "process"});
        let list = json!([reached, {"limit": "x", "value": 3, "used": 3, "scope": "of tomorrow"}]);
        let known = known(list).unwrap();
        assert_eq!(serde_json::to_value(known).unwrap(), json!([reached]));
    }
}

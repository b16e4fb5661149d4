//! Figures as a table for people and as JSON for programs.

use crate::Failure;
use crate::rows::{Row, Unit};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// What was measured of one row.
pub(crate) struct Line {
    pub(crate) row: Row,
    /// By column: the servers with an ordinary client, then with one that acknowledges at once.
    pub(crate) columns: Vec<Vec<f64>>,
    pub(crate) limit: Vec<f64>,
}

/// Least, middle, and 99th of a hundred.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Summary {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) rounds: usize,
}

impl Summary {
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |part: usize| sorted.get((sorted.len().checked_sub(1)?) * part / 100).copied();
        Some(Self { min: at(0)?, median: at(50)?, p99: at(99)?, rounds: sorted.len() })
    }

    fn json(samples: &[f64]) -> Value {
        Self::of(samples).map_or(
            Value::Null,
            |Self { min, median, p99, rounds }| json!({"min": min, "median": median, "p99": p99, "rounds": rounds}),
        )
    }
}

/// The heading, and what the columns are.
pub(crate) fn heading(names: &[String], is_twice: bool) -> String {
    let mut text = "| | unit, rounds | this machine |".to_owned();
    let mut rule = "|---|---|---|".to_owned();
    for kind in if is_twice { &["", ", acks at once"][..] } else { &[""] } {
        for name in names {
            let _infallible = write!(text, " {name}{kind}: median (min, p99) |");
            rule.push_str("---|");
        }
        if names.len() > 1 {
            let _infallible = write!(text, " ratio{kind} |");
            rule.push_str("---|");
        }
    }
    if names.len() > 1 {
        text.push_str(" target |");
        rule.push_str("---|");
    }
    format!("{text}\n{rule}")
}

impl Line {
    /// The line, with so many servers.
    pub(crate) fn text(&self, servers: usize) -> String {
        let Row { name, unit, target, limit, .. } = &self.row;
        let rounds = self.columns.first().map_or(0, Vec::len);
        let mut text = format!("| {name} | {}, {rounds} |", unit.name());
        match (Summary::of(&self.limit), limit) {
            (Some(summary), Some((what, _))) => {
                let _infallible = write!(text, " {} {what} |", figure(summary.median));
            }
            _ => text.push_str(" |"),
        }
        for group in self.columns.chunks(servers.max(1)) {
            for samples in group {
                let summary = Summary::of(samples);
                let shown = summary.map(|Summary { min, median, p99, .. }| {
                    if samples.len() > 1 {
                        format!("{} ({}, {})", figure(median), figure(min), figure(p99))
                    } else {
                        figure(median)
                    }
                });
                let _infallible = write!(text, " {} |", shown.unwrap_or_else(|| "–".to_owned()));
            }
            if servers > 1 {
                let _infallible = write!(text, " {} |", ratio(*unit, group));
            }
        }
        if servers > 1 {
            let _infallible = if *target > 0.0 { write!(text, " {target}x |") } else { write!(text, " 0 |") };
        }
        text
    }

    pub(crate) fn json(&self, names: &[String]) -> Value {
        let columns: Vec<Value> = self
            .columns
            .iter()
            .enumerate()
            .map(|(nth, samples)| {
                let acks = if nth < names.len() { "ordinary" } else { "at once" };
                json!({"server": names[nth % names.len()], "acks": acks, "figures": Summary::json(samples)})
            })
            .collect();
        let limit = self.row.limit.map(|(what, _)| json!({"what": what, "figures": Summary::json(&self.limit)}));
        json!({"row": self.row.name, "unit": self.row.unit.name(), "target_ratio": self.row.target, "columns": columns, "machine": limit})
    }
}

/// How many times better the first is than the second, by their medians.
fn ratio(unit: Unit, group: &[Vec<f64>]) -> String {
    let [Some(ours), Some(other)] = [0, 1].map(|nth| group.get(nth).and_then(|samples| Summary::of(samples))) else {
        return "–".to_owned();
    };
    let (better, worse) = if unit.is_less_better() { (ours.median, other.median) } else { (other.median, ours.median) };
    if better <= 0.0 { "–".to_owned() } else { format!("**{}x**", figure(worse / better)) }
}

/// Three digits that matter.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Writes what was measured, with what it was measured on.
pub(crate) fn save(path: &Path, lines: &[Value], facts: &[Value]) -> Result<(), Failure> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let whole =
        json!({"seconds_since_1970": seconds, "kernel": kernel.trim(), "processors": processors, "facts": facts, "rows": lines});
    std::fs::write(path, serde_json::to_string_pretty(&whole)?)
        .map_err(|error| format!("write {}: {error}", path.display()).into())
}

//! What is measured: one line of the table each.

mod bulk;
mod files;
mod processes;

pub(crate) use bulk::stream;
pub(crate) use processes::{start, wait};

use crate::Failure;
use crate::ground::Ground;
use crate::machine::Machine;
use crate::wire::{Acks, Address, Wire};

/// What a figure means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Milliseconds; less is better.
    Milliseconds,
    /// Times a second; more is better.
    PerSecond,
    /// 10⁶ bytes a second; more is better.
    Megabytes,
    /// 10⁶ bytes that did not arrive; less is better.
    Lost,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Milliseconds => "ms",
            Self::PerSecond => "1/s",
            Self::Megabytes => "MB/s",
            Self::Lost => "MB lost",
        }
    }

    pub(crate) fn is_less_better(self) -> bool {
        matches!(self, Self::Milliseconds | Self::Lost)
    }
}

/// One server, by one kind of client.
pub(crate) struct Side {
    pub(crate) address: Address,
    pub(crate) acks: Acks,
    pub(crate) wire: Wire,
}

impl Side {
    pub(crate) fn open(address: &Address, acks: Acks) -> Result<Self, Failure> {
        Ok(Self { address: address.clone(), acks, wire: Wire::connect(address, acks)? })
    }
}

/// One round at a server; no number if it does not offer what the row is about.
pub(crate) type Measure = fn(&mut Side, &Ground) -> Result<f64, Failure>;
/// One round without a server.
pub(crate) type Limit = fn(&mut Machine, &Ground) -> Result<f64, Failure>;

/// A line of the table.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
    /// How often by default.
    pub(crate) rounds: u32,
    /// What the row asks for, in times of the reference.
    pub(crate) target: f64,
    pub(crate) measure: Measure,
    /// What this machine takes for it at least, or for the nearest thing to it that needs no server.
    pub(crate) limit: Option<(&'static str, Limit)>,
}

/// All lines, in order.
pub(crate) fn all() -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(files::rows());
    rows.extend(processes::rows());
    rows.extend(bulk::rows());
    rows
}

/// Seconds of a duration as milliseconds.
pub(crate) fn milliseconds(begun: std::time::Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1000.0
}

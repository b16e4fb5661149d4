//! Denials as data: what a layer of a sandbox refused, by which rule, and what would allow it.

use crate::path::AbsolutePath;
use serde::{Deserialize, Deserializer, Serialize};

/// Bound of the denials that are listed for one process; the rest are counted.
pub const MOST_DENIALS: usize = 64;

/// Something that a layer saw and refused. On the wire it looks as it does here; between helper and gateway it travels in
/// postcard, so that no member may be left out when it is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Denial {
    /// As the client or the program named it, made absolute; bytes that are no UTF-8 are replaced.
    pub path: String,
    /// What was wanted of it.
    pub access: Wanted,
    /// Who refused.
    pub layer: Layer,
    /// The rule that decided, in words that name the policy's entry.
    pub rule: String,
    /// The entry that would allow it; none where a denial has to go instead.
    pub grant: Option<SuggestedEntry>,
}

impl Denial {
    fn size(&self) -> usize {
        let grant = self.grant.as_ref().map_or(0, |entry| entry.path.r#type.len() + entry.path.path.len());
        size_of::<Self>() + self.path.len() + self.rule.len() + grant
    }
}

/// What a denied act wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Wanted {
    /// To look at it, to read or to execute it.
    Read,
    /// To change, make or remove it.
    Write,
}

/// Layers that can see what they refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Layer {
    /// An fs worker's own judgement.
    Worker,
    /// The view of mounts; seen by the sandbox's init, which is told of each attempt to change something.
    Mounts,
    /// The launcher, when it could not execute the program.
    Launcher,
}

/// An entry in the form of `file_system.entries`, to be added as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuggestedEntry {
    /// Always a `path`.
    pub path: SuggestedPath,
    /// `read` or `write`.
    pub access: Wanted,
}

impl SuggestedEntry {
    /// For a path of this machine.
    #[must_use]
    pub fn new(path: &AbsolutePath, access: Wanted) -> Self {
        Self { path: SuggestedPath { r#type: "path".to_owned(), path: path.to_uri() }, access }
    }
}

/// The path of a suggested entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuggestedPath {
    /// The tag, always `path`.
    pub r#type: String,
    /// A `file:` URI.
    pub path: String,
}

/// Denials of one process: the first ones, and how many more there were.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denials {
    /// At most [`MOST_DENIALS`], in the order in which they were seen, each path and access once.
    pub list: Vec<Denial>,
    /// How many more were not listed.
    pub more: u64,
}

impl Denials {
    /// Takes one up, unless it is known already.
    pub fn add(&mut self, denial: Denial) {
        if self.list.iter().any(|known| known.path == denial.path && known.access == denial.access) {
            return;
        }
        if self.list.len() < MOST_DENIALS {
            self.list.push(denial);
        } else {
            self.more += 1;
        }
    }

    /// The bytes that count against bounds of memory.
    #[must_use]
    pub fn size(&self) -> usize {
        self.list.iter().map(Denial::size).sum()
    }

    /// Whether a process that ended with this status failed with something denied. Programs probe and go on, so a success
    /// is none of the sandbox's doing.
    #[must_use]
    pub fn failed_it(&self, code: i32) -> bool {
        code != 0 && !self.is_empty()
    }

    /// Whether nothing was denied.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.more == 0
    }
}

/// Those of a JSON list that this version understands: a layer of a newer server costs its own denial, not the whole answer.
///
/// # Errors
/// It is no list.
pub fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Denial>, D::Error> {
    let list = Vec::<serde_json::Value>::deserialize(deserializer)?;
    Ok(list.into_iter().filter_map(|denial| serde_json::from_value(denial).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denial(nth: usize) -> Denial {
        let path = format!("/etc/{nth}");
        let entry = SuggestedPath { r#type: "path".to_owned(), path: format!("file://{path}") };
        let grant = Some(SuggestedEntry { path: entry, access: Wanted::Write });
        Denial { path, access: Wanted::Write, layer: Layer::Mounts, rule: "entry read `/`".to_owned(), grant }
    }

    #[test]
    fn the_first_are_listed_once_and_the_rest_counted() {
        let mut denials = Denials::default();
        for nth in [0, 0, 1].into_iter().chain(2..MOST_DENIALS + 3) {
            denials.add(denial(nth));
        }
        assert_eq!((denials.list.len(), denials.more), (MOST_DENIALS, 3));
    }

    #[test]
    fn a_grant_is_an_entry_as_clients_write_it() {
        let json = serde_json::to_value(denial(1)).unwrap();
        let grant = serde_json::json!({"path": {"type": "path", "path": "file:///etc/1"}, "access": "write"});
        assert_eq!((&json["grant"], &json["layer"]), (&grant, &serde_json::json!("mounts")));
    }

    #[test]
    fn a_layer_that_is_not_known_costs_its_own_denial_only() {
        let list = serde_json::json!([denial(1), {"path": "/x", "layer": "of tomorrow"}, 3]);
        assert_eq!(known(list).unwrap(), [denial(1)]);
    }
}

//! Taking a JSON object apart member by member, so that what is left was not known.

use super::{Network, SandboxError};
use crate::path::WirePath;
use serde_json::{Map, Value};

/// A JSON object whose members are taken one by one; what is left at the end was not known.
pub(super) struct Object {
    pub(super) at: String,
    pub(super) members: Map<String, Value>,
    pub(super) ignored: u32,
}

impl Object {
    pub(super) fn new(value: Value, at: String) -> Result<Self, SandboxError> {
        match value {
            Value::Object(members) => Ok(Self { at, members, ignored: 0 }),
            other => Err(fail(&at, format!("invalid type: {}, expected a map", kind(&other)))),
        }
    }

    pub(super) fn has(&self, member: &str) -> bool {
        self.members.contains_key(member)
    }

    pub(super) fn has_value(&self, member: &str) -> bool {
        self.members.get(member).is_some_and(|value| !value.is_null())
    }

    pub(super) fn take(&mut self, member: &str) -> Option<Value> {
        self.members.remove(member)
    }

    pub(super) fn required(&mut self, member: &str) -> Result<Value, SandboxError> {
        self.take(member).ok_or_else(|| fail(&self.at, format!("missing field `{member}`")))
    }

    pub(super) fn place(&self, member: &str) -> String {
        format!("{}.{member}", self.at)
    }

    pub(super) fn object(&mut self, member: &str) -> Result<Self, SandboxError> {
        Self::new(self.required(member)?, self.place(member))
    }

    pub(super) fn variant(&mut self, member: &str, variants: &[&'static str]) -> Result<&'static str, SandboxError> {
        let value = self.required(member)?;
        let at = self.place(member);
        let text = text(&value, &at)?;
        variants.iter().find(|variant| **variant == text).copied().ok_or_else(|| {
            let known: Vec<String> = variants.iter().map(|variant| format!("`{variant}`")).collect();
            fail(&at, format!("unknown variant `{text}`, expected one of {}", known.join(", ")))
        })
    }

    pub(super) fn optional_variant(&mut self, member: &str, variants: &[&'static str]) -> Result<(), SandboxError> {
        if self.has_value(member) {
            self.variant(member, variants)?;
        } else {
            self.take(member);
        }
        Ok(())
    }

    pub(super) fn network(&mut self, member: &str) -> Result<Network, SandboxError> {
        Ok(match self.variant(member, &["restricted", "enabled"])? {
            "enabled" => Network::Enabled,
            _restricted => Network::Restricted,
        })
    }

    /// A plain policy says `network_access`: a boolean, or one of the two words.
    pub(super) fn spelled_network(&mut self) -> Result<Network, SandboxError> {
        let member = self.spelled("network_access", "networkAccess")?;
        if self.members.get(member).is_some_and(Value::is_string) {
            return self.network(member);
        }
        Ok(if self.optional_boolean(member)?.unwrap_or(false) { Network::Enabled } else { Network::Restricted })
    }

    pub(super) fn spelled_boolean(&mut self, snake: &'static str, camel: &'static str) -> Result<bool, SandboxError> {
        let member = self.spelled(snake, camel)?;
        Ok(self.optional_boolean(member)?.unwrap_or(false))
    }

    /// Which of the two spellings is there; both is one too many.
    pub(super) fn spelled(&self, snake: &'static str, camel: &'static str) -> Result<&'static str, SandboxError> {
        match (self.has(snake), self.has(camel)) {
            (true, true) => Err(fail(&self.at, format!("has both `{snake}` and `{camel}`: give one"))),
            (_, true) => Ok(camel),
            (_, false) => Ok(snake),
        }
    }

    pub(super) fn optional_boolean(&mut self, member: &str) -> Result<Option<bool>, SandboxError> {
        match self.take(member) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(fail(&self.place(member), format!("invalid type: {}, expected a boolean", kind(&other)))),
        }
    }

    pub(super) fn optional_depth(&mut self, member: &str) -> Result<Option<u32>, SandboxError> {
        match self.take(member) {
            None | Some(Value::Null) => Ok(None),
            Some(other) => {
                let depth = other.as_u64().and_then(|depth| u32::try_from(depth).ok()).filter(|depth| *depth > 0);
                depth.map(Some).ok_or_else(|| fail(&self.place(member), format!("`{other}` is not a positive number")))
            }
        }
    }

    pub(super) fn optional_path(&mut self, member: &str) -> Result<Option<WirePath>, SandboxError> {
        match self.take(member) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => path(&value, &self.place(member)).map(Some),
        }
    }

    pub(super) fn optional_paths(&mut self, member: &str) -> Result<Option<Vec<WirePath>>, SandboxError> {
        let at = self.place(member);
        match self.take(member) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(values)) => values
                .iter()
                .enumerate()
                .map(|(nth, value)| path(value, &format!("{at}[{nth}]")))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(fail(&at, format!("invalid type: {}, expected a sequence", kind(&other)))),
        }
    }

    pub(super) fn entries(&mut self) -> Result<Vec<super::Entry>, SandboxError> {
        let at = self.place("entries");
        let Value::Array(values) = self.required("entries")? else {
            return Err(fail(&at, "expected a sequence"));
        };
        let mut entries = Vec::with_capacity(values.len());
        for (nth, value) in values.into_iter().enumerate() {
            let mut object = Self::new(value, format!("{at}[{nth}]"))?;
            entries.push(super::entry::entry(&mut object)?);
            object.finish_into(self)?;
        }
        Ok(entries)
    }

    pub(super) fn finish_into(self, parent: &mut Self) -> Result<(), SandboxError> {
        const MATTER: [&str; 9] =
            ["entries", "access", "path", "type", "value", "kind", "subpath", "pattern", "missing_path_behavior"];
        parent.ignored += self.finish(&[&MATTER[..], &[super::NESTED.1]].concat())?;
        Ok(())
    }

    /// Counts the members that are left. A near-miss of a member that matters is refused: ignoring it would run the request
    /// under another policy than its author meant.
    pub(super) fn finish(self, matter: &[&str]) -> Result<u32, SandboxError> {
        for member in self.members.keys() {
            // The name is so long that it can be misspelt in more letters than a near-miss has.
            let is_misspelt = |name: &str| {
                is_near_miss(member, name)
                    || name == super::NESTED.1 && fold(member).starts_with(&['p', 'r', 'o', 't', 'e', 'c', 't'])
            };
            if let Some(meant) = matter.iter().find(|name| is_misspelt(name)) {
                return Err(fail(&self.at, format!("`{member}` is unknown or out of place here, did you mean `{meant}`?")));
            }
        }
        Ok(self.ignored + u32::try_from(self.members.len()).unwrap_or(u32::MAX))
    }
}

pub(super) fn text<'a>(value: &'a Value, at: &str) -> Result<&'a str, SandboxError> {
    value.as_str().ok_or_else(|| fail(at, format!("invalid type: {}, expected a string", kind(value))))
}

pub(super) fn path(value: &Value, at: &str) -> Result<WirePath, SandboxError> {
    let text = text(value, at)?;
    WirePath::parse(text).map_err(|error| fail(at, format!("`{text}`: {error}")))
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => format!("boolean `{value}`"),
        Value::Number(_) => "number".to_owned(),
        Value::String(text) => format!("string {text:?}"),
        Value::Array(_) => "sequence".to_owned(),
        Value::Object(_) => "map".to_owned(),
    }
}

/// Whether `given` looks like a misspelling of `name`: equal but for case, `_` and `-`, or one letter wrong, missing, too many
/// or swapped with its neighbour; two of these in a name of six letters or more.
#[must_use]
pub fn is_near_miss(given: &str, name: &str) -> bool {
    let (given, name) = (fold(given), fold(name));
    let bound = if name.len() < LONG_NAME { 1 } else { 2 };
    // Also the bound of the work: a member may be as long as a message.
    given.len().abs_diff(name.len()) <= bound && edits(&given, &name) <= bound
}

/// From this length on two edits still leave most of a name.
const LONG_NAME: usize = 6;

/// Letters in lower case, without what only parts words.
pub(super) fn fold(text: &str) -> Vec<char> {
    text.chars().filter(|letter| !matches!(letter, '_' | '-' | ' ')).flat_map(char::to_lowercase).collect()
}

/// The least number of letters to change, add, drop or swap with a neighbour, none touched twice.
fn edits(left: &[char], right: &[char]) -> usize {
    let (mut before, mut above) = (Vec::new(), (0..=right.len()).collect::<Vec<_>>());
    for (i, a) in left.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in right.iter().enumerate() {
            let mut least = (above[j] + usize::from(a != b)).min(above[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && left[i - 1] == *b && right[j - 1] == *a {
                let before: &[usize] = &before;
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[right.len()]
}

pub(super) fn fail(at: &str, problem: impl ToString) -> SandboxError {
    SandboxError { at: at.to_owned(), problem: problem.to_string() }
}

//! A policy: what may be touched, resolved against this machine. It is the only form that a helper ever gets.

mod own_places;

use crate::glob;
use portcullis_protocol::path::AbsolutePath;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

/// Names that stay read-only at the top of every writable root, present or not, unless an entry grants them.
pub const PROTECTED_NAMES: [&str; 4] = [".git", ".codex", ".agents", ".aws"];

/// Whether a name is one of [`PROTECTED_NAMES`], or a spelling that some file system treats as one: in any case, with dots or
/// blanks behind it, or in the short form of vfat (`GIT~1`). Git itself refuses such names everywhere. Where they are other
/// names, nothing is lost.
#[must_use]
pub fn is_protected_name(name: &OsStr) -> bool {
    protected_name(name).is_some()
}

/// The protected name that a name may stand for.
pub(crate) fn protected_name(name: &OsStr) -> Option<&'static str> {
    let name = name.as_bytes().trim_ascii_end();
    let end = name.iter().rposition(|byte| !matches!(byte, b'.' | b' ')).map_or(0, |last| last + 1);
    let name = &name[..end];
    let stem = || {
        let (stem, number) = name.split_at(name.iter().position(|byte| *byte == b'~')?);
        (number.len() > 1 && number[1..].iter().all(u8::is_ascii_digit)).then_some(stem)
    };
    PROTECTED_NAMES.into_iter().find(|protected| {
        let plain = protected.as_bytes();
        name.eq_ignore_ascii_case(plain) || stem().is_some_and(|stem| stem.eq_ignore_ascii_case(&plain[1..]))
    })
}

/// Bound of the entries of a policy: each costs a descriptor and a kernel rule when a helper is confined.
pub const MAX_ENTRIES: usize = 8192;

/// Bound of the deny globs of a policy: all of them are tried on every ancestor of a path.
pub const MAX_GLOBS: usize = 512;

/// Bound of one glob in bytes, the longest path that the system takes.
pub const MAX_GLOB_LENGTH: usize = 4096;

/// Bound of one path in bytes: `PATH_MAX` of linux/limits.h without the NUL byte.
pub const MAX_PATH_LENGTH: usize = 4095;

/// Bound of all paths of one set of grants in bytes: 256 for each of [`MAX_ENTRIES`]. The gateway's thread reads and copies them, and
/// a helper gets them in one frame.
pub const MAX_PATH_BYTES: usize = 2 << 20;

/// What may be touched: validated, absolute, without anything left to look up but the files themselves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// On file systems.
    pub files: Files,
    /// On the network.
    pub network: Network,
}

/// What may be touched on file systems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Files {
    /// Everything that the user may touch.
    Unrestricted,
    /// What every one of the sets grants, and nothing else.
    Restricted(GrantSets),
}

impl Files {
    /// The sets of grants, all of which must allow; none where nothing is restricted.
    pub fn sets(&self) -> impl Iterator<Item = &Grants> + Clone {
        let sets = match self {
            Self::Unrestricted => None,
            Self::Restricted(sets) => Some(sets.iter()),
        };
        sets.into_iter().flatten()
    }

    /// Whether a set grants no writing, so that nothing at all can be changed.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.sets().any(|grants| grants.entries.iter().all(|grant| grant.access != Access::Write))
    }
}

/// Bound of the sets of grants: what was asked for, what the client's token allows, and the operator's ceiling. Nobody else has a
/// say, and the kernel nests sixteen domains at most, of which the gateway's own surroundings may have used some.
pub const MAX_SETS: usize = 3;

/// Sets of grants, at least one, all of which must allow. Sets cannot be merged into one: a link in one may lead into what another
/// denies, and where it leads is only known once the paths are opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantSets {
    first: Grants,
    ceilings: Vec<Grants>,
}

impl GrantSets {
    /// All of them: the request's, then those of the ceilings.
    pub fn iter(&self) -> impl Iterator<Item = &Grants> + Clone {
        [&self.first].into_iter().chain(&self.ceilings)
    }

    fn bounded_by(mut self, ceiling: &Self) -> Result<Self, PolicyError> {
        // One that holds already is not said twice.
        let more: Vec<Grants> = ceiling.iter().filter(|set| !self.iter().any(|own| own == *set)).cloned().collect();
        self.ceilings.extend(more);
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), PolicyError> {
        match self.iter().count() {
            count if count > MAX_SETS => Err(PolicyError::Bound { what: "sets of grants", count, bound: MAX_SETS }),
            _fits => Ok(()),
        }
    }
}

impl From<Grants> for GrantSets {
    fn from(grants: Grants) -> Self {
        Self { first: grants, ceilings: Vec::new() }
    }
}

/// Whether sockets may reach beyond the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// No.
    Restricted,
    /// Yes.
    Enabled,
}

/// Grants and denials of a restricted policy, in one canonical form: equal policies have equal bytes and hashes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grants {
    /// In the order of their paths, at most one for each path; see [`Grants::new`].
    pub entries: Vec<Grant>,
    /// What matches, and everything below it, is denied; in order, without duplicates.
    pub deny_globs: Vec<DenyGlob>,
    /// Whether [`PROTECTED_NAMES`] are read-only at any depth below a writable root rather than at its top alone. An entry for
    /// writing whose own path goes through such a name lifts it there.
    pub protect_nested: bool,
    /// Places of the server itself, each with the most that an entry may give at it or below it, or above it through a link: see
    /// [`Policy::hiding`] and [`Policy::keeping`]. A policy of which an entry resolves to more is refused when its paths are opened.
    pub own_places: Vec<(AbsolutePath, Access)>,
}

/// An entry: it covers its path and everything below, where no longer path says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// As the client named it, normalised lexically; may hold links until a helper resolves it.
    pub path: AbsolutePath,
    /// What it gives.
    pub access: Access,
    /// Whether it says nothing where its path does not exist when it is opened; never of an entry for writing. Others hold for
    /// what is made there later.
    pub skip_missing: bool,
}

impl Grant {
    /// An entry that holds whether or not its path exists.
    #[must_use]
    pub fn new(path: AbsolutePath, access: Access) -> Self {
        Self { path, access, skip_missing: false }
    }
}

/// A denial by pattern. The base is kept apart because it may hold links and bytes that no pattern can spell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DenyGlob {
    /// Where the pattern starts.
    pub base: AbsolutePath,
    /// Relative to the base, not empty; `*` and `?` stop at slashes, `**` does not.
    pub pattern: String,
}

/// What an entry gives. The order is that of a tie between two entries of one path: the greater wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Access {
    /// Reading.
    Read,
    /// Reading and changing.
    Write,
    /// Nothing.
    Deny,
}

impl Grants {
    /// Sorts, and merges entries of one path: deny wins over write, write over read. What one of them says of a missing path
    /// holds for the merged one.
    ///
    /// # Errors
    /// More entries or globs than the bounds allow.
    pub fn new(mut entries: Vec<Grant>, mut deny_globs: Vec<DenyGlob>) -> Result<Self, PolicyError> {
        entries.sort_by(|left, right| left.path.cmp(&right.path).then(right.access.cmp(&left.access)));
        entries.dedup_by(|later, kept| {
            let same = later.path == kept.path;
            kept.skip_missing &= !same || later.skip_missing;
            same
        });
        entries.iter_mut().for_each(|entry| entry.skip_missing &= entry.access != Access::Write);
        deny_globs.sort();
        deny_globs.dedup();
        let grants = Self { entries, deny_globs, protect_nested: false, own_places: Vec::new() };
        grants.check()?;
        Ok(grants)
    }

    /// The paths of entries, and those where globs start.
    fn paths(&self) -> impl Iterator<Item = &AbsolutePath> {
        self.entries.iter().map(|entry| &entry.path).chain(self.deny_globs.iter().map(|glob| &glob.base))
    }

    /// What [`Grants::new`] makes true, and what bytes from elsewhere must not break.
    fn check(&self) -> Result<(), PolicyError> {
        if self.entries.len() > MAX_ENTRIES {
            return Err(PolicyError::Bound { what: "entries", count: self.entries.len(), bound: MAX_ENTRIES });
        }
        if self.deny_globs.len() > MAX_GLOBS {
            return Err(PolicyError::Bound { what: "deny globs", count: self.deny_globs.len(), bound: MAX_GLOBS });
        }
        if let Some(path) = self.paths().find(|path| path.len() > MAX_PATH_LENGTH) {
            return Err(PolicyError::Bound { what: "bytes in a path", count: path.len(), bound: MAX_PATH_LENGTH });
        }
        let bytes = self.paths().map(AbsolutePath::len).sum();
        if bytes > MAX_PATH_BYTES {
            return Err(PolicyError::Bound { what: "bytes of paths", count: bytes, bound: MAX_PATH_BYTES });
        }
        if let Some(glob) = self.deny_globs.iter().find(|glob| glob.pattern.len() > MAX_GLOB_LENGTH) {
            return Err(PolicyError::Bound { what: "bytes in a deny glob", count: glob.pattern.len(), bound: MAX_GLOB_LENGTH });
        }
        if self.own_places.len() > MAX_ENTRIES {
            return Err(PolicyError::Bound { what: "places of the server", count: self.own_places.len(), bound: MAX_ENTRIES });
        }
        glob::check_size(self.deny_globs.iter().map(|glob| glob.pattern.as_str()))?;
        let sorted = self.entries.is_sorted_by(|left, right| left.path < right.path);
        if sorted && self.deny_globs.is_sorted_by(|left, right| left < right) {
            Ok(())
        } else {
            Err(PolicyError::Bytes("entries or globs are out of order".to_owned()))
        }
    }
}

impl Policy {
    /// The bytes that go to a helper.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("Invariant: a policy holds only sequences of known length, which always encode")
    }

    /// Reads what [`Policy::encode`] wrote.
    ///
    /// # Errors
    /// Anything else than a policy in its canonical form.
    pub fn decode(bytes: &[u8]) -> Result<Self, PolicyError> {
        let (policy, rest): (Self, &[u8]) =
            postcard::take_from_bytes(bytes).map_err(|error| PolicyError::Bytes(error.to_string()))?;
        if !rest.is_empty() {
            return Err(PolicyError::Bytes(format!("{} bytes too many", rest.len())));
        }
        if let Files::Restricted(sets) = &policy.files {
            sets.check()?;
        }
        policy.files.sets().try_for_each(Grants::check)?;
        Ok(policy)
    }

    /// Everything can be read, and nothing else be done.
    #[must_use]
    pub fn read_everything() -> Self {
        let entries = AbsolutePath::new("/").map(|path| Grant::new(path, Access::Read)).into_iter().collect();
        let grants = Grants { entries, ..Grants::default() };
        Self { files: Files::Restricted(grants.into()), network: Network::Restricted }
    }

    /// Whether a set of grants protects names at any depth, which no list of places can say.
    #[must_use]
    pub fn protects_nested(&self) -> bool {
        self.files.sets().any(|grants| grants.protect_nested)
    }

    /// What both policies allow, and no more.
    ///
    /// # Errors
    /// More than [`MAX_SETS`] sets of grants: one of the two is bounded already.
    pub fn bounded_by(self, ceiling: &Self) -> Result<Self, PolicyError> {
        let files = match (self.files, &ceiling.files) {
            (Files::Restricted(own), Files::Restricted(bound)) => Files::Restricted(own.bounded_by(bound)?),
            (Files::Unrestricted, bound) => bound.clone(),
            (own, Files::Unrestricted) => own,
        };
        let network = match (self.network, ceiling.network) {
            (Network::Enabled, Network::Enabled) => Network::Enabled,
            (Network::Restricted, _) | (_, Network::Restricted) => Network::Restricted,
        };
        Ok(Self { files, network })
    }

    /// Names the policy: equal hashes mean equal policies.
    #[must_use]
    pub fn hash(&self) -> PolicyHash {
        PolicyHash::of(&self.encode())
    }
}

/// SHA-256 of an encoded policy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyHash([u8; 32]);

impl PolicyHash {
    /// Of the bytes of [`Policy::encode`].
    #[must_use]
    pub fn of(encoded: &[u8]) -> Self {
        Self(Sha256::digest(encoded).into())
    }
}

impl fmt::Display for PolicyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PolicyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyHash({self})")
    }
}

/// Why there is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A path of another system.
    #[error("{at}: {problem}")]
    Path {
        /// What was being resolved.
        at: String,
        /// What is wrong with its path.
        problem: String,
    },
    /// Project roots or a relative glob without a directory to start from. The text is the one that clients know.
    #[error("file system sandbox context with dynamic permissions requires cwd")]
    CwdRequired,
    /// A glob that cannot be enforced as written.
    #[error("deny glob `{glob}`: {problem}")]
    Glob {
        /// As the client wrote it.
        glob: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An entry that would come to nothing and whose author meant it to limit.
    #[error("special entry `{kind}` with access {access}: {problem}")]
    Special {
        /// The entry's kind.
        kind: String,
        /// What it was to give.
        access: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Protection of nested names where no entry limits what may be changed.
    #[error("protectNestedRepositories protects nothing where files are not confined: give entries")]
    NothingToProtect,
    /// More than a policy may hold.
    #[error("policy with {count} {what}: the bound is {bound}")]
    Bound {
        /// Of what there are too many.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        bound: usize,
    },
    /// A path of the policy must not be used as it is.
    #[error("policy path `{path}`: {problem}")]
    Refused {
        /// The path.
        path: AbsolutePath,
        /// Why.
        problem: String,
    },
    /// Bytes that no encoder wrote.
    #[error("bytes of a policy do not decode: {0}")]
    Bytes(String),
    /// A policy file.
    #[error("policy file {file}, line {line}: {problem}")]
    File {
        /// Its name.
        file: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        problem: String,
    },
}

#[cfg(test)]
mod tests;

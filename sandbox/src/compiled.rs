//! A policy as lookup tables: what it says of a path costs the path's depth, however many entries there are.
//!
//! The tables know only real paths: absolute and without links. Whoever asks must have resolved the links, and must open
//! exactly the path it asked about. Every entry is resolved once, when the tables are made.

use crate::mounts::{Found, FoundKind};
use crate::policy::{Policy, PolicyError};
use crate::tree::Tree;
use portcullis_protocol::path::AbsolutePath;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// What a policy says of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Reading and changing.
    Write,
    /// Reading.
    Read,
    /// Reading only, below a writable root.
    Protected,
    /// A deny entry or a deny glob covers it.
    Denied,
    /// No entry covers it.
    Unlisted,
}

impl Verdict {
    /// How much it allows; see [`Compiled::has_narrower_below`].
    pub(crate) fn rank(self) -> u8 {
        match self {
            Self::Write => 3,
            Self::Read | Self::Protected => 2,
            Self::Unlisted => 1,
            Self::Denied => 0,
        }
    }

    /// Whether it lets something be read.
    #[must_use]
    pub fn is_granted(self) -> bool {
        matches!(self, Self::Write | Self::Read | Self::Protected)
    }

    /// The verdict where both hold. Protected is only what lies below a place that is writable under both.
    pub(crate) fn and(self, other: Self) -> Self {
        if other.rank() < self.rank() || other == Self::Read && self == Self::Protected { other } else { self }
    }
}

/// A path at which the verdict changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// Real: absolute and without links when the tables were made.
    pub path: &'a Path,
    /// From here on, down to the next place.
    pub verdict: Verdict,
}

/// What a path of a policy turned out to be on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// It exists.
    Real {
        /// Absolute, without links.
        path: PathBuf,
        /// Places of the links that were followed on the way, in order.
        links: Vec<PathBuf>,
    },
    /// It does not exist.
    Missing {
        /// The real path of what exists of it, and the missing names.
        path: PathBuf,
        /// Places of the links that were followed on the way, in order.
        links: Vec<PathBuf>,
    },
    /// Another set of grants hides it: its entry takes away and grants nothing. Whether it exists is not told.
    Hidden {
        /// Absolute, without links.
        path: PathBuf,
        /// Places of the links that were followed on the way, in order.
        links: Vec<PathBuf>,
    },
    /// It must not be used, in words.
    Refused(String),
}

impl Resolved {
    /// A path that exists and holds no link.
    #[must_use]
    pub fn same(path: &AbsolutePath) -> Self {
        Self::Real { path: path.as_path().to_owned(), links: Vec::new() }
    }

    /// The real path, existing or not; none if it must not be used.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Real { path, .. } | Self::Missing { path, .. } | Self::Hidden { path, .. } => Some(path),
            Self::Refused(_) => None,
        }
    }

    /// The links on the way.
    pub(crate) fn links(&self) -> &[PathBuf] {
        match self {
            Self::Real { links, .. } | Self::Missing { links, .. } | Self::Hidden { links, .. } => links,
            Self::Refused(_) => &[],
        }
    }
}

/// A policy in lookup tables.
#[derive(Debug)]
pub struct Compiled {
    /// One for each set of grants, in their order; one in which everything is writable where there is none.
    trees: Vec<Tree>,
    /// Places that protected names lead to, and whether an entry names them all the same; the deepest holds.
    pointed: HashMap<PathBuf, bool>,
}

impl Compiled {
    /// Builds the tables. `resolve` is asked once for every entry of every set of grants, and for every base of a glob.
    ///
    /// # Errors
    /// A path is refused, or a glob does not compile.
    pub fn new(policy: &Policy, mut resolve: impl FnMut(&AbsolutePath) -> Resolved) -> Result<Self, PolicyError> {
        let mut trees = policy.files.sets().map(|grants| Tree::new(grants, &mut resolve)).collect::<Result<Vec<_>, _>>()?;
        if trees.is_empty() {
            trees.push(Tree::everything());
        }
        Ok(Self { trees, pointed: HashMap::new() })
    }

    /// What the policy says of an absolute path without links.
    #[must_use]
    pub fn verdict(&self, real: &Path) -> Verdict {
        match self.least(|tree| tree.verdict(real)) {
            Verdict::Write if self.is_pointed_at(real) => Verdict::Protected,
            verdict => verdict,
        }
    }

    /// Takes up where protected names lead, as a look at the files found it: from here on that is protected too.
    pub fn protect<'a>(&mut self, found: impl IntoIterator<Item = &'a Found>) {
        let kept = found.into_iter().filter_map(|found| match found.kind {
            FoundKind::Protected => Some((found.path.as_path().to_owned(), false)),
            FoundKind::Named => Some((found.path.as_path().to_owned(), true)),
            FoundKind::Denied | FoundKind::Nested | FoundKind::Way => None,
        });
        for (path, is_named) in kept {
            *self.pointed.entry(path).or_default() |= is_named;
        }
    }

    /// What of `found` the tables do not know by an entry or a protected name of one: only a look at the files told of it.
    #[must_use]
    pub fn without_named(&self, found: Vec<Found>) -> Vec<Found> {
        let named: HashSet<&Path> = self.places().iter().map(|place| place.path).collect();
        found.into_iter().filter(|found| !named.contains(found.path.as_path())).collect()
    }

    /// Whether a protected name leads there, and no entry names it.
    pub(crate) fn is_pointed_at(&self, real: &Path) -> bool {
        real.ancestors().find_map(|above| self.pointed.get(above)).is_some_and(|is_named| !is_named)
    }

    /// The places above it that protected names lead to.
    pub(crate) fn pointed_at<'a>(&self, real: &'a Path) -> Vec<&'a Path> {
        real.ancestors().filter(|above| self.pointed.get(*above).is_some_and(|is_named| !is_named)).collect()
    }

    /// Whether every set of grants makes `real` writable by an entry for `repository` or for something in it, so that its author
    /// meant the repository. An entry that also covers `pointer`, by which the repository was found, does not show that.
    #[must_use]
    pub fn is_named(&self, real: &Path, repository: &Path, pointer: &Path) -> bool {
        let names = |tree: &Tree| tree.decider(real).is_some_and(|by| by.starts_with(repository) && !pointer.starts_with(by));
        self.least(|tree| tree.verdict(real)) == Verdict::Write && self.trees.iter().all(names)
    }

    /// Whether a set of grants makes a directory writable and not the name in it. It does not matter what less the other sets
    /// grant there: they must not lift the protection of this set.
    pub(crate) fn protects_name(&self, name: &Path) -> bool {
        let is_writable = |tree: &Tree, path: &Path| tree.verdict(path) == Verdict::Write;
        let directory = name.parent().unwrap_or(name);
        self.trees.iter().any(|tree| is_writable(tree, directory) && !is_writable(tree, name))
    }

    /// Whether no request can have written a name: a set of grants that clients do not choose makes its directory writable and not the
    /// name. Without a ceiling that is the only set.
    pub(crate) fn is_operators(&self, name: &Path) -> bool {
        let directory = name.parent().unwrap_or(name);
        let protects = |tree: &Tree| tree.verdict(directory) == Verdict::Write && tree.verdict(name) != Verdict::Write;
        let fixed = if self.trees.len() > 1 { 1 } else { 0 };
        self.trees.iter().skip(fixed).any(protects)
    }

    /// Whether a path would be writable if no protected name led to it.
    pub(crate) fn is_writable_but_pointed_at(&self, real: &Path) -> bool {
        self.is_pointed_at(real) && self.least(|tree| tree.verdict(real)) == Verdict::Write
    }

    /// The verdict of one set of grants, by its place in [`crate::policy::Files::sets`].
    pub(crate) fn verdict_of_set(&self, set: usize, real: &Path) -> Verdict {
        self.trees.get(set).map_or(Verdict::Unlisted, |tree| tree.verdict(real))
    }

    /// Whether a deny glob matches the path or one of its ancestors.
    #[must_use]
    pub fn glob_denies(&self, real: &Path) -> bool {
        self.trees.iter().any(|tree| tree.glob_denies(real))
    }

    /// Whether the path may be known to exist: it can be read, or it leads to something granted.
    #[must_use]
    pub fn is_visible(&self, real: &Path) -> bool {
        self.trees.iter().all(|tree| tree.is_visible(real))
    }

    /// Whether an entry, a protected name or a glob could make something below `real` less than `real` itself. It may say so
    /// where another set of grants allows even less.
    #[must_use]
    pub fn has_narrower_below(&self, real: &Path) -> bool {
        self.trees.iter().any(|tree| tree.has_narrower_below(real))
            || self.pointed.iter().any(|(place, _)| place.starts_with(real))
    }

    /// The real paths of the entries that decide over `real`, of each set of grants that has one, also of entries that were
    /// missing when the tables were made: whoever acts on the verdict must check that each is still what it was.
    pub fn roots_of(&self, real: &Path) -> impl Iterator<Item = &Path> {
        self.trees.iter().flat_map(|tree| tree.roots_of(real))
    }

    /// Every path at which the verdict changes on the way down, globs and names that are protected at any depth aside (see
    /// [`Policy::protects_nested`]); a path comes after those above it. What it has to be made of on this machine is for whoever
    /// builds a view of it.
    #[must_use]
    pub fn places(&self) -> Vec<Place<'_>> {
        let paths = self.trees.iter().flat_map(Tree::paths);
        // In the order of the paths, what lies above comes first.
        let mut verdicts: BTreeMap<&Path, Verdict> =
            paths.map(|path| (path, self.least(|tree| tree.verdict_of_entries(path)))).collect();
        let above = |path: &Path| path.parent().map(|parent| self.least(|tree| tree.verdict_of_entries(parent)));
        verdicts.retain(|path, verdict| above(path) != Some(*verdict));
        verdicts.into_iter().map(|(path, verdict)| Place { path, verdict }).collect()
    }

    pub(crate) fn trees(&self) -> &[Tree] {
        &self.trees
    }

    fn least(&self, verdict: impl Fn(&Tree) -> Verdict) -> Verdict {
        self.trees.iter().map(verdict).reduce(Verdict::and).expect("Invariant: there is always a tree")
    }
}

#[cfg(test)]
mod tests;

//! One set of grants as a tree of the names in its paths. The set's own rules live here; [`crate::compiled`] asks several trees.

use crate::compiled::{Resolved, Verdict};
use crate::glob::Globs;
use crate::policy::{Access, DenyGlob, Grant, Grants, PROTECTED_NAMES, PolicyError, is_protected_name, protected_name};
use portcullis_protocol::path::AbsolutePath;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// A set of grants in a lookup table.
#[derive(Debug)]
pub(crate) struct Tree {
    /// By the components of the entries' real paths; the first node is the root of the file system.
    nodes: Vec<Node>,
    /// Protected names count at any depth below what is writable.
    protect_nested: bool,
    /// As the policy has them.
    entries: Vec<Grant>,
    /// As the policy has them, by the real path of each base.
    globs: Vec<(PathBuf, DenyGlob)>,
}

/// What decides over a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule<'a> {
    /// Nothing is restricted.
    Everything,
    /// No entry covers it.
    NoEntry,
    Entry(&'a Grant),
    /// A protected name at the top of what an entry makes writable.
    Top(&'a Grant),
    /// A protected name anywhere below what an entry makes writable.
    Nested(&'a OsStr, &'a Grant),
    Glob(&'a DenyGlob),
}

/// What made a node say what it says: an entry, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Entry(usize),
    /// The node is one of the entry's protected names.
    Top(usize),
}

#[derive(Debug)]
struct Node {
    path: PathBuf,
    children: HashMap<OsString, usize>,
    said: Option<Said>,
    /// Who said it.
    origin: Option<Origin>,
    /// The real path of an entry, whether or not it exists.
    is_entry: bool,
    /// The real path of an entry that says nothing, because it is missing and was to be skipped then.
    is_awaited: bool,
    /// It leads to an entry and must be seen to be followed: a link on the way, and the entry's own name.
    is_waypoint: bool,
    /// Deny globs that start here, relative to here.
    globs: Option<Globs>,
    /// Something at or below grants, or is a waypoint.
    leads_on: bool,
    /// The least rank of the nodes strictly below.
    least_below: u8,
}

/// What an entry says at its node. The greater wins where several fall on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    /// Takes writing away and gives nothing: protected names, entries for reading that are missing or a link's own place.
    Narrow,
    Read,
    Write,
    Deny,
}

impl Said {
    /// The verdict below a node, given the verdict above it.
    fn below(said: Option<Self>, above: Verdict) -> Verdict {
        match said {
            None => above,
            Some(Self::Write) => Verdict::Write,
            Some(Self::Deny) => Verdict::Denied,
            Some(Self::Read) if above == Verdict::Write || above == Verdict::Protected => Verdict::Protected,
            Some(Self::Read) => Verdict::Read,
            Some(Self::Narrow) if above == Verdict::Write => Verdict::Protected,
            Some(Self::Narrow) => above,
        }
    }
}

impl Tree {
    pub(crate) fn new(grants: &Grants, resolve: &mut impl FnMut(&AbsolutePath) -> Resolved) -> Result<Self, PolicyError> {
        let mut tree = Self {
            nodes: vec![Node::new(PathBuf::from("/"))],
            protect_nested: grants.protect_nested,
            entries: grants.entries.clone(),
            globs: Vec::new(),
        };
        tree.insert_all(grants, resolve)?;
        tree.summarise();
        Ok(tree)
    }

    /// All is writable.
    pub(crate) fn everything() -> Self {
        let nodes = vec![Node::new(PathBuf::from("/"))];
        let mut tree = Self { nodes, protect_nested: false, entries: Vec::new(), globs: Vec::new() };
        tree.nodes[0].said = Some(Said::Write);
        tree.summarise();
        tree
    }

    fn insert_all(&mut self, grants: &Grants, resolve: &mut impl FnMut(&AbsolutePath) -> Resolved) -> Result<(), PolicyError> {
        let mut writable = Vec::new();
        for (number, entry) in grants.entries.iter().enumerate() {
            self.insert(number, entry, resolve(&entry.path), &mut writable)?;
        }
        // Of a missing entry too: whoever may write above it may make it, and its protected names with it.
        for (at, number) in writable {
            let by = Origin::Top(number);
            for name in PROTECTED_NAMES {
                let protected = self.child(at, OsStr::new(name));
                self.nodes[protected].say(Said::Narrow, by);
            }
        }
        let mut by_base: BTreeMap<&AbsolutePath, Vec<&DenyGlob>> = BTreeMap::new();
        for glob in &grants.deny_globs {
            by_base.entry(&glob.base).or_default().push(glob);
        }
        let mut by_real: BTreeMap<PathBuf, Vec<&DenyGlob>> = BTreeMap::new();
        for (base, globs) in by_base {
            let path = usable(base, resolve(base))?.path;
            // Also where it stands by name: the link that leads elsewhere now may become a directory.
            if path != base.as_path() {
                by_real.entry(base.as_path().to_owned()).or_default().extend(&globs);
            }
            by_real.entry(path).or_default().extend(globs);
        }
        for (base, globs) in by_real {
            let at = self.node(&base);
            self.nodes[at].globs = Some(Globs::new(&globs)?);
            self.globs.extend(globs.into_iter().map(|glob| (base.clone(), glob.clone())));
        }
        Ok(())
    }

    /// Places of an entry for writing, whatever stands there, are added to `writable` with the entry's number.
    fn insert(
        &mut self,
        number: usize,
        entry: &Grant,
        resolved: Resolved,
        writable: &mut Vec<(usize, usize)>,
    ) -> Result<(), PolicyError> {
        let by = Origin::Entry(number);
        let (named, access) = (&entry.path, entry.access);
        let Usable { path, exists, links, is_hidden } = usable(named, resolved)?;
        let at = self.node(&path);
        if entry.skip_missing && !exists {
            self.nodes[at].is_awaited = true;
            return Ok(());
        }
        // What only takes away may be another file by now: nothing is granted by what it was.
        self.nodes[at].is_entry |= !is_hidden;
        if access == Access::Write {
            writable.push((at, number));
        }
        match (access, exists && !is_hidden) {
            (Access::Deny, _) => self.nodes[at].say(Said::Deny, by),
            (Access::Read, true) => self.nodes[at].say(Said::Read, by),
            (Access::Write, true) => self.nodes[at].say(Said::Write, by),
            (Access::Read, false) => self.nodes[at].say(Said::Narrow, by),
            // What does not exist is not writable once it does: whoever made it was not asked whether it is a link.
            (Access::Write, false) => {}
        }
        let own_name = (access != Access::Deny).then_some([path.as_path(), named.as_path()]);
        let way = links.iter().map(PathBuf::as_path).chain(own_name.into_iter().flatten());
        for place in way.filter(|_| !is_hidden) {
            let at = self.node(place);
            self.nodes[at].is_waypoint = true;
        }
        // The entry also covers its own name, as written and where its parents really are, whatever stands there later.
        let name = named.as_path().file_name();
        let own_places = links.iter().map(PathBuf::as_path).filter(|link| link.file_name() == name);
        for place in own_places.chain([named.as_path()]).filter(|place| *place != path) {
            let at = self.node(place);
            match access {
                Access::Deny => self.nodes[at].say(Said::Deny, by),
                Access::Read => self.nodes[at].say(Said::Narrow, by),
                Access::Write => writable.push((at, number)),
            }
        }
        Ok(())
    }

    pub(crate) fn verdict(&self, real: &Path) -> Verdict {
        let walk = self.walk(real);
        if walk.glob_denies { Verdict::Denied } else { walk.verdict }
    }

    /// The same without globs.
    pub(crate) fn verdict_of_entries(&self, real: &Path) -> Verdict {
        self.walk(real).verdict
    }

    pub(crate) fn glob_denies(&self, real: &Path) -> bool {
        self.walk(real).glob_denies
    }

    /// What decides, globs first.
    pub(crate) fn rule<'a>(&'a self, real: &'a Path) -> Rule<'a> {
        let walk = self.walk(real);
        if walk.glob_denies {
            let matches = |(base, glob): &&(PathBuf, DenyGlob)| {
                let names = real.strip_prefix(base).map(|below| below.iter().collect::<Vec<_>>());
                names.is_ok_and(|names| Globs::new(&[glob]).is_ok_and(|globs| globs.match_ancestor(&names)))
            };
            if let Some((_, glob)) = self.globs.iter().find(matches) {
                return Rule::Glob(glob);
            }
        }
        match (walk.decider.and_then(|at| self.nodes[at].origin), walk.nested) {
            (Some(Origin::Entry(number)), Some(name)) => Rule::Nested(name, &self.entries[number]),
            (Some(Origin::Entry(number)), None) => Rule::Entry(&self.entries[number]),
            (Some(Origin::Top(number)), _) => Rule::Top(&self.entries[number]),
            (None, _) if walk.verdict == Verdict::Write => Rule::Everything,
            (None, _) => Rule::NoEntry,
        }
    }

    /// The place of the entry or name that decides.
    pub(crate) fn decider(&self, real: &Path) -> Option<&Path> {
        self.walk(real).decider.map(|at| self.nodes[at].path.as_path())
    }

    pub(crate) fn is_visible(&self, real: &Path) -> bool {
        let walk = self.walk(real);
        !walk.glob_denies
            && (matches!(walk.verdict, Verdict::Write | Verdict::Read | Verdict::Protected)
                || walk.node.is_some_and(|at| self.nodes[at].leads_on))
    }

    pub(crate) fn has_narrower_below(&self, real: &Path) -> bool {
        let walk = self.walk(real);
        walk.below_glob_base
            || self.protect_nested && walk.verdict == Verdict::Write
            || walk.node.is_some_and(|at| self.nodes[at].least_below < walk.verdict.rank())
    }

    /// The entry that decides, and any further down that is to decide once it exists.
    pub(crate) fn roots_of(&self, real: &Path) -> impl Iterator<Item = &Path> + use<'_> {
        let walk = self.walk(real);
        walk.entry.into_iter().chain(walk.awaited).map(|at| self.nodes[at].path.as_path())
    }

    /// Every path that an entry, a protected name or a glob speaks of, and those above.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.nodes.iter().map(|node| node.path.as_path())
    }

    fn walk<'a>(&self, real: &'a Path) -> Walk<'a> {
        let names: Vec<&OsStr> = real.iter().skip(1).collect();
        let root = &self.nodes[0];
        let mut walk = Walk {
            verdict: Said::below(root.said, Verdict::Unlisted),
            node: Some(0),
            entry: root.is_entry.then_some(0),
            awaited: None,
            decider: root.said.map(|_| 0),
            nested: None,
            glob_denies: false,
            below_glob_base: root.globs.is_some(),
        };
        // Names from here on were not spoken of by the entry that makes them writable.
        let mut unnamed = 0;
        let mut is_respelt = false;
        walk.glob_denies = root.globs.as_ref().is_some_and(|globs| globs.match_ancestor(&names));
        for (depth, name) in names.iter().enumerate() {
            let children = walk.node.map(|at| &self.nodes[at].children);
            let exact = children.and_then(|children| children.get(*name)).copied();
            // Another spelling of a protected name may be the same directory: it is judged as that one, and gains nothing by it.
            let spelt = || children.and_then(|children| children.get(OsStr::new(protected_name(name)?))).copied();
            let Some(at) = exact.or_else(|| spelt().filter(|_| walk.verdict.is_granted())) else {
                walk.node = None;
                break;
            };
            is_respelt |= exact.is_none();
            let node = &self.nodes[at];
            walk.node = Some(at);
            // What only takes writing away says nothing where there is none.
            if node.said.is_some_and(|said| said != Said::Narrow || walk.verdict == Verdict::Write) {
                walk.decider = Some(at);
            }
            let verdict = Said::below(node.said, walk.verdict);
            walk.verdict = if is_respelt { walk.verdict.and(verdict) } else { verdict };
            if node.said == Some(Said::Write) {
                unnamed = depth + 1;
            }
            if node.is_awaited {
                walk.awaited = Some(at);
            }
            if node.is_entry {
                walk.entry = Some(at);
            }
            if let Some(globs) = &node.globs {
                walk.below_glob_base = true;
                walk.glob_denies |= globs.match_ancestor(&names[depth + 1..]);
            }
        }
        if walk.verdict == Verdict::Write && self.protect_nested {
            walk.nested = names[unnamed..].iter().find(|name| is_protected_name(name)).copied();
            if walk.nested.is_some() {
                walk.verdict = Verdict::Protected;
            }
        }
        walk
    }

    fn node(&mut self, path: &Path) -> usize {
        path.iter().skip(1).fold(0, |at, name| self.child(at, name))
    }

    fn child(&mut self, parent: usize, name: &OsStr) -> usize {
        if let Some(at) = self.nodes[parent].children.get(name) {
            return *at;
        }
        let at = self.nodes.len();
        let path = self.nodes[parent].path.join(name);
        self.nodes[parent].children.insert(name.to_owned(), at);
        self.nodes.push(Node::new(path));
        at
    }

    /// Fills in what depends on the nodes below. Children come after their parents in the list, so that no recursion is
    /// needed: paths may be as deep as a path is long.
    fn summarise(&mut self) {
        let mut verdicts = vec![Said::below(self.nodes[0].said, Verdict::Unlisted); self.nodes.len()];
        for at in 0..self.nodes.len() {
            for child in self.nodes[at].children.values() {
                verdicts[*child] = Said::below(self.nodes[*child].said, verdicts[at]);
            }
        }
        for at in (0..self.nodes.len()).rev() {
            let node = &self.nodes[at];
            let children = || node.children.values().map(|child| (&self.nodes[*child], verdicts[*child]));
            let grants = matches!(node.said, Some(Said::Read | Said::Write));
            let leads_on = grants || node.is_waypoint || children().any(|(child, _)| child.leads_on);
            let own_globs = node.globs.as_ref().map(|_| Verdict::Denied.rank());
            let least_below = children()
                .map(|(child, verdict)| child.least_below.min(verdict.rank()))
                .chain(own_globs)
                .min()
                .unwrap_or(u8::MAX);
            let node = &mut self.nodes[at];
            node.leads_on = leads_on;
            node.least_below = least_below;
        }
    }
}

/// What was found on the way down to a path.
struct Walk<'a> {
    /// By entries alone.
    verdict: Verdict,
    /// The path's own node, if it has one.
    node: Option<usize>,
    /// The deepest entry on the way.
    entry: Option<usize>,
    /// The deepest node on the way whose entry was skipped.
    awaited: Option<usize>,
    /// The node whose word holds.
    decider: Option<usize>,
    /// The name that is protected at any depth, if that decides.
    nested: Option<&'a OsStr>,
    /// A glob matches the path or one of its ancestors.
    glob_denies: bool,
    /// A glob starts at the path or at one of its ancestors.
    below_glob_base: bool,
}

impl Node {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            children: HashMap::new(),
            said: None,
            origin: None,
            is_entry: false,
            is_awaited: false,
            is_waypoint: false,
            globs: None,
            leads_on: false,
            least_below: u8::MAX,
        }
    }

    fn say(&mut self, said: Said, by: Origin) {
        if self.said < Some(said) {
            self.said = Some(said);
            self.origin = Some(by);
        }
    }
}

/// What an entry's path turned out to be.
struct Usable {
    path: PathBuf,
    exists: bool,
    links: Vec<PathBuf>,
    /// The entry only takes away.
    is_hidden: bool,
}

fn usable(named: &AbsolutePath, resolved: Resolved) -> Result<Usable, PolicyError> {
    let (path, links, exists, is_hidden) = match resolved {
        Resolved::Real { path, links } => (path, links, true, false),
        Resolved::Missing { path, links } => (path, links, false, false),
        // Said to be skipped where it is missing, it is not missing.
        Resolved::Hidden { path, links } => (path, links, true, true),
        Resolved::Refused(problem) => return Err(PolicyError::Refused { path: named.clone(), problem }),
    };
    if path.is_absolute() {
        Ok(Usable { path, exists, links, is_hidden })
    } else {
        Err(PolicyError::Refused { path: named.clone(), problem: format!("resolves to the relative `{}`", path.display()) })
    }
}

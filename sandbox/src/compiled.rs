//! A policy as lookup tables: what it says of a path costs the path's depth, however many entries there are.
//!
//! The tables know only real paths: absolute and without links. Whoever asks must have resolved the links, and must open
//! exactly the path it asked about. Every entry is resolved once, when the tables are made.

use crate::glob::Globs;
use crate::policy::{Access, DenyGlob, Files, Grants, PROTECTED_NAMES, Policy, PolicyError};

use portcullis_protocol::path::AbsolutePath;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
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
    fn rank(self) -> u8 {
        match self {
            Self::Write => 3,
            Self::Read | Self::Protected => 2,
            Self::Unlisted => 1,
            Self::Denied => 0,
        }
    }

    /// The verdict below an entry, given the verdict above it.
    fn below(self, said: Option<Said>) -> Self {
        match said {
            None => self,
            Some(Said::Write) => Self::Write,
            Some(Said::Deny) => Self::Denied,
            Some(Said::Read) if self == Self::Write || self == Self::Protected => Self::Protected,
            Some(Said::Read) => Self::Read,
            Some(Said::Narrow) if self == Self::Write => Self::Protected,
            Some(Said::Narrow) => self,
        }
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
    /// It must not be used, in words.
    Refused(String),
}

impl Resolved {
    /// A path that exists and holds no link.
    #[must_use]
    pub fn same(path: &AbsolutePath) -> Self {
        Self::Real { path: path.as_path().to_owned(), links: Vec::new() }
    }
}

/// A policy in lookup tables.
#[derive(Debug)]
pub struct Compiled {
    /// A tree of the entries' real paths by their components; the first node is the root of the file system.
    nodes: Vec<Node>,
}

#[derive(Debug)]
struct Node {
    path: PathBuf,
    children: HashMap<OsString, usize>,
    said: Option<Said>,
    /// The real path of an entry, whether or not it exists.
    is_entry: bool,
    /// A link on the way to an entry: it must be seen to be followed.
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

impl Compiled {
    /// Builds the tables. `resolve` is asked once for every entry and for every base of a glob.
    ///
    /// # Errors
    /// A path is refused, or a glob does not compile.
    pub fn new(policy: &Policy, mut resolve: impl FnMut(&AbsolutePath) -> Resolved) -> Result<Self, PolicyError> {
        let mut compiled = Self { nodes: vec![Node::new(PathBuf::from("/"))] };
        match &policy.files {
            Files::Unrestricted => compiled.nodes[0].say(Said::Write),
            Files::Restricted(grants) => compiled.insert_all(grants, &mut resolve)?,
        }
        compiled.summarise(0, Verdict::Unlisted);
        Ok(compiled)
    }

    fn insert_all(&mut self, grants: &Grants, resolve: &mut impl FnMut(&AbsolutePath) -> Resolved) -> Result<(), PolicyError> {
        let mut writable = Vec::new();
        for entry in &grants.entries {
            self.insert(&entry.path, entry.access, resolve(&entry.path), &mut writable)?;
        }
        // Of a missing entry too: whoever may write above it may make it, and its protected names with it.
        for at in writable {
            for name in PROTECTED_NAMES {
                let protected = self.child(at, OsStr::new(name));
                self.nodes[protected].say(Said::Narrow);
            }
        }
        let mut by_base: BTreeMap<&AbsolutePath, Vec<&DenyGlob>> = BTreeMap::new();
        for glob in &grants.deny_globs {
            by_base.entry(&glob.base).or_default().push(glob);
        }
        let mut by_real: BTreeMap<PathBuf, Vec<&DenyGlob>> = BTreeMap::new();
        for (base, globs) in by_base {
            let (path, _exists, _links) = usable(base, resolve(base))?;
            // Also where it stands by name: the link that leads elsewhere now may become a directory.
            if path != base.as_path() {
                by_real.entry(base.as_path().to_owned()).or_default().extend(&globs);
            }
            by_real.entry(path).or_default().extend(globs);
        }
        for (base, globs) in by_real {
            let at = self.node(&base);
            self.nodes[at].globs = Some(Globs::new(&globs)?);
        }
        Ok(())
    }

    /// Places of an entry for writing, whatever stands there, are added to `writable`.
    fn insert(
        &mut self,
        named: &AbsolutePath,
        access: Access,
        resolved: Resolved,
        writable: &mut Vec<usize>,
    ) -> Result<(), PolicyError> {
        let (path, exists, links) = usable(named, resolved)?;
        let at = self.node(&path);
        self.nodes[at].is_entry = true;
        if access == Access::Write {
            writable.push(at);
        }
        match (access, exists) {
            (Access::Deny, _) => self.nodes[at].say(Said::Deny),
            (Access::Read, true) => self.nodes[at].say(Said::Read),
            (Access::Write, true) => self.nodes[at].say(Said::Write),
            (Access::Read, false) => self.nodes[at].say(Said::Narrow),
            // What does not exist is not writable once it does: whoever made it was not asked whether it is a link.
            (Access::Write, false) => {}
        }
        for link in &links {
            let at = self.node(link);
            self.nodes[at].is_waypoint = true;
        }
        // The entry also covers its own name, as written and where its parents really are, whatever stands there later.
        let name = named.as_path().file_name();
        let own_places = links.iter().map(PathBuf::as_path).filter(|link| link.file_name() == name);
        for place in own_places.chain([named.as_path()]).filter(|place| *place != path) {
            let at = self.node(place);
            match access {
                Access::Deny => self.nodes[at].say(Said::Deny),
                Access::Read => self.nodes[at].say(Said::Narrow),
                Access::Write => writable.push(at),
            }
        }
        Ok(())
    }

    /// What the policy says of an absolute path without links.
    #[must_use]
    pub fn verdict(&self, real: &Path) -> Verdict {
        let walk = self.walk(real);
        if walk.glob_denies { Verdict::Denied } else { walk.verdict }
    }

    /// Whether the path may be known to exist: it can be read, or it leads to something granted.
    #[must_use]
    pub fn is_visible(&self, real: &Path) -> bool {
        let walk = self.walk(real);
        !walk.glob_denies
            && (matches!(walk.verdict, Verdict::Write | Verdict::Read | Verdict::Protected)
                || walk.node.is_some_and(|at| self.nodes[at].leads_on))
    }

    /// Whether an entry, a protected name or a glob could make something below `real` less than `real` itself.
    #[must_use]
    pub fn has_narrower_below(&self, real: &Path) -> bool {
        let walk = self.walk(real);
        walk.below_glob_base || walk.node.is_some_and(|at| self.nodes[at].least_below < walk.verdict.rank())
    }

    /// The real path of the entry that decides over `real`, also of one that was missing when the tables were made: whoever
    /// acts on the verdict must check that it is still what it was.
    #[must_use]
    pub fn root_of(&self, real: &Path) -> Option<&Path> {
        self.walk(real).entry.map(|at| self.nodes[at].path.as_path())
    }

    /// Every path at which the verdict changes on the way down, globs aside; a path comes after those above it. What it has to
    /// be made of on this machine is for whoever builds a view of it.
    #[must_use]
    pub fn places(&self) -> Vec<Place<'_>> {
        let mut verdicts = vec![Verdict::Unlisted.below(self.nodes[0].said); self.nodes.len()];
        let mut places = vec![Place { path: Path::new("/"), verdict: verdicts[0] }];
        // Children come after their parents in the list.
        for at in 0..self.nodes.len() {
            for child in self.nodes[at].children.values() {
                let node = &self.nodes[*child];
                verdicts[*child] = verdicts[at].below(node.said);
                if verdicts[*child] != verdicts[at] {
                    places.push(Place { path: &node.path, verdict: verdicts[*child] });
                }
            }
        }
        places.sort_by(|left, right| left.path.cmp(right.path));
        places
    }

    fn walk(&self, real: &Path) -> Walk {
        let names: Vec<&OsStr> = real.iter().skip(1).collect();
        let root = &self.nodes[0];
        let mut walk = Walk {
            verdict: Verdict::Unlisted.below(root.said),
            node: Some(0),
            entry: root.is_entry.then_some(0),
            glob_denies: false,
            below_glob_base: root.globs.is_some(),
        };
        walk.glob_denies = root.globs.as_ref().is_some_and(|globs| globs.match_ancestor(&names));
        for (depth, name) in names.iter().enumerate() {
            let Some(at) = walk.node.and_then(|at| self.nodes[at].children.get(*name)).copied() else {
                walk.node = None;
                break;
            };
            let node = &self.nodes[at];
            walk.node = Some(at);
            walk.verdict = walk.verdict.below(node.said);
            if node.is_entry {
                walk.entry = Some(at);
            }
            if let Some(globs) = &node.globs {
                walk.below_glob_base = true;
                walk.glob_denies |= globs.match_ancestor(&names[depth + 1..]);
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
    fn summarise(&mut self, root: usize, above: Verdict) {
        let mut verdicts = vec![above; self.nodes.len()];
        verdicts[root] = above.below(self.nodes[root].said);
        for at in 0..self.nodes.len() {
            for child in self.nodes[at].children.values() {
                verdicts[*child] = verdicts[at].below(self.nodes[*child].said);
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
struct Walk {
    /// By entries alone.
    verdict: Verdict,
    /// The path's own node, if it has one.
    node: Option<usize>,
    /// The deepest entry on the way.
    entry: Option<usize>,
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
            is_entry: false,
            is_waypoint: false,
            globs: None,
            leads_on: false,
            least_below: u8::MAX,
        }
    }

    fn say(&mut self, said: Said) {
        self.said = self.said.max(Some(said));
    }
}

fn usable(named: &AbsolutePath, resolved: Resolved) -> Result<(PathBuf, bool, Vec<PathBuf>), PolicyError> {
    let (path, exists, links) = match resolved {
        Resolved::Real { path, links } => (path, true, links),
        Resolved::Missing { path, links } => (path, false, links),
        Resolved::Refused(problem) => return Err(PolicyError::Refused { path: named.clone(), problem }),
    };
    if path.is_absolute() {
        Ok((path, exists, links))
    } else {
        Err(PolicyError::Refused { path: named.clone(), problem: format!("resolves to the relative `{}`", path.display()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::glob::compile_glob;
    use crate::policy::{Grant, Network};
    use proptest::prelude::*;

    fn absolute(path: &str) -> AbsolutePath {
        AbsolutePath::new(path).unwrap()
    }

    fn policy(entries: &[(&str, Access)], globs: &[(&str, &str)]) -> Policy {
        let entries = entries.iter().map(|(path, access)| Grant { path: absolute(path), access: *access }).collect();
        let globs = globs.iter().map(|(base, pattern)| DenyGlob { base: absolute(base), pattern: (*pattern).to_owned() });
        Policy { files: Files::Restricted(Grants::new(entries, globs.collect()).unwrap()), network: Network::Restricted }
    }

    fn compile(policy: &Policy) -> Compiled {
        Compiled::new(policy, Resolved::same).unwrap()
    }

    #[track_caller]
    fn check(compiled: &Compiled, rows: &[(&str, Verdict)]) {
        for (path, expect) in rows {
            assert_eq!(compiled.verdict(Path::new(path)), *expect, "{path}");
        }
    }

    use Access::{Deny, Read, Write};

    #[test]
    fn places_are_where_the_verdict_changes() {
        let compiled = compile(&policy(&[("/", Read), ("/w", Write), ("/w/ro", Read), ("/w/x", Write), ("/etc", Read)], &[]));
        let places: Vec<_> = compiled.places().iter().map(|place| (place.path.to_owned(), place.verdict)).collect();
        let mut expect = vec![("/", Verdict::Read), ("/w", Verdict::Write)];
        expect.extend(["/w/.agents", "/w/.aws", "/w/.codex", "/w/.git", "/w/ro"].map(|path| (path, Verdict::Protected)));
        expect.extend(["/w/x/.agents", "/w/x/.aws", "/w/x/.codex", "/w/x/.git"].map(|path| (path, Verdict::Protected)));
        assert_eq!(places, expect.into_iter().map(|(path, verdict)| (PathBuf::from(path), verdict)).collect::<Vec<_>>());
    }

    #[test]
    fn the_longest_path_wins() {
        let compiled = compile(&policy(
            &[
                ("/", Read),
                ("/w", Write),
                ("/w/ro", Read),
                ("/w/ro/rw", Write),
                ("/w/no", Deny),
                ("/w/no/yes", Read),
                ("/etc", Deny),
            ],
            &[],
        ));
        check(
            &compiled,
            &[
                ("/", Verdict::Read),
                ("/usr/bin", Verdict::Read),
                ("/w", Verdict::Write),
                ("/w/a/b", Verdict::Write),
                ("/wx", Verdict::Read),
                ("/w/ro", Verdict::Protected),
                ("/w/ro/a", Verdict::Protected),
                ("/w/ro/rw/a", Verdict::Write),
                ("/w/no", Verdict::Denied),
                ("/w/no/a", Verdict::Denied),
                ("/w/no/yes/a", Verdict::Read),
                ("/etc/passwd", Verdict::Denied),
            ],
        );
        assert_eq!(compiled.root_of(Path::new("/w/ro/rw/a")), Some(Path::new("/w/ro/rw")));
        assert_eq!(compiled.root_of(Path::new("/usr")), Some(Path::new("/")));
    }

    #[test]
    fn protected_names_at_the_top_of_every_writable_root() {
        let compiled =
            compile(&policy(&[("/w", Write), ("/g", Write), ("/g/.git", Write), ("/h", Write), ("/h/.git/hooks", Write)], &[]));
        for name in PROTECTED_NAMES {
            check(&compiled, &[(&format!("/w/{name}"), Verdict::Protected), (&format!("/w/{name}/a"), Verdict::Protected)]);
        }
        check(
            &compiled,
            &[
                ("/w/sub/.git", Verdict::Write),
                ("/w/.gitignore", Verdict::Write),
                ("/g/.git/config", Verdict::Write),
                ("/g/.git/.git", Verdict::Protected),
                ("/g/.codex", Verdict::Protected),
                ("/h/.git/config", Verdict::Protected),
                ("/h/.git/hooks/x", Verdict::Write),
            ],
        );
    }

    #[test]
    fn visible_is_what_can_be_read_or_leads_to_it() {
        let compiled = compile(&policy(&[("/a/b/c", Read), ("/a/no", Deny), ("/a/no/yes", Write)], &[("/a/b/c", "*.env")]));
        for (path, expect) in [
            ("/", true),
            ("/a", true),
            ("/a/b", true),
            ("/a/b/c/d", true),
            ("/a/x", false),
            ("/b", false),
            ("/a/no", true),
            ("/a/no/x", false),
            ("/a/no/yes/x", true),
            ("/a/b/c/x.env", false),
        ] {
            assert_eq!(compiled.is_visible(Path::new(path)), expect, "{path}");
        }
        check(&compiled, &[("/a", Verdict::Unlisted), ("/", Verdict::Unlisted)]);
    }

    #[test]
    fn globs_win_over_everything_and_cover_what_is_below() {
        let compiled =
            compile(&policy(&[("/w", Write), ("/w/a.env", Write)], &[("/w", "**/*.env"), ("/w/s", "*"), ("/[x]", "y")]));
        check(
            &compiled,
            &[
                ("/w/a.env", Verdict::Denied),
                ("/w/deep/er/.env", Verdict::Denied),
                ("/w/d.env/below/it", Verdict::Denied),
                ("/w/env", Verdict::Write),
                ("/w/s", Verdict::Write),
                ("/w/s/a", Verdict::Denied),
                // A base is no pattern.
                ("/x/y", Verdict::Unlisted),
                ("/[x]/y", Verdict::Denied),
            ],
        );
        let one_level = compile(&policy(&[("/", Read)], &[("/w", "*/k")]));
        check(&one_level, &[("/w/a/k", Verdict::Denied), ("/w/a/b/k", Verdict::Read), ("/w/k", Verdict::Read)]);
    }

    #[test]
    fn narrower_below() {
        let compiled = compile(&policy(&[("/", Read), ("/w", Write), ("/w/a/b/no", Deny), ("/r/s", Read)], &[("/r/g", "*.env")]));
        for (path, expect) in [
            ("/", true),
            ("/w", true),
            ("/w/a", true),
            ("/w/a/b", true),
            ("/w/a/b/no", false),
            ("/w/.git", false),
            ("/w/x", false),
            ("/r/s", false),
            ("/r", true),
            ("/r/g", true),
            ("/r/g/x", true),
            ("/q", false),
        ] {
            assert_eq!(compiled.has_narrower_below(Path::new(path)), expect, "{path}");
        }
    }

    #[test]
    fn links_count_by_name_and_by_target() {
        let policy = policy(&[("/a/ws", Write), ("/a/secret", Deny), ("/a/ro", Read), ("/bin", Read)], &[("/a/ws", "*.env")]);
        let real = |path: &str, links: &[&str]| Resolved::Real {
            path: PathBuf::from(path),
            links: links.iter().map(PathBuf::from).collect(),
        };
        // /a -> /b; /b/secret -> /b/ws/s; /b/ro -> /b/ws/r; /bin -> /usr/bin
        let compiled = Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
            "/a/ws" => real("/b/ws", &["/a"]),
            "/a/secret" => real("/b/ws/s", &["/a", "/b/secret"]),
            "/a/ro" => real("/b/ws/r", &["/a", "/b/ro"]),
            "/bin" => real("/usr/bin", &["/bin"]),
            other => panic!("{other}"),
        })
        .unwrap();
        check(
            &compiled,
            &[
                ("/b/ws/x", Verdict::Write),
                ("/b/ws/s", Verdict::Denied),
                ("/b/ws/r/x", Verdict::Protected),
                ("/b/secret", Verdict::Denied),
                ("/a/secret", Verdict::Denied),
                ("/usr/bin/sh", Verdict::Read),
                ("/b/ws/x.env", Verdict::Denied),
                ("/a/ws/x.env", Verdict::Denied),
                ("/a/ws/x", Verdict::Unlisted),
            ],
        );
        assert!(compiled.is_visible(Path::new("/a")) && compiled.is_visible(Path::new("/bin")));
        assert!(compiled.is_visible(Path::new("/b/ro")));
    }

    #[test]
    fn missing_paths_grant_nothing_and_still_narrow() {
        let policy = policy(&[("/w", Write), ("/w/ro", Read), ("/w/no", Deny), ("/r", Read), ("/q", Write)], &[]);
        let compiled = Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
            "/w" => Resolved::same(path),
            missing => Resolved::Missing { path: PathBuf::from(missing), links: Vec::new() },
        })
        .unwrap();
        check(
            &compiled,
            &[
                ("/w/ro/a", Verdict::Protected),
                ("/w/no/a", Verdict::Denied),
                ("/r/a", Verdict::Unlisted),
                ("/q/a", Verdict::Unlisted),
            ],
        );
        // The worker must see that it came to be.
        assert_eq!(compiled.root_of(Path::new("/q/a")), Some(Path::new("/q")));
        let refused = Compiled::new(&policy, |_| Resolved::Refused("is no good".to_owned()));
        assert_eq!(refused.unwrap_err().to_string(), "policy path `/q`: is no good");
    }

    #[test]
    fn a_missing_writable_entry_keeps_its_protected_names() {
        let policy = policy(&[("/par", Write), ("/par/ws", Write), ("/par/.git/x", Write), ("/alone/ws", Write)], &[]);
        let there = |is_there: bool| {
            Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
                "/par" => Resolved::same(path),
                _ if is_there => Resolved::same(path),
                other => Resolved::Missing { path: PathBuf::from(other), links: Vec::new() },
            })
            .unwrap()
        };
        for is_there in [true, false] {
            for name in PROTECTED_NAMES {
                check(
                    &there(is_there),
                    &[
                        (&format!("/par/ws/{name}"), Verdict::Protected),
                        (&format!("/par/ws/{name}/hooks"), Verdict::Protected),
                        (&format!("/par/{name}"), Verdict::Protected),
                        ("/par/ws/src", Verdict::Write),
                        (&format!("/par/other/{name}"), Verdict::Write),
                    ],
                );
            }
            assert!(there(is_there).has_narrower_below(Path::new("/par/ws")));
        }
        // Alone it is as little as before, and so are its protected names.
        check(&there(false), &[("/alone/ws/.git", Verdict::Unlisted), ("/alone/ws/a", Verdict::Unlisted)]);
        check(&there(true), &[("/alone/ws/.git", Verdict::Protected)]);
    }

    #[test]
    fn a_writable_entry_keeps_its_protected_names_where_its_own_name_stands() {
        let policy = policy(&[("/", Write), ("/a/ws", Write)], &[]);
        let compiled = Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
            "/a/ws" => Resolved::Real { path: PathBuf::from("/b/ws"), links: vec![PathBuf::from("/a")] },
            _ => Resolved::same(path),
        })
        .unwrap();
        check(&compiled, &[("/b/ws/.git", Verdict::Protected), ("/a/ws/.git", Verdict::Protected), ("/a/ws/x", Verdict::Write)]);
    }

    #[test]
    fn unrestricted_is_writable_everywhere() {
        let compiled = compile(&Policy { files: Files::Unrestricted, network: Network::Restricted });
        check(&compiled, &[("/", Verdict::Write), ("/a/.git", Verdict::Write)]);
        assert!(!compiled.has_narrower_below(Path::new("/")));
    }

    /// The rules once more, slow and obvious.
    fn walker(grants: &Grants, path: &Path) -> Verdict {
        for glob in &grants.deny_globs {
            let matcher = compile_glob(&glob.pattern).unwrap().compile_matcher();
            let below = path.ancestors().filter_map(|above| above.strip_prefix(glob.base.as_path()).ok());
            if below.filter(|rest| !rest.as_os_str().is_empty()).any(|rest| matcher.is_match(rest)) {
                return Verdict::Denied;
            }
        }
        // From the root down: what each entry on the way says, and the protected names of a writable one.
        let mut above: Vec<_> = path.ancestors().collect();
        above.reverse();
        let mut verdict = Verdict::Unlisted;
        for place in above {
            let entry = grants.entries.iter().find(|entry| entry.path.as_path() == place);
            let parent = place.parent();
            let protected = place.file_name().is_some_and(|name| PROTECTED_NAMES.iter().any(|it| *it == name))
                && grants.entries.iter().any(|entry| entry.access == Write && Some(entry.path.as_path()) == parent);
            verdict = match (entry.map(|entry| entry.access), verdict) {
                (Some(Write), _) => Verdict::Write,
                (Some(Deny), _) => Verdict::Denied,
                (Some(Read), Verdict::Write | Verdict::Protected) => Verdict::Protected,
                (Some(Read), _) => Verdict::Read,
                (None, Verdict::Write) if protected => Verdict::Protected,
                (None, same) => same,
            };
        }
        verdict
    }

    fn any_path() -> impl Strategy<Value = String> {
        let name = prop::sample::select(vec!["a", "b", "c", ".git", ".aws", "x.env"]);
        prop::collection::vec(name, 0..5).prop_map(|names| format!("/{}", names.join("/")))
    }

    fn any_entry() -> impl Strategy<Value = (String, Access)> {
        (any_path(), prop::sample::select(vec![Read, Write, Deny]))
    }

    fn any_globs() -> impl Strategy<Value = Vec<(String, String)>> {
        let pattern = prop::sample::select(vec!["*.env", "**/*.env", "a/*", "*/b/**", "?", "{a,b}/c"]);
        prop::collection::vec((any_path(), pattern.prop_map(str::to_owned)), 0..3)
    }

    fn of(entries: &[(String, Access)], globs: &[(String, String)]) -> Policy {
        let entries: Vec<_> = entries.iter().map(|(path, access)| (path.as_str(), *access)).collect();
        let globs: Vec<_> = globs.iter().map(|(base, pattern)| (base.as_str(), pattern.as_str())).collect();
        policy(&entries, &globs)
    }

    fn rank(compiled: &Compiled, path: &str) -> u8 {
        compiled.verdict(Path::new(path)).rank()
    }

    proptest! {
        #[test]
        fn the_tables_agree_with_the_walker(
            entries in prop::collection::vec(any_entry(), 0..12), globs in any_globs(),
            paths in prop::collection::vec(any_path(), 1..20), crowd in any::<bool>(),
        ) {
            let mut entries = entries;
            if crowd {
                entries.extend((0..1000).map(|nth| (format!("/crowd/{nth}"), Read)));
            }
            let policy = of(&entries, &globs);
            let Files::Restricted(grants) = &policy.files else { unreachable!() };
            let compiled = compile(&policy);
            for path in &paths {
                prop_assert_eq!(compiled.verdict(Path::new(path)), walker(grants, Path::new(path)), "{}", path);
            }
        }

        #[test]
        fn a_denial_never_widens(
            entries in prop::collection::vec(any_entry(), 0..8), globs in any_globs(),
            denied in any_path(), more in any_globs(), paths in prop::collection::vec(any_path(), 1..20),
        ) {
            let before = compile(&of(&entries, &globs));
            let mut entries = entries;
            entries.push((denied, Deny));
            let after = compile(&of(&entries, &[globs, more].concat()));
            for path in &paths {
                // Where nothing was granted, a denial has another name and gives as little.
                prop_assert!(rank(&after, path) <= rank(&before, path), "{}", path);
            }
        }

        #[test]
        fn order_does_not_matter(entries in prop::collection::vec(any_entry(), 0..10).prop_shuffle(), globs in any_globs()) {
            let mut other: (Vec<_>, Vec<_>) = (entries.clone(), globs.clone());
            other.0.reverse();
            other.1.reverse();
            prop_assert_eq!(of(&entries, &globs).hash(), of(&other.0, &other.1).hash());
        }

        #[test]
        fn what_is_said_to_have_nothing_narrower_has_nothing_narrower(
            entries in prop::collection::vec(any_entry(), 0..8), globs in any_globs(), top in any_path(), below in any_path(),
        ) {
            let compiled = compile(&of(&entries, &globs));
            if !compiled.has_narrower_below(Path::new(&top)) {
                let below = format!("{}{below}", top.trim_end_matches('/'));
                prop_assert!(rank(&compiled, &below) >= rank(&compiled, &top), "{}", below);
            }
        }
    }
}

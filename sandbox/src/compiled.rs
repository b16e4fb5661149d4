//! A policy as lookup tables: what it says of a path costs the path's depth, however many entries there are.
//!
//! The tables know only real paths: absolute and without links. Whoever asks must have resolved the links, and must open
//! exactly the path it asked about. Every entry is resolved once, when the tables are made.

use crate::mounts::{Found, FoundKind};
use crate::policy::{Policy, PolicyError};
use crate::tree::Tree;
use portcullis_protocol::path::AbsolutePath;
use std::collections::BTreeMap;
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
    /// One for each set of grants, in their order; one in which everything is writable where there is none.
    trees: Vec<Tree>,
    /// Places that protected names lead to, and whether an entry names them all the same; the deepest holds.
    pointed: Vec<(PathBuf, bool)>,
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
        Ok(Self { trees, pointed: Vec::new() })
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
        self.pointed.extend(kept);
    }

    /// Whether a protected name leads there, and no entry names it.
    pub(crate) fn is_pointed_at(&self, real: &Path) -> bool {
        let above = self.pointed.iter().filter(|(place, _)| real.starts_with(place));
        above.max_by_key(|(place, is_named)| (place.as_os_str().len(), *is_named)).is_some_and(|(_, is_named)| !is_named)
    }

    /// The places above it that protected names lead to.
    pub(crate) fn pointed_at(&self, real: &Path) -> Vec<&Path> {
        let above = self.pointed.iter().filter(|(place, is_named)| !is_named && real.starts_with(place));
        above.map(|(place, _)| place.as_path()).collect()
    }

    /// Whether every set of grants makes `real` writable by an entry for `repository` or for something in it, so that whoever wrote
    /// it meant the repository. One that covers `pointer` too, by which the repository was found, says nothing of where that leads.
    #[must_use]
    pub fn is_named(&self, real: &Path, repository: &Path, pointer: &Path) -> bool {
        let names = |tree: &Tree| tree.decider(real).is_some_and(|by| by.starts_with(repository) && !pointer.starts_with(by));
        self.least(|tree| tree.verdict(real)) == Verdict::Write && self.trees.iter().all(names)
    }

    /// Whether a set of grants makes a directory writable and not the name in it. What the other sets give there less does not matter: it
    /// must not lift what this one protects.
    pub(crate) fn protects_name(&self, name: &Path) -> bool {
        let is_writable = |tree: &Tree, path: &Path| tree.verdict(path) == Verdict::Write;
        let directory = name.parent().unwrap_or(name);
        self.trees.iter().any(|tree| is_writable(tree, directory) && !is_writable(tree, name))
    }

    /// What one set of grants says of it, by its place in [`crate::policy::Files::sets`].
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
mod tests {
    use super::*;
    use crate::glob::compile_glob;
    use crate::policy::{Access, DenyGlob, Files, Grant, Grants, Network, PROTECTED_NAMES};
    use proptest::prelude::*;

    fn absolute(path: &str) -> AbsolutePath {
        AbsolutePath::new(path).unwrap()
    }

    fn policy(entries: &[(&str, Access)], globs: &[(&str, &str)]) -> Policy {
        let entries = entries.iter().map(|(path, access)| Grant::new(absolute(path), *access)).collect();
        let globs = globs.iter().map(|(base, pattern)| DenyGlob { base: absolute(base), pattern: (*pattern).to_owned() });
        Policy { files: Files::Restricted(Grants::new(entries, globs.collect()).unwrap().into()), network: Network::Restricted }
    }

    fn restricted(grants: Grants) -> Policy {
        Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
    }

    fn nested(policy: &Policy) -> Policy {
        restricted(Grants { protect_nested: true, ..policy.files.sets().next().unwrap().clone() })
    }

    fn compile(policy: &Policy) -> Compiled {
        Compiled::new(policy, Resolved::same).unwrap()
    }

    fn root_of<'a>(compiled: &'a Compiled, real: &str) -> Vec<&'a str> {
        compiled.roots_of(Path::new(real)).map(|root| root.to_str().unwrap()).collect()
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
        assert_eq!(root_of(&compiled, "/w/ro/rw/a"), ["/w/ro/rw"]);
        assert_eq!(root_of(&compiled, "/usr"), ["/"]);
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
    fn another_spelling_of_a_protected_name_gains_nothing() {
        let mut compiled = compile(&policy(
            &[("/w", Write), ("/w/.git/hooks", Write), ("/w/.aws", Deny), ("/g", Write), ("/g/.git", Write), ("/r/.git", Write)],
            &[],
        ));
        check(
            &compiled,
            &[
                ("/w/.GIT/config", Verdict::Protected),
                ("/w/git~1", Verdict::Protected),
                ("/w/.GIT/hooks/x", Verdict::Protected),
                ("/w/.AWS/x", Verdict::Denied),
                ("/w/.Codex", Verdict::Protected),
                ("/w/sub/.GIT", Verdict::Write),
                ("/g/.GIT", Verdict::Write),
                ("/r/.GIT", Verdict::Unlisted),
            ],
        );
        assert!(!compiled.is_visible(Path::new("/r/.GIT")) && compiled.is_visible(Path::new("/r/.git")));
        compiled = compile(&nested(&policy(&[("/w", Write)], &[])));
        check(&compiled, &[("/w/sub/.Git/x", Verdict::Protected)]);
    }

    #[test]
    fn names_protected_at_any_depth() {
        let plain = policy(&[("/w", Write), ("/w/a/.git/hooks", Write), ("/w/b/.aws", Write), ("/r", Read)], &[]);
        let compiled = compile(&nested(&plain));
        check(
            &compiled,
            &[
                ("/w/sub/.git", Verdict::Protected),
                ("/w/sub/.git/hooks/x", Verdict::Protected),
                ("/w/a/.git/config", Verdict::Protected),
                ("/w/.codex/x", Verdict::Protected),
                // Lifted by an entry whose own path goes through the name, up to the next such name.
                ("/w/a/.git/hooks/x", Verdict::Write),
                ("/w/a/.git/hooks/.git", Verdict::Protected),
                ("/w/b/.aws/x", Verdict::Write),
                ("/w/b/.aws/d/.aws", Verdict::Protected),
                ("/w/sub/git", Verdict::Write),
                ("/r/sub/.git", Verdict::Read),
            ],
        );
        check(&compile(&plain), &[("/w/sub/.git/hooks/x", Verdict::Write), ("/w/b/.aws/d/.aws", Verdict::Write)]);
        for (path, expect) in [("/w/sub", true), ("/w/sub/.git", false), ("/r", false)] {
            assert_eq!(compiled.has_narrower_below(Path::new(path)), expect, "{path}");
        }
        // In one of two sets is enough, below what both make writable.
        let both = compile(&policy(&[("/w", Write), ("/r", Write)], &[]).bounded_by(&nested(&plain)).unwrap());
        check(&both, &[("/w/sub/.git", Verdict::Protected), ("/r/sub/.git", Verdict::Read), ("/w/sub/x", Verdict::Write)]);
    }

    #[test]
    fn what_is_skipped_when_missing_says_nothing_until_it_exists() {
        let skip = |path: &str, access| Grant { skip_missing: true, ..Grant::new(absolute(path), access) };
        let entries = vec![Grant::new(absolute("/w"), Write), skip("/w/ro", Read), skip("/w/no", Deny), skip("/w/ws", Write)];
        let policy = restricted(Grants::new(entries, Vec::new()).unwrap());
        let with = |is_there: bool| {
            Compiled::new(&policy, |path| match path.as_path().to_str().unwrap() {
                "/w" => Resolved::same(path),
                _ if is_there => Resolved::same(path),
                missing => Resolved::Missing { path: PathBuf::from(missing), links: Vec::new() },
            })
            .unwrap()
        };
        check(&with(true), &[("/w/ro/a", Verdict::Protected), ("/w/no/a", Verdict::Denied)]);
        let missing = with(false);
        check(&missing, &[("/w/ro/a", Verdict::Write), ("/w/no/a", Verdict::Write), ("/w/ws/.git", Verdict::Protected)]);
        // Whoever acts on that must see that it came to be, and that what is above is what it was.
        assert_eq!(root_of(&missing, "/w/no/a"), ["/w", "/w/no"]);
        assert!(missing.places().iter().all(|place| place.path != Path::new("/w/no")));
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
        assert_eq!(root_of(&compiled, "/q/a"), ["/q"]);
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
    fn the_least_of_two_sets_counts() {
        let own = policy(&[("/", Read), ("/w", Write), ("/x", Write), ("/w/no", Deny)], &[("/w", "*.env")]);
        let ceiling = policy(&[("/", Read), ("/w", Write), ("/w/a/.git", Read), ("/etc/shadow", Deny), ("/w/ro", Read)], &[]);
        let compiled = compile(&own.bounded_by(&ceiling).unwrap());
        check(
            &compiled,
            &[
                ("/usr", Verdict::Read),
                ("/w/a", Verdict::Write),
                ("/w/no", Verdict::Denied),
                ("/w/b.env", Verdict::Denied),
                ("/w/.git", Verdict::Protected),
                ("/w/a/.git", Verdict::Protected),
                ("/w/ro/x", Verdict::Protected),
                // Writable below one only, its protected names are not special.
                ("/x/a", Verdict::Read),
                ("/x/.git", Verdict::Read),
                ("/etc/shadow", Verdict::Denied),
            ],
        );
        assert_eq!(root_of(&compiled, "/w/a"), ["/w", "/w"]);
        assert_eq!(root_of(&compiled, "/x/a"), ["/x", "/"]);
        let places: Vec<_> = compiled.places().iter().map(|place| place.path.to_str().unwrap()).collect();
        let names = ["/w", "/w/.agents", "/w/.aws", "/w/.codex", "/w/.git", "/w/a/.git", "/w/no", "/w/ro"];
        assert_eq!(places, [&["/", "/etc/shadow"], &names[..]].concat());
        assert!(compiled.has_narrower_below(Path::new("/w/a")));
    }

    #[test]
    fn what_one_set_does_not_lead_to_is_not_visible() {
        let compiled = compile(&policy(&[("/a/b", Read)], &[]).bounded_by(&policy(&[("/a/c", Read)], &[])).unwrap());
        for (path, expect) in [("/a", true), ("/a/b", false), ("/a/c", false)] {
            assert_eq!(compiled.is_visible(Path::new(path)), expect, "{path}");
        }
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
                && (grants.protect_nested
                    || grants.entries.iter().any(|entry| entry.access == Write && Some(entry.path.as_path()) == parent));
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

    fn any_policy() -> impl Strategy<Value = Policy> {
        (prop::collection::vec(any_entry(), 0..8), any_globs(), any::<bool>(), 0..4_u8).prop_map(|(entries, globs, on, kind)| {
            let files = match kind {
                0 => Files::Unrestricted,
                1 => nested(&of(&entries, &globs)).files,
                _plain => of(&entries, &globs).files,
            };
            Policy { files, network: if on { Network::Enabled } else { Network::Restricted } }
        })
    }

    proptest! {
        #[test]
        fn a_bounded_policy_allows_what_both_allow(
            own in any_policy(), ceiling in any_policy(), paths in prop::collection::vec(any_path(), 1..20),
        ) {
            let both = own.clone().bounded_by(&ceiling).unwrap();
            prop_assert_eq!(
                both.network == Network::Enabled, own.network == Network::Enabled && ceiling.network == Network::Enabled
            );
            let (both, own, ceiling) = (compile(&both), compile(&own), compile(&ceiling));
            for path in &paths {
                prop_assert_eq!(rank(&both, path), rank(&own, path).min(rank(&ceiling, path)), "{}", path);
            }
        }

        #[test]
        fn places_say_what_the_tables_say(
            own in any_policy(), ceiling in any_policy(), paths in prop::collection::vec(any_path(), 1..20),
        ) {
            let both = own.bounded_by(&ceiling).unwrap();
            let without_globs = |grants: &Grants| Grants { entries: grants.entries.clone(), ..Grants::default() };
            let bare = both.files.sets().map(without_globs).map(|grants| Policy {
                files: Files::Restricted(grants.into()), network: Network::Restricted,
            });
            let bare = bare.reduce(|left, right| left.bounded_by(&right).unwrap()).unwrap_or(Policy { files: Files::Unrestricted, ..both });
            let compiled = compile(&bare);
            let places = compiled.places();
            for path in &paths {
                let nearest = Path::new(path).ancestors().find_map(|above| places.iter().find(|place| place.path == above));
                prop_assert_eq!(nearest.unwrap().verdict, compiled.verdict(Path::new(path)), "{}", path);
            }
        }

        #[test]
        fn the_tables_agree_with_the_walker(
            entries in prop::collection::vec(any_entry(), 0..12), globs in any_globs(),
            paths in prop::collection::vec(any_path(), 1..20), crowd in any::<bool>(), nested in any::<bool>(),
        ) {
            let mut entries = entries;
            if crowd {
                entries.extend((0..1000).map(|nth| (format!("/crowd/{nth}"), Read)));
            }
            let grants = Grants { protect_nested: nested, ..of(&entries, &globs).files.sets().next().unwrap().clone() };
            let compiled = compile(&restricted(grants.clone()));
            for path in &paths {
                prop_assert_eq!(compiled.verdict(Path::new(path)), walker(&grants, Path::new(path)), "{}", path);
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
            own in any_policy(), ceiling in any_policy(), top in any_path(), below in any_path(),
        ) {
            let compiled = compile(&own.bounded_by(&ceiling).unwrap());
            if !compiled.has_narrower_below(Path::new(&top)) {
                let below = format!("{}{below}", top.trim_end_matches('/'));
                prop_assert!(rank(&compiled, &below) >= rank(&compiled, &top), "{}", below);
            }
        }
    }
}

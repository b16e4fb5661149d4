//! Why a policy says what it says of a path, in words, and what would make it say more.

mod view;

pub use view::{Seen, Views, views};

use crate::compiled::{Compiled, Verdict};
use crate::policy::{Access, Grant};
use crate::tree::Rule;
use std::path::{Path, PathBuf};

/// The rule for a path that would be writable without a protected name.
pub const POINTED: &str = "a place that a protected name leads to";

/// What a policy says of a path, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// As [`Compiled::verdict`] has it.
    pub verdict: Verdict,
    /// The rule that decides, by its author's words as far as they are known.
    pub rule: String,
    /// The entry that would allow the next more, reading or else changing, once its path exists. None where nothing more is to be
    /// had: where a denial decides, and where the ceiling allows no more than it does now.
    pub grant: Option<(PathBuf, Access)>,
}

impl Compiled {
    /// Why [`Compiled::verdict`] says what it says of a path without links. What protected names point at is known to workers
    /// only.
    #[must_use]
    pub fn explain(&self, real: &Path) -> Explanation {
        let verdict = self.verdict(real);
        let trees = self.trees();
        if self.is_pointed_at(real) && trees.iter().all(|tree| tree.verdict(real) == Verdict::Write) {
            return self.explain_pointed(real);
        }
        let deciding = trees.iter().position(|tree| tree.verdict(real) == verdict).unwrap_or(0);
        let rule = trees[deciding].rule(real);
        let whose = if deciding > 0 { "the operator's ceiling: " } else { "" };
        let next = match verdict {
            Verdict::Write | Verdict::Denied => None,
            Verdict::Unlisted => Some((Access::Read, Verdict::Read)),
            Verdict::Read | Verdict::Protected => Some((Access::Write, Verdict::Write)),
        };
        let bounded = |least: Verdict| trees.iter().skip(1).any(|ceiling| ceiling.verdict(real).rank() < least.rank());
        let grant = next.filter(|(_, least)| !bounded(*least)).map(|(access, _)| (real.to_owned(), access));
        Explanation { verdict, rule: format!("{whose}{}{}", words(rule, real), also_changed(real)), grant }
    }

    fn explain_pointed(&self, real: &Path) -> Explanation {
        let pointed = self.pointed_at(real);
        let grant = self.may_name(real, &pointed).then(|| (real.to_owned(), Access::Write));
        Explanation { verdict: Verdict::Protected, rule: format!("{POINTED}{}", also_changed(real)), grant }
    }

    /// Whether all that is missing is an entry of the request: every ceiling names the place, or one in it.
    fn may_name(&self, real: &Path, pointed: &[&Path]) -> bool {
        let names = |by: &Path| pointed.iter().any(|place| by.starts_with(place));
        self.trees().iter().skip(1).all(|ceiling| ceiling.decider(real).is_some_and(names))
    }

    /// The same as [`Compiled::why`] for a path that would be writable without protected names that lead to `pointed`, above it.
    pub fn why_pointed(
        &self,
        real: &Path,
        pointed: &[&Path],
        exists: impl Fn(&Path) -> bool,
    ) -> (String, Option<(PathBuf, Access)>) {
        let place = real.ancestors().find(|place| exists(place)).filter(|_| self.may_name(real, pointed));
        let within = place.map(part_of_repository).filter(|place| pointed.iter().any(|top| place.starts_with(top)));
        (format!("{POINTED}{}", also_changed(real)), within.map(|place| (place.to_owned(), Access::Write)))
    }

    /// Why a link-free path is denied to whoever wants `access` of it: the rule that decides, and the entry that would allow it.
    /// What does not exist is not made writable by an entry, so that entry is for what `exists` of the path. None where a denial
    /// has to go instead, where the ceiling forbids it, and where all of the file system had to be granted.
    pub fn why(&self, real: &Path, access: Access, exists: impl Fn(&Path) -> bool) -> (String, Option<(PathBuf, Access)>) {
        let Explanation { verdict, rule, grant } = self.explain(real);
        if verdict == Verdict::Denied || grant.is_none() {
            return (rule, None);
        }
        let place = match access {
            Access::Write => real.ancestors().find(|place| exists(place)).filter(|place| self.verdict(place) != Verdict::Write),
            Access::Read | Access::Deny => Some(real),
        };
        let place = place.map(|place| if access == Access::Write { part_of_repository(place) } else { place });
        (rule, place.filter(|place| place.parent().is_some()).map(|place| (place.to_owned(), access)))
    }
}

/// The files that git changes in the directory that linked work trees share, beside their own.
const CHANGED: [&str; 3] = ["objects", "refs", "logs"];

/// The directory that linked work trees share, and the path below it, if a path goes through one.
fn shared(real: &Path) -> Option<(&Path, &Path)> {
    let is_shared = |place: &&Path| place.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(b".git"));
    let directory = real.ancestors().find(is_shared)?;
    Some((directory, real.strip_prefix(directory).ok()?))
}

/// For a path in a linked work tree's own directory, the other paths that a commit there changes, since a process meets one
/// denial at a time.
fn also_changed(real: &Path) -> String {
    match shared(real) {
        Some((directory, below)) if below.starts_with("worktrees") => {
            let [first, second, third] = CHANGED;
            format!("; a commit also changes `{first}`, `{second}` and `{third}` of `{}`", directory.display())
        }
        _elsewhere => String::new(),
    }
}

/// The part of a shared directory that is granted as a whole or not at all: git makes directories in it at will.
fn part_of_repository(place: &Path) -> &Path {
    let Some((_, below)) = shared(place) else { return place };
    let mut names = below.iter();
    let depth = match names.next() {
        Some(name) if CHANGED.iter().any(|changed| name == *changed) => 1,
        Some(name) if name == "worktrees" => 2,
        _whole => return place,
    };
    place.ancestors().nth(below.iter().count().saturating_sub(depth)).unwrap_or(place)
}

fn words(rule: Rule<'_>, real: &Path) -> String {
    match rule {
        Rule::Everything => "files are not restricted".to_owned(),
        Rule::NoEntry => "no entry covers it".to_owned(),
        Rule::Entry(entry) => format!("entry `{}`", spell(entry)),
        Rule::Top(entry) => {
            let name = real.strip_prefix(entry.path.as_path()).ok().and_then(|below| below.iter().next());
            match name {
                Some(name) => format!("protected name `{}` of writable `{}`", name.display(), entry.path),
                None => format!("a protected name of writable `{}`", entry.path),
            }
        }
        Rule::Nested(name, entry) => format!("name `{}`, protected at any depth below writable `{}`", name.display(), entry.path),
        Rule::Glob(glob) => format!("deny glob `{}` below `{}`", glob.pattern, glob.base),
    }
}

fn spell(entry: &Grant) -> String {
    let access = match entry.access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Deny => "deny",
    };
    format!("{access} {}", entry.path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiled::Resolved;
    use crate::policy::{DenyGlob, Files, Grants, Network, Policy};
    use Access::{Deny, Read, Write};
    use portcullis_protocol::path::AbsolutePath;
    use proptest::prelude::*;

    fn grants(entries: &[(&str, Access)], globs: &[(&str, &str)]) -> Grants {
        let absolute = |path: &str| AbsolutePath::new(path).unwrap();
        let entries = entries.iter().map(|(path, access)| Grant::new(absolute(path), *access)).collect();
        let globs = globs.iter().map(|(base, pattern)| DenyGlob { base: absolute(base), pattern: (*pattern).to_owned() });
        Grants::new(entries, globs.collect()).unwrap()
    }

    fn policy(grants: Grants) -> Policy {
        Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
    }

    fn explain(policy: &Policy, real: &str) -> Explanation {
        Compiled::new(policy, Resolved::same).unwrap().explain(Path::new(real))
    }

    #[track_caller]
    fn check(policy: &Policy, rows: &[(&str, &str, Option<Access>)]) {
        for (real, rule, grant) in rows {
            let got = explain(policy, real);
            assert_eq!((got.rule.as_str(), got.grant.map(|(_, access)| access)), (*rule, *grant), "{real}");
        }
    }

    #[test]
    fn each_rule_in_words() {
        let entries = [("/r", Read), ("/w", Write), ("/w/ro", Read), ("/w/no", Deny), ("/w/no/yes", Read)];
        let plain = grants(&entries, &[("/w", "**/*.env"), ("/", "s")]);
        check(
            &policy(plain.clone()),
            &[
                ("/x", "no entry covers it", Some(Read)),
                ("/r/a", "entry `read /r`", Some(Write)),
                ("/w/a", "entry `write /w`", None),
                ("/w/ro/a", "entry `read /w/ro`", Some(Write)),
                ("/w/.git/a", "protected name `.git` of writable `/w`", Some(Write)),
                ("/w/sub/.git/a", "entry `write /w`", None),
                ("/w/no/a", "entry `deny /w/no`", None),
                ("/w/no/yes/a", "entry `read /w/no/yes`", Some(Write)),
                ("/w/a/b.env/c", "deny glob `**/*.env` below `/w`", None),
                ("/s/x", "deny glob `s` below `/`", None),
            ],
        );
        let nested = policy(Grants { protect_nested: true, ..plain });
        check(&nested, &[("/w/sub/.git/a", "name `.git`, protected at any depth below writable `/w`", Some(Write))]);
        let free = Policy { files: Files::Unrestricted, network: Network::Restricted };
        check(&free, &[("/a", "files are not restricted", None)]);
    }

    #[test]
    fn of_two_sets_the_one_that_decides_is_named() {
        let own = policy(grants(&[("/", Read), ("/w", Write), ("/w/no", Deny)], &[]));
        let ceiling = policy(grants(&[("/usr", Read), ("/w", Write), ("/v", Write), ("/etc", Deny)], &[("/w", "*.env")]));
        check(
            &own.bounded_by(&ceiling).unwrap(),
            &[
                ("/w/a", "entry `write /w`", None),
                ("/usr/a", "entry `read /`", None),
                ("/v/a", "entry `read /`", Some(Write)),
                ("/x", "the operator's ceiling: no entry covers it", None),
                ("/etc/x", "the operator's ceiling: entry `deny /etc`", None),
                ("/w/no", "entry `deny /w/no`", None),
                ("/w/a.env", "the operator's ceiling: deny glob `*.env` below `/w`", None),
            ],
        );
    }

    fn any_path() -> impl Strategy<Value = String> {
        let name = prop::sample::select(vec!["a", "b", ".git", ".aws", "x.env"]);
        prop::collection::vec(name, 0..5).prop_map(|names| format!("/{}", names.join("/")))
    }

    fn any_grants() -> impl Strategy<Value = Grants> {
        let entry = (any_path(), prop::sample::select(vec![Read, Write, Deny]));
        let glob = (any_path(), prop::sample::select(vec!["*.env", "**/b", "a/*"]));
        (prop::collection::vec(entry, 0..8), prop::collection::vec(glob, 0..2), any::<bool>()).prop_map(
            |(entries, globs, nested)| {
                let entries: Vec<_> = entries.iter().map(|(path, access)| (path.as_str(), *access)).collect();
                let globs: Vec<_> = globs.iter().map(|(base, pattern)| (base.as_str(), *pattern)).collect();
                Grants { protect_nested: nested, ..grants(&entries, &globs) }
            },
        )
    }

    proptest! {
        #[test]
        fn the_entry_that_is_named_allows_it(own in any_grants(), ceiling in any_grants(), bounded in any::<bool>(), real in any_path()) {
            let bound = |own: Grants| if bounded { policy(own).bounded_by(&policy(ceiling.clone())).unwrap() } else { policy(own) };
            // A policy that is its own ceiling is one set, and nothing says that it is bounded.
            prop_assume!(!bounded || own != ceiling);
            let explanation = explain(&bound(own.clone()), &real);
            let Some((path, access)) = explanation.grant else { return Ok(()) };
            let nested = own.protect_nested;
            let more = [own.entries, vec![Grant::new(AbsolutePath::new(path).unwrap(), access)]].concat();
            let own = Grants { protect_nested: nested, ..Grants::new(more, own.deny_globs).unwrap() };
            let after = explain(&bound(own), &real).verdict;
            let expect = if access == Write { Verdict::Write } else { Verdict::Read };
            prop_assert!(after.rank() >= expect.rank(), "{}: {:?}", real, after);
        }
    }
}

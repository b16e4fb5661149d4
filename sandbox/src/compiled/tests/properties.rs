//! Properties of every policy.

use super::*;
use crate::glob::compile_glob;
use proptest::prelude::*;

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

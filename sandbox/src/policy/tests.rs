use super::*;
use proptest::prelude::*;

#[test]
fn a_protected_name_is_protected_in_every_spelling() {
    for name in [".git", ".GIT", ".Git", ".git.", ".gIt .", "git~1", "GIT~23", ".CODEX", "agents~2", ".Aws"] {
        assert!(is_protected_name(OsStr::new(name)), "{name}");
    }
    for name in ["git", ".gitignore", ".git~x", "git~", ".gi", "", ".", "...", ".git/x", "xgit~1", "aws"] {
        assert!(!is_protected_name(OsStr::new(name)), "{name}");
    }
}

fn grant(path: &str, access: Access) -> Grant {
    Grant::new(AbsolutePath::new(path).unwrap(), access)
}

fn restricted(grants: Grants) -> Policy {
    Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
}

#[test]
fn what_is_hidden_is_denied_with_all_below_it() {
    let path = |text: &str| AbsolutePath::new(text).unwrap();
    let entries = ["/", "/run", "/run/own/x", "/run/owner", "/zz"].map(|text| Grant::new(path(text), Access::Write));
    let grants = Grants::new(entries.to_vec(), Vec::new()).unwrap();
    let policy = Policy { files: Files::Restricted(grants.into()), network: Network::Restricted };
    let hidden = policy.hiding(&path("/run/own"));
    let got: Vec<(String, Access)> =
        hidden.files.sets().flat_map(|set| &set.entries).map(|entry| (entry.path.to_string(), entry.access)).collect();
    let expect = [
        ("/", Access::Write),
        ("/run", Access::Write),
        ("/run/own", Access::Deny),
        ("/run/owner", Access::Write),
        ("/zz", Access::Write),
    ];
    assert_eq!(got, expect.map(|(path, access)| (path.to_owned(), access)));
    assert_eq!(Policy::decode(&hidden.encode()).unwrap(), hidden, "in canonical form");
}

#[test]
fn duplicates_merge_and_deny_beats_write_beats_read() {
    use Access::{Deny, Read, Write};
    let entries = vec![grant("/b", Read), grant("/a", Read), grant("/a", Write), grant("/b", Deny), grant("/b", Write)];
    assert_eq!(Grants::new(entries, Vec::new()).unwrap().entries, [grant("/a", Write), grant("/b", Deny)]);
}

#[test]
fn an_entry_that_skips_nothing_wins_where_paths_are_equal() {
    use Access::{Deny, Read, Write};
    let skip = |access| Grant { skip_missing: true, ..grant("/a", access) };
    let strict = |access| grant("/a", access);
    for (entries, expect) in [
        (vec![skip(Read)], skip(Read)),
        (vec![skip(Deny), skip(Read)], skip(Deny)),
        (vec![skip(Read), strict(Read)], strict(Read)),
        (vec![skip(Deny), strict(Read)], strict(Deny)),
        (vec![skip(Deny), skip(Write)], skip(Deny)),
        (vec![skip(Write)], strict(Write)),
        (vec![skip(Write), skip(Read)], strict(Write)),
    ] {
        let mut reversed = entries.clone();
        reversed.reverse();
        for entries in [entries, reversed] {
            assert_eq!(Grants::new(entries, Vec::new()).unwrap().entries, std::slice::from_ref(&expect));
        }
    }
    let policies = [skip(Read), strict(Read)].map(|entry| restricted(Grants::new(vec![entry], Vec::new()).unwrap()));
    assert_ne!(policies[0].hash(), policies[1].hash());
}

#[test]
fn bounds_are_named() {
    let entries = (0..=MAX_ENTRIES).map(|nth| grant(&format!("/{nth}"), Access::Read)).collect();
    let error = Grants::new(entries, Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "policy with 8193 entries: the bound is 8192");
    let base = AbsolutePath::new("/").unwrap();
    let globs = (0..=MAX_GLOBS).map(|nth| DenyGlob { base: base.clone(), pattern: nth.to_string() }).collect();
    let error = Grants::new(Vec::new(), globs).unwrap_err();
    assert_eq!(error.to_string(), "policy with 513 deny globs: the bound is 512");
}

#[test]
fn a_bound_takes_and_never_gives() {
    let own = restricted(Grants::new(vec![grant("/a", Access::Write)], Vec::new()).unwrap());
    let ceiling = restricted(Grants::new(vec![grant("/b", Access::Read)], Vec::new()).unwrap());
    let free = Policy { files: Files::Unrestricted, network: Network::Enabled };
    let both = own.clone().bounded_by(&ceiling).unwrap();
    assert_eq!(both.files.sets().count(), 2);
    assert!(both.files.is_read_only() && !own.files.is_read_only());
    assert_eq!(free.clone().bounded_by(&ceiling).unwrap(), ceiling);
    assert_eq!(own.clone().bounded_by(&free).unwrap(), own);
    assert_eq!(free.clone().bounded_by(&free).unwrap(), free);
    assert_eq!(own.clone().bounded_by(&own).unwrap(), own);
    assert_eq!(Policy::decode(&both.encode()), Ok(both.clone()));
    assert_eq!(both.clone().bounded_by(&own).unwrap(), both, "it holds already");
    let more = |path: &str| restricted(Grants::new(vec![grant(path, Access::Read)], Vec::new()).unwrap());
    let three = more("/c").bounded_by(&both).unwrap();
    assert_eq!(three.files.sets().count(), 3);
    assert_eq!(Policy::decode(&three.encode()), Ok(three.clone()));
    let error = more("/d").bounded_by(&three).unwrap_err();
    assert_eq!(error.to_string(), "policy with 4 sets of grants: the bound is 3");
    let Files::Restricted(GrantSets { first, ceilings }) = &three.files else { panic!("it restricts files") };
    let sets = GrantSets { first: first.clone(), ceilings: [&ceilings[..], &[Grants::default()]].concat() };
    let four = Policy { files: Files::Restricted(sets), network: Network::Restricted };
    assert!(Policy::decode(&four.encode()).is_err());
}

#[test]
fn bytes_out_of_order_are_refused() {
    let grants = Grants { entries: vec![grant("/b", Access::Read), grant("/a", Access::Read)], ..Grants::default() };
    let bytes = restricted(grants).encode();
    assert!(Policy::decode(&bytes).unwrap_err().to_string().contains("out of order"));
}

#[test]
fn a_hash_is_shown_in_hex() {
    let text = restricted(Grants::default()).hash().to_string();
    assert!(text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()), "{text}");
}

proptest! {
    #[test]
    fn what_is_encoded_decodes_to_itself(
        entries in prop::collection::vec(("(/[a-z.]{1,3}){0,4}", 0..3_u8), 0..20),
        globs in prop::collection::vec(("(/[a-z]{1,3}){0,2}", "[a-z*/]{1,9}"), 0..5), enabled in any::<bool>(),
    ) {
        let access = |nth| [Access::Read, Access::Write, Access::Deny][usize::from(nth)];
        let entries = entries.iter().map(|(path, nth)| grant(&format!("/{path}"), access(*nth))).collect();
        let base = |path: &str| AbsolutePath::new(format!("/{path}")).unwrap();
        let globs = globs.iter().map(|(path, pattern)| DenyGlob { base: base(path), pattern: pattern.clone() }).collect();
        let network = if enabled { Network::Enabled } else { Network::Restricted };
        let policy = Policy { files: Files::Restricted(Grants::new(entries, globs).unwrap().into()), network };
        let bytes = policy.encode();
        prop_assert_eq!(Policy::decode(&bytes), Ok(policy.clone()));
        prop_assert!(Policy::decode(&bytes[..bytes.len() - 1]).is_err());
        prop_assert!(Policy::decode(&[bytes, vec![0]].concat()).is_err());
    }

    #[test]
    fn garbage_is_refused_or_canonical(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(policy) = Policy::decode(&bytes) {
            prop_assert_eq!(Policy::decode(&policy.encode()), Ok(policy));
        }
    }
}

//! The sandbox object of a request becomes a policy, by its text from a cache: the second request with a policy of a
//! thousand entries costs what one with a single entry does. Whatever it says, it becomes no more than the operator's ceiling:
//! every policy of every file call and every process comes from here.

use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_protocol::sandbox::Sandbox;
use portcullis_sandbox::policy::{Policy, PolicyError, PolicyHash};
use portcullis_sandbox::resolve::{self, Machine};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::sync::Arc;

/// Texts remembered per connection; a client that makes up new ones all the time pays for each.
const CAPACITY: usize = 64;
/// Bytes of a text: a policy with as many entries as there may be fits.
const BOUND: usize = 8 << 20;
/// Bytes of texts and of their policies remembered per connection: some twenty policies of a thousand entries.
const REMEMBERED: usize = 4 << 20;
/// Bytes that an entry takes beside its path.
const PART: usize = 64;

/// A policy, and the hash that names it.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    /// Of the policy's bytes.
    pub(crate) hash: PolicyHash,
    /// About the bytes of memory that it takes.
    size: usize,
    /// What it says.
    pub(crate) policy: Arc<Policy>,
}

impl Named {
    pub(crate) fn new(policy: Policy) -> Self {
        let encoded = policy.encode();
        let parts = policy.files.sets().map(|set| set.entries.len() + set.deny_globs.len()).sum::<usize>();
        Self { hash: PolicyHash::of(&encoded), size: encoded.len() + PART * parts, policy: Arc::new(policy) }
    }
}

/// What no confined request may exceed, and what a request without a policy of its own gets.
#[derive(Debug, Clone)]
pub(crate) struct Ceiling {
    /// The operator's policy.
    policy: Option<Named>,
    /// The same for file calls.
    for_files: Option<Named>,
    own: Arc<OwnPlaces>,
}

/// What is the server's own on this machine.
#[derive(Debug, Default)]
pub(crate) struct OwnPlaces {
    /// Where tokens are that open listeners of this user: hidden.
    pub(crate) hidden: Vec<AbsolutePath>,
    /// What the server's next start is made of: read-only.
    pub(crate) kept: Vec<AbsolutePath>,
}

impl Ceiling {
    pub(crate) fn new(policy: Option<Policy>, own: Arc<OwnPlaces>) -> Self {
        let mut ceiling = Self { policy: None, for_files: None, own };
        ceiling.for_files = policy.clone().map(|policy| Named::new(ceiling.without_own(policy)));
        ceiling.policy = policy.map(Named::new);
        ceiling
    }

    /// The same for a client whose token allows this much and no more: what both allow.
    pub(crate) fn within(&self, token: Option<&Policy>) -> Result<Self, PolicyError> {
        let Some(token) = token else { return Ok(self.clone()) };
        let both = match &self.policy {
            Some(operator) => token.clone().bounded_by(&operator.policy)?,
            None => token.clone(),
        };
        Ok(Self::new(Some(both), Arc::clone(&self.own)))
    }

    /// What is confined must not find what opens the gateway's own listener, for itself or for somebody else: who holds a token
    /// may ask without a sandbox. Nor may it change what the next server is started from.
    pub(crate) fn without_own(&self, policy: Policy) -> Policy {
        let policy = self.own.hidden.iter().fold(policy, |policy, place| policy.hiding(place));
        self.own.kept.iter().fold(policy, |policy, place| policy.keeping(place))
    }
}

/// The cache of one connection.
#[derive(Debug)]
pub(crate) struct Policies {
    machine: Machine,
    ceiling: Ceiling,
    known: HashMap<Box<str>, Option<Named>>,
    /// What it takes, at most [`REMEMBERED`].
    size: usize,
}

impl Policies {
    pub(crate) fn new(machine: Machine, ceiling: Ceiling) -> Self {
        Self { machine, ceiling, known: HashMap::new(), size: 0 }
    }

    /// The policy of a file call, without the places of tokens, which workers can deny on any machine; none means that no
    /// confinement was asked for, neither by the client nor by the operator.
    pub(crate) fn for_files(&mut self, sandbox: Option<&RawValue>) -> Result<Option<Named>, RpcError> {
        let Some(text) = text(sandbox) else { return Ok(self.ceiling.for_files.clone()) };
        if let Some(known) = self.known.get(text) {
            return Ok(known.clone());
        }
        // Once for as long as the text is remembered.
        let named = match self.resolve(text, None)? {
            Some(policy) => Some(Named::new(self.ceiling.without_own(policy))),
            None => self.ceiling.for_files.clone(),
        };
        let size = text.len() + named.as_ref().map_or(0, |named| named.size);
        if self.known.len() >= CAPACITY || self.size + size > REMEMBERED {
            self.known.clear();
            self.size = 0;
        }
        if size <= REMEMBERED {
            self.known.insert(text.into(), named.clone());
            self.size += size;
        }
        Ok(named)
    }

    /// The policy of a process, whose working directory stands in for an absent one. It is resolved each time: a start costs
    /// far more, and the text alone does not decide.
    pub(crate) fn for_process(&self, sandbox: Option<&RawValue>, cwd: &AbsolutePath) -> Result<Option<Named>, RpcError> {
        let own = text(sandbox).map(|text| self.resolve(text, Some(cwd))).transpose()?.flatten();
        Ok(own.map(Named::new).or_else(|| self.ceiling.policy.clone()))
    }

    /// What the text says, within the ceiling; none if it asks for nothing, so that the ceiling alone decides.
    fn resolve(&self, text: &str, cwd: Option<&AbsolutePath>) -> Result<Option<Policy>, RpcError> {
        let refused = |error: String| RpcError::new(code::INVALID_PARAMS, error);
        if text.len() > BOUND {
            return Err(refused(format!("sandbox of {} bytes: at most {BOUND} are allowed", text.len())));
        }
        let sandbox = Sandbox::parse(text).map_err(|error| refused(error.to_string()))?;
        let own = resolve::resolve(&sandbox, cwd, &self.machine).map_err(|error| refused(error.to_string()))?;
        Ok(match (own, &self.ceiling.policy) {
            (Some(own), Some(ceiling)) => Some(own.bounded_by(&ceiling.policy).map_err(|error| refused(error.to_string()))?),
            (own, _) => own,
        })
    }
}

/// The object's text; null is absence.
fn text(sandbox: Option<&RawValue>) -> Option<&str> {
    sandbox.map(RawValue::get).filter(|text| *text != "null")
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_sandbox::compiled::{Compiled, Resolved, Verdict};
    use portcullis_sandbox::file;
    use portcullis_sandbox::policy::{Access, Files, Network};
    use proptest::prelude::*;
    use serde_json::json;
    use std::path::Path;

    fn policies(ceiling: Option<&str>) -> Policies {
        let resolved = ceiling.map(|name| {
            let sandbox = file::builtin(name).unwrap().sandbox;
            let cwd = AbsolutePath::new("/ceiling").unwrap();
            resolve::resolve(&sandbox, Some(&cwd), &Machine::default()).unwrap().unwrap()
        });
        Policies::new(Machine::default(), Ceiling::new(resolved, Arc::default()))
    }

    fn both(policies: &mut Policies, text: Option<&str>) -> [Option<Named>; 2] {
        let raw = text.map(|text| RawValue::from_string(text.to_owned()).unwrap());
        let cwd = AbsolutePath::new("/own").unwrap();
        [policies.for_files(raw.as_deref()).unwrap(), policies.for_process(raw.as_deref(), &cwd).unwrap()]
    }

    /// Spellings of "no sandbox".
    const NONE: [Option<&str>; 5] = [
        None,
        Some("null"),
        Some(r#"{"type":"danger-full-access"}"#),
        Some(r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"disabled"}"#),
        Some(r#"{"type":"external-sandbox","network_access":"enabled"}"#),
    ];

    #[test]
    fn who_asks_for_nothing_gets_the_ceiling() {
        let mut bounded = policies(Some("workspace-write"));
        let ceiling = bounded.ceiling.policy.clone().unwrap();
        for text in NONE {
            for named in both(&mut bounded, text) {
                assert_eq!(named.unwrap().hash, ceiling.hash, "{text:?}");
            }
            assert!(both(&mut policies(None), text).iter().all(Option::is_none), "{text:?}");
        }
        // Somebody else confines the files, the operator did not say that it is so.
        for named in both(&mut bounded, Some(r#"{"type":"external-sandbox"}"#)) {
            assert_eq!(named.unwrap().hash, ceiling.hash);
        }
    }

    #[test]
    fn what_is_remembered_has_a_bound_in_bytes() {
        let mut policies = policies(None);
        let directory = "d".repeat(250);
        for round in 0..2 * CAPACITY {
            let entry = |nth| json!({"path": {"type": "path", "path": format!("/{directory}/{round}/{nth}")}, "access": "read"});
            let entries = (0..1000).map(entry).collect::<Vec<_>>();
            let files = json!({"type": "restricted", "entries": entries});
            let permissions = json!({"type": "managed", "network": "restricted", "file_system": files});
            let text = json!({"permissions": permissions, "windowsSandboxLevel": "disabled", "cwd": "/"}).to_string();
            let named = both(&mut policies, Some(&text))[0].clone().unwrap();
            assert!(named.size > 250_000);
            let remembered = policies.known.iter().map(|(text, named)| text.len() + named.as_ref().unwrap().size).sum::<usize>();
            assert_eq!(remembered, policies.size);
            assert!(remembered <= REMEMBERED && policies.known.contains_key(text.as_str()), "{remembered} in round {round}");
        }
    }

    #[test]
    fn no_file_call_under_a_policy_gets_to_see_tokens() {
        let place = AbsolutePath::new("/run/own").unwrap();
        for ceiling in [None, Some("workspace-write")] {
            let mut policies = policies(ceiling);
            let policy = policies.ceiling.policy.take().map(|named| Policy::clone(&named.policy));
            policies.ceiling = Ceiling::new(policy, Arc::new(OwnPlaces { hidden: vec![place.clone()], kept: Vec::new() }));
            for text in [None, Some(r#"{"type":"read-only"}"#), Some(r#"{"type":"danger-full-access"}"#)] {
                for _from_text_then_from_memory in 0..2 {
                    let [named, _of_a_process] = both(&mut policies, text);
                    let Some(named) = named else {
                        assert!(ceiling.is_none() && text != Some(r#"{"type":"read-only"}"#), "{ceiling:?} {text:?}");
                        continue;
                    };
                    let denied = named.policy.files.sets().flat_map(|set| &set.entries);
                    assert_eq!(denied.filter(|entry| entry.path == place && entry.access == Access::Deny).count(), 1);
                    assert_eq!(named.hash, named.policy.hash(), "workers are told apart by it");
                }
            }
        }
    }

    #[test]
    fn who_asks_for_more_gets_what_both_allow() {
        let text = r#"{"type":"workspace-write","cwd":"/own","network_access":true,"writable_roots":["/own/more"]}"#;
        let mut bounded = policies(Some("read-only"));
        for _from_text_then_from_memory in 0..2 {
            for named in both(&mut bounded, Some(text)) {
                let policy = named.unwrap().policy;
                assert!(policy.files.is_read_only() && policy.files.sets().count() == 2);
                assert_eq!(policy.network, Network::Restricted);
            }
        }
        let unrestricted = r#"{"permissions":{"type":"managed","network":"enabled","file_system":{"type":"restricted","entries":[
            {"path":{"type":"special","value":{"kind":"root"}},"access":"write"}]}},"windowsSandboxLevel":"disabled"}"#;
        for named in both(&mut policies(Some("read-only")), Some(unrestricted)) {
            assert!(named.unwrap().policy.files != Files::Unrestricted);
        }
    }

    /// A restricted policy of few paths, as it is written on the wire.
    fn any_sandbox() -> impl Strategy<Value = String> {
        let access = prop::sample::select(vec!["read", "write", "deny"]);
        let entry = (prop::sample::select(vec!["/", "/a", "/a/b", "/a/b/c", "/d", "/a/.git"]), access);
        let managed = (prop::collection::vec(entry, 0..5), any::<bool>()).prop_map(|(entries, network)| {
            let entries: Vec<_> = entries
                .iter()
                .map(|(path, access)| json!({"path": {"type": "path", "path": format!("file://{path}")}, "access": access}))
                .collect();
            let network = if network { "enabled" } else { "restricted" };
            let files = json!({"type": "restricted", "entries": entries});
            json!({"windowsSandboxLevel": "disabled", "cwd": "file:///a",
                "permissions": {"type": "managed", "network": network, "file_system": files}})
            .to_string()
        });
        let plain = prop::sample::select(vec![
            r#"{"type":"read-only"}"#,
            r#"{"type":"workspace-write","cwd":"/a"}"#,
            r#"{"type":"danger-full-access"}"#,
            "null",
        ]);
        prop_oneof![3 => managed, 1 => plain.prop_map(str::to_owned)]
    }

    fn policy_of(text: &str) -> Option<Policy> {
        let sandbox = (text != "null").then(|| Sandbox::parse(text).unwrap())?;
        resolve::resolve(&sandbox, None, &Machine::default()).unwrap()
    }

    /// How much a policy allows of a path; everything if there is none.
    fn allows(policy: Option<&Policy>, path: &str) -> u8 {
        let Some(policy) = policy else { return 3 };
        match Compiled::new(policy, Resolved::same).unwrap().verdict(Path::new(path)) {
            Verdict::Write => 3,
            Verdict::Read | Verdict::Protected => 2,
            Verdict::Unlisted => 1,
            Verdict::Denied => 0,
        }
    }

    proptest! {
        #[test]
        fn whatever_is_asked_a_token_gives_no_more_than_it_says_and_the_operator_allows(
            token in any_sandbox(), operator in any_sandbox(), asked in any_sandbox(),
        ) {
            let (token, operator) = (policy_of(&token), policy_of(&operator));
            let ceiling = Ceiling::new(operator.clone(), Arc::default()).within(token.as_ref()).unwrap();
            let mut policies = Policies::new(Machine::default(), ceiling);
            let own = policy_of(&asked);
            for named in both(&mut policies, Some(&asked)) {
                let got = named.map(|named| Policy::clone(&named.policy));
                for path in ["/", "/a", "/a/x", "/a/b", "/a/b/x", "/a/b/c/x", "/d/x", "/e", "/a/.git/x", "/a/b/.git"] {
                    let least = [&token, &operator, &own].map(|policy| allows(policy.as_ref(), path)).into_iter().min();
                    prop_assert_eq!(Some(allows(got.as_ref(), path)), least, "{}", path);
                }
                let network = |policy: Option<&Policy>| policy.is_none_or(|policy| policy.network == Network::Enabled);
                let all = [&token, &operator, &own].into_iter().all(|policy| network(policy.as_ref()));
                prop_assert_eq!(network(got.as_ref()), all);
            }
        }
    }
}

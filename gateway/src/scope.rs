//! What a signed token narrows its connection to: a ceiling beside the operator's, methods, and a time. The claim is read
//! strictly, since a member that is not understood would have narrowed something.

use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::sandbox::Sandbox;
use portcullis_sandbox::file;
use portcullis_sandbox::policy::{Files, Policy};
use portcullis_sandbox::resolve::{self, Machine};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::time::{Duration, SystemTime};
use tokio::time::sleep;

/// The claim of a token that says so.
pub(crate) const CLAIM: &str = "portcullis";

/// How often it is looked at the clock: it may be set, and sleep with its machine, while a timer runs.
const LOOK: Duration = Duration::from_secs(30);

/// Names a scope: connections of equal ones share their sessions.
pub(crate) type Digest = [u8; 32];

/// What the token of a connection allows.
#[derive(Debug)]
pub(crate) struct TokenScope {
    policy: Option<Policy>,
    methods: Option<Vec<String>>,
    digest: Digest,
    expires: SystemTime,
}

/// The claim, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    #[serde(default, deserialize_with = "present")]
    policy: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "present")]
    workspace: Option<Vec<String>>,
    #[serde(default, deserialize_with = "present")]
    methods: Option<Vec<String>>,
}

/// A member that is there is never taken for one that is not, also where it is null.
pub(crate) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

impl TokenScope {
    /// Reads the claim of a token that is valid until `expires`, for policies on this machine with this home.
    pub(crate) fn parse(
        claim: &str,
        expires: SystemTime,
        machine: &Machine,
        home: Option<&AbsolutePath>,
    ) -> Result<Self, String> {
        // However its members are ordered and spaced.
        let canonical: Value = serde_json::from_str(claim).map_err(|error| error.to_string())?;
        // A list would be taken for the members in their order.
        if !canonical.is_object() {
            return Err("it is no object".to_owned());
        }
        let Claim { policy, workspace, methods } = serde_json::from_str(claim).map_err(|error| error.to_string())?;
        let policy = match policy {
            Some(policy) => resolved(policy.get(), workspace.as_deref().unwrap_or_default(), machine, home)?,
            None if workspace.is_some() => return Err("`workspace` without a `policy` that speaks of it".to_owned()),
            None => None,
        };
        if let Some(wrong) = methods.iter().flatten().find(|pattern| !is_pattern(pattern)) {
            return Err(format!("`{wrong}` is no method: write `FAMILY/NAME`, or `FAMILY/*` for all of a family"));
        }
        Ok(Self { policy, methods, digest: Sha256::digest(canonical.to_string()).into(), expires })
    }

    /// The token's ceiling.
    pub(crate) fn policy(&self) -> Option<&Policy> {
        self.policy.as_ref()
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether a method may be called; if not, why. What only tells who is there always may.
    pub(crate) fn admit(&self, method: &str) -> Result<(), String> {
        let Some(methods) = &self.methods else { return Ok(()) };
        let matches = |pattern: &String| match pattern.strip_suffix('*') {
            Some(family) => method.strip_prefix(family).is_some_and(|name| !name.is_empty()),
            None => pattern == method,
        };
        if method == "initialize" || method.starts_with("environment/") || methods.iter().any(matches) {
            return Ok(());
        }
        let allowed = if methods.is_empty() { "nothing".to_owned() } else { methods.join(", ") };
        Err(format!("{method}: the token of this connection allows {allowed} beside initialize and environment/*"))
    }

    /// Waits until the token is no longer valid.
    pub(crate) async fn expired(&self) {
        while let Ok(left) = self.expires.duration_since(SystemTime::now())
            && !left.is_zero()
        {
            sleep(left.min(LOOK)).await;
        }
    }
}

/// The policy that a claim names or spells; none if it confines nothing.
fn resolved(
    policy: &str,
    workspace: &[String],
    machine: &Machine,
    home: Option<&AbsolutePath>,
) -> Result<Option<Policy>, String> {
    let workspaces = workspace.iter().map(AbsolutePath::new).collect::<Result<Vec<_>, _>>();
    let workspaces = workspaces.map_err(|error| format!("`workspace`: {error}"))?;
    let is_named = policy.starts_with('"');
    let sandbox = if is_named {
        let name: String = serde_json::from_str(policy).map_err(|error| format!("`policy`: {error}"))?;
        let named = file::builtin(&name);
        let named = named.ok_or_else(|| format!("no policy is named `{name}`: known are {}", file::BUILTIN.join(", ")))?;
        named.in_workspaces(&workspaces, home.cloned())
    } else {
        let sandbox = Sandbox::parse(policy).map_err(|error| format!("`policy`: {error}"))?;
        if sandbox.ignored > 0 {
            return Err(format!("`policy`: {} of its members are not known", sandbox.ignored));
        }
        if !workspaces.is_empty() {
            return Err("`workspace` is for a policy's name: one that is spelt out names its own".to_owned());
        }
        sandbox
    };
    let resolved = resolve::resolve(&sandbox, None, machine).map_err(|error| format!("`policy`: {error}"))?;
    let confines_files = resolved.as_ref().is_some_and(|policy| policy.files != Files::Unrestricted);
    if is_named && !workspaces.is_empty() && !confines_files {
        return Err("`workspace`: `/` leaves nothing to confine: name a directory below".to_owned());
    }
    Ok(resolved)
}

/// Whether a text is `FAMILY/NAME` or `FAMILY/*`.
fn is_pattern(text: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    text.split_once('/').is_some_and(|(family, name)| is_word(family) && (is_word(name) || name == "*"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(claim: &Value) -> Result<TokenScope, String> {
        TokenScope::parse(&claim.to_string(), SystemTime::UNIX_EPOCH, &Machine::default(), None)
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for claim in [
            json!(null),
            json!("read-only"),
            json!([]),
            json!(["read-only", null, []]),
            json!({"polcy": "read-only"}),
            json!({"policy": "read-only", "more": 1}),
            json!({"policy": null}),
            json!({"policy": 7}),
            json!({"policy": "no-such"}),
            json!({"policy": "/etc/policy.toml"}),
            json!({"policy": {"type": "read-only", "network_acess": true}}),
            json!({"policy": {"type": "read-only", "nobody knows": true}}),
            json!({"policy": {"type": "workspace-write", "cwd": "/w"}, "workspace": ["/x"]}),
            json!({"policy": "workspace-write"}),
            json!({"policy": "workspace-write", "workspace": ["relative"]}),
            json!({"policy": "workspace-write", "workspace": "/w"}),
            json!({"policy": "workspace-write", "workspace": null}),
            json!({"workspace": ["/w"]}),
            json!({"methods": null}),
            json!({"methods": "fs/*"}),
            json!({"methods": ["fs"]}),
            json!({"methods": ["*"]}),
            json!({"methods": ["fs/read*"]}),
            json!({"methods": ["fs/"]}),
            json!({"methods": [1]}),
        ] {
            assert!(parse(&claim).is_err(), "{claim}");
        }
        assert!(TokenScope::parse(r#"{"methods":[],"methods":["fs/*"]}"#, SystemTime::now(), &Machine::default(), None).is_err());
        for claim in [
            json!({}),
            json!({"policy": "read-only"}),
            json!({"policy": "workspace-write", "workspace": ["/w", "/x"], "methods": ["fs/*", "process/start"]}),
            json!({"policy": {"type": "workspace-write", "cwd": "/w"}}),
            json!({"methods": []}),
        ] {
            parse(&claim).unwrap();
        }
    }

    #[test]
    fn methods_are_those_that_are_named_and_those_of_families() {
        let scope = parse(&json!({"methods": ["fs/*", "process/read"]})).unwrap();
        for method in ["initialize", "environment/info", "environment/status", "fs/readFile", "process/read"] {
            scope.admit(method).unwrap();
        }
        for method in ["process/start", "process/readX", "fs", "fs/", "fsx/readFile", "http/request", "initialized", "Initialize"]
        {
            assert!(scope.admit(method).is_err(), "{method}");
        }
        assert!(parse(&json!({"methods": []})).unwrap().admit("fs/readFile").unwrap_err().contains("allows nothing"));
        parse(&json!({})).unwrap().admit("process/start").unwrap();
    }

    #[test]
    fn scopes_are_told_apart_by_what_they_say() {
        let digest = |claim: &str| TokenScope::parse(claim, SystemTime::now(), &Machine::default(), None).unwrap().digest();
        let one = digest(r#"{"policy":"read-only","methods":["fs/*"]}"#);
        assert_eq!(one, digest(r#"{ "methods": ["fs/*"], "policy": "read-only" }"#));
        assert_ne!(one, digest(r#"{"policy":"read-only","methods":["fs/*","process/*"]}"#));
        assert_ne!(one, digest(r#"{"policy":"read-only"}"#));
    }
}

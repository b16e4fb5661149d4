//! The other way: a sandbox as the object that every server of this wire understands.

use super::{Access, Entry, Files, Network, Permissions, Sandbox, Target};
use serde_json::{Value, json};

impl Sandbox {
    /// The permission profile that means the same. Unknown members that were counted are not in it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let network = |network: Network| match network {
            Network::Restricted => "restricted",
            Network::Enabled => "enabled",
        };
        let permissions = match &self.permissions {
            Permissions::Disabled => json!({"type": "disabled"}),
            Permissions::External(reach) => json!({"type": "external", "network": network(*reach)}),
            Permissions::Managed { files: Files::Unrestricted, network: reach } => {
                json!({"type": "managed", "network": network(*reach), "file_system": {"type": "unrestricted"}})
            }
            Permissions::Managed { files: Files::Restricted { entries, glob_scan_max_depth }, network: reach } => {
                let entries: Vec<Value> = entries.iter().map(spell).collect();
                let mut files = json!({"type": "restricted", "entries": entries});
                if let Some(depth) = glob_scan_max_depth {
                    files["glob_scan_max_depth"] = json!(depth);
                }
                json!({"type": "managed", "network": network(*reach), "file_system": files})
            }
        };
        let roots = if self.roots_default_to_cwd && self.workspace_roots.is_empty() {
            self.cwd.iter().cloned().collect()
        } else {
            self.workspace_roots.clone()
        };
        let mut object = json!({"permissions": permissions, "workspaceRoots": roots, "windowsSandboxLevel": "disabled"});
        if let Some(cwd) = &self.cwd {
            object["cwd"] = json!(cwd);
        }
        if let Some(home) = &self.home {
            object["userHomeDir"] = json!(home);
        }
        if self.protect_nested {
            object["protectNestedRepositories"] = json!(true);
        }
        object
    }
}

fn spell(entry: &Entry) -> Value {
    let special = |kind: &str| json!({"type": "special", "value": {"kind": kind}});
    let target = match &entry.target {
        Target::Path(path) => json!({"type": "path", "path": path}),
        Target::Home(below) => json!({"type": "path", "path": format!("~/{below}")}),
        Target::Glob(pattern) => json!({"type": "glob_pattern", "pattern": pattern}),
        Target::Root => special("root"),
        Target::Minimal => special("minimal"),
        Target::ProjectRoots { subpath: None } => special("project_roots"),
        Target::ProjectRoots { subpath: Some(subpath) } => {
            json!({"type": "special", "value": {"kind": "project_roots", "subpath": subpath}})
        }
        Target::Tmpdir => special("tmpdir"),
        Target::SlashTmp => special("slash_tmp"),
        Target::Nothing(kind) => special(kind),
    };
    let access = match entry.access {
        Access::Write => "write",
        Access::Read => "read",
        Access::Deny => "deny",
    };
    let mut object = json!({"path": target, "access": access});
    if entry.skip_missing {
        object["missing_path_behavior"] = json!("skip");
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spelled_is_read_back_the_same() {
        for text in [
            r#"{"type":"read-only","cwd":"/w"}"#,
            r#"{"type":"workspace-write","cwd":"/w","writable_roots":["/x y"],"network_access":true}"#,
            r#"{"type":"danger-full-access"}"#,
            r#"{"type":"workspace-write","protect_nested_repositories":true,"cwd":"/w"}"#,
            r#"{"type":"external-sandbox"}"#,
            r#"{"windowsSandboxLevel":"disabled","permissions":{"type":"managed","network":"enabled","file_system":{"type":"unrestricted"}}}"#,
            r#"{"windowsSandboxLevel":"disabled","cwd":"/w","workspaceRoots":["/w","/v"],"userHomeDir":"/h","permissions":{"type":"managed","network":"restricted",
                "file_system":{"type":"restricted","glob_scan_max_depth":3,"entries":[
                {"path":{"type":"special","value":{"kind":"minimal"}},"access":"read"},
                {"path":{"type":"special","value":{"kind":"project_roots","subpath":".git"}},"access":"read","missing_path_behavior":"skip"},
                {"path":{"type":"path","path":"~/.ssh"},"access":"deny"},
                {"path":{"type":"path","path":"~"},"access":"read"},
                {"path":{"type":"glob_pattern","pattern":"**/*.env"},"access":"none"},
                {"path":{"type":"special","value":{"kind":"unknown"}},"access":"write"}]}}}"#,
        ] {
            let first = Sandbox::parse(text).unwrap();
            let again = Sandbox::parse(&first.to_json().to_string()).unwrap();
            assert_eq!(again.permissions, first.permissions, "{text}");
            assert_eq!(again.cwd, first.cwd, "{text}");
            assert_eq!((&again.home, again.protect_nested), (&first.home, first.protect_nested), "{text}");
            assert!(!again.roots_default_to_cwd, "what was meant is now said");
            if first.roots_default_to_cwd {
                assert_eq!(again.workspace_roots, first.cwd.into_iter().collect::<Vec<_>>(), "{text}");
            } else {
                assert_eq!(again.workspace_roots, first.workspace_roots, "{text}");
            }
        }
    }
}

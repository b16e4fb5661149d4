//! A workspace and a place beside it, on a server of their own, and policies for them as clients write them.

use crate::{Client, Place, Server};
use serde_json::{Value, json};

/// `ws` is the workspace with the file `in`; `out` lies outside and holds `o`.
#[derive(Debug)]
pub struct Workspace {
    /// Connected.
    pub client: Client,
    /// Of both.
    pub place: Place,
    /// It ends with this.
    pub server: Server,
}

impl Workspace {
    /// On a new server.
    pub async fn new() -> Self {
        let server = Server::start().await;
        let place = Place::new();
        place.put("ws/in", "in");
        place.put("out/o", "o");
        Self { client: Client::connect(&server).await, place, server }
    }

    /// A profile of entries, without network, of which the workspace is the project root.
    #[must_use]
    pub fn profile(&self, entries: &[Value]) -> Value {
        json!({
            "permissions": {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": entries}},
            "cwd": self.place.uri("ws"), "workspaceRoots": [self.place.uri("ws")], "windowsSandboxLevel": "disabled",
        })
    }
}

/// An entry of a special kind.
#[must_use]
pub fn special(kind: &str, access: &str) -> Value {
    json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access})
}

/// An entry for a `file:` URI.
#[must_use]
pub fn at(uri: &str, access: &str) -> Value {
    json!({"path": {"type": "path", "path": uri}, "access": access})
}

//! The list of threats in SECURITY.md, where no other test tries one. Each attack is made three times: by what is confined on a
//! machine with namespaces, by what is confined on one without, and as a control by nobody confined.

mod exec;
mod files;
mod interfaces;
mod life;
mod metadata;
mod network;
mod others;
mod resources;
mod set_id;

use portcullis_tests::{Client, Place, Server, executable};
use serde_json::{Value, json};
use std::fs;

/// Both kinds of machine, and a workspace `ws` beside `out`, which lies outside.
struct Set {
    whole: Server,
    bare: Server,
    /// Of the server with namespaces.
    with: Client,
    /// Of the one without, where the operator accepted what cannot be held.
    without: Client,
    place: Place,
    /// A copy of the attacker that every user may execute.
    probe: String,
    number: usize,
}

impl Set {
    async fn new() -> Self {
        let place = Place::new();
        for file in ["ws/file", "out/file"] {
            place.put(file, "content");
        }
        let probe = place.path("probe");
        fs::copy(executable("portcullis-probe"), &probe).unwrap();
        let whole = Server::start().await;
        let bare = Server::without(&["namespaces"], &["--allow-unprotected-metadata"]).await;
        let (with, without) = (Client::connect(&whole).await, Client::connect(&bare).await);
        Self { whole, bare, with, without, place, probe: probe.to_str().unwrap().to_owned(), number: 0 }
    }

    fn at(&self, name: &str) -> String {
        self.place.path(name).to_str().unwrap().to_owned()
    }

    /// What a program writes on the machine with namespaces, on the one without, and on the first without a sandbox.
    async fn run(&mut self, sandbox: &Value, argv: &[&str], more: &Value) -> [String; 3] {
        let mut outputs = [const { String::new() }; 3];
        for (which, output) in outputs.iter_mut().enumerate() {
            *output = self.run_one(which, sandbox, argv, more).await;
        }
        outputs
    }

    async fn run_one(&mut self, which: usize, sandbox: &Value, argv: &[&str], more: &Value) -> String {
        self.number += 1;
        let id = self.number.to_string();
        let mut more = more.clone();
        if which < 2 {
            more["sandbox"] = sandbox.clone();
        }
        if more.get("cwd").is_none() {
            more["cwd"] = json!(self.place.uri("ws"));
        }
        let client = if which == 1 { &mut self.without } else { &mut self.with };
        let events = client.run(&self.place, &id, argv, more).await;
        let ending = if events.code() == 0 { String::new() } else { format!("ended with {}", events.code()) };
        format!("{}{ending}", events.output(None).trim_end())
    }

    /// The attacker's act on a place in each of the three ways.
    async fn act(&mut self, sandbox: &Value, act: &str, on: &str) -> [String; 3] {
        let probe = self.probe.clone();
        self.run(sandbox, &[&probe, act, on], &json!({})).await
    }

    /// Checks what comes of an act with namespaces and without, and that it is possible to whoever is not confined.
    async fn denied(&mut self, sandbox: &Value, act: &str, on: &str, [with, without]: [&str; 2]) {
        let outcomes = self.act(sandbox, act, on).await;
        assert_eq!(outcomes.each_ref().map(String::as_str), [with, without, "ok"], "{act} {on}");
    }
}

fn read_only() -> Value {
    json!({"type": "read-only"})
}

fn entry(special: &str, access: &str) -> Value {
    json!({"path": {"type": "special", "value": {"kind": special}}, "access": access})
}

fn entry_at(uri: &str, access: &str) -> Value {
    json!({"path": {"type": "path", "path": uri}, "access": access})
}

/// Everything can be read and the workspace `ws` changed, with more entries.
fn workspace_write(place: &Place, more: &[Value]) -> Value {
    let entries = [&[entry("root", "read"), entry("project_roots", "write")][..], more].concat();
    managed(place, "restricted", &entries)
}

fn managed(place: &Place, network: &str, entries: &[Value]) -> Value {
    json!({
        "permissions": {"type": "managed", "network": network, "file_system": {"type": "restricted", "entries": entries}},
        "cwd": place.uri("ws"), "workspaceRoots": [place.uri("ws")], "windowsSandboxLevel": "disabled",
    })
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

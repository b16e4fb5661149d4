//! One attempt: a process or a file call, under the policy of a row or under none.

use super::field::{CANARY, Field};
use super::row::{Act, Kind, Row};
use portcullis_protocol::path::AbsolutePath;
use portcullis_tests::{Client, Refusal, Server, at, special};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Where attempts are made.
pub(super) struct Target<'a> {
    pub(super) kind: Kind,
    pub(super) server: &'a Server,
}

/// Runs the act under the policy of the row. An error names the change, or the check that failed afterwards.
pub(super) async fn confined(row: &Row, target: &Target<'_>) -> Result<String, String> {
    let field = Field::new(row, target.server.program.child.id().expect("the server runs"));
    let own = match &row.ceiling {
        None => None,
        Some(entries) => {
            let policy = field.place.path("ceiling.toml");
            std::fs::write(&policy, operators(&field, entries)).expect("write the operator's policy");
            let workspace = field.place.path("ws");
            let more = ["--policy", policy.to_str().expect("UTF-8"), "--workspace", workspace.to_str().expect("UTF-8")];
            Some(super::start(target.kind, &more).await)
        }
    };
    let mut client = Client::connect(own.as_ref().unwrap_or(target.server)).await;
    let sandbox = (!row.policy.is_empty()).then(|| requests(&field, &row.policy));
    let before = field.snapshot();
    let expect = row.expect.at(target.kind).map_or("", String::as_str);
    let mut got = String::new();
    for (nth, each) in row.each.iter().enumerate() {
        got = one(row, &field, &mut client, &sandbox, each, nth).await;
        if !super::row::is_expected(expect, &got) {
            if !each.is_empty() {
                write!(got, " with {each}").expect("a string takes everything");
            }
            break;
        }
    }
    if field.snapshot() != before {
        return Err(format!("something outside or protected was changed; the act said {got}"));
    }
    row.after.iter().try_for_each(|check| field.check(check)).map(|()| got)
}

/// Runs the act without a sandbox, with the first of its values, and returns `ok` or the other outcome.
pub(super) async fn control(row: &Row, target: &Target<'_>) -> String {
    let row = row.for_control().expect("it was read before");
    let field = Field::new(&row, target.server.program.child.id().expect("the server runs"));
    let mut client = Client::connect(target.server).await;
    let got = one(&row, &field, &mut client, &None, &row.each[0], 0).await;
    // Without a sandbox the secret may be read.
    if got == "leak" { "ok".to_owned() } else { got }
}

async fn one(row: &Row, field: &Field, client: &mut Client, sandbox: &Option<Value>, each: &str, nth: usize) -> String {
    let words = |text: &str| -> Vec<String> { text.split_whitespace().map(|word| field.text(word, each)).collect() };
    let argv = match &row.act {
        Act::Call(text) => return call(client, &words(text), sandbox).await,
        Act::Probe(text) => [vec![field.text("{probe}", "")], words(text)].concat(),
        Act::Script(text) => vec!["/bin/sh".to_owned(), "-c".to_owned(), field.text(text, each)],
        Act::Program(program) => program.iter().map(|word| field.text(word, each)).collect(),
    };
    let id = format!("p{nth}");
    let cwd = AbsolutePath::new(field.text(&row.cwd, each)).expect("an absolute directory").to_uri();
    let mut env = json!({"PATH": "/usr/bin:/bin"});
    for (name, value) in &row.env {
        env[name] = json!(field.text(value, each));
    }
    let mut params = json!({"processId": id, "argv": argv, "cwd": cwd, "env": env, "tty": false});
    if let Some(sandbox) = sandbox {
        params["sandbox"] = sandbox.clone();
    }
    if let Err(refusal) = client.call("process/start", params).await {
        return format!("refused: {}", refusal.message);
    }
    let events = client.events(&id).await;
    let (code, said) = (events.code(), events.output(None));
    let said = said.trim();
    match &row.act {
        _ if said.contains(CANARY) => "leak".to_owned(),
        Act::Probe(_) if code == 0 => said.split_once(' ').filter(|(word, _)| *word == "ok").map_or(said, |_| "ok").to_owned(),
        _ if code == 0 => "ok".to_owned(),
        _ => format!("failed with {code}: {said}"),
    }
}

/// Makes a file call by its name and paths; the reply must not contain the secret.
async fn call(client: &mut Client, words: &[String], sandbox: &Option<Value>) -> String {
    let uri = |path: &String| AbsolutePath::new(path).expect("an absolute path").to_uri();
    let options = json!({"maxDepth": 8, "maxDirectories": 100, "maxEntries": 1000, "followDirectorySymlinks": true});
    let (name, mut params) = match words {
        [name, path] if name == "writeFile" => (name, json!({"path": uri(path), "dataBase64": "eA=="})),
        [name, path] if name == "open" || name == "replace" => {
            let mode = if name == "open" { "read" } else { "replace" };
            return handle(client, json!({"handleId": "h", "path": uri(path), "mode": mode}), sandbox).await;
        }
        [name, path] if name == "walk" => (name, json!({"path": uri(path), "options": options})),
        [name, path] => (name, json!({"path": uri(path)})),
        [name, from, to] => (name, json!({"sourcePath": uri(from), "destinationPath": uri(to), "recursive": true})),
        _ => panic!("no call {words:?}"),
    };
    if let Some(sandbox) = sandbox {
        params["sandbox"] = sandbox.clone();
    }
    match client.call(&format!("fs/{name}"), params).await {
        Ok(answer) => leak_or_ok(&answer),
        Err(refusal) => name_of(&refusal),
    }
}

/// Opens, reads a block where that was asked for, and closes.
async fn handle(client: &mut Client, mut params: Value, sandbox: &Option<Value>) -> String {
    if let Some(sandbox) = sandbox {
        params["sandbox"] = sandbox.clone();
    }
    let is_read = params["mode"] == "read";
    if let Err(refusal) = client.call("fs/open", params).await {
        return name_of(&refusal);
    }
    let block = json!({"handleId": "h", "offset": 0, "len": 4096});
    let outcome = match if is_read { client.call("fs/readBlock", block).await } else { Ok(Value::Null) } {
        Ok(answer) => leak_or_ok(&answer),
        Err(refusal) => name_of(&refusal),
    };
    let closed = client.call("fs/close", json!({"handleId": "h"})).await;
    closed.map_or_else(|refusal| name_of(&refusal), |_| outcome)
}

fn leak_or_ok(answer: &Value) -> String {
    use base64::Engine as _;
    let content = answer["dataBase64"].as_str().or_else(|| answer["chunk"].as_str()).unwrap_or("");
    let content = base64::engine::general_purpose::STANDARD.decode(content).expect("base64");
    let found = String::from_utf8_lossy(&content).contains(CANARY) || answer.to_string().contains("/secret\"");
    if found { "leak" } else { "ok" }.to_owned()
}

fn name_of(refusal: &Refusal) -> String {
    let number = refusal.message.rsplit_once("(os error ").and_then(|(_, rest)| rest.strip_suffix(')'));
    let name = match number {
        Some("1") => "EPERM",
        Some("2") => "ENOENT",
        Some("13") => "EACCES",
        Some("18") => "EXDEV",
        Some("30") => "EROFS",
        Some("40") => "ELOOP",
        _ => return format!("refused: {}", refusal.message),
    };
    name.to_owned()
}

/// An entry: `SPECIAL ACCESS`, `PATH ACCESS`, `glob PATTERN deny`, `network`, or `nested` for protected names at any depth.
enum Entry<'a> {
    Network,
    Nested,
    Glob(&'a str, &'a str),
    Path(&'a str, &'a str),
    Special(&'a str, &'a str),
}

fn entry(text: &str) -> Entry<'_> {
    match text.split_whitespace().collect::<Vec<_>>()[..] {
        ["network"] => Entry::Network,
        ["nested"] => Entry::Nested,
        ["glob", pattern, access] => Entry::Glob(pattern, access),
        [path, access] if path.starts_with('/') => Entry::Path(path, access),
        [special, access] => Entry::Special(special, access),
        _ => panic!("no entry `{text}`"),
    }
}

/// The entries as a request has them.
fn requests(field: &Field, entries: &[String]) -> Value {
    let (mut network, mut nested, mut list) = ("restricted", false, Vec::new());
    for text in entries.iter().map(|text| field.text(text, "")) {
        match entry(&text) {
            Entry::Network => network = "enabled",
            Entry::Nested => nested = true,
            Entry::Glob(pattern, access) => {
                list.push(json!({"path": {"type": "glob_pattern", "pattern": pattern}, "access": access}))
            }
            Entry::Path(path, access) => list.push(at(&AbsolutePath::new(path).expect("an absolute path").to_uri(), access)),
            Entry::Special(kind, access) => list.push(special(kind, access)),
        }
    }
    let workspace = field.place.uri("ws");
    json!({
        "permissions": {"type": "managed", "network": network, "file_system": {"type": "restricted", "entries": list}},
        "cwd": workspace, "workspaceRoots": [workspace], "windowsSandboxLevel": "disabled", "protectNestedRepositories": nested,
    })
}

/// The entries as a file of the operator's has them.
fn operators(field: &Field, entries: &[String]) -> String {
    let (mut network, mut nested, mut list) = ("restricted", false, String::new());
    for text in entries.iter().map(|text| field.text(text, "")) {
        let (kind, what, access) = match entry(&text) {
            Entry::Network => {
                network = "enabled";
                continue;
            }
            Entry::Nested => {
                nested = true;
                continue;
            }
            Entry::Glob(pattern, access) => ("glob", pattern, access),
            Entry::Path(path, access) => ("path", path, access),
            Entry::Special(special, access) => ("special", special, access),
        };
        writeln!(list, "[[entries]]\n{kind} = '{what}'\naccess = '{access}'").expect("a string takes everything");
    }
    format!("description = 'of a test'\nfiles = 'restricted'\nnetwork = '{network}'\nprotect_nested = {nested}\n{list}")
}

//! Rows of the corpus, as they are written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use toml::{Table, Value};

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Root,
    User,
    /// Root's, with namespaces refused by a filter outside.
    BareRoot,
    BareUser,
}

impl Kind {
    pub(super) const fn has_namespaces(self) -> bool {
        matches!(self, Self::Root | Self::User)
    }

    /// The words that mean this kind, the most particular first.
    const fn words(self) -> &'static [&'static str] {
        match self {
            Self::Root => &["root", "view", "as-root", "all"],
            Self::User => &["user", "view", "as-user", "all"],
            Self::BareRoot => &["bare-root", "bare", "as-root", "all"],
            Self::BareUser => &["bare-user", "bare", "as-user", "all"],
        }
    }
}

const KINDS: [&str; 9] = ["root", "user", "bare-root", "bare-user", "view", "bare", "as-root", "as-user", "all"];

/// A text for each kind of server: one string for all, or a table. `root` and `user` give namespaces and are `view` together,
/// `bare-root` and `bare-user` do not and are `bare`; `as-root` and `as-user` are both of one user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ByKind(BTreeMap<String, String>);

impl ByKind {
    pub(super) fn at(&self, kind: Kind) -> Option<&String> {
        kind.words().iter().find_map(|word| self.0.get(*word))
    }

    fn read(name: &str, value: Value) -> Result<Self, String> {
        let table = match value {
            Value::String(text) => return Ok(Self([("all".to_owned(), text)].into())),
            Value::Table(table) => table,
            other => return Err(format!("`{name}` is neither a text nor a table: {other}")),
        };
        let by_kind = table.into_iter().map(|(kind, text)| match text {
            Value::String(text) if KINDS.contains(&kind.as_str()) => Ok((kind, text)),
            _ => Err(format!("`{name}`: `{kind}` is not a kind of server, or has no text")),
        });
        Ok(Self(by_kind.collect::<Result<_, _>>()?))
    }
}

/// The act of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    /// By the attacker program, in its words.
    Probe(String),
    /// By a shell: `ok` if it ends with 0.
    Script(String),
    /// By a program that the client names: `ok` if it ends with 0.
    Program(Vec<String>),
    /// A file call: its name without `fs/`, and its paths.
    Call(String),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    /// Steps before the attempt, by the test itself.
    pub(super) setup: Vec<String>,
    pub(super) act: Act,
    pub(super) cwd: String,
    pub(super) env: BTreeMap<String, String>,
    /// Values of `{n}`: the row is made with each in turn.
    pub(super) each: Vec<String>,
    /// Entries of the request's sandbox.
    pub(super) policy: Vec<String>,
    /// Entries of the operator's policy; the row has a server of its own then.
    pub(super) ceiling: Option<Vec<String>>,
    pub(super) expect: ByKind,
    /// Checks that must hold afterwards.
    pub(super) after: Vec<String>,
    pub(super) skip: ByKind,
    pub(super) pending: ByKind,
    /// Members that are others where no sandbox holds the act.
    pub(super) control: Table,
}

/// All rows of all files.
pub(super) fn read_all() -> Vec<Row> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("attacks");
    let (mut rows, mut names): (Vec<Row>, _) = (Vec::new(), BTreeSet::new());
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let shown = path.display();
        assert!(path.extension().is_some_and(|extension| extension == "toml"), "{shown}: files of attacks end in .toml");
        let text = std::fs::read_to_string(&path).unwrap();
        let found = parse(&text).unwrap_or_else(|error| panic!("{shown}: {error}"));
        assert_eq!(found.len(), text.lines().filter(|line| line.trim() == "[[case]]").count(), "{shown}: every row is read");
        for row in &found {
            assert!(names.insert(row.name.clone()), "{shown}: {} is there twice", row.name);
        }
        rows.extend(found);
    }
    assert!(rows.len() >= 80, "only {} rows were found", rows.len());
    rows
}

/// The rows of one file.
pub(super) fn parse(text: &str) -> Result<Vec<Row>, String> {
    let mut file: Table = text.parse().map_err(|error| format!("{error}"))?;
    let cases = file.remove("case").unwrap_or_else(|| Value::Array(Vec::new()));
    if let Some(other) = file.keys().next() {
        return Err(format!("`{other}`: a file holds `[[case]]` only"));
    }
    let Value::Array(cases) = cases else { return Err("`case`: write `[[case]]`".to_owned()) };
    let mut names = BTreeSet::new();
    cases
        .into_iter()
        .map(|case| {
            let Value::Table(table) = case else { return Err("a case is a table".to_owned()) };
            let shown = table.get("name").and_then(Value::as_str).unwrap_or("a case without a name").to_owned();
            let row = read(table).map_err(|error| format!("{shown}: {error}"))?;
            if names.insert(row.name.clone()) { Ok(row) } else { Err(format!("{shown}: is there twice")) }
        })
        .collect()
}

fn read(mut table: Table) -> Result<Row, String> {
    let name = text(&mut table, "name")?.ok_or("no `name`")?;
    // Which of the classes of attacks it is of: for people, and for a look over the whole.
    text(&mut table, "class")?.ok_or("no `class`")?;
    let expect = ByKind::read("expect", table.remove("expect").ok_or("no `expect`")?)?;
    let by_kind =
        |table: &mut Table, name: &str| table.remove(name).map_or_else(|| Ok(ByKind::default()), |it| ByKind::read(name, it));
    let (skip, pending) = (by_kind(&mut table, "skip")?, by_kind(&mut table, "pending")?);
    let control = match table.remove("control") {
        None => Table::new(),
        Some(Value::Table(control)) => control,
        Some(other) => return Err(format!("`control` is not a table: {other}")),
    };
    let policy = match table.remove("policy") {
        None => named("read-only")?,
        Some(policy) => policy_entries(policy)?,
    };
    let ceiling = table.remove("ceiling").map(policy_entries).transpose()?;
    let mut row = Row {
        name,
        setup: Vec::new(),
        act: Act::Probe(String::new()),
        cwd: "{ws}".to_owned(),
        env: BTreeMap::new(),
        each: vec![String::new()],
        policy,
        ceiling,
        expect,
        after: list(&mut table, "after")?.unwrap_or_default(),
        skip,
        pending,
        control,
    };
    let acts = read_start(&mut row, table)?;
    if acts != 1 {
        return Err("exactly one of `act`, `script`, `program` and `call`".to_owned());
    }
    row.for_control()?;
    Ok(row)
}

/// The members that a control may have otherwise; answers how many of them are acts.
fn read_start(row: &mut Row, mut table: Table) -> Result<usize, String> {
    let mut acts = Vec::new();
    acts.extend(text(&mut table, "act")?.map(Act::Probe));
    acts.extend(text(&mut table, "script")?.map(Act::Script));
    acts.extend(list(&mut table, "program")?.map(Act::Program));
    acts.extend(text(&mut table, "call")?.map(Act::Call));
    let count = acts.len();
    if let Some(act) = acts.pop() {
        row.act = act;
    }
    if let Some(setup) = list(&mut table, "setup")? {
        row.setup = setup;
    }
    if let Some(cwd) = text(&mut table, "cwd")? {
        row.cwd = cwd;
    }
    match table.remove("each") {
        None => {}
        Some(Value::Array(range)) => match range[..] {
            [Value::Integer(first), Value::Integer(last)] => row.each = (first..=last).map(|n| n.to_string()).collect(),
            _ => row.each = texts("each", range)?,
        },
        Some(other) => return Err(format!("`each` is not a list: {other}")),
    }
    match table.remove("env") {
        None => {}
        Some(Value::Table(env)) => {
            for (name, value) in env {
                row.env.insert(name, value.as_str().ok_or("`env` holds texts")?.to_owned());
            }
        }
        Some(other) => return Err(format!("`env` is not a table: {other}")),
    }
    table.keys().next().map_or(Ok(count), |other| Err(format!("`{other}` is not a member of a row")))
}

impl Row {
    /// The same act without a sandbox.
    pub(super) fn for_control(&self) -> Result<Self, String> {
        let mut control = self.clone();
        read_start(&mut control, self.control.clone())?;
        Ok(control)
    }
}

/// Errors by which the kernel denies access, unlike errors of an odd or broken file.
const DENIALS: [&str; 6] = ["EPERM", "EACCES", "ENOENT", "EROFS", "ENOSYS", "ELOOP"];

/// Whether an outcome is one of those between the bars: itself, `failed` for a program that did not end with 0, `refused: WORDS` for a
/// refusal that contains them, or `denied` for any refusal and each of [`DENIALS`].
pub(super) fn is_expected(expect: &str, got: &str) -> bool {
    expect.split('|').any(|one| match one {
        "denied" => got.starts_with("refused: ") || DENIALS.contains(&got),
        "failed" => got.starts_with("failed"),
        _ => one.strip_prefix("refused: ").map_or(one == got, |words| got.starts_with("refused: ") && got.contains(words)),
    })
}

fn policy_entries(value: Value) -> Result<Vec<String>, String> {
    match value {
        Value::String(name) => named(&name),
        Value::Array(entries) => texts("policy", entries),
        other => Err(format!("`policy` is neither a name nor a list: {other}")),
    }
}

fn named(name: &str) -> Result<Vec<String>, String> {
    let entries: &[&str] = match name {
        "read-only" => &["root read"],
        "workspace-write" => &["root read", "project_roots write"],
        "workspace-write-network" => &["root read", "project_roots write", "network"],
        // The attacker lies where only this policy's first entry reaches.
        "minimal" => &["minimal read", "{probe} read", "project_roots write"],
        "none" => &[],
        other => return Err(format!("`policy`: no name {other}")),
    };
    Ok(entries.iter().map(|entry| (*entry).to_owned()).collect())
}

fn text(table: &mut Table, name: &str) -> Result<Option<String>, String> {
    match table.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("`{name}` is not a text: {other}")),
    }
}

fn list(table: &mut Table, name: &str) -> Result<Option<Vec<String>>, String> {
    match table.remove(name) {
        None => Ok(None),
        Some(Value::Array(list)) => texts(name, list).map(Some),
        Some(other) => Err(format!("`{name}` is not a list: {other}")),
    }
}

fn texts(name: &str, list: Vec<Value>) -> Result<Vec<String>, String> {
    let text = |value: Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("`{name}` holds texts"));
    list.into_iter().map(text).collect()
}

//! The corpus of attacks, `tests/attacks/*.toml`: each row runs on every kind of server, and once more without a sandbox.
//!
//! `CONTRIBUTING.md` says how to add a row; `attacks/row.rs` says what a row can hold.

mod attempt;
mod field;
mod row;

use attempt::Target;
use portcullis_tests::Server;
use row::{Kind, Row};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Rows that run at the same time. They share two processors with other tests.
const AT_ONCE: usize = 4;

/// The result of a row.
#[derive(Debug)]
enum Verdict {
    Held,
    /// Does not hold, and is marked so.
    Pending(String),
    /// Cannot be made here.
    Skipped(String),
    Wrong(String),
}

#[tokio::test]
async fn every_attack_fails_where_namespaces_are_given() {
    check(if is_root() { Kind::Root } else { Kind::User }).await;
}

#[tokio::test]
async fn every_attack_fails_where_namespaces_are_refused() {
    check(if is_root() { Kind::BareRoot } else { Kind::BareUser }).await;
}

#[test]
fn rows_that_say_too_little_or_too_much_are_refused() {
    let whole = "[[case]]\nname = 'n'\nclass = 'c'\nact = 'read {out}/file'\nexpect = 'EACCES'\n";
    assert_eq!(row::parse(whole).map(|rows| rows.len()), Ok(1));
    for (text, cause) in [
        (whole.replace("expect = 'EACCES'", ""), "no `expect`"),
        (whole.replace("act =", "cat ="), "`cat`"),
        (format!("{whole}call = 'readFile {{out}}/file'\n"), "exactly one"),
        (whole.replace("act = 'read {out}/file'", ""), "exactly one"),
        (format!("{whole}pending = {{ everywhere = 'x' }}\n"), "`everywhere`"),
        (format!("{whole}policy = 3\n"), "`policy`"),
        (format!("{whole}{whole}"), "twice"),
        (whole.replace("[[case]]", "[[row]]"), "`row`"),
    ] {
        let refused = row::parse(&text).unwrap_err();
        assert!(refused.contains(cause), "{text}: {refused}");
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

/// Runs every row on one kind of server, and reports the result of every row that is wrong.
async fn check(kind: Kind) {
    let mut rows = row::read_all();
    // For authors of rows: runs only rows with this text in their names, and prints the result of each.
    let wanted = std::env::var("ATTACK").ok();
    rows.retain(|row| wanted.as_ref().is_none_or(|wanted| row.name.contains(wanted)));
    let expected = rows.len();
    let server = Arc::new(start(kind, &[]).await);
    let free = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = JoinSet::new();
    let mut names = BTreeMap::new();
    for row in rows {
        let (server, free, name) = (Arc::clone(&server), Arc::clone(&free), row.name.clone());
        let task = tasks.spawn(async move {
            let _turn = free.acquire().await.expect("the semaphore is never closed");
            judge(&row, kind, &server).await
        });
        names.insert(task.id(), name);
    }
    let mut verdicts = BTreeMap::new();
    while let Some(ended) = tasks.join_next_with_id().await {
        let (id, verdict) = match ended {
            Ok((id, verdict)) => (id, verdict),
            Err(error) => (error.id(), Verdict::Wrong(format!("the row itself failed: {error}"))),
        };
        verdicts.insert(names.remove(&id).expect("every task has a name"), verdict);
    }
    report(kind, expected, &verdicts);
}

fn report(kind: Kind, expected: usize, verdicts: &BTreeMap<String, Verdict>) {
    let (mut held, mut lines, mut wrong) = (0, Vec::new(), Vec::new());
    for (name, verdict) in verdicts {
        match verdict {
            Verdict::Held => held += 1,
            Verdict::Pending(reason) => lines.push(format!("pending: {name}: {reason}")),
            Verdict::Skipped(reason) => lines.push(format!("skipped: {name}: {reason}")),
            Verdict::Wrong(how) => wrong.push(format!("{name}: {how}")),
        }
    }
    let (besides, failed) = (lines.join("\n"), wrong.len());
    // To the stream itself: the harness shows the output of `println!` for failed tests only.
    let said = format!("\nattacks on {kind:?}: {expected} rows, {held} hold, {failed} wrong\n{besides}\n");
    let _closed = std::io::stderr().write_all(said.as_bytes());
    assert!(wrong.is_empty(), "{failed} rows are wrong on {kind:?}:\n{}", wrong.join("\n"));
    assert_eq!(verdicts.len(), expected, "every row of the files was made or skipped by name");
}

async fn start(kind: Kind, more: &[&str]) -> Server {
    if kind.has_namespaces() {
        Server::with_arguments(more).await
    } else {
        Server::without(&["namespaces"], &[&["--allow-unprotected-metadata"], more].concat()).await
    }
}

/// The attack under the policy of the row, and its control without one.
async fn judge(row: &Row, kind: Kind, shared: &Server) -> Verdict {
    if let Some(reason) = row.skip.at(kind) {
        return Verdict::Skipped(reason.clone());
    }
    let expect = row.expect.at(kind).unwrap_or_else(|| panic!("{}: no expectation for {kind:?}", row.name));
    let target = Target { kind, server: shared };
    let (held, got) = match attempt::confined(row, &target).await {
        Ok(got) => (row::is_expected(expect, &got), got),
        Err(changed) => (false, changed),
    };
    let control = attempt::control(row, &target).await;
    if std::env::var_os("ATTACK").is_some() {
        let _closed = writeln!(std::io::stderr(), "{} on {kind:?}: {got}; without a sandbox: {control}", row.name);
    }
    if control != "ok" {
        return Verdict::Wrong(format!("the control, without a sandbox: expected ok, got {control}"));
    }
    match (held, row.pending.at(kind)) {
        (true, None) => Verdict::Held,
        (true, Some(_)) => Verdict::Wrong(format!("it holds ({got}), and is marked as pending: remove the mark")),
        (false, Some(reason)) => Verdict::Pending(format!("{reason}: expected {expect}, got {got}")),
        (false, None) => Verdict::Wrong(format!("expected {expect}, got {got}")),
    }
}

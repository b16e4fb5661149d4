//! The hidden roles as real processes: this program plays them too, by calling `dispatch` first, like every embedder.
//!
//! It has a `main` of its own because the harness would start threads before `dispatch`, and understands as much of a
//! harness's command line as test runners use.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test with a main of its own, which clippy does not take for one"
)]

mod roles {
    pub(crate) mod automounter;
    pub(crate) mod first;
    pub(crate) mod gateway;
    pub(crate) mod hidden;
    pub(crate) mod nested;
    pub(crate) mod open;
    pub(crate) mod place;
    pub(crate) mod points;
    pub(crate) mod races;
    pub(crate) mod sandbox;
    pub(crate) mod spares;
    pub(crate) mod spawner;
    pub(crate) mod trees;
    pub(crate) mod uids;
    pub(crate) mod view;
    pub(crate) mod views;
    pub(crate) mod worker;
}

use std::os::unix::fs::PermissionsExt;
use std::panic::catch_unwind;
use std::process::ExitCode;

/// A test and its name.
type Test = (&'static str, fn());

fn main() -> ExitCode {
    if let Some(code) = roles::views::without_judgement() {
        return code;
    }
    if let Some(code) = portcullis_helpers::dispatch() {
        return code;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(code) = roles::worker::backstop(&arguments) {
        return code;
    }
    let tests: Vec<Test> = [
        roles::spawner::TESTS,
        roles::trees::TESTS,
        roles::sandbox::TESTS,
        roles::spares::TESTS,
        roles::open::TESTS,
        roles::view::TESTS,
        roles::nested::TESTS,
        roles::hidden::TESTS,
        roles::first::TESTS,
        roles::races::TESTS,
        roles::points::TESTS,
        roles::uids::TESTS,
        roles::automounter::TESTS,
        roles::worker::TESTS,
        roles::views::TESTS,
    ]
    .concat();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    if has("--list") {
        if !has("--ignored") {
            tests.iter().for_each(|(name, _)| println!("{name}: test"));
        }
        return ExitCode::SUCCESS;
    }
    let words: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &str| {
        words.is_empty() || words.iter().any(|word| if has("--exact") { name == *word } else { name.contains(*word) })
    };
    // One for all, as servers of a user have it. It is its owner's alone.
    let private = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(private).tempdir_in("/var/tmp").unwrap();
    roles::gateway::RECORDS.set(directory.path().canonicalize().unwrap()).unwrap();
    let mut failed = 0;
    for (name, test) in tests.into_iter().filter(|(name, _)| wanted(name)) {
        let passed = catch_unwind(test).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed += u32::from(!passed);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

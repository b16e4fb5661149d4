//! Rules of the layout: what a machine checks is a rule, the rest are wishes.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace").to_owned()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

const CRATES: [&str; 7] = ["protocol", "sandbox", "helpers", "gateway", "client", "relay", "cli"];

/// Every Rust file below the folders.
fn sources(folders: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no sources in {folders:?}");
    found
}

fn metadata() -> Value {
    // Only this platform's packages: those of others need not be on this machine.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked", "--filter-platform", &platform])
        .current_dir(root())
        .output()
        .expect("run cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Names of the packages that each package of the workspace needs when it is not under test.
fn dependencies(metadata: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .filter(|package| package["source"].is_null())
        .map(|package| {
            let needs = package["dependencies"].as_array().unwrap().iter().filter(|dependency| dependency["kind"].is_null());
            let needs = needs.map(|dependency| dependency["name"].as_str().unwrap().to_owned()).collect();
            (package["name"].as_str().unwrap().to_owned(), needs)
        })
        .collect()
}

#[test]
fn crates_depend_only_on_those_below_them() {
    let needs = dependencies(&metadata());
    for (package, may) in [
        ("portcullis-protocol", &[][..]),
        ("portcullis-sandbox", &["portcullis-protocol"]),
        ("portcullis-helpers", &["portcullis-protocol", "portcullis-sandbox"]),
        ("portcullis-gateway", &["portcullis-protocol", "portcullis-sandbox", "portcullis-relay"]),
        ("portcullis-relay", &["portcullis-protocol"]),
        ("portcullis-client", &["portcullis-protocol", "portcullis-relay"]),
    ] {
        let own = needs[package].iter().filter(|name| name.starts_with("portcullis"));
        let above: Vec<&String> = own.filter(|name| !may.contains(&name.as_str())).collect();
        assert!(above.is_empty(), "{package} must not depend on {above:?}");
    }
}

#[test]
fn helpers_never_link_a_runtime_tls_or_a_logger() {
    let metadata = metadata();
    let names: BTreeMap<&str, &str> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (package["id"].as_str().unwrap(), package["name"].as_str().unwrap()))
        .collect();
    let nodes: BTreeMap<&str, &Value> =
        metadata["resolve"]["nodes"].as_array().unwrap().iter().map(|node| (node["id"].as_str().unwrap(), node)).collect();
    let mut open: Vec<&str> = names.iter().filter(|(_, name)| **name == "portcullis-helpers").map(|(id, _)| *id).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            let is_normal = dependency["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"].is_null());
            if is_normal {
                open.push(dependency["pkg"].as_str().unwrap());
            }
        }
    }
    let linked: BTreeSet<&str> = seen.iter().map(|id| names[id]).collect();
    for banned in ["tokio", "rustls", "tracing", "log", "axum", "hyper"] {
        assert!(!linked.contains(banned), "helpers link {banned}");
    }
}

#[test]
fn unsafe_code_lives_in_one_file_a_crate() {
    for path in sources(&CRATES) {
        let shown = path.display();
        let is_sys = path.file_name().is_some_and(|name| name == "sys.rs");
        for line in read(&path).lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
            let is_unsafe = line.contains("unsafe {")
                || line.contains("unsafe fn")
                || line.contains("unsafe impl")
                || line.contains("unsafe extern");
            assert!(is_sys || !is_unsafe, "{shown}: {line}");
        }
    }
    for safe in ["protocol", "gateway", "client", "relay"] {
        assert!(read(root().join(safe).join("src/lib.rs")).contains("#![forbid(unsafe_code)]"), "{safe}");
    }
}

/// A file's lines before its tests, which come last. Other things that only tests see do not end it.
fn before_tests(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let begin_tests = |at: usize| {
        let mut rest = lines[at + 1..].iter().skip_while(|line| line.starts_with("#["));
        match rest.next() {
            Some(&"mod tests {") => true,
            Some(&"mod tests;") => rest.all(|line| line.is_empty()),
            _ => false,
        }
    };
    let end = (0..lines.len()).find(|at| lines[*at] == "#[cfg(test)]" && begin_tests(*at));
    lines[..end.unwrap_or(lines.len())].to_vec()
}

#[test]
fn tests_end_a_file_where_they_begin_and_nothing_else_does() {
    for (text, lines) in [
        ("a\n#[cfg(test)]\nmod tests {\n}\n", 1),
        ("a\n#[cfg(test)]\nmod tests;\n", 1),
        ("a\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\n", 1),
        ("a\n#[cfg(test)]\nmod tests;\n\nb\n", 5),
        ("a\n#[cfg(test)]\nmod fake;\nb\n", 4),
        ("a\n#[cfg(test)]\nimpl A {}\n#[cfg(test)]\nmod tests {\n}\n", 3),
    ] {
        assert_eq!(before_tests(text).len(), lines, "{text}");
    }
}

/// Lines of a crate's sources that are no comments and no tests, with their file.
fn code(folder: &str) -> Vec<(PathBuf, String)> {
    let mut lines = Vec::new();
    for path in sources(&[folder])
        .into_iter()
        .filter(|path| !path.ends_with("tests.rs") && !path.components().any(|part| part.as_os_str() == "tests"))
    {
        let text = read(&path);
        let code = before_tests(&text).into_iter().map(str::trim_start).filter(|line| !line.starts_with("//"));
        lines.extend(code.map(|line| (path.clone(), line.to_owned())));
    }
    lines
}

#[test]
fn the_registry_is_the_only_lock() {
    for (path, line) in code("gateway/src") {
        let is_lock = line.contains("Mutex") || line.contains("RwLock");
        assert!(!is_lock || path.ends_with("registry.rs"), "{}: {line}", path.display());
    }
}

#[test]
fn no_channel_is_unbounded() {
    for (path, line) in ["gateway/src", "client/src", "relay/src", "cli/src"].into_iter().flat_map(code) {
        assert!(!line.contains("unbounded"), "{}: {line}", path.display());
    }
}

#[test]
fn tasks_are_started_by_their_owners_only() {
    for (path, line) in ["gateway/src", "client/src", "relay/src", "cli/src"].into_iter().flat_map(code) {
        // A statement that begins so throws the handle away, and with it the chance to join the task.
        assert!(!line.starts_with("tokio::spawn(") && !line.starts_with("let _ = tokio::spawn("), "{}: {line}", path.display());
    }
}

#[test]
fn files_stay_small_without_their_tests() {
    for path in sources(&CRATES)
        .into_iter()
        .filter(|path| !path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs"))
    {
        let lines = before_tests(&read(&path)).len();
        assert!(lines <= 430, "{} has {lines} lines: split it by operation", path.display());
    }
}

#[test]
fn words_that_say_nothing_are_not_in_type_names() {
    for path in sources(&CRATES) {
        for line in read(&path).lines() {
            let Some(name) = ["struct ", "enum ", "trait "].iter().find_map(|kind| {
                line.trim_start()
                    .trim_start_matches("pub ")
                    .trim_start_matches("pub(crate) ")
                    .trim_start_matches("pub(super) ")
                    .strip_prefix(kind)
            }) else {
                continue;
            };
            let name: String = name.chars().take_while(char::is_ascii_alphanumeric).collect();
            for word in ["Manager", "Handler", "Service", "Util", "Context", "Impl", "Backend"] {
                assert!(!name.contains(word), "{}: {name}", path.display());
            }
        }
    }
}

/// Every test function of the workspace.
fn tests_by_name() -> BTreeSet<String> {
    let files = sources(&["protocol", "sandbox", "helpers", "gateway", "client", "relay", "cli", "tests"]);
    files.iter().flat_map(|path| tests_in(&read(path))).collect()
}

/// The functions of a file behind `#[test]` or `#[tokio::test]`, those inside `proptest!`, and what a program of tests without the
/// usual harness names in its list, `TESTS` or `CASES`.
fn tests_in(text: &str) -> Vec<String> {
    let (mut names, mut is_test, mut is_list, mut proptest) = (Vec::new(), false, false, None);
    for line in text.lines() {
        let (word, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        let begins = ["const TESTS: ", "const CASES: "].iter().any(|list| word.contains(list));
        is_list = (is_list || begins) && word != "];";
        if is_list {
            names.extend(word.split('"').skip(1).step_by(2).filter_map(|name| name.split("::").last()).map(str::to_owned));
            continue;
        }
        if word.starts_with("proptest!") {
            proptest = Some(indent);
        } else if proptest == Some(indent) && word.starts_with('}') {
            proptest = None;
        } else if word == "#[test]" || word.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(rest) = word.strip_prefix("async fn ").or_else(|| word.strip_prefix("fn ")) {
            // Deeper ones in a block of properties are their helpers.
            if is_test || proptest.is_some_and(|outer| indent == outer + 4) {
                names.push(rest.chars().take_while(|letter| letter.is_ascii_alphanumeric() || *letter == '_').collect());
            }
            is_test = false;
        }
    }
    names
}

#[test]
fn only_tests_count_as_tests() {
    let text = "fn helper() {}\n#[test]\n#[ignore]\nfn one() {\n    fn inner() {}\n}\n#[tokio::test(flavor = \"x\")]\nasync fn two() {}\n\
                proptest! {\n    #[test]\n    fn three(a in 0..1) {\n        fn inner() {}\n    }\n}\nfn other() {}\n\
                const TESTS: &[Test] = &[\n    (\"role::four\", four),\n];\nfn four() {}\n";
    assert_eq!(tests_in(text), ["one", "two", "three", "four"]);
}

/// The words in backticks of a line that look like tests: lower case with underscores, after `test:`.
fn named_tests(line: &str) -> Vec<&str> {
    let Some((_, tests)) = line.split_once("test:") else { return Vec::new() };
    tests.split('`').skip(1).step_by(2).collect()
}

#[test]
fn every_invariant_names_a_test_that_exists() {
    let tests = tests_by_name();
    let text = read(root().join("ARCHITECTURE.md"));
    let section = text.split_once("## Invariants").expect("ARCHITECTURE.md has its invariants").1;
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let invariants: Vec<&str> =
        section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| #") && !line.starts_with("|--")).collect();
    assert!(invariants.len() >= 13, "{} invariants", invariants.len());
    for line in invariants {
        let named = named_tests(line);
        assert!(!named.is_empty(), "no test is named: {line}");
        for test in named {
            assert!(tests.contains(test), "`{test}` does not exist: {line}");
        }
    }
}

#[test]
fn every_test_that_a_document_names_exists() {
    let tests = tests_by_name();
    for document in ["SECURITY.md", "README.md"] {
        for line in read(root().join(document)).lines() {
            for test in named_tests(line) {
                assert!(tests.contains(test), "{document}: `{test}` does not exist");
            }
        }
    }
}

#[test]
fn every_threat_names_its_tests() {
    let text = read(root().join("SECURITY.md"));
    let section = text.split_once("## What holds").expect("SECURITY.md has its table").1;
    let section = section.split_once("\n## ").expect("and says what does not hold").0;
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| threat |"));
    let rows: Vec<&str> = rows.collect();
    assert!(rows.len() >= 60, "{} threats", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        assert!(matches!(cells.len(), 3 | 4), "four columns: {row}");
        assert!(!named_tests(row).is_empty() || cells[1..3] == ["not yet"; 2], "no test is named: {row}");
    }
}

#[test]
fn the_gate_runs_the_very_command_that_the_readme_gives() {
    let gate = read(root().join(".ci/run"));
    let command = gate.lines().find_map(|line| line.strip_prefix("TEST=")).expect("the gate names its command").trim_matches('"');
    assert!(read(root().join("README.md")).lines().any(|line| line.trim() == command), "`{command}` is not in README.md");
}

#[test]
fn every_policy_says_what_to_expect_of_it() {
    let folder = root().join("policies");
    let mut policies = 0;
    for entry in fs::read_dir(&folder).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            policies += 1;
            assert!(path.with_extension("expect").is_file(), "{} has no .expect file", path.display());
        }
    }
    assert_eq!(policies, portcullis_sandbox::file::BUILTIN.len());
}

#[test]
fn text_files_end_well() {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let files = match &listed {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        // A copy without its history: the sources must do.
        _ => sources(&CRATES).iter().map(|path| path.strip_prefix(root()).unwrap().display().to_string() + "\0").collect(),
    };
    for file in files.split('\0').filter(|file| !file.is_empty() && *file != "Cargo.lock") {
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        assert!(text.is_empty() || text.ends_with('\n') && !text.ends_with("\n\n"), "{file} does not end in one newline");
        assert!(text.lines().all(|line| !line.ends_with(' ') && !line.ends_with('\t')), "{file} has blanks at a line's end");
    }
}

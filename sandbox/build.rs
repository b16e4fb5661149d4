//! Compiles `policies/seccomp-*.json` into one program a table and architecture.
//!
//! The files are in seccompiler's format, with four additions, which are taken out before seccompiler reads them: `"syscalls"`
//! gives several calls one rule, `"any"` gives a rule several alternative lists of arguments, `"arch"` keeps a rule to one
//! architecture, and `"head"` lists rules that seccompiler cannot express: calls with an error number of their own, and calls
//! that are newer than its tables. The head is assembled here and stands before the compiled program. Every rule must have a
//! comment.

use seccompiler::{TargetArch, sock_filter};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLES: [&str; 6] = ["worker", "process", "read-only", "shared-ipc", "no-network", "internet"];

/// Name, seccompiler's name, the audit value of `linux/audit.h`.
const ARCHITECTURES: [(&str, TargetArch, u32); 2] =
    [("x86_64", TargetArch::x86_64, 0xc000_003e), ("aarch64", TargetArch::aarch64, 0xc000_00b7)];

/// Bound of instructions in a program, far below the kernel's 4096: a table that grows that long is a mistake.
const MAX_PROGRAM: usize = 1500;

fn main() {
    let policies = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../policies");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed=build.rs");
    for table in TABLES {
        let file = policies.join(format!("seccomp-{table}.json"));
        println!("cargo::rerun-if-changed={}", file.display());
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let json: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let filter = json.get(table).unwrap_or_else(|| panic!("{}: no member `{table}`", file.display()));
        for (name, arch, audit) in ARCHITECTURES {
            let mut program = head(filter, name, audit);
            program.extend(body(table, filter, name, arch));
            assert!(program.len() <= MAX_PROGRAM, "{table}: {} instructions", program.len());
            fs::write(out.join(format!("{table}.{name}.bpf")), bytes(&program)).expect("OUT_DIR is writable");
        }
    }
}

/// What seccompiler compiles.
fn body(table: &str, filter: &Value, arch: &str, target: TargetArch) -> Vec<sock_filter> {
    let mut rules = Vec::new();
    let mut unconditional = HashSet::new();
    let mut conditional = HashSet::new();
    for rule in list(filter, "filter").iter().filter(|rule| is_for(rule, arch)) {
        let comment = comment(rule);
        let alternatives = match (rule.get("args"), rule.get("any")) {
            (Some(_), Some(_)) => panic!("{table}: `args` and `any` in one rule: {comment}"),
            (Some(args), None) => vec![args.clone()],
            (None, Some(any)) => any.as_array().expect("`any` is a list").clone(),
            (None, None) => vec![Value::Null],
        };
        for (call, args) in calls(rule).into_iter().flat_map(|call| alternatives.iter().map(move |args| (call.clone(), args))) {
            let mut plain = Map::from_iter([("syscall".to_owned(), json!(call)), ("comment".to_owned(), json!(comment))]);
            if args.is_null() {
                assert!(unconditional.insert(call.clone()), "{table}: {call} stands twice");
            } else {
                conditional.insert(call);
                plain.insert("args".to_owned(), args.clone());
            }
            rules.push(Value::Object(plain));
        }
    }
    // seccompiler would let the conditions win, whatever was meant.
    let both: Vec<_> = unconditional.intersection(&conditional).collect();
    assert!(both.is_empty(), "{table}: {both:?} stand with and without arguments");
    let plain = json!({ table: {
        "mismatch_action": filter["mismatch_action"],
        "match_action": filter["match_action"],
        "filter": rules,
    }});
    let mut programs = seccompiler::compile_from_json(plain.to_string().as_bytes(), target)
        .unwrap_or_else(|error| panic!("{table} for {arch}: {error}"));
    programs.remove(table).expect("compiled under its name")
}

/// Classic BPF: returns an error for the calls of the head, and for x32 calls; falls through to the body otherwise, also for a
/// foreign architecture, which the body ends with SIGSYS.
fn head(filter: &Value, arch: &str, audit: u32) -> Vec<sock_filter> {
    const LOAD: u16 = 0x20;
    const EQUAL: u16 = 0x15;
    const AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const ERRNO: u32 = 0x0005_0000;
    const OFFSET_OF_CALL: u32 = 0;
    const OFFSET_OF_ARCHITECTURE: u32 = 4;
    const FIRST_X32_CALL: u32 = 0x4000_0000;
    const ENOSYS: u32 = 38;

    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut checks = vec![instruction(LOAD, 0, 0, OFFSET_OF_CALL)];
    if arch == "x86_64" {
        // x32 calls have other numbers for the calls that the tables name. No program needs them; a kernel without them says
        // ENOSYS.
        checks.push(instruction(AT_LEAST, 0, 1, FIRST_X32_CALL));
        checks.push(instruction(RETURN, 0, 0, ERRNO | ENOSYS));
    }
    for rule in list(filter, "head").iter().filter(|rule| is_for(rule, arch)) {
        comment(rule);
        let number = |member: &str| {
            let number = rule[member].as_u64().unwrap_or_else(|| panic!("`{member}` in {rule}"));
            u32::try_from(number).expect("fits")
        };
        checks.push(instruction(EQUAL, 0, 1, number("number")));
        checks.push(instruction(RETURN, 0, 0, ERRNO | number("errno")));
    }
    let skip = u8::try_from(checks.len()).expect("a head is shorter than a jump");
    let mut program = vec![instruction(LOAD, 0, 0, OFFSET_OF_ARCHITECTURE), instruction(EQUAL, 0, skip, audit)];
    program.extend(checks);
    program
}

fn list<'a>(filter: &'a Value, member: &str) -> &'a [Value] {
    filter.get(member).map_or(&[], |rules| rules.as_array().expect("rules are a list"))
}

fn is_for(rule: &Value, arch: &str) -> bool {
    rule.get("arch").is_none_or(|only| only.as_str().expect("`arch` is a string") == arch)
}

fn comment(rule: &Value) -> &str {
    rule["comment"].as_str().filter(|comment| !comment.is_empty()).unwrap_or_else(|| panic!("rule without comment: {rule}"))
}

fn calls(rule: &Value) -> Vec<String> {
    let one = |name: &Value| name.as_str().expect("a call is a string").to_owned();
    match (rule.get("syscall"), rule.get("syscalls")) {
        (Some(name), None) => vec![one(name)],
        (None, Some(names)) => names.as_array().expect("`syscalls` is a list").iter().map(one).collect(),
        _ => panic!("either `syscall` or `syscalls`: {rule}"),
    }
}

/// As `struct sock_filter` of `linux/filter.h` lies in memory on the architectures above, which are little-endian.
fn bytes(program: &[sock_filter]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(program.len() * 8);
    for instruction in program {
        bytes.extend(instruction.code.to_le_bytes());
        bytes.extend([instruction.jt, instruction.jf]);
        bytes.extend(instruction.k.to_le_bytes());
    }
    bytes
}

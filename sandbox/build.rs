//! Compiles `policies/seccomp-*.json` into one program a table and architecture.
//!
//! The files are in seccompiler's format, with five additions, which are taken out before seccompiler reads them: `"syscalls"`
//! gives several calls one rule, `"any"` gives a rule several alternative lists of arguments, `"arch"` keeps a rule to one
//! architecture, and `"head"` lists rules that seccompiler cannot express: calls with an error number of their own, and calls
//! that are newer than its tables. The head is assembled here and stands before the compiled program. `"ignored"` lists rules about
//! arguments whose calls succeed without effect. Every rule must have a comment.
//!
//! A table with `"free"` and `"absent"` decides every call by name: a call that its rules do not match is allowed if `"free"`
//! lists it, and gets ENOSYS otherwise; `"absent"` says why. A call of the last years that is in none of the lists fails the
//! build. In every table calls that are newer than [`NEWEST`] get ENOSYS.
//!
//! seccompiler compares a call with one rule after the other, hundreds of them, and the kernel tries every call there is when a
//! program is installed. So calls that are decided by their number alone are decided by a search tree between head and compiled
//! program. Only rules about arguments are left to the compiled program.

use seccompiler::{TargetArch, sock_filter};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLES: [&str; 10] = [
    "worker",
    "init",
    "process",
    "read-only",
    "shared-ipc",
    "no-network",
    "internet",
    "machine-network",
    "set-id",
    "set-group-id",
];

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
            let rules = rules(table, filter, "filter", name);
            let ignored = ignored(table, filter, name, arch);
            let all = compile(table, filter, &rules, arch);
            let of_arguments: Vec<_> = rules.into_iter().filter(|rule| rule.get("args").is_some()).collect();
            let head = head(filter, name);
            let free = free(table, filter, name, arch, audit);
            let decide = |number| match verdict(&all, audit, number) {
                _by_arguments if verdict(&ignored, audit, number).is_none() => None,
                _any if number > NEWEST => Some(ERRNO | ENOSYS),
                Some(ALLOW) if free.as_ref().is_some_and(|free| !free.contains(&number)) => Some(ERRNO | ENOSYS),
                other => other,
            };
            let rest = then(ignored.clone(), compile(table, filter, &of_arguments, arch));
            let program = program(audit, head, &verdicts(decide), rest);
            // The tree has the decision for every number, up to the last one that is not an x32 call.
            for number in (0..CALLS).chain([FIRST_X32_CALL - 1]).filter(|number| !is_in_head(filter, name, *number)) {
                let (expected, decided) = (decide(number), verdict(&program, audit, number));
                assert_eq!(decided, expected, "{table} for {name}: call {number} is decided otherwise than by its rules");
            }
            assert!(program.len() <= MAX_PROGRAM, "{table}: {} instructions", program.len());
            fs::write(out.join(format!("{table}.{name}.bpf")), bytes(&program)).expect("OUT_DIR is writable");
        }
    }
}

/// The program that ends the calls of `"ignored"` with success, and allows all others.
fn ignored(table: &str, filter: &Value, arch: &str, target: TargetArch) -> Vec<sock_filter> {
    let rules = rules(table, filter, "ignored", arch);
    assert!(rules.iter().all(|rule| rule.get("args").is_some()), "{table}: a rule of `ignored` without arguments");
    let succeed = json!({"mismatch_action": "allow", "match_action": {"errno": 0}});
    compile(table, &succeed, &rules, target)
}

/// Has one program decide what another one allows. A program without rules, which looks at the call's number only, is left out.
fn then(mut first: Vec<sock_filter>, second: Vec<sock_filter>) -> Vec<sock_filter> {
    if first.iter().all(|instruction| instruction.code != RETURN || instruction.k != ERRNO) {
        return second;
    }
    let length = first.len();
    for (at, instruction) in first.iter_mut().enumerate() {
        if instruction.code == RETURN && instruction.k == ALLOW {
            let rest = u32::try_from(length - at - 1).expect("a program is short");
            *instruction = sock_filter { code: JUMP, jt: 0, jf: 0, k: rest };
        }
    }
    [first, second].concat()
}

/// The rules of a member in seccompiler's format, one call each.
fn rules(table: &str, filter: &Value, member: &str, arch: &str) -> Vec<Value> {
    let mut rules = Vec::new();
    let mut unconditional = HashSet::new();
    let mut conditional = HashSet::new();
    for rule in list(filter, member).iter().filter(|rule| is_for(rule, arch)) {
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
    rules
}

/// The calls that a table with `"free"` lets pass; none if it has no such list. Every call that seccompiler knows must be decided.
fn free(table: &str, filter: &Value, arch: &str, target: TargetArch, audit: u32) -> Option<HashSet<u32>> {
    filter.get("free")?;
    let numbers = |member: &str| -> HashSet<u32> {
        let (by_number, by_name): (Vec<_>, Vec<_>) =
            list(filter, member).iter().filter(|rule| is_for(rule, arch)).partition(|rule| rule.get("number").is_some());
        let named = by_name.iter().flat_map(|rule| {
            let comment = comment(rule);
            calls(rule).into_iter().map(move |call| json!({"syscall": call, "comment": comment}))
        });
        // seccompiler knows the number of a name: it is the number that its program allows and that all other programs refuse.
        let only = json!({"mismatch_action": {"errno": 1}, "match_action": "allow"});
        let named: Vec<_> = named.collect();
        let program = compile(table, &only, &named, target);
        let found: HashSet<u32> = (0..CALLS).filter(|call| verdict(&program, audit, *call) == Some(ALLOW)).collect();
        assert_eq!(found.len(), named.len(), "{table}: a call stands twice in `{member}`");
        found.into_iter().chain(by_number.into_iter().map(|rule| number(rule, "number"))).collect()
    };
    let (free, absent) = (numbers("free"), numbers("absent"));
    let head = list(filter, "head").iter().filter(|rule| is_for(rule, arch)).map(|rule| number(rule, "number"));
    let plain = json!({"mismatch_action": "allow", "match_action": {"errno": 1}});
    let ruled = compile(table, &plain, &rules(table, filter, "filter", arch), target);
    let ruled: HashSet<u32> = (0..CALLS).filter(|call| verdict(&ruled, audit, *call) != Some(ALLOW)).chain(head).collect();
    assert!(free.is_disjoint(&absent) && ruled.is_disjoint(&absent), "{table}: a call stands in `absent` and elsewhere");
    let known = |call: &u32| free.contains(call) || absent.contains(call) || ruled.contains(call);
    let undecided: Vec<u32> = (FIRST_NEW..=NEWEST).filter(|call| !known(call)).collect();
    assert!(undecided.is_empty(), "{table} for {arch}: calls {undecided:?} are not decided");
    Some(free)
}

fn compile(table: &str, filter: &Value, rules: &[Value], target: TargetArch) -> Vec<sock_filter> {
    let plain = json!({ table: {
        "mismatch_action": filter["mismatch_action"],
        "match_action": filter["match_action"],
        "filter": rules,
    }});
    let mut programs =
        seccompiler::compile_from_json(plain.to_string().as_bytes(), target).unwrap_or_else(|error| panic!("{table}: {error}"));
    programs.remove(table).expect("compiled under its name")
}

/// Classic BPF, `linux/bpf_common.h`: load a word of the call, jumps, return.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const EQUAL: u16 = 0x15;
const AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Offsets in `struct seccomp_data` of `linux/seccomp.h`.
const OFFSET_OF_CALL: u32 = 0;
const OFFSET_OF_ARCHITECTURE: u32 = 4;

/// `SECCOMP_RET_ERRNO` and `SECCOMP_RET_ALLOW`.
const ERRNO: u32 = 0x0005_0000;
const ALLOW: u32 = 0x7fff_0000;

/// The error of a kernel that lacks a call.
const ENOSYS: u32 = 38;

const FIRST_X32_CALL: u32 = 0x4000_0000;

/// No call has this number or a higher one; Linux 6.18 has less than 500.
const CALLS: u32 = 1024;

/// The newest call that the tables were written for: `file_setattr`, Linux 6.17 and 6.18. Later calls are undecided, so a program
/// sees a kernel without them. Raise this once every call up to the new number is decided in every table.
const NEWEST: u32 = 469;

/// From this number on all architectures give the same numbers to the same calls (Linux 5.1).
const FIRST_NEW: u32 = 424;

fn instruction(code: u16, jt: usize, jf: usize, k: u32) -> sock_filter {
    let near = |jump: usize| u8::try_from(jump).expect("a jump is short");
    sock_filter { code, jt: near(jt), jf: near(jf), k }
}

/// Returns an error for the calls of the head, and for x32 calls; falls through otherwise. The number of the call is loaded.
fn head(filter: &Value, arch: &str) -> Vec<sock_filter> {
    let mut checks = Vec::new();
    if arch == "x86_64" {
        // x32 calls have other numbers for the calls that the tables name. No program needs them; a kernel without them says
        // ENOSYS.
        checks.push(instruction(AT_LEAST, 0, 1, FIRST_X32_CALL));
        checks.push(instruction(RETURN, 0, 0, ERRNO | ENOSYS));
    }
    for rule in list(filter, "head").iter().filter(|rule| is_for(rule, arch)) {
        comment(rule);
        checks.push(instruction(EQUAL, 0, 1, number(rule, "number")));
        checks.push(instruction(RETURN, 0, 0, ERRNO | number(rule, "errno")));
    }
    checks
}

fn is_in_head(filter: &Value, arch: &str, call: u32) -> bool {
    list(filter, "head").iter().any(|rule| is_for(rule, arch) && number(rule, "number") == call)
}

fn number(rule: &Value, member: &str) -> u32 {
    let number = rule[member].as_u64().unwrap_or_else(|| panic!("`{member}` in {rule}"));
    u32::try_from(number).expect("fits")
}

/// What a program answers to a call by its number alone; none if it looks at arguments.
fn verdict(program: &[sock_filter], audit: u32, call: u32) -> Option<u32> {
    let (mut at, mut loaded) = (0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at];
        at += 1;
        let mut jump = |condition| at += usize::from(if condition { jt } else { jf });
        match code {
            LOAD if k == OFFSET_OF_CALL => loaded = call,
            LOAD if k == OFFSET_OF_ARCHITECTURE => loaded = audit,
            LOAD => return None,
            JUMP => at += k as usize,
            EQUAL => jump(loaded == k),
            AT_LEAST => jump(loaded >= k),
            RETURN => return Some(k),
            other => panic!("seccompiler wrote instruction {other:#x}"),
        }
    }
}

/// Where the verdict changes, from call 0 up to all above.
fn verdicts(decide: impl Fn(u32) -> Option<u32>) -> Vec<(u32, Option<u32>)> {
    let mut ranges: Vec<(u32, Option<u32>)> = Vec::new();
    for call in 0..CALLS {
        let verdict = decide(call);
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((call, verdict));
        }
    }
    ranges
}

/// Head, tree and rest. Of a foreign architecture the rest alone decides, which ends it with SIGSYS.
fn program(audit: u32, head: Vec<sock_filter>, ranges: &[(u32, Option<u32>)], rest: Vec<sock_filter>) -> Vec<sock_filter> {
    let mut checks = [vec![instruction(LOAD, 0, 0, OFFSET_OF_CALL)], head, tree(ranges)].concat();
    let length = checks.len();
    for (at, check) in checks.iter_mut().enumerate() {
        // What the tree leaves open.
        if check.code == JUMP {
            check.k = u32::try_from(length - at - 1).expect("a program is short");
        }
    }
    let over = u32::try_from(length).expect("a program is short");
    let begin = [instruction(LOAD, 0, 0, OFFSET_OF_ARCHITECTURE), instruction(EQUAL, 1, 0, audit), instruction(JUMP, 0, 0, over)];
    [begin.to_vec(), checks, rest].concat()
}

/// Finds the range of a loaded number. Jumps lead nowhere yet.
fn tree(ranges: &[(u32, Option<u32>)]) -> Vec<sock_filter> {
    match ranges {
        [] => Vec::new(),
        [(_, Some(verdict))] => vec![instruction(RETURN, 0, 0, *verdict)],
        [(_, None)] => vec![instruction(JUMP, 0, 0, 0)],
        _several => {
            let (below, above) = ranges.split_at(ranges.len() / 2);
            let left = tree(below);
            let choice = instruction(AT_LEAST, left.len(), 0, above[0].0);
            [vec![choice], left, tree(above)].concat()
        }
    }
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

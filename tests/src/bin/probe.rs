//! The attacker: `portcullis-probe ACT PLACE` does one act and says what came of it, `ok` or the name of the error.
//!
//! The acts are those of the sandbox's own tests, which confine themselves; here the real gateway starts it under a policy.

#![expect(clippy::print_stdout, reason = "a program of the tests")]

#[path = "../../../sandbox/tests/kernel/acts.rs"]
mod acts;
#[path = "../../../sandbox/tests/kernel/sys.rs"]
#[expect(unsafe_code, reason = "acts that no safe call can do: system calls by number, of foreign and of new kinds")]
mod sys;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [act, place] = &arguments[..] else { panic!("usage: portcullis-probe ACT PLACE") };
    println!("{}", acts::outcome(act, place));
}

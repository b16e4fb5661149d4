//! The attacker: `portcullis-probe ACT WORDS…` does one act and prints its result, `ok` or the name of the error.
//!
//! The acts of one place are those of the sandbox's own tests, which confine themselves; here the real gateway starts them under a
//! policy. `probe/words.rs` has those of more words, for the rows of `tests/attacks`.

#![expect(clippy::print_stdout, reason = "a program of the tests")]

#[path = "../../../sandbox/tests/kernel/acts.rs"]
mod acts;
#[path = "probe/sys.rs"]
#[expect(unsafe_code, reason = "any system call, with any arguments")]
mod raw;
#[path = "../../../sandbox/tests/kernel/sys.rs"]
#[expect(unsafe_code, reason = "acts that no safe call can do: system calls by number, of foreign and of new kinds")]
mod sys;
#[path = "probe/words.rs"]
mod words;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    println!("{}", words::outcome(&words));
}

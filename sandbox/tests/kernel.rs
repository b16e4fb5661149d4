//! What the kernel does under a policy. This program plays three parts: the test, which confines nothing and starts itself
//! anew; the launcher, which confines itself and executes a command; and the attacker, which does one act and says its outcome.
//!
//! Every denied act has a control: the same act without confinement, which must succeed, so that no pass is empty.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test with its own main, which clippy does not take for one")]

mod kernel {
    pub(crate) mod acts;
    pub(crate) mod cases;
    #[expect(unsafe_code, reason = "acts that no safe call can do: system calls by number, of foreign and of new kinds")]
    pub(crate) mod sys;
}

use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::enforce::{self, Choices};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

const WAIVED: Choices = Choices { allow_unprotected: true, tty: false };

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--act", act, place] => {
            println!("{}", kernel::acts::outcome(act, place));
            ExitCode::SUCCESS
        }
        ["--confine", who, policy, act, place] => {
            let policy = Policy::decode(&std::fs::read(policy).expect("the test wrote it")).expect("the test encoded it");
            let roots = match Roots::open(&policy) {
                Ok(roots) => roots,
                Err(error) => return refused(&error),
            };
            let tables = Compiled::new(&policy, |path| roots.resolve(path)).expect("no glob is wrong");
            let enforced = match *who {
                "worker" => enforce::worker(&policy, &roots),
                "process" => enforce::process(&policy, &roots, &tables, None, Choices::default()),
                "terminal" => enforce::process(&policy, &roots, &tables, None, Choices { tty: true, ..Choices::default() }),
                "waived" => enforce::process(&policy, &roots, &tables, None, WAIVED),
                "threaded" => {
                    let (_keep, wait) = std::sync::mpsc::channel::<()>();
                    std::thread::spawn(move || wait.recv());
                    enforce::process(&policy, &roots, &tables, None, WAIVED)
                }
                other => panic!("{other}"),
            };
            match enforced {
                Err(error) => refused(&error),
                Ok(enforced) if *act == "report" => {
                    println!("{} {} [{}]", enforced.landlock_abi, enforced.seccomp.join(","), enforced.missing.join(","));
                    ExitCode::SUCCESS
                }
                Ok(_) if *who == "worker" => {
                    println!("{}", kernel::acts::outcome(act, place));
                    ExitCode::SUCCESS
                }
                // A program, so that what execve keeps and drops is part of the test.
                Ok(_) => match act.strip_prefix("run:") {
                    Some(program) => failed(&Command::new(program).args(["-c", place]).exec()),
                    None => failed(&Command::new("/proc/self/exe").args(["--act", act, place]).exec()),
                },
            }
        }
        // `cargo nextest` lists and runs tests by these arguments; `cargo test` gives filters.
        args => kernel::cases::run(args),
    }
}

fn refused(error: &dyn std::error::Error) -> ExitCode {
    println!("refused: {error}");
    ExitCode::SUCCESS
}

fn failed(error: &std::io::Error) -> ExitCode {
    println!("exec: {error}");
    ExitCode::FAILURE
}

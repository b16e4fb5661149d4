//! A client's program, found and executed as execvp(3) does.

use crate::launch::{failed, system};
use crate::sys;
use crate::walk::{Stop, walk};
use portcullis_protocol::helper::{Command, Step, StepFailed};
use portcullis_protocol::path::Bytes;
use rustix::io::Errno;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the C library searches when the environment has no PATH.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// Runs a file that has no `#!` line and is not a program, as `execvp` does.
const SHELL: &str = "/bin/sh";

/// Bound of interpreters of interpreters, above the kernel's (`exec_binprm`: five).
const MAX_INTERPRETERS: usize = 8;

/// As much of a `#!` line as the kernel reads (`BINPRM_BUF_SIZE`).
const MAX_LINE: usize = 256;

/// How much of a program is read at first: its program headers lie there.
const HEAD: usize = 1024;

/// A command line in the form that `execve` takes.
pub(crate) struct Program {
    pub(crate) name: Vec<u8>,
    argv: Vec<CString>,
    env: Vec<CString>,
    search: Vec<u8>,
    /// Whether a way through a magic link is refused.
    is_confined: bool,
}

/// Why a file was not executed.
enum Unexecuted {
    System(io::Error),
    Refused(StepFailed),
}

impl Program {
    pub(crate) fn new(command: &Command, is_confined: bool) -> Result<Self, StepFailed> {
        let name = match command.argv.first() {
            Some(Bytes(name)) if !name.is_empty() => name.clone(),
            _empty => return Err(failed(Step::Execute, "missing program", None)),
        };
        // The gateway refuses NUL bytes with the texts that clients know; this is the same check where it matters.
        let text = |bytes: &[u8]| {
            CString::new(bytes).map_err(|_nul| failed(Step::Execute, "nul byte found in provided data", Some(Errno::INVAL)))
        };
        let mut argv = command.argv.iter().map(|Bytes(argument)| text(argument)).collect::<Result<Vec<_>, _>>()?;
        if let Some(Bytes(arg0)) = &command.arg0 {
            argv[0] = text(arg0)?;
        }
        let pair = |(Bytes(name), Bytes(value)): &(Bytes, Bytes)| text(&[name, b"=".as_slice(), value].concat());
        let env = command.env.iter().map(pair).collect::<Result<_, _>>()?;
        let search = command.env.iter().find(|(Bytes(name), _)| name == b"PATH");
        let search = search.map_or(DEFAULT_PATH, |(_, Bytes(value))| value).to_vec();
        Ok(Self { name, argv, env, search, is_confined })
    }

    /// Executes the program, found as `execvp` finds it. Returns only with a failure.
    pub(crate) fn execute(&self) -> StepFailed {
        if self.name.contains(&b'/') {
            return self.failure(self.try_file(&self.name));
        }
        let mut denied = None;
        for folder in self.search.split(|byte| *byte == b':') {
            // An empty folder means the working directory.
            let file = if folder.is_empty() { self.name.clone() } else { [folder, b"/", &self.name].concat() };
            let reason = self.try_file(&file);
            let errno = match &reason {
                Unexecuted::System(error) => error.raw_os_error(),
                Unexecuted::Refused(_) => None,
            };
            match errno {
                // Not here; maybe in the next one.
                Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT) => {}
                // A later folder may have one that may be executed; if none does, this is the answer.
                Some(libc::EACCES) => denied = Some(reason),
                _final => return self.failure(reason),
            }
        }
        self.failure(denied.unwrap_or_else(|| Unexecuted::System(io::Error::from_raw_os_error(libc::ENOENT))))
    }

    fn try_file(&self, file: &[u8]) -> Unexecuted {
        let Ok(path) = CString::new(file) else {
            return Unexecuted::System(io::Error::from_raw_os_error(libc::EINVAL));
        };
        if self.is_confined
            && let Err(refused) = self.refuse_magic(file)
        {
            return Unexecuted::Refused(refused);
        }
        let error = sys::execve(&path, &self.argv, &self.env);
        if error.raw_os_error() != Some(libc::ENOEXEC) {
            return Unexecuted::System(error);
        }
        // A script without a `#!` line: the shell is to read it.
        let Ok(shell) = CString::new(SHELL) else {
            return Unexecuted::System(error);
        };
        let argv: Vec<CString> = [shell.clone(), path].into_iter().chain(self.argv.iter().skip(1).cloned()).collect();
        Unexecuted::System(sys::execve(&shell, &argv, &self.env))
    }

    /// Refuses a file that is found through a magic link, or that asks for an interpreter that is. A file that cannot be examined
    /// is left to the kernel, which refuses it.
    fn refuse_magic(&self, file: &[u8]) -> Result<(), StepFailed> {
        let mut file = file.to_vec();
        for nth in 0..MAX_INTERPRETERS {
            match walk(&file) {
                Ok(reached) => match reached.read().and_then(|file| interpreter(&File::from(file))) {
                    Some(interpreter) => file = interpreter,
                    None => return Ok(()),
                },
                Err(Stop::System(_)) => return Ok(()),
                Err(Stop::Magic(link)) => {
                    let through = if nth == 0 { "it" } else { "its interpreter" };
                    let attempt = format!(
                        "{}: {through} is reached through `{}`, a magic link of procfs; name the file by its real path",
                        self.attempt(),
                        link.display()
                    );
                    return Err(failed(Step::Enforce, &attempt, None));
                }
            }
        }
        Ok(())
    }

    fn attempt(&self) -> String {
        format!("start `{}`", Path::new(OsStr::from_bytes(&self.name)).display())
    }

    fn failure(&self, reason: Unexecuted) -> StepFailed {
        match reason {
            Unexecuted::System(error) => system(Step::Execute, &self.attempt())(error),
            Unexecuted::Refused(failure) => failure,
        }
    }
}

/// The program that the kernel would run a file with, by its `#!` line or its header of ELF.
fn interpreter(file: &File) -> Option<Vec<u8>> {
    let mut head = [0; HEAD];
    let length = file.read_at(&mut head, 0).ok()?;
    let head = head.get(..length)?;
    match head.strip_prefix(b"#!") {
        Some(line) => of_line(&line[..line.len().min(MAX_LINE - 2)]),
        None => of_elf(head, file),
    }
}

/// The first word of a `#!` line (`load_script` of `fs/binfmt_script.c`).
fn of_line(line: &[u8]) -> Option<Vec<u8>> {
    let line = line.split(|byte| matches!(byte, b'\n' | 0)).next()?;
    let word = line.split(|byte| matches!(byte, b' ' | b'\t')).find(|word| !word.is_empty())?;
    Some(word.to_vec())
}

/// The path in the segment `PT_INTERP` (elf(5)), of a program of 64 or 32 bits in this machine's byte order.
fn of_elf(head: &[u8], file: &File) -> Option<Vec<u8>> {
    /// Fields by offset: of the header the table of segments, the size of an entry and their count; of an entry the offset in the
    /// file and the size there. And the width of the first and the last two.
    struct Layout {
        table: usize,
        entry: usize,
        count: usize,
        offset: usize,
        size: usize,
        width: usize,
    }
    const INTERPRETER: u64 = 3;
    let layout = match head.get(..5)? {
        b"\x7fELF\x02" => Layout { table: 32, entry: 54, count: 56, offset: 8, size: 32, width: 8 },
        b"\x7fELF\x01" => Layout { table: 28, entry: 42, count: 44, offset: 4, size: 16, width: 4 },
        _other => return None,
    };
    let number = |bytes: &[u8], at: usize, width: usize| -> Option<u64> {
        let mut all = [0; 8];
        all.get_mut(..width)?.copy_from_slice(bytes.get(at..at.checked_add(width)?)?);
        Some(u64::from_le_bytes(all))
    };
    let (table, entry, count) =
        (number(head, layout.table, layout.width)?, number(head, layout.entry, 2)?, number(head, layout.count, 2)?);
    for nth in 0..count {
        let at = table.checked_add(nth.checked_mul(entry)?)?;
        let mut segment = [0; 56];
        // Nearly always it was read already.
        match usize::try_from(at).ok().and_then(|at| head.get(at..at.checked_add(segment.len())?)) {
            Some(read) => segment.copy_from_slice(read),
            None => drop(file.read_at(&mut segment, at).ok().filter(|length| *length > 0)?),
        }
        if number(&segment, 0, 4)? == INTERPRETER {
            let (offset, size) = (number(&segment, layout.offset, layout.width)?, number(&segment, layout.size, layout.width)?);
            // The kernel takes no longer path.
            let mut path = vec![0; usize::try_from(size).ok()?.min(4096)];
            let length = file.read_at(&mut path, offset).ok()?;
            path.truncate(length);
            let end = path.iter().position(|byte| *byte == 0).unwrap_or(length);
            path.truncate(end);
            return Some(path);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn interpreters_are_found_as_the_kernel_finds_them() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        let of = |content: &[u8]| {
            fs::write(&file, content).unwrap();
            interpreter(&File::open(&file).unwrap()).map(|path| String::from_utf8(path).unwrap())
        };
        for (content, expect) in [
            (&b"#!/bin/sh\n"[..], Some("/bin/sh")),
            (b"#! \t/usr/bin/env  python3\nrest", Some("/usr/bin/env")),
            (b"#!relative", Some("relative")),
            (b"#!\n/bin/sh", None),
            (b"", None),
            (b"text", None),
            (b"\x7fELF\x02", None),
        ] {
            assert_eq!(of(content).as_deref(), expect, "{content:?}");
        }
        let found = interpreter(&File::open("/proc/self/exe").unwrap()).unwrap();
        assert!(found.starts_with(b"/") && found.windows(3).any(|part| part == b"ld-"), "{}", found.escape_ascii());
    }
}

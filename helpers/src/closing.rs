//! Closing descriptors before a role uses data of a client: only the standard ones and those on its list stay open.
//!
//! A descriptor of the server leads past every mount and every Landlock rule: through the descriptor of a policy root, for example,
//! `/proc/self/fd/N` leads beneath the covers of the view. So a role closes all descriptors except those on a list, and then checks
//! the kernel's list of open descriptors.

use crate::launch::{failed, machine, system};
use crate::sys;
use portcullis_protocol::helper::{Step, StepFailed};
use rustix::fs::{CWD, Mode, OFlags, RawDir, fstat, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The first descriptor after the standard ones.
const FIRST: RawFd = 3;

/// The buffer size for reading some directory entries at once.
const BUFFER: usize = 1024;

/// The maximum number of descriptors passed to poll(2), with eight bytes for each.
const MAX_POLLED: u64 = 1 << 20;

/// Closes every descriptor except the standard ones and `kept`, and verifies the result.
pub(crate) fn close_all_but(kept: &[RawFd]) -> Result<(), StepFailed> {
    Witness::open()?.close_all_but(kept)
}

/// The kernel's list of this process's descriptors. It is opened before the process is confined: afterwards the policy may not let
/// it open `/proc`. In a view whose policy denies `/proc` there is no list; there poll(2) finds the open descriptors.
#[derive(Debug)]
pub(crate) struct Witness {
    list: Option<OwnedFd>,
}

impl Witness {
    pub(crate) fn open() -> Result<Self, StepFailed> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(CWD, "/proc/self/fd", flags, Mode::empty()) {
            Ok(list) => Ok(Self { list: Some(list) }),
            Err(Errno::NOENT | Errno::ACCESS) => Ok(Self { list: None }),
            Err(errno) => Err(machine("list the open descriptors in /proc/self/fd")(errno)),
        }
    }

    /// Does the same as the function of this name. The list itself is closed as well.
    pub(crate) fn close_all_but(self, kept: &[RawFd]) -> Result<(), StepFailed> {
        let fail = || system(Step::Machine, "close the descriptors of the server");
        let all = kept.iter().copied().chain(self.list.as_ref().map(AsRawFd::as_raw_fd));
        let mut all: Vec<u32> = all.filter_map(|number| u32::try_from(number).ok()).collect();
        all.sort_unstable();
        let mut from = FIRST.unsigned_abs();
        for number in all.into_iter().filter(|number| *number >= FIRST.unsigned_abs()) {
            sys::close_range(from, number.saturating_sub(1)).map_err(fail())?;
            from = number.saturating_add(1);
        }
        sys::close_range(from, u32::MAX).map_err(fail())?;
        self.make_sure(kept)
    }

    /// Fails if a descriptor is open that is neither a standard one nor in `kept`.
    fn make_sure(self, kept: &[RawFd]) -> Result<(), StepFailed> {
        let Some(list) = &self.list else { return make_sure_by_poll(kept) };
        if has_only(list, kept) {
            return Ok(());
        }
        let fail = |errno| failed(Step::Machine, "list the open descriptors in /proc/self/fd", Some(errno));
        let mut space = [MaybeUninit::uninit(); BUFFER];
        let mut entries = RawDir::new(list, &mut space);
        while let Some(entry) = entries.next() {
            let name = entry.map_err(fail)?.file_name().to_owned();
            let number = match name.to_bytes() {
                b"." | b".." => continue,
                bytes => {
                    str::from_utf8(bytes).ok().and_then(|text| text.parse::<RawFd>().ok()).ok_or_else(|| fail(Errno::PROTO))?
                }
            };
            if number >= FIRST && number != list.as_raw_fd() && !kept.contains(&number) {
                let target = readlinkat(list, &name, Vec::new()).unwrap_or_default();
                return Err(left_open(number, &target.to_string_lossy()));
            }
        }
        Ok(())
    }
}

/// Whether the kernel counts as many descriptors as the standard ones, `kept` and the list itself, all of which are open. Since
/// Linux 6.2 the size of `/proc/PID/fd` is that count (proc_pid_fd(5)); before, it is 0. Listing the names instead would make a
/// procfs inode for each. If the count is wrong, the names decide.
fn has_only(list: &OwnedFd, kept: &[RawFd]) -> bool {
    let mut expected: Vec<RawFd> = (0..FIRST).chain(kept.iter().copied()).chain([list.as_raw_fd()]).collect();
    expected.sort_unstable();
    expected.dedup();
    let count = fstat(list).ok().and_then(|stat| usize::try_from(stat.st_size).ok());
    count == Some(expected.len()) && expected.into_iter().all(sys::is_open)
}

/// Checks the same without a list: poll(2) reports `POLLNVAL` for each closed descriptor. It accepts as many descriptors as the
/// process may have open.
fn make_sure_by_poll(kept: &[RawFd]) -> Result<(), StepFailed> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let end = RawFd::try_from(limit.min(MAX_POLLED)).unwrap_or(RawFd::MAX);
    match sys::first_open(FIRST, end, kept).map_err(system(Step::Machine, "look for open descriptors"))? {
        Some(number) => Err(left_open(number, "unknown")),
        None => Ok(()),
    }
}

fn left_open(number: RawFd, target: &str) -> StepFailed {
    let attempt = format!(
        "start: descriptor {number} of the server (`{target}`) is open before the client's command is decoded; report this defect"
    );
    failed(Step::Machine, &attempt, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Fork;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::fs::File;
    use std::io::{Read as _, Write as _};

    /// Runs a function in a child, whose descriptors may be closed, and returns its result.
    fn in_child(act: impl FnOnce(RawFd) -> Result<(), StepFailed>) -> String {
        let (answers, pen) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        match sys::fork().unwrap() {
            Fork::Child => {
                let answer = act(pen.as_raw_fd()).map_or_else(|failure| failure.to_string(), |()| "closed".to_owned());
                let _unread = File::from(pen).write_all(answer.as_bytes());
                sys::end(0)
            }
            Fork::Parent(child) => {
                drop(pen);
                let mut answer = String::new();
                File::from(answers).read_to_string(&mut answer).unwrap();
                sys::wait_for(child);
                answer
            }
        }
    }

    /// Opens `/etc/passwd` under numbers below and above all others.
    fn plant() {
        let file = std::mem::ManuallyDrop::new(File::open("/etc/passwd").unwrap());
        for number in [200, 201, 999] {
            sys::place(file.as_raw_fd(), number).unwrap();
        }
    }

    #[test]
    fn only_the_list_survives_at_low_and_high_numbers() {
        let answer = in_child(|pen| {
            plant();
            close_all_but(&[pen, 201])?;
            // A cross-check: the same call reports a descriptor that stayed open.
            Witness::open()?.make_sure(&[pen])
        });
        assert!(answer.starts_with("start: descriptor 201 of the server (`/etc/passwd`) is open"), "{answer}");
        let answer = in_child(|pen| {
            plant();
            close_all_but(&[pen])?;
            Witness::open()?.make_sure(&[pen])
        });
        assert_eq!(answer, "closed");
    }

    #[test]
    fn open_descriptors_are_found_without_proc() {
        let answer = in_child(|pen| {
            plant();
            close_all_but(&[pen, 201])?;
            make_sure_by_poll(&[pen, 201])?;
            make_sure_by_poll(&[pen])
        });
        assert!(answer.starts_with("start: descriptor 201 of the server"), "{answer}");
    }

    #[test]
    fn a_descriptor_that_is_opened_after_closing_is_named() {
        let answer = in_child(|pen| {
            close_all_but(&[pen])?;
            sys::place(std::mem::ManuallyDrop::new(File::open("/etc/passwd").unwrap()).as_raw_fd(), 77).unwrap();
            Witness::open()?.make_sure(&[pen, FIRST])
        });
        assert!(answer.contains("descriptor ") && answer.contains("(`/etc/passwd`) is open"), "{answer}");
    }
}

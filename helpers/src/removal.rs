//! Removing mount points from the machine, in a child of the remover: on a file system that hangs it must not hold up everybody.

use crate::closing;
use crate::dispatch::complain;
use crate::keeper::EXIT_FAILED;
use crate::remover::Token;
use crate::sys::{self, Fork};
use portcullis_sandbox::mounts::{self, RecordsAt};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

/// By then init has closed its end of what told of covers, so that the child's is the last.
const UNTIL_LAST: Duration = Duration::from_millis(100);

/// What a child removes.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    pub(crate) points: Vec<PathBuf>,
    /// Everything that is recorded and not in use.
    pub(crate) all_left: bool,
    /// Says when the names are gone, before the child ends, and ends without a word if somebody kills the child; none once it has.
    pub(crate) done: Option<OwnedFd>,
    /// The names are gone.
    pub(crate) is_done: bool,
    /// Children that were killed over it.
    pub(crate) killed: u32,
    /// Which sandbox's end waits for it, until that is told.
    pub(crate) token: Option<Token>,
}

impl Removal {
    /// Removes in a child, which then closes `watch` last of all: that takes the kernel some ten milliseconds.
    pub(crate) fn begin(self, records: Option<&RecordsAt>, watch: Option<OwnedFd>) -> std::io::Result<(Pid, Self)> {
        let (done, pen) = pipe_with(PipeFlags::CLOEXEC)?;
        match sys::fork()? {
            Fork::Child => {
                // Above all the sockets of inits, of which these would be other ends.
                let kept: Vec<RawFd> = watch.iter().chain([&pen]).map(AsRawFd::as_raw_fd).collect();
                if let Err(failure) = closing::close_all_but(&kept) {
                    complain(format_args!("remove mount points: {failure}"));
                    sys::end(EXIT_FAILED)
                }
                let records = records.and_then(|records| records.open().ok());
                // To close what was removed takes the file system as long as to remove it.
                let removed: Vec<_> = records
                    .iter()
                    .flat_map(|records| self.points.iter().rev().map(move |point| mounts::remove(point, records)))
                    .collect();
                if self.all_left {
                    records.iter().for_each(mounts::remove_left);
                }
                let _gone = rustix::io::write(&pen, b"g");
                if watch.is_some() {
                    std::thread::sleep(UNTIL_LAST);
                }
                drop((removed, watch, pen));
                sys::end(0)
            }
            Fork::Parent(pid) => Ok((pid, Self { done: Some(done), ..self })),
        }
    }

    /// Takes what the child said, once it has or has ended. What to stop waiting for, the first time.
    pub(crate) fn hear(&mut self) -> Option<OwnedFd> {
        let done = self.done.take()?;
        self.is_done = matches!(rustix::io::read(&done, &mut [0; 1][..]), Ok(1));
        Some(done)
    }
}

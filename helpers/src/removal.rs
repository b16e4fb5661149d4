//! Removing mount points from the machine, in a child of the spawner: on a file system that hangs it must not hold up everybody.

use crate::closing;
use crate::dispatch::complain;
use crate::keeper::EXIT_FAILED;
use crate::sys::{self, Fork};
use crate::tether::Outcome;
use portcullis_sandbox::mounts;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

/// By then init has closed its end of what told of covers, so that the child's is the last.
const UNTIL_LAST: Duration = Duration::from_millis(100);

/// What a child removes.
#[derive(Debug)]
pub(crate) struct Removal {
    pub(crate) points: Vec<PathBuf>,
    /// Says when the names are gone, before the child ends, and ends without a word if somebody kills the child; none once it has.
    pub(crate) done: Option<OwnedFd>,
    /// The names are gone.
    pub(crate) is_done: bool,
    /// Children that were killed over it.
    pub(crate) killed: u32,
    /// Whose end has not been told because of it; none if that is not known yet, or there is nobody.
    pub(crate) then: Option<(u64, Outcome)>,
    /// The keeper that used them, as long as it was not reaped.
    pub(crate) keeper: Option<Pid>,
}

impl Removal {
    /// Removes `points` in a child, which then closes `watch` last of all: that takes the kernel some ten milliseconds. The child
    /// has no [`Name`](crate::children::Name). Gives both back if there can be no child.
    pub(crate) fn begin(
        points: Vec<PathBuf>,
        watch: Option<OwnedFd>,
        keeper: Option<Pid>,
    ) -> Result<(Pid, Self), (Vec<PathBuf>, Option<OwnedFd>)> {
        let Ok((done, pen)) = pipe_with(PipeFlags::CLOEXEC) else { return Err((points, watch)) };
        match sys::fork() {
            Ok(Fork::Child) => {
                // Above all the gateway's socket, of which this would be another end.
                let kept: Vec<RawFd> = watch.iter().chain([&pen]).map(AsRawFd::as_raw_fd).collect();
                if let Err(failure) = closing::close_all_but(&kept) {
                    complain(format_args!("remove mount points: {failure}"));
                    sys::end(EXIT_FAILED)
                }
                // To close what was removed takes the file system as long as to remove it.
                let removed: Vec<_> = points.iter().rev().map(|point| mounts::remove(point)).collect();
                let _gone = rustix::io::write(&pen, b"g");
                if watch.is_some() {
                    std::thread::sleep(UNTIL_LAST);
                }
                drop((removed, watch, pen));
                sys::end(0)
            }
            Ok(Fork::Parent(pid)) => Ok((pid, Self { points, done: Some(done), is_done: false, killed: 0, then: None, keeper })),
            Err(_no_child) => Err((points, watch)),
        }
    }

    /// Takes what the child said, once it has or has ended. What to stop waiting for, the first time.
    pub(crate) fn hear(&mut self) -> Option<OwnedFd> {
        let done = self.done.take()?;
        self.is_done = matches!(rustix::io::read(&done, &mut [0; 1][..]), Ok(1));
        Some(done)
    }
}

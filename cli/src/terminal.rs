//! The terminal that this program was started on.

use crate::Failure;
use portcullis::protocol::process::Size;
use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::num::NonZeroU16;

/// Refuses unless standard input and output are a terminal.
pub(crate) fn require() -> Result<(), Failure> {
    for (descriptor, name) in [(stdin(), "standard input"), (stdout(), "standard output")] {
        if !isatty(descriptor) {
            return Err(format!("--tty: {name} is not a terminal; leave --tty out").into());
        }
    }
    Ok(())
}

/// Its size, if it has one.
pub(crate) fn size() -> Option<Size> {
    let size = tcgetwinsize(stdout()).ok()?;
    Some(Size { rows: NonZeroU16::new(size.ws_row)?, cols: NonZeroU16::new(size.ws_col)? })
}

/// While it lives each key goes to who reads, as it is, Ctrl-C too. Dropping it makes the terminal what it was.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    pub(crate) fn begin() -> Result<Self, Failure> {
        let failed = |errno| format!("--tty: pass keys on as they are typed: {errno}");
        let before = tcgetattr(stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let _gone = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

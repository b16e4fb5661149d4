//! Terminals. No path that a client named is opened: the child's side comes from the master itself.

use portcullis_protocol::process::Size;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Result;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::os::fd::OwnedFd;

/// The size that clients of this wire count on if they say none.
const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };

/// Both sides of a new terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    /// Ours, which never blocks.
    pub(crate) master: OwnedFd,
    /// The child's.
    pub(crate) peer: OwnedFd,
}

impl Terminal {
    /// A terminal of 24 rows and 80 columns, if nothing else is said.
    pub(crate) fn open(size: Option<Size>) -> Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let peer = ioctl_tiocgptpeer(&master, flags)?;
        tcsetwinsize(&master, size.map_or(SIZE, winsize))?;
        fcntl_setfl(&master, OFlags::RDWR | OFlags::NONBLOCK)?;
        Ok(Self { master, peer })
    }
}

/// Changes the size of a terminal; the kernel tells those in its foreground with SIGWINCH.
pub(crate) fn resize(master: &OwnedFd, size: Size) -> Result<()> {
    tcsetwinsize(master, winsize(size))
}

fn winsize(Size { rows, cols }: Size) -> Winsize {
    Winsize { ws_row: rows.get(), ws_col: cols.get(), ..SIZE }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{Errno, FdFlags, fcntl_getfd, read, write};
    use rustix::termios::tcgetwinsize;

    #[test]
    fn a_terminal_has_two_ends_and_a_size() {
        let Terminal { master, peer } = Terminal::open(None).unwrap();
        assert!(rustix::termios::isatty(&peer));
        let size = tcgetwinsize(&peer).unwrap();
        assert_eq!((size.ws_row, size.ws_col), (24, 80));
        for end in [&master, &peer] {
            assert!(fcntl_getfd(end).unwrap().contains(FdFlags::CLOEXEC));
        }
        let mut bytes = [0; 16];
        assert_eq!(read(&master, &mut bytes), Err(Errno::AGAIN));
        write(&peer, b"hi\n").unwrap();
        let length = read(&master, &mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"hi\r\n");
        drop(peer);
        assert_eq!(read(&master, &mut bytes), Err(Errno::IO), "the end of a terminal is an error");
    }
}

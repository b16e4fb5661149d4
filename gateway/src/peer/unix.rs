//! Whose connection over a unix socket it is. The kernel says who called `connect(2)`; but a process may have ended since, and its
//! number be another's, and it may have handed the socket on. So whoever holds the other end now is asked about too, and neither
//! may be the gateway's own descendant.

use super::{PeerError, diag, holder};
use rustix::fs::fstat;
use std::io;
use std::os::unix::net::UnixStream;

/// Whether the connection may be served whose accepted socket has this number, and which this process of this user made; or the
/// number of the socket whose holders have to be known for that.
pub(super) fn question(
    inode: u64,
    uid: u32,
    pid: Option<u32>,
    ancestors: impl Fn() -> Vec<u32>,
) -> Result<Option<u32>, PeerError> {
    let own = rustix::process::geteuid().as_raw();
    if uid != own && uid != 0 {
        return Err(PeerError::Stranger { caller: uid, own });
    }
    // Nothing that the gateway confines is ever of another user than its own.
    if uid != own {
        return Ok(None);
    }
    let nobody = |text: &str| PeerError::Nobody(text.to_owned());
    let unknown = |text: &'static str| move |error: io::Error| PeerError::Nobody(format!("{text}: {error}"));
    let pid = pid.filter(|pid| *pid != 0).ok_or_else(|| nobody("it comes from a process of another pid namespace"))?;
    let caller = holder::by_number(pid).map_err(unknown("/proc"))?;
    let caller = caller.ok_or_else(|| nobody("the process that made it has ended"))?;
    if ancestors().into_iter().any(|ancestor| caller.descends_from(ancestor)) {
        return Err(PeerError::Descendant(pid));
    }
    let other = other_end(inode).map_err(unknown("sock_diag"))?;
    let other = other.ok_or_else(|| nobody("its other end is closed or of another network namespace"))?;
    Ok(Some(other))
}

/// Whether the kernel answers such questions here, by one whose answer is known.
pub(super) fn can_be_told() -> Result<(), String> {
    let asked = || -> io::Result<bool> {
        let (one, other) = UnixStream::pair()?;
        Ok(other_end(fstat(&one)?.st_ino)?.map(u64::from) == Some(fstat(&other)?.st_ino))
    };
    match asked() {
        Ok(true) => holder::look().map_err(|error| format!("/proc: {error}")),
        Ok(false) => Err("sock_diag does not know the ends of a pair of unix sockets".to_owned()),
        Err(error) => Err(format!("sock_diag: {error}")),
    }
}

/// The number of the socket at the other end.
fn other_end(inode: u64) -> io::Result<Option<u32>> {
    // The kernel counts sockets in 32 bits.
    match u32::try_from(inode) {
        Ok(inode) => diag::unix_peer(inode),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No process: nobody descends from it.
    const NOBODY: u32 = u32::MAX;

    fn tell(inode: u64, uid: u32, pid: Option<u32>, spawner: u32) -> Result<(), PeerError> {
        crate::peer::tests::told(question(inode, uid, pid, || vec![spawner])?, spawner, PeerError::Nobody)
    }

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn who_connects_is_known_by_number_and_by_who_holds_the_other_end() {
        let (one, other) = UnixStream::pair().unwrap();
        let (inode, pid) = (fstat(&one).unwrap().st_ino, std::process::id());
        tell(inode, own(), Some(pid), NOBODY).unwrap();
        assert!(matches!(tell(inode, own(), Some(pid), pid), Err(PeerError::Descendant(told)) if told == pid));
        // Somebody else made it, and this process, which descends from itself, holds it.
        let parent = std::os::unix::process::parent_id();
        if parent != 0 {
            assert!(matches!(tell(inode, own(), Some(parent), pid), Err(PeerError::Descendant(told)) if told == pid));
        }
        assert!(matches!(tell(inode, own(), None, NOBODY), Err(PeerError::Nobody(_))));
        assert!(matches!(tell(inode, own() + 1, Some(pid), NOBODY), Err(PeerError::Stranger { .. })));
        drop(other);
        // Another test may just be starting a child, which has a copy of every descriptor until it executes.
        let closed = (0..10_000).any(|_attempt| {
            std::thread::yield_now();
            tell(inode, own(), Some(pid), NOBODY).is_err()
        });
        assert!(closed);
    }

    #[test]
    fn the_question_can_be_asked_here() {
        assert_eq!(can_be_told(), Ok(()));
    }
}

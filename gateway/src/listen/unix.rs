//! A unix socket's place among the files: made, taken over from a server that is gone, and removed.

#![expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]

use super::ListenError;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;

/// Connections that wait for `accept(2)`, as many as tokio has for TCP.
const BACKLOG: i32 = 1024;

/// How long another one that holds the lock of the directory is waited for. A server holds it for some milliseconds while it makes its
/// socket. A stranger, who only has to be able to read the directory, may hold it for ever, and shall not keep a server from starting.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the lock is asked for meanwhile.
const PAUSE: Duration = Duration::from_millis(10);

/// Listens at a path in a directory that exists. Only the server's own user may open the socket (mode 0600 from the first moment
/// on). One that a server left behind which is gone is replaced.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    let failed = |errno: Errno| ListenError::Io { attempt: format!("listen on unix:{}", path.display()), source: errno.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    // Two servers that start at once must not both find the place free, or the one the other's socket.
    let directory = path.parent().unwrap_or_else(|| Path::new("/"));
    let lock = lock(directory, PATIENCE).map_err(|errno| ListenError::Io {
        attempt: format!("lock the directory {}", directory.display()),
        source: errno.into(),
    })?;
    if lock.is_none() {
        tracing::warn!(directory = %directory.display(), "another process keeps the directory locked; starting without the lock");
    }
    if let Some(there) = look(path).map_err(failed)? {
        make_room(path, &there, &address)?;
    }
    let socket = stream(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).map_err(failed)?;
    // The file gets the socket's mode, so there is no moment at which it has another one.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    rustix::net::bind(&socket, &address).map_err(failed)?;
    let held = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let file = SocketFile { path: path.to_owned(), held };
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    let listener = UnixListener::from_std(socket.into());
    let listener =
        listener.map_err(|source| ListenError::Io { attempt: format!("listen on unix:{}", path.display()), source })?;
    Ok((listener, file))
}

/// Removes a socket that nobody serves any more.
fn make_room(path: &Path, there: &Stat, address: &SocketAddrUnix) -> Result<(), ListenError> {
    if FileType::from_raw_mode(there.st_mode) != FileType::Socket {
        return Err(ListenError::NoSocket(path.to_owned()));
    }
    let failed =
        |attempt: &str, errno: Errno| ListenError::Io { attempt: format!("{attempt} {}", path.display()), source: errno.into() };
    let probe = stream(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).map_err(|errno| failed("make a socket for", errno))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            rustix::fs::unlink(path).map_err(|errno| failed("remove the socket of a server that is gone,", errno))
        }
        // It went by itself.
        Err(Errno::NOENT) => Ok(()),
        Ok(()) => {
            let server = rustix::net::sockopt::socket_peercred(&probe).ok();
            Err(ListenError::Served { path: path.to_owned(), server: server.map(|server| server.pid.as_raw_nonzero().get()) })
        }
        // Its line is full.
        Err(Errno::AGAIN) => Err(ListenError::Served { path: path.to_owned(), server: None }),
        Err(errno) => Err(failed("ask whether a server still listens on", errno)),
    }
}

fn stream(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Locks the directory: no other server makes or removes a socket in it while the answer lives. `None` if another process keeps the
/// lock.
fn lock(directory: &Path, patience: Duration) -> rustix::io::Result<Option<OwnedFd>> {
    let directory = rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let until = Instant::now() + patience;
    loop {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(directory)),
            Err(Errno::AGAIN) if Instant::now() >= until => return Ok(None),
            Err(Errno::AGAIN) => std::thread::sleep(PAUSE),
            Err(errno) => return Err(errno),
        }
    }
}

/// What is there, not following a link.
fn look(path: &Path) -> rustix::io::Result<Option<Stat>> {
    match rustix::fs::lstat(path) {
        Ok(there) => Ok(Some(there)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The name of a socket that is served; removed when it is dropped.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Keeps the inode, so that its number cannot be another socket's by then.
    held: OwnedFd,
}

impl Drop for SocketFile {
    /// Removes the name if it still is this server's: somebody else may have taken the place.
    fn drop(&mut self) {
        let own = rustix::fs::statat(self.held.as_fd(), "", AtFlags::EMPTY_PATH);
        if let (Ok(own), Ok(Some(there))) = (own, look(&self.path))
            && (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
        {
            let _gone_already = rustix::fs::unlink(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[tokio::test]
    async fn a_socket_is_its_users_alone_and_goes_with_its_server_but_not_with_another() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("s");
        let (listener, file) = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let served = bind(&path).unwrap_err().to_string();
        assert!(served.contains(&format!("process {}", std::process::id())), "{served}");
        // Its server is gone, the name is not.
        drop(listener);
        let (_newer, newer_file) = bind(&path).unwrap();
        drop(file);
        assert!(path.exists(), "it is another server's");
        drop(newer_file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_is_no_socket_stays() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("s");
        std::fs::write(&path, "kept").unwrap();
        let refused = bind(&path).unwrap_err().to_string();
        assert!(refused.contains("no socket"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(bind(&link).is_err());
    }

    #[tokio::test]
    async fn a_lock_of_a_stranger_on_the_directory_stops_no_server() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("s");
        let held = lock(place.path(), Duration::ZERO).unwrap();
        assert!(held.is_some() && lock(place.path(), Duration::ZERO).unwrap().is_none(), "one at a time");
        let (listener, _file) = bind(&path).unwrap();
        assert!(bind(&path).unwrap_err().to_string().contains("process"), "one that is served is not replaced all the same");
        drop((listener, held));
        assert!(lock(place.path(), Duration::ZERO).unwrap().is_some(), "control: it is free again");
    }
}

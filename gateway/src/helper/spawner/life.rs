//! One life of the spawner helper: its start, and its end.

use super::SpawnerError;
use crate::helper::socket::{FrameReceiver, FrameSender, pair_up, watch_fd};
use crate::metrics::{Metrics, Present};
use portcullis_protocol::helper::{
    BUILD, CgroupLayer, HIDDEN_FLAG, NamespaceLayer, Role, SpawnerEvent, SpawnerRequest, decode, encode,
};
use portcullis_protocol::limit::{DefaultBounds, SessionLimits};
use portcullis_protocol::path::Bytes;
use portcullis_protocol::uids::UidRange;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Child as HelperChild;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long the helper may take to say that it is ready.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may take to end after its socket closed, and again after it was killed. Its children are killed with it.
pub(super) const END_PATIENCE: Duration = Duration::from_millis(1500);

/// The layers that the helper found available at its start.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) namespaces: NamespaceLayer,
    pub(crate) cgroups: CgroupLayer,
}

impl Found {
    /// The first layer that `first` had and this one lacks. Clients were told of the layers of `first`.
    pub(super) fn lacks_of(&self, first: &Self) -> Option<String> {
        let namespaces = match (&first.namespaces, &self.namespaces) {
            (NamespaceLayer::Unavailable { .. }, _) => None,
            (_, NamespaceLayer::Unavailable { reason, .. }) => Some(format!("namespaces ({reason})")),
            (
                NamespaceLayer::Available { user, own_proc, .. },
                NamespaceLayer::Available { user: user_now, own_proc: proc_now, .. },
            ) => (user > user_now || own_proc > proc_now).then(|| "namespaces of the same kind".to_owned()),
        };
        let (before, now) = (&first.cgroups, &self.cgroups);
        let lost = (before.processes && !now.processes) || (before.memory && !now.memory);
        namespaces.or_else(|| lost.then(|| format!("cgroups ({})", now.reason)))
    }
}

/// The file that plays hidden roles: the one that was there at the start, since another one may stand at its path later.
#[derive(Debug)]
pub(super) struct Executable {
    named: PathBuf,
    /// None if it is the one that runs and was removed: `/proc/self/exe` leads to it still. That path is not used otherwise, since a
    /// tool that interprets the program (valgrind) runs itself by it.
    opened: Option<OwnedFd>,
}

impl Executable {
    /// As it is now.
    pub(super) fn open(named: &Path) -> io::Result<Self> {
        let is_own = std::env::current_exe().is_ok_and(|own| own == named);
        #[expect(clippy::disallowed_methods, reason = "our own executable, once at the start; no client names it")]
        let opened = rustix::fs::open(named, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        match opened {
            Ok(opened) => Ok(Self { named: named.to_owned(), opened: Some(opened) }),
            // It was removed after this process was started.
            Err(_removed) if is_own => Ok(Self { named: named.to_owned(), opened: None }),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A path that leads to it alone, also when it was replaced or removed.
    fn running(&self) -> PathBuf {
        let number = self.opened.as_ref().map(AsRawFd::as_raw_fd);
        number.map_or_else(|| "/proc/self/exe".to_owned(), |number| format!("/proc/self/fd/{number}")).into()
    }
}

/// The parameters of each life.
#[derive(Debug)]
pub(super) struct Begin {
    /// Its `main` dispatches hidden roles first.
    pub(super) executable: Executable,
    pub(super) session_limits: SessionLimits,
    pub(super) bounds: DefaultBounds,
    /// The directory for records of the mount points that it makes on the machine.
    pub(super) records: Option<PathBuf>,
    /// User ids for sandboxes of root.
    pub(super) uids: Option<UidRange>,
    pub(super) metrics: Arc<Metrics>,
}

/// A helper that runs.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) sender: FrameSender,
    pub(super) receiver: FrameReceiver,
    pub(super) body: Body,
    pub(super) found: Found,
}

/// Its process: the warden, below which everything is that comes of this life, until nothing is left of it.
#[derive(Debug)]
pub(super) struct Body {
    /// None in tests, which play it.
    pub(super) child: Option<HelperChild>,
    /// Counts it among the helpers.
    pub(super) present: Option<Present>,
}

impl Begin {
    /// Starts the helper, and waits until it says that it is ready.
    pub(super) async fn life(&self) -> Result<Life, SpawnerError> {
        let failed = |error| SpawnerError::Start(self.executable.named.display().to_string(), error);
        let (ours, theirs) = StdStream::pair().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let ours = UnixStream::from_std(ours).map_err(failed)?;
        let child = self.spawn(theirs).map_err(failed)?;
        // From here on a caller that goes away closes the socket, with which the helper ends.
        let body = Body { child: Some(child), present: Some(self.metrics.helper("spawner")) };
        let (mut sender, mut receiver) = pair_up(ours);
        let (session_limits, bounds) = (self.session_limits, self.bounds);
        let records = self.records.as_ref().map(|path| Bytes(path.as_os_str().as_bytes().to_vec()));
        let hello = SpawnerRequest::Hello { build: BUILD.to_owned(), session_limits, bounds, records, uids: self.uids };
        let ready = timeout(PATIENCE, greet(&mut sender, &mut receiver, &hello)).await;
        match ready.unwrap_or_else(|_| Err(format!("not ready within {} s", PATIENCE.as_secs()))) {
            Ok(found) => Ok(Life { sender, receiver, body, found }),
            Err(reason) => {
                drop((sender, receiver));
                let ended = body.end().await;
                Err(SpawnerError::Handshake(format!("{reason} ({ended})")))
            }
        }
    }

    /// Starts the executable in its hidden role with the socket as standard input and output. The standard library uses
    /// `posix_spawn` for this, so nothing of ours runs between fork and exec.
    fn spawn(&self, socket: StdStream) -> io::Result<HelperChild> {
        let stdin = OwnedFd::from(socket);
        let stdout = stdin.try_clone()?;
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that starts a process: our own executable, never a client's"
        )]
        std::process::Command::new(self.executable.running())
            .arg0(&self.executable.named)
            .args([HIDDEN_FLAG, Role::Spawner.name(), BUILD])
            .env_clear()
            .stdin(stdin)
            .stdout(stdout)
            .spawn()
    }
}

impl Body {
    pub(super) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, HelperChild::id)
    }

    /// Waits until the warden has ended, and with it everything of this life, and reaps it. Dropping the future changes nothing.
    pub(super) async fn ended(&mut self) -> String {
        let Some(child) = &mut self.child else { return "it was played".to_owned() };
        loop {
            let watched = watch(child).await;
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.present = None;
                    return status.to_string();
                }
                // Descriptors may have run out: it is looked at again.
                Ok(None) if watched.is_err() => tokio::time::sleep(Duration::from_millis(50)).await,
                Ok(None) => {}
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Waits for its end, for a while; then kills it by its process id, which is its own until it is reaped.
    pub(super) async fn end(mut self) -> String {
        for _attempt in 0..2 {
            if let Ok(status) = timeout(END_PATIENCE, self.ended()).await {
                return status;
            }
            let _already_ended = self.child.as_mut().map(HelperChild::kill);
        }
        "it cannot be killed".to_owned()
    }
}

async fn watch(child: &HelperChild) -> io::Result<()> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let _readable = watch_fd(pidfd, Interest::READABLE)?.readable().await?;
    Ok(())
}

/// Sends Hello and waits for Ready, which has the layers that the helper tried.
async fn greet(sender: &mut FrameSender, receiver: &mut FrameReceiver, hello: &SpawnerRequest) -> Result<Found, String> {
    let hello = encode(hello, &[], 0).map_err(|error| error.to_string())?;
    sender.send(&hello, &[]).await.map_err(|error| error.to_string())?;
    let (frame, _none) = receiver.recv().await.map_err(|error| error.to_string())?.ok_or("it ended at once")?;
    match decode(&frame.body).map_err(|error| error.to_string())? {
        SpawnerEvent::Ready { namespaces, cgroups } => Ok(Found { namespaces, cgroups }),
        SpawnerEvent::WrongBuild { build } => Err(format!("its build is {build}, ours is {BUILD}: both must be one executable")),
        other => Err(format!("unexpected first message: {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_gives_all_that_its_predecessor_gave() {
        let namespaces =
            |user| NamespaceLayer::Available { user, own_proc: true, shared: String::new(), uids: Default::default() };
        let none = || NamespaceLayer::Unavailable { reason: "no room".to_owned(), remedy: String::new() };
        let found = |namespaces, processes| Found {
            namespaces,
            cgroups: CgroupLayer { processes, memory: false, reason: "read-only".to_owned() },
        };
        let first = found(namespaces(true), true);
        assert_eq!(first.lacks_of(&first), None);
        assert_eq!(first.lacks_of(&found(none(), false)), None, "more than before");
        assert_eq!(first.lacks_of(&found(namespaces(false), true)), None, "more than before");
        for (now, expect) in [
            (found(none(), true), "namespaces (no room)"),
            (found(namespaces(false), true), "namespaces of the same kind"),
            (found(namespaces(true), false), "cgroups (read-only)"),
        ] {
            assert_eq!(now.lacks_of(&first).as_deref(), Some(expect));
        }
    }
}

//! The fixed order in which a helper gives up the rights that its policy does not grant.
//!
//! The caller has closed every descriptor except those for the confined program, and has opened the [`Roots`]. From then on each
//! step is one call with one error. A failed step leaves the process partly confined, so it must end.

mod files;

use crate::compiled::Compiled;
use crate::landlock::{self, MINIMUM_ABI, Who};
use crate::mounts::{self, Machine, MountError, Plan, View};
use crate::policy::{Files, Network, Policy};
use crate::report::{self, Gap};
use crate::roots::Roots;
use crate::{limits, namespaces, seccomp, sys};
use portcullis_protocol::helper::{Enforced, Step, StepFailed};
use portcullis_protocol::path::AbsolutePath;
use std::path::{Path, PathBuf};

pub use files::{hand_on_mounting, keep_mounting, surrender, worker_in_view};

/// Confines this single-threaded process as an fs worker: it may open, make and remove files that the policy grants, and do nothing
/// else. Where the policy grants less below a grant, only the worker's own checks enforce that.
///
/// # Errors
/// A step failed; the process must end.
pub fn worker(policy: &Policy, roots: &Roots) -> Result<Enforced, EnforceError> {
    let abi = landlock_abi(policy)?;
    confine(policy, roots, None, Who::Worker, abi, Vec::new())
}

/// Confines this single-threaded process so that it may read everything that its user may, and do nothing else. Used for the survey
/// of files before a view is built.
///
/// # Errors
/// A step failed; the process must end.
pub fn reader() -> Result<(), EnforceError> {
    let policy = Policy::read_everything();
    let roots = Roots::open(&policy)?;
    worker(&policy, &roots).map(drop)
}

/// Choices for one process beside its policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Choices {
    /// The operator accepts the gaps that can be waived; they are then listed as missing.
    pub allow_unprotected: bool,
    /// The process was given a terminal, so `/dev/tty` is its own. Without its own view and without a terminal, a process could use
    /// `/dev/tty` to write to any terminal that it can read: a session without a controlling terminal gets the first terminal that
    /// it opens.
    pub tty: bool,
}

/// Confines this single-threaded process before it executes a client's program.
///
/// # Errors
/// These layers cannot enforce the policy, or a step failed. The process must end.
pub fn process(
    policy: &Policy,
    roots: &Roots,
    tables: &Compiled,
    own: Option<&Own>,
    choices: Choices,
) -> Result<Enforced, EnforceError> {
    let Choices { allow_unprotected, tty } = choices;
    if own.is_none() {
        roots.refuse_turnable(tables)?;
    }
    let abi = landlock_abi(policy)?;
    // Checked again here with real paths: through links, one entry may be below another.
    let gaps = if own.is_some() { Vec::new() } else { report::gaps(policy, roots, abi) };
    if gaps.iter().any(|gap| !(gap.waivable && allow_unprotected)) {
        return Err(EnforceError::Gaps(gaps));
    }
    let missing = gaps.iter().map(|gap| gap.what.name().to_owned()).collect();
    confine(policy, roots, own.map(|own| (own, tables)), Who::Process { tty }, abi, missing)
}

/// Drops the rights on files that the confined process will not have. Called in the first process of a sandbox, before it opens the
/// policy's paths.
///
/// # Errors
/// The kernel refuses.
pub fn see_as_confined() -> Result<(), EnforceError> {
    limits::drop_file_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })
}

/// Denies making files and directories set-group-ID, in a process whose changes are not reported to its init.
///
/// # Errors
/// The step failed; the process must end.
pub fn without_listener(policy: &Policy, enforced: &mut Enforced) -> Result<(), EnforceError> {
    let table = seccomp::Table::SetGroupId;
    if matches!(policy.files, Files::Restricted(_)) {
        seccomp::install(table).map_err(|error| EnforceError::Seccomp { table: table.name(), problem: error.to_string() })?;
        enforced.seccomp.push(table.name().to_owned());
    }
    Ok(())
}

/// The private resources of a process, made before it is confined.
#[derive(Debug)]
pub struct Own {
    /// Whether it has a user namespace.
    pub user: bool,
    /// Whether it has its own user id on the machine.
    pub uid: bool,
    /// The network.
    pub network: bool,
    /// The view of mounts. With a view, pids and System V objects are its own, too.
    pub view: View,
}

/// The resources of the first process of a sandbox, beside its pid and ipc namespaces, before its policy is known.
#[derive(Debug)]
pub struct Made {
    /// A user namespace.
    pub user: bool,
    /// Its own user id on the machine.
    pub uid: bool,
    /// A network, made by [`namespaces::own_network`].
    pub network: bool,
    /// The machine's mounts.
    pub machine: Machine,
}

impl Own {
    /// Makes the view, and also a network if the policy denies the machine's and none was `made`. The calling process must be the
    /// first of new mount, pid and ipc namespaces. `announce` is the one of [`mounts::build`].
    ///
    /// # Errors
    /// A step failed, or the policy needs the machine's network, which the process has left. The process must end.
    pub fn make(policy: &Policy, plan: Plan<'_>, made: Made, announce: &mut dyn FnMut(&Path)) -> Result<Self, EnforceError> {
        plan.roots.refuse_turnable(plan.tables)?;
        let network = policy.network == Network::Restricted;
        if made.network && !network {
            let attempt = "give the process the machine's network: the sandbox has its own network".to_owned();
            return Err(EnforceError::Namespace { attempt, errno: 0 });
        }
        let view = mounts::build(plan, made.machine, announce)?;
        if network && !made.network {
            namespaces::own_network()?;
        }
        Ok(Self { user: made.user, uid: made.uid, network, view })
    }

    fn names(&self) -> Vec<&'static str> {
        let user = self.user.then_some("user");
        let network = self.network.then_some("net");
        user.into_iter().chain(["mount", "pid", "ipc"]).chain(network).collect()
    }
}

fn confine(
    policy: &Policy,
    roots: &Roots,
    own: Option<(&Own, &Compiled)>,
    who: Who,
    abi: u32,
    missing: Vec<String>,
) -> Result<Enforced, EnforceError> {
    // Landlock and seccomp confine only the calling thread. A view may have no /proc in which threads could be counted.
    refuse_threads(own.is_some())?;

    // No core files, and the original descriptor limit for a program.
    limits::set(roots, who != Who::Worker)
        .map_err(|errno| EnforceError::Limits { attempt: "set resource limits", errno: errno.raw_os_error() })?;

    // A policy that restricts only the network leaves the user's rights on files as they are, and root's rights are capabilities.
    if policy.files != Files::Unrestricted {
        limits::drop_capabilities().map_err(|errno| EnforceError::Capabilities { errno: errno.raw_os_error() })?;
    }

    // With it no set-user-ID program gives rights back, and the next two steps need no privilege.
    rustix::thread::set_no_new_privs(true).map_err(|errno| EnforceError::NoNewPrivs { errno: errno.raw_os_error() })?;

    // Landlock: which files can be opened, made and removed; which ports, signals and abstract sockets can be reached.
    let landlock_abi = landlock::restrict(policy, roots, own, who, abi)
        .map_err(|error| EnforceError::Landlock { problem: error.to_string() })?;
    let own = own.map(|(own, _)| own);

    // Seccomp: which system calls remain. It is last, because earlier steps need some of the calls that it denies.
    let tables = tables(policy, own, who);
    for table in &tables {
        seccomp::install(*table).map_err(|error| EnforceError::Seccomp { table: table.name(), problem: error.to_string() })?;
    }

    let seccomp = tables.iter().map(|table| table.name().to_owned()).collect();
    let namespaces = own.map(|own| own.names().into_iter().map(str::to_owned).collect()).unwrap_or_default();
    let own_proc = own.is_some_and(|own| own.view.own_proc);
    let own_uid = own.is_some_and(|own| own.uid);
    Ok(Enforced { landlock_abi, namespaces, own_uid, own_proc, observed: false, seccomp, missing })
}

/// The tables that a policy needs, in the order in which they are installed.
fn tables(policy: &Policy, own: Option<&Own>, who: Who) -> Vec<seccomp::Table> {
    use seccomp::Table;
    if who == Who::Worker {
        return vec![Table::Worker];
    }
    let files = match &policy.files {
        // Files are not restricted here: only the network is.
        Files::Unrestricted => Vec::new(),
        files if files.is_read_only() => vec![Table::Process, Table::ReadOnly],
        // Without a view there is no init that checks changes to set-group-ID.
        Files::Restricted(_) if own.is_none() => vec![Table::Process, Table::SetId, Table::SetGroupId],
        Files::Restricted(_) => vec![Table::Process, Table::SetId],
    };
    // In its own network a process may use internet sockets: they lead only to itself.
    let network = match policy.network {
        Network::Restricted if !own.is_some_and(|own| own.network) => Table::NoNetwork,
        Network::Restricted | Network::Enabled => Table::Internet,
    };
    // There the ports of other programs are.
    let is_confined = matches!(policy.files, Files::Restricted(_));
    let machine = (is_confined && policy.network == Network::Enabled).then_some(Table::MachineNetwork);
    // System V objects have no paths. Without an ipc namespace they are shared with the whole machine.
    let shared = (own.is_none() && is_confined).then_some(Table::SharedIpc);
    files.into_iter().chain(shared).chain([network]).chain(machine).collect()
}

pub(crate) fn landlock_abi(policy: &Policy) -> Result<u32, EnforceError> {
    let found = sys::landlock_abi();
    match (&policy.files, found) {
        (Files::Restricted(_), Ok(abi)) if abi >= MINIMUM_ABI => Ok(abi),
        (Files::Restricted(_), Ok(abi)) => Err(EnforceError::OldLandlock { abi }),
        (Files::Restricted(_), Err(error)) => Err(EnforceError::NoLandlock { errno: error.raw_os_error().unwrap_or(0) }),
        // Without a policy for files, Landlock is only a second layer behind seccomp.
        (Files::Unrestricted, found) => Ok(found.unwrap_or(0)),
    }
}

/// Refuses a process with more than one thread, or whose threads the kernel does not count. In its own view, which may have no
/// `/proc`, unshare(2) reports whether there is more than one: a process that made a view may call it.
fn refuse_threads(in_view: bool) -> Result<(), EnforceError> {
    if in_view {
        return sys::is_single_threaded().map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => EnforceError::Threads { count: u32::MAX },
            errno => EnforceError::Uncounted { errno: errno.unwrap_or(0) },
        });
    }
    // The link count has one link for each thread, beside the two of every directory (`proc_task_getattr`). Reading `status` for
    // one number would take a tenth of a millisecond.
    let tasks = rustix::fs::stat("/proc/self/task").map_err(|errno| EnforceError::Uncounted { errno: errno.raw_os_error() })?;
    match tasks.st_nlink.checked_sub(2) {
        Some(1) => Ok(()),
        None | Some(0) => Err(EnforceError::Uncounted { errno: 0 }),
        Some(count) => Err(EnforceError::Threads { count: count.try_into().unwrap_or(u32::MAX) }),
    }
}

/// The reason why a helper is not confined. Each text names the layer, and the remedy where there is one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnforceError {
    /// The policy needs more than Landlock and seccomp alone can enforce on a process.
    #[error("enforce policy on a process: {}", report::describe(.0))]
    Gaps(Vec<Gap>),
    /// A root could not be opened.
    #[error("open policy path `{path}` before confinement")]
    Root {
        /// As the policy names it.
        path: AbsolutePath,
        /// The system's number.
        errno: i32,
    },
    /// A root cannot be opened in the view. `ESTALE` means that the root was replaced while the view was made; a new view will have
    /// the present one.
    #[error("open policy path `{}` in the view of the sandbox", path.display())]
    ReplacedRoot {
        /// The path of the root.
        path: PathBuf,
        /// The system's number.
        errno: i32,
    },
    /// A writable root is a link, so a user who can replace the link decides what is writable.
    #[error("open writable root `{path}`: it is a symbolic link; name the real path `{}` instead", real.display())]
    LinkedRoot {
        /// As the policy names it.
        path: AbsolutePath,
        /// The target of the link.
        real: PathBuf,
    },
    /// The path of a writable root leads through a link in another one.
    #[error(
        "open writable root `{path}`: a link on its way lies in another writable root; name the real path `{}` instead",
        real.display()
    )]
    SteeredRoot {
        /// As the policy names it.
        path: AbsolutePath,
        /// The present target.
        real: PathBuf,
    },
    /// The path of an entry leads to a place of the server.
    #[error("open the policy's `{path}`: it leads to files of the server itself, which no request may use; remove the entry")]
    OwnPlace {
        /// As the policy names it.
        path: AbsolutePath,
    },
    /// The path of an entry leads through a link in a writable directory.
    #[error(
        "hold a process to the policy's `{path}`: a link on its way lies where the process may write; name the real path{} instead",
        real.as_ref().map(|real| format!(" `{}`", real.display())).unwrap_or_default()
    )]
    TurnableLink {
        /// As the policy names it.
        path: AbsolutePath,
        /// The present target, if it may be shown.
        real: Option<PathBuf>,
    },
    /// The policy has more roots than this process may open descriptors.
    #[error("open the paths of the policy: needs {needed} descriptors, the hard limit is {maximum}; raise it (ulimit -Hn)")]
    Descriptors {
        /// The number of descriptors that the roots need.
        needed: u64,
        /// The hard limit.
        maximum: u64,
    },
    /// The process has more than one thread. This is a defect.
    #[error("confine a process with {count} threads: only the calling one would be confined")]
    Threads {
        /// The number of threads.
        count: u32,
    },
    /// The kernel does not report the number of threads.
    #[error("count threads in /proc/self/task before confinement; mount /proc")]
    Uncounted {
        /// The system's number.
        errno: i32,
    },
    /// A namespace could not be made or used.
    #[error("{attempt}")]
    Namespace {
        /// The attempted step.
        attempt: String,
        /// The system's number.
        errno: i32,
    },
    /// The view of mounts could not be made.
    #[error("make the view of the file system: {0}")]
    Mounts(#[from] MountError),
    /// Resource limits.
    #[error("{attempt} before confinement")]
    Limits {
        /// The attempted step.
        attempt: &'static str,
        /// The system's number.
        errno: i32,
    },
    /// Capabilities.
    #[error("drop capabilities")]
    Capabilities {
        /// The system's number.
        errno: i32,
    },
    /// `no_new_privs`.
    #[error("set no_new_privs")]
    NoNewPrivs {
        /// The system's number.
        errno: i32,
    },
    /// The kernel has no Landlock.
    #[error(
        "confine files with Landlock: this kernel does not offer it; boot with lsm=landlock,… (Linux {} or later)",
        MINIMUM_KERNEL
    )]
    NoLandlock {
        /// `ENOSYS`: not built in. `EOPNOTSUPP`: not enabled.
        errno: i32,
    },
    /// The kernel's Landlock cannot deny truncation of files outside the policy.
    #[error(
        "confine files with Landlock: this kernel has ABI {abi}, which cannot deny truncation; use Linux {MINIMUM_KERNEL} or later"
    )]
    OldLandlock {
        /// The ABI of the kernel.
        abi: u32,
    },
    /// The ruleset was refused.
    #[error("confine with Landlock: {problem}")]
    Landlock {
        /// The message of the library.
        problem: String,
    },
    /// A filter was refused.
    #[error("install seccomp table `{table}`: {problem}; use a kernel with CONFIG_SECCOMP_FILTER")]
    Seccomp {
        /// The name of the table.
        table: &'static str,
        /// The message of the library.
        problem: String,
    },
}

/// The first kernel whose Landlock has [`MINIMUM_ABI`].
const MINIMUM_KERNEL: &str = "6.2";

impl EnforceError {
    /// The system's error number, or 0 if there is none.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Root { errno, .. }
            | Self::ReplacedRoot { errno, .. }
            | Self::Namespace { errno, .. }
            | Self::Mounts(MountError { errno, .. })
            | Self::Uncounted { errno }
            | Self::Limits { errno, .. }
            | Self::Capabilities { errno }
            | Self::NoNewPrivs { errno }
            | Self::NoLandlock { errno } => *errno,
            Self::LinkedRoot { .. } | Self::SteeredRoot { .. } | Self::TurnableLink { .. } => libc::ELOOP,
            Self::OwnPlace { .. } => libc::EACCES,
            Self::Descriptors { .. } => libc::EMFILE,
            Self::Gaps(_) | Self::Threads { .. } | Self::OldLandlock { .. } | Self::Landlock { .. } | Self::Seccomp { .. } => {
                libc::EOPNOTSUPP
            }
        }
    }
}

impl From<EnforceError> for StepFailed {
    fn from(error: EnforceError) -> Self {
        Self { step: Step::Enforce, attempt: error.to_string(), errno: error.errno(), denial: None }
    }
}

//! Whether this machine gives namespaces and mounts: tried once, in a child that ends at once.

use crate::init;
use crate::sys::{self, Fork};
use portcullis_protocol::helper::{NamespaceLayer, errno_text};
use portcullis_sandbox::{namespaces, report};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{getegid, geteuid};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Statuses of the child.
const OWN_PROC: i32 = 0;
const MACHINE_PROC: i32 = 1;
const REFUSED: i32 = 2;

/// The effective ids, which a new user namespace needs to know.
pub(crate) fn own_ids() -> (u32, u32) {
    (geteuid().as_raw(), getegid().as_raw())
}

/// Tries.
pub(crate) fn namespaces() -> NamespaceLayer {
    let ids = namespaces::need_user().then(own_ids);
    match attempt(ids) {
        Ok(own_proc) => NamespaceLayer::Available { user: ids.is_some(), own_proc },
        Err(reason) => NamespaceLayer::Unavailable { reason, remedy: report::namespace_remedy() },
    }
}

fn attempt(ids: Option<(u32, u32)>) -> Result<bool, String> {
    let (words, pen) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| format!("make a pipe: {errno}"))?;
    let forked = sys::fork_into(namespaces::flags(ids.is_some()));
    let forked = forked.map_err(|error| format!("make user, mount, pid and ipc namespaces: {error}"))?;
    let child = match forked {
        Fork::Child => {
            let tried = catch_unwind(AssertUnwindSafe(|| init::try_all(ids)));
            let problem = match tried {
                Ok(Ok(own_proc)) => sys::end(if own_proc { OWN_PROC } else { MACHINE_PROC }),
                Ok(Err(error)) if error.errno() == 0 => error.to_string(),
                Ok(Err(error)) => format!("{error}: {}", errno_text(error.errno())),
                Err(_panic) => "the attempt panicked".to_owned(),
            };
            // It fits into an empty pipe; without a reader there is nobody to tell.
            let _unheard = rustix::io::write(&pen, problem.as_bytes());
            sys::end(REFUSED)
        }
        Fork::Parent(child) => child,
    };
    drop(pen);
    let status = sys::wait_for(child);
    let mut problem = [0; 4096];
    match status {
        Some(OWN_PROC) => Ok(true),
        Some(MACHINE_PROC) => Ok(false),
        _failed => {
            let length = rustix::io::read(&words, &mut problem[..]).unwrap_or(0);
            let text = String::from_utf8_lossy(&problem[..length]).into_owned();
            Err(if text.is_empty() { "the attempt died".to_owned() } else { text })
        }
    }
}

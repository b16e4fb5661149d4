//! The warden: the process that the gateway starts, and the parent of the spawner.
//!
//! A spawner that is killed, by the OOM killer for example, leaves processes without a parent. They become children of the warden,
//! the subreaper above the spawner, which ends them and then exits. So all started processes are descendants of one process until
//! the last of them has ended. From that process alone the gateway can see which processes are descendants, and when all of them
//! have ended. The warden reads no requests and holds no socket.

use crate::cgroup::remove_of;
use crate::dispatch::{clear_standard, complain};
use crate::remover;
use crate::spawner;
use crate::sys::{self, Fork};
use crate::tree;
use portcullis_protocol::helper::ExitStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{DumpableBehavior, Pid, Signal, getpid, set_child_subreaper, set_dumpable_behavior};
use std::collections::HashSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The time in which keepers and inits must end their processes, after the spawner has ended and their tethers have closed. Then
/// they are killed, and the remover gets the same time again.
const GRACE: Duration = Duration::from_secs(1);

/// The amount added to the `oom_score_adj` of everything that is started. It weighs as much as half of the machine's memory.
const GO_FIRST: i32 = 500;

/// The offset that a shell adds to the number of a signal.
const BY_SIGNAL: i32 = 128;

/// Starts the spawner on the gateway's socket, and waits until the spawner and all its descendants have ended.
pub(crate) fn run(socket: OwnedFd) -> ExitCode {
    let signals = match set_up() {
        Ok(signals) => signals,
        Err(error) => {
            complain(format_args!("set up the warden of the spawner: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let me = getpid();
    match sys::fork() {
        Ok(Fork::Child) => {
            drop(signals);
            go_first();
            // Without the warden, descendants could no longer be recognised. The warden has one thread, so the signal is sent only
            // when the warden ends.
            let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            if tied.is_err() || rustix::process::getppid() != Some(me) {
                complain("tie the spawner to its warden: the warden is gone");
                return ExitCode::FAILURE;
            }
            spawner::run(socket)
        }
        Ok(Fork::Parent(spawner)) => {
            // The warden holds no data of clients, but a process that traces it would control all its descendants.
            let _hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            // The gateway detects the end of the spawner by the end of this socket, so the warden must not hold it.
            match clear_standard(socket) {
                Ok(socket) => drop(socket),
                Err(errno) => {
                    complain(format_args!("close the spawner's socket: {errno}"));
                    return ExitCode::FAILURE;
                }
            }
            watch(spawner, &signals)
        }
        Err(error) => {
            complain(format_args!("fork the spawner: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Makes the OOM killer prefer started processes to the server and other programs: the spawner, its workers, and by inheritance
/// each process that it starts. Among them the kernel kills the one that uses the most memory, which is rarely a helper. Called
/// before this process hides its memory, after which an ordinary user may not write this file (proc(5)).
fn go_first() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let raised = std::fs::read_to_string(FILE).and_then(|text| {
        let own = text.trim().parse::<i32>().map_err(std::io::Error::other)?;
        std::fs::write(FILE, own.saturating_add(GO_FIRST).min(1000).to_string())
    });
    if let Err(error) = raised {
        complain(format_args!("raise the OOM score of started programs: write {FILE}: {error}"));
    }
}

fn set_up() -> std::io::Result<OwnedFd> {
    // Only the gateway handles terminal signals. It then closes its socket to the spawner.
    sys::ignore_group_signals();
    let _leader = rustix::process::setsid();
    set_child_subreaper(Some(getpid()))?;
    sys::child_events()
}

/// Waits for the end of the spawner, and then of all its descendants.
fn watch(spawner: Pid, signals: &OwnedFd) -> ExitCode {
    let mut ended: Option<(ExitStatus, Instant)> = None;
    loop {
        // Drained before the children are checked, so that a later end wakes the poll.
        let _drained = rustix::io::read(signals, &mut [0_u8; 1024][..]);
        loop {
            match sys::ended_child() {
                Ok(Some((pid, status))) => {
                    sys::reap(pid);
                    if pid == spawner && ended.is_none() {
                        ended = Some((status, Instant::now()));
                    }
                }
                Ok(None) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // No child is left.
                Err(_no_child) => {
                    remove_of(number(spawner));
                    return ended.map_or(ExitCode::FAILURE, |(status, _)| code(status));
                }
            }
        }
        let since = ended.map(|(_, at)| at.elapsed());
        if let (Some((status, _)), Some(since)) = (ended, since) {
            if since >= 2 * GRACE {
                tree::end_all(&HashSet::new(), signals.as_fd(), |_| false, |_, _| (), || ());
                remove_of(number(spawner));
                return code(status);
            }
            if since >= GRACE {
                tree::kill_all(&HashSet::new(), is_remover);
            }
        }
        let next = since.map(|since| if since < GRACE { GRACE } else { 2 * GRACE }.saturating_sub(since));
        let patience = next.and_then(|next| Timespec::try_from(next).ok());
        let _woken = poll(&mut [PollFd::new(signals, PollFlags::IN)], patience.as_ref());
    }
}

/// Whether a process has the name of the remover. A program that takes this name lives a second longer.
fn is_remover(pid: Pid) -> bool {
    let name = std::fs::read(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
    name.strip_suffix(b"\n") == Some(remover::NAME.to_bytes())
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

fn code(status: ExitStatus) -> ExitCode {
    let code = match status {
        ExitStatus::Code(code) => code,
        ExitStatus::Signal(signal) => BY_SIGNAL + signal,
    };
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

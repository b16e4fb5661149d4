//! The warden: the process that the gateway starts, and the parent of the spawner.
//!
//! A spawner that is killed, by the OOM killer for example, leaves processes without a parent. They come to the warden, the subreaper
//! above it, which ends them and then itself. So everything that was started stays below one process until the last of it has
//! ended, and the gateway knows two things by that process alone: whose descendant a process is, and when nothing is left. The
//! warden reads no request and holds no socket.

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

/// How long keepers and inits may take to end what they keep, once the spawner has ended. Their tethers tell them; then they are
/// killed, and the remover has the same time again.
const GRACE: Duration = Duration::from_secs(1);

/// What is added to the `oom_score_adj` of everything that is started: half of the machine's memory on top of what it has.
const GO_FIRST: i32 = 500;

/// What a shell adds to a signal's number.
const BY_SIGNAL: i32 = 128;

/// Starts the spawner on the gateway's socket, and waits until it and everything that it left have ended.
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
            // Without it descendants would no longer be known as such. It has one thread, so this fires at its end only.
            let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            if tied.is_err() || rustix::process::getppid() != Some(me) {
                complain("tie the spawner to its warden: the warden is gone");
                return ExitCode::FAILURE;
            }
            spawner::run(socket)
        }
        Ok(Fork::Parent(spawner)) => {
            // It holds nothing of a client's; but who traces it would be above everything.
            let _hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            // The gateway sees the end of the spawner by the end of this socket.
            match clear_standard(socket) {
                Ok(socket) => drop(socket),
                Err(errno) => {
                    complain(format_args!("let go of the spawner's socket: {errno}"));
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

/// Has the OOM killer take what is started before the server and other programs: the spawner, its workers, and by inheritance whatever
/// it starts. Among those the kernel takes who has the most memory, so hardly a helper. Before this process hides its memory, after
/// which an ordinary user may not write there (proc(5)).
fn go_first() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let raised = std::fs::read_to_string(FILE).and_then(|text| {
        let own = text.trim().parse::<i32>().map_err(std::io::Error::other)?;
        std::fs::write(FILE, own.saturating_add(GO_FIRST).min(1000).to_string())
    });
    if let Err(error) = raised {
        complain(format_args!("have the OOM killer take programs before the server: write {FILE}: {error}"));
    }
}

fn set_up() -> std::io::Result<OwnedFd> {
    // Terminal signals are for the gateway, whose socket tells the spawner.
    sys::ignore_group_signals();
    let _leader = rustix::process::setsid();
    set_child_subreaper(Some(getpid()))?;
    sys::child_events()
}

/// Waits for the spawner's end, and then for everybody's.
fn watch(spawner: Pid, signals: &OwnedFd) -> ExitCode {
    let mut ended: Option<(ExitStatus, Instant)> = None;
    loop {
        // Before the look, so that an end behind it is heard of.
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

/// Whether a process is called like the remover. A program that takes the name lives a second longer.
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

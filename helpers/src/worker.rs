//! The worker: confined first, then it serves `fs/*` requests until its socket closes.

use crate::closing;
use crate::cover::Covers;
use crate::dispatch::{clear_standard, complain};
use crate::frames::{Inlet, Received, Wait, send_all};
use crate::fs::{View, carry_out, serve};
use crate::init::look;
use crate::launch::{self, failed};
use portcullis_protocol::helper::{BUILD, Enforced, Step, StepFailed, WorkerAnswer, WorkerSetup, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::compiled::{Compiled, Verdict};
use portcullis_sandbox::enforce::{self, EnforceError};
use portcullis_sandbox::mounts::{FileView, Found, Ground};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::{casefold, namespaces, survey};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;

/// Runs until the gateway closes the socket of requests.
pub(crate) fn run(requests: OwnedFd, control: OwnedFd) -> ExitCode {
    let prepared =
        clear_standard(requests).map_err(|errno| failed(Step::Machine, "set up the worker", Some(errno))).and_then(|requests| {
            closing::close_all_but(&[requests.as_raw_fd(), control.as_raw_fd()])?;
            Ok((requests, confine(&control)?))
        });
    let (requests, view, concurrency) = match prepared {
        // A spare that nobody needed.
        Ok((_requests, None)) => return ExitCode::SUCCESS,
        Ok((requests, Some((view, enforced, concurrency)))) => {
            if answer(&control, &WorkerAnswer::Ready(enforced)).is_err() {
                return ExitCode::FAILURE;
            }
            (requests, view, concurrency)
        }
        // The answer goes to the client. It names paths of the request, which the log does not.
        Err(failure) => {
            let is_told = answer(&control, &WorkerAnswer::Failed(failure)).is_ok();
            return if is_told { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
    };
    drop(control);
    let carry = Arc::new(move |operation, payload: &[u8], descriptors| carry_out(&view, operation, payload, descriptors));
    match serve(requests, concurrency, carry) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(format_args!("worker: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Reads who this worker shall be, and becomes it; none if the gateway ends without saying. No request is read, no glob expanded and no file opened but the roots of
/// the policy (`O_PATH`) before the kernel enforces it; a `.git` file is read by a confined child.
fn confine(control: &OwnedFd) -> Result<Option<(View, Enforced, u16)>, StepFailed> {
    let Some(setup) = receive(control)? else { return Ok(None) };
    // Requests hold files of clients; no process of the same user may look.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(|errno| failed(Step::Machine, "hide the worker's memory", Some(errno)))?;
    // Each request in flight and each root of the policy takes descriptors; none is inherited by anything.
    raise_descriptor_limit();
    let Some(Bytes(policy)) = setup.policy else {
        return Ok(Some((View::unconfined(), Enforced::default(), setup.concurrency)));
    };
    let policy = Policy::decode(&policy).map_err(|error| wrong(&format!("decode the policy: {error}")))?;
    let (roots, found, enforced, covers) = if setup.own_view {
        let (roots, found, view) = make_view(&policy)?;
        let covers = Covers::watch_ways(&view.covered, &view.awaited);
        let enforced = enforce::worker_in_view(&policy, &roots, &view, setup.own_user)?;
        (roots, found, enforced, covers)
    } else {
        enforce::surrender(&policy)?;
        let roots = open_roots(&policy)?;
        let found = hidden_pointers(&launch::tables(&policy, &roots)?, &roots)?;
        let enforced = enforce::worker(&policy, &roots)?;
        (roots, found, enforced, Covers::default())
    };
    let view = View::confined(&policy, roots, &found)
        .map_err(|error| failed(Step::Enforce, &format!("compile the policy: {error}"), None))?;
    Ok(Some((view.held_by(covers), enforced, setup.concurrency)))
}

/// Makes the view of a policy in mounts of this process's own, as the machine's are now, and opens the roots in it.
fn make_view(policy: &Policy) -> Result<(Roots, Vec<Found>, FileView), StepFailed> {
    namespaces::own_mounts()?;
    enforce::keep_mounting()?;
    let ground = Ground::lay().map_err(EnforceError::from)?;
    let mut roots = open_roots(policy)?;
    let tables = launch::tables(policy, &roots)?;
    let found = hidden_pointers(&tables, &roots)?;
    let view = ground.cover(&tables, &roots).map_err(EnforceError::from)?;
    roots.open_anew(|path| tables.verdict(path) == Verdict::Denied)?;
    Ok((roots, found, view))
}

/// Where the operator's `.git` leads through places that this worker will not see. A confined child looks, since it reads contents.
fn hidden_pointers(tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, StepFailed> {
    if survey::are_there(tables, roots) { look(|| survey::hidden_pointers(tables, roots)) } else { Ok(Vec::new()) }
}

fn open_roots(policy: &Policy) -> Result<Roots, StepFailed> {
    let roots = Roots::open(policy)?;
    casefold::refuse(policy, &roots).map_err(|error| failed(Step::Enforce, &error.to_string(), None))?;
    Ok(roots)
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // With fewer, requests may fail with EMFILE and say so.
    let _unchanged = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

fn receive(control: &OwnedFd) -> Result<Option<WorkerSetup>, StepFailed> {
    let frame = match Inlet::new().next(control.as_fd(), Wait::Yes) {
        Ok(Received::Frame(frame, _none)) => frame,
        Ok(Received::Later | Received::End) => return Ok(None),
        Err(error) => return Err(wrong(&error.to_string())),
    };
    let setup: WorkerSetup = decode(&frame.body).map_err(|error| wrong(&error.to_string()))?;
    if setup.build != BUILD {
        return Err(wrong("the gateway is of another build"));
    }
    Ok(Some(setup))
}

fn answer(control: &OwnedFd, answer: &WorkerAnswer) -> Result<(), Errno> {
    let bytes = encode(answer, b"", 0).map_err(|_too_large| Errno::MSGSIZE)?;
    send_all(control.as_fd(), &bytes, None)
}

fn wrong(attempt: &str) -> StepFailed {
    failed(Step::Frame, attempt, None)
}

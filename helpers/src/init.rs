//! The first process of a sandbox: it makes the view and the namespaces, starts the client's program, and stays as pid 1 of its pid
//! namespace. When it ends, the kernel kills every process in that namespace. It is the keeper of the processes in the sandbox.

use crate::closing;
use crate::cover::Covers;
use crate::dispatch::complain;
use crate::keeper::{EXIT_FAILED, Keeper, leave_standard, null};
use crate::launch::{self, Order, failed};
use crate::remover::Line;
use crate::spare::{self, Ends};
use crate::sys::{self, Fork};
use crate::told::Told;
use crate::uids::Lease;
use portcullis_protocol::helper::{Deframer, HEADER, MAX_BODY, Step, StepFailed, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::core_handler;
use portcullis_sandbox::enforce::{self, Choices, EnforceError, Made, Own};
use portcullis_sandbox::first;
use portcullis_sandbox::mounts::{self, Found, Machine, Plan, Unmapped};
use portcullis_sandbox::namespaces::{self, Maps, Users};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::survey::{self, SurveyError};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes the sandbox, starts the program and serves until both end, in the first process of new namespaces. `users` says whether
/// the process is in a new user namespace too, or enters one; `lease` names the user that it becomes on the machine, if it changes
/// its user.
pub(crate) fn run(order: Order, ends: Ends, users: Users, lease: Option<Lease>) -> ! {
    let kept = lease.iter().map(|lease| lease.map.as_raw_fd()).collect();
    go(order, ends, kept, |policy| {
        begin(users)?;
        take_machine(users, lease, Some(policy))
    })
}

/// Makes everything that does not depend on the order, a network included, in the first process of new namespaces. Then it waits
/// for the order and continues as [`run`].
pub(crate) fn wait(way: &OwnedFd, users: Users, lease: Option<Lease>) -> ! {
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let waited = catch_unwind(AssertUnwindSafe(|| {
        let ready = make_ahead(way, users, lease);
        if ready.is_err() {
            // The next start finds no spare and forks an init. A start that was sent here meanwhile gets an error.
            spare::refuse(way);
        }
        (ready, spare::wait(way))
    }));
    match waited {
        Ok((ready, Ok(Some((order, ends))))) => {
            let kept = ready.as_ref().map(Begun::descriptors).unwrap_or_default();
            go(order, ends, kept, |_policy| ready)
        }
        Ok((Ok(_), Ok(None))) => sys::end(0),
        Ok((Err(failure), Ok(None))) => {
            complain(format_args!("prepare a spare: {failure}"));
            sys::end(EXIT_FAILED)
        }
        Ok((_, Err(error))) => {
            complain(format_args!("receive the order of a spare: {error}"));
            sys::end(EXIT_FAILED)
        }
        Err(_panic) => sys::end(EXIT_FAILED),
    }
}

/// The state of a sandbox before its policy is used.
#[derive(Debug)]
struct Begun {
    made: Made,
    /// For the user namespace that it enters after the view is built.
    maps: Option<Maps>,
    /// Its user id on the machine, if it has its own.
    uid: Option<u32>,
    /// Why it has the server's user id on the machine although it was to have its own.
    shared_uid: Option<String>,
}

impl Begun {
    fn descriptors(&self) -> Vec<RawFd> {
        self.maps.iter().map(AsRawFd::as_raw_fd).chain(self.made.machine.descriptors()).collect()
    }
}

fn make_ahead(way: &OwnedFd, users: Users, lease: Option<Lease>) -> Result<Begun, StepFailed> {
    spare::leave_spawner(way, lease.as_ref())?;
    begin(users)?;
    namespaces::own_network()?;
    let mut begun = take_machine(users, lease, None)?;
    begun.made.machine.furnish().map_err(EnforceError::from)?;
    Ok(Begun { made: Made { network: true, ..begun.made }, ..begun })
}

/// The first steps in new namespaces, for every use of them.
fn begin(users: Users) -> Result<(), StepFailed> {
    // Signals to the spawner's process group do not reach a new session.
    rustix::process::setsid().map_err(launch::machine("start a session"))?;
    core_handler::tell_little();
    // The user namespace first: the other namespaces belong to it.
    if let Users::First(user, group) = users {
        namespaces::map_ids(user, group)?;
    }
    // No process of the same user may read this copy of the spawner's memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(launch::machine("hide the memory of init"))
}

/// Takes the machine's mounts as they are now, and becomes the leased user, to whom root's files then belong in this view. If the
/// policy names a device, the process stays root. Without a policy, no device is named.
fn take_machine(users: Users, lease: Option<Lease>, policy: Option<&Policy>) -> Result<Begun, StepFailed> {
    let maps = maps(users)?;
    namespaces::own_mounts()?;
    let mapped = match (&lease, policy.and_then(mounts::named_device)) {
        (None, _) => None,
        (Some(_), Some(device)) => Some(Err(format!("its policy names the device `{}`, which is root's", device.display()))),
        (Some(lease), None) => match Machine::take_mapped(lease.map.as_fd()) {
            Ok(machine) => Some(Ok((machine, lease.uid))),
            Err(Unmapped::Refused(reason)) => Some(Err(reason)),
            Err(Unmapped::Failed(error)) => return Err(EnforceError::from(error).into()),
        },
    };
    let (machine, uid, shared_uid) = match mapped {
        Some(Ok((machine, uid))) => {
            namespaces::become_user(uid)?;
            (machine, Some(uid), None)
        }
        Some(Err(reason)) => (Machine::take().map_err(EnforceError::from)?, None, Some(reason)),
        None => (Machine::take().map_err(EnforceError::from)?, None, None),
    };
    let made = Made { user: users.is_first(), uid: uid.is_some(), network: false, machine };
    Ok(Begun { made, maps, uid, shared_uid })
}

fn go(order: Order, ends: Ends, kept: Vec<RawFd>, make: impl FnOnce(&Policy) -> Result<Begun, StepFailed>) -> ! {
    let Ends { result, tether, line } = ends;
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let ended = catch_unwind(AssertUnwindSafe(|| prepare(order, result.as_fd(), tether.as_fd(), line, kept, make)));
    let failure = match ended {
        Ok(Ok(keeper)) => {
            drop(result);
            let served = catch_unwind(AssertUnwindSafe(|| keeper.serve(tether.as_fd())));
            sys::end(if served.is_ok() { 0 } else { EXIT_FAILED })
        }
        Ok(Err(failure)) => failure,
        Err(_panic) => failed(Step::Frame, "start: the sandbox's init panicked", None),
    };
    launch::report_failure(result.as_fd(), failure);
    sys::end(EXIT_FAILED)
}

fn prepare(
    order: Order,
    result: BorrowedFd<'_>,
    tether: BorrowedFd<'_>,
    line: Option<OwnedFd>,
    kept: Vec<RawFd>,
    make: impl FnOnce(&Policy) -> Result<Begun, StepFailed>,
) -> Result<Keeper, StepFailed> {
    let Order { tty, policy, command, descriptors, limits, records, .. } = order;
    // From now on the numbers of the received descriptors are reused, so their owners must not close them again.
    let descriptors: Vec<RawFd> = descriptors.into_iter().map(std::os::fd::IntoRawFd::into_raw_fd).collect();
    launch::place_standard(&descriptors, tty)?;
    let kept: Vec<RawFd> = [result.as_raw_fd(), tether.as_raw_fd()]
        .into_iter()
        .chain(line.as_ref().map(AsRawFd::as_raw_fd))
        .chain(kept)
        .chain(limits.descriptors())
        .collect();
    closing::close_all_but(&kept)?;

    let null = null()?;
    let policy = decoded(policy)?;
    let Begun { made, maps, uid, shared_uid } = make(&policy)?;
    if let Some(uid) = uid {
        give_streams(uid, &policy)?;
    }
    limits.bound_namespace()?;

    // Resolves the policy's paths in this mount namespace, with the rights that the confined process will have.
    enforce::see_as_confined()?;
    let roots = Roots::open(&policy)?;
    let mut tables = launch::tables(&policy, &roots)?;

    // A confined process finds what deny globs match and where `.git` files lead.
    let found = found(&policy, &tables, &roots)?;
    tables.protect(&found);

    // The view and the network.
    let terminal = tty.then(rustix::stdio::stdin);
    let Some(line) = line.map(Line) else {
        return Err(failed(Step::Frame, "start: the sandbox has no socket to the remover", None));
    };
    let records = records.and_then(|records| records.open().ok());
    let plan = Plan { tables: &tables, roots: &roots, found: &found, terminal, records: records.as_ref() };
    let mut own = Own::make(&policy, plan, made, &mut |path| line.name(path))?;
    // The records are outside every view.
    drop(records);
    if let Some(kept) = own.view.records.take() {
        line.close(kept);
    }
    let own_proc = own.view.own_proc;
    let points = std::mem::take(&mut own.view.points);
    let mut covers = Covers::watch(&own.view.covered, &own.view.awaited, &tables.without_named(found));
    if let Some(watch) = covers.descriptor() {
        line.lend(watch);
    }
    if let Some(path) = covers.lost() {
        let attempt = format!("hold `{}`: it was replaced while the sandbox was made; start again", path.display());
        return Err(failed(Step::Enforce, &attempt, None));
    }

    // Nothing that this process still holds may lead beneath the covers: neither its first working directory nor an opened file.
    rustix::process::chdir("/").map_err(launch::machine("enter the root of the view"))?;

    // From here on this process has no more rights on the machine than its user, and administers only the user namespace.
    if let Some(maps) = maps {
        maps.enter()?;
        own.user = true;
    }

    // The program is a child of this process, and confines itself. Its Landlock domain nests in the domain of this process.
    first::before_launcher(&policy, &roots, &own, &tables)?;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (incoming, outgoing) = pair.map_err(launch::machine("make a socket for the seccomp listener"))?;
    let signals = sys::child_events().map_err(|error| launch::system(Step::Machine, "watch children")(error))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the launcher"))? {
        Fork::Child => launch::inside(&launch::Inside {
            command: &command,
            limits: &limits,
            policy: &policy,
            roots: &roots,
            tables: &tables,
            own: &own,
            shared_uid,
            choices: Choices { allow_unprotected: false, tty },
            outgoing: outgoing.as_fd(),
            result,
        }),
        Fork::Parent(program) => {
            drop((outgoing, roots, limits));
            leave_standard(null)?;
            // The descriptors of the machine are not needed any more, and no process has read data of the client yet.
            let own = [result, tether, line.0.as_fd(), signals.as_fd(), incoming.as_fd()].into_iter().chain(covers.descriptor());
            let kept: Vec<RawFd> = own.chain(points.iter().map(AsFd::as_fd)).map(|kept| kept.as_raw_fd()).collect();
            closing::close_all_but(&kept)?;
            first::for_good()?;
            let told = Told::new(incoming, tables, own_proc);
            Ok(Keeper { told, points, line: Some(line), covers, signals, program, has_program: true, has_more: false })
        }
    }
}

/// Makes the user of the sandbox the owner of its standard streams. The gateway never sends a policy that names a device to a
/// spare.
fn give_streams(uid: u32, policy: &Policy) -> Result<(), StepFailed> {
    if mounts::named_device(policy).is_some() {
        let attempt = "start: the policy names a device, but the sandbox has its own user id";
        return Err(failed(Step::Frame, attempt, None));
    }
    Ok(namespaces::give_standard(uid)?)
}

fn decoded(policy: Option<Bytes>) -> Result<Policy, StepFailed> {
    let Some(Bytes(policy)) = policy else {
        return Err(failed(Step::Frame, "start: the sandbox has no policy", None));
    };
    Policy::decode(&policy).map_err(|error| failed(Step::Frame, &format!("decode the policy: {error}"), None))
}

/// The reply of a confined child about the files.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Found(Vec<Found>),
    Failed(StepFailed),
}

fn found(policy: &Policy, tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, StepFailed> {
    let is_needed = survey::is_needed(policy, tables, roots);
    if is_needed { look(|| survey::survey(policy, tables, roots)) } else { Ok(Vec::new()) }
}

/// Lets a confined child inspect the files, and reads its reply.
pub(crate) fn look(survey: impl FnOnce() -> Result<Vec<Found>, SurveyError>) -> Result<Vec<Found>, StepFailed> {
    let (answers, pen) = pipe_with(PipeFlags::CLOEXEC).map_err(launch::machine("make a pipe to the survey"))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the survey"))? {
        Fork::Child => {
            let looked = catch_unwind(AssertUnwindSafe(|| {
                closing::close_all_but(&[pen.as_raw_fd()])?;
                enforce::reader()?;
                survey().map_err(|error| failed(Step::Enforce, &error.to_string(), None))
            }));
            let answer = match looked {
                Ok(Ok(found)) => Answer::Found(found),
                Ok(Err(failure)) => Answer::Failed(failure),
                Err(_panic) => Answer::Failed(failed(Step::Frame, "survey the files: the survey panicked", None)),
            };
            let written = encode(&answer, b"", 0).map(|bytes| File::from(pen).write_all(&bytes));
            sys::end(if matches!(written, Ok(Ok(()))) { 0 } else { EXIT_FAILED })
        }
        Fork::Parent(child) => {
            drop(pen);
            let mut bytes = Vec::new();
            let read = File::from(answers).take((MAX_BODY + HEADER) as u64).read_to_end(&mut bytes);
            sys::wait_for(child);
            read.map_err(launch::system(Step::Machine, "read the survey"))?;
            let mut deframer = Deframer::default();
            deframer.push(&bytes);
            let answer = deframer.next_frame().ok().flatten().and_then(|frame| decode(&frame.body).ok());
            match answer {
                Some(Answer::Found(found)) => Ok(found),
                Some(Answer::Failed(failure)) => Err(failure),
                None => Err(failed(Step::Machine, "survey the files: the survey died", None)),
            }
        }
    }
}

/// The part of the server's mounts that a process needs to enter a user namespace later.
fn maps(users: Users) -> Result<Option<Maps>, EnforceError> {
    (users == Users::Later).then(Maps::take).transpose()
}

/// The result of a trial.
pub(crate) struct Tried {
    /// Whether `/proc` can be its own.
    pub(crate) own_proc: bool,
    /// Why the process stays in the user namespace of the server, if it does.
    pub(crate) shared_users: Option<EnforceError>,
}

/// Tries out namespaces, a view over the machine's tree and a network, in the first process of new namespaces.
pub(crate) fn try_all(users: Users) -> Result<Tried, EnforceError> {
    if let Users::First(user, group) = users {
        namespaces::map_ids(user, group)?;
    }
    let maps = maps(users);
    namespaces::own_mounts()?;
    let policy = Policy::read_everything();
    let roots = Roots::open(&policy)?;
    let tables = Compiled::new(&policy, |path| roots.resolve(path))
        .map_err(|error| EnforceError::Namespace { attempt: error.to_string(), errno: 0 })?;
    let plan = Plan { tables: &tables, roots: &roots, found: &[], terminal: None, records: None };
    let machine = Machine::take().map_err(EnforceError::from)?;
    let made = Made { user: users.is_first(), uid: false, network: false, machine };
    let own_proc = Own::make(&policy, plan, made, &mut |_| ())?.view.own_proc;
    let shared_users = maps.and_then(|maps| maps.map_or(Ok(()), Maps::enter)).err();
    Ok(Tried { own_proc, shared_users })
}

/// Tries to become a separate user on the machine, and then root of a user namespace, in the first process of new namespaces.
pub(crate) fn try_user(lease: &Lease) -> Result<(), String> {
    let text = |error: EnforceError| StepFailed::from(error).to_string();
    let maps = Maps::take().map_err(text)?;
    namespaces::own_mounts().map_err(text)?;
    match Machine::take_mapped(lease.map.as_fd()) {
        Ok(_machine) => {}
        Err(Unmapped::Refused(reason)) => return Err(reason),
        Err(Unmapped::Failed(error)) => return Err(text(error.into())),
    }
    namespaces::become_user(lease.uid).and_then(|()| maps.enter()).map_err(text)
}

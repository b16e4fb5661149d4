//! The first process of a sandbox: it makes the view and the namespaces, starts the client's program, and stays as pid 1 of
//! its pid namespace, so that with its end the kernel ends everything in it. It is the keeper of what is in the sandbox.

use crate::closing;
use crate::cover::Covers;
use crate::dispatch::complain;
use crate::keeper::{EXIT_FAILED, Keeper, leave_standard, null};
use crate::launch::{self, Order, failed};
use crate::remover::Line;
use crate::spare::{self, Ends};
use crate::sys::{self, Fork};
use crate::told::Told;
use portcullis_protocol::helper::{Deframer, HEADER, MAX_BODY, Step, StepFailed, decode, encode};
use portcullis_protocol::path::Bytes;
use portcullis_sandbox::compiled::Compiled;
use portcullis_sandbox::enforce::{self, Choices, EnforceError, Made, Own};
use portcullis_sandbox::first;
use portcullis_sandbox::mounts::{Found, Plan};
use portcullis_sandbox::namespaces::{self, Maps, Users};
use portcullis_sandbox::policy::Policy;
use portcullis_sandbox::roots::Roots;
use portcullis_sandbox::survey;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes the sandbox, starts the program and serves until the end of both, in the first process of new namespaces. `users`
/// says whether it is in a new user namespace too, or enters one.
pub(crate) fn run(order: Order, ends: Ends, users: Users) -> ! {
    go(order, ends, users, || begin(users).map(|()| Made { user: users.is_first(), network: false }))
}

/// Waits for an order in the first process of new namespaces but of mounts, with a network of its own, and goes on with it as
/// [`run`].
pub(crate) fn wait(way: &OwnedFd, users: Users) -> ! {
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let waited = catch_unwind(|| {
        let ready = spare::leave_spawner(way).and_then(|()| begin(users)).and_then(|()| Ok(namespaces::own_network()?));
        if ready.is_err() {
            // The next start finds none and does without. One that has been sent here meanwhile is told.
            spare::refuse(way);
        }
        (ready, spare::wait(way))
    });
    match waited {
        Ok((ready, Ok(Some((order, ends))))) => go(order, ends, users, || {
            ready?;
            Ok(Made { user: users.is_first(), network: true })
        }),
        Ok((Ok(()), Ok(None))) => sys::end(0),
        Ok((Err(failure), Ok(None))) => {
            complain(format_args!("prepare a sandbox ahead: {failure}"));
            sys::end(EXIT_FAILED)
        }
        Ok((_, Err(error))) => {
            complain(format_args!("take an order ahead: {error}"));
            sys::end(EXIT_FAILED)
        }
        Err(_panic) => sys::end(EXIT_FAILED),
    }
}

/// What has to be done in new namespaces before they are used, whatever for.
fn begin(users: Users) -> Result<(), StepFailed> {
    // Out of the reach of whatever signals the spawner's group.
    rustix::process::setsid().map_err(launch::machine("start a session"))?;
    // Users first: whatever else is made belongs to their namespace.
    if let Users::First(user, group) = users {
        namespaces::map_ids(user, group)?;
    }
    // No process of the same user may look at the copy of the spawner's memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(launch::machine("hide the memory of init"))
}

fn go(order: Order, ends: Ends, users: Users, make: impl FnOnce() -> Result<Made, StepFailed>) -> ! {
    let Ends { result, tether, line } = ends;
    // A panic must not unwind into the spawner's frames, of which this process has a copy.
    let ended = catch_unwind(AssertUnwindSafe(|| prepare(order, result.as_fd(), tether.as_fd(), line, users, make)));
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
    users: Users,
    make: impl FnOnce() -> Result<Made, StepFailed>,
) -> Result<Keeper, StepFailed> {
    let Order { tty, policy, command, descriptors, limits, records, .. } = order;
    // From here on the numbers of the received descriptors are reused; their owners must not close them again.
    let descriptors: Vec<RawFd> = descriptors.into_iter().map(std::os::fd::IntoRawFd::into_raw_fd).collect();
    launch::place_standard(&descriptors, tty)?;
    let kept: Vec<RawFd> = [result.as_raw_fd(), tether.as_raw_fd()]
        .into_iter()
        .chain(line.as_ref().map(AsRawFd::as_raw_fd))
        .chain(limits.descriptors())
        .collect();
    closing::close_all_but(&kept)?;

    let null = null()?;
    let made = make()?;
    let maps = maps(users)?;
    // As the machine's are now.
    namespaces::own_mounts()?;
    limits.bound_namespace()?;

    // The policy's paths, as this mount namespace has them, and as the process will be able to see them.
    enforce::see_as_confined()?;
    let Some(Bytes(policy)) = policy else {
        return Err(failed(Step::Frame, "start: a sandbox without a policy", None));
    };
    let policy = Policy::decode(&policy).map_err(|error| failed(Step::Frame, &format!("decode the policy: {error}"), None))?;
    let roots = Roots::open(&policy)?;
    let mut tables = launch::tables(&policy, &roots)?;

    // What deny globs match and where `.git` files lead is for a confined process to say.
    let found = if survey::is_needed(&policy, &tables, &roots) { look(&policy, &tables, &roots)? } else { Vec::new() };

    // The view and the network.
    let terminal = tty.then(rustix::stdio::stdin);
    let Some(line) = line.map(Line) else {
        return Err(failed(Step::Frame, "start: a sandbox without a socket to the remover", None));
    };
    let records = records.and_then(|records| records.open().ok());
    let plan = Plan { tables: &tables, roots: &roots, found: &found, terminal, records: records.as_ref() };
    let mut own = Own::make(&policy, plan, made, &mut |path| line.name(path))?;
    // It lies outside every view.
    drop(records);
    // What is told of changes is judged by what the view protects.
    tables.protect(&found);
    let own_proc = own.view.own_proc;
    let points = std::mem::take(&mut own.view.points);
    let mut covers = Covers::watch(&own.view.covered, &own.view.awaited);
    if let Some(watch) = covers.descriptor() {
        line.lend(watch);
    }
    if let Some(path) = covers.lost() {
        let attempt = format!("hold `{}`: it was replaced while the sandbox was made; start again", path.display());
        return Err(failed(Step::Enforce, &attempt, None));
    }

    // Nothing of the way here leads beneath the covers: neither the directory that this process began in, nor what it opened.
    rustix::process::chdir("/").map_err(launch::machine("enter the root of the view"))?;

    // From here on it has no right on the machine that its user has not, and the user namespace is all that it administers.
    if let Some(maps) = maps {
        maps.enter()?;
        own.user = true;
    }

    // The program is a child of this process, and confines itself. Its domain nests in this one.
    first::before_launcher(&policy, &roots, &own, &tables)?;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (incoming, outgoing) = pair.map_err(launch::machine("make a socket for what is told"))?;
    let signals = sys::child_events().map_err(|error| launch::system(Step::Machine, "watch children")(error))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the launcher"))? {
        Fork::Child => launch::inside(&launch::Inside {
            command: &command,
            limits: &limits,
            policy: &policy,
            roots: &roots,
            tables: &tables,
            own: &own,
            choices: Choices { allow_unprotected: false, tty },
            outgoing: outgoing.as_fd(),
            result,
        }),
        Fork::Parent(program) => {
            drop((outgoing, roots, limits));
            leave_standard(null)?;
            // What was opened of the machine is of no more use, and nothing of the client's was read by anybody yet.
            let own = [result, tether, line.0.as_fd(), signals.as_fd(), incoming.as_fd()].into_iter().chain(covers.descriptor());
            let kept: Vec<RawFd> = own.chain(points.iter().map(AsFd::as_fd)).map(|kept| kept.as_raw_fd()).collect();
            closing::close_all_but(&kept)?;
            first::for_good()?;
            let told = Told::new(incoming, tables, own_proc);
            Ok(Keeper { told, points, line: Some(line), covers, signals, program, has_program: true })
        }
    }
}

/// What a confined child says of the files.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Found(Vec<Found>),
    Failed(StepFailed),
}

/// Has a confined child look at the files, and reads what it says.
fn look(policy: &Policy, tables: &Compiled, roots: &Roots) -> Result<Vec<Found>, StepFailed> {
    let (answers, pen) = pipe_with(PipeFlags::CLOEXEC).map_err(launch::machine("make a pipe to the survey"))?;
    match sys::fork().map_err(launch::system(Step::Machine, "fork the survey"))? {
        Fork::Child => {
            let looked = catch_unwind(AssertUnwindSafe(|| {
                closing::close_all_but(&[pen.as_raw_fd()])?;
                enforce::reader()?;
                survey::survey(policy, tables, roots).map_err(|error| failed(Step::Enforce, &error.to_string(), None))
            }));
            let answer = match looked {
                Ok(Ok(found)) => Answer::Found(found),
                Ok(Err(failure)) => Answer::Failed(failure),
                Err(_panic) => Answer::Failed(failed(Step::Frame, "look at the files before the start: it panicked", None)),
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
                None => Err(failed(Step::Machine, "look at the files before the start: the survey died", None)),
            }
        }
    }
}

/// What a process that enters a user namespace later needs of the server's mounts for that.
fn maps(users: Users) -> Result<Option<Maps>, EnforceError> {
    (users == Users::Later).then(Maps::take).transpose()
}

/// What a try has found.
pub(crate) struct Tried {
    /// Whether `/proc` can be its own.
    pub(crate) own_proc: bool,
    /// Why it is in the user namespace of the server, if it is.
    pub(crate) shared_users: Option<EnforceError>,
}

/// Tries namespaces, a view over the machine's tree and a network, in the first process of new namespaces.
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
    let made = Made { user: users.is_first(), network: false };
    let own_proc = Own::make(&policy, plan, made, &mut |_| ())?.view.own_proc;
    let shared_users = maps.and_then(|maps| maps.map_or(Ok(()), Maps::enter)).err();
    Ok(Tried { own_proc, shared_users })
}

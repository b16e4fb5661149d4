//! A stand-in for the spawner helper, for tests: it speaks the same frames and starts real processes, but confines none.

use super::Spawner;
use super::life::{Body, Found, Life};
use crate::helper::socket::{FrameReceiver, FrameSender, pair_up};
use portcullis_protocol::denial::{Denial, Denials, Layer, Wanted};
use portcullis_protocol::helper::{
    CgroupLayer, Command, Enforced, ExitStatus, NamespaceLayer, SpawnerEvent, SpawnerRequest, Step, StepFailed, decode, encode,
};
use portcullis_protocol::limit::TreeEnd;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// A spawner whose helper the test plays itself, on the two halves that come with it.
pub(crate) fn scripted(tasks: &mut JoinSet<()>) -> (Spawner, FrameSender, FrameReceiver) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (sender, receiver) = pair_up(ours);
    let (stop, stopped) = oneshot::channel();
    let namespaces = NamespaceLayer::Unavailable { reason: "a stand-in has none".to_owned(), remedy: String::new() };
    let found = Found { namespaces, cgroups: CgroupLayer::default() };
    let life = Life { sender, receiver, body: Body { child: None, present: None }, found };
    let (spawner, owner) = Spawner::over(&life, stopped, None);
    tasks.spawn(async move {
        let _running = stop;
        owner.run(life).await;
    });
    let (sender, receiver) = pair_up(theirs);
    (spawner, sender, receiver)
}

/// A spawner whose helper starts processes. Both ends run in `tasks`.
pub(crate) fn spawner(tasks: &mut JoinSet<()>) -> Spawner {
    let (spawner, sender, receiver) = scripted(tasks);
    tasks.spawn(play(sender, receiver));
    spawner
}

/// Denials of writes, as a sandbox's init would tell of them.
pub(crate) fn denials(paths: &[&str]) -> Denials {
    let mut denials = Denials::default();
    for path in paths {
        let rule = "entry read `/`".to_owned();
        denials.add(Denial { path: (*path).to_owned(), access: Wanted::Write, layer: Layer::Mounts, rule, grant: None });
    }
    denials
}

/// Says something to the gateway.
pub(crate) async fn say(sender: &mut FrameSender, event: &SpawnerEvent) {
    let _gateway_gone = sender.send(&encode(event, &[], 0).unwrap(), &[]).await;
}

/// What the gateway asks next, with its descriptors; none at the end.
pub(crate) async fn hear(receiver: &mut FrameReceiver) -> Option<(SpawnerRequest, Vec<OwnedFd>)> {
    let (frame, descriptors) = receiver.recv().await.unwrap()?;
    Some((decode(&frame.body).unwrap(), descriptors))
}

async fn play(mut sender: FrameSender, mut receiver: FrameReceiver) {
    let mut groups: HashMap<u64, Pid> = HashMap::new();
    let (exits, mut exited) = mpsc::channel(64);
    loop {
        tokio::select! {
            heard = hear(&mut receiver) => match heard {
                Some((SpawnerRequest::Start { id, command, .. }, descriptors)) => match begin(&command.0, descriptors) {
                    Ok(mut child) => {
                        let pid = Pid::from_child(&child);
                        groups.insert(id, pid);
                        let (pid, enforced, tree) = (pid.as_raw_pid(), Enforced::default(), TreeEnd::Descendants);
                        let started = SpawnerEvent::Started { id, pid, enforced, limits: Vec::new(), tree };
                        say(&mut sender, &started).await;
                        let exits = exits.clone();
                        tokio::task::spawn_blocking(move || exits.blocking_send((id, child.wait().unwrap())));
                    }
                    Err(error) => {
                        let errno = error.raw_os_error().unwrap_or(0);
                        let failure = StepFailed { step: Step::Execute, attempt: "start it".to_owned(), errno, denial: None };
                        say(&mut sender, &SpawnerEvent::StartFailed { id, failure }).await;
                    }
                },
                Some((SpawnerRequest::Signal { id, signal }, _)) => {
                    let signal = Signal::from_named_raw(signal).unwrap();
                    let _ended = groups.get(&id).map(|pid| kill_process_group(*pid, signal));
                }
                Some((other, _)) => panic!("{other:?}"),
                None => break,
            },
            Some((id, status)) = exited.recv() => {
                groups.remove(&id);
                let status = status.code().map_or_else(|| ExitStatus::Signal(status.signal().unwrap()), ExitStatus::Code);
                let (denials, failure, limits) = (Denials::default(), None, Vec::new());
                say(&mut sender, &SpawnerEvent::Exited { id, status, denials, failure, limits }).await;
            }
        }
    }
    // As the helper does when its lifeline closes.
    for pid in groups.into_values() {
        let _ended = kill_process_group(pid, Signal::KILL);
    }
}

fn begin(command: &[u8], descriptors: Vec<OwnedFd>) -> std::io::Result<std::process::Child> {
    let Command { argv, env, cwd, .. } = decode(command).unwrap();
    let text = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    #[expect(clippy::disallowed_methods, reason = "a test that plays the helper")]
    let mut child = std::process::Command::new(text(&argv[0].0));
    child.args(argv[1..].iter().map(|argument| text(&argument.0))).env_clear();
    child.envs(env.iter().map(|(name, value)| (text(&name.0), text(&value.0)))).current_dir(cwd.as_path()).process_group(0);
    let mut descriptors = descriptors.into_iter();
    let stdin = descriptors.next().unwrap();
    let stdout = descriptors.next().map_or_else(|| stdin.try_clone(), Ok)?;
    let stderr = descriptors.next().map_or_else(|| stdin.try_clone(), Ok)?;
    child.stdin(stdin).stdout(stdout).stderr(stderr).spawn()
}

//! The other end of a spawner and of a worker.

use portcullis_protocol::denial::Denials;
use portcullis_protocol::helper::{
    BUILD, CgroupLayer, Command, Deframer, Enforced, ExitStatus, Frame, FsDone, FsError, FsOperation, FsReply, FsRequest,
    HIDDEN_FLAG, NamespaceLayer, Role, SpawnerEvent, SpawnerRequest, StepFailed, WorkerAnswer, WorkerSetup, decode, encode,
};
use portcullis_protocol::limit::{ProcessLimits, SessionLimits};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use portcullis_protocol::uids::UidRange;
use portcullis_sandbox::mounts::named_device;
use portcullis_sandbox::policy::{Access, Files, Grant, Grants, Network, Policy};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;

/// A stream of frames with descriptors.
pub(crate) struct Channel {
    socket: OwnedFd,
    deframer: Deframer,
    descriptors: VecDeque<OwnedFd>,
}

impl Channel {
    /// Two connected ends; one is for the helper.
    pub(crate) fn pair() -> (Self, OwnedFd) {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        (Self { socket: ours, deframer: Deframer::default(), descriptors: VecDeque::new() }, theirs)
    }

    pub(crate) fn send(&self, body: &impl Serialize, payload: &[u8], descriptors: &[OwnedFd]) {
        let bytes = encode(body, payload, descriptors.len()).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if !borrowed.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let mut sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
        while sent < bytes.len() {
            sent += rustix::io::write(&self.socket, &bytes[sent..]).unwrap();
        }
    }

    /// The next frame; none at the end.
    pub(crate) fn receive(&mut self) -> Option<(Frame, Vec<OwnedFd>)> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            if let Some(frame) = self.deframer.next_frame().unwrap() {
                let descriptors = self.descriptors.drain(..frame.descriptors).collect();
                return Some((frame, descriptors));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::CMSG_CLOEXEC);
            // A peer that died with unread bytes resets the connection, which is an end as well.
            let got = got.map_or(0, |got| got.bytes);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    self.descriptors.extend(received);
                }
            }
            if got == 0 {
                return None;
            }
            self.deframer.push(&buffer[..got]);
        }
    }

    /// The socket alone, for data that is not a frame.
    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub(crate) fn expect<T: DeserializeOwned>(&mut self) -> T {
        decode(&self.receive().expect("a frame before the end").0.body).unwrap()
    }
}

/// Starts this program in a hidden role, as the gateway does.
pub(crate) fn start_role(role: Role, build: &str, stdio: OwnedFd) -> Child {
    start_role_called("portcullis", role, build, stdio)
}

fn start_role_called(name: &str, role: Role, build: &str, stdio: OwnedFd) -> Child {
    let output = stdio.try_clone().unwrap();
    std::process::Command::new("/proc/self/exe")
        .arg0(name)
        .args([HIDDEN_FLAG, role.name(), build])
        .stdin(stdio)
        .stdout(output)
        .spawn()
        .unwrap()
}

/// The directory in which spawners record mount points.
pub(crate) static RECORDS: OnceLock<PathBuf> = OnceLock::new();

fn records() -> Bytes {
    Bytes(RECORDS.get().unwrap().as_os_str().as_bytes().to_vec())
}

/// A spawner that has said Ready.
pub(crate) struct Spawner {
    pub(crate) channel: Option<Channel>,
    pub(crate) process: Child,
    /// Of the newest process that was run: an id is in use until the last of its sandbox is gone.
    pub(crate) newest: u64,
    /// As it said.
    pub(crate) namespaces: NamespaceLayer,
}

impl Spawner {
    /// The spawner itself, the one child of the process that was started, its warden.
    pub(crate) fn pid(&self) -> i32 {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.process.id())).unwrap();
        children.trim().parse().unwrap_or_else(|_| panic!("one child of the warden: {children}"))
    }

    pub(crate) fn start() -> Self {
        Self::start_with(SessionLimits::default()).0
    }

    /// One whose sessions have limits, as far as it can hold them.
    pub(crate) fn start_with(session_limits: SessionLimits) -> (Self, CgroupLayer) {
        Self::begin("portcullis", session_limits, Some(UidRange::DEFAULT))
    }

    /// One of which the helpers are called so.
    pub(crate) fn start_called(name: &str) -> Self {
        Self::begin(name, SessionLimits::default(), Some(UidRange::DEFAULT)).0
    }

    /// One that gives its sandboxes these user ids; none: its own.
    pub(crate) fn start_of(uids: Option<&str>) -> Self {
        Self::begin("portcullis", SessionLimits::default(), uids.and_then(|text| UidRange::parse(text).unwrap())).0
    }

    /// One in mounts of its own, to which a script has added something.
    pub(crate) fn start_in(mounts: &str) -> Self {
        Self::start_in_with(mounts, true)
    }

    /// The same with or without user ids of their own for sandboxes.
    pub(crate) fn start_in_with(mounts: &str, has_uids: bool) -> Self {
        let (channel, theirs) = Channel::pair();
        let output = theirs.try_clone().unwrap();
        let script = format!("{mounts}\nexec \"$0\" \"$@\"");
        let process = std::process::Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec", &script])
            .arg(std::env::current_exe().unwrap())
            .args([HIDDEN_FLAG, Role::Spawner.name(), BUILD])
            .stdin(theirs)
            .stdout(output)
            .spawn()
            .unwrap();
        Self::greet(channel, process, SessionLimits::default(), has_uids.then_some(UidRange::DEFAULT)).0
    }

    fn begin(name: &str, session_limits: SessionLimits, uids: Option<UidRange>) -> (Self, CgroupLayer) {
        let (channel, theirs) = Channel::pair();
        Self::greet(channel, start_role_called(name, Role::Spawner, BUILD, theirs), session_limits, uids)
    }

    fn greet(mut channel: Channel, process: Child, session_limits: SessionLimits, uids: Option<UidRange>) -> (Self, CgroupLayer) {
        let (build, bounds) = (BUILD.to_owned(), Default::default());
        channel.send(&SpawnerRequest::Hello { build, session_limits, bounds, records: Some(records()), uids }, b"", &[]);
        let SpawnerEvent::Ready { cgroups, namespaces } = channel.expect() else { panic!("its first word is another") };
        (Self { channel: Some(channel), process, newest: 1000, namespaces }, cgroups)
    }

    pub(crate) fn send(&self, request: &SpawnerRequest, descriptors: &[OwnedFd]) {
        self.channel.as_ref().unwrap().send(request, b"", descriptors);
    }

    pub(crate) fn event(&mut self) -> SpawnerEvent {
        self.channel.as_mut().unwrap().expect()
    }

    /// Starts a process with pipes; yields the reading ends of its output and error.
    pub(crate) fn start_process(&self, id: u64, command: &Command, policy: Option<&Policy>) -> (File, File) {
        let (stdout, their_stdout) = pipe();
        let (stderr, their_stderr) = pipe();
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        let request = SpawnerRequest::Start {
            id,
            session: "s".to_owned(),
            tty: false,
            policy: policy.map(|policy| Bytes(policy.encode())),
            own_view: policy.is_some(),
            own_network: policy.is_some_and(|policy| policy.network == Network::Restricted),
            own_uid: policy.is_none_or(|policy| named_device(policy).is_none()),
            allow_unprotected: true,
            limits: ProcessLimits::default(),
            command: Bytes(encoded(command)),
        };
        self.send(&request, &[null, their_stdout, their_stderr]);
        (stdout.into(), stderr.into())
    }

    /// Starts a process, waits for its end, and yields what it wrote and how it ended.
    pub(crate) fn run(&mut self, command: &Command, policy: Option<&Policy>) -> (Outcome, Enforced) {
        let (outcome, enforced, _) = self.run_and_see(command, policy);
        (outcome, enforced)
    }

    /// The same, with what was seen to be denied.
    pub(crate) fn run_and_see(&mut self, command: &Command, policy: Option<&Policy>) -> (Outcome, Enforced, Denials) {
        self.newest += 1;
        let (mut stdout, mut stderr) = self.start_process(self.newest, command, policy);
        let enforced = match self.event() {
            SpawnerEvent::Started { id, enforced, .. } if id == self.newest => enforced,
            other => panic!("{other:?}"),
        };
        let mut outcome = Outcome { stdout: String::new(), stderr: String::new(), status: ExitStatus::Code(-1) };
        stdout.read_to_string(&mut outcome.stdout).unwrap();
        stderr.read_to_string(&mut outcome.stderr).unwrap();
        match self.event() {
            SpawnerEvent::Exited { id, status, denials, .. } if id == self.newest => {
                outcome.status = status;
                (outcome, enforced, denials)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Starts a program that writes nothing and succeeds, and waits for its end; or why it was not started.
    pub(crate) fn try_to_run(&mut self, command: &Command, policy: Option<&Policy>) -> Result<(), StepFailed> {
        self.newest += 1;
        let _outputs = self.start_process(self.newest, command, policy);
        match self.event() {
            SpawnerEvent::Started { .. } => {}
            SpawnerEvent::StartFailed { failure, .. } => return Err(failure),
            other => panic!("{other:?}"),
        }
        match self.event() {
            SpawnerEvent::Exited { id, status: ExitStatus::Code(0), .. } if id == self.newest => Ok(()),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn fail(&mut self, command: &Command, policy: Option<&Policy>) -> StepFailed {
        self.newest += 1;
        let _outputs = self.start_process(self.newest, command, policy);
        match self.event() {
            SpawnerEvent::StartFailed { id, failure } if id == self.newest => failure,
            other => panic!("{other:?}"),
        }
    }

    /// Closes the lifeline and waits for the spawner's end.
    pub(crate) fn close(mut self) {
        self.channel = None;
        assert!(self.process.wait().unwrap().success());
    }
}

/// What a process wrote, and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) status: ExitStatus,
}

/// A worker and the socket of its requests.
pub(crate) struct Worker {
    pub(crate) channel: Channel,
    pub(crate) enforced: Enforced,
    /// The spawner that is its parent.
    pub(crate) spawner: Spawner,
}

impl Worker {
    pub(crate) fn start(policy: Option<&Policy>) -> Self {
        Self::try_start(policy).unwrap_or_else(|failure| panic!("{failure}"))
    }

    pub(crate) fn try_start(policy: Option<&Policy>) -> Result<Self, StepFailed> {
        Self::try_start_with(policy, None)
    }

    /// Starts one whose first request is in its socket before it knows its policy.
    pub(crate) fn try_start_with(policy: Option<&Policy>, early: Option<&FsRequest>) -> Result<Self, StepFailed> {
        Self::start_by(Spawner::start(), policy, early)
    }

    /// One of this spawner.
    pub(crate) fn start_by(spawner: Spawner, policy: Option<&Policy>, early: Option<&FsRequest>) -> Result<Self, StepFailed> {
        let (channel, theirs) = Channel::pair();
        if let Some(request) = early {
            channel.send(request, b"early", &[]);
        }
        let (mut control, their_control) = Channel::pair();
        // As the gateway decides it.
        let own_view = policy.is_some_and(|policy| policy.files != Files::Unrestricted)
            && matches!(spawner.namespaces, NamespaceLayer::Available { .. });
        let own_user = portcullis_sandbox::namespaces::need_user();
        spawner.send(&SpawnerRequest::Worker { id: 7, own_view }, &[theirs, their_control]);
        let policy = policy.map(|policy| Bytes(policy.encode()));
        control.send(&WorkerSetup { build: BUILD.to_owned(), policy, own_view, own_user, concurrency: 8 }, b"", &[]);
        match control.expect() {
            WorkerAnswer::Ready(enforced) => Ok(Self { channel, enforced, spawner }),
            WorkerAnswer::Failed(failure) => Err(failure),
        }
    }

    pub(crate) fn ask(&mut self, operation: FsOperation, payload: &[u8]) -> (Result<FsDone, FsError>, Vec<u8>, Vec<OwnedFd>) {
        self.channel.send(&FsRequest { id: 5, operation }, payload, &[]);
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> (Result<FsDone, FsError>, Vec<u8>, Vec<OwnedFd>) {
        let (frame, descriptors) = self.channel.receive().expect("a reply before the end");
        let reply: FsReply = decode(&frame.body).unwrap();
        assert_eq!(reply.id, 5);
        (reply.outcome, frame.payload.to_vec(), descriptors)
    }

    pub(crate) fn read(&mut self, path: impl AsRef<Path>) -> Result<Vec<u8>, FsError> {
        let path = AbsolutePath::new(path).unwrap();
        let (outcome, payload, _none) = self.ask(FsOperation::ReadFile { path, follow: true, limit: 1 << 30 }, b"");
        outcome.map(|_done| payload)
    }

    pub(crate) fn write(&mut self, path: impl AsRef<Path>, content: &[u8]) -> Result<FsDone, FsError> {
        let path = AbsolutePath::new(path).unwrap();
        self.ask(FsOperation::WriteFile { path, follow: true }, content).0
    }
}

/// A command line in `/`, with an environment.
pub(crate) fn command(argv: &[&str], env: &[(&str, &str)]) -> Command {
    let bytes = |text: &str| Bytes(text.as_bytes().to_vec());
    Command {
        argv: argv.iter().copied().map(bytes).collect(),
        arg0: None,
        env: env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
        cwd: AbsolutePath::new("/").unwrap(),
    }
}

pub(crate) fn shell(script: &str) -> Command {
    command(&["/bin/sh", "-c", script], &[("PATH", "/usr/bin:/bin")])
}

pub(crate) fn policy(entries: &[(&Path, Access)]) -> Policy {
    let entries = entries.iter().map(|(path, access)| Grant::new(AbsolutePath::new(path).unwrap(), *access));
    let grants = Grants::new(entries.collect(), Vec::new()).unwrap();
    Policy { files: Files::Restricted(grants.into()), network: Network::Restricted }
}

pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

pub(crate) fn encoded(command: &Command) -> Vec<u8> {
    let frame = encode(command, b"", 0).unwrap();
    frame[portcullis_protocol::helper::HEADER..].to_vec()
}

/// Runs this program by hand and yields its status and error text.
pub(crate) fn by_hand(arguments: &[&str]) -> (Option<i32>, String) {
    let output = std::process::Command::new("/proc/self/exe").args(arguments).stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

//! Names below the directory of an automounter, each of which the kernel passes to a program of the machine when it is looked up.

use super::gateway::{Spawner, Worker, policy, shell};
use crate::Test;
use portcullis_protocol::helper::{FsOperation, SpawnerEvent, SpawnerRequest};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::Access;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use rustix::process::geteuid;
use std::os::fd::OwnedFd;
use std::path::Path;

pub(crate) const TESTS: &[Test] = &[("automounter::no_name_reaches_an_automounter", no_name_reaches_an_automounter)];

fn is_asked(requests: &OwnedFd, patience: Option<&Timespec>) -> bool {
    poll(&mut [PollFd::new(requests, PollFlags::IN)], patience).unwrap() > 0
}

fn no_name_reaches_an_automounter() {
    if !geteuid().is_root() {
        println!("skipped: only root may mount the directory of an automounter");
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let top = directory.path().canonicalize().unwrap();
    let (pipe, on) = (top.join("requests"), top.join("on"));
    std::fs::create_dir(&on).unwrap();
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let requests = open(&pipe, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap();
    // Nothing answers. The process group is that of no process here.
    let settings = "fd=9,pgrp=1,minproto=5,maxproto=5,indirect";
    let mounts = format!("exec 9<>{}\nmount -i -t autofs -o {settings} none {}", pipe.display(), on.display());
    let reading = policy(&[(Path::new("/"), Access::Read)]);
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };

    let mut spawner = Spawner::start_in(&mounts);
    let look = shell(&format!("ls -d {0} {0}/name.of.a.host; echo done", on.display()));
    let (outcome, _) = spawner.run(&look, Some(&reading));
    assert_eq!(outcome.stdout, format!("{}\ndone\n", on.display()), "{}", outcome.stderr);
    assert!(!is_asked(&requests, Some(&now)), "by a process");
    // The control: without a sandbox it is asked, and the process waits for the answer.
    let _outputs = spawner.start_process(1, &look, None);
    assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
    assert!(is_asked(&requests, None));
    spawner.send(&SpawnerRequest::Signal { id: 1, signal: 9 }, &[]);
    assert!(matches!(spawner.event(), SpawnerEvent::Exited { .. }));
    while rustix::io::read(&requests, &mut [0; 4096][..]).is_ok() {}

    spawner.close();

    let denying = policy(&[(Path::new("/"), Access::Read), (&on, Access::Deny)]);
    for policy in [reading, denying] {
        let mut worker = Worker::start_by(Spawner::start_in(&mounts), Some(&policy), None).unwrap();
        let path = AbsolutePath::new(on.join("other.name")).unwrap();
        assert!(worker.ask(FsOperation::ReadFile { path, follow: true, limit: 1 }, b"").0.is_err());
        assert!(!is_asked(&requests, Some(&now)), "by a file call");
        // Other files are served.
        assert!(worker.read("/proc/version").is_ok());
    }
}

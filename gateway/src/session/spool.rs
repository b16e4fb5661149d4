//! The files that output waits in while nobody is attached: one a process, made when it is needed, without a name.
//!
//! The state says what is written and read where; this does it beside the session's task, for each process one after the
//! other and in the order in which it was said. So a read sees what was written before it was asked for, and what is written
//! later cannot overwrite what it wants.

use super::log::{Extent, Write};
use super::message::Call;
use crate::blocking::{Blocking, read_at, write_at};
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The spools of a session.
pub(super) struct Spools {
    folder: PathBuf,
    blocking: Blocking,
    spools: HashMap<u64, Spool>,
    /// One for each spool that is busy.
    working: FuturesUnordered<BoxFuture<'static, Worked>>,
}

/// The spool of a process.
#[derive(Default)]
struct Spool {
    /// None before the first write, and while it is in use.
    file: Option<OwnedFd>,
    is_busy: bool,
    /// One write at most, and reads, which the calls in flight of the attached connection bound.
    line: VecDeque<Job>,
}

enum Job {
    Write(Write),
    Read(Call, Vec<Extent>),
    /// It holds nothing any more.
    Close,
}

/// What came of it.
#[derive(Debug)]
pub(super) enum Done {
    Written(io::Result<()>),
    Read(Call, io::Result<Vec<Vec<u8>>>),
    Closed,
}

struct Worked {
    key: u64,
    file: Option<OwnedFd>,
    done: Done,
}

impl Spools {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, blocking: Blocking::new(), spools: HashMap::new(), working: FuturesUnordered::new() }
    }

    pub(super) fn write(&mut self, key: u64, write: Write) {
        self.enqueue(key, Job::Write(write));
    }

    pub(super) fn read(&mut self, key: u64, call: Call, extents: Vec<Extent>) {
        self.enqueue(key, Job::Read(call, extents));
    }

    /// Gives the disk's space back.
    pub(super) fn close(&mut self, key: u64) {
        self.enqueue(key, Job::Close);
    }

    /// The process is forgotten.
    pub(super) fn forget(&mut self, key: u64) {
        self.spools.remove(&key);
    }

    /// The next thing that was done; none if nothing is to be done. Nothing is lost if this is not waited for to its end.
    pub(super) async fn next(&mut self) -> Option<(u64, Done)> {
        let Worked { key, file, done } = self.working.next().await?;
        if let Some(spool) = self.spools.get_mut(&key) {
            (spool.file, spool.is_busy) = (file, false);
        }
        self.work(key);
        Some((key, done))
    }

    fn enqueue(&mut self, key: u64, job: Job) {
        self.spools.entry(key).or_default().line.push_back(job);
        self.work(key);
    }

    fn work(&mut self, key: u64) {
        let Some(spool) = self.spools.get_mut(&key).filter(|spool| !spool.is_busy) else { return };
        let Some(job) = spool.line.pop_front() else { return };
        spool.is_busy = true;
        let (file, folder, blocking) = (spool.file.take(), self.folder.clone(), self.blocking.clone());
        let call = if let Job::Read(call, _) = &job { Some(*call) } else { None };
        self.working.push(Box::pin(async move {
            let worked = blocking.run(move || carry_out(job, file, &folder)).await;
            let (file, done) = worked.unwrap_or_else(|lost| {
                let error = io::Error::other(lost);
                (None, call.map_or_else(|| Done::Written(Err(io::Error::other(lost))), |call| Done::Read(call, Err(error))))
            });
            Worked { key, file, done }
        }));
    }
}

fn carry_out(job: Job, mut file: Option<OwnedFd>, folder: &PathBuf) -> (Option<OwnedFd>, Done) {
    let done = match job {
        Job::Write(write) => Done::Written(write_out(&mut file, &write, folder)),
        Job::Read(call, extents) => Done::Read(call, read_in(file.as_ref(), &extents)),
        Job::Close => {
            file = None;
            Done::Closed
        }
    };
    (file, done)
}

fn write_out(file: &mut Option<OwnedFd>, write: &Write, folder: &PathBuf) -> io::Result<()> {
    let file = match file {
        Some(file) => file,
        // The folder is the operator's, and the file never has a name that somebody could find it by.
        None => file.insert(tempfile::tempfile_in(folder)?.into()),
    };
    Ok(write_at(file, write.at, &write.bytes)?)
}

fn read_in(file: Option<&OwnedFd>, extents: &[Extent]) -> io::Result<Vec<Vec<u8>>> {
    let file = file.ok_or_else(|| io::Error::other("the spool was lost"))?;
    let mut slots = Vec::with_capacity(extents.len());
    for (at, length) in extents {
        let slot = read_at(file, *at, *length)?;
        if slot.len() < *length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        slots.push(slot);
    }
    Ok(slots)
}

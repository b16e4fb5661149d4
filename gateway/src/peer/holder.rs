//! Which process holds a socket, and whose descendant it is.

#![expect(
    clippy::disallowed_methods,
    reason = "what is looked at is the kernel's own /proc, by numbers; no client names any of it"
)]

use std::collections::HashSet;
use std::fs;
use std::io;
use std::time::Instant;

/// Processes between one and the first of all. Only a tree that changes under our eyes could be this deep.
const DEEPEST: usize = 100_000;

/// How often a process is looked at anew whose ancestors changed meanwhile.
const ATTEMPTS: usize = 8;

/// A process that was seen to hold a socket, with its ancestors at that moment, itself first.
#[derive(Debug)]
pub(super) struct Holder {
    lineage: Vec<Kin>,
}

/// One process: its number, and when it began, which tells it from a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kin {
    pid: u32,
    began: u64,
}

impl Holder {
    /// Whether it is that process or was started by it, by its children, and so on: who loses its parent in there becomes a
    /// child of the spawner, which is a subreaper, so nobody gets out of its line.
    pub(super) fn descends_from(&self, ancestor: u32) -> bool {
        self.lineage.iter().any(|kin| kin.pid == ancestor)
    }
}

/// Whether `/proc` is there, and counts processes as we do.
pub(super) fn look() -> io::Result<()> {
    // One of another pid namespace has other numbers: nobody there would be anybody's descendant.
    if fs::read_link("/proc/self")?.as_os_str() == std::process::id().to_string().as_str() {
        Ok(())
    } else {
        Err(io::Error::other("it is of another pid namespace"))
    }
}

/// A process by its number, with its ancestors; none if it or one of them went away meanwhile.
pub(super) fn by_number(pid: u32) -> io::Result<Option<Holder>> {
    look()?;
    Ok(lineage(pid).map(|lineage| Holder { lineage }))
}

/// The processes of this machine, as they are now.
pub(super) fn processes() -> io::Result<Vec<u32>> {
    look()?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(found)
}

/// Tells of each socket that a process has open, and answers whether all were looked at in time. One that cannot be looked at
/// is not known to have any.
pub(super) fn sockets(pid: u32, until: Instant, mut tell: impl FnMut(u32)) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Instant::now() < until };
    for (nth, entry) in descriptors.flatten().enumerate() {
        if nth % 256 == 0 && Instant::now() >= until {
            return false;
        }
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let number = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        number.into_iter().for_each(&mut tell);
    }
    true
}

impl Holder {
    /// The sockets among `wanted` that a process holds, and its ancestors, which were the same before and after it was seen to hold
    /// them. None if it ended or holds none of them. Its descriptors are read once for all of them: a process may have as many
    /// connections as descriptors.
    pub(super) fn settled(pid: u32, wanted: &HashSet<u32>, until: Instant) -> Option<(Self, Vec<u32>)> {
        for _attempt in 0..ATTEMPTS {
            let (before, mut held) = (lineage(pid), Vec::new());
            sockets(pid, until, |inode| held.extend(wanted.contains(&inode).then_some(inode)));
            if held.is_empty() {
                return None;
            }
            match (before, lineage(pid)) {
                (Some(before), Some(lineage)) if before == lineage => return Some((Self { lineage }, held)),
                _changed => {}
            }
        }
        None
    }
}

/// A process and its ancestors; none if one went away meanwhile.
fn lineage(mut pid: u32) -> Option<Vec<Kin>> {
    let mut found = Vec::new();
    // The first process of all has no parent, nor has one whose parent lives in another pid namespace.
    while pid != 0 {
        if found.len() == DEEPEST {
            return None;
        }
        let (parent, began) = parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)?;
        found.push(Kin { pid, began });
        pid = parent;
    }
    (!found.is_empty()).then_some(found)
}

/// Parent and beginning of a process, from its `stat`.
fn parse(stat: &[u8]) -> Option<(u32, u64)> {
    // The name comes second, in brackets, and the process chooses it: only what follows the last bracket is the kernel's.
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[name_ends + 1..]).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    // State, parent, and 17 more before the beginning.
    Some((fields.nth(1)?.parse().ok()?, fields.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_nothing_about_ancestors() {
        let rest = "S 7 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 99 5 6";
        for name in ["sh", "a) S 1 (b", "x y", "\n) R 1"] {
            assert_eq!(parse(format!("5 ({name}) {rest}").as_bytes()), Some((7, 99)), "{name}");
        }
        assert_eq!(parse(b"5 (sh"), None);
    }

    #[test]
    fn a_process_descends_from_its_parent_and_not_from_its_child() {
        let own = lineage(std::process::id()).unwrap();
        let parent = std::os::unix::process::parent_id();
        assert!(parent == 0 || own[1].pid == parent);
        let mut child = std::process::Command::new("/bin/cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let holder = Holder { lineage: lineage(child.id()).unwrap() };
        assert!(holder.descends_from(std::process::id()) && !Holder { lineage: own }.descends_from(child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(lineage(child.id()), None);
    }
}

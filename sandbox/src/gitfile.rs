//! `.git` files and their like, as git reads them: one line that names another place.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat, openat2, statat};
use rustix::io::Errno;
use std::path::Path;

/// Bound of what is read: `gitdir: ` and a path.
const LONGEST: usize = 4096 + 16;

/// What a file of one line holds, to the byte where git stops: the end of the line, or a NUL. It never waits: what is no regular
/// file yields nothing, or an error.
///
/// # Errors
/// The system's: the file cannot be read, or a link is in the way.
pub fn line(file: &Path) -> Result<Vec<u8>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = openat2(CWD, file, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let mut text = vec![0; LONGEST];
    let length = rustix::io::retry_on_intr(|| rustix::io::read(&opened, &mut text[..]))?;
    text.truncate(length);
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.truncate(end);
    let end = text.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
    text.truncate(end);
    Ok(text)
}

/// Whether a name is somebody else's in a directory where only owners may remove what is theirs, as in `/tmp`: git does not follow
/// it for this user, and it must not decide what is protected here. `stat` is that of the name itself.
#[must_use]
pub fn is_a_strangers(place: &Path, stat: &Stat) -> bool {
    let parent = place.parent().and_then(|parent| statat(CWD, parent, AtFlags::SYMLINK_NOFOLLOW).ok());
    let is_shared = parent.is_some_and(|parent| parent.st_mode & Mode::SVTX.bits() != 0);
    is_shared && stat.st_uid != rustix::process::geteuid().as_raw()
}

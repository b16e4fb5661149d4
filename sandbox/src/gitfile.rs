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

/// Directories that all users of a machine share (hier(7)). On a root server they belong to the server's user.
const SHARED: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// Whether a name belongs to another user in a directory where only owners may remove their entries, as in `/tmp`: git does not follow
/// it for this user, and it must not decide what is protected here. The owner of a directory may remove every entry, and a confined
/// process may set the bit on a directory of its own, so that a directory of this user counts only where all users share it. `stat` is
/// that of the name itself.
#[must_use]
pub fn is_a_strangers(place: &Path, stat: &Stat) -> bool {
    stat.st_uid != rustix::process::geteuid().as_raw() && place.parent().is_some_and(is_shared)
}

/// Whether any user may make names in a directory that lies below one that all users share, such as `/tmp/.X11-unix`.
pub(crate) fn is_open_below_shared(directory: &Path) -> bool {
    const OPEN: u32 = 0o1002;
    let is_below = SHARED.iter().any(|shared| directory.starts_with(shared));
    is_below && statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|found| found.st_mode & OPEN == OPEN)
}

/// Whether users who know nothing of each other make names in a directory, and only their owners may remove them.
pub(crate) fn is_shared(directory: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|found| {
        found.st_mode & Mode::SVTX.bits() != 0
            && (found.st_uid != user || SHARED.iter().any(|shared| directory == Path::new(shared)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn the_sticky_bit_of_an_own_directory_makes_no_stranger() {
        // Only root can make a file that belongs to another user.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let file = top.join(".git");
        fs::write(&file, "gitdir: real").unwrap();
        chown(&file, Some(64_105), None).unwrap();
        fs::set_permissions(&top, fs::Permissions::from_mode(0o1777)).unwrap();
        let stat = statat(CWD, &file, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        assert!(!is_a_strangers(&file, &stat));
        // The control: in a directory of another user it is one.
        chown(&top, Some(64_106), None).unwrap();
        assert!(is_a_strangers(&file, &stat));
    }
}

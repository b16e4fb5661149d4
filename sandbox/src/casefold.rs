//! Directories in which several spellings are one name: a denial by name there would hold for one of them.

use crate::policy::{Access, Policy, PolicyError};
use crate::roots::Roots;
use portcullis_protocol::path::AbsolutePath;
use rustix::fs::{CWD, Mode, OFlags, fstatfs, ioctl_getflags, openat};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// msdos and vfat, exfat, ntfs and ntfs3, hfs, hfsplus, affs, hpfs, cifs and smb2, by linux/magic.h or their sources. Some can be mounted
/// so that spelling counts, which nothing tells.
const INSENSITIVE: [u64; 10] =
    [0x4d44, 0x2011_bab0, 0x5346_544e, 0x7366_746e, 0x4244, 0x482b, 0xadff, 0xf995_e849, 0xff53_4d42, 0xfe53_4d42];

/// `FS_CASEFOLD_FL` of linux/fs.h: ext4, f2fs and tmpfs have it for each directory.
const CASEFOLD: u32 = 0x4000_0000;

/// Refuses a policy that denies a name, or what a pattern matches, below a directory in which several spellings are one name. File calls
/// hold denials by name. Names that are protected everywhere are compared so that the spelling does not count.
///
/// # Errors
/// There is one.
pub fn refuse(policy: &Policy, roots: &Roots) -> Result<(), PolicyError> {
    let mut known = HashMap::new();
    for grants in policy.files.sets() {
        let denied = grants.entries.iter().filter(|grant| grant.access == Access::Deny);
        for named in denied.map(|grant| &grant.path) {
            let real = roots.real(named);
            check(named, real.as_deref().and_then(Path::parent), &mut known)?;
        }
        for glob in &grants.deny_globs {
            check(&glob.base, roots.real(&glob.base).as_deref(), &mut known)?;
        }
    }
    Ok(())
}

fn check(named: &AbsolutePath, directory: Option<&Path>, known: &mut HashMap<PathBuf, bool>) -> Result<(), PolicyError> {
    for directory in directory.into_iter().flat_map(Path::ancestors) {
        let folds = match known.get(directory) {
            // Those above were looked at with it.
            Some(false) => return Ok(()),
            Some(true) => true,
            None => folds(directory),
        };
        known.insert(directory.to_owned(), folds);
        if folds {
            let problem = format!(
                "in `{}` other spellings are the same name, so that a denial by name would not hold; deny the whole of `{}`, or move what is denied",
                directory.display(),
                directory.display()
            );
            return Err(PolicyError::Refused { path: named.clone(), problem });
        }
    }
    Ok(())
}

/// What cannot be looked at cannot be told; what its user may not open for reading may still be searched.
fn folds(directory: &Path) -> bool {
    let open = |flags| openat(CWD, directory, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(opened) = open(OFlags::RDONLY | OFlags::NONBLOCK).or_else(|_unreadable| open(OFlags::PATH)) else { return false };
    let magic = fstatfs(&opened).ok().and_then(|stat| u64::try_from(stat.f_type).ok());
    magic.is_some_and(|magic| INSENSITIVE.contains(&magic))
        || ioctl_getflags(&opened).is_ok_and(|flags| flags.bits() & CASEFOLD != 0)
}

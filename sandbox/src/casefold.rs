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

/// Refuses a policy that denies a name or a pattern below a directory in which several spellings are one name. File calls enforce
/// denials by name. Protected names are compared without regard to spelling.
///
/// # Errors
/// There is one.
pub fn refuse(policy: &Policy, roots: &Roots) -> Result<(), PolicyError> {
    refuse_where(policy, roots, &folds)
}

fn refuse_where(policy: &Policy, roots: &Roots, folds: &dyn Fn(&Path) -> bool) -> Result<(), PolicyError> {
    let mut known = HashMap::new();
    for grants in policy.files.sets() {
        let denied = grants.entries.iter().filter(|grant| grant.access == Access::Deny);
        for named in denied.map(|grant| &grant.path) {
            let real = roots.real(named);
            check(named, real.as_deref().and_then(Path::parent), &mut known, folds)?;
        }
        for glob in &grants.deny_globs {
            check(&glob.base, roots.real(&glob.base).as_deref(), &mut known, folds)?;
        }
    }
    Ok(())
}

fn check(
    named: &AbsolutePath,
    directory: Option<&Path>,
    known: &mut HashMap<PathBuf, bool>,
    folds: &dyn Fn(&Path) -> bool,
) -> Result<(), PolicyError> {
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
                "in `{}` other spellings are the same name, so that a denial by name would not hold; deny the whole of `{}`, or move the denied files",
                directory.display(),
                directory.display()
            );
            return Err(PolicyError::Refused { path: named.clone(), problem });
        }
    }
    Ok(())
}

/// A directory that cannot be examined cannot be judged; one that its user may not open for reading may still be searched.
fn folds(directory: &Path) -> bool {
    let open = |flags| openat(CWD, directory, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(opened) = open(OFlags::RDONLY | OFlags::NONBLOCK).or_else(|_unreadable| open(OFlags::PATH)) else { return false };
    let magic = fstatfs(&opened).ok().and_then(|stat| u64::try_from(stat.f_type).ok());
    magic.is_some_and(|magic| INSENSITIVE.contains(&magic))
        || ioctl_getflags(&opened).is_ok_and(|flags| flags.bits() & CASEFOLD != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{DenyGlob, Files, Grant, Grants, Network};

    #[test]
    fn a_denial_where_spellings_are_one_name_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("fat/sub")).unwrap();
        let path = |name: &str| AbsolutePath::new(top.join(name)).unwrap();
        let is_fat = |directory: &Path| directory.starts_with(top.join("fat"));
        for (denied, base, is_refused) in [
            (None, None, false),
            (Some("plain"), Some(""), false),
            // The whole of it, by a name that has one spelling.
            (Some("fat"), None, false),
            (Some("fat/secret"), None, true),
            (Some("fat/sub/deep/er"), None, true),
            (None, Some("fat"), true),
            (None, Some("fat/sub"), true),
        ] {
            let mut entries = vec![Grant::new(path("fat"), Access::Write)];
            entries.retain(|_| denied != Some("fat"));
            entries.extend(denied.map(|name| Grant::new(path(name), Access::Deny)));
            let globs = base.map(|name| DenyGlob { base: path(name), pattern: "*.env".to_owned() }).into_iter().collect();
            let files = Files::Restricted(Grants::new(entries, globs).unwrap().into());
            let policy = Policy { files, network: Network::Restricted };
            let roots = Roots::open(&policy).unwrap();
            let refused = refuse_where(&policy, &roots, &is_fat);
            assert_eq!(refused.is_err(), is_refused, "{denied:?} {base:?}: {refused:?}");
            // Here every spelling is a name of its own.
            assert_eq!(refuse(&policy, &roots), Ok(()));
        }
    }
}

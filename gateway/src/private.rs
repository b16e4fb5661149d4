//! Directories of the server's user that are hidden from confined processes.
//!
//! Every server makes them when it starts, even if it writes no token: a view covers only paths that exist when it is made. A
//! directory made later would be visible to every process that was confined before.

use crate::config::Config;
use crate::environment::account_home;
use rustix::fs::{CWD, FileType, Mode, mkdirat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The private directory below a home.
const BELOW_HOME: &str = ".local/state/portcullis";

/// The name of the directory for records in a private directory.
const RECORDS: &str = "points";

/// The prepared directories.
#[derive(Debug)]
pub(crate) struct Private {
    /// The directories to hide.
    pub(crate) places: Vec<PathBuf>,
    /// The real path of the directory for records of the mount points that helpers make. `None` if no directory belongs to this
    /// user alone.
    pub(crate) records: Option<PathBuf>,
}

impl Private {
    /// Makes the directories for tokens and for records. Servers of one user with other environments may use other directories, so
    /// every directory that a server of this user uses by default is hidden, even if it does not exist yet.
    pub(crate) fn prepare(config: &Config) -> Self {
        if let Some(tokens) = config.token_directory()
            && let Err(error) = make(&tokens)
        {
            tracing::warn!("make {}: {error}; make it before the first confined process starts", tokens.display());
        }
        let candidates = candidates(config);
        let records = candidates.iter().find_map(|place| ready(place));
        // Another server may use another one of them, and would make it while confined processes run that are not kept from it.
        for place in candidates.iter().filter(|place| has_base(place)) {
            if let Err(error) = make(place) {
                tracing::debug!("make {}: {error}", place.display());
            }
        }
        if records.is_none() {
            tracing::warn!(
                "no private directory for records of mount points: absent names cannot be protected; set HOME or XDG_RUNTIME_DIR \
                 to a directory that only this user can change"
            );
        }
        // By its given path, and by its real path.
        let real = records.as_deref().and_then(Path::parent).map(Path::to_owned);
        let places = places(config).into_iter().chain(real).collect();
        Self { places, records }
    }
}

/// The default directories for tokens and records of this user's servers. They need not exist.
pub(crate) fn places(config: &Config) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = config.token_directory().into_iter().chain(candidates(config)).collect();
    places.sort();
    places.dedup();
    places
}

/// The possible directories for private files of this user's servers, the longest-lived first: a runtime directory is removed with
/// the user's last session. They come from the environment, and from the user's account, which servers with another environment
/// use.
fn candidates(config: &Config) -> Vec<PathBuf> {
    let absolute = |name: &str| config.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let below_home = |home: PathBuf| home.join(BELOW_HOME);
    let home = absolute("HOME").map(below_home);
    let runtime = absolute("XDG_RUNTIME_DIR").map(|runtime| runtime.join("portcullis"));
    let account = account_home().filter(|home| home != Path::new("/")).map(below_home);
    // The directory that pam_systemd(8) makes.
    let session = PathBuf::from(format!("/run/user/{}/portcullis", geteuid().as_raw()));
    home.into_iter().chain(runtime).chain(account).chain([session]).collect()
}

/// Makes the directory of records in a private directory, if necessary, and returns its real path. `None` if that fails, or if
/// another user could change it.
fn ready(place: &Path) -> Option<PathBuf> {
    make(place).ok()?;
    #[expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]
    let place = std::fs::canonicalize(place).ok()?;
    let records = place.join(RECORDS);
    #[expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]
    let made = mkdirat(CWD, &records, Mode::RWXU);
    match made {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(_refused) => return None,
    }
    (is_own(&records) && is_own(&place) && place.ancestors().skip(1).all(is_safe)).then_some(records)
}

/// Whether the home or the runtime directory is there: these are for the system to make.
fn has_base(place: &Path) -> bool {
    let depth = if place.ends_with(BELOW_HOME) { Path::new(BELOW_HOME).iter().count() } else { 1 };
    place.ancestors().nth(depth).is_some_and(|base| look(base).is_some())
}

fn make(directory: &Path) -> std::io::Result<()> {
    #[expect(clippy::disallowed_types, reason = "the operator's own place, which no client names")]
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Whether a directory belongs to this user alone.
fn is_own(directory: &Path) -> bool {
    look(directory).is_some_and(|(user, mode)| user == geteuid().as_raw() && mode & 0o077 == 0)
}

/// Whether only this user and root can replace this user's directory in it. In a user namespace that does not map the machine's
/// root, root's directories appear with the overflow id (user_namespaces(7)).
fn is_safe(directory: &Path) -> bool {
    let is_trusted = |user: u32| user == 0 || user == geteuid().as_raw() || Some(user) == unmapped_root();
    look(directory).is_some_and(|(user, mode)| is_trusted(user) && (mode & 0o022 == 0 || mode & 0o1000 != 0))
}

/// The id with which files of the machine's root appear, if this is a user namespace that does not map all users.
fn unmapped_root() -> Option<u32> {
    #[expect(clippy::disallowed_methods, reason = "the kernel's own files, which no client names")]
    let read = |file: &str| std::fs::read_to_string(file).ok();
    let map = read("/proc/self/uid_map")?;
    let is_whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if is_whole { None } else { read("/proc/sys/kernel/overflowuid")?.trim().parse().ok() }
}

/// Returns the owner and the mode of a directory. No link is followed.
fn look(directory: &Path) -> Option<(u32, u32)> {
    #[expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]
    let stat = std::fs::symlink_metadata(directory).ok()?;
    (FileType::from_raw_mode(stat.mode()) == FileType::Directory).then(|| (stat.uid(), stat.mode()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn with(variables: &[(&str, &str)]) -> Config {
        let environment: Arc<[_]> = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Config { environment, ..Config::bare() }
    }

    #[test]
    fn servers_with_other_environments_share_their_default_places() {
        let of_session = PathBuf::from(format!("/run/user/{}/portcullis", geteuid().as_raw()));
        let of_account = account_home().map(|home| home.join(BELOW_HOME));
        let [bare, named] = [&[][..], &[("HOME", "/h"), ("XDG_RUNTIME_DIR", "/r")]].map(|variables| candidates(&with(variables)));
        assert!(bare.contains(&of_session) && named.contains(&of_session));
        assert!(of_account.is_none_or(|place| bare.contains(&place) && named.contains(&place)));
        assert_eq!(named[..2], [PathBuf::from("/h/.local/state/portcullis"), PathBuf::from("/r/portcullis")]);
        let here = tempfile::tempdir().unwrap();
        for (below, depth) in [(BELOW_HOME, "home"), ("portcullis", "runtime")] {
            assert!(has_base(&here.path().join(below)), "{depth}");
            assert!(!has_base(&here.path().join("missing").join(below)), "{depth}");
        }
        // Records are never in a directory where every confined process may write.
        assert!(bare.iter().chain(&named).all(|place| !place.starts_with("/tmp")));
    }
}

//! Directories of the server's user that no confined process gets to see.
//!
//! They exist from the start of every server, also of one that writes no token: a view covers what is there when it is made, and what
//! came later would be seen by every process that was confined before.

use crate::config::Config;
use rustix::fs::{CWD, FileType, Mode, mkdirat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The directory of records in a private directory.
const RECORDS: &str = "points";

/// What was prepared.
#[derive(Debug)]
pub(crate) struct Private {
    /// To be hidden.
    pub(crate) places: Vec<PathBuf>,
    /// Where is noted what helpers make on the machine, a real path; none if no directory is this user's alone.
    pub(crate) records: Option<PathBuf>,
}

impl Private {
    /// Makes the directory of tokens and that of records. Both are the same for all servers of a user that have the same environment.
    pub(crate) fn prepare(config: &Config) -> Self {
        let tokens = config.token_directory();
        if let Some(tokens) = &tokens
            && let Err(error) = make(tokens)
        {
            tracing::warn!("make {}: {error}; make it before the first confined process starts", tokens.display());
        }
        let records = candidates(config).into_iter().find_map(|place| Some((ready(&place)?, place)));
        let (records, place) = records.unzip();
        if records.is_none() {
            tracing::warn!(
                "no directory is this user's alone, so that absent names cannot be held: set HOME or XDG_RUNTIME_DIR to one"
            );
        }
        // As it is named, and as it is.
        let real = records.as_deref().and_then(Path::parent).map(Path::to_owned);
        let mut places: Vec<PathBuf> = tokens.into_iter().chain(place).chain(real).collect();
        places.sort();
        places.dedup();
        Self { places, records }
    }
}

/// Where records may be, the best first: what lasts longest. A runtime directory goes with the user's last session.
fn candidates(config: &Config) -> Vec<PathBuf> {
    let absolute = |name: &str| config.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = absolute("HOME").map(|home| home.join(".local/state/portcullis"));
    let runtime = absolute("XDG_RUNTIME_DIR").map(|runtime| runtime.join("portcullis"));
    let user = geteuid();
    let system = user.is_root().then(|| PathBuf::from("/run/portcullis"));
    let shared = PathBuf::from(format!("/tmp/portcullis-{}", user.as_raw()));
    home.into_iter().chain(runtime).chain(system).chain([shared]).collect()
}

/// The real directory of records in a private directory, made if need be; none if it cannot be, or another user could change it.
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

fn make(directory: &Path) -> std::io::Result<()> {
    #[expect(clippy::disallowed_types, reason = "the operator's own place, which no client names")]
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Whether a directory is this user's alone.
fn is_own(directory: &Path) -> bool {
    look(directory).is_some_and(|(user, mode)| user == geteuid().as_raw() && mode & 0o077 == 0)
}

/// Whether nobody but this user and root can put another directory in the place of one in it that is this user's. In a user namespace
/// that does not know the machine's root, root's directories are shown as those of the overflow id (user_namespaces(7)).
fn is_safe(directory: &Path) -> bool {
    let is_trusted = |user: u32| user == 0 || user == geteuid().as_raw() || Some(user) == unmapped_root();
    look(directory).is_some_and(|(user, mode)| is_trusted(user) && (mode & 0o022 == 0 || mode & 0o1000 != 0))
}

/// The id as which files of the machine's root are shown, if this is a user namespace that does not know all users.
fn unmapped_root() -> Option<u32> {
    #[expect(clippy::disallowed_methods, reason = "the kernel's own files, which no client names")]
    let read = |file: &str| std::fs::read_to_string(file).ok();
    let map = read("/proc/self/uid_map")?;
    let is_whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if is_whole { None } else { read("/proc/sys/kernel/overflowuid")?.trim().parse().ok() }
}

/// The owner and the mode of a directory; no link is followed.
fn look(directory: &Path) -> Option<(u32, u32)> {
    #[expect(clippy::disallowed_methods, reason = "the operator's own place, which no client names")]
    let stat = std::fs::symlink_metadata(directory).ok()?;
    (FileType::from_raw_mode(stat.mode()) == FileType::Directory).then(|| (stat.uid(), stat.mode()))
}

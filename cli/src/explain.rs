//! `portcullis explain`: what a policy allows of paths, why, and what would allow more.

use crate::Failure;
use crate::args::Explain;
use crate::plain;
use crate::policy;
use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::compiled::{Compiled, Resolved, Verdict};
use portcullis::sandbox::explain::{Explanation, Seen, Views, views};
use portcullis::sandbox::kernel_files::{Hidden, hidden};
use portcullis::sandbox::policy::{Access, Files, Policy};
use portcullis::sandbox::roots::Roots;
use portcullis::sandbox::survey;
use portcullis::{Config, ExecServerRuntimePaths};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes one line. Names of files, of targets of links and of rules are no orders to a terminal, and make no lines of their own.
macro_rules! say {
    ($out:expr, $($text:tt)+) => {
        writeln!($out, "{}", plain(&format!($($text)+)))
    };
}

/// Writes the answers for people.
pub(crate) fn print(options: &Explain, out: &mut impl Write) -> Result<(), Failure> {
    let policy = policy::resolved(&options.policy, &options.workspace)?;
    let mut compiled = match &policy {
        Some(policy) => Some(policy::compiled(policy).map_err(|error| format!("--policy {}: {error}", options.policy))?),
        None => None,
    };
    if let Some((compiled, roots)) = &mut compiled {
        let found = survey::pointers(compiled, roots).map_err(|error| error.to_string())?;
        compiled.protect(&found);
    }
    let private = private_places()?;
    for (nth, path) in options.paths.iter().enumerate() {
        if nth > 0 {
            writeln!(out)?;
        }
        let path = std::path::absolute(path).map_err(|error| format!("path `{}`: {error}", path.display()))?;
        let named = AbsolutePath::new(&path)?;
        let trace = Roots::trace(&named).map_err(|error| format!("follow the path `{}`: {error}", path.display()))?;
        match (&policy, &compiled) {
            (Some(policy), Some((compiled, _roots))) => explain(out, &named, &trace, policy, compiled, &private)?,
            _nothing_restricted => {
                say!(out, "{named}")?;
                say!(out, "  read yes, change yes: the policy confines nothing")?;
            }
        }
    }
    Ok(())
}

fn explain(
    out: &mut impl Write,
    named: &AbsolutePath,
    trace: &Resolved,
    policy: &Policy,
    compiled: &Compiled,
    private: &[PathBuf],
) -> Result<(), Failure> {
    let (real, links, exists) = match trace {
        Resolved::Real { path, links } => (path, links, true),
        Resolved::Missing { path, links } | Resolved::Hidden { path, links } => (path, links, false),
        Resolved::Refused(problem) => return Err(format!("{named}: {problem}").into()),
    };
    say!(out, "{named}")?;
    // The links of a process are not followed: which process it is depends on the one that looks.
    let is_process = matches!(hidden(real), Some(Hidden::Process(_)));
    if real != named.as_path() || !exists && !is_process {
        say!(out, "  real path   {}{}", real.display(), if exists { "" } else { " (does not exist)" })?;
    }
    let is_private = |place: &&PathBuf| real.starts_with(place) || named.as_path().starts_with(place);
    if let (Files::Restricted(_), Some(place)) = (&policy.files, private.iter().find(is_private)) {
        let why = "servers of this user keep tokens and records there, hidden from every request under a policy";
        say!(out, "  read no, change no: `{}`: {why}", place.display())?;
        return Ok(());
    }
    // A denial of a name holds wherever the name leads, and a link that may not be seen is not followed.
    let by_name = compiled.explain(named.as_path());
    let hidden_link = links.iter().find(|link| !compiled.is_visible(link));
    let (verdict, rule, grant) = match hidden_link {
        _ if by_name.verdict == Verdict::Denied => (Verdict::Denied, by_name.rule, None),
        Some(link) => (Verdict::Unlisted, format!("the link `{}` on the way may not be seen", link.display()), None),
        None => {
            let Explanation { verdict, rule, grant } = compiled.explain(real);
            (verdict, rule, grant)
        }
    };
    let by_policy = Seen { read: verdict.is_granted(), change: verdict == Verdict::Write, why: rule };
    let views = views(policy, compiled, real).filter(|_| hidden_link.is_none() && by_name.verdict != Verdict::Denied);
    let grant = grant.filter(|_| views.as_ref().is_none_or(|views| views.has_grant));
    match views {
        None => say!(out, "  {}", line(&by_policy))?,
        // The tables are not the whole answer there.
        Some(Views { file_calls, processes, .. }) => {
            for (whose, seen) in [("policy    ", by_policy), ("file calls", file_calls), ("processes ", processes)] {
                say!(out, "  {whose}  {}", line(&seen))?;
            }
        }
    }
    if let Some((path, access)) = grant {
        let (to, access) = if access == Access::Read { ("read", "read") } else { ("change", "write") };
        // An entry for a missing path grants nothing: for a new file it is the directory that counts. A device has to be named.
        let is_device = real.starts_with("/dev") && !real.starts_with("/dev/shm");
        let place = if exists || verdict == Verdict::Protected || is_device { path } else { existing(&path) };
        let once = if exists || verdict != Verdict::Protected { "" } else { ", once it exists" };
        say!(out, "  to {to} it   an entry `{access} {}`{once}", place.display())?;
    }
    let mut globs = policy.files.sets().flat_map(|grants| &grants.deny_globs);
    if verdict != Verdict::Denied && globs.any(|glob| real.starts_with(glob.base.as_path())) {
        say!(out, "  processes   deny globs hold only for what exists when the process starts")?;
    }
    Ok(())
}

fn line(Seen { read, change, why }: &Seen) -> String {
    let [read, change] = [read, change].map(|may| if *may { "yes" } else { "no" });
    format!("read {read}, change {change}: {why}")
}

/// The real paths of the directories that this user's servers hide.
fn private_places() -> Result<Vec<PathBuf>, Failure> {
    let paths = ExecServerRuntimePaths::of_this_process().map_err(|error| format!("find this program: {error}"))?;
    let places = Config::new(paths).private_places().into_iter().filter_map(|place| AbsolutePath::new(place).ok());
    let real = places.filter_map(|place| match Roots::trace(&place) {
        Ok(Resolved::Real { path, .. } | Resolved::Missing { path, .. } | Resolved::Hidden { path, .. }) => Some(path),
        Ok(Resolved::Refused(_)) | Err(_) => None,
    });
    Ok(real.collect())
}

/// The nearest place above that exists.
fn existing(path: &Path) -> PathBuf {
    let exists = |place: &&Path| place.symlink_metadata().is_ok();
    path.ancestors().find(exists).unwrap_or_else(|| Path::new("/")).to_owned()
}

//! `portcullis explain`: what a policy allows of paths, why, and what would allow more.

use crate::Failure;
use crate::args::Explain;
use crate::policy;
use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::compiled::{Compiled, Resolved, Verdict};
use portcullis::sandbox::explain::Explanation;
use portcullis::sandbox::policy::{Access, Policy};
use portcullis::sandbox::roots::Roots;
use portcullis::sandbox::survey;
use std::io::Write;
use std::path::{Path, PathBuf};

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
    for (nth, path) in options.paths.iter().enumerate() {
        if nth > 0 {
            writeln!(out)?;
        }
        let path = std::path::absolute(path).map_err(|error| format!("path `{}`: {error}", path.display()))?;
        let named = AbsolutePath::new(&path)?;
        let trace = Roots::trace(&named).map_err(|error| format!("follow the path `{}`: {error}", path.display()))?;
        match (&policy, &compiled) {
            (Some(policy), Some((compiled, _roots))) => explain(out, &named, &trace, policy, compiled)?,
            _nothing_restricted => {
                writeln!(out, "{named}")?;
                writeln!(out, "  read yes, change yes: the policy confines nothing")?;
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
) -> Result<(), Failure> {
    let (real, links, exists) = match trace {
        Resolved::Real { path, links } => (path, links, true),
        Resolved::Missing { path, links } => (path, links, false),
        Resolved::Refused(problem) => return Err(format!("{named}: {problem}").into()),
    };
    writeln!(out, "{named}")?;
    if real != named.as_path() || !exists {
        writeln!(out, "  real path   {}{}", real.display(), if exists { "" } else { " (does not exist)" })?;
    }
    // A denial of a name holds wherever the name leads, and a link that may not be seen is not followed.
    let by_name = compiled.explain(named.as_path());
    let hidden = links.iter().find(|link| !compiled.is_visible(link));
    let (verdict, rule, grant) = match hidden {
        _ if by_name.verdict == Verdict::Denied => (Verdict::Denied, by_name.rule, None),
        Some(link) => (Verdict::Unlisted, format!("the link `{}` on the way may not be seen", link.display()), None),
        None => {
            let Explanation { verdict, rule, grant } = compiled.explain(real);
            (verdict, rule, grant)
        }
    };
    let (read, change) = match verdict {
        Verdict::Write => ("yes", "yes"),
        Verdict::Read | Verdict::Protected => ("yes", "no"),
        Verdict::Denied | Verdict::Unlisted => ("no", "no"),
    };
    writeln!(out, "  read {read}, change {change}: {rule}")?;
    if let Some((path, access)) = grant {
        let (to, access) = if access == Access::Read { ("read", "read") } else { ("change", "write") };
        // An entry for what does not exist grants nothing: for a new file it is the directory that counts.
        let place = if exists || verdict == Verdict::Protected { path } else { existing(&path) };
        let once = if exists || verdict != Verdict::Protected { "" } else { ", once it exists" };
        writeln!(out, "  to {to} it   an entry `{access} {}`{once}", place.display())?;
    }
    let mut globs = policy.files.sets().flat_map(|grants| &grants.deny_globs);
    if verdict != Verdict::Denied && globs.any(|glob| real.starts_with(glob.base.as_path())) {
        writeln!(out, "  processes   deny globs hold only for what exists when the process starts")?;
    }
    Ok(())
}

/// The nearest place above that exists.
fn existing(path: &Path) -> PathBuf {
    let exists = |place: &&Path| place.symlink_metadata().is_ok();
    path.ancestors().find(exists).unwrap_or_else(|| Path::new("/")).to_owned()
}

//! One entry of a permission profile.

use super::object::{Object, fail, path, text};
use super::{Access, Entry, SandboxError, Target};
use serde_json::Value;

pub(super) fn entry(object: &mut Object) -> Result<Entry, SandboxError> {
    let mut target = object.object("path")?;
    let access = match object.variant("access", &["read", "write", "deny", "none"])? {
        "read" => Access::Read,
        "write" => Access::Write,
        _deny => Access::Deny,
    };
    let skip_missing = object.has_value("missing_path_behavior");
    object.optional_variant("missing_path_behavior", &["skip"])?;
    let parsed = match target.variant("type", &["path", "glob_pattern", "special"])? {
        "path" => {
            let at = target.place("path");
            path_target(&target.required("path")?, &at, access)?
        }
        "glob_pattern" => {
            let at = target.place("pattern");
            let pattern = text(&target.required("pattern")?, &at)?.to_owned();
            if access != Access::Deny {
                return Err(fail(&at, format!("glob `{pattern}` with access other than deny: only denials take globs")));
            }
            Target::Glob(pattern)
        }
        _special => {
            let mut value = target.object("value")?;
            let special = special(&mut value, access)?;
            value.finish_into(&mut target)?;
            special
        }
    };
    target.finish_into(object)?;
    Ok(Entry { target: parsed, access, skip_missing })
}

/// A path, or one below the home. A request may name its own home, so that nothing becomes writable by it.
fn path_target(value: &Value, at: &str, access: Access) -> Result<Target, SandboxError> {
    let text = text(value, at)?;
    let Some(below) = below_home(text) else { return path(value, at).map(Target::Path) };
    if access == Access::Write {
        return Err(fail(at, format!("`{text}` with access write: only entries that read or deny may start with `~`")));
    }
    if below.is_empty() || is_plain_relative(below) {
        Ok(Target::Home(below.to_owned()))
    } else {
        Err(fail(at, format!("`{text}` is not a path below the home without `..`")))
    }
}

/// What follows `~/`, if a text starts so.
#[must_use]
pub fn below_home(text: &str) -> Option<&str> {
    if text == "~" { Some("") } else { text.strip_prefix("~/").map(|below| below.trim_start_matches('/')) }
}

fn special(value: &mut Object, access: Access) -> Result<Target, SandboxError> {
    let at = value.place("kind");
    let kind = text(&value.required("kind")?, &at)?.to_owned();
    Ok(match kind.as_str() {
        "root" => Target::Root,
        "minimal" => Target::Minimal,
        "project_roots" => {
            let at = value.place("subpath");
            let subpath = match value.take("subpath") {
                None | Some(Value::Null) => None,
                Some(member) => Some(text(&member, &at)?.to_owned()),
            };
            if let Some(bad) = subpath.as_deref().filter(|path| !is_plain_relative(path)) {
                return Err(fail(&at, format!("`{bad}` is not a relative path without `..`")));
            }
            Target::ProjectRoots { subpath }
        }
        "tmpdir" => Target::Tmpdir,
        "slash_tmp" => Target::SlashTmp,
        _grants_nothing => {
            // What grants nothing grants no less without its other members. A denial might say something else without them.
            if access != Access::Deny {
                value.ignored += u32::try_from(value.members.len()).unwrap_or(u32::MAX);
                value.members.clear();
            }
            Target::Nothing(kind)
        }
    })
}

/// Whether a text is a path below something: not empty, not absolute, without `..` and NUL.
#[must_use]
pub fn is_plain_relative(path: &str) -> bool {
    !path.is_empty() && !path.starts_with('/') && !path.contains('\0') && path.split('/').all(|part| part != "..")
}

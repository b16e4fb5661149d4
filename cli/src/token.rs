//! `portcullis token`: a signed token, of everything that a server offers or of less.

use crate::Failure;
use crate::args::Token;
use crate::credential;
use crate::policy;
use portcullis::protocol::path::AbsolutePath;
use portcullis::sandbox::file;
use serde_json::{Map, Value};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Writes the token and the end of a line.
pub(crate) fn print(options: &Token, out: &mut impl Write) -> Result<(), Failure> {
    let secret = std::path::absolute(&options.secret_file)?;
    let mut rules = credential::signed_bearer(&secret, "--secret-file")?;
    rules.issuer.clone_from(&options.issuer);
    rules.audience.clone_from(&options.audience);
    let scope = scope(options)?.map(|scope| scope.to_string());
    let token = rules.sign(Duration::from_secs(options.expires), scope.as_deref())?;
    Ok(writeln!(out, "{token}")?)
}

/// The claim, if anything is to be narrowed.
fn scope(options: &Token) -> Result<Option<Value>, Failure> {
    let mut scope = Map::new();
    let workspaces = options.workspace.iter().map(|path| absolute(path)).collect::<Result<Vec<_>, _>>()?;
    match &options.policy {
        // The server has it by its name.
        Some(name) if file::builtin(name).is_some() => {
            scope.insert("policy".to_owned(), Value::from(name.as_str()));
            if !workspaces.is_empty() {
                let texts = workspaces.iter().map(|path| path.as_path().to_str().map(Value::from)).collect::<Option<Vec<_>>>();
                let texts = texts.ok_or("--workspace: a token carries only paths in UTF-8")?;
                scope.insert("workspace".to_owned(), texts.into());
            }
        }
        Some(name) => {
            let sandbox = policy::load(name)?.in_workspaces(&workspaces, policy::home());
            scope.insert("policy".to_owned(), sandbox.to_json());
        }
        None => {}
    }
    if !options.method.is_empty() {
        scope.insert("methods".to_owned(), options.method.clone().into());
    }
    Ok((!scope.is_empty()).then(|| scope.into()))
}

/// A path as it stands: the token may be for another machine.
fn absolute(path: &Path) -> Result<AbsolutePath, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::from(format!("--workspace {}: {error}", path.display()));
    let path = std::path::absolute(path).map_err(|error| failed(&error))?;
    AbsolutePath::new(path.as_path()).map_err(|error| failed(&error))
}

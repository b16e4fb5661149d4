//! The sandbox object of a request becomes a policy, by its text from a cache: the second request with a policy of a
//! thousand entries costs what one with a single entry does.

use portcullis_protocol::path::AbsolutePath;
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_protocol::sandbox::Sandbox;
use portcullis_sandbox::policy::{Policy, PolicyHash};
use portcullis_sandbox::resolve::{self, Machine};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::sync::Arc;

/// Texts remembered per connection; a client that makes up new ones all the time pays for each.
const CAPACITY: usize = 64;
/// Bytes of a text: a policy with as many entries as there may be fits.
const BOUND: usize = 8 << 20;
/// Bytes of a text that is worth remembering; a longer one is resolved each time.
const LONGEST: usize = 256 * 1024;

/// A policy, and the hash that names it.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    /// Of the policy's bytes.
    pub(crate) hash: PolicyHash,
    /// What it says.
    pub(crate) policy: Arc<Policy>,
}

/// The cache of one connection.
#[derive(Debug)]
pub(crate) struct Policies {
    machine: Machine,
    known: HashMap<Box<str>, Option<Named>>,
}

impl Policies {
    pub(crate) fn new(machine: Machine) -> Self {
        Self { machine, known: HashMap::new() }
    }

    /// The policy of a file call; none means that no confinement was asked for.
    pub(crate) fn for_files(&mut self, sandbox: Option<&RawValue>) -> Result<Option<Named>, RpcError> {
        let Some(text) = text(sandbox) else { return Ok(None) };
        if let Some(known) = self.known.get(text) {
            return Ok(known.clone());
        }
        let named = self.resolve(text, None)?;
        if self.known.len() >= CAPACITY {
            self.known.clear();
        }
        if text.len() <= LONGEST {
            self.known.insert(text.into(), named.clone());
        }
        Ok(named)
    }

    /// The policy of a process, whose working directory stands in for an absent one. It is resolved each time: a start costs
    /// far more, and the text alone does not decide.
    pub(crate) fn for_process(&self, sandbox: Option<&RawValue>, cwd: &AbsolutePath) -> Result<Option<Named>, RpcError> {
        text(sandbox).map_or(Ok(None), |text| self.resolve(text, Some(cwd)))
    }

    fn resolve(&self, text: &str, cwd: Option<&AbsolutePath>) -> Result<Option<Named>, RpcError> {
        let refused = |error: String| RpcError::new(code::INVALID_PARAMS, error);
        if text.len() > BOUND {
            return Err(refused(format!("sandbox of {} bytes: at most {BOUND} are allowed", text.len())));
        }
        let sandbox = Sandbox::parse(text).map_err(|error| refused(error.to_string()))?;
        let policy = resolve::resolve(&sandbox, cwd, &self.machine).map_err(|error| refused(error.to_string()))?;
        Ok(policy.map(|policy| Named { hash: policy.hash(), policy: Arc::new(policy) }))
    }
}

/// The object's text; null is absence.
fn text(sandbox: Option<&RawValue>) -> Option<&str> {
    sandbox.map(RawValue::get).filter(|text| *text != "null")
}

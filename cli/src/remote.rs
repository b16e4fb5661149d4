//! Both ends of remote mode, from their flags and the environment.

use crate::Failure;
use crate::args::{Exec, Serve};
use crate::credential;
use portcullis::client::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs, Token};
use portcullis::{RegistryToken, RemoteEnvironmentConfig};
use std::io::Read as _;

/// The registry's token, of an executor.
pub(crate) const EXECUTOR_TOKEN: &str = "PORTCULLIS_EXECUTOR_TOKEN";
/// The registry's token, of a client.
pub(crate) const HARNESS_TOKEN: &str = "PORTCULLIS_HARNESS_TOKEN";
/// An API key, which may be the registry's token too.
const API_KEY: &str = "CODEX_API_KEY";
/// Bytes of a token on standard input.
const LONGEST: u64 = 64 * 1024;

/// The environment that `serve` is to serve.
pub(crate) fn environment(url: &str, options: &Serve) -> Result<RemoteEnvironmentConfig, Failure> {
    let auth = &options.auth;
    let asks_clients = auth.insecure_no_auth || auth.ws_auth.is_some() || auth.token_file.is_some() || auth.tls_cert.is_some();
    if asks_clients {
        return Err("WebSocket listener auth cannot be used with --remote: its registry says who is let in".into());
    }
    let token = if options.registration_bearer_stdin {
        RegistryToken::Bearer(of_stdin()?)
    } else if let Some(token) = variable(EXECUTOR_TOKEN)? {
        RegistryToken::Bearer(token)
    } else if let Some(key) = variable(API_KEY)? {
        RegistryToken::ApiKey(key)
    } else {
        return Err(format!(
            "--remote {url}: a token is needed; set {EXECUTOR_TOKEN} or {API_KEY}, or give --registration-bearer-stdin"
        )
        .into());
    };
    let mut remote = RemoteEnvironmentConfig::new(url, options.environment_id.clone().unwrap_or_default(), token);
    remote.name.clone_from(&options.name);
    remote.allowed_hosts.clone_from(&options.remote_allow_host);
    Ok(remote)
}

/// The way of `exec` to an environment.
pub(crate) fn connect(url: &str, options: &Exec) -> Result<ExecServerClientConnectOptions, Failure> {
    let token = match &options.token_file {
        Some(file) => {
            let file = std::path::absolute(file).map_err(|error| format!("--token-file {}: {error}", file.display()))?;
            credential::read(&file, "--token-file")?
        }
        None => variable(HARNESS_TOKEN)?
            .ok_or_else(|| format!("--remote {url}: a token is needed; give --token-file FILE, or set {HARNESS_TOKEN}"))?,
    };
    let environment_id = options.environment_id.clone().unwrap_or_default();
    let remote = RemoteExecServerConnectArgs { base_url: url.to_owned(), environment_id, token: Token::new(token) };
    let mut connect = ExecServerClientConnectOptions::remote(remote, "portcullis exec");
    connect.tls = credential::client_tls(options)?;
    Ok(connect)
}

/// A variable that is there and not empty.
fn variable(name: &str) -> Result<Option<String>, Failure> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(format!("{name}: {error}").into()),
    }
}

fn of_stdin() -> Result<String, Failure> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(LONGEST).read_to_string(&mut text);
    read.map_err(|error| format!("read the registry's token from standard input: {error}"))?;
    let text = text.trim();
    if text.is_empty() { Err("the registry's token on standard input is empty".into()) } else { Ok(text.to_owned()) }
}

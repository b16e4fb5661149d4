//! Both ends of remote mode, from their flags and the environment.

use crate::Failure;
use crate::args::{Exec, Registration, Serve};
use crate::credential;
use portcullis::RemoteEnvironmentConfig;
use portcullis::client::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs, Token};
use portcullis::credentials::{ApiKey, Bearer, Credentials, CredentialsFile};
use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The registry's token, of an executor.
pub(crate) const EXECUTOR_TOKEN: &str = "PORTCULLIS_EXECUTOR_TOKEN";
/// The registry's token, of a client.
pub(crate) const HARNESS_TOKEN: &str = "PORTCULLIS_HARNESS_TOKEN";
/// An API key, which may be the registry's token too.
const API_KEY: &str = "CODEX_API_KEY";
/// An agent's identity, which only programs that embed the gateway can use.
const AGENT_TOKEN: &str = "CODEX_ACCESS_TOKEN";
/// What is not known is not guessed: the registry would be shown something that is no proof of anything.
const AGENT: &str = "an agent's identity (--use-agent-identity-auth, CODEX_ACCESS_TOKEN) cannot be used by this program: how it registers a task, and how it signs the assertion of each request, is not known here; a program that knows implements portcullis::credentials::AgentIdentity and gives OfAgent to run_remote_environment";
/// Whether the end of standard input is the program's: 1 or true.
const EXIT: &str = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE";
/// Bytes of a token on standard input.
const LONGEST: u64 = 16 * 1024;

/// The environment that `serve` is to serve.
pub(crate) fn environment(url: &str, options: &Serve) -> Result<RemoteEnvironmentConfig, Failure> {
    let auth = &options.auth;
    let asks_clients = auth.insecure_no_auth || auth.ws_auth.is_some() || auth.token_file.is_some() || auth.tls_cert.is_some();
    if asks_clients {
        return Err("WebSocket listener auth cannot be used with --remote: its registry says who is let in".into());
    }
    let credentials = credentials(&options.registration)?;
    let mut remote = RemoteEnvironmentConfig::new(url, options.environment_id.clone().unwrap_or_default(), credentials);
    remote.name.clone_from(&options.name);
    remote.health = options.health_listen;
    remote.exits_with_stdin = exits_with_stdin(&options.registration)?;
    Ok(remote)
}

/// Whether the end of standard input is the program's.
pub(crate) fn exits_with_stdin(registration: &Registration) -> Result<bool, Failure> {
    let named = variable(EXIT)?;
    Ok(registration.exit_on_stdin_close || named.is_some_and(|value| matches!(value.as_str(), "1" | "true")))
}

/// The files that these flags name and whose readers could serve the environment in this one's place.
pub(crate) fn files(registration: &Registration) -> Vec<PathBuf> {
    [&registration.registration_token_file, &registration.auth_file].into_iter().flatten().cloned().collect()
}

/// What the registry is shown.
pub(crate) fn credentials(registration: &Registration) -> Result<Arc<dyn Credentials>, Failure> {
    let absolute = |flag: &str, file: &Path| {
        std::path::absolute(file).map_err(|error| Failure::from(format!("{flag} {}: {error}", file.display())))
    };
    let hosts = || registration.remote_allow_host.clone();
    if registration.use_agent_identity_auth {
        return Err(AGENT.into());
    }
    if let Some(file) = &registration.registration_token_file {
        return Ok(Arc::new(CredentialsFile::token(absolute("--registration-token-file", file)?)));
    }
    if let Some(file) = &registration.auth_file {
        return Ok(Arc::new(CredentialsFile::sign_in(absolute("--auth-file", file)?, hosts())));
    }
    if registration.registration_bearer_stdin {
        return Ok(Arc::new(Bearer::new(&of_stdin()?)?));
    }
    if let Some(token) = variable(EXECUTOR_TOKEN)? {
        return Ok(Arc::new(Bearer::new(&token)?));
    }
    match variable(API_KEY)? {
        Some(key) => Ok(Arc::new(ApiKey::new(&key, hosts())?)),
        None if variable(AGENT_TOKEN)?.is_some() => Err(AGENT.into()),
        None => Err(format!(
            "remote exec-server registration requires a credential: set {EXECUTOR_TOKEN} or {API_KEY}, or give --registration-bearer-stdin, --registration-token-file FILE, or --auth-file FILE after `codex login`"
        )
        .into()),
    }
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
    connect.tls = credential::client_tls(&options.tls, url)?;
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

/// The first line. What follows stays there: its end may be what this program is to end with.
fn of_stdin() -> Result<String, Failure> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(LONGEST).read_line(&mut text);
    read.map_err(|error| format!("read the registry's token from standard input: {error}"))?;
    if u64::try_from(text.len()).is_ok_and(|length| length >= LONGEST) {
        return Err(format!("the registry's token on standard input has more than {LONGEST} bytes").into());
    }
    let text = text.trim();
    if text.is_empty() { Err("the registry's token on standard input is empty".into()) } else { Ok(text.to_owned()) }
}

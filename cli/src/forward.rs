//! `portcullis forward`: clients of an environment are passed on to somebody else's server.

use crate::Failure;
use crate::args::Forward;
use crate::credential;
use crate::remote;
use portcullis::{Config, ExecServerRuntimePaths, RemoteEnvironmentConfig};

/// Forwards until SIGINT or SIGTERM.
pub(crate) async fn run(options: &Forward) -> Result<(), Failure> {
    let credentials = remote::credentials(&options.registration)?;
    let mut environment = RemoteEnvironmentConfig::new(&options.remote, &options.environment_id, credentials);
    environment.exits_with_stdin = remote::exits_with_stdin(&options.registration)?;
    let tls = credential::client_tls(&options.tls, &options.connect)?.map(|tls| tls.config());
    let config = Config::new(ExecServerRuntimePaths::of_this_process()?);
    Ok(portcullis::run_forward(environment, &options.connect, tls, config).await?)
}

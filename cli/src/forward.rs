//! `portcullis forward`: clients of an environment are passed on to somebody else's server.

use crate::Failure;
use crate::args::Forward;
use crate::remote;
use portcullis::client::Tls;
use portcullis::{Config, ExecServerRuntimePaths, RemoteEnvironmentConfig};

/// Forwards until SIGINT or SIGTERM.
pub(crate) async fn run(options: &Forward) -> Result<(), Failure> {
    let credentials = remote::credentials(&options.registration)?;
    let mut environment = RemoteEnvironmentConfig::new(&options.remote, &options.environment_id, credentials);
    environment.exits_with_stdin = remote::exits_with_stdin(&options.registration)?;
    let own = options.tls_cert.as_deref().zip(options.tls_key.as_deref());
    let tls = match &options.tls_ca {
        Some(_) if !options.connect.starts_with("wss://") => {
            return Err("--tls-ca is for a wss:// URL of --connect, and does nothing here".into());
        }
        Some(ca) => Some(Tls::from_files(ca, own)?.config()),
        None => None,
    };
    let config = Config::new(ExecServerRuntimePaths::of_this_process()?);
    Ok(portcullis::run_forward(environment, &options.connect, tls, config).await?)
}

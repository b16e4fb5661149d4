//! `portcullis rendezvous`: where executors and their clients meet.

use crate::Failure;
use crate::args::Rendezvous;
use crate::credential;
use portcullis::ListenUrl;
use portcullis::rendezvous::{self, new_token};
use std::io::{self, Write as _};
use std::path::Path;
use tokio::signal::unix::{SignalKind, signal};

/// The URL of the store, which may hold a password.
const STORE: &str = "PORTCULLIS_STORE";

/// Serves until SIGINT or SIGTERM.
pub(crate) async fn run(options: &Rendezvous) -> Result<(), Failure> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let tls = match options.tls_cert.as_ref().zip(options.tls_key.as_ref()) {
        Some((certificate, key)) => Some(portcullis::Tls::from_files(certificate, key, None)?.config()),
        None => None,
    };
    let address = match (options.listen.parse()?, &tls) {
        (ListenUrl::WebSocketTls(_), None) => {
            return Err(format!("--listen {}: give --tls-cert FILE and --tls-key FILE", options.listen).into());
        }
        (ListenUrl::WebSocket(address) | ListenUrl::WebSocketTls(address), _) => address,
        _ => return Err(format!("--listen {}: a rendezvous listens on ws://IP:PORT", options.listen).into()),
    };
    let executor_tokens = tokens("executor", options.executor_token_file.as_deref())?;
    let harness_tokens = tokens("harness", options.harness_token_file.as_deref())?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let store = options.store.clone().or_else(|| std::env::var(STORE).ok());
    let (public_url, node_url) = (options.public_url.clone(), options.node_url.clone());
    let rendezvous = rendezvous::Rendezvous { executor_tokens, harness_tokens, public_url, tls, store, node_url };
    let listening = rendezvous.listen(address).await?;
    writeln!(io::stdout(), "{scheme}://{}", listening.address())?;
    let stop = async move {
        tokio::select! {
            _signal = interrupt.recv() => {}
            _signal = terminate.recv() => {}
        }
    };
    Ok(listening.serve(stop).await?)
}

/// The tokens of a file, or one that is made here and said.
fn tokens(of: &str, file: Option<&Path>) -> Result<Vec<String>, Failure> {
    let Some(file) = file else {
        let token = new_token()?;
        writeln!(io::stderr(), "{of} token: {token}")?;
        return Ok(vec![token]);
    };
    let absolute = std::path::absolute(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let text = credential::read(&absolute, &format!("--{of}-token-file"))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

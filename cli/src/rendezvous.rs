//! `portcullis rendezvous`: where executors and their clients meet.

use crate::Failure;
use crate::args::Rendezvous;
use crate::credential;
use portcullis::ListenUrl;
use portcullis::rendezvous::{self, new_token};
use std::io::{self, Write as _};
use std::path::Path;
use tokio::signal::unix::{SignalKind, signal};

/// Serves until SIGINT or SIGTERM.
pub(crate) async fn run(options: &Rendezvous) -> Result<(), Failure> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let ListenUrl::WebSocket(address) = options.listen.parse()? else {
        return Err(format!("--listen {}: a rendezvous listens on ws://IP:PORT", options.listen).into());
    };
    let executor_tokens = tokens("executor", options.executor_token_file.as_deref())?;
    let harness_tokens = tokens("harness", options.harness_token_file.as_deref())?;
    if options.public_url.as_ref().is_some_and(|url| !url.starts_with("wss://") && !url.starts_with("ws://")) {
        return Err("--public-url: it begins with wss:// or ws://".into());
    }
    let rendezvous = rendezvous::Rendezvous { executor_tokens, harness_tokens, public_url: options.public_url.clone() };
    let listening = rendezvous.listen(address).await.map_err(|error| format!("listen on {address}: {error}"))?;
    writeln!(io::stdout(), "http://{}", listening.address())?;
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

//! Whose certificates are believed: those that the system believes, or those in `SSL_CERT_FILE` and `SSL_CERT_DIR`.

use super::failed;
use crate::config::Config;
use portcullis_protocol::rpc::RpcError;
use rustls::{ClientConfig, RootCertStore};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

/// Certificates, read when the first request needs them: most servers never make one.
#[derive(Debug)]
pub(super) struct Trust {
    file: Option<PathBuf>,
    directory: Option<PathBuf>,
    read: OnceCell<Arc<ClientConfig>>,
}

impl Trust {
    pub(super) fn new(config: &Config) -> Self {
        let named = |name: &str| config.variable(name).filter(|value| !value.is_empty()).map(|value| config.cwd.join(value));
        Self { file: named("SSL_CERT_FILE"), directory: named("SSL_CERT_DIR"), read: OnceCell::new() }
    }

    /// Whom the gateway itself believes.
    pub(super) async fn config(&self) -> Result<Arc<ClientConfig>, String> {
        self.connector().await.map(|connector| Arc::clone(connector.config())).map_err(|error| error.message)
    }

    /// What begins TLS. Sessions are remembered, so that the next request to the same place needs one exchange less.
    pub(super) async fn connector(&self) -> Result<TlsConnector, RpcError> {
        let (file, directory) = (self.file.clone(), self.directory.clone());
        let read = self.read.get_or_try_init(|| async {
            let read = tokio::task::spawn_blocking(move || read(file, directory));
            read.await.unwrap_or_else(|_panicked| Err("reading them failed".to_owned()))
        });
        let config = read.await.map_err(|reason| failed(format!("no certificate of any authority could be had: {reason}")))?;
        Ok(TlsConnector::from(Arc::clone(config)))
    }
}

/// All of it, or why there is none. A file with some that are no certificates is as good as its others.
fn read(file: Option<PathBuf>, directory: Option<PathBuf>) -> Result<Arc<ClientConfig>, String> {
    let is_named = file.is_some() || directory.is_some();
    let found = if is_named {
        rustls_native_certs::load_certs_from_paths(file.as_deref(), directory.as_deref())
    } else {
        rustls_native_certs::load_native_certs()
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let reason = found.errors.first().map_or_else(|| "none was found".to_owned(), ToString::to_string);
        let remedy =
            if is_named { "see SSL_CERT_FILE and SSL_CERT_DIR" } else { "install ca-certificates, or set SSL_CERT_FILE" };
        return Err(format!("{reason}; {remedy} of the server's environment"));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = config.map_err(|error| error.to_string())?.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

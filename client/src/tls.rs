//! TLS: whom the client believes, and what it shows.

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Whom a client believes at `wss://`: servers whose certificate has the name or address that was dialled and descends from one of
/// those that are given here. The system's own roots are not asked. Clones are the same.
#[derive(Clone)]
pub struct Tls(Arc<ClientConfig>);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file does not hold what it should, as PEM.
    #[error("read {what} from {path}: {reason}", path = .path.display())]
    File {
        /// What it should hold.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why it does not.
        reason: String,
    },
    /// The client's certificate and its key do not work together, or there is no cryptography for them.
    #[error("use the client's certificate and key: {0}; give the key that the certificate was made for")]
    Pair(#[from] rustls::Error),
}

impl Tls {
    /// Reads the certificates to believe, and the client's own chain of certificates with its key where the server asks for one;
    /// all as PEM. The files are read once, here.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn from_files(ca: &Path, own: Option<(&Path, &Path)>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates("certificates to believe", ca)? {
            let failed = |error: rustls::Error| TlsError::File {
                what: "certificates to believe",
                path: ca.to_owned(),
                reason: error.to_string(),
            };
            roots.add(certificate).map_err(failed)?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let private = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::File {
                    what: "a private key",
                    path: key.to_owned(),
                    reason: error.to_string(),
                })?;
                builder.with_client_auth_cert(certificates("the client's certificates", certificate)?, private)?
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// The same for whoever else dials.
    #[must_use]
    pub fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0)
    }

    /// Shakes hands with the server of this name or address.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let name = ServerName::try_from(literal.to_owned()).map_err(|error| format!("{host}: {error}"))?;
        TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await.map_err(|error| format!("TLS: {error}"))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Tls {}

/// All certificates of a file; at least one.
fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError::File { what, path: path.to_owned(), reason };
    let read = CertificateDer::pem_file_iter(path).map_err(|error| failed(error.to_string()))?;
    let found = read.collect::<Result<Vec<_>, _>>().map_err(|error| failed(error.to_string()))?;
    if found.is_empty() { Err(failed("it holds none as PEM".to_owned())) } else { Ok(found) }
}

//! TLS: what the server shows, and what it asks its clients to show.

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::{Error as PemError, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// The first byte of a TLS handshake (RFC 8446 section 5.1). A request in plain HTTP begins with a letter.
const HANDSHAKE_RECORD: u8 = 22;
/// Bytes of a request in plain HTTP that are taken before its socket is closed, so that the answer arrives.
const PLAIN: u64 = 32 << 10;

/// What a listener shows its clients: a certificate with its key. With certificates that clients' own must descend from, it serves
/// nobody who has none, and a client's certificate is its credential.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    key: PathBuf,
    asks_clients: bool,
}

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
    /// Certificate and key do not work together.
    #[error("use the certificate in {certificate} with the key in {key}: {reason}; give the key that the certificate was made for", certificate = .certificate.display(), key = .key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why not.
        reason: rustls::Error,
    },
    /// Clients cannot be judged by these certificates.
    #[error("ask clients for certificates: {0}")]
    Clients(#[from] VerifierBuilderError),
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its key, both as PEM; and the certificates that those of clients
    /// must descend from, if clients are asked for one. The files are read once, here.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn from_files(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let file =
            |what, path: &Path, reason: &PemError| TlsError::File { what, path: path.to_owned(), reason: reason.to_string() };
        let chain = certificates("certificates", certificate)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|reason| file("a private key", key, &reason))?;
        let pair = |reason| TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), reason };
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions().map_err(pair)?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates("certificates that clients' own descend from", path)? {
                    let wrong = |reason: rustls::Error| TlsError::File {
                        what: "certificates that clients' own descend from",
                        path: path.to_owned(),
                        reason: reason.to_string(),
                    };
                    roots.add(certificate).map_err(wrong)?;
                }
                builder.with_client_cert_verifier(WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?)
            }
        };
        let mut config = builder.with_single_cert(chain, private).map_err(pair)?;
        // WebSocket by RFC 6455 is an upgrade of HTTP/1.1.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { config: Arc::new(config), key: key.to_owned(), asks_clients: client_ca.is_some() })
    }

    /// The same for other listeners of this program.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Whether nobody without a certificate is served.
    pub(super) fn asks_clients(&self) -> bool {
        self.asks_clients
    }

    /// Whoever reads it can pretend to be this server.
    pub(crate) fn key(&self) -> &Path {
        &self.key
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("key", &self.key).field("asks_clients", &self.asks_clients).finish_non_exhaustive()
    }
}

/// All certificates of a file; at least one.
fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError::File { what, path: path.to_owned(), reason };
    let read = CertificateDer::pem_file_iter(path).map_err(|error| failed(error.to_string()))?;
    let found = read.collect::<Result<Vec<_>, _>>().map_err(|error| failed(error.to_string()))?;
    if found.is_empty() { Err(failed("it holds none as PEM".to_owned())) } else { Ok(found) }
}

/// Whether a client begins with TLS. Waits for its first byte; none from one that left is no TLS.
pub(super) async fn begins_with_tls(socket: &TcpStream) -> std::io::Result<bool> {
    let mut first = [0];
    Ok(socket.peek(&mut first).await? == 1 && first == [HANDSHAKE_RECORD])
}

/// Tells a client in plain HTTP what is spoken here, and takes what it sends until it leaves, so that it reads the answer.
pub(super) async fn refuse_plain(mut socket: TcpStream) -> std::io::Result<()> {
    let text = "this port speaks TLS: use wss:// (or https:// for /readyz and /livez)\n";
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{text}",
        text.len()
    );
    socket.write_all(answer.as_bytes()).await?;
    socket.shutdown().await?;
    tokio::io::copy(&mut socket.take(PLAIN), &mut tokio::io::sink()).await.map(|_taken| ())
}

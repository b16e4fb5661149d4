//! A listener that speaks TLS: who is believed, and whose certificates are.

use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ExecServerError, Tls, Token};
use portcullis_tests::{PATIENCE, Place, Program, Server, portcullis};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use serde_json::json;
use std::path::PathBuf;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Somebody who signs certificates.
struct Authority {
    name: &'static str,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Writes its certificate to `NAME.pem`.
    fn new(place: &Place, name: &'static str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        place.put(&format!("{name}.pem"), params.self_signed(&key).unwrap().pem());
        Self { name, issuer: Issuer::new(params, key) }
    }

    /// Writes a certificate for names to `NAME-of-AUTHORITY.pem`, and its key to `NAME-of-AUTHORITY.key`.
    fn signs(&self, place: &Place, name: &str, names: &[&str]) {
        let mut params = CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let file = format!("{name}-of-{}", self.name);
        place.put(&format!("{file}.pem"), params.signed_by(&key, &self.issuer).unwrap().pem());
        place.put(&format!("{file}.key"), key.serialize_pem());
    }
}

/// Two authorities, and of each a server on loopback and a client.
pub(super) fn certificates() -> Place {
    let place = Place::new();
    for name in ["ours", "other"] {
        let authority = Authority::new(&place, name);
        authority.signs(&place, "server", &["localhost", "127.0.0.1"]);
        authority.signs(&place, "client", &["client"]);
    }
    place
}

async fn serve(place: &Place, arguments: &[&str]) -> Server {
    let server = serve_at("ws://127.0.0.1:0", place, arguments).await;
    assert!(server.url.starts_with("wss://127.0.0.1:"), "{}", server.url);
    server
}

async fn serve_at(listen: &str, place: &Place, arguments: &[&str]) -> Server {
    let file = |name: &str| place.path(name).display().to_string();
    let (certificate, key) = (file("server-of-ours.pem"), file("server-of-ours.key"));
    let tls = ["serve", "--listen", listen, "--tls-cert", &certificate, "--tls-key", &key];
    let mut command = portcullis(&[&tls[..], arguments].concat());
    command.env("XDG_RUNTIME_DIR", place.path(""));
    Server::with(command).await
}

/// Connects as the client of an authority or as nobody, believing an authority.
async fn connect(place: &Place, url: &str, ca: &str, own: Option<&str>, token: Option<&str>) -> Result<(), ExecServerError> {
    let pem = |name: &str| place.path(&format!("{name}.pem"));
    let own: Option<(PathBuf, PathBuf)> =
        own.map(|name| (pem(&format!("client-of-{name}")), place.path(&format!("client-of-{name}.key"))));
    let tls = Tls::from_files(&pem(ca), own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()))).unwrap();
    let mut options = ExecServerClientConnectOptions::new(url, "test");
    options.tls = Some(tls);
    options.token = token.map(Token::new);
    options.reconnect = false;
    let (client, task) = ExecServerClient::connect(&options).await?;
    client.call::<serde_json::Value>("fs/getMetadata", &json!({"path": place.uri("")})).await?;
    drop(client);
    task.await.unwrap();
    Ok(())
}

fn token(place: &Place, server: &Server) -> String {
    let address = server.url.strip_prefix("wss://").unwrap();
    std::fs::read_to_string(place.path(&format!("portcullis/{address}.token"))).unwrap()
}

#[track_caller]
fn refused(outcome: Result<(), ExecServerError>, words: &str) {
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(words), "{words}: {error}");
}

#[tokio::test]
async fn a_server_is_believed_by_its_certificate_and_its_name() {
    let place = certificates();
    let server = serve(&place, &[]).await;
    let token = token(&place, &server);
    let localhost = server.url.replace("127.0.0.1", "localhost");
    for url in [&server.url, &localhost] {
        connect(&place, url, "ours", None, Some(&token)).await.unwrap();
        // A certificate is no credential unless it is asked for.
        refused(connect(&place, url, "ours", Some("ours"), None).await, "missing websocket bearer token");
        refused(connect(&place, url, "other", None, Some(&token)).await, "UnknownIssuer");
    }
    // The same machine by a name that the certificate does not have.
    let everywhere = serve_at("wss://0.0.0.0:0", &place, &[]).await;
    let port = everywhere.url.strip_prefix("wss://0.0.0.0:").unwrap();
    let token = std::fs::read_to_string(place.path(&format!("portcullis/127.0.0.1:{port}.token"))).unwrap();
    connect(&place, &format!("wss://127.0.0.1:{port}"), "ours", None, Some(&token)).await.unwrap();
    let other = connect(&place, &format!("wss://127.0.0.2:{port}"), "ours", None, Some(&token)).await;
    refused(other, "certificate not valid for name");
    // Nobody is believed who was not named, and nothing but TLS is spoken.
    let mut options = ExecServerClientConnectOptions::new(&server.url, "test");
    options.reconnect = false;
    let error = ExecServerClient::connect(&options).await.unwrap_err().to_string();
    assert!(error.contains("--tls-ca"), "{error}");
    options.url = server.url.replace("wss://", "ws://");
    let error = ExecServerClient::connect(&options).await.unwrap_err().to_string();
    assert!(error.contains("400") && error.contains("use wss://"), "{error}");
}

#[tokio::test]
async fn clients_are_served_by_their_certificates_where_these_are_asked_for() {
    let place = certificates();
    let ca = place.path("ours.pem").display().to_string();
    let server = serve(&place, &["--tls-client-ca", &ca]).await;
    connect(&place, &server.url, "ours", Some("ours"), None).await.unwrap();
    let made = std::fs::read_dir(place.path("portcullis")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!made.into_iter().any(|name| name.to_string_lossy().ends_with(".token")), "no token is made");
    refused(connect(&place, &server.url, "ours", None, None).await, "--tls-cert and --tls-key");
    refused(connect(&place, &server.url, "ours", Some("other"), None).await, "UnknownCA");
    // A token is asked for in addition where the operator says so.
    let file = place.path("token").display().to_string();
    let both = serve(&place, &["--tls-client-ca", &ca, "--token-file", &file]).await;
    let token = std::fs::read_to_string(&file).unwrap();
    connect(&place, &both.url, "ours", Some("ours"), Some(&token)).await.unwrap();
    refused(connect(&place, &both.url, "ours", Some("ours"), None).await, &file);
    refused(connect(&place, &both.url, "ours", None, Some(&token)).await, "--tls-cert and --tls-key");
}

#[tokio::test]
async fn exec_reaches_a_server_over_tls() {
    let place = certificates();
    let server = serve(&place, &[]).await;
    place.put("file", "content");
    let (workspace, ca) = (place.path("").display().to_string(), place.path("ours.pem").display().to_string());
    let words = ["exec", "--url", &server.url, "--tls-ca", &ca, "--workspace", &workspace, "--policy", "read-only"];
    let mut command = portcullis(&[&words[..], &["--", "cat", "file"]].concat());
    command.env("XDG_RUNTIME_DIR", place.path(""));
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"content"[..]), "{output:?}");
    // Nobody confined reads the key; the same words do without a sandbox.
    let key = place.path("server-of-ours.key").display().to_string();
    for (policy, expect) in [("read-only", Some(1)), ("full-access", Some(0))] {
        let words = ["exec", "--url", &server.url, "--tls-ca", &ca, "--workspace", &workspace, "--policy", policy];
        let mut command = portcullis(&[&words[..], &["--", "cat", &key]].concat());
        command.env("XDG_RUNTIME_DIR", place.path(""));
        let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
        assert_eq!(output.status.code(), expect, "{policy}: {output:?}");
    }
}

/// Says something to the port, and answers what came back until the end.
async fn said(server: &Server, words: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(server.url.strip_prefix("wss://").unwrap()).await.unwrap();
    socket.write_all(words).await.unwrap();
    let mut answer = Vec::new();
    timeout(PATIENCE, socket.read_to_end(&mut answer)).await.unwrap().unwrap();
    answer
}

#[tokio::test]
async fn who_speaks_no_tls_is_told_and_who_is_silent_is_sent_away() {
    let place = certificates();
    let server = serve(&place, &[]).await;
    let plain = said(&server, b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let plain = String::from_utf8(plain).unwrap();
    assert!(plain.starts_with("HTTP/1.1 400") && plain.contains("this port speaks TLS"), "{plain}");
    // Nothing, and half of a handshake: both end by the deadline alone.
    let (silent, half) = tokio::join!(said(&server, b""), said(&server, &[22, 3, 1, 2, 0]));
    assert!(half.is_empty() && silent.is_empty(), "{half:?} {silent:?}");
    // What is no handshake at all is answered with an alert.
    let nonsense = said(&server, &[22, 9, 9, 0, 1, 0]).await;
    assert_eq!(nonsense.first(), Some(&21), "{nonsense:?}");
    connect(&place, &server.url, "ours", None, Some(&token(&place, &server))).await.unwrap();
}

#[tokio::test]
async fn health_is_answered_over_tls() {
    let place = certificates();
    let server = serve(&place, &[]).await;
    let mut roots = rustls::RootCertStore::empty();
    let ca = <rustls::pki_types::CertificateDer<'_> as rustls::pki_types::pem::PemObject>::from_pem_file(place.path("ours.pem"));
    roots.add(ca.unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    for path in ["/readyz", "/livez"] {
        let socket = TcpStream::connect(server.url.strip_prefix("wss://").unwrap()).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config.clone()));
        let mut socket = connector.connect("localhost".try_into().unwrap(), socket).await.unwrap();
        let group = socket.get_ref().1.negotiated_key_exchange_group().unwrap().name();
        assert_eq!(group, rustls::NamedGroup::X25519MLKEM768, "hybrid by default");
        socket.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[tokio::test]
async fn what_cannot_be_shown_is_refused_at_the_start() {
    let place = certificates();
    let file = |name: &str| place.path(name).display().to_string();
    let (certificate, key) = (file("server-of-ours.pem"), file("server-of-ours.key"));
    let (unix, other) = (format!("unix:{}", file("s")), file("server-of-other.key"));
    for (arguments, status, words) in [
        (&["--listen", "wss://127.0.0.1:0"][..], 1, "give --tls-cert FILE and --tls-key FILE"),
        (&["--tls-cert", &certificate], 2, "--tls-key"),
        (&["--tls-cert", &certificate, "--tls-key", &other], 1, "give the key that the certificate was made for"),
        (&["--tls-cert", &certificate, "--tls-key", "/no/such/key"], 1, "/no/such/key"),
        (&["--tls-cert", &key, "--tls-key", &key], 1, "holds none as PEM"),
        (&["--tls-cert", &certificate, "--tls-key", &key, "--tls-client-ca", "/dev/null"], 1, "holds none as PEM"),
        (&["--tls-cert", &certificate, "--tls-key", &key, "--listen", &unix], 1, "TLS is for ws://IP:PORT"),
        (&["--tls-cert", &certificate, "--tls-key", &key, "--listen", "stdio"], 1, "TLS is for ws://IP:PORT"),
        (
            &["--tls-cert", &certificate, "--tls-key", &key, "--insecure-no-auth", "--listen", "wss://0.0.0.0:0"],
            1,
            "only loopback",
        ),
        (
            &["--tls-cert", &certificate, "--tls-key", &key, "--insecure-no-auth", "--tls-client-ca", &certificate],
            2,
            "cannot be used",
        ),
    ] {
        let mut refused = Program::start(portcullis(&[&["serve"], arguments].concat()));
        assert_eq!(refused.wait().await, status, "{arguments:?}");
        let stderr = refused.stderr().await;
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
}

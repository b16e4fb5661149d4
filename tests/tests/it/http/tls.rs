//! TLS: with an authority of the test's own, which the server trusts by `SSL_CERT_FILE` alone.

use super::origin::{Origin, server};
use super::{body, request};
use portcullis_tests::{Client, Place};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// A server with a certificate for these names, and the certificate of who signed it.
async fn origin(names: &[&str]) -> (Origin, String) {
    let key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let own = authority.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(authority, key);
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = config.with_single_cert(vec![certificate.der().clone()], key).unwrap();
    (Origin::with_tls(TlsAcceptor::from(Arc::new(config))).await, own)
}

#[tokio::test]
async fn a_server_is_believed_by_its_certificate_and_its_name() {
    let place = Place::new();
    let (own, authority) = origin(&["localhost"]).await;
    place.put("authority.pem", authority);
    let file = place.path("authority.pem");
    let trusting = server(&[], &[("SSL_CERT_FILE", file.to_str().unwrap())]).await;
    let mut client = Client::connect(&trusting).await;
    let url = |host: &str| format!("https://{host}:{}/x", own.port);
    let result = client.ok("http/request", request(&url("localhost"), json!({}))).await;
    assert!(body(&result).starts_with("GET /x HTTP/1.1\r\n"));
    let refusal = client.refused("http/request", request(&url("127.0.0.1"), json!({}))).await;
    assert!(refusal.message.contains("TLS with 127.0.0.1: invalid peer certificate"), "{refusal:?}");
    // Another authority, and none at all.
    place.put("other.pem", origin(&["localhost"]).await.1);
    let other = place.path("other.pem");
    for (file, expect) in [(other.to_str().unwrap(), "invalid peer certificate: "), ("/dev/null", "SSL_CERT_FILE")] {
        let doubting = server(&[], &[("SSL_CERT_FILE", file)]).await;
        let refusal = Client::connect(&doubting).await.refused("http/request", request(&url("localhost"), json!({}))).await;
        assert!(refusal.code == -32603 && refusal.message.contains(expect), "{refusal:?}");
    }
}

#[tokio::test]
async fn a_proxy_sees_nothing_of_what_goes_through_its_tunnel() {
    let (place, proxy) = (Place::new(), Origin::start().await);
    let (own, authority) = origin(&["localhost"]).await;
    place.put("authority.pem", authority);
    let (file, named) = (place.path("authority.pem"), format!("http://127.0.0.1:{}", proxy.port));
    let environment = [("SSL_CERT_FILE", file.to_str().unwrap()), ("HTTPS_PROXY", named.as_str())];
    let tunnelled = server(&[], &environment).await;
    let url = format!("https://localhost:{}/x", own.port);
    let result = Client::connect(&tunnelled).await.ok("http/request", request(&url, json!({}))).await;
    assert!(body(&result).starts_with("GET /x HTTP/1.1\r\n"));
    assert_eq!((proxy.accepted(), own.accepted()), (1, 1));
}
